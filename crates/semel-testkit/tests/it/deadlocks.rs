//! Batches lock their rows in one order, whatever the order of their items.

use std::{sync::Arc, time::Duration};

use semel::{
    Outcome, Policy,
    machine::{Answer, Request, Write},
    prelude::*,
    store::{Applied, LeaseWrite},
};
use semel_store::{Database, Settings};
use semel_testkit::{
    conformance::batches::until_free,
    faults::{Server, torture},
    request,
};
use sqlx::{Connection as _, PgConnection};

const BATCH: usize = 200;

/// Two nodes that do the same at the same time, in opposite orders.
struct Nodes {
    a: Database,
    b: Database,
    watch: PgConnection,
    // Dropped last.
    _server: Server,
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_nodes_with_opposite_batches_do_not_deadlock() {
    // Deadlocks are looked for after a moment, long before a statement stops waiting.
    let server = Server::start("deadlock_timeout = '5ms'");
    let open = async || Database::open(&server.url(), Settings::default()).await.unwrap();
    let watch = PgConnection::connect(&server.url()).await.unwrap();
    let mut nodes = Nodes { a: open().await, b: open().await, watch, _server: server };
    for round in 0..if torture() { 300 } else { 12 } {
        let held = nodes.claim(round).await;
        nodes.write(&held, &Write::Release { delay: Duration::ZERO, why: None }).await;
        // Once more: now both nodes know the keys, and the rows are gone.
        let held = nodes.claim(round).await;
        nodes.write(&held, &Write::Checkpoint("here".into())).await;
        nodes.write(&held, &Write::Complete(Outcome::kept(""))).await;
    }
    // Sessions report their counts after a moment of idleness.
    tokio::time::sleep(Duration::from_millis(500)).await;
    nodes.check("all rounds").await;
}

impl Nodes {
    /// Both claim the same keys. Returns what either of them got.
    async fn claim(&mut self, round: usize) -> Vec<Applied> {
        let batch = || {
            let one = |n| Arc::new(request(&format!("{round}-{n:03}"), b"", Policy::default()));
            (0..BATCH).map(one).collect::<Vec<Arc<Request>>>()
        };
        let (ours, mut theirs) = (batch(), batch());
        theirs.reverse();
        let (a, b) = (self.a.clone(), self.b.clone());
        let first = tokio::spawn(async move { until_free(ours, |batch| a.claim(batch)).await });
        let second = tokio::spawn(async move { until_free(theirs, |batch| b.claim(batch)).await });
        let mut answers = first.await.unwrap();
        answers.extend(second.await.unwrap());
        answers.retain(|applied| applied.answer == Answer::Acquired);
        assert_eq!(answers.len(), BATCH, "each key has one owner");
        self.check("claims").await;
        answers
    }

    /// Both send the same writes, as after a lost answer.
    async fn write(&mut self, held: &[Applied], write: &Write) {
        let one = |applied: &Applied| {
            let op = applied.operation.as_ref().unwrap();
            LeaseWrite { id: op.id, fence: op.fence, write: write.clone() }
        };
        let ours: Vec<LeaseWrite> = held.iter().map(one).collect();
        let mut theirs = ours.clone();
        theirs.reverse();
        let (a, b) = (self.a.clone(), self.b.clone());
        let first = tokio::spawn(async move { until_free(ours, |batch| a.write(batch)).await });
        let second = tokio::spawn(async move { until_free(theirs, |batch| b.write(batch)).await });
        let answers = [first.await.unwrap(), second.await.unwrap()].concat();
        let made = |applied: &Applied| matches!(applied.answer, Answer::Settled { .. } | Answer::Written);
        assert!(answers.iter().all(made), "each is answered as made");
        self.check(&format!("{write:?}")).await;
    }

    /// A deadlock is retried and then answered; only the count shows it.
    async fn check(&mut self, what: &str) {
        let sql = "SELECT deadlocks FROM pg_stat_database WHERE datname = current_database()";
        let deadlocks: i64 = sqlx::query_scalar(sql).fetch_one(&mut self.watch).await.unwrap();
        assert_eq!(deadlocks, 0, "{what}");
    }
}
