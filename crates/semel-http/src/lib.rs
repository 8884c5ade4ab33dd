//! `Idempotency-Key` for any tower HTTP service, on Semel's ledger.
//!
//! A client that times out sends its POST again and gets the same answer, with the effect made once.
//! [`Idempotency`] makes a [`tower::Layer`] for each [`Route`]:
//!
//! - [`Route::leased`]: the handler does what it likes; the ledger knows that it ran.
//! - [`Route::atomic`]: the handler works in the request's [`Transaction`]; what it writes and the
//!   answer that is kept commit together.
//!
//! The layer belongs inside of authentication, authorisation and rate limits (who may not ask is not
//! answered from memory) and inside of compression and CORS (which are about a connection, not about
//! an answer). It needs to know whose request it is: a [`Principal`] in the request's extensions, or
//! [`Idempotency::for_everyone`].
//!
//! [`webhooks`] stands by itself: it tells whether a delivery was signed by who claims to have sent it.

mod answer;
mod body;
mod caller;
mod cookies;
mod credentials;
mod fingerprint;
pub mod key;
mod layer;
mod principal;
pub mod problem;
mod route;
mod run;
mod waiting;
pub mod webhooks;

pub use body::Body;
pub use caller::{Attempt, Reason, Reference, Transaction, Verdict};
pub use credentials::Credentials;
pub use layer::{Idempotency, IdempotencyLayer, IdempotencyService, OTHER_METHOD};
pub use principal::{Authenticate, BoxFuture, Principal, Role};
pub use problem::Problem;
pub use route::{Mode, Rebuild, Route, may_not_repeat};
