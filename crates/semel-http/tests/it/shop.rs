//! The service under test: a shop that takes orders.

use std::{
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use axum::{
    Router,
    body::Bytes,
    extract::{FromRequestParts as _, Request},
    http::{HeaderMap, StatusCode},
    response::{IntoResponse as _, Response},
    routing::any,
};
use semel::{Backoff, Key, Ledger, Operation, Policy, Scope, prelude::*};
use semel_http::{Attempt, Idempotency, Route, Transaction};
use semel_store::{Database, on};
use semel_testkit::{Kind, Lab};
use tokio::{net::TcpListener, sync::Semaphore};

use crate::client::{Client, soon};

/// Makes one test per database from a function of a [`Kind`].
macro_rules! on_both_databases {
    ($($test:ident),+ $(,)?) => {
        mod sqlite {
            $(#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn $test() {
                super::$test(semel_testkit::Kind::Sqlite).await;
            })+
        }
        mod postgres {
            $(#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn $test() {
                super::$test(semel_testkit::Kind::Postgres).await;
            })+
        }
    };
}

pub(crate) use on_both_databases;

pub(crate) const TENANT: &str = "acme";

/// A shop on a separate database, with a stopped clock.
pub(crate) struct Shop {
    pub(crate) lab: Lab,
    pub(crate) ledger: Ledger<Database>,
    pub(crate) once: Idempotency<Database>,
    pub(crate) desk: Desk,
}

/// Counts the orders, and can hold them.
#[derive(Clone)]
pub(crate) struct Desk {
    runs: Arc<AtomicUsize>,
    /// One permit for each held order.
    arrived: Arc<Semaphore>,
    /// One permit for each order that may continue.
    go: Arc<Semaphore>,
}

impl Default for Desk {
    fn default() -> Self {
        Self { runs: Arc::default(), arrived: Arc::new(Semaphore::new(0)), go: Arc::new(Semaphore::new(0)) }
    }
}

impl Desk {
    pub(crate) fn runs(&self) -> usize {
        self.runs.load(Ordering::SeqCst)
    }

    /// Counts an order, and returns its number.
    pub(crate) fn count(&self) -> usize {
        self.runs.fetch_add(1, Ordering::SeqCst) + 1
    }

    /// Holds an order until [`Desk::let_go`].
    pub(crate) async fn hold_up(&self) {
        self.arrived.add_permits(1);
        self.go.acquire().await.unwrap().forget();
    }

    /// Waits until one more order is held.
    pub(crate) async fn arrival(&self) {
        soon(self.arrived.acquire()).await.unwrap().forget();
    }

    pub(crate) fn let_go(&self) {
        self.go.add_permits(1);
    }

    pub(crate) fn router(&self, once: &Idempotency<Database>, route: Route) -> Router {
        let desk = self.clone();
        let handler = any(move |request: Request| order(desk.clone(), request));
        Router::new().route("/orders", handler.clone()).route("/orders/{id}", handler).layer(once.layer(route))
    }
}

impl Shop {
    pub(crate) async fn open(kind: Kind) -> Self {
        Self::on(Lab::new(kind).await).await
    }

    pub(crate) async fn on(lab: Lab) -> Self {
        let ledger = lab.ledger().await;
        lab.execute("CREATE TABLE effects (name TEXT NOT NULL)").await.unwrap();
        let once = Idempotency::for_everyone(ledger.clone(), TENANT);
        Self { lab, ledger, once, desk: Desk::default() }
    }

    /// Serves the usual handler at `/orders` and `/orders/{id}`.
    pub(crate) async fn serve(&self, route: Route) -> Client {
        serve(self.router(&self.once, route)).await
    }

    pub(crate) fn router(&self, once: &Idempotency<Database>, route: Route) -> Router {
        self.desk.router(once, route)
    }

    /// Serves the test's own handler at `/orders`.
    pub(crate) async fn serve_with<F, Fut>(&self, route: Route, handler: F) -> Client
    where
        F: Fn(Request) -> Fut + Clone + Send + Sync + 'static,
        Fut: Future<Output = Response> + Send + 'static,
    {
        serve(Router::new().route("/orders", any(handler).layer(self.once.layer(route)))).await
    }

    /// The number of operations.
    pub(crate) async fn operations(&self) -> i64 {
        self.lab.number("SELECT count(*) FROM semel_operations").await
    }

    /// The operation of a POST to `/orders`.
    pub(crate) async fn operation(&self, key: &str) -> Option<Operation> {
        let scope = Scope::new(TENANT, "http", "POST /orders").unwrap();
        self.ledger.store().by_key(&scope, &Key::new(key).unwrap()).await.unwrap()
    }

    /// The rows of atomic orders.
    pub(crate) async fn effects(&self) -> Vec<String> {
        self.lab.texts("SELECT name FROM effects ORDER BY name").await
    }
}

/// Serves an app on a free port until the test ends.
pub(crate) async fn serve(app: Router) -> Client {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(async move { axum::serve(listener, app).await });
    Client(address)
}

/// Takes an order. These headers control the answer, and are not compared:
/// `X-Status` is the answer's status (201), `X-Hold` makes it wait for [`Desk::let_go`], `X-Panic` makes it panic.
/// In a transaction, the order inserts a row.
async fn order(desk: Desk, request: Request) -> Response {
    let (mut head, body) = request.into_parts();
    let headers = head.headers.clone();
    let attempt = head.extensions.get::<Attempt>().cloned();
    let name = attempt.map_or_else(|| "unkeyed".to_owned(), |attempt| attempt.key().as_str().to_owned());
    let body = axum::body::to_bytes(axum::body::Body::new(body), usize::MAX).await.unwrap();
    let run = desk.count();
    if let Ok(Transaction(tx)) = Transaction::<Database>::from_request_parts(&mut head, &()).await {
        insert(&tx, &name).await.unwrap();
    }
    if headers.contains_key("x-hold") {
        desk.hold_up().await;
    }
    assert!(!headers.contains_key("x-panic"), "panics because of X-Panic");
    (status(&headers), [("x-run", run.to_string())], Bytes::from([b"took ", &body[..]].concat())).into_response()
}

fn status(headers: &HeaderMap) -> StatusCode {
    let said = headers.get("x-status").map(|value| value.to_str().unwrap().parse().unwrap());
    StatusCode::from_u16(said.unwrap_or(201)).unwrap()
}

/// Inserts the row of an order.
pub(crate) async fn insert(tx: &semel_store::Tx, name: &str) -> Result<(), String> {
    let mut held = tx.connection().await.map_err(|e| e.to_string())?;
    let conn = held.get().map_err(|e| e.to_string())?;
    let sql = "INSERT INTO effects (name) VALUES ($1)";
    on!(conn, c => sqlx::query(sql).bind(name).execute(c).await.map(drop)).map_err(|e| e.to_string())
}

/// The policy without backoff.
pub(crate) fn at_once(policy: Policy) -> Policy {
    Policy { backoff: Backoff::NONE, ..policy }
}

pub(crate) const fn secs(n: u64) -> Duration {
    Duration::from_secs(n)
}
