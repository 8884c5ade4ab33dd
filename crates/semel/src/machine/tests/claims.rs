//! Claims.

use std::time::Duration;

use super::{
    super::*,
    life::{LEASE, Life, RETENTION, TICK, ask, ask_newer, ask_under, complete, doubt, fail, policy},
    situations::situations,
};
use crate::{OnLost, OnMismatch};

#[test]
fn the_first_claim_gets_the_lease_and_others_get_its_deadline() {
    let mut life = Life::new();
    let fence = life.acquire(&ask("a"));
    assert_eq!(life.row().id, fence.0, "the id is the fence of the first claim");
    assert_eq!((life.row().attempt(), life.row().owner.as_str()), (1, "worker"));
    let until = life.now + LEASE;
    life.pass(LEASE / 2);
    assert_eq!(life.claim(&ask("a")), Answer::InFlight { until, kept: false });
}

#[test]
fn a_takeover_sets_the_owner_and_the_terms() {
    let mut life = Life::new();
    let began = life.now;
    life.acquire(&ask("a"));
    life.crash();
    let terms = Policy { lease: LEASE * 2, on_lost: OnLost::Hold, ..policy() };
    life.acquire(&Request { owner: "other".into(), policy: terms.clone(), ..ask("a") });
    let row = life.row();
    assert_eq!((row.created_at, row.claimed_at, row.owner.as_str()), (began, life.now, "other"));
    let lease = row.lease.as_ref().unwrap();
    assert_eq!((lease.deadline, &lease.terms), (life.now + LEASE * 2, &terms));
}

#[test]
fn a_claim_whose_answer_was_lost_is_recognised_by_its_token() {
    let mut life = Life::new();
    let fence = life.acquire(&ask("a"));
    let before = life.row.clone();
    life.pass(LEASE - TICK);
    assert_eq!(life.claim_again(&ask("a")), Answer::Acquired);
    assert_eq!((life.row.clone(), life.row().fence), (before, fence), "and changes nothing");

    life.pass(TICK);
    assert_eq!(life.claim_again(&ask("a")), Answer::Acquired, "after its lease, it is a claim like any other");
    assert!(life.row().fence > fence && life.row().crashes == 1);
}

#[test]
fn a_completed_operation_is_replayed_with_its_outcome() {
    let mut life = Life::new();
    let fence = life.acquire(&ask("a"));
    life.settle(fence, complete("done"));
    for _ in 0..3 {
        life.pass(Duration::from_secs(100));
        assert_eq!(life.claim(&ask("a")), Answer::Replay { mismatch: false });
        assert_eq!(life.row().outcome, Some(Outcome::kept("done")));
    }
}

#[test]
fn expired_is_absent() {
    for settle in [complete("done"), fail(Retry::Backoff), fail(Retry::Never)] {
        let mut life = Life::new();
        let fence = life.acquire(&ask("a"));
        life.pass(LEASE / 2);
        life.settle(fence, settle.clone());
        let id = life.row().id;

        life.pass(RETENTION - TICK);
        let before_its_end = life.clone().claim(&ask("b"));
        assert_eq!(before_its_end, Answer::Mismatch, "kept for all of its retention, counted from its end: {settle:?}");

        life.pass(TICK);
        assert_eq!(life.clone().resolve(Verdict::Retry), Answer::NotNow(NotNow::Absent));
        assert_eq!(life.clone().claim_inline(&ask("b")), Answer::Acquired);
        assert_eq!(life.clone().tend(), Answer::Expired);
        assert_eq!(life.claim(&ask("b")), Answer::Acquired, "another payload may have the key: {settle:?}");
        assert!(life.row().id > id && life.row().failures == 0, "a new life, not a new attempt");
    }
}

#[test]
fn timed_out_expires_but_pending_and_in_doubt_never_do() {
    let ages = RETENTION * 1000;
    for (on_lost, expected) in [(OnLost::Rerun, Answer::Acquired), (OnLost::Hold, Answer::Mismatch)] {
        let mut life = Life::new();
        life.acquire(&ask_under("a", on_lost));
        life.crash();
        life.pass(ages);
        assert_eq!(life.claim(&ask("b")), expected);
    }
    let mut life = Life::new();
    let fence = life.acquire(&ask("a"));
    life.settle(fence, Write::Release { delay: TICK, why: None });
    life.pass(ages);
    assert_eq!(life.claim(&ask("b")), Answer::Mismatch, "a pending operation never expires");
}

#[test]
fn a_failed_operation_runs_again_after_its_backoff_and_not_before() {
    for (retry, wait) in [
        (Retry::Backoff, policy().backoff.after(1, 1)),
        (Retry::After(Duration::from_secs(77)), Duration::from_secs(77)),
        (Retry::After(Duration::ZERO), Duration::ZERO),
    ] {
        let mut life = Life::new();
        let fence = life.acquire(&ask("a"));
        life.settle(fence, fail(retry));
        let until = life.now + wait;
        if !wait.is_zero() {
            life.pass(wait - TICK);
            assert_eq!(life.claim(&ask("a")), Answer::NotYet { until });
            life.pass(TICK);
        }
        assert_eq!(life.claim(&ask("a")), Answer::Acquired);
        assert_eq!(life.row().attempt(), 2);
    }
}

#[test]
fn too_many_failures_are_exhausted_until_a_claim_allows_more() {
    let mut life = Life::new();
    for _ in 0..2 {
        let fence = life.acquire(&ask("a"));
        life.settle(fence, fail(Retry::After(Duration::ZERO)));
    }
    assert_eq!(life.claim(&ask("a")), Answer::Exhausted);
    let patient = Policy { max_attempts: None, ..policy() };
    assert_eq!(life.claim(&Request { policy: patient, ..ask("a") }), Answer::Acquired);
}

#[test]
fn crashes_do_not_count_as_failures() {
    let once = Policy { max_attempts: Some(1), max_crashes: 3, ..policy() };
    let request = Request { policy: once, ..ask("a") };
    let mut life = Life::new();
    life.acquire(&request);
    life.crash();
    let fence = life.acquire(&request);
    assert_eq!((life.row().failures, life.row().crashes, life.row().attempt()), (0, 1, 2));
    life.settle(fence, fail(Retry::Backoff));
    life.pass(RETENTION / 2);
    assert_eq!(life.claim(&request), Answer::Exhausted, "a failure does");
}

#[test]
fn a_crash_loop_is_slowed_down_and_then_parked() {
    let request = Request { policy: Policy { max_crashes: 3, ..policy() }, ..ask("a") };
    let mut life = Life::new();
    life.acquire(&request);
    life.crash();
    let careful = Request { policy: Policy { max_crashes: 1, ..policy() }, ..ask("a") };
    assert_eq!(life.claim(&careful), Answer::Exhausted, "the limit is that of the claim's policy");
    life.acquire(&request);
    life.crash();
    let until = life.now + policy().backoff.after(1, 1);
    assert_eq!(life.claim(&request), Answer::NotYet { until }, "the second takeover waits");
    life.now = until;
    life.acquire(&request);
    life.crash();
    assert!(life.row().parked);
    let daring = Policy { max_crashes: 100, ..policy() };
    life.pass(RETENTION / 2);
    assert_eq!(life.claim(&Request { policy: daring, ..ask("a") }), Answer::Exhausted, "only a person unparks");
    assert_eq!(life.resolve(Verdict::Retry), Answer::Resolved);
    assert_eq!(life.claim(&request), Answer::Acquired);
}

#[test]
fn a_claim_ends_an_expired_lease_first() {
    for (on_lost, state, expected) in [
        (OnLost::Rerun, State::Processing, Answer::Acquired),
        (OnLost::Hold, State::InDoubt, Answer::InDoubt { kept: false }),
        (OnLost::Probe, State::InDoubt, Answer::InDoubt { kept: false }),
    ] {
        let mut life = Life::new();
        let fence = life.acquire(&ask_under("a", on_lost));
        life.pass(LEASE - TICK);
        assert!(matches!(life.claim(&ask("a")), Answer::InFlight { .. }), "it lasts to its deadline");
        life.pass(TICK);

        let mut refused = life.clone();
        assert_eq!(refused.claim(&ask("b")), Answer::Mismatch);
        assert_eq!((refused.row().crashes, refused.row().lease.is_none()), (1, true), "the lease expiry is stored");

        assert_eq!(life.claim(&ask("a")), expected);
        assert_eq!((life.row().state, life.row().crashes), (state, 1));
        assert!(life.row().fence > fence, "so that writes of the former owner are refused");
    }
}

#[test]
fn another_payload_is_refused_in_every_state() {
    for (name, mut life) in situations() {
        let counts = life.row.as_ref().is_some_and(|op| !op.has_expired(life.now));
        let expected = if counts { Answer::Mismatch } else { Answer::Acquired };
        assert_eq!(life.claim(&ask("other")), expected, "{name}");
    }
}

#[test]
fn under_replay_another_payload_is_answered_as_if_it_were_equal() {
    let replay = Policy { on_mismatch: OnMismatch::Replay, ..policy() };
    let other = Request { policy: replay, payload: Some("other".into()), ..ask("other") };
    for (name, mut life) in situations() {
        let Some(row) = life.row.clone().filter(|op| !op.has_expired(life.now)) else { continue };
        let same = Request { fingerprint: row.fingerprint, ..other.clone() };
        let (equal, answer) = (life.clone().claim(&same), life.claim(&other));
        match answer {
            Answer::Replay { mismatch } => assert!(mismatch, "a replay says that it is not the same: {name}"),
            _ => assert_eq!(answer, equal, "{name}"),
        }
        let runs = answer == Answer::Acquired;
        let is_other = [
            life.row().fingerprint == other.fingerprint,
            life.row().payload == other.payload,
            life.row().order == other.order,
        ];
        assert_eq!(is_other, [runs; 3], "if nothing took effect, the claimed payload runs: {name}");
    }
    let mut life = Life::new();
    let fence = life.acquire(&ask("a"));
    assert_eq!(life.write(fence, Write::Checkpoint("half of a".into())), Answer::Written);
    life.crash();
    life.acquire(&other);
    assert_eq!(life.row().checkpoint, None, "a checkpoint is of its own payload");
}

#[test]
fn an_inline_claim_is_completed_at_once_or_answered_like_any_other() {
    for (name, life) in situations() {
        for request in [ask_newer("first", 1), ask_newer("second", 2), ask("other")] {
            let (mut leased, mut inline) = (life.clone(), life.clone());
            let answer = inline.claim_inline(&request);
            assert_eq!(answer, leased.claim(&request), "{name}");
            if answer == Answer::Acquired {
                assert_eq!(inline.state(), Some(State::Completed), "{name}");
                assert_eq!(inline.row().expires_at, Some(life.now + RETENTION));
                assert_eq!(inline.claim_inline(&request), Answer::Replay { mismatch: false }, "{name}");
            } else {
                assert_eq!(inline.row, leased.row, "{name}");
            }
        }
    }
}

#[test]
fn an_inline_claim_never_takes_a_lease_for_its_own() {
    // Its effect would be made while the row still counts as running, and repeated later.
    let mut life = Life::new();
    life.acquire(&ask("a"));
    life.token -= 1;
    assert!(matches!(life.claim_inline(&ask("a")), Answer::InFlight { .. }));
}

#[test]
fn an_operation_in_doubt_is_never_rerun_by_a_claim() {
    for on_lost in [OnLost::Rerun, OnLost::Hold, OnLost::Probe] {
        let mut life = Life::new();
        let fence = life.acquire(&ask("a"));
        life.settle(fence, doubt());
        life.pass(RETENTION * 9);
        assert_eq!(life.claim(&ask_under("a", on_lost)), Answer::InDoubt { kept: false });
    }
}
