//! Operations that no worker runs: lease expiry, retention, archive, verdicts, cancel, purge.

use std::time::Duration;

use super::{
    Answer, CANCELLED, Next, NotNow, Step, Verdict, claim::complete, is_adrift, is_never_due, lapsed, note, promote,
    settle::has_future, unsettle,
};
use crate::{
    Fence, Operation, Outcome, Policy, State, Successor, Timestamp,
    journal::{self, Event, Note, SWEEP},
};

/// When the sweep looks again at a row that is past its age but must stay: in doubt, pending or running.
const LOOK_AGAIN: Duration = Duration::from_secs(3600);

/// The same for a pending one: there may be millions, and each look is a write.
const LOOK_AGAIN_AT_WAITING: Duration = Duration::from_secs(24 * 3600);

/// Ends an expired lease, and promotes the successor unless there is doubt.
pub(super) fn lapse(held: &Operation, fence: Fence, now: Timestamp) -> (Operation, Vec<Note>) {
    let (mut op, mut notes) = end_lease(held, fence, now);
    if op.state != State::InDoubt {
        notes.extend(promote(&mut op, SWEEP, now));
    }
    // An enqueue that finds the expired lease is answered by this.
    op.never_due = is_never_due(Some(held), &op, now);
    (op, notes)
}

/// Ends an expired lease. The new fence distinguishes later writes of the former owner from earlier ones.
fn end_lease(op: &Operation, fence: Fence, now: Timestamp) -> (Operation, Vec<Note>) {
    let mut op = op.clone();
    let mut notes = Vec::new();
    let Some(lease) = op.lease.take() else {
        if is_adrift(&op) {
            notes.push(doubt_adrift(&mut op, fence, now));
        }
        return (op, notes);
    };
    let owner = op.owner.clone();
    op.fence = fence;
    op.crashes += 1;
    op.settled_at = Some(now);
    let gone = format!("the lease of {owner} expired");
    // The start of the run is overwritten by the next claim; for a first run only this note keeps it.
    let detail = journal::lapsed(&owner, op.claimed_at);
    if lease.terms.on_lost.doubts() {
        op.state = State::InDoubt;
        op.error = Some(gone);
        notes.push(note(&op, Event::Doubted, SWEEP, detail, now));
        return (op, notes);
    }
    if lease.cancelled {
        op.state = State::Failed;
        op.parked = true;
        op.error = Some(CANCELLED.to_owned());
        op.expires_at = lease.terms.retention.map(|kept| now + kept);
        notes.push(note(&op, Event::Cancelled, SWEEP, detail, now));
        return (op, notes);
    }
    op.state = State::TimedOut;
    op.error = Some(gone);
    op.parked = op.crashes >= lease.terms.max_crashes;
    let kept = lease.terms.retention.filter(|_| !has_future(&op, &lease.terms));
    op.expires_at = kept.map(|kept| now + kept);
    // The first takeover is at once; a crash loop backs off before it is parked.
    if op.crashes > 1 {
        let wait = lease.terms.backoff.after(op.crashes - 1, op.id);
        op.not_before = (!wait.is_zero()).then(|| now + wait);
    }
    notes.push(note(&op, Event::TimedOut, SWEEP, detail, now));
    (op, notes)
}

/// Ends a run whose lease is missing. Its terms were in the lease, so `on_lost` is unknown: in doubt is right under any
/// terms.
fn doubt_adrift(op: &mut Operation, fence: Fence, now: Timestamp) -> Note {
    let gone = format!("the lease of {} is missing: it was damaged, or not restored with its operation", op.owner);
    op.fence = fence;
    op.crashes += 1;
    op.settled_at = Some(now);
    op.state = State::InDoubt;
    op.error = Some(gone.clone());
    note(op, Event::Doubted, SWEEP, gone, now)
}

/// The action that the age of an operation requires. It needs only these columns, so that the sweep does not read the
/// stored data, which may be large or unreadable.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Aged {
    /// Its retention has ended: delete it.
    Expired,
    /// Archive its data.
    Archive,
    /// None yet. The sweep looks again at this time, if any.
    LookAt(Option<Timestamp>),
}

impl Aged {
    /// For an operation in this state, with these ends.
    #[must_use]
    pub fn of(state: State, expires_at: Option<Timestamp>, archive_at: Option<Timestamp>, now: Timestamp) -> Self {
        let is_over = |end: Option<Timestamp>| end.is_some_and(|end| end <= now);
        if is_over(expires_at) {
            return Self::Expired;
        }
        if is_over(archive_at) {
            return Self::Archive;
        }
        Self::LookAt(match state {
            // Settled; without an end it is kept for ever.
            State::Completed | State::Failed | State::TimedOut => expires_at.into_iter().chain(archive_at).min(),
            State::Processing | State::InDoubt => Some(now + LOOK_AGAIN),
            State::Pending => Some(now + LOOK_AGAIN_AT_WAITING),
        })
    }
}

/// The outcome that stays in the row of an archived operation.
#[must_use]
pub fn tombstone() -> Outcome {
    Outcome::not_kept("")
}

/// The note about archiving.
#[must_use]
pub fn archived_note(fence: Fence, at: Timestamp) -> Note {
    let detail = "the data went to the archive; the key stays taken".to_owned();
    Note { at, event: Event::Archived, fence, actor: SWEEP.to_owned(), detail }
}

/// Expires, archives, or sets when to look again.
pub(super) fn tend(stored: Option<&Operation>, now: Timestamp) -> Step {
    let Some(op) = stored.filter(|op| op.look_at.is_some_and(|at| at <= now)) else {
        return Step::answer(Answer::NothingDue);
    };
    let mut op = op.clone();
    match Aged::of(op.state, op.expires_at, op.archive_at, now) {
        Aged::Expired => Step { next: Next::Gone, answer: Answer::Expired, notes: Vec::new() },
        Aged::Archive => {
            op.archived = true;
            op.archive_at = None;
            op.outcome = Some(tombstone());
            op.payload = None;
            op.look_at = op.expires_at;
            let note = archived_note(op.fence, now);
            Step::put(op, Answer::Archived, vec![note])
        }
        Aged::LookAt(at) => {
            op.look_at = at;
            Step::put(op, Answer::NothingDue, Vec::new())
        }
    }
}

pub(super) fn resolve(
    stored: Option<&Operation>,
    fence: Fence,
    expected: Option<Fence>,
    verdict: &Verdict,
    (actor, reason): (&str, &str),
    now: Timestamp,
) -> Step {
    let Some(stored) = stored.filter(|op| !op.has_expired(now)) else {
        return Step::answer(Answer::NotNow(NotNow::Absent));
    };
    if expected.is_some_and(|expected| expected != stored.fence) {
        return Step::answer(Answer::NotNow(NotNow::MovedOn));
    }
    let (mut op, mut notes) = match stored.lease {
        // The successor is promoted after the verdict, which is about the lost run.
        Some(_) if lapsed(stored, now) => end_lease(stored, fence, now),
        Some(_) => return Step::answer(Answer::NotNow(NotNow::Running)),
        None if stored.is_final(now) => return Step::answer(Answer::NotNow(NotNow::Pinned)),
        None if stored.state == State::Completed && !matches!(verdict, Verdict::Rerun { .. }) => {
            return Step::answer(Answer::NotNow(NotNow::Completed));
        }
        None => (stored.clone(), Vec::new()),
    };
    op.fence = fence;
    // The terms were in the lease. The retention is known from the end of a run that failed or was lost, and from a
    // lease that is ended only now. An operation that was in doubt or pending has no end, unless its own policy has one:
    // it is kept until a person purges it, also if the sweep has not yet found the expired lease that puts it in doubt.
    let retention = match &stored.lease {
        Some(lease) => lease.terms.retention.filter(|_| op.state != State::InDoubt),
        None => op.expires_at.zip(op.settled_at).map(|(end, settled)| end.since(settled)),
    };
    let retention = op.terms.as_ref().map_or(retention, |own| own.retention);
    let said = match verdict {
        Verdict::Completed(outcome) => {
            // The last run was counted as lost or failed, but took effect: there was no other.
            match op.crashes {
                0 => op.failures = op.failures.saturating_sub(1),
                _ => op.crashes -= 1,
            }
            let terms = Policy { retention, tombstone: None, ..Policy::default() };
            complete(&mut op, outcome.clone(), &terms, now);
            op.pinned = false;
            "it took effect"
        }
        Verdict::Failed => {
            unsettle(&mut op);
            op.state = State::Failed;
            op.settled_at = Some(now);
            op.expires_at = retention.map(|kept| now + kept);
            op.error = Some(reason.to_owned());
            op.parked = true;
            "it did not take effect and stays so"
        }
        Verdict::Retry => {
            unsettle(&mut op);
            op.state = State::Pending;
            op.tried_since = Some(now);
            op.failures = 0;
            op.crashes = 0;
            "it may run again"
        }
        Verdict::Rerun { archived } => {
            notes.extend(completed_note(&op, stored.fence));
            if op.archived {
                op.payload.clone_from(archived);
            }
            unsettle(&mut op);
            op.state = State::Pending;
            op.tried_since = Some(now);
            op.failures = 0;
            op.crashes = 0;
            op.error = None;
            "it runs once more"
        }
    };
    op.look_at = op.look_at.into_iter().chain(op.expires_at).min();
    notes.push(note(&op, Event::Resolved, actor, format!("{said}: {reason}"), now));
    notes.extend(promote(&mut op, actor, now));
    Step::put(op, Answer::Resolved, notes)
}

/// The note about a completed run before another one: the row will show the new one.
fn completed_note(op: &Operation, fence: Fence) -> Option<Note> {
    let at = op.settled_at.filter(|_| op.state == State::Completed)?;
    let detail = "it was run once more after this".to_owned();
    Some(Note { at, event: Event::Completed, fence, actor: op.owner.clone(), detail })
}

/// Withdraws a pending operation: it becomes failed and parked, and its key stays taken. A run is asked to stop, and
/// newer data that waits for its end is withdrawn. Newer data that comes later is new work.
pub(super) fn cancel(stored: Option<&Operation>, fence: Fence, (actor, reason): (&str, &str), now: Timestamp) -> Step {
    let Some(stored) = stored.filter(|op| !op.has_expired(now)) else {
        return Step::answer(Answer::NotNow(NotNow::Absent));
    };
    let (mut op, mut notes) =
        if lapsed(stored, now) { lapse(stored, fence, now) } else { (stored.clone(), Vec::new()) };
    match (op.state, &mut op.lease) {
        (State::Completed, _) => return Step::answer(Answer::NotNow(NotNow::Completed)),
        (State::InDoubt, _) => return Step::answer(Answer::NotNow(NotNow::InDoubt)),
        (_, Some(lease)) => {
            lease.cancelled = true;
            let detail = match op.successor.take() {
                Some(Successor { order, fingerprint, .. }) => {
                    format!("{reason}; newer data is withdrawn: order {order}, fingerprint {}", fingerprint.to_hex())
                }
                None => reason.to_owned(),
            };
            notes.push(note(&op, Event::CancelAsked, actor, detail, now));
            return Step::put(op, Answer::CancelAsked, notes);
        }
        (State::Failed, None) if op.parked && op.error.as_deref() == Some(CANCELLED) => {
            return Step::put(op, Answer::Cancelled, notes);
        }
        (_, None) => {}
    }
    let known = op.expires_at.zip(op.settled_at).map(|(end, settled)| end.since(settled));
    // Newer data that was promoted has no end yet: it has that of the lost run.
    let known = known.or_else(|| stored.lease.as_ref()?.terms.retention);
    let retention = op.terms.as_ref().map_or(known, |terms| terms.retention);
    unsettle(&mut op);
    op.fence = fence;
    op.state = State::Failed;
    op.settled_at = Some(now);
    op.expires_at = retention.map(|kept| now + kept);
    op.look_at = op.look_at.into_iter().chain(op.expires_at).min();
    op.error = Some(CANCELLED.to_owned());
    op.parked = true;
    notes.push(note(&op, Event::Cancelled, actor, reason.to_owned(), now));
    Step::put(op, Answer::Cancelled, notes)
}

/// Deletes the operation and frees its key. Refused under a live lease, and if it is pinned and completed.
pub(super) fn purge(stored: Option<&Operation>, (actor, reason): (&str, &str), now: Timestamp) -> Step {
    let Some(op) = stored else { return Step::answer(Answer::NotNow(NotNow::Absent)) };
    if let Some(why) = Purge::of(op).refused(now) {
        return Step::answer(Answer::NotNow(why));
    }
    let note = purged_note(op.fence, actor, reason, now);
    Step { next: Next::Gone, answer: Answer::Purged, notes: vec![note] }
}

/// The columns that decide whether an operation may be purged. No others are needed, so an unreadable operation can be
/// purged, too.
#[derive(Clone, Copy, Debug)]
pub struct Purge {
    /// Its state.
    pub state: State,
    /// Whether it is pinned.
    pub pinned: bool,
    /// The end of its retention.
    pub expires_at: Option<Timestamp>,
    /// The deadline of its lease.
    pub deadline: Option<Timestamp>,
}

impl Purge {
    fn of(op: &Operation) -> Self {
        let deadline = op.lease.as_ref().map(|lease| lease.deadline);
        Self { state: op.state, pinned: op.pinned, expires_at: op.expires_at, deadline }
    }

    /// The reason why it may not be purged.
    #[must_use]
    pub fn refused(self, now: Timestamp) -> Option<NotNow> {
        let is_final = self.pinned && self.state == State::Completed && self.expires_at.is_none_or(|end| end > now);
        match self.deadline {
            Some(deadline) if deadline > now => Some(NotNow::Running),
            _ if is_final => Some(NotNow::Pinned),
            _ => None,
        }
    }
}

/// The note about a purge.
#[must_use]
pub fn purged_note(fence: Fence, actor: &str, reason: &str, at: Timestamp) -> Note {
    Note { at, event: Event::Purged, fence, actor: actor.to_owned(), detail: reason.to_owned() }
}
