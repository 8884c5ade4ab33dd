//! `/notifications`: what there is for whom, and what was read.

use std::sync::Arc;

use axum::{extract::State, response::Response};
use semel::Store as _;
use semel_http::Principal;

use super::{
    Service,
    model::Kind,
    tables::notifications::{self, Filter},
};
use crate::http::{
    answers::{Page, missing, patiently, shown},
    path::Id,
    principal::Actor,
    problem::{Problem, of_store},
    query::{Query, number},
};

pub(super) fn kind(name: &str) -> Result<Kind, &'static str> {
    Kind::parse(name).ok_or("must be one of restaurant, customer, agency, admin")
}

fn truth(text: &str) -> Result<bool, &'static str> {
    text.parse().map_err(|_| "must be true or false")
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
    };
    let place = query.place();
    query.finish()?;
    let rows = patiently(async {
        let mut reader = service.database.reader().await?;
        let rows = notifications::list(&mut reader.conn(), &principal.tenant, &filter, place).await?;
        reader.leave();
        Ok(rows)
    });
    let (items, next) = place.cut(rows.await?, |row| row.id);
    Ok(shown(&Page { items, next }))
}

/// `POST /notifications/{id}/read`
pub(super) async fn read(
    State(service): State<Arc<Service>>,
    Actor(principal): Actor,
    Id(id): Id,
) -> Result<Response, Problem> {
    let id = number(&id).ok_or_else(missing)?;
    let now = service.database.now().await.map_err(of_store)?.as_micros();
    let read = service.transact(move |tx| async move {
        let mut held = tx.connection().await?;
        notifications::read(&mut held.get()?, &principal.tenant, id, now).await
    });
    Ok(shown(&read.await.map_err(of_store)?.ok_or_else(missing)?))
}
