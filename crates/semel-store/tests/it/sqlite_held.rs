//! SQLite: a process outside of Semel holds the lock of the file.
#![expect(clippy::unwrap_used, reason = "these are tests")]

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use semel::{Claim, Error, Outcome, Policy, prelude::*};
use semel_store::{Database, FILE_HELD, FILE_LOST, Settings};
use semel_testkit::{Kind, Lab, request, work};
use sqlx::{ConnectOptions as _, SqliteConnection, sqlite::SqliteConnectOptions};
use tokio::task::JoinSet;

/// Far more than a caller waits, which is between five and six seconds, and far less than the waits of all of them in
/// turn.
const SOON: Duration = Duration::from_secs(15);

async fn prompt(lab: &Lab) -> SqliteConnection {
    let path = lab.url.strip_prefix("sqlite:").unwrap();
    SqliteConnectOptions::new().filename(path).connect().await.unwrap()
}

async fn timed(call: impl Future<Output = Result<(), Error>>) -> (Duration, Option<&'static str>) {
    let begun = Instant::now();
    let error = call.await.unwrap_err();
    (begun.elapsed(), error.reason())
}

#[tokio::test]
async fn many_callers_get_an_error_within_seconds_while_another_process_holds_the_file() {
    let lab = Arc::new(Lab::in_real_time(Kind::Sqlite).await);
    let ledger = lab.ledger().await;
    let Claim::Acquired(lease) = ledger.claim(work("running", Policy::default())).await.unwrap() else { panic!() };
    let mut other = prompt(&lab).await;
    sqlx::raw_sql("BEGIN IMMEDIATE").execute(&mut other).await.unwrap();
    let store = ledger.store();
    let mut calls = JoinSet::new();
    for n in 0..12 {
        let request = Arc::new(request(&format!("direct {n}"), b"k", Policy::default()));
        let (a, b, c) = (ledger.clone(), store.clone(), store.clone());
        calls.spawn(timed(async move { a.claim(work(&format!("k{n}"), Policy::default())).await.map(drop) }));
        calls.spawn(timed(async move { b.claim(vec![request]).await.map(drop) }));
        calls.spawn(timed(async move { c.begin(Duration::from_secs(5)).await.map(drop) }));
    }
    for (after, reason) in calls.join_all().await {
        assert_eq!(reason, Some(FILE_HELD));
        assert!(after < SOON, "answered after {after:?}");
    }
    // A later caller does not wait behind those that keep retrying.
    let (after, reason) = timed(async { ledger.claim(work("later", Policy::default())).await.map(drop) }).await;
    assert!(after < SOON && reason == Some(FILE_HELD), "{after:?}, {reason:?}");
    assert_eq!(store.check_writes().await.unwrap_err().reason(), Some(FILE_HELD));
    // A run's outcome is kept until the file is free.
    let settle = tokio::spawn(lease.complete(Outcome::kept("done")));
    // Its first attempt fails after a fraction of this.
    tokio::time::sleep(Duration::from_secs(1)).await;
    assert!(!settle.is_finished(), "the outcome was given up");
    sqlx::raw_sql("COMMIT").execute(&mut other).await.unwrap();
    assert!(matches!(ledger.claim(work("k1", Policy::default())).await.unwrap(), Claim::Acquired(_)));
    assert_ne!(settle.await.unwrap().unwrap(), semel::Settled::LeaseLost);
}

#[tokio::test]
async fn a_deleted_log_is_reported_at_once() {
    let lab = Lab::in_real_time(Kind::Sqlite).await;
    let ledger = lab.ledger().await;
    drop(ledger.claim(work("before", Policy::default())).await.unwrap());
    std::fs::remove_file(format!("{}-wal", lab.url.strip_prefix("sqlite:").unwrap())).unwrap();
    let error = ledger.claim(work("after", Policy::default())).await.map(drop).unwrap_err();
    assert_eq!(error.reason(), Some(FILE_LOST));
    // The engine retries an unavailable store for three seconds. Not this one: waiting does not free the file.
    assert!(!ledger.store().is_worth_asking_again(&error), "{error}");
}

#[tokio::test]
async fn opening_a_file_that_another_process_holds_is_an_error() {
    let lab = Lab::in_real_time(Kind::Sqlite).await;
    lab.open().await.close().await;
    let mut other = prompt(&lab).await;
    sqlx::raw_sql("BEGIN IMMEDIATE").execute(&mut other).await.unwrap();
    let error = Database::open(&lab.url, Settings::default()).await.err().unwrap();
    assert_eq!(error.reason(), Some(FILE_HELD), "{error}");
}
