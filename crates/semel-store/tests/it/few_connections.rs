//! PostgreSQL: a node that gets fewer connections than it could use continues with those.
#![expect(clippy::unwrap_used, reason = "these are tests")]

use std::{sync::Arc, time::Duration};

use semel::{Claim, Ledger, Options, Outcome, Policy, Ran, prelude::*, store::Commit};
use semel_store::{Database, Settings};
use semel_testkit::{Kind, Lab, request, work};
use tokio::{task::JoinSet, time::timeout};

/// Five for the node, and one for its listener.
const LIMIT: usize = 6;

/// A database whose role may have few connections.
struct Narrow {
    lab: Lab,
    url: String,
    role: String,
}

impl Narrow {
    async fn new() -> Self {
        let lab = Lab::in_real_time(Kind::Postgres).await;
        let schema = lab.texts("SELECT current_schema()::text").await.remove(0);
        let role = format!("{schema}_role");
        lab.execute(&format!("CREATE ROLE {role} LOGIN CONNECTION LIMIT {LIMIT}")).await.unwrap();
        lab.execute(&format!("GRANT ALL ON SCHEMA {schema} TO {role}")).await.unwrap();
        let (scheme, rest) = lab.url.split_once("://").unwrap();
        let url = format!("{scheme}://{role}@{}", rest.split_once('@').unwrap().1);
        Self { lab, url, role }
    }

    async fn open(&self, settings: Settings) -> Database {
        Database::open(&self.url, settings).await.unwrap()
    }

    async fn connections(&self) -> i64 {
        self.lab.number(&format!("SELECT count(*) FROM pg_stat_activity WHERE usename = '{}'", self.role)).await
    }

    async fn end(self) {
        // Its objects are dropped with it, and the schema with the lab.
        self.lab.execute(&format!("DROP OWNED BY {}", self.role)).await.unwrap();
        self.lab.execute(&format!("DROP ROLE {}", self.role)).await.unwrap();
    }
}

/// Claims, transactions and readers, concurrently.
async fn burst(ledger: &Ledger<Database>, name: &str) {
    let mut all = JoinSet::new();
    for n in 0..40 {
        let (ledger, text) = (ledger.clone(), format!("{name} {n}"));
        all.spawn(async move {
            match n % 3 {
                0 => {
                    let Claim::Acquired(lease) = ledger.claim(work(&text, Policy::default())).await.unwrap() else {
                        panic!("{text}")
                    };
                    assert_ne!(lease.complete(Outcome::kept("done")).await.unwrap(), semel::Settled::LeaseLost);
                }
                1 => {
                    let handler = |_, _| async {
                        tokio::time::sleep(Duration::from_millis(20)).await;
                        Ok(Outcome::kept("done"))
                    };
                    let ran = ledger.run_atomic(work(&text, Policy::default()), handler).await.unwrap();
                    assert!(matches!(ran, Claim::Acquired(Ran::Completed(_))), "{text}: {}", ran.word());
                }
                _ => drop(ledger.store().backlog().await.unwrap()),
            }
        });
    }
    timeout(Duration::from_secs(60), all.join_all()).await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_burst_on_few_connections_is_served_without_an_error() {
    let narrow = Narrow::new().await;
    let db = narrow.open(Settings::default()).await;
    // A connection that listens to the other nodes.
    let _wake = db.outbox_wake();
    let ledger = Ledger::new(db, Options::default()).unwrap();
    burst(&ledger, "first").await;
    burst(&ledger, "second").await;
    ledger.stop(Duration::from_secs(1)).await;
    drop(ledger);
    narrow.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn callers_leave_connections_to_the_ledger() {
    let narrow = Narrow::new().await;
    let db = narrow.open(Settings::default()).await;
    let mut begun = JoinSet::new();
    for _ in 0..12 {
        let db = db.clone();
        begun.spawn(async move { db.begin(Duration::from_secs(20)).await });
    }
    // Some get one and hold it, the others wait and get an error in the end.
    let begun = timeout(Duration::from_secs(60), begun.join_all()).await.unwrap();
    let open: Vec<_> = begun.into_iter().filter_map(Result::ok).collect();
    assert!((2..LIMIT).contains(&open.len()), "{} transactions are open", open.len());
    // While all of them are held, claims go on.
    let claim = db.claim(vec![Arc::new(request("k", b"k", Policy::default()))]);
    let answers = timeout(Duration::from_secs(60), claim).await.unwrap().unwrap();
    assert_eq!(answers.len(), 1);
    drop((open, db));
    narrow.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn connections_that_nothing_uses_are_closed() {
    let narrow = Narrow::new().await;
    let settings = Settings { idle_limit: Duration::from_millis(200), ..Settings::default() };
    let ledger = Ledger::new(narrow.open(settings).await, Options::default()).unwrap();
    burst(&ledger, "first").await;
    let closed = async {
        while narrow.connections().await > 1 {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    timeout(Duration::from_secs(30), closed).await.expect("idle connections are kept");
    burst(&ledger, "second").await;
    ledger.stop(Duration::from_secs(1)).await;
    drop(ledger);
    narrow.end().await;
}

/// A caller comes while another one has the only connection for a moment, and gets that one.
#[tokio::test]
async fn concurrent_callers_share_a_connection_that_is_soon_free() {
    let narrow = Narrow::new().await;
    let settings = Settings { idle_limit: Duration::from_secs(1), ..Settings::default() };
    let db = narrow.open(settings).await;
    // On a busy machine a commit may take longer than others wait for its connection. Then there are two for a moment,
    // and the test tries again once they are closed.
    let shared = async {
        loop {
            while narrow.connections().await > 0 {
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
            let tx = db.begin(Duration::from_secs(5)).await.unwrap();
            // In this order: the second caller asks for a connection before the first one ends.
            let (now, end) = tokio::join!(db.now(), db.commit(&tx));
            assert!(now.is_ok() && matches!(end, Commit::Done));
            if narrow.connections().await == 1 {
                break;
            }
        }
    };
    timeout(Duration::from_secs(30), shared).await.expect("each caller opens a connection of its own");
    drop(db);
    narrow.end().await;
}
