//! `/jobs`.

use axum::{
    body::Body,
    extract::State,
    http::{HeaderValue, StatusCode, header},
    response::Response,
};
use semel::machine::{Answer, NotNow};

use super::{
    Jobs,
    model::{Job, JobId, JobState},
    problems::JOB_ENDED,
};
use crate::http::{
    answers::{Page, answer, damaged, missing, one_row, patiently, shown},
    fields::Because,
    path::Id,
    principal::{Actor, Principal},
    problem::Problem,
    query::Query,
};

/// The remedy for a job that cannot be read.
const HELP: &str = "restore the row of semel_operations whose key is the job's id";

/// `GET /jobs`
pub(super) async fn list(
    State(jobs): State<Jobs>,
    principal: Principal,
    mut query: Query,
) -> Result<Response, Problem> {
    let state = query.take("state", |word| JobState::parse(word).ok_or("must be running, done or failed"));
    let place = query.place();
    query.finish()?;
    let after = Some(place.after).filter(|after| *after > 0);
    let limit = usize::try_from(place.limit).unwrap_or(usize::MAX);
    let (items, next) = patiently(jobs.list(&principal.tenant, state, after, limit)).await?;
    Ok(shown(&Page { items, next: next.map(|next| next.to_string()) }))
}

/// `GET /jobs/{id}`
pub(super) async fn show(State(jobs): State<Jobs>, principal: Principal, Id(id): Id) -> Result<Response, Problem> {
    Ok(shown(&find(&jobs, &principal.tenant, &id).await?.1))
}

/// `POST /jobs/{id}/cancel`
pub(super) async fn cancel(
    State(jobs): State<Jobs>,
    Actor(principal): Actor,
    Id(id): Id,
    Because(reason): Because,
) -> Result<Response, Problem> {
    let (operation, job) = find(&jobs, &principal.tenant, &id).await?;
    if job.state != JobState::Running {
        return Err(ended(&job));
    }
    let applied = patiently(jobs.0.ledger.cancel(operation, &principal.subject, &reason)).await?;
    let (_, job) = find(&jobs, &principal.tenant, &id).await?;
    match applied.answer {
        Answer::Cancelled => Ok(shown(&job)),
        // Its run ends at its next renewal at the latest.
        Answer::CancelAsked => Ok(answer(StatusCode::ACCEPTED, &job).map(Body::from)),
        Answer::NotNow(NotNow::Absent) => Err(missing()),
        _ => Err(ended(&job)),
    }
}

/// The answer to a request that made a job: where to look how far it is.
pub(crate) fn accepted(job: &Job) -> Response {
    let mut response = answer(StatusCode::ACCEPTED, job).map(Body::from);
    if let Ok(location) = HeaderValue::try_from(format!("/jobs/{}", job.id)) {
        response.headers_mut().insert(header::LOCATION, location);
    }
    response
}

/// The id of a job's operation, and the job.
async fn find(jobs: &Jobs, tenant: &str, id: &str) -> Result<(i64, Job), Problem> {
    let id = JobId::parse(id).ok_or_else(missing)?;
    let found = one_row(jobs.find(tenant, id), id, HELP).await?.ok_or_else(missing)?;
    let job = Job::of(&found).map_err(|error| damaged(error, id, HELP))?;
    Ok((found.id, job))
}

fn ended(job: &Job) -> Problem {
    let how = if job.state == JobState::Done { "is done" } else { "has failed" };
    Problem::new(&JOB_ENDED).detail(format!("The job {how}."))
}
