//! kill -9 at every crash point: the guarantees hold after the restart.

use std::{
    collections::{BTreeMap, BTreeSet},
    os::unix::process::ExitStatusExt as _,
    sync::Arc,
    time::Duration,
};

use semel::{State, crash::POINTS, prelude::*};
use semel_testkit::{
    Kind,
    faults::{
        Order, Report, effect_rows,
        scenario::{Keys, STEPS, queue, step_of, steps},
        torture,
    },
    key,
};
use tokio::{sync::Semaphore, task::JoinSet};

use crate::support::{Site, acknowledged, lost_leases, on_both_databases, troubled};

on_both_databases!(kill_minus_nine_at_every_crash_point, kill_minus_nine_at_any_moment);

const ROUNDS: usize = 3;

/// Processes wait most of the time; this many runs at once keep two cores busy.
const AT_ONCE: usize = 6;

async fn kill_minus_nine_at_every_crash_point(kind: Kind) {
    let hits = hits_of_an_undisturbed_run(kind).await;
    let never: Vec<_> = POINTS.iter().filter(|point| !hits.contains_key(**point)).collect();
    assert!(never.is_empty(), "these crash points were never hit: {never:?}");
    let most = if torture() { 40 } else { ROUNDS };
    let mut runs = Vec::new();
    for point in POINTS {
        runs.extend((1..=hits[*point].min(most)).map(|nth| When::Hit(point, nth)));
    }
    let all = runs.len();
    // How often a point is hit varies with the timing, but every round hits each of them.
    let killed = kill_all(kind, runs).await;
    let reached: BTreeSet<&str> = killed
        .iter()
        .filter_map(|when| match when {
            When::Hit(point, _) => Some(*point),
            When::After(_) => None,
        })
        .collect();
    assert_eq!(reached, POINTS.iter().copied().collect(), "a process was killed at every crash point");
    println!("{all} runs, {} processes killed", killed.len());
}

async fn kill_minus_nine_at_any_moment(kind: Kind) {
    let all: u32 = if torture() { 400 } else { 20 };
    // Spread over the duration of the scenario.
    let runs = (1..=all).map(|n| When::After(Duration::from_millis(700) * n / all)).collect();
    let killed = kill_all(kind, runs).await;
    println!("{all} runs, {} processes killed", killed.len());
    // On any machine, each of the three rounds takes the 200 ms of its longest run: a process that was killed before
    // had not finished.
    assert!(killed.len() >= all as usize * 6 / 7, "of {all} workers only {} were killed at their work", killed.len());
}

/// What a worker may have begun when it is killed: in each round two operations that must not be repeated run
/// concurrently. Only these can be in doubt afterwards.
const BEGUN_AT_ONCE: usize = 2;

/// When a worker is killed.
#[derive(Clone, Copy, Debug)]
enum When {
    /// At the n-th hit of a crash point.
    Hit(&'static str, usize),
    /// After this long.
    After(Duration),
}

/// Which of them were killed before they were done.
async fn kill_all(kind: Kind, runs: Vec<When>) -> Vec<When> {
    let gate = Arc::new(Semaphore::new(AT_ONCE));
    let mut running = JoinSet::new();
    for when in runs {
        let gate = gate.clone();
        running.spawn(async move {
            let _turn = gate.acquire().await.unwrap();
            kill(kind, when).await.then_some(when)
        });
    }
    running.join_all().await.into_iter().flatten().collect()
}

async fn hits_of_an_undisturbed_run(kind: Kind) -> BTreeMap<String, usize> {
    let site = Site::new(kind).await;
    let log = tempfile::NamedTempFile::new().unwrap();
    let mut worker = site.worker_with(&[("SEMEL_CRASH_LOG", log.path().to_str().unwrap())]).await;
    let reports = worker.ask(&Order::Scenario { rounds: ROUNDS }).await;
    worker.stop().await;
    check(&site, &[], &reports, 0, "undisturbed").await;
    let mut hits = BTreeMap::new();
    for point in std::fs::read_to_string(log.path()).unwrap().lines() {
        *hits.entry(point.to_owned()).or_default() += 1;
    }
    hits
}

/// Kills a worker, starts another one on its data, and checks. False if there was nothing left to kill.
async fn kill(kind: Kind, when: When) -> bool {
    let site = Site::new(kind).await;
    let mut doomed = match when {
        When::Hit(point, nth) => site.worker_with(&[("SEMEL_CRASH", &format!("{point}:{nth}"))]).await,
        When::After(_) => site.worker().await,
    };
    doomed.order(&Order::Scenario { rounds: ROUNDS }).await;
    if let When::After(time) = when {
        tokio::time::sleep(time).await;
        doomed.kill().await;
    }
    let mut before = Vec::new();
    let killed = loop {
        match doomed.next().await {
            Some(Report::Done) => break false,
            Some(reports) => before.push(reports),
            None => break true,
        }
    };
    if killed {
        assert_eq!(doomed.ended().await.signal(), Some(9), "{when:?}");
    } else {
        doomed.kill().await;
    }
    // The counters from before the kill are kept.
    site.check_counters().await;
    let mut heir = site.worker().await;
    let after = heir.ask(&Order::Scenario { rounds: ROUNDS }).await;
    heir.stop().await;
    let most = if killed { BEGUN_AT_ONCE } else { 0 };
    check(&site, &before, &after, most, &format!("{when:?}")).await;
    killed
}

/// Checks the guarantees. At most this many are in doubt because of a kill; a lease that was lost on a busy machine is
/// reported, and leaves a doubt as well. So does a disk that stalled.
async fn check(site: &Site, before: &[Report], after: &[Report], most_in_doubt: usize, what: &str) {
    // An outcome that was acknowledged before the kill is replayed after it.
    let outcomes = acknowledged(before.iter().chain(after));
    let keys = Keys::of(ROUNDS);
    let (operations, rows) = (site.operations().await, effect_rows(&site.db).await);
    let state = |key: &str| operations.get(key).unwrap_or_else(|| panic!("{what}: {key} is gone")).state;

    let in_steps = keys.stepped.iter().flat_map(|key| (0..STEPS).map(move |n| step_of(key, n)));
    let once = keys.atomic.iter().chain(&keys.queued).cloned().chain(in_steps);
    let once: BTreeMap<String, i64> = once.map(|key| (key, 1)).collect();
    assert_eq!(rows, once, "{what}: atomic mode, and steps");
    for key in &keys.atomic {
        assert_eq!(state(key), State::Completed, "{what}: {key}");
    }

    let queued = keys.queued.iter().map(|name| (queue(), name));
    for (scope, name) in queued.chain(keys.stepped.iter().map(|name| (steps(), name))) {
        let there = site.db.by_key(&scope, &key(name)).await.unwrap();
        assert_eq!(there.map(|op| op.state), Some(State::Completed), "{what}: {name}");
    }

    let (mut effects, mut derived) = (BTreeMap::<&str, usize>::new(), BTreeMap::<&str, BTreeSet<&str>>::new());
    let taken = site.bank.effects();
    for effect in &taken {
        *effects.entry(&effect.key).or_default() += 1;
        derived.entry(&effect.key).or_default().insert(&effect.derived);
    }
    let mut lost = lost_leases(before.iter().chain(after));
    lost.extend(troubled(before.iter().chain(after), what));
    let doubted = keys.hold.iter().filter(|key| state(key) == State::InDoubt && !lost.contains(*key)).count();
    assert!(
        doubted <= most_in_doubt,
        "{what}: {doubted} are in doubt, and no worker was killed at more than {most_in_doubt}"
    );
    for key in &keys.hold {
        let effects = effects.get(key.as_str()).copied().unwrap_or(0);
        match state(key) {
            State::Completed => assert_eq!(effects, 1, "{what}: {key}"),
            State::InDoubt => {
                assert!(effects <= 1, "{what}: {key}: {effects} effects");
                assert!(!outcomes.contains_key(key), "{what}: {key} was completed before it was in doubt");
            }
            other => panic!("{what}: {key} is {other}"),
        }
    }
    for key in &keys.rerun {
        assert_eq!(state(key), State::Completed, "{what}: {key}");
        assert!(effects.get(key.as_str()).copied().unwrap_or(0) >= 1, "{what}: {key} took no effect");
    }
    let distinct: BTreeSet<_> = derived.values().flatten().collect();
    assert!(derived.values().all(|keys| keys.len() == 1), "{what}: a derived key has changed: {derived:?}");
    assert_eq!(distinct.len(), derived.len(), "{what}: two operations have the same derived key");
    site.check_counters().await;
}
