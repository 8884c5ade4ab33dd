//! `semel work list`.

use std::process::ExitCode;

use semel_store::KindOfWork;
use serde_json::{Value, json};

use crate::{
    cli::ledger::{LedgerFlags, Opened},
    view::{
        json,
        words::{plain, span, table},
    },
};

/// List the kinds of work that wait, run or are paused
#[derive(clap::Args)]
pub(in crate::cli) struct List {
    /// List them as JSON
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    ledger: LedgerFlags,
}

impl List {
    pub(super) async fn run(self) -> anyhow::Result<ExitCode> {
        let list = async |opened: &Opened| {
            let kinds = opened.ledger.store().kinds_of_work().await?;
            Ok(if self.json { to_json(&kinds) } else { to_table(&kinds) })
        };
        self.ledger.print(list).await
    }
}

fn to_json(kinds: &[KindOfWork]) -> String {
    let kind = |of: &KindOfWork| {
        json!({
            "service": of.service,
            "kind": of.kind,
            "waiting": of.waiting,
            "due": of.due,
            "running": of.running,
            "more": of.waiting >= KindOfWork::MOST,
            "oldestSeconds": of.oldest.map(|age| age.as_secs()),
            "paused": of.paused.as_ref().map(json::paused),
        })
    };
    format!("{:#}\n", json!({ "items": kinds.iter().map(kind).collect::<Vec<Value>>() }))
}

fn to_table(kinds: &[KindOfWork]) -> String {
    if kinds.is_empty() {
        return "nothing waits, runs or is paused\n".to_owned();
    }
    let head = ["KIND", "WAITING", "DUE", "RUNNING", "OLDEST", "PAUSED"].map(str::to_owned);
    table(std::iter::once(head).chain(kinds.iter().map(row)))
}

fn row(of: &KindOfWork) -> [String; 6] {
    let at_most = |n: u64, all: u64| if all >= KindOfWork::MOST { format!("{n}+") } else { n.to_string() };
    [
        plain(&format!("{}/{}", of.service, of.kind)),
        at_most(of.waiting, of.waiting),
        at_most(of.due, of.waiting),
        at_most(of.running, of.running),
        of.oldest.map_or("-".to_owned(), span),
        of.paused
            .as_ref()
            .map_or(String::new(), |by| format!("since {} by {}: {}", by.at, plain(&by.actor), plain(&by.reason))),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_truncated_count_is_shown_with_a_plus() {
        let of = KindOfWork { waiting: KindOfWork::MOST, due: 7, running: 3, ..KindOfWork::default() };
        assert_eq!(row(&of)[1..4], ["10000+", "7+", "3"]);
    }
}
