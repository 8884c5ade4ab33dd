//! The runs of an operation one by one, how it began, and people's decisions.

use semel::{
    Operation, State, Timestamp,
    journal::{Event, Note, RELEASED},
    store::MOST_NOTES,
};

use super::{View, words::told};

/// How many runs are shown, the latest: an operation that waits for another may have been released for days.
const MOST_ATTEMPTS: usize = 100;

/// How many decisions are shown, the latest.
const MOST_DECISIONS: usize = 20;

/// How an operation was created.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Beginning {
    /// By its first claim.
    Claimed,
    /// By an enqueue, for a worker.
    Enqueued,
    /// The notes that would tell are missing.
    Unknown,
}

impl Beginning {
    /// The row does not say it. An operation's id is the fence of the claim or the enqueue that created it; a run from
    /// the queue has another fence. So the fence of the first run decides: it is in the first note about a run, or in
    /// the row.
    pub(super) fn of(op: &Operation, notes: &[Note]) -> Self {
        let was_enqueued = op.terms.is_some() && !op.is_left_to_callers();
        if !op.was_claimed() || was_enqueued || op.priority.get() != 0 {
            return Self::Enqueued;
        }
        let followed = notes.iter().any(|note| note.event == Event::TakenOver);
        let by_claim = |note: &Note| match (note.event, note.lapsed_lease()) {
            // The note of a lease expiry has the fence that ended the lease, and since when it was held.
            (Event::TimedOut | Event::Doubted | Event::Cancelled, Some((_, since))) => Some(since == op.created_at),
            // A note of an earlier version does not. That version had no enqueue.
            _ if note.is_lapse() => Some(followed || op.claimed_at == op.created_at),
            // Its predecessor ran, or it replaced data that had waited until then.
            (Event::Superseded, _) => Some(note.fence.0 == op.id && (followed || op.claimed_at <= note.at)),
            (Event::Failed | Event::Released | Event::Doubted | Event::Completed, _) => Some(note.fence.0 == op.id),
            (Event::RenewedLate | Event::CancelAsked, _) => Some(note.fence.0 == op.id),
            (Event::TakenOver, _) => Some(true),
            _ => None,
        };
        match notes.iter().find_map(by_claim) {
            Some(false) | None if notes.len() >= MOST_NOTES => Self::Unknown,
            Some(true) => Self::Claimed,
            Some(false) => Self::Enqueued,
            None if op.fence.0 == op.id || op.claimed_at == op.created_at => Self::Claimed,
            None => Self::Enqueued,
        }
    }
}

/// The end of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum End {
    /// It took effect.
    Completed,
    /// It failed.
    Failed,
    /// Its lease expired.
    TimedOut,
    /// It is unknown whether it took effect.
    InDoubt,
    /// It was released; no attempt is counted.
    Released,
    /// Newer data superseded it.
    Superseded,
    /// It was cancelled.
    Cancelled,
}

impl End {
    /// Its name in JSON.
    pub(crate) const fn as_str(self) -> &'static str {
        match self {
            Self::Completed => "completed",
            Self::Failed => "failed",
            Self::TimedOut => "timedOut",
            Self::InDoubt => "inDoubt",
            Self::Released => "released",
            Self::Superseded => "superseded",
            Self::Cancelled => "cancelled",
        }
    }
}

/// One run of an operation.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Attempt {
    /// When it began, if known.
    pub(crate) started_at: Option<Timestamp>,
    /// When it ended. Unknown for a run that newer data superseded long after.
    pub(crate) ended_at: Option<Timestamp>,
    /// How it ended; none while it runs.
    pub(crate) end: Option<End>,
    /// Its error.
    pub(crate) error: Option<String>,
    /// Its owner.
    pub(crate) owner: Option<String>,
}

impl Attempt {
    fn begun(at: Timestamp, owner: &str) -> Self {
        let owner = Some(owner.to_owned()).filter(|owner| !owner.is_empty());
        Self { started_at: Some(at), owner, ..Self::default() }
    }

    fn ended(self, at: Option<Timestamp>, end: End, error: Option<String>) -> Self {
        Self { ended_at: at, end: Some(end), error, ..self }
    }
}

/// A person's decision about an operation.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Decision {
    /// When.
    pub(crate) at: Timestamp,
    /// Who.
    pub(crate) by: String,
    /// The decision and its reason.
    pub(crate) what: String,
}

impl View {
    /// How it was created.
    pub(super) fn beginning(&self) -> Beginning {
        Beginning::of(&self.operation, &self.notes)
    }

    /// When an enqueued operation first ran, if the row still says so: the next claim overwrites it.
    pub(super) fn first_run(&self) -> Option<Timestamp> {
        let began = |event| matches!(event, Event::TakenOver | Event::Superseded);
        let is_first = self.operation.was_claimed() && !self.notes.iter().any(|note| began(note.event));
        (is_first && self.beginning() == Beginning::Enqueued).then_some(self.operation.claimed_at)
    }

    /// When the run of a note began: by the note of its claim, or by the row, because a first run has none.
    pub(super) fn started(&self, note: &Note) -> Option<Timestamp> {
        let op = &self.operation;
        let claim = self.notes.iter().find(|other| other.event == Event::TakenOver && other.fence == note.fence);
        let is_first = note.fence.0 == op.id && self.beginning() == Beginning::Claimed;
        let is_last = note.fence == op.fence && op.was_claimed() && op.claimed_at <= note.at;
        claim
            .map(|claim| claim.at)
            .or_else(|| is_first.then_some(op.created_at))
            .or_else(|| is_last.then_some(op.claimed_at))
    }

    /// Its runs. The row has the first and the last; the journal has the others: a note for every run that followed
    /// another and for every run that did not complete.
    pub(crate) fn attempts(&self) -> Vec<Attempt> {
        let (op, notes) = (&self.operation, &self.notes);
        let mut all = Vec::new();
        let mut runs = match self.beginning() {
            // Of a long story only the end is known, and its first note is not about the first run.
            _ if notes.len() >= MOST_NOTES => None,
            Beginning::Claimed => Some(Attempt::begun(op.created_at, "")),
            Beginning::Enqueued | Beginning::Unknown => self.first_run().map(|at| Attempt::begun(at, "")),
        };
        for (place, note) in notes.iter().enumerate() {
            let end = match note.event {
                Event::TakenOver => {
                    // A run without a recorded end has completed, and an older version that did not record it ran it
                    // again.
                    let before = runs.replace(Attempt::begun(note.at, &note.actor));
                    all.extend(before.map(|run| run.ended(None, End::Completed, None)));
                    continue;
                }
                Event::Completed => {
                    let run = runs.take().map(|run| Attempt { owner: run.owner.or(Some(note.actor.clone())), ..run });
                    all.extend(run.map(|run| run.ended(Some(note.at), End::Completed, None)));
                    continue;
                }
                Event::Superseded => {
                    let at_once = self.runs_at_once(&notes[place + 1..]);
                    // The former run completed, a moment ago if its successor waited for it.
                    let ended = Some(note.at).filter(|_| !at_once);
                    all.extend(runs.take().map(|run| run.ended(ended, End::Superseded, None)));
                    runs = at_once.then(|| Attempt::begun(note.at, &note.actor));
                    continue;
                }
                Event::Failed => End::Failed,
                Event::TimedOut => End::TimedOut,
                Event::Doubted => End::InDoubt,
                Event::Released => End::Released,
                // A pending operation was withdrawn.
                Event::Cancelled if runs.is_none() => continue,
                Event::Cancelled => End::Cancelled,
                Event::Refused | Event::RenewedLate | Event::Resolved | Event::CancelAsked => continue,
                Event::Archived | Event::Purged => continue,
            };
            let error = (note.event != Event::Released || note.detail != RELEASED).then(|| told(note).into_owned());
            let mut run = runs.take().unwrap_or_default().ended(Some(note.at), end, error);
            run.started_at = run.started_at.or(note.lapsed_lease().map(|(_, since)| since));
            // The sweep ends an expired lease; the note names its owner in words.
            if run.owner.is_none() && matches!(note.event, Event::Failed | Event::Released) {
                run.owner = Some(note.actor.clone());
            }
            all.push(run);
        }
        if let Some(mut run) = runs {
            run.owner = Some(op.owner.clone()).filter(|owner| !owner.is_empty()).or(run.owner);
            all.push(match op.state {
                State::Completed => run.ended(op.settled_at, End::Completed, None),
                _ => run,
            });
        }
        last(all, MOST_ATTEMPTS)
    }

    /// Whether newer data was run by the claim that brought it, by the notes after it. If it waited, the next note is
    /// that of its claim.
    fn runs_at_once(&self, later: &[Note]) -> bool {
        use Event::{Archived, Refused, RenewedLate, Resolved, TakenOver};
        let of_a_run = |event| !matches!(event, Refused | RenewedLate | Resolved | Archived);
        match later.iter().map(|note| note.event).find(|event| of_a_run(*event)) {
            Some(next) => next != TakenOver,
            None => matches!(self.operation.state, State::Processing | State::Completed),
        }
    }

    /// People's decisions about it.
    pub(crate) fn decisions(&self) -> Vec<Decision> {
        let decided = self.notes.iter().filter(|note| note.event == Event::Resolved);
        let told = decided.map(|note| Decision { at: note.at, by: note.actor.clone(), what: note.detail.clone() });
        last(told.collect(), MOST_DECISIONS)
    }
}

/// The last so many items.
fn last<T>(mut all: Vec<T>, most: usize) -> Vec<T> {
    all.drain(..all.len().saturating_sub(most));
    all
}

#[cfg(test)]
mod tests {
    use semel::Fence;

    use super::*;
    use crate::view::stories::operation;

    fn at(micros: i64) -> Timestamp {
        Timestamp::from_micros(1 + micros)
    }

    /// An operation that was claimed at once, in a state.
    fn view(state: State, notes: &[Note]) -> View {
        let claimed = Operation { claimed_at: at(0), created_at: at(0), ..operation() };
        let settled = Operation { state, owner: "last".to_owned(), settled_at: Some(at(99)), ..claimed };
        View { notes: notes.to_vec(), ..View::bare(settled, at(99)) }
    }

    fn note(time: i64, event: Event) -> Note {
        let detail = if event == Event::Released { RELEASED } else { "because" }.to_owned();
        Note { at: at(time), event, fence: Fence(1), actor: "node".to_owned(), detail }
    }

    /// How each run ended, and its start and end, in microseconds.
    fn told(state: State, notes: &[Note]) -> Vec<(Option<Timestamp>, Option<Timestamp>, Option<End>)> {
        view(state, notes).attempts().into_iter().map(|run| (run.started_at, run.ended_at, run.end)).collect()
    }

    fn time(micros: i64) -> Option<Timestamp> {
        Some(at(micros))
    }

    #[test]
    fn an_operation_without_notes_ran_once() {
        assert_eq!(told(State::Completed, &[]), [(time(0), time(99), Some(End::Completed))]);
        assert_eq!(told(State::Processing, &[]), [(time(0), None, None)]);
    }

    #[test]
    fn every_run_is_shown_with_its_end() {
        let notes = [
            note(1, Event::Failed),
            note(2, Event::TakenOver),
            note(3, Event::TimedOut),
            note(4, Event::TakenOver),
            note(5, Event::Refused),
            note(6, Event::Released),
            note(7, Event::Resolved),
            note(8, Event::TakenOver),
        ];
        let ends = [
            (time(0), time(1), Some(End::Failed)),
            (time(2), time(3), Some(End::TimedOut)),
            (time(4), time(6), Some(End::Released)),
            (time(8), time(99), Some(End::Completed)),
        ];
        assert_eq!(told(State::Completed, &notes), ends);
        let told = view(State::Completed, &notes).attempts();
        assert_eq!((told[0].error.as_deref(), told[2].error.as_deref()), (Some("because"), None));
        assert_eq!(told[3].owner.as_deref(), Some("last"));
        assert_eq!(
            view(State::Completed, &notes).decisions(),
            [Decision { at: at(7), by: "node".into(), what: "because".into() }]
        );
    }

    #[test]
    fn a_completed_run_that_was_repeated_is_shown_with_its_end_and_its_node() {
        let first = Note { actor: "first".to_owned(), ..note(3, Event::Completed) };
        // Its data was archived in between: the note of its end was written later.
        let again = [note(4, Event::Archived), first, note(5, Event::Resolved), note(6, Event::TakenOver)];
        let both = [(time(0), time(3), Some(End::Completed)), (time(6), time(99), Some(End::Completed))];
        assert_eq!(told(State::Completed, &again), both);
        let nodes: Vec<_> = view(State::Completed, &again).attempts().into_iter().map(|run| run.owner).collect();
        assert_eq!(nodes, [Some("first".to_owned()), Some("last".to_owned())]);
        assert_eq!(told(State::Pending, &again[..3]), both[..1], "it has not run again yet");
    }

    #[test]
    fn a_completed_run_that_an_older_version_repeated_is_shown() {
        let again = [note(5, Event::Resolved), note(6, Event::TakenOver)];
        let both = [(time(0), None, Some(End::Completed)), (time(6), time(99), Some(End::Completed))];
        assert_eq!(told(State::Completed, &again), both);
        let skipped = [note(5, Event::Resolved)];
        assert_eq!(told(State::Completed, &skipped), [(time(0), time(99), Some(End::Completed))], "no run followed");
    }

    #[test]
    fn a_release_is_shown_with_its_reason() {
        let away = Note { detail: "the endpoint cannot be reached".to_owned(), ..note(1, Event::Released) };
        let told = view(State::Pending, &[away, note(2, Event::TakenOver), note(3, Event::Released)]).attempts();
        assert_eq!(told[0].error.as_deref(), Some("the endpoint cannot be reached"));
        assert_eq!((told[1].end, told[1].error.as_deref()), (Some(End::Released), None));
    }

    #[test]
    fn newer_data_is_a_run_of_its_own() {
        let ran = [note(5, Event::Superseded)];
        let at_once = [(time(0), None, Some(End::Superseded)), (time(5), time(99), Some(End::Completed))];
        assert_eq!(told(State::Completed, &ran), at_once, "the claim that brought it ran it");
        assert_eq!(told(State::Pending, &ran), [(time(0), time(5), Some(End::Superseded))], "it waits");
        let later = [note(5, Event::Superseded), note(6, Event::TakenOver)];
        let waited = [(time(0), time(5), Some(End::Superseded)), (time(6), time(99), Some(End::Completed))];
        assert_eq!(told(State::Completed, &later), waited, "it waited, and was taken up");
    }

    #[test]
    fn the_first_run_is_not_shown_with_the_end_of_another() {
        let mut notes = vec![note(1, Event::Refused); MOST_NOTES - 1];
        notes.push(note(2, Event::Released));
        assert_eq!(told(State::Pending, &notes), [(None, time(2), Some(End::Released))]);
        assert_eq!(told(State::Pending, &notes[1..]), [(time(0), time(2), Some(End::Released))]);
    }

    #[test]
    fn only_the_latest_of_many_are_shown() {
        assert_eq!(last((0..5).collect(), 3), [2, 3, 4]);
        assert_eq!(last(vec![1], 3), [1]);
    }
}
