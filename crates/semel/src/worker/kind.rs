//! One kind of work: its handler, its policy, its limits.

use std::{collections::BTreeMap, future::Future, pin::Pin, sync::Arc, time::Duration};

use parking_lot::Mutex;
use tokio::sync::{Semaphore, watch};
use tracing::Span;

use super::targets::Targets;
use crate::{
    Context, Lease, Operation, Outcome, Policy, Ran, Result, Scope, Unfinished, Uptime,
    lease::Turn,
    store::{Limits, Store},
};

/// The default concurrency of a kind.
const AT_ONCE: usize = 16;

type BoxFuture<T> = Pin<Box<dyn Future<Output = T> + Send>>;
type Runs<S> = Box<dyn Fn(Lease<S>) -> BoxFuture<Result<Ran>> + Send + Sync>;
/// Returns the target of an operation, if it is known.
type Names = Box<dyn Fn(&Operation) -> Option<String> + Send + Sync>;
type Takes = Box<dyn Fn(&str, &str) -> bool + Send + Sync>;

/// One kind of work.
#[must_use = "a kind does nothing until it is added to a worker"]
pub struct Kind<S: Store> {
    pub(super) service: String,
    pub(super) is_work: bool,
    pub(super) name: String,
    takes: Takes,
    runs: Runs<S>,
    policy: Box<dyn Fn(&Scope) -> Policy + Send + Sync>,
    target: Names,
    pub(super) targets: Arc<Targets>,
    pub(super) span: Box<dyn Fn(&Operation) -> Span + Send + Sync>,
    pub(super) seats: Arc<Semaphore>,
    pub(super) limits: Limits,
    /// By kind: how many starts of the rate were not used, because the operation's target is paused.
    unused: Mutex<BTreeMap<String, u32>>,
    turn: Option<Duration>,
}

impl<S: Store> Kind<S> {
    /// Work in leased mode: the handler's effects are elsewhere.
    pub fn leased<F, Fut>(service: &str, kind: &str, handler: F) -> Self
    where
        F: Fn(Context<S>) -> Fut + Send + Sync + 'static,
        Fut: Future<Output = Result<Outcome, Unfinished>> + Send + 'static,
    {
        let handler = Arc::new(handler);
        Self::run_by(service, kind, move |lease| {
            let handler = handler.clone();
            Box::pin(lease.run(move |context| handler(context)))
        })
    }

    /// Work in atomic mode: what the handler writes in its transaction commits with the completion.
    pub fn atomic<F, Fut>(service: &str, kind: &str, handler: F) -> Self
    where
        F: Fn(Context<S>, S::Tx) -> Fut + Send + Sync + 'static,
        Fut: Future<Output = Result<Outcome, Unfinished>> + Send + 'static,
    {
        let handler = Arc::new(handler);
        Self::run_by(service, kind, move |lease| {
            let handler = handler.clone();
            Box::pin(lease.run_atomic(move |context, tx| handler(context, tx)))
        })
    }

    /// Work with its own way to run, by [`Lease::run`] or [`Lease::run_atomic`] of the given lease.
    pub fn run_by(
        service: &str,
        kind: &str,
        runs: impl Fn(Lease<S>) -> BoxFuture<Result<Ran>> + Send + Sync + 'static,
    ) -> Self {
        let name = kind.to_owned();
        Self {
            service: service.to_owned(),
            is_work: true,
            name: kind.to_owned(),
            takes: Box::new(move |kind, _| kind == name),
            runs: Box::new(runs),
            policy: Box::new(|_| Policy::default()),
            target: Box::new(|_| None),
            targets: Arc::default(),
            span: Box::new(|_| Span::none()),
            seats: Arc::new(Semaphore::new(AT_ONCE)),
            limits: Limits::default(),
            unused: Mutex::default(),
            turn: None,
        }
    }

    /// Operations of a service that are no work for a worker, though they may be pending: their own callers claim them.
    /// The worker skips them, and does not log a missing handler.
    pub fn no_work(service: &str, takes: impl Fn(&str, &str) -> bool + Send + Sync + 'static) -> Self {
        let none = Self::run_by(service, "", |lease| {
            Box::pin(async move { lease.release(Duration::ZERO).await.map(|_| Ran::Released) })
        });
        Self { is_work: false, ..none.taking(takes) }
    }

    /// Also handles every kind and tenant of the service for which this returns true.
    pub fn taking(self, takes: impl Fn(&str, &str) -> bool + Send + Sync + 'static) -> Self {
        Self { takes: Box::new(takes), ..self }
    }

    /// The policy of operations that were enqueued without one. The work of a kind with an invalid policy is not taken,
    /// and logged; a worker has no probe, so [`OnLost::Probe`](crate::OnLost::Probe) is invalid.
    pub fn policy(self, policy: Policy) -> Self {
        self.policy_by(move |_| policy.clone())
    }

    /// The same, by tenant and kind.
    pub fn policy_by(self, policy: impl Fn(&Scope) -> Policy + Send + Sync + 'static) -> Self {
        Self { policy: Box::new(policy), ..self }
    }

    /// How many run concurrently on this node.
    pub fn at_once(self, most: usize) -> Self {
        self.seats(Arc::new(Semaphore::new(most.min(Semaphore::MAX_PERMITS))))
    }

    /// Seats that are shared: with another kind, or with callers that run the same work themselves.
    pub fn seats(self, seats: Arc<Semaphore>) -> Self {
        Self { seats, ..self }
    }

    /// How many run concurrently on all nodes.
    pub fn at_once_in_all(mut self, most: u32) -> Self {
        self.limits.at_once = Some(most);
        self
    }

    /// How many start per period, on all nodes. After an idle time the starts of up to one second are made up for at
    /// once.
    pub fn rate(mut self, most: u32, per: Duration) -> Self {
        self.limits.every = Some(per / most.max(1));
        self
    }

    /// How long a run keeps its seat before others have their turn. The handler checks
    /// [`Context::turn_is_over`](crate::Context::turn_is_over) and ends with [`Unfinished::TurnOver`]; a handler that
    /// does not check runs to its end.
    pub fn turn(self, turn: Duration) -> Self {
        Self { turn: Some(turn), ..self }
    }

    /// The target of an operation. While it is unreachable, other operations of the same target are not run.
    pub fn target(self, target: impl Fn(&Operation) -> Option<String> + Send + Sync + 'static) -> Self {
        Self { target: Box::new(target), ..self }
    }

    /// Extra log fields of a run.
    pub fn span(self, span: impl Fn(&Operation) -> Span + Send + Sync + 'static) -> Self {
        Self { span: Box::new(span), ..self }
    }

    /// Its name in a sign of life: `service/kind`, or `service/*` for one that takes several.
    pub(super) fn shown(&self) -> String {
        format!("{}/{}", self.service, if self.name.is_empty() { "*" } else { &self.name })
    }

    pub(super) fn takes(&self, kind: &str, tenant: &str) -> bool {
        (self.takes)(kind, tenant)
    }

    pub(super) fn policy_of(&self, scope: &Scope) -> Policy {
        (self.policy)(scope)
    }

    /// The starts that were not used, by kind; they are counted as given back.
    pub(super) fn take_unused(&self) -> BTreeMap<String, u32> {
        std::mem::take(&mut *self.unused.lock())
    }

    /// Counts starts of a kind's rate that were not used.
    pub(super) fn count_unused(&self, kind: &str, starts: u32) {
        if self.limits.every.is_some() {
            *self.unused.lock().entry(kind.to_owned()).or_default() += starts;
        }
    }

    /// The turn of a run that begins now. `stop` turns true when the worker stops, `leave` when its runs have to end.
    pub(super) fn begin_turn(&self, stop: watch::Receiver<bool>, leave: watch::Receiver<bool>) -> Turn {
        let until = self.turn.map(|turn| Uptime::now() + turn);
        Turn { until, stop, leave, targets: self.targets.clone(), returned: Arc::default() }
    }

    /// Runs one operation, unless its target is paused.
    pub(super) async fn run(&self, lease: Lease<S>) {
        let target = (self.target)(lease.operation());
        if let Some(target) = &target
            && let Some(pause) = self.targets.wait(target)
        {
            let wait = self.targets.put_off(target, pause, lease.operation());
            self.count_unused(lease.operation().scope.kind(), 1);
            if let Err(error) = lease.put_off(wait).await {
                tracing::warn!(%error, "an operation whose target is paused could not be released; its lease expires");
            }
            return;
        }
        let turn = lease.turn().cloned();
        let ran = (self.runs)(lease).await;
        // A run that was cancelled, or that panicked, has failed too, and says nothing of its target.
        let has_returned = turn.is_some_and(|turn| turn.has_returned());
        match (&ran, target) {
            (Ok(Ran::Completed(_) | Ran::Failed(_)), Some(target)) if has_returned => self.targets.is_there(&target),
            (_, Some(target)) => self.targets.is_unknown(&target),
            (_, None) => {}
        }
        // The ledger logs the end of a run.
        if let Err(error) = ran {
            tracing::warn!(%error, "a run could not be settled; it is retried");
        }
    }
}
