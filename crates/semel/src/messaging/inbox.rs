//! The inbox, for those who take messages by themselves.

use std::time::Duration;

use super::{InboxKey, Message, MessageStore, Origin};
use crate::{Claim, Error, Fingerprint, Key, Ledger, OnMismatch, Policy, Result, Scope, Store, Work};

/// How long a key is remembered: longer than any queue or person should keep a message.
pub(super) const RETENTION: Duration = Duration::from_secs(30 * 24 * 3600);

/// What the inbox says of a message. Only [`First`](Self::First), after the commit, and [`Done`](Self::Done) may be
/// acknowledged: in every other case the message would be lost.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use = "a message that is acknowledged without asking may never take effect"]
pub enum Once {
    /// It is the first: make its effect in this transaction, commit, then acknowledge.
    First(Origin),
    /// It took effect before: acknowledge it.
    Done,
    /// It has not taken effect, and must not be begun now. Do not acknowledge it: it has to come again, or to be kept
    /// for a person.
    NotSettled(Unsettled),
    /// Its key belongs to another message, whose fingerprint this is. Keep it for a person.
    Conflict(Fingerprint),
}

/// Why a message can be neither handled nor acknowledged. The inbox itself leaves no key like that: another program has
/// claimed it under a lease of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unsettled {
    /// It is being handled under a lease; let it come again after so long.
    InFlight(Duration),
    /// It failed, and is not due again before so long.
    NotYet(Duration),
    /// It may or may not have taken effect: a person or a probe has to say so first.
    InDoubt,
    /// It failed as often as it may: a person has to decide.
    Exhausted,
}

/// Lets each message through once per consumer. A [`Consumer`](super::Consumer) does so by itself; this is for a
/// program that has its own way of taking messages.
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

    /// The same with another memory; `None` is for ever.
    #[must_use]
    pub fn retention(self, retention: Option<Duration>) -> Self {
        Self { retention, ..self }
    }

    /// Asks, inside of the transaction of the effect, whether a message is the first of its key for a consumer. Whoever
    /// asks for the same key in another transaction waits for this one to end.
    ///
    /// # Errors
    /// [`Error::Invalid`](crate::Error::Invalid) for names that cannot be; and what a store can break with: roll back
    /// then.
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

/// The claim of a message's key.
fn work(consumer: &str, key: &InboxKey, retention: Option<Duration>) -> Result<Work> {
    let policy = Policy { retention, on_mismatch: OnMismatch::Reject, ..Policy::default() };
    let scope = Scope::new(&key.tenant, "inbox", consumer)?;
    Ok(Work::new(scope, Key::new(&key.key)?, key.fingerprint).policy(policy))
}

/// The outbox: messages that go out if their transaction commits.
#[derive(Clone)]
pub struct Outbox<S: MessageStore>(S);

impl<S: MessageStore> Outbox<S> {
    /// The outbox of a database.
    #[must_use]
    pub fn new(store: S) -> Self {
        Self(store)
    }

    /// Puts a message into it, inside of a transaction.
    ///
    /// # Errors
    /// [`Error::Invalid`](crate::Error::Invalid) for a message that no broker would take; and what a store can break
    /// with: roll back then.
    pub async fn put(&self, tx: &S::Tx, message: Message) -> Result<()> {
        self.0.put(tx, vec![message]).await
    }
}
