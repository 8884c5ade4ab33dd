//! Semel: operations that take effect once.
//!
//! Software retries: a client times out and sends again, a broker redelivers, a worker is killed
//! halfway. The [`Ledger`] makes each operation take effect once. A caller claims a [`Key`] and gets
//! one of seven answers ([`Claim`]). The caller that acquires the [`Lease`] does the work and settles
//! it; every other caller gets the stored outcome.
//!
//! The modules, in reading order:
//!
//! - [`Scope`], [`Key`], [`Fingerprint`], [`Policy`], [`Operation`]: the data types
//! - [`machine`]: the state machine of an operation, one pure function
//! - [`Work`] and [`Claim`]: the request and its seven answers
//! - [`Lease`]: the right to execute; [`Ledger::run`] and [`Ledger::run_atomic`] claim, run and settle
//! - [`Worker`] and [`Kind`]: run the operations that [`Ledger::enqueue`] stored
//! - [`lane`]: group commit
//! - [`Schedule`]: enqueues operations at cron times
//! - [`store`] and [`fleet`]: the contract of a database (`semel-store` has SQLite and PostgreSQL)
//! - [`journal`] and [`look`]: the history of an operation, listings and counters
//! - [`messaging`]: outbox, relay, broker, inbox
//! - [`crash`]: crash points, each with a test that kills the process there
//!
//! The words (`ARCHITECTURE.md` has the whole list):
//!
//! | word | meaning |
//! |---|---|
//! | operation | one row of the ledger: something that must take effect once |
//! | scope | tenant + service + kind; equal keys in two scopes are different operations |
//! | key | the caller's name for the operation |
//! | fingerprint | a hash of the payload; distinguishes a retry from a reuse of the key |
//! | policy | the rules of an operation: lease, retention, attempts, backoff, what a lost lease means |
//! | claim | asks for the right to execute |
//! | token | a random number of one claim, to recognise it if it is sent again |
//! | lease | the right to execute until a deadline; renewed while the work runs |
//! | fence | a number that only grows, new with every claim; a write with an old fence is refused |
//! | attempt | the number of a run; failures and expired leases count, releases do not |
//! | settle | end a run: complete, fail, release (no effect, no attempt counted) or doubt (end unknown) |
//! | checkpoint, progress | small data that a run leaves for the next one; progress also resets the count of crashes |
//! | cancel | withdraw a pending operation, or ask a run to stop |
//! | outcome, replay | the stored result; the answer with it, without executing |
//! | in doubt | it may or may not have taken effect; a probe or a person resolves it |
//! | pending, due | stored and waiting to run; may be claimed now |
//! | enqueue, worker | store a pending operation; run due operations |
//! | priority | -2 to 2; higher first among due operations |
//! | target | what a handler calls; an unreachable one is paused, and its operations are released |
//! | turn | the longest time a long operation runs before it is released to let others run |
//! | schedule | enqueues one operation per cron time |
//! | parked | runs again only after a person said so |
//! | successor | newer data that waits for the present run to settle |
//! | retention, tombstone | how long a settled operation is kept; its row after archiving, without data |
//! | journal | the history of an operation beyond its row |
//! | sweep | the periodic clean-up: lease expiry, retention, archive, counters |
//! | message | what goes through the outbox and a broker |
//! | deliver | bring something to its receiver, at least once: a broker brings a message to a consumer |

mod aside;
mod atomic;
mod canonical_json;
mod claim;
pub mod crash;
mod engine;
mod error;
mod fingerprint;
pub mod fleet;
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
pub mod prelude;
mod renewer;
mod repeats;
mod replays;
mod run;
mod schedule;
mod scope;
mod step;
pub mod store;
mod text;
mod time;
mod waiters;
mod withdrawals;
mod worker;

pub use canonical_json::JsonError;
pub use chrono_tz;
pub use claim::{Claim, Enqueued, InFlight, NotYet, Replay, Waiting, Work};
pub use error::{Error, Result, reasons};
pub use fingerprint::{Fields, Fingerprint, FingerprintError, json_hash, sha256_hex, short_hash};
pub use lease::{Held, Lease, Settled};
pub use ledger::{Ledger, Options, Renewed};
pub use machine::{Failure, Retry, Verdict};
pub use operation::{Fence, Labels, LeaseRow, Operation, Outcome, Priority, State, Successor, Token};
pub use policy::{Backoff, OnLost, OnMismatch, Policy, Runner};
pub use run::{Context, Finding, Handed, NODE_STOPPED, Ran, Unfinished};
pub use schedule::{Missed, Schedule};
pub use scope::{Key, Scope};
pub use store::Store;
pub use text::{MAX_TEXT, panic_text};
pub use time::{Timestamp, Uptime, micros};
pub use worker::{Kind, Timetable, Worker};
