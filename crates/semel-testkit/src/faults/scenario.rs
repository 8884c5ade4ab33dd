//! What a worker does until it is killed: a round of it passes every crash point, and it can be
//! played again over what a killed worker left behind.

use std::{collections::BTreeSet, sync::Arc, time::Duration};

use semel::{Claim, Context, Fingerprint, Key, OnLost, Policy, Ran, Scope, State, Store as _, Unfinished, Work};
use semel_store::{Database, Tx};
use tokio::{sync::watch, task::JoinSet};

use super::{
    Mode,
    bank::take_in,
    worker::{Worker, outcome, policy, tell_claim, tell_error},
};
use crate::work;

/// Short, so that what a killed worker left is soon free; a busy machine may lose one, and that is
/// one more thing that must not matter.
pub const LEASE: Duration = Duration::from_millis(400);

/// The keys of a scenario, by what is promised about them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Keys {
    /// Atomic mode: each takes effect once.
    pub atomic: BTreeSet<String>,
    /// Leased mode, `hold`: each takes effect at most once, and ends completed or in doubt.
    pub hold: BTreeSet<String>,
    /// Leased mode, `rerun`: each takes effect at least once, under the same derived key.
    pub rerun: BTreeSet<String>,
    /// Enqueued, and run by a worker in atomic mode: each takes effect once. They are of another [kind](queue).
    pub queued: BTreeSet<String>,
}

/// The scope of what is enqueued.
///
/// # Panics
/// Never: it is constant.
#[must_use]
#[expect(clippy::unwrap_used, reason = "it is constant")]
pub fn queue() -> Scope {
    Scope::new("acme", "bank", "queue").unwrap()
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
        }
        keys
    }
}

/// Plays some rounds. Every key is brought to its end.
pub(crate) async fn play(worker: &Arc<Worker>, rounds: usize) {
    for round in 0..rounds {
        // A lease that ends without a word.
        let lost = format!("lost-{round}");
        if let Err(error) = worker.ledger.claim(work(&lost, policy(Policy::SHORTEST_LEASE))).await {
            tell_error(&lost, &error);
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
        // Repeats of this round, written at once instead of within a second.
        worker.ledger.flush().await;
    }
}

async fn sweep(worker: &Worker) {
    if let Err(error) = worker.ledger.sweep().await {
        tell_error("sweep", &error);
    }
}

/// What goes on side by side in a round.
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
    /// A run that is forgotten at once.
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
                // Nobody counts its effects: it may come again as something new.
                let _ =
                    worker.ledger.run(work(&format!("old-{round}"), policy), |_| async { Ok(outcome("old", 0)) }).await;
            }
        }
    }
}

/// The keys that are enqueued in a round.
fn queued(round: usize) -> [String; 2] {
    ["alone", "with-rows"].map(|how| format!("queued-{round}-{how}"))
}

/// Enqueues, by itself and in a transaction, and lets a worker run until both have completed.
async fn run_queued(worker: &Arc<Worker>, round: usize, policy: &Policy) {
    let keys = queued(round);
    let work = |name: &str| {
        let fingerprint = Fingerprint::of_bytes(name.as_bytes());
        Ok::<_, semel::Error>(Work::new(queue(), Key::new(name)?, fingerprint).payload(name.to_owned()))
    };
    let enqueue = async || {
        worker.ledger.enqueue(work(&keys[0])?).await?;
        let (ledger, other) = (worker.ledger.clone(), work(&keys[1])?);
        let put = worker.ledger.transact(move |tx| async move {
            let done = ledger.enqueue_in(&tx, vec![other]).await;
            if done.is_ok() { Ok(done) } else { Err(done) }
        });
        put.await?.map(drop)
    };
    while let Err(error) = enqueue().await {
        tell_error(&keys[0], &error);
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    let effect = |context: Context<Database>, tx: Tx| async move {
        let name = context.operation().key.as_str().to_owned();
        take_in(&tx, &name, context.fence()).await.map_err(Unfinished::failed)?;
        Ok(outcome(&name, context.fence().0))
    };
    let kind = semel::Kind::atomic("bank", "queue", effect).policy(policy.clone()).at_once(2);
    let (stop, stops) = watch::channel(false);
    let hands = tokio::spawn(semel::Worker::new(&worker.ledger).on(kind).run(stops));
    let is_over = async |name: &str| {
        let Ok(name) = Key::new(name) else { return true };
        let there = worker.ledger.store().by_key(&queue(), &name).await;
        there.is_ok_and(|op| op.is_some_and(|op| op.state == State::Completed))
    };
    while !(is_over(&keys[0]).await && is_over(&keys[1]).await) {
        tokio::time::sleep(Duration::from_millis(20)).await;
        // What a killed worker had taken is free when its lease has lapsed.
        sweep(worker).await;
    }
    stop.send_replace(true);
    let _ = hands.await;
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

/// Asks until the key has come to its end, and tells which.
async fn until_settled<F, Fut>(worker: &Worker, key: &str, run: F)
where
    F: Fn() -> Fut,
    Fut: Future<Output = semel::Result<Claim<Ran>>>,
{
    loop {
        let pause = match run().await {
            Ok(claim) => {
                tell_claim(key, &claim);
                match claim {
                    Claim::Acquired(Ran::Failed(_) | Ran::Released | Ran::LeaseLost) => Duration::ZERO,
                    Claim::InFlight(there) => there.retry_after,
                    Claim::NotYet(not_yet) => not_yet.retry_after,
                    _ => return,
                }
            }
            Err(error) => {
                tell_error(key, &error);
                Duration::from_millis(20)
            }
        };
        // A lease of a killed worker ends by itself, or because somebody sweeps.
        tokio::time::sleep(pause.min(LEASE)).await;
        if !pause.is_zero() {
            sweep(worker).await;
        }
    }
}
