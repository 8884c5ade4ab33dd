//! From the claim to the answer.

use std::{sync::Arc, time::Duration};

use semel::{Claim, Error, Key, Lease, OnMismatch, Operation, Policy, Ran, Result, State, Store as _, crash_point};
use semel_store::Database;
use tokio::sync::OwnedSemaphorePermit;
use tracing::{Instrument as _, Span};

use super::{
    Receiver,
    bodies::{self, Whose},
    conflicts::{self, Noted},
    event::Event,
    process::{self, Done},
    record::{is_at_limit, is_parked},
    source::Source,
};
use crate::http::problem::{Problem, STORE_UNAVAILABLE, WEBHOOK_FAILED, of_store};

/// How long a delivery waits for one of the source's seats. After that it is stored, and the runner takes it up.
const SEAT_PATIENCE: Duration = Duration::from_secs(5);

/// What a sender is answered, with 200.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Status {
    /// It took effect now.
    Processed,
    /// It is stored, and takes effect without anybody sending it again.
    Accepted,
    /// It took effect before, or something newer has.
    Skipped,
    /// Somebody is at it. If that fails, it is tried again without anybody sending it again.
    Rejected,
    /// It failed as often as it may.
    MaxRetries,
    /// Too many runs of it were lost, or a person has set it aside.
    Parked,
}

impl Status {
    pub(super) const fn word(self) -> &'static str {
        match self {
            Self::Processed => "processed",
            Self::Accepted => "accepted",
            Self::Skipped => "skipped",
            Self::Rejected => "rejected",
            Self::MaxRetries => "max_retries",
            Self::Parked => "parked",
        }
    }
}

impl Receiver {
    /// Takes a delivery in: claims the event, and processes it if it is this one's turn.
    pub(super) async fn deliver(self, source: Arc<Source>, event: Event) -> Result<Status, Problem> {
        let lease = match self.take_in(&source, &event).await.map_err(not_stored)? {
            Ok(lease) => lease,
            Err(status) => return Ok(status),
        };
        crash_point!("webhooks.after_store");
        let event = as_stored(event, lease.operation(), &source);
        let attempt = lease.operation().attempt();
        if source.config.in_background {
            self.process_in_background(lease, source, event).await.map_err(not_stored)?;
            crash_point!("webhooks.before_answer");
            return Ok(Status::Accepted);
        }
        let Some(seat) = seat(&source).await else {
            self.put_back(lease).await.map_err(not_stored)?;
            return Ok(Status::Accepted);
        };
        let span = span(&source, &event);
        let ran = self.process(lease, source, event, seat).await;
        crash_point!("webhooks.before_answer");
        span.in_scope(|| answered(ran, attempt))
    }

    /// Claims the bytes of an event, where its id tells nothing, and the event: the lease, or what the sender is answered
    /// without one.
    async fn take_in(&self, source: &Source, event: &Event) -> Result<Result<Lease<Database>, Status>> {
        let ledger = &self.0.ledger;
        match bodies::claim(ledger, source, event).await? {
            Whose::Own => self.claim(source, event).await.map(|claim| turn(claim, source)),
            Whose::New(bytes) => {
                let claim = self.claim(source, event).await;
                let end = |stored| bodies::end(bytes, stored).instrument(span(source, event));
                match &claim {
                    Ok(Claim::Mismatch(_)) => end(false).await,
                    // Whatever else it says, the event is stored with these bytes, or will have them next.
                    Ok(_) => end(true).await,
                    // The store is away, and the sender should hear so soon.
                    Err(_) => drop(tokio::spawn(end(false))),
                }
                claim.map(|claim| turn(claim, source))
            }
            Whose::Other(first) => {
                let known = ledger.store().by_key(&source.scope(&event.function)?, &Key::new(&event.id)?).await?;
                if known.is_some_and(|known| bodies::has(&known, event)) {
                    // Stored with these bytes all the same, and so a repeat like any other.
                    return self.claim(source, event).await.map(|claim| turn(claim, source));
                }
                bodies::count(ledger, source, event).await?;
                Ok(Err(of_other(first.as_deref(), source)))
            }
        }
    }

    /// Claims an event; newer data takes the place of older if it may.
    async fn claim(&self, source: &Source, event: &Event) -> Result<Claim<Lease<Database>>> {
        let now = (self.0.clock)();
        let work = source.work(event, now)?;
        let claim = self.0.ledger.claim(work.clone()).await?;
        let Claim::Mismatch(stored) = &claim else { return Ok(claim) };
        // Other data under the same id. That is told before anything else is done about it. It is not taken before it
        // is stored, which may fail.
        self.note_conflict(source, event, stored, false, true).await?;
        let newer = matches!((event.created, stored.order), (Some(came), Some(there)) if came > there);
        let policy = Policy { on_mismatch: OnMismatch::SupersedeIfNewer, ..source.policy(now) };
        let superseded = match newer {
            true => Some(self.0.ledger.claim_again(work.policy(policy)).await?),
            false => None,
        };
        // Refused all the same if something newer still came in between.
        let taken = superseded.as_ref().is_some_and(|claim| !matches!(claim, Claim::Mismatch(_)));
        if taken && let Err(error) = self.note_conflict(source, event, stored, true, false).await {
            // The event itself is what counts: it is stored, and may be this one's to process.
            tracing::warn!(%error, key = stored.short_hash(), "a conflict stays noted as skipped; its data was taken");
        }
        let (source, event, key) = (&source.name, &event.id, stored.short_hash());
        tracing::warn!(source, event, key, taken, "other data came under the id of a known event");
        Ok(superseded.unwrap_or(claim))
    }

    async fn note_conflict(
        &self,
        source: &Source,
        event: &Event,
        stored: &Operation,
        taken: bool,
        again: bool,
    ) -> Result<()> {
        let now = self.0.ledger.store().now().await?;
        let (source, event) = (source.name.clone(), event.clone());
        let (kind, there) = (stored.scope.kind().to_owned(), (stored.fingerprint, stored.order));
        let note = self.0.ledger.transact(move |tx| async move {
            let noted = Noted {
                tenant: &event.tenant,
                source: &source,
                kind: &kind,
                event_id: &event.id,
                event_type: &event.kind,
                function: &event.function,
                came: (event.fingerprint, event.created),
                stored: there,
                taken,
                again,
            };
            let done = async {
                let mut held = tx.connection().await?;
                conflicts::note(&mut held.get()?, &noted, now).await
            };
            let done = done.await;
            if done.is_ok() { Ok(done) } else { Err(done) }
        });
        note.await?
    }

    /// Processes an event under its lease, and newer data that comes meanwhile.
    pub(super) async fn process(
        &self,
        lease: Lease<Database>,
        source: Arc<Source>,
        event: Event,
        seat: OwnedSemaphorePermit,
    ) -> Result<Ran> {
        let span = span(&source, &event);
        let run = process::run(self.0.ledger.clone(), lease, source.clone(), event.clone(), seat);
        let ran = run.instrument(span).await;
        if matches!(&ran, Ok(Ran::Completed(outcome)) if matches!(Done::read(outcome), Some(Done::Stored))) {
            self.0.refusals.count_stored(&source, &event);
        }
        if !matches!(ran, Ok(Ran::Completed(_))) {
            // What was put back may be due at once.
            self.wake();
        }
        ran
    }

    /// Processes an event after it was answered. Where too many are at it already, the runner takes it up.
    async fn process_in_background(&self, lease: Lease<Database>, source: Arc<Source>, event: Event) -> Result<()> {
        let Ok(seat) = source.seats.clone().try_acquire_owned() else { return self.put_back(lease).await };
        let receiver = self.clone();
        tokio::spawn(async move {
            let span = span(&source, &event);
            // How a run ended is logged by the ledger.
            if let Err(error) = receiver.process(lease, source, event, seat).await {
                tracing::warn!(parent: span, %error, "an event was not processed; it is tried again");
            }
        });
        Ok(())
    }

    async fn put_back(&self, lease: Lease<Database>) -> Result<()> {
        // A lease that is lost by now is somebody else's business.
        let _ = lease.release(Duration::ZERO).await?;
        self.wake();
        Ok(())
    }
}

/// The event of a delivery as it is stored. Of what nobody has signed, that counts which came first: a delivery that
/// somebody has seen and sends on must not give the event another type, or another function.
fn as_stored(event: Event, operation: &Operation, source: &Source) -> Event {
    let [kind, function, ..] = &operation.labels.0;
    let same = (kind.as_ref(), function.as_ref()) == (Some(&event.kind), Some(&event.function))
        && operation.payload.as_ref() == Some(&event.body);
    if same { event } else { Event::of(operation, source).unwrap_or(event) }
}

/// A seat for a run, if one is free in time. Nobody renews the lease meanwhile.
async fn seat(source: &Source) -> Option<OwnedSemaphorePermit> {
    let patience = SEAT_PATIENCE.min(source.config.lease / 2);
    tokio::time::timeout(patience, source.seats.clone().acquire_owned()).await.ok().and_then(std::result::Result::ok)
}

/// Whose turn it is.
fn turn(claim: Claim<Lease<Database>>, source: &Source) -> Result<Lease<Database>, Status> {
    Err(match claim {
        Claim::Acquired(lease) => return Ok(lease),
        Claim::Replay(_) | Claim::Mismatch(_) => Status::Skipped,
        Claim::InFlight(there) if there.kept => Status::Accepted,
        Claim::InFlight(_) => Status::Rejected,
        Claim::NotYet(_) => Status::Accepted,
        Claim::Exhausted(operation) if is_at_limit(&operation, source) => Status::MaxRetries,
        // Nothing is ever left in doubt here but by hand.
        Claim::Exhausted(_) | Claim::InDoubt(_) => Status::Parked,
    })
}

/// What is said of bytes that are those of an event of another id: nothing of them is stored.
fn of_other(first: Option<&Operation>, source: &Source) -> Status {
    match first {
        Some(first) if first.state == State::Completed => Status::Skipped,
        Some(first) if is_at_limit(first, source) => Status::MaxRetries,
        Some(first) if is_parked(first, source) || first.state == State::InDoubt => Status::Parked,
        Some(_) => Status::Rejected,
        // A person has purged it, and not for it to come back under another name.
        None => Status::Skipped,
    }
}

/// What a sender is told of a run.
fn answered(ran: Result<Ran>, attempt: u32) -> Result<Status, Problem> {
    match ran.map_err(not_stored)? {
        Ran::Completed(outcome) if Done::is_duplicate(&outcome) => Ok(Status::Skipped),
        Ran::Completed(_) => Ok(Status::Processed),
        Ran::Released => Ok(Status::Accepted),
        Ran::LeaseLost => Ok(Status::Rejected),
        // Why it failed is for whoever runs this server, not for whoever sent the event.
        Ran::Failed(_) | Ran::Doubted(_) => Err(Problem::new(&WEBHOOK_FAILED).with("attempt", attempt)),
    }
}

/// What log lines of an event's run say beside what the ledger tells of it. At the level of errors, so that no filter
/// keeps the line and drops what it is about.
pub(super) fn span(source: &Source, event: &Event) -> Span {
    tracing::error_span!("webhook", source = source.name, event = event.id, r#type = event.kind)
}

/// Nobody may be told 200 of what is not durable.
fn not_stored(error: Error) -> Problem {
    if error.is_transient() {
        tracing::warn!(%error, "a delivery could not be stored");
        return Problem::new(&STORE_UNAVAILABLE)
            .detail("The database did not answer as it should. Send the same again: events take effect once.")
            .retry_after(Duration::from_secs(1));
    }
    of_store(error)
}
