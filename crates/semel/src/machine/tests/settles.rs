//! Settles.

use std::time::Duration;

use super::{
    super::*,
    life::{LEASE, Life, RETENTION, TICK, ask, ask_newer, ask_under, complete, doubt, fail, policy, release},
};
use crate::{OnLost, Token};

#[test]
fn release_of_a_first_run_frees_the_key_unless_data_was_stored() {
    let mut life = Life::new();
    let fence = life.acquire(&ask("a"));
    life.settle(fence, release());
    assert_eq!(life.state(), None);
    assert_eq!(life.claim(&ask("b")), Answer::Acquired, "the key is free, also for another payload");

    let keeping = Request { payload: Some("a".into()), ..ask("a") };
    let mut life = Life::new();
    let fence = life.acquire(&keeping);
    life.settle(fence, release());
    assert_eq!(life.state(), Some(State::Pending));
    assert_eq!(life.row().payload, keeping.payload, "accepted data is never lost");

    let mut life = Life::new();
    let fence = life.acquire(&ask("a"));
    assert_eq!(life.write(fence, Write::Checkpoint("half".into())), Answer::Written);
    life.settle(fence, release());
    assert_eq!(life.state(), Some(State::Pending), "nor is a checkpoint");
}

#[test]
fn release_for_later_keeps_the_key_and_the_time() {
    let delay = Duration::from_secs(7);
    let mut life = Life::new();
    let fence = life.acquire(&ask("a"));
    life.settle(fence, Write::Release { delay, why: None });
    let until = life.now + delay;
    assert_eq!(life.claim(&ask("a")), Answer::NotYet { until });
    life.now = until;
    assert_eq!(life.claim(&ask("a")), Answer::Acquired);
}

#[test]
fn release_counts_no_attempt_and_resets_none() {
    let mut life = Life::new();
    let fence = life.acquire(&ask("a"));
    life.settle(fence, fail(Retry::After(TICK)));
    for _ in 0..5 {
        life.pass(TICK);
        let fence = life.acquire(&ask("a"));
        life.settle(fence, release());
        assert_eq!((life.row().state, life.row().failures), (State::Pending, 1));
    }
}

#[test]
fn release_keeps_the_row_of_data_that_took_effect_before_newer_data() {
    let mut life = Life::new();
    let fence = life.acquire(&ask_newer("first", 1));
    life.settle(fence, complete("first"));
    let fence = life.acquire(&ask_newer("second", 2));
    life.settle(fence, release());
    assert_eq!(life.claim(&ask_newer("first", 1)), Answer::Mismatch, "the first took effect and is not newer");
    assert_eq!(life.claim(&ask_newer("second", 2)), Answer::Acquired);
}

#[test]
fn release_keeps_the_row_that_a_person_had_run_again() {
    let mut life = Life::new();
    life.acquire(&ask_under("a", OnLost::Hold));
    life.crash();
    assert_eq!(life.resolve(Verdict::Retry), Answer::Resolved);
    let fence = life.acquire(&ask("a"));
    life.settle(fence, release());
    assert_eq!(life.state(), Some(State::Pending));
}

#[test]
fn a_doubt_is_in_doubt_under_every_policy() {
    for on_lost in [OnLost::Rerun, OnLost::Hold, OnLost::Probe] {
        let mut life = Life::new();
        let fence = life.acquire(&ask_under("a", on_lost));
        life.settle(fence, doubt());
        assert_eq!((life.row().state, life.row().crashes, life.row().failures), (State::InDoubt, 1, 0));
        assert_eq!(life.row().error.as_deref(), Some("who knows"));
        assert_eq!(life.row().expires_at, None);
    }
}

#[test]
fn a_failure_decides_when_it_runs_again() {
    for (retry, parked) in [(Retry::Backoff, false), (Retry::After(LEASE), false), (Retry::Never, true)] {
        let mut life = Life::new();
        let fence = life.acquire(&ask("a"));
        life.settle(fence, fail(retry));
        assert_eq!((life.row().parked, life.row().not_before.is_none()), (parked, parked));
        assert_eq!((life.row().failures, life.row().crashes), (1, 0));
        assert_eq!(life.row().error.as_deref(), Some("it broke"));
        life.pass(RETENTION / 2);
        assert_eq!(life.claim(&ask("a")) == Answer::Exhausted, parked, "{retry:?}");
    }
}

#[test]
fn retention_and_tombstone_count_from_the_settle_by_the_terms_of_the_lease() {
    let terms = Policy { retention: Some(LEASE * 9), tombstone: Some(LEASE * 3), ..policy() };
    let mut life = Life::new();
    let fence = life.acquire(&Request { policy: terms, ..ask("a") });
    life.pass(LEASE / 2);
    life.settle(fence, complete("done"));
    let ends = (life.row().expires_at, life.row().archive_at);
    assert_eq!(ends, (Some(life.now + LEASE * 9), Some(life.now + LEASE * 3)));
}

#[test]
fn only_an_ordinary_life_writes_no_note() {
    use super::life::Happening::{Claim, Write as Writes};
    use journal::Event::{Doubted, Failed, Released, TakenOver};
    let noted_by = |life: &mut Life, what| life.happens(&what).notes.iter().map(|note| note.event).collect::<Vec<_>>();
    for (write, noted) in [
        (complete("done"), vec![]),
        (release(), vec![]),
        (fail(Retry::Backoff), vec![Failed]),
        (doubt(), vec![Doubted]),
        (Write::Release { delay: LEASE, why: None }, vec![Released]),
    ] {
        let mut life = Life::new();
        assert_eq!(noted_by(&mut life, Claim(ask("a"))), []);
        let fence = life.row().fence;
        assert_eq!(noted_by(&mut life, Writes(fence, write.clone())), noted, "{write:?}");
    }
    let mut life = Life::new();
    let fence = life.acquire(&ask("a"));
    life.settle(fence, fail(Retry::After(TICK)));
    life.pass(TICK);
    assert_eq!(noted_by(&mut life, Claim(ask("a"))), [TakenOver]);
}

#[test]
fn a_withdrawn_first_claim_leaves_only_stored_data_that_may_run_again() {
    let bare = ask("first");
    let stored = Request { payload: Some("data".into()), ..ask("first") };
    let held = |on_lost| Request { policy: Policy { on_lost, ..stored.policy.clone() }, ..stored.clone() };
    for gone in [bare, held(OnLost::Hold), held(OnLost::Probe)] {
        let mut life = Life::new();
        let fence = life.acquire(&gone);
        life.settle(fence, Write::Withdraw);
        assert_eq!(life.row, None, "{gone:?}");
    }
    // Its sender may have been answered in flight, and does not send it again.
    let mut life = Life::new();
    let fence = life.acquire(&stored);
    assert!(matches!(life.claim(&Request { token: Token([9; 16]), ..stored.clone() }), Answer::InFlight { .. }));
    life.settle(fence, Write::Withdraw);
    assert_eq!((life.state(), life.row().payload.as_deref()), (Some(State::Pending), Some(&b"data"[..])));
    assert_eq!((life.row().failures, life.row().crashes), (0, 0));
}

#[test]
fn the_successor_of_a_withdrawn_claim_is_pending() {
    let stored = Request { payload: Some("data".into()), ..ask_newer("first", 1) };
    let mut life = Life::new();
    let fence = life.acquire(&stored);
    let newer = Request { payload: Some("newer".into()), ..ask_newer("second", 2) };
    assert!(matches!(life.claim(&newer), Answer::InFlight { kept: true, .. }));
    assert_eq!(life.write(fence, Write::Withdraw), Answer::Settled { successor: true });
    assert_eq!((life.state(), life.row().payload.as_deref()), (Some(State::Pending), Some(&b"newer"[..])));
}

#[test]
fn a_withdrawn_takeover_counts_no_attempt() {
    for first in [fail(Retry::After(TICK)), Write::Release { delay: TICK, why: None }] {
        let mut life = Life::new();
        let fence = life.acquire(&Request { payload: Some("data".into()), ..ask("a") });
        life.settle(fence, first.clone());
        let (failures, crashes) = (life.row().failures, life.row().crashes);
        life.pass(TICK);
        let fence = life.acquire(&ask("a"));
        life.settle(fence, Write::Withdraw);
        let row = life.row();
        assert_eq!((row.state, row.failures, row.crashes), (State::Pending, failures, crashes), "{first:?}");
        assert_eq!(row.payload.as_deref(), Some(&b"data"[..]));
    }
}

#[test]
fn a_busy_row_answers_in_flight_only_to_its_stored_payload() {
    let mut life = Life::new();
    life.acquire(&ask_newer("first", 1));
    assert!(matches!(life.claim(&ask_newer("second", 2)), Answer::InFlight { kept: true, .. }));
    let answer = |life: &Life, payload, order| while_busy(life.row(), &ask_newer(payload, order), life.now);
    assert!(matches!(answer(&life, "first", 1), Answer::InFlight { kept: false, .. }));
    assert!(matches!(answer(&life, "second", 2), Answer::InFlight { kept: true, .. }));
    assert_eq!(answer(&life, "third", 3), Answer::Busy);
    assert_eq!(answer(&life, "older", 0), Answer::Busy, "the row may have changed since it was read");

    let mut life = Life::new();
    let fence = life.acquire(&ask_newer("first", 1));
    life.settle(fence, complete("done"));
    life.pass(RETENTION);
    assert_eq!(answer(&life, "first", 1), Answer::Busy, "an expired operation counts as absent");
}

#[test]
fn texts_and_stored_data_count_toward_the_size_of_a_batch() {
    let text = "x".repeat(1000);
    let fail = |error: &str| Write::Fail(Failure { error: error.into(), retry: Retry::Never });
    assert!(fail(&text).weight(0) >= fail("").weight(0) + 2 * text.len(), "to the row and to the journal");
    let doubt = |reason: &str| Write::Doubt { reason: reason.into() };
    assert!(doubt(&text).weight(0) >= doubt("").weight(0) + 2 * text.len());
    // These load and save the stored data.
    for write in [fail(""), doubt(""), release(), Write::Withdraw, Write::Checkpoint("so far".into())] {
        assert!(write.weight(1 << 20) >= 1 << 20, "{write:?}");
    }
}
