//! Fleet: the data that nodes share besides operations: marks of schedules and signs of life.

use std::{future::Future, time::Duration};

use crate::{Key, Result, Schedule, Scope, Store, Timestamp, schedule::run_key};

/// A stored schedule.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mark {
    /// The scope of its runs.
    pub scope: Scope,
    /// Its name.
    pub name: String,
    /// When it is due, as [`Schedule::spec`] returns it.
    pub spec: String,
    /// Since when this spec applies.
    pub since: Timestamp,
    /// Every due time up to this one is handled.
    pub at: Timestamp,
    /// The due time of the last enqueued run.
    pub last: Option<Timestamp>,
    /// The next due time.
    pub next: Option<Timestamp>,
    /// Whether its kind is paused: no run is enqueued meanwhile.
    pub paused: bool,
}

impl Mark {
    /// The mark of a schedule that starts at a time.
    #[must_use]
    pub fn new(schedule: &Schedule, since: Timestamp) -> Self {
        Self {
            scope: schedule.scope().clone(),
            name: schedule.name().to_owned(),
            spec: schedule.spec(),
            since,
            at: since,
            last: None,
            next: schedule.next(since),
            paused: false,
        }
    }

    /// The key of the last run, if there was one.
    #[must_use]
    pub fn last_key(&self) -> Option<Result<Key>> {
        self.last.map(|due| run_key(&self.name, due))
    }

    /// Whether it is the mark of this schedule, with any spec.
    #[must_use]
    pub(crate) fn is_of(&self, schedule: &Schedule) -> bool {
        self.scope == *schedule.scope() && self.name == schedule.name()
    }
}

/// A node's description of itself.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Sign {
    /// Its roles.
    pub roles: Vec<String>,
    /// The version of its program.
    pub version: String,
    /// The kinds of work that it runs, as `service/kind`.
    pub kinds: Vec<String>,
}

/// A node, by its last sign of life.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NodeSeen {
    /// Its name: the owner in the journal.
    pub owner: String,
    /// Its description.
    pub sign: Sign,
    /// The start of its process.
    pub since: Timestamp,
    /// The time of its last sign of life.
    pub seen: Timestamp,
    /// The age of that, by the database's clock.
    pub age: Duration,
}

/// The calls that a worker needs beside [`Store`].
pub trait Fleet: Store {
    /// The stored marks of schedules, and the time. Schedules without a mark are omitted.
    fn marks(&self, schedules: &[Schedule]) -> impl Future<Output = Result<(Vec<Mark>, Timestamp)>> + Send;

    /// Stores a mark in a transaction: in place of `from`, or as the first. False if there is another one by now, or if
    /// another transaction has locked it; it does not wait. A mark never moves back.
    fn move_mark(&self, tx: &Self::Tx, from: Option<&Mark>, to: &Mark) -> impl Future<Output = Result<bool>> + Send;

    /// Stores a sign of life. `since` is the answer to the first sign of this process: its start.
    fn leave_sign(
        &self,
        owner: &str,
        sign: &Sign,
        since: Option<Timestamp>,
    ) -> impl Future<Output = Result<Timestamp>> + Send;

    /// Removes the sign of life of a process that ends, unless another process has replaced it.
    fn remove_sign(&self, owner: &str, since: Timestamp) -> impl Future<Output = Result<()>> + Send;
}
