//! Events for people: found by their columns, shown with their story, and run again when a person asks for it.

use axum::{
    Router,
    body::Body,
    extract::{Path, State as Server, rejection::PathRejection},
    http::StatusCode,
    response::Response,
    routing::{get, post},
};
use semel::{
    Labels, Store as _,
    look::{Filter, Listing, Page as Place},
};
use semel_store::Database;
use serde_json::json;

use super::{
    Receiver, SERVICE, again, conflicts, monitor,
    named::Named,
    process::{Done, RESULTS},
    record::{Listed, Record, STATES, Sent, status},
    reprocess::result,
    source::Source,
};
use crate::config::is_function;
use crate::http::{
    answers::{Page, answer, missing, patiently, shown},
    fields::{Fields, reason},
    path::Id,
    principal::{Actor, Principal},
    problem::Problem,
    query::{Query, time},
};

/// How many conflicts are told of an event.
const MOST_CONFLICTS: i64 = 50;

/// How many events a request looks through for those with a result: there is no index on it.
const MOST_LOOKED_AT: u32 = 5_000;

/// How many of them are read at a time.
const AT_ONCE: u32 = 500;

impl Receiver {
    /// The routes for people. Unlike those that senders post to, they need a principal.
    pub fn routes_for_people(&self) -> Router {
        Router::new()
            .route("/functions/v1/stripe-events-monitor", get(monitor::of_stripe))
            .route("/webhooks/{source}/monitor", get(monitor::of_source))
            .route("/webhooks/{source}/events", get(list))
            .route("/webhooks/{source}/events/{id}", get(show))
            .route("/webhooks/{source}/events/{id}/retry", post(retry))
            .with_state(self.clone())
    }
}

/// Takes a parameter that may be left empty: so do forms.
pub(super) fn given<T>(query: &mut Query, name: &str, read: impl FnOnce(&str) -> Result<T, &'static str>) -> Option<T> {
    query.take(name, |text| if text.is_empty() { Ok(None) } else { read(text).map(Some) }).flatten()
}

/// Reads the text of a label. What no event can have is a slip, and no empty list.
pub(crate) fn label(text: &str) -> Result<String, &'static str> {
    if text.len() > Labels::MAX_BYTES {
        return Err("must have at most 128 bytes");
    }
    if text.chars().any(char::is_control) { Err("must not have control characters") } else { Ok(text.to_owned()) }
}

/// The events of a source, by type and function.
pub(super) fn filter(source: &Source, kind: Option<String>, function: Option<String>) -> Filter {
    let scope = match &function {
        Some(function) => Some(source.kind(function)),
        None => (!source.config.dedup_per_function).then(|| source.name.clone()),
    };
    // By its scope where there is one: that leaves the choice of an index to the labels that tell more.
    let name = scope.is_none().then(|| source.name.clone());
    Filter {
        service: Some(SERVICE.to_owned()),
        kind: scope,
        labels: Labels([kind, function, name, None]),
        ..Filter::tenant(&source.config.tenant)
    }
}

/// `GET /webhooks/{source}/events`
async fn list(
    Server(receiver): Server<Receiver>,
    principal: Principal,
    Id(name): Id,
    mut query: Query,
) -> Result<Response, Problem> {
    let kind = given(&mut query, "type", label);
    let function = given(&mut query, "function", label);
    let state = given(&mut query, "status", |text| {
        let known = STATES.into_iter().find(|state| status(*state) == text);
        known.ok_or("must be pending, processing, completed, failed or timeout")
    });
    let since = given(&mut query, "since", |text| time(text).ok_or("must be a time such as 2026-01-31T12:00:00Z"));
    let archived = given(&mut query, "archived", |text| match text {
        "true" => Ok(true),
        "false" => Ok(false),
        _ => Err("must be true or false"),
    });
    let result = given(&mut query, "result", |text| {
        let known = RESULTS.into_iter().find(|result| *result == text);
        known.ok_or("must be stored, published, forwarded, handled or duplicate")
    });
    let place = query.place();
    query.finish()?;
    let source = receiver.source_of(&principal.tenant, &name)?;
    let filter = Filter { state, since, archived, ..filter(&source, kind, function) };
    let page = Place {
        after: Some(place.after).filter(|after| *after > 0),
        limit: u32::try_from(place.limit).unwrap_or(u32::MAX),
    };
    let store = receiver.ledger().store();
    let listing = match result {
        Some(result) => patiently(with_result(store, &source, &filter, result, page)).await?,
        None => patiently(store.list(&filter, page)).await?,
    };
    let mut items: Vec<_> = listing.items.iter().map(|op| (op.id, Listed::of(op, &source))).collect();
    items.extend(listing.unreadable.iter().map(|row| (row.id, Listed::unreadable(row))));
    items.sort_by_key(|(id, _)| std::cmp::Reverse(*id));
    let items = items.into_iter().map(|(_, item)| item).collect();
    Ok(shown(&Page { items, next: listing.next.map(|next| next.to_string()) }))
}

/// The events that completed with this result. Looks through a bounded number of events: where few have the result, a
/// page is shorter than asked for, and its cursor leads on.
async fn with_result(
    store: &Database,
    source: &Source,
    filter: &Filter,
    result: &str,
    page: Place,
) -> semel::Result<Listing> {
    let (mut listing, mut after, mut looked_at) = (Listing::default(), page.after, 0);
    loop {
        let passed = store.passed((&source.config.tenant, &source.name), after, AT_ONCE).await?;
        for event in &passed {
            after = Some(event.id);
            looked_at += 1;
            let is = event.service == SERVICE
                && event.outcome.as_ref().and_then(Done::read).is_some_and(|done| done.word() == result);
            // Once more, by the other filters, and without what may be large.
            if is {
                let one = store.list(filter, Place { after: Some(event.id.saturating_add(1)), limit: 1 }).await?;
                listing.items.extend(one.items.into_iter().filter(|op| op.id == event.id));
            }
            if listing.items.len() >= page.limit as usize || looked_at >= MOST_LOOKED_AT {
                listing.next = after;
                return Ok(listing);
            }
        }
        if passed.len() < AT_ONCE as usize {
            return Ok(listing);
        }
    }
}

/// The event that a path and a query name, or what is wrong with them.
async fn find(
    receiver: &Receiver,
    tenant: &str,
    path: Result<Path<(String, String)>, PathRejection>,
    mut query: Query,
) -> Result<Named, Problem> {
    let function = given(&mut query, "function", |text| {
        if is_function(text) { Ok(text.to_owned()) } else { Err("must be the name of a function") }
    });
    query.finish()?;
    let Path((name, id)) = path.map_err(|_| missing())?;
    Named::find(receiver, tenant, (&name, &id), function.as_deref()).await
}

/// `GET /webhooks/{source}/events/{id}`
async fn show(
    Server(receiver): Server<Receiver>,
    principal: Principal,
    path: Result<Path<(String, String)>, PathRejection>,
    query: Query,
) -> Result<Response, Problem> {
    let Named { source, operation } = find(&receiver, &principal.tenant, path, query).await?;
    let store = receiver.ledger().store();
    let story = patiently(store.journal(operation.id)).await?;
    let conflicts = patiently(async {
        let mut reader = store.reader().await?;
        let (kind, id) = (operation.scope.kind(), operation.key.as_str());
        let found = conflicts::of_event(&mut reader.conn(), &principal.tenant, kind, id, MOST_CONFLICTS).await?;
        reader.leave();
        Ok(found)
    });
    let sent = match operation.outcome.as_ref().and_then(Done::read) {
        Some(Done::Published { message, .. }) => {
            Some(patiently(Sent::find(store, &principal.tenant, &message, &story.0)).await?)
        }
        _ => None,
    };
    Ok(shown(&Record::of(&operation, &source, story, conflicts.await?, sent)))
}

/// `GET /webhooks/{source}/events/reprocess`: an event of that very id, though the path has another method, too.
pub(super) async fn show_reprocess(
    receiver: Server<Receiver>,
    principal: Principal,
    Id(name): Id,
    query: Query,
) -> Result<Response, Problem> {
    show(receiver, principal, Ok(Path((name, "reprocess".to_owned()))), query).await
}

/// `POST /webhooks/{source}/events/{id}/retry`
async fn retry(
    Server(receiver): Server<Receiver>,
    Actor(principal): Actor,
    path: Result<Path<(String, String)>, PathRejection>,
    query: Query,
    mut fields: Fields,
) -> Result<Response, Problem> {
    let why = fields.must("reason", reason);
    let named = fields.may("result", result);
    fields.finish()?;
    let Some(why) = why else { return Err(missing()) };
    let event = find(&receiver, &principal.tenant, path, query).await?;
    let stands = again::retry(&receiver, &event, named.as_deref(), (&principal.subject, &why)).await?;
    let said = json!({ "event_id": event.operation.key.as_str(), "processing_status": status(stands) });
    Ok(answer(StatusCode::ACCEPTED, &said).map(Body::from))
}
