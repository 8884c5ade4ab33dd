//! The messages between a test and its worker processes: one JSON object per line.

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
    /// Renew.
    Renew,
    /// Checkpoint.
    Checkpoint,
    /// Complete.
    Complete,
    /// Fail.
    Fail,
    /// Release.
    Release,
    /// Doubt.
    Doubt,
}

impl WriteKind {
    /// Every one of them.
    pub const ALL: [Self; 6] = [Self::Renew, Self::Checkpoint, Self::Complete, Self::Fail, Self::Release, Self::Doubt];
}

/// Whether to commit.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Open {
    /// The transaction stays open: [`Report::Begun`] reports that all is written.
    ForEver,
    /// It commits.
    UntilWritten,
}

/// An order for a worker. Orders run concurrently; each ends with [`Report::Done`], after its answers.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub enum Order {
    /// Claim, and keep the lease for a later [`Order::Write`].
    Claim {
        /// The key.
        key: String,
        /// The policy, as [`Policy::to_terms`] writes it.
        terms: String,
    },
    /// Write under a kept lease, which is consumed.
    Write {
        /// The key.
        key: String,
        /// The write.
        write: WriteKind,
    },
    /// One run of the library, with renewals.
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
    /// A handler that blocks its thread and checks before each step whether the lease is lost.
    Watch {
        /// The key.
        key: String,
        /// The policy.
        terms: String,
    },
    /// Many concurrent tasks, each with one of the keys in turn, all waiting for an outcome.
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
        /// The prefix of the keys.
        prefix: String,
        /// How many tasks.
        tasks: usize,
        /// The policy.
        terms: String,
        /// Where the effect lives.
        mode: Mode,
    },
    /// Enqueue work of [one of the two queues](super::scenario).
    Enqueue {
        /// Its keys.
        keys: Vec<String>,
        /// Whether the effects are to be outside the database, or rows of it.
        mode: Mode,
        /// The policy that is kept with the work. Without it, the policy of [`Order::Work`] applies.
        terms: Option<String>,
        /// In a transaction that also writes a row for each, and that stays open if requested; without it each alone.
        with_rows: Option<Open>,
    },
    /// Run due operations of both queues, until [`Order::Stop`].
    Work {
        /// The concurrency of each.
        at_once: usize,
        /// The policy of work that was enqueued without one.
        terms: String,
    },
    /// The [`scenario`](super::scenario).
    Scenario {
        /// The number of rounds.
        rounds: usize,
    },
    /// A worker with a [schedule of every second](super::scenario::ticks), until [`Order::Stop`].
    Tick,
    /// End in order.
    Stop,
}

impl Order {
    /// An [`Order::Claim`].
    #[must_use]
    pub fn claim(key: &str, policy: &Policy) -> Self {
        Self::Claim { key: key.to_owned(), terms: policy.to_terms() }
    }

    /// An [`Order::Work`].
    #[must_use]
    pub fn work(at_once: usize, policy: &Policy) -> Self {
        Self::Work { at_once, terms: policy.to_terms() }
    }

    /// An [`Order::Run`] whose handler makes its effect at once.
    #[must_use]
    pub fn run(key: &str, policy: &Policy, mode: Mode) -> Self {
        Self::Run { key: key.to_owned(), terms: policy.to_terms(), mode, work: 0 }
    }
}

/// A report of a worker.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Report {
    /// The database is open; it takes orders.
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
        /// The answer's word; for a run, its end (`completed`, `lease_lost`, …).
        how: String,
        /// The fence, if acquired.
        fence: i64,
        /// The outcome, if it is kept.
        outcome: Option<String>,
    },
    /// A write was answered.
    Wrote {
        /// The key.
        key: String,
        /// The write.
        write: WriteKind,
        /// False: the lease is lost.
        held: bool,
    },
    /// The result of the first check after a pause of the process.
    Woke {
        /// The key.
        key: String,
        /// Whether it was "lost".
        lost: bool,
    },
    /// An error.
    Broke {
        /// The key.
        key: String,
        /// Its text.
        error: String,
        /// Whether it is transient.
        transient: bool,
    },
    /// An order is done.
    Done,
}
