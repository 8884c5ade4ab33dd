//! Migrates notifications of a version without the worker: each gets its operation.
//!
//! An operation does this in batches. A batch is one transaction that enqueues the deliveries and marks the
//! notifications, so a killed run continues after the last batch. Nodes of the older version may run for a while beside
//! the first new one: the migration looks again until none of their notifications appeared for some time.

use std::time::Duration;

use semel::{
    Backoff, Claim, Context, Enqueued, Fingerprint, Key, Kind, Ledger, Operation, Outcome, Policy, Result, Scope,
    Timestamp, Unfinished, Work, crash_point, prelude::*,
};
use semel_store::{Database, Tx};

use super::{
    deliver::{RETENTION, SERVICE, delivery},
    deliver_tables::{self as tables, Bare},
};

const KIND: &str = "carry-over";

/// How many notifications a transaction migrates.
const AT_ONCE: i64 = 1000;

/// How long it looks for more after the last one found, and how often.
const WATCH: Duration = Duration::from_secs(15 * 60);
const LOOK_AGAIN: Duration = Duration::from_secs(10);

fn policy() -> Policy {
    let backoff = Backoff { first: Duration::from_secs(1), cap: Duration::from_secs(60) };
    Policy { lease: Duration::from_secs(10), retention: Some(RETENTION), backoff, ..Policy::default() }
}

/// Enqueues the migration if there are notifications without an operation. Idempotent: the first of them is the key.
pub(super) async fn begin(ledger: &Ledger<Database>) -> Result<()> {
    let first = ledger.store().read(async |conn| tables::bare(conn, 0, 1).await).await?;
    if let Some(Bare { id, .. }) = first.first() {
        let key = Key::new(&id.to_string())?;
        let scope = Scope::new(Scope::DEFAULT_TENANT, SERVICE, KIND)?;
        let work = Work::new(scope, key, Fingerprint::of_bytes(b"")).policy_of_worker(policy());
        ledger.enqueue(work).await?;
        tracing::info!(first = id, "notifications of an earlier version are carried over to the worker");
    }
    Ok(())
}

/// The kind of work of the migration.
pub(super) fn kind(ledger: &Ledger<Database>) -> Kind<Database> {
    let ledger = ledger.clone();
    let handler = move |context: Context<Database>| {
        let ledger = ledger.clone();
        async move {
            let trouble = |error: semel::Error| match error.is_transient() {
                true => Unfinished::released_because(LOOK_AGAIN, error.to_string()),
                false => Unfinished::failed(error.to_string()),
            };
            let now = ledger.store().now().await.map_err(trouble)?;
            let mut found = false;
            let mut after = Some(0);
            while let Some(from) = after {
                let (ledger, batch) = (ledger.clone(), ledger.clone());
                let carried = ledger.transact(move |tx| async move { carry(&batch, &tx, from).await });
                after = carried.await.map_err(trouble)?;
                crash_point!("deliveries.carried");
                found |= after.is_some();
            }
            // The checkpoint holds the time when it last found some.
            let last = if found { now } else { last_found(context.operation()).unwrap_or(now) };
            if now.since(last) >= WATCH {
                return Ok(Outcome::kept(""));
            }
            if found || context.operation().checkpoint.is_none() {
                let _ = context.progress(last.as_micros().to_string()).await.map_err(trouble)?;
            }
            Err(Unfinished::released(LOOK_AGAIN))
        }
    };
    Kind::leased(SERVICE, KIND, handler).policy(policy()).at_once(1)
}

fn last_found(operation: &Operation) -> Option<Timestamp> {
    let text = std::str::from_utf8(operation.checkpoint.as_deref()?).ok()?;
    text.parse().ok().map(Timestamp::from_micros)
}

/// Migrates the next notifications; returns the last of them. One that a node of the older version is delivering is
/// left for later: that node settles the operation and cannot mark the notification.
async fn carry(ledger: &Ledger<Database>, tx: &Tx, after: i64) -> Result<Option<i64>> {
    let bare = {
        let mut held = tx.connection().await?;
        tables::bare(&mut held.get()?, after, AT_ONCE).await?
    };
    let Some(last) = bare.last().map(|bare| bare.id) else { return Ok(None) };
    let works = bare.iter().map(|bare| delivery(&bare.tenant, &bare.notification_type, bare.id));
    let answers = ledger.enqueue_in(tx, works.collect::<Result<_>>()?).await?;
    let (mut done, mut settled) = (Vec::new(), Vec::new());
    for (bare, answer) in bare.iter().zip(answers) {
        match &answer {
            Enqueued::Known(Claim::InFlight(_)) => continue,
            Enqueued::Known(Claim::Replay(_) | Claim::Exhausted(_) | Claim::InDoubt(_)) => {
                settled.push(answer.operation().clone());
            }
            _ => {}
        }
        done.push(bare.id);
    }
    ledger.store().project_in(tx, &settled).await?;
    let mut held = tx.connection().await?;
    tables::enqueued(&mut held.get()?, &done).await?;
    Ok(Some(last))
}
