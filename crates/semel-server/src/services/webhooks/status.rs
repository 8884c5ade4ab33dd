//! The answers to deliveries.

/// The status in a 200 answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Status {
    /// It took effect now.
    Processed,
    /// It is stored, and takes effect without a redelivery.
    Accepted,
    /// It took effect before, or newer data did.
    Skipped,
    /// Another run processes it. If that fails, a worker runs it again without a redelivery.
    Rejected,
    /// It failed as often as allowed.
    MaxRetries,
    /// Too many of its runs were lost, or a person parked it.
    Parked,
}

impl Status {
    pub(super) const fn word(self) -> &'static str {
        match self {
            Self::Processed => "processed",
            Self::Accepted => "accepted",
            Self::Skipped => "skipped",
            Self::Rejected => "rejected",
            Self::MaxRetries => "max_retries",
            Self::Parked => "parked",
        }
    }
}
