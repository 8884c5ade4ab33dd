//! Runs: claim, renew, work, settle, in one call. `course`: what happens under the lease.

mod course;

use std::{sync::Arc, time::Duration};

use bytes::Bytes;
use tokio::sync::watch;

pub(crate) use self::course::{Attended, End, RanOne, in_own_task};
use crate::{
    Claim, Fence, Held, Lease, Ledger, Operation, Outcome, Result, Uptime, Work,
    lease::{self, Turn},
    machine::{Failure, Retry, Write},
    renewer::Standing,
    store::{Decision, Store},
};

/// The reason of a doubt when the node stopped during the run.
pub const NODE_STOPPED: &str = "the node stopped while it ran";

/// How a run ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Ran {
    /// It took effect, durably.
    Completed(Outcome),
    /// It failed.
    Failed(Failure),
    /// It was released: it had not begun, it asked to wait, or the commit failed for a transient reason.
    Released,
    /// It began, and its end is unknown.
    Doubted(String),
    /// The lease was lost during the run. The work was cancelled, its transaction was rolled back, and another node
    /// decides about the operation now.
    LeaseLost,
}

impl Ran {
    /// The end of a run that was settled by this write.
    pub(crate) fn by(write: &Write) -> Self {
        match write {
            Write::Complete(outcome) => Self::Completed(outcome.clone()),
            Write::Fail(failure) => Self::Failed(failure.clone()),
            Write::Doubt { reason } => Self::Doubted(reason.clone()),
            _ => Self::Released,
        }
    }
}

/// A value of a handler for the caller that waits for its run, beside the stored outcome: see [`Lease::run_handing`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Handed<V> {
    /// The handler's value; its result was stored.
    Stored(V),
    /// The handler returned, but its result was not stored: the commit was refused, or the lease was lost. The value is
    /// dropped, because it may be untrue.
    NotStored,
    /// The handler did not return: it panicked, was cancelled, or never began.
    Nothing,
}

/// Why a handler did not complete its work.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Unfinished {
    /// It failed.
    Failed(Failure),
    /// Nothing was done; try again after this delay. No attempt is counted.
    Released {
        /// The delay.
        after: Duration,
        /// The reason, if something that it needs is unavailable or busy: it is stored as the operation's error,
        /// journalled and logged.
        why: Option<String>,
    },
    /// Nothing was done, because the target is unreachable. A [worker](crate::Worker) pauses the target. No attempt is
    /// counted, and the reason is stored as that of [`Released`](Self::Released).
    Away {
        /// The target: a URL, a server.
        target: String,
        /// The shortest delay of this operation. The target's pause may be longer, and so may half the time for which
        /// the operation has been tried, up to the longest backoff of its policy.
        after: Duration,
        /// The reason.
        why: String,
    },
    /// Its [turn](Context::turn_is_over) is over, and there is more to do: it is released behind the other due
    /// operations, and no attempt is counted. Its progress should be in its checkpoint.
    TurnOver,
    /// It began, and it is unknown whether it took effect: the operation is in doubt, for this reason.
    Doubted(String),
    /// Declined for good: the outcome is stored, but the transaction is rolled back. Without a transaction it is the
    /// same as completing.
    Declined(Outcome),
}

impl Unfinished {
    /// Released without a reason.
    #[must_use]
    pub const fn released(after: Duration) -> Self {
        Self::Released { after, why: None }
    }

    /// Released for a reason that is stored and logged.
    #[must_use]
    pub fn released_because(after: Duration, why: impl Into<String>) -> Self {
        Self::Released { after, why: Some(why.into()) }
    }

    /// A failure that is retried after the policy's backoff.
    #[must_use]
    pub fn failed(error: impl Into<String>) -> Self {
        Self::Failed(Failure { error: error.into(), retry: Retry::Backoff })
    }

    /// A failure that is not retried.
    #[must_use]
    pub fn failed_for_good(error: impl Into<String>) -> Self {
        Self::Failed(Failure { error: error.into(), retry: Retry::Never })
    }
}

/// The result of a probe of an operation in doubt.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Finding {
    /// It took effect.
    TookEffect(Outcome),
    /// It did not.
    DidNot,
    /// Unknown.
    Unknown,
}

/// The context of a handler's run.
pub struct Context<S: Store> {
    pub(crate) ledger: Ledger<S>,
    pub(crate) operation: Arc<Operation>,
    standing: watch::Receiver<Standing>,
    turn: Option<Turn>,
}

impl<S: Store> Clone for Context<S> {
    fn clone(&self) -> Self {
        let Self { ledger, operation, standing, turn } = self;
        Self { ledger: ledger.clone(), operation: operation.clone(), standing: standing.clone(), turn: turn.clone() }
    }
}

impl<S: Store> Context<S> {
    /// The operation at its claim, with its payload and the last checkpoint.
    #[must_use]
    pub fn operation(&self) -> &Operation {
        &self.operation
    }

    /// The fence, for services that can refuse an older one.
    #[must_use]
    pub fn fence(&self) -> Fence {
        self.operation.fence
    }

    /// The key for a step's call to another service, the same on every attempt.
    #[must_use]
    pub fn derived_key(&self, step: &str) -> String {
        lease::derived_key(&self.operation, step)
    }

    /// Stores a checkpoint for the next attempt.
    ///
    /// # Errors
    /// It is too large, or errors of the store.
    pub async fn checkpoint(&self, data: impl Into<Bytes>) -> Result<Held> {
        lease::save_checkpoint(&self.ledger, &self.operation, Write::Checkpoint(data.into())).await
    }

    /// Stores a checkpoint for the next attempt, and resets the count of crashes: a long run that is killed again and
    /// again, and gets further each time, is not parked.
    ///
    /// # Errors
    /// It is too large, or errors of the store.
    pub async fn progress(&self, data: impl Into<Bytes>) -> Result<Held> {
        lease::save_checkpoint(&self.ledger, &self.operation, Write::Progress(data.into())).await
    }

    /// Whether the lease is lost: to be checked before each effect by work that cannot be cancelled. It also
    /// checks the clock: a process that was suspended past its lease knows it at once, before its renewer has
    /// woken up.
    #[must_use]
    pub fn is_lost(&self) -> bool {
        self.standing.borrow().until.is_none_or(Uptime::has_passed)
    }

    /// Whether a long run should end its turn, with [`Unfinished::TurnOver`]: its [turn](crate::Kind::turn) is over,
    /// its node stops, or its lease is lost. To be checked between two [steps](Self::step).
    #[must_use]
    pub fn turn_is_over(&self) -> bool {
        self.is_lost() || self.ledger.is_stopping() || self.turn.as_ref().is_some_and(Turn::is_over)
    }

    /// Completes when its node stops. The run has only its worker's [grace](crate::Worker::grace) left: an effect that may
    /// take longer, and has not begun, should wait for the next run.
    pub async fn node_stops(&self) {
        let Some(turn) = &self.turn else { return self.ledger.stops().await };
        let mut stop = turn.stop.clone();
        tokio::select! {
            // A dropped sender counts as a stop.
            _ = stop.wait_for(|stop| *stop) => {}
            () = self.ledger.stops() => {}
        }
    }
}

impl<S: Store> Ledger<S> {
    /// Claims and, if the lease is acquired, runs `handler` while the lease is renewed in the background, and
    /// settles. The run has its own task: it continues if the caller goes away. A lost lease cancels it. A panic
    /// is a failure or, under hold or probe, a doubt.
    ///
    /// If newer data arrives during the run (supersede-if-newer), the handler is called again for it, in the
    /// background.
    ///
    /// # Errors
    /// As [`Ledger::claim`] and [`Lease::complete`].
    pub async fn run<F, Fut>(&self, work: Work, handler: F) -> Result<Claim<Ran>>
    where
        F: Fn(Context<S>) -> Fut + Send + Sync + 'static,
        Fut: Future<Output = Result<Outcome, Unfinished>> + Send + 'static,
    {
        let ledger = self.clone();
        self.claim_and_run(async move { ledger.claim(work).await }, |lease| lease.run_all(handler)).await
    }

    /// As [`Ledger::run`], but waits up to `up_to` first while another run holds the lease.
    ///
    /// # Errors
    /// As [`Ledger::run`].
    pub async fn run_or_wait<F, Fut>(&self, work: Work, up_to: Duration, handler: F) -> Result<Claim<Ran>>
    where
        F: Fn(Context<S>) -> Fut + Send + Sync + 'static,
        Fut: Future<Output = Result<Outcome, Unfinished>> + Send + 'static,
    {
        let ledger = self.clone();
        self.claim_and_run(async move { ledger.claim_or_wait(work, up_to).await }, |lease| lease.run_all(handler)).await
    }

    /// As [`Ledger::run`], but probes an operation in doubt first.
    ///
    /// # Errors
    /// As [`Ledger::run`].
    pub async fn run_with_probe<F, Fut, P, Found>(&self, work: Work, handler: F, probe: P) -> Result<Claim<Ran>>
    where
        F: Fn(Context<S>) -> Fut + Send + Sync + 'static,
        Fut: Future<Output = Result<Outcome, Unfinished>> + Send + 'static,
        P: Fn(Operation) -> Found + Send + Sync + 'static,
        Found: Future<Output = Finding> + Send + 'static,
    {
        let ledger = self.clone();
        let claim = async move {
            match ledger.claim(work.clone()).await? {
                Claim::InDoubt(operation) if ledger.probe(&operation, &probe).await? => ledger.claim(work).await,
                claim => Ok(claim),
            }
        };
        self.claim_and_run(claim, |lease| lease.run_all(handler)).await
    }

    /// Claims, and runs an acquired lease in its own task.
    pub(crate) async fn claim_and_run<C, R, Runs, V>(&self, claim: C, run: R) -> Result<Claim<Ran>>
    where
        C: Future<Output = Result<Claim<Lease<S>>>> + Send + 'static,
        R: FnOnce(Lease<S>) -> Runs + Send + 'static,
        Runs: Future<Output = Result<(Ran, Handed<V>)>> + Send,
        V: Send + 'static,
    {
        let ledger = self.clone();
        in_own_task(async move {
            // Counted from before the claim, so that a stopping ledger does not miss a run about to begin.
            let _counted = ledger.enter();
            match claim.await?.acquired() {
                Ok(lease) => Ok(Claim::Acquired(run(lease).await?.0)),
                Err(other) => Ok(other),
            }
        })
        .await
    }

    /// Probes an operation in doubt; true if the doubt has ended. The finding counts only if the operation has not
    /// changed meanwhile, so two probes cannot contradict each other.
    async fn probe<P, Found>(&self, operation: &Operation, probe: &P) -> Result<bool>
    where
        P: Fn(Operation) -> Found,
        Found: Future<Output = Finding>,
    {
        use crate::machine::{Answer, Verdict};
        let (verdict, reason) = match probe(operation.clone()).await {
            Finding::TookEffect(outcome) => (Verdict::Completed(outcome), "the probe found the effect"),
            Finding::DidNot => (Verdict::Retry, "the probe found no effect"),
            Finding::Unknown => return Ok(false),
        };
        let decision = Decision::Found { verdict, expected: Some(operation.fence) };
        let applied = self.decide(operation.id, decision, "probe", reason).await?;
        // In any case this doubt has ended: by this finding, or by an earlier one.
        debug_assert!(matches!(applied.answer, Answer::Resolved | Answer::NotNow(_)), "{:?}", applied.answer);
        Ok(true)
    }
}
