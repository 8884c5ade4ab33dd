//! `semel work schedules` and `semel work nodes`.

use std::{process::ExitCode, time::Duration};

use semel::{
    Key, State, Timestamp,
    fleet::{Mark, NodeSeen},
    prelude::*,
};
use semel_store::Database;
use serde_json::{Value, json};

use crate::{
    cli::ledger::{LedgerFlags, Opened},
    view::{
        GONE,
        words::{plain, span, table},
    },
};

/// How late a run may be before its schedule is shown as overdue.
const LATE: Duration = Duration::from_secs(60);

/// List schedules, with their last and next runs
#[derive(clap::Args)]
pub(in crate::cli) struct Schedules {
    /// List them as JSON
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    ledger: LedgerFlags,
}

/// List the nodes that have left a sign of life within a day
#[derive(clap::Args)]
pub(in crate::cli) struct Nodes {
    /// List them as JSON
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    ledger: LedgerFlags,
}

/// A schedule and the standing of its last run, unless that run has expired.
struct Shown {
    mark: Mark,
    last: Option<State>,
}

impl Schedules {
    pub(super) async fn run(self) -> anyhow::Result<ExitCode> {
        let list = async |opened: &Opened| {
            let (shown, now) = look(opened.ledger.store()).await?;
            Ok(if self.json { schedules_json(&shown) } else { schedules_table(&shown, now) })
        };
        self.ledger.print(list).await
    }
}

async fn look(store: &Database) -> anyhow::Result<(Vec<Shown>, Timestamp)> {
    let (marks, now) = store.schedules().await?;
    let mut shown = Vec::new();
    for mark in marks {
        let last = match mark.last_key() {
            Some(key) => state(store, &mark, &key?).await?,
            None => None,
        };
        shown.push(Shown { mark, last });
    }
    Ok((shown, now))
}

async fn state(store: &Database, mark: &Mark, key: &Key) -> anyhow::Result<Option<State>> {
    match store.by_key(&mark.scope, key).await {
        Ok(found) => Ok(found.map(|run| run.state)),
        Err(error) if error.is_transient() => Err(error.into()),
        // `semel operations` reports unreadable rows.
        Err(_) => Ok(None),
    }
}

fn schedules_json(shown: &[Shown]) -> String {
    let one = |Shown { mark, last }: &Shown| {
        json!({
            "name": mark.name,
            "tenant": mark.scope.tenant(),
            "service": mark.scope.service(),
            "kind": mark.scope.kind(),
            "when": mark.spec,
            "since": mark.since.to_string(),
            "paused": mark.paused,
            "last": mark.last.map(|due| json!({ "due": due.to_string(), "state": last.map(State::as_str) })),
            "next": mark.next.map(|due| due.to_string()),
        })
    };
    format!("{:#}\n", json!({ "items": shown.iter().map(one).collect::<Vec<Value>>() }))
}

fn schedules_table(shown: &[Shown], now: Timestamp) -> String {
    if shown.is_empty() {
        return "none\n".to_owned();
    }
    let head = ["NAME", "SCOPE", "WHEN", "LAST", "NEXT"].map(str::to_owned);
    let row = |Shown { mark, last }: &Shown| {
        let state = last.map_or(String::new(), |state| format!(" ({state})"));
        [
            plain(&mark.name),
            plain(&mark.scope.to_string()),
            plain(&mark.spec),
            mark.last.map_or("-".to_owned(), |due| format!("{due}{state}")),
            next(mark, now),
        ]
    };
    table(std::iter::once(head).chain(shown.iter().map(row)))
}

fn next(mark: &Mark, now: Timestamp) -> String {
    match mark.next {
        _ if mark.paused => "paused".to_owned(),
        None => "never".to_owned(),
        Some(due) if now.since(due) > LATE => format!("{due}: overdue, no worker runs it"),
        Some(due) if due <= now => format!("{due} (due now)"),
        Some(due) => format!("{due} (in {})", span(due.since(now))),
    }
}

impl Nodes {
    pub(super) async fn run(self) -> anyhow::Result<ExitCode> {
        let list = async |opened: &Opened| {
            let nodes = opened.ledger.store().nodes().await?;
            Ok(if self.json { nodes_json(&nodes) } else { nodes_table(&nodes) })
        };
        self.ledger.print(list).await
    }
}

fn nodes_json(nodes: &[NodeSeen]) -> String {
    let node = |node: &NodeSeen| {
        json!({
            "name": node.owner,
            "roles": node.sign.roles,
            "version": node.sign.version,
            "kinds": node.sign.kinds,
            "since": node.since.to_string(),
            "seen": node.seen.to_string(),
            "ageSeconds": node.age.as_secs(),
        })
    };
    format!("{:#}\n", json!({ "items": nodes.iter().map(node).collect::<Vec<Value>>() }))
}

fn nodes_table(nodes: &[NodeSeen]) -> String {
    if nodes.is_empty() {
        return "none\n".to_owned();
    }
    let head = ["NODE", "ROLES", "VERSION", "SINCE", "SEEN", "KINDS"].map(str::to_owned);
    let row = |node: &NodeSeen| {
        let seen = format!("{} ago{}", span(node.age), if node.age > GONE { ": gone" } else { "" });
        [
            plain(&node.owner),
            plain(&node.sign.roles.join(",")),
            plain(&node.sign.version),
            node.since.to_string(),
            seen,
            plain(&node.sign.kinds.join(" ")),
        ]
    };
    table(std::iter::once(head).chain(nodes.iter().map(row)))
}

#[cfg(test)]
mod tests {
    use semel::{Schedule, Scope};

    use super::*;

    #[test]
    fn a_schedule_shows_when_it_is_due() {
        let at = |seconds: i64| Timestamp::from_micros(seconds * 1_000_000);
        let scope = Scope::parse("shop/report").unwrap();
        let hourly = Schedule::every("hourly", Duration::from_secs(3600), scope).unwrap();
        let shown = |now| next(&Mark::new(&hourly, at(10)), now).split_once("Z").unwrap().1.to_owned();
        assert_eq!(shown(at(3540)), " (in 1m)");
        assert_eq!((shown(at(3600)), shown(at(3601))), (" (due now)".to_owned(), " (due now)".to_owned()));
        assert_eq!(shown(at(3661)), ": overdue, no worker runs it");
    }
}
