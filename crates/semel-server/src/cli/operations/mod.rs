//! `semel operations`: lists and shows operations, and resolves or purges them.

mod decide;
mod list;
pub(super) mod show;

use std::process::ExitCode;

/// List and show operations, and resolve those that wait for a person
#[derive(clap::Subcommand)]
pub(super) enum OperationsCommand {
    List(list::List),
    Show(show::Show),
    Resolve(decide::Resolve),
    Purge(decide::Purge),
}

impl OperationsCommand {
    pub(super) fn run(self) -> anyhow::Result<ExitCode> {
        crate::log::start("error");
        super::runtime()?.block_on(async {
            match self {
                Self::List(command) => command.run().await,
                Self::Show(command) => command.run().await,
                Self::Resolve(command) => command.run().await,
                Self::Purge(command) => command.run().await,
            }
        })
    }
}
