//! `Idempotency-Key` for any tower HTTP service, on Semel's ledger.
//!
//! A client that times out sends its POST again with the same key. It gets the same answer, and the
//! request takes effect once. [`Idempotency`] makes a [`tower::Layer`] for each [`Route`]:
//!
//! - [`Route::leased`]: the handler may do anything; the ledger records that it ran.
//! - [`Route::atomic`]: the handler works in the request's [`Transaction`]; its rows and the stored
//!   answer are one commit.
//!
//! Put the layer inside of authentication, authorisation and rate limits, so that a caller without
//! the right gets no stored answer, and inside of compression and CORS, whose headers must not be
//! stored. The layer needs the tenant of a request: a [`Principal`] in the request's extensions, or
//! [`Idempotency::for_everyone`].
//!
//! [`webhooks`] is independent of the layer: it verifies the signatures of webhook deliveries.

mod answer;
mod ask;
mod body;
mod bound;
mod caller;
mod claim;
mod cookies;
mod credentials;
mod fingerprint;
pub mod headers;
pub mod key;
mod layer;
mod principal;
pub mod problem;
mod refusal;
mod replay;
mod route;
mod run;
mod serve;
mod waiting;
pub mod webhooks;

pub use ask::OTHER_METHOD;
pub use body::Body;
pub use caller::{Attempt, Reason, Reference, Transaction, Verdict};
pub use credentials::Credentials;
pub use layer::{Idempotency, IdempotencyLayer, IdempotencyService};
pub use principal::{Authenticate, BoxFuture, Principal, Role};
pub use problem::Problem;
pub use route::{Mode, Rebuild, Route, may_not_repeat};
