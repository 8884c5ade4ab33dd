//! An event as people see it: the columns by the names that the source document gives them, and the story behind them.

mod sent;
mod story;

use base64::{Engine as _, engine::general_purpose::STANDARD};
use semel::{
    Operation, State, Timestamp,
    journal::{Repeat, Repeats},
    look::Unreadable,
    store::Story,
};
use serde::Serialize;
use serde_json::value::RawValue;

pub(super) use self::sent::Sent;
pub(crate) use self::sent::{Stuck, stuck};
use self::story::{Attempt, Decision, attempts, decisions};
use super::{conflicts::Conflict, event::Event, source::Source};

/// The word for where an event is in its life. What waits to be run, and has neither failed nor been lost, is `pending`.
pub(super) const fn status(state: State) -> &'static str {
    match state {
        State::Pending => "pending",
        State::Processing => "processing",
        State::Completed => "completed",
        State::Failed => "failed",
        // Nothing of webhooks is ever in doubt but by hand; then nobody has heard of its run, either.
        State::TimedOut | State::InDoubt => "timeout",
    }
}

/// The states that have a word of their own.
pub(super) const STATES: [State; 5] =
    [State::Pending, State::Processing, State::Completed, State::Failed, State::TimedOut];

/// An event on a page: all but what may be long.
#[derive(Serialize)]
pub(super) struct Listed {
    event_id: String,
    event_type: Option<String>,
    webhook_function: Option<String>,
    /// When it first came.
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
    /// From when on we try again by ourselves.
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
    /// An event that this version cannot read, with what is known of it; `last_error` says why.
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

/// Whether an event was set aside, or its runs were lost as often as its source allows.
pub(super) fn is_parked(operation: &Operation, source: &Source) -> bool {
    operation.parked || usize::try_from(operation.crashes).is_ok_and(|lost| lost >= source.config.max_crashes)
}

/// Whether it runs only if a person says so.
pub(super) fn waits_for_a_person(operation: &Operation, source: &Source) -> bool {
    is_at_limit(operation, source) || is_parked(operation, source)
}

fn next_attempt(operation: &Operation, source: &Source) -> Option<Timestamp> {
    let waits = matches!(operation.state, State::Pending | State::Failed | State::TimedOut);
    let since = || operation.not_before.or(operation.settled_at).unwrap_or(operation.claimed_at);
    (waits && !waits_for_a_person(operation, source)).then(since)
}

/// Seconds since 1970 as a time, if the calendar reaches that far.
pub(super) fn second(seconds: i64) -> Option<String> {
    let micros = seconds.checked_mul(1_000_000)?;
    chrono::DateTime::from_timestamp_micros(micros).map(|_| Timestamp::from_micros(micros).to_string())
}

/// A whole event.
#[derive(Serialize)]
pub(super) struct Record {
    #[serde(flatten)]
    listed: Listed,
    /// What is kept of how it was processed.
    processing_result: Option<Box<RawValue>>,
    /// The delivery, number for number as it was written.
    event_data: Option<Box<RawValue>>,
    /// Data that is no JSON.
    #[serde(skip_serializing_if = "Option::is_none")]
    event_data_base64: Option<String>,
    /// Newer data that waits for the present run to end.
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
    pub(super) fn of(
        operation: &Operation,
        source: &Source,
        story: Story,
        conflicts: Vec<Conflict>,
        sent: Option<Sent>,
    ) -> Self {
        let (notes, repeats) = story;
        let mut listed = Listed::of(operation, source);
        // Newer data may be of another type than what the operation was first labelled with.
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
            attempts: attempts(operation, &notes),
            decisions: decisions(&notes),
            duplicates: Duplicates::of(repeats),
            conflicts: conflicts.into_iter().map(Other::of).collect(),
        }
    }
}

fn json(bytes: &[u8]) -> Option<Box<RawValue>> {
    serde_json::from_slice(bytes).ok()
}

/// Deliveries of the same that changed nothing.
#[derive(Default, Serialize)]
struct Duplicates {
    count: i64,
    first: Vec<Seen>,
    last: Vec<Seen>,
}

#[derive(Serialize)]
struct Seen {
    at: String,
    /// The ledger's word: `replay`, `in_flight`, `exhausted`.
    answer: String,
}

impl Duplicates {
    fn of(repeats: Vec<(Repeat, Repeats)>) -> Self {
        let Some((_, same)) = repeats.into_iter().find(|(repeat, _)| *repeat == Repeat::Duplicate) else {
            return Self::default();
        };
        let seen = |list: Vec<semel::journal::Sighting>| {
            list.into_iter().map(|seen| Seen { at: seen.at.to_string(), answer: seen.answer.into_owned() }).collect()
        };
        Self { count: same.count, first: seen(same.first), last: seen(same.last) }
    }
}

/// Other data that came under the id of an event, with the times as people read them.
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
