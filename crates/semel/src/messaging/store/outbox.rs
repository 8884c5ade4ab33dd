//! The outbox, for services that put messages into it and for people.

use super::super::{Envelope, Message, MessageId, Topic};
use crate::{Result, Timestamp, store::Transactions};

/// The outbox, for services and people.
pub trait OutboxStore: Transactions {
    /// Puts messages into the outbox, inside a transaction: they are published if it commits. Their ordering keys are
    /// locked until then.
    fn put(&self, tx: &Self::Tx, messages: Vec<Message>) -> impl Future<Output = Result<()>> + Send;

    /// When a message with a receipt was published; `None` if it was not, or if the receipt has expired.
    fn receipt(&self, tenant: &str, id: MessageId) -> impl Future<Output = Result<Option<Timestamp>>> + Send;

    /// A page of the outbox, after row `after`, oldest first. An unreadable row hides no other.
    fn outbox(
        &self,
        filter: &OutboxFilter,
        after: Option<i64>,
        limit: u32,
    ) -> impl Future<Output = Result<OutboxListing>> + Send;

    /// Makes a parked, unroutable or waiting row ready: a person's action, audited. False if there was none.
    fn redrive_outbox(&self, tenant: &str, id: MessageId, actor: &str) -> impl Future<Output = Result<bool>> + Send;

    /// Removes a parked or unroutable row, so that later rows of its ordering key can be published: a person's action,
    /// audited.
    fn skip_outbox(
        &self,
        tenant: &str,
        id: MessageId,
        actor: &str,
        reason: &str,
    ) -> impl Future<Output = Result<bool>> + Send;

    /// Counts of the outbox.
    fn backlog(&self) -> impl Future<Output = Result<Backlog>> + Send;
}

/// The state of a message in the outbox. A published message is deleted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OutboxState {
    /// To be published as soon as possible, or leased by a relay.
    Ready,
    /// To be published at a time: it has a `not_before`, or the last attempt failed.
    Waiting,
    /// An earlier message of its ordering key is still in the outbox.
    Blocked,
    /// No queue is bound to its topic. It is tried again periodically, because the topology may be repaired.
    Unroutable,
    /// It was refused too often, and waits for a person.
    Parked,
}

impl OutboxState {
    /// All states.
    pub const ALL: [Self; 5] = [Self::Ready, Self::Waiting, Self::Blocked, Self::Unroutable, Self::Parked];

    /// Its word, in the database and elsewhere.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Ready => "ready",
            Self::Waiting => "waiting",
            Self::Blocked => "blocked",
            Self::Unroutable => "unroutable",
            Self::Parked => "parked",
        }
    }

    /// The state of this word.
    #[must_use]
    pub fn parse(word: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|state| state.as_str() == word)
    }
}

/// A filter of outbox rows.
#[derive(Clone, Debug, Default)]
pub struct OutboxFilter {
    /// Of this tenant.
    pub tenant: String,
    /// In this state.
    pub state: Option<OutboxState>,
    /// To this topic.
    pub topic: Option<Topic>,
}

/// A row of the outbox in a listing.
#[derive(Clone, Debug)]
pub struct OutboxRow {
    /// The row.
    pub id: i64,
    /// The state.
    pub state: OutboxState,
    /// The message.
    pub envelope: Envelope,
    /// How many attempts have failed.
    pub failures: u32,
    /// The last error.
    pub error: Option<String>,
    /// When it is tried next, if it waits for a time.
    pub due_at: Option<Timestamp>,
}

/// A page of the outbox, oldest first.
#[derive(Clone, Debug)]
pub struct OutboxListing {
    /// The rows.
    pub items: Vec<OutboxRow>,
    /// Unreadable rows of the page, oldest first.
    pub unreadable: Vec<UnreadableMessage>,
    /// Where the next page begins.
    pub next: Option<i64>,
}

/// A row of the outbox that this version cannot read: damaged, or written by a newer version or with another key. The
/// columns that can be read, as stored.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UnreadableMessage {
    /// The row.
    pub id: i64,
    /// The message's id.
    pub message_id: String,
    /// The word of its state.
    pub state: String,
    /// The destination.
    pub topic: String,
    /// The kind of message.
    pub kind: String,
    /// When it was put.
    pub put_at: Timestamp,
    /// Why it cannot be read.
    pub why: String,
}

/// Counts of the outbox, over all tenants.
#[derive(Clone, Debug, Default)]
pub struct Backlog {
    /// Rows by state. Counting stops at [`Backlog::MOST`], so that it costs the same however many there are.
    pub counts: Vec<(OutboxState, u64)>,
    /// When the oldest ready row was put.
    pub oldest: Option<Timestamp>,
}

impl Backlog {
    /// Where counting stops.
    pub const MOST: u64 = 10_000;
}
