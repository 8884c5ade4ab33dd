//! Events for people: lists, single events with their story, and reruns.

use axum::{
    Router,
    body::Body,
    extract::{Path, State as Server, rejection::PathRejection},
    http::StatusCode,
    response::Response,
    routing::{get, post},
};
use semel::{
    Labels, State,
    look::{Filter, Listing, Page as Place},
    prelude::*,
};
use semel_store::Passed;
use serde_json::json;

use super::config::is_function;
use super::{
    Receiver, SERVICE, again, conflicts, monitor,
    named::Named,
    process::{Done, RESULTS},
    record::{Listed, Record, STATES, Sent, status},
    reprocess::result,
    source::Source,
};
use crate::http::{
    answers::{Page, answer, missing, patiently, shown},
    fields::{Fields, reason},
    path::Id,
    principal::{Actor, Principal},
    problem::Problem,
    query::{Query, time},
};
use crate::view::View;

/// How many conflicts of an event are shown.
const MOST_CONFLICTS: i64 = 50;

/// The longest type or function of an event.
const LONGEST_LABEL: usize = 128;

/// How many events a request searches for a result: there is no index on it.
const MOST_LOOKED_AT: u32 = 5_000;

/// How many of them are read at a time.
const AT_ONCE: u32 = 500;

impl Receiver {
    /// The routes for people. Unlike the routes for senders, they need a principal.
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

/// Takes a parameter that may be empty, as forms send it.
pub(super) fn given<T>(query: &mut Query, name: &str, read: impl FnOnce(&str) -> Result<T, &'static str>) -> Option<T> {
    query.take(name, |text| if text.is_empty() { Ok(None) } else { read(text).map(Some) }).flatten()
}

/// Parses a label. A value that no event can have is a mistake, not an empty list.
pub(crate) fn label(text: &str) -> Result<String, &'static str> {
    if text.len() > LONGEST_LABEL {
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
    // If there is a scope, the service is implied, and the labels select the index.
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
    let since = given(&mut query, "since", time);
    let archived = given(&mut query, "archived", |text| match text {
        "true" => Ok(true),
        "false" => Ok(false),
        _ => Err("must be true or false"),
    });
    let result = given(&mut query, "result", |text| {
        let known = RESULTS.into_iter().find(|result| *result == text);
        known.ok_or("must be stored, published, forwarded, handled, pulled or duplicate")
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
        Some(result) => {
            let (tenant, name) = (&*source.config.tenant, &*source.name);
            let pass = |after| store.passed((tenant, name), after, AT_ONCE);
            let load = |ids: Vec<i64>| async move { store.listed(tenant, &ids).await };
            patiently(with_result(&filter, result, page, pass, load)).await?
        }
        None => patiently(store.list(&filter, page)).await?,
    };
    let mut items: Vec<_> = listing.items.iter().map(|op| (op.id, Listed::of(op, &source))).collect();
    items.extend(listing.unreadable.iter().map(|row| (row.id, Listed::unreadable(row))));
    items.sort_by_key(|(id, _)| std::cmp::Reverse(*id));
    let items = items.into_iter().map(|(_, item)| item).collect();
    Ok(shown(&Page { items, next: listing.next.map(|next| next.to_string()) }))
}

/// The events that completed with this result. Searches a bounded number of events: if few have the result, a page is
/// shorter than its limit, and its cursor leads on. `pass` reads some events from an id downwards; `load` reads the
/// matching ones. It is called once, so that the number of statements does not depend on the number of matches.
async fn with_result<P, L>(
    filter: &Filter,
    result: &str,
    page: Place,
    pass: impl Fn(Option<i64>) -> P,
    load: impl FnOnce(Vec<i64>) -> L,
) -> semel::Result<Listing>
where
    P: Future<Output = semel::Result<Vec<Passed>>>,
    L: Future<Output = semel::Result<Listing>>,
{
    // Only completed events have a result.
    if filter.state.is_some_and(|state| state != State::Completed) {
        return Ok(Listing::default());
    }
    let (mut found, mut after, mut looked_at, mut more) = (Vec::new(), page.after, 0, true);
    while more && found.len() < page.limit as usize && looked_at < MOST_LOOKED_AT {
        let passed = pass(after).await?;
        more = passed.len() >= AT_ONCE as usize;
        for event in passed {
            if found.len() >= page.limit as usize {
                more = true;
                break;
            }
            after = Some(event.id);
            looked_at += 1;
            if fits(&event, filter, result) {
                found.push(event.id);
            }
        }
    }
    let mut listing = load(found).await?;
    // One may have begun anew since it was read.
    listing.items.retain(|event| event.state == State::Completed);
    listing.next = after.filter(|_| more);
    Ok(listing)
}

/// Whether an event has this result and matches a filter.
fn fits(event: &Passed, filter: &Filter, result: &str) -> bool {
    let Labels([kind, function, ..]) = &filter.labels;
    let is = |asked: &Option<String>, has: Option<&str>| asked.is_none() || asked.as_deref() == has;
    is(&filter.service, Some(&event.service))
        && is(&filter.kind, Some(&event.kind))
        && is(kind, event.label1.as_deref())
        && is(function, event.label2.as_deref())
        && filter.since.is_none_or(|since| event.created_at >= since)
        && filter.archived.is_none_or(|archived| event.archived == archived)
        && event.outcome.as_ref().and_then(Done::read).is_some_and(|done| done.word() == result)
}

/// The event that a path and a query name, or their mistakes.
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
    let view = patiently(View::read(store, operation)).await?;
    let conflicts = patiently(store.read(async |conn| {
        let (kind, id) = (view.operation.scope.kind(), view.operation.key.as_str());
        conflicts::of_event(conn, &principal.tenant, kind, id, MOST_CONFLICTS).await
    }));
    let sent = match view.operation.outcome.as_ref().and_then(Done::read) {
        Some(Done::Published { message, .. }) => {
            Some(patiently(Sent::find(store, &principal.tenant, &message, &view.notes)).await?)
        }
        _ => None,
    };
    Ok(shown(&Record::of(&view, &source, conflicts.await?, sent)))
}

/// `GET /webhooks/{source}/events/reprocess`: an event with that id, although the path has another method, too.
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

#[cfg(test)]
mod tests {
    use std::cell::{Cell, RefCell};

    use semel::{Fence, Outcome, Timestamp};

    use super::*;

    /// A stored event of a type.
    fn stored(id: i64, kind: &str) -> Passed {
        Passed {
            id,
            fence: Fence(id),
            service: SERVICE.to_owned(),
            kind: "stripe".to_owned(),
            label1: Some(kind.to_owned()),
            label2: None,
            created_at: Timestamp::from_micros(id),
            archived: id % 2 == 0,
            outcome: Some(Outcome::kept(r#"{"result":"stored"}"#)),
        }
    }

    /// Of 12,000 stored events four are of a rare type, one of them on the third page.
    fn passed(after: Option<i64>) -> Vec<Passed> {
        let rare = |id: &i64| [11_990, 9_000, 2_000, 1].contains(id);
        let below = after.unwrap_or(12_001).min(12_001);
        let ids = (1..below).rev().take(AT_ONCE as usize);
        ids.map(|id| stored(id, if rare(&id) { "rare" } else { "common" })).collect()
    }

    /// The ids that a page loads, its cursor, and its number of statements.
    async fn page(filter: &Filter, after: Option<i64>, limit: u32) -> (Vec<i64>, Option<i64>, u32) {
        let (statements, loaded) = (Cell::new(0), RefCell::new(Vec::new()));
        let count = || statements.set(statements.get() + 1);
        let pass = |after| {
            count();
            async move { Ok(passed(after)) }
        };
        let load = |ids| {
            count();
            loaded.replace(ids);
            async { Ok(Listing::default()) }
        };
        let listing = with_result(filter, "stored", Place { after, limit }, pass, load).await.unwrap();
        (loaded.take(), listing.next, statements.get())
    }

    #[tokio::test]
    async fn a_page_by_result_takes_a_bounded_number_of_statements() {
        let most = MOST_LOOKED_AT / AT_ONCE + 1;
        let labels = Labels([Some("rare".to_owned()), None, None, None]);
        let rare = Filter { service: Some(SERVICE.to_owned()), labels, ..Filter::tenant("acme") };
        let (mut after, mut found) = (None, Vec::new());
        loop {
            let (ids, next, statements) = page(&rare, after, 20).await;
            assert!(statements <= most, "{statements}");
            found.extend(ids);
            match next {
                Some(next) => assert!(after.replace(next).is_none_or(|before| next < before)),
                None => break,
            }
        }
        assert_eq!(found, [11_990, 9_000, 2_000, 1]);
        assert_eq!(page(&rare, None, 1).await, (vec![11_990], Some(11_990), 2), "a full page looks no further");
    }

    #[tokio::test]
    async fn a_page_by_result_loads_only_events_that_match_all_filters() {
        let all = Filter::tenant("acme");
        assert_eq!(page(&all, Some(4), 20).await.0, [3, 2, 1]);
        assert_eq!(page(&all, Some(4), 3).await, (vec![3, 2, 1], None, 2), "there is no page after the last event");
        let kind = |kind: &str| Filter { kind: Some(kind.to_owned()), ..all.clone() };
        assert_eq!(page(&kind("stripe"), Some(4), 20).await.0, [3, 2, 1]);
        assert!(page(&kind("github"), Some(4), 20).await.0.is_empty());
        let since = Filter { since: Some(Timestamp::from_micros(2)), ..all.clone() };
        assert_eq!(page(&since, Some(4), 20).await.0, [3, 2]);
        let archived = Filter { archived: Some(true), ..all.clone() };
        assert_eq!(page(&archived, Some(4), 20).await.0, [2]);
        let failed = Filter { state: Some(State::Failed), ..all };
        assert_eq!(page(&failed, None, 20).await, (vec![], None, 0), "what failed has no result");
    }
}
