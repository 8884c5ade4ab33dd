//! PostgreSQL: rows that are added to an operation while another transaction deletes it must not be orphaned.
#![expect(clippy::unwrap_used, reason = "these are tests")]

use std::{sync::Arc, time::Duration};

use semel::{
    Claim, Fence, Ledger, Outcome, Policy, Settled,
    journal::{Repeat, Sighting},
    machine::{Answer, Write},
    prelude::*,
    store::{Commit, Decision, LeaseWrite, SeenAgain},
};
use semel_store::Database;
use semel_testkit::{Kind, Lab, request, work};
use sqlx::{Connection as _, PgConnection};

use crate::contention::{go_on, stall_commits, stalls};

const KEPT: Duration = Duration::from_secs(60);

fn policy() -> Policy {
    Policy { retention: Some(KEPT), ..Policy::default() }
}

/// A completed operation.
async fn completed(ledger: &Ledger<Database>, name: &str) -> (i64, Fence) {
    let Claim::Acquired(lease) = ledger.claim(work(name, policy())).await.unwrap() else { panic!() };
    let (id, fence) = (lease.operation().id, lease.fence());
    assert_eq!(lease.complete(Outcome::kept("done")).await.unwrap(), Settled::Yes { successor: false });
    (id, fence)
}

fn again(id: i64) -> SeenAgain {
    let sighting = Sighting { at: Lab::START, answer: "replay".into(), fingerprint: String::new() };
    SeenAgain::once(id, Repeat::Duplicate, sighting)
}

/// Adds a repeat while its operation is being deleted, and once more after that.
async fn add_meanwhile(lab: &Lab, store: &Database, id: i64, removed: impl Future<Output = ()>) {
    let left = store.note_repeats(vec![again(id)], Vec::new()).await.unwrap();
    assert_eq!(left.iter().map(|seen| seen.id).collect::<Vec<_>>(), [id], "it is for the next time");
    removed.await;
    assert!(store.note_repeats(left, Vec::new()).await.unwrap().is_empty(), "the operation is gone");
    assert_eq!(lab.number("SELECT count(*) FROM semel_repeats").await, 0);
}

/// The transaction of a caller stays open for long.
#[tokio::test]
async fn a_repeat_that_is_added_during_a_claim_in_place_of_it_leaves_no_row() {
    let lab = Lab::new(Kind::Postgres).await;
    let ledger = lab.ledger().await;
    let (id, _) = completed(&ledger, "k").await;
    lab.pass(KEPT);
    let other = lab.open().await;
    let tx = other.begin(Duration::from_secs(30)).await.unwrap();
    let claim = other.claim_in(&tx, Arc::new(request("k", b"k", policy()))).await.unwrap();
    assert_eq!(claim.answer, Answer::Acquired);
    add_meanwhile(&lab, ledger.store(), id, async { assert!(matches!(other.commit(&tx).await, Commit::Done)) }).await;
}

#[tokio::test]
async fn a_repeat_added_during_the_release_of_a_first_run_leaves_no_row() {
    for (lock, write) in [(45, Write::Release { delay: Duration::ZERO, why: None }), (46, Write::Withdraw)] {
        let lab = Lab::new(Kind::Postgres).await;
        let store = lab.open().await;
        let claim = store.claim(vec![Arc::new(request("k", b"k", policy()))]).await.unwrap().remove(0);
        let op = claim.operation.unwrap();
        let mut holder = PgConnection::connect(&lab.url).await.unwrap();
        stall_commits(&mut holder, lock, "DELETE ON semel_operations", "OLD.key IS NOT NULL").await;
        let writes = vec![LeaseWrite { id: op.id, fence: op.fence, write }];
        let writing = tokio::spawn({
            let store = store.clone();
            async move { store.write(writes).await.unwrap().remove(0).answer }
        });
        stalls(&mut holder, lock).await;
        let removed = async {
            go_on(&mut holder, lock).await;
            assert_eq!(writing.await.unwrap(), Answer::Settled { successor: false });
        };
        add_meanwhile(&lab, &store, op.id, removed).await;
    }
}

/// A purge comes while repeats are being added: it waits for them, and deletes them.
#[tokio::test]
async fn a_purge_waits_for_repeats_that_are_being_added() {
    const LOCK: i64 = 47;
    let lab = Lab::new(Kind::Postgres).await;
    let ledger = lab.ledger().await;
    let (id, _) = completed(&ledger, "k").await;
    let mut holder = PgConnection::connect(&lab.url).await.unwrap();
    stall_commits(&mut holder, LOCK, "INSERT ON semel_repeats", "NEW.operation > 0").await;
    let (store, other) = (ledger.store().clone(), ledger.store().clone());
    let add = tokio::spawn(async move { store.note_repeats(vec![again(id)], Vec::new()).await.unwrap() });
    stalls(&mut holder, LOCK).await;
    let purge = tokio::spawn(async move { other.decide(id, Decision::Purge, "me", "done with").await.unwrap() });
    // The stalled one has the lock of `stalls`.
    let waiting = "SELECT count(*) FROM pg_stat_activity AS purge JOIN pg_locks AS adds ON adds.locktype = 'advisory'
                   WHERE adds.granted AND adds.objsubid = 1 AND adds.classid = 4294967295 AND adds.objid = 4294967296 - $1
                     AND adds.pid = ANY (pg_blocking_pids(purge.pid))";
    while !purge.is_finished()
        && sqlx::query_scalar::<_, i64>(waiting).bind(LOCK).fetch_one(&mut holder).await.unwrap() == 0
    {
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
    go_on(&mut holder, LOCK).await;
    assert!(add.await.unwrap().is_empty());
    assert_eq!(purge.await.unwrap().answer, Answer::Purged);
    assert_eq!(lab.number("SELECT count(*) FROM semel_repeats").await, 0);
}

/// The repeats of a locked operation are written when it is free; their answers are counted once.
#[tokio::test]
async fn repeats_of_a_locked_operation_are_kept_for_the_next_flush() {
    let lab = Lab::new(Kind::Postgres).await;
    let ledger = lab.ledger().await;
    let (id, _) = completed(&ledger, "k").await;
    completed(&ledger, "other").await;
    let mut holder = PgConnection::connect(&lab.url).await.unwrap();
    sqlx::raw_sql("BEGIN; SELECT id FROM semel_operations WHERE key = 'k' FOR UPDATE")
        .execute(&mut holder)
        .await
        .unwrap();
    for name in ["k", "other"] {
        assert_eq!(ledger.claim(work(name, policy())).await.unwrap().word(), "replay");
    }
    let of = async || lab.texts("SELECT operation::text FROM semel_repeats").await.len();
    ledger.flush().await;
    assert_eq!(of().await, 1, "those of the other operation do not wait");
    sqlx::raw_sql("ROLLBACK").execute(&mut holder).await.unwrap();
    ledger.flush().await;
    assert_eq!(of().await, 2);
    let story = ledger.store().journal(id).await.unwrap().1;
    assert_eq!(story.iter().map(|(_, repeats)| repeats.count).collect::<Vec<_>>(), [1]);
    ledger.flush().await;
    assert_eq!(lab.number("SELECT sum(n)::bigint FROM semel_deltas WHERE answer = 'replay'").await, 2);
}

/// A renewal was refused, and its note is written later: by then a purge has deleted the journal of the operation, and
/// is about to commit.
#[tokio::test]
async fn a_note_that_is_written_during_a_purge_leaves_no_row() {
    const LOCK: i64 = 44;
    let lab = Lab::new(Kind::Postgres).await;
    let ledger = lab.ledger().await;
    let (id, fence) = completed(&ledger, "k").await;
    // A separate node: that of the ledger writes its notes by itself.
    let store = lab.open().await;
    assert_eq!(store.renew(vec![(id, Fence(fence.0 - 1))]).await.unwrap(), [Answer::Lost]);
    let mut holder = PgConnection::connect(&lab.url).await.unwrap();
    stall_commits(&mut holder, LOCK, "DELETE ON semel_operations", "OLD.key IS NOT NULL").await;
    let purge = tokio::spawn({
        let store = store.clone();
        async move { store.decide(id, Decision::Purge, "me", "done with").await.unwrap() }
    });
    stalls(&mut holder, LOCK).await;
    let written = store.tell_renewals().await;
    go_on(&mut holder, LOCK).await;
    assert_eq!(purge.await.unwrap().answer, Answer::Purged);
    assert!(written.is_err_and(|error| error.is_transient()), "it is for the next time");
    store.tell_renewals().await.unwrap();
    assert_eq!(lab.texts("SELECT event FROM semel_journal").await, ["purged"]);
}

/// Rows that were set aside are tried again one by one. One that times out blocks no other.
#[tokio::test]
async fn a_row_that_always_times_out_blocks_no_other_retry() {
    const REFUSE: &str = "CREATE OR REPLACE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS
         $$ BEGIN RAISE EXCEPTION 'not this one'; END $$;
         CREATE TRIGGER refuse BEFORE DELETE ON semel_operations FOR EACH ROW EXECUTE FUNCTION refuse()";
    const TIME_OUT: &str = "CREATE OR REPLACE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS
         $$ BEGIN
              IF OLD.key = 'slow' THEN RAISE EXCEPTION 'too slow' USING ERRCODE = 'lock_not_available'; END IF;
              RETURN OLD;
            END $$;
         UPDATE semel_set_aside SET retry_at = 0 WHERE item = (SELECT id FROM semel_operations WHERE key = 'slow')";
    let lab = Lab::new(Kind::Postgres).await;
    let ledger = lab.ledger().await;
    completed(&ledger, "slow").await;
    completed(&ledger, "quick").await;
    let mut holder = PgConnection::connect(&lab.url).await.unwrap();
    sqlx::raw_sql(REFUSE).execute(&mut holder).await.unwrap();
    lab.pass(KEPT);
    assert_eq!(ledger.sweep().await.unwrap().set_aside, 2);
    sqlx::raw_sql(TIME_OUT).execute(&mut holder).await.unwrap();
    lab.pass(Duration::from_secs(6 * 3600));
    let swept = ledger.store().sweep(1000).await.unwrap();
    assert_eq!(swept.expired, 1, "{swept:?}");
    assert_eq!(swept.troubles.iter().map(|trouble| trouble.phase).collect::<Vec<_>>(), ["rows set aside"]);
    assert_eq!(lab.texts("SELECT key FROM semel_operations").await, ["slow"]);
}
