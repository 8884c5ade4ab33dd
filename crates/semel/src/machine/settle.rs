//! Writes under a lease. Every write names its fence.

use super::{
    Answer, CANCELLED, Failure, Next, Retry, Step, Write,
    claim::{complete, is_exhausted},
    lapsed, note, promote,
};
use crate::{
    Fence, LeaseRow, Operation, Policy, State, Timestamp,
    journal::{Event, Note, RELEASED},
    text::bounded,
};

impl Write {
    /// The same, with its text cut to [`MAX_TEXT`](crate::MAX_TEXT) bytes.
    pub(crate) fn bounded(self) -> Self {
        match self {
            Self::Fail(Failure { error, retry }) => Self::Fail(Failure { error: bounded(error), retry }),
            Self::Doubt { reason } => Self::Doubt { reason: bounded(reason) },
            Self::Release { delay, why } => Self::Release { delay, why: why.map(bounded) },
            other => other,
        }
    }

    /// Its approximate size in a batch, for an operation with so many stored bytes. A text goes to the row and to the
    /// journal. A plain completion does not touch the stored data; every other write loads and saves it.
    pub(crate) fn weight(&self, stored: usize) -> usize {
        256 + match self {
            Self::Complete(outcome) => outcome.body.len(),
            Self::Checkpoint(data) | Self::Progress(data) => data.len() + stored,
            Self::Fail(Failure { error, .. }) => 2 * error.len() + stored,
            Self::Doubt { reason } => 2 * reason.len() + stored,
            Self::Release { why, .. } => why.as_ref().map_or(0, String::len) + stored,
            Self::PutOff { .. } | Self::HandOver(_) | Self::Withdraw => stored,
            Self::Renew => 0,
        }
    }
}

pub(super) fn write(stored: Option<&Operation>, fence: Fence, write: &Write, now: Timestamp) -> Step {
    match stored {
        Some(op) if op.fence == fence => match op.lease.clone() {
            Some(lease) => write_held(op.clone(), lease, write, now),
            None => made_before(op, write),
        },
        Some(op) => refused(op, fence, write, now),
        // A first run that is released leaves no row, so a release without a row was made before.
        None if matches!(
            write,
            Write::Release { .. } | Write::PutOff { .. } | Write::HandOver(_) | Write::Withdraw
        ) =>
        {
            Step::answer(Answer::Settled { successor: false })
        }
        None => Step::answer(Answer::Lost),
    }
}

/// The row has our fence and no lease: this write was made before, and its answer was lost; unless it says something else.
fn made_before(op: &Operation, write: &Write) -> Step {
    // An enqueued operation that was never claimed has had no lease.
    let successor = op.state == State::Pending && op.owner.is_empty() && op.was_claimed();
    let made = match write {
        Write::Complete(outcome) => {
            let same = op.archived || op.outcome.as_ref() == Some(outcome);
            (op.state == State::Completed && same) || successor
        }
        Write::Fail(failure) => {
            let same = op.error.as_ref() == Some(&failure.error) && (failure.retry == Retry::Never) == op.parked;
            (op.state == State::Failed && same) || successor || is_cancelled(op)
        }
        Write::Release { .. } | Write::PutOff { .. } | Write::HandOver(_) | Write::Withdraw => {
            (op.state == State::Pending && op.was_claimed()) || is_cancelled(op)
        }
        Write::Doubt { reason } => op.state == State::InDoubt && op.error.as_ref() == Some(reason),
        Write::Checkpoint(_) | Write::Progress(_) | Write::Renew => false,
    };
    Step::answer(if made { Answer::Settled { successor } } else { Answer::Lost })
}

/// Whether the run ended as cancelled, whatever it said.
fn is_cancelled(op: &Operation) -> bool {
    op.state == State::Failed && op.parked && op.error.as_deref() == Some(CANCELLED)
}

fn refused(op: &Operation, fence: Fence, write: &Write, now: Timestamp) -> Step {
    let note = refusal(fence, write, (op.state, op.fence), now);
    Step { next: Next::Same, answer: Answer::Lost, notes: vec![note] }
}

/// The note of a write under an old fence, by the state and the fence of the operation.
#[must_use]
pub fn refusal(fence: Fence, write: &Write, (state, present): (State, Fence), now: Timestamp) -> Note {
    let what = match write {
        Write::Complete(_) => "a completion",
        Write::Fail(_) => "a failure",
        Write::Release { .. } | Write::PutOff { .. } | Write::HandOver(_) => "a release",
        Write::Withdraw => "a withdrawal",
        Write::Doubt { .. } => "a doubt",
        Write::Checkpoint(_) | Write::Progress(_) => "a checkpoint",
        Write::Renew => "a renewal",
    };
    let detail = format!("{what} came late; the operation is {state} under fence {present}");
    Note { at: now, event: Event::Refused, fence, actor: String::new(), detail }
}

fn write_held(mut op: Operation, lease: LeaseRow, write: &Write, now: Timestamp) -> Step {
    let actor = op.owner.clone();
    let mut notes = Vec::new();
    // A cancel that the run has not heard of counts, unless the run took effect or may have.
    let cancelled = Write::Fail(Failure { error: CANCELLED.to_owned(), retry: Retry::Never });
    let write = match write {
        Write::Fail(_) | Write::Release { .. } | Write::PutOff { .. } | Write::HandOver(_) | Write::Withdraw
            if lease.cancelled =>
        {
            &cancelled
        }
        write => write,
    };
    match write {
        Write::Renew => return renew(op, lease, now),
        Write::Checkpoint(data) | Write::Progress(data) => {
            op.checkpoint = Some(data.clone());
            if matches!(write, Write::Progress(_)) {
                op.crashes = 0;
            }
            return Step::put(op, Answer::Written, notes);
        }
        // Late, but not taken over: the result is true, and worth storing.
        Write::Complete(outcome) => complete(&mut op, outcome.clone(), &lease.terms, now),
        Write::Fail(failure) => {
            fail(&mut op, failure, &lease, now);
            notes.push(note(&op, Event::Failed, &actor, failure.error.clone(), now));
        }
        Write::Release { delay, why } => return release(op, now, *delay, why.as_deref(), &actor),
        Write::HandOver(policy) => {
            op.terms = Some((**policy).clone());
            return release(op, now, std::time::Duration::ZERO, None, &actor);
        }
        Write::PutOff { delay } => {
            let mut step = release(op, now, *delay, None, &actor);
            step.notes.retain(|note| note.event != Event::Released);
            return step;
        }
        Write::Withdraw => return withdraw(op, now, &actor),
        Write::Doubt { reason } => {
            op.state = State::InDoubt;
            op.lease = None;
            op.crashes += 1;
            op.settled_at = Some(now);
            op.error = Some(reason.clone());
            notes.push(note(&op, Event::Doubted, &actor, reason.clone(), now));
            return Step::put(op, Answer::Settled { successor: false }, notes);
        }
    }
    let promoted = promote(&mut op, &actor, now);
    let answer = Answer::Settled { successor: promoted.is_some() };
    notes.extend(promoted);
    Step::put(op, answer, notes)
}

/// Whether an operation with a policy of its own may run again: it does not expire before it is settled for good.
pub(super) fn has_future(op: &Operation, terms: &Policy) -> bool {
    op.terms.is_some() && !is_exhausted(op, terms)
}

fn fail(op: &mut Operation, failure: &Failure, lease: &LeaseRow, now: Timestamp) {
    op.state = State::Failed;
    op.lease = None;
    op.failures += 1;
    op.settled_at = Some(now);
    op.error = Some(failure.error.clone());
    op.parked = failure.retry == Retry::Never;
    let wait = match failure.retry {
        Retry::Backoff => lease.terms.backoff.after(op.failures, op.id),
        Retry::After(wait) => wait,
        Retry::Never => std::time::Duration::ZERO,
    };
    op.not_before = (!wait.is_zero()).then(|| now + wait);
    // It must not expire before its retry has had its time.
    let retry = op.not_before.filter(|_| !is_exhausted(op, &lease.terms)).unwrap_or(now);
    op.expires_at = lease.terms.retention.map(|kept| (now + kept).max(retry + kept / 2));
    if has_future(op, &lease.terms) {
        op.expires_at = None;
    }
}

/// Whether it is a first run without stored data. The counts cannot tell: they are also zero when newer data
/// has replaced data that took effect, and freeing the key would let that take effect again.
pub(crate) fn is_bare(op: &Operation) -> bool {
    op.fence.0 == op.id && op.payload.is_none() && op.checkpoint.is_none()
}

/// Releases. A first run leaves no trace, so that the key is free again, also for another payload; unless
/// data was stored with it, which must not be lost.
fn release(mut op: Operation, now: Timestamp, delay: std::time::Duration, why: Option<&str>, actor: &str) -> Step {
    let settled = Answer::Settled { successor: false };
    let mut notes = Vec::new();
    if let Some(promoted) = promote(&mut op, actor, now) {
        notes.push(promoted);
        return Step::put(op, Answer::Settled { successor: true }, notes);
    }
    if is_bare(&op) && delay.is_zero() {
        return Step { next: Next::Gone, answer: settled, notes };
    }
    op.state = State::Pending;
    op.lease = None;
    op.not_before = (!delay.is_zero()).then(|| now + delay);
    if let Some(why) = why {
        op.error = Some(why.to_owned());
    }
    notes.push(note(&op, Event::Released, actor, why.unwrap_or(RELEASED).to_owned(), now));
    Step::put(op, settled, notes)
}

/// Undoes a claim whose caller got an error. A successor becomes pending.
///
/// Under rerun, stored data stays: another delivery of the same data may have been answered in flight meanwhile, and
/// its sender does not send it again. Under hold or probe nothing may run unrequested, and in flight is no
/// acknowledgement.
fn withdraw(op: Operation, now: Timestamp, actor: &str) -> Step {
    let is_first = op.fence.0 == op.id && op.successor.is_none();
    let doubts = op.lease.as_ref().is_some_and(|lease| lease.terms.on_lost.doubts());
    match is_first && (doubts || is_bare(&op)) {
        true => Step { next: Next::Gone, answer: Answer::Settled { successor: false }, notes: Vec::new() },
        false => release(op, now, std::time::Duration::ZERO, None, actor),
    }
}

/// An expired lease cannot be renewed, even if it was not taken over: others rely on its deadline.
fn renew(mut op: Operation, mut lease: LeaseRow, now: Timestamp) -> Step {
    if lapsed(&op, now) || lease.run_until <= now {
        return Step::answer(Answer::Lost);
    }
    let term = lease.terms.lease;
    let renewed_at = lease.deadline.as_micros() - crate::time::micros(term);
    let gap = now.since(Timestamp::from_micros(renewed_at));
    // A deadline that `max_run` cut short does not show when it was renewed.
    let late = gap > term / 2 && lease.deadline < lease.run_until;
    lease.deadline = (now + term).min(lease.run_until).max(lease.deadline);
    let (deadline, cancelled) = (lease.deadline, lease.cancelled);
    op.lease = Some(lease);
    let mut notes = Vec::new();
    if late {
        let detail = format!("renewed after {gap:?} of a lease of {term:?}");
        notes.push(note(&op, Event::RenewedLate, &op.owner, detail, now));
    }
    Step::put(op, Answer::Renewed { deadline, cancelled }, notes)
}
