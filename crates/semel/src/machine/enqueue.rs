//! Enqueues: work that is stored now and run later, by a worker.

use super::{
    Answer, Next, Request, Step,
    claim::{is_newer, look_by, stale, supersede, unclaimed},
    lapsed, tend,
};
use crate::{Fence, OnMismatch, Operation, State, Timestamp, journal::Note};

pub(super) fn enqueue(stored: Option<&Operation>, request: &Request, fence: Fence, now: Timestamp) -> Step {
    let Some(stored) = stored.filter(|op| !op.has_expired(now)) else {
        let mut op = unclaimed(request, fence, now);
        (op.not_before, op.priority, op.terms) = request.later.unwrap_or_default().terms(&request.policy, now);
        // Written now, so that neither the claim nor the completion touches an index.
        look_by(&mut op, &request.policy, now);
        return Step { next: Next::Anew(Box::new(op)), answer: Answer::Enqueued, notes: Vec::new() };
    };
    if !lapsed(stored, now) {
        return enqueue_known(stored, request, now, Vec::new());
    }
    // The sweep has not ended the expired lease yet; that comes first.
    let (lapsed, notes) = tend::lapse(stored, fence, now);
    let mut step = enqueue_known(&lapsed, request, now, notes);
    if step.next == Next::Same {
        step.next = Next::Put(Box::new(lapsed));
    }
    step
}

/// An enqueue of an existing key.
fn enqueue_known(op: &Operation, request: &Request, now: Timestamp, mut notes: Vec<Note>) -> Step {
    let is_known = op.fingerprint.matches(&request.fingerprint);
    if is_known && op.is_left_to_callers() && is_waiting(op) && !op.is_given_up() {
        return Step::put(taken_from_callers(op, request, now), Answer::Enqueued, notes);
    }
    match request.policy.on_mismatch {
        _ if is_known => Step { next: Next::Same, answer: known(op, now, false), notes },
        OnMismatch::Reject => Step { next: Next::Same, answer: Answer::Mismatch, notes },
        OnMismatch::Replay => Step { next: Next::Same, answer: known(op, now, true), notes },
        OnMismatch::SupersedeIfNewer if op.is_final(now) || !is_newer(op, request) => stale(op, request, notes),
        OnMismatch::SupersedeIfNewer => {
            let mut op = op.clone();
            // It waits for a run, or for the end of a doubt; otherwise it replaces the older data.
            if let Some(answer) = supersede(&mut op, request, now, &mut notes) {
                return Step::put(op, answer, notes);
            }
            look_by(&mut op, &request.policy, now);
            Step::put(op, Answer::Enqueued, notes)
        }
    }
}

fn is_waiting(op: &Operation) -> bool {
    matches!(op.state, State::Pending | State::Failed | State::TimedOut)
}

/// An operation whose callers failed: from now on a worker runs it, under the terms of this enqueue.
fn taken_from_callers(op: &Operation, request: &Request, now: Timestamp) -> Operation {
    let mut op = op.clone();
    let (from, priority, terms) = request.later.unwrap_or_default().terms(&request.policy, now);
    op.not_before = op.not_before.max(from);
    (op.priority, op.terms) = (priority, terms);
    op.payload = op.payload.or_else(|| request.payload.clone());
    look_by(&mut op, &request.policy, now);
    op
}

/// The answer to an enqueue of an existing key.
fn known(op: &Operation, now: Timestamp, mismatch: bool) -> Answer {
    let from = op.not_before.filter(|from| *from > now).unwrap_or(now);
    match op.state {
        State::Processing => {
            let until = op.lease.as_ref().map_or(now, |lease| lease.deadline);
            Answer::InFlight { until, kept: false }
        }
        State::Completed => Answer::Replay { mismatch },
        State::InDoubt => Answer::InDoubt { kept: false },
        // The worker's policy decides, which an enqueue without a policy does not know.
        State::Pending | State::Failed | State::TimedOut if op.is_given_up() => Answer::Exhausted,
        State::Pending => Answer::Waiting { from },
        State::Failed | State::TimedOut => Answer::NotYet { until: from },
    }
}
