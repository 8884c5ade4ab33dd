//! Operations that are left to callers, and leases that programs outside hold.

use std::time::Duration;

use super::{
    super::*,
    life::{LEASE, Life, RETENTION, TICK, ask, complete, doubt, fail, policy, release},
};
use crate::{OnLost, Runner};

/// A claim whose operation no worker may run.
fn asked() -> Request {
    Request { policy: Policy { runner: Runner::Caller, ..policy() }, ..ask("a") }
}

/// When a worker would run it.
fn due_now(life: &Life) -> Option<Timestamp> {
    due(life.row(), Some(&policy()), life.now)
}

#[test]
fn an_operation_that_a_caller_created_is_never_due_and_its_caller_runs_it_again() {
    let mut life = Life::new();
    let fence = life.acquire(&asked());
    life.settle(fence, fail(Retry::After(Duration::ZERO)));
    assert_eq!((due_now(&life), life.row().never_due, life.row().is_given_up()), (None, true, false));
    life.acquire(&asked());
    life.crash();
    assert_eq!((due_now(&life), life.row().is_given_up()), (None, false));
    let fence = life.acquire(&asked());
    life.settle(fence, fail(Retry::After(Duration::ZERO)));
    assert!(life.row().is_given_up(), "its attempts are used up");
    assert_eq!(life.claim(&asked()), Answer::Exhausted);
    assert_eq!(life.resolve(Verdict::Retry), Answer::Resolved);
    assert_eq!((due_now(&life), life.row().is_given_up()), (None, false), "a person leaves it to its caller, too");
    life.acquire(&asked());
}

#[test]
fn an_enqueued_operation_stays_due_although_a_caller_ran_it() {
    let mut life = Life::new();
    let later = Some(Later { keeps_policy: true, ..Later::default() });
    assert_eq!(life.claim(&Request { later, ..ask("a") }), Answer::Enqueued);
    let fence = life.acquire(&asked());
    assert_eq!(life.row().lease.as_ref().unwrap().terms.runner, Runner::Worker);
    life.settle(fence, fail(Retry::After(Duration::ZERO)));
    assert_eq!(due_now(&life), Some(life.now));
}

#[test]
fn each_claim_of_a_caller_brings_its_own_policy() {
    let mut life = Life::new();
    let fence = life.acquire(&asked());
    life.settle(fence, fail(Retry::After(Duration::ZERO)));
    let patient = Policy { lease: LEASE * 2, max_attempts: Some(9), ..asked().policy };
    life.acquire(&Request { policy: patient.clone(), ..asked() });
    let row = life.row();
    assert_eq!((row.terms.as_ref(), row.lease.as_ref().map(|lease| &lease.terms)), (Some(&patient), Some(&patient)));
}

#[test]
fn a_worker_may_ask_for_a_longer_lease_than_the_enqueue() {
    let mut life = Life::new();
    let later = Some(Later { keeps_policy: true, ..Later::default() });
    life.claim(&Request { later, ..ask("a") });
    let long = policy().max_run + TICK;
    life.acquire(&Request { lease: Some(long), ..ask("a") });
    let lease = life.row().lease.as_ref().unwrap();
    assert_eq!((lease.deadline, lease.run_until, lease.terms.lease), (life.now + long, life.now + long, long));
    assert_eq!(life.row().terms.as_ref().map(|own| own.lease), Some(LEASE), "for this run only");
}

#[test]
fn a_token_does_not_get_the_lease_of_other_data() {
    let mut life = Life::new();
    life.acquire(&asked());
    let other = Request { fingerprint: Fingerprint::of_bytes(b"b"), ..asked() };
    assert_eq!(life.claim_again(&other), Answer::Mismatch);
    assert_eq!(life.claim_again(&asked()), Answer::Acquired);
}

#[test]
fn a_settle_that_says_something_else_than_the_one_before_is_refused() {
    let other = Write::Fail(Failure { error: "another error".into(), retry: Retry::Backoff });
    let unsure = Write::Doubt { reason: "another reason".into() };
    let ends = [complete("a"), complete("b"), fail(Retry::Backoff), other, doubt(), unsure, release()];
    for first in &ends {
        for second in &ends {
            let mut life = Life::new();
            let fence = life.acquire(&Request { payload: Some("a".into()), ..asked() });
            life.settle(fence, first.clone());
            let before = life.row.clone();
            let expected = if first == second { Answer::Settled { successor: false } } else { Answer::Lost };
            assert_eq!(life.write(fence, second.clone()), expected, "{first:?}, then {second:?}");
            assert_eq!(life.row, before, "and nothing changes");
        }
    }
}

#[test]
fn a_verdict_keeps_the_retention_of_an_operation_with_a_policy_of_its_own() {
    for verdict in [Verdict::Failed, Verdict::Completed(Outcome::kept("done"))] {
        let mut life = Life::new();
        let hold = Policy { on_lost: OnLost::Hold, ..asked().policy };
        life.acquire(&Request { policy: hold, ..asked() });
        life.crash();
        assert_eq!(life.state(), Some(State::InDoubt));
        life.pass(RETENTION * 2);
        assert_eq!(life.resolve(verdict), Answer::Resolved);
        assert_eq!(life.row().expires_at, Some(life.now + RETENTION));
    }
}
