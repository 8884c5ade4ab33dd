//! PostgreSQL: what may happen between two statements of one claim.
//!
//! A lock on a table that only the second statement reads holds a claim in between, and what
//! another node could have done meanwhile is done by hand.
#![expect(clippy::unwrap_used, reason = "these are tests")]

use std::{sync::Arc, time::Duration};

use semel::{Backoff, Claim, Failure, Fence, Policy, Retry, Store as _, machine::Answer};
use semel_testkit::{Kind, Lab, request, work};
use sqlx::{Connection as _, PgConnection};

fn policy() -> Policy {
    Policy { backoff: Backoff::NONE, ..Policy::default() }
}

/// A failed operation, and a claim on it that has seen nothing newer. Then another node takes over
/// and fails, and the claim goes on. Returns its fence, and that of the other.
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

/// What refuses an older fence would otherwise refuse the present owner.
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
