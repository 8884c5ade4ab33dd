//! No-op jobs: enqueued by many callers or in bulk, then run. The two phases are timed one after the other, so that
//! each has the machine to itself; the rate of both is the number of jobs divided by the sum of the two times.

use std::{
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};

use anyhow::{Result, ensure};
use semel::{Fingerprint, Kind, Ledger, Outcome, Scope, Work, Worker};
use semel_store::Database;
use tokio::{
    sync::{Notify, watch},
    task::JoinSet,
};

use super::{peers, subject};
use crate::{
    Plan,
    cpu::Cpu,
    load::Figure,
    report::Report,
    site::{Backend, Site, close},
    work::{SCOPE, new_key},
};

/// The number of callers that enqueue at the same time.
pub(crate) const SEATS: usize = 512;

/// The concurrency: as many as the peer holds in its local queue, which is how many it takes at once.
const AT_ONCE: usize = 5000;

pub(crate) const SINGLE: &str = "enqueued one by one";
pub(crate) const BULK: &str = "enqueued in bulk";
pub(crate) const WORKED: &str = "worked off";
pub(crate) const ALL_SINGLE: &str = "one by one, and worked off";
pub(crate) const ALL_BULK: &str = "in bulk, and worked off";

/// The number of jobs per call in bulk.
const BULK_SIZE: usize = 5000;

/// Longer than any round takes: a stuck worker ends the run with an error.
const PATIENCE: Duration = Duration::from_secs(300);

/// The duration of a phase, and the CPU time of all processes in it.
#[derive(Clone, Copy)]
pub(super) struct Phase {
    pub(super) took: Duration,
    pub(super) cpu: Duration,
}

impl Phase {
    /// Times one phase.
    pub(super) async fn time<T>(cpu: Cpu, phase: impl Future<Output = Result<T>>) -> Result<Self> {
        let (before, begun) = (cpu.used(), Instant::now());
        phase.await?;
        Ok(Self { took: begun.elapsed(), cpu: cpu.used() - before })
    }

    pub(super) fn and(self, other: Self) -> Self {
        Self { took: self.took + other.took, cpu: self.cpu + other.cpu }
    }

    pub(super) fn figure(self, jobs: usize) -> Figure {
        let (jobs, nan) = (jobs as f64, f64::NAN);
        let per = |time: Duration| jobs / time.as_secs_f64();
        Figure { rate: per(self.took), p50: nan, p99: nan, per_cpu: per(self.cpu) }
    }
}

pub(crate) async fn measure(plan: &Plan, backend: Backend, report: &mut Report) -> Result<()> {
    let jobs = plan.jobs;
    for _ in 0..plan.rounds {
        let site = Site::fresh(plan, backend).await?;
        let ledger = site.ledger(true).await?;
        // The warm-up of connections, plans and caches.
        enqueue_in_bulk(&ledger, jobs / 10).await?;
        work_off(&ledger, jobs / 10).await?;
        site.tidy(&ledger).await?;
        let mut add = |how, tasks, phase: Phase| report.add(subject(backend, how, tasks), phase.figure(jobs));
        for (enqueued, how, all) in [(true, BULK, ALL_BULK), (false, SINGLE, ALL_SINGLE)] {
            let enqueued = match enqueued {
                true => Phase::time(site.cpu, enqueue_in_bulk(&ledger, jobs)).await?,
                false => Phase::time(site.cpu, enqueue_one_by_one(&ledger, jobs)).await?,
            };
            let worked = Phase::time(site.cpu, work_off(&ledger, jobs)).await?;
            add(how, SEATS, enqueued);
            add(WORKED, SEATS, worked);
            add(all, SEATS, enqueued.and(worked));
            site.tidy(&ledger).await?;
        }
        close(ledger).await;
        if backend == Backend::Postgres {
            peers::measure(plan, &site, report).await?;
        }
        site.remove().await?;
    }
    Ok(())
}

/// A job as the peers have it: a key and a payload, no labels.
fn job() -> Result<Work> {
    let (scope, key) = (Scope::new(SCOPE[0], SCOPE[1], SCOPE[2])?, new_key()?);
    let fingerprint = Fingerprint::of_bytes(key.as_str().as_bytes());
    Ok(Work::new(scope, key, fingerprint).payload(&b"{\"n\":1}"[..]))
}

pub(super) async fn enqueue_in_bulk(ledger: &Ledger<Database>, jobs: usize) -> Result<()> {
    let mut left = jobs;
    while left > 0 {
        let some = left.min(BULK_SIZE);
        let works = (0..some).map(|_| job()).collect::<Result<Vec<_>>>()?;
        ledger.enqueue_all(works).await?;
        left -= some;
    }
    Ok(())
}

async fn enqueue_one_by_one(ledger: &Ledger<Database>, jobs: usize) -> Result<()> {
    let begun = Arc::new(AtomicUsize::new(0));
    let mut callers = JoinSet::new();
    for _ in 0..SEATS {
        let (ledger, begun) = (ledger.clone(), begun.clone());
        callers.spawn(async move {
            while begun.fetch_add(1, Ordering::Relaxed) < jobs {
                ledger.enqueue(job()?).await?;
            }
            anyhow::Ok(())
        });
    }
    while let Some(done) = callers.join_next().await {
        done??;
    }
    Ok(())
}

/// Runs a worker until this many jobs have completed, durably.
async fn work_off(ledger: &Ledger<Database>, jobs: usize) -> Result<()> {
    let (begun, all) = (Arc::new(AtomicUsize::new(0)), Arc::new(Notify::new()));
    let (count, last) = (begun.clone(), all.clone());
    let kind = Kind::leased(SCOPE[1], SCOPE[2], move |_| {
        if count.fetch_add(1, Ordering::Relaxed) + 1 == jobs {
            last.notify_one();
        }
        async { Ok(Outcome::not_kept("")) }
    });
    let (stop, stops) = watch::channel(false);
    let worker = tokio::spawn(Worker::new(ledger).on(kind.at_once(AT_ONCE)).run(stops));
    let ended = tokio::time::timeout(PATIENCE, all.notified()).await;
    // The worker ends when the last completions are stored.
    stop.send_replace(true);
    worker.await?;
    ensure!(ended.is_ok(), "only {} of {jobs} jobs were begun", begun.load(Ordering::Relaxed));
    Ok(())
}
