//! Time limits of reads, and answers, for the handlers of all services.

use std::{fmt::Display, time::Duration};

use axum::{
    body::Body,
    http::{HeaderValue, StatusCode, header},
    response::Response,
};
use bytes::Bytes;
use semel::{Error, Timestamp};
use serde::{Serialize, Serializer};

use super::problem::{INTERNAL, NOT_FOUND, Problem, ROW_UNREADABLE, of_store};

/// The time limit of a read. Above the database's own limit for a statement (10 s), so that its error comes first.
const PATIENCE: Duration = Duration::from_secs(15);

/// The problem of an id that names nothing of this tenant.
pub fn missing() -> Problem {
    Problem::new(&NOT_FOUND).detail("There is nothing with this id.")
}

/// Runs a read with a time limit.
///
/// # Errors
/// When it cannot be reached, or is too slow.
pub async fn patiently<T>(look: impl Future<Output = semel::Result<T>>) -> Result<T, Problem> {
    in_time(look).await.map_err(of_store)
}

/// As [`patiently`], for a read of one row by its id.
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

/// The problem of a read of one row by its id. If the row cannot be read, it names the row and what an operator can do.
pub fn damaged(error: Error, id: impl Display, help: &str) -> Problem {
    let Error::Corrupt(what) = error else { return of_store(error) };
    tracing::warn!(%error, %id, "a row that was asked for cannot be read");
    let detail = format!(
        "{id} exists and cannot be read: it was damaged, or written by another version. No other row is affected. To \
         repair it: {help}."
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

/// A 200 with this entity.
pub fn shown(entity: &impl Serialize) -> Response {
    answer(StatusCode::OK, entity).map(Body::from)
}

/// A page of a list.
#[derive(Debug, Serialize)]
pub struct Page<T> {
    /// The items.
    pub items: Vec<T>,
    /// The cursor of the next page, if there is one.
    pub next: Option<String>,
}

/// Shows a time, stored in microseconds, for `serialize_with`.
///
/// # Errors
/// The serializer's.
pub fn time<S: Serializer>(micros: &i64, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_str(&Timestamp::from_micros(*micros))
}

/// As [`time`], or null.
///
/// # Errors
/// The serializer's.
pub fn maybe_time<S: Serializer>(micros: &Option<i64>, serializer: S) -> Result<S::Ok, S::Error> {
    match micros {
        Some(micros) => time(micros, serializer),
        None => serializer.serialize_none(),
    }
}
