//! `GET /v1/operations` and `GET /v1/operations/{id}`.

use axum::{extract::State as Server, response::Response};
use semel::{
    Key, Labels, Operation, Scope, State, Timestamp,
    look::{Filter, Page as Place, Unreadable},
    prelude::*,
};
use semel_store::Database;
use serde_json::{Value, json};

use super::{
    Api, SERVICE, ask,
    record::{Record, Status},
};
use crate::{
    http::{
        answers::{Page, missing, patiently, shown},
        fields::Wrong,
        path::Id,
        principal::Principal,
        problem::{INVALID_QUERY, Problem},
        query::{Query, number, time},
    },
    view,
};

/// The most names of operations that are listed by their own indexes.
const MOST_NAMES: usize = 32;

/// What a list selects.
struct Selection {
    service: String,
    status: Option<Status>,
    filter: Filter,
}

/// `GET /v1/operations/{id}`
pub(super) async fn show(
    Server(api): Server<Api>,
    principal: Principal,
    Id(id): Id,
    query: Query,
) -> Result<Response, Problem> {
    query.finish()?;
    let id = number(&id).ok_or_else(missing)?;
    let (op, now) = api.find_kept(&principal.tenant, id).await?;
    Ok(shown(&Record::of(api.store(), &op, now).await))
}

/// `GET /v1/operations`
pub(super) async fn list(
    Server(api): Server<Api>,
    principal: Principal,
    mut query: Query,
) -> Result<Response, Problem> {
    let key = query.take("key", |text| Key::new(text).map_err(|_| "must be 1 to 255 bytes without control characters"));
    let service = query.take("scope", |text| {
        ask::service(text)
            .map_err(|_| "must be a scope of operations: 1 to 64 bytes without a slash, none of Semel's own")
    });
    let kind = query.take("operationName", label);
    let process = query.take("processInstanceId", label);
    let activity = query.take("activityId", label);
    let status = query.take("status", |text| {
        let known = Status::ALL.into_iter().find(|(name, _)| *name == text).map(|(_, status)| status);
        known.ok_or("must be PENDING, SUCCESS or FAILED")
    });
    let (before, since) = (query.take("createdBefore", time), query.take("createdAfter", time));
    let place = query.place();
    query.finish()?;
    let service = service.unwrap_or_else(|| SERVICE.to_owned());
    let filter = Filter {
        service: Some(service.clone()),
        kind,
        labels: Labels([None, None, process, activity]),
        before,
        since,
        ..Filter::tenant(&principal.tenant)
    };
    let selection = Selection { service, status, filter };
    match key {
        Some(key) => by_key(&api, &selection, &key).await,
        None => page(&api, &selection, place.after, place.limit).await,
    }
}

/// Reads a text that is compared with a label or a name.
fn label(text: &str) -> Result<String, &'static str> {
    let fits = !text.is_empty() && text.len() <= Labels::MAX_BYTES && !text.chars().any(char::is_control);
    if fits { Ok(text.to_owned()) } else { Err("must be 1 to 255 bytes without control characters") }
}

/// The operations with a key: one per name.
async fn by_key(api: &Api, selection: &Selection, key: &Key) -> Result<Response, Problem> {
    let (store, tenant) = (api.store(), &selection.filter.tenant);
    let names = match &selection.filter.kind {
        Some(name) => vec![name.clone()],
        None => patiently(store.kinds(tenant, &selection.service, "")).await?,
    };
    if names.len() >= Database::MOST_KINDS as usize {
        let mut wrong = Wrong::default();
        wrong.note("operationName", "is needed to find a key: there are more names than are searched");
        return Err(wrong.problem(&INVALID_QUERY));
    }
    let now = patiently(store.now()).await?;
    let mut items = Vec::new();
    for name in names {
        let Ok(scope) = Scope::new(tenant, &selection.service, &name) else { continue };
        let found = patiently(store.by_key(&scope, key)).await?;
        for op in found.into_iter().filter(|op| selection.fits(op, now)) {
            items.push((op.id, Record::of(store, &op, now).await));
        }
    }
    items.sort_by_key(|(id, _)| std::cmp::Reverse(*id));
    let items: Vec<_> = items.into_iter().map(|(_, item)| item).collect();
    Ok(shown(&Page { items, next: None }))
}

/// A page, newest first. It is read from several lists, each by its own index: one per name, or one per state.
async fn page(api: &Api, selection: &Selection, after: i64, limit: i64) -> Result<Response, Problem> {
    let store = api.store();
    let place = Place { after: Some(after).filter(|after| *after > 0), limit: u32::try_from(limit).unwrap_or(500) };
    let now = patiently(store.now()).await?;
    let mut rows: Vec<(i64, Value)> = Vec::new();
    // Below this id, one of the lists may have rows that were not read.
    let mut floor = None::<i64>;
    for filter in selection.lists(api).await? {
        let listing = patiently(store.list(&filter, place)).await?;
        floor = floor.max(listing.next);
        for op in listing.items.iter().filter(|op| selection.fits(op, now)) {
            rows.push((op.id, serde_json::to_value(Record::brief(op, now)).unwrap_or_default()));
        }
        rows.extend(listing.unreadable.iter().map(|row: &Unreadable| (row.id, view::json::unreadable(row))));
    }
    rows.sort_by_key(|(id, _)| std::cmp::Reverse(*id));
    rows.dedup_by_key(|(id, _)| *id);
    rows.retain(|(id, _)| floor.is_none_or(|floor| *id >= floor));
    let limit = usize::try_from(limit).unwrap_or(usize::MAX);
    let more = rows.len() > limit;
    rows.truncate(limit);
    let next = if more { rows.last().map(|(id, _)| *id) } else { floor };
    let items: Vec<_> = rows.into_iter().map(|(_, item)| item).collect();
    Ok(shown(&json!({ "items": items, "next": next.map(|next| next.to_string()) })))
}

impl Selection {
    /// The lists that contain all selected operations.
    async fn lists(&self, api: &Api) -> Result<Vec<Filter>, Problem> {
        let state = |state| Filter { state: Some(state), ..self.filter.clone() };
        Ok(match self.status {
            Some(Status::Pending) => {
                let states = State::ALL.into_iter().filter(|state| *state != State::Completed);
                states.map(state).collect()
            }
            Some(Status::Failed) => [State::Pending, State::Failed, State::TimedOut].map(state).into(),
            _ => {
                let filter = match self.status {
                    Some(_) => state(State::Completed),
                    None => self.filter.clone(),
                };
                let labelled = filter.labels.0.iter().any(Option::is_some);
                if filter.kind.is_some() || labelled {
                    return Ok(vec![filter]);
                }
                let names = patiently(api.store().kinds(&filter.tenant, &self.service, "")).await?;
                match names.len() {
                    0 => Vec::new(),
                    1..=MOST_NAMES => {
                        names.into_iter().map(|name| Filter { kind: Some(name), ..filter.clone() }).collect()
                    }
                    _ => vec![filter],
                }
            }
        })
    }

    /// Whether an operation is selected. One whose retention has ended counts as absent.
    fn fits(&self, op: &Operation, now: Timestamp) -> bool {
        let Labels([_, _, process, activity]) = &self.filter.labels;
        let is = |asked: &Option<String>, has: &Option<String>| asked.is_none() || asked == has;
        self.status.is_none_or(|status| status == Status::of(op))
            && is(process, &op.labels.0[2])
            && is(activity, &op.labels.0[3])
            && self.filter.before.is_none_or(|before| op.created_at < before)
            && self.filter.since.is_none_or(|since| op.created_at >= since)
            && (op.state == State::Processing || !op.has_expired(now))
    }
}
