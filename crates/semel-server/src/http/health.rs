//! Liveness and readiness of this process.

use std::{sync::Arc, time::Duration};

use axum::{
    Json,
    extract::State,
    http::{StatusCode, header},
    response::IntoResponse,
};
use serde_json::json;

use super::BoxFuture;

/// The time limit of readiness checks. Probes commonly give up after a few seconds; a clear "no" in time is worth more
/// than a late "yes".
const PATIENCE: Duration = Duration::from_secs(2);

/// Checks whether this node can do its work.
pub trait Readiness: Send + Sync + 'static {
    /// Checks the parts that the work needs.
    fn check(&self) -> BoxFuture<'_, Report>;
}

/// The state of the parts that the work needs. Public: contains no addresses and no secrets.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Report {
    /// Whether the database works; if not, a short reason.
    pub database: Result<(), String>,
    /// The kind of broker.
    pub broker: String,
    /// Problems while requests are still answered: without a broker the outbox waits, and nothing is lost.
    pub degraded: Vec<String>,
    /// Why this node does only a part of its work: it is about to end.
    pub fault: Option<String>,
}

/// A node that is always ready, for servers without a store.
#[derive(Clone, Copy, Debug, Default)]
pub struct AlwaysReady;

impl Readiness for AlwaysReady {
    fn check(&self) -> BoxFuture<'_, Report> {
        Box::pin(async {
            Report { database: Ok(()), broker: "embedded".to_owned(), degraded: Vec::new(), fault: None }
        })
    }
}

/// `GET /healthz`: answers as long as the process lives. A supervisor must not restart a node
/// because its database is down.
pub(super) async fn healthz() -> impl IntoResponse {
    ([(header::CACHE_CONTROL, "no-store")], Json(json!({ "status": "ok" })))
}

/// `GET /readyz`: 200 or 503.
pub(super) async fn readyz(State(readiness): State<Arc<dyn Readiness>>) -> impl IntoResponse {
    let report = tokio::time::timeout(PATIENCE, readiness.check()).await.unwrap_or_else(|_| Report {
        database: Err(format!("no answer within {} s", PATIENCE.as_secs())),
        broker: "unknown".to_owned(),
        degraded: Vec::new(),
        fault: None,
    });
    let ready = report.database.is_ok() && report.fault.is_none();
    let status = if ready { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE };
    let database = report.database.map_or_else(|why| why, |()| "ok".to_owned());
    let degraded: Vec<_> = report.fault.into_iter().chain(report.degraded).collect();
    let body = json!({ "ready": ready, "database": database, "broker": report.broker, "degraded": degraded });
    (status, [(header::CACHE_CONTROL, "no-store")], Json(body))
}
