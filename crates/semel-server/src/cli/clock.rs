//! `semel clock`: the time in a SQLite file, and setting it back.

use std::{process::ExitCode, time::Duration};

use anyhow::Context as _;
use semel::{Timestamp, prelude::*};
use semel_store::{Clock, repair_clock};
use serde_json::json;

use super::ledger::{LedgerFlags, actor, said};
use crate::{config::DatabaseUrl, log, view::words::span};

/// The time to catch up, as a multiple of the lead: the ledger's time advances a tenth slower.
const CATCHES_UP: u32 = 10;

/// Look at the time in a SQLite ledger, and set it back after this host's clock was ahead
#[derive(clap::Subcommand)]
pub(super) enum ClockCommand {
    Show(Show),
    Repair(Repair),
}

/// Show whether the time in the ledger is ahead of this host's clock
///
/// The time in a ledger never goes back: an expired lease stays expired. If this host's clock was ahead for a while,
/// the time in the ledger is ahead, too. It advances a tenth slower than real time until the clock has caught up.
#[derive(clap::Args)]
pub(super) struct Show {
    /// Print JSON
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    ledger: LedgerFlags,
}

/// Set the time in the ledger back to this host's clock
///
/// Use this if the ledger is too far ahead to wait. No other process may have the file open, and nothing in it may be
/// leased. Due operations stay due, delays keep their remaining time, and retentions end at their stored time by the
/// corrected clock, so they last longer. Recorded times do not change.
#[derive(clap::Args)]
pub(super) struct Repair {
    /// Why, for the audit
    #[arg(long, value_name = "TEXT", value_parser = super::arguments::reason)]
    reason: String,
    #[command(flatten)]
    ledger: LedgerFlags,
}

impl ClockCommand {
    pub(super) fn run(self) -> anyhow::Result<ExitCode> {
        log::start("error");
        super::runtime()?.block_on(async {
            let text = match self {
                Self::Show(command) => command.run().await?,
                Self::Repair(command) => command.run().await?,
            };
            super::say(&text)?;
            Ok(ExitCode::SUCCESS)
        })
    }
}

impl Show {
    async fn run(self) -> anyhow::Result<String> {
        let opened = self.ledger.look().await?;
        let store = opened.ledger.store();
        let (now, ahead) = (store.now().await, store.clock_is_ahead());
        let flags = opened.flags.clone();
        opened.close().await;
        let now = now?;
        if self.json {
            return Ok(to_json(now, ahead));
        }
        Ok(match ahead {
            None => format!("The time in the ledger is {now}. It is not ahead of this host's clock.\n"),
            Some(ahead) => format!(
                "The time in the ledger is {now}, {} ahead of this host's clock.\n\
                 It advances a tenth slower than real time until the clock has caught up, in about {}.\n\
                 To set it back at once: {} --reason '…'\n",
                span(ahead),
                span(ahead * CATCHES_UP),
                format!("semel clock repair {flags}").trim_end()
            ),
        })
    }
}

/// Durations in milliseconds. On PostgreSQL the time is the server's, and never ahead.
fn to_json(now: Timestamp, ahead: Option<Duration>) -> String {
    let millis = |span: Duration| u64::try_from(span.as_millis()).unwrap_or(u64::MAX);
    let said = json!({
        "now": now.to_string(),
        "ahead": ahead.is_some(),
        "aheadMillis": ahead.map_or(0, millis),
        "caughtUpInMillis": ahead.map_or(0, |ahead| millis(ahead * CATCHES_UP)),
    });
    format!("{said:#}\n")
}

impl Repair {
    async fn run(self) -> anyhow::Result<String> {
        let place = self.ledger.place()?;
        anyhow::ensure!(
            matches!(place, DatabaseUrl::Sqlite(_)),
            "the ledger in {} uses the clock of its server; set that clock",
            place.place()
        );
        // Expired leases are ended first: they would become valid again.
        let opened = self.ledger.look().await?;
        let swept = opened.ledger.sweep().await;
        opened.close().await;
        swept?;
        let repaired = repair_clock(&place.expose(), Clock::default(), (&actor(), &self.reason))
            .await
            .map_err(said)
            .with_context(|| format!("the time in {} was not set back", place.place()))?;
        let moment = |at: Timestamp| at.to_string();
        Ok(match repaired.by.is_zero() {
            true => format!("The time in the ledger is {}; nothing was changed.\n", moment(repaired.before)),
            false => format!(
                "The time in the ledger was {} and is {}: set back by {}.\n",
                moment(repaired.before),
                moment(repaired.after),
                span(repaired.by)
            ),
        })
    }
}
