//! `semel sweep`: one full sweep.

use std::process::ExitCode;

use semel::store::{Swept, Trouble};
use serde_json::json;

use super::ledger::{LedgerFlags, Opened};
use crate::{
    log,
    view::words::{count, plain},
};

/// Sweep the ledger once: end expired and missing leases, delete expired operations, archive, fold counters
///
/// A server with the role sweeper does this every 15 seconds. Rows that cannot be read or changed are set aside: see
/// `semel operations list --set-aside`.
#[derive(clap::Args)]
pub(super) struct Sweep {
    /// Also retry rows that were set aside
    #[arg(long)]
    set_aside: bool,
    /// Print the result as JSON
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    ledger: LedgerFlags,
}

impl Sweep {
    pub(super) fn run(self) -> anyhow::Result<ExitCode> {
        log::start("error");
        super::runtime()?.block_on(async {
            let opened = self.ledger.look().await?;
            let swept = self.sweep(&opened).await;
            let flags = opened.flags.clone();
            opened.close().await;
            let swept = swept?;
            super::say(&if self.json { to_json(&swept) } else { in_words(&swept, &flags) })?;
            Ok(if swept.troubles.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
        })
    }

    async fn sweep(&self, opened: &Opened) -> anyhow::Result<Swept> {
        if self.set_aside {
            opened.ledger.store().try_set_aside_again().await?;
        }
        let mut swept = opened.ledger.sweep().await?;
        // A server's sweep looks for missing leases in slices, one per round. A single sweep must check them all.
        if let Err(error) = opened.ledger.store().end_missing_leases(&mut swept).await {
            let trouble = Trouble { phase: "missing leases", why: error.to_string() };
            swept += Swept { troubles: vec![trouble], ..Swept::default() };
        }
        Ok(swept)
    }
}

fn to_json(swept: &Swept) -> String {
    let Swept { lapsed, expired, archived, folded, set_aside, troubles, .. } = swept;
    let trouble = |Trouble { phase, why }: &Trouble| json!({ "phase": phase, "why": why });
    let troubles: Vec<_> = troubles.iter().map(trouble).collect();
    let said = json!({
        "lapsed": lapsed, "expired": expired, "archived": archived, "folded": folded,
        "setAside": set_aside, "troubles": troubles,
    });
    format!("{said:#}\n")
}

fn in_words(swept: &Swept, flags: &str) -> String {
    let count = |n: u64, one, many| count(i64::try_from(n).unwrap_or(i64::MAX), one, many);
    let Swept { lapsed, expired, archived, folded, set_aside, troubles, .. } = swept;
    let mut text = format!(
        "{} ended, {} deleted, {} archived, {} folded\n",
        count(*lapsed, "expired lease", "expired leases"),
        count(*expired, "expired operation", "expired operations"),
        count(*archived, "operation", "operations"),
        count(*folded, "counter row", "counter rows"),
    );
    if *set_aside > 0 {
        let rows = count(*set_aside, "row", "rows");
        let list = format!("semel operations list --set-aside {flags}");
        text.push_str(&format!("{rows} set aside. To see why: {}\n", list.trim_end()));
    }
    for Trouble { phase, why } in troubles {
        text.push_str(&format!("{phase}: failed: {}\n", plain(why)));
    }
    text
}
