//! Verdicts of a person or a probe.

use super::{
    super::*,
    life::{Happening, LEASE, Life, RETENTION, TICK, ask, ask_under, complete, doubt, fail, policy, release},
    situations::situations,
};
use crate::OnLost;

fn verdicts() -> [Verdict; 3] {
    [Verdict::Completed(Outcome::kept("yes")), Verdict::Failed, Verdict::Retry]
}

#[test]
fn a_verdict_needs_an_operation_that_neither_runs_nor_has_completed() {
    for (name, life) in situations() {
        for verdict in verdicts() {
            let mut life = life.clone();
            let expected = match &life.row {
                None => Answer::NotNow(NotNow::Absent),
                Some(op) if op.has_expired(life.now) => Answer::NotNow(NotNow::Absent),
                Some(op) if op.lease.is_some() && !lapsed(op, life.now) => Answer::NotNow(NotNow::Running),
                Some(op) if op.is_final(life.now) => Answer::NotNow(NotNow::Pinned),
                Some(op) if op.state == State::Completed => Answer::NotNow(NotNow::Completed),
                Some(_) => Answer::Resolved,
            };
            let before = life.row.clone();
            let answer = life.resolve(verdict.clone());
            assert_eq!(answer, expected, "{verdict:?} on {name}");
            if answer == Answer::Resolved {
                let (before, after) = (before.unwrap(), life.row());
                assert!(after.fence > before.fence, "writes of the former owner are refused: {name}");
            }
        }
    }
}

#[test]
fn a_completed_operation_runs_again_only_by_an_explicit_verdict() {
    let mut life = Life::new();
    let fence = life.acquire(&ask("a"));
    assert_eq!(life.write(fence, complete("nothing to do")), Answer::Settled { successor: false });
    let again = Verdict::Rerun { archived: None };
    let done = life.row().fence;
    assert_eq!(life.happens(&Happening::Resolve(Some(done), again.clone())).answer, Answer::Resolved);
    let row = life.row();
    assert_eq!((row.state, row.failures, row.crashes, &row.outcome), (State::Pending, 0, 0, &None));
    assert!(row.fence > done);
    // The same verdict again is about a run that has ended.
    let twice = life.happens(&Happening::Resolve(Some(done), again.clone())).answer;
    assert_eq!(twice, Answer::NotNow(NotNow::MovedOn));
    let fence = life.acquire(&ask("a"));
    assert_eq!(life.resolve(again), Answer::NotNow(NotNow::Running));
    assert_eq!(life.write(fence, complete("done")), Answer::Settled { successor: false });
}

#[test]
fn a_pinned_operation_never_runs_again_and_an_archived_one_gets_its_data_back() {
    for (name, life) in situations() {
        let Some(row) = life.row.clone().filter(|op| op.state == State::Completed && !op.has_expired(life.now)) else {
            continue;
        };
        let mut life = life.clone();
        let answer = life.resolve(Verdict::Rerun { archived: Some("kept".into()) });
        if row.is_final(life.now) {
            assert_eq!(answer, Answer::NotNow(NotNow::Pinned), "{name}");
            continue;
        }
        assert_eq!(answer, Answer::Resolved, "{name}");
        let expected = if row.archived { Some("kept".into()) } else { row.payload };
        assert_eq!((life.row().payload.clone(), life.row().archived), (expected, false), "{name}");
    }
}

#[test]
fn a_verdict_about_another_run_changes_nothing() {
    for (name, life) in situations() {
        let Some(row) = life.row.clone().filter(|op| !op.has_expired(life.now)) else { continue };
        for verdict in verdicts() {
            for other in [row.fence.0 - 1, row.fence.0 + 1] {
                let mut life = life.clone();
                let step = life.happens(&Happening::Resolve(Some(Fence(other)), verdict.clone()));
                assert_eq!(step.answer, Answer::NotNow(NotNow::MovedOn), "{name}");
                assert_eq!(life.row.as_ref(), Some(&row));
            }
            let (mut expecting, mut plain) = (life.clone(), life.clone());
            let found = Happening::Resolve(Some(row.fence), verdict.clone());
            assert_eq!(expecting.happens(&found).answer, plain.resolve(verdict), "{name}");
            assert_eq!(expecting.row, plain.row, "{name}");
        }
    }
}

#[test]
fn a_run_that_a_person_resolves_as_completed_keeps_its_number() {
    for on_lost in [OnLost::Hold, OnLost::Rerun] {
        let mut life = Life::new();
        life.acquire(&ask_under("a", on_lost));
        life.pass(LEASE * 2);
        assert_eq!(life.resolve(Verdict::Completed(Outcome::kept("yes"))), Answer::Resolved);
        assert_eq!((life.row().state, life.row().attempt()), (State::Completed, 1), "its only run took effect");
    }
}

#[test]
fn of_two_probes_one_decides() {
    let mut life = Life::new();
    life.acquire(&ask_under("a", OnLost::Probe));
    life.crash();
    let fence = life.row().fence;
    let found = |verdict| Happening::Resolve(Some(fence), verdict);
    assert_eq!(life.happens(&found(Verdict::Completed(Outcome::kept("yes")))).answer, Answer::Resolved);
    assert_eq!(life.happens(&found(Verdict::Retry)).answer, Answer::NotNow(NotNow::MovedOn));
    assert_eq!(life.claim(&ask("a")), Answer::Replay { mismatch: false });
}

#[test]
fn an_operation_resolved_as_completed_is_kept_until_a_person_purges_it() {
    let mut life = Life::new();
    life.acquire(&ask_under("a", OnLost::Hold));
    life.crash();
    assert_eq!(life.resolve(Verdict::Completed(Outcome::kept("yes"))), Answer::Resolved);
    assert_eq!((life.row().outcome.clone(), &life.row().error), (Some(Outcome::kept("yes")), &None));
    life.pass(RETENTION * 99);
    let _ = life.tend();
    assert_eq!(life.claim(&ask("a")), Answer::Replay { mismatch: false });
    assert_eq!(life.purge(), Answer::Purged);
    assert_eq!(life.claim(&ask("a")), Answer::Acquired);
}

/// Its retention is unknown. It makes no difference whether the sweep came before the person.
#[test]
fn a_resolved_doubt_or_pending_operation_is_kept_until_a_person_purges_it() {
    for verdict in [Verdict::Completed(Outcome::kept("yes")), Verdict::Failed] {
        for on_lost in [OnLost::Hold, OnLost::Probe, OnLost::Rerun] {
            for how in ["swept", "not swept", "doubted", "pending"] {
                let mut life = Life::new();
                let fence = life.acquire(&ask_under("a", on_lost));
                match how {
                    "doubted" => life.settle(fence, doubt()),
                    "pending" => {
                        life.settle(fence, doubt());
                        assert_eq!(life.resolve(Verdict::Retry), Answer::Resolved);
                    }
                    // It is not in doubt.
                    _ if on_lost == OnLost::Rerun => continue,
                    "swept" => life.crash(),
                    _ => life.pass(LEASE),
                }
                assert_eq!(life.resolve(verdict.clone()), Answer::Resolved, "{on_lost:?}, {how}");
                assert_eq!(life.row().expires_at, None, "{on_lost:?}, {how}, {verdict:?}");
                life.pass(RETENTION * 99);
                let _ = life.tend();
                assert_ne!(life.claim(&ask("a")), Answer::Acquired, "{on_lost:?}, {how}, {verdict:?}");
                assert_eq!(life.purge(), Answer::Purged);
            }
        }
    }
}

/// The retention of a run that failed or was lost is still known.
#[test]
fn a_resolved_operation_that_was_not_in_doubt_is_kept_for_its_retention() {
    for verdict in [Verdict::Completed(Outcome::kept("yes")), Verdict::Failed] {
        for how in ["failed", "lost", "expired"] {
            let mut life = Life::new();
            let fence = life.acquire(&ask("a"));
            match how {
                "failed" => assert_eq!(life.write(fence, fail(Retry::Never)), Answer::Settled { successor: false }),
                "lost" => life.crash(),
                _ => life.pass(LEASE),
            }
            life.pass(RETENTION / 2);
            assert_eq!(life.resolve(verdict.clone()), Answer::Resolved, "{how}");
            assert_eq!(life.row().expires_at, Some(life.now + RETENTION), "{verdict:?} after it was {how}");
            life.pass(RETENTION - TICK);
            assert_ne!(life.claim(&ask("a")), Answer::Acquired, "{verdict:?} after it was {how}");
            life.pass(TICK);
            assert_eq!(life.claim(&ask("a")), Answer::Acquired, "{verdict:?} after it was {how}");
        }
    }
}

#[test]
fn the_end_of_a_run_is_noted_before_another_run() {
    let mut life = Life::new();
    let fence = life.acquire(&ask("a"));
    life.settle(fence, complete("yes"));
    let ended = life.row().settled_at.unwrap();
    life.pass(LEASE);
    let step = life.happens(&Happening::Resolve(None, Verdict::Rerun { archived: None }));
    let noted: Vec<_> = step.notes.iter().map(|note| (note.event, note.at, note.fence, note.actor.as_str())).collect();
    let completed = (journal::Event::Completed, ended, fence, "worker");
    assert_eq!((noted.len(), noted[0], noted[1].0), (2, completed, journal::Event::Resolved));
}

#[test]
fn an_operation_resolved_as_completed_is_not_pinned() {
    let mut life = Life::new();
    life.acquire(&Request { policy: Policy { on_lost: OnLost::Hold, pinned: true, ..policy() }, ..ask("a") });
    life.crash();
    assert_eq!(life.resolve(Verdict::Completed(Outcome::kept("yes"))), Answer::Resolved);
    assert_eq!(life.purge(), Answer::Purged, "it would stay for ever");
}

#[test]
fn an_operation_resolved_as_failed_stays_failed_until_another_verdict() {
    let mut life = Life::new();
    let fence = life.acquire(&ask("a"));
    life.settle(fence, doubt());
    assert_eq!(life.resolve(Verdict::Failed), Answer::Resolved);
    assert_eq!((life.row().state, life.row().parked), (State::Failed, true));
    assert_eq!(life.row().error.as_deref(), Some("she knows"));
    life.pass(RETENTION * 99);
    assert_eq!(life.claim(&ask("a")), Answer::Exhausted);
    assert_eq!(life.resolve(Verdict::Retry), Answer::Resolved);
    assert_eq!(life.claim(&ask("a")), Answer::Acquired);
}

#[test]
fn a_retry_verdict_resets_all_attempts() {
    let mut life = Life::new();
    for _ in 0..2 {
        let fence = life.acquire(&ask("a"));
        life.settle(fence, fail(Retry::Backoff));
        life.pass(LEASE);
    }
    assert_eq!(life.claim(&ask("a")), Answer::Exhausted);
    assert_eq!(life.resolve(Verdict::Retry), Answer::Resolved);
    assert_eq!((life.row().state, life.row().failures, life.row().not_before), (State::Pending, 0, None));
    let fence = life.acquire(&ask("a"));
    life.settle(fence, fail(Retry::Backoff));
    life.pass(LEASE);
    assert_eq!(life.claim(&ask("a")), Answer::Acquired, "one of two attempts is left");
}

#[test]
fn a_verdict_ends_an_expired_lease_first() {
    for on_lost in [OnLost::Rerun, OnLost::Hold] {
        let mut life = Life::new();
        let fence = life.acquire(&ask_under("a", on_lost));
        life.pass(LEASE);
        let step = life.happens(&Happening::Resolve(Some(fence), Verdict::Completed(Outcome::kept("yes"))));
        assert_eq!((step.answer, step.notes.len()), (Answer::Resolved, 2), "the journal has both");
        assert_eq!((life.row().state, life.row().crashes), (State::Completed, 0), "that run did not crash after all");
        assert_eq!(life.write(fence, complete("late")), Answer::Lost);
        assert_eq!(life.row().outcome, Some(Outcome::kept("yes")));
    }
}

#[test]
fn purge_frees_every_key_that_is_neither_leased_nor_pinned() {
    for (name, mut life) in situations() {
        let live = life.row.as_ref().is_some_and(|op| op.lease.is_some() && !lapsed(op, life.now));
        let pinned = name.starts_with("completed and pinned");
        let expected = match &life.row {
            None => Answer::NotNow(NotNow::Absent),
            Some(_) if live => Answer::NotNow(NotNow::Running),
            Some(_) if pinned => Answer::NotNow(NotNow::Pinned),
            Some(_) => Answer::Purged,
        };
        assert_eq!(life.purge(), expected, "{name}");
        assert_eq!(life.row.is_some(), live || pinned, "{name}");
        if !live && !pinned {
            assert_eq!(life.claim(&ask("other")), Answer::Acquired, "{name}");
        }
    }
}

#[test]
fn in_doubt_ends_only_by_a_verdict_or_a_purge() {
    for (name, life) in situations().into_iter().filter(|(_, life)| life.state() == Some(State::InDoubt)) {
        let fence = life.row().fence;
        let mut events = vec![Happening::Lapse, Happening::Tend];
        events.extend([ask("first"), ask("other"), super::life::ask_newer("third", 3)].map(Happening::Claim));
        events.extend([complete("no"), fail(Retry::Never), release()].map(|write| Happening::Write(fence, write)));
        for event in events {
            let mut life = life.clone();
            life.pass(RETENTION * 99);
            life.happens(&event);
            assert_eq!(life.state(), Some(State::InDoubt), "{event:?} on {name}");
        }
    }
}
