//! The database moves to another server: a standby is promoted, or a dump is restored into a new cluster.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

use semel::{Claim, Fence, Ledger, OnLost, Options, Outcome, Policy, Settled, prelude::*};
use semel_store::{Database, Settings};
use semel_testkit::{
    faults::{Mode, Order, Process, Report, Server, Wire, worker::policy},
    work,
};
use sqlx::{Connection as _, PgConnection};

use crate::{
    kill_postgres::{check, until_they_work},
    support::Site,
};

/// Polls a server until it is true.
async fn until(server: &Server, question: &'static str) {
    let mut conn = PgConnection::connect(&server.url()).await.unwrap();
    let is_so = async {
        while !sqlx::query_scalar::<_, bool>(question).fetch_one(&mut conn).await.unwrap() {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(60), is_so).await.unwrap();
}

/// Concurrent runs of each mode per worker.
const TASKS: usize = 4;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn crash_of_a_primary_with_a_synchronous_standby_loses_nothing_acknowledged() {
    let primary = Server::start("");
    let standby = primary.standby();
    until(&primary, "SELECT count(*) = 1 FROM pg_stat_replication WHERE state = 'streaming'").await;
    primary.set("synchronous_standby_names = '*'");
    until(&primary, "SELECT count(*) = 1 FROM pg_stat_replication WHERE sync_state = 'sync'").await;

    let wire = Wire::to(&primary.url()).await;
    let site = Site::at(&wire.url(&primary.url())).await;
    let mut workers = vec![site.worker().await, site.worker().await];
    for (n, worker) in workers.iter_mut().enumerate() {
        for (mode, on_lost) in [(Mode::Atomic, OnLost::Rerun), (Mode::Leased, OnLost::Hold)] {
            let terms = Policy { on_lost, ..policy(Duration::from_secs(3)) }.to_terms();
            worker.order(&Order::Pump { prefix: format!("{mode:?}-{n}"), tasks: TASKS, terms, mode }).await;
        }
    }
    let mut reports = Vec::new();
    until_they_work(&mut workers, &mut reports).await;
    primary.kill();
    standby.promote();
    wire.lead_to(&standby.url());
    // Without any order: they continue by themselves.
    until_they_work(&mut workers, &mut reports).await;
    until_each_task_works(&mut workers, &mut reports).await;
    for worker in workers {
        reports.extend(worker.stop().await);
    }
    check(&site, &reports, 2 * TASKS).await;
    fences_only_grew(&reports);
}

/// Waits until each task has a fence of the next epoch: one may still wait for the lost server when the others are at
/// work again.
async fn until_each_task_works(workers: &mut [Process], reports: &mut Vec<Report>) {
    let moved = |reports: &Report| match reports {
        Report::Begun { key, fence } if fence >> 43 == 1 => Some(key.rsplit_once('-').unwrap().0.to_owned()),
        _ => None,
    };
    let mut at_work: BTreeSet<String> = reports.iter().filter_map(moved).collect();
    for (n, worker) in workers.iter_mut().enumerate() {
        let tasks = (0..TASKS).flat_map(|task| ["Atomic", "Leased"].map(|mode| format!("{mode}-{n}-{task}")));
        for task in tasks {
            while !at_work.contains(&task) {
                let one = worker.next().await.expect("a worker has ended");
                at_work.extend(moved(&one));
                reports.push(one);
            }
        }
    }
}

/// Each task of a worker runs one key after the other, so its fences must be in order, and end in the next epoch.
fn fences_only_grew(reports: &[Report]) {
    let mut last: BTreeMap<&str, i64> = BTreeMap::new();
    for reports in reports {
        if let Report::Begun { key, fence } = reports {
            let last = last.entry(key.rsplit_once('-').unwrap().0).or_default();
            assert!(*fence > *last, "{key}: {fence} after {last}");
            *last = *fence;
        }
    }
    assert_eq!(last.len(), 16);
    assert!(last.values().all(|fence| fence >> 43 == 1), "{last:?}");
}

async fn ledger(url: &str) -> Ledger<Database> {
    Ledger::new(Database::open(url, Settings::default()).await.unwrap(), Options::default()).unwrap()
}

async fn acquire(ledger: &Ledger<Database>, text: &str, policy: &Policy) -> Fence {
    // Until the previous lease has expired.
    let acquired = async {
        loop {
            if let Claim::Acquired(lease) = ledger.claim(work(text, policy.clone())).await.unwrap() {
                return lease.fence();
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(60), acquired).await.unwrap()
}

/// The tables before there was a stored epoch.
const OLDER: &str =
    "DROP TABLE semel_epoch; DROP FUNCTION semel_cluster; DELETE FROM semel_migrations WHERE version = 8";

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn crash_recovery_from_a_dump_of_a_promoted_server_keeps_fences_growing() {
    let (old, new) = (Server::start(""), Server::start(""));
    old.begin_a_timeline();
    let terms = policy(Duration::from_secs(1));
    let before = ledger(&old.url()).await;
    for text in ["held", "lapsed"] {
        acquire(&before, text, &terms).await;
    }
    let short = Policy { retention: Some(Duration::from_millis(1)), ..terms.clone() };
    let Claim::Acquired(lease) = before.claim(work("expired", short)).await.unwrap() else { panic!() };
    assert_ne!(lease.complete(Outcome::kept("x")).await.unwrap(), Settled::LeaseLost);
    let last = acquire(&before, "last", &terms).await;
    assert_eq!(last.0 >> 43, 1, "it was promoted once");
    before.stop(Duration::ZERO).await;

    for name in ["moved", "moved_before_the_upgrade"] {
        if name == "moved_before_the_upgrade" {
            let mut conn = PgConnection::connect(&old.url()).await.unwrap();
            sqlx::raw_sql(OLDER).execute(&mut conn).await.unwrap();
        }
        let url = old.dump_into(&new, name);
        let after = ledger(&url).await;
        let first = acquire(&after, "first", &terms).await;
        assert!(first > last, "{name}: {first} after {last}");
        let taken = acquire(&after, "held", &terms).await;
        assert!(taken > first, "{name}: {taken} after {first}");
        // The sweep finds expired operations, and expired leases: that lease may still have some of its second left.
        let (mut lapsed, mut expired) = (0, 0);
        let swept = async {
            while lapsed < 1 || expired < 1 {
                let swept = after.store().sweep(100).await.unwrap();
                assert!(swept.troubles.is_empty(), "{name}: {swept:?}");
                (lapsed, expired) = (lapsed + swept.lapsed, expired + swept.expired);
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        };
        tokio::time::timeout(Duration::from_secs(60), swept).await.unwrap();
        after.stop(Duration::ZERO).await;
    }
    let mut conn = PgConnection::connect(&new.url()).await.unwrap();
    let timeline = sqlx::query_scalar::<_, i32>("SELECT timeline_id FROM pg_control_checkpoint()");
    assert_eq!(timeline.fetch_one(&mut conn).await.unwrap(), 1);
}
