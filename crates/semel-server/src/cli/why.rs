//! `semel why`: what happened to an operation, and what will.

use std::process::ExitCode;

use semel::Store as _;
use serde_json::json;

use super::{
    json,
    ledger::{LedgerFlags, Opened},
    operations::show,
    story::{Story, gone},
    target::Target,
    words,
};
use crate::{
    log,
    services::webhooks::{SERVICE, record::stuck},
};

/// Tell the story of one operation in plain words
///
/// KEY may also be the operation's number, or the short hash by which log lines name it.
#[derive(clap::Args)]
pub(super) struct Why {
    #[command(flatten)]
    target: Target,
    /// Tell it as JSON
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    ledger: LedgerFlags,
}

impl Why {
    pub(super) fn run(self) -> anyhow::Result<ExitCode> {
        log::start("error");
        super::runtime()?.block_on(async {
            let opened = self.ledger.look().await?;
            let told = self.tell(&opened).await;
            opened.close().await;
            let (story, data) = told?;
            super::say(&if self.json { format!("{data:#}\n") } else { format!("{}\n", story.join("\n")) })?;
            Ok(ExitCode::SUCCESS)
        })
    }

    /// The story for people, and all of it for programs.
    async fn tell(&self, opened: &Opened) -> anyhow::Result<(Vec<String>, serde_json::Value)> {
        let store = opened.ledger.store();
        let now = store.now().await?;
        let operation = match self.target.find_somehow(opened).await {
            Ok(operation) => operation,
            Err(not_found) => {
                if let Some(row) = self.target.unreadable(opened, &not_found).await? {
                    let aside = show::set_aside(opened, row.id).await?;
                    let mut story: Vec<_> = show::unreadable(&row).lines().map(str::to_owned).collect();
                    story.extend(aside.iter().map(words::set_aside));
                    let operation = json::unreadable(&row);
                    let data = json!({
                        "now": now.to_string(), "operation": operation, "setAside": json::set_aside(&aside), "story": story,
                    });
                    return Ok((story, data));
                }
                // That a person purged it is still known, by its number.
                let Some(id) = self.target.number() else { return Err(not_found) };
                let (notes, _) = store.journal(id).await?;
                anyhow::ensure!(!notes.is_empty(), not_found);
                let story = gone(id, &notes);
                let journal = json::journal(&notes);
                let data = json!({ "now": now.to_string(), "operation": null, "journal": journal, "story": story });
                return Ok((story, data));
            }
        };
        let (notes, repeats) = store.journal(operation.id).await?;
        let stuck = match operation.scope.service() {
            SERVICE => stuck(store, &operation, &notes).await?,
            _ => None,
        };
        let (repeats_told, ledger) = (&repeats[..], &*opened.flags);
        let stuck = stuck.as_ref();
        let story = Story { operation: &operation, notes: &notes, repeats: repeats_told, stuck, now, ledger };
        let mut story = story.tell();
        let aside = show::set_aside(opened, operation.id).await?;
        story.extend(aside.iter().map(words::set_aside));
        let data = json!({
            "now": now.to_string(),
            "operation": json::whole(&operation),
            "journal": json::journal(&notes),
            "repeats": json::repeats(&repeats),
            "setAside": json::set_aside(&aside),
            "story": story,
        });
        Ok((story, data))
    }
}
