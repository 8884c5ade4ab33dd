//! The course of a run: runs the work while its lease is renewed, then settles it; newer data runs next.

use std::{sync::Arc, time::Duration};

use tokio::sync::watch;
use tracing::Instrument as _;

use super::{Context, Handed, NODE_STOPPED, Ran, Unfinished};
use crate::{
    Lease, Ledger, Operation, Outcome, Result, Uptime, Work, crash_point,
    lease::Settled,
    log,
    machine::{CANCELLED, Failure, Retry, Write},
    renewer::Renewal,
    store::Store,
    text::panic_text,
    worker::targets::patience,
};

/// The delay of a new run whose target is unreachable, without a worker.
const AWAY: Duration = Duration::from_secs(1);

/// Runs to the end whether the caller waits or not. A panic of the engine is passed to the caller.
pub(crate) async fn in_own_task<T: Send + 'static>(task: impl Future<Output = T> + Send + 'static) -> T {
    match tokio::spawn(task.in_current_span()).await {
        Ok(done) => done,
        Err(error) => match error.try_into_panic() {
            Ok(panic) => std::panic::resume_unwind(panic),
            // Only the shutdown of a runtime cancels it, and then no caller waits any more.
            Err(_) => std::future::pending().await,
        },
    }
}

/// The end of a run, the value that its handler hands over, and whether newer data waits.
pub(crate) struct RanOne<V> {
    pub(crate) ran: Ran,
    pub(crate) handed: Handed<V>,
    pub(crate) successor: bool,
}

impl<V> RanOne<V> {
    pub(crate) const LOST: Self = Self { ran: Ran::LeaseLost, handed: Handed::NotStored, successor: false };
}

/// How the work of a handler ended.
pub(crate) enum Attended<T> {
    /// It returned.
    Ended(T),
    /// It was cancelled, or it panicked: this write settles the run.
    CutOff(Write),
    /// The lease was lost.
    Lost,
}

/// The result of a handler: what to store, and perhaps a value for its caller.
pub(crate) trait End: Send + 'static {
    type Value: Send + 'static;
    fn parts(self) -> (Result<Outcome, Unfinished>, Self::Value);
}

impl End for Result<Outcome, Unfinished> {
    type Value = ();
    fn parts(self) -> (Self, ()) {
        (self, ())
    }
}

impl<V: Send + 'static> End for (Result<Outcome, Unfinished>, V) {
    type Value = V;
    fn parts(self) -> Self {
        self
    }
}

impl<S: Store> Ledger<S> {
    /// Claims newer data that waited for the run of `operation` to settle. If it cannot be claimed now, it stays
    /// pending for a worker.
    async fn claim_successor(&self, operation: &Operation) -> Option<Lease<S>> {
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

/// Runs newer data that waited for `operation`, and data that arrives meanwhile, until none is left. The caller of the
/// first run has its answer and does not wait.
fn run_successors<S, F, Fut, V>(ledger: Ledger<S>, mut operation: Operation, run: F)
where
    S: Store,
    F: Fn(Lease<S>) -> Fut + Send + 'static,
    Fut: Future<Output = Result<RanOne<V>>> + Send,
    V: Send,
{
    // Counted from here on: between two runs the ledger must not seem idle.
    let counted = ledger.enter();
    let all = async move {
        let _counted = counted;
        while let Some(lease) = ledger.claim_successor(&operation).await {
            operation = lease.operation().clone();
            match run(lease).await {
                Ok(RanOne { successor: true, .. }) => {}
                Ok(_) => return,
                Err(error) => return log::newer_data_not_run(&operation, &error),
            }
        }
    };
    tokio::spawn(all.in_current_span());
}

impl<S: Store> Lease<S> {
    /// Runs `handler` under this lease, as [`Ledger::run`] does under the lease that it claims. On a
    /// [worker](crate::Worker), newer data is left for the next take.
    ///
    /// # Errors
    /// As [`Lease::complete`].
    pub async fn run<F, Fut>(self, handler: F) -> Result<Ran>
    where
        F: Fn(Context<S>) -> Fut + Send + Sync + 'static,
        Fut: Future<Output = Result<Outcome, Unfinished>> + Send + 'static,
    {
        Ok(self.counted(|lease| lease.run_all(handler)).await?.0)
    }

    /// As [`Lease::run`], with a handler that returns what to store and, beside it, a value for this caller: an answer
    /// too large to store, an error. The value is handed over only if the handler's result was stored. Values from runs
    /// of newer data are dropped.
    ///
    /// # Errors
    /// As [`Lease::complete`].
    pub async fn run_handing<F, Fut, V>(self, handler: F) -> Result<(Ran, Handed<V>)>
    where
        F: Fn(Context<S>) -> Fut + Send + Sync + 'static,
        Fut: Future<Output = (Result<Outcome, Unfinished>, V)> + Send + 'static,
        V: Send + 'static,
    {
        self.counted(|lease| lease.run_all(handler)).await
    }

    /// Runs in its own task, counted from here: a ledger that stops must not miss a run about to begin.
    pub(crate) async fn counted<R, Runs, T>(self, run: R) -> T
    where
        R: FnOnce(Self) -> Runs + Send + 'static,
        Runs: Future<Output = T> + Send,
        T: Send + 'static,
    {
        let counted = self.ledger().enter();
        in_own_task(async move {
            let _counted = counted;
            run(self).await
        })
        .await
    }

    pub(super) async fn run_all<F, Fut>(self, handler: F) -> Result<(Ran, Handed<<Fut::Output as End>::Value>)>
    where
        F: Fn(Context<S>) -> Fut + Send + Sync + 'static,
        Fut: Future<Output: End> + Send + 'static,
    {
        let handler = Arc::new(handler);
        self.run_each(move |lease| lease.run_one(handler.clone())).await
    }

    /// Runs this lease, then newer data that waited for it, in the background. A worker takes newer data itself: under
    /// its limits, and not after its stop.
    pub(crate) async fn run_each<F, Fut, V>(self, run: F) -> Result<(Ran, Handed<V>)>
    where
        F: Fn(Self) -> Fut + Send + 'static,
        Fut: Future<Output = Result<RanOne<V>>> + Send,
        V: Send + 'static,
    {
        let (ledger, operation, by_worker) = (self.ledger().clone(), self.shared(), self.turn().is_some());
        let RanOne { ran, handed, successor } = run(self).await?;
        if successor && !by_worker {
            run_successors(ledger, Operation::clone(&operation), run);
        }
        Ok((ran, handed))
    }

    async fn run_one<F, Fut>(self, handler: Arc<F>) -> Result<RanOne<<Fut::Output as End>::Value>>
    where
        F: Fn(Context<S>) -> Fut + Send + Sync + 'static,
        Fut: Future<Output: End> + Send + 'static,
    {
        let (_counted, halt) = self.ledger().enter();
        let renewal = self.keep();
        let context = self.context(&renewal);
        crash_point!("work.before");
        if self.remaining().is_zero() {
            return Ok(self.release_unbegun().await);
        }
        let doubts = self.operation().lease.as_ref().is_some_and(|lease| lease.terms.on_lost.doubts());
        let work = self.noting_return(async move { handler(context).await.parts() });
        let (write, handed) = match self.attend(&renewal, halt, doubts, work).await {
            Attended::Ended((said, value)) => (self.write_for(said), Handed::Stored(value)),
            Attended::CutOff(write) => (write, Handed::Nothing),
            Attended::Lost => return Ok(RanOne::LOST),
        };
        crash_point!("work.after");
        let ran = Ran::by(&write);
        Ok(match self.settle_while_renewed(write, &renewal).await? {
            Settled::Yes { successor } => RanOne { ran, handed, successor },
            Settled::LeaseLost => RanOne::LOST,
        })
    }

    /// The lease expired before the work began (the process slept, or the claim took that long). The work must not
    /// begin: another node may run it. Nothing is in doubt.
    async fn release_unbegun<V>(self) -> RanOne<V> {
        match self.settle(Write::Release { delay: Duration::ZERO, why: None }).await {
            Ok(Settled::Yes { successor }) => RanOne { ran: Ran::Released, handed: Handed::Nothing, successor },
            Ok(Settled::LeaseLost) | Err(_) => RanOne::LOST,
        }
    }

    /// Starts to renew in the background.
    pub(crate) fn keep(&self) -> Renewal {
        self.ledger().renewer().keep(self.operation().id, self.fence(), self.term(), self.deadline())
    }

    pub(crate) fn context(&self, renewal: &Renewal) -> Context<S> {
        let (operation, turn) = (self.shared(), self.turn().cloned());
        Context { ledger: self.ledger().clone(), operation, standing: renewal.watch(), turn }
    }

    /// Runs the work until it ends in any way. `doubts` is true if cancelled work may have had an effect that must not
    /// be repeated.
    pub(crate) async fn attend<T: Send + 'static>(
        &self,
        renewal: &Renewal,
        mut halt: watch::Receiver<bool>,
        doubts: bool,
        work: impl Future<Output = T> + Send + 'static,
    ) -> Attended<T> {
        let mut task = tokio::spawn(work.in_current_span());
        let (reason, otherwise) = tokio::select! {
            // Work that has ended counts as ended, even if its lease is lost by now.
            biased;
            ended = &mut task => match ended {
                Ok(ended) => return Attended::Ended(ended),
                Err(error) => {
                    let error = format!("the handler {}", describe_panic(error));
                    (error.clone(), Write::Fail(Failure { error, retry: Retry::Backoff }))
                }
            },
            () = renewal.lost() => {
                log::lost(self.operation(), "the work is cancelled");
                task.abort();
                return Attended::Lost;
            }
            () = renewal.cancelled() => (
                "it was cancelled while it ran".to_owned(),
                Write::Fail(Failure { error: CANCELLED.into(), retry: Retry::Never }),
            ),
            () = self.is_to_leave() => (NODE_STOPPED.to_owned(), Write::Release { delay: Duration::ZERO, why: None }),
            Ok(_) = halt.wait_for(|halt| *halt) => {
                (NODE_STOPPED.to_owned(), Write::Release { delay: Duration::ZERO, why: None })
            }
        };
        task.abort();
        if matches!(otherwise, Write::Release { .. }) && !doubts {
            log::stopped(self.operation(), &reason);
        }
        Attended::CutOff(if doubts { Write::Doubt { reason } } else { otherwise })
    }

    /// The write that settles a run by its handler's result.
    pub(crate) fn write_for(&self, said: Result<Outcome, Unfinished>) -> Write {
        match said {
            Ok(outcome) | Err(Unfinished::Declined(outcome)) => Write::Complete(outcome),
            Err(Unfinished::Failed(failure)) => Write::Fail(failure),
            Err(Unfinished::Released { after, why }) => Write::Release { delay: after, why },
            Err(Unfinished::TurnOver) => Write::Release { delay: Duration::ZERO, why: None },
            Err(Unfinished::Away { target, after, why }) => {
                let delay = self.pause(&target, &why).unwrap_or_else(|| patience(AWAY, self.operation())).max(after);
                Write::Release { delay, why: Some(why) }
            }
            Err(Unfinished::Doubted(reason)) => Write::Doubt { reason },
        }
    }

    /// Settles while the lease is still renewed, so that a short outage of the store does not lose the work.
    async fn settle_while_renewed(self, write: Write, renewal: &Renewal) -> Result<Settled> {
        /// Longer than any lease: the renewal decides when it is over.
        const UNTIL_LOST: Duration = Duration::from_secs(7 * 24 * 3600);
        /// For an answer that is already in flight: a process that slept through its lease gets it if the store is
        /// available.
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
        Ok(panic) => format!("panicked: {}", panic_text(&*panic)),
        Err(_) => "was cancelled".to_owned(),
    }
}
