//! The bytes of events whose ids nobody has signed: a second key, so that the same bytes take effect once, whatever id
//! they come under.
//!
//! Bytes belong to the id that they were first taken in under. They are claimed before the id is, and are that id's for
//! good once its event is stored with them: a delivery that gets no event leaves no trace of its bytes, and bytes that
//! are another's get no event. So whoever sends on what they have seen takes no id from anybody.

use std::time::Duration;

use semel::{
    Claim, Error, Fingerprint, Key, Lease, Ledger, OnLost, OnMismatch, Operation, Outcome, Policy, Result, State,
    Store as _, Unfinished, Work,
};
use semel_store::{Database, Tx};

use super::{
    event::{Event, body_hash},
    source::Source,
};

/// How long a delivery waits for another one that is just taking in the same bytes under another id.
const PATIENCE: Duration = Duration::from_secs(2);

/// How long to wait, in a run, for another one that is just taking in the same bytes.
const A_MOMENT: Duration = Duration::from_secs(1);

/// Whose some bytes are.
pub(super) enum Whose {
    /// The event's own; also wherever its id is signed, and bytes say nothing.
    Own,
    /// Nobody's yet. They are the event's once it is stored.
    New(Lease<Database>),
    /// Those of the event of another id; none if a person has purged that one.
    Other(Option<Box<Operation>>),
}

/// The claim of an event's bytes. Under its rules another id is a mismatch, whatever became of that one.
fn work(source: &Source, event: &Event) -> Result<Work> {
    let key = Key::new(&body_hash(&event.body))?;
    let work = Work::new(source.body_scope(event)?, key, Fingerprint::of_bytes(event.id.as_bytes()));
    Ok(work.payload(event.id.clone()).policy(policy(OnMismatch::Reject)).at_once())
}

fn policy(on_mismatch: OnMismatch) -> Policy {
    // However often taking them in was cut off: they are nobody's before it is done.
    Policy { retention: None, max_crashes: u32::MAX, on_lost: OnLost::Rerun, on_mismatch, ..Policy::default() }
}

/// Bytes that were claimed and never taken in may be taken over; those that were stay with their id.
fn taking_over(work: Work) -> Work {
    work.policy(policy(OnMismatch::Replay))
}

/// The id that some bytes belong to.
fn owner(body: &Operation) -> Option<String> {
    body.payload.as_deref().map(|id| String::from_utf8_lossy(id).into_owned())
}

/// Claims the bytes of a delivery, before its id.
pub(super) async fn claim(ledger: &Ledger<Database>, source: &Source, event: &Event) -> Result<Whose> {
    if !source.config.id_can_be_forged() {
        return Ok(Whose::Own);
    }
    let work = work(source, event)?;
    match ledger.claim_again(work.clone()).await? {
        Claim::Acquired(lease) => return Ok(Whose::New(lease)),
        Claim::Mismatch(body) => {
            let other = event_of(ledger, source, event, &body).await?;
            // Whoever stored the event may have died before it could say that it has taken the bytes in.
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
        // Nothing is stored yet that anybody could be told 200 of.
        _ => Err(Error::Unavailable("the same bytes are being taken in under another id".into())),
    }
}

/// The event that some bytes belong to.
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

/// Whether an event has the data of another one, or will have it next.
pub(super) fn has(stored: &Operation, event: &Event) -> bool {
    let waits = stored.successor.as_ref().is_some_and(|newer| newer.fingerprint == event.fingerprint);
    stored.fingerprint == event.fingerprint || waits
}

/// Says that the bytes are their event's for good, if it is stored with them; otherwise they are anybody's again. What
/// goes wrong here changes nothing for the event: its run claims the bytes, too.
pub(super) async fn end(lease: Lease<Database>, stored: bool) {
    let (scope, key) = (lease.operation().scope.clone(), lease.operation().short_hash());
    let ended = match stored {
        true => lease.complete(Outcome::not_kept("")).await,
        false => lease.release(Duration::ZERO).await,
    };
    if let Err(error) = ended {
        tracing::warn!(%scope, key, %error, "the claim of an event's bytes could not be settled; its lease will lapse");
    }
}

/// Counts a delivery of another's bytes. Nothing else is kept of it, under an id that is known or not: whoever has seen
/// one delivery can make up ids without end, and whoever has seen a thousand has a million pairs of an id and bytes.
pub(super) async fn count(ledger: &Ledger<Database>, source: &Source, event: &Event) -> Result<()> {
    match ledger.claim(work(source, event)?).await? {
        // Somebody has purged them in between.
        Claim::Acquired(lease) => lease.release(Duration::ZERO).await.map(drop),
        _ => Ok(()),
    }
}

/// Claims the bytes of an event that runs: whose they are, if not its own. That is so only if its delivery was away, in
/// the middle of taking it in, for so long that another one did. In a transaction it commits with the effect.
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
            let claim = ledger.transact(move |tx| async move {
                let claim = inner.claim_inline(&tx, work).await;
                if claim.is_ok() { Ok(claim) } else { Err(claim) }
            });
            claim.await??
        }
    };
    Ok(match claim {
        Claim::Replay(replay) if replay.mismatch => {
            Ok(Some(owner(&replay.operation).unwrap_or_else(|| "another event".to_owned())))
        }
        Claim::InFlight(there) if owner(&there.operation).is_none_or(|id| id != event.id) => {
            Err(Unfinished::NotYet(A_MOMENT))
        }
        _ => Ok(None),
    })
}
