//! The story of one operation in plain sentences: what happened, in order of time, and what happens next.

use std::time::Duration;

use semel::{
    Operation, State, Timestamp,
    journal::{Event, Note, RELEASED, Repeat, Repeats},
    machine::CANCELLED,
    store::MOST_NOTES,
};
use semel_store::{Audited, HeldMessage};

use super::{
    Meaning, Standing, View,
    about::outcome,
    runs::Beginning,
    words::{self, plain, quoted, resolve, set_aside, span, times, told},
};

/// A run that is released without a reason after this time has had its turn; before, it had hardly begun.
const A_TURN: Duration = Duration::from_secs(1);

/// A story, in the order of its lines.
pub(crate) struct Story {
    /// The operation and its standing.
    pub(crate) head: String,
    /// Its subject.
    pub(crate) about: Option<String>,
    /// How it began.
    pub(crate) began: (Timestamp, String),
    /// A note that older notes are not shown.
    pub(crate) left_out: Option<String>,
    /// The later events, in order of time.
    pub(crate) happened: Vec<(Timestamp, String)>,
    /// The repeats of its key, its messages, the next step, and why it was set aside.
    pub(crate) stands: Vec<String>,
}

impl Story {
    /// Line by line, for a terminal.
    pub(crate) fn lines(self) -> Vec<String> {
        let timed = |(at, text): (Timestamp, String)| format!("{at}  {text}");
        let mut lines = vec![self.head];
        lines.extend(self.about);
        lines.push(String::new());
        lines.push(timed(self.began));
        lines.extend(self.left_out);
        lines.extend(self.happened.into_iter().map(timed));
        lines.push(String::new());
        lines.extend(self.stands);
        lines
    }
}

impl View {
    /// The story. `ledger` has the flags with which a person's next command finds the ledger.
    pub(crate) fn story(&self, ledger: &str) -> Story {
        let op = &self.operation;
        let completed = op.state == State::Completed;
        let meaning = completed.then(|| (self.telling().completed)(self, ledger)).flatten();
        let verdict = meaning.as_ref().map_or_else(|| self.verdict(), |meaning| meaning.verdict);
        let mut stands: Vec<_> = self.repeats.iter().map(|(repeat, repeats)| came_again(*repeat, repeats)).collect();
        // The service's text about a completion includes its message.
        let messages = self.messages.iter().filter(|_| meaning.is_none());
        stands.extend(messages.map(held));
        let is_due = self.standing() == Standing::Waiting && op.not_before.is_none_or(|at| at <= self.now);
        let held_up = self.held_up(ledger);
        // It does not run next, although it is due.
        if held_up.is_none() || !is_due {
            stands.push(self.next(meaning.as_ref(), ledger));
        }
        stands.extend(held_up);
        stands.extend(self.aside.iter().map(set_aside));
        Story {
            head: format!("{} in {}: {verdict}", plain(op.key.as_str()), op.scope),
            about: (self.telling().about)(op).map(|(name, text)| format!("The {name}: {text}")),
            began: (op.created_at, self.began()),
            left_out: left_out(&self.notes),
            happened: self.happened(meaning.as_ref()),
            stands,
        }
    }

    /// The standing in a few words.
    fn verdict(&self) -> &'static str {
        match self.standing() {
            Standing::Waiting => "it waits to be run",
            Standing::Running => "it is running",
            Standing::LeaseLapsed => "its lease has expired",
            Standing::Completed => "it took effect",
            Standing::Cancelled => "it was cancelled",
            Standing::InDoubt => "it is in doubt whether it took effect",
            Standing::BackingOff | Standing::Runnable | Standing::Parked => match self.operation.state {
                State::TimedOut => "the lease of its last run expired",
                State::Pending => "it has no attempt left",
                _ => "it failed",
            },
        }
    }

    fn began(&self) -> String {
        let op = &self.operation;
        match self.beginning() {
            Beginning::Enqueued => {
                // Once it has been claimed, this is the end of a backoff.
                let from = op.not_before.filter(|_| !op.was_claimed()).map(|at| format!(", not before {at}"));
                let priority = Some(op.priority.get()).filter(|priority| *priority != 0);
                let priority = priority.map(|priority| format!(", priority {priority}"));
                format!("enqueued{}{}", from.unwrap_or_default(), priority.unwrap_or_default())
            }
            // The row names its last owner, which is the first one only if no other has claimed it since.
            Beginning::Claimed if op.claimed_at == op.created_at && !op.owner.is_empty() => {
                format!("first claimed by {}", plain(&op.owner))
            }
            Beginning::Claimed => "first claimed".to_owned(),
            Beginning::Unknown => "first seen".to_owned(),
        }
    }

    /// The events after the beginning, sorted by time: the end of a run that was run again is noted after it, and
    /// the first run from the queue and the end of the last run come from the row.
    fn happened(&self, meaning: Option<&Meaning>) -> Vec<(Timestamp, String)> {
        let is_told = |note: &&Note| note.event != Event::Completed || !self.was_decided(note.at);
        let notes = self.notes.iter().filter(is_told).map(|note| (note.at, sentence(note, self.took(note))));
        let first = self.first_run().map(|at| (at, self.first()));
        let audit = self.audit.iter().filter(|did| !self.is_noted(did)).map(|did| (did.at, acted(did)));
        let mut all: Vec<_> = first.into_iter().chain(notes).chain(self.completion(meaning)).chain(audit).collect();
        all.sort_by_key(|(at, _)| *at);
        all
    }

    /// The first run from the queue. The row names its last owner.
    fn first(&self) -> String {
        match self.operation.owner.as_str() {
            "" => "first run".to_owned(),
            owner => format!("first run by {}", plain(owner)),
        }
    }

    /// The duration of a note's run, if known.
    fn took(&self, note: &Note) -> Option<Duration> {
        self.started(note).map(|since| note.at.since(since))
    }

    /// Whether the journal has a person's decision at this moment, with a name and a reason.
    fn was_decided(&self, at: Timestamp) -> bool {
        self.notes.iter().any(|note| note.event == Event::Resolved && note.at == at)
    }

    /// Whether the journal has this action, too.
    fn is_noted(&self, did: &Audited) -> bool {
        let of_people =
            |event| matches!(event, Event::Resolved | Event::CancelAsked | Event::Cancelled | Event::Purged);
        self.notes.iter().any(|note| note.at == did.at && of_people(note.event))
    }

    fn completion(&self, meaning: Option<&Meaning>) -> Option<(Timestamp, String)> {
        let op = &self.operation;
        let at = op.settled_at.filter(|_| op.state == State::Completed)?;
        let kept = meaning.and_then(|meaning| meaning.kept).map(str::to_owned);
        let kept = kept.or_else(|| outcome(op)).unwrap_or_default();
        let given = op.outcome.as_ref().is_some_and(|outcome| !outcome.body.is_empty());
        let how = match self.was_decided(at) {
            true if !given => return Some((at, "completed; the decision gave no outcome".to_owned())),
            true => "completed".to_owned(),
            false => format!("completed by {} after {}", plain(&op.owner), span(at.since(op.claimed_at))),
        };
        Some((at, format!("{how}: {kept}")))
    }

    /// The next step.
    fn next(&self, meaning: Option<&Meaning>, ledger: &str) -> String {
        let op = &self.operation;
        let person = resolve(&op.scope, &op.key, ledger);
        if op.has_expired(self.now) {
            return "Its retention is over: the key is free again.".to_owned();
        }
        match self.standing() {
            Standing::Waiting => self.waits(),
            Standing::Running | Standing::LeaseLapsed => self.lease(),
            Standing::Completed => meaning.map_or_else(|| replayed(op), |meaning| plain(&meaning.next)),
            Standing::Cancelled => format!("It runs again only if a person decides so: {person}"),
            Standing::Parked => match op.parked {
                true => format!("It runs again only if a person decides so: {person}"),
                false if self.beginning() == Beginning::Enqueued => {
                    format!("Its policy allows no further attempt: it runs again only if a person decides so: {person}")
                }
                // A repeat brings its own policy.
                false => format!("{} A person can decide, too: {person}", self.retry()),
            },
            Standing::BackingOff | Standing::Runnable => {
                format!("{} A person can decide, too: {person}", self.retry())
            }
            Standing::InDoubt => format!("A person must resolve it: {person}"),
        }
    }

    fn waits(&self) -> String {
        let op = &self.operation;
        let queued = self.beginning() == Beginning::Enqueued;
        match op.not_before.filter(|at| *at > self.now) {
            Some(at) if queued => format!("A worker runs it after {at}."),
            Some(at) => format!("It may be claimed after {at}."),
            None if queued => "A worker runs it as soon as one is free.".to_owned(),
            None => "It runs when it is claimed next.".to_owned(),
        }
    }

    /// Why no worker runs an operation that waits for one.
    fn held_up(&self, ledger: &str) -> Option<String> {
        let op = &self.operation;
        let (service, kind) = (op.scope.service(), op.scope.kind());
        if op.parked || op.has_expired(self.now) {
            return None;
        }
        if let Some(pause) = &self.paused {
            let command = ["semel work resume", &quoted(service), &quoted(kind), ledger, "--reason '…'"];
            let resume = command.iter().filter(|part| !part.is_empty()).copied().collect::<Vec<_>>().join(" ");
            return Some(format!("No worker runs it: {}. To resume it: {resume}", words::paused(service, kind, pause)));
        }
        // Operations that their callers claim need no worker.
        let waits_for_a_worker = self.has_handler == Some(false) && self.beginning() == Beginning::Enqueued;
        let kind = plain(&format!("{service}/{kind}"));
        waits_for_a_worker.then(|| format!("No node that is running has a handler for {kind}: see semel work nodes."))
    }

    fn lease(&self) -> String {
        let op = &self.operation;
        let Some(lease) = &op.lease else { return String::new() };
        let (owner, end) = (plain(&op.owner), lease.deadline);
        match (self.standing(), lease.terms.on_lost.doubts()) {
            (Standing::Running, _) if lease.cancelled => {
                format!("{owner} holds the lease until {end}; it stops at its next renewal.")
            }
            (Standing::Running, _) => format!("{owner} holds the lease until {end}, and longer if it renews it."),
            (_, false) => format!("The lease of {owner} ended at {end}. It runs again when it is claimed next."),
            (_, true) => format!(
                "The lease of {owner} ended at {end}. A worker, the sweep or the next claim puts it in doubt; then a \
                 person must resolve it."
            ),
        }
    }

    fn retry(&self) -> String {
        let op = &self.operation;
        let when = op.not_before.filter(|at| *at > self.now).map(|at| format!(" after {at}")).unwrap_or_default();
        let failed = times(op.failures);
        // Each claim says how many attempts there are, unless it was enqueued with its policy.
        match (op.failures, &op.terms) {
            (0, _) => format!("It may run again{when}."),
            (_, Some(terms)) => {
                let most =
                    terms.max_attempts.map(|most| format!(" It has {most} attempts in all.")).unwrap_or_default();
                format!("It has failed {failed}, and runs again{when}.{most}")
            }
            (_, None) if self.beginning() == Beginning::Enqueued => {
                format!("It has failed {failed}. A worker runs it again{when}.")
            }
            (failures, None) => {
                let more = failures + 1;
                format!(
                    "It has failed {failed}, and may run again{when} for a claim that allows {more} attempts or more."
                )
            }
        }
    }
}

/// The answer to a repeat of a completed operation, and for how long.
fn replayed(op: &Operation) -> String {
    match (op.expires_at, op.archived) {
        (Some(end), false) => {
            format!("Every repeat is answered with this outcome. It is kept until {end}; then the key is free again.")
        }
        (Some(end), true) => format!("Its data is in the archive. The key stays taken until {end}."),
        (None, false) => "Every repeat is answered with this outcome. It is kept for ever.".to_owned(),
        (None, true) => "Its data is in the archive. The key stays taken for ever.".to_owned(),
    }
}

/// A note of the journal in words; `took` is the duration of the run.
fn sentence(note: &Note, took: Option<Duration>) -> String {
    let (detail, actor) = (plain(&told(note)), plain(&note.actor));
    let by = if actor.is_empty() { String::new() } else { format!(" by {actor}") };
    let after = took.map(|took| format!(" after {}", span(took))).unwrap_or_default();
    match note.event {
        Event::TakenOver => claimed_again(&by, &detail),
        Event::Completed => format!("completed{by}{after}; {detail}"),
        Event::Failed if note.detail == CANCELLED => format!("the run{by} was cancelled{after}"),
        Event::Failed => format!("the run{by} failed{after}: {detail}"),
        Event::TimedOut => format!("{detail}; it may run again"),
        // Noted by the sweep or the claim that ended the expired lease, or by the run itself.
        Event::Doubted if note.is_lapse() => format!("{detail}; it is in doubt whether it took effect"),
        Event::Doubted => format!("the run{by} ended in doubt{after}: {detail}"),
        Event::Released if note.detail != RELEASED => {
            format!("released{by}{after}; no attempt is counted: {detail}")
        }
        Event::Released if took.is_some_and(|took| took >= A_TURN) => {
            format!("{actor} ended its turn{after}; no attempt is counted")
        }
        Event::Released => format!("released{by}; no attempt is counted"),
        Event::Refused => format!("a late write was refused: {detail}"),
        Event::Superseded => format!("superseded{by}: {detail}"),
        Event::Resolved => format!("decided{by}: {detail}"),
        Event::CancelAsked => format!("its run was asked to stop{by}, because: {detail}"),
        Event::Cancelled if note.lapsed_lease().is_some() => format!("cancelled: {detail}"),
        Event::Cancelled => format!("cancelled{by}, because: {detail}"),
        Event::Purged => format!("purged{by}: {detail}"),
        Event::RenewedLate | Event::Archived => detail,
    }
}

/// A claim after the first; `detail` has the attempt and the state that it found.
fn claimed_again(by: &str, detail: &str) -> String {
    match detail.split_once(" after ") {
        Some((attempt, "failed")) => format!("claimed again{by}: {attempt}, after a run that failed"),
        Some((attempt, "timed_out")) => format!("claimed again{by}: {attempt}, after the lease of the last run ended"),
        // It was released, or has only been waiting.
        Some((attempt, "pending")) => format!("claimed{by}: {attempt}"),
        _ => format!("claimed again{by}: {detail}"),
    }
}

/// A person's action that the journal no longer has.
fn acted(did: &Audited) -> String {
    let action = did.action.strip_prefix("operations.").unwrap_or(&did.action);
    format!("{} by {}: {}", plain(action), plain(&did.actor), plain(&did.reason))
}

/// A message that was not published at once.
fn held(message: &HeldMessage) -> String {
    let error = message.error.as_deref().map(|error| format!(": {}", plain(error))).unwrap_or_default();
    let (id, topic, state) = (plain(&message.id), plain(&message.topic), message.state.as_str());
    format!("Its message {id} to the topic {topic} is {state}{error}.")
}

/// The remaining history of a purged or expired operation.
pub(crate) fn gone(id: i64, notes: &[Note]) -> Vec<String> {
    let head = format!("Operation {id} is gone, and its key is free. Its remaining history:");
    let lines = notes.iter().map(|note| format!("{}  {}", note.at, sentence(note, None)));
    [head, String::new()].into_iter().chain(left_out(notes)).chain(lines).collect()
}

/// A note that the story lacks its beginning, if it may.
fn left_out(notes: &[Note]) -> Option<String> {
    (notes.len() >= MOST_NOTES).then(|| format!("Only the last {MOST_NOTES} notes are shown."))
}

fn came_again(repeat: Repeat, repeats: &Repeats) -> String {
    let Repeats { count: n, first, last } = repeats;
    let what = match repeat {
        Repeat::Duplicate => "The same input came again",
        Repeat::Conflict => "Another input came under this key",
    };
    let ends = match (first.first(), last.last().or(first.last())) {
        (Some(first), Some(_)) if *n == 1 => format!(", at {}, and was {}", first.at, answered(&first.answer)),
        (Some(first), Some(last)) => {
            format!(", first at {}, last at {}; the last was {}", first.at, last.at, answered(&last.answer))
        }
        _ => String::new(),
    };
    format!("{what} {}{ends}.{}", times(*n), refused(repeats))
}

/// The answer to a repeat that was refused because it had other credentials than the first request.
const CREDENTIALS_DIFFER: &str = "credentials_differ";

/// The answer to a repeat, in words.
fn answered(answer: &str) -> String {
    match answer {
        CREDENTIALS_DIFFER => "refused: it had other credentials than the first request".to_owned(),
        answer => format!("answered {}", plain(answer).replace('_', " ")),
    }
}

/// How many of several repeats were refused for their credentials. Of many, only the first and the last are known one
/// by one.
fn refused(Repeats { count, first, last }: &Repeats) -> String {
    let known = || first.iter().chain(last);
    let refused = known().filter(|seen| seen.answer == CREDENTIALS_DIFFER).count();
    let least = if known().count() < usize::try_from(*count).unwrap_or(usize::MAX) { "At least " } else { "" };
    match (count, refused) {
        (1, _) | (_, 0) => String::new(),
        (_, 1) => format!(" {least}1 of these was refused: it had other credentials than the first request."),
        (_, n) => format!(" {least}{n} of these were refused: they had other credentials than the first request."),
    }
}

#[cfg(test)]
mod tests {
    use semel::Fence;

    use super::*;

    #[test]
    fn every_event_is_shown_as_a_sentence() {
        let told = |event_of, actor: &str, detail: &str| {
            let note = Note {
                at: Timestamp::from_micros(0),
                event: event_of,
                fence: Fence(1),
                actor: actor.to_owned(),
                detail: detail.to_owned(),
            };
            sentence(&note, Some(Duration::from_secs(3)))
        };
        for (event, actor, detail, sentence) in [
            (Event::TakenOver, "b", "attempt 2 after failed", "claimed again by b: attempt 2, after a run that failed"),
            (
                Event::TakenOver,
                "b",
                "attempt 2 after timed_out",
                "claimed again by b: attempt 2, after the lease of the last run ended",
            ),
            (Event::TakenOver, "b", "attempt 1 after pending", "claimed by b: attempt 1"),
            (Event::Completed, "a:1", "it was run once more", "completed by a:1 after 3.0 s; it was run once more"),
            (Event::Failed, "a:1", "exit code 3", "the run by a:1 failed after 3.0 s: exit code 3"),
            (Event::TimedOut, "sweep", "the lease ended", "the lease ended; it may run again"),
            (Event::Doubted, "sweep", "it ended", "it ended; it is in doubt whether it took effect"),
            (Event::Doubted, "a:1", "stopped", "the run by a:1 ended in doubt after 3.0 s: stopped"),
            (Event::Released, "a:1", RELEASED, "a:1 ended its turn after 3.0 s; no attempt is counted"),
            (Event::Released, "a:1", "it is away", "released by a:1 after 3.0 s; no attempt is counted: it is away"),
            (Event::Failed, "a:1", "cancelled", "the run by a:1 was cancelled after 3.0 s"),
            (Event::CancelAsked, "ana", "a slip", "its run was asked to stop by ana, because: a slip"),
            (Event::Cancelled, "ana", "a slip", "cancelled by ana, because: a slip"),
            (Event::Refused, "", "a failure came late", "a late write was refused: a failure came late"),
            (Event::Superseded, "a:1", "newer data", "superseded by a:1: newer data"),
            (Event::RenewedLate, "a:1", "renewed late", "renewed late"),
            (Event::Resolved, "ana", "it took effect: I looked", "decided by ana: it took effect: I looked"),
            (Event::Archived, "sweep", "in the archive", "in the archive"),
            (Event::Purged, "ana", "a test", "purged by ana: a test"),
            (Event::Failed, "a\n:1", "\x1b[2J", "the run by a\\n:1 failed after 3.0 s: \\u{1b}[2J"),
        ] {
            assert_eq!(told(event, actor, detail), sentence);
        }
    }
}
