//! `semel operations list`.

use std::{collections::HashMap, process::ExitCode, time::Duration};

use semel::{
    Labels, Operation, Scope, State, Timestamp,
    look::{Filter, Listing, Page, SetAside, Unreadable},
    micros,
    prelude::*,
};
use semel_store::Database;

use crate::{
    cli::{
        arguments::duration,
        ledger::{LedgerFlags, Opened},
    },
    view::{
        json, lease_has_expired,
        words::{self, plain, span, table},
    },
};

/// List operations, newest first
#[derive(clap::Args)]
pub(in crate::cli) struct List {
    /// Select by state: pending, processing, completed, failed, timed_out or in_doubt
    #[arg(long, value_parser = str::parse::<State>)]
    state: Option<State>,
    /// Select by service
    #[arg(long)]
    service: Option<String>,
    /// Select by kind
    #[arg(long)]
    kind: Option<String>,
    /// Select by the text of label 1, 2, 3 or 4
    #[arg(long, value_name = "N=TEXT", value_parser = label)]
    label: Option<(usize, String)>,
    /// Select operations that were set aside, because they cannot be read or changed
    #[arg(long, conflicts_with_all = ["state", "service", "kind", "label", "older_than", "cursor"])]
    set_aside: bool,
    /// Select operations first claimed longer ago than this
    #[arg(long, value_name = "TIME", value_parser = duration)]
    older_than: Option<Duration>,
    /// The tenant
    #[arg(long, default_value = Scope::DEFAULT_TENANT)]
    tenant: String,
    /// The most operations to list
    #[arg(long, value_name = "N", default_value_t = 50, value_parser = clap::value_parser!(u32).range(1..=500))]
    limit: u32,
    /// Continue here: the cursor that the previous page printed
    #[arg(long, value_name = "N")]
    cursor: Option<i64>,
    /// Print JSON
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    ledger: LedgerFlags,
}

fn label(text: &str) -> Result<(usize, String), String> {
    let wrong = || "write it as N=TEXT, where N is 1, 2, 3 or 4".to_owned();
    let (slot, text) = text.split_once('=').ok_or_else(wrong)?;
    let slot = slot.parse().ok().filter(|slot| (1..=4).contains(slot)).ok_or_else(wrong)?;
    Ok((slot, text.to_owned()))
}

impl List {
    pub(super) async fn run(self) -> anyhow::Result<ExitCode> {
        self.ledger.print(async |opened| self.list(opened).await).await
    }

    async fn list(&self, opened: &Opened) -> anyhow::Result<String> {
        let store = opened.ledger.store();
        let now = store.now().await?;
        let before = |age: Duration| Timestamp::from_micros(now.as_micros().saturating_sub(micros(age)));
        let labels = match &self.label {
            Some((slot, text)) => Labels::default().with(*slot, text)?,
            None => Labels::default(),
        };
        let filter = Filter {
            tenant: self.tenant.clone(),
            service: self.service.clone(),
            kind: self.kind.clone(),
            labels,
            state: self.state,
            before: self.older_than.map(before),
            ..Filter::default()
        };
        let listing = match self.set_aside {
            true => set_aside(store, &filter.tenant, self.limit).await?,
            false => store.list(&filter, Page { after: self.cursor, limit: self.limit }).await?,
        };
        let ids: Vec<_> =
            listing.items.iter().map(|op| op.id).chain(listing.unreadable.iter().map(|row| row.id)).collect();
        let aside = store.set_aside_of(&ids).await?;
        Ok(if self.json { format!("{:#}\n", json::page(&listing, &aside)) } else { to_table(&listing, &aside, now) })
    }
}

/// The reasons why operations were set aside, by id.
type Asides = HashMap<i64, Vec<SetAside>>;

/// The operations that were set aside, read one by one: there should be few.
async fn set_aside(store: &Database, tenant: &str, limit: u32) -> anyhow::Result<Listing> {
    let mut listing = Listing::default();
    let mut ids: Vec<_> = store.list_set_aside(tenant, limit).await?.into_iter().map(|aside| aside.id).collect();
    ids.dedup();
    for id in ids {
        match store.by_id(tenant, id).await {
            // Without the large fields, as in any list.
            Ok(found) => {
                listing.items.extend(found.map(|op| Operation { payload: None, outcome: None, checkpoint: None, ..op }))
            }
            Err(error) if error.is_transient() => return Err(error.into()),
            Err(error) => listing.unreadable.extend(store.unreadable_by_id(tenant, id, &error).await?),
        }
    }
    Ok(listing)
}

fn to_table(listing: &Listing, aside: &Asides, now: Timestamp) -> String {
    if listing.items.is_empty() && listing.unreadable.is_empty() {
        return "none\n".to_owned();
    }
    let head = ["ID", "STATE", "ATTEMPT", "AGE", "SCOPE", "KEY", "NOTE"].map(str::to_owned);
    let mut items: Vec<_> = listing.items.iter().map(|op| (op.id, row(op, aside.get(&op.id), now))).collect();
    items.extend(listing.unreadable.iter().map(|row| (row.id, unreadable(row, now))));
    items.sort_by_key(|(id, _)| std::cmp::Reverse(*id));
    let mut text = table(std::iter::once(head).chain(items.into_iter().map(|(_, row)| row)));
    if let Some(next) = listing.next {
        text.push_str(&format!("There are more: --cursor {next}\n"));
    }
    text
}

/// The line of an unreadable row.
fn unreadable(row: &Unreadable, now: Timestamp) -> [String; 7] {
    [
        row.id.to_string(),
        plain(&row.state),
        "?".to_owned(),
        span(now.since(row.created_at)),
        plain(&format!("{}/{}/{}", row.tenant, row.service, row.kind)),
        plain(&row.key),
        format!("unreadable: {}", plain(&row.why)),
    ]
}

fn row(op: &Operation, aside: Option<&Vec<SetAside>>, now: Timestamp) -> [String; 7] {
    let note = match &op.error {
        _ if lease_has_expired(op, now) => "its lease has expired".to_owned(),
        Some(error) => plain(error),
        None => op.labels.0.iter().flatten().map(|label| plain(label)).collect::<Vec<_>>().join(" "),
    };
    let note = aside.and_then(|all| all.first()).map_or(note, words::set_aside);
    [
        op.id.to_string(),
        format!("{}{}", op.state, if op.parked { " (parked)" } else { "" }),
        // The number of its last run: none, if it was only enqueued.
        if op.was_claimed() { op.attempt().to_string() } else { "0".to_owned() },
        span(now.since(op.created_at)),
        op.scope.to_string(),
        op.key.as_str().to_owned(),
        note,
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_label_is_a_slot_and_a_text() {
        assert_eq!(label("3=a=b"), Ok((3, "a=b".to_owned())));
        for wrong in ["", "a", "0=a", "5=a", "x=a", "=a"] {
            assert!(label(wrong).is_err(), "{wrong}");
        }
    }
}
