//! Messages that could not be handled: retries for consumers, dead letters for people.

use std::time::Duration;

use super::{
    super::{DeadLetter, LetterCount, LetterFilter, LetterPage, NewLetter, Retry, RetryRow},
    Wake,
};
use crate::{Result, Store, Timestamp};

/// The database calls of a [`Consumer`](crate::messaging::Consumer): a ledger, and the retries.
pub trait ConsumerStore: Store {
    /// Stores a message that could not be handled, as a retry or a dead letter, in its own commit. An existing one
    /// (same tenant, consumer, key and fingerprint) is not changed.
    fn put_letter(&self, letter: NewLetter) -> impl Future<Output = Result<()>> + Send;

    /// Leases up to `limit` due retries of a consumer, and counts their starts. An unreadable one is postponed, not
    /// counted, and delays no other.
    fn take_retries(
        &self,
        consumer: &str,
        limit: u32,
        lease: Duration,
    ) -> impl Future<Output = Result<Vec<RetryRow>>> + Send;

    /// Removes a retry in the transaction of its effect. `false` means that the lease was lost: roll back.
    fn retry_done(&self, tx: &Self::Tx, id: i64, token: i64) -> impl Future<Output = Result<bool>> + Send;

    /// Releases a retry that was taken but not begun: it is due now, and its start is not counted. `false` means that
    /// the lease was lost.
    fn retry_not_begun(&self, id: i64, token: i64) -> impl Future<Output = Result<bool>> + Send;

    /// Stores the failure of a retry: retry later, or dead letter. `false` means that the lease was lost.
    fn retry_failed(
        &self,
        id: i64,
        token: i64,
        reason: &str,
        retry: Retry,
    ) -> impl Future<Output = Result<bool>> + Send;

    /// When the next retry of a consumer is due.
    fn next_retry(&self, consumer: &str) -> impl Future<Output = Result<Option<Timestamp>>> + Send;

    /// Wakes the consumers of this process when retries were stored or letters re-driven.
    fn retry_wake(&self) -> Wake;
}

/// The database calls for people who inspect and re-drive dead letters.
pub trait LetterStore: Clone + Send + Sync + 'static {
    /// A page of dead letters, newest first. An unreadable one hides no other.
    fn letters(
        &self,
        filter: &LetterFilter,
        after: Option<i64>,
        limit: u32,
    ) -> impl Future<Output = Result<LetterPage>> + Send;

    /// One dead letter.
    fn letter(&self, tenant: &str, id: i64) -> impl Future<Output = Result<Option<DeadLetter>>> + Send;

    /// How many dead letters match, counted up to [`Backlog::MOST`](super::Backlog::MOST).
    fn count_letters(&self, filter: &LetterFilter) -> impl Future<Output = Result<LetterCount>> + Send;

    /// Re-drives up to `limit` matching dead letters with ids above `after`: they become retries with no failures
    /// counted. A person's action, audited. If the filter has an end time, letters that die later are not included.
    fn redrive_letters(
        &self,
        filter: &LetterFilter,
        after: Option<i64>,
        limit: u32,
        actor: &str,
    ) -> impl Future<Output = Result<Redriven>> + Send;

    /// Removes a dead letter: a person's action, audited with the reason. False if there was none.
    fn discard_letter(
        &self,
        tenant: &str,
        id: i64,
        actor: &str,
        reason: &str,
    ) -> impl Future<Output = Result<bool>> + Send;
}

/// The result of a round of re-driving.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Redriven {
    /// How many letters were re-driven.
    pub moved: u64,
    /// The last letter; the next round continues after it.
    pub last: Option<i64>,
    /// Whether more letters match.
    pub more: bool,
}
