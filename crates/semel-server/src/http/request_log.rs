//! One log line per request, if configured.
//!
//! A line contains the route, not the path: a path may contain a key or a secret. Of the route's parameters, only the
//! source and the function of a webhook are filled in. The query is left out.

use std::{net::SocketAddr, time::Instant};

use axum::{
    Router,
    extract::{ConnectInfo, MatchedPath, Request},
    http::{Method, StatusCode},
    middleware::{self, Next},
    response::Response,
};

/// Parameters that contain no secret.
const SHOWN: [&str; 2] = ["{source}", "{function}"];

/// Stands for a path without a route, or of another service.
const UNKNOWN: &str = "-";

/// Logs every request to these routes.
pub fn on(router: Router) -> Router {
    router.layer(middleware::from_fn(log))
}

async fn log(request: Request, next: Next) -> Response {
    let template = request.extensions().get::<MatchedPath>();
    let route = template.map_or_else(|| UNKNOWN.to_owned(), |route| filled(route.as_str(), request.uri().path()));
    let line = Line::begin(&request, route);
    let response = next.run(request).await;
    line.end(response.status());
    response
}

/// A request in flight.
pub(crate) struct Line {
    method: Method,
    route: String,
    peer: Option<SocketAddr>,
    begun: Instant,
}

impl Line {
    /// A request to another service, whose paths are not shown.
    pub(crate) fn of_another<B>(request: &axum::http::Request<B>) -> Self {
        Self::begin(request, UNKNOWN.to_owned())
    }

    fn begin<B>(request: &axum::http::Request<B>, route: String) -> Self {
        let peer = request.extensions().get::<ConnectInfo<SocketAddr>>().map(|peer| peer.0);
        Self { method: request.method().clone(), route, peer, begun: Instant::now() }
    }

    /// Logs the request when the head of its answer is known.
    pub(crate) fn end(self, status: StatusCode) {
        let Self { method, route, peer, begun } = self;
        // A method may be any word, so it is cut.
        let method: String = method.as_str().chars().take(20).collect();
        let (peer, took) = (peer.map(|peer| peer.to_string()), begun.elapsed());
        tracing::info!(method, route, status = status.as_u16(), ?took, peer, "request");
    }
}

/// A route's template, with the parameters filled in that may be shown.
fn filled(template: &str, path: &str) -> String {
    let mut given = path.split('/');
    let part = |part| {
        let given = given.next();
        if SHOWN.contains(&part) { given.unwrap_or(part) } else { part }
    };
    template.split('/').map(part).collect::<Vec<_>>().join("/")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_logged_route_contains_only_source_and_function() {
        assert_eq!(filled("/webhooks/{source}/{function}", "/webhooks/stripe/connect"), "/webhooks/stripe/connect");
        let event = filled("/webhooks/{source}/events/{id}", "/webhooks/stripe/events/evt_1");
        assert_eq!(event, "/webhooks/stripe/events/{id}");
        assert_eq!(filled("/u/{token}", "/u/secret"), "/u/{token}");
        assert_eq!(filled("/", "/"), "/");
    }
}
