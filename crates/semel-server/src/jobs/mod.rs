//! Background jobs with progress: requests of people that take longer than an answer may.
//!
//! A job is an operation of the service [`SERVICE`]: its kind is the kind of job, its key the job's id, its payload the
//! request, its checkpoint the progress. A [worker](semel::Worker) runs it in bounded steps, each in one transaction
//! that also moves the checkpoint. A node that dies has done whole steps only, and the next node continues after the
//! last one.
//!
//! - [`JobKind`]: what one step of a kind of job does
//! - [`Jobs`]: creates jobs, has them run on nodes with the role worker, and answers `/jobs`
//! - `carry_over`: jobs of older versions, which had their own table

mod carry_over;
mod look;
mod model;
pub mod problems;
mod routes;
mod work;

use std::{
    collections::BTreeMap,
    sync::{Arc, OnceLock},
};

use axum::{
    Router,
    routing::{get, post},
};
use semel::{Error, Fingerprint, Kind, Ledger, Result, Work};
use semel_store::{Database, Tx};

pub use model::{Job, JobId, JobKind, JobState, NewJob, Progress, Step};
pub(crate) use routes::accepted;

use crate::{
    service::{Opened, Service, migrations},
    services,
    view::Telling,
};
use model::Stored;

/// The service, for the list of all services.
pub static JOBS: Service = Service {
    name: SERVICE,
    section: None,
    problems: &problems::ALL,
    openapi: &[include_str!("openapi.json")],
    telling: Telling { noun: ("job", "jobs"), ..Telling::PLAIN },
    migrations: migrations!("0003_jobs"),
    projections: &[],
    #[cfg(test)]
    statements: &[carry_over::statements],
    open: |parts| {
        Box::pin(async {
            let (routes, kinds) = (parts.jobs.routes(), parts.jobs.kinds());
            Ok(Opened { routes, kinds, ..Opened::default() })
        })
    },
};

/// The service of jobs' operations. In older versions, operations of the service `jobs` were leases on rows of a table:
/// the two must not mix.
pub const SERVICE: &str = "background-jobs";

/// The jobs of a server. Clones share them.
#[derive(Clone)]
pub struct Jobs(Arc<Inner>);

struct Inner {
    ledger: Ledger<Database>,
    kinds: OnceLock<BTreeMap<&'static str, Arc<dyn JobKind>>>,
}

impl Inner {
    fn kind(&self, name: &str) -> Option<&Arc<dyn JobKind>> {
        self.kinds.get()?.get(name)
    }
}

impl Jobs {
    /// Opens the jobs of a ledger.
    ///
    /// # Errors
    /// When the database cannot be reached.
    pub async fn open(ledger: &Ledger<Database>) -> Result<Self> {
        services::migrate(ledger.store()).await?;
        carry_over::enqueue(ledger).await?;
        Ok(Self(Arc::new(Inner { ledger: ledger.clone(), kinds: OnceLock::new() })))
    }

    /// Registers the kinds of jobs, once, before they run.
    pub fn know(&self, kinds: impl IntoIterator<Item = Arc<dyn JobKind>>) {
        let _ = self.0.kinds.set(kinds.into_iter().map(|kind| (kind.name(), kind)).collect());
    }

    /// Creates a job in the caller's transaction. A worker runs it after the commit.
    ///
    /// # Errors
    /// Errors of the store.
    pub async fn create_in(&self, tx: &Tx, new: NewJob) -> Result<Job> {
        let stored = Stored { params: new.params, actor: new.actor, former: None };
        let work = work_of(&new.tenant, new.kind, JobId::new(), &stored)?;
        let enqueued = self.0.ledger.enqueue_in(tx, vec![work]).await?;
        let made = enqueued.first().ok_or(Error::Contradiction("an enqueue got no answer"))?;
        Job::of(made.operation())
    }

    /// `/jobs`.
    pub fn routes(&self) -> Router {
        Router::new()
            .route("/jobs", get(routes::list))
            .route("/jobs/{id}", get(routes::show))
            .route("/jobs/{id}/cancel", post(routes::cancel))
            .with_state(self.clone())
    }

    /// The kinds of work of jobs.
    #[must_use]
    pub fn kinds(&self) -> Vec<Kind<Database>> {
        vec![work::kind(self), carry_over::kind(self), carry_over::former(self)]
    }
}

/// The operation of a job.
fn work_of(tenant: &str, kind: &str, id: JobId, stored: &Stored) -> Result<Work> {
    let fingerprint = Fingerprint::of_bytes(id.to_string().as_bytes());
    let payload = serde_json::to_vec(stored).map_err(|_| Error::Invalid("params: are no JSON".into()))?;
    Ok(Work::new(look::scope(tenant, kind)?, look::key(id)?, fingerprint).payload(payload).policy(work::policy()))
}
