//! The story of one operation in plain words.

use semel::{
    Operation, Scope, State, Timestamp,
    journal::{Event, Note, PUT_BACK, Repeat, Repeats},
    store::MOST_NOTES,
};

use super::words::{command_line, outcome, plain, quoted, request_line, resolve, span, times};
use crate::{
    gateway,
    services::webhooks::{SERVICE, again::result_of, process::STORED, record::Stuck},
};

/// What is known about an operation.
pub(super) struct Story<'a> {
    pub(super) operation: &'a Operation,
    pub(super) notes: &'a [Note],
    pub(super) repeats: &'a [(Repeat, Repeats)],
    /// The message that it was published as, if that reached nobody.
    pub(super) stuck: Option<&'a Stuck>,
    /// The database's time.
    pub(super) now: Timestamp,
    /// The flags by which the next command finds the ledger.
    pub(super) ledger: &'a str,
}

impl Story<'_> {
    /// The whole story, line by line.
    pub(super) fn tell(&self) -> Vec<String> {
        let op = self.operation;
        let mut lines = vec![format!("{} in {}: {}", plain(op.key.as_str()), op.scope, self.verdict())];
        lines.extend(command_line(op).map(|command| format!("The command: {command}")));
        lines.extend(request_line(op).map(|request| format!("The request: {request}")));
        lines.push(String::new());
        lines.push(self.first_claim());
        lines.extend(left_out(self.notes));
        lines.extend(self.happened());
        lines.push(String::new());
        lines.extend(self.repeats.iter().map(|(repeat, repeats)| came_again(*repeat, repeats)));
        lines.push(self.next());
        lines
    }

    /// What happened after the first claim, in the order of time: the end of a run that was run once more is noted after
    /// it, and the end of the last run is told by the row.
    fn happened(&self) -> Vec<String> {
        let is_told = |note: &&Note| note.event != Event::Completed || !self.was_decided(note.at);
        let mut lines: Vec<_> =
            self.notes.iter().filter(is_told).map(|note| (note.at, self.note(note))).chain(self.completion()).collect();
        lines.sort_by_key(|(at, _)| *at);
        lines.into_iter().map(|(_, line)| line).collect()
    }

    /// Whether a person's word is in the journal for this moment, with a name and a reason.
    fn was_decided(&self, at: Timestamp) -> bool {
        self.notes.iter().any(|note| note.event == Event::Resolved && note.at == at)
    }

    /// How things stand, in a few words.
    fn verdict(&self) -> &'static str {
        let op = self.operation;
        match op.state {
            State::Pending => "it waits to be run",
            State::Processing if self.is_live() => "it is running",
            State::Processing => "its run ended without a word",
            State::Completed if self.is_stored() => "it was stored, and no rule took it",
            State::Completed => self.stuck.map_or("it took effect", |stuck| stuck.verdict),
            State::Failed => "it failed",
            State::TimedOut => "its last run ended without a word",
            State::InDoubt => "it is in doubt whether it took effect",
        }
    }

    fn first_claim(&self) -> String {
        let op = self.operation;
        // The row names its last owner, which is the first only if no other has claimed it since.
        let owner = if op.claimed_at == op.created_at && !op.owner.is_empty() {
            format!(" by {}", plain(&op.owner))
        } else {
            String::new()
        };
        format!("{}  first claimed{owner}", op.created_at)
    }

    fn note(&self, note: &Note) -> String {
        format!("{}  {}", note.at, event(note, &self.after_claim(note)))
    }

    /// How long a run took: since the note of its claim, or since the first claim, which has none.
    fn after_claim(&self, note: &Note) -> String {
        let claim = self.notes.iter().find(|other| other.event == Event::TakenOver && other.fence == note.fence);
        let first = Some(self.operation.created_at).filter(|_| note.fence.0 == self.operation.id);
        let since = claim.map(|claim| claim.at).or(first);
        since.map(|since| format!(" after {}", span(note.at.since(since)))).unwrap_or_default()
    }

    fn completion(&self) -> Option<(Timestamp, String)> {
        let op = self.operation;
        let at = op.settled_at.filter(|_| op.state == State::Completed)?;
        let kept = if self.is_stored() { "stored".to_owned() } else { outcome(op).unwrap_or_default() };
        let given = op.outcome.as_ref().is_some_and(|outcome| !outcome.body.is_empty());
        let how = match self.was_decided(at) {
            true if !given => return Some((at, format!("{at}  completed; the decision gave no outcome"))),
            true => "completed".to_owned(),
            false => format!("completed by {} after {}", plain(&op.owner), span(at.since(op.claimed_at))),
        };
        Some((at, format!("{at}  {how}: {kept}")))
    }

    /// Whether it is an event of a webhook that no rule took: it completed, and had no effect yet.
    fn is_stored(&self) -> bool {
        self.operation.scope.service() == SERVICE && result_of(self.operation) == Some(STORED)
    }

    /// Whether it took effect through the gateway and its answer is not there to be given again: it was not kept, or a
    /// person said that it took effect.
    fn has_no_answer(&self) -> bool {
        let is_answer = self.operation.outcome.as_ref().is_some_and(|outcome| outcome.kept && !outcome.body.is_empty());
        self.operation.scope.service() == gateway::SERVICE && !is_answer
    }

    /// The command that runs a stored event through the present rules.
    fn rerun(&self) -> String {
        let op = self.operation;
        let [_, function, source, _] = op.labels.0.each_ref().map(|label| label.as_deref().unwrap_or_default());
        let mut flags = Vec::new();
        if op.scope.kind() != source {
            flags.push(format!("--function {}", quoted(function)));
        }
        if op.scope.tenant() != Scope::DEFAULT_TENANT {
            flags.push(format!("--tenant {}", quoted(op.scope.tenant())));
        }
        flags.extend(Some(self.ledger.to_owned()).filter(|flags| !flags.is_empty()));
        flags.push("--reason '…'".to_owned());
        // An id that looks like a flag comes last.
        let (flags, key) = (flags.join(" "), quoted(op.key.as_str()));
        match key.starts_with('-') {
            true => format!("semel webhooks rerun {flags} -- {source} {key}"),
            false => format!("semel webhooks rerun {source} {key} {flags}"),
        }
    }

    /// What will happen next.
    fn next(&self) -> String {
        let op = self.operation;
        let person = resolve(&op.scope, &op.key, self.ledger);
        match op.state {
            State::Pending => match op.not_before.filter(|at| *at > self.now) {
                Some(at) => format!("It may be claimed after {at}."),
                None => "It runs when it is claimed next.".to_owned(),
            },
            State::Processing => self.lease(),
            State::Completed if self.is_stored() => {
                format!("To run it through the rules that the server has now: {}", self.rerun())
            }
            State::Completed if self.stuck.is_some() => self.stuck.map_or_else(String::new, |stuck| plain(&stuck.next)),
            State::Completed => match (op.expires_at, op.archived) {
                (Some(end), _) if end <= self.now => "Its retention is over: the key is free again.".to_owned(),
                (end, false) if self.has_no_answer() => {
                    let until = end.map_or_else(|| "for ever".to_owned(), |end| format!("until {end}"));
                    format!(
                        "Every repeat is answered 409 response-not-kept: it took effect, and its answer is not here. The \
                         key stays taken {until}."
                    )
                }
                (Some(end), false) => format!(
                    "Every repeat is answered with this outcome. It is kept until {end}; then the key is free again."
                ),
                (Some(end), true) => format!("Its data is in the archive. The key stays taken until {end}."),
                (None, false) => "Every repeat is answered with this outcome. It is kept for ever.".to_owned(),
                (None, true) => "Its data is in the archive. The key stays taken for ever.".to_owned(),
            },
            State::Failed | State::TimedOut if op.expires_at.is_some_and(|end| end <= self.now) => {
                "Its retention is over: the key is free again.".to_owned()
            }
            State::Failed | State::TimedOut if op.parked => {
                format!("It runs again only when a person says so: {person}")
            }
            State::Failed | State::TimedOut => format!("{} A person can decide, too: {person}", self.retry()),
            State::InDoubt => format!("A person must say what happened: {person}"),
        }
    }

    fn lease(&self) -> String {
        let op = self.operation;
        let Some(lease) = &op.lease else { return String::new() };
        let end = lease.deadline;
        match (self.is_live(), lease.terms.on_lost.doubts()) {
            (true, _) => format!("{} holds the lease until {end}, and longer if it renews it.", plain(&op.owner)),
            (false, false) => {
                format!("The lease of {} ended at {end}. It runs again when it is claimed next.", plain(&op.owner))
            }
            (false, true) => format!(
                "The lease of {} ended at {end}. The next claim or sweep puts it in doubt; then a person must say what happened.",
                plain(&op.owner)
            ),
        }
    }

    fn retry(&self) -> String {
        let op = self.operation;
        let when = op.not_before.filter(|at| *at > self.now).map(|at| format!(" after {at}")).unwrap_or_default();
        // How many attempts there are is said by each claim, so only the next one knows.
        match op.failures {
            0 => format!("It may run again{when}."),
            failures => {
                let failed = times(failures);
                let more = failures + 1;
                format!(
                    "It has failed {failed}, and may run again{when} for a claim that allows {more} attempts or more."
                )
            }
        }
    }

    fn is_live(&self) -> bool {
        self.operation.lease.as_ref().is_some_and(|lease| lease.deadline > self.now)
    }
}

/// One line of the journal in words; `took` is how long the run had gone on.
fn event(note: &Note, took: &str) -> String {
    let (detail, actor) = (plain(&note.detail), plain(&note.actor));
    let by = if actor.is_empty() { String::new() } else { format!(" by {actor}") };
    match note.event {
        Event::TakenOver => claimed_again(&by, &detail),
        Event::Completed => format!("completed{by}{took}; {detail}"),
        Event::Failed => format!("the run{by} failed{took}: {detail}"),
        Event::TimedOut => format!("{detail}; it may run again"),
        // Told by the sweep, or the claim, that found its lease at an end, or by the run itself.
        Event::Doubted if actor == "sweep" => format!("{detail}; it is in doubt whether it took effect"),
        Event::Doubted => format!("the run{by} ended in doubt{took}: {detail}"),
        Event::Released if note.detail == PUT_BACK => {
            format!("put back{by} before its work began, at no cost of an attempt")
        }
        Event::Released => format!("put back{by}{took}, at no cost of an attempt: {detail}"),
        Event::Refused => format!("a late write was refused: {detail}"),
        Event::Superseded => format!("superseded{by}: {detail}"),
        Event::Resolved => format!("decided{by}: {detail}"),
        Event::CancelAsked => format!("its run was asked to stop{by}: {detail}"),
        Event::Cancelled => format!("cancelled{by}: {detail}"),
        Event::Purged => format!("purged{by}: {detail}"),
        Event::RenewedLate | Event::Archived => detail,
    }
}

/// A claim after the first; `detail` has the attempt and the state that it found.
fn claimed_again(by: &str, detail: &str) -> String {
    match detail.split_once(" after ") {
        Some((attempt, "failed")) => format!("claimed again{by}: {attempt}, after a run that failed"),
        Some((attempt, "timed_out")) => format!("claimed again{by}: {attempt}, after the lease of the last run ended"),
        // It was put back, or has only been waiting.
        Some((attempt, "pending")) => format!("claimed{by}: {attempt}"),
        _ => format!("claimed again{by}: {detail}"),
    }
}

/// What is left of the story of an operation that is gone.
pub(super) fn gone(id: i64, notes: &[Note]) -> Vec<String> {
    let head = format!("Operation {id} is gone, and its key is free. What is left of its story:");
    let lines = notes.iter().map(|note| format!("{}  {}", note.at, event(note, "")));
    [head, String::new()].into_iter().chain(left_out(notes)).chain(lines).collect()
}

/// That the story has no beginning, where it may not.
fn left_out(notes: &[Note]) -> Option<String> {
    (notes.len() >= MOST_NOTES)
        .then(|| format!("Of its notes only the last {MOST_NOTES} are told; any older are left out."))
}

fn came_again(repeat: Repeat, repeats: &Repeats) -> String {
    let Repeats { count: n, first, last } = repeats;
    let what = match repeat {
        Repeat::Duplicate => "The same came again",
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

/// The word of a repeat that was refused because it had other credentials than the first request.
const CREDENTIALS_DIFFER: &str = "credentials_differ";

/// What a repeat was answered, as it is said.
fn answered(answer: &str) -> String {
    match answer {
        CREDENTIALS_DIFFER => "refused: it had other credentials than the first request".to_owned(),
        answer => format!("answered {}", plain(answer).replace('_', " ")),
    }
}

/// How many of several repeats were refused for their credentials. Only the first and the last of many are known one by
/// one.
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
    fn every_event_is_told_in_a_sentence() {
        let told = |event_of, actor: &str, detail: &str| {
            let note = Note {
                at: Timestamp::from_micros(0),
                event: event_of,
                fence: Fence(1),
                actor: actor.to_owned(),
                detail: detail.to_owned(),
            };
            event(&note, " after 3 s")
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
            (Event::Completed, "a:1", "it was run once more", "completed by a:1 after 3 s; it was run once more"),
            (Event::Failed, "a:1", "exit code 3", "the run by a:1 failed after 3 s: exit code 3"),
            (Event::TimedOut, "sweep", "the lease ended", "the lease ended; it may run again"),
            (Event::Doubted, "sweep", "it ended", "it ended; it is in doubt whether it took effect"),
            (Event::Doubted, "a:1", "stopped", "the run by a:1 ended in doubt after 3 s: stopped"),
            (Event::Released, "a:1", PUT_BACK, "put back by a:1 before its work began, at no cost of an attempt"),
            (Event::Released, "a:1", "it is away", "put back by a:1 after 3 s, at no cost of an attempt: it is away"),
            (Event::Refused, "", "a failure came late", "a late write was refused: a failure came late"),
            (Event::Superseded, "a:1", "newer data", "superseded by a:1: newer data"),
            (Event::RenewedLate, "a:1", "renewed late", "renewed late"),
            (Event::Resolved, "ana", "it took effect: I looked", "decided by ana: it took effect: I looked"),
            (Event::Archived, "sweep", "in the archive", "in the archive"),
            (Event::Purged, "ana", "a test", "purged by ana: a test"),
            (Event::Failed, "a\n:1", "\x1b[2J", "the run by a\\n:1 failed after 3 s: \\u{1b}[2J"),
        ] {
            assert_eq!(told(event, actor, detail), sentence);
        }
    }
}
