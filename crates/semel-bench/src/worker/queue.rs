//! The cost of taking a batch from a short queue and from a long one.
//!
//! Each taken batch is completed, and as many jobs are enqueued, outside of the measured time: the queue keeps its
//! length, and dead rows at its front are as in production. On PostgreSQL the long queue is measured once more while
//! another transaction holds a snapshot: the entries of ended jobs stay in the index then.
//!
//! A look for due jobs goes over all kinds and tenants: it is measured with many tenants that each have a delayed job.

use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use semel::{
    Fingerprint, Ledger, Outcome, Policy, Scope, Settled, Work,
    store::{Limits, Want},
};
use semel_store::Database;
use sqlx::{Connection as _, PgConnection};
use tokio::task::JoinSet;

use super::{jobs::enqueue_in_bulk, subject};
use crate::{
    Plan,
    load::Figure,
    report::Report,
    site::{Backend, Site, close},
    work::{SCOPE, new_key},
};

/// The batch size.
pub(crate) const BATCH: usize = 64;

const FEW: usize = 1000;
const MANY: usize = 1_000_000;

pub(crate) const SHORT: &str = "a batch of 1,000 waiting";
pub(crate) const LONG: &str = "a batch of 1,000,000 waiting";
pub(crate) const HELD: &str = "the same, a snapshot held";

/// The tenants with one delayed job each.
const TENANTS: usize = 10_000;

pub(crate) const LOOK: &str = "a look at 10,000 tenants";

pub(crate) async fn measure(plan: &Plan, backend: Backend, report: &mut Report) -> Result<()> {
    let long = Site::fresh(plan, backend).await?;
    let ledger = long.ledger(true).await?;
    let begun = Instant::now();
    enqueue_in_bulk(&ledger, MANY).await?;
    report.say(format!("{backend}: 1 million operations were enqueued in {} s", begun.elapsed().as_secs()));
    rustix::fs::sync();
    for _ in 0..plan.rounds {
        let site = Site::fresh(plan, backend).await?;
        let few = site.ledger(true).await?;
        enqueue_in_bulk(&few, FEW).await?;
        report.add(subject(backend, SHORT, BATCH), run(plan, &site, &few).await?);
        close(few).await;
        site.remove().await?;
        report.add(subject(backend, LONG, BATCH), run(plan, &long, &ledger).await?);
    }
    if backend == Backend::Postgres {
        let mut dump = PgConnection::connect(&long.url).await?;
        let hold = "BEGIN ISOLATION LEVEL REPEATABLE READ; SELECT count(*) FROM semel_paused";
        sqlx::raw_sql(hold).execute(&mut dump).await?;
        for _ in 0..plan.rounds {
            report.add(subject(backend, HELD, BATCH), run(plan, &long, &ledger).await?);
        }
        dump.close().await?;
    }
    close(ledger).await;
    long.remove().await?;
    look_at_many(plan, backend, report).await
}

/// Looks for due jobs of many tenants that have only delayed ones.
async fn look_at_many(plan: &Plan, backend: Backend, report: &mut Report) -> Result<()> {
    let site = Site::fresh(plan, backend).await?;
    let ledger = site.ledger(true).await?;
    for tenants in (0..TENANTS).collect::<Vec<_>>().chunks(1000) {
        let delayed = |n: &usize| -> Result<Work> {
            let scope = Scope::new(&format!("tenant-{n}"), SCOPE[1], SCOPE[2])?;
            Ok(Work::new(scope, new_key()?, Fingerprint::of_bytes(b"")).delay(Duration::from_secs(24 * 3600)))
        };
        ledger.enqueue_all(tenants.iter().map(delayed).collect::<Result<_>>()?).await?;
    }
    site.vacuum().await?;
    let (mut all, before) = (Vec::new(), site.cpu.used());
    let end = Instant::now() + plan.length;
    while Instant::now() < end {
        let (begun, mut after, mut found) = (Instant::now(), (String::new(), String::new()), 0);
        loop {
            let page = ledger.due_kinds(SCOPE[1], (&after.0, &after.1)).await?;
            let Some(last) = page.last() else { break };
            after = (last.kind.clone(), last.tenant.clone());
            found += page.len();
        }
        all.push(begun.elapsed());
        ensure!(found == TENANTS, "{found} tenants were found");
    }
    let (window, cpu) = (all.iter().sum(), site.cpu.used() - before);
    report.add(subject(backend, LOOK, 1), Figure::new(all, window, cpu));
    close(ledger).await;
    site.remove().await
}

/// Takes batches until their durations add up to the time.
async fn run(plan: &Plan, site: &Site, ledger: &Ledger<Database>) -> Result<Figure> {
    let until = Instant::now() + Plan::WARM_UP;
    while Instant::now() < until {
        take(ledger).await?;
    }
    let (mut all, mut cpu) = (Vec::new(), Duration::ZERO);
    let end = Instant::now() + plan.length;
    while Instant::now() < end {
        let before = site.cpu.used();
        all.push(take(ledger).await?);
        cpu += site.cpu.used() - before;
    }
    let window = all.iter().sum();
    Ok(Figure::new(all, window, cpu))
}

/// Looks for due operations, takes a batch, and refills the queue. Returns the duration of the first two.
async fn take(ledger: &Ledger<Database>) -> Result<Duration> {
    let begun = Instant::now();
    let due = ledger.due_kinds(SCOPE[1], ("", "")).await?;
    ensure!(due.len() == 1 && due[0].kind == SCOPE[2], "{} kinds are due", due.len());
    let want = Want {
        scope: Scope::new(SCOPE[0], SCOPE[1], SCOPE[2])?,
        most: BATCH as u32,
        since: Some(0),
        policy: Policy::default(),
        lease: None,
        limits: Limits::default(),
    };
    let taken = ledger.take(vec![want]).await?;
    let took = begun.elapsed();
    ensure!(taken.len() == BATCH, "{} were taken", taken.len());
    let mut ending = JoinSet::new();
    for (_, lease) in taken {
        ending.spawn(lease.complete(Outcome::not_kept("")));
    }
    while let Some(done) = ending.join_next().await {
        ensure!(matches!(done??, Settled::Yes { .. }), "a lease was lost within moments");
    }
    enqueue_in_bulk(ledger, BATCH).await?;
    Ok(took)
}
