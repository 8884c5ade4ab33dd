//! Verifies the signatures of webhook deliveries.
//!
//! A [`Verifier`] is built once per source. It checks each delivery: the headers, the raw bytes of the body, and the
//! time. It stores nothing; the ledger deduplicates.
//!
//! ```
//! use std::time::{Duration, SystemTime};
//!
//! use semel_http::webhooks::{DEFAULT_TOLERANCE, Refused, Verifier};
//!
//! // The new secret and the old one: both are valid during a rotation.
//! let verifier = Verifier::stripe(["whsec_new", "whsec_old"], DEFAULT_TOLERANCE)?;
//!
//! let (body, now) = (br#"{"id":"evt_1","object":"event"}"#, SystemTime::now());
//! let headers = verifier.sign(None, now, body)?;
//! assert_eq!(verifier.verify(&headers, body, now)?.secret, 0);
//!
//! assert_eq!(verifier.verify(&headers, b"{}", now), Err(Refused::Wrong));
//! let late = verifier.verify(&headers, body, now + Duration::from_secs(301));
//! assert_eq!(late.unwrap_err().word(), "too_old");
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! A verifier that accepts everything cannot be built: [`Mistakes`] lists the mistakes in its settings.

mod format;
mod mac;
mod mistakes;
mod refused;
mod scheme;
mod secret;
mod template;
mod verifier;

use std::time::Duration;

pub use mistakes::{Mistake, Mistakes};
pub use refused::Refused;
pub use scheme::{Algorithm, Encoding, HmacScheme};
pub use secret::Secret;
pub use verifier::{Verified, Verifier};

/// The default tolerance between a signed timestamp and now, in both directions: that of Stripe and Standard Webhooks.
pub const DEFAULT_TOLERANCE: Duration = Duration::from_secs(300);

/// The longest signature header, in bytes. Servers commonly refuse longer ones; a genuine one has a few hundred.
pub const MAX_HEADER_BYTES: usize = 8 * 1024;

/// The most signatures of one delivery. A sender adds one per valid secret: two during a rotation.
pub const MAX_SIGNATURES: usize = 32;
