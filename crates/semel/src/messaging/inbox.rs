//! The inbox, for programs that consume messages without a `Consumer`.

use std::time::Duration;

use super::{InboxKey, Message, Origin, OutboxStore};
use crate::{Claim, Error, Fingerprint, Key, Ledger, OnMismatch, Policy, Result, Scope, Store, Work};

/// How long a key is remembered: longer than a queue or a person should keep a message.
pub(super) const RETENTION: Duration = Duration::from_secs(30 * 24 * 3600);

/// The inbox's answer. Acknowledge only [`First`](Self::First), after the commit, and [`Done`](Self::Done): in every
/// other case the message would be lost.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use = "a message that is acknowledged without asking may never take effect"]
pub enum Once {
    /// It is the first: make its effect in this transaction, commit, then acknowledge.
    First(Origin),
    /// It took effect before: acknowledge it.
    Done,
    /// It has not taken effect, and must not be begun now. Do not acknowledge it: it must be delivered again, or stored
    /// for a person.
    NotSettled(Unsettled),
    /// Its key belongs to another message, with this fingerprint. Store it for a person.
    Conflict(Fingerprint),
}

/// Why a message can be neither handled nor acknowledged. The inbox itself leaves no key in these states: another
/// program has claimed it under a lease.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unsettled {
    /// It is being handled under a lease; redeliver it after this time.
    InFlight(Duration),
    /// It failed; it is due after this time.
    NotYet(Duration),
    /// It may or may not have taken effect: a person or a probe must resolve it.
    InDoubt,
    /// No attempts are left: a person must decide.
    Exhausted,
}

/// Deduplicates messages per consumer. A [`Consumer`](super::Consumer) does this itself; this is for programs with
/// their own consumer loop.
pub struct Inbox<S: Store> {
    ledger: Ledger<S>,
    retention: Option<Duration>,
}

impl<S: Store> Inbox<S> {
    /// The inbox in a ledger. Keys are remembered for 30 days.
    #[must_use]
    pub fn new(ledger: Ledger<S>) -> Self {
        Self { ledger, retention: Some(RETENTION) }
    }

    /// The same with another retention; `None` keeps keys for ever.
    #[must_use]
    pub fn retention(self, retention: Option<Duration>) -> Self {
        Self { retention, ..self }
    }

    /// Claims the key of a message in the transaction of its effect. Another transaction that claims the same key waits
    /// for this one to end.
    ///
    /// # Errors
    /// [`Error::Invalid`](crate::Error::Invalid) for invalid names; errors of the store. Roll back then.
    pub async fn once(&self, tx: &S::Tx, consumer: &str, key: &InboxKey) -> Result<Once> {
        let work = work(consumer, key, self.retention)?;
        let claims = self.ledger.claim_all_inline(tx, vec![work]).await?;
        Ok(match claims.into_iter().next() {
            Some(Claim::Acquired(origin)) => Once::First(origin),
            Some(Claim::Replay(_)) => Once::Done,
            Some(Claim::Mismatch(first)) => Once::Conflict(first.fingerprint),
            Some(Claim::InFlight(there)) => Once::NotSettled(Unsettled::InFlight(there.retry_after)),
            Some(Claim::NotYet(there)) => Once::NotSettled(Unsettled::NotYet(there.retry_after)),
            Some(Claim::InDoubt(_)) => Once::NotSettled(Unsettled::InDoubt),
            Some(Claim::Exhausted(_)) => Once::NotSettled(Unsettled::Exhausted),
            None => return Err(Error::Contradiction("a claim without an answer")),
        })
    }
}

/// The inbox claim of a message.
fn work(consumer: &str, key: &InboxKey, retention: Option<Duration>) -> Result<Work> {
    let policy = Policy { retention, on_mismatch: OnMismatch::Reject, ..Policy::default() };
    let scope = Scope::new(&key.tenant, "inbox", consumer)?;
    Ok(Work::new(scope, Key::new(&key.key)?, key.fingerprint).policy(policy))
}

/// The outbox: messages that go out if their transaction commits.
#[derive(Clone)]
pub struct Outbox<S: OutboxStore>(S);

impl<S: OutboxStore> Outbox<S> {
    /// The outbox of a database.
    #[must_use]
    pub fn new(store: S) -> Self {
        Self(store)
    }

    /// Puts a message into the outbox, inside a transaction.
    ///
    /// # Errors
    /// [`Error::Invalid`](crate::Error::Invalid) for an invalid message; errors of the store. Roll back then.
    pub async fn put(&self, tx: &S::Tx, message: Message) -> Result<()> {
        self.0.put(tx, vec![message]).await
    }
}
