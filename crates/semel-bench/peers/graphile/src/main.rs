//! `graphile-peer URL SCHEMA bulk|keyed|single JOBS SEATS`: enqueues no-op jobs with the crate `graphile_worker`, runs
//! them, and prints the seconds of both. The settings are those of the crate's own benchmark: a local queue of 5,000
//! jobs, and completions that are collected for 5 ms.

use std::{
    error::Error,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};

use graphile_worker::{
    IntoTaskHandlerResult, JobSpec, JobSpecBuilder, LocalQueueConfig, TaskHandler, WorkerContext, WorkerOptions, WorkerUtils,
};
use serde::{Deserialize, Serialize};
use sqlx::postgres::PgPoolOptions;
use tokio::{sync::Notify, task::JoinSet};

type Result<T> = std::result::Result<T, Box<dyn Error + Send + Sync>>;

/// The number of jobs per call in bulk, as in semel-bench.
const BULK_SIZE: usize = 5000;

/// As many connections as pgbench has clients.
const CONNECTIONS: u32 = 64;

#[derive(Clone, Deserialize, Serialize)]
struct Charge {
    n: usize,
}

impl TaskHandler for Charge {
    const IDENTIFIER: &'static str = "charge";

    async fn run(self, context: WorkerContext) -> impl IntoTaskHandlerResult {
        if let Some(Count(begun, jobs, all)) = context.get_ext::<Count>()
            && begun.fetch_add(1, Ordering::Relaxed) + 1 == *jobs
        {
            all.notify_one();
        }
        Ok::<(), String>(())
    }
}

/// The number of started jobs, the total, and a signal for the last.
#[derive(Clone, Debug)]
struct Count(Arc<AtomicUsize>, usize, Arc<Notify>);

#[tokio::main]
async fn main() -> Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [url, schema, how, jobs, seats] = &arguments[..] else {
        return Err("usage: graphile-peer URL SCHEMA bulk|keyed|single JOBS SEATS".into());
    };
    let (jobs, seats): (usize, usize) = (jobs.parse()?, seats.parse()?);
    let pool = PgPoolOptions::new().max_connections(CONNECTIONS).connect(url).await?;
    let (begun, all) = (Arc::new(AtomicUsize::new(0)), Arc::new(Notify::new()));
    let worker = WorkerOptions::default()
        .pg_pool(pool)
        .schema(schema)
        .concurrency(seats)
        .poll_interval(Duration::from_millis(5))
        .complete_job_batch_delay(Duration::from_millis(5))
        .local_queue(LocalQueueConfig::default().with_size(5000))
        .add_extension(Count(begun, jobs, all.clone()))
        .define_job::<Charge>()
        .init()
        .await?;
    let utils = worker.create_utils();
    let start = Instant::now();
    match how.as_str() {
        "single" => enqueue_one_by_one(&utils, jobs, seats).await?,
        how => enqueue_in_bulk(&utils, jobs, how == "keyed").await?,
    }
    let enqueued = start.elapsed().as_secs_f64();
    let worker = Arc::new(worker);
    let start = Instant::now();
    let running = tokio::spawn({
        let worker = worker.clone();
        async move { worker.run().await }
    });
    tokio::time::timeout(Duration::from_secs(300), all.notified()).await?;
    // It ends when the last completions are stored.
    worker.request_shutdown();
    running.await??;
    let worked = start.elapsed().as_secs_f64();
    println!("{{\"enqueued\": {enqueued}, \"worked\": {worked}}}");
    Ok(())
}

async fn enqueue_in_bulk(utils: &WorkerUtils, jobs: usize, keyed: bool) -> Result<()> {
    for first in (0..jobs).step_by(BULK_SIZE) {
        let numbers = first..jobs.min(first + BULK_SIZE);
        let spec = |n: usize| match keyed {
            true => JobSpecBuilder::new().job_key(format!("order-{n:032}")).build(),
            false => JobSpec::default(),
        };
        let specs: Vec<JobSpec> = numbers.clone().map(spec).collect();
        let some: Vec<_> = numbers.map(|n| Charge { n }).zip(&specs).collect();
        utils.add_jobs(&some).await?;
    }
    Ok(())
}

async fn enqueue_one_by_one(utils: &WorkerUtils, jobs: usize, callers: usize) -> Result<()> {
    let begun = Arc::new(AtomicUsize::new(0));
    let mut running = JoinSet::new();
    for _ in 0..callers {
        let (utils, begun) = (utils.clone(), begun.clone());
        running.spawn(async move {
            loop {
                let n = begun.fetch_add(1, Ordering::Relaxed);
                if n >= jobs {
                    return Ok::<_, Box<dyn Error + Send + Sync>>(());
                }
                utils.add_job(Charge { n }, JobSpec::default()).await?;
            }
        });
    }
    while let Some(done) = running.join_next().await {
        done??;
    }
    Ok(())
}
