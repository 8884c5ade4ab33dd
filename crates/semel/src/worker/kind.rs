//! One kind of work: who runs it, by which rules, and how many at once.

use std::{future::Future, pin::Pin, sync::Arc, time::Duration};

use tokio::sync::Semaphore;
use tracing::Span;

use super::targets::Targets;
use crate::{
    Context, Lease, Operation, Outcome, Policy, Ran, Result, Scope, Unfinished,
    store::{Limits, Store},
};

/// How many of a kind run at once, unless it is told otherwise.
const AT_ONCE: usize = 16;

/// The longest that an operation of a target which is away waits for its next look, whatever its age.
const LONGEST_AWAY: Duration = Duration::from_secs(3600);

type BoxFuture<T> = Pin<Box<dyn Future<Output = T> + Send>>;
type Runs<S> = Box<dyn Fn(Lease<S>) -> BoxFuture<Result<Ran>> + Send + Sync>;
/// What an operation calls, if that is known.
type Names = Box<dyn Fn(&Operation) -> Option<String> + Send + Sync>;
type Takes = Box<dyn Fn(&str, &str) -> bool + Send + Sync>;

/// One kind of work.
#[must_use = "a worker has to be told of it"]
pub struct Kind<S: Store> {
    pub(super) service: String,
    takes: Takes,
    runs: Runs<S>,
    policy: Box<dyn Fn(&Scope) -> Policy + Send + Sync>,
    target: Names,
    targets: Arc<Targets>,
    pub(super) span: Box<dyn Fn(&Operation) -> Span + Send + Sync>,
    pub(super) seats: Arc<Semaphore>,
    pub(super) limits: Limits,
}

impl<S: Store> Kind<S> {
    /// Work in leased mode: the handler's effects are elsewhere.
    pub fn leased<F, Fut>(service: &str, kind: &str, handler: F) -> Self
    where
        F: Fn(Context<S>) -> Fut + Send + Sync + 'static,
        Fut: Future<Output = Result<Outcome, Unfinished>> + Send + 'static,
    {
        let (handler, targets) = (Arc::new(handler), Arc::<Targets>::default());
        let asked = targets.clone();
        let runs = move |lease: Lease<S>| {
            let (handler, targets) = (handler.clone(), asked.clone());
            let run = lease.run(move |context| {
                let (targets, age) = (targets.clone(), age(context.operation()));
                let work = handler(context);
                async move { noted(work.await, &targets, age) }
            });
            Box::pin(run) as BoxFuture<_>
        };
        Self { targets, ..Self::run_by(service, kind, runs) }
    }

    /// Work in atomic mode: what the handler writes in its transaction commits with the completion.
    pub fn atomic<F, Fut>(service: &str, kind: &str, handler: F) -> Self
    where
        F: Fn(Context<S>, S::Tx) -> Fut + Send + Sync + 'static,
        Fut: Future<Output = Result<Outcome, Unfinished>> + Send + 'static,
    {
        let (handler, targets) = (Arc::new(handler), Arc::<Targets>::default());
        let asked = targets.clone();
        let runs = move |lease: Lease<S>| {
            let (handler, targets) = (handler.clone(), asked.clone());
            let run = lease.run_atomic(move |context, tx| {
                let (targets, age) = (targets.clone(), age(context.operation()));
                let work = handler(context, tx);
                async move { noted(work.await, &targets, age) }
            });
            Box::pin(run) as BoxFuture<_>
        };
        Self { targets, ..Self::run_by(service, kind, runs) }
    }

    /// Work that is run in a way of its own, under the lease it is given.
    pub fn run_by(
        service: &str,
        kind: &str,
        runs: impl Fn(Lease<S>) -> BoxFuture<Result<Ran>> + Send + Sync + 'static,
    ) -> Self {
        let name = kind.to_owned();
        Self {
            service: service.to_owned(),
            takes: Box::new(move |kind, _| kind == name),
            runs: Box::new(runs),
            policy: Box::new(|_| Policy::default()),
            target: Box::new(|_| None),
            targets: Arc::default(),
            span: Box::new(|_| Span::none()),
            seats: Arc::new(Semaphore::new(AT_ONCE)),
            limits: Limits::default(),
        }
    }

    /// Takes every kind and tenant of the service of which this says so, not only the one that it is called.
    pub fn taking(self, takes: impl Fn(&str, &str) -> bool + Send + Sync + 'static) -> Self {
        Self { takes: Box::new(takes), ..self }
    }

    /// The rules for work that was enqueued without any.
    pub fn policy(self, policy: Policy) -> Self {
        self.policy_by(move |_| policy.clone())
    }

    /// The same, by whose work it is and of which kind.
    pub fn policy_by(self, policy: impl Fn(&Scope) -> Policy + Send + Sync + 'static) -> Self {
        Self { policy: Box::new(policy), ..self }
    }

    /// How many run at once on this node.
    pub fn at_once(self, most: usize) -> Self {
        self.seats(Arc::new(Semaphore::new(most)))
    }

    /// Seats that are shared with others: with another kind, or with callers who run the same work by themselves.
    pub fn seats(self, seats: Arc<Semaphore>) -> Self {
        Self { seats, ..self }
    }

    /// How many run at once on all nodes.
    pub fn at_once_in_all(mut self, most: u32) -> Self {
        self.limits.at_once = Some(most);
        self
    }

    /// How many start on all nodes, at most, in a time.
    pub fn rate(mut self, most: u32, per: Duration) -> Self {
        self.limits.every = Some(per / most.max(1));
        self
    }

    /// What the handler calls, by the operation. While it is away, others of the same target are not tried.
    pub fn target(self, target: impl Fn(&Operation) -> Option<String> + Send + Sync + 'static) -> Self {
        Self { target: Box::new(target), ..self }
    }

    /// What log lines of a run say beside what the ledger tells of it.
    pub fn span(self, span: impl Fn(&Operation) -> Span + Send + Sync + 'static) -> Self {
        Self { span: Box::new(span), ..self }
    }

    pub(super) fn takes(&self, kind: &str, tenant: &str) -> bool {
        (self.takes)(kind, tenant)
    }

    pub(super) fn policy_of(&self, scope: &Scope) -> Policy {
        (self.policy)(scope)
    }

    /// Runs one operation, unless its target is away.
    pub(super) async fn run(&self, lease: Lease<S>) {
        let target = (self.target)(lease.operation());
        if let Some(wait) = target.as_deref().and_then(|target| self.targets.wait(target)) {
            let wait = patience(wait, age(lease.operation()));
            if let Err(error) = lease.release(wait).await {
                tracing::warn!(%error, "work whose target is away could not be put back; its lease lapses");
            }
            return;
        }
        match ((self.runs)(lease).await, target) {
            (Ok(Ran::Completed(_) | Ran::Failed(_)), Some(target)) => self.targets.is_there(&target),
            // How a run ended is logged by the ledger.
            (Ok(_), _) => {}
            (Err(error), _) => tracing::warn!(%error, "a run was not brought to its end; it is tried again"),
        }
    }
}

/// How a handler's work ended; one whose target is away waits for as long as that pauses.
fn noted(ended: Result<Outcome, Unfinished>, targets: &Targets, age: Duration) -> Result<Outcome, Unfinished> {
    match ended {
        Err(Unfinished::Away { target, why }) => {
            Err(Unfinished::NotNow { after: patience(targets.is_away(&target, &why), age), why })
        }
        ended => ended,
    }
}

/// How long work waits whose target is away: longer if it is old. A target that is away for days would else be asked about
/// by everything that waits, over and over.
fn patience(pause: Duration, age: Duration) -> Duration {
    pause.max((age / 4).min(LONGEST_AWAY))
}

fn age(operation: &Operation) -> Duration {
    operation.claimed_at.since(operation.created_at)
}
