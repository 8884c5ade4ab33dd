//! The state machine of an operation.
//!
//! [`step`] is a pure and total function: from the stored row, an event and the time it computes the new row,
//! the answer and the notes for the journal. (Events without a policy use the one stored with the lease.)
//! Both databases are tested against it, and their general path calls it; only the two hottest transitions,
//! a first claim and a plain completion, are also written in SQL.
//!
//! ```text
//!                        claim
//!    (absent) ───────────────────────────► processing ─── complete ──► completed
//!        ▲                                  │  ▲  │ │                    │
//!        │ release of a first run           │  │  │ └─ doubt, or lease   │ newer data
//!        └──────────────────────────────────┘  │  │    lost under hold   │ (supersede)
//!                                              │  │    or probe          │
//!                      claim, after backoff    │  │         │            ▼
//!        ┌─────────────────────────────────────┤  │         ▼        processing
//!        │                  │                  │  │      in_doubt
//!     failed ◄── fail ──────┼──────────────────┼──┤         │
//!     timed_out ◄─ lease lost under rerun ─────┼──┘         │ resolved by a probe or a person:
//!     pending ◄─ release, or newer data waits ─┘            ▼ completed, failed, or pending again
//!        ▲
//!        └─ enqueue of an absent operation, or of newer data
//!    past its retention, a settled operation counts as absent; in_doubt and pending never expire
//! ```
//!
//! Five rules keep it correct:
//! - **The fence identifies the last writer.** A settle that finds its own fence on a row that is not
//!   processing was made before, and its answer was lost; it gets the same answer again. A transition
//!   that ends a lease without its owner (lease expiry, a resolution) writes a new fence.
//! - **An expired lease is ended first.** A claim, a resolution or a purge that finds one first makes
//!   the transition that the sweep would have made, and continues from there.
//! - **Past its retention is absent**, before the sweep has deleted it, too.
//! - **Completed stays completed**, except for newer data, and for a person who has it run again explicitly.
//! - **Pinned and completed is final** until its retention ends: no purge, no verdict and no newer data changes it.

mod claim;
mod enqueue;
mod settle;
mod tend;
#[cfg(test)]
mod tests;

use bytes::Bytes;

pub(crate) use claim::{is_exhausted, while_busy};
pub(crate) use settle::is_bare;
pub use settle::refusal;
pub use tend::{Aged, Purge, archived_note, purged_note, tombstone};

use crate::{
    Fence, Fingerprint, Key, Labels, Operation, Outcome, Policy, Priority, Runner, Scope, State, Timestamp, Token,
    journal::{self, Note},
};

/// The error of an operation that was cancelled.
pub const CANCELLED: &str = "cancelled";

/// The events of an operation.
#[derive(Clone, Debug)]
pub enum Event<'a> {
    /// A claim; `fence` is a new one.
    Claim {
        /// The request.
        request: &'a Request,
        /// A new fence, used if the answer is acquired.
        fence: Fence,
    },
    /// Inline mode: the claim is made in the transaction of its effect, so it completes at once.
    ClaimInline {
        /// The request.
        request: &'a Request,
        /// A new fence, used if the answer is acquired.
        fence: Fence,
    },
    /// A write under a lease.
    Write {
        /// The fence of the lease.
        fence: Fence,
        /// The write.
        write: Write,
    },
    /// The sweep checks for lease expiry.
    Lapse {
        /// A new fence, to refuse later writes of the former owner.
        fence: Fence,
    },
    /// The sweep checks for retention and archive.
    Tend,
    /// A person or a probe decides.
    Resolve {
        /// A new fence, to refuse later writes of the former owner.
        fence: Fence,
        /// Only if the operation still has this fence: a probe decides about one run.
        expected: Option<Fence>,
        /// The verdict.
        verdict: Verdict,
        /// The person or probe.
        actor: String,
        /// The reason.
        reason: String,
    },
    /// A person or a program withdraws a pending operation, or asks a run to stop.
    Cancel {
        /// A new fence, to refuse later writes of a former owner.
        fence: Fence,
        /// The person or program.
        actor: String,
        /// The reason.
        reason: String,
    },
    /// A person frees the key.
    Purge {
        /// The person.
        actor: String,
        /// The reason.
        reason: String,
    },
}

/// A claim or an enqueue.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Request {
    /// The scope.
    pub scope: Scope,
    /// The key.
    pub key: Key,
    /// The payload's fingerprint.
    pub fingerprint: Fingerprint,
    /// The payload's order, for supersede-if-newer.
    pub order: Option<i64>,
    /// The input, if it should be stored with the operation.
    pub payload: Option<Bytes>,
    /// The labels.
    pub labels: Labels,
    /// The policy.
    pub policy: Policy,
    /// Whether it ignores the backoff.
    pub at_once: bool,
    /// Set for an enqueue: the operation is run later, by a worker.
    pub later: Option<Later>,
    /// The length of the lease, if not that of the policy: a worker may ask for another one than the enqueue.
    pub lease: Option<std::time::Duration>,
    /// The token of the claim.
    pub token: Token,
    /// Whether the claimer keeps the token and sends the claim again if its answer is lost. Otherwise such a claim is
    /// withdrawn.
    pub sent_again: bool,
    /// The claimer, for the journal.
    pub owner: String,
}

impl Request {
    /// The kind under which its enqueue is due.
    #[must_use]
    pub fn listed_kind(&self) -> std::borrow::Cow<'_, str> {
        let kept = self.later.is_some_and(|later| later.keeps_policy);
        self.labels.listed_kind(self.scope.kind(), if kept { self.policy.runner } else { Runner::Worker })
    }
}

/// The terms of an enqueue.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Later {
    /// Not before this time.
    pub not_before: Option<Timestamp>,
    /// Not before this delay after it is stored.
    pub delay: std::time::Duration,
    /// Its priority among due operations.
    pub priority: Priority,
    /// Whether its runs use the policy of the enqueue; otherwise they use the worker's.
    pub keeps_policy: bool,
}

impl Later {
    /// The time from which it may run, if not at once.
    #[must_use]
    pub fn from(&self, now: Timestamp) -> Option<Timestamp> {
        let delayed = (!self.delay.is_zero()).then(|| now + self.delay);
        self.not_before.max(delayed).filter(|from| *from > now)
    }

    /// The time, the priority and the policy of an enqueue with this policy.
    fn terms(self, policy: &Policy, now: Timestamp) -> (Option<Timestamp>, Priority, Option<Policy>) {
        (self.from(now), self.priority, self.keeps_policy.then(|| policy.clone()))
    }
}

/// The writes under a lease.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Write {
    /// It took effect.
    Complete(Outcome),
    /// The run failed.
    Fail(Failure),
    /// The work had no effect: back to pending, optionally with a delay; no attempt is counted.
    Release {
        /// The delay before it may be claimed.
        delay: std::time::Duration,
        /// The reason, if there is one: stored as the operation's error.
        why: Option<String>,
    },
    /// Released without a run, because its target is paused. The journal has no note of it: while a target is
    /// unreachable, its operations are put off again and again.
    PutOff {
        /// The delay before it may be claimed.
        delay: std::time::Duration,
    },
    /// Released without a run, under another policy: another [runner](crate::Runner) runs it.
    HandOver(Box<Policy>),
    /// Undoes the claim: its answer was lost, and its caller got an error. A first claim leaves no
    /// trace, unless data is stored with it that may run again; any other claim is released.
    Withdraw,
    /// The work has begun, and its end is unknown.
    Doubt {
        /// The reason.
        reason: String,
    },
    /// Small data for the next attempt.
    Checkpoint(Bytes),
    /// A checkpoint of a run that got further than the last one: resets the count of crashes.
    Progress(Bytes),
    /// Extends the lease.
    Renew,
}

/// How a run failed.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Failure {
    /// The error.
    pub error: String,
    /// When it may run again.
    pub retry: Retry,
}

/// When a failed operation may run again.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Retry {
    /// After the policy's backoff.
    Backoff,
    /// After this long.
    After(std::time::Duration),
    /// Never, unless a person decides so.
    Never,
}

/// A decision of a person or a probe about an operation that does not run.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Verdict {
    /// It took effect, with this outcome.
    Completed(Outcome),
    /// It did not take effect, and must not run again.
    Failed,
    /// It did not take effect, and may run again, with its counts at zero.
    Retry,
    /// It has completed, and a person has it run again, with its counts at zero: it had nothing to do then. The effects
    /// of its completion are not undone. A pinned operation never runs again.
    Rerun {
        /// The data of an archived operation; any other has its own.
        archived: Option<Bytes>,
    },
}

/// The new row.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Next {
    /// No change.
    Same,
    /// A changed row.
    Put(Box<Operation>),
    /// A new row, in place of none or of an expired one.
    Anew(Box<Operation>),
    /// No row.
    Gone,
}

/// The answer to an event.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Answer {
    /// The claimer holds the lease.
    Acquired,
    /// It was enqueued.
    Enqueued,
    /// It was enqueued before and has not run yet.
    Waiting {
        /// The time from which it may run.
        from: Timestamp,
    },
    /// It took effect before; the row has the outcome.
    Replay {
        /// The payload was another one (`on_mismatch = replay`).
        mismatch: bool,
    },
    /// Another claim holds the lease.
    InFlight {
        /// The deadline of the lease.
        until: Timestamp,
        /// The claim's newer data is stored as the successor.
        kept: bool,
    },
    /// Its backoff is not over.
    NotYet {
        /// The end of the backoff.
        until: Timestamp,
    },
    /// The key belongs to another payload.
    Mismatch,
    /// No attempts are left, or it is parked.
    Exhausted,
    /// It may or may not have taken effect.
    InDoubt {
        /// The claim's newer data is stored as the successor.
        kept: bool,
    },
    /// The lease was renewed.
    Renewed {
        /// The new deadline.
        deadline: Timestamp,
        /// A cancellation of the run was requested.
        cancelled: bool,
    },
    /// The write was made.
    Written,
    /// The run is settled.
    Settled {
        /// There was a successor, and the operation is pending with it.
        successor: bool,
    },
    /// The fence is old: the lease was ended by another.
    Lost,
    /// The sweep ended an expired lease.
    Lapsed,
    /// The sweep (or a claim) found it past its retention.
    Expired,
    /// Its data is archived; the key stays taken.
    Archived,
    /// Nothing was due.
    NothingDue,
    /// The verdict was applied.
    Resolved,
    /// It was cancelled, and does not run again.
    Cancelled,
    /// It runs, and its worker was asked to stop.
    CancelAsked,
    /// The key is free.
    Purged,
    /// The action is not allowed in this state.
    NotNow(NotNow),
    /// Nothing was decided or stored: another transaction holds the row, or the database failed. The event can be sent
    /// again. Only a store gives this answer, for one event of a batch.
    Busy,
}

/// The reason why an action of a person or a probe was refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NotNow {
    /// There is no such operation.
    Absent,
    /// It is leased.
    Running,
    /// It has completed, and cannot be decided again.
    Completed,
    /// It has completed, and its policy pins it until its retention ends.
    Pinned,
    /// It has changed since the probe looked.
    MovedOn,
    /// It is in doubt: a verdict ends it, not a cancellation.
    InDoubt,
}

/// The result of a step.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Step {
    /// The new row.
    pub next: Next,
    /// The answer.
    pub answer: Answer,
    /// The notes for the journal.
    pub notes: Vec<Note>,
}

impl Step {
    fn answer(answer: Answer) -> Self {
        Self { next: Next::Same, answer, notes: Vec::new() }
    }

    fn put(operation: Operation, answer: Answer, notes: Vec<Note>) -> Self {
        Self { next: Next::Put(Box::new(operation)), answer, notes }
    }
}

/// One step of the state machine. See the [module](self).
#[must_use]
pub fn step(stored: Option<&Operation>, event: &Event<'_>, now: Timestamp) -> Step {
    let mut step = transition(stored, event, now);
    match &mut step.next {
        Next::Put(op) => op.never_due = is_never_due(stored, op, now),
        Next::Anew(op) => op.never_due = is_never_due(None, op, now),
        Next::Same | Next::Gone => {}
    }
    step
}

fn transition(stored: Option<&Operation>, event: &Event<'_>, now: Timestamp) -> Step {
    match event {
        Event::Claim { request, fence } | Event::ClaimInline { request, fence } if request.later.is_some() => {
            enqueue::enqueue(stored, request, *fence, now)
        }
        Event::Claim { request, fence } => claim::claim(stored, request, *fence, now),
        Event::ClaimInline { request, fence } => claim::claim_inline(stored, request, *fence, now),
        Event::Write { fence, write } => settle::write(stored, *fence, write, now),
        Event::Lapse { fence } => match stored.filter(|op| lapsed(op, now) || is_adrift(op)) {
            Some(op) => {
                let (op, notes) = tend::lapse(op, *fence, now);
                Step::put(op, Answer::Lapsed, notes)
            }
            None => Step::answer(Answer::NothingDue),
        },
        Event::Tend => tend::tend(stored, now),
        Event::Resolve { fence, expected, verdict, actor, reason } => {
            tend::resolve(stored, *fence, *expected, verdict, (actor, reason), now)
        }
        Event::Cancel { fence, actor, reason } => tend::cancel(stored, *fence, (actor, reason), now),
        Event::Purge { actor, reason } => tend::purge(stored, (actor, reason), now),
    }
}

/// The answer to a claim that changes nothing, from a row that was read without a lock.
#[must_use]
pub fn read(row: &Operation, request: &Request, now: Timestamp) -> Option<Answer> {
    /// Answers that change nothing do not contain the claim's fence.
    const UNDRAWN: Fence = Fence(i64::MAX);
    let read = step(Some(row), &Event::Claim { request, fence: UNDRAWN }, now);
    matches!(read.next, Next::Same).then_some(read.answer)
}

/// Whether a changed operation waits and no worker tries it. The end of its lease decides, and holds until it has
/// another fence or newer data.
fn is_never_due(old: Option<&Operation>, op: &Operation, now: Timestamp) -> bool {
    let waits = |op: &Operation| matches!(op.state, State::Pending | State::Failed | State::TimedOut);
    match old {
        _ if !waits(op) => false,
        Some(old) if old.is_left_to_callers() && !op.is_left_to_callers() => due(op, None, now).is_none(),
        Some(old) if waits(old) && (old.fence, old.order) == (op.fence, op.order) => old.never_due,
        _ => due(op, old.and_then(|old| old.lease.as_ref()).map(|lease| &lease.terms), now).is_none(),
    }
}

/// The time from which an operation is due, by the terms of the lease that ended; `now` is the time of that end. `None`
/// if a claim cannot decide it: in doubt, parked, or out of attempts by those terms. A later claim under a policy with
/// more attempts would acquire it, but no worker should try. Operations that are left to callers are never due.
#[must_use]
pub fn due(op: &Operation, terms: Option<&Policy>, now: Timestamp) -> Option<Timestamp> {
    match op.state {
        State::Processing | State::Completed | State::InDoubt => None,
        State::Pending | State::Failed | State::TimedOut => {
            let given_up = op.parked || terms.is_some_and(|terms| is_exhausted(op, terms));
            (!given_up && !op.is_left_to_callers()).then(|| op.not_before.unwrap_or(now))
        }
    }
}

/// Whether its lease has expired.
fn lapsed(operation: &Operation, now: Timestamp) -> bool {
    operation.lease.as_ref().is_some_and(|lease| lease.deadline <= now)
}

/// Whether its lease is missing: the row was damaged, or restored without its lease. No transaction leaves it so.
fn is_adrift(operation: &Operation) -> bool {
    operation.state == State::Processing && operation.lease.is_none()
}

/// Ends a run with a successor: the operation is pending with the newer data, its counts at zero, like a
/// new one.
fn promote(op: &mut Operation, actor: &str, now: Timestamp) -> Option<Note> {
    let successor = op.successor.take()?;
    // The whole fingerprints, so that a person who has the payloads can match them.
    let (newer, older) = (successor.fingerprint.to_hex(), op.fingerprint.to_hex());
    let order = op.order.map_or_else(|| "none".to_owned(), |order| order.to_string());
    let detail =
        format!("order {} takes over from order {order}: fingerprint {newer} in place of {older}", successor.order);
    op.fingerprint = successor.fingerprint;
    op.order = Some(successor.order);
    op.payload = successor.payload;
    unsettle(op);
    op.not_before = successor.not_before.filter(|from| *from > now);
    op.priority = successor.priority;
    op.terms = successor.terms;
    op.state = State::Pending;
    op.lease = None;
    op.failures = 0;
    op.crashes = 0;
    op.checkpoint = None;
    op.error = None;
    // The newer data was not claimed yet. This also distinguishes the row from a released one.
    op.owner.clear();
    Some(note(op, journal::Event::Superseded, actor, detail, now))
}

/// Clears the end of the last run, because another one follows.
fn unsettle(op: &mut Operation) {
    op.settled_at = None;
    op.not_before = None;
    op.expires_at = None;
    op.archive_at = None;
    op.archived = false;
    op.outcome = None;
    op.parked = false;
}

fn note(op: &Operation, event: journal::Event, actor: &str, detail: String, at: Timestamp) -> Note {
    Note { at, event, fence: op.fence, actor: actor.to_owned(), detail }
}
