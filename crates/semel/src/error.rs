//! What can break. What an operation answers (in flight, mismatch, lease lost) is never an error.

/// Machinery that broke, or input that was refused before anything was claimed.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The input fits no rule; nothing was claimed.
    #[error("{0}")]
    Invalid(String),
    /// The store cannot be reached or refuses work for now; nothing was claimed, or what was asked
    /// did not happen.
    #[error("the store is unavailable: {0}")]
    Unavailable(String),
    /// A broker that is not the database cannot be reached, or refuses work for now; the text names it.
    #[error("the broker is unavailable: {0}")]
    BrokerUnavailable(String),
    /// The connection was lost at a moment when the write may or may not have been made, and the
    /// store could not be asked again in time.
    #[error("the outcome is unknown: {0}")]
    OutcomeUnknown(String),
    /// The store refused this very item (and would refuse it again).
    #[error("the store refused it: {0}")]
    Refused(String),
    /// A stored row that was asked for cannot be read by this version, or is damaged.
    #[error("a stored row cannot be read: {0}")]
    Corrupt(&'static str),
    /// The engine or its store broke a rule of its own, such as one answer too few. It says nothing about any row.
    #[error("the ledger contradicts itself: {0}")]
    Contradiction(&'static str),
    /// The ledger was called from inside a transaction of its own: on SQLite that would wait for
    /// itself, on PostgreSQL it would hold a connection while waiting.
    #[error("the ledger cannot be used inside a transaction; do it before or after")]
    InsideTransaction,
    /// The ledger is stopping and takes nothing new.
    #[error("the ledger is stopping")]
    Stopping,
}

impl Error {
    /// Whether the same call may succeed later.
    #[must_use]
    pub fn is_transient(&self) -> bool {
        matches!(self, Self::Unavailable(_) | Self::BrokerUnavailable(_) | Self::OutcomeUnknown(_) | Self::Stopping)
    }

    /// Which of the [reasons] it is that the store is unavailable, if it is one of them.
    #[must_use]
    pub fn reason(&self) -> Option<&'static str> {
        let Self::Unavailable(why) = self else { return None };
        reasons::ALL.into_iter().find(|reason| why.starts_with(reason))
    }
}

/// Why a database cannot be used, in words that may be shown to anybody. The text of an [`Error::Unavailable`] or
/// [`Error::OutcomeUnknown`] begins with one of these where it is the reason.
pub mod reasons {
    /// It does not answer.
    pub const AWAY: &str = "the database cannot be reached";
    /// Its disk has no room left, or does not take what is written.
    pub const DISK_FULL: &str = "the disk of the database is full or broken";
    /// It can be read and not written.
    pub const READ_ONLY: &str = "the database is read-only";
    /// The server has no connection left for this node.
    pub const NO_CONNECTION: &str = "the database server has no connection left";
    /// A file of it was deleted or replaced.
    pub const FILE_LOST: &str = "a file of the database is gone";
    /// A process outside of Semel's turns keeps the lock of the file.
    pub const FILE_HELD: &str = "another process holds the database";

    pub(super) const ALL: [&str; 6] = [AWAY, DISK_FULL, READ_ONLY, NO_CONNECTION, FILE_LOST, FILE_HELD];
}

/// The engine's result.
pub type Result<T, E = Error> = std::result::Result<T, E>;
