//! Lease: the right to execute until a deadline, and the only way to change the state of an operation.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use bytes::Bytes;
use tokio::sync::watch;

use crate::{
    Error, Fence, Ledger, Operation, Outcome, Policy, Result, Uptime,
    fingerprint::derive_key,
    ledger::{patiently, stored_bytes},
    machine::{Answer, Failure, Write},
    renewer::OwnDeadline,
    store::{LeaseWrite, Store},
    worker::targets::{Targets, patience},
};

/// The right to execute an operation. A settle consumes it: it cannot be settled twice.
///
/// A lease that is dropped expires, and the policy decides what happens then.
#[must_use = "a lease that is dropped is held until it expires"]
pub struct Lease<S: Store> {
    ledger: Ledger<S>,
    operation: Arc<Operation>,
    deadline: OwnDeadline,
    /// Its turn on a worker, if one runs it.
    turn: Option<Turn>,
}

/// The turn of a run on a worker.
#[derive(Clone)]
pub(crate) struct Turn {
    /// When the turn is over, if it has an end.
    pub(crate) until: Option<Uptime>,
    /// Turns true when the worker stops: a run in steps ends after the present one.
    pub(crate) stop: watch::Receiver<bool>,
    /// Turns true when the run has to end at once.
    pub(crate) leave: watch::Receiver<bool>,
    /// The unreachable targets of this kind.
    pub(crate) targets: Arc<Targets>,
    /// Whether the handler has returned: it was neither cancelled, nor did it panic.
    pub(crate) returned: Arc<AtomicBool>,
}

impl Turn {
    pub(crate) fn is_over(&self) -> bool {
        // A dropped sender counts as a stop.
        self.until.is_some_and(Uptime::has_passed) || *self.stop.borrow() || self.stop.has_changed().is_err()
    }

    pub(crate) fn has_returned(&self) -> bool {
        self.returned.load(Ordering::SeqCst)
    }
}

/// Whether the lease is still held.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub enum Held {
    /// It is; the write was made.
    Yes,
    /// It is not: stop. Nothing was written.
    LeaseLost,
}

/// The result of a settle.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub enum Settled {
    /// It was settled.
    Yes {
        /// There was a successor, and the operation is pending with it.
        successor: bool,
    },
    /// Another node has ended the lease. Nothing was written.
    LeaseLost,
}

impl<S: Store> Lease<S> {
    /// The largest checkpoint: it is small data, not a second payload.
    pub const MAX_CHECKPOINT: usize = 64 << 10;

    pub(crate) fn new(ledger: Ledger<S>, operation: Arc<Operation>, deadline: OwnDeadline) -> Self {
        Self { ledger, operation, deadline, turn: None }
    }

    /// Gives its run a turn on a worker.
    pub(crate) fn in_turn(self, turn: Turn) -> Self {
        Self { turn: Some(turn), ..self }
    }

    pub(crate) fn turn(&self) -> Option<&Turn> {
        self.turn.as_ref()
    }

    /// Completes when its worker has to stop.
    pub(crate) async fn is_to_leave(&self) {
        let Some(turn) = &self.turn else { return std::future::pending().await };
        if turn.leave.clone().wait_for(|leave| *leave).await.is_err() {
            std::future::pending::<()>().await;
        }
    }

    /// Runs a handler; notes for the worker that it has returned.
    pub(crate) fn noting_return<F: Future>(&self, handler: F) -> impl Future<Output = F::Output> + use<F, S> {
        let returned = self.turn.as_ref().map(|turn| turn.returned.clone());
        async move {
            let said = handler.await;
            if let Some(returned) = returned {
                returned.store(true, Ordering::SeqCst);
            }
            said
        }
    }

    /// Reports an unreachable target to the worker; returns how long the operation waits.
    pub(crate) fn pause(&self, target: &str, why: &str) -> Option<Duration> {
        let turn = self.turn.as_ref()?;
        Some(patience(turn.targets.is_away(target, why), &self.operation))
    }

    /// The operation as it was when it was claimed.
    #[must_use]
    pub fn operation(&self) -> &Operation {
        &self.operation
    }

    /// The operation, shared instead of copied.
    pub(crate) fn shared(&self) -> Arc<Operation> {
        self.operation.clone()
    }

    /// The fence, which every write under this lease names.
    #[must_use]
    pub fn fence(&self) -> Fence {
        self.operation.fence
    }

    /// The time until the lease must be renewed, by the node's own, cautious clock.
    #[must_use]
    pub fn remaining(&self) -> Duration {
        self.deadline.at().remaining()
    }

    /// The key for a step's call to another service: the same on every attempt, so that the service can
    /// deduplicate.
    #[must_use]
    pub fn derived_key(&self, step: &str) -> String {
        derived_key(&self.operation, step)
    }

    /// Extends the lease by its term.
    ///
    /// # Errors
    /// Errors of the store.
    pub async fn renew(&mut self) -> Result<Held> {
        let sent = Uptime::now();
        match self.ledger.renew(self.operation.id, self.fence()).await? {
            Answer::Renewed { .. } => {
                self.deadline = self.deadline.renewed(sent);
                Ok(Held::Yes)
            }
            _ => Ok(Held::LeaseLost),
        }
    }

    /// Stores a checkpoint for the next attempt.
    ///
    /// # Errors
    /// It is too large, or errors of the store.
    pub async fn checkpoint(&self, data: impl Into<Bytes>) -> Result<Held> {
        save_checkpoint(&self.ledger, &self.operation, Write::Checkpoint(data.into())).await
    }

    /// Complete: it took effect, with this outcome.
    ///
    /// # Errors
    /// [`Error::OutcomeUnknown`] if the store did not answer before the lease expired.
    pub async fn complete(self, outcome: Outcome) -> Result<Settled> {
        self.settle(Write::Complete(outcome)).await
    }

    /// Fail: the run failed.
    ///
    /// # Errors
    /// [`Error::OutcomeUnknown`] if the store did not answer before the lease expired.
    pub async fn fail(self, failure: Failure) -> Result<Settled> {
        self.settle(Write::Fail(failure)).await
    }

    /// Release: the work had no effect. It may be claimed after `delay`, and no attempt is counted.
    ///
    /// # Errors
    /// [`Error::OutcomeUnknown`] if the store did not answer before the lease expired.
    pub async fn release(self, delay: Duration) -> Result<Settled> {
        self.settle(Write::Release { delay, why: None }).await
    }

    /// Release without a run: as [`release`](Self::release), but the journal has no note of it.
    pub(crate) async fn put_off(self, delay: Duration) -> Result<Settled> {
        self.settle(Write::PutOff { delay }).await
    }

    /// Release without a run, to another [runner](crate::Runner): the operation has this policy from now on.
    ///
    /// # Errors
    /// A policy that is not valid for work that is run later; [`Error::OutcomeUnknown`] if the store did not answer
    /// before the lease expired.
    pub async fn hand_over(self, policy: Policy) -> Result<Settled> {
        policy.check_for_worker()?;
        self.settle(Write::HandOver(Box::new(policy))).await
    }

    /// The work has begun, and its end is unknown.
    ///
    /// # Errors
    /// [`Error::OutcomeUnknown`] if the store did not answer before the lease expired.
    pub async fn doubt(self, reason: impl Into<String>) -> Result<Settled> {
        self.settle(Write::Doubt { reason: reason.into() }).await
    }

    /// Settles. An unavailable store is retried until the lease has expired: finished work is worth waiting for.
    pub(crate) async fn settle(self, write: Write) -> Result<Settled> {
        self.ledger.settle(&self.operation, write, self.deadline.at()).await
    }

    pub(crate) fn ledger(&self) -> &Ledger<S> {
        &self.ledger
    }

    pub(crate) fn term(&self) -> Duration {
        self.operation.lease.as_ref().map_or(Duration::ZERO, |lease| lease.terms.lease)
    }

    pub(crate) fn deadline(&self) -> OwnDeadline {
        self.deadline
    }
}

pub(crate) fn derived_key(op: &Operation, step: &str) -> String {
    derive_key(&[op.scope.tenant(), op.scope.service(), op.scope.kind()], op.key.as_str(), step)
}

pub(crate) async fn save_checkpoint<S: Store>(ledger: &Ledger<S>, op: &Operation, write: Write) -> Result<Held> {
    if let Write::Checkpoint(data) | Write::Progress(data) = &write {
        check_checkpoint::<S>(data)?;
    }
    let write = LeaseWrite { id: op.id, fence: op.fence, write };
    let stored = stored_bytes(op);
    match patiently(ledger.store(), || ledger.write_of(write.clone(), stored)).await?.answer {
        Answer::Written => Ok(Held::Yes),
        _ => Ok(Held::LeaseLost),
    }
}

pub(crate) fn check_checkpoint<S: Store>(data: &Bytes) -> Result<()> {
    match data.len() > Lease::<S>::MAX_CHECKPOINT {
        true => Err(Error::Invalid(format!("checkpoint: is larger than {} bytes", Lease::<S>::MAX_CHECKPOINT))),
        false => Ok(()),
    }
}
