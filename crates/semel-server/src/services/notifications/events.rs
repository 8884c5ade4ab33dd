//! `/events`.

use std::{collections::HashMap, sync::Arc, time::Duration};

use axum::{
    Json,
    extract::{FromRequest as _, Request, State},
    http::StatusCode,
    response::{IntoResponse as _, Response},
};
use bytes::Bytes;
use semel::prelude::*;
use semel_http::Principal;
use serde::Serialize;
use serde_json::{json, value::RawValue};
use tokio::sync::OwnedSemaphorePermit;

use super::{
    Service,
    accept::{Accepted, Submission},
    model::Kind,
    problems::EVENT_MISMATCH,
    reading,
    tables::{events, fanouts, fanouts::Fanout},
};
use crate::http::{
    answers::{maybe_time, missing, one_row, shown, time},
    fields::Wrong,
    path::Id,
    principal::Actor,
    problem::{BODY_TIMEOUT, Problem, STORE_UNAVAILABLE, of_store},
    room::Held,
};

/// The longest body: a thousand events of eight kilobytes.
pub(super) const BODY_LIMIT: usize = 8 << 20;

/// How long a body may take to arrive.
const PATIENCE: Duration = Duration::from_secs(30);

/// `POST /events`
pub(super) async fn create(
    State(service): State<Arc<Service>>,
    Actor(principal): Actor,
    request: Request,
) -> Result<Response, Problem> {
    let held = request.extensions().get::<Held>().cloned();
    let body = tokio::time::timeout(PATIENCE, Bytes::from_request(request, &())).await;
    let body = body.map_err(|_| Problem::new(&BODY_TIMEOUT))??;
    let room = room(&service, body.len()).await?;
    let given = reading::read(&body, &principal.tenant, &service.config.routes)?;
    let ids: Vec<_> = given.events.iter().map(|event| event.id.clone()).collect();
    let submission = Submission { tenant: principal.tenant, events: given.events, room: (held, Some(room)) };
    match service.acceptor.accept(submission).await.map_err(unavailable)? {
        Accepted::Stored(new) => {
            let mut answers: Vec<_> = ids
                .iter()
                .zip(new)
                .map(|(id, created)| json!({ "eventId": id.as_str(), "created": created }))
                .collect();
            let answer = if given.list { answers.into() } else { answers.remove(0) };
            Ok((StatusCode::ACCEPTED, Json(answer)).into_response())
        }
        Accepted::Mismatch(which) => {
            let mut wrong = Wrong::default();
            for place in which {
                let field = if given.list { format!("[{place}].eventId") } else { "eventId".to_owned() };
                wrong.note(&field, "is that of an earlier event, which had another body");
            }
            Err(wrong.problem(&EVENT_MISMATCH))
        }
        Accepted::Busy(error) | Accepted::Failed(error) => Err(unavailable(error)),
    }
}

/// Room for a body that has arrived: parsing its events takes several times its bytes, so their number is limited. No
/// client can block this, since only the database is waited for.
async fn room(service: &Service, length: usize) -> Result<OwnedSemaphorePermit, Problem> {
    let kibibytes = u32::try_from(length / 1024 + 1).unwrap_or(u32::MAX);
    let room = tokio::time::timeout(PATIENCE, service.room.clone().acquire_many_owned(kibibytes)).await;
    room.ok().and_then(Result::ok).ok_or_else(|| {
        Problem::new(&STORE_UNAVAILABLE)
            .detail("Too many events are being stored. Send the same again: events are stored once.")
            .retry_after(Duration::from_secs(1))
    })
}

/// The error may have come after the commit; sending the events again does no harm.
fn unavailable(error: semel::Error) -> Problem {
    if error.is_transient() {
        tracing::warn!(%error, "events could not be stored");
        return Problem::new(&STORE_UNAVAILABLE)
            .detail("The database did not answer as it should. Send the same again: events are stored once.")
            .retry_after(Duration::from_secs(1));
    }
    of_store(error)
}

/// An event and its progress.
#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Shown {
    event_id: String,
    aggregate_type: String,
    aggregate_id: Option<Box<RawValue>>,
    event_type: String,
    payload: Box<RawValue>,
    #[serde(serialize_with = "time")]
    created_at: i64,
    outbox: Outbox,
    processed_event: ProcessedEvent,
    kinds: Vec<Reached>,
}

/// Level 1: whether the event was published.
#[derive(Serialize)]
struct Outbox {
    status: &'static str,
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct ProcessedEvent {
    status: &'static str,
    #[serde(serialize_with = "maybe_time")]
    processed_at: Option<i64>,
}

/// Level 2: its progress for one kind of recipient.
#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Reached {
    kind: String,
    published: bool,
    #[serde(serialize_with = "maybe_time")]
    published_at: Option<i64>,
    listener_done: bool,
    notifications: i64,
}

/// `GET /events/{eventId}`
pub(super) async fn show(
    State(service): State<Arc<Service>>,
    principal: Principal,
    Id(event_id): Id,
) -> Result<Response, Problem> {
    let help = "restore the row of notification_events";
    let found = one_row(find(&service, &principal.tenant, &event_id), &event_id, help).await?;
    Ok(shown(&found.ok_or_else(missing)?))
}

async fn find(service: &Service, tenant: &str, event_id: &str) -> semel::Result<Option<Shown>> {
    let read = service.database.read(async |conn| {
        Ok((events::find(conn, tenant, event_id).await?, fanouts::all(conn, tenant, event_id).await?))
    });
    let (event, fanouts) = read.await?;
    let Some(event) = event else { return Ok(None) };
    let mut fanouts: HashMap<String, Fanout> =
        fanouts.into_iter().map(|fanout| (fanout.kind.clone(), fanout)).collect();
    let mut kinds = Vec::with_capacity(Kind::ALL.len());
    for sent in &event.messages {
        let receipt = match sent.id() {
            Some(id) => service.database.receipt(tenant, id).await?,
            None => None,
        };
        let fanout = fanouts.remove(&sent.kind);
        // A message that reached the listener was published, even if its receipt is not written yet or has expired.
        let arrived = fanout.as_ref().map(|fanout| fanout.begun_at);
        let published_at = receipt.map(semel::Timestamp::as_micros).or(arrived);
        // Receipts expire, and a person may have skipped the message: if it is not in the outbox, it has left.
        let waits = match sent.id() {
            Some(id) if published_at.is_none() => service.database.is_in_outbox(tenant, id).await?,
            _ => false,
        };
        kinds.push(Reached {
            kind: sent.kind.clone(),
            published: !waits,
            published_at,
            listener_done: fanout.as_ref().is_some_and(|fanout| fanout.done_at.is_some()),
            notifications: fanout.map_or(0, |fanout| fanout.notifications),
        });
    }
    let processed = kinds.iter().all(|kind| kind.published);
    let processed_at = kinds.iter().filter_map(|kind| kind.published_at).max().filter(|_| processed);
    let raw = |json: String| RawValue::from_string(json).map_err(|_| semel::Error::Corrupt("a stored event"));
    let payload = String::from_utf8(event.payload.to_vec()).map_err(|_| semel::Error::Corrupt("a stored payload"))?;
    Ok(Some(Shown {
        event_id: event_id.to_owned(),
        aggregate_type: event.aggregate_type,
        aggregate_id: event.aggregate_id.map(raw).transpose()?,
        event_type: event.event_type,
        payload: raw(payload)?,
        created_at: event.created_at,
        outbox: Outbox { status: if processed { "PROCESSED" } else { "PENDING" } },
        processed_event: ProcessedEvent { status: if processed { "SUCCESS" } else { "PROCESSING" }, processed_at },
        kinds,
    }))
}
