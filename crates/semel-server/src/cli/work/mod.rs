//! `semel work`: pending and running work, schedules and nodes; pause, resume and cancel.

mod change;
mod list;
mod look;

use std::process::ExitCode;

/// Show the work that waits and runs; pause, resume and cancel it
#[derive(clap::Subcommand)]
pub(super) enum WorkCommand {
    List(list::List),
    Schedules(look::Schedules),
    Nodes(look::Nodes),
    Pause(change::Pause),
    Resume(change::Resume),
    Cancel(change::Cancel),
}

impl WorkCommand {
    pub(super) fn run(self) -> anyhow::Result<ExitCode> {
        crate::log::start("error");
        super::runtime()?.block_on(async {
            match self {
                Self::List(command) => command.run().await,
                Self::Schedules(command) => command.run().await,
                Self::Nodes(command) => command.run().await,
                Self::Pause(command) => command.run().await,
                Self::Resume(command) => command.run().await,
                Self::Cancel(command) => command.run().await,
            }
        })
    }
}
