//! The worker: runs due operations (enqueued, released, failed after their backoff, timed out).
//!
//! A worker has a handler and a concurrency limit per kind. It claims due operations in batches, as many as it has free
//! seats for, and settles each like any run. Any number of workers may share a database: two of them never get the same
//! operation.
//!
//! - [`Kind`]: one kind of work, its handler and its limits
//! - [`Worker`]: all of them, and the loop
//! - [`Timetable`]: schedules, whose runs it enqueues when they are due
//! - `expired`: ends the expired leases of killed nodes
//! - `rounds`: looks for due operations, claims as many as it has free seats, runs them
//! - `shares`: shares the free seats among tenants
//! - `targets`: pauses unreachable targets

mod expired;
mod kind;
mod rounds;
mod shares;
pub(crate) mod targets;
mod timetable;

use std::{sync::Arc, time::Duration};

use tokio::sync::watch;

use self::rounds::Rounds;
pub use self::{kind::Kind, timetable::Timetable};
use crate::{
    Ledger, Schedule,
    fleet::{Fleet, Sign},
    store::Store,
};

/// The polling interval while there is work: finds what other nodes have enqueued.
const BUSY: Duration = Duration::from_millis(100);

/// The polling interval while idle.
const IDLE: Duration = Duration::from_secs(1);

/// The default time that runs have after a stop.
const GRACE: Duration = Duration::from_secs(5);

/// Runs due operations.
#[must_use = "a worker works when it is run"]
pub struct Worker<S: Store> {
    ledger: Ledger<S>,
    kinds: Vec<Arc<Kind<S>>>,
    schedules: Vec<Schedule>,
    /// The roles and version of this process; its kinds are added.
    sign: Sign,
    grace: Duration,
    /// The polling intervals, busy and idle.
    polls: (Duration, Duration),
}

impl<S: Fleet> Worker<S> {
    /// A worker on a ledger, without any kind yet.
    pub fn new(ledger: &Ledger<S>) -> Self {
        let sign = Sign { roles: vec!["worker".to_owned()], ..Sign::default() };
        let (kinds, schedules) = (Vec::new(), Vec::new());
        Self { ledger: ledger.clone(), kinds, schedules, sign, grace: GRACE, polls: (BUSY, IDLE) }
    }

    /// Adds a kind. If two kinds match an operation, the first one runs it.
    pub fn on(mut self, kind: Kind<S>) -> Self {
        self.kinds.push(Arc::new(kind));
        self
    }

    /// Adds a schedule, whose runs it enqueues when they are due. Any number of workers may have the same one.
    pub fn every(mut self, schedule: Schedule) -> Self {
        self.schedules.push(schedule);
        self
    }

    /// The roles and version of this process in its [signs of life](Ledger::show_life). The default role is `worker`.
    pub fn known_as(self, roles: Vec<String>, version: &str) -> Self {
        Self { sign: Sign { roles, version: version.to_owned(), kinds: Vec::new() }, ..self }
    }

    /// How long runs may continue after a stop. Those that have not ended by then are released under rerun, and in
    /// doubt under hold or probe.
    pub fn grace(self, grace: Duration) -> Self {
        Self { grace, ..self }
    }

    /// The polling interval for what other nodes have enqueued. Commits of this process wake it at once.
    pub fn poll(self, every: Duration) -> Self {
        Self { polls: (every, every), ..self }
    }

    /// Works until `stop` turns true or its sender is dropped; returns after its runs have ended.
    pub async fn run(mut self, stop: watch::Receiver<bool>) {
        let ledger = self.ledger.clone();
        let timetable = Timetable::new(&ledger, std::mem::take(&mut self.schedules));
        let mut sign = std::mem::take(&mut self.sign);
        sign.kinds = self.kinds.iter().filter(|kind| kind.is_work).map(|kind| kind.shown()).collect();
        let work = async {
            let expired = expired::end_expired_leases(&ledger, stop.clone());
            let rounds = Rounds::new(ledger.clone(), self.kinds, self.polls, stop.clone());
            // A database that does not answer must not delay the stop.
            let others = Box::pin(async {
                tokio::select! {
                    _ = async { tokio::join!(timetable.run(stop.clone()), expired) } => {}
                    () = end_of(stop.clone(), self.grace) => {}
                }
            });
            // On the heap: callers may run the worker in a future of their own.
            tokio::join!(others, Box::pin(rounds.run(self.grace)));
        };
        ledger.show_life_while(sign, work).await;
    }
}

/// Whether to stop. A dropped sender counts as a stop request.
fn is_over(stop: &watch::Receiver<bool>) -> bool {
    *stop.borrow() || stop.has_changed().is_err()
}

/// Completes when runs have had their time after the stop.
async fn end_of(mut stop: watch::Receiver<bool>, grace: Duration) {
    let _ = stop.wait_for(|stop| *stop).await;
    tokio::time::sleep(grace).await;
}
