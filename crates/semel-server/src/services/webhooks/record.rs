//! An event for people: its columns with the names of the source document, and its story.

mod sent;
mod telling;

use base64::{Engine as _, engine::general_purpose::STANDARD};
use semel::{
    Operation, State, Timestamp,
    journal::{Repeat, Repeats, Sighting},
    look::Unreadable,
};
use serde::Serialize;
use serde_json::value::RawValue;

pub(super) use self::sent::Sent;
pub(crate) use self::telling::TELLING;
use super::{conflicts::Conflict, event::Event, source::Source};
use crate::view::{self, End, View};

/// The status of an event. `pending` waits to run, and has neither failed nor been lost.
pub(super) const fn status(state: State) -> &'static str {
    match state {
        State::Pending => "pending",
        State::Processing => "processing",
        State::Completed => "completed",
        State::Failed => "failed",
        // Only a person puts a webhook event in doubt; its run did not report either.
        State::TimedOut | State::InDoubt => "timeout",
    }
}

/// The states with their own status.
pub(super) const STATES: [State; 5] =
    [State::Pending, State::Processing, State::Completed, State::Failed, State::TimedOut];

/// An event in a list: without its long fields.
#[derive(Serialize)]
pub(super) struct Listed {
    event_id: String,
    event_type: Option<String>,
    webhook_function: Option<String>,
    /// When it first arrived.
    processed_at: String,
    event_created: Option<String>,
    data_fingerprint: String,
    processing_status: &'static str,
    /// When its last run began.
    processing_started_at: String,
    /// When its last run ended.
    processing_completed_at: Option<String>,
    /// Runs that failed.
    retry_count: u32,
    last_error: Option<String>,
    /// Runs that were lost.
    crashes: u32,
    parked: bool,
    archived: bool,
    /// When a worker may run it again.
    next_attempt_at: Option<String>,
}

impl Listed {
    pub(super) fn of(operation: &Operation, source: &Source) -> Self {
        let [kind, function, ..] = &operation.labels.0;
        Self {
            event_id: operation.key.as_str().to_owned(),
            event_type: kind.clone(),
            webhook_function: function.clone(),
            processed_at: operation.created_at.to_string(),
            event_created: operation.order.and_then(second),
            data_fingerprint: operation.fingerprint.to_hex(),
            processing_status: status(operation.state),
            processing_started_at: operation.claimed_at.to_string(),
            processing_completed_at: operation.settled_at.map(|at| at.to_string()),
            retry_count: operation.failures,
            last_error: operation.error.clone(),
            crashes: operation.crashes,
            parked: is_parked(operation, source),
            archived: operation.archived,
            next_attempt_at: next_attempt(operation, source).map(|at| at.to_string()),
        }
    }
}

impl Listed {
    /// An event that this version cannot read; `last_error` says why.
    pub(super) fn unreadable(row: &Unreadable) -> Self {
        let came = row.created_at.to_string();
        Self {
            event_id: row.key.clone(),
            event_type: None,
            webhook_function: None,
            processed_at: came.clone(),
            event_created: None,
            data_fingerprint: String::new(),
            processing_status: row.state.parse().map_or("failed", status),
            processing_started_at: came,
            processing_completed_at: None,
            retry_count: 0,
            last_error: Some(format!("unreadable: {}", row.why)),
            crashes: 0,
            parked: true,
            archived: false,
            next_attempt_at: None,
        }
    }
}

/// Whether an event failed as often as its source allows.
pub(super) fn is_at_limit(operation: &Operation, source: &Source) -> bool {
    usize::try_from(operation.failures).is_ok_and(|failed| failed >= source.config.max_attempts)
}

/// Whether an event was parked, or its runs were lost as often as its source allows.
pub(super) fn is_parked(operation: &Operation, source: &Source) -> bool {
    operation.parked || usize::try_from(operation.crashes).is_ok_and(|lost| lost >= source.config.max_crashes)
}

/// Whether it runs only if a person decides so.
pub(super) fn waits_for_a_person(operation: &Operation, source: &Source) -> bool {
    is_at_limit(operation, source) || is_parked(operation, source)
}

fn next_attempt(operation: &Operation, source: &Source) -> Option<Timestamp> {
    let waits = matches!(operation.state, State::Pending | State::Failed | State::TimedOut);
    let since = || operation.not_before.or(operation.settled_at).unwrap_or(operation.claimed_at);
    (waits && !waits_for_a_person(operation, source)).then(since)
}

/// Seconds since 1970 as a time, within the range of the calendar.
pub(super) fn second(seconds: i64) -> Option<String> {
    let micros = seconds.checked_mul(1_000_000)?;
    chrono::DateTime::from_timestamp_micros(micros).map(|_| Timestamp::from_micros(micros).to_string())
}

/// A whole event.
#[derive(Serialize)]
pub(super) struct Record {
    #[serde(flatten)]
    listed: Listed,
    /// Its stored result.
    processing_result: Option<Box<RawValue>>,
    /// The delivery, with its numbers as they were written.
    event_data: Option<Box<RawValue>>,
    /// Data that is not JSON.
    #[serde(skip_serializing_if = "Option::is_none")]
    event_data_base64: Option<String>,
    /// Newer data that waits for the present run.
    newer: Option<Newer>,
    attempts: Vec<Attempt>,
    decisions: Vec<Decision>,
    duplicates: Duplicates,
    conflicts: Vec<Other>,
}

#[derive(Serialize)]
struct Newer {
    data_fingerprint: String,
    event_created: Option<String>,
}

impl Record {
    pub(super) fn of(view: &View, source: &Source, conflicts: Vec<Conflict>, sent: Option<Sent>) -> Self {
        let operation = &view.operation;
        let mut listed = Listed::of(operation, source);
        // Newer data may have another type than the label.
        if let Some(event) = Event::of(operation, source) {
            listed.event_type = Some(event.kind);
        }
        let event_data = operation.payload.as_deref().and_then(json);
        let is_json = event_data.is_some();
        let kept = operation.outcome.as_ref().filter(|outcome| outcome.kept);
        Self {
            listed,
            processing_result: kept.and_then(|outcome| match sent {
                Some(sent) => sent.told(&outcome.body),
                None => json(&outcome.body),
            }),
            event_data,
            event_data_base64: operation.payload.as_deref().filter(|_| !is_json).map(|data| STANDARD.encode(data)),
            newer: operation.successor.as_ref().map(|newer| Newer {
                data_fingerprint: newer.fingerprint.to_hex(),
                event_created: second(newer.order),
            }),
            attempts: view.attempts().into_iter().map(Attempt::of).collect(),
            decisions: view.decisions().into_iter().map(Decision::of).collect(),
            duplicates: Duplicates::of(&view.repeats),
            conflicts: conflicts.into_iter().map(Other::of).collect(),
        }
    }
}

fn json(bytes: &[u8]) -> Option<Box<RawValue>> {
    serde_json::from_slice(bytes).ok()
}

/// One run of an event.
#[derive(Serialize)]
struct Attempt {
    started_at: Option<String>,
    ended_at: Option<String>,
    /// `completed`, `failed`, `timeout`, `released`, `superseded`, `cancelled`; none while it runs.
    end: Option<&'static str>,
    error: Option<String>,
    /// Its node.
    node: Option<String>,
}

impl Attempt {
    fn of(run: view::Attempt) -> Self {
        let time = |at: Option<Timestamp>| at.map(|at| at.to_string());
        let end = run.end.map(|end| match end {
            End::TimedOut | End::InDoubt => status(State::TimedOut),
            other => other.as_str(),
        });
        Self { started_at: time(run.started_at), ended_at: time(run.ended_at), end, error: run.error, node: run.owner }
    }
}

/// A person's decision about an event.
#[derive(Serialize)]
struct Decision {
    at: String,
    by: String,
    what: String,
}

impl Decision {
    fn of(decision: view::Decision) -> Self {
        Self { at: decision.at.to_string(), by: decision.by, what: decision.what }
    }
}

/// Duplicate deliveries.
#[derive(Default, Serialize)]
struct Duplicates {
    count: i64,
    first: Vec<Seen>,
    last: Vec<Seen>,
}

#[derive(Serialize)]
struct Seen {
    at: String,
    /// The ledger's answer: `replay`, `in_flight`, `exhausted`.
    answer: String,
}

impl Duplicates {
    fn of(repeats: &[(Repeat, Repeats)]) -> Self {
        let Some((_, same)) = repeats.iter().find(|(repeat, _)| *repeat == Repeat::Duplicate) else {
            return Self::default();
        };
        let seen = |list: &[Sighting]| {
            list.iter().map(|seen| Seen { at: seen.at.to_string(), answer: seen.answer.to_string() }).collect()
        };
        Self { count: same.count, first: seen(&same.first), last: seen(&same.last) }
    }
}

/// A conflict of an event, with readable times.
#[derive(Serialize)]
pub(super) struct Other {
    event_id: String,
    event_type: String,
    webhook_function: String,
    came_fingerprint: String,
    stored_fingerprint: String,
    came_created: Option<String>,
    stored_created: Option<String>,
    /// `taken` if it was newer, or `skipped`.
    deed: String,
    count: i64,
    first_at: String,
    last_at: String,
}

impl Other {
    pub(super) fn of(conflict: Conflict) -> Self {
        let at = |micros| Timestamp::from_micros(micros).to_string();
        Self {
            event_id: conflict.event_id,
            event_type: conflict.event_type,
            webhook_function: conflict.webhook_function,
            came_fingerprint: conflict.came_fingerprint,
            stored_fingerprint: conflict.stored_fingerprint,
            came_created: conflict.came_created.and_then(second),
            stored_created: conflict.stored_created.and_then(second),
            deed: conflict.deed,
            count: conflict.count,
            first_at: at(conflict.first_at),
            last_at: at(conflict.last_at),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_second_beyond_the_calendar_is_no_time() {
        assert_eq!(second(1_700_000_000).as_deref(), Some("2023-11-14T22:13:20.000000Z"));
        assert_eq!((second(i64::MAX), second(i64::MAX / 1_000_000)), (None, None));
    }
}
