//! Migrates notifications of a version without the worker: each gets its operation.
//!
//! An operation does this in batches. A batch is one step that enqueues the deliveries and marks the notifications, so
//! a killed run continues after the last batch. Nodes of the older version may run for a while beside the first new
//! one: they create notifications without operations, and they change operations without the status of the
//! notification. So the migration looks again until none of their notifications appeared for some time. Then it
//! compares the status of every pending notification with its operation.

use std::time::Duration;

use semel::{
    Backoff, Claim, Context, Enqueued, Fingerprint, Key, Kind, Ledger, Operation, Outcome, Policy, Result, Scope,
    Timestamp, Unfinished, Work, crash_point, prelude::*,
};
use semel_store::{Database, Tx, is_held};
use serde::{Deserialize, Serialize};

use super::{
    deliver::{SERVICE, delivery, key, scope},
    deliver_tables::{self as tables, Any, Bare},
};

const KIND: &str = "carry-over";

/// How many notifications a step migrates.
const AT_ONCE: i64 = 1000;

/// How many notifications, of any status, one look goes through to find pending ones.
const CHECKED_AT_ONCE: i64 = 5000;

/// How long it looks for more after the last one found, and how often.
const WATCH: Duration = Duration::from_secs(15 * 60);
const LOOK_AGAIN: Duration = Duration::from_secs(10);

/// Its turn: far shorter than the longest run of its policy.
const TURN: Duration = Duration::from_secs(60);

fn policy() -> Policy {
    let backoff = Backoff { first: Duration::from_secs(1), cap: Duration::from_secs(60) };
    let retention = Some(Duration::from_secs(24 * 3600));
    Policy { lease: Duration::from_secs(5), retention, backoff, ..Policy::default() }
}

/// Enqueues the migration if there are notifications without an operation. Nodes that start together enqueue one: the
/// key is fixed while it runs. It cannot be fixed for ever, because a completed operation would answer with a replay.
/// So the key of the next migration is the id of the completed one.
pub(super) async fn begin(ledger: &Ledger<Database>) -> Result<()> {
    let first = ledger.store().read(async |conn| tables::first_bare(conn).await).await?;
    let Some(first) = first else { return Ok(()) };
    // No id of an operation: otherwise the chain of keys could be a circle.
    let mut key = Key::new("first")?;
    loop {
        let scope = Scope::new(Scope::DEFAULT_TENANT, SERVICE, KIND)?;
        let work = Work::new(scope, key, Fingerprint::of_bytes(b"")).policy_of_worker(policy());
        match ledger.enqueue(work).await? {
            Enqueued::Known(Claim::Replay(replay)) => key = Key::new(&replay.operation.id.to_string())?,
            Enqueued::Known(Claim::Exhausted(parked)) => {
                tracing::warn!(
                    operation = parked.id,
                    "notifications of an earlier version are not carried over: the operation is parked"
                );
                return Ok(());
            }
            _ => {
                tracing::info!(first, "notifications of an earlier version are carried over to the worker");
                return Ok(());
            }
        }
    }
}

/// The kind of work of the migration.
pub(super) fn kind(ledger: &Ledger<Database>) -> Kind<Database> {
    let ledger = ledger.clone();
    let handler = move |context: Context<Database>| {
        let run = Run { ledger: ledger.clone(), context };
        async move { run.look().await }
    };
    Kind::leased(SERVICE, KIND, handler).policy(policy()).at_once(1).turn(TURN)
}

/// What a run leaves for the next one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
struct Checkpoint {
    /// When it last found a notification to migrate or a status to correct, in microseconds.
    found: i64,
    /// How many notifications that cannot be migrated the log has named.
    logged: u64,
    /// The last notification whose status was compared, and whether one was corrected on the way.
    checked: i64,
    corrected: bool,
}

impl Checkpoint {
    fn of(operation: &Operation) -> Option<Self> {
        serde_json::from_slice(operation.checkpoint.as_deref()?).ok()
    }

    fn encode(&self) -> String {
        serde_json::json!(self).to_string()
    }

    /// Begins the watch anew: all statuses are compared at its end.
    fn found(self, at: Timestamp) -> Self {
        Self { found: at.as_micros(), logged: self.logged, ..Self::default() }
    }
}

/// The result of the steps for some rows.
#[derive(Default)]
struct Stepped {
    /// Whether a step was committed.
    committed: bool,
    /// Rows that failed alone.
    refused: u64,
}

/// One run of the migration.
struct Run {
    ledger: Ledger<Database>,
    context: Context<Database>,
}

impl Run {
    /// Migrates all notifications that it finds. Completes at the end of the watch.
    async fn look(&self) -> Result<Outcome, Unfinished> {
        let stored = Checkpoint::of(self.context.operation());
        let mut checkpoint = match stored {
            Some(stored) => stored,
            None => Checkpoint::default().found(self.now().await?),
        };
        let left = self.carry_all(&mut checkpoint).await?;
        if left > checkpoint.logged {
            tracing::warn!(
                notifications = left,
                "notifications of an earlier version that cannot be read are not carried over"
            );
        }
        checkpoint.logged = left;
        let silent = self.now().await?.since(Timestamp::from_micros(checkpoint.found));
        if silent >= WATCH && self.check_all(&mut checkpoint).await? {
            return Ok(Outcome::kept(""));
        }
        if stored != Some(checkpoint) {
            self.keep(checkpoint).await?;
        }
        Err(Unfinished::released(LOOK_AGAIN))
    }

    /// Migrates all notifications without an operation. Returns how many cannot be migrated.
    async fn carry_all(&self, checkpoint: &mut Checkpoint) -> Result<u64, Unfinished> {
        let (mut after, mut left) = (0, 0);
        loop {
            let bare = self.ledger.store().read(async |conn| tables::bare(conn, after, AT_ONCE).await);
            let bare = bare.await.map_err(unfinished)?;
            let Some(last) = bare.last().map(|any| any.id) else { return Ok(left) };
            let readable: Vec<Delivery> = bare.iter().filter_map(Delivery::of).collect();
            left += (bare.len() - readable.len()) as u64;
            // The time is that of this batch: a pass may take longer than the watch.
            let found = checkpoint.found(self.now().await?);
            let stepped = self.in_steps(found, readable, carry).await?;
            left += stepped.refused;
            if stepped.committed {
                *checkpoint = found;
            }
            after = last;
        }
    }

    /// Compares pending notifications with their operations, which a node of the older version may have changed. True
    /// if all agree.
    async fn check_all(&self, checkpoint: &mut Checkpoint) -> Result<bool, Unfinished> {
        let store = self.ledger.store();
        loop {
            let from = checkpoint.checked;
            let page = store.read(async |conn| tables::waiting(conn, from, CHECKED_AT_ONCE).await);
            let Some((last, waiting)) = page.await.map_err(unfinished)? else { break };
            let waiting: Vec<Bare> = waiting.into_iter().filter_map(|any| any.bare).collect();
            let ended = self.ended(&waiting).await.map_err(unfinished)?;
            let corrected = Checkpoint { corrected: true, ..*checkpoint };
            let stepped = self.in_steps(corrected, ended, correct).await?;
            if stepped.committed {
                *checkpoint = corrected;
            }
            if stepped.refused > 0 {
                tracing::warn!(notifications = stepped.refused, "the status of notifications cannot be corrected");
            }
            checkpoint.checked = last;
            self.keep(*checkpoint).await?;
        }
        let agree = !checkpoint.corrected;
        if !agree {
            // A node of the older version was there not long ago.
            *checkpoint = checkpoint.found(self.now().await?);
        }
        Ok(agree)
    }

    /// Of pending notifications, those whose operations are not pending.
    async fn ended(&self, waiting: &[Bare]) -> Result<Vec<Ended>> {
        let named = waiting.iter().filter_map(|bare| {
            Some((bare.id, (scope(&bare.tenant, &bare.notification_type).ok()?, key(bare.id).ok()?)))
        });
        let (ids, operations): (Vec<i64>, Vec<_>) = named.unzip();
        let ended = self.ledger.store().ended(&operations).await?;
        Ok(ids.into_iter().zip(ended).filter_map(|(id, operation)| Some(Ended { id, operation: operation? })).collect())
    }

    /// Runs a step for these rows. If that fails, the rows are halved until the offending one is alone.
    async fn in_steps<T, F, Fut>(&self, checkpoint: Checkpoint, rows: Vec<T>, step: F) -> Result<Stepped, Unfinished>
    where
        T: Clone + Send + Sync,
        F: Fn(Ledger<Database>, Tx, Vec<T>) -> Fut + Send + Sync,
        Fut: Future<Output = Result<()>> + Send,
    {
        let (mut done, mut parts) = (Stepped::default(), vec![rows]);
        while let Some(mut part) = parts.pop() {
            if self.context.turn_is_over() {
                return Err(Unfinished::TurnOver);
            }
            if part.is_empty() {
                continue;
            }
            let stepped = self.context.step(|tx: Tx| {
                let step = step(self.ledger.clone(), tx, part.clone());
                async move {
                    step.await.map_err(unfinished)?;
                    crash_point!("deliveries.carried");
                    Ok((checkpoint.encode(), ()))
                }
            });
            match stepped.await {
                Ok(()) => done.committed = true,
                Err(Unfinished::Failed(_)) if part.len() > 1 => {
                    let rest = part.split_off(part.len() / 2);
                    parts.extend([rest, part]);
                }
                Err(Unfinished::Failed(failure)) => {
                    tracing::debug!(error = failure.error, "a notification cannot be carried over");
                    done.refused += 1;
                }
                Err(unfinished) => return Err(unfinished),
            }
        }
        Ok(done)
    }

    async fn now(&self) -> Result<Timestamp, Unfinished> {
        self.ledger.store().now().await.map_err(unfinished)
    }

    async fn keep(&self, checkpoint: Checkpoint) -> Result<(), Unfinished> {
        self.context.progress(checkpoint.encode()).await.map(drop).map_err(unfinished)
    }
}

/// How a run ends after an error. A row that another transaction holds is a failure: its batch is halved.
fn unfinished(error: semel::Error) -> Unfinished {
    match is_held(&error) {
        true => Unfinished::failed(error.to_string()),
        false => crate::unfinished::unfinished(error),
    }
}

/// A notification without an operation, and the operation that it gets.
#[derive(Clone)]
struct Delivery {
    id: i64,
    work: Work,
}

impl Delivery {
    /// Nothing if the notification is unreadable.
    fn of(any: &Any) -> Option<Self> {
        let bare = any.bare.as_ref()?;
        Some(Self { id: bare.id, work: delivery(&bare.tenant, &bare.notification_type, bare.id).ok()? })
    }
}

/// Migrates notifications. Two kinds of them are left for the next look: those that another transaction has locked, and
/// those that a node of the older version is delivering, because that node cannot mark the notification.
async fn carry(ledger: Ledger<Database>, tx: Tx, deliveries: Vec<Delivery>) -> Result<()> {
    let (ids, works): (Vec<i64>, Vec<Work>) = deliveries.into_iter().map(|one| (one.id, one.work)).unzip();
    let answers = ledger.enqueue_in(&tx, works).await?;
    let (mut done, mut ended) = (Vec::new(), Vec::new());
    for (id, answer) in ids.into_iter().zip(answers) {
        match &answer {
            Enqueued::Known(Claim::InFlight(_)) => {}
            Enqueued::Known(_) => ended.push(Ended { id, operation: answer.operation().id }),
            Enqueued::New(_) | Enqueued::Waiting(_) => done.push(id),
        }
    }
    done = free(&tx, &done).await?;
    done.extend(project(&ledger, &tx, ended).await?);
    let mut held = tx.connection().await?;
    tables::enqueued(&mut held.get()?, &done).await
}

/// A notification whose operation has run.
#[derive(Clone, Copy)]
struct Ended {
    id: i64,
    operation: i64,
}

/// Corrects the status of notifications.
async fn correct(ledger: Ledger<Database>, tx: Tx, ended: Vec<Ended>) -> Result<()> {
    project(&ledger, &tx, ended).await.map(drop)
}

/// Sets the status of notifications to that of their operations. Returns those that no other transaction has locked.
async fn project(ledger: &Ledger<Database>, tx: &Tx, mut ended: Vec<Ended>) -> Result<Vec<i64>> {
    let free = free(tx, &ended.iter().map(|one| one.id).collect::<Vec<_>>()).await?;
    ended.retain(|one| free.contains(&one.id));
    let operations: Vec<i64> = ended.iter().map(|one| one.operation).collect();
    let projected = ledger.store().project_in(tx, &operations).await?;
    Ok(ended.iter().filter(|one| projected.contains(&one.operation)).map(|one| one.id).collect())
}

/// Locks pending notifications that no other transaction has locked.
async fn free(tx: &Tx, ids: &[i64]) -> Result<Vec<i64>> {
    let mut held = tx.connection().await?;
    tables::free(&mut held.get()?, ids).await
}
