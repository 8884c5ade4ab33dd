//! The commands, one file each.

mod config;
mod guard;
mod serve;

use std::{
    io::{self, Write as _},
    process::ExitCode,
};

use clap::Parser;

use crate::config::{Config, Environment, Flags, Report};

/// Makes each operation take effect once.
#[derive(Parser)]
#[command(name = "semel", version, arg_required_else_help = true)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(clap::Subcommand)]
enum Command {
    Serve(serve::Serve),
    #[command(subcommand)]
    Config(config::ConfigCommand),
    #[command(hide = true)]
    Guard(guard::Guard),
    #[command(hide = true)]
    GuardExec(guard::GuardExec),
}

/// Runs the command line that this process was started with.
///
/// Every command starts the runtime that it needs by itself: the guard must stay a process of one thread.
#[must_use]
pub fn main() -> ExitCode {
    let done = match Cli::parse().command {
        Command::Serve(command) => command.run(),
        Command::Config(command) => command.run(),
        Command::Guard(command) => Ok(command.run()),
        Command::GuardExec(command) => Ok(command.run()),
    };
    done.unwrap_or_else(|error| {
        complain(format_args!("{error:#}"));
        ExitCode::FAILURE
    })
}

/// Reads the configuration for a command that needs it.
fn load(flags: &Flags) -> crate::Result<Config> {
    Ok(read(flags).config()?.clone())
}

/// Reads the configuration, its warnings told on stderr.
fn read(flags: &Flags) -> Report {
    let report = crate::config::read(flags, &Environment::of_process());
    for warning in report.warnings() {
        complain(format_args!("{warning}"));
    }
    report
}

/// Prints what a command was asked for. A reader that went away, such as `head`, is no error.
fn say(text: &str) -> io::Result<()> {
    let mut stdout = io::stdout().lock();
    match stdout.write_all(text.as_bytes()).and_then(|()| stdout.flush()) {
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(()),
        done => done,
    }
}

/// Prints a message to people. There is nobody to tell if even that fails.
fn complain(message: std::fmt::Arguments<'_>) {
    let _ = writeln!(io::stderr(), "semel: {message}");
}
