//! The ledger as an HTTP API, for workers in any language.
//!
//! A program claims a key, does its work under a lease, and settles it by the lease's fence; or it enqueues work, and
//! asks for what is due. In reading order:
//!
//! - `key`: the key and the fingerprint of an operation that is named by its inputs
//! - `ask`, `claim`: `POST /v1/operations`; `record`: the answer
//! - `held`: renew, complete, fail, doubt, release; `granted`: the leases that this node has granted
//! - `next`, `polls`: `POST /v1/operations/next`, and the requests that wait for work
//! - `list`, `people`: what people look at and decide

mod ask;
mod claim;
pub mod config;
mod granted;
mod held;
mod key;
mod list;
mod next;
mod people;
mod polls;
pub mod problems;
mod record;
mod repeats;

use std::sync::{Arc, atomic::AtomicU32};

use axum::{
    Router,
    routing::{get, post},
};
use semel::{Ledger, Operation, Scope, State, prelude::*};
use semel_store::Database;
use tokio::sync::Semaphore;

use crate::{
    config::NodeRole,
    gateway,
    http::{
        answers::{missing, one_row},
        problem::Problem,
    },
    service::{Opened, Service, Task},
    services::webhooks::{config::Webhooks, pull},
    view::Telling,
};
use config::Operations;
use granted::Granted;
use polls::Polls;
use repeats::Repeats;

/// The service in the scopes of its operations, unless a request names another one.
pub(crate) const SERVICE: &str = "operations";

/// Services of Semel's own programs that are not in the list of services: also the inboxes of consumers, and jobs of
/// older versions.
const OWN: [&str; 5] = [gateway::SERVICE, "cli", "http", "inbox", "jobs"];

/// The service, for the list of all services.
pub static OPERATIONS: Service = Service {
    name: SERVICE,
    section: Some(|reader| Arc::new(Operations::read(reader))),
    problems: &problems::ALL,
    openapi: &[include_str!("openapi.json")],
    telling: Telling { labels: [None, None, Some("process instance"), Some("activity")], ..Telling::PLAIN },
    migrations: &[],
    projections: &[],
    #[cfg(test)]
    statements: &[],
    open: |parts| {
        Box::pin(async {
            let api = Api::open(parts.ledger, parts.config.services.get(), parts.config.services.get());
            let polls = api.clone();
            let watch = Task::new("operations polls", &[NodeRole::Api], move |stop| async move {
                polls::watch(&polls.ledger, &polls.polls, stop).await;
            });
            Ok(Opened { routes: api.routes(), tasks: vec![watch], ..Opened::default() })
        })
    },
};

/// The API on a ledger. Cheap to clone.
#[derive(Clone)]
pub struct Api {
    ledger: Ledger<Database>,
    config: Arc<Operations>,
    polls: Arc<Polls>,
    granted: Granted,
    /// Repeats of one request.
    repeats: Repeats,
    /// Takes of this node at a time: more would only wait for one another's locks.
    takes: Arc<Semaphore>,
    /// Notes requests for events of webhooks.
    asked: Arc<pull::Asked>,
    webhooks: Arc<Webhooks>,
    /// Counts what is asked for: every tenth operation is the longest due one.
    turn: Arc<AtomicU32>,
    /// Counts takes: each begins with another name.
    request: Arc<AtomicU32>,
}

/// How many takes of a node run at a time.
const TAKES: usize = 4;

impl Api {
    /// Opens the API.
    #[must_use]
    pub fn open(ledger: &Ledger<Database>, config: Operations, webhooks: Webhooks) -> Self {
        Self {
            ledger: ledger.clone(),
            config: Arc::new(config),
            polls: Arc::default(),
            granted: Granted::default(),
            repeats: Repeats::default(),
            takes: Arc::new(Semaphore::new(TAKES)),
            asked: Arc::default(),
            webhooks: Arc::new(webhooks),
            turn: Arc::default(),
            request: Arc::default(),
        }
    }

    /// The routes.
    pub fn routes(&self) -> Router {
        Router::new()
            .route("/v1/operations", post(claim::post).get(list::list))
            .route("/v1/operations/next", post(next::next))
            .route("/v1/operations/{id}", get(list::show).delete(people::delete))
            .route("/v1/operations/{id}/renew", post(held::renew))
            .route("/v1/operations/{id}/complete", post(held::complete))
            .route("/v1/operations/{id}/fail", post(held::fail))
            .route("/v1/operations/{id}/doubt", post(held::doubt))
            .route("/v1/operations/{id}/release", post(held::release))
            .route("/v1/operations/{id}/retry", post(people::retry))
            .route("/v1/operations/{id}/resolve", post(people::resolve))
            .route("/v1/operations/{id}/cancel", post(people::cancel))
            .with_state(self.clone())
    }

    fn store(&self) -> &Database {
        self.ledger.store()
    }

    /// An operation of a tenant, unless it belongs to another of Semel's services: a fence is not a secret, and those
    /// have rules of their own.
    async fn find(&self, tenant: &str, id: i64) -> Result<Operation, Problem> {
        let help = format!("see semel operations show --id {id}");
        let found = one_row(self.store().by_id(tenant, id), id, &help).await?;
        found.filter(|op| !is_own(op.scope.service()) || pull::is_asked_for(op)).ok_or_else(missing)
    }

    /// As [`find`](Self::find), without one whose retention has ended.
    async fn find_kept(&self, tenant: &str, id: i64) -> Result<(Operation, semel::Timestamp), Problem> {
        let op = self.find(tenant, id).await?;
        let now = crate::http::answers::patiently(self.store().now()).await?;
        if op.has_expired(now) && op.state != State::Processing { Err(missing()) } else { Ok((op, now)) }
    }
}

/// The scope of an operation name, in which its operations are due.
fn scope_of(tenant: &str, service: &str, name: &str) -> semel::Result<Scope> {
    match pull::scope(tenant, name).filter(|_| service == SERVICE) {
        Some(events) => Ok(events),
        None => Scope::new(tenant, service, name),
    }
}

/// The scope in which an operation is due.
fn listed(op: &Operation) -> semel::Result<Scope> {
    Scope::new(op.scope.tenant(), op.scope.service(), &op.listed_kind())
}

/// Whether a service is another one of Semel's own.
fn is_own(service: &str) -> bool {
    let others = super::ALL.into_iter().map(|other| other.name).filter(|name| *name != SERVICE);
    others.chain(OWN).any(|own| own == service)
}
