//! Work for later, over several processes: a long queue, killed processes, and frozen processes.

use std::{
    collections::BTreeMap,
    os::unix::process::ExitStatusExt as _,
    time::{Duration, Instant},
};

use semel::{Fingerprint, Ledger, OnLost, Operation, Options, Policy, State, Work, prelude::*};
use semel_store::{Database, Settings};
use semel_testkit::{
    Kind,
    faults::{
        Mode, Open, Order, Process, Report, effect_rows,
        scenario::{leased_queue, queue},
        states, torture,
        worker::policy,
    },
    key,
};

use crate::support::{Site, on_both_databases};

on_both_databases!(
    two_processes_work_off_a_long_queue,
    a_worker_that_slept_past_its_lease_changes_nothing,
    kill_minus_nine_at_each_step_of_a_worker,
    kill_minus_nine_of_an_enqueue_before_and_after_its_commit,
);

/// Short: operations of a killed worker are soon free.
const SHORT: Duration = Duration::from_millis(500);

/// Longer than any step takes on a busy machine.
const PATIENCE: Duration = Duration::from_secs(120);

/// A process with free seats may start nothing while the other one starts this part of the queue. Not a time: a busy
/// machine or a disk that stalls delays both.
const LARGEST_GAP: usize = 10;

/// Each of 20,000 operations (100,000 under torture) is run once, and neither process is idle while there is work.
async fn two_processes_work_off_a_long_queue(kind: Kind) {
    // 100,000 take a minute of CPU time on PostgreSQL.
    let all = if torture() { 100_000 } else { 20_000 };
    let site = Site::new(kind).await;
    let ledger = ledger(&site).await;
    // Both find the whole queue at the same time.
    site.db.pause_kind("bank", "leased", "test", "until the queue is filled").await.unwrap();
    let mut nodes = [site.worker().await, site.worker().await];
    for node in &mut nodes {
        node.order(&Order::work(64, &policy(Duration::from_secs(60)))).await;
    }
    let work = |n: usize| {
        let name = format!("job-{n}");
        Work::new(leased_queue(), key(&name), Fingerprint::of_bytes(name.as_bytes()))
    };
    ledger.enqueue_all((0..all).map(work).collect()).await.unwrap();
    site.db.resume_kind("bank", "leased", "test", "it is filled").await.unwrap();
    let completed = BTreeMap::from([("completed".to_owned(), i64::try_from(all).unwrap())]);
    eventually(async || states(&site.db).await == completed).await;

    let effects = site.bank.effects();
    let mut by_key = BTreeMap::<&str, usize>::new();
    effects.iter().for_each(|effect| *by_key.entry(&effect.key).or_default() += 1);
    assert_eq!((by_key.len(), effects.len()), (all, all), "each was run once");
    let mut order: Vec<_> = effects.iter().map(|effect| (effect.at, effect.pid)).collect();
    order.sort_unstable();
    for node in &nodes {
        let pid = node.pid().as_raw_nonzero().get().unsigned_abs();
        let own = order.iter().filter(|(_, of)| *of == pid).count();
        assert!(own >= all / 5, "one process ran only {own} of {all}");
        // It may find the queue a second after the other.
        let begun = order.iter().position(|(_, of)| *of == pid).unwrap();
        let gap = order[begun..].split(|(_, of)| *of == pid).map(<[_]>::len).max().unwrap();
        assert!(gap < all / LARGEST_GAP, "a process was idle while the other ran {gap} of {all}");
    }
    for node in nodes {
        node.stop().await;
    }
}

/// A worker is stopped at each of its steps for longer than its lease. Another process completes its operation. When
/// the first wakes, it does not change the row, and makes no effect that it had not made before.
async fn a_worker_that_slept_past_its_lease_changes_nothing(kind: Kind) {
    // Where it is stopped, and how many effects there are in the end, by both.
    let mut cases = vec![
        (Mode::Leased, "take.after", 1),
        (Mode::Leased, "work.before", 1),
        (Mode::Leased, "work.after", 2),
        (Mode::Leased, "settle.before", 2),
    ];
    if kind == Kind::Postgres {
        // On SQLite a process that is stopped here holds the file's only write lock.
        cases
            .extend(["atomic.begun", "atomic.before_complete", "atomic.before_commit"].map(|at| (Mode::Atomic, at, 1)));
    }
    // With its own policy, and with that of the worker: on PostgreSQL another statement takes those.
    let cases = cases.into_iter().flat_map(|case| [(case, Some(policy(SHORT))), (case, None)]);
    for ((mode, point, effects), own) in cases {
        let site = Site::new(kind).await;
        let mut zombie = site.worker_with(&[("SEMEL_CRASH", &format!("{point}:1:stop"))]).await;
        enqueue(&mut zombie, mode, &["sleeper"], own.as_ref()).await;
        zombie.order(&Order::work(2, &policy(SHORT))).await;
        zombie.until_frozen().await;
        tokio::time::sleep(SHORT).await;
        let mut heir = site.worker().await;
        heir.order(&Order::work(2, &policy(SHORT))).await;
        let before = settled(&site, mode, "sleeper").await;
        assert_eq!(before.state, State::Completed, "{point}");
        zombie.wake();
        // It has woken, and works again, when it has run another operation.
        heir.stop().await;
        enqueue(&mut zombie, mode, &["another"], Some(&policy(PATIENCE))).await;
        assert_eq!(settled(&site, mode, "another").await.state, State::Completed, "{point}");
        zombie.stop().await;
        assert_eq!(operation(&site, mode, "sleeper").await, Some(before), "{point}: it has changed the row");
        assert_eq!(effects_of(&site, mode, "sleeper").await, effects, "{point}");
    }
}

/// A worker that is stopped during a take holds the locks of its rows. Another worker skips these rows.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_worker_frozen_during_a_take_blocks_no_other() {
    let site = Site::new(Kind::Postgres).await;
    let mut zombie = site.worker_with(&[("SEMEL_CRASH", "store.take.claimed:1:stop")]).await;
    enqueue(&mut zombie, Mode::Leased, &["held"], None).await;
    zombie.order(&Order::work(2, &policy(PATIENCE))).await;
    zombie.until_frozen().await;
    let mut node = site.worker().await;
    enqueue(&mut node, Mode::Leased, &["free"], None).await;
    let begun = Instant::now();
    node.order(&Order::work(2, &policy(PATIENCE))).await;
    assert_eq!(settled(&site, Mode::Leased, "free").await.state, State::Completed);
    // The server ends the transaction of a frozen node after five seconds.
    assert!(begun.elapsed() < Duration::from_secs(4), "it waited for {:?}", begun.elapsed());
    zombie.wake();
    assert_eq!(settled(&site, Mode::Leased, "held").await.state, State::Completed);
    assert_eq!(effects_of(&site, Mode::Leased, "held").await, 1);
}

/// A worker that is stopped during a take may have locked more rows than another one looks at. The server ends its
/// transaction after five seconds, and the other continues.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_worker_frozen_during_a_large_take_blocks_others_for_seconds() {
    let site = Site::new(Kind::Postgres).await;
    let mut zombie = site.worker_with(&[("SEMEL_CRASH", "store.take.claimed:1:stop")]).await;
    let names: Vec<String> = (0..200).map(|n| format!("held {n:03}")).collect();
    let held: Vec<&str> = names.iter().map(String::as_str).collect();
    enqueue(&mut zombie, Mode::Leased, &held, None).await;
    zombie.order(&Order::work(200, &policy(PATIENCE))).await;
    zombie.until_frozen().await;
    let mut node = site.worker().await;
    enqueue(&mut node, Mode::Leased, &["free"], None).await;
    let begun = Instant::now();
    // With its margin of 64 it looks at 128 rows, all of which are locked.
    node.order(&Order::work(64, &policy(PATIENCE))).await;
    assert_eq!(settled(&site, Mode::Leased, "free").await.state, State::Completed);
    assert!(begun.elapsed() < Duration::from_secs(20), "it waited for {:?}", begun.elapsed());
    node.stop().await;
    zombie.wake();
    zombie.stop().await;
}

/// If a worker is killed at any step, another one completes its work: in atomic mode with one effect, under rerun
/// with the same derived key, under hold with one effect at most.
async fn kill_minus_nine_at_each_step_of_a_worker(kind: Kind) {
    let points = [
        "take.before",
        "store.take.claimed",
        "take.after",
        "work.before",
        "work.after",
        "settle.before",
        "store.write.completed",
        "settle.after",
        "atomic.begun",
        "atomic.before_complete",
        "atomic.before_commit",
        "atomic.after_commit",
    ];
    // With its own policy, and with that of the worker: on PostgreSQL another statement takes those.
    let points = points.into_iter().flat_map(|point| [(point, false), (point, true)]);
    for (point, own) in points.filter(|(_, own)| !own || kind == Kind::Postgres) {
        let site = Site::new(kind).await;
        let mut doomed = site.worker_with(&[("SEMEL_CRASH", point)]).await;
        let (rerun, hold) = (policy(SHORT), Policy { on_lost: OnLost::Hold, ..policy(SHORT) });
        enqueue(&mut doomed, Mode::Leased, &["rerun"], own.then_some(&rerun)).await;
        enqueue(&mut doomed, Mode::Leased, &["hold"], Some(&hold)).await;
        enqueue(&mut doomed, Mode::Atomic, &["atomic"], own.then_some(&rerun)).await;
        doomed.order(&Order::work(2, &rerun)).await;
        assert_eq!(doomed.ended().await.signal(), Some(9), "{point}");
        site.check_counters().await;

        let mut heir = site.worker().await;
        heir.order(&Order::work(2, &rerun)).await;
        for (mode, name) in [(Mode::Leased, "rerun"), (Mode::Atomic, "atomic")] {
            assert_eq!(settled(&site, mode, name).await.state, State::Completed, "{point}: {name}");
        }
        let held = settled(&site, Mode::Leased, "hold").await;
        heir.stop().await;
        let of = |name| effects_of(&site, Mode::Leased, name);
        let (rerun, hold) = (of("rerun").await, of("hold").await);
        assert!((1..=2).contains(&rerun), "{point}: {rerun} effects under rerun");
        match held.state {
            State::Completed => assert_eq!(hold, 1, "{point}"),
            state => assert!(state == State::InDoubt && hold <= 1, "{point}: {state} with {hold} effects"),
        }
        assert_eq!(effects_of(&site, Mode::Atomic, "atomic").await, 1, "{point}");
        let derived = site.bank.effects().into_iter().map(|effect| (effect.key, effect.derived));
        assert_eq!(
            derived.collect::<std::collections::BTreeSet<_>>().len(),
            1 + hold,
            "{point}: a derived key changed"
        );
        site.check_counters().await;
    }
}

/// Work that was enqueued before a kill is stored or not, with the rows of its transaction, and is run once if it is
/// stored.
async fn kill_minus_nine_of_an_enqueue_before_and_after_its_commit(kind: Kind) {
    for (point, is_there) in [("enqueue.before", false), ("enqueue.after", true)] {
        let site = Site::new(kind).await;
        let mut doomed = site.worker_with(&[("SEMEL_CRASH", point)]).await;
        enqueue(&mut doomed, Mode::Atomic, &["alone"], Some(&policy(SHORT))).await;
        assert_eq!(doomed.ended().await.signal(), Some(9), "{point}");
        check_enqueued(&site, "alone", is_there.then_some(1)).await;
    }
    for open in [Open::ForEver, Open::UntilWritten] {
        let site = Site::new(kind).await;
        let mut doomed = site.worker().await;
        let (keys, terms) = (vec!["with rows".to_owned()], Some(policy(SHORT).to_terms()));
        doomed.order(&Order::Enqueue { keys, mode: Mode::Atomic, terms, with_rows: Some(open) }).await;
        assert!(matches!(doomed.next().await, Some(Report::Begun { .. })));
        if open == Open::UntilWritten {
            assert_eq!(doomed.next().await, Some(Report::Done));
        }
        doomed.kill().await;
        // The row of the transaction, and the effect of the run.
        check_enqueued(&site, "with rows", (open == Open::UntilWritten).then_some(2)).await;
    }
}

/// Checks that the work is stored, pending, and takes effect once; or that nothing is stored.
async fn check_enqueued(site: &Site, name: &str, rows: Option<usize>) {
    let there = operation(site, Mode::Atomic, name).await;
    assert_eq!(there.map(|op| op.state), rows.map(|_| State::Pending), "{name}");
    site.check_counters().await;
    let mut heir = site.worker().await;
    heir.order(&Order::work(2, &policy(SHORT))).await;
    // The caller got no answer, and enqueues it again.
    enqueue(&mut heir, Mode::Atomic, &[name], Some(&policy(PATIENCE))).await;
    assert_eq!(settled(site, Mode::Atomic, name).await.state, State::Completed);
    heir.stop().await;
    assert_eq!(effects_of(site, Mode::Atomic, name).await, rows.unwrap_or(1), "{name}");
}

/// Enqueues with its own policy, or without.
async fn enqueue(node: &mut Process, mode: Mode, keys: &[&str], policy: Option<&Policy>) {
    let keys: Vec<String> = keys.iter().map(|key| (*key).to_owned()).collect();
    node.order(&Order::Enqueue { keys, mode, terms: policy.map(Policy::to_terms), with_rows: None }).await;
    // A process that is killed meanwhile ends here, too.
    node.until_done().await;
}

/// Sweeps until an operation has completed or is in doubt.
async fn settled(site: &Site, mode: Mode, name: &str) -> Operation {
    let ledger = ledger(site).await;
    eventually(async || {
        let _ = ledger.sweep().await;
        let there = operation(site, mode, name).await;
        there.is_some_and(|op| matches!(op.state, State::Completed | State::InDoubt))
    })
    .await;
    operation(site, mode, name).await.unwrap()
}

async fn operation(site: &Site, mode: Mode, name: &str) -> Option<Operation> {
    let scope = if mode == Mode::Atomic { queue() } else { leased_queue() };
    site.db.by_key(&scope, &key(name)).await.unwrap()
}

async fn effects_of(site: &Site, mode: Mode, name: &str) -> usize {
    match mode {
        Mode::Leased => site.bank.by_key().remove(name).unwrap_or(0),
        Mode::Atomic => usize::try_from(effect_rows(&site.db).await.remove(name).unwrap_or(0)).unwrap(),
    }
}

async fn ledger(site: &Site) -> Ledger<Database> {
    let db = Database::open(&site.url, Settings::default()).await.unwrap();
    Ledger::new(db, Options::default()).unwrap()
}

async fn eventually(mut is_so: impl AsyncFnMut() -> bool) {
    let begun = Instant::now();
    while !is_so().await {
        assert!(begun.elapsed() < PATIENCE, "it did not come to that within {PATIENCE:?}");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}
