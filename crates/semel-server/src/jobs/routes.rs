//! `/jobs`.

use axum::{extract::State, response::Response};

use super::{
    Jobs,
    model::{Job, JobId, JobState},
    tables,
};
use crate::http::{
    answers::{Page, missing, one_row, patiently, shown},
    path::Id,
    principal::Principal,
    problem::Problem,
    query::Query,
};

/// `GET /jobs`
pub(super) async fn list(
    State(jobs): State<Jobs>,
    principal: Principal,
    mut query: Query,
) -> Result<Response, Problem> {
    let state = query.take("state", |word| JobState::parse(word).ok_or("must be running, done or failed"));
    let before = query.take("cursor", |id| JobId::parse(id).ok_or("must be as the page before gave it"));
    let limit = query.place().limit;
    query.finish()?;
    let read = patiently(async {
        let mut reader = jobs.0.ledger.store().reader().await?;
        let read = tables::list(&mut reader.conn(), &principal.tenant, before, state, limit + 1).await?;
        reader.leave();
        Ok(read)
    });
    let mut items: Vec<Job> = read.await?;
    // One more than asked for was read: it tells whether there is another page.
    let limit = usize::try_from(limit).unwrap_or(usize::MAX);
    let more = items.len() > limit;
    items.truncate(limit);
    let next = items.last().filter(|_| more).map(|job| job.id.to_string());
    Ok(shown(&Page { items, next }))
}

/// `GET /jobs/{id}`
pub(super) async fn show(State(jobs): State<Jobs>, principal: Principal, Id(id): Id) -> Result<Response, Problem> {
    let id = JobId::parse(&id).ok_or_else(missing)?;
    let found = one_row(jobs.find(&principal.tenant, id), id, "restore the row of semel_jobs").await?;
    Ok(shown(&found.ok_or_else(missing)?))
}
