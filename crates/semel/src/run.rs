//! Runs: claim, renew, work, settle, in one call.

use std::{sync::Arc, time::Duration};

use bytes::Bytes;
use tokio::sync::watch;
use tracing::Instrument as _;

use crate::{
    Claim, Fence, Held, Lease, Ledger, Operation, Outcome, Result, Uptime, Work, crash_point,
    lease::{self, Settled},
    log,
    machine::{CANCELLED, Failure, Retry, Write},
    renewer::{Renewal, Standing},
    store::{Decision, Store},
};

/// Why a run is in doubt that was cut off because its node stopped.
pub const NODE_STOPPED: &str = "the node stopped while it ran";

/// How long a run waits whose target is away, without a worker that knows more of it.
const AWAY: Duration = Duration::from_secs(1);

/// How a run ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Ran {
    /// It took effect, and that is durable.
    Completed(Outcome),
    /// It failed.
    Failed(Failure),
    /// It was put back: it had not begun, it was asked to wait, or the store was in trouble when it was to commit.
    Released,
    /// It began, and nobody knows how it ended.
    Doubted(String),
    /// The lease was lost on the way. The work was cancelled; what it did under Semel's own
    /// transactions did not happen, and somebody else decides about the operation now.
    LeaseLost,
}

/// Why a handler did not complete its work.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Unfinished {
    /// It failed.
    Failed(Failure),
    /// Nothing was done; it should be tried after this long, at no cost of an attempt.
    NotYet(Duration),
    /// Nothing was done, because what it needs is away or busy; it should be tried after this long, at no cost of an
    /// attempt. Unlike [`NotYet`](Self::NotYet) it is told why: by the operation's error, its journal and the log.
    NotNow {
        /// How long to wait.
        after: Duration,
        /// What is away or busy.
        why: String,
    },
    /// Nothing was done, because what it calls is away. A [worker](crate::Worker) lets the target pause; anybody else tries
    /// again after a second. It costs no attempt, and is told as [`NotNow`](Self::NotNow) is.
    Away {
        /// What is away: a URL, a server.
        target: String,
        /// How it was found out.
        why: String,
    },
    /// Something was begun, and it cannot be known whether it took effect.
    Unknown(String),
    /// It was declined for good: this outcome is stored, but what was written in its transaction is
    /// rolled back. Without a transaction it is the same as completing.
    Declined(Outcome),
}

impl Unfinished {
    /// A failure that is tried again after the policy's backoff.
    #[must_use]
    pub fn failed(error: impl Into<String>) -> Self {
        Self::Failed(Failure { error: error.into(), retry: Retry::Backoff })
    }

    /// A failure that no further attempt can mend.
    #[must_use]
    pub fn failed_for_good(error: impl Into<String>) -> Self {
        Self::Failed(Failure { error: error.into(), retry: Retry::Never })
    }
}

/// What a probe found out about an operation in doubt.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Finding {
    /// It did take effect.
    TookEffect(Outcome),
    /// It did not.
    DidNot,
    /// That could not be found out.
    Unknown,
}

/// What a handler knows about its run, and can do beside its work.
pub struct Context<S: Store> {
    ledger: Ledger<S>,
    operation: Arc<Operation>,
    standing: watch::Receiver<Standing>,
}

impl<S: Store> Clone for Context<S> {
    fn clone(&self) -> Self {
        Self { ledger: self.ledger.clone(), operation: self.operation.clone(), standing: self.standing.clone() }
    }
}

impl<S: Store> Context<S> {
    /// The operation as it was claimed, with its payload and the last attempt's checkpoint.
    #[must_use]
    pub fn operation(&self) -> &Operation {
        &self.operation
    }

    /// The number to hand to whatever can refuse an older one.
    #[must_use]
    pub fn fence(&self) -> Fence {
        self.operation.fence
    }

    /// The key for a step's call to another service, the same on every attempt.
    #[must_use]
    pub fn derived_key(&self, step: &str) -> String {
        lease::derived_key(&self.operation, step)
    }

    /// Keeps small data for the next attempt.
    ///
    /// # Errors
    /// When it is too large, or the store cannot be asked.
    pub async fn checkpoint(&self, data: impl Into<Bytes>) -> Result<Held> {
        lease::save_checkpoint(&self.ledger, &self.operation, Write::Checkpoint(data.into())).await
    }

    /// Keeps small data for the next attempt, and says that this run has got further than the one before: what was lost
    /// so far is forgotten, so a long run that is killed again and again is not parked for it.
    ///
    /// # Errors
    /// When it is too large, or the store cannot be asked.
    pub async fn progress(&self, data: impl Into<Bytes>) -> Result<Held> {
        lease::save_checkpoint(&self.ledger, &self.operation, Write::Progress(data.into())).await
    }

    /// Whether the lease is lost: to be asked before each effect by work that cannot be cancelled.
    /// The clock is asked too: a process that slept through its lease knows so at its first
    /// question, before its own renewer has woken up.
    #[must_use]
    pub fn is_lost(&self) -> bool {
        self.standing.borrow().until.is_none_or(Uptime::has_passed)
    }
}

impl<S: Store> Ledger<S> {
    /// Claims, and if this caller is the one, runs `handler` under a lease that is renewed in the
    /// background, and settles. The run has its own task: a caller that goes away does not stop
    /// it. A lost lease cancels it. A panic is a failure or, where a run may not simply be
    /// repeated, doubt.
    ///
    /// If newer data arrives while it runs (supersede-if-newer), the handler is called again for
    /// that, in the background.
    ///
    /// # Errors
    /// As [`Ledger::claim`] and [`Lease::complete`].
    pub async fn run<F, Fut>(&self, work: Work, handler: F) -> Result<Claim<Ran>>
    where
        F: Fn(Context<S>) -> Fut + Send + Sync + 'static,
        Fut: Future<Output = Result<Outcome, Unfinished>> + Send + 'static,
    {
        let (ledger, handler) = (self.clone(), Arc::new(handler));
        in_own_task(async move {
            // Counted from before the claim: a ledger that stops must not miss a run about to begin.
            let _counted = ledger.enter();
            match ledger.claim(work).await?.acquired() {
                Ok(lease) => Ok(Claim::Acquired(lease.run_all(handler).await?)),
                Err(other) => Ok(other),
            }
        })
        .await
    }

    /// As [`Ledger::run`], but while somebody else is at it, waits up to `up_to` first.
    ///
    /// # Errors
    /// As [`Ledger::run`].
    pub async fn run_or_wait<F, Fut>(&self, work: Work, up_to: Duration, handler: F) -> Result<Claim<Ran>>
    where
        F: Fn(Context<S>) -> Fut + Send + Sync + 'static,
        Fut: Future<Output = Result<Outcome, Unfinished>> + Send + 'static,
    {
        let (ledger, handler) = (self.clone(), Arc::new(handler));
        in_own_task(async move {
            // Counted from before the claim: a ledger that stops must not miss a run about to begin.
            let _counted = ledger.enter();
            match ledger.claim_or_wait(work, up_to).await?.acquired() {
                Ok(lease) => Ok(Claim::Acquired(lease.run_all(handler).await?)),
                Err(other) => Ok(other),
            }
        })
        .await
    }

    /// As [`Ledger::run`], but an operation in doubt is first put to a probe, which may find out
    /// what became of it.
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
        let (ledger, handler) = (self.clone(), Arc::new(handler));
        in_own_task(async move {
            // Counted from before the claim: a ledger that stops must not miss a run about to begin.
            let _counted = ledger.enter();
            let mut claim = ledger.claim(work.clone()).await?;
            if let Claim::InDoubt(operation) = &claim
                && ledger.probe(operation, &probe).await?
            {
                claim = ledger.claim(work).await?;
            }
            match claim.acquired() {
                Ok(lease) => Ok(Claim::Acquired(lease.run_all(handler).await?)),
                Err(other) => Ok(other),
            }
        })
        .await
    }

    /// Puts an operation in doubt to a probe; true if that doubt is over. What the probe found counts
    /// only if the operation has not moved on meanwhile, so two probes cannot disagree.
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
        // Whatever the answer, this doubt is over: by this finding, or by another one before it.
        debug_assert!(matches!(applied.answer, Answer::Resolved | Answer::NotNow(_)), "{:?}", applied.answer);
        Ok(true)
    }

    /// Claims newer data that waited for the run of `operation` to settle. If it cannot be had
    /// now, it stays pending: whoever looks after its scope finds it.
    pub(crate) async fn claim_successor(&self, operation: &Operation) -> Option<Lease<S>> {
        let policy = operation.lease.as_ref()?.terms.clone();
        let next = self.store().by_id(operation.scope.tenant(), operation.id).await.ok()??;
        let mut work = Work::new(next.scope, next.key, next.fingerprint).policy(policy).labels(next.labels);
        if let Some(order) = next.order {
            work = work.order(order);
        }
        if let Some(payload) = next.payload {
            work = work.payload(payload);
        }
        self.claim(work).await.ok()?.acquired::<()>().ok()
    }
}

/// Runs to the end whether the caller waits or not. A panic of ours goes to the caller.
pub(crate) async fn in_own_task<T: Send + 'static>(task: impl Future<Output = T> + Send + 'static) -> T {
    match tokio::spawn(task.in_current_span()).await {
        Ok(done) => done,
        Err(error) => match error.try_into_panic() {
            Ok(panic) => std::panic::resume_unwind(panic),
            // Only a runtime that shuts down cancels it, and then nobody waits any more.
            Err(_) => std::future::pending().await,
        },
    }
}

/// How a run ended, and whether newer data waits to be run next.
pub(crate) type RanOne = (Ran, bool);

/// Runs newer data that waited for `operation`, and what came meanwhile, until none is left. The
/// caller of the first run has its answer and does not wait for these.
pub(crate) fn run_successors<S, F, Fut>(ledger: Ledger<S>, mut operation: Operation, run: F)
where
    S: Store,
    F: Fn(Lease<S>) -> Fut + Send + 'static,
    Fut: Future<Output = Result<RanOne>> + Send,
{
    // Counted from here on: between two runs it must not seem that there is none.
    let counted = ledger.enter();
    let all = async move {
        let _counted = counted;
        while let Some(lease) = ledger.claim_successor(&operation).await {
            operation = lease.operation().clone();
            match run(lease).await {
                Ok((_, true)) => {}
                Ok((_, false)) => return,
                Err(error) => return log::newer_data_not_run(&operation, &error),
            }
        }
    };
    tokio::spawn(all.in_current_span());
}

impl<S: Store> Lease<S> {
    /// Runs `handler` under this lease, as [`Ledger::run`] does under the one that it claims.
    ///
    /// # Errors
    /// As [`Lease::complete`].
    pub async fn run<F, Fut>(self, handler: F) -> Result<Ran>
    where
        F: Fn(Context<S>) -> Fut + Send + Sync + 'static,
        Fut: Future<Output = Result<Outcome, Unfinished>> + Send + 'static,
    {
        // Counted from here: a ledger that stops must not miss a run about to begin.
        let counted = self.ledger().enter();
        in_own_task(async move {
            let _counted = counted;
            self.run_all(Arc::new(handler)).await
        })
        .await
    }

    async fn run_all<F, Fut>(self, handler: Arc<F>) -> Result<Ran>
    where
        F: Fn(Context<S>) -> Fut + Send + Sync + 'static,
        Fut: Future<Output = Result<Outcome, Unfinished>> + Send + 'static,
    {
        let (ledger, operation) = (self.ledger().clone(), self.operation().clone());
        let (ran, successor) = self.run_one(handler.clone()).await?;
        if successor {
            run_successors(ledger, operation, move |lease| lease.run_one(handler.clone()));
        }
        Ok(ran)
    }

    async fn run_one<F, Fut>(self, handler: Arc<F>) -> Result<RanOne>
    where
        F: Fn(Context<S>) -> Fut + Send + Sync + 'static,
        Fut: Future<Output = Result<Outcome, Unfinished>> + Send + 'static,
    {
        let (_counted, halt) = self.ledger().enter();
        let renewal = self.keep();
        let context = self.context(&renewal);
        crash_point!("work.before");
        if self.remaining().is_zero() {
            return Ok(self.put_back_unbegun().await);
        }
        let doubts = self.operation().lease.as_ref().is_some_and(|lease| lease.terms.on_lost.doubts());
        let Some(end) = self.attend(&renewal, halt, doubts, async move { handler(context).await }).await else {
            return Ok((Ran::LeaseLost, false));
        };
        crash_point!("work.after");
        let ran = match end.clone() {
            Write::Complete(outcome) => Ran::Completed(outcome),
            Write::Fail(failure) => Ran::Failed(failure),
            Write::Doubt { reason } => Ran::Doubted(reason),
            _ => Ran::Released,
        };
        match self.settle_while_renewed(end, &renewal).await? {
            Settled::LeaseLost => Ok((Ran::LeaseLost, false)),
            Settled::Yes { successor } => Ok((ran, successor)),
        }
    }

    /// We slept through the lease before the work began (or the claim took that long), and must not
    /// begin now: somebody else may be at it. If nobody is, nothing is in doubt.
    async fn put_back_unbegun(self) -> RanOne {
        match self.settle(Write::Release { delay: Duration::ZERO, why: None }).await {
            Ok(Settled::Yes { successor }) => (Ran::Released, successor),
            Ok(Settled::LeaseLost) | Err(_) => (Ran::LeaseLost, false),
        }
    }

    /// Begins to renew in the background.
    pub(crate) fn keep(&self) -> Renewal {
        self.ledger().renewer().keep(self.operation().id, self.fence(), self.term(), self.deadline())
    }

    pub(crate) fn context(&self, renewal: &Renewal) -> Context<S> {
        let operation = Arc::new(self.operation().clone());
        Context { ledger: self.ledger().clone(), operation, standing: renewal.watch() }
    }

    /// Attends the work until it ends, however it ends: the settle that follows from it, or none
    /// when the lease is lost. `doubts` says whether work that was ended half-way may have had an
    /// effect that must not be repeated.
    pub(crate) async fn attend(
        &self,
        renewal: &Renewal,
        mut halt: watch::Receiver<bool>,
        doubts: bool,
        work: impl Future<Output = Result<Outcome, Unfinished>> + Send + 'static,
    ) -> Option<Write> {
        let mut task = tokio::spawn(work.in_current_span());
        let ended = tokio::select! {
            // Work that has ended has ended, whatever else is the case by now.
            biased;
            ended = &mut task => ended,
            () = renewal.lost() => {
                log::lost(self.operation(), "the work is cancelled");
                task.abort();
                return None;
            }
            () = renewal.cancelled() => {
                task.abort();
                return Some(match doubts {
                    true => Write::Doubt { reason: "it was cancelled while it ran".into() },
                    false => Write::Fail(Failure { error: CANCELLED.into(), retry: Retry::Never }),
                });
            }
            () = self.is_to_leave() => {
                task.abort();
                return Some(match doubts {
                    true => Write::Doubt { reason: NODE_STOPPED.into() },
                    false => Write::Release { delay: Duration::ZERO, why: None },
                });
            }
            Ok(_) = halt.wait_for(|halt| *halt) => {
                task.abort();
                return Some(match doubts {
                    true => Write::Doubt { reason: NODE_STOPPED.into() },
                    false => Write::Release { delay: Duration::ZERO, why: None },
                });
            }
        };
        Some(match ended {
            Ok(Ok(outcome)) => Write::Complete(outcome),
            Ok(Err(Unfinished::Failed(failure))) => Write::Fail(failure),
            Ok(Err(Unfinished::NotYet(delay))) => Write::Release { delay, why: None },
            Ok(Err(Unfinished::NotNow { after, why })) => Write::Release { delay: after, why: Some(why) },
            Ok(Err(Unfinished::Away { why, .. })) => Write::Release { delay: AWAY, why: Some(why) },
            Ok(Err(Unfinished::Unknown(reason))) => Write::Doubt { reason },
            Ok(Err(Unfinished::Declined(outcome))) => Write::Complete(outcome),
            Err(error) => {
                let reason = format!("the handler {}", describe_panic(error));
                match doubts {
                    true => Write::Doubt { reason },
                    false => Write::Fail(Failure { error: reason, retry: Retry::Backoff }),
                }
            }
        })
    }

    /// Settles while the lease is still renewed, so that a store that is away for a while does not
    /// cost the work.
    async fn settle_while_renewed(self, write: Write, renewal: &Renewal) -> Result<Settled> {
        /// Longer than any lease: the renewal says when it is over.
        const UNTIL_LOST: Duration = Duration::from_secs(7 * 24 * 3600);
        /// For an answer that is on its way already. A process that slept through its lease, and
        /// wakes up at a store that is there, is told the truth.
        const LAST_ANSWER: Duration = Duration::from_secs(1);
        let settled = self.ledger().settle(self.operation(), write, Uptime::now() + UNTIL_LOST);
        tokio::pin!(settled);
        tokio::select! {
            settled = &mut settled => settled,
            () = renewal.lost() => tokio::time::timeout(LAST_ANSWER, settled).await.unwrap_or_else(|_| {
                Err(crate::Error::OutcomeUnknown("the lease ended while its outcome was being stored".into()))
            }),
        }
    }
}

fn describe_panic(error: tokio::task::JoinError) -> String {
    match error.try_into_panic() {
        Ok(panic) => {
            let said = panic.downcast_ref::<&str>().map(|text| (*text).to_owned());
            let said = said.or_else(|| panic.downcast_ref::<String>().cloned()).unwrap_or_default();
            format!("panicked: {said}")
        }
        Err(_) => "was cancelled".to_owned(),
    }
}
