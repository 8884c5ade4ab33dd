//! Runs jobs: one node each, step by step.

use std::{
    collections::HashSet,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use semel::{
    Backoff, Claim, Context, Error, Fingerprint, Key, OnLost, Outcome, Policy, Ran, Result, Scope, State, Store as _,
    Unfinished, Uptime, Work, crash_point,
};
use semel_store::{Database, Tx};
use tokio::{
    sync::{Semaphore, watch},
    task::JoinSet,
};
use tracing::Instrument as _;

use super::{
    Jobs, POLL,
    model::{Job, JobId, JobKind},
    tables,
};

/// How many jobs run on a node at a time. They are for people, who have few of them; and each step takes the writer.
const AT_ONCE: usize = 4;

/// How many jobs one look reads.
const PAGE: i64 = 100;

/// How long a job keeps its place on a node before it goes to the end of the queue: well below the longest run.
const TURN: Duration = Duration::from_secs(60);

/// How long to wait after a step that could not be made because the database was away.
const AWAY: Duration = Duration::from_secs(1);

/// The rules for the operation of a job. Every step is atomic, so a job whose node was lost may simply go on.
fn policy() -> Policy {
    Policy {
        lease: Duration::from_secs(5),
        retention: Some(Duration::from_secs(24 * 3600)),
        max_attempts: Some(10),
        max_crashes: 5,
        backoff: Backoff { first: Duration::from_secs(1), cap: Duration::from_secs(60) },
        on_lost: OnLost::Rerun,
        ..Policy::default()
    }
}

/// The jobs that this node runs.
type Here = Arc<Mutex<HashSet<JobId>>>;

/// Turns true when the node stops.
type Stop = watch::Receiver<bool>;

/// Looks for jobs, and runs them, until the node stops.
pub(super) async fn work(jobs: Jobs, mut stop: Stop) {
    let (here, seats) = (Here::default(), Arc::new(Semaphore::new(AT_ONCE)));
    let mut runs = JoinSet::new();
    while !*stop.borrow() {
        if let Err(error) = look(&jobs, &stop, &here, &seats, &mut runs).await {
            tracing::warn!(%error, "jobs could not be looked for; the next round tries again");
        }
        tokio::select! {
            () = jobs.0.wake.woken() => {}
            () = tokio::time::sleep(POLL) => {}
            _ = stop.wait_for(|stop| *stop) => {}
        }
        while runs.try_join_next().is_some() {}
    }
    // They see the stop as well, and end after the step that they are at.
    while runs.join_next().await.is_some() {}
}

/// Starts what nobody runs.
async fn look(jobs: &Jobs, stop: &Stop, here: &Here, seats: &Arc<Semaphore>, runs: &mut JoinSet<()>) -> Result<()> {
    let mut after = String::new();
    loop {
        let mut reader = jobs.0.ledger.store().reader().await?;
        let (page, next) = tables::running(&mut reader.conn(), &after, PAGE).await?;
        reader.leave();
        for job in page {
            // A kind that this node does not know is one of a newer version, another node's; or a row that cannot be read.
            let Some(kind) = jobs.0.kinds.get(job.kind.as_str()) else { continue };
            if lock(here).contains(&job.id) || !is_free(jobs, &job).await? {
                continue;
            }
            let Ok(seat) = seats.clone().try_acquire_owned() else { return Ok(()) };
            lock(here).insert(job.id);
            let (jobs, kind, stop, here) = (jobs.clone(), kind.clone(), stop.clone(), here.clone());
            runs.spawn(async move {
                let again = run(&jobs, kind, &job, &stop).await;
                lock(&here).remove(&job.id);
                drop(seat);
                // A seat is free, or the job's turn is over: somebody may want it.
                if again {
                    jobs.wake();
                }
            });
        }
        match next {
            Some(next) => after = next,
            None => return Ok(()),
        }
    }
}

/// Whether no other node runs the job. Asked before claiming, so that looking leaves no trace in the job's story.
async fn is_free(jobs: &Jobs, job: &Job) -> Result<bool> {
    let store = jobs.0.ledger.store();
    let Some(operation) = store.by_key(&scope(job)?, &key(job)?).await? else { return Ok(true) };
    let now = store.now().await?;
    let live = operation.lease.as_ref().is_some_and(|lease| lease.deadline > now);
    let backs_off = operation.not_before.is_some_and(|at| at > now);
    Ok(!live && !backs_off && operation.state != State::InDoubt)
}

/// Runs a job under its lease; whether it is worth looking for jobs again at once.
async fn run(jobs: &Jobs, kind: Arc<dyn JobKind>, job: &Job, stop: &Stop) -> bool {
    // The ledger logs a run that fails, with attempt and error; the span adds which job that was, whatever filter there is.
    let span = tracing::error_span!("job", id = %job.id, kind = job.kind);
    match claim_and_run(jobs, kind, job, stop).instrument(span).await {
        Ok(Claim::Acquired(Ran::Completed(_) | Ran::Released)) => true,
        Ok(Claim::Exhausted(operation)) => {
            let why = operation.error.clone().unwrap_or_else(|| "the nodes that ran it were lost too often".to_owned());
            let (kind, attempt) = (&*job.kind, operation.failures);
            match fail(jobs, job, why.clone()).await {
                Ok(()) => tracing::warn!(job = %job.id, kind, attempt, error = why, "a job failed, and is given up"),
                Err(error) => {
                    tracing::warn!(job = %job.id, kind, %error, "a job that failed could not be marked; the next round does it");
                }
            }
            true
        }
        // A run that did not end well: the ledger has logged how, in this job's span. Or another node was faster.
        Ok(_) | Err(Error::Stopping) => false,
        Err(error) => {
            tracing::warn!(job = %job.id, kind = job.kind, %error, "a job was interrupted; it goes on later");
            false
        }
    }
}

async fn claim_and_run(jobs: &Jobs, kind: Arc<dyn JobKind>, job: &Job, stop: &Stop) -> Result<Claim<Ran>> {
    let work = Work::new(scope(job)?, key(job)?, Fingerprint::of_bytes(job.id.to_string().as_bytes()));
    let (jobs, stop, tenant, id) = (jobs.clone(), stop.clone(), job.tenant.clone(), job.id);
    let ledger = jobs.0.ledger.clone();
    let run = move |context| {
        let (jobs, kind, stop, tenant) = (jobs.clone(), kind.clone(), stop.clone(), tenant.clone());
        async move { steps(&jobs, &kind, &tenant, id, &context, &stop).await }
    };
    ledger.run(work.policy(policy()), run).await
}

/// Takes step after step while it has the lease, for one turn.
async fn steps(
    jobs: &Jobs,
    kind: &Arc<dyn JobKind>,
    tenant: &str,
    id: JobId,
    context: &Context<Database>,
    stop: &Stop,
) -> Result<Outcome, Unfinished> {
    let turn = Uptime::now() + TURN;
    let mut counted = false;
    loop {
        // After each whole step: somebody else can go on from here.
        if turn.has_passed() || *stop.borrow() || context.is_lost() {
            return Err(Unfinished::NotYet(Duration::ZERO));
        }
        let stepped = async {
            if !counted {
                count(jobs, kind.as_ref(), tenant, id).await?;
                counted = true;
            }
            step(jobs, kind, tenant, id).await
        };
        match stepped.await {
            Ok(true) => {}
            Ok(false) => return Ok(Outcome::kept("")),
            Err(error) if error.is_transient() => return Err(Unfinished::NotYet(AWAY)),
            // No step can mend these.
            Err(error @ (Error::Invalid(_) | Error::Corrupt(_))) => {
                return Err(Unfinished::failed_for_good(error.to_string()));
            }
            Err(error) => return Err(Unfinished::failed(error.to_string())),
        }
    }
}

/// Finds out how much there is to do, before the first step.
async fn count(jobs: &Jobs, kind: &dyn JobKind, tenant: &str, id: JobId) -> Result<()> {
    let Some(job) = jobs.find(tenant, id).await? else { return Ok(()) };
    if job.total.is_some() || job.cursor.is_some() {
        return Ok(());
    }
    let Some(total) = kind.count(&job).await? else { return Ok(()) };
    let total = i64::try_from(total).unwrap_or(i64::MAX);
    in_transaction(jobs, move |tx: Tx| async move {
        let mut held = tx.connection().await?;
        tables::set_total(&mut held.get()?, &job.tenant, job.id, total).await
    })
    .await
}

/// One step and its progress, in one commit; whether there are more.
async fn step(jobs: &Jobs, kind: &Arc<dyn JobKind>, tenant: &str, id: JobId) -> Result<bool> {
    let now = jobs.0.ledger.store().now().await?;
    let (stepping, tenant) = (kind.clone(), tenant.to_owned());
    let more = in_transaction(jobs, move |tx: Tx| async move {
        let found = {
            let mut held = tx.connection().await?;
            tables::lock(&mut held.get()?, &tenant, id).await?
        };
        // It has ended before: its node died between that and the end of its operation.
        let Some(job) = found else { return Ok(false) };
        let step = stepping.step(&job, &tx).await?;
        let mut held = tx.connection().await?;
        tables::advance(&mut held.get()?, &job, &step, now).await?;
        crash_point!("job.stepped");
        Ok(step.more)
    })
    .await?;
    crash_point!("job.committed");
    Ok(more)
}

async fn fail(jobs: &Jobs, job: &Job, why: String) -> Result<()> {
    let (now, job) = (jobs.0.ledger.store().now().await?, job.clone());
    in_transaction(jobs, move |tx: Tx| async move {
        let mut held = tx.connection().await?;
        tables::fail(&mut held.get()?, &job, &why, now).await
    })
    .await
}

/// Runs `work` in a transaction that commits if it succeeds.
async fn in_transaction<T, F, Fut>(jobs: &Jobs, work: F) -> Result<T>
where
    T: Send + 'static,
    F: FnOnce(Tx) -> Fut + Send + 'static,
    Fut: Future<Output = Result<T>> + Send,
{
    let done = jobs.0.ledger.transact(|tx| async move {
        let done = work(tx).await;
        if done.is_ok() { Ok(done) } else { Err(done) }
    });
    done.await?
}

fn scope(job: &Job) -> Result<Scope> {
    Scope::new(&job.tenant, "jobs", &job.kind)
}

fn key(job: &Job) -> Result<Key> {
    Key::new(&job.id.to_string())
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
