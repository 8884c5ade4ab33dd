//! The inbox, for those who take messages by themselves.

use std::time::Duration;

use super::{InboxKey, Message, MessageStore, Origin};
use crate::{Claim, Fingerprint, Key, Ledger, OnMismatch, Policy, Result, Scope, Store, Work};

/// How long a key is remembered: longer than any queue or person should keep a message.
pub(super) const RETENTION: Duration = Duration::from_secs(30 * 24 * 3600);

/// What the inbox says of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Once {
    /// It is the first: make its effect in this transaction, commit, then acknowledge.
    First(Origin),
    /// It took effect before: acknowledge it.
    Again,
    /// Its key belongs to another message, whose fingerprint this is. Keep it for a person.
    Conflict(Fingerprint),
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
            Some(Claim::Mismatch(first)) => Once::Conflict(first.fingerprint),
            _ => Once::Again,
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
