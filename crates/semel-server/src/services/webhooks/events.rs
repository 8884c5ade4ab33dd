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
    Labels, State, Store as _,
    look::{Filter, Listing, Page as Place},
};
use semel_store::Passed;
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

/// The events that completed with this result. Looks through a bounded number of events: where few have the result, a
/// page is shorter than asked for, and its cursor leads on. `pass` reads some events from an id downwards, `load` reads
/// those that fit: it is called once, so that the number of statements does not depend on how many do not fit.
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
    // Events have a result when they have completed.
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
    // One may have begun anew since it was passed.
    listing.items.retain(|event| event.state == State::Completed);
    listing.next = after.filter(|_| more);
    Ok(listing)
}

/// Whether an event has this result and is one of those that a filter asks for.
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

#[cfg(test)]
mod tests {
    use std::cell::{Cell, RefCell};

    use semel::{Fence, Outcome, Timestamp};

    use super::*;

    /// An event that was stored, of a type.
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

    /// Of 12,000 stored events four are of a rare type, one of them after two looks.
    fn passed(after: Option<i64>) -> Vec<Passed> {
        let rare = |id: &i64| [11_990, 9_000, 2_000, 1].contains(id);
        let below = after.unwrap_or(12_001).min(12_001);
        let ids = (1..below).rev().take(AT_ONCE as usize);
        ids.map(|id| stored(id, if rare(&id) { "rare" } else { "common" })).collect()
    }

    /// What a page loads, where the next begins, and how many statements it took.
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
    async fn a_page_by_result_takes_a_bounded_number_of_statements_however_few_events_fit() {
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
    async fn a_page_by_result_loads_only_what_fits_all_filters() {
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
