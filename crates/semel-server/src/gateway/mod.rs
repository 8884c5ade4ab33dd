//! The gateway: a reverse proxy that adds `Idempotency-Key` to any HTTP service.
//!
//! The steps of a request:
//!
//! - `admit`: can it be forwarded, and which tenant is it of;
//! - the layer of [`semel_http`]: a request with a key is claimed, replayed or refused; without a key it passes
//!   unchanged;
//! - `proxy`: sends it to the upstream (`upstream`, `pool`), and interprets the result.
//!
//! docs/gateway.md lists what a proxy cannot know.

mod admit;
pub mod config;
mod framing;
pub(crate) mod headers;
mod pool;
pub(crate) mod problems;
mod proxy;
pub mod secret;
mod trailers;
mod tunnel;
mod upstream;

use std::{
    convert::Infallible,
    sync::Arc,
    task::{Context, Poll},
    time::Duration,
};

use axum::{
    Router,
    body::Body,
    http::{HeaderValue, Request, Response},
    response::IntoResponse as _,
};
use hyper::body::Incoming;
use semel::{Backoff, Ledger, Policy};
use semel_http::{BoxFuture, Credentials, Idempotency, IdempotencyService, Route};
use semel_store::Database;
use tower::{Layer as _, Service};

use crate::{
    http::{self, health::Readiness, room::Budget},
    view::{Meaning, Telling, about},
};
use admit::Admission;
use proxy::{Proxy, Rules};

/// The service of the gateway's operations.
pub(crate) const SERVICE: &str = "gateway";
/// Their kind: one for all methods and paths, so that a reused key is noticed. A proxy knows no route templates and
/// cannot tell `/orders/1` from a collection.
pub(crate) const KIND: &str = "request";

/// How requests are described: by method and path. Some took effect and have no answer to replay, because it was not
/// stored or because a person resolved them.
pub(crate) const TELLING: Telling = Telling {
    noun: ("request", "requests"),
    labels: about::REQUEST_LABELS,
    about: |operation| about::request(operation).filter(|_| operation.scope.kind() == KIND),
    completed: |view, _| {
        let op = &view.operation;
        let is_answer = op.outcome.as_ref().is_some_and(|outcome| outcome.kept && !outcome.body.is_empty());
        let until = op.expires_at.map_or_else(|| "for ever".to_owned(), |end| format!("until {end}"));
        (!is_answer && !op.archived).then(|| Meaning {
            verdict: "it took effect",
            kept: None,
            next: format!(
                "Every repeat is answered 409 response-not-kept: it took effect, and its answer was not stored. The key \
                 stays taken {until}."
            ),
        })
    },
};

/// A gateway that is ready to serve. Clones share everything.
#[derive(Clone)]
pub struct Gateway {
    own: Router,
    admission: Arc<Admission>,
    bodies: Budget,
    passing: IdempotencyService<Database, Proxy>,
}

impl Gateway {
    /// A gateway for an upstream. With credentials, a repeat must have those of its first request.
    #[must_use]
    pub fn new(
        config: &config::Gateway,
        upstream: config::Upstream,
        ledger: Ledger<Database>,
        readiness: Arc<dyn Readiness>,
        bodies: Budget,
        credentials: Option<Credentials>,
    ) -> Self {
        let onward = upstream::Upstream::new(upstream.clone(), config.connect_timeout, config.timeout);
        let rules = Rules { on_lost: config.on_lost, not_executed: config.not_executed_statuses.clone() };
        let proxy = Proxy { upstream: onward, rules: Arc::new(rules) };
        Self {
            own: http::own_routes(readiness),
            admission: Arc::new(Admission {
                tenant: config.tenant.clone(),
                tenant_header: config.tenant_header.clone(),
                trusted: config.trusted_proxies.clone(),
                upstream: HeaderValue::from_str(&upstream.authority()).ok(),
            }),
            bodies,
            passing: Idempotency::new(ledger).layer(route(config, credentials)).layer(proxy),
        }
    }
}

/// The layer's rules for all requests.
fn route(config: &config::Gateway, credentials: Option<Credentials>) -> Route {
    /// Time for the rest of an answer on a busy machine.
    const MARGIN: Duration = Duration::from_secs(60);
    let policy = Policy {
        lease: config.lease,
        max_run: config.lease.max(config.connect_timeout + config.timeout + MARGIN),
        retention: Some(config.retention),
        // The client decides when to retry.
        backoff: Backoff::NONE,
        on_lost: config.on_lost,
        pinned: config.pinned,
        ..Policy::default()
    };
    let route = Route::leased()
        .service(SERVICE)
        .kind(KIND)
        // The upstream may accept unknown methods, and may read `post` as POST.
        .all_methods_that_may_not_repeat()
        // One gateway may serve many sites: the same path on another host is another request.
        .host_counts()
        .wait(config.wait)
        .request_limit(config.request_limit.0)
        .request_patience(config.timeout)
        .answer_limit(config.answer_limit.0)
        .policy(policy);
    credentials.into_iter().fold(route, Route::same_credentials)
}

/// Whether the gateway itself answers a path.
fn is_own(path: &str) -> bool {
    matches!(path, "/semel/healthz" | "/semel/readyz") || path.starts_with("/semel/problems/")
}

impl Service<Request<Incoming>> for Gateway {
    type Response = Response<Body>;
    type Error = Infallible;
    type Future = BoxFuture<'static, Result<Response<Body>, Infallible>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request<Incoming>) -> Self::Future {
        if is_own(request.uri().path()) {
            return Box::pin(self.own.call(request));
        }
        let (mut head, body) = request.into_parts();
        let keyed = match self.admission.admit(&mut head) {
            Ok(keyed) => keyed,
            Err(problem) => return Box::pin(std::future::ready(Ok(problem.into_response()))),
        };
        let request = Request::from_parts(head, Body::new(body));
        if !keyed {
            // The body is streamed and uses no more memory than a connection's buffers.
            let answer = self.passing.call(request);
            return Box::pin(async move { Ok(answer.await?.map(Body::new)) });
        }
        let (request, held) = self.bodies.watch(request);
        let answer = self.passing.call(request);
        Box::pin(async move { Ok(held.answer(answer.await?.map(Body::new))) })
    }
}

#[cfg(test)]
mod tests {
    use crate::config::{Environment, Flags, Networks, read};

    use super::*;

    pub(super) fn networks(text: &str) -> Networks {
        let environment = Environment::from_iter([("SEMEL_GATEWAY_TRUSTED_PROXIES", text)]);
        read(&Flags::default(), &environment, "").config().unwrap().gateway.trusted_proxies.clone()
    }

    #[test]
    fn only_the_gateways_own_paths_are_kept_from_the_upstream() {
        for path in ["/semel/healthz", "/semel/readyz", "/semel/problems/in-doubt"] {
            assert!(is_own(path));
        }
        for path in ["/", "/healthz", "/semel", "/semel/", "/semel/healthz/", "/semel/problems", "/semel/other"] {
            assert!(!is_own(path));
        }
    }
}
