//! What the handlers of all services share: how they wait, and how they answer.

use std::{fmt::Display, time::Duration};

use axum::{
    body::Body,
    http::{HeaderValue, StatusCode, header},
    response::Response,
};
use bytes::Bytes;
use semel::Error;
use serde::Serialize;

use super::problem::{INTERNAL, NOT_FOUND, Problem, ROW_UNREADABLE, of_store};

/// How long a database may take to answer a look. Above its own limit for a statement, which is 10 s, so that it has
/// its say first.
const PATIENCE: Duration = Duration::from_secs(15);

/// The problem of an id that names nothing of this tenant's.
pub fn missing() -> Problem {
    Problem::new(&NOT_FOUND).detail("There is nothing with this id.")
}

/// Waits for a look at the database, but not for ever.
///
/// # Errors
/// When it cannot be reached, or is too slow.
pub async fn patiently<T>(look: impl Future<Output = semel::Result<T>>) -> Result<T, Problem> {
    in_time(look).await.map_err(of_store)
}

/// As [`patiently`], for a look at one row, by its id.
///
/// # Errors
/// As [`patiently`], and [`damaged`] when the row cannot be read.
pub async fn one_row<T>(
    look: impl Future<Output = semel::Result<T>>,
    id: impl Display,
    help: &str,
) -> Result<T, Problem> {
    in_time(look).await.map_err(|error| damaged(error, id, help))
}

async fn in_time<T>(look: impl Future<Output = semel::Result<T>>) -> semel::Result<T> {
    let late = || Err(Error::Unavailable("no answer in time".into()));
    tokio::time::timeout(PATIENCE, look).await.unwrap_or_else(|_| late())
}

/// The problem of a look at one row by its id: if the row cannot be read, it names the row and what an operator can do
/// about it.
pub fn damaged(error: Error, id: impl Display, help: &str) -> Problem {
    let Error::Corrupt(what) = error else { return of_store(error) };
    tracing::warn!(%error, %id, "a row that was asked for cannot be read");
    let detail = format!(
        "{id} is there and cannot be read: it was damaged, or written by another version. No other row is affected. To \
         mend it: {help}."
    );
    Problem::new(&ROW_UNREADABLE).with("unreadable", what).detail(detail).about(id)
}

/// An entity as an answer.
pub fn answer(status: StatusCode, entity: &impl Serialize) -> Response<Bytes> {
    match serde_json::to_vec(entity) {
        Ok(body) => {
            let mut response = Response::new(Bytes::from(body));
            *response.status_mut() = status;
            let json = HeaderValue::from_static("application/json");
            response.headers_mut().insert(header::CONTENT_TYPE, json);
            response
        }
        Err(error) => {
            tracing::error!(%error, "an entity cannot be written as JSON");
            Problem::new(&INTERNAL).into_http()
        }
    }
}

/// The answer of what was looked at.
pub fn shown(entity: &impl Serialize) -> Response {
    answer(StatusCode::OK, entity).map(Body::from)
}

/// A page of a list.
#[derive(Debug, Serialize)]
pub struct Page<T> {
    /// What is on it.
    pub items: Vec<T>,
    /// The cursor of the next page, if there is one.
    pub next: Option<String>,
}
