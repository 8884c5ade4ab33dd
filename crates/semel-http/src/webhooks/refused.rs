//! Why a delivery does not count as signed.

use std::{error::Error, fmt};

use http::HeaderName;

use super::{MAX_HEADER_BYTES, MAX_SIGNATURES};

/// Why a delivery was refused. Its sentence repeats nothing of what was sent, and no secret.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Refused {
    /// A header that the scheme needs is not there.
    Missing {
        /// Which one.
        header: HeaderName,
    },
    /// A header came twice. Whoever reads the first and whoever reads the last would see different deliveries.
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
    /// A header cannot be read.
    Malformed {
        /// Which one.
        header: HeaderName,
        /// What is wrong with it.
        why: &'static str,
    },
    /// Signed, but with none of the schemes that count: only a `v0`, say.
    Unsupported {
        /// The header that has no signature that counts.
        header: HeaderName,
    },
    /// No signature is right: another secret, or other bytes than those that were signed.
    Wrong,
    /// Rightly signed, but longer ago than the tolerance: late, or sent again by who listened.
    TooOld {
        /// How many seconds ago.
        age: u64,
        /// The tolerance in seconds.
        tolerance: u64,
    },
    /// Rightly signed, but further in the future than the tolerance: one of the clocks is wrong.
    TooNew {
        /// How many seconds ahead.
        ahead: u64,
        /// The tolerance in seconds.
        tolerance: u64,
    },
}

impl Refused {
    /// All that [`word`](Self::word) can say.
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
            Self::Unsupported { header } => write!(f, "the header {header} has no signature of a scheme that counts"),
            Self::Wrong => f.write_str("no signature fits these bytes and any of the secrets"),
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
