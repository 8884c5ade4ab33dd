//! The reasons why a delivery is refused.

use std::{error::Error, fmt};

use http::HeaderName;

use super::{MAX_HEADER_BYTES, MAX_SIGNATURES};

/// The reason why a delivery is refused. Its text repeats nothing of the request, and no secret.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Refused {
    /// A required header is missing.
    Missing {
        /// Which one.
        header: HeaderName,
    },
    /// A header is present twice. Readers of the first and of the last one would see different deliveries.
    Repeated {
        /// Which one.
        header: HeaderName,
    },
    /// The signature header is longer than [`MAX_HEADER_BYTES`].
    TooLong {
        /// Which one.
        header: HeaderName,
    },
    /// There are more signatures than [`MAX_SIGNATURES`].
    TooMany,
    /// A header cannot be parsed.
    Malformed {
        /// Which one.
        header: HeaderName,
        /// The reason.
        why: &'static str,
    },
    /// There are signatures, but none of an accepted scheme: only a `v0`, say.
    Unsupported {
        /// The header without an accepted signature.
        header: HeaderName,
    },
    /// No signature matches: another secret, or other bytes than those that were signed.
    Wrong,
    /// A valid signature, but older than the tolerance: a late delivery, or a replayed one.
    TooOld {
        /// How many seconds ago.
        age: u64,
        /// The tolerance in seconds.
        tolerance: u64,
    },
    /// A valid signature, but further in the future than the tolerance: one of the clocks is wrong.
    TooNew {
        /// How many seconds ahead.
        ahead: u64,
        /// The tolerance in seconds.
        tolerance: u64,
    },
}

impl Refused {
    /// All values of [`word`](Self::word).
    pub const WORDS: [&str; 9] =
        ["missing", "repeated", "too_long", "too_many", "malformed", "unsupported", "wrong", "too_old", "too_new"];

    /// The reason in one word, for counters.
    #[must_use]
    pub fn word(&self) -> &'static str {
        match self {
            Self::Missing { .. } => "missing",
            Self::Repeated { .. } => "repeated",
            Self::TooLong { .. } => "too_long",
            Self::TooMany => "too_many",
            Self::Malformed { .. } => "malformed",
            Self::Unsupported { .. } => "unsupported",
            Self::Wrong => "wrong",
            Self::TooOld { .. } => "too_old",
            Self::TooNew { .. } => "too_new",
        }
    }
}

impl fmt::Display for Refused {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Missing { header } => write!(f, "the header {header} is missing"),
            Self::Repeated { header } => write!(f, "the header {header} was sent more than once"),
            Self::TooLong { header } => write!(f, "the header {header} is longer than {MAX_HEADER_BYTES} bytes"),
            Self::TooMany => write!(f, "the delivery has more than {MAX_SIGNATURES} signatures"),
            Self::Malformed { header, why } => write!(f, "the header {header} cannot be read: {why}"),
            Self::Unsupported { header } => write!(f, "the header {header} has no signature of an accepted scheme"),
            Self::Wrong => f.write_str("no signature matches these bytes and any of the secrets"),
            Self::TooOld { age, tolerance } => {
                write!(f, "the delivery was signed {age} s ago, and {tolerance} s are allowed")
            }
            Self::TooNew { ahead, tolerance } => {
                write!(f, "the delivery was signed {ahead} s in the future, and {tolerance} s are allowed")
            }
        }
    }
}

impl Error for Refused {}
