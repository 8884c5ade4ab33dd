//! Claims.

use std::borrow::Cow;

use super::{Answer, Next, Request, Step, lapsed, note, promote, tend, unsettle};
use crate::{
    Fence, LeaseRow, OnMismatch, Operation, Outcome, Policy, Priority, Runner, State, Successor, Timestamp,
    journal::{Event, Note},
};

pub(super) fn claim(stored: Option<&Operation>, request: &Request, fence: Fence, now: Timestamp) -> Step {
    match stored {
        Some(stored) if is_own(stored, request) && !lapsed(stored, now) => Step::answer(Answer::Acquired),
        _ => claim_once(stored, request, fence, now),
    }
}

/// A new claim.
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
    // The sweep has not ended the expired lease yet; that comes first.
    let (lapsed, notes) = tend::lapse(stored, fence, now);
    let mut step = claim_existing(Cow::Borrowed(&lapsed), request, fence, now, notes);
    if step.next == Next::Same {
        step.next = Next::Put(Box::new(lapsed));
    }
    step
}

/// Inline mode: one commit contains the claim and its effect, so there is no lease. A live lease is never its own:
/// the effect would be made here and by its holder.
pub(super) fn claim_inline(stored: Option<&Operation>, request: &Request, fence: Fence, now: Timestamp) -> Step {
    let mut step = claim_once(stored, request, fence, now);
    if step.answer == Answer::Acquired
        && let Next::Put(op) | Next::Anew(op) = &mut step.next
    {
        complete(op, Outcome::not_kept(""), &request.policy, now);
    }
    step
}

/// The answer to a claim of a row that another transaction has held for long, from what was read of the row. A claim
/// with the stored payload is in flight. Other data may be newer and is not stored, so its claim must be sent again.
#[must_use]
pub(crate) fn while_busy(row: &Operation, request: &Request, now: Timestamp) -> Answer {
    /// The retry delay.
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

/// The row of a new operation that runs now.
fn anew(request: &Request, fence: Fence, now: Timestamp) -> Operation {
    let mut op = unclaimed(request, fence, now);
    op.terms = (request.policy.runner == Runner::Caller).then(|| request.policy.clone());
    grant(&mut op, request, fence, now);
    op
}

/// The row of a new operation that was not claimed.
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
        never_due: false,
        pinned: false,
        priority: Priority::default(),
        terms: None,
        owner: String::new(),
        created_at: now,
        claimed_at: Timestamp::NEVER,
        tried_since: None,
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

/// Grants the lease.
fn grant(op: &mut Operation, request: &Request, fence: Fence, now: Timestamp) {
    let mut policy = policy_of(op, request).clone();
    if op.is_left_to_callers() {
        op.terms = Some(policy.clone());
    }
    if let Some(lease) = request.lease {
        policy.max_run = policy.max_run.max(lease);
        policy.lease = lease;
    }
    unsettle(op);
    op.state = State::Processing;
    op.fence = fence;
    if op.owner.is_empty() {
        op.tried_since = (op.created_at != now).then_some(now);
    }
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

/// The policy of a run: the one of the enqueue, or the claimer's. Each claim of a caller brings its own, which is stored.
fn policy_of<'a>(op: &'a Operation, request: &'a Request) -> &'a Policy {
    match &op.terms {
        Some(own) if own.runner != Runner::Caller || request.policy.runner != Runner::Caller => own,
        _ => &request.policy,
    }
}

/// Sets when the sweep looks at the row: at the first possible end. Also for a row that the sweep had finished with.
/// Most rows keep their time.
pub(super) fn look_by(op: &mut Operation, policy: &Policy, now: Timestamp) {
    op.look_at = op.look_at.into_iter().chain(policy.first_look().map(|kept| now + kept)).min();
}

/// Whether the claim was sent again after its answer was lost: its token already holds the lease. A claim of other data
/// is another claim: a program that uses one token for all of its claims must not get this lease.
fn is_own(op: &Operation, request: &Request) -> bool {
    op.lease.as_ref().is_some_and(|lease| lease.token == request.token) && op.fingerprint.matches(&request.fingerprint)
}

/// A claim of an existing row. `notes` are those of a lease expiry.
fn claim_existing(op: Cow<'_, Operation>, request: &Request, fence: Fence, now: Timestamp, notes: Vec<Note>) -> Step {
    match request.policy.on_mismatch {
        _ if op.fingerprint.matches(&request.fingerprint) => by_state(op, request, fence, now, notes, false),
        OnMismatch::Reject => Step { next: Next::Same, answer: Answer::Mismatch, notes },
        OnMismatch::Replay => by_state(op, request, fence, now, notes, true),
        OnMismatch::SupersedeIfNewer if op.is_final(now) || !is_newer(&op, request) => stale(&op, request, notes),
        OnMismatch::SupersedeIfNewer => {
            let (mut op, mut notes) = (op.into_owned(), notes);
            if let Some(answer) = supersede(&mut op, request, now, &mut notes) {
                return Step::put(op, answer, notes);
            }
            grant(&mut op, request, fence, now);
            Step::put(op, Answer::Acquired, notes)
        }
    }
}

/// Newer than the stored data and than the successor. Equal is not newer.
pub(super) fn is_newer(op: &Operation, request: &Request) -> bool {
    let waiting = op.successor.as_ref().map(|successor| successor.order);
    match (request.order, op.order.max(waiting)) {
        (Some(new), Some(old)) => new > old,
        _ => false,
    }
}

/// Data that is not newer: a mismatch, unless it equals the successor.
pub(super) fn stale(op: &Operation, request: &Request, notes: Vec<Note>) -> Step {
    let waits = op.successor.as_ref().is_some_and(|successor| successor.fingerprint.matches(&request.fingerprint));
    let answer = match (&op.lease, op.state) {
        (Some(lease), _) if waits => Answer::InFlight { until: lease.deadline, kept: true },
        (_, State::InDoubt) if waits => Answer::InDoubt { kept: true },
        _ => Answer::Mismatch,
    };
    Step { next: Next::Same, answer, notes }
}

/// Takes newer data. While the older runs or is in doubt, the newer becomes its successor; the answer says so. Otherwise it
/// replaces the older.
pub(super) fn supersede(
    op: &mut Operation,
    request: &Request,
    now: Timestamp,
    notes: &mut Vec<Note>,
) -> Option<Answer> {
    op.successor = Some(newer(op, request, now));
    if let Some(lease) = &op.lease {
        return Some(Answer::InFlight { until: lease.deadline, kept: true });
    }
    if op.state == State::InDoubt {
        return Some(Answer::InDoubt { kept: true });
    }
    notes.extend(promote(op, &request.owner, now));
    None
}

/// The newer data of a request, with the terms of its enqueue.
fn newer(op: &Operation, request: &Request, now: Timestamp) -> Successor {
    let (not_before, priority, terms) = match (request.later, &op.successor) {
        (Some(later), _) => later.terms(&request.policy, now),
        (None, Some(waiting)) => (None, waiting.priority, waiting.terms.clone()),
        (None, None) => (None, op.priority, op.terms.clone()),
    };
    let (fingerprint, payload) = (request.fingerprint, request.payload.clone());
    Successor { fingerprint, order: request.order.unwrap_or(i64::MIN), payload, not_before, priority, terms }
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
                    // Nothing has taken effect under this key, so there is no outcome to replay.
                    op.fingerprint = request.fingerprint;
                    op.order = request.order;
                    op.payload.clone_from(&request.payload);
                    op.checkpoint = None;
                }
                grant(&mut op, request, fence, now);
                // The first run of an enqueued operation is ordinary and needs no note.
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

/// The end of the backoff, unless the claim ignores it.
fn waits_until(op: &Operation, request: &Request, now: Timestamp) -> Option<Timestamp> {
    op.not_before.filter(|until| *until > now && !request.at_once)
}

pub(crate) fn is_exhausted(op: &Operation, policy: &Policy) -> bool {
    op.parked || policy.max_attempts.is_some_and(|most| op.failures >= most) || op.crashes >= policy.max_crashes
}
