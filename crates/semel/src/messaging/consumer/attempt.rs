//! The transaction: inbox, handler, commit.

use std::{
    future::poll_fn,
    panic::{AssertUnwindSafe, catch_unwind},
    pin::pin,
    sync::{
        Arc,
        atomic::{AtomicU32, Ordering},
    },
    task::Poll,
};

use super::{Handler, InboxKey, Refusal, Shared};
use crate::{
    Claim, Error, Fingerprint, Key, OnMismatch, Policy, Scope, Work, crash_point,
    messaging::{MessageStore, Origin, Received, RetryRow},
};

/// A message and what it is known by.
pub(super) struct Item {
    pub(super) message: Received,
    pub(super) scope: Scope,
    pub(super) key: Key,
    pub(super) fingerprint: Fingerprint,
    /// How often the handler was entered with it.
    entered: AtomicU32,
}

impl Item {
    pub(super) fn new(message: Received, (scope, key, fingerprint): (Scope, Key, Fingerprint)) -> Self {
        Self { message, scope, key, fingerprint, entered: AtomicU32::new(0) }
    }

    pub(super) fn entered(&self) -> u32 {
        self.entered.load(Ordering::Relaxed)
    }
}

/// What a transaction has done for a message.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Handled {
    /// What it asks for.
    Done,
    /// Nothing: it was done before.
    Duplicate,
    /// Nothing: its key belongs to another message, of this fingerprint.
    Conflict(Fingerprint),
}

/// Why a transaction has done nothing.
pub(super) enum Undone {
    /// The handler refused, or the database refused what it did.
    Refused(Refusal),
    /// The key of a retry belongs to another message, of this fingerprint.
    Conflict(Fingerprint),
    /// The retry is not ours any more.
    Lost,
    /// The store is away, or nobody knows whether it was committed. It says nothing about the message.
    Store(Error),
}

impl Undone {
    /// What an error of the store's means.
    fn by(error: Error) -> Self {
        match error.is_transient() {
            true => Self::Store(error),
            false => Self::Refused(Refusal::retry(error)),
        }
    }
}

type Ended = Result<Vec<Handled>, Undone>;

impl<S: MessageStore, H: Handler<S>> Shared<S, H> {
    /// Finds out what a message is known by; the reason, if it cannot be understood.
    pub(super) fn identify(&self, message: &Received) -> Result<(Scope, Key, Fingerprint), String> {
        match catch_unwind(AssertUnwindSafe(|| self.handler.key(message))) {
            Ok(Ok(InboxKey { tenant, key, fingerprint })) => Scope::new(&tenant, "inbox", &self.name)
                .and_then(|scope| Ok((scope, Key::new(&key)?, fingerprint)))
                .map_err(|error| error.to_string()),
            Ok(Err(Refusal::Retry(why) | Refusal::Dead(why))) => Err(why),
            Err(panic) => Err(told(&*panic)),
        }
    }

    /// The claim of a message's key.
    pub(super) fn work(&self, item: &Item) -> Work {
        let policy = Policy { retention: self.options.retention, on_mismatch: OnMismatch::Reject, ..Policy::default() };
        Work::new(item.scope.clone(), item.key.clone(), item.fingerprint).policy(policy)
    }

    /// Handles messages of different keys in one transaction; all of them or none. A retry is one message, and is
    /// removed in the same transaction.
    pub(super) async fn attempt(self: &Arc<Self>, items: &Arc<Vec<Item>>, retry: Option<&RetryRow>) -> Ended {
        let (shared, items, retry) = (self.clone(), items.clone(), retry.map(|row| (row.id, row.token)));
        let ended = self.ledger.transact(async move |tx| match shared.inside(&tx, &items, retry).await {
            Ok(handled) => Ok(Ok(handled)),
            Err(undone) => Err(Err(undone)),
        });
        let handled = ended.await.unwrap_or_else(|error| Err(Undone::by(error)))?;
        crash_point!("consumer.after_commit");
        self.store_is_back();
        Ok(handled)
    }

    async fn inside(&self, tx: &S::Tx, items: &[Item], retry: Option<(i64, i64)>) -> Ended {
        // First, since it also keeps the row from being taken by anybody else for as long as we are at it.
        if let Some((id, token)) = retry
            && !self.store().retry_done(tx, id, token).await.map_err(Undone::by)?
        {
            return Err(Undone::Lost);
        }
        let claims = self.claim(tx, items).await?;
        crash_point!("consumer.begun");
        let mut handled = Vec::with_capacity(items.len());
        for (item, claim) in items.iter().zip(claims) {
            handled.push(match claim {
                Claim::Acquired(_) => {
                    item.entered.fetch_add(1, Ordering::Relaxed);
                    let run = caught(async { self.handler.handle(&item.message, tx).await });
                    run.await.map_err(Undone::Refused)?;
                    Handled::Done
                }
                Claim::Replay(_) => Handled::Duplicate,
                Claim::Mismatch(first) if retry.is_some() => return Err(Undone::Conflict(first.fingerprint)),
                Claim::Mismatch(first) => Handled::Conflict(first.fingerprint),
                // Nobody but us makes claims in an inbox, and ours are made and settled at once.
                other => {
                    let why = format!("the inbox has the key as {}", other.word());
                    return Err(Undone::Refused(Refusal::Retry(why)));
                }
            });
        }
        crash_point!("consumer.before_commit");
        Ok(handled)
    }

    /// Claims in the order of the keys, so that two consumers with the same messages wait for one another in one
    /// direction; answered in the order of the items.
    async fn claim(&self, tx: &S::Tx, items: &[Item]) -> Result<Vec<Claim<Origin>>, Undone> {
        let mut order: Vec<usize> = (0..items.len()).collect();
        order.sort_unstable_by_key(|&n| (&items[n].scope, &items[n].key));
        let works = order.iter().map(|&n| self.work(&items[n])).collect();
        let claims = self.ledger.claim_all_inline(tx, works).await.map_err(Undone::by)?;
        let mut claims: Vec<_> = order.into_iter().zip(claims).collect();
        claims.sort_unstable_by_key(|(n, _)| *n);
        Ok(claims.into_iter().map(|(_, claim)| claim).collect())
    }

    /// Tells the handler that what it did is durable.
    pub(super) fn committed(&self, message: &Received) {
        if let Err(panic) = catch_unwind(AssertUnwindSafe(|| self.handler.committed(message))) {
            tracing::error!(consumer = self.name, error = told(&*panic), "a handler that was told of its commit");
        }
    }
}

/// Runs a handler; a panic is a failure like any other.
async fn caught(handler: impl Future<Output = Result<(), Refusal>>) -> Result<(), Refusal> {
    let mut handler = pin!(handler);
    poll_fn(|context| match catch_unwind(AssertUnwindSafe(|| handler.as_mut().poll(context))) {
        Ok(poll) => poll,
        Err(panic) => Poll::Ready(Err(Refusal::Retry(told(&*panic)))),
    })
    .await
}

/// What a panic says.
fn told(panic: &(dyn std::any::Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().copied().or_else(|| panic.downcast_ref::<String>().map(String::as_str));
    format!("the handler panicked: {}", text.unwrap_or("no text"))
}
