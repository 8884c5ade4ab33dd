//! The commands, one file each.
//!
//! The server keeps its data in its working directory. The commands for people (`once`, `why`, `operations`, `work`,
//! `sweep`, `clock`, `webhooks`, `mailing`, `suppressions`) use the user's state directory (`ledger`), so that cron and shell use the same ledger.
//! `target` finds the named operation; [`view`](crate::view) shows it.

mod arguments;
mod clock;
mod config;
mod gateway;
mod guard;
mod ledger;
mod mailing;
mod once;
mod operations;
mod serve;
mod suppressions;
mod sweep;
mod target;
mod webhooks;
mod why;
mod work;

use std::{
    io::{self, Write as _},
    process::ExitCode,
};

use anyhow::Context as _;
use clap::Parser;
use tokio::runtime::{Builder, Runtime};

use crate::{
    config::{Config, DATA_DIR, Environment, Flags, Report},
    services::webhooks::config::refuse_handlers,
};

/// Make each operation take effect once, although clients, brokers and workers retry
#[derive(Parser)]
#[command(name = "semel", version, arg_required_else_help = true)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(clap::Subcommand)]
enum Command {
    Serve(serve::Serve),
    Gateway(gateway::Gateway),
    Once(once::OnceCommand),
    Why(why::Why),
    #[command(subcommand)]
    Operations(operations::OperationsCommand),
    #[command(subcommand)]
    Work(work::WorkCommand),
    Sweep(sweep::Sweep),
    #[command(subcommand)]
    Clock(clock::ClockCommand),
    #[command(subcommand)]
    Webhooks(webhooks::WebhooksCommand),
    #[command(subcommand)]
    Mailing(mailing::MailingCommand),
    #[command(subcommand)]
    Suppressions(suppressions::SuppressionsCommand),
    #[command(subcommand)]
    Config(config::ConfigCommand),
    #[command(hide = true)]
    Guard(guard::Guard),
    #[command(hide = true)]
    GuardExec(guard::GuardExec),
}

/// Runs the command line that this process was started with.
///
/// Every command starts its own runtime, because the guard must stay a process of one thread.
#[must_use]
pub fn main() -> ExitCode {
    let done = match Cli::parse().command {
        Command::Serve(command) => command.run(),
        Command::Gateway(command) => command.run(),
        Command::Once(command) => command.run(),
        Command::Why(command) => command.run(),
        Command::Operations(command) => command.run(),
        Command::Work(command) => command.run(),
        Command::Sweep(command) => command.run(),
        Command::Clock(command) => command.run(),
        Command::Webhooks(command) => command.run(),
        Command::Mailing(command) => command.run(),
        Command::Suppressions(command) => command.run(),
        Command::Config(command) => command.run(),
        Command::Guard(command) => Ok(command.run()),
        Command::GuardExec(command) => Ok(command.run()),
    };
    done.unwrap_or_else(|error| {
        complain(format_args!("{error:#}"));
        ExitCode::FAILURE
    })
}

/// Reads the configuration. This program has no handlers, so a rule that names one is a mistake.
fn load(flags: &Flags) -> crate::Result<Config> {
    Ok(refuse_handlers(read(flags)).config()?.clone())
}

/// Reads the configuration and prints its warnings on stderr.
fn read(flags: &Flags) -> Report {
    let report = crate::config::read(flags, &Environment::of_process(), DATA_DIR);
    for warning in report.warnings() {
        complain(format_args!("{warning}"));
    }
    report
}

/// The runtime of a command for people. The ledger has separate threads.
fn runtime() -> anyhow::Result<Runtime> {
    Builder::new_multi_thread().worker_threads(2).enable_all().build().context("cannot start")
}

/// Prints the output of a command. A closed pipe (`| head`) is no error.
fn say(text: &str) -> io::Result<()> {
    let mut stdout = io::stdout().lock();
    match stdout.write_all(text.as_bytes()).and_then(|()| stdout.flush()) {
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(()),
        done => done,
    }
}

/// Prints the address of a server. A server that cannot write to stdout logs it and continues.
fn greet(greeting: &str) {
    let mut stdout = io::stdout().lock();
    if let Err(error) = stdout.write_all(greeting.as_bytes()).and_then(|()| stdout.flush()) {
        tracing::warn!(%error, "the greeting could not be written to stdout: {}", greeting.lines().next().unwrap_or_default());
    }
}

/// Prints a text for people on stderr; if that fails, it is lost.
fn complain(message: std::fmt::Arguments<'_>) {
    let _ = writeln!(io::stderr(), "semel: {message}");
}
