//! Path ids and answers of all handlers.

use axum::{
    body::Body,
    extract::{FromRequestParts, Path},
    http::{HeaderValue, StatusCode, header, request::Parts},
    response::Response,
};
use bytes::Bytes;
use semel_http::Reference;
use serde::Serialize;

use super::model::Listed;
pub(super) use crate::http::answers::{answer, missing, patiently, shown};
use crate::http::{problem::Problem, query::Place};

/// The id in a path. Anything else is a 404.
pub(super) struct Id(pub(super) i64);

impl<S: Send + Sync> FromRequestParts<S> for Id {
    type Rejection = Problem;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, Problem> {
        let path = Path::<String>::from_request_parts(parts, state).await.map_err(|_| missing())?;
        // `01` and `+1` are not other names of 1: a key belongs to one path.
        path.parse().ok().filter(|id: &i64| id.to_string() == *path).map(Self).ok_or_else(missing)
    }
}

/// The answer of a change; repeats show the same entity.
pub(super) fn done(status: StatusCode, id: i64, entity: &impl Serialize) -> Response {
    let mut response = answer(status, entity).map(Body::from);
    response.extensions_mut().insert(Reference::new(id.to_string()));
    response
}

/// The answer of a creation.
pub(super) fn created(path: &str, id: i64, entity: &impl Serialize) -> Response {
    let mut response = done(StatusCode::CREATED, id, entity);
    if let Some(location) = location(path, id) {
        response.headers_mut().insert(header::LOCATION, location);
    }
    response
}

/// The URL of an id.
pub(super) fn location(path: &str, id: i64) -> Option<HeaderValue> {
    HeaderValue::try_from(format!("{path}/{id}")).ok()
}

/// The answer to a repeat: the entity as it is now.
pub(super) fn rebuilt<T: Serialize>(found: Result<Option<T>, Problem>) -> Response<Bytes> {
    match found {
        Ok(Some(entity)) => answer(StatusCode::OK, &entity),
        Ok(None) => missing().into_http(),
        Err(problem) => problem.into_http(),
    }
}

/// The id in a reference.
pub(super) fn referred(reference: &Reference) -> Option<i64> {
    std::str::from_utf8(&reference.0).ok()?.parse().ok()
}

/// A page of a list.
#[derive(Serialize)]
pub(super) struct Page<T> {
    itens: Vec<T>,
    /// The cursor of the next page, if there is one.
    proximo: Option<String>,
}

impl<T: Listed> Page<T> {
    /// A page of rows, of which one more than the limit was read: it shows whether there is a next page.
    pub(super) fn of(mut read: Vec<T>, place: Place) -> Self {
        let limit = usize::try_from(place.limit).unwrap_or(usize::MAX);
        let more = read.len() > limit;
        read.truncate(limit);
        let proximo = read.last().filter(|_| more).map(|last| last.place().to_string());
        Self { itens: read, proximo }
    }
}
