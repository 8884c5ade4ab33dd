//! Batches touch their rows in one order, whatever the order they were asked in.

use std::sync::Arc;

use semel::{
    Outcome, Policy, Store as _,
    machine::{Answer, Request, Write},
    store::{Applied, LeaseWrite},
};
use semel_store::{Database, Settings};
use semel_testkit::{
    faults::{Server, torture},
    request,
};
use sqlx::{Connection as _, PgConnection};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_nodes_with_opposite_batches_do_not_deadlock() {
    const BATCH: usize = 200;
    // Every wait of more than a moment is looked at, long before anybody gives up waiting.
    let server = Server::start("deadlock_timeout = '5ms'");
    let (a, b) = (open(&server.url()).await, open(&server.url()).await);
    let mut watch = PgConnection::connect(&server.url()).await.unwrap();
    for round in 0..if torture() { 400 } else { 20 } {
        let asked = || {
            let one = |n| Arc::new(request(&format!("{round}-{n:03}"), b"", Policy::default()));
            (0..BATCH).map(one).collect::<Vec<_>>()
        };
        let (ours, mut theirs) = (asked(), asked());
        theirs.reverse();
        let (first, second) = tokio::join!(spawn(&a, ours), spawn(&b, theirs));
        let (first, second) = (first.unwrap(), second.unwrap());
        let acquired =
            |answers: &[Applied]| answers.iter().filter(|applied| applied.answer == Answer::Acquired).count();
        assert_eq!(acquired(&first) + acquired(&second), BATCH, "each key has one owner");

        // Both send all completions, in opposite orders, as after a lost answer.
        let held = first.iter().chain(&second).filter(|applied| applied.answer == Answer::Acquired);
        let write = |applied: &Applied| {
            let op = applied.operation.as_ref().unwrap();
            LeaseWrite { id: op.id, fence: op.fence, write: Write::Complete(Outcome::kept("")) }
        };
        let ours: Vec<LeaseWrite> = held.map(write).collect();
        let mut theirs = ours.clone();
        theirs.reverse();
        let (first, second) = tokio::join!(a.write(ours), b.write(theirs));
        let settled = |applied: &Applied| applied.answer == Answer::Settled { successor: false };
        assert!(first.unwrap().iter().chain(&second.unwrap()).all(settled), "each is told that it is settled");
        // Whoever is told of a deadlock asks again and gets its answer; only the count tells.
        assert_eq!(deadlocks(&mut watch).await, 0, "round {round}");
    }
    // Sessions report their counts when they have been idle for a moment.
    tokio::time::sleep(std::time::Duration::from_millis(500)).await;
    assert_eq!(deadlocks(&mut watch).await, 0);
}

async fn open(url: &str) -> Database {
    Database::open(url, Settings::default()).await.unwrap()
}

/// In a task of its own, so that both are on their way at once.
async fn spawn(db: &Database, batch: Vec<Arc<Request>>) -> semel::Result<Vec<Applied>> {
    let db = db.clone();
    tokio::spawn(async move { db.claim(batch).await }).await.unwrap()
}

async fn deadlocks(conn: &mut PgConnection) -> i64 {
    let sql = "SELECT deadlocks FROM pg_stat_database WHERE datname = current_database()";
    sqlx::query_scalar(sql).fetch_one(conn).await.unwrap()
}
