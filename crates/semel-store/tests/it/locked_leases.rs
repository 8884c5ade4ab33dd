//! PostgreSQL: a peer that was cut off inside a transaction has locked one lease. Only that lease may suffer.
#![expect(clippy::unwrap_used, reason = "these are tests")]

use std::{sync::Arc, time::Duration};

use semel::{
    Claim, Context, Failure, Lease, Ledger, Options, Outcome, Policy, Ran, Retry, Settled, State, prelude::*,
    store::Decision,
};
use semel_store::{Database, Settings};
use semel_testkit::{Kind, Lab, key, scope, work};
use sqlx::{Connection as _, PgConnection};
use tokio::{
    sync::{Barrier, watch},
    task::JoinSet,
};

/// Short, so that a node that renews nothing for a while loses everything; long enough for a busy machine.
const LEASE: Duration = Duration::from_secs(6);

const RUNS: usize = 100;

fn policy(lease: Duration) -> Policy {
    Policy { lease, ..Policy::default() }
}

/// Another transaction that has locked the lease of a key, and stays open.
async fn lock_lease(lab: &Lab, text: &str) -> PgConnection {
    let mut peer = PgConnection::connect(&lab.url).await.unwrap();
    sqlx::raw_sql("BEGIN").execute(&mut peer).await.unwrap();
    let locked = sqlx::query(
        "SELECT l.operation FROM semel_leases AS l JOIN semel_operations AS o ON o.id = l.operation
         WHERE o.key = $1 FOR UPDATE OF l",
    );
    let locked = locked.bind(text).fetch_all(&mut peer).await.unwrap();
    assert_eq!(locked.len(), 1, "the lease of {text}");
    peer
}

async fn state(ledger: &Ledger<Database>, text: &str) -> State {
    ledger.store().by_key(&scope(), &key(text)).await.unwrap().unwrap().state
}

/// A hundred runs on one node, each under a short lease.
struct Runs {
    ended: JoinSet<(usize, semel::Result<Claim<Ran>>)>,
    begun: Arc<Barrier>,
    go_on: watch::Sender<bool>,
}

impl Runs {
    fn start(ledger: &Ledger<Database>) -> Self {
        let (begun, (go_on, wait)) = (Arc::new(Barrier::new(RUNS + 1)), watch::channel(false));
        let mut ended = JoinSet::new();
        for n in 0..RUNS {
            let (ledger, begun, wait) = (ledger.clone(), begun.clone(), wait.clone());
            ended.spawn(async move {
                let handler = move |_: Context<Database>| {
                    let (begun, mut wait) = (begun.clone(), wait.clone());
                    async move {
                        begun.wait().await;
                        let _ = wait.wait_for(|go_on| *go_on).await;
                        Ok(Outcome::kept(n.to_string()))
                    }
                };
                (n, ledger.run(work(&format!("k{n}"), policy(LEASE)), handler).await)
            });
        }
        Self { ended, begun, go_on }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_node_loses_a_locked_lease_and_no_other() {
    let lab = Lab::in_real_time(Kind::Postgres).await;
    let ledger = lab.ledger().await;
    let mut runs = Runs::start(&ledger);
    runs.begun.wait().await;
    let peer = lock_lease(&lab, "k0").await;
    // Two leases long: each of the others is renewed several times meanwhile, or lost.
    let Some(Ok((n, ended_with))) = runs.ended.join_next().await else { panic!("no run has ended") };
    assert!(matches!(ended_with, Ok(Claim::Acquired(Ran::LeaseLost))), "run {n} ended first, with {ended_with:?}");
    assert_eq!(n, 0, "an unlocked lease was lost");
    tokio::time::sleep(LEASE).await;
    runs.go_on.send_replace(true);
    while let Some(ended) = runs.ended.join_next().await {
        let (n, ended_with) = ended.unwrap();
        assert!(
            matches!(ended_with, Ok(Claim::Acquired(Ran::Completed(_)))),
            "run {n} of an unlocked lease: {ended_with:?}"
        );
        assert_eq!(state(&ledger, &format!("k{n}")).await, State::Completed);
    }
    // All of this while the peer still had its lock; and the run with the lost lease did not complete.
    assert_eq!(state(&ledger, "k0").await, State::Processing);
    peer.close().await.unwrap();
}

/// The only connection for the ledger's other writes waits for a row. A lease that is renewed meanwhile is kept.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn renewals_have_connections_of_their_own() {
    /// One and a half leases long, and within the ten seconds for which a statement waits for a lock.
    const LEASE: Duration = Duration::from_secs(4);
    let lab = Lab::in_real_time(Kind::Postgres).await;
    let settings = Settings { lane_connections: 1, ..lab.settings() };
    let ledger = Ledger::new(Database::open(&lab.url, settings).await.unwrap(), Options::default()).unwrap();
    let Claim::Acquired(locked) = ledger.claim(work("locked", policy(Duration::from_secs(60)))).await.unwrap() else {
        panic!("it is free")
    };
    let mut peer = lock_lease(&lab, "locked").await;
    let pid: i32 = sqlx::query_scalar("SELECT pg_backend_pid()").fetch_one(&mut peer).await.unwrap();
    let deciding = tokio::spawn({
        let (ledger, id) = (ledger.clone(), locked.operation().id);
        async move { ledger.decide(id, Decision::Purge, "ann", "because").await }
    });
    let waits = format!("SELECT count(*) FROM pg_stat_activity WHERE {pid} = ANY (pg_blocking_pids(pid))");
    while lab.number(&waits).await == 0 {
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    let handler = |_: Context<Database>| async {
        tokio::time::sleep(LEASE * 3 / 2).await;
        Ok(Outcome::kept(""))
    };
    let ended_with = ledger.run(work("k", policy(LEASE)), handler).await;
    assert!(matches!(ended_with, Ok(Claim::Acquired(Ran::Completed(_)))), "{ended_with:?}");
    peer.close().await.unwrap();
    // Whether it got the row in time does not matter here.
    let _ = deciding.await.unwrap();
}

async fn settle(lease: Lease<Database>, failing: bool) -> semel::Result<Settled> {
    match failing {
        true => lease.fail(Failure { error: "no".into(), retry: Retry::Never }).await,
        false => lease.complete(Outcome::kept("")).await,
    }
}

/// The outcome of the locked one waits, while its lease lasts, and is then stored. Nothing else waits with it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn only_the_settle_of_a_locked_lease_waits() {
    let lab = Lab::in_real_time(Kind::Postgres).await;
    let ledger = lab.ledger().await;
    let claim = async |text: &str| match ledger.claim(work(text, policy(Duration::from_secs(60)))).await.unwrap() {
        Claim::Acquired(lease) => lease,
        other => panic!("{}", other.word()),
    };
    for (round, failing) in [false, true].into_iter().enumerate() {
        let name = |n: usize| format!("{round}/{n}");
        let mut leases = Vec::new();
        for n in 0..20 {
            leases.push(claim(&name(n)).await);
        }
        let peer = lock_lease(&lab, &name(0)).await;
        let mut leases = leases.into_iter();
        let locked = leases.next().unwrap();
        let first = tokio::spawn(settle(locked, failing));
        // One after the other, so that each batch has the locked one in it or beside it.
        for (n, lease) in leases.enumerate() {
            let settled = tokio::time::timeout(Duration::from_secs(8), settle(lease, failing)).await;
            let settled = settled.unwrap_or_else(|_| panic!("settle {n} waited for a row that is not its own"));
            assert_eq!(settled.unwrap(), Settled::Yes { successor: false });
        }
        assert!(!first.is_finished(), "it cannot have been settled: its row is locked");
        peer.close().await.unwrap();
        assert_eq!(first.await.unwrap().unwrap(), Settled::Yes { successor: false });
        let ended = if failing { State::Failed } else { State::Completed };
        assert_eq!(state(&ledger, &name(0)).await, ended);
    }
}
