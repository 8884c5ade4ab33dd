//! PostgreSQL: another transaction has locked a row that follows an operation. Only that operation waits.
#![expect(clippy::unwrap_used, reason = "these are tests")]

use std::time::{Duration, Instant};

use semel::{
    Backoff, Claim, Failure, Fingerprint, Lease, Ledger, Options, Outcome, Policy, Retry, Settled, State, Work,
    prelude::*,
    store::{Limits, Want},
};
use semel_store::{Database, Settings};
use semel_testkit::{
    Kind, Lab,
    faults::{FOLLOWERS, disagreements, make_followers, scenario::queue},
    key,
};
use sqlx::{Connection as _, PgConnection};

/// The time limit of the others: far less than a statement waits for a lock.
const SOON: Duration = Duration::from_secs(4);

const LEASE: Duration = Duration::from_secs(30);

async fn node(lab: &Lab) -> Ledger<Database> {
    let settings = Settings { projections: vec![FOLLOWERS], ..lab.settings() };
    let ledger = Ledger::new(Database::open(&lab.url, settings).await.unwrap(), Options::default()).unwrap();
    make_followers(ledger.store()).await;
    ledger
}

fn job(n: usize) -> Work {
    let name = n.to_string();
    let policy = Policy { lease: LEASE, backoff: Backoff::NONE, ..Policy::default() };
    Work::new(queue(), key(&name), Fingerprint::of_bytes(name.as_bytes())).policy(policy)
}

async fn claim(ledger: &Ledger<Database>, n: usize) -> Lease<Database> {
    match ledger.claim(job(n)).await.unwrap() {
        Claim::Acquired(lease) => lease,
        other => panic!("{}", other.word()),
    }
}

/// This many operations, each of which has failed once and so has a row.
async fn with_rows(ledger: &Ledger<Database>, all: usize) {
    for n in 0..all {
        let failure = Failure { error: "no".into(), retry: Retry::After(Duration::ZERO) };
        assert_eq!(claim(ledger, n).await.fail(failure).await.unwrap(), Settled::Yes { successor: false });
    }
}

/// Another transaction that has locked the row of operation 0.
async fn lock_row(lab: &Lab) -> PgConnection {
    let mut peer = PgConnection::connect(&lab.url).await.unwrap();
    sqlx::raw_sql("BEGIN; SELECT id FROM followers WHERE key = '0' FOR UPDATE").execute(&mut peer).await.unwrap();
    peer
}

async fn state(ledger: &Ledger<Database>, n: usize) -> State {
    ledger.store().by_key(&queue(), &key(&n.to_string())).await.unwrap().unwrap().state
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn only_the_settle_of_a_locked_row_waits() {
    const ALL: usize = 40;
    let lab = Lab::in_real_time(Kind::Postgres).await;
    let ledger = node(&lab).await;
    with_rows(&ledger, ALL).await;
    let mut leases = Vec::new();
    for n in 0..ALL {
        leases.push(claim(&ledger, n).await);
    }
    let peer = lock_row(&lab).await;
    let mut leases = leases.into_iter();
    let locked = leases.next().unwrap();
    let first = tokio::spawn(async { locked.complete(Outcome::kept("")).await });
    // Half of them in one batch with the locked one, and the others one after the other.
    let together: Vec<_> = leases
        .by_ref()
        .take(ALL / 2)
        .map(|lease| tokio::spawn(async { lease.complete(Outcome::kept("")).await }))
        .collect();
    for settled in together {
        let settled = tokio::time::timeout(SOON, settled).await.expect("it waited for a row that is not its own");
        assert_eq!(settled.unwrap().unwrap(), Settled::Yes { successor: false });
    }
    for lease in leases {
        let settled = tokio::time::timeout(SOON, lease.complete(Outcome::kept(""))).await;
        assert_eq!(settled.expect("it waited").unwrap(), Settled::Yes { successor: false });
    }
    assert!(!first.is_finished() && state(&ledger, 0).await == State::Processing);
    peer.close().await.unwrap();
    assert_eq!(first.await.unwrap().unwrap(), Settled::Yes { successor: false });
    assert_eq!(state(&ledger, 0).await, State::Completed);
    assert!(disagreements(ledger.store()).await.is_empty());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_locked_row_stalls_no_sweep_and_no_takeover() {
    const ALL: usize = 20;
    let lab = Lab::new(Kind::Postgres).await;
    let ledger = node(&lab).await;
    with_rows(&ledger, ALL).await;
    for n in 0..ALL {
        drop(claim(&ledger, n).await);
    }
    let peer = lock_row(&lab).await;
    lab.pass(LEASE + Duration::from_secs(1));
    // Takeovers of the first half in one batch; the sweep does the rest.
    let begun = Instant::now();
    let asked: Vec<_> = (0..ALL / 2)
        .map(|n| {
            let ledger = ledger.clone();
            tokio::spawn(async move { ledger.claim(job(n)).await })
        })
        .collect();
    let mut taken = Vec::new();
    for (n, asked) in asked.into_iter().enumerate().skip(1) {
        match tokio::time::timeout(SOON, asked).await.expect("it waited").unwrap().unwrap() {
            Claim::Acquired(lease) => taken.push(lease),
            other => panic!("{n}: {}", other.word()),
        }
    }
    let swept = tokio::time::timeout(SOON, ledger.sweep()).await.expect("the sweep waited").unwrap();
    assert_eq!(usize::try_from(swept.lapsed), Ok(ALL / 2));
    println!("all but one after {:?}", begun.elapsed());
    assert_eq!((state(&ledger, 0).await, state(&ledger, ALL - 1).await), (State::Processing, State::TimedOut));
    peer.close().await.unwrap();
    ledger.sweep().await.unwrap();
    assert!(disagreements(ledger.store()).await.is_empty());
    drop(taken);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_locked_row_stalls_no_worker() {
    let lab = Lab::new(Kind::Postgres).await;
    let ledger = node(&lab).await;
    with_rows(&ledger, 3).await;
    ledger.enqueue(job(7)).await.unwrap();
    let peer = lock_row(&lab).await;
    // By this policy the three have no attempts left.
    let policy = Policy { max_attempts: Some(1), ..Policy::default() };
    let want = Want { scope: queue(), most: 9, since: None, policy, lease: None, limits: Limits::default() };
    let taken = tokio::time::timeout(SOON, ledger.take(vec![want])).await.expect("it waited").unwrap();
    assert_eq!(taken.iter().map(|(_, lease)| lease.operation().key.as_str()).collect::<Vec<_>>(), ["7"]);
    let due = "SELECT key FROM followers WHERE due IS NOT NULL";
    assert_eq!(lab.texts(due).await, ["0"], "the others are exhausted, and their rows show it");
    peer.close().await.unwrap();
}
