//! Deduplicates by body hash when the signature does not cover the event id: a second key, so that the same body takes
//! effect once, under any id.
//!
//! A body belongs to the id with which it was first stored. It is claimed before the id, and completed once the event
//! is stored. A delivery that stores no event leaves no claim of its body, and a body of another id stores no event. So
//! a third party that replays a delivery under other ids takes no id.

use std::time::Duration;

use semel::{
    Claim, Error, Fingerprint, Key, Lease, Ledger, OnLost, OnMismatch, Operation, Outcome, Policy, Result, State,
    Unfinished, Work, prelude::*,
};
use semel_store::{Database, Tx};

use super::{
    event::{Event, body_hash},
    source::Source,
};

/// How long a delivery waits for another one that is storing the same body under another id.
const PATIENCE: Duration = Duration::from_secs(2);

/// How long a run waits for a delivery that is storing the same body.
const A_MOMENT: Duration = Duration::from_secs(1);

/// The owner of a body.
pub(super) enum Whose {
    /// The event itself. Also if its id is signed, so that the body does not matter.
    Own,
    /// No event yet. It is the event's once that is stored.
    New(Lease<Database>),
    /// The event of another id; none if that was purged.
    Other(Option<Box<Operation>>),
}

/// The claim of an event's body. Another id is a mismatch, in any state of the first.
fn work(source: &Source, event: &Event) -> Result<Work> {
    let key = Key::new(&body_hash(&event.body))?;
    let work = Work::new(source.body_scope(event)?, key, Fingerprint::of_bytes(event.id.as_bytes()));
    Ok(work.payload(event.id.clone()).policy(policy(OnMismatch::Reject)).at_once())
}

fn policy(on_mismatch: OnMismatch) -> Policy {
    // However often storing was cut off: the body has no owner before it is stored.
    Policy { retention: None, max_crashes: u32::MAX, on_lost: OnLost::Rerun, on_mismatch, ..Policy::default() }
}

/// A body that was claimed and never stored may be taken over; a stored one stays with its id.
fn taking_over(work: Work) -> Work {
    work.policy(policy(OnMismatch::Replay))
}

/// The id that owns a body.
fn owner(body: &Operation) -> Option<String> {
    body.payload.as_deref().map(|id| String::from_utf8_lossy(id).into_owned())
}

/// Claims the body of a delivery, before its id.
pub(super) async fn claim(ledger: &Ledger<Database>, source: &Source, event: &Event) -> Result<Whose> {
    if !source.config.id_can_be_forged() {
        return Ok(Whose::Own);
    }
    let work = work(source, event)?;
    match ledger.claim_again(work.clone()).await? {
        Claim::Acquired(lease) => return Ok(Whose::New(lease)),
        Claim::Mismatch(body) => {
            let other = event_of(ledger, source, event, &body).await?;
            // The process that stored the event may have died before it completed the claim of the body.
            if body.state == State::Completed || other.as_ref().is_some_and(|other| has(other, event)) {
                return Ok(Whose::Other(other));
            }
        }
        _ => return Ok(Whose::Own),
    }
    match ledger.claim_or_wait(taking_over(work), PATIENCE).await? {
        Claim::Acquired(lease) => Ok(Whose::New(lease)),
        Claim::Replay(replay) if replay.mismatch => {
            Ok(Whose::Other(event_of(ledger, source, event, &replay.operation).await?))
        }
        Claim::Replay(_) => Ok(Whose::Own),
        // Nothing is stored yet, so no delivery may be answered 200.
        _ => Err(Error::Unavailable("the same body is being stored under another id".into())),
    }
}

/// The event that owns a body.
async fn event_of(
    ledger: &Ledger<Database>,
    source: &Source,
    event: &Event,
    body: &Operation,
) -> Result<Option<Box<Operation>>> {
    let Some(id) = owner(body) else { return Ok(None) };
    let found = ledger.store().by_key(&source.scope(&event.function)?, &Key::new(&id)?).await?;
    Ok(found.map(Box::new))
}

/// Whether an operation has the event's data, or will have it next.
pub(super) fn has(stored: &Operation, event: &Event) -> bool {
    let waits = stored.successor.as_ref().is_some_and(|newer| newer.fingerprint == event.fingerprint);
    stored.fingerprint == event.fingerprint || waits
}

/// Completes the claim of a body if its event is stored with it; otherwise releases it. An error here does not affect
/// the event: its run claims the body, too.
pub(super) async fn end(lease: Lease<Database>, stored: bool) {
    let (scope, key) = (lease.operation().scope.clone(), lease.operation().short_hash());
    let ended = match stored {
        true => lease.complete(Outcome::not_kept("")).await,
        false => lease.release(Duration::ZERO).await,
    };
    if let Err(error) = ended {
        tracing::warn!(%scope, key, %error, "the claim of an event's body could not be settled; its lease will expire");
    }
}

/// Counts a delivery of another event's body. Nothing else is stored, whether its id is known or not: a third party
/// that saw one delivery can invent any number of ids, and one that saw a thousand has a million pairs of id and body.
pub(super) async fn count(ledger: &Ledger<Database>, source: &Source, event: &Event) -> Result<()> {
    match ledger.claim(work(source, event)?).await? {
        // It was purged in between.
        Claim::Acquired(lease) => lease.release(Duration::ZERO).await.map(drop),
        _ => Ok(()),
    }
}

/// Claims the body of a running event; returns the owner if it is another event. That happens only if the delivery was
/// suspended while it stored the event, for so long that another one stored it. In a transaction the claim commits with
/// the effect.
pub(super) async fn claim_in_run(
    ledger: &Ledger<Database>,
    source: &Source,
    event: &Event,
    tx: Option<&Tx>,
) -> Result<Result<Option<String>, Unfinished>> {
    if !source.config.id_can_be_forged() {
        return Ok(Ok(None));
    }
    let work = taking_over(work(source, event)?);
    let claim = match tx {
        Some(tx) => ledger.claim_inline(tx, work).await?,
        None => {
            let inner = ledger.clone();
            ledger.transact(move |tx| async move { inner.claim_inline(&tx, work).await }).await?
        }
    };
    Ok(match claim {
        Claim::Replay(replay) if replay.mismatch => {
            Ok(Some(owner(&replay.operation).unwrap_or_else(|| "another event".to_owned())))
        }
        Claim::InFlight(there) if owner(&there.operation).is_none_or(|id| id != event.id) => {
            Err(Unfinished::released(A_MOMENT))
        }
        _ => Ok(None),
    })
}
