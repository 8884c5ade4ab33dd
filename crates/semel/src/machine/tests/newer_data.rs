//! Supersede-if-newer: data with a higher order takes the place of the older, and is never lost.

use std::time::Duration;

use super::{
    super::*,
    life::{LEASE, Life, RETENTION, ask, ask_newer, complete, doubt, fail, policy, release, settles},
    situations::situations,
};
use crate::{OnLost, OnMismatch};

/// A claim that stores its payload.
fn bring(payload: &'static str, order: i64) -> Request {
    Request { payload: Some(payload.into()), ..ask_newer(payload, order) }
}

fn has(life: &Life, payload: &'static str, order: i64) -> bool {
    let row = life.row();
    let brought = bring(payload, order);
    (row.fingerprint, row.order, &row.payload) == (brought.fingerprint, brought.order, &brought.payload)
}

#[test]
fn an_equal_an_older_or_a_missing_order_is_not_newer() {
    for (name, life) in situations() {
        if life.row.as_ref().is_none_or(|op| op.has_expired(life.now)) {
            continue;
        }
        for order in [Some(1), Some(0), Some(i64::MIN), None] {
            let mut life = life.clone();
            let request = Request { order, ..ask_newer("other", 1) };
            assert_eq!(life.claim(&request), Answer::Mismatch, "{order:?} on {name}");
        }
    }
    let mut life = Life::new();
    let no_order = Request { order: None, ..ask_newer("first", 1) };
    life.acquire(&no_order);
    assert_eq!(life.claim(&ask_newer("other", 1)), Answer::Mismatch, "no order is newer than data without an order");
}

#[test]
fn newer_data_runs_at_once_unless_it_runs_is_in_doubt_or_pinned() {
    for (name, mut life) in situations() {
        let Some(row) = life.row.clone() else { continue };
        let busy = row.lease.is_some() || row.state == State::InDoubt || row.has_expired(life.now);
        if busy {
            continue;
        }
        if row.is_final(life.now) {
            assert_eq!(life.claim(&bring("third", 3)), Answer::Mismatch, "{name}");
            continue;
        }
        assert_eq!(life.claim(&bring("third", 3)), Answer::Acquired, "{name}");
        assert!(has(&life, "third", 3), "{name}");
        let fresh = (life.row().failures, life.row().crashes, life.row().attempt(), &life.row().checkpoint);
        assert_eq!(fresh, (0, 0, 1, &None), "it has all its attempts: {name}");
        assert_eq!(life.row().error, None, "it has not failed: {name}");
        assert!(!life.row().archived && life.row().outcome.is_none(), "{name}");
        assert_eq!(life.row().id, row.id, "it is the same operation: {name}");
    }
}

#[test]
fn newer_data_waits_for_the_run_and_then_is_pending() {
    for settle in [complete("first"), fail(Retry::Backoff), fail(Retry::Never), release()] {
        let mut life = Life::new();
        let fence = life.acquire(&bring("first", 1));
        let until = life.now + LEASE;
        assert_eq!(life.claim(&bring("second", 2)), Answer::InFlight { until, kept: true });
        assert_eq!(life.row().fence, fence, "the run goes on");
        assert_eq!(life.write(fence, Write::Checkpoint("half".into())), Answer::Written);
        assert_eq!(life.write(fence, settle.clone()), Answer::Settled { successor: true });
        assert_eq!((life.row().state, life.row().attempt()), (State::Pending, 1), "{settle:?}");
        assert_eq!((&life.row().checkpoint, &life.row().error), (&None, &None), "those are the older data's");
        assert!(has(&life, "second", 2), "{settle:?}");

        assert_eq!(life.clone().claim(&bring("first", 1)), Answer::Mismatch, "the older is over");
        assert_eq!(life.claim(&bring("second", 2)), Answer::Acquired, "{settle:?}");
    }
}

#[test]
fn newer_data_that_waited_has_the_time_the_priority_and_the_policy_of_its_enqueue() {
    let (day, own) = (Duration::from_secs(86_400), Policy { max_attempts: Some(1), ..bring("second", 2).policy });
    let priority = Priority::ALL[0];
    let later = Later { delay: day, priority, keeps_policy: true, not_before: None };
    let second = Request { later: Some(later), policy: own.clone(), ..bring("second", 2) };
    for end in [Some(complete("first")), Some(fail(Retry::Never)), Some(release()), Some(doubt()), None] {
        let mut life = Life::new();
        let mut first = bring("first", 1);
        first.later = Some(Later { keeps_policy: true, ..Later::default() });
        assert_eq!(life.claim(&first), Answer::Enqueued);
        first.later = None;
        let fence = life.acquire(&first);
        let (begun, from) = (life.now, life.now + day);
        assert!(matches!(life.claim(&second), Answer::InFlight { kept: true, .. }));
        assert_eq!(life.row().terms, Some(first.policy.clone()), "the run goes on under its own policy");
        match end.clone() {
            Some(end) => life.settle(fence, end),
            None => life.crash(),
        }
        if life.row().state == State::InDoubt {
            assert_eq!(life.resolve(Verdict::Failed), Answer::Resolved);
        }
        assert!(has(&life, "second", 2), "{end:?}");
        assert_eq!((life.row().priority, life.row().terms.as_ref()), (priority, Some(&own)), "{end:?}");
        assert_eq!(due(life.row(), Some(&first.policy), life.now), Some(from), "{end:?}");
        assert_eq!(life.claim(&bring("second", 2)), Answer::NotYet { until: from }, "{end:?}");
        life.pass(from.since(life.now));
        assert_eq!(life.now, begun + day);
        life.acquire(&bring("second", 2));
        assert_eq!(life.row().lease.as_ref().map(|lease| &lease.terms), Some(&own), "{end:?}");
    }
}

#[test]
fn newer_data_of_a_claim_has_the_priority_and_the_policy_of_the_data_that_it_replaces() {
    let (older, own) = (bring("first", 1).policy, Policy { max_attempts: Some(1), ..bring("second", 2).policy });
    for enqueued in [false, true] {
        let (low, high) = (Priority::ALL[4], Priority::ALL[0]);
        let enqueue = |request: Request, priority| {
            let later = Later { delay: LEASE, priority, keeps_policy: true, not_before: None };
            Request { later: Some(later), ..request }
        };
        let mut life = Life::new();
        assert_eq!(life.claim(&enqueue(bring("first", 1), low)), Answer::Enqueued);
        let fence = life.acquire(&Request { at_once: true, ..bring("first", 1) });
        if enqueued {
            let second = Request { policy: own.clone(), ..bring("second", 2) };
            assert!(matches!(life.claim(&enqueue(second, high)), Answer::InFlight { kept: true, .. }));
        }
        assert!(matches!(life.claim(&bring("third", 3)), Answer::InFlight { kept: true, .. }));
        life.settle(fence, complete("first"));
        let expected = if enqueued { (high, Some(&own)) } else { (low, Some(&older)) };
        assert_eq!((life.row().priority, life.row().terms.as_ref()), expected);
        assert_eq!(life.row().not_before, None, "a claim is for now");
    }
}

#[test]
fn stored_terms_of_newer_data_are_read_back_and_those_of_other_data_are_ignored() {
    let mut life = Life::new();
    life.acquire(&bring("first", 1));
    let later = Later { delay: LEASE, priority: Priority::ALL[0], keeps_policy: true, not_before: None };
    let _ = life.claim(&Request { later: Some(later), ..bring("second", 2) });
    let second = life.row().successor.clone().expect("newer data");
    let bare = crate::Successor { not_before: None, priority: Priority::default(), terms: None, ..second.clone() };
    assert_eq!(bare.clone().with_terms(&second.to_terms()).unwrap(), second);
    assert_eq!(second.clone().with_terms(&bare.to_terms()).unwrap(), bare);
    // A node of an earlier version has replaced the data, and left the terms.
    let third = crate::Successor { order: 3, ..bare };
    assert_eq!(third.clone().with_terms(&second.to_terms()).unwrap(), third);
    for wrong in ["", "[]", "[2,null,9,null]", r#"[2,null,0,"[]"]"#] {
        assert!(second.clone().with_terms(wrong).is_err(), "{wrong}");
    }
}

#[test]
fn newer_data_survives_the_crash_of_the_older_run() {
    for swept in [false, true] {
        for (claimed, expected) in [(bring("first", 1), Answer::Mismatch), (bring("second", 2), Answer::Acquired)] {
            let mut life = Life::new();
            life.acquire(&bring("first", 1));
            let _ = life.claim(&bring("second", 2));
            match swept {
                true => life.crash(),
                false => life.pass(LEASE),
            }
            assert_eq!(life.claim(&claimed), expected);
            assert!(has(&life, "second", 2));
            assert_eq!((life.row().crashes, life.row().parked, life.row().not_before), (0, false, None));
        }
    }
}

#[test]
fn a_cancel_after_lease_expiry_withdraws_the_newer_data_before_and_after_the_sweep() {
    for swept in [false, true] {
        let mut life = Life::new();
        life.acquire(&bring("first", 1));
        let _ = life.claim(&bring("second", 2));
        match swept {
            true => life.crash(),
            false => life.pass(LEASE),
        }
        assert_eq!(life.cancel(), Answer::Cancelled);
        assert!(has(&life, "second", 2) && life.row().successor.is_none(), "swept: {swept}");
        // After the sweep only the policy of the enqueue or the claim would tell.
        assert_eq!(life.row().expires_at, (!swept).then_some(life.now + RETENTION), "swept: {swept}");
        assert_eq!(life.claim(&bring("second", 2)), Answer::Exhausted, "swept: {swept}");
    }
}

#[test]
fn a_cancel_of_a_run_withdraws_the_newer_data_and_not_what_comes_later() {
    for (end, comes_later) in
        settles().map(Some).into_iter().chain([None]).flat_map(|end| [(end.clone(), false), (end, true)])
    {
        let mut life = Life::new();
        let fence = life.acquire(&bring("first", 1));
        let _ = life.claim(&bring("second", 2));
        let asked = life.happens(&super::life::Happening::Cancel);
        assert_eq!(asked.answer, Answer::CancelAsked);
        let withdrawn = bring("second", 2).fingerprint.to_hex();
        let detail = &asked.notes.last().expect("a note").detail;
        assert_eq!(*detail, format!("she knows; newer data is withdrawn: order 2, fingerprint {withdrawn}"));
        if comes_later {
            assert!(matches!(life.claim(&bring("third", 3)), Answer::InFlight { kept: true, .. }));
        }
        match end.clone() {
            Some(end) => life.settle(fence, end),
            None => life.crash(),
        }
        if life.row().state == State::InDoubt {
            assert_eq!(life.resolve(Verdict::Failed), Answer::Resolved);
        }
        let expected = match (&end, comes_later) {
            (_, true) => State::Pending,
            (Some(Write::Complete(_)), false) => State::Completed,
            (_, false) => State::Failed,
        };
        assert_eq!(life.state(), Some(expected), "{end:?}");
        assert!(if comes_later { has(&life, "third", 3) } else { has(&life, "first", 1) }, "{end:?}");
        assert!(life.row().parked == (expected == State::Failed), "{end:?}");
    }
}

#[test]
fn newer_data_waits_for_the_end_of_a_doubt() {
    for came_first in [false, true] {
        for verdict in [Verdict::Completed(Outcome::kept("yes")), Verdict::Failed, Verdict::Retry] {
            let mut life = Life::new();
            let fence = life.acquire(&bring("first", 1));
            if came_first {
                assert!(matches!(life.claim(&bring("second", 2)), Answer::InFlight { kept: true, .. }));
            }
            assert_eq!(life.write(fence, doubt()), Answer::Settled { successor: false });
            assert_eq!(life.claim(&bring("second", 2)), Answer::InDoubt { kept: true });
            assert_eq!(life.row().state, State::InDoubt, "a doubt comes first");
            life.pass(RETENTION * 9);
            assert_eq!(life.resolve(verdict.clone()), Answer::Resolved);
            assert_eq!(life.row().state, State::Pending, "{verdict:?}");
            assert!(has(&life, "second", 2), "{verdict:?}");
        }
    }
}

#[test]
fn a_crash_under_hold_is_a_doubt_even_with_a_successor() {
    for swept in [false, true] {
        let mut life = Life::new();
        let mut first = bring("first", 1);
        first.policy.on_lost = OnLost::Hold;
        life.acquire(&first);
        assert!(matches!(life.claim(&bring("second", 2)), Answer::InFlight { kept: true, .. }));
        match swept {
            true => life.crash(),
            false => life.pass(LEASE),
        }
        assert_eq!(life.claim(&bring("second", 2)), Answer::InDoubt { kept: true });
        assert!(has(&life, "first", 1), "the older data is in doubt");
    }
}

#[test]
fn a_verdict_about_a_lost_run_does_not_apply_to_the_newer_data() {
    for on_lost in [OnLost::Rerun, OnLost::Hold, OnLost::Probe] {
        for verdict in [Verdict::Completed(Outcome::kept("yes")), Verdict::Failed, Verdict::Retry] {
            let mut life = Life::new();
            let mut first = bring("first", 1);
            first.policy.on_lost = on_lost;
            life.acquire(&first);
            let _ = life.claim(&bring("second", 2));
            life.pass(LEASE);
            assert_eq!(life.resolve(verdict.clone()), Answer::Resolved);
            assert_eq!(life.row().state, State::Pending, "{verdict:?} under {on_lost:?}");
            assert!(has(&life, "second", 2), "{verdict:?} under {on_lost:?}");
        }
    }
}

#[test]
fn the_newest_successor_runs() {
    for settle in settles() {
        let mut life = Life::new();
        let fence = life.acquire(&bring("first", 1));
        let until = life.now + LEASE;
        let kept = Answer::InFlight { until, kept: true };
        assert_eq!(life.claim(&bring("third", 3)), kept);
        assert_eq!(
            life.claim(&bring("second", 2)),
            Answer::Mismatch,
            "newer than the running data, not than the waiting"
        );
        assert_eq!(life.claim(&bring("fourth", 4)), kept);
        assert_eq!(life.claim(&bring("fourth", 4)), kept, "a repeated claim gets the same answer");
        assert_eq!(life.claim(&bring("third", 3)), Answer::Mismatch);
        assert_eq!(life.claim(&bring("first", 1)), Answer::InFlight { until, kept: false });
        life.settle(fence, settle.clone());
        if life.row().state == State::InDoubt {
            assert_eq!(life.claim(&bring("fourth", 4)), Answer::InDoubt { kept: true });
            assert_eq!(life.resolve(Verdict::Retry), Answer::Resolved);
        }
        assert!(has(&life, "fourth", 4), "{settle:?}");
    }
}

#[test]
fn newer_data_is_a_mismatch_unless_the_policy_supersedes() {
    let mut life = Life::new();
    let fence = life.acquire(&bring("first", 1));
    let reject = Policy { on_mismatch: OnMismatch::Reject, ..policy() };
    assert_eq!(life.claim(&Request { policy: reject, ..bring("second", 2) }), Answer::Mismatch);
    life.settle(fence, complete("first"));
    assert_eq!(life.row().state, State::Completed, "and does not wait");
    assert_eq!(life.claim(&Request { order: Some(9), ..ask("first") }), Answer::Replay { mismatch: false });
}
