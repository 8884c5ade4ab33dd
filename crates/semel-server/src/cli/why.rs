//! `semel why`: the history of an operation, and what happens next.

use std::process::ExitCode;

use semel::prelude::*;
use serde_json::{Value, json};

use super::{
    ledger::{LedgerFlags, Opened},
    target::Target,
};
use crate::{
    log,
    view::{self, View, fields, json, story::gone, words},
};

/// Show the history of one operation in plain words
///
/// KEY may also be the operation's number, or the short hash by which log lines name it.
#[derive(clap::Args)]
pub(super) struct Why {
    #[command(flatten)]
    target: Target,
    /// Print it as JSON
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    ledger: LedgerFlags,
}

impl Why {
    pub(super) fn run(self) -> anyhow::Result<ExitCode> {
        log::start("error");
        super::runtime()?.block_on(self.ledger.print(async |opened| {
            let (story, data) = self.tell(opened).await?;
            Ok(if self.json { format!("{data:#}\n") } else { format!("{}\n", story.join("\n")) })
        }))
    }

    /// The story for people, and all data for programs.
    async fn tell(&self, opened: &Opened) -> anyhow::Result<(Vec<String>, Value)> {
        let not_found = match self.target.find_somehow(opened).await {
            Ok(operation) => {
                let view = View::read(opened.ledger.store(), operation).await?;
                return Ok(with_story(view.json(), view.story(&opened.flags).lines()));
            }
            Err(error) => error,
        };
        let store = opened.ledger.store();
        let now = store.now().await?.to_string();
        if let Some(row) = self.target.unreadable(opened, &not_found).await? {
            let aside = view::set_aside(store, row.id).await?;
            let data = json!({ "now": now, "operation": json::unreadable(&row), "setAside": json::set_aside(&aside) });
            let fields = fields::unreadable(&row);
            let story = fields.lines().map(str::to_owned).chain(aside.iter().map(words::set_aside));
            return Ok(with_story(data, story.collect()));
        }
        // The audit still records, by its number, that a person purged it.
        let Some(id) = self.target.number() else { return Err(not_found) };
        let (notes, _) = store.journal(id).await?;
        anyhow::ensure!(!notes.is_empty(), not_found);
        let audit = store.audited(self.target.scope()?.tenant(), id).await?;
        let data = json!({
            "now": now, "operation": null, "journal": json::journal(&notes), "audit": json::audit(&audit),
        });
        Ok(with_story(data, gone(id, &notes)))
    }
}

fn with_story(mut data: Value, story: Vec<String>) -> (Vec<String>, Value) {
    data["story"] = story.as_slice().into();
    (story, data)
}
