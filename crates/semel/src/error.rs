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
    /// The connection was lost at a moment when the write may or may not have been made, and the
    /// store could not be asked again in time.
    #[error("the outcome is unknown: {0}")]
    OutcomeUnknown(String),
    /// The store refused this very item (and would refuse it again).
    #[error("the store refused it: {0}")]
    Refused(String),
    /// A stored row cannot be read by this version.
    #[error("a stored row cannot be read: {0}")]
    Corrupt(&'static str),
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
        matches!(self, Self::Unavailable(_) | Self::OutcomeUnknown(_) | Self::Stopping)
    }
}

/// The engine's result.
pub type Result<T, E = Error> = std::result::Result<T, E>;
