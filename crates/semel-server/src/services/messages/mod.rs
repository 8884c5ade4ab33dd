//! The messages for people: the outbox, the dead letters, and actions on both.
//!
//! The store audits every action with its actor. Re-driving many letters is a [job](crate::jobs).

pub mod config;
mod letters;
mod outbox;
pub mod problems;
mod redrive;

use std::sync::Arc;

use axum::{
    Router,
    routing::{get, post},
};
use semel::{Ledger, OnLost, Policy, Result};
use semel_http::{Idempotency, Route};
use semel_store::Database;

use crate::{
    jobs::{JobKind, Jobs},
    service::{Opened, Service},
    view::Telling,
};

/// The service, for the list of all services.
pub static MESSAGES: Service = Service {
    name: "messages",
    section: Some(|reader| Arc::new(config::Messages::read(reader))),
    problems: &problems::ALL,
    openapi: &[include_str!("openapi.json")],
    telling: Telling::PLAIN,
    migrations: &[],
    projections: &[],
    #[cfg(test)]
    statements: &[],
    open: |parts| {
        Box::pin(async {
            let messages = Messages::open(parts.ledger, parts.jobs).await?;
            let jobs = Messages::job_kinds(parts.ledger);
            Ok(Opened { routes: messages.routes(), jobs, ..Opened::default() })
        })
    },
};

/// The longest body: the ids of as many letters as one request may name.
const BODY_LIMIT: usize = 64 << 10;

/// The service.
#[derive(Clone)]
pub struct Messages {
    ledger: Ledger<Database>,
    jobs: Jobs,
}

impl Messages {
    /// Opens the service on a ledger.
    ///
    /// # Errors
    /// When the database cannot be reached.
    pub async fn open(ledger: &Ledger<Database>, jobs: &Jobs) -> Result<Self> {
        super::migrate(ledger.store()).await?;
        Ok(Self { ledger: ledger.clone(), jobs: jobs.clone() })
    }

    /// The kinds of jobs of this service.
    #[must_use]
    pub fn job_kinds(ledger: &Ledger<Database>) -> Vec<Arc<dyn JobKind>> {
        vec![Arc::new(redrive::Redrive::new(ledger.store().clone()))]
    }

    /// The routes.
    pub fn routes(&self) -> Router {
        // With a key, a repeated request gets the job of the first one.
        let keyed = Route::atomic()
            .service("messages")
            .kind("redrive")
            .policy(Policy { on_lost: OnLost::Rerun, ..Policy::default() })
            .verdict(semel_http::Verdict::only_success)
            .request_limit(BODY_LIMIT);
        let redrive = post(letters::redrive).route_layer(Idempotency::new(self.ledger.clone()).layer(keyed));
        Router::new()
            .route("/dead-letters", get(letters::list))
            .route("/dead-letters/redrive", redrive)
            .route("/dead-letters/{id}", get(letters::show))
            .route("/dead-letters/{id}/redrive", post(letters::redrive_one))
            .route("/dead-letters/{id}/discard", post(letters::discard))
            .route("/outbox", get(outbox::list))
            .route("/outbox/summary", get(outbox::summary))
            .route("/outbox/{messageId}/redrive", post(outbox::redrive))
            .route("/outbox/{messageId}/skip", post(outbox::skip))
            .with_state(self.clone())
    }

    fn store(&self) -> &Database {
        self.ledger.store()
    }
}
