//! `semel sweep`: one full round of what the server does every so often.

use std::process::ExitCode;

use semel::store::Swept;
use serde_json::json;

use super::{ledger::LedgerFlags, words::count};
use crate::log;

/// Sweep the ledger once: end lapsed leases, remove what is past its retention, archive, fold counters
#[derive(clap::Args)]
pub(super) struct Sweep {
    /// Tell what was done as JSON
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
            let swept = opened.ledger.sweep().await;
            opened.close().await;
            let swept = swept?;
            super::say(&if self.json { to_json(swept) } else { in_words(swept) })?;
            Ok(ExitCode::SUCCESS)
        })
    }
}

fn to_json(swept: Swept) -> String {
    let Swept { lapsed, expired, archived, folded, .. } = swept;
    format!("{:#}\n", json!({ "lapsed": lapsed, "expired": expired, "archived": archived, "folded": folded }))
}

fn in_words(swept: Swept) -> String {
    let count = |n: u64, one, many| count(i64::try_from(n).unwrap_or(i64::MAX), one, many);
    let Swept { lapsed, expired, archived, folded, .. } = swept;
    format!(
        "{} ended, {} removed, {} archived, {} folded\n",
        count(lapsed, "lapsed lease", "lapsed leases"),
        count(expired, "expired operation", "expired operations"),
        count(archived, "operation", "operations"),
        count(folded, "counter row", "counter rows"),
    )
}
