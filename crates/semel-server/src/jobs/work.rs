//! Runs jobs, step by step.

use std::{sync::Arc, time::Duration};

use semel::{Backoff, Context, Kind, OnLost, Outcome, Policy, Unfinished, prelude::*};
use semel_store::{Database, Tx};

use super::{
    Jobs, SERVICE,
    model::{Job, JobKind, JobState, Progress},
};
use crate::unfinished::unfinished;

/// How many jobs run on a node at a time. People create few, and on SQLite each step takes the only writer.
const AT_ONCE: usize = 4;

/// The turn of a job: after it, the job goes behind the other jobs.
const TURN: Duration = Duration::from_secs(60);

/// The policy of jobs. Every step is atomic, so a job whose node was lost may continue.
pub(super) fn policy() -> Policy {
    Policy {
        lease: Duration::from_secs(5),
        // As long as the data of webhooks' events is kept.
        retention: Some(Duration::from_secs(90 * 24 * 3600)),
        max_attempts: Some(10),
        max_crashes: 5,
        backoff: Backoff { first: Duration::from_secs(1), cap: Duration::from_secs(60) },
        on_lost: OnLost::Rerun,
        ..Policy::default()
    }
}

/// All kinds of jobs that this node has. They share their seats.
pub(super) fn kind(jobs: &Jobs) -> Kind<Database> {
    let (known, run) = (jobs.clone(), jobs.clone());
    Kind::leased(SERVICE, "", move |context| {
        let jobs = run.clone();
        async move { steps(&jobs, &context).await }
    })
    .taking(move |kind, _| known.0.kind(kind).is_some())
    .policy(policy())
    .at_once(AT_ONCE)
    .turn(TURN)
    // The ledger logs a failed run with attempt and error; the span adds the job, under any log filter.
    .span(|operation| tracing::error_span!("job", id = operation.key.as_str(), kind = operation.scope.kind()))
}

/// Runs steps for one turn.
async fn steps(jobs: &Jobs, context: &Context<Database>) -> Result<Outcome, Unfinished> {
    let mut job = Job::of(context.operation()).map_err(unfinished)?;
    match job.state {
        JobState::Running => {}
        // It ended under an older version.
        JobState::Done => return Ok(Outcome::kept(job.progress.encode())),
        JobState::Failed => return Err(Unfinished::failed_for_good(job.error.unwrap_or_default())),
    }
    let kind = jobs.0.kind(&job.kind).ok_or_else(|| Unfinished::failed("this node does not know the kind"))?;
    if job.progress.total.is_none() && job.progress.cursor.is_none() && !job.progress.over {
        let total = kind.count(&job).await.map_err(unfinished)?;
        job.progress.total = total.map(|total| i64::try_from(total).unwrap_or(i64::MAX));
    }
    while !job.progress.over {
        if context.turn_is_over() {
            return Err(Unfinished::TurnOver);
        }
        job.progress = step(jobs, kind, &job, context).await?;
    }
    Ok(Outcome::kept(job.progress.encode()))
}

/// One step and its progress, in one commit.
async fn step(
    jobs: &Jobs,
    kind: &Arc<dyn JobKind>,
    job: &Job,
    context: &Context<Database>,
) -> Result<Progress, Unfinished> {
    let now = jobs.0.ledger.store().now().await.map_err(unfinished)?;
    let stepped = context.step(|tx: Tx| async move {
        let step = kind.step(job, &tx).await.map_err(unfinished)?;
        let progress = job.progress.after(&step, now);
        Ok((progress.encode(), progress))
    });
    stepped.await
}
