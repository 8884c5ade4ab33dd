//! The outbox, for the relay.

use std::time::Duration;

use super::{super::Envelope, Wake};
use crate::{Result, Timestamp, store::TimeSource};

/// The database calls of a [`Relay`](crate::messaging::Relay).
pub trait RelayStore: TimeSource {
    /// Leases up to `limit` ready rows, oldest first, and at most [`Taken::MOST_BYTES`].
    fn take(&self, limit: u32, lease: Duration) -> impl Future<Output = Result<Taken>> + Send;

    /// Renews leases, each given by row and token; returns the ids of those still held. A row that another transaction
    /// has locked keeps its present lease.
    fn hold(&self, rows: Vec<(i64, i64)>, lease: Duration) -> impl Future<Output = Result<Vec<i64>>> + Send;

    /// Stores the marks of leased rows; returns how many other rows became ready. A row with a newer lease is not
    /// changed. Sending a batch again is harmless.
    fn mark(&self, marks: Vec<MarkRow>) -> impl Future<Output = Result<u64>> + Send;

    /// Makes rows ready that are due or no longer blocked; one bounded round.
    fn tend(&self) -> impl Future<Output = Result<Tended>> + Send;

    /// Wakes the relay of this process when a transaction with messages has committed, here or, if the database can
    /// notify, at another node.
    fn outbox_wake(&self) -> Wake;
}

/// Leased rows, all with the same deadline.
#[derive(Clone, Debug, Default)]
pub struct Taken {
    /// The rows, at most one per ordering key.
    pub rows: Vec<Lent>,
    /// The token of the lease: every mark names it.
    pub token: i64,
    /// Whether a limit was reached: there may be more.
    pub more: bool,
}

impl Taken {
    /// The limit for the bytes of bodies, which the last row may exceed: they are in memory until they are marked.
    pub const MOST_BYTES: usize = 16 << 20;
}

/// A leased row of the outbox.
#[derive(Clone, Debug)]
pub struct Lent {
    /// The row.
    pub id: i64,
    /// How many attempts have failed.
    pub failures: u32,
    /// The message to publish.
    pub envelope: Envelope,
}

/// The mark of a leased row.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Mark {
    /// Confirmed: the row is deleted, and the next of its ordering key becomes ready.
    Sent,
    /// Not sent, through no fault of the message: no failure is counted.
    PutBack,
    /// It failed, and is tried again after a delay.
    Retry {
        /// The error.
        error: String,
        /// The delay.
        after: Duration,
    },
    /// Not confirmed; tried again after a delay. No failure is counted.
    Later {
        /// The error.
        error: String,
        /// The delay.
        after: Duration,
    },
    /// No queue is bound to its topic; tried again after a delay.
    Unroutable {
        /// The broker's text.
        error: String,
        /// The delay.
        after: Duration,
    },
    /// It failed too often: a person decides.
    Park {
        /// The error.
        error: String,
    },
}

/// A mark and the row that it is for.
#[derive(Clone, Debug)]
pub struct MarkRow {
    /// The row.
    pub id: i64,
    /// The token of the lease; a row under another token is not changed.
    pub token: i64,
    /// The mark.
    pub mark: Mark,
}

/// The result of tending the outbox.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Tended {
    /// How many rows became ready.
    pub ready: u64,
    /// When the next row becomes ready.
    pub next_due: Option<Timestamp>,
    /// Whether a limit was reached: there may be more.
    pub more: bool,
}
