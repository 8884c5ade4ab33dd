//! Lease: the right to execute until a deadline, and the only door to a change of state.

use std::{sync::Arc, time::Duration};

use bytes::Bytes;
use tokio::sync::watch;

use crate::{
    Error, Fence, Ledger, Operation, Outcome, Result, Uptime,
    fingerprint::derive_key,
    ledger::{patiently, stored_bytes},
    machine::{Answer, Failure, Write},
    renewer::OwnDeadline,
    store::{LeaseWrite, Store},
};

/// The right to execute an operation. Ending it consumes it: it cannot be ended twice.
///
/// A lease that is dropped instead lapses, and what happens then is up to the policy.
#[must_use = "a lease that is dropped leaves its operation to lapse"]
pub struct Lease<S: Store> {
    ledger: Ledger<S>,
    operation: Arc<Operation>,
    deadline: OwnDeadline,
    /// Turns true when the run has to end, because its worker does.
    leave: Option<watch::Receiver<bool>>,
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

/// Whether the lease was ended as asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub enum Settled {
    /// It was.
    Yes {
        /// Newer data arrived meanwhile; the operation is pending with it.
        successor: bool,
    },
    /// Somebody else decides about the operation now. Nothing was written.
    LeaseLost,
}

impl<S: Store> Lease<S> {
    /// The largest checkpoint: it is small data, not a second payload.
    pub const MAX_CHECKPOINT: usize = 64 << 10;

    pub(crate) fn new(ledger: Ledger<S>, operation: Arc<Operation>, deadline: OwnDeadline) -> Self {
        Self { ledger, operation, deadline, leave: None }
    }

    /// Lets its run end when this turns true.
    pub(crate) fn leaving(self, leave: watch::Receiver<bool>) -> Self {
        Self { leave: Some(leave), ..self }
    }

    /// Done when the worker that runs it has to end.
    pub(crate) async fn is_to_leave(&self) {
        let Some(leave) = &self.leave else { return std::future::pending().await };
        if leave.clone().wait_for(|leave| *leave).await.is_err() {
            std::future::pending::<()>().await;
        }
    }

    /// The operation as it was when it was claimed.
    #[must_use]
    pub fn operation(&self) -> &Operation {
        &self.operation
    }

    /// The number that every write under this lease names.
    #[must_use]
    pub fn fence(&self) -> Fence {
        self.operation.fence
    }

    /// How long the work may go on before it must have been renewed, by our own cautious clock.
    #[must_use]
    pub fn remaining(&self) -> Duration {
        self.deadline.at().remaining()
    }

    /// The key for a step's call to another service: the same on every attempt, so that whatever
    /// that service has already done is recognised.
    #[must_use]
    pub fn derived_key(&self, step: &str) -> String {
        derived_key(&self.operation, step)
    }

    /// Extends the lease by its term.
    ///
    /// # Errors
    /// When the store cannot be asked.
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

    /// Keeps small data on the operation for the next attempt.
    ///
    /// # Errors
    /// When it is too large, or the store cannot be asked.
    pub async fn checkpoint(&self, data: impl Into<Bytes>) -> Result<Held> {
        save_checkpoint(&self.ledger, &self.operation, Write::Checkpoint(data.into())).await
    }

    /// It took effect, with this outcome.
    ///
    /// # Errors
    /// [`Error::OutcomeUnknown`] when the store did not answer until the lease ended.
    pub async fn complete(self, outcome: Outcome) -> Result<Settled> {
        self.settle(Write::Complete(outcome)).await
    }

    /// The run failed.
    ///
    /// # Errors
    /// [`Error::OutcomeUnknown`] when the store did not answer until the lease ended.
    pub async fn fail(self, failure: Failure) -> Result<Settled> {
        self.settle(Write::Fail(failure)).await
    }

    /// The work has not begun: put it back, at no cost of an attempt, to be claimed after `delay`.
    ///
    /// # Errors
    /// [`Error::OutcomeUnknown`] when the store did not answer until the lease ended.
    pub async fn release(self, delay: Duration) -> Result<Settled> {
        self.settle(Write::Release { delay, why: None }).await
    }

    /// The work has begun, and nobody knows how it ended.
    ///
    /// # Errors
    /// [`Error::OutcomeUnknown`] when the store did not answer until the lease ended.
    pub async fn doubt(self, reason: impl Into<String>) -> Result<Settled> {
        self.settle(Write::Doubt { reason: reason.into() }).await
    }

    /// Ends the lease. A store that is away is asked again until the lease has ended: work that
    /// has been done is worth waiting for.
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
    if matches!(&write, Write::Checkpoint(data) | Write::Progress(data) if data.len() > Lease::<S>::MAX_CHECKPOINT) {
        return Err(Error::Invalid(format!("checkpoint: is larger than {} bytes", Lease::<S>::MAX_CHECKPOINT)));
    }
    let write = LeaseWrite { id: op.id, fence: op.fence, write };
    let stored = stored_bytes(op);
    match patiently(ledger.store(), || ledger.write_of(write.clone(), stored)).await?.answer {
        Answer::Written => Ok(Held::Yes),
        _ => Ok(Held::LeaseLost),
    }
}
