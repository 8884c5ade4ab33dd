//! `POST /v1/operations`: claims an operation, or enqueues it.

use std::{sync::Arc, time::Duration};

use axum::{
    body::Body,
    extract::State as Server,
    http::StatusCode,
    response::{IntoResponse as _, Response},
};
use semel::{Claim, Enqueued, Operation, Timestamp};
use semel_http::problem::{ATTEMPTS_EXHAUSTED, BACKING_OFF, IN_DOUBT, IN_FLIGHT, Kind, PAYLOAD_MISMATCH};

use super::{
    Api,
    ask::Asked,
    record::{Answered, Lease, Record},
};
use crate::http::{
    answers::{answer, damaged, shown},
    fields::Fields,
    principal::Actor,
    problem::Problem,
};

/// The longest `Retry-After` for an operation in flight: most end long before their lease does.
const SOON: Duration = Duration::from_secs(5);

/// `POST /v1/operations`
pub(super) async fn post(
    Server(api): Server<Api>,
    Actor(principal): Actor,
    fields: Fields,
) -> Result<Response, Problem> {
    let asked = Asked::read(fields, &principal.tenant, &api.config)?;
    if asked.later.is_some() { enqueue(&api, asked).await } else { claim(&api, asked).await }
}

async fn claim(api: &Api, asked: Asked) -> Result<Response, Problem> {
    let claim = api.ledger.claim(asked.claim()).await.map_err(refused)?;
    match claim.acquired() {
        Ok(held) => {
            // Dropping the lease here does not end it: its holder is the client, who names the fence.
            let op = held.operation();
            api.granted.remember(op);
            let operation = Record::of(api.store(), op, op.claimed_at).await;
            let body = Answered { claim: Some("acquired"), lease: Some(Lease::of(op)), operation };
            Ok(answer(StatusCode::CREATED, &body).map(Body::from))
        }
        Err(known) => answered(api, known).await,
    }
}

async fn enqueue(api: &Api, asked: Asked) -> Result<Response, Problem> {
    let enqueued = api.ledger.enqueue(asked.enqueue()).await.map_err(refused)?;
    let (word, operation) = match enqueued {
        Enqueued::New(operation) => ("enqueued", operation),
        Enqueued::Waiting(waiting) => ("waiting", waiting.operation),
        Enqueued::Known(claim) => {
            return answered(api, claim.map(|never| match never {})).await;
        }
    };
    let operation = Record::of(api.store(), &operation, operation.created_at).await;
    let body = Answered { claim: Some(word), lease: None, operation };
    Ok(answer(StatusCode::ACCEPTED, &body).map(Body::from))
}

/// The answer to a claim of a key whose lease this caller does not get.
async fn answered(api: &Api, claim: Claim<()>) -> Result<Response, Problem> {
    Ok(match claim {
        Claim::Replay(replay) => {
            let at = settled(&replay.operation);
            let operation = Record::of(api.store(), &replay.operation, at).await;
            shown(&Answered { claim: Some("replay"), lease: None, operation })
        }
        Claim::InFlight(there) => problem(&IN_FLIGHT, &there.operation, None)
            .retry_after(there.retry_after.clamp(SECOND, SOON))
            .into_response(),
        Claim::NotYet(not_yet) => {
            let before = Timestamp::from_micros(not_yet.until.as_micros() - 1);
            problem(&BACKING_OFF, &not_yet.operation, Some(before))
                .retry_after(not_yet.retry_after.max(SECOND))
                .into_response()
        }
        Claim::Mismatch(op) => problem(&PAYLOAD_MISMATCH, &op, None).into_response(),
        Claim::Exhausted(op) => problem(&ATTEMPTS_EXHAUSTED, &op, None).into_response(),
        Claim::InDoubt(op) => problem(&IN_DOUBT, &op, None).into_response(),
        Claim::Acquired(()) => return Err(Problem::new(&IN_FLIGHT)),
    })
}

/// The shortest `Retry-After`.
const SECOND: Duration = Duration::from_secs(1);

/// A problem with what is known of the operation. It has neither its input nor its result: of a mismatch, they belong
/// to another request.
fn problem(kind: &'static Kind, op: &Arc<Operation>, now: Option<Timestamp>) -> Problem {
    let record = Record::brief(op, now.unwrap_or_else(|| settled(op)));
    let record = serde_json::to_value(&record).unwrap_or_default();
    Problem::new(kind).with("first_seen", op.created_at.to_string()).with("operation", record)
}

/// The time of its last change that its row shows.
fn settled(op: &Operation) -> Timestamp {
    op.settled_at.unwrap_or(op.claimed_at)
}

/// The problem of a claim that failed: nothing was claimed.
fn refused(error: semel::Error) -> Problem {
    damaged(error, "the operation of this key", "see semel operations list")
}
