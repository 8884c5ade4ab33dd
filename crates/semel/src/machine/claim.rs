//! Claims: who executes.

use std::borrow::Cow;

use super::{Answer, Next, Request, Step, lapsed, note, promote, tend, unsettle};
use crate::{
    Fence, LeaseRow, OnMismatch, Operation, Outcome, Policy, Priority, State, Successor, Timestamp,
    journal::{Event, Note},
};

pub(super) fn claim(stored: Option<&Operation>, request: &Request, fence: Fence, now: Timestamp) -> Step {
    match stored {
        Some(stored) if is_own(stored, request) && !lapsed(stored, now) => Step::answer(Answer::Acquired),
        _ => claim_once(stored, request, fence, now),
    }
}

/// A claim that has not been made before.
fn claim_once(stored: Option<&Operation>, request: &Request, fence: Fence, now: Timestamp) -> Step {
    let Some(stored) = stored.filter(|op| !op.has_expired(now)) else {
        return Step {
            next: Next::Anew(Box::new(anew(request, fence, now))),
            answer: Answer::Acquired,
            notes: Vec::new(),
        };
    };
    if !lapsed(stored, now) {
        return claim_existing(Cow::Borrowed(stored), request, fence, now, Vec::new());
    }
    // The sweep has not been here yet; what it would do comes first.
    let (lapsed, notes) = tend::lapse(stored, fence, now);
    let mut step = claim_existing(Cow::Borrowed(&lapsed), request, fence, now, notes);
    if step.next == Next::Same {
        step.next = Next::Put(Box::new(lapsed));
    }
    step
}

/// Inline mode: one commit makes the claim and its effect, so there is no lease to hold, and none
/// that could be its own: under a live lease, the effect would be made here and by its holder.
pub(super) fn claim_inline(stored: Option<&Operation>, request: &Request, fence: Fence, now: Timestamp) -> Step {
    let mut step = claim_once(stored, request, fence, now);
    if step.answer == Answer::Acquired
        && let Next::Put(op) | Next::Anew(op) = &mut step.next
    {
        complete(op, Outcome::not_kept(""), &request.policy, now);
    }
    step
}

/// The answer to a claim about a row that another transaction has held for long: what was read of the row is all that is
/// known. Whoever brings what is stored already can be told that it is in flight. Other data may be newer and is not
/// stored, so its claim has to be sent again.
#[must_use]
pub fn while_busy(row: &Operation, request: &Request, now: Timestamp) -> Answer {
    /// When to ask again.
    const LATER: std::time::Duration = std::time::Duration::from_secs(1);
    let waits = row.successor.as_ref().is_some_and(|successor| successor.fingerprint.matches(&request.fingerprint));
    match row.has_expired(now) {
        false if waits || row.fingerprint.matches(&request.fingerprint) => {
            Answer::InFlight { until: now + LATER, kept: waits }
        }
        _ => Answer::Busy,
    }
}

/// The row of a completed operation.
pub(super) fn complete(op: &mut Operation, outcome: Outcome, terms: &Policy, now: Timestamp) {
    op.state = State::Completed;
    op.lease = None;
    op.settled_at = Some(now);
    op.expires_at = terms.retention.map(|kept| now + kept);
    op.archive_at = terms.tombstone.map(|kept| now + kept);
    op.outcome = Some(outcome);
    op.error = None;
    op.checkpoint = None;
    op.not_before = None;
    op.parked = false;
}

/// The row of an operation that was never seen before (or so long ago that it counts as such), and that runs now.
fn anew(request: &Request, fence: Fence, now: Timestamp) -> Operation {
    let mut op = unclaimed(request, fence, now);
    grant(&mut op, request, fence, now);
    op
}

/// The row of an operation that was never seen before, and that no worker has claimed.
pub(super) fn unclaimed(request: &Request, fence: Fence, now: Timestamp) -> Operation {
    Operation {
        id: fence.0,
        scope: request.scope.clone(),
        key: request.key.clone(),
        labels: request.labels.clone(),
        fingerprint: request.fingerprint,
        order: request.order,
        payload: request.payload.clone(),
        state: State::Pending,
        fence,
        failures: 0,
        crashes: 0,
        parked: false,
        pinned: false,
        priority: Priority::default(),
        terms: None,
        owner: String::new(),
        created_at: now,
        claimed_at: Timestamp::NEVER,
        settled_at: None,
        not_before: None,
        expires_at: None,
        archive_at: None,
        archived: false,
        look_at: None,
        outcome: None,
        error: None,
        checkpoint: None,
        lease: None,
        successor: None,
    }
}

/// Gives the lease to the claimer.
fn grant(op: &mut Operation, request: &Request, fence: Fence, now: Timestamp) {
    let policy = policy_of(op, request).clone();
    unsettle(op);
    op.state = State::Processing;
    op.fence = fence;
    op.owner.clone_from(&request.owner);
    op.pinned = policy.pinned;
    op.claimed_at = now;
    look_by(op, &policy, now);
    op.lease = Some(LeaseRow {
        token: request.token,
        deadline: now + policy.lease,
        run_until: now + policy.max_run,
        terms: policy,
        cancelled: false,
    });
}

/// The policy that a run goes by: the one that the operation was enqueued with, or the claimer's.
fn policy_of<'a>(op: &'a Operation, request: &'a Request) -> &'a Policy {
    op.terms.as_ref().unwrap_or(&request.policy)
}

/// Lets the sweep look at it when it can first be over. Also a row that the sweep had done with: it settles once more.
/// Most keep their time.
pub(super) fn look_by(op: &mut Operation, policy: &Policy, now: Timestamp) {
    let first_end = policy.retention.into_iter().chain(policy.tombstone).min();
    op.look_at = op.look_at.into_iter().chain(first_end.map(|kept| now + kept)).min();
}

/// A claim whose answer was lost comes again with the same token: it holds the lease already.
fn is_own(op: &Operation, request: &Request) -> bool {
    op.lease.as_ref().is_some_and(|lease| lease.token == request.token)
}

/// A claim on a row that counts. `notes` is what a lapse has told so far.
fn claim_existing(op: Cow<'_, Operation>, request: &Request, fence: Fence, now: Timestamp, notes: Vec<Note>) -> Step {
    match request.policy.on_mismatch {
        _ if op.fingerprint.matches(&request.fingerprint) => by_state(op, request, fence, now, notes, false),
        OnMismatch::Reject => Step { next: Next::Same, answer: Answer::Mismatch, notes },
        OnMismatch::Replay => by_state(op, request, fence, now, notes, true),
        OnMismatch::SupersedeIfNewer if op.is_final(now) || !is_newer(&op, request) => stale(&op, request, notes),
        OnMismatch::SupersedeIfNewer => {
            let mut op = op.into_owned();
            op.successor = Some(Successor {
                fingerprint: request.fingerprint,
                order: request.order.unwrap_or(i64::MIN),
                payload: request.payload.clone(),
            });
            supersede(op, request, fence, now, notes)
        }
    }
}

/// Newer than what is there, and than what already waits. Equal is not newer.
pub(super) fn is_newer(op: &Operation, request: &Request) -> bool {
    let waiting = op.successor.as_ref().map(|successor| successor.order);
    match (request.order, op.order.max(waiting)) {
        (Some(new), Some(old)) => new > old,
        _ => false,
    }
}

/// Data that is not newer: refused, unless it is the very data that waits already.
pub(super) fn stale(op: &Operation, request: &Request, notes: Vec<Note>) -> Step {
    let waits = op.successor.as_ref().is_some_and(|successor| successor.fingerprint.matches(&request.fingerprint));
    let answer = match (&op.lease, op.state) {
        (Some(lease), _) if waits => Answer::InFlight { until: lease.deadline, kept: true },
        (_, State::InDoubt) if waits => Answer::InDoubt { kept: true },
        _ => Answer::Mismatch,
    };
    Step { next: Next::Same, answer, notes }
}

/// Newer data: it waits while the older runs or is in doubt, and runs at once otherwise.
fn supersede(mut op: Operation, request: &Request, fence: Fence, now: Timestamp, mut notes: Vec<Note>) -> Step {
    if let Some(lease) = &op.lease {
        let answer = Answer::InFlight { until: lease.deadline, kept: true };
        return Step::put(op, answer, notes);
    }
    if op.state == State::InDoubt {
        return Step::put(op, Answer::InDoubt { kept: true }, notes);
    }
    notes.extend(promote(&mut op, &request.owner, now));
    grant(&mut op, request, fence, now);
    Step::put(op, Answer::Acquired, notes)
}

fn by_state(
    op: Cow<'_, Operation>,
    request: &Request,
    fence: Fence,
    now: Timestamp,
    mut notes: Vec<Note>,
    mismatch: bool,
) -> Step {
    let policy = policy_of(&op, request);
    let answer = match op.state {
        State::Processing => {
            let until = op.lease.as_ref().map_or(now, |lease| lease.deadline);
            Answer::InFlight { until, kept: false }
        }
        State::Completed => Answer::Replay { mismatch },
        State::InDoubt => Answer::InDoubt { kept: false },
        State::Pending | State::Failed | State::TimedOut if is_exhausted(&op, policy) => Answer::Exhausted,
        State::Pending | State::Failed | State::TimedOut => match waits_until(&op, request, now) {
            Some(until) => Answer::NotYet { until },
            None => {
                let mut op = op.into_owned();
                let (earlier, is_first) = (op.state, !op.was_claimed());
                if mismatch {
                    // Nothing has taken effect under this key, so there is no original to replay.
                    op.fingerprint = request.fingerprint;
                    op.order = request.order;
                    op.payload.clone_from(&request.payload);
                    op.checkpoint = None;
                }
                grant(&mut op, request, fence, now);
                // The first run of what was enqueued is ordinary life.
                if !is_first {
                    let detail = format!("attempt {} after {earlier}", op.attempt());
                    notes.push(note(&op, Event::TakenOver, &request.owner, detail, now));
                }
                return Step::put(op, Answer::Acquired, notes);
            }
        },
    };
    Step { next: Next::Same, answer, notes }
}

/// The end of the backoff that the claim has to wait for.
fn waits_until(op: &Operation, request: &Request, now: Timestamp) -> Option<Timestamp> {
    op.not_before.filter(|until| *until > now && !request.at_once)
}

pub(super) fn is_exhausted(op: &Operation, policy: &Policy) -> bool {
    op.parked || policy.max_attempts.is_some_and(|most| op.failures >= most) || op.crashes >= policy.max_crashes
}
