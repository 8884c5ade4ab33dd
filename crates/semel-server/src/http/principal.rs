//! The caller of a request.

use axum::{extract::FromRequestParts, http::request::Parts};
pub use semel_http::{Authenticate, Principal, Role};

use super::{
    BoxFuture,
    problem::{Problem, ROLE_NOT_ALLOWED},
};

/// A caller that may act. A handler that executes people's decisions takes it instead of a [`Principal`].
#[derive(Clone, Debug)]
pub struct Actor(pub Principal);

impl<S: Sync> FromRequestParts<S> for Actor {
    type Rejection = Problem;

    async fn from_request_parts(request: &mut Parts, state: &S) -> Result<Self, Problem> {
        let principal = Principal::from_request_parts(request, state).await?;
        match principal.role {
            Role::Admin => Ok(Self(principal)),
            // Future roles may only read until they are listed here.
            _ => Err(Problem::new(&ROLE_NOT_ALLOWED)),
        }
    }
}

/// The authentication of a server without API tokens: every local caller may do everything.
#[derive(Clone, Copy, Debug, Default)]
pub struct Local;

impl Local {
    /// The subject of local callers, which is not verified.
    pub const SUBJECT: &'static str = "local";
}

impl Authenticate for Local {
    fn authenticate<'a>(&'a self, _request: &'a Parts) -> BoxFuture<'a, Result<Principal, Problem>> {
        Box::pin(async {
            Ok(Principal { tenant: "default".to_owned(), subject: Self::SUBJECT.to_owned(), role: Role::Admin })
        })
    }

    fn loopback_only(&self) -> bool {
        true
    }
}
