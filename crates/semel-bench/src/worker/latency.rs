//! From the commit of an enqueue to the start of its job, on an idle worker: in the same process, and enqueued by
//! another process of the same host.

use std::{
    collections::HashMap,
    process::Stdio,
    sync::{Arc, Mutex},
    time::Duration,
};

use anyhow::{Context as _, Result, ensure};
use semel::{Kind, Ledger, Outcome, Worker};
use semel_store::Database;
use tokio::{process::Command, sync::watch, task::JoinHandle};

use super::subject;
use crate::{
    Plan,
    load::Figure,
    report::Report,
    site::{Backend, Site, close},
    work::{SCOPE, new_key, work},
};

pub(crate) const SAME: &str = "commit to start, same process";
pub(crate) const OTHER: &str = "commit to start, another process";

/// The longest pause between two jobs, in milliseconds; each is random, so that none keeps step with a timer.
const LONGEST_PAUSE: u64 = 40;

/// An idle worker polls every second. Jobs that are enqueued before it has found the first one are no traffic yet, and
/// do not count.
const WARM_UP: Duration = Duration::from_secs(2);

/// Microseconds of the clock that all processes of a host share.
type Micros = i64;

/// When jobs started, by key.
type Starts = Arc<Mutex<HashMap<String, Micros>>>;

pub(crate) async fn measure(plan: &Plan, backend: Backend, report: &mut Report) -> Result<()> {
    let site = Site::fresh(plan, backend).await?;
    for _ in 0..plan.rounds {
        for how in [SAME, OTHER] {
            let ledger = site.ledger(true).await?;
            let starts = Starts::default();
            let (stop, worker) = start_worker(&ledger, &starts);
            let before = site.cpu.used();
            let commits = match how {
                SAME => enqueue_for(&ledger, plan.length).await?,
                _ => enqueue_elsewhere(&site.url, plan.length).await?,
            };
            // Time for the last one, too.
            tokio::time::sleep(Duration::from_secs(2)).await;
            stop.send_replace(true);
            worker.await?;
            let cpu = site.cpu.used() - before;
            report.add(subject(backend, how, 1), Figure::new(waits(&commits, &starts)?, plan.length, cpu));
            site.tidy(&ledger).await?;
            close(ledger).await;
        }
    }
    site.remove().await
}

fn start_worker(ledger: &Ledger<Database>, starts: &Starts) -> (watch::Sender<bool>, JoinHandle<()>) {
    let starts = starts.clone();
    let kind = Kind::leased(SCOPE[1], SCOPE[2], move |context| {
        let (now, key) = (now(), context.operation().key.as_str().to_owned());
        if let Ok(mut starts) = starts.lock() {
            starts.insert(key, now);
        }
        async { Ok(Outcome::not_kept("")) }
    });
    let (stop, stops) = watch::channel(false);
    (stop, tokio::spawn(Worker::new(ledger).on(kind).run(stops)))
}

/// How long each job waited for its start after its commit; zero if it began before its caller was answered.
fn waits(commits: &[(String, Micros)], starts: &Starts) -> Result<Vec<Duration>> {
    let starts = starts.lock().map_err(|_| anyhow::anyhow!("a handler panicked"))?;
    let wait = |(key, committed): &(String, Micros)| {
        let started = starts.get(key).with_context(|| format!("{key} did not start"))?;
        Ok(Duration::from_micros(u64::try_from(started - committed).unwrap_or(0)))
    };
    let from = commits.first().map_or(0, |(_, first)| first + WARM_UP.as_micros() as Micros);
    let counts = |(_, committed): &&(String, Micros)| *committed >= from;
    let waits = commits.iter().filter(counts).map(wait).collect::<Result<Vec<_>>>()?;
    ensure!(!waits.is_empty(), "nothing was enqueued");
    Ok(waits)
}

/// Enqueues one job after the other for a while; returns their keys, and when each was answered.
async fn enqueue_for(ledger: &Ledger<Database>, length: Duration) -> Result<Vec<(String, Micros)>> {
    let end = now() + i64::try_from((WARM_UP + length).as_micros())?;
    let mut commits = Vec::new();
    while now() < end {
        let key = new_key()?;
        ledger.enqueue(work(key.clone())?).await?;
        commits.push((key.as_str().to_owned(), now()));
        tokio::time::sleep(Duration::from_millis(fastrand::u64(1..=LONGEST_PAUSE))).await;
    }
    Ok(commits)
}

/// The same in another process: this program, with `--enqueue`.
async fn enqueue_elsewhere(url: &str, length: Duration) -> Result<Vec<(String, Micros)>> {
    let output = Command::new(std::env::current_exe()?)
        .args(["--enqueue", url, "--seconds", &length.as_secs().to_string()])
        .stdin(Stdio::null())
        .stderr(Stdio::inherit())
        .output()
        .await?;
    ensure!(output.status.success(), "the process that enqueues failed");
    let text = String::from_utf8(output.stdout)?;
    let line = |line: &str| {
        let (key, at) = line.split_once(' ').context("a line of the process that enqueues")?;
        Ok((key.to_owned(), at.parse()?))
    };
    text.lines().map(line).collect()
}

/// Runs this program with `--enqueue`.
pub(crate) async fn enqueue(url: &str, seconds: u64) -> Result<()> {
    let database = Database::open(url, semel_store::Settings::default()).await?;
    let ledger = Ledger::new(database, semel::Options::default())?;
    for (key, at) in enqueue_for(&ledger, Duration::from_secs(seconds)).await? {
        println!("{key} {at}");
    }
    close(ledger).await;
    Ok(())
}

fn now() -> Micros {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Boottime);
    now.tv_sec * 1_000_000 + now.tv_nsec / 1000
}
