//! Attempts: their number and the backoff.

use semel::{Backoff, Failure, Policy, Retry, State, prelude::*};

use super::tools::*;
use crate::{Lab, work};

/// The backoff is stored in the row: every node respects it, it doubles up to its cap, and it ends exactly at its time.
pub async fn the_backoff_is_kept_by_every_node(lab: Lab) {
    let (a, b) = (lab.ledger().await, lab.ledger().await);
    let policy = Policy { backoff: Backoff { first: secs(10), cap: secs(40) }, ..Policy::default() };
    for whole in [10, 20, 40, 40] {
        assert_eq!(acquire(&a, work("k", policy.clone())).await.fail(failure("no")).await.unwrap(), SETTLED);
        let until = row(&b, "k").await.not_before.unwrap();
        let wait = until.since(b.store().now().await.unwrap());
        assert!(wait <= secs(whole) && wait > secs(whole) * 4 / 5, "{wait:?} instead of {whole} s");
        lab.pass(wait - TICK);
        assert_eq!(ask(&b, work("k", policy.clone())).await, "not_yet");
        lab.pass(TICK);
    }
    // Another policy does not shorten the stored backoff.
    assert_eq!(acquire(&a, work("k", policy.clone())).await.fail(failure("no")).await.unwrap(), SETTLED);
    assert_eq!(ask(&b, work("k", Policy { backoff: Backoff::NONE, ..policy })).await, "not_yet");
}

/// An operation out of attempts is exhausted; a policy that allows more lets it run again; a permanent failure stays.
pub async fn an_operation_is_exhausted_after_its_attempts(lab: Lab) {
    let ledger = lab.ledger().await;
    let allow = |n: u32| Policy { max_attempts: Some(n), backoff: Backoff::NONE, ..Policy::default() };
    for attempt in 1..=2 {
        let lease = acquire(&ledger, work("k", allow(2))).await;
        assert_eq!(lease.operation().attempt(), attempt);
        assert_eq!(lease.fail(failure("no")).await.unwrap(), SETTLED);
    }
    for _ in 0..3 {
        assert_eq!(ask(&ledger, work("k", allow(2))).await, "exhausted");
        lab.pass(secs(3600));
    }
    let lease = acquire(&ledger, work("k", allow(3))).await;
    assert_eq!(lease.operation().attempt(), 3);
    let never = Failure { error: "no way".into(), retry: Retry::Never };
    assert_eq!(lease.fail(never).await.unwrap(), SETTLED);
    assert_eq!(ask(&ledger, work("k", allow(100))).await, "exhausted");
    assert_eq!(row(&ledger, "k").await.failures, 3);
}

/// Exhausted or not, a failed operation is kept for its retention and then counts as absent.
pub async fn a_failed_operation_expires_too(lab: Lab) {
    let ledger = lab.ledger().await;
    let policy = Policy { max_attempts: Some(1), retention: Some(secs(60)), ..Policy::default() };
    assert_eq!(acquire(&ledger, work("k", policy.clone())).await.fail(failure("no")).await.unwrap(), SETTLED);
    lab.pass(secs(60) - TICK);
    assert_eq!(ask(&ledger, work("k", policy.clone())).await, "exhausted");
    lab.pass(TICK);
    assert_eq!(acquire(&ledger, work("k", policy)).await.operation().attempt(), 1);
}

/// Failures and lost leases are counted separately, and both counts stay after a success.
pub async fn failures_and_crashes_are_counted_apart(lab: Lab) {
    let ledger = lab.ledger().await;
    let policy = Policy { max_attempts: Some(2), max_crashes: 3, backoff: Backoff::NONE, ..Policy::default() };
    assert_eq!(acquire(&ledger, work("k", policy.clone())).await.fail(failure("no")).await.unwrap(), SETTLED);
    for _ in 0..2 {
        drop(acquire(&ledger, work("k", policy.clone())).await);
        lab.pass(policy.lease);
    }
    let lease = acquire(&ledger, work("k", policy)).await;
    let op = lease.operation();
    assert_eq!((op.failures, op.crashes, op.attempt()), (1, 2, 4));
    assert_eq!(lease.complete(done("at last")).await.unwrap(), SETTLED);
    let op = row(&ledger, "k").await;
    assert_eq!((op.state, op.failures, op.crashes, op.attempt()), (State::Completed, 1, 2, 4));
    assert_eq!((op.error, op.not_before), (None, None));
}
