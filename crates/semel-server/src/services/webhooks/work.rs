//! The kinds of work of this service: the worker runs events that failed, were released or lost, and newer data. Each
//! source is one kind with its own seats, so no source blocks another.

use std::sync::Arc;

use semel::{Failure, Kind, Lease, Operation, Ran, Result, Retry, Settled};
use semel_store::Database;

use super::{
    Receiver, SERVICE,
    event::{Event, UNTYPED},
    process::{NO_DATA, span},
    source::{Source, Way, is_body, pulled_type, source_of},
};

impl Receiver {
    /// The kinds of work of this service.
    #[must_use]
    pub fn kinds(&self) -> Vec<Kind<Database>> {
        let all = self.clone();
        let others = Kind::no_work(SERVICE, move |kind, _| is_body(kind) || all.is_asked_for(kind));
        self.sources().map(|source| self.kind(source)).chain([others]).collect()
    }

    /// Whether a kind is that of events that programs ask for.
    fn is_asked_for(&self, kind: &str) -> bool {
        let source = self.source(source_of(kind));
        source.zip(pulled_type(kind)).is_some_and(|(source, kind)| source.pulls(kind))
    }

    /// The events of one source and its tenant. Events of a source that is not configured wait.
    fn kind(&self, source: &Arc<Source>) -> Kind<Database> {
        let (receiver, of) = (self.clone(), source.clone());
        let run = move |lease| Box::pin(receiver.clone().process_due(lease, of.clone())) as _;
        let (taken, ruled, shown, called) = (source.clone(), source.clone(), source.clone(), source.clone());
        let clock = self.0.clock.clone();
        Kind::run_by(SERVICE, &source.name, run)
            .taking(move |kind, tenant| {
                // Without their rule, events that waited for programs are run here.
                let is_asked_for = pulled_type(kind).is_some_and(|kind| taken.pulls(kind));
                !is_body(kind) && !is_asked_for && source_of(kind) == taken.name && tenant == taken.config.tenant
            })
            // Shared with deliveries, which queue for the same seats.
            .seats(source.seats.clone())
            .policy_by(move |_| ruled.policy(clock()))
            .span(move |operation| {
                let kind = operation.labels.0[0].as_deref().unwrap_or(UNTYPED);
                span(&shown, operation.key.as_str(), kind)
            })
            .target(move |operation| target(&called, operation))
    }

    /// Processes an event that a worker has claimed.
    async fn process_due(self, lease: Lease<Database>, source: Arc<Source>) -> Result<Ran> {
        if let Some(event) = Event::of(lease.operation(), &source) {
            return self.process(lease, source, event, None).await;
        }
        let failure = Failure { error: NO_DATA.to_owned(), retry: Retry::Never };
        Ok(match lease.fail(failure.clone()).await? {
            Settled::Yes { .. } => Ran::Failed(failure),
            Settled::LeaseLost => Ran::LeaseLost,
        })
    }
}

/// The endpoint to which an event is forwarded, if its rule says so.
fn target(source: &Source, operation: &Operation) -> Option<String> {
    if !source.forwards() {
        return None;
    }
    match source.way(&Event::of(operation, source)?)? {
        Way::Forward(caller) => Some(caller.target()),
        _ => None,
    }
}
