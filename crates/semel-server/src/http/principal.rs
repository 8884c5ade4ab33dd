//! Who is asking.

use axum::http::request::Parts;
pub use semel_http::{Authenticate, Principal, Role};

use super::{BoxFuture, problem::Problem};

/// The authentication of a server without tokens: whoever is on this machine may do everything.
#[derive(Clone, Copy, Debug, Default)]
pub struct Local;

impl Local {
    /// The subject of whoever asks, which nobody has verified.
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
