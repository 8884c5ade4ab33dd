//! Path parameters.

use axum::{
    extract::{FromRequestParts, Path},
    http::request::Parts,
};

use super::{answers::missing, problem::Problem};

/// The one id in a path. A NUL or invalid UTF-8 matches no row: PostgreSQL accepts no NUL in a text.
pub struct Id(pub String);

impl<S: Send + Sync> FromRequestParts<S> for Id {
    type Rejection = Problem;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, Problem> {
        let path = Path::<String>::from_request_parts(parts, state).await;
        path.ok().filter(|Path(id)| !id.contains('\0')).map(|Path(id)| Self(id)).ok_or_else(missing)
    }
}
