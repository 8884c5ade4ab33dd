//! `/dead-letters`.

use axum::{
    extract::State,
    http::StatusCode,
    response::{IntoResponse as _, Response},
};
use base64::{Engine as _, engine::general_purpose::STANDARD};
use semel::{
    messaging::{DeadLetter, LetterFilter, UnreadableLetter},
    prelude::*,
};
use semel_http::Transaction;
use semel_store::Database;
use serde::Serialize;
use serde_json::{Value, json};

use super::{
    Messages,
    redrive::{self, MOST_IDS},
};
use crate::{
    http::{
        answers::{Page, missing, one_row, patiently, shown},
        fields::{Because, Fields, Wrong, moment, only_true, text},
        path::Id,
        principal::{Actor, Principal},
        problem::{INVALID_FIELDS, Problem, of_store},
        query::{Query, number, time},
    },
    jobs::{NewJob, accepted},
};

/// A letter in a list: without its long fields.
#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Listed {
    id: i64,
    message_id: Option<String>,
    kind: String,
    consumer: String,
    queue: String,
    key: String,
    failures: u32,
    reason: String,
    died_at: String,
}

/// A whole letter.
#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Shown {
    #[serde(flatten)]
    listed: Listed,
    headers: Value,
    #[serde(skip_serializing_if = "Option::is_none")]
    body: Option<Value>,
    /// A body that is not JSON.
    #[serde(skip_serializing_if = "Option::is_none")]
    body_base64: Option<String>,
    number: Option<i64>,
    put_at: Option<String>,
    origin: Option<Value>,
}

impl Listed {
    fn of(letter: DeadLetter) -> Self {
        Self {
            id: letter.id,
            message_id: letter.message.id,
            kind: letter.message.kind,
            consumer: letter.consumer,
            queue: letter.message.queue,
            key: letter.key,
            failures: letter.failures,
            reason: letter.reason,
            died_at: letter.died_at.to_string(),
        }
    }

    /// A letter that this version cannot read; `reason` says why.
    fn unreadable(letter: UnreadableLetter) -> Self {
        Self {
            id: letter.id,
            message_id: letter.message_id,
            kind: letter.kind,
            consumer: letter.consumer,
            queue: letter.queue,
            key: letter.key,
            failures: 0,
            reason: format!("unreadable: {}", letter.why),
            died_at: letter.died_at.to_string(),
        }
    }
}

impl Shown {
    fn of(letter: DeadLetter) -> Self {
        let message = &letter.message;
        let body = serde_json::from_slice::<Value>(&message.body).ok();
        Self {
            headers: json!(message.headers),
            body_base64: body.is_none().then(|| STANDARD.encode(&message.body)),
            body,
            number: message.number,
            put_at: message.put_at.map(|at| at.to_string()),
            origin: message.origin.map(|origin| json!({ "operation": origin.operation, "fence": origin.fence.0 })),
            listed: Listed::of(letter),
        }
    }
}

/// `GET /dead-letters`
pub(super) async fn list(
    State(messages): State<Messages>,
    principal: Principal,
    mut query: Query,
) -> Result<Response, Problem> {
    let some = |text: &str| if text.is_empty() { Err("must not be empty") } else { Ok(text.to_owned()) };
    let filter = LetterFilter {
        tenant: principal.tenant,
        ids: Vec::new(),
        consumer: query.take("consumer", some),
        queue: query.take("queue", some),
        reason: query.take("reason", some),
        since: query.take("since", time),
        before: query.take("before", time),
    };
    let place = query.place();
    query.finish()?;
    let after = Some(place.after).filter(|after| *after > 0);
    let limit = u32::try_from(place.limit).unwrap_or(u32::MAX);
    let page = patiently(messages.store().letters(&filter, after, limit)).await?;
    let readable = page.items.into_iter().map(Listed::of);
    let mut items: Vec<_> = readable.chain(page.unreadable.into_iter().map(Listed::unreadable)).collect();
    items.sort_by_key(|item| std::cmp::Reverse(item.id));
    Ok(shown(&Page { items, next: page.next.map(|next| next.to_string()) }))
}

/// `GET /dead-letters/{id}`
pub(super) async fn show(
    State(messages): State<Messages>,
    principal: Principal,
    Id(id): Id,
) -> Result<Response, Problem> {
    let id = number(&id).ok_or_else(missing)?;
    let help = "restore it, or remove it with DELETE on this path";
    let found = one_row(messages.store().letter(&principal.tenant, id), id, help).await?;
    Ok(shown(&Shown::of(found.ok_or_else(missing)?)))
}

/// `POST /dead-letters/redrive`
pub(super) async fn redrive(
    State(messages): State<Messages>,
    Transaction(tx): Transaction<Database>,
    Actor(principal): Actor,
    mut fields: Fields,
) -> Result<Response, Problem> {
    let all = fields.may("all", only_true);
    let ids = fields.may("ids", ids);
    let filter = redrive::Filter {
        consumer: fields.may("consumer", word),
        queue: fields.may("queue", word),
        reason: fields.may("reason", word),
        since: fields.may("since", moment).map(|at| at.to_string()),
        before: fields.may("before", moment).map(|at| at.to_string()),
        ids: ids.clone().unwrap_or_default(),
    };
    fields.finish()?;
    let filters = filter.consumer.is_some()
        || filter.queue.is_some()
        || filter.reason.is_some()
        || filter.since.is_some()
        || filter.before.is_some();
    // A filter that was lost on the way must not re-drive every letter.
    if [all.is_some(), ids.is_some(), filters].into_iter().filter(|said| *said).count() != 1 {
        let mut wrong = Wrong::default();
        let message = "must be true if every letter is meant; otherwise there must be ids, or a filter by consumer, queue, \
                       reason, since or before; only one of the three";
        wrong.note("all", message);
        return Err(wrong.problem(&INVALID_FIELDS));
    }
    let new =
        NewJob { tenant: principal.tenant, kind: redrive::NAME, params: filter.to_params(), actor: principal.subject };
    let job = messages.jobs.create_in(&tx, new).await.map_err(of_store)?;
    Ok(accepted(&job))
}

/// `POST /dead-letters/{id}/redrive`
pub(super) async fn redrive_one(
    State(messages): State<Messages>,
    Actor(principal): Actor,
    Id(id): Id,
) -> Result<Response, Problem> {
    let id = number(&id).ok_or_else(missing)?;
    let filter = LetterFilter { tenant: principal.tenant, ids: vec![id], ..LetterFilter::default() };
    let redriven = patiently(messages.store().redrive_letters(&filter, None, 1, &principal.subject)).await?;
    if redriven.moved == 0 { Err(missing()) } else { Ok(StatusCode::NO_CONTENT.into_response()) }
}

/// `POST /dead-letters/{id}/discard`
pub(super) async fn discard(
    State(messages): State<Messages>,
    Actor(principal): Actor,
    Id(id): Id,
    Because(reason): Because,
) -> Result<Response, Problem> {
    let id = number(&id).ok_or_else(missing)?;
    let gone = messages.store().discard_letter(&principal.tenant, id, &principal.subject, &reason);
    if patiently(gone).await? { Ok(StatusCode::NO_CONTENT.into_response()) } else { Err(missing()) }
}

fn word(raw: &str) -> Result<String, String> {
    let word = text(raw)?;
    if word.is_empty() || word.len() > 1000 { Err("must be 1 to 1000 bytes".to_owned()) } else { Ok(word) }
}

fn ids(raw: &str) -> Result<Vec<i64>, String> {
    let ids: Option<Vec<i64>> = serde_json::from_str(raw).ok();
    ids.filter(|ids| (1..=MOST_IDS).contains(&ids.len()))
        .ok_or_else(|| format!("must be a list of 1 to {MOST_IDS} ids, as whole numbers"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_are_a_list_that_is_not_empty() {
        assert_eq!(ids("[1, 2]"), Ok(vec![1, 2]));
        for raw in ["[]", "1", "null", "[\"1\"]", "[1.5]"] {
            assert!(ids(raw).is_err(), "{raw}");
        }
    }
}
