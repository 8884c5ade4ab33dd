//! Callers' transactions.

use std::time::Duration;

use crate::Result;

/// Result of a commit.
#[derive(Clone, Debug)]
pub enum Commit {
    /// It is durable.
    Done,
    /// The connection was lost during the commit: it may or may not be durable. Ask with
    /// [`Operations::read_back`](super::Operations::read_back), never guess.
    Unknown(String),
    /// The database refused the writes, and would do so again; nothing was committed.
    Refused(String),
    /// A transient failure of the database (a deadlock, a full disk); nothing was committed, and a retry may succeed.
    Unavailable(String),
}

/// Transactions of callers, in which their own writes commit together with the ledger's.
pub trait Transactions: Clone + Send + Sync + 'static {
    /// A transaction of a caller: a handle that can be shared with the code that uses it.
    type Tx: Clone + Send + Sync + 'static;

    /// The time limit of a caller's transaction, however long its lease is.
    fn longest_transaction(&self) -> Duration;

    /// Opens a transaction that is rolled back automatically after `limit`.
    fn begin(&self, limit: Duration) -> impl Future<Output = Result<Self::Tx>> + Send;

    /// Commits. The handle and its clones are unusable afterwards.
    fn commit(&self, tx: &Self::Tx) -> impl Future<Output = Commit> + Send;

    /// Rolls back. The handle and its clones are unusable afterwards.
    fn roll_back(&self, tx: &Self::Tx) -> impl Future<Output = ()> + Send;
}
