//! The worker: jobs per second, the cost of a batch by the length of the queue, and how soon a job starts.
//!
//! - `jobs`: no-op jobs, enqueued one by one and in bulk, and run
//! - `peers`: the same work done by pgbench and by the crate `graphile_worker`
//! - `queue`: one batch taken from a short queue and from a long one; a look at many tenants
//! - `latency`: from the commit to the start, in this process and from another

pub(crate) mod jobs;
pub(crate) mod latency;
mod peers;
pub(crate) mod queue;

use anyhow::Result;

pub(crate) use self::{
    jobs::{ALL_BULK, ALL_SINGLE, SEATS},
    latency::{OTHER, SAME},
    peers::{GRAPHILE_BULK, GRAPHILE_KEYED, GRAPHILE_SINGLE, PGBENCH_JOBS},
    queue::{BATCH, HELD, LONG, SHORT},
};
use crate::{
    Plan,
    report::{Report, Subject},
    site::Backend,
};

/// The section of every figure here.
pub(crate) const SECTION: &str = "worker";

pub(crate) async fn measure(plan: &Plan, backend: Backend, report: &mut Report) -> Result<()> {
    jobs::measure(plan, backend, report).await?;
    queue::measure(plan, backend, report).await?;
    latency::measure(plan, backend, report).await
}

pub(crate) fn subject(backend: Backend, how: &'static str, tasks: usize) -> Subject {
    Subject { section: SECTION, backend, how, tasks }
}
