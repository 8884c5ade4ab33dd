//! The values that the layer passes to a handler, and those that a handler can return to it.

use axum::extract::FromRequestParts;
use bytes::Bytes;
use http::{StatusCode, request::Parts};
use semel::{Context, Fence, Key, Scope, Store};

use crate::problem::{INTERNAL, Problem};

/// The meaning of an answer for its key. A handler overrides its status by putting this into the extensions
/// of its response.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// Complete. Repeats get this answer.
    Complete,
    /// Release: nothing was done, and the key is free.
    Release,
    /// Fail: it may run again.
    Fail,
    /// Doubt: it was begun, and its end is unknown.
    Doubt,
}

impl Verdict {
    /// By status: 2xx, 3xx and 4xx are final; 408, 409, 425 and 429, which ask the client to retry, release; 5xx
    /// fails. A status of no known class (600 to 999) says nothing about the effect, so it is in doubt.
    #[must_use]
    pub fn by_status(status: StatusCode) -> Self {
        match status.as_u16() {
            408 | 409 | 425 | 429 => Self::Release,
            ..=499 => Self::Complete,
            500..=599 => Self::Fail,
            _ => Self::Doubt,
        }
    }

    /// Only success is final, so that a refused request does not use up its key.
    #[must_use]
    pub fn only_success(status: StatusCode) -> Self {
        match status.as_u16() {
            200..=299 => Self::Complete,
            ..=499 => Self::Release,
            500..=599 => Self::Fail,
            _ => Self::Doubt,
        }
    }
}

/// The reason why an answer is not final, in a few words: for the operation's error, its journal and the log, which
/// otherwise show the status. A handler puts it into the extensions of its response.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Reason(pub String);

/// Stored instead of the answer in [reference mode](crate::Route::rebuild), such as the id of a created row. The
/// handler puts it into the extensions of its response.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Reference(pub Bytes);

impl Reference {
    /// A reference.
    #[must_use]
    pub fn new(name: impl Into<Bytes>) -> Self {
        Self(name.into())
    }
}

/// The transaction of a request in [atomic mode](crate::Route::atomic). Its rows commit together with the answer,
/// or not at all. A handler takes it as an argument.
pub struct Transaction<S: Store>(pub S::Tx);

/// How the layer hands the transaction on.
pub(crate) struct RequestTx<S: Store>(pub(crate) S::Tx);

impl<S: Store> Clone for RequestTx<S> {
    fn clone(&self) -> Self {
        Self(self.0.clone())
    }
}

impl<S: Store, State: Sync> FromRequestParts<State> for Transaction<S> {
    type Rejection = Problem;

    async fn from_request_parts(parts: &mut Parts, _state: &State) -> Result<Self, Problem> {
        match parts.extensions.get::<RequestTx<S>>() {
            Some(RequestTx(tx)) => Ok(Self(tx.clone())),
            None => {
                tracing::error!("a handler takes a transaction, but its route is not atomic");
                Err(Problem::new(&INTERNAL))
            }
        }
    }
}

/// This attempt at a keyed request. A handler takes it as an argument, or `Option<Attempt>` if the key is
/// optional.
#[derive(Clone, Debug)]
pub struct Attempt {
    scope: Scope,
    key: Key,
    fence: Fence,
    run: Run,
}

/// The run, for any store.
#[derive(Clone)]
struct Run(std::sync::Arc<dyn AnyRun>);

trait AnyRun: Send + Sync {
    fn derived_key(&self, step: &str) -> String;
    fn is_lost(&self) -> bool;
}

impl<S: Store> AnyRun for Context<S> {
    fn derived_key(&self, step: &str) -> String {
        Self::derived_key(self, step)
    }

    fn is_lost(&self) -> bool {
        Self::is_lost(self)
    }
}

impl std::fmt::Debug for Run {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Run")
    }
}

impl Attempt {
    pub(crate) fn new<S: Store>(context: &Context<S>) -> Self {
        Self {
            scope: context.operation().scope.clone(),
            key: context.operation().key.clone(),
            fence: context.fence(),
            run: Run(std::sync::Arc::new(context.clone())),
        }
    }

    /// The request's key.
    #[must_use]
    pub fn key(&self) -> &Key {
        &self.key
    }

    /// The short hash of the key, for log lines, which must not contain the key.
    #[must_use]
    pub fn short_hash(&self) -> String {
        semel::short_hash(self.scope.tenant(), self.scope.service(), self.scope.kind(), self.key.as_str())
    }

    /// The fence, for services that can refuse an older one.
    #[must_use]
    pub fn fence(&self) -> Fence {
        self.fence
    }

    /// The key for a step's call to another service: the same on every attempt, different for each step.
    #[must_use]
    pub fn derived_key(&self, step: &str) -> String {
        self.run.0.derived_key(step)
    }

    /// Whether the lease is lost: to be checked right before each effect elsewhere. It uses the boot clock, so a
    /// process that was suspended past its lease knows it at once.
    #[must_use]
    pub fn is_lost(&self) -> bool {
        self.run.0.is_lost()
    }
}

impl<State: Sync> FromRequestParts<State> for Attempt {
    type Rejection = Problem;

    async fn from_request_parts(parts: &mut Parts, _state: &State) -> Result<Self, Problem> {
        parts.extensions.get::<Self>().cloned().ok_or_else(|| Problem::new(&crate::problem::KEY_MISSING))
    }
}

impl<State: Sync> axum::extract::OptionalFromRequestParts<State> for Attempt {
    type Rejection = std::convert::Infallible;

    async fn from_request_parts(parts: &mut Parts, _state: &State) -> Result<Option<Self>, Self::Rejection> {
        Ok(parts.extensions.get::<Self>().cloned())
    }
}
