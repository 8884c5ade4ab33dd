//! Reading operations.

use super::TimeSource;
use crate::{
    Fence, Key, Operation, Result, Scope, State, Token,
    journal::{Note, Repeat, Repeats},
    look::{Count, DayTally, DueKind, Filter, Listing, Page, Tallied, Tally, TallyFilter},
};

/// Reads of operations, for programs and people. Changes nothing.
pub trait Look: TimeSource {
    /// The states of operations that callers wait for.
    fn glance(&self, ids: Vec<i64>) -> impl Future<Output = Result<Vec<Glance>>> + Send;

    /// One operation by id, within a tenant; with its archived data, if any.
    fn by_id(&self, tenant: &str, id: i64) -> impl Future<Output = Result<Option<Operation>>> + Send;

    /// One operation by key; with its archived data, if any.
    fn by_key(&self, scope: &Scope, key: &Key) -> impl Future<Output = Result<Option<Operation>>> + Send;

    /// The kinds and tenants of a service with operations that are due now or later, ordered by kind and tenant (by
    /// bytes), after `after`; at most [`DueKind::MOST`]. The cost depends on the number of kinds, not on the number of
    /// operations. Expired operations are included until the sweep removes them.
    fn due_kinds(&self, service: &str, after: (&str, &str)) -> impl Future<Output = Result<Vec<DueKind>>> + Send;

    /// A page of operations. A filter by state reads the leases or the backlog; otherwise it reads an index, by the
    /// last label that is set or by scope, from the newest until the page is full. Archived operations are at the old
    /// end of these indexes, so the last page of a listing without them reads over all of them. An unreadable operation
    /// is listed as such.
    fn list(&self, filter: &Filter, page: Page) -> impl Future<Output = Result<Listing>> + Send;

    /// The live leases of a request that was [sent again](crate::Ledger::take_up_to), by its [kept](Token::kept) token:
    /// operation and fence, in the order of the fences.
    fn taken_under(&self, token: Token) -> impl Future<Output = Result<Vec<(i64, Fence)>>> + Send;

    /// The notes of an operation, oldest first, and its repeats. Returns the newest [`MOST_NOTES`] notes.
    fn journal(&self, id: i64) -> impl Future<Output = Result<Story>> + Send;

    /// The counters of a tenant since an hour, folded and not yet folded.
    fn counts(&self, tenant: &str, since_hour: i64) -> impl Future<Output = Result<Vec<Count>>> + Send;

    /// The counters of a tenant summed over hours, by what was counted and by [`TallyBy`](crate::look::TallyBy); folded
    /// and not yet folded, in one snapshot. It reads counters and deltas, no operations: an hour with millions of
    /// operations costs as much as an hour with one.
    fn tally(&self, filter: &TallyFilter) -> impl Future<Output = Result<Tallied<Tally>>> + Send;

    /// As [`tally`](Self::tally), by day and by what was counted.
    fn tally_days(&self, filter: &TallyFilter) -> impl Future<Output = Result<Tallied<DayTally>>> + Send;
}

/// The part of an operation that a waiter needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Glance {
    /// The operation.
    pub id: i64,
    /// Its state.
    pub state: State,
    /// Its fence.
    pub fence: Fence,
    /// Whether it runs under a lease that has not expired.
    pub live: bool,
}

/// The most notes that are returned: the newest. An operation that is released for days has more.
pub const MOST_NOTES: usize = 1000;

/// The newest notes of an operation, oldest first, and its repeats.
pub type Story = (Vec<Note>, Vec<(Repeat, Repeats)>);
