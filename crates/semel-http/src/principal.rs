//! Who is asking.

use std::{future::Future, pin::Pin};

use axum::extract::FromRequestParts;
use http::request::Parts;

use crate::problem::{INTERNAL, Problem};

/// A future behind a trait object.
pub type BoxFuture<'a, T> = Pin<Box<dyn Future<Output = T> + Send + 'a>>;

/// Whom a request comes from. A handler asks for it by taking it as an argument.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Principal {
    /// Whose data it may touch: part of every scope.
    pub tenant: String,
    /// Who it is within the tenant: named in the journal and the audit, never part of a scope.
    pub subject: String,
    /// What it may do.
    pub role: Role,
}

/// What a principal may do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Role {
    /// Everything.
    Admin,
}

/// Finds out who is asking.
pub trait Authenticate: Send + Sync + 'static {
    /// The principal of a request, or the problem to answer with.
    fn authenticate<'a>(&'a self, request: &'a Parts) -> BoxFuture<'a, Result<Principal, Problem>>;

    /// Whether being on this machine is the only proof asked for. If so, requests that a web page elsewhere made a
    /// local browser send are refused before they reach any route.
    fn loopback_only(&self) -> bool {
        false
    }
}

impl<S: Sync> FromRequestParts<S> for Principal {
    type Rejection = Problem;

    async fn from_request_parts(request: &mut Parts, _state: &S) -> Result<Self, Problem> {
        // Missing only if a handler of an open route asks for it, which no request can put right.
        request.extensions.get::<Self>().cloned().ok_or_else(|| Problem::new(&INTERNAL))
    }
}
