//! PostgreSQL: events between two statements of one claim.
//!
//! A lock on a table that only the second statement reads holds a claim in between, while the test makes the changes of
//! another node.
#![expect(clippy::unwrap_used, reason = "these are tests")]

use std::{sync::Arc, time::Duration};

use semel::{
    Backoff, Claim, Error, Failure, Fence, Ledger, OnMismatch, Outcome, Policy, Retry,
    journal::{Repeat, Sighting},
    machine::{Answer, Write},
    prelude::*,
    store::{Commit, Decision, LeaseWrite, SeenAgain},
};
use semel_store::Database;
use semel_testkit::{Kind, Lab, key, request, scope, work, work_with};
use sqlx::{Connection as _, PgConnection};
use tokio::task::JoinSet;

fn policy() -> Policy {
    Policy { backoff: Backoff::NONE, ..Policy::default() }
}

/// A failed operation, and a claim on it that has read it. Then another node takes over and fails, and the claim
/// continues. Returns its fence, and that of the other.
async fn overtaken<F: Future<Output = Fence>>(
    lab: &Lab,
    claim: impl FnOnce(semel_store::Database) -> F,
) -> (Fence, i64) {
    let ledger = lab.ledger().await;
    let Claim::Acquired(lease) = ledger.claim(work("k", policy())).await.unwrap() else { panic!() };
    let first = lease.fence();
    let failed = lease.fail(Failure { error: "no".into(), retry: Retry::Backoff }).await.unwrap();
    assert_ne!(failed, semel::Settled::LeaseLost);

    let mut holder = PgConnection::connect(&lab.url).await.unwrap();
    sqlx::raw_sql("BEGIN; LOCK TABLE semel_successors IN ACCESS EXCLUSIVE MODE").execute(&mut holder).await.unwrap();
    let claim = claim(lab.open().await);
    let other = async {
        let waiting = "SELECT count(*) FROM pg_locks WHERE NOT granted AND relation = 'semel_successors'::regclass";
        while sqlx::query_scalar::<_, i64>(waiting).fetch_one(&mut holder).await.unwrap() == 0 {
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
        let later = "UPDATE semel_operations SET fence = fence + 50;
                     SELECT setval('semel_fence', nextval('semel_fence') + 100);
                     COMMIT";
        sqlx::raw_sql(later).execute(&mut holder).await.unwrap();
    };
    let (fence, ()) =
        tokio::time::timeout(Duration::from_secs(20), async { tokio::join!(claim, other) }).await.unwrap();
    (fence, first.0 + 50)
}

/// A target that refuses older fences would otherwise refuse the present owner.
#[tokio::test]
async fn a_claim_that_is_overtaken_gets_a_higher_fence_than_the_one_before() {
    let lab = Lab::new(Kind::Postgres).await;
    let claim = async |store: semel_store::Database| {
        let applied = store.claim(vec![Arc::new(request("k", b"k", policy()))]).await.unwrap().remove(0);
        assert_eq!(applied.answer, Answer::Acquired);
        applied.operation.unwrap().fence
    };
    let (fence, before) = overtaken(&lab, claim).await;
    assert!(fence.0 > before, "{fence} after {before}");
}

/// The same for a claim in the transaction of its effect.
#[tokio::test]
async fn an_inline_claim_that_is_overtaken_gets_a_higher_fence_than_the_one_before() {
    let lab = Lab::new(Kind::Postgres).await;
    let claim = async |store: semel_store::Database| {
        let tx = store.begin(Duration::from_secs(5)).await.unwrap();
        let applied = store.claim_in(&tx, Arc::new(request("k", b"k", policy()))).await.unwrap();
        assert_eq!(applied.answer, Answer::Acquired);
        assert!(matches!(store.commit(&tx).await, semel::store::Commit::Done));
        applied.operation.unwrap().fence
    };
    let (fence, before) = overtaken(&lab, claim).await;
    assert!(fence.0 > before, "{fence} after {before}");
}

/// Newer data cannot be stored while another transaction has locked the row. A claim with newer data gets an error and
/// must be sent again; a claim with the stored data is in flight.
#[tokio::test]
async fn a_locked_row_is_in_flight_only_for_claims_with_the_stored_payload() {
    let lab = Lab::new(Kind::Postgres).await;
    let ledger = lab.ledger().await;
    let policy = Policy { on_mismatch: OnMismatch::SupersedeIfNewer, ..policy() };
    let data = |n: i64| work_with("k", &format!("v{n}"), policy.clone()).order(n).payload(format!("v{n}"));
    let Claim::Acquired(lease) = ledger.claim(data(1)).await.unwrap() else { panic!() };
    let Claim::InFlight(waits) = ledger.claim(data(2)).await.unwrap() else { panic!() };
    assert!(waits.kept);
    let mut holder = PgConnection::connect(&lab.url).await.unwrap();
    sqlx::raw_sql("BEGIN; SELECT id FROM semel_operations FOR UPDATE").execute(&mut holder).await.unwrap();

    let newest = ledger.claim(data(3)).await;
    assert!(matches!(newest, Err(Error::Unavailable(_))), "{:?}", newest.map(|claim| claim.word()));
    // Its lease has expired, so a claim would take it over.
    lab.pass(policy.lease);
    for (n, kept) in [(1, false), (2, true)] {
        let Claim::InFlight(there) = ledger.claim(data(n)).await.unwrap() else { panic!("{n}") };
        assert_eq!(there.kept, kept, "{n}");
    }
    sqlx::raw_sql("ROLLBACK").execute(&mut holder).await.unwrap();
    let Claim::Acquired(newest) = ledger.claim(data(3)).await.unwrap() else { panic!() };
    assert_eq!(newest.operation().payload.as_deref(), Some(&b"v3"[..]));
    drop(lease);
}

/// A claim that met a locked row is looked up in the background, and withdrawn if it was made. This concerns this claim
/// only, not the next one of the same caller.
#[tokio::test]
async fn a_waiter_that_met_a_locked_row_keeps_its_later_lease() {
    /// Longer than the pauses between looks in the background.
    const LOOKED: Duration = Duration::from_millis(2500);
    let lab = Lab::new(Kind::Postgres).await;
    let ledger = lab.ledger().await;
    let Claim::Acquired(lease) = ledger.claim(work("k", policy())).await.unwrap() else { panic!() };
    let failed = lease.fail(Failure { error: "no".into(), retry: Retry::Backoff }).await.unwrap();
    assert_ne!(failed, semel::Settled::LeaseLost);
    let mut holder = PgConnection::connect(&lab.url).await.unwrap();
    sqlx::raw_sql("BEGIN; SELECT id FROM semel_operations FOR UPDATE").execute(&mut holder).await.unwrap();
    let (sees, seen) = tokio::sync::oneshot::channel();
    let waiting = tokio::spawn({
        let ledger = ledger.clone();
        let worth = move |_: &semel::Operation| sees.send(()).is_ok();
        async move { ledger.claim_or_wait_if(work("k", policy()), Duration::from_secs(60), worth).await.unwrap() }
    });
    seen.await.expect("its answer is in flight, and it waits");
    sqlx::raw_sql("ROLLBACK").execute(&mut holder).await.unwrap();
    let Claim::Acquired(lease) = waiting.await.unwrap() else { panic!() };
    tokio::time::sleep(LOOKED).await;
    assert_ne!(lease.complete(semel::Outcome::kept("done")).await.unwrap(), semel::Settled::LeaseLost);
}

/// Claims keys concurrently; returns those that were not acquired.
async fn claim_all(ledger: &Ledger<Database>, names: impl Iterator<Item = String>) -> Vec<String> {
    let mut claims = JoinSet::new();
    for name in names {
        let ledger = ledger.clone();
        claims.spawn(async move {
            let claim = ledger.claim(work(&name, policy())).await;
            let got = claim.as_ref().map(Claim::word);
            (!matches!(got, Ok("acquired"))).then(|| format!("{name}: {got:?}"))
        });
    }
    claims.join_all().await.into_iter().flatten().collect()
}

/// An open transaction has inserted a key: a frozen peer, or a slow inline claim. Only claims of that key wait, and the
/// others wait for them once, for a moment.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_uncommitted_insert_blocks_no_other_key() {
    let lab = Lab::new(Kind::Postgres).await;
    let (ledger, other) = (lab.ledger().await, lab.open().await);
    let tx = other.begin(Duration::from_secs(300)).await.unwrap();
    let held = || Arc::new(request("k 50", b"k 50", policy()));
    assert_eq!(other.claim_in(&tx, held()).await.unwrap().answer, Answer::Acquired);

    // In one batch of the store: a hundred others, and that one three times.
    let batch = |round: usize| {
        let mut batch: Vec<_> = (0..100)
            .map(|n| {
                Arc::new(request(&if n == 50 { "k 50".into() } else { format!("k {n:02} {round}") }, b"", policy()))
            })
            .collect();
        batch.extend([held(), held()]);
        batch
    };
    for round in 0..2 {
        let applied = ledger.store().claim(batch(round)).await.unwrap();
        for (n, applied) in applied.into_iter().enumerate() {
            let expected = if n == 50 || n > 99 { Answer::Busy } else { Answer::Acquired };
            assert_eq!(applied.answer, expected, "{n} in round {round}");
        }
    }

    // Through the ledger: claims of that key are retried, and all others go on.
    let mut slow = 0;
    for round in 0..40 {
        let begun = std::time::Instant::now();
        let asks = tokio::spawn({
            let ledger = ledger.clone();
            async move { ledger.claim(work("k 50", policy())).await.map(|claim| claim.word()) }
        });
        assert_eq!(claim_all(&ledger, (0..5).map(|n| format!("{round} {n}"))).await, [""; 0]);
        slow += usize::from(begun.elapsed() >= Duration::from_millis(250));
        asks.abort();
    }
    // A round that waits for the key takes a quarter of a second at least. A disk that stalls makes some so slow, too.
    assert!(slow < 20, "{slow} of 40 rounds waited");

    let waits = ledger.claim(work("k 50", policy())).await;
    assert!(matches!(waits, Err(Error::Unavailable(_))), "{:?}", waits.map(|claim| claim.word()));
    assert!(matches!(other.commit(&tx).await, Commit::Done));
    assert_eq!(ledger.claim(work("k 50", policy())).await.unwrap().word(), "replay");
}

/// Lets commits that have changed a row wait while `holder` holds an advisory lock, like a disk that stalls. Advisory
/// locks are server-wide, so each test has its own number.
pub(crate) async fn stall_commits(holder: &mut PgConnection, lock: i64, change: &str, row: &str) {
    let sql = format!(
        "CREATE FUNCTION stall() RETURNS trigger LANGUAGE plpgsql AS
         $$ BEGIN
              PERFORM pg_advisory_xact_lock(-{lock});
              WHILE NOT pg_try_advisory_xact_lock_shared({lock}) LOOP PERFORM pg_sleep(0.01); END LOOP;
              RETURN NULL;
            END $$;
         CREATE CONSTRAINT TRIGGER stall AFTER {change} DEFERRABLE INITIALLY DEFERRED
         FOR EACH ROW WHEN ({row}) EXECUTE FUNCTION stall();
         SELECT pg_advisory_lock({lock})"
    );
    sqlx::raw_sql(sqlx::AssertSqlSafe(sql)).execute(holder).await.unwrap();
}

/// Waits until a commit stalls.
pub(crate) async fn stalls(holder: &mut PgConnection, lock: i64) {
    // The two halves of the number -lock.
    let stalled = "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND granted AND objsubid = 1
                   AND classid = 4294967295 AND objid = 4294967296 - $1";
    while sqlx::query_scalar::<_, i64>(stalled).bind(lock).fetch_one(&mut *holder).await.unwrap() == 0 {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

pub(crate) async fn go_on(holder: &mut PgConnection, lock: i64) {
    sqlx::query("SELECT pg_advisory_unlock($1)").bind(lock).execute(holder).await.unwrap();
}

/// Two batches of one node are in flight and share a key, while the first cannot commit. Of the second, only the claims
/// of that key wait.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn overlapping_batches_that_share_a_key_harm_only_its_callers() {
    let lab = Lab::new(Kind::Postgres).await;
    let ledger = lab.ledger().await;
    let mut holder = PgConnection::connect(&lab.url).await.unwrap();
    stall_commits(&mut holder, 42, "INSERT ON semel_operations", "NEW.key = 'shared'").await;
    let claim = |name: &'static str| {
        let ledger = ledger.clone();
        tokio::spawn(async move { ledger.claim(work(name, policy())).await.map(|claim| claim.word()) })
    };
    let first = claim("shared");
    stalls(&mut holder, 42).await;
    // Enough for a second batch beside the first, and no more.
    let shared = claim("shared");
    assert_eq!(claim_all(&ledger, (0..95).map(|n| format!("other {n}"))).await, [""; 0]);
    assert!(!first.is_finished(), "it still waits for its disk");
    let answer = shared.await.unwrap();
    assert!(matches!(answer, Err(Error::Unavailable(_))), "{answer:?}");
    go_on(&mut holder, 42).await;
    assert_eq!(first.await.unwrap().unwrap(), "acquired");
    assert!(ledger.store().by_key(&scope(), &key("shared")).await.unwrap().is_some());
}

/// A claim in a caller's transaction replaces an expired operation, and the transaction stays open. Claims of other
/// expired keys go on, and so do the repeats of other operations.
#[tokio::test]
async fn an_open_inline_claim_of_an_expired_key_blocks_no_other() {
    /// More than the slots of any hashed lock of operations.
    const OTHERS: usize = 300;
    let lab = Lab::new(Kind::Postgres).await;
    let (store, other) = (lab.open().await, lab.open().await);
    let policy = Policy { retention: Some(Duration::from_secs(60)), ..policy() };
    let ask = |n: usize| Arc::new(request(&format!("k {n:03}"), b"", policy.clone()));
    let claimed = store.claim((0..=OTHERS).map(ask).collect()).await.unwrap();
    let complete = |applied: &semel::store::Applied| {
        let op = applied.operation.as_ref().unwrap();
        LeaseWrite { id: op.id, fence: op.fence, write: Write::Complete(Outcome::kept("done")) }
    };
    let settled = store.write(claimed.iter().map(complete).collect()).await.unwrap();
    assert!(settled.iter().all(|applied| applied.answer == Answer::Settled { successor: false }));
    lab.pass(Duration::from_secs(60));

    let tx = other.begin(Duration::from_secs(30)).await.unwrap();
    assert_eq!(other.claim_in(&tx, ask(0)).await.unwrap().answer, Answer::Acquired);
    let sighting = Sighting { at: Lab::START, answer: "replay".into(), fingerprint: String::new() };
    let again = claimed[1..].iter().filter_map(|applied| applied.operation.as_ref());
    let again = again.map(|op| SeenAgain::once(op.id, Repeat::Duplicate, sighting.clone())).collect();
    store.note_repeats(again, Vec::new()).await.expect("repeats wait for nothing");
    for (n, applied) in store.claim((1..=OTHERS).map(ask).collect()).await.unwrap().into_iter().enumerate() {
        assert_eq!(applied.answer, Answer::Acquired, "{n}");
    }
    assert!(matches!(other.commit(&tx).await, Commit::Done));
}

/// A purge has deleted the rows of its operation and is about to commit, when another node adds a repeat: no orphaned
/// row may remain.
#[tokio::test]
async fn a_repeat_that_is_added_during_a_purge_leaves_no_row() {
    let lab = Lab::new(Kind::Postgres).await;
    let ledger = lab.ledger().await;
    let Claim::Acquired(lease) = ledger.claim(work("k", policy())).await.unwrap() else { panic!() };
    let id = lease.operation().id;
    assert_ne!(lease.complete(Outcome::kept("done")).await.unwrap(), semel::Settled::LeaseLost);
    let mut holder = PgConnection::connect(&lab.url).await.unwrap();
    stall_commits(&mut holder, 43, "DELETE ON semel_operations", "OLD.key IS NOT NULL").await;
    let store = ledger.store().clone();
    let purge = tokio::spawn(async move { store.decide(id, Decision::Purge, "me", "done with").await });
    stalls(&mut holder, 43).await;
    let sighting = Sighting { at: Lab::START, answer: "replay".into(), fingerprint: String::new() };
    let seen = SeenAgain::once(id, Repeat::Duplicate, sighting);
    let left = ledger.store().note_repeats(vec![seen], Vec::new()).await.unwrap();
    go_on(&mut holder, 43).await;
    assert_eq!(purge.await.unwrap().unwrap().answer, Answer::Purged);
    assert!(ledger.store().note_repeats(left, Vec::new()).await.unwrap().is_empty());
    assert_eq!(lab.number("SELECT count(*) FROM semel_repeats").await, 0);
}

/// A frozen node cannot end its transaction, and the node that takes over would wait for its locks. The server has a
/// time limit for the transaction, and ends it.
#[tokio::test]
async fn the_server_ends_the_transaction_of_a_frozen_node() {
    let lab = Lab::in_real_time(Kind::Postgres).await;
    let store = lab.open().await;
    let ledger = lab.ledger().await;
    let Claim::Acquired(lease) = ledger.claim(work("k", policy())).await.unwrap() else { panic!() };
    let tx = store.begin(Duration::from_secs(1)).await.unwrap();
    let mut held = tx.connection().await.unwrap();
    let Ok(semel_store::Conn::Postgres(conn)) = held.get() else { panic!("no connection") };
    let lock = "SELECT id FROM semel_operations FOR UPDATE";
    assert_eq!(sqlx::query(lock).fetch_all(conn).await.unwrap().len(), 1);
    // While the connection is in use, the store's own timer cannot end the transaction, as on a frozen node.
    let mut heir = PgConnection::connect(&lab.url).await.unwrap();
    sqlx::raw_sql("SET lock_timeout = '20s'").execute(&mut heir).await.unwrap();
    assert_eq!(sqlx::query(lock).fetch_all(&mut heir).await.expect("the lock is free").len(), 1);
    drop((held, lease));
}
