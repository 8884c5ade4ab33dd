//! Background jobs with progress: whatever a person asks for that takes longer than an answer may.
//!
//! A job is a row of `semel_jobs`. It goes in bounded steps, and each step is one transaction that also moves the row
//! on: a node that dies in the middle has done whole steps only, and whoever goes on begins after the last. Which node
//! that is the ledger decides, by an operation whose key is the job's id: a lease, renewed while the job runs, and run
//! again when it was lost.
//!
//! - [`JobKind`]: what one step of a kind of job does
//! - [`Jobs`]: makes jobs, runs them on nodes that work, and answers `/jobs`

mod model;
mod routes;
mod run;
mod tables;

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use axum::{
    Router,
    extract::{Request, State},
    http::StatusCode,
    middleware::Next,
    response::Response,
    routing::get,
};
use semel::{Ledger, Result, messaging::Wake};
use semel_store::{Database, Tx};
use tokio::sync::watch;

pub use model::{Job, JobId, JobKind, JobState, NewJob, Step};

use crate::services;

/// The part of `/openapi.json` that is of jobs.
pub const OPENAPI: &str = include_str!("openapi.json");

/// How often a node that works looks for jobs that nobody runs, without being woken: for those of other nodes, and of
/// nodes that died.
const POLL: Duration = Duration::from_secs(2);

/// The jobs of a server. Clones share them.
#[derive(Clone)]
pub struct Jobs(Arc<Inner>);

struct Inner {
    ledger: Ledger<Database>,
    kinds: BTreeMap<&'static str, Arc<dyn JobKind>>,
    wake: Wake,
}

impl Jobs {
    /// Opens the jobs of these kinds on a ledger.
    ///
    /// # Errors
    /// When the database cannot be reached.
    pub async fn open(ledger: &Ledger<Database>, kinds: Vec<Arc<dyn JobKind>>) -> Result<Self> {
        services::migrate(ledger.store()).await?;
        let kinds = kinds.into_iter().map(|kind| (kind.name(), kind)).collect();
        Ok(Self(Arc::new(Inner { ledger: ledger.clone(), kinds, wake: Wake::default() })))
    }

    /// Makes a job, inside the transaction of whoever asks for it. After the commit, [wake](Self::wake) the workers.
    ///
    /// # Errors
    /// What a store can break with.
    pub async fn create_in(&self, tx: &Tx, new: NewJob) -> Result<Job> {
        let mut held = tx.connection().await?;
        tables::insert(&mut held.get()?, &new).await
    }

    /// A job of a tenant.
    ///
    /// # Errors
    /// What a store can break with.
    pub async fn find(&self, tenant: &str, id: JobId) -> Result<Option<Job>> {
        let mut reader = self.0.ledger.store().reader().await?;
        let found = tables::find(&mut reader.conn(), tenant, id).await?;
        reader.leave();
        Ok(found)
    }

    /// There is a new job: this node's worker, if it has one, looks at once.
    pub fn wake(&self) {
        self.0.wake.wake();
    }

    /// `/jobs`.
    pub fn routes(&self) -> Router {
        Router::new().route("/jobs", get(routes::list)).route("/jobs/{id}", get(routes::show)).with_state(self.clone())
    }

    /// Runs jobs on this node until `stop` turns true; ends when those that run here have come to the end of a step.
    pub async fn run(self, stop: watch::Receiver<bool>) {
        run::work(self, stop).await;
    }
}

/// Wakes the workers when a job is committed, which is not before the answer.
pub(crate) async fn wake_after(State(jobs): State<Jobs>, request: Request, next: Next) -> Response {
    let response = next.run(request).await;
    if response.status() == StatusCode::ACCEPTED {
        jobs.wake();
    }
    response
}
