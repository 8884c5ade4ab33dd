//! When an operation is due, and claims that ignore the backoff.

use std::time::Duration;

use super::{
    super::*,
    life::{Life, TICK, ask, ask_newer, complete, doubt, fail, policy, release},
    situations::situations,
};

fn due_of(life: &Life) -> Option<Timestamp> {
    due(life.row(), Some(&policy()), life.now)
}

#[test]
fn a_claim_at_once_ignores_the_backoff_and_changes_no_other_answer() {
    let mut waited = 0;
    for (name, life) in situations() {
        for request in [ask_newer("first", 1), ask_newer("second", 2), ask("other")] {
            let patient = life.clone().claim(&request);
            let at_once = life.clone().claim(&Request { at_once: true, ..request.clone() });
            match patient {
                Answer::NotYet { .. } => {
                    waited += 1;
                    assert_eq!(at_once, Answer::Acquired, "{name}");
                }
                _ => assert_eq!(at_once, patient, "{name}"),
            }
        }
    }
    assert!(waited > 0, "no situation has a backoff");
}

#[test]
fn a_failure_counts_even_if_its_backoff_is_ignored() {
    let mut life = Life::new();
    for attempt in 1..=2 {
        let fence = life.acquire(&Request { at_once: true, ..ask("a") });
        assert_eq!(life.row().attempt(), attempt);
        life.settle(fence, fail(Retry::Backoff));
    }
    assert_eq!(life.claim(&Request { at_once: true, ..ask("a") }), Answer::Exhausted);
}

#[test]
fn a_failed_operation_is_due_after_its_backoff_unless_it_is_exhausted() {
    let mut life = Life::new();
    let fence = life.acquire(&ask("a"));
    let mut for_good = life.clone();
    for_good.settle(fence, fail(Retry::Never));
    assert_eq!(due_of(&for_good), None, "parked");

    life.settle(fence, fail(Retry::After(Duration::from_secs(77))));
    assert_eq!(due_of(&life), Some(life.now + Duration::from_secs(77)));
    life.pass(Duration::from_secs(77));
    let fence = life.acquire(&ask("a"));
    life.settle(fence, fail(Retry::Backoff));
    assert_eq!(due_of(&life), None, "two failures are too many");
    assert_eq!(life.resolve(Verdict::Retry), Answer::Resolved);
    assert_eq!(due(life.row(), None, life.now), Some(life.now), "until a person decides");
}

#[test]
fn an_enqueue_without_a_policy_is_exhausted_when_the_worker_has_given_up() {
    let enqueue = |policy: Policy| Request { later: Some(Later::default()), policy, ..ask("a") };
    let unlimited = Policy { max_attempts: None, max_crashes: 99, ..policy() };
    for crashes in [false, true] {
        let mut life = Life::new();
        assert_eq!(life.claim(&enqueue(unlimited.clone())), Answer::Enqueued);
        for run in 1..=2 {
            let fence = life.acquire(&Request { at_once: true, ..ask("a") });
            match crashes {
                true => life.crash(),
                false => life.settle(fence, fail(Retry::Backoff)),
            }
            let said = life.claim(&enqueue(unlimited.clone()));
            assert_eq!(said == Answer::Exhausted, run == 2, "run {run}, crashes: {crashes}: {said:?}");
        }
        let strict = Policy { max_attempts: Some(1), max_crashes: 1, ..policy() };
        assert_eq!(life.claim(&enqueue(strict.clone())), Answer::Exhausted);
        assert_eq!(life.resolve(Verdict::Retry), Answer::Resolved);
        let waiting = Answer::Waiting { from: life.now };
        assert_eq!(life.claim(&enqueue(unlimited.clone())), waiting);
        let fence = life.acquire(&ask("a"));
        life.settle(fence, fail(Retry::Backoff));
        assert!(matches!(life.claim(&enqueue(strict)), Answer::NotYet { .. }), "the worker tries it again");
        let more = Request { at_once: true, policy: unlimited.clone(), ..ask("a") };
        life.acquire(&more);
    }
}

#[test]
fn a_pending_operation_without_a_delay_is_due_at_once() {
    let claimed = || {
        let mut life = Life::new();
        let fence = life.acquire(&Request { payload: Some("a".into()), ..ask_newer("a", 1) });
        (life, fence)
    };
    let (mut released, fence) = claimed();
    released.settle(fence, release());
    let (mut timed_out, _) = claimed();
    timed_out.crash();
    let (mut promoted, fence) = claimed();
    assert!(matches!(promoted.claim(&ask_newer("b", 2)), Answer::InFlight { kept: true, .. }));
    promoted.settle(fence, fail(Retry::Never));
    for life in [released, timed_out, promoted] {
        assert_eq!(due_of(&life), Some(life.now), "{:?}", life.row());
    }
    let (mut later, fence) = claimed();
    later.settle(fence, Write::Release { delay: TICK, why: None });
    assert_eq!(due_of(&later), Some(later.now + TICK));
}

#[test]
fn processing_completed_and_in_doubt_are_never_due() {
    let mut life = Life::new();
    let fence = life.acquire(&ask("a"));
    assert_eq!(due_of(&life), None, "it runs");
    let mut doubted = life.clone();
    doubted.settle(fence, doubt());
    assert_eq!(due_of(&doubted), None, "in doubt");
    life.settle(fence, complete("done"));
    assert_eq!(due_of(&life), None, "completed");
}

#[test]
fn a_superseded_note_names_both_fingerprints_and_orders() {
    let (older, newer) = (ask_newer("first", 1), ask_newer("second", 2));
    let mut life = Life::new();
    let fence = life.acquire(&older);
    let _ = life.claim(&newer);
    let step = life.happens(&super::life::Happening::Write(fence, complete("first")));
    let detail = &step.notes.last().expect("a note").detail;
    let (new, old) = (newer.fingerprint.to_hex(), older.fingerprint.to_hex());
    assert_eq!(*detail, format!("order 2 takes over from order 1: fingerprint {new} in place of {old}"));
}
