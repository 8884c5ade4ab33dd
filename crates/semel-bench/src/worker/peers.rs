//! The same jobs by other means, on the same server: `pgbench` with one INSERT and one UPDATE per job, each a commit,
//! like a hand-written table of jobs; and the crate `graphile_worker` with its batches (`peers/graphile`, a separate
//! program).

use std::{path::Path, process::Stdio, time::Duration};

use anyhow::{Context as _, Result, ensure};
use serde_json::Value;
use sqlx::{Connection as _, PgConnection};
use tokio::process::Command;

use super::{
    jobs::{Phase, SEATS},
    subject,
};
use crate::{
    Plan, limit,
    report::Report,
    site::{Backend, Site},
};

pub(crate) const PGBENCH_JOBS: &str = "pgbench: INSERT, UPDATE";
pub(crate) const GRAPHILE_SINGLE: &str = "graphile_worker: one by one, and worked off";
pub(crate) const GRAPHILE_BULK: &str = "graphile_worker: in bulk, and worked off";
/// With a key per job, as our jobs have: it then looks for a job of the same key before it inserts.
pub(crate) const GRAPHILE_KEYED: &str = "graphile_worker: in bulk with keys, and worked off";

/// A hand-written table of jobs.
const TABLE: &str = "CREATE TABLE own_jobs (id BIGSERIAL PRIMARY KEY, kind TEXT NOT NULL, payload TEXT NOT NULL,
                         state TEXT NOT NULL, done_at TIMESTAMPTZ)";

const SCRIPT: &str =
    "INSERT INTO own_jobs (kind, payload, state) VALUES ('charge', '{\"n\":1}', 'waiting') RETURNING id \\gset
UPDATE own_jobs SET state = 'done', done_at = now() WHERE id = :id AND state = 'waiting';
";

pub(super) async fn measure(plan: &Plan, site: &Site, report: &mut Report) -> Result<()> {
    let mut connection = PgConnection::connect(&site.url).await?;
    sqlx::raw_sql(TABLE).execute(&mut connection).await?;
    let figure = limit::run(plan, site, SCRIPT).await?;
    report.add(subject(Backend::Postgres, PGBENCH_JOBS, limit::CLIENTS), figure);
    let Some(program) = &plan.graphile else {
        report.say("graphile_worker was not measured: SEMEL_BENCH_GRAPHILE names no program".into());
        return Ok(());
    };
    for (how, all) in [("bulk", GRAPHILE_BULK), ("keyed", GRAPHILE_KEYED), ("single", GRAPHILE_SINGLE)] {
        let phase = graphile(program, site, how, plan.jobs).await?;
        report.add(subject(Backend::Postgres, all, SEATS), phase.figure(plan.jobs));
    }
    Ok(())
}

/// Runs the program, which prints the durations of enqueueing and running, without its preparations.
async fn graphile(program: &Path, site: &Site, how: &str, jobs: usize) -> Result<Phase> {
    let schema = format!("graphile_{:016x}", fastrand::u64(..));
    let before = site.cpu.used();
    let output = Command::new(program)
        .args([&site.url, &schema, how, &jobs.to_string(), &SEATS.to_string()])
        .stdin(Stdio::null())
        .stderr(Stdio::inherit())
        .output()
        .await
        .with_context(|| format!("running {}", program.display()))?;
    ensure!(output.status.success(), "{} failed", program.display());
    let cpu = site.cpu.used() - before;
    let times: Value = serde_json::from_slice(&output.stdout).context("the output of graphile_worker's program")?;
    let seconds = |name: &str| times[name].as_f64().with_context(|| format!("{name} is missing in {times}"));
    let (enqueued, worked) = (seconds("enqueued")?, seconds("worked")?);
    eprintln!(
        "  graphile_worker, {how}: {:.0} enqueued/s, {:.0} worked off/s",
        jobs as f64 / enqueued,
        jobs as f64 / worked
    );
    Ok(Phase { took: Duration::from_secs_f64(enqueued + worked), cpu })
}
