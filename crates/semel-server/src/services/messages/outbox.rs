//! `/outbox`.

use std::time::Duration;

use axum::{
    extract::State,
    http::StatusCode,
    response::{IntoResponse as _, Response},
};
use semel::{
    Timestamp,
    messaging::{Backlog, MessageId, OutboxFilter, OutboxRow, OutboxState, Topic, UnreadableMessage},
    prelude::*,
};
use serde::Serialize;
use serde_json::{Map, Value, json};

use super::{Messages, problems::NOT_HELD};
use crate::http::{
    answers::{Page, missing, patiently, shown},
    fields::Because,
    path::Id,
    principal::{Actor, Principal},
    problem::Problem,
    query::Query,
};

/// A waiting message, without its body.
#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Listed {
    message_id: String,
    state: String,
    topic: String,
    kind: String,
    ordering_key: Option<String>,
    number: Option<i64>,
    put_at: String,
    due_at: Option<String>,
    failures: u32,
    error: Option<String>,
}

impl Listed {
    fn of(row: OutboxRow) -> Self {
        let message = row.envelope.message;
        Self {
            message_id: message.id.to_string(),
            state: row.state.as_str().to_owned(),
            topic: message.topic.to_string(),
            kind: message.kind,
            ordering_key: message.ordering_key,
            number: row.envelope.number,
            put_at: row.envelope.put_at.to_string(),
            due_at: row.due_at.map(|at| at.to_string()),
            failures: row.failures,
            error: row.error,
        }
    }

    /// A message that this version cannot read; `error` says why.
    fn unreadable(row: UnreadableMessage) -> Self {
        Self {
            message_id: row.message_id,
            state: row.state,
            topic: row.topic,
            kind: row.kind,
            ordering_key: None,
            number: None,
            put_at: row.put_at.to_string(),
            due_at: None,
            failures: 0,
            error: Some(format!("unreadable: {}", row.why)),
        }
    }
}

/// `GET /outbox`
pub(super) async fn list(
    State(messages): State<Messages>,
    principal: Principal,
    mut query: Query,
) -> Result<Response, Problem> {
    let filter = OutboxFilter {
        tenant: principal.tenant,
        state: query.take("state", |word| {
            OutboxState::parse(word).ok_or("must be one of ready, waiting, blocked, unroutable, parked")
        }),
        topic: query.take("topic", |name| Topic::new(name).map_err(|_| "must be the name of a topic")),
    };
    let place = query.place();
    query.finish()?;
    let after = Some(place.after).filter(|after| *after > 0);
    let limit = u32::try_from(place.limit).unwrap_or(u32::MAX);
    let page = patiently(messages.store().outbox(&filter, after, limit)).await?;
    let mut items: Vec<_> = page.items.into_iter().map(|row| (row.id, Listed::of(row))).collect();
    items.extend(page.unreadable.into_iter().map(|row| (row.id, Listed::unreadable(row))));
    items.sort_by_key(|(id, _)| *id);
    let items = items.into_iter().map(|(_, item)| item).collect();
    Ok(shown(&Page { items, next: page.next.map(|next| next.to_string()) }))
}

/// `GET /outbox/summary`: the counts of all tenants, because the relay serves them all.
pub(super) async fn summary(State(messages): State<Messages>, _principal: Principal) -> Result<Response, Problem> {
    let store = messages.store();
    let (backlog, now) = patiently(async { Ok((store.backlog().await?, store.now().await?)) }).await?;
    Ok(shown(&summed(&backlog, now)))
}

fn summed(backlog: &Backlog, now: Timestamp) -> Value {
    let count = |state: OutboxState| {
        let counted = backlog.counts.iter().find(|(of, _)| *of == state);
        (state.as_str().to_owned(), counted.map_or(0, |(_, n)| *n).into())
    };
    let counts: Map<String, Value> = OutboxState::ALL.into_iter().map(count).collect();
    json!({
        "counts": counts,
        // A count that reached this stopped there: it means "at least".
        "countsStopAt": Backlog::MOST,
        "oldestReadyAt": backlog.oldest.map(|at| at.to_string()),
        "oldestReadyAgeSeconds": backlog.oldest.map(|at| seconds(now.since(at))),
    })
}

fn seconds(age: Duration) -> f64 {
    // Three decimals are enough.
    (age.as_secs_f64() * 1000.0).round() / 1000.0
}

/// `POST /outbox/{messageId}/redrive`
pub(super) async fn redrive(
    State(messages): State<Messages>,
    Actor(principal): Actor,
    Id(id): Id,
) -> Result<Response, Problem> {
    let id = message_id(&id)?;
    let done = patiently(messages.store().redrive_outbox(&principal.tenant, id, &principal.subject)).await?;
    acted(done)
}

/// `POST /outbox/{messageId}/skip`
pub(super) async fn skip(
    State(messages): State<Messages>,
    Actor(principal): Actor,
    Id(id): Id,
    Because(reason): Because,
) -> Result<Response, Problem> {
    let id = message_id(&id)?;
    let done = patiently(messages.store().skip_outbox(&principal.tenant, id, &principal.subject, &reason)).await?;
    acted(done)
}

/// The answer to an action, depending on whether its row was found.
fn acted(done: bool) -> Result<Response, Problem> {
    if done { Ok(StatusCode::NO_CONTENT.into_response()) } else { Err(Problem::new(&NOT_HELD)) }
}

fn message_id(text: &str) -> Result<MessageId, Problem> {
    text.parse().map_err(|_| missing())
}
