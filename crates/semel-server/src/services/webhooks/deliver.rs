//! From a delivery to its answer: it is stored, and processed if it gets the lease.

use std::{sync::Arc, time::Duration};

use semel::{Error, Operation, Ran, Result, crash_point};
use tokio::sync::OwnedSemaphorePermit;
use tracing::Instrument as _;

use super::{
    Receiver,
    event::Event,
    problems::WEBHOOK_FAILED,
    process::{Done, span},
    source::Source,
    status::Status,
};
use crate::http::problem::{Problem, STORE_UNAVAILABLE, of_store};

/// How long a delivery waits for a seat of its source. Without one it stays stored, and a worker runs it.
const SEAT_PATIENCE: Duration = Duration::from_secs(5);

/// The same if the sender does not wait for the run: longer than a worker holds free seats while it takes due events.
const SHORT_PATIENCE: Duration = Duration::from_millis(20);

impl Receiver {
    /// Stores a delivery, and processes it if it gets the lease. The sender is answered after that, or meanwhile.
    pub(super) async fn deliver(self, source: Arc<Source>, event: Event) -> Result<Status, Problem> {
        let lease = match self.take_in(&source, &event).await.map_err(not_stored)? {
            Ok(lease) => lease,
            Err(status) => return Ok(status),
        };
        crash_point!("webhooks.after_store");
        let (event, attempt) = (as_stored(event, lease.operation(), &source), lease.operation().attempt());
        let paused = self.is_paused(lease.operation().scope.kind());
        let Some(seat) = (if paused { None } else { seat(&source).await }) else {
            // A worker runs it, after the pause of its kind if there is one. If the lease is lost by now, another node
            // decides.
            let _ = lease.release(Duration::ZERO).await.map_err(not_stored)?;
            return Ok(Status::Accepted);
        };
        let (span, in_background) = (span(&source, &event.id, &event.kind), source.config.in_background);
        let run = self.process(lease, source, event, Some(seat)).instrument(span.clone());
        if in_background {
            tokio::spawn(async move {
                // The ledger logs how a run ended.
                if let Err(error) = run.await {
                    tracing::warn!(parent: span, %error, "an event was not processed; it is tried again");
                }
            });
            crash_point!("webhooks.before_answer");
            return Ok(Status::Accepted);
        }
        let ran = run.await;
        crash_point!("webhooks.before_answer");
        span.in_scope(|| answered(ran, attempt))
    }
}

/// The event of a delivery as it is stored. If the signature does not cover type and function, the first delivery
/// decides: a replay by a third party must not change them.
fn as_stored(event: Event, operation: &Operation, source: &Source) -> Event {
    let [kind, function, ..] = &operation.labels.0;
    let same = (kind.as_ref(), function.as_ref()) == (Some(&event.kind), Some(&event.function))
        && operation.payload.as_ref() == Some(&event.body);
    if same { event } else { Event::of(operation, source).unwrap_or(event) }
}

/// A seat for a run, if one is free in time. The lease is not renewed meanwhile.
async fn seat(source: &Source) -> Option<OwnedSemaphorePermit> {
    let patience = if source.config.in_background { SHORT_PATIENCE } else { SEAT_PATIENCE };
    tokio::time::timeout(patience.min(source.config.lease / 2), source.seats.clone().acquire_owned()).await.ok()?.ok()
}

/// The answer for a run.
fn answered(ran: Result<Ran>, attempt: u32) -> Result<Status, Problem> {
    match ran.map_err(not_stored)? {
        Ran::Completed(outcome) if Done::is_duplicate(&outcome) => Ok(Status::Skipped),
        Ran::Completed(_) => Ok(Status::Processed),
        Ran::Released => Ok(Status::Accepted),
        Ran::LeaseLost => Ok(Status::Rejected),
        // The error of a run is for the operator of this server, not for the sender.
        Ran::Failed(_) | Ran::Doubted(_) => Err(Problem::new(&WEBHOOK_FAILED).with("attempt", attempt)),
    }
}

/// A delivery is answered 200 only if it is durable.
fn not_stored(error: Error) -> Problem {
    if error.is_transient() {
        tracing::warn!(%error, "a delivery could not be stored");
        return Problem::new(&STORE_UNAVAILABLE)
            .detail("The database did not answer as it should. Send the same again: events take effect once.")
            .retry_after(Duration::from_secs(1));
    }
    of_store(error)
}
