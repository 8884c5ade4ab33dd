//! Forwards a request, and decides what the answer, or its absence, means for the key.

use std::{
    convert::Infallible,
    sync::Arc,
    task::{Context, Poll},
};

use axum::{
    body::Body,
    http::{HeaderValue, Request, Response, StatusCode, Uri, Version},
    response::IntoResponse as _,
};
use semel::OnLost;
use semel_http::{Attempt, BoxFuture, Reason, Verdict};
use tower::Service;

use super::{
    config::Statuses,
    framing::settle_length,
    headers::{FENCE, remove_about_the_key, remove_hop_by_hop, set_upgrade, upgrade},
    problems::{UPSTREAM_INVALID, UPSTREAM_LOST, UPSTREAM_TIMEOUT, UPSTREAM_UNREACHABLE},
    trailers::WithoutTrailers,
    tunnel,
    upstream::{Failure, Upstream},
};
use crate::{
    http::{
        held::Held,
        problem::{BODY_INCOMPLETE, BODY_TIMEOUT, Kind, Problem},
    },
    serve::Seat,
};

/// The protocol of the client's upgrade, in the extensions of its request.
#[derive(Clone)]
pub(super) struct Wanted(pub(super) HeaderValue);

/// The proxy: the service behind the layer.
#[derive(Clone)]
pub(super) struct Proxy {
    pub(super) upstream: Upstream,
    pub(super) rules: Arc<Rules>,
}

/// How the upstream's answers are interpreted.
pub(super) struct Rules {
    pub(super) on_lost: OnLost,
    pub(super) not_executed: Statuses,
}

impl Rules {
    fn verdict(&self, status: StatusCode) -> Verdict {
        match status {
            _ if self.not_executed.contains(status) => Verdict::Release,
            // Neither a 5xx nor a status of no known class (600 to 999) says whether it took effect.
            _ if status.as_u16() >= 500 => self.unknown(),
            // The upstream authenticates. If this answer were stored, a retry with renewed credentials would still get
            // it.
            StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN => Verdict::Release,
            _ => Verdict::by_status(status),
        }
    }

    fn unknown(&self) -> Verdict {
        if self.on_lost.doubts() { Verdict::Doubt } else { Verdict::Fail }
    }
}

impl Service<Request<Body>> for Proxy {
    type Response = Response<Body>;
    type Error = Infallible;
    type Future = BoxFuture<'static, Result<Response<Body>, Infallible>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request<Body>) -> Self::Future {
        let proxy = self.clone();
        Box::pin(async move { Ok(proxy.pass_on(request).await) })
    }
}

impl Proxy {
    async fn pass_on(&self, mut request: Request<Body>) -> Response<Body> {
        let attempt = request.extensions_mut().remove::<Attempt>();
        // A request with a key must get an answer, so it cannot upgrade.
        let wanted = request.extensions_mut().remove::<Wanted>().filter(|_| attempt.is_none());
        let client = wanted.is_some().then(|| hyper::upgrade::on(&mut request));
        let seat = request.extensions_mut().remove::<Seat>();

        let (mut head, body) = request.into_parts();
        if let Some(attempt) = &attempt {
            head.headers.insert(FENCE, attempt.fence().0.into());
        }
        if let Some(Wanted(protocol)) = wanted {
            set_upgrade(&mut head.headers, protocol);
        }
        // Only method, target, headers and body go to the upstream.
        let mut onward = Request::new(body);
        *onward.method_mut() = head.method;
        *onward.uri_mut() = origin_form(&head.uri);
        *onward.version_mut() = Version::HTTP_11;
        *onward.headers_mut() = head.headers;

        let held = attempt.clone().map_or_else(Held::always, |attempt| Held::new(move || attempt.is_lost()));
        let mut response = match self.upstream.send(onward, &held).await {
            Ok(response) => response,
            Err(failure) => return self.failed(&failure, attempt.as_ref()),
        };
        // The client gets our HTTP version, not the upstream's.
        *response.version_mut() = Version::HTTP_11;
        let changed = upgrade(response.headers());
        if let Err(why) = settle_length(&mut response) {
            let what = format!("the upstream's answer breaks the rules of HTTP: {why}");
            return self.broken(&UPSTREAM_INVALID, what, attempt.as_ref());
        }
        remove_hop_by_hop(response.headers_mut());
        remove_about_the_key(response.headers_mut());
        if response.status() == StatusCode::SWITCHING_PROTOCOLS {
            return match (client, changed) {
                (Some(client), Some(protocol)) => {
                    set_upgrade(response.headers_mut(), protocol);
                    tunnel::join(client, hyper::upgrade::on(&mut response), seat);
                    response.map(|_| Body::empty())
                }
                _ => {
                    let what = "the upstream switched to a protocol that the client did not request".to_owned();
                    self.broken(&UPSTREAM_LOST, what, attempt.as_ref())
                }
            };
        }
        if attempt.is_some() {
            let verdict = self.rules.verdict(response.status());
            response.extensions_mut().insert(verdict);
        }
        response.map(|body| Body::new(WithoutTrailers(body)))
    }

    fn failed(&self, failure: &Failure, attempt: Option<&Attempt>) -> Response<Body> {
        match failure {
            Failure::Unreachable(why) => {
                // `semel why` finds the operation by this hash, if it still exists: the key is free again.
                let key = attempt.map(Attempt::short_hash);
                tracing::warn!(why, key, "the upstream cannot be reached");
                self.problem(&UPSTREAM_UNREACHABLE, attempt.is_some())
            }
            Failure::Lost(error) => {
                let what = format!("the connection to the upstream was lost before it answered: {error}");
                self.broken(&UPSTREAM_LOST, what, attempt)
            }
            Failure::Timeout => {
                self.broken(&UPSTREAM_TIMEOUT, "the upstream did not answer in time".to_owned(), attempt)
            }
            Failure::BodyIncomplete => {
                tracing::debug!("a client's body broke off on its way to the upstream");
                body_problem(&BODY_INCOMPLETE, "The request's body broke off.")
            }
            Failure::BodyTimeout => {
                tracing::debug!("a client stopped in the middle of its body");
                body_problem(&BODY_TIMEOUT, "The rest of the request's body did not come in time.")
            }
        }
    }

    /// The problem of a request that was sent and has no usable answer. For a request with a key, the ledger logs how
    /// its run ended, and the operation stores it.
    fn broken(&self, kind: &'static Kind, what: String, attempt: Option<&Attempt>) -> Response<Body> {
        if attempt.is_none() {
            tracing::warn!("{what}");
        }
        let mut response = self.problem(kind, attempt.is_some());
        response.extensions_mut().insert(Reason(what));
        response
    }

    /// A problem with the upstream, and its meaning for the key.
    fn problem(&self, kind: &'static Kind, keyed: bool) -> Response<Body> {
        let unsent = std::ptr::eq(kind, &UPSTREAM_UNREACHABLE);
        let verdict = if unsent { Verdict::Release } else { self.rules.unknown() };
        let mut problem = Problem::new(kind);
        if keyed && verdict == Verdict::Fail {
            // `on_lost = rerun`: it may be sent again with its key.
            problem = problem.with("retryable", true);
        }
        let mut response = problem.into_response();
        response.extensions_mut().insert(verdict);
        response
    }
}

/// A problem with a streamed body, which only requests without a key have. Unlike a body that is read first, it may
/// have had an effect.
fn body_problem(kind: &'static Kind, what: &str) -> Response<Body> {
    let detail = format!("{what} The service behind the gateway may have got the part before.");
    Problem::new(kind).detail(detail).with("retryable", false).into_response()
}

/// The target in origin form, from any form that the client sent.
fn origin_form(uri: &Uri) -> Uri {
    uri.path_and_query().map_or_else(|| Uri::from_static("/"), |target| Uri::from(target.clone()))
}
