//! The common parts of all routes.

pub mod answers;
pub mod fields;
pub mod health;
pub(crate) mod held;
pub mod json;
pub mod loopback;
mod openapi;
pub mod path;
pub mod principal;
pub mod problem;
mod problem_page;
pub mod query;
pub mod request_log;
pub mod room;

use std::{panic::AssertUnwindSafe, sync::Arc};

use axum::{
    Router,
    extract::{DefaultBodyLimit, Request, State},
    middleware::{self, Next},
    response::{IntoResponse as _, Response},
    routing::get,
};
use futures_util::FutureExt as _;

use health::Readiness;
use principal::Authenticate;
use problem::Problem;
use room::Budget;

/// The longest request body, unless a route sets its own limit. An order, an event or an operation is a few kilobytes;
/// larger bodies are streamed by their own route.
pub const BODY_LIMIT: usize = 1024 * 1024;

pub use semel_http::BoxFuture;

/// The parts of the HTTP application that differ from server to server.
pub struct App {
    /// The readiness checks of this node.
    pub readiness: Arc<dyn Readiness>,
    /// Authenticates callers.
    pub authenticate: Arc<dyn Authenticate>,
    /// The services' routes; each request that reaches one has a [`principal::Principal`].
    pub routes: Router,
    /// Routes without authentication, because their requests are signed: webhooks. They come through proxies, with the
    /// `Host` that their sender knows, so the host is not checked.
    pub signed: Router,
}

impl App {
    /// The whole application, with the default budget for bodies.
    pub fn into_router(self) -> Router {
        self.into_router_within(&Budget::default())
    }

    /// The whole application: the services' routes and the common ones. All bodies share a budget.
    pub fn into_router_within(self, bodies: &Budget) -> Router {
        let loopback_only = self.authenticate.loopback_only();
        let known = Router::new()
            .route("/", get(index))
            .merge(self.routes)
            .route_layer(middleware::from_fn_with_state(self.authenticate, identify));
        let open = Router::new()
            .route("/healthz", get(health::healthz))
            .route("/readyz", get(health::readyz).with_state(self.readiness))
            .route("/problems/{name}", get(problem_page::show))
            .route("/openapi.json", get(openapi::show));
        let router = known
            .merge(open)
            .method_not_allowed_fallback(async || Problem::new(&problem::METHOD_NOT_ALLOWED))
            .fallback(async || Problem::new(&problem::NOT_FOUND))
            .layer(DefaultBodyLimit::max(BODY_LIMIT))
            .layer(middleware::from_fn(catch_panic));
        let router = if loopback_only { router.layer(middleware::from_fn(loopback::refuse_foreign)) } else { router };
        let signed = self
            .signed
            .method_not_allowed_fallback(async || Problem::new(&problem::METHOD_NOT_ALLOWED))
            .layer(middleware::from_fn(catch_panic));
        router.merge(signed).layer(middleware::from_fn_with_state(bodies.clone(), room::keep_within))
    }
}

/// The gateway's own routes; all other paths belong to its upstream. Only these are protected from foreign pages: the
/// upstream gets `Host` and `Origin` and decides for itself.
pub(crate) fn own_routes(readiness: Arc<dyn Readiness>) -> Router {
    Router::new()
        .route("/semel/healthz", get(health::healthz))
        .route("/semel/readyz", get(health::readyz).with_state(readiness))
        .route("/semel/problems/{name}", get(problem_page::show))
        .method_not_allowed_fallback(async || Problem::new(&problem::METHOD_NOT_ALLOWED))
        .fallback(async || Problem::new(&problem::NOT_FOUND))
        .layer(middleware::from_fn(loopback::refuse_foreign))
}

/// Answers for a handler that panicked, so that its client does not only see a closed connection. No state is left
/// half-changed: what must hold together is in the database.
async fn catch_panic(request: Request, next: Next) -> Response {
    AssertUnwindSafe(next.run(request)).catch_unwind().await.unwrap_or_else(|panic| {
        tracing::error!(panic = semel::panic_text(&*panic), "a handler panicked");
        Problem::new(&problem::INTERNAL).into_response()
    })
}

/// Authenticates the caller, and adds the principal to the request.
async fn identify(
    State(authenticate): State<Arc<dyn Authenticate>>,
    request: Request,
    next: Next,
) -> Result<Response, Problem> {
    let (mut head, body) = request.into_parts();
    let principal = authenticate.authenticate(&head).await?;
    head.extensions.insert(principal);
    Ok(next.run(Request::from_parts(head, body)).await)
}

/// A short description, for people who open the address in a browser.
async fn index() -> &'static str {
    concat!(
        "Semel ",
        env!("CARGO_PKG_VERSION"),
        " makes each operation take effect once.\n\n",
        "/healthz       whether this process lives\n",
        "/readyz        whether it can do its work\n",
        "/openapi.json  every path that it answers\n",
    )
}
