//! The traits of a database, split by caller.
//!
//! - [`TimeSource`]: everything that compares times
//! - [`Transactions`]: callers that work in transactions of their own
//! - [`Operations`]: the ledger, which changes operations
//! - [`Look`]: programs and people that look at operations
//! - [`Sweep`]: the sweep
//! - [`Store`]: all of these; a [`Ledger`](crate::Ledger) needs a `Store`
//!
//! A store keeps rows and moves them by the rules of [`machine`](crate::machine); it decides
//! nothing itself. The conformance suite in `semel-testkit` is its definition.
//!
//! Messages ask for more: see [`messaging`](crate::messaging). Callers with a store of a concrete type import all
//! methods by [`prelude`](crate::prelude).

mod look;
mod operations;
mod sweep;
mod take;
mod transactions;
mod wake;

pub use look::{Glance, Look, MOST_NOTES, Story};
pub use operations::{
    AnswerCount, Applied, Decision, Ended, LeaseWrite, Operations, SeenAgain, complete_then_commit, two_commits,
};
pub use sweep::{Sweep, Swept, Trouble};
pub use take::{Limits, Take, Want};
pub use transactions::{Commit, Transactions};
pub use wake::{DueNews, DueTeller, DueWake};

use crate::{Result, Timestamp};

/// All that a ledger needs of a database. Implement the traits it is made of.
pub trait Store: Operations + Look + Sweep {}

impl<S: Operations + Look + Sweep> Store for S {}

/// The time of a database, by which leases and due times are compared.
pub trait TimeSource: Clone + Send + Sync + 'static {
    /// The database's time.
    fn now(&self) -> impl Future<Output = Result<Timestamp>> + Send;
}
