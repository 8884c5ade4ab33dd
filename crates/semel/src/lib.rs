//! Semel: operations that take effect once.
//!
//! Software retries: a client times out and sends again, a broker redelivers, a worker is killed
//! half-way. The [`Ledger`] makes each such operation take effect once all the same. Ask it with a
//! [`Key`], and it answers one of seven things ([`Claim`]); whoever gets the [`Lease`] does the
//! work and settles it, everybody else gets the outcome.
//!
//! The parts, in reading order:
//!
//! - [`Scope`], [`Key`], [`Fingerprint`], [`Policy`], [`Operation`]: the nouns
//! - [`machine`]: the life of an operation as one pure function
//! - [`Work`] and [`Claim`]: what is asked, and the seven answers
//! - [`Lease`]: the right to execute; [`Ledger::run`] and [`Ledger::run_atomic`] do it all
//! - [`lane`]: group commit
//! - [`store`]: what a database must do (`semel-store` has SQLite and PostgreSQL)
//! - [`journal`] and [`look`]: the story of an operation, listings and counters
//! - [`messaging`]: outbox, relay, broker, inbox
//! - [`crash`]: where a process may die, each with a test that kills it there

mod aside;
mod atomic;
mod canonical_json;
mod claim;
pub mod crash;
mod engine;
mod error;
mod fingerprint;
pub mod journal;
pub mod lane;
mod lanes;
mod lease;
mod ledger;
#[doc(hidden)]
pub mod log;
pub mod look;
pub mod machine;
pub mod messaging;
mod operation;
mod policy;
mod renewer;
mod repeats;
mod replays;
mod run;
mod scope;
pub mod store;
mod text;
mod time;
mod waiters;
mod withdrawals;
mod worker;

pub use canonical_json::{Canonical, JsonError, Literal, canonicalize, canonicalize_without};
pub use claim::{Claim, Enqueued, InFlight, NotYet, Replay, Waiting, Work};
pub use error::{Error, Result, reasons};
pub use fingerprint::{Fields, Fingerprint, FingerprintError, OpenField, derive_key, short_hash};
pub use lease::{Held, Lease, Settled};
pub use ledger::{Ledger, Options};
pub use machine::{Failure, Retry, Verdict};
pub use operation::{Fence, Labels, LeaseRow, Operation, Outcome, Priority, State, Successor, Token};
pub use policy::{Backoff, OnLost, OnMismatch, Policy};
pub use run::{Context, Finding, NODE_STOPPED, Ran, Unfinished};
pub use scope::{Key, Scope};
pub use store::Store;
pub use text::MAX_TEXT;
pub use time::{Timestamp, Uptime, micros};
pub use worker::{Kind, Worker};
