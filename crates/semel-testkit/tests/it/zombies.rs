//! A process that slept through its lease, and wakes up.

use std::time::{Duration, Instant};

use semel::{OnLost, Policy, State, journal::Event, prelude::*};
use semel_testkit::{
    Kind,
    faults::{Mode, Order, Report, WriteKind, effect_rows, worker::policy},
};

use crate::support::{Site, how, on_both_databases};

on_both_databases!(
    a_zombie_is_refused_on_every_write,
    a_zombie_reports_a_lost_lease_wherever_it_slept,
    a_zombie_knows_before_its_next_step,
);

const SHORT: Duration = Duration::from_secs(1);

/// For the new owner: it should not lose its own lease on a busy machine.
fn long() -> Policy {
    policy(Duration::from_secs(30))
}

async fn sleep_through_the_lease() {
    tokio::time::sleep(SHORT + SHORT / 5).await;
}

async fn a_zombie_is_refused_on_every_write(kind: Kind) {
    let site = Site::new(kind).await;
    // Two of each write: at the first the new owner still runs, at the second it has completed.
    let all = || WriteKind::ALL.into_iter().flat_map(|write| [(write, true), (write, false)]);
    let name = |write: WriteKind, at_it: bool| format!("{write:?}-{}", if at_it { "running" } else { "completed" });
    let mut zombie = site.worker().await;
    for (write, at_it) in all() {
        assert_eq!(how(&zombie.ask(&Order::claim(&name(write, at_it), &policy(SHORT))).await), "acquired");
    }
    zombie.freeze().await;
    sleep_through_the_lease().await;
    let mut heir = site.worker().await;
    for (write, at_it) in all() {
        let key = name(write, at_it);
        match at_it {
            true => assert_eq!(how(&heir.ask(&Order::claim(&key, &long())).await), "acquired"),
            false => assert_eq!(how(&heir.ask(&Order::run(&key, &long(), Mode::Leased)).await), "completed"),
        }
    }
    let before = site.all(all().map(|(write, at_it)| name(write, at_it))).await;
    zombie.wake();
    for ((write, at_it), before) in all().zip(before) {
        let key = name(write, at_it);
        let reports = zombie.ask(&Order::Write { key: key.clone(), write }).await;
        assert_eq!(reports, [Report::Wrote { key: key.clone(), write, held: false }]);
        assert_eq!(site.operation(&key).await, before, "{key}: a zombie has changed the row");
        let (notes, _) = site.db.journal(before.id).await.unwrap();
        assert!(notes.iter().any(|note| note.event == Event::Refused && note.fence < before.fence), "{key}: {notes:?}");
        if at_it {
            let reports = heir.ask(&Order::Write { key: key.clone(), write: WriteKind::Complete }).await;
            assert_eq!(reports, [Report::Wrote { key, write: WriteKind::Complete, held: true }]);
        }
    }
    assert!(site.bank.by_key().into_values().all(|effects| effects == 1));
    site.check_counters().await;
}

/// Where a run fell asleep, and how many effects there may be outside in the end.
struct Case {
    mode: Mode,
    point: &'static str,
    on_lost: OnLost,
    effects: usize,
}

fn cases(kind: Kind) -> Vec<Case> {
    let leased = |point, on_lost, effects| Case { mode: Mode::Leased, point, on_lost, effects };
    let atomic = |point| Case { mode: Mode::Atomic, point, on_lost: OnLost::Rerun, effects: 0 };
    let mut cases = vec![
        // It had not begun, and does not begin when it wakes: the effect is that of the new owner.
        leased("claim.after", OnLost::Rerun, 1),
        leased("work.before", OnLost::Rerun, 1),
        // It had made its effect. Under rerun the effect is repeated, with the same derived key;
        leased("work.after", OnLost::Rerun, 2),
        leased("settle.before", OnLost::Rerun, 2),
        // under hold it is not.
        leased("settle.before", OnLost::Hold, 1),
        atomic("claim.after"),
    ];
    if kind == Kind::Postgres {
        // On SQLite a process that is stopped here holds the file's only write lock.
        cases.extend(["atomic.begun", "atomic.before_complete", "atomic.before_commit"].map(atomic));
    }
    cases
}

async fn a_zombie_reports_a_lost_lease_wherever_it_slept(kind: Kind) {
    let site = Site::new(kind).await;
    let site = &site;
    let cases = cases(kind);
    let all = cases.iter().enumerate().map(|(n, case)| async move {
        let what = format!("{:?} at {} under {:?}", case.mode, case.point, case.on_lost);
        let key = format!("key-{n}");
        let mut zombie = site.worker_with(&[("SEMEL_CRASH", &format!("{}:1:stop", case.point))]).await;
        let policy = Policy { on_lost: case.on_lost, ..policy(SHORT) };
        zombie.order(&Order::run(&key, &policy, case.mode)).await;
        zombie.until_frozen().await;
        sleep_through_the_lease().await;
        let mut heir = site.worker().await;
        let expected = if case.on_lost == OnLost::Hold { "in_doubt" } else { "completed" };
        let reports = heir.ask(&Order::run(&key, &long(), case.mode)).await;
        assert_eq!(how(&reports), expected, "{what}: {reports:?}");
        let before = site.operation(&key).await;
        zombie.wake();
        let reports = zombie.until_done().await;
        assert_eq!(how(&reports), "lease_lost", "{what}: {reports:?}");
        assert_eq!(site.operation(&key).await, before, "{what}");
        let effects = site.bank.effects().into_iter().filter(|effect| effect.key == key);
        assert_eq!(effects.count(), case.effects, "{what}");
        let rows = effect_rows(&site.db).await.get(&key).copied().unwrap_or(0);
        assert_eq!(rows, i64::from(case.mode == Mode::Atomic), "{what}: business rows");
    });
    futures(all).await;
    site.check_counters().await;
}

/// Waits for all of them.
async fn futures(all: impl Iterator<Item = impl Future<Output = ()>>) {
    let mut all: Vec<_> = all.map(Box::pin).collect();
    std::future::poll_fn(|context| {
        all.retain_mut(|one| one.as_mut().poll(context).is_pending());
        if all.is_empty() { std::task::Poll::Ready(()) } else { std::task::Poll::Pending }
    })
    .await;
}

/// A node that is frozen with a commit in flight holds that row's lock, and another claim of the key is in flight. The
/// others of the same batch are not affected.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_zombie_blocks_no_other_key_of_a_batch() {
    let site = Site::new(Kind::Postgres).await;
    let mut zombie = site.worker_with(&[("SEMEL_CRASH", "atomic.before_commit:1:stop")]).await;
    // Its completion is sent before the commit, not with it.
    zombie.order(&Order::run("large", &long(), Mode::Atomic)).await;
    zombie.until_frozen().await;
    let mut node = site.worker().await;
    let begun = Instant::now();
    node.order(&Order::run("large", &long(), Mode::Atomic)).await;
    for n in 0..20 {
        node.order(&Order::run(&format!("other-{n}"), &long(), Mode::Atomic)).await;
    }
    let mut reports = Vec::new();
    for _ in 0..21 {
        reports.extend(node.until_done().await);
    }
    let took = begun.elapsed();
    assert!(took < Duration::from_secs(20), "they waited {took:?}");
    let ended = |word: &str| {
        reports.iter().filter(|reports| matches!(reports, Report::Ended { how, .. } if how == word)).count()
    };
    assert_eq!((ended("completed"), ended("in_flight")), (20, 1), "{reports:?}");
    zombie.wake();
    assert_eq!(how(&zombie.until_done().await), "completed", "it was not late");
}

/// Work that cannot be cancelled checks before each step, and the first check after the pause already returns lost.
async fn a_zombie_knows_before_its_next_step(kind: Kind) {
    let site = Site::new(kind).await;
    let mut zombie = site.worker().await;
    zombie.order(&Order::Watch { key: "k".into(), terms: policy(SHORT).to_terms() }).await;
    assert!(matches!(zombie.next().await, Some(Report::Begun { .. })));
    zombie.freeze().await;
    sleep_through_the_lease().await;
    zombie.wake();
    // The run may be signalled before its handler, which cannot be cancelled, has had its next turn.
    let mut reports = zombie.until_done().await;
    while !reports.iter().any(|reports| matches!(reports, Report::Woke { .. })) {
        reports.push(zombie.next().await.unwrap());
    }
    assert!(reports.contains(&Report::Woke { key: "k".into(), lost: true }), "{reports:?}");
    assert_ne!(site.operation("k").await.state, State::Completed);
}
