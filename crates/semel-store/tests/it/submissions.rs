//! PostgreSQL: submissions under lock timeouts, foreign locks and backends that are killed at any moment. A submission
//! changes a row from its first version to its second and completes its key, in one commit. If one could commit without
//! its key, every further attempt under that key would find the second version, and be refused for ever.
#![expect(clippy::unwrap_used, reason = "these are tests")]

use std::{
    collections::BTreeMap,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    time::Duration,
};

use semel::{Backoff, Claim, Context, Ledger, Outcome, Policy, Ran, State, Unfinished, prelude::*};
use semel_store::{Conn, Database, Tx};
use semel_testkit::{Kind, Lab, key, scope, work};
use sqlx::{AssertSqlSafe, Connection as _, PgConnection};
use tokio::task::JoinSet;

const KEYS: usize = 120;

fn policy() -> Policy {
    Policy { lease: Duration::from_secs(30), backoff: Backoff::NONE, ..Policy::default() }
}

/// Short time-outs, as a role or a database may set them.
const SHORT: &str = "SET LOCAL lock_timeout = '15ms'; SET LOCAL statement_timeout = '500ms';
                     SET LOCAL idle_in_transaction_session_timeout = '20ms'";
/// Those of the end, without interference.
const LONG: &str = "SET LOCAL lock_timeout = '20s'";

/// One attempt: the row goes from version 1 to version 2, unless it has done so already.
async fn submit(tx: Tx, n: i32, limits: &'static str) -> Result<Outcome, Unfinished> {
    let failed = |error: sqlx::Error| Unfinished::failed(error.to_string());
    let mut held = tx.connection().await.map_err(|error| Unfinished::failed(error.to_string()))?;
    let Ok(Conn::Postgres(conn)) = held.get() else { return Err(Unfinished::failed("the transaction is over")) };
    sqlx::raw_sql(limits).execute(&mut *conn).await.map_err(failed)?;
    let done = sqlx::query("UPDATE proposals SET version = 2 WHERE id = $1 AND version = 1");
    let changed = done.bind(n).execute(&mut *conn).await.map_err(failed)?.rows_affected();
    if n % 3 == 0 {
        // The server ends transactions that are idle for longer than 20 ms: before, at and after the completion that
        // follows.
        let pause = Duration::from_millis(fastrand::u64(0..40));
        tokio::time::sleep(pause).await;
    }
    match changed {
        1 => Ok(Outcome::kept(n.to_string())),
        _ => Err(Unfinished::failed("out of date")),
    }
}

/// Submits a key until it has its outcome; whether it was refused as out of date.
async fn bring(ledger: &Ledger<Database>, n: i32, limits: &'static str, troubles: &AtomicUsize) -> bool {
    for _ in 0..200 {
        let handler = move |_: Context<Database>, tx: Tx| submit(tx, n, limits);
        match ledger.run_atomic(work(&format!("k{n}"), policy()), handler).await {
            Ok(Claim::Acquired(Ran::Completed(_)) | Claim::Replay(_)) => return false,
            Ok(Claim::Acquired(Ran::Failed(failure))) if failure.error.contains("out of date") => return true,
            _ => troubles.fetch_add(1, Ordering::Relaxed),
        };
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    false
}

/// Locks the rows of a submission for a moment, one table after the other.
async fn lock_rows(url: String, stop: Arc<AtomicBool>) {
    let mut peer = PgConnection::connect(&url).await.unwrap();
    let tables = [("proposals", "id"), ("semel_leases", "operation"), ("semel_operations", "id")];
    for (table, column) in tables.iter().cycle() {
        if stop.load(Ordering::Relaxed) {
            return;
        }
        let lock = format!(
            "BEGIN; SELECT 1 FROM {table} WHERE {column} IN (SELECT {column} FROM {table} ORDER BY random() LIMIT 20)
             FOR UPDATE SKIP LOCKED"
        );
        sqlx::raw_sql(AssertSqlSafe(lock)).execute(&mut peer).await.unwrap();
        tokio::time::sleep(Duration::from_millis(40)).await;
        sqlx::raw_sql("ROLLBACK").execute(&mut peer).await.unwrap();
    }
}

/// Ends backends in the middle of a submission; returns how many.
async fn end_backends(url: String, stop: Arc<AtomicBool>) -> i64 {
    let mut peer = PgConnection::connect(&url).await.unwrap();
    let mut ended = 0;
    while !stop.load(Ordering::Relaxed) {
        let one = "SELECT count(pg_terminate_backend(pid)) FROM (SELECT pid FROM pg_locks
                   WHERE relation = 'proposals'::regclass AND mode = 'RowExclusiveLock' AND pid <> pg_backend_pid()
                   ORDER BY random() LIMIT 1) AS one";
        ended += sqlx::query_scalar::<_, i64>(one).fetch_one(&mut peer).await.unwrap();
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    ended
}

/// Which keys have completed, and which rows have their effect.
async fn completed_and_submitted(lab: &Lab, ledger: &Ledger<Database>) -> BTreeMap<usize, (bool, bool)> {
    let versions = lab.texts("SELECT version::text FROM proposals ORDER BY id").await;
    let mut all = BTreeMap::new();
    for (n, version) in versions.into_iter().enumerate() {
        let op = ledger.store().by_key(&scope(), &key(&format!("k{n}"))).await.unwrap();
        all.insert(n, (op.is_some_and(|op| op.state == State::Completed), version == "2"));
    }
    all
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_submission_commits_without_its_key_under_timeouts_and_lost_connections() {
    let lab = Lab::in_real_time(Kind::Postgres).await;
    let (a, b) = (lab.ledger_of("a").await, lab.ledger_of("b").await);
    lab.execute("CREATE TABLE proposals (id INT PRIMARY KEY, version INT NOT NULL)").await.unwrap();
    lab.execute(&format!("INSERT INTO proposals SELECT n, 1 FROM generate_series(0, {KEYS} - 1) AS n")).await.unwrap();
    let (stop, troubles) = (Arc::<AtomicBool>::default(), Arc::<AtomicUsize>::default());
    let locks = [1, 2].map(|_| tokio::spawn(lock_rows(lab.url.clone(), stop.clone())));
    let ends = tokio::spawn(end_backends(lab.url.clone(), stop.clone()));
    // Each key is sent to both nodes, as by a client that retries elsewhere.
    let mut brought = JoinSet::new();
    for n in 0..KEYS {
        for ledger in [&a, &b] {
            let (ledger, troubles) = (ledger.clone(), troubles.clone());
            brought.spawn(async move { (n, bring(&ledger, i32::try_from(n).unwrap(), SHORT, &troubles).await) });
        }
    }
    let results = brought.join_all().await;
    stop.store(true, Ordering::Relaxed);
    for lock in locks {
        lock.await.unwrap();
    }
    let ended = ends.await.unwrap();
    println!("{ended} backends ended, {} attempts failed", troubles.load(Ordering::Relaxed));
    assert!(ended > 0 && troubles.load(Ordering::Relaxed) > 0, "nothing happened to them");
    for (n, out_of_date) in results {
        assert!(!out_of_date, "submission {n} found its own effect");
    }
    for (n, (completed, submitted)) in completed_and_submitted(&lab, &a).await {
        assert_eq!(completed, submitted, "submission {n}: its key and its effect do not agree");
    }
    // A submission without an effect can be repeated.
    let last = JoinSet::from_iter((0..KEYS).map(|n| {
        let (ledger, troubles) = (b.clone(), troubles.clone());
        async move { bring(&ledger, i32::try_from(n).unwrap(), LONG, &troubles).await }
    }));
    assert!(last.join_all().await.into_iter().all(|out_of_date| !out_of_date));
    let all = completed_and_submitted(&lab, &b).await;
    assert!(all.values().all(|ends| *ends == (true, true)), "{all:?}");
}
