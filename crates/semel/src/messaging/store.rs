//! What messages ask of a database, beyond what the ledger asks of it.

use std::{sync::Arc, time::Duration};

use tokio::sync::Notify;

use super::{DeadLetter, Envelope, LetterCount, LetterFilter, LetterPage, Message, NewLetter, Retry, RetryRow, Topic};
use crate::{Result, Store, Timestamp};

/// Wakes whoever waits for new rows. Cheap to clone; wakes in between are remembered, as one.
#[derive(Clone, Default)]
pub struct Wake(Arc<Notify>);

impl Wake {
    /// There is something new.
    pub fn wake(&self) {
        self.0.notify_one();
    }

    /// Whether somebody else has it too. If not, nobody can be waiting.
    #[must_use]
    pub fn is_shared(&self) -> bool {
        Arc::strong_count(&self.0) > 1
    }

    /// Waits until there is, or was since the last wait.
    pub async fn woken(&self) {
        self.0.notified().await;
    }
}

/// Where a message in the outbox stands. One that was published is there no more.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OutboxState {
    /// To be published as soon as may be; or a relay is at it.
    Ready,
    /// To be published at a time: it asked for it, or the last try failed.
    Waiting,
    /// An earlier message of its ordering key is still there.
    Blocked,
    /// No queue wanted it. It is tried again every so often, for the topology may be mended.
    Unroutable,
    /// It was refused too often, and waits for a person.
    Parked,
}

impl OutboxState {
    /// All there are.
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

/// Rows that a relay has leased, all until the same time.
#[derive(Clone, Debug, Default)]
pub struct Taken {
    /// The rows, at most one per ordering key.
    pub rows: Vec<Lent>,
    /// The number that says that they are ours: every mark names it.
    pub token: i64,
    /// Whether a limit was reached, so that there may be more at once.
    pub more: bool,
}

impl Taken {
    /// How many bytes of bodies are taken together, but for the last one: so many are in memory until they are marked.
    pub const MOST_BYTES: usize = 16 << 20;
}

/// A row of the outbox in a relay's hands.
#[derive(Clone, Debug)]
pub struct Lent {
    /// The row.
    pub id: i64,
    /// How many tries have failed.
    pub failures: u32,
    /// What is to be published.
    pub envelope: Envelope,
}

/// What a relay says of a row that it leased.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Mark {
    /// The broker has it: the row goes, and the next of its ordering key is ready.
    Sent,
    /// Not yet; nothing was wrong with the message, so it does not count as a failure.
    PutBack,
    /// It failed, and is to be tried again after a while.
    Retry {
        /// Why.
        error: String,
        /// After how long.
        after: Duration,
    },
    /// Nobody knows what became of it; to be tried again after a while. It does not count as a failure.
    Later {
        /// Why.
        error: String,
        /// After how long.
        after: Duration,
    },
    /// No queue wants it; to be tried again after a while.
    Unroutable {
        /// What the broker said.
        error: String,
        /// After how long.
        after: Duration,
    },
    /// It failed too often: a person decides.
    Park {
        /// Why.
        error: String,
    },
}

/// A mark and the row that it is for.
#[derive(Clone, Debug)]
pub struct MarkRow {
    /// The row.
    pub id: i64,
    /// The token of the lease; another relay's row stays as it is.
    pub token: i64,
    /// What is said of it.
    pub mark: Mark,
}

/// What tending the outbox has found.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Tended {
    /// How many rows became ready.
    pub ready: u64,
    /// When the next one will be.
    pub next_due: Option<Timestamp>,
    /// Whether a limit was reached, so that there may be more at once.
    pub more: bool,
}

/// Which rows of the outbox to list.
#[derive(Clone, Debug, Default)]
pub struct OutboxFilter {
    /// Of this tenant.
    pub tenant: String,
    /// In this state.
    pub state: Option<OutboxState>,
    /// To this topic.
    pub topic: Option<Topic>,
}

/// A row of the outbox, for whoever looks.
#[derive(Clone, Debug)]
pub struct OutboxRow {
    /// The row.
    pub id: i64,
    /// Where it stands.
    pub state: OutboxState,
    /// The message.
    pub envelope: Envelope,
    /// How many tries have failed.
    pub failures: u32,
    /// Why the last one did.
    pub error: Option<String>,
    /// When it is to be tried, if it waits for a time.
    pub due_at: Option<Timestamp>,
}

/// A page of the outbox, oldest first.
#[derive(Clone, Debug)]
pub struct OutboxListing {
    /// The rows.
    pub items: Vec<OutboxRow>,
    /// Those of the page that cannot be read, oldest first.
    pub unreadable: Vec<UnreadableMessage>,
    /// Where the next page begins.
    pub next: Option<i64>,
}

/// A row of the outbox that this version cannot read: damaged, or written by a newer version or with another key. What
/// can be told of it all the same, as it is stored.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UnreadableMessage {
    /// The row.
    pub id: i64,
    /// The message's id.
    pub message_id: String,
    /// The word of its state.
    pub state: String,
    /// Where it is to go.
    pub topic: String,
    /// Of which kind.
    pub kind: String,
    /// When it was put.
    pub put_at: Timestamp,
    /// What is wrong with it.
    pub why: String,
}

/// How much waits in the outbox, over all tenants.
#[derive(Clone, Debug, Default)]
pub struct Backlog {
    /// Rows by state. Counting stops at [`Backlog::MOST`], so that looking costs the same however many there are.
    pub counts: Vec<(OutboxState, u64)>,
    /// When the oldest row that is ready was put.
    pub oldest: Option<Timestamp>,
}

impl Backlog {
    /// Where counting stops.
    pub const MOST: u64 = 10_000;
}

/// What a round of re-driving did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Redriven {
    /// How many letters were given back to their consumers.
    pub moved: u64,
    /// The last one, for the next round to go on from.
    pub last: Option<i64>,
    /// Whether there are more that match.
    pub more: bool,
}

/// What messages ask of a database. Like [`Store`]'s, all answers come after what they tell of is durable.
pub trait MessageStore: Store {
    /// Puts messages into the outbox, inside a transaction: they go out if it commits, and never were if it does not.
    /// Their ordering keys are locked until then.
    fn put(&self, tx: &Self::Tx, messages: Vec<Message>) -> impl Future<Output = Result<()>> + Send;

    /// Leases up to `limit` rows that are ready, oldest first, and no more of them than [`Taken::MOST_BYTES`].
    fn take(&self, limit: u32, lease: Duration) -> impl Future<Output = Result<Taken>> + Send;

    /// Leases rows for another while that a relay still has in its hands, each given by row and token; the ids of those
    /// that are still its own. A row that another transaction has locked keeps its present lease.
    fn hold(&self, rows: Vec<(i64, i64)>, lease: Duration) -> impl Future<Output = Result<Vec<i64>>> + Send;

    /// Says what became of leased rows; how many others became ready by that. A row that was leased anew since is
    /// left alone. Sending a batch again is harmless.
    fn mark(&self, marks: Vec<MarkRow>) -> impl Future<Output = Result<u64>> + Send;

    /// Makes ready what is due and what is blocked by nothing any more; one bounded round.
    fn tend(&self) -> impl Future<Output = Result<Tended>> + Send;

    /// Wakes the relay of this process when a transaction with messages has committed, here or, where the database
    /// can tell, at another node.
    fn outbox_wake(&self) -> Wake;

    /// When a message with a receipt was published; `None` for one that was not, or so long ago that it is forgotten.
    fn receipt(&self, tenant: &str, id: super::MessageId) -> impl Future<Output = Result<Option<Timestamp>>> + Send;

    /// A page of the outbox, after row `after`, oldest first. One row that cannot be read hides no other.
    fn outbox(
        &self,
        filter: &OutboxFilter,
        after: Option<i64>,
        limit: u32,
    ) -> impl Future<Output = Result<OutboxListing>> + Send;

    /// Makes a parked, unroutable or waiting row ready: a person's action, audited. Whether there was one.
    fn redrive_outbox(
        &self,
        tenant: &str,
        id: super::MessageId,
        actor: &str,
    ) -> impl Future<Output = Result<bool>> + Send;

    /// Removes a parked or unroutable row, so that those behind it can go: a person's action, audited.
    fn skip_outbox(
        &self,
        tenant: &str,
        id: super::MessageId,
        actor: &str,
        reason: &str,
    ) -> impl Future<Output = Result<bool>> + Send;

    /// How much waits.
    fn backlog(&self) -> impl Future<Output = Result<Backlog>> + Send;

    /// Keeps a message that could not be handled, to be tried again or as a dead letter, in its own commit. One that
    /// is kept already (same tenant, consumer, key and fingerprint) stays as it is.
    fn put_letter(&self, letter: NewLetter) -> impl Future<Output = Result<()>> + Send;

    /// Leases up to `limit` retries of a consumer that are due, and counts that they are begun. One that cannot be read
    /// is put off, not counted, and keeps no other waiting.
    fn take_retries(
        &self,
        consumer: &str,
        limit: u32,
        lease: Duration,
    ) -> impl Future<Output = Result<Vec<RetryRow>>> + Send;

    /// Removes a retry in the transaction of its effect. `false` means that the lease was lost: roll back.
    fn retry_done(&self, tx: &Self::Tx, id: i64, token: i64) -> impl Future<Output = Result<bool>> + Send;

    /// Gives back a retry that was taken and not begun after all: it is due now, and its start is not counted. `false`
    /// means that the lease was lost.
    fn retry_not_begun(&self, id: i64, token: i64) -> impl Future<Output = Result<bool>> + Send;

    /// Says that a retry failed: again later, or dead. `false` means that the lease was lost.
    fn retry_failed(
        &self,
        id: i64,
        token: i64,
        reason: &str,
        retry: Retry,
    ) -> impl Future<Output = Result<bool>> + Send;

    /// When the next retry of a consumer is due.
    fn next_retry(&self, consumer: &str) -> impl Future<Output = Result<Option<Timestamp>>> + Send;

    /// Wakes the consumers of this process when retries were put or letters re-driven.
    fn retry_wake(&self) -> Wake;

    /// A page of dead letters, newest first. One that cannot be read hides no other.
    fn letters(
        &self,
        filter: &LetterFilter,
        after: Option<i64>,
        limit: u32,
    ) -> impl Future<Output = Result<LetterPage>> + Send;

    /// One dead letter.
    fn letter(&self, tenant: &str, id: i64) -> impl Future<Output = Result<Option<DeadLetter>>> + Send;

    /// How many dead letters match, counted up to [`Backlog::MOST`].
    fn count_letters(&self, filter: &LetterFilter) -> impl Future<Output = Result<LetterCount>> + Send;

    /// Gives up to `limit` dead letters that match, with ids above `after`, back to their consumers, with no failures
    /// counted: a person's action, audited. Letters that die from now on are not among them if the filter ends before.
    fn redrive_letters(
        &self,
        filter: &LetterFilter,
        after: Option<i64>,
        limit: u32,
        actor: &str,
    ) -> impl Future<Output = Result<Redriven>> + Send;

    /// Removes a dead letter: a person's action, audited with the reason. Whether there was one.
    fn discard_letter(
        &self,
        tenant: &str,
        id: i64,
        actor: &str,
        reason: &str,
    ) -> impl Future<Output = Result<bool>> + Send;
}
