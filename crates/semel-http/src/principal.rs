//! The caller of a request.

use std::{future::Future, pin::Pin};

use axum::extract::FromRequestParts;
use http::request::Parts;

use crate::problem::{INTERNAL, Problem};

/// A future behind a trait object.
pub type BoxFuture<'a, T> = Pin<Box<dyn Future<Output = T> + Send + 'a>>;

/// The caller of a request. A handler takes it as an argument.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Principal {
    /// The tenant, part of every scope.
    pub tenant: String,
    /// The caller within the tenant: named in the journal and the audit, never part of a scope.
    pub subject: String,
    /// Its rights.
    pub role: Role,
}

/// The rights of a principal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Role {
    /// All rights.
    Admin,
}

/// Authenticates requests.
pub trait Authenticate: Send + Sync + 'static {
    /// The principal of a request, or the problem to answer with.
    fn authenticate<'a>(&'a self, request: &'a Parts) -> BoxFuture<'a, Result<Principal, Problem>>;

    /// Whether only the loopback address proves the caller. Then requests that a foreign web page makes a local browser
    /// send are refused before they reach a route.
    fn loopback_only(&self) -> bool {
        false
    }
}

impl<S: Sync> FromRequestParts<S> for Principal {
    type Rejection = Problem;

    async fn from_request_parts(request: &mut Parts, _state: &S) -> Result<Self, Problem> {
        // Missing only if a handler of an open route takes it, which is a bug of the program.
        request.extensions.get::<Self>().cloned().ok_or_else(|| Problem::new(&INTERNAL))
    }
}
