//! Every write names its fence, and a fence settles once.

use std::time::Duration;

use super::{
    super::*,
    life::{Happening, LEASE, Life, MAX_RUN, TICK, ask, ask_newer, ask_under, complete, fail, settles, writes},
    situations::situations,
};
use crate::OnLost;

#[test]
fn a_write_under_an_old_fence_changes_nothing_in_any_state() {
    for (name, life) in situations() {
        let present = life.row.as_ref().map_or(5, |op| op.fence.0);
        for write in writes() {
            for other in [present - 1, present + 1] {
                let mut life = life.clone();
                let before = life.row.clone();
                let step = life.happens(&Happening::Write(Fence(other), write.clone()));
                assert_eq!(life.row, before, "{name}: {write:?}");
                match (&before, &write) {
                    // A first run that is released leaves no row: this may be the same write again.
                    (None, Write::Release { .. } | Write::Withdraw) => {
                        assert_eq!(step.answer, Answer::Settled { successor: false })
                    }
                    (None, _) => assert_eq!(step.answer, Answer::Lost),
                    (Some(_), _) => {
                        assert_eq!(step.answer, Answer::Lost, "{name}: {write:?}");
                        let noted = step.notes.iter().map(|note| (note.event, note.fence)).collect::<Vec<_>>();
                        assert_eq!(noted, [(journal::Event::Refused, Fence(other))], "{name}: {write:?}");
                    }
                }
            }
        }
    }
}

#[test]
fn a_zombie_of_a_purged_row_cannot_touch_the_row_that_took_its_key() {
    for write in writes() {
        let mut life = Life::new();
        let zombie = life.acquire(&ask("a"));
        life.pass(LEASE);
        assert_eq!(life.purge(), Answer::Purged);
        life.acquire(&ask("a"));
        let before = life.row.clone();
        assert_eq!(life.write(zombie, write), Answer::Lost);
        assert_eq!(life.row, before);
    }
}

#[test]
fn settling_again_with_the_same_fence_gets_the_same_answer() {
    for newer_waits in [false, true] {
        for write in settles() {
            let mut life = Life::new();
            let kept = Request { payload: Some("first".into()), ..ask_newer("first", 1) };
            let fence = life.acquire(&kept);
            if newer_waits {
                assert!(matches!(life.claim(&ask_newer("second", 2)), Answer::InFlight { kept: true, .. }));
            }
            let first = life.write(fence, write.clone());
            let row = life.row.clone();
            for _ in 0..2 {
                life.pass(LEASE);
                assert_eq!(life.write(fence, write.clone()), first, "{write:?}");
                assert_eq!(life.row, row, "{write:?}");
            }
        }
    }
}

#[test]
fn a_settled_lease_cannot_be_settled_in_another_way() {
    for first in settles() {
        for second in writes() {
            // Both of these release it.
            let releases = |write: &Write| matches!(write, Write::Release { .. } | Write::Withdraw);
            let same = std::mem::discriminant(&first) == std::mem::discriminant(&second);
            if same || releases(&first) && releases(&second) {
                continue;
            }
            let mut life = Life::new();
            let kept = Request { payload: Some("a".into()), ..ask("a") };
            let fence = life.acquire(&kept);
            life.settle(fence, first.clone());
            let row = life.row.clone();
            let answer = life.write(fence, second.clone());
            assert_eq!(life.row, row);
            assert_eq!(answer, Answer::Lost, "{first:?}, then {second:?}");
        }
    }
}

#[test]
fn the_owner_of_a_lease_that_another_ended_gets_lost() {
    for write in writes() {
        for on_lost in [OnLost::Rerun, OnLost::Hold, OnLost::Probe] {
            let mut life = Life::new();
            let fence = life.acquire(&ask_under("a", on_lost));
            life.crash();
            assert_eq!(life.write(fence, write.clone()), Answer::Lost, "{write:?} after lease expiry");
            for verdict in [Verdict::Completed(Outcome::kept("done")), Verdict::Failed, Verdict::Retry] {
                let mut life = life.clone();
                assert_eq!(life.resolve(verdict.clone()), Answer::Resolved);
                assert_eq!(life.write(fence, write.clone()), Answer::Lost, "{write:?} after {verdict:?}");
            }
        }
    }
}

#[test]
fn an_expired_lease_cannot_be_renewed_but_can_be_completed_until_taken_over() {
    for on_lost in [OnLost::Rerun, OnLost::Hold] {
        let mut life = Life::new();
        let fence = life.acquire(&ask_under("a", on_lost));
        life.pass(LEASE);
        assert_eq!(life.write(fence, Write::Renew), Answer::Lost, "others rely on its deadline");
        life.pass(LEASE * 5);
        let mut late = life.clone();
        assert_eq!(late.write(fence, complete("late")), Answer::Settled { successor: false });
        assert_eq!(late.row().outcome, Some(Outcome::kept("late")), "a late result that was not taken over is stored");

        let _ = life.claim(&ask("a"));
        assert_eq!(life.write(fence, complete("late")), Answer::Lost);
    }
}

#[test]
fn a_renewal_counts_from_now_and_renewals_end_at_max_run() {
    let mut life = Life::new();
    let (start, fence) = (life.now, life.acquire(&ask("a")));
    for seconds in [4, 8, 12, 16, 20, 24] {
        life.now = start + Duration::from_secs(seconds);
        let deadline = (life.now + LEASE).min(start + MAX_RUN);
        assert_eq!(life.write(fence, Write::Renew), Answer::Renewed { deadline, cancelled: false });
        assert!(matches!(life.claim(&ask("a")), Answer::InFlight { until, .. } if until == deadline));
    }
    life.now = start + MAX_RUN;
    assert_eq!(life.write(fence, Write::Renew), Answer::Lost, "a live but stuck run ends, too");
    assert_eq!(life.claim(&ask("a")), Answer::Acquired);
}

#[test]
fn a_renewal_is_noted_only_if_it_came_later_than_half_a_lease() {
    for (pauses, noted) in [
        (vec![5, 5, 5], vec![false, false, false]),
        (vec![6, 5, 9], vec![true, false, true]),
        // The deadline no longer moves by a whole lease towards the end of the longest run.
        (vec![5, 5, 5, 2, 2, 2], vec![false; 6]),
    ] {
        let mut life = Life::new();
        let fence = life.acquire(&ask("a"));
        let late: Vec<bool> = pauses
            .iter()
            .map(|pause| {
                life.pass(Duration::from_secs(*pause));
                let step = life.happens(&Happening::Write(fence, Write::Renew));
                assert!(matches!(step.answer, Answer::Renewed { .. }), "{step:?}");
                step.notes.iter().any(|note| note.event == journal::Event::RenewedLate)
            })
            .collect();
        assert_eq!(late, noted, "{pauses:?}");
    }
}

#[test]
fn a_checkpoint_lasts_until_the_operation_completes() {
    for crash in [false, true] {
        let mut life = Life::new();
        let fence = life.acquire(&ask("a"));
        assert_eq!(life.write(fence, Write::Checkpoint("half".into())), Answer::Written);
        match crash {
            true => life.crash(),
            false => life.settle(fence, fail(Retry::After(TICK))),
        }
        life.pass(TICK);
        let fence = life.acquire(&ask("a"));
        assert_eq!(life.row().checkpoint.as_deref(), Some(&b"half"[..]));
        life.settle(fence, complete("done"));
        assert_eq!((&life.row().checkpoint, &life.row().error), (&None, &None));
    }
}
