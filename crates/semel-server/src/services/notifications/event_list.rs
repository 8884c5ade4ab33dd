//! `GET /events`: the accepted events, newest first.

use std::sync::Arc;

use axum::{extract::State, response::Response};
use semel_http::Principal;

use super::{
    Service,
    list::within,
    tables::event_listing::{self, Filter},
};
use crate::http::{
    answers::{Page, patiently, shown},
    fields::Wrong,
    problem::{INVALID_QUERY, Problem},
    query::Query,
};

/// `GET /events`
pub(super) async fn list(
    State(service): State<Arc<Service>>,
    principal: Principal,
    mut query: Query,
) -> Result<Response, Problem> {
    let filter = Filter {
        aggregate_type: query.take("aggregateType", |text| Ok(text.to_owned())),
        aggregate_id: query.take("aggregateId", |text| Ok(text.to_owned())),
        event_type: query.take("eventType", |text| Ok(text.to_owned())),
        within: within(&mut query),
    };
    let place = query.place();
    query.finish()?;
    if filter.aggregate_id.is_some() && filter.aggregate_type.is_none() {
        let mut wrong = Wrong::default();
        wrong.note("aggregateId", "needs aggregateType: equal ids of two types are two things");
        return Err(wrong.problem(&INVALID_QUERY));
    }
    let page = patiently(
        service.database.read(async |conn| event_listing::page(conn, &principal.tenant, &filter, place).await),
    );
    let (items, next) = page.await?;
    Ok(shown(&Page { items, next }))
}
