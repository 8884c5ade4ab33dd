//! `/notifications`: lists, and marks as read.

use std::sync::Arc;

use axum::{extract::State, response::Response};
use semel::prelude::*;
use semel_http::Principal;

use super::{
    Service,
    model::{Channel, Kind, STATUSES},
    tables::{
        listing::{self, Filter},
        notifications,
        within::Within,
    },
};
use crate::http::{
    answers::{Page, missing, patiently, shown},
    path::Id,
    principal::Actor,
    problem::{Problem, of_store},
    query::{Query, number, time},
};

pub(super) fn kind(name: &str) -> Result<Kind, &'static str> {
    Kind::parse(name).ok_or("must be one of restaurant, customer, agency, admin")
}

fn truth(text: &str) -> Result<bool, &'static str> {
    text.parse().map_err(|_| "must be true or false")
}

fn status(text: &str) -> Result<&'static str, &'static str> {
    STATUSES.into_iter().find(|status| *status == text).ok_or("must be one of PENDING, SENT, FAILED, IN_DOUBT")
}

fn channel(text: &str) -> Result<Channel, &'static str> {
    Channel::parse(text).ok_or("must be one of PUSH, EMAIL, SMS, IN_APP")
}

/// `since` and `until` of a list.
pub(super) fn within(query: &mut Query) -> Within {
    Within { since: query.take("since", time), until: query.take("until", time) }
}

/// `GET /notifications`
pub(super) async fn list(
    State(service): State<Arc<Service>>,
    principal: Principal,
    mut query: Query,
) -> Result<Response, Problem> {
    let filter = Filter {
        kind: query.take("kind", kind),
        user_id: query.take("userId", |text| Ok(text.to_owned())),
        event_id: query.take("eventId", |text| Ok(text.to_owned())),
        unread: query.take("unread", truth),
        status: query.take("status", status),
        notification_type: query.take("notificationType", channel),
        within: within(&mut query),
    };
    let place = query.place();
    query.finish()?;
    let page =
        patiently(service.database.read(async |conn| listing::page(conn, &principal.tenant, &filter, place).await));
    let (items, next) = page.await?;
    Ok(shown(&Page { items, next }))
}

/// `GET /notifications/{id}`
pub(super) async fn show(
    State(service): State<Arc<Service>>,
    principal: Principal,
    Id(id): Id,
) -> Result<Response, Problem> {
    let id = number(&id).ok_or_else(missing)?;
    let found = patiently(service.database.read(async |conn| listing::find(conn, &principal.tenant, id).await));
    Ok(shown(&found.await?.ok_or_else(missing)?))
}

/// `POST /notifications/{id}/read`
pub(super) async fn read(
    State(service): State<Arc<Service>>,
    Actor(principal): Actor,
    Id(id): Id,
) -> Result<Response, Problem> {
    let id = number(&id).ok_or_else(missing)?;
    let now = service.database.now().await.map_err(of_store)?.as_micros();
    let read = service.ledger.transact(move |tx| async move {
        let mut held = tx.connection().await?;
        match notifications::read(&mut held.get()?, &principal.tenant, id, now).await? {
            true => listing::find(&mut held.get()?, &principal.tenant, id).await,
            false => Ok(None),
        }
    });
    Ok(shown(&read.await.map_err(of_store)?.ok_or_else(missing)?))
}
