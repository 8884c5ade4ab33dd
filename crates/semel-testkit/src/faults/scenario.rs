//! What a worker does until it is killed: a round passes every crash point, and can be repeated over the data of a
//! killed worker.

use std::{collections::BTreeSet, sync::Arc, time::Duration};

use semel::{
    Claim, Context, Fingerprint, Key, Missed, OnLost, Outcome, Policy, Ran, Schedule, Scope, State, Unfinished, Work,
    prelude::*,
};
use semel_store::{Database, Tx};
use tokio::{sync::watch, task::JoinSet};

use super::{
    Mode,
    bank::take_in,
    worker::{Worker, outcome, policy, report_claim, report_error},
};
use crate::work;

/// Short, so that the operations of a killed worker are soon free; a busy machine may lose a lease, which must not
/// matter either.
pub const LEASE: Duration = Duration::from_millis(400);

/// The keys of a scenario, by their guarantee.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Keys {
    /// Atomic mode: each takes effect once.
    pub atomic: BTreeSet<String>,
    /// Leased mode, `hold`: each takes effect at most once, and ends completed or in doubt.
    pub hold: BTreeSet<String>,
    /// Leased mode, `rerun`: each takes effect at least once, under the same derived key.
    pub rerun: BTreeSet<String>,
    /// Enqueued, and run by a worker in atomic mode: each takes effect once. They have another [kind](queue).
    pub queued: BTreeSet<String>,
    /// Enqueued, and run by a worker in [`STEPS`] steps: each step takes effect once, as the key and its number. They
    /// have another [kind](steps).
    pub stepped: BTreeSet<String>,
}

/// How many steps a run in steps takes.
pub const STEPS: usize = 3;

/// The name of the effect of a step.
#[must_use]
pub fn step_of(key: &str, n: usize) -> String {
    format!("{key} {n}")
}

/// The scope of runs in steps.
///
/// # Panics
/// Never: it is constant.
#[must_use]
#[expect(clippy::unwrap_used, reason = "it is constant")]
pub fn steps() -> Scope {
    Scope::new("acme", "bank", "steps").unwrap()
}

/// The scope of enqueued operations.
///
/// # Panics
/// Never: it is constant.
#[must_use]
#[expect(clippy::unwrap_used, reason = "it is constant")]
pub fn queue() -> Scope {
    Scope::new("acme", "bank", "queue").unwrap()
}

/// The scope of enqueued operations with effects outside the database.
///
/// # Panics
/// Never: it is constant.
#[must_use]
#[expect(clippy::unwrap_used, reason = "it is constant")]
pub fn leased_queue() -> Scope {
    Scope::new("acme", "bank", "leased").unwrap()
}

impl Keys {
    /// The keys of some rounds.
    #[must_use]
    pub fn of(rounds: usize) -> Self {
        let mut keys = Self::default();
        for round in 0..rounds {
            keys.atomic.extend([format!("atomic-{round}-a"), format!("atomic-{round}-b"), format!("grave-{round}")]);
            keys.hold.extend([format!("hold-{round}-a"), format!("hold-{round}-b")]);
            keys.rerun.extend([format!("rerun-{round}"), format!("lost-{round}")]);
            keys.queued.extend(queued(round));
            keys.stepped.insert(stepped(round));
        }
        keys
    }
}

/// Plays some rounds. Every key reaches its end.
pub(crate) async fn play(worker: &Arc<Worker>, rounds: usize) {
    for round in 0..rounds {
        // A lease that is dropped.
        let lost = format!("lost-{round}");
        if let Err(error) = worker.ledger.claim(work(&lost, policy(Policy::SHORTEST_LEASE))).await {
            report_error(&lost, &error);
        }
        let mut tasks = JoinSet::new();
        for part in [Part::Atomic, Part::Grave, Part::Hold, Part::LongHold, Part::Rerun, Part::Old, Part::Queued] {
            let worker = worker.clone();
            tasks.spawn(async move { part.play(&worker, round).await });
        }
        tasks.join_all().await;
        tokio::time::sleep(Policy::SHORTEST_LEASE / 4).await;
        sweep(worker).await;
        until_settled(worker, &lost, || worker.run_once(&lost, policy(LEASE), Mode::Leased, Duration::ZERO)).await;
        // Repeats of this round, flushed at once.
        worker.ledger.flush().await;
    }
}

async fn sweep(worker: &Worker) {
    if let Err(error) = worker.ledger.sweep().await {
        report_error("sweep", &error);
    }
}

/// The concurrent parts of a round.
#[derive(Clone, Copy)]
enum Part {
    /// Two atomic runs, the second twice.
    Atomic,
    /// An atomic run whose data is archived at once.
    Grave,
    /// A leased run that may not be repeated.
    Hold,
    /// One that takes long enough to be renewed.
    LongHold,
    /// A leased run that fails the first time.
    Rerun,
    /// A run with a retention that ends at once.
    Old,
    /// Work that is enqueued and run by a worker.
    Queued,
}

impl Part {
    async fn play(self, worker: &Arc<Worker>, round: usize) {
        let rerun = policy(LEASE);
        let hold = Policy { on_lost: OnLost::Hold, ..rerun.clone() };
        let soon = Some(Duration::from_millis(1));
        match self {
            Self::Atomic => {
                for key in ["a", "b", "b"].map(|letter| format!("atomic-{round}-{letter}")) {
                    once(worker, &key, &rerun, Mode::Atomic, Duration::ZERO).await;
                }
            }
            Self::Grave => {
                let policy = Policy { retention: None, tombstone: soon, ..rerun };
                once(worker, &format!("grave-{round}"), &policy, Mode::Atomic, Duration::ZERO).await;
            }
            Self::Hold => once(worker, &format!("hold-{round}-a"), &hold, Mode::Leased, Duration::ZERO).await,
            Self::LongHold => once(worker, &format!("hold-{round}-b"), &hold, Mode::Leased, LEASE / 2).await,
            Self::Rerun => {
                let key = format!("rerun-{round}");
                until_settled(worker, &key, || second_time_lucky(worker, &key, rerun.clone())).await;
            }
            Self::Queued => run_queued(worker, round, &rerun).await,
            Self::Old => {
                let policy = Policy { retention: soon, ..rerun };
                // Its effects are not counted: it may run again as a new operation.
                let _ =
                    worker.ledger.run(work(&format!("old-{round}"), policy), |_| async { Ok(outcome("old", 0)) }).await;
            }
        }
    }
}

/// The enqueued keys of a round.
fn queued(round: usize) -> [String; 2] {
    ["alone", "with-rows"].map(|how| format!("queued-{round}-{how}"))
}

/// The key of a round that runs in steps.
fn stepped(round: usize) -> String {
    format!("stepped-{round}")
}

/// Makes each remaining step, by the checkpoint, in its own transaction.
async fn take_steps(context: Context<Database>) -> Result<Outcome, Unfinished> {
    let name = context.operation().key.as_str().to_owned();
    let taken = context.operation().checkpoint.as_ref().map_or(0, |data| data.len());
    for n in taken..STEPS {
        let (effect, fence) = (step_of(&name, n), context.fence());
        let step = context.step(|tx: Tx| async move {
            take_in(&tx, &effect, fence).await.map_err(Unfinished::failed)?;
            Ok((vec![b'.'; n + 1], ()))
        });
        step.await?;
    }
    Ok(outcome(&name, context.fence().0))
}

/// Enqueues, alone and in a transaction, and runs a worker until all have completed.
async fn run_queued(worker: &Arc<Worker>, round: usize, policy: &Policy) {
    let keys = queued(round);
    let long = stepped(round);
    let work = |scope: Scope, name: &str| {
        let fingerprint = Fingerprint::of_bytes(name.as_bytes());
        Ok::<_, semel::Error>(Work::new(scope, Key::new(name)?, fingerprint).payload(name.to_owned()))
    };
    let enqueue = async || {
        worker.ledger.enqueue(work(queue(), &keys[0])?).await?;
        worker.ledger.enqueue(work(steps(), &long)?).await?;
        let (ledger, other) = (worker.ledger.clone(), work(queue(), &keys[1])?);
        let put = worker.ledger.transact(move |tx| async move { ledger.enqueue_in(&tx, vec![other]).await });
        put.await.map(drop)
    };
    while let Err(error) = enqueue().await {
        report_error(&keys[0], &error);
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    let kind = semel::Kind::atomic("bank", "queue", effect).policy(policy.clone()).at_once(2);
    let (stop, stops) = watch::channel(false);
    let in_steps = semel::Kind::leased("bank", "steps", take_steps).policy(policy.clone()).at_once(2);
    let running = tokio::spawn(semel::Worker::new(&worker.ledger).on(kind).on(in_steps).run(stops));
    let is_over = async |scope: Scope, name: &str| {
        let Ok(name) = Key::new(name) else { return true };
        let there = worker.ledger.store().by_key(&scope, &name).await;
        there.is_ok_and(|op| op.is_some_and(|op| op.state == State::Completed))
    };
    while !(is_over(queue(), &keys[0]).await && is_over(queue(), &keys[1]).await && is_over(steps(), &long).await) {
        tokio::time::sleep(Duration::from_millis(20)).await;
        // Operations that a killed worker had taken are free after lease expiry.
        sweep(worker).await;
    }
    stop.send_replace(true);
    let _ = running.await;
}

/// A run every second, missed ones included: no second is omitted after any kill.
///
/// # Panics
/// Never: it is constant.
#[must_use]
#[expect(clippy::unwrap_used, reason = "it is constant")]
pub fn ticks() -> Schedule {
    let scope = Scope::new("acme", "bank", "tick").unwrap();
    Schedule::every("tick", Duration::from_secs(1), scope).unwrap().missed(Missed::All(1000))
}

/// Runs the schedule in atomic mode until the test says stop.
pub(crate) async fn tick(worker: &Arc<Worker>) {
    let kind = semel::Kind::atomic("bank", "tick", effect).policy(policy(LEASE)).at_once(4);
    let (stop, stops) = watch::channel(false);
    let running = tokio::spawn(semel::Worker::new(&worker.ledger).on(kind).every(ticks()).run(stops));
    while !worker.is_stopping() {
        tokio::time::sleep(Duration::from_millis(100)).await;
        // Operations that a killed worker had taken are free after lease expiry.
        sweep(worker).await;
    }
    stop.send_replace(true);
    let _ = running.await;
}

/// The effect of an enqueued operation: a row under its key.
async fn effect(context: Context<Database>, tx: Tx) -> Result<Outcome, Unfinished> {
    let name = context.operation().key.as_str().to_owned();
    take_in(&tx, &name, context.fence()).await.map_err(Unfinished::failed)?;
    Ok(outcome(&name, context.fence().0))
}

async fn once(worker: &Worker, key: &str, policy: &Policy, mode: Mode, long: Duration) {
    until_settled(worker, key, || worker.run_once(key, policy.clone(), mode, long)).await;
}

/// Leaves a checkpoint and fails; the next attempt finds the checkpoint and succeeds.
async fn second_time_lucky(worker: &Worker, key: &str, policy: Policy) -> semel::Result<Claim<Ran>> {
    let (bank, name) = (worker.bank.clone(), key.to_owned());
    let handler = move |ctx: Context<Database>| {
        let (bank, key) = (bank.clone(), name.clone());
        async move {
            if ctx.operation().checkpoint.is_none() {
                let _ = ctx.checkpoint("tried").await;
                return Err(Unfinished::failed("the first time never works"));
            }
            bank.take(&key, ctx.fence(), &ctx.derived_key("effect"));
            Ok(outcome(&key, ctx.fence().0))
        }
    };
    worker.ledger.run(work(key, policy), handler).await
}

/// Claims until the key has reached its end, and returns it.
async fn until_settled<F, Fut>(worker: &Worker, key: &str, run: F)
where
    F: Fn() -> Fut,
    Fut: Future<Output = semel::Result<Claim<Ran>>>,
{
    loop {
        let pause = match run().await {
            Ok(claim) => {
                report_claim(key, &claim);
                match claim {
                    Claim::Acquired(Ran::Failed(_) | Ran::Released | Ran::LeaseLost) => Duration::ZERO,
                    Claim::InFlight(there) => there.retry_after,
                    Claim::NotYet(not_yet) => not_yet.retry_after,
                    _ => return,
                }
            }
            Err(error) => {
                report_error(key, &error);
                Duration::from_millis(20)
            }
        };
        // The lease of a killed worker expires, or a sweep ends it.
        tokio::time::sleep(pause.min(LEASE)).await;
        if !pause.is_zero() {
            sweep(worker).await;
        }
    }
}
