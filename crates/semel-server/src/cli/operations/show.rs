//! `semel operations show`.

use std::process::ExitCode;

use crate::{
    cli::{
        ledger::{LedgerFlags, Opened},
        target::Target,
    },
    view::{self, fields, json},
};

/// Show all stored data of one operation
///
/// KEY may also be the operation's number, or the short hash by which log lines name it.
#[derive(clap::Args)]
pub(in crate::cli) struct Show {
    #[command(flatten)]
    target: Target,
    /// Show it as JSON, payload and outcome in full
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    ledger: LedgerFlags,
}

impl Show {
    pub(super) async fn run(self) -> anyhow::Result<ExitCode> {
        self.ledger.print(async |opened| self.show(opened).await).await
    }

    async fn show(&self, opened: &Opened) -> anyhow::Result<String> {
        let (whole, text, id) = match self.target.find_somehow(opened).await {
            Ok(operation) => (json::whole(&operation), fields::whole(&operation), operation.id),
            Err(error) => {
                let Some(row) = self.target.unreadable(opened, &error).await? else { return Err(error) };
                (json::unreadable(&row), fields::unreadable(&row), row.id)
            }
        };
        let aside = view::set_aside(opened.ledger.store(), id).await?;
        Ok(match self.json {
            true => format!("{:#}\n", json::with_aside(whole, &aside)),
            false => text + &fields::set_aside(&aside),
        })
    }
}
