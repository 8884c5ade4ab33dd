//! Stores an event: its id is claimed, and before it its body if the signature does not cover the id. The ledger's
//! answer decides whether this delivery processes it.

use std::{sync::Arc, time::Duration};

use semel::{Claim, Enqueued, Key, Lease, NotYet, OnMismatch, Operation, Policy, Result, State, Work, prelude::*};
use semel_store::Database;
use tracing::Instrument as _;

use super::{
    Receiver,
    bodies::{self, Whose},
    conflicts::{self, Noted},
    event::Event,
    process::span,
    record::{is_at_limit, is_parked},
    source::Source,
    status::Status,
};

impl Receiver {
    /// Claims the body of an event, if the signature does not cover its id, and the event. Returns the lease, or the
    /// answer to the sender.
    pub(super) async fn take_in(&self, source: &Source, event: &Event) -> Result<Result<Lease<Database>, Status>> {
        let ledger = &self.0.ledger;
        match bodies::claim(ledger, source, event).await? {
            Whose::Own => self.claim(source, event).await.map(|claim| turn(claim, source)),
            Whose::New(bytes) => {
                let claim = self.claim(source, event).await;
                let end = |stored| bodies::end(bytes, stored).instrument(span(source, &event.id, &event.kind));
                match &claim {
                    Ok(Claim::Mismatch(_)) => end(false).await,
                    // In all these cases the event is stored with this body, or will have it next.
                    Ok(_) => end(true).await,
                    // The store is unreachable, and the sender should be answered soon.
                    Err(_) => drop(tokio::spawn(end(false))),
                }
                claim.map(|claim| turn(claim, source))
            }
            Whose::Other(first) => {
                let known = ledger.store().by_key(&source.scope(&event.function)?, &Key::new(&event.id)?).await?;
                if known.is_some_and(|known| bodies::has(&known, event)) {
                    // The event is stored with this body, so this is an ordinary repeat.
                    return self.claim(source, event).await.map(|claim| turn(claim, source));
                }
                bodies::count(ledger, source, event).await?;
                Ok(Err(of_other(first.as_deref(), source)))
            }
        }
    }

    /// Claims an event; newer data supersedes older data if allowed.
    async fn claim(&self, source: &Source, event: &Event) -> Result<Claim<Lease<Database>>> {
        let now = (self.0.clock)();
        let work = source.work(event, now)?;
        let claim = self.claim_or_keep(source, event, work.clone(), false).await?;
        let Claim::Mismatch(stored) = &claim else { return Ok(claim) };
        // Other data under the same id. Record the conflict first. It is marked as taken only after it was stored,
        // which may fail.
        self.note_conflict(source, event, stored, false, true).await?;
        let newer = matches!((event.created, stored.order), (Some(came), Some(there)) if came > there);
        let policy = Policy { on_mismatch: OnMismatch::SupersedeIfNewer, ..source.policy_of(&event.kind, now) };
        let superseded = match newer {
            true => Some(self.claim_or_keep(source, event, work.policy(policy), true).await?),
            false => None,
        };
        // Refused if newer data still arrived in between.
        let taken = superseded.as_ref().is_some_and(|claim| !matches!(claim, Claim::Mismatch(_)));
        if taken && let Err(error) = self.note_conflict(source, event, stored, true, false).await {
            // The event itself is what counts: it is stored, and this delivery may process it.
            tracing::warn!(%error, key = stored.short_hash(), "a conflict is still recorded as skipped, but its data was taken");
        }
        let (source, event, key) = (&source.name, &event.id, stored.short_hash());
        tracing::warn!(source, event, key, taken, "other data came under the id of a known event");
        Ok(superseded.unwrap_or(claim))
    }

    /// Claims an event, or only stores it if programs ask for it: then it is as if another run had failed, and nothing
    /// is left to do for this delivery.
    async fn claim_or_keep(
        &self,
        source: &Source,
        event: &Event,
        work: Work,
        again: bool,
    ) -> Result<Claim<Lease<Database>>> {
        let ledger = &self.0.ledger;
        if !source.pulls(&event.kind) {
            return if again { ledger.claim_again(work).await } else { ledger.claim(work).await };
        }
        let waits = |operation: Arc<Operation>| {
            let until = operation.not_before.unwrap_or(operation.created_at);
            Claim::NotYet(NotYet { retry_after: Duration::ZERO, until, operation })
        };
        Ok(match ledger.enqueue(work).await? {
            Enqueued::New(operation) => waits(operation),
            Enqueued::Waiting(waiting) => waits(waiting.operation),
            Enqueued::Known(claim) => claim.map(|never| match never {}),
        })
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
            let mut held = tx.connection().await?;
            conflicts::note(&mut held.get()?, &noted, now).await
        });
        note.await
    }
}

/// The lease, if this delivery is to process the event; otherwise the answer to its sender.
fn turn(claim: Claim<Lease<Database>>, source: &Source) -> Result<Lease<Database>, Status> {
    Err(match claim {
        Claim::Acquired(lease) => return Ok(lease),
        Claim::Replay(_) | Claim::Mismatch(_) => Status::Skipped,
        Claim::InFlight(there) if there.kept => Status::Accepted,
        Claim::InFlight(_) => Status::Rejected,
        Claim::NotYet(_) => Status::Accepted,
        Claim::Exhausted(operation) if is_at_limit(&operation, source) => Status::MaxRetries,
        // Only a person puts an event in doubt.
        Claim::Exhausted(_) | Claim::InDoubt(_) => Status::Parked,
    })
}

/// The answer to a body that belongs to an event of another id: nothing of it is stored.
fn of_other(first: Option<&Operation>, source: &Source) -> Status {
    match first {
        Some(first) if first.state == State::Completed => Status::Skipped,
        Some(first) if is_at_limit(first, source) => Status::MaxRetries,
        Some(first) if is_parked(first, source) || first.state == State::InDoubt => Status::Parked,
        Some(_) => Status::Rejected,
        // A person purged it; it must not come back under another id.
        None => Status::Skipped,
    }
}
