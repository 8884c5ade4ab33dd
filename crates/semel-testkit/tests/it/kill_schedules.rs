//! kill -9 of nodes that run a schedule: every run is enqueued once, and none is missing.

use std::{os::unix::process::ExitStatusExt as _, time::Duration};

use semel::{Schedule, State, Timestamp, crash::SCHEDULE_POINTS, prelude::*};
use semel_testkit::{
    Kind,
    faults::{Order, Process, effect_rows, scenario::ticks},
};

use crate::support::{Site, on_both_databases};

on_both_databases!(
    three_nodes_that_are_killed_at_every_crash_point_make_each_run_once,
    three_nodes_that_are_killed_at_any_moment_make_each_run_once,
);

/// How many nodes share the schedule.
const NODES: usize = 3;

/// Longer than anything here takes on a busy machine.
const PATIENCE: Duration = Duration::from_secs(60);

async fn ticking(site: &Site, env: &[(&str, &str)]) -> Process {
    let mut node = site.worker_with(env).await;
    node.order(&Order::Tick).await;
    node
}

/// The due time of the last run.
async fn last(site: &Site) -> Option<Timestamp> {
    site.db.schedules().await.unwrap().0.first()?.last
}

/// Waits until one more run has been enqueued, so that the nodes were at work for a second.
async fn one_more(site: &Site) {
    let before = last(site).await;
    let more = async {
        while last(site).await == before {
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    };
    tokio::time::timeout(PATIENCE, more).await.expect("no node enqueues runs");
}

async fn three_nodes_that_are_killed_at_every_crash_point_make_each_run_once(kind: Kind) {
    for point in SCHEDULE_POINTS {
        let site = Site::new(kind).await;
        // The first commit of one of them is the mark of the new schedule, the second of each is a run.
        let crash = format!("{point}:2");
        let mut doomed = Vec::new();
        for _ in 0..NODES {
            doomed.push(ticking(&site, &[("SEMEL_CRASH", &crash)]).await);
        }
        for node in &mut doomed {
            assert_eq!(node.ended().await.signal(), Some(9), "{point}");
        }
        let heir = ticking(&site, &[]).await;
        one_more(&site).await;
        one_more(&site).await;
        check(&site, heir, point).await;
    }
}

async fn three_nodes_that_are_killed_at_any_moment_make_each_run_once(kind: Kind) {
    let site = Site::new(kind).await;
    let mut nodes = Vec::new();
    for _ in 0..NODES {
        nodes.push(ticking(&site, &[]).await);
    }
    for n in 0..2 * NODES {
        // Around the due time of a run, a bit later each time.
        one_more(&site).await;
        let next = last(&site).await.unwrap() + Duration::from_secs(1) + Duration::from_millis(3 * n as u64);
        tokio::time::sleep(next.since(site.db.now().await.unwrap())).await;
        nodes.remove(0).kill().await;
        nodes.push(ticking(&site, &[]).await);
    }
    let survivor = nodes.remove(0);
    for mut node in nodes {
        node.kill().await;
    }
    one_more(&site).await;
    check(&site, survivor, "at any moment").await;
}

/// A node that freezes in the transaction of a run blocks this schedule for the others for a few seconds: then the
/// server ends the transaction. When the node wakes, its commit is refused. SQLite has one writer, for which all wait.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_node_that_freezes_in_a_run_blocks_the_schedule_for_seconds() {
    let site = Site::new(Kind::Postgres).await;
    let mut frozen = ticking(&site, &[("SEMEL_CRASH", "schedule.before_commit:3:stop")]).await;
    frozen.until_frozen().await;
    let other = ticking(&site, &[]).await;
    one_more(&site).await;
    frozen.wake();
    one_more(&site).await;
    frozen.kill().await;
    check(&site, other, "after a freeze").await;
}

/// Lets a node finish, and checks that each second had its run, once.
async fn check(site: &Site, node: Process, what: &str) {
    let schedule = ticks();
    let (marks, _) = site.db.schedules().await.unwrap();
    let [mark] = &marks[..] else { panic!("{what}: {marks:?}") };
    let dues = std::iter::successors(schedule.next(mark.since), |due| schedule.next(*due));
    let keys: Vec<_> = dues.take_while(|due| Some(*due) <= mark.last).map(|due| schedule.key(due).unwrap()).collect();
    assert!(keys.len() > 2, "{what}: {keys:?}");
    let all_done = async {
        for key in &keys {
            loop {
                let run = site.db.by_key(schedule.scope(), key).await.unwrap();
                let run = run.unwrap_or_else(|| panic!("{what}: {} was left out", key.as_str()));
                assert!(Schedule::due(&run).is_some());
                if run.state == State::Completed {
                    break;
                }
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        }
    };
    tokio::time::timeout(PATIENCE, all_done).await.unwrap_or_else(|_| panic!("{what}: a run does not complete"));
    node.stop().await;
    let effects = effect_rows(&site.db).await;
    let twice: Vec<_> = effects.iter().filter(|(_, n)| **n != 1).collect();
    assert!(twice.is_empty(), "{what}: {twice:?}");
    assert!(keys.iter().all(|key| effects.contains_key(key.as_str())), "{what}: {effects:?}");
}
