//! The story of an event: its runs, and what people decided about it.

use semel::{
    Operation, State, Timestamp,
    journal::{Event as Told, Note, PUT_BACK},
    store::MOST_NOTES,
};
use serde::Serialize;

/// How many attempts of an event are told, the latest: one that waits for another event may have been put back for days.
const MOST_ATTEMPTS: usize = 100;

/// How many decisions of people are told, the latest.
const MOST_DECISIONS: usize = 20;

/// One run of an event.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub(super) struct Attempt {
    started_at: Option<String>,
    /// Not known of a run that newer data took the place of long after.
    ended_at: Option<String>,
    /// `completed`, `failed`, `timeout`, `released` (put back, at no cost), `superseded`; nothing while it runs.
    end: Option<&'static str>,
    error: Option<String>,
    /// Whose it was.
    node: Option<String>,
}

impl Attempt {
    fn begun(at: Timestamp, node: &str) -> Self {
        let node = Some(node.to_owned()).filter(|node| !node.is_empty());
        Self { started_at: Some(at.to_string()), node, ..Self::default() }
    }

    fn ended(self, at: Option<Timestamp>, end: &'static str, error: Option<&str>) -> Self {
        Self { ended_at: at.map(|at| at.to_string()), end: Some(end), error: error.map(str::to_owned), ..self }
    }
}

/// The runs of an event. The first and the last are told by its row, the others by the journal, which has a note for
/// every run that followed another and for every run that did not complete.
pub(super) fn attempts(operation: &Operation, notes: &[Note]) -> Vec<Attempt> {
    let mut told = Vec::new();
    // Of a long story only the end is known, and what it begins with is not the first run.
    let mut runs = (notes.len() < MOST_NOTES).then(|| Attempt::begun(operation.created_at, ""));
    for (place, note) in notes.iter().enumerate() {
        let end = match note.event {
            Told::TakenOver => {
                // A run of which no end is told has completed, and was run once more by a version that did not note it.
                let before = runs.replace(Attempt::begun(note.at, &note.actor));
                told.extend(before.map(|run| run.ended(None, "completed", None)));
                continue;
            }
            Told::Completed => {
                let run = runs.take().map(|run| Attempt { node: run.node.or(Some(note.actor.clone())), ..run });
                told.extend(run.map(|run| run.ended(Some(note.at), "completed", None)));
                continue;
            }
            Told::Superseded => {
                let at_once = runs_at_once(operation, &notes[place + 1..]);
                // What ran was completed, a moment ago if its successor waited for it.
                told.extend(runs.take().map(|run| run.ended(Some(note.at).filter(|_| !at_once), "superseded", None)));
                runs = at_once.then(|| Attempt::begun(note.at, &note.actor));
                continue;
            }
            Told::Failed => "failed",
            Told::TimedOut | Told::Doubted => "timeout",
            Told::Released => "released",
            Told::Cancelled => "cancelled",
            Told::Refused | Told::RenewedLate | Told::Resolved | Told::CancelAsked | Told::Archived | Told::Purged => {
                continue;
            }
        };
        let error = Some(note.detail.as_str()).filter(|detail| note.event != Told::Released || *detail != PUT_BACK);
        let mut run = runs.take().unwrap_or_default().ended(Some(note.at), end, error);
        // A lease that nobody renewed is ended by the sweep; whose it was, the note has in words.
        if run.node.is_none() && matches!(note.event, Told::Failed | Told::Released) {
            run.node = Some(note.actor.clone());
        }
        told.push(run);
    }
    if let Some(mut run) = runs {
        run.node = Some(operation.owner.clone()).filter(|node| !node.is_empty()).or(run.node);
        told.push(if operation.state == State::Completed {
            run.ended(operation.settled_at, "completed", None)
        } else {
            run
        });
    }
    last(told, MOST_ATTEMPTS)
}

/// Whether newer data was run by the claim that brought it, by what was noted after it took over. Where it waited first,
/// the next thing to happen is that somebody took it up.
fn runs_at_once(operation: &Operation, later: &[Note]) -> bool {
    let of_a_run = |event| !matches!(event, Told::Refused | Told::RenewedLate | Told::Resolved | Told::Archived);
    match later.iter().map(|note| note.event).find(|event| of_a_run(*event)) {
        Some(next) => next != Told::TakenOver,
        None => matches!(operation.state, State::Processing | State::Completed),
    }
}

/// What a person decided about an event.
#[derive(Debug, PartialEq, Eq, Serialize)]
pub(super) struct Decision {
    at: String,
    by: String,
    what: String,
}

pub(super) fn decisions(notes: &[Note]) -> Vec<Decision> {
    let decided = notes.iter().filter(|note| note.event == Told::Resolved);
    let told =
        decided.map(|note| Decision { at: note.at.to_string(), by: note.actor.clone(), what: note.detail.clone() });
    last(told.collect(), MOST_DECISIONS)
}

/// The last so many of them.
fn last<T>(mut all: Vec<T>, most: usize) -> Vec<T> {
    all.drain(..all.len().saturating_sub(most));
    all
}

#[cfg(test)]
mod tests {
    use semel::{Fence, Fingerprint, Key, Labels, Scope};

    use super::*;

    fn at(micros: i64) -> Timestamp {
        Timestamp::from_micros(micros)
    }

    fn event(state: State) -> Operation {
        Operation {
            id: 1,
            scope: Scope::new("default", "webhooks", "stripe").unwrap(),
            key: Key::new("evt_1").unwrap(),
            labels: Labels::default(),
            fingerprint: Fingerprint::of_bytes(b"a"),
            order: None,
            payload: None,
            state,
            fence: Fence(1),
            failures: 0,
            crashes: 0,
            parked: false,
            pinned: false,
            priority: semel::Priority::default(),
            terms: None,
            owner: "last".to_owned(),
            created_at: at(0),
            claimed_at: at(0),
            settled_at: Some(at(99)),
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

    fn note(time: i64, event: Told) -> Note {
        let detail = if event == Told::Released { PUT_BACK } else { "because" }.to_owned();
        Note { at: at(time), event, fence: Fence(1), actor: "node".to_owned(), detail }
    }

    /// How each run ended, and from when to when it was, in microseconds.
    fn told(state: State, notes: &[Note]) -> Vec<(Option<String>, Option<String>, Option<&'static str>)> {
        attempts(&event(state), notes).into_iter().map(|run| (run.started_at, run.ended_at, run.end)).collect()
    }

    fn time(micros: i64) -> Option<String> {
        Some(at(micros).to_string())
    }

    #[test]
    fn an_event_without_a_story_ran_once() {
        assert_eq!(told(State::Completed, &[]), [(time(0), time(99), Some("completed"))]);
        assert_eq!(told(State::Processing, &[]), [(time(0), None, None)]);
    }

    #[test]
    fn every_run_is_told_with_its_end() {
        let notes = [
            note(1, Told::Failed),
            note(2, Told::TakenOver),
            note(3, Told::TimedOut),
            note(4, Told::TakenOver),
            note(5, Told::Refused),
            note(6, Told::Released),
            note(7, Told::Resolved),
            note(8, Told::TakenOver),
        ];
        let ends = [
            (time(0), time(1), Some("failed")),
            (time(2), time(3), Some("timeout")),
            (time(4), time(6), Some("released")),
            (time(8), time(99), Some("completed")),
        ];
        assert_eq!(told(State::Completed, &notes), ends);
        let told = attempts(&event(State::Completed), &notes);
        assert_eq!((told[0].error.as_deref(), told[2].error.as_deref()), (Some("because"), None));
        assert_eq!(told[3].node.as_deref(), Some("last"));
        assert_eq!(decisions(&notes), [Decision { at: at(7).to_string(), by: "node".into(), what: "because".into() }]);
    }

    #[test]
    fn a_run_that_completed_and_was_run_once_more_is_told_with_its_end_and_its_node() {
        let first = Note { actor: "first".to_owned(), ..note(3, Told::Completed) };
        // Its data went to the archive in between: the note of its end was written later.
        let again = [note(4, Told::Archived), first, note(5, Told::Resolved), note(6, Told::TakenOver)];
        let both = [(time(0), time(3), Some("completed")), (time(6), time(99), Some("completed"))];
        assert_eq!(told(State::Completed, &again), both);
        let nodes: Vec<_> = attempts(&event(State::Completed), &again).into_iter().map(|run| run.node).collect();
        assert_eq!(nodes, [Some("first".to_owned()), Some("last".to_owned())]);
        assert_eq!(told(State::Pending, &again[..3]), both[..1], "it has not run again yet");
    }

    #[test]
    fn a_run_that_completed_and_was_run_once_more_by_an_older_version_is_told() {
        let again = [note(5, Told::Resolved), note(6, Told::TakenOver)];
        let both = [(time(0), None, Some("completed")), (time(6), time(99), Some("completed"))];
        assert_eq!(told(State::Completed, &again), both);
        let skipped = [note(5, Told::Resolved)];
        assert_eq!(told(State::Completed, &skipped), [(time(0), time(99), Some("completed"))], "no run followed");
    }

    #[test]
    fn a_run_that_was_put_back_for_a_reason_says_so() {
        let away = Note { detail: "the endpoint cannot be reached".to_owned(), ..note(1, Told::Released) };
        let told = attempts(&event(State::Pending), &[away, note(2, Told::TakenOver), note(3, Told::Released)]);
        assert_eq!(told[0].error.as_deref(), Some("the endpoint cannot be reached"));
        assert_eq!((told[1].end, told[1].error.as_deref()), (Some("released"), None));
    }

    #[test]
    fn newer_data_is_a_run_of_its_own() {
        let ran = [note(5, Told::Superseded)];
        let at_once = [(time(0), None, Some("superseded")), (time(5), time(99), Some("completed"))];
        assert_eq!(told(State::Completed, &ran), at_once, "the claim that brought it ran it");
        assert_eq!(told(State::Pending, &ran), [(time(0), time(5), Some("superseded"))], "it waits");
        let later = [note(5, Told::Superseded), note(6, Told::TakenOver)];
        let waited = [(time(0), time(5), Some("superseded")), (time(6), time(99), Some("completed"))];
        assert_eq!(told(State::Completed, &later), waited, "it waited, and was taken up");
    }

    #[test]
    fn the_first_run_is_not_told_with_the_end_of_another() {
        let mut notes = vec![note(1, Told::Refused); MOST_NOTES - 1];
        notes.push(note(2, Told::Released));
        assert_eq!(told(State::Pending, &notes), [(None, time(2), Some("released"))]);
        assert_eq!(told(State::Pending, &notes[1..]), [(time(0), time(2), Some("released"))]);
    }

    #[test]
    fn only_the_latest_of_many_are_told() {
        assert_eq!(last((0..5).collect(), 3), [2, 3, 4]);
        assert_eq!(last(vec![1], 3), [1]);
    }
}
