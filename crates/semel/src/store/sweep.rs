//! The sweep: what happens to operations that no worker runs.

use crate::Result;

/// The database calls of the sweep.
pub trait Sweep: Clone + Send + Sync + 'static {
    /// One bounded round of the sweep: every phase runs. An unreadable or unwritable row is set aside, and the others
    /// continue. A phase that fails is reported in [`Swept::troubles`], and the other phases run. An error means that
    /// every phase failed.
    fn sweep(&self, limit: u32) -> impl Future<Output = Result<Swept>> + Send;

    /// The first phase of a round alone: ends leases that have expired.
    fn end_expired_leases(&self, limit: u32) -> impl Future<Output = Result<Swept>> + Send;
}

/// The result of one round of the sweep.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Swept {
    /// Expired leases that were ended.
    pub lapsed: u64,
    /// Operations past their retention that were deleted.
    pub expired: u64,
    /// Operations that were archived.
    pub archived: u64,
    /// Counter rows that were folded.
    pub folded: u64,
    /// Unreadable or unwritable rows that were [set aside](crate::look::SetAside).
    pub set_aside: u64,
    /// Phases that failed. The other phases ran nevertheless.
    pub troubles: Vec<Trouble>,
    /// Whether a limit was reached: there may be more to do.
    pub more: bool,
}

/// A phase of the sweep that failed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Trouble {
    /// The phase.
    pub phase: &'static str,
    /// The error of the store.
    pub why: String,
}

impl std::ops::AddAssign for Swept {
    fn add_assign(&mut self, other: Self) {
        self.lapsed += other.lapsed;
        self.expired += other.expired;
        self.archived += other.archived;
        self.folded += other.folded;
        self.set_aside += other.set_aside;
        for trouble in other.troubles {
            if !self.troubles.contains(&trouble) {
                self.troubles.push(trouble);
            }
        }
        self.more = other.more;
    }
}
