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
    messaging::{ConsumerStore, Origin, Received, RetryRow},
    panic_text,
};

/// A message, its inbox key and its scope.
pub(super) struct Item {
    pub(super) message: Received,
    pub(super) scope: Scope,
    pub(super) key: Key,
    pub(super) fingerprint: Fingerprint,
    /// How many times the handler has been called with it.
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

/// The result of a committed transaction for one message.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Handled {
    /// Handled.
    Done,
    /// A duplicate: it was handled before.
    Duplicate,
    /// A conflict: its key belongs to another message, with this fingerprint.
    Conflict(Fingerprint),
}

/// Why a transaction was rolled back.
pub(super) enum Undone {
    /// The handler refused, or the database refused its writes.
    Refused(Refusal),
    /// A retry whose key belongs to another message, with this fingerprint.
    Conflict(Fingerprint),
    /// The lease of the retry was lost.
    Lost,
    /// The store is unavailable, or the result of the commit is unknown. The message is not at fault.
    Store(Error),
}

impl From<Error> for Undone {
    fn from(error: Error) -> Self {
        match error.is_transient() {
            true => Self::Store(error),
            false => Self::Refused(Refusal::retry(error)),
        }
    }
}

type Ended = Result<Vec<Handled>, Undone>;

impl<S: ConsumerStore, H: Handler<S>> Shared<S, H> {
    /// Asks the handler for the inbox key; an error with the reason if the message cannot be read.
    pub(super) fn identify(&self, message: &Received) -> Result<(Scope, Key, Fingerprint), String> {
        match catch_unwind(AssertUnwindSafe(|| self.handler.key(message))) {
            Ok(Ok(InboxKey { tenant, key, fingerprint })) => Scope::new(&tenant, "inbox", &self.name)
                .and_then(|scope| Ok((scope, Key::new(&key)?, fingerprint)))
                .map_err(|error| error.to_string()),
            Ok(Err(Refusal::Retry(why) | Refusal::Dead(why))) => Err(why),
            Err(panic) => Err(panic_error(&*panic)),
        }
    }

    /// The inbox claim of a message.
    pub(super) fn work(&self, item: &Item) -> Work {
        let policy = Policy { retention: self.options.retention, on_mismatch: OnMismatch::Reject, ..Policy::default() };
        Work::new(item.scope.clone(), item.key.clone(), item.fingerprint).policy(policy)
    }

    /// Handles messages with different keys in one transaction: all of them or none. A retry is handled alone, and is
    /// removed in the same transaction.
    pub(super) async fn attempt(self: &Arc<Self>, items: &Arc<Vec<Item>>, retry: Option<&RetryRow>) -> Ended {
        let (shared, items, retry) = (self.clone(), items.clone(), retry.map(|row| (row.id, row.token)));
        let handled = self.ledger.transact(async move |tx| shared.inside(&tx, &items, retry).await).await?;
        crash_point!("consumer.after_commit");
        self.store_is_back();
        Ok(handled)
    }

    async fn inside(&self, tx: &S::Tx, items: &[Item], retry: Option<(i64, i64)>) -> Ended {
        // First, because this locks the row: no other consumer takes the retry while it runs.
        if let Some((id, token)) = retry
            && !self.store().retry_done(tx, id, token).await?
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
                // Only consumers claim in an inbox, and each claim is settled in its own transaction.
                other => {
                    let why = format!("the inbox has the key as {}", other.word());
                    return Err(Undone::Refused(Refusal::Retry(why)));
                }
            });
        }
        crash_point!("consumer.before_commit");
        Ok(handled)
    }

    /// Claims in key order, so that two consumers with the same messages lock in the same order; answers in the order
    /// of the items.
    async fn claim(&self, tx: &S::Tx, items: &[Item]) -> Result<Vec<Claim<Origin>>, Undone> {
        let mut order: Vec<usize> = (0..items.len()).collect();
        order.sort_unstable_by_key(|&n| (&items[n].scope, &items[n].key));
        let works = order.iter().map(|&n| self.work(&items[n])).collect();
        let claims = self.ledger.claim_all_inline(tx, works).await?;
        let mut claims: Vec<_> = order.into_iter().zip(claims).collect();
        claims.sort_unstable_by_key(|(n, _)| *n);
        Ok(claims.into_iter().map(|(_, claim)| claim).collect())
    }

    /// Calls the handler's after-commit hook.
    pub(super) fn committed(&self, message: &Received) {
        if let Err(panic) = catch_unwind(AssertUnwindSafe(|| self.handler.committed(message))) {
            tracing::error!(
                consumer = self.name,
                error = panic_text(&*panic),
                "handler panicked in its after-commit hook"
            );
        }
    }
}

/// Runs a handler; a panic counts as a failure.
async fn caught(handler: impl Future<Output = Result<(), Refusal>>) -> Result<(), Refusal> {
    let mut handler = pin!(handler);
    poll_fn(|context| match catch_unwind(AssertUnwindSafe(|| handler.as_mut().poll(context))) {
        Ok(poll) => poll,
        Err(panic) => Poll::Ready(Err(Refusal::Retry(panic_error(&*panic)))),
    })
    .await
}

/// The error of a handler that panicked.
fn panic_error(panic: &(dyn std::any::Any + Send)) -> String {
    format!("the handler panicked: {}", panic_text(panic))
}
