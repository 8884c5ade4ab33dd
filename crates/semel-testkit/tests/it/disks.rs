//! A store that cannot write is unavailable for a while, and never wrong.

use std::time::{Duration, Instant};

use semel::{State, prelude::*};
use semel_testkit::{
    Kind,
    faults::{Mode, Order, Process, Report, Server, effect_rows, worker::policy},
    key, scope,
};
use sqlx::{Connection as _, PgConnection};

use crate::support::{Site, how};

/// The end of an order while nothing can be written: a transient error, or a run that reports that nothing happened.
async fn is_unavailable(worker: &mut Process, key: &str) {
    let reports = worker.ask(&Order::run(key, &policy(Duration::from_secs(2)), Mode::Atomic)).await;
    assert!(matches!(reports[..], [Report::Broke { transient: true, .. }]), "{reports:?}");
}

async fn completes(worker: &mut Process, key: &str) {
    let reports = worker.ask(&Order::run(key, &policy(Duration::from_secs(20)), Mode::Atomic)).await;
    assert_eq!(how(&reports), "completed", "{reports:?}");
}

/// Waits until new sessions are read-only, or no longer: the others have been signalled by then.
async fn until_read_only_is(server: &Server, value: &str) {
    let begun = Instant::now();
    loop {
        let mut session = PgConnection::connect(&server.url()).await.unwrap();
        let sql = "SHOW default_transaction_read_only";
        let shown: String = sqlx::query_scalar(sql).fetch_one(&mut session).await.unwrap();
        if shown == value {
            return;
        }
        assert!(begun.elapsed() < Duration::from_secs(60), "it is still {shown}");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_full_disk_or_read_only_store_is_unavailable_not_wrong_on_sqlite() {
    let site = Site::new(Kind::Sqlite).await;
    let mut worker = site.worker().await;
    completes(&mut worker, "before").await;
    // No byte more: for the process, the disk is full.
    worker.limit_files(Some(0));
    is_unavailable(&mut worker, "claim").await;
    assert!(site.db.by_key(&scope(), &key("claim")).await.unwrap().is_none(), "nothing was claimed");
    worker.limit_files(None);
    completes(&mut worker, "claim").await;

    // Full in the middle of a run: it must not count as completed.
    let terms = policy(Duration::from_secs(4)).to_terms();
    worker.order(&Order::Run { key: "run".into(), terms, mode: Mode::Atomic, work: 300 }).await;
    assert!(matches!(worker.next().await, Some(Report::Begun { .. })));
    worker.limit_files(Some(0));
    let reports = worker.until_done().await;
    assert!(matches!(reports[..], [Report::Broke { transient: true, .. }]), "{reports:?}");
    assert_ne!(site.operation("run").await.state, State::Completed);
    worker.limit_files(None);
    // Its lease could not be released, and lasts a moment longer than the worker assumed.
    let begun = Instant::now();
    let reports = loop {
        let reports = worker.ask(&Order::run("run", &policy(Duration::from_secs(20)), Mode::Atomic)).await;
        if how(&reports) != "in_flight" {
            break reports;
        }
        assert!(begun.elapsed() < Duration::from_secs(20), "its lease does not end");
        tokio::time::sleep(Duration::from_millis(50)).await;
    };
    assert_eq!(how(&reports), "completed", "{reports:?}");
    worker.stop().await;
    let rows = effect_rows(&site.db).await;
    assert_eq!(rows.into_iter().collect::<Vec<_>>(), [("before".into(), 1), ("claim".into(), 1), ("run".into(), 1)]);
    site.check_counters().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_full_disk_or_read_only_store_is_unavailable_not_wrong_on_postgres() {
    let server = Server::start("");
    let site = Site::at(&server.url()).await;
    let mut worker = site.worker().await;
    completes(&mut worker, "before").await;
    // Like a server that has been demoted to a standby.
    server.set("default_transaction_read_only = on");
    until_read_only_is(&server, "on").await;
    is_unavailable(&mut worker, "claim").await;
    assert!(site.db.by_key(&scope(), &key("claim")).await.unwrap().is_none(), "nothing was claimed");
    server.set("default_transaction_read_only = off");
    until_read_only_is(&server, "off").await;
    completes(&mut worker, "claim").await;
    worker.stop().await;
    let rows = effect_rows(&site.db).await;
    assert_eq!(rows.into_iter().collect::<Vec<_>>(), [("before".into(), 1), ("claim".into(), 1)]);
    site.check_counters().await;
}
