//! Every event on every kind of row. The rows come from a grid, not from a history: every row that
//! satisfies the invariants is tried, so the invariants are shown to be inductive.

use std::time::Duration;

use super::{
    super::*,
    invariants,
    life::{Happening, ask, ask_newer, complete, doubt, fail, policy, release, writes},
};
use crate::{LeaseRow, OnLost, OnMismatch, Successor};

const NOW: i64 = 1_000_000_000;
/// The fence of every row of the grid, and the one that is new.
const PRESENT: Fence = Fence(7);
const NEW: Fence = Fence(9);

fn at(seconds: i64) -> Timestamp {
    Timestamp::from_micros(NOW + seconds * 1_000_000)
}

/// Absent, past, now and future.
fn times() -> [Option<Timestamp>; 4] {
    [None, Some(at(-5)), Some(at(0)), Some(at(5))]
}

/// Rows that differ in columns that any state can have.
fn any_state(state: State) -> Vec<Operation> {
    let step = Happening::Claim(ask_newer("first", 5)).step(None, PRESENT, at(-8));
    let Next::Anew(first) = step.next else { panic!("{step:?}") };
    let mut rows = Vec::new();
    for (failures, crashes) in [(0, 0), (2, 0), (1, 2)] {
        for id in [PRESENT.0, 3] {
            for data in [None, Some("data".into())] {
                for look_at in times() {
                    let (id, payload, checkpoint) = (id, data.clone(), data.clone());
                    let row =
                        Operation { id, state, failures, crashes, payload, checkpoint, look_at, ..(*first).clone() };
                    rows.push(Operation { lease: None, ..row });
                }
            }
        }
    }
    rows
}

/// Every row made by one of `ways` from every row of `rows`.
fn each<T: Clone>(rows: Vec<Operation>, ways: &[T], make: impl Fn(&mut Operation, T)) -> Vec<Operation> {
    let made = |row: Operation| {
        ways.iter().cloned().map({
            let make = &make;
            move |way| {
                let mut row = row.clone();
                make(&mut row, way);
                row
            }
        })
    };
    rows.into_iter().flat_map(made).collect()
}

fn leases() -> Vec<LeaseRow> {
    let mut all = Vec::new();
    for on_lost in [OnLost::Rerun, OnLost::Hold, OnLost::Probe] {
        for retention in [None, Some(Duration::from_secs(100))] {
            for (deadline, run_until) in [(2, 17), (2, 2), (0, 15), (-1, -1)] {
                for cancelled in [false, true] {
                    let terms = Policy { on_lost, retention, tombstone: retention, ..policy() };
                    let (deadline, run_until) = (at(deadline), at(run_until));
                    all.push(LeaseRow { token: Token([1; 16]), deadline, run_until, terms, cancelled });
                }
            }
        }
    }
    all
}

fn rows_in(state: State) -> Vec<Operation> {
    let rows = any_state(state);
    let newer = ask_newer("second", 6);
    let bare = Successor {
        fingerprint: newer.fingerprint,
        order: 6,
        payload: Some("second".into()),
        not_before: None,
        priority: Priority::default(),
        terms: None,
    };
    let (priority, terms) = (Priority::ALL[0], Some(policy()));
    let own = Successor { not_before: Some(at(5)), priority, terms, ..bare.clone() };
    let overdue = Successor { not_before: Some(at(-1)), ..bare.clone() };
    let waits = [None, Some(bare), Some(own), Some(overdue)];
    let with_successor = |rows| each(rows, &waits, |row, waits| row.successor = waits);
    let settled = |rows| each(rows, &[()], |row, ()| row.settled_at = Some(at(-3)));
    let ended_badly = |rows| {
        let rows = each(settled(rows), &times(), |row, until| row.not_before = until);
        let rows = each(rows, &times(), |row, end| row.expires_at = end);
        each(rows, &[(false, false), (false, true), (true, true)], |row, (parked, never_due)| {
            (row.parked, row.never_due) = (parked, never_due);
        })
    };
    match state {
        State::Pending => {
            let rows = each(rows, &times(), |row, until| row.not_before = until);
            each(rows, &[false, true], |row, never_due| row.never_due = never_due)
        }
        State::Processing => with_successor(each(rows, &leases(), |row, lease| row.lease = Some(lease))),
        State::InDoubt => with_successor(settled(rows)),
        State::Failed | State::TimedOut => ended_badly(rows),
        State::Completed => {
            let rows = each(settled(rows), &times(), |row, end| row.expires_at = end);
            let rows = each(rows, &times(), |row, end| row.archive_at = end);
            let rows = each(rows, &[true, false], |row, pinned| row.pinned = pinned);
            each(rows, &[true, false], |row, kept| {
                row.checkpoint = None;
                row.outcome = Some(Outcome { kept, body: "done".into() });
                row.archived = !kept && row.payload.is_none() && row.archive_at.is_none();
            })
        }
    }
}

fn happenings() -> Vec<Happening> {
    let mut all = vec![Happening::Lapse, Happening::Tend, Happening::Cancel, Happening::Purge];
    for mismatch in [OnMismatch::Reject, OnMismatch::Replay, OnMismatch::SupersedeIfNewer] {
        for (payload, order) in [
            ("first", Some(5)),
            ("second", Some(6)),
            ("other", Some(9)),
            ("other", Some(5)),
            ("other", Some(1)),
            ("other", None),
        ] {
            for token in [Token([1; 16]), Token([2; 16])] {
                for at_once in [false, true] {
                    let policy = Policy { on_mismatch: mismatch, ..policy() };
                    let request = Request { order, token, policy, at_once, ..ask(payload) };
                    all.extend([Happening::Claim(request.clone()), Happening::Inline(request)]);
                }
            }
            for keeps_policy in [false, true] {
                let policy = Policy { on_mismatch: mismatch, ..policy() };
                let later = Some(Later { delay: Duration::from_secs(3), keeps_policy, ..Later::default() });
                all.push(Happening::Claim(Request { order, policy, later, ..ask(payload) }));
            }
        }
    }
    let more = [fail(Retry::Never), Write::Release { delay: Duration::from_secs(5), why: None }];
    for write in writes().into_iter().chain(more) {
        all.extend([5, 7, 8].map(|fence| Happening::Write(Fence(fence), write.clone())));
    }
    let again = Verdict::Rerun { archived: None };
    for verdict in [Verdict::Completed(Outcome::kept("yes")), Verdict::Failed, Verdict::Retry, again] {
        let expected = [None, Some(PRESENT), Some(Fence(5))];
        all.extend(expected.map(|expected| Happening::Resolve(expected, verdict.clone())));
    }
    all
}

#[test]
fn every_event_on_every_kind_of_row_keeps_the_invariants() {
    let happenings = happenings();
    let rows = State::ALL.into_iter().flat_map(rows_in);
    let mut pairs = 0;
    for row in rows.filter(|row| row.look_at.is_some() || !invariants::has_an_end(row)) {
        invariants::row(&row);
        for happening in &happenings {
            let step = happening.step(Some(&row), NEW, at(0));
            invariants::step(Some(&row), happening, NEW, at(0), &step);
            pairs += 1;
        }
    }
    println!("{pairs} pairs");
    assert!(pairs > 500_000, "the grid has holes: {pairs} pairs");
}

#[test]
fn every_event_without_a_row_keeps_the_invariants() {
    for happening in happenings() {
        invariants::step(None, &happening, NEW, at(0), &happening.step(None, NEW, at(0)));
    }
}

#[test]
fn extreme_times_and_policies_do_not_overflow() {
    // The machine is total: it must not overflow with an absurd clock or policy.
    let absurd = [Duration::ZERO, Duration::from_micros(1), Duration::MAX];
    let moments = [i64::MIN, -1, 0, 1, i64::MAX].map(Timestamp::from_micros);
    let writes = [complete("done"), fail(Retry::Backoff), fail(Retry::After(Duration::MAX)), release(), doubt()];
    for lease in absurd {
        for rest in absurd {
            let backoff = crate::Backoff { first: rest, cap: Duration::MAX };
            let (max_run, retention, tombstone) = (rest, Some(rest), Some(rest));
            let policy = Policy { lease, max_run, retention, tombstone, backoff, max_attempts: None, ..policy() };
            let request = Request { policy, ..ask("a") };
            for begun in moments {
                let claim = Happening::Claim(request.clone());
                let Next::Anew(row) = claim.step(None, Fence(1), begun).next else { panic!("a first claim") };
                let mut events = vec![claim.clone(), Happening::Lapse, Happening::Tend];
                events.extend(writes.clone().map(|write| Happening::Write(Fence(1), write)));
                events.push(Happening::Write(Fence(1), Write::Renew));
                for now in moments {
                    for event in &events {
                        let next = event.step(Some(&row), Fence(2), now).next;
                        if let Next::Put(row) = next {
                            let _ = Happening::Tend.step(Some(&row), Fence(3), now);
                            let _ = claim.step(Some(&row), Fence(3), now);
                        }
                    }
                }
            }
        }
    }
}
