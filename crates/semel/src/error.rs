//! Errors. Answers of an operation (in flight, mismatch, lease lost) are never errors.

/// A failure of the machinery, or input that was refused before anything was claimed.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// Invalid input; nothing was claimed.
    #[error("{0}")]
    Invalid(String),
    /// The store cannot be reached or refuses work for now; nothing was claimed, or the call had no effect.
    #[error("the store is unavailable: {0}")]
    Unavailable(String),
    /// A separate broker cannot be reached, or refuses work for now; the text names it.
    #[error("the broker is unavailable: {0}")]
    BrokerUnavailable(String),
    /// The connection was lost while the write may or may not have been made, and the result could not be read
    /// back in time.
    #[error("the outcome is unknown: {0}")]
    OutcomeUnknown(String),
    /// The store refused this item, and would refuse it again.
    #[error("the store refused it: {0}")]
    Refused(String),
    /// A requested row is damaged, or of a version that this one cannot read.
    #[error("a stored row cannot be read: {0}")]
    Corrupt(&'static str),
    /// A bug of the engine or its store, such as a missing answer. It says nothing about any row.
    #[error("the ledger contradicts itself: {0}")]
    Contradiction(&'static str),
    /// The ledger was called from inside a transaction of its own: on SQLite the call would wait for itself, on
    /// PostgreSQL it would hold a connection while waiting.
    #[error("the ledger cannot be used inside a transaction; do it before or after")]
    InsideTransaction,
    /// The ledger is stopping and accepts nothing new.
    #[error("the ledger is stopping")]
    Stopping,
}

impl Error {
    /// Whether the same call may succeed later.
    #[must_use]
    pub fn is_transient(&self) -> bool {
        matches!(self, Self::Unavailable(_) | Self::BrokerUnavailable(_) | Self::OutcomeUnknown(_) | Self::Stopping)
    }

    /// The [reason](reasons) why the store is unavailable, if it is known.
    #[must_use]
    pub fn reason(&self) -> Option<&'static str> {
        let Self::Unavailable(why) = self else { return None };
        reasons::ALL.into_iter().find(|reason| why.starts_with(reason))
    }
}

/// The reasons why a database cannot be used, in texts that may be shown to any caller. The text of an
/// [`Error::Unavailable`] or [`Error::OutcomeUnknown`] begins with one of these if it applies.
pub mod reasons {
    /// It does not answer.
    pub const AWAY: &str = "the database cannot be reached";
    /// Its disk is full or broken.
    pub const DISK_FULL: &str = "the disk of the database is full or broken";
    /// It is read-only.
    pub const READ_ONLY: &str = "the database is read-only";
    /// The server has no connection left for this node.
    pub const NO_CONNECTION: &str = "the database server has no connection left";
    /// A file of it was deleted or replaced.
    pub const FILE_LOST: &str = "a file of the database is gone";
    /// Another process holds the lock of the file.
    pub const FILE_HELD: &str = "another process holds the database";

    pub(super) const ALL: [&str; 6] = [AWAY, DISK_FULL, READ_ONLY, NO_CONNECTION, FILE_LOST, FILE_HELD];
}

/// The engine's result.
pub type Result<T, E = Error> = std::result::Result<T, E>;
