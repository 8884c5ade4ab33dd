//! `semel-bench`: claims and completions per second, batched and not, on both databases.
//!
//! The parts, in reading order:
//!
//! - `site`: a fresh database for each section
//! - `load`: tasks that repeat an operation for a while, and the result
//! - `pairs`, `replays`, `http`, `gateway`, `messages` and `events`, `webhooks`, `worker`, `mailings`,
//!   `operations`, `growth`: the sections; `limit` is pgbench, `fill` fills the large tables
//! - `verdict`: the aims, each with the measured ratio
//! - `report`: tables for people, JSON for programs

mod cpu;
mod events;
mod fill;
mod gateway;
mod growth;
mod http;
mod limit;
mod load;
mod mailings;
mod messages;
mod operations;
mod pairs;
mod replays;
mod report;
mod site;
mod verdict;
mod webhooks;
mod work;
mod worker;

use std::{path::PathBuf, time::Duration};

use anyhow::{Context as _, Result};
use clap::{Parser, ValueEnum};

use crate::{report::Report, site::Backend};

/// Measures the ledger on SQLite and PostgreSQL.
#[derive(Parser)]
#[command(version)]
struct Args {
    /// Shorter and rougher: 2 s per figure instead of 5, one round instead of three, 1 million rows instead of 10.
    #[arg(long)]
    quick: bool,

    /// Write all figures and the verdict to a file, too.
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,

    /// Measure this database only; may be given again.
    #[arg(long = "database", value_enum)]
    databases: Vec<Backend>,

    /// Only with this many tasks; may be given again.
    #[arg(long)]
    tasks: Vec<usize>,

    /// Only this way (batched, unbatched, pgbench, replays); may be given again.
    #[arg(long)]
    how: Vec<String>,

    /// A PostgreSQL server to create schemas in.
    #[arg(long, env = "SEMEL_TEST_POSTGRES_URL")]
    postgres_url: Option<String>,

    /// A RabbitMQ server to create queues on.
    #[arg(long, env = "SEMEL_TEST_RABBITMQ_URL")]
    rabbitmq_url: Option<String>,

    /// The pgbench program.
    #[arg(long, env = "SEMEL_BENCH_PGBENCH", default_value = "pgbench")]
    pgbench: PathBuf,

    /// The program of `peers/graphile`, the worker's peer.
    #[arg(long, env = "SEMEL_BENCH_GRAPHILE")]
    graphile: Option<PathBuf>,

    /// Only enqueue jobs in this database: the other process of the section `worker`.
    #[arg(long, hide = true, value_name = "URL", requires = "seconds")]
    enqueue: Option<String>,

    /// For this many seconds.
    #[arg(long, hide = true)]
    seconds: Option<u64>,

    /// The sections to measure; all by default.
    #[arg(value_enum)]
    sections: Vec<Section>,
}

/// A section.
#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Section {
    /// New claims and their completions, batched and unbatched, with pgbench as the limit.
    Pairs,
    /// Claims of completed keys.
    Replays,
    /// Keyed requests through the HTTP layer, next to the same server without it.
    Http,
    /// Keyed requests through the gateway, next to its bare hop.
    Gateway,
    /// The relay next to a bare publisher, and events from end to end.
    Messages,
    /// Signed deliveries, new and repeated, next to the same handler without deduplication.
    Webhooks,
    /// Jobs enqueued and run, next to pgbench and graphile_worker; long queues; the latency from the commit to the
    /// start.
    Worker,
    /// Imports next to a bare COPY, sending next to the bare transport.
    Mailings,
    /// Claims and completions through the operations API, next to requests without work and to pgbench; workers that
    /// ask for the next operation.
    Operations,
    /// New claims in a small and in a large table.
    Growth,
}

/// The options that all sections need.
struct Plan {
    /// How often each figure is measured; the median is reported.
    rounds: usize,
    /// The duration of each measurement.
    length: Duration,
    /// The rows of the large table.
    rows: i64,
    /// The number of jobs.
    jobs: usize,
    /// Only these numbers of tasks and these ways; all if empty.
    tasks: Vec<usize>,
    how: Vec<String>,
    postgres_url: Option<String>,
    rabbitmq_url: Option<String>,
    pgbench: PathBuf,
    graphile: Option<PathBuf>,
}

impl Plan {
    /// The warm-up: caches fill and plans settle.
    const WARM_UP: Duration = Duration::from_secs(1);

    fn new(args: &Args) -> Self {
        let (rounds, seconds, rows) = if args.quick { (1, 2, 1_000_000) } else { (3, 5, 10_000_000) };
        let (tasks, how) = (args.tasks.clone(), args.how.clone());
        let (postgres_url, rabbitmq_url) = (args.postgres_url.clone(), args.rabbitmq_url.clone());
        let (length, jobs) = (Duration::from_secs(seconds), if args.quick { 20_000 } else { 100_000 });
        let (pgbench, graphile) = (args.pgbench.clone(), args.graphile.clone());
        Self { rounds, length, rows, jobs, tasks, how, postgres_url, rabbitmq_url, pgbench, graphile }
    }

    /// Whether a figure was requested.
    fn wants(&self, how: &str, tasks: usize) -> bool {
        (self.tasks.is_empty() || self.tasks.contains(&tasks))
            && (self.how.is_empty() || self.how.iter().any(|h| h == how))
    }
}

#[tokio::main]
async fn main() -> Result<()> {
    let args = Args::parse();
    if let (Some(url), Some(seconds)) = (&args.enqueue, args.seconds) {
        return worker::latency::enqueue(url, seconds).await;
    }
    let plan = Plan::new(&args);
    let sections = if args.sections.is_empty() { Section::value_variants() } else { &args.sections };
    let databases = if args.databases.is_empty() { Backend::value_variants() } else { &args.databases };
    let mut report = Report::default();
    report.say(machine("before the run"));
    for section in sections {
        for database in databases {
            let name = section.to_possible_value().map(|value| value.get_name().to_owned()).unwrap_or_default();
            eprintln!("{name} on {database} …");
            match section {
                Section::Pairs => pairs::measure(&plan, *database, &mut report).await,
                Section::Replays => replays::measure(&plan, *database, &mut report).await,
                Section::Http => http::measure(&plan, *database, &mut report).await,
                Section::Gateway => gateway::measure(&plan, *database, &mut report).await,
                Section::Messages => match messages::measure(&plan, *database, &mut report).await {
                    Ok(()) => events::measure(&plan, *database, &mut report).await,
                    failed => failed,
                },
                Section::Webhooks => webhooks::measure(&plan, *database, &mut report).await,
                Section::Worker => worker::measure(&plan, *database, &mut report).await,
                Section::Mailings => mailings::measure(&plan, *database, &mut report).await,
                Section::Operations => operations::measure(&plan, *database, &mut report).await,
                Section::Growth => growth::measure(&plan, *database, &mut report).await,
            }
            .with_context(|| format!("{name} on {database}"))?;
        }
    }
    report.say(machine("after it"));
    println!("{report}");
    if let Some(path) = &args.json {
        let json = serde_json::to_string_pretty(&report.to_json())?;
        std::fs::write(path, json).with_context(|| format!("writing {}", path.display()))?;
    }
    Ok(())
}

/// Other load of the machine: figures from a busy one compare badly with others.
fn machine(when: &str) -> String {
    let cpus = std::thread::available_parallelism().map_or(0, usize::from);
    let load = std::fs::read_to_string("/proc/loadavg").unwrap_or_default();
    format!("{cpus} CPUs, load average {when}: {}", load.split(' ').next().unwrap_or("unknown"))
}
