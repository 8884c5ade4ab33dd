//! Events for people: found by their columns, shown with their story, and run again when somebody says so.

use std::{collections::BTreeSet, sync::Arc};

use axum::{
    Router,
    body::Body,
    extract::{Path, State as Server, rejection::PathRejection},
    http::StatusCode,
    response::Response,
    routing::{get, post},
};
use semel::{
    Key, Labels, Operation, State, Store as _, Verdict,
    look::{Filter, Page as Place},
    machine::{Answer, NotNow},
    store::Decision,
};
use serde_json::json;

use super::{
    Receiver, SERVICE,
    again::{self, Again, result_of},
    conflicts,
    event::Event,
    monitor,
    process::{Done, STORED},
    record::{Listed, Record, STATES, Sent, status},
    reprocess::result,
    source::Source,
};
use crate::config::is_function;
use crate::http::{
    answers::{Page, answer, missing, patiently, shown},
    fields::{Fields, Wrong, reason},
    path::Id,
    principal::{Actor, Principal},
    problem::{EVENT_COMPLETED, EVENT_RUNNING, EVENT_WITHOUT_RULE, INVALID_QUERY, Problem},
    query::{Query, time},
};

/// How many conflicts are told of an event.
const MOST_CONFLICTS: i64 = 50;

/// How many functions an event is looked for in, where it takes effect once per function.
/// Those that are configured are at most half of it, and none of them is left out.
const MOST_FUNCTIONS: usize = 202;

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

    /// A source, if it is this tenant's.
    pub(super) fn source_of(&self, tenant: &str, name: &str) -> Result<Arc<Source>, Problem> {
        let found = self.source(name).filter(|source| source.config.tenant == tenant);
        found.cloned().ok_or_else(|| missing().detail("There is no source of this name."))
    }
}

/// Takes a parameter that may be left empty: so do forms.
pub(super) fn given<T>(query: &mut Query, name: &str, read: impl FnOnce(&str) -> Result<T, &'static str>) -> Option<T> {
    query.take(name, |text| if text.is_empty() { Ok(None) } else { read(text).map(Some) }).flatten()
}

/// Reads the text of a label. What no event can have is a slip, and no empty list.
pub(super) fn label(text: &str) -> Result<String, &'static str> {
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
    let place = query.place();
    query.finish()?;
    let source = receiver.source_of(&principal.tenant, &name)?;
    let filter = Filter { state, since, archived, ..filter(&source, kind, function) };
    let page = Place {
        after: Some(place.after).filter(|after| *after > 0),
        limit: u32::try_from(place.limit).unwrap_or(u32::MAX),
    };
    let listing = patiently(receiver.ledger().store().list(&filter, page)).await?;
    let mut items: Vec<_> = listing.items.iter().map(|op| (op.id, Listed::of(op, &source))).collect();
    items.extend(listing.unreadable.iter().map(|row| (row.id, Listed::unreadable(row))));
    items.sort_by_key(|(id, _)| std::cmp::Reverse(*id));
    let items = items.into_iter().map(|(_, item)| item).collect();
    Ok(shown(&Page { items, next: listing.next.map(|next| next.to_string()) }))
}

/// The event that a path names, or what is wrong with it.
struct Named {
    source: Arc<Source>,
    operation: Operation,
}

impl Named {
    async fn find(
        receiver: &Receiver,
        tenant: &str,
        path: Result<Path<(String, String)>, PathRejection>,
        mut query: Query,
    ) -> Result<Self, Problem> {
        let named = given(&mut query, "function", |text| {
            if is_function(text) { Ok(text.to_owned()) } else { Err("must be the name of a function") }
        });
        query.finish()?;
        let Path((name, id)) = path.map_err(|_| missing())?;
        let source = receiver.source_of(tenant, &name)?;
        let key = Key::new(&id).map_err(|_| missing())?;
        let functions = match &named {
            Some(function) => vec![function.clone()],
            None if source.config.dedup_per_function => patiently(functions(receiver, &source)).await?,
            None => vec![source.name.clone()],
        };
        let mut found = Vec::new();
        for function in functions {
            let Ok(scope) = source.scope(&function) else { continue };
            let operation = patiently(receiver.ledger().store().by_key(&scope, &key)).await?;
            let meant = |op: &Operation| named.as_ref().is_none_or(|named| op.labels.0[1].as_ref() == Some(named));
            found.extend(operation.filter(meant).map(|operation| (function, operation)));
        }
        match found.len() {
            0 => Err(missing()),
            1 => found.pop().map(|(_, operation)| Self { source, operation }).ok_or_else(missing),
            _ => Err(which(found.into_iter().map(|(function, _)| function).collect())),
        }
    }
}

/// The functions of a source, where each takes effect by itself: those that are configured, and those that have events
/// from when they were, by the kinds that there are.
pub(super) async fn functions(receiver: &Receiver, source: &Source) -> semel::Result<Vec<String>> {
    let prefix = source.kind("");
    let kinds = receiver.ledger().store().kinds(&source.config.tenant, SERVICE, &prefix).await?;
    let former = kinds.iter().filter_map(|kind| kind.strip_prefix(&prefix)).filter(|name| is_function(name));
    let mut names: BTreeSet<_> = [&source.name].into_iter().chain(&source.config.functions.0).cloned().collect();
    for name in former {
        if names.len() < MOST_FUNCTIONS {
            names.insert(name.to_owned());
        }
    }
    Ok(names.into_iter().collect())
}

/// The problem of an id that several functions know.
fn which(functions: Vec<String>) -> Problem {
    let mut wrong = Wrong::default();
    wrong.note("function", format!("must be one of those that know this event: {}", functions.join(", ")));
    wrong.problem(&INVALID_QUERY).with("functions", functions)
}

/// `GET /webhooks/{source}/events/{id}`
async fn show(
    Server(receiver): Server<Receiver>,
    principal: Principal,
    path: Result<Path<(String, String)>, PathRejection>,
    query: Query,
) -> Result<Response, Problem> {
    let Named { source, operation } = Named::find(&receiver, &principal.tenant, path, query).await?;
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
    let Named { operation, source } = Named::find(&receiver, &principal.tenant, path, query).await?;
    if operation.state == State::Completed {
        let named = named.unwrap_or_else(|| STORED.to_owned());
        return rerun(&receiver, &source, &operation, &named, (&principal.subject, &why)).await;
    }
    // About the event as it stands: whoever asks has not seen a run that ended meanwhile.
    let decision = Decision::Resolve { verdict: Verdict::Retry, expected: Some(operation.fence) };
    let decided = patiently(receiver.ledger().decide(operation.id, decision, &principal.subject, &why)).await?;
    match decided.answer {
        Answer::Resolved => {}
        Answer::NotNow(NotNow::Absent) => return Err(missing()),
        Answer::NotNow(NotNow::Completed | NotNow::Pinned) => return Err(Problem::new(&EVENT_COMPLETED)),
        _ => return Err(Problem::new(&EVENT_RUNNING)),
    }
    tracing::info!(operation = operation.id, by = principal.subject, "a person has an event run again");
    receiver.wake();
    Ok(runs(&operation, decided.operation.map_or(State::Pending, |operation| operation.state)))
}

/// The answer to who had an event run again.
fn runs(operation: &Operation, stands: State) -> Response {
    let said = json!({ "event_id": operation.key.as_str(), "processing_status": status(stands) });
    answer(StatusCode::ACCEPTED, &said).map(Body::from)
}

/// Has an event run through the present rules that has completed, if it did so with the result that was named.
async fn rerun(
    receiver: &Receiver,
    source: &Source,
    operation: &Operation,
    result: &str,
    by: (&str, &str),
) -> Result<Response, Problem> {
    let kind = Event::of(operation, source).map(|event| event.kind).or_else(|| operation.labels.0[0].clone());
    if result_of(operation) == Some(result) && kind.is_some_and(|kind| source.stores(&kind)) {
        return Err(Problem::new(&EVENT_WITHOUT_RULE));
    }
    match patiently(again::rerun(receiver.ledger(), operation, result, by)).await? {
        Again::Yes => {
            tracing::info!(operation = operation.id, by = by.0, "a person has an event run once more");
            receiver.wake();
            Ok(runs(operation, State::Pending))
        }
        Again::Otherwise(was) => Err(Problem::new(&EVENT_COMPLETED).with("result", was)),
        Again::Gone => Err(missing()),
        Again::MovedOn => Err(Problem::new(&EVENT_RUNNING)),
    }
}
