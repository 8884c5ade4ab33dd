//! Whether a webhook was signed by who claims to have sent it.
//!
//! A [`Verifier`] is built once per source and then asked about each delivery: its headers, the bytes of its body as
//! they came over the wire, and the time. It keeps nothing and asks nobody; that a delivery came *before* is the
//! ledger's to know.
//!
//! ```
//! use std::time::{Duration, SystemTime};
//!
//! use semel_http::webhooks::{DEFAULT_TOLERANCE, Refused, Verifier};
//!
//! // The new secret and the old one: both count while a secret is being changed.
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
//! A verifier that would let everything pass cannot be built: [`Mistakes`] names what is wrong with its settings.

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

/// How far a signed timestamp may be from now, either way, unless set: what Stripe and Standard Webhooks use.
pub const DEFAULT_TOLERANCE: Duration = Duration::from_secs(300);

/// The longest signature header, in bytes. Servers commonly refuse longer ones; an honest one has a few hundred.
pub const MAX_HEADER_BYTES: usize = 8 * 1024;

/// The most signatures that one delivery may carry. A sender adds one per secret in use: two, while it changes them.
pub const MAX_SIGNATURES: usize = 32;
