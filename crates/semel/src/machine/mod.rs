//! The life of an operation, written once.
//!
//! [`step`] is a pure and total function: the stored row, an event and the time go in; the row as
//! it should be, the answer and the notes for the journal come out. (The policy comes with the
//! event that brings it, and is read from the lease for those that do not.) Both databases are
//! tested against it, and the rare paths of both call it; only the two hottest transitions, a
//! first claim and a plain completion, are written in SQL as well.
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
//!        └─ enqueue of what is absent, or of newer data
//!    past its retention, a settled operation counts as absent; in_doubt and pending never expire
//! ```
//!
//! Five habits keep it right:
//! - **The fence tells who wrote last.** A settle that finds its own fence on a row that is no
//!   longer processing was already made, and its first answer was lost; it is answered again.
//!   Whatever ends a lease over its owner's head (a lapse, a resolution) writes a new fence.
//! - **A lapsed lease lapses first.** A claim, a resolution or a purge that meets one first makes
//!   the transition that the sweep would have made, then goes on from there.
//! - **Expired is absent**, whether the sweep has come by or not.
//! - **Completed stays completed** but for newer data, and for a person who has it run once more by that name.
//! - **Pinned and completed is final** until then: no purge, no verdict and no newer data touches it.

mod claim;
mod enqueue;
mod settle;
mod tend;
#[cfg(test)]
mod tests;

use bytes::Bytes;

pub use claim::while_busy;
pub(crate) use settle::is_bare;
pub use settle::refusal;
pub use tend::{Aged, Purge, archived_note, purged_note, tombstone};

use crate::{
    Fence, Fingerprint, Key, Labels, Operation, Outcome, Policy, Priority, Scope, State, Timestamp, Token,
    journal::{self, Note},
};

/// The error of an operation that was cancelled.
pub const CANCELLED: &str = "cancelled";

/// What may happen to an operation.
#[derive(Clone, Debug)]
pub enum Event<'a> {
    /// Somebody asks to be the one who executes; `fence` is a new one.
    Claim {
        /// What is asked.
        request: &'a Request,
        /// A new fence, used if the answer is acquired.
        fence: Fence,
    },
    /// Inline mode: the claim is made in the transaction of its effect, so it completes at once.
    ClaimInline {
        /// What is asked.
        request: &'a Request,
        /// A new fence, used if the answer is acquired.
        fence: Fence,
    },
    /// The holder of a lease writes.
    Write {
        /// The fence of the lease.
        fence: Fence,
        /// What it writes.
        write: Write,
    },
    /// The sweep asks whether the lease has lapsed.
    Lapse {
        /// A new fence, so that what the former owner still sends is told apart.
        fence: Fence,
    },
    /// The sweep asks whether it is time to expire or archive.
    Tend,
    /// A person or a probe decides.
    Resolve {
        /// A new fence, so that what the former owner still sends is told apart.
        fence: Fence,
        /// Only if the operation still has this fence: what a probe found out is about one run.
        expected: Option<Fence>,
        /// What is decided.
        verdict: Verdict,
        /// Who decides.
        actor: String,
        /// Why.
        reason: String,
    },
    /// A person or a program withdraws what waits, or asks a run to stop.
    Cancel {
        /// A new fence, so that what a former owner still sends is told apart.
        fence: Fence,
        /// Who.
        actor: String,
        /// Why.
        reason: String,
    },
    /// A person frees the key.
    Purge {
        /// Who.
        actor: String,
        /// Why.
        reason: String,
    },
}

/// What a claim asks for, or what is enqueued.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Request {
    /// Whose operation, of which kind.
    pub scope: Scope,
    /// The caller's name for it.
    pub key: Key,
    /// The payload's fingerprint.
    pub fingerprint: Fingerprint,
    /// The payload's place in time, for supersede-if-newer.
    pub order: Option<i64>,
    /// The input, if it should be kept with the operation.
    pub payload: Option<Bytes>,
    /// What to find it by.
    pub labels: Labels,
    /// The rules.
    pub policy: Policy,
    /// Whether it waits for no backoff.
    pub at_once: bool,
    /// It is to be run later, by a worker, and not by the one who asks: an enqueue.
    pub later: Option<Later>,
    /// The claim's own mark.
    pub token: Token,
    /// Who asks, for the story.
    pub owner: String,
}

/// How an operation waits that is enqueued.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Later {
    /// Not before this time.
    pub not_before: Option<Timestamp>,
    /// Not before this long after it is stored.
    pub delay: std::time::Duration,
    /// Its place among what is due.
    pub priority: Priority,
    /// Whether its runs go by the policy of the enqueue; otherwise they go by the worker's.
    pub keeps_policy: bool,
}

impl Later {
    /// From when on it may run, if not at once.
    #[must_use]
    pub fn from(&self, now: Timestamp) -> Option<Timestamp> {
        let delayed = (!self.delay.is_zero()).then(|| now + self.delay);
        self.not_before.max(delayed).filter(|from| *from > now)
    }
}

/// What the holder of a lease can write.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Write {
    /// It took effect.
    Complete(Outcome),
    /// The run failed.
    Fail(Failure),
    /// The work has not begun: put it back, optionally for later.
    Release {
        /// How long to wait before it may be claimed.
        delay: std::time::Duration,
        /// Why nothing could be done, where that is worth telling: it is kept as the operation's error.
        why: Option<String>,
    },
    /// The claim itself is undone: its answer was lost, so its caller was told that nothing was claimed. A first claim
    /// leaves no trace, unless data is stored with it that may run again; any other is put back as by a release.
    Withdraw,
    /// The work has begun, and nobody knows how it ended.
    Doubt {
        /// Why nobody knows.
        reason: String,
    },
    /// Small data for the next attempt.
    Checkpoint(Bytes),
    /// The same of a run that has got further than the one before: the crashes so far say nothing about the next attempt.
    Progress(Bytes),
    /// Go on holding it.
    Renew,
}

/// How a run failed.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Failure {
    /// What it said.
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
    /// Never, unless a person says so.
    Never,
}

/// What a person or a probe decides about an operation that nobody runs.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Verdict {
    /// It did take effect, with this outcome.
    Completed(Outcome),
    /// It did not take effect, and should not run again.
    Failed,
    /// It did not take effect, and may run again, its counts at zero.
    Retry,
    /// It has completed, and a person wants it run once more all the same, its counts at zero: it had nothing to do
    /// then, and has now. What its completion did is not undone. Nothing that is pinned runs again.
    Rerun {
        /// The data of an operation that was archived; any other has its own.
        archived: Option<Bytes>,
    },
}

/// What becomes of the row.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Next {
    /// It stays as it is.
    Same,
    /// It changes.
    Put(Box<Operation>),
    /// A new row takes the place of nothing, or of an expired one.
    Anew(Box<Operation>),
    /// It goes.
    Gone,
}

/// What the event is answered.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Answer {
    /// The claimer holds the lease.
    Acquired,
    /// It waits to be run by a worker.
    Enqueued,
    /// It was enqueued before and has not run yet.
    Waiting {
        /// From when on it may run.
        from: Timestamp,
    },
    /// It took effect before; here is the outcome.
    Replay {
        /// The payload was another one (policy replay).
        mismatch: bool,
    },
    /// Somebody holds the lease.
    InFlight {
        /// When the lease ends unless renewed.
        until: Timestamp,
        /// The claim's newer data is kept and runs when the present run settles.
        kept: bool,
    },
    /// It may be claimed again later.
    NotYet {
        /// From when on.
        until: Timestamp,
    },
    /// The key belongs to another payload.
    Mismatch,
    /// No attempts are left.
    Exhausted,
    /// It may or may not have taken effect.
    InDoubt {
        /// The claim's newer data is kept and runs when the doubt is resolved.
        kept: bool,
    },
    /// The lease goes on until then.
    Renewed {
        /// The new deadline.
        deadline: Timestamp,
        /// Somebody has asked for the run to be cancelled.
        cancelled: bool,
    },
    /// The write was made.
    Written,
    /// The lease is ended as asked.
    Settled {
        /// Newer data waits, and the operation is pending with it.
        successor: bool,
    },
    /// The fence is an old one: somebody else decides about the operation now.
    Lost,
    /// The sweep ended a lapsed lease.
    Lapsed,
    /// The sweep (or a claim) found it past its retention.
    Expired,
    /// Its data goes to the archive; the key stays taken.
    Archived,
    /// Nothing was due.
    NothingDue,
    /// The verdict stands.
    Resolved,
    /// It does not run any more.
    Cancelled,
    /// It runs, and its worker is asked to stop.
    CancelAsked,
    /// The key is free.
    Purged,
    /// A person's action does not fit the state.
    NotNow(NotNow),
    /// Nothing was decided about this event, and nothing of it is stored: another transaction holds the row, or the
    /// database failed on the way. It can be sent again. Only a store says this, of one event in a batch.
    Busy,
}

/// Why a person's or a probe's action was not carried out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NotNow {
    /// There is no such operation.
    Absent,
    /// Somebody holds its lease.
    Running,
    /// It has completed; what took effect cannot be decided again.
    Completed,
    /// It has completed, and its policy pins it until its retention ends.
    Pinned,
    /// It has moved on since the probe looked.
    MovedOn,
    /// It may have taken effect: a verdict ends it, not a cancellation.
    InDoubt,
}

/// The result of a step.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Step {
    /// What becomes of the row.
    pub next: Next,
    /// What is answered.
    pub answer: Answer,
    /// What the journal is told.
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

/// One step of an operation's life. See the [module](self).
#[must_use]
pub fn step(stored: Option<&Operation>, event: &Event<'_>, now: Timestamp) -> Step {
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

/// The answer to a claim, where that changes nothing: read off a row that nobody has locked.
#[must_use]
pub fn read(row: &Operation, request: &Request, now: Timestamp) -> Option<Answer> {
    /// No answer that changes nothing tells of the claim's own fence.
    const UNDRAWN: Fence = Fence(i64::MAX);
    let read = step(Some(row), &Event::Claim { request, fence: UNDRAWN }, now);
    matches!(read.next, Next::Same).then_some(read.answer)
}

/// From when on somebody may claim an operation that nobody runs, going by the terms of the lease that ended; `now` is
/// when that happened. Nothing where it is not for a claim to decide: in doubt, parked, or out of attempts by those
/// terms. A later claim under a more generous policy would still get it, but nobody should come and try.
#[must_use]
pub fn due(op: &Operation, terms: Option<&Policy>, now: Timestamp) -> Option<Timestamp> {
    match op.state {
        State::Processing | State::Completed | State::InDoubt => None,
        State::Pending | State::Failed | State::TimedOut => {
            let given_up = op.parked || terms.is_some_and(|terms| claim::is_exhausted(op, terms));
            (!given_up).then(|| op.not_before.unwrap_or(now))
        }
    }
}

/// Whether its lease has ended without a word.
fn lapsed(operation: &Operation, now: Timestamp) -> bool {
    operation.lease.as_ref().is_some_and(|lease| lease.deadline <= now)
}

/// Whether its lease is missing: a row that was damaged, or restored without its lease. No transaction leaves it so.
fn is_adrift(operation: &Operation) -> bool {
    operation.state == State::Processing && operation.lease.is_none()
}

/// Ends a run that newer data waits for: the operation is pending with the newer data, its counts
/// at zero, as if that had just arrived.
fn promote(op: &mut Operation, actor: &str, now: Timestamp) -> Option<Note> {
    let successor = op.successor.take()?;
    // Whole, so that whoever has one of the two payloads can tell which it was.
    let (newer, older) = (successor.fingerprint.to_hex(), op.fingerprint.to_hex());
    let order = op.order.map_or_else(|| "none".to_owned(), |order| order.to_string());
    let detail =
        format!("order {} takes over from order {order}: fingerprint {newer} in place of {older}", successor.order);
    op.fingerprint = successor.fingerprint;
    op.order = Some(successor.order);
    op.payload = successor.payload;
    unsettle(op);
    op.state = State::Pending;
    op.lease = None;
    op.failures = 0;
    op.crashes = 0;
    op.checkpoint = None;
    op.error = None;
    // Nobody has claimed the newer data yet. This also tells the row from one that was released.
    op.owner.clear();
    Some(note(op, journal::Event::Superseded, actor, detail, now))
}

/// Forgets how the last run ended, because another one follows.
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
