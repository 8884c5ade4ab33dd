//! The sweep.

use std::time::Duration;

use super::{
    super::*,
    life::{Happening, LEASE, Life, RETENTION, TICK, ask, ask_newer, ask_under, complete, fail, policy},
    situations::situations,
};
use crate::OnLost;

#[test]
fn lease_expiry_is_in_doubt_under_hold_and_timed_out_under_rerun() {
    for (on_lost, state, noted) in [
        (OnLost::Rerun, State::TimedOut, journal::Event::TimedOut),
        (OnLost::Hold, State::InDoubt, journal::Event::Doubted),
        (OnLost::Probe, State::InDoubt, journal::Event::Doubted),
    ] {
        let mut life = Life::new();
        life.acquire(&ask_under("a", on_lost));
        life.pass(LEASE - TICK);
        assert_eq!(life.lapse(), Answer::NothingDue, "a lease lasts to its deadline");
        life.pass(TICK);
        let step = life.happens(&Happening::Lapse);
        assert_eq!((step.answer, step.notes[0].event), (Answer::Lapsed, noted));
        assert_eq!((life.row().state, life.row().crashes), (state, 1));
        assert_eq!(life.row().settled_at, Some(life.now));
        assert_eq!(life.row().error.as_deref(), Some("the lease of worker expired"));
        assert_eq!(life.row().expires_at.is_some(), on_lost == OnLost::Rerun, "a doubt never expires");
        assert_eq!(life.lapse(), Answer::NothingDue, "once is enough");
    }
}

#[test]
fn only_a_lease_can_expire() {
    for (name, mut life) in situations() {
        let lapsed = life.row.as_ref().is_some_and(|op| lapsed(op, life.now));
        let expected = if lapsed { Answer::Lapsed } else { Answer::NothingDue };
        assert_eq!(life.lapse(), expected, "{name}");
    }
}

#[test]
fn a_completed_operation_only_changes_by_newer_data_expiry_archive_or_purge() {
    let completed = situations().into_iter().filter(|(_, life)| life.state() == Some(State::Completed));
    for (name, life) in completed.filter(|(_, life)| !life.row().has_expired(life.now)) {
        let fence = life.row().fence;
        let mut events = vec![Happening::Lapse, Happening::Tend];
        events.extend([ask("first"), ask("other"), ask_newer("other", 1)].map(Happening::Claim));
        events.extend([ask("first"), ask("other"), ask_newer("other", 1)].map(Happening::Inline));
        events.extend(super::life::writes().map(|write| Happening::Write(fence, write)));
        for verdict in [Verdict::Completed(Outcome::kept("no, this")), Verdict::Failed, Verdict::Retry] {
            events.extend([None, Some(fence)].map(|expected| Happening::Resolve(expected, verdict.clone())));
        }
        for event in events {
            let mut after = life.clone();
            let answer = after.happens(&event).answer;
            assert_eq!(after.row, life.row, "{event:?} on {name} was answered {answer:?}");
        }
        let (newer, purge) = match life.row().is_final(life.now) {
            true => (Answer::Mismatch, Answer::NotNow(NotNow::Pinned)),
            false => (Answer::Acquired, Answer::Purged),
        };
        assert_eq!(life.clone().claim(&ask_newer("second", 2)), newer, "newer data on {name}");
        assert_eq!(life.clone().purge(), purge, "{name}");
        let mut expired = life.clone();
        expired.pass(RETENTION);
        assert_eq!(expired.clone().claim(&ask("other")), Answer::Acquired, "an expired {name}");
        assert_eq!(expired.tend(), Answer::Expired, "{name}");
    }
}

#[test]
fn archiving_never_frees_a_key() {
    let terms = Policy { retention: None, tombstone: Some(LEASE), ..policy() };
    let request = Request { policy: terms, payload: Some("a".into()), ..ask("a") };
    let mut life = Life::new();
    let fence = life.acquire(&request);
    life.settle(fence, complete("done"));
    life.pass(LEASE - TICK);
    assert_eq!(life.tend(), Answer::NothingDue);
    life.pass(TICK);
    assert_eq!(life.tend(), Answer::Archived);
    assert_eq!((&life.row().payload, &life.row().outcome), (&None, &Some(Outcome::not_kept(""))));
    for _ in 0..3 {
        life.pass(RETENTION * 9);
        assert_eq!(life.tend(), Answer::NothingDue, "once is enough");
        assert_eq!(life.claim(&request), Answer::Replay { mismatch: false });
        assert_eq!(life.claim(&ask("b")), Answer::Mismatch);
    }
    assert_eq!(life.write(fence, complete("done")), Answer::Settled { successor: false }, "its completion stands");
}

#[test]
fn an_archived_operation_that_runs_again_is_archived_again() {
    let mut life = Life::new();
    let terms = |request: Request| {
        let policy = Policy { retention: None, tombstone: Some(LEASE), ..request.policy.clone() };
        Request { policy, ..request }
    };
    for order in 1..4 {
        let fence = life.acquire(&terms(ask_newer(&order.to_string(), order)));
        life.settle(fence, complete("done"));
        life.pass(LEASE);
        assert_eq!(life.tend(), Answer::Archived, "round {order}");
    }
}

#[test]
fn a_parked_operation_that_ran_again_is_swept() {
    // Parked and kept for ever, it needs no sweep until a person has it run again.
    let for_ever = Policy { retention: None, tombstone: Some(LEASE), ..policy() };
    let request = Request { policy: for_ever, ..ask("a") };
    let mut life = Life::new();
    let fence = life.acquire(&request);
    life.settle(fence, fail(Retry::Never));
    life.pass(LEASE);
    assert_eq!((life.tend(), life.row().look_at), (Answer::NothingDue, None));
    assert_eq!(life.resolve(Verdict::Retry), Answer::Resolved);
    let fence = life.acquire(&request);
    life.settle(fence, complete("done"));
    life.pass(LEASE);
    assert_eq!(life.tend(), Answer::Archived);
}

#[test]
fn a_claim_with_a_shorter_retention_is_swept_at_its_end() {
    let short = Policy { retention: Some(LEASE), ..policy() };
    let mut life = Life::new();
    life.acquire(&ask("a"));
    life.crash();
    let fence = life.acquire(&Request { policy: short, ..ask("a") });
    life.settle(fence, complete("done"));
    life.pass(LEASE);
    assert_eq!(life.tend(), Answer::Expired);
}

#[test]
fn the_sweep_finds_every_operation_with_an_end() {
    for (name, mut life) in situations() {
        for _ in 0..6 {
            life.pass(RETENTION + Duration::from_secs(3600));
            if life.tend() == Answer::Expired {
                break;
            }
            let _ = life.lapse();
        }
        let stays = matches!(life.state(), Some(State::InDoubt | State::Pending));
        assert!(stays || life.row.is_none(), "{name} is still {:?}", life.row);
    }
}

#[test]
fn the_sweep_keeps_operations_that_run_wait_or_are_in_doubt() {
    for (name, mut life) in situations() {
        let Some(before) = life.row.clone().filter(|op| op.expires_at.is_none()) else { continue };
        life.row.as_mut().unwrap().look_at = Some(life.now);
        assert_eq!(life.tend(), Answer::NothingDue, "{name}");
        assert!(life.row().look_at > Some(life.now), "it is looked at again, later: {name}");
        assert_eq!(Operation { look_at: before.look_at, ..life.row().clone() }, before, "{name}");
    }
}
