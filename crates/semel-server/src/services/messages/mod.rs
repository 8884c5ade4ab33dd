//! The message store for people: what waits in the outbox, what died on the way in, and what to do about it.
//!
//! What a person does here is audited by the store, with who it was. Re-driving many letters is a [job](crate::jobs).

mod letters;
mod outbox;
mod redrive;

use std::sync::Arc;

use axum::{
    Router, middleware,
    routing::{get, post},
};
use semel::{Ledger, OnLost, Policy, Result};
use semel_http::{Idempotency, Route};
use semel_store::Database;

use crate::jobs::{JobKind, Jobs};

/// The part of `/openapi.json` that is this service's.
pub const OPENAPI: &str = include_str!("openapi.json");

/// The longest body: the ids of as many letters as one request may name.
const BODY_LIMIT: usize = 64 << 10;

/// The service.
#[derive(Clone)]
pub struct Messages {
    ledger: Ledger<Database>,
    jobs: Jobs,
}

impl Messages {
    /// Opens the service on a ledger; its jobs run with the others.
    ///
    /// # Errors
    /// When the database cannot be reached.
    pub async fn open(ledger: &Ledger<Database>, jobs: &Jobs) -> Result<Self> {
        super::migrate(ledger.store()).await?;
        Ok(Self { ledger: ledger.clone(), jobs: jobs.clone() })
    }

    /// The kinds of job that this service asks for.
    #[must_use]
    pub fn job_kinds(ledger: &Ledger<Database>) -> Vec<Arc<dyn JobKind>> {
        vec![Arc::new(redrive::Redrive::new(ledger.store().clone()))]
    }

    /// The routes.
    pub fn routes(&self) -> Router {
        // Under a key, a request that is sent again gets the job that the first has made.
        let keyed = Route::atomic()
            .service("messages")
            .kind("redrive")
            .policy(Policy { on_lost: OnLost::Rerun, ..Policy::default() })
            .verdict(semel_http::Verdict::only_success)
            .request_limit(BODY_LIMIT);
        let redrive = post(letters::redrive)
            .route_layer(Idempotency::new(self.ledger.clone()).layer(keyed))
            .route_layer(middleware::from_fn_with_state(self.jobs.clone(), crate::jobs::wake_after));
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
