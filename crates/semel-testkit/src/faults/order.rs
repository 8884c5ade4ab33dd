//! What is said between a test and its worker processes: one JSON object a line.

use semel::Policy;
use serde::{Deserialize, Serialize};

/// Where the effect lives.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Mode {
    /// Outside the database: a line in the [`Bank`](super::Bank)'s file.
    Leased,
    /// Inside the transaction: a row in the table `effects`.
    Atomic,
}

/// The writes under a lease.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum WriteKind {
    /// Go on holding it.
    Renew,
    /// Small data for the next attempt.
    Checkpoint,
    /// It took effect.
    Complete,
    /// It failed.
    Fail,
    /// It has not begun.
    Release,
    /// Nobody knows.
    Doubt,
}

impl WriteKind {
    /// Every one of them.
    pub const ALL: [Self; 6] = [Self::Renew, Self::Checkpoint, Self::Complete, Self::Fail, Self::Release, Self::Doubt];
}

/// What a worker should do. Orders are carried out side by side; each ends with [`Told::Done`],
/// and what it was answered comes before that.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub enum Order {
    /// Claim, and keep the lease for a later [`Order::Write`].
    Claim {
        /// The key.
        key: String,
        /// The policy, as [`Policy::to_terms`] writes it.
        terms: String,
    },
    /// Write under a lease that was kept. It is gone after that, however the write ends.
    Write {
        /// The key.
        key: String,
        /// What is written.
        write: WriteKind,
    },
    /// One run of the library's own, with its renewals.
    Run {
        /// The key.
        key: String,
        /// The policy.
        terms: String,
        /// Where the effect lives.
        mode: Mode,
        /// How long the handler works, in milliseconds, before its effect.
        work: u64,
    },
    /// A handler that blocks its thread and asks before each step whether the lease is lost.
    Watch {
        /// The key.
        key: String,
        /// The policy.
        terms: String,
    },
    /// Many tasks at once, each with one of the keys in turn, all waiting for an outcome.
    Race {
        /// The keys.
        keys: Vec<String>,
        /// The first key of the first task.
        from: usize,
        /// How many tasks.
        tasks: usize,
        /// The policy.
        terms: String,
        /// Where the effect lives.
        mode: Mode,
    },
    /// One new key after the other, in each of some tasks, until [`Order::Stop`].
    Pump {
        /// What the keys begin with.
        prefix: String,
        /// How many tasks.
        tasks: usize,
        /// The policy.
        terms: String,
        /// Where the effect lives.
        mode: Mode,
    },
    /// A bit of everything: see [`scenario`](super::scenario).
    Scenario {
        /// How many rounds of it.
        rounds: usize,
    },
    /// End in order.
    Stop,
}

impl Order {
    /// An [`Order::Claim`].
    #[must_use]
    pub fn claim(key: &str, policy: &Policy) -> Self {
        Self::Claim { key: key.to_owned(), terms: policy.to_terms() }
    }

    /// An [`Order::Run`] whose handler goes straight to its effect.
    #[must_use]
    pub fn run(key: &str, policy: &Policy, mode: Mode) -> Self {
        Self::Run { key: key.to_owned(), terms: policy.to_terms(), mode, work: 0 }
    }
}

/// What a worker tells.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Told {
    /// The database is open; orders are welcome.
    Ready,
    /// A handler has begun.
    Begun {
        /// The key.
        key: String,
        /// Its fence.
        fence: i64,
    },
    /// A claim or a run was answered.
    Ended {
        /// The key.
        key: String,
        /// The answer's word; for a run that was made, how it ended (`completed`, `lease_lost`, …).
        how: String,
        /// The fence, of whoever acquired it.
        fence: i64,
        /// The outcome, where there is one and it is kept.
        outcome: Option<String>,
    },
    /// A write was answered.
    Wrote {
        /// The key.
        key: String,
        /// What was written.
        write: WriteKind,
        /// False: the lease is lost.
        held: bool,
    },
    /// A watching handler found out how things are after a pause.
    Woke {
        /// The key.
        key: String,
        /// Whether the first question after the pause was answered "lost".
        lost: bool,
    },
    /// An error surfaced.
    Broke {
        /// The key.
        key: String,
        /// What it said.
        error: String,
        /// Whether it calls itself passing.
        transient: bool,
    },
    /// An order is done.
    Done,
}
