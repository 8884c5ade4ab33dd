//! PostgreSQL: fences only grow, also after a change of the server.
//!
//! The tests simulate another server by changing the stored identity of the last one. Real ones, a promoted standby and
//! a restored dump, are in semel-testkit's `crash_failover.rs`.
#![expect(clippy::unwrap_used, reason = "these are tests")]

use std::time::Duration;

use semel::{Backoff, Claim, Fence, Ledger, OnLost, Policy, State, prelude::*};
use semel_store::Database;
use semel_testkit::{
    Kind, Lab,
    faults::{Fault, On, Proxy, Wire},
    key, scope, work,
};

/// A change of the server, as SQL.
const CHANGES: &[(&str, &str)] = &[
    ("a promoted standby", "UPDATE semel_epoch SET timeline = timeline - 1"),
    ("a timeline that begins again", "UPDATE semel_epoch SET timeline = timeline + 4"),
    ("another cluster", "UPDATE semel_epoch SET system = system + 1"),
    (
        "another cluster that begins its sequence again",
        "UPDATE semel_epoch SET system = system + 1; ALTER SEQUENCE semel_fence RESTART",
    ),
    ("rows that came without their sequence", "ALTER SEQUENCE semel_fence RESTART"),
    ("rows that came without their epoch", "DELETE FROM semel_epoch"),
    ("rows that came with neither", "DELETE FROM semel_epoch; ALTER SEQUENCE semel_fence RESTART"),
    ("an epoch that went back", "UPDATE semel_epoch SET epoch = 0; ALTER SEQUENCE semel_fence RESTART"),
];

fn policy() -> Policy {
    Policy { backoff: Backoff::NONE, on_lost: OnLost::Rerun, ..Policy::default() }
}

async fn acquire(ledger: &Ledger<Database>, text: &str) -> Fence {
    match ledger.claim(work(text, policy())).await.unwrap() {
        Claim::Acquired(lease) => lease.fence(),
        other => panic!("{text} is {}", other.word()),
    }
}

async fn run(lab: &Lab, sql: &str) {
    for sql in sql.split("; ") {
        lab.execute(sql).await.unwrap();
    }
}

async fn epoch(lab: &Lab) -> i64 {
    lab.number("SELECT epoch FROM semel_epoch").await
}

/// A ledger in epoch 3 with a leased operation, one whose id is older than its fence, and one that will expire.
async fn lived_in(lab: &Lab) -> Fence {
    let old = lab.ledger().await;
    acquire(&old, "taken over").await;
    lab.pass(policy().lease);
    run(lab, "UPDATE semel_epoch SET epoch = 3").await;
    // A ledger that was promoted twice before: in its third epoch it only took over.
    let taken = acquire(&old, "taken over").await;
    assert_eq!(taken.0 >> 43, 3, "a raised epoch holds for connections that are open");
    let short = Policy { retention: Some(Duration::from_secs(1)), ..policy() };
    let Claim::Acquired(lease) = old.claim(work("short", short)).await.unwrap() else { panic!() };
    assert_ne!(lease.complete(semel::Outcome::kept("x")).await.unwrap(), semel::Settled::LeaseLost);
    acquire(&old, "held").await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn fences_only_grow_after_every_change_of_the_server() {
    for (change, sql) in CHANGES {
        let lab = Lab::new(Kind::Postgres).await;
        let before = lived_in(&lab).await;
        run(&lab, sql).await;
        let node = lab.ledger().await;
        let first = acquire(&node, "first").await;
        assert!(first > before, "{change}: {first} after {before}");
        // Takeovers and the sweep meet earlier rows.
        lab.pass(policy().lease);
        let taken = acquire(&node, "taken over").await;
        assert!(taken > first, "{change}: {taken} after {first}");
        let swept = node.store().sweep(100).await.unwrap();
        assert_eq!((swept.lapsed, swept.expired), (2, 1), "{change}: {swept:?}");
        let held = node.store().by_key(&scope(), &key("held")).await.unwrap().unwrap();
        assert!(held.fence > taken && held.state == State::TimedOut, "{change}");
        // The next node finds nothing changed.
        let raised = epoch(&lab).await;
        drop(lab.open().await);
        assert_eq!(epoch(&lab).await, raised, "{change}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_fence_that_was_drawn_for_a_takeover_counts_where_there_is_no_epoch() {
    let lab = Lab::new(Kind::Postgres).await;
    let ledger = lab.ledger().await;
    acquire(&ledger, "k").await;
    run(&lab, "UPDATE semel_operations SET fence = (5::bigint << 43) + 7; DELETE FROM semel_epoch").await;
    drop(lab.open().await);
    assert_eq!(epoch(&lab).await, 6);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nodes_that_meet_another_server_together_raise_the_epoch_once() {
    let lab = Lab::new(Kind::Postgres).await;
    lived_in(&lab).await;
    run(&lab, "UPDATE semel_epoch SET timeline = timeline - 1").await;
    let mut nodes = tokio::task::JoinSet::new();
    for n in 0..6 {
        let (url, settings) = (lab.url.clone(), lab.settings());
        nodes.spawn(async move {
            let store = Database::open(&url, settings).await.unwrap();
            acquire(&Ledger::new(store, semel::Options::default()).unwrap(), &format!("k{n}")).await
        });
    }
    let fences = nodes.join_all().await;
    assert!(fences.iter().all(|fence| fence.0 >> 43 == 4), "{fences:?}");
    assert_eq!(epoch(&lab).await, 4);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_running_node_notices_a_failover_on_its_next_connection() {
    let lab = Lab::new(Kind::Postgres).await;
    let wire = Wire::to(&lab.url).await;
    let store = Database::open(&wire.url(&lab.url), lab.settings()).await.unwrap();
    let ledger = Ledger::new(store, semel::Options::default()).unwrap();
    let before = acquire(&ledger, "before").await;
    run(&lab, "UPDATE semel_epoch SET timeline = timeline - 1").await;
    // No connection of that node survives a failover. Statements in flight may still succeed.
    wire.cut();
    let mut after = before;
    for n in 0..100 {
        match ledger.claim(work(&format!("after {n}"), policy())).await {
            Ok(Claim::Acquired(lease)) => after = lease.fence(),
            Ok(other) => panic!("{}", other.word()),
            Err(error) => assert!(error.is_transient(), "{error}"),
        }
    }
    assert_eq!((before.0 >> 43, after.0 >> 43), (0, 1));
}

/// A server without a readable identity keeps the stored epoch.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn where_the_timeline_cannot_be_read_the_stored_epoch_counts() {
    let lab = Lab::new(Kind::Postgres).await;
    let before = lived_in(&lab).await;
    let made = lab.texts("SELECT pg_get_functiondef('semel_cluster'::regproc)").await.remove(0);
    assert!(made.contains("pg_control_system()"));
    lab.execute(&made.replace("pg_control_system()", "pg_control_that_is_forbidden()")).await.unwrap();
    assert_eq!(lab.number("SELECT count(timeline) FROM semel_cluster()").await, 0);
    let after = acquire(&lab.ledger().await, "after").await;
    assert!(after > before);
    assert_eq!(epoch(&lab).await, 3);
    assert_eq!(lab.number("SELECT count(timeline) FROM semel_epoch").await, 1, "what was known stays known");
}

/// A lost answer is an error, not an epoch.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_connection_lost_while_the_epoch_is_read_is_an_error() {
    let lab = Lab::new(Kind::Postgres).await;
    let before = lived_in(&lab).await;
    let proxy = Proxy::start(&lab.url).await;
    let settings = lab.settings();
    let store = Database::open(&proxy.url(&lab.url), settings).await.unwrap();
    proxy.plan(On::Query("SELECT pg_is_in_recovery() AS standby"), Fault::CutAnswer(40));
    let error = store.now().await.unwrap_err();
    assert!(error.is_transient(), "{error}");
    assert!(proxy.met().is_some());
    let ledger = Ledger::new(store, semel::Options::default()).unwrap();
    assert!(acquire(&ledger, "after").await > before);
    assert_eq!(epoch(&lab).await, 3);
}

/// Without the epoch a node cannot know whether its fences are new, and draws none.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_epoch_that_cannot_be_read_keeps_a_node_from_starting() {
    let lab = Lab::new(Kind::Postgres).await;
    lived_in(&lab).await;
    run(&lab, "ALTER FUNCTION semel_cluster() RENAME TO semel_cluster_gone").await;
    let opened = Database::open(&lab.url, lab.settings()).await;
    assert!(opened.is_err(), "it would not notice another server");
    run(&lab, "ALTER FUNCTION semel_cluster_gone() RENAME TO semel_cluster").await;
    assert!(Database::open(&lab.url, lab.settings()).await.is_ok());
}
