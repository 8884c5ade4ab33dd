//! An operation as the API shows it: the record of the source document, and what the ledger knows beyond it.

use std::time::Duration;

use semel::{
    Operation, Policy, State, Timestamp,
    journal::{Event, Note},
    prelude::*,
};
use semel_store::Database;
use serde::Serialize;
use serde_json::{Value, value::RawValue};

use super::SERVICE;
use crate::{
    http::answers::patiently,
    services::webhooks::pull,
    view::{View, json as shown, lease_has_expired},
};

/// The record.
#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Record {
    id: i64,
    idempotency_key: String,
    scope: String,
    process_instance_id: Option<String>,
    activity_id: Option<String>,
    operation_name: String,
    status: Status,
    #[serde(skip_serializing_if = "Option::is_none")]
    input: Option<Data>,
    #[serde(skip_serializing_if = "Option::is_none")]
    result_data: Option<Data>,
    error_message: Option<String>,
    retry_count: u32,
    max_retries: Option<u32>,
    can_retry: bool,
    created_at: String,
    updated_at: String,
    expires_at: Option<String>,
    is_expired: bool,
    in_doubt: bool,
    lease_expired: bool,
    backing_off: bool,
    waiting: bool,
    not_before: Option<String>,
    lease_expires_at: Option<String>,
    priority: i8,
    fence: i64,
    #[serde(skip_serializing_if = "Option::is_none")]
    attempts: Option<Value>,
}

/// The three states of the source document.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "UPPERCASE")]
pub(super) enum Status {
    Pending,
    Success,
    Failed,
}

impl Status {
    /// All of them.
    pub(super) const ALL: [(&'static str, Self); 3] =
        [("PENDING", Self::Pending), ("SUCCESS", Self::Success), ("FAILED", Self::Failed)];

    /// Failed is final: a failed run that may be followed by another one is pending.
    pub(super) fn of(op: &Operation) -> Self {
        match op.state {
            State::Completed => Self::Success,
            _ if op.is_given_up() => Self::Failed,
            _ => Self::Pending,
        }
    }
}

/// Stored bytes: JSON as it was given, other bytes as a text.
#[derive(Serialize)]
#[serde(untagged)]
enum Data {
    Json(Box<RawValue>),
    Other(Value),
}

impl Data {
    fn of(bytes: &[u8]) -> Self {
        let json = std::str::from_utf8(bytes).ok().and_then(|text| serde_json::from_str::<Box<RawValue>>(text).ok());
        json.map_or_else(|| Self::Other(shown::bytes(bytes)), Self::Json)
    }
}

impl Record {
    /// The whole record, with its runs. It reads the journal if the row alone does not tell them.
    pub(super) async fn of(store: &Database, op: &Operation, now: Timestamp) -> Self {
        // The lease is granted, or the run ended: the answer is worth more than its list of runs.
        let (notes, is_told) = match ran_once(op) {
            true => (Vec::new(), true),
            false => patiently(store.journal(op.id)).await.map_or((Vec::new(), false), |(notes, _)| (notes, true)),
        };
        // A refused call and a renewal change nothing that is shown.
        let is_change = |note: &&Note| !matches!(note.event, Event::Refused | Event::RenewedLate);
        let last = notes.iter().rev().find(is_change).map(|note| note.at);
        let view = View { notes, ..View::bare(op.clone(), now) };
        let record = Self::brief(op, now);
        Self {
            input: op.payload.as_deref().map(Data::of),
            result_data: match &op.outcome {
                Some(outcome) if pull::is_asked_for(op) => pull::value(outcome).map(Data::Json),
                Some(outcome) if outcome.kept && !outcome.body.is_empty() => Some(Data::of(&outcome.body)),
                _ => Some(Data::Other(Value::Null)),
            },
            updated_at: updated(op).max(last.unwrap_or(op.created_at)).to_string(),
            attempts: is_told.then(|| view.runs_json()),
            ..record
        }
    }

    /// The record without its input, its result and its runs: for lists.
    pub(super) fn brief(op: &Operation, now: Timestamp) -> Self {
        // Lost runs are counted apart, and use up no retry.
        let retry_count = op.failures.saturating_sub(u32::from(op.state == State::Failed));
        let max_retries = op.terms.as_ref().and_then(|own| own.max_attempts).map(|most| most.saturating_sub(1));
        let status = Status::of(op);
        let event = pull::name(op);
        let waits = matches!(op.state, State::Pending | State::Failed | State::TimedOut);
        let later = op.not_before.filter(|at| *at > now);
        Self {
            id: op.id,
            idempotency_key: op.key.as_str().to_owned(),
            scope: if event.is_some() { SERVICE } else { op.scope.service() }.to_owned(),
            process_instance_id: op.labels.0[2].clone().filter(|_| event.is_none()),
            activity_id: op.labels.0[3].clone(),
            operation_name: event.unwrap_or_else(|| op.scope.kind().to_owned()),
            status,
            input: None,
            result_data: None,
            error_message: op.error.clone().filter(|_| op.state != State::Completed),
            retry_count,
            max_retries,
            can_retry: status == Status::Pending && (waits || max_retries.is_none_or(|most| retry_count < most)),
            created_at: op.created_at.to_string(),
            updated_at: updated(op).to_string(),
            expires_at: expires_at(op, status).map(|at| at.to_string()),
            is_expired: op.has_expired(now),
            in_doubt: op.state == State::InDoubt,
            lease_expired: lease_has_expired(op, now),
            backing_off: waits && status == Status::Pending && op.state != State::Pending && later.is_some(),
            waiting: op.state == State::Pending && status == Status::Pending,
            not_before: later.filter(|_| waits).map(|at| at.to_string()),
            lease_expires_at: op.lease.as_ref().map(|lease| lease.deadline.to_string()),
            priority: op.priority.get(),
            fence: op.fence.0,
            attempts: None,
        }
    }
}

/// The answer to a claim or an enqueue, and an operation that is handed out. Serialized as it is: as a JSON value, numbers
/// of the stored JSON would change.
#[derive(Serialize)]
pub(super) struct Answered {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) claim: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) lease: Option<Lease>,
    pub(super) operation: Record,
}

/// A lease.
#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Lease {
    fence: i64,
    lease_expires_at: Option<String>,
}

impl Lease {
    pub(super) fn of(op: &Operation) -> Self {
        let lease_expires_at = op.lease.as_ref().map(|lease| lease.deadline.to_string());
        Self { fence: op.fence.0, lease_expires_at }
    }
}

/// Whether its row shows its only run: the claim that created it, or none yet.
fn ran_once(op: &Operation) -> bool {
    let first = op.fence.0 == op.id && matches!(op.state, State::Processing | State::Completed);
    // Without newer data, the first claim of enqueued work is the one since which it is tried. So next reads no journals.
    let runs_first = op.state == State::Processing && op.order.is_none() && op.tried_since == Some(op.claimed_at);
    first || runs_first || (!op.was_claimed() && op.state == State::Pending)
}

/// When it last changed, by its row.
fn updated(op: &Operation) -> Timestamp {
    [Some(op.created_at), Some(op.claimed_at), op.settled_at, op.tried_since]
        .into_iter()
        .flatten()
        .max()
        .unwrap_or(op.created_at)
}

/// When it expires. Only a settled record does; for the others, it is the time from the creation on.
fn expires_at(op: &Operation, status: Status) -> Option<Timestamp> {
    match status {
        Status::Success | Status::Failed => op.expires_at,
        Status::Pending => {
            let terms: Option<&Policy> = op.terms.as_ref().or(op.lease.as_ref().map(|lease| &lease.terms));
            let ttl: Duration = terms.and_then(|terms| terms.retention)?;
            Some(op.created_at + ttl)
        }
    }
}
