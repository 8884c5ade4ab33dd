//! The gateway: a reverse proxy that gives `Idempotency-Key` to any HTTP service behind it.
//!
//! A request goes through, in this order:
//!
//! - `admit`: is it one that can be passed on, and whose is it;
//! - the layer of [`semel_http`]: with a key, it is claimed, replayed or refused; without, it goes on untouched;
//! - `proxy`: on to the upstream (`upstream`, `pool`), and what came of it.
//!
//! What a proxy cannot know is in docs/gateway.md.

mod admit;
mod framing;
mod headers;
mod pool;
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
    config,
    http::{self, health::Readiness, room::Budget},
};
use admit::Admission;
use proxy::{Proxy, Rules};

/// The service of the gateway's operations.
pub(crate) const SERVICE: &str = "gateway";
/// Their kind. There is one for all methods and paths, so that a key that is used for two different things is noticed:
/// a proxy knows no route templates, and cannot tell `/orders/1` from a collection.
pub(crate) const KIND: &str = "request";
/// A gateway that is ready to serve. Clones share everything.
#[derive(Clone)]
pub struct Gateway {
    own: Router,
    admission: Arc<Admission>,
    bodies: Budget,
    passing: IdempotencyService<Database, Proxy>,
}

impl Gateway {
    /// A gateway before an upstream. With credentials, a repeat must come with those of its first request.
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

/// The layer's rules for all that passes.
fn route(config: &config::Gateway, credentials: Option<Credentials>) -> Route {
    /// For the rest of an answer, and a busy machine.
    const MARGIN: Duration = Duration::from_secs(60);
    let policy = Policy {
        lease: config.lease,
        max_run: config.lease.max(config.connect_timeout + config.timeout + MARGIN),
        retention: Some(config.retention),
        // It is the client who decides when to come again.
        backoff: Backoff::NONE,
        on_lost: config.on_lost,
        pinned: config.pinned,
        ..Policy::default()
    };
    let route = Route::leased()
        .service(SERVICE)
        .kind(KIND)
        // What stands behind may know methods that nobody here does, and may read `post` as POST.
        .all_methods_that_may_not_repeat()
        // One gateway may stand before many sites, and the same path of another is another request.
        .host_counts()
        .wait(config.wait)
        .request_limit(config.request_limit.0)
        .request_patience(config.timeout)
        .answer_limit(config.answer_limit.0)
        .policy(policy);
    credentials.into_iter().fold(route, Route::same_credentials)
}

/// Whether a path is the gateway's own. Every other one is the upstream's.
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
            // It is passed on as it comes, and takes no more than a connection's buffers.
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
