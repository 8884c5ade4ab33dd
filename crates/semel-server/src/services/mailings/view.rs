//! A mailing and an entry, as JSON.

use semel::Timestamp;
use serde::Serialize;
use serde_json::{Value, json};

use super::{
    send::message_id,
    tables::{entries::Shown, mailings::Mailing},
};
use crate::http::answers;

/// An entry.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct EntryView {
    /// Its number in the mailing: the line of its first appearance in the file.
    entry_id: i64,
    line: i64,
    email: String,
    original: String,
    status: String,
    attempts: i64,
    #[serde(serialize_with = "answers::maybe_time")]
    last_attempt: Option<i64>,
    #[serde(serialize_with = "answers::maybe_time")]
    next_attempt: Option<i64>,
    external_id: Option<String>,
    message_id: String,
    #[serde(serialize_with = "answers::maybe_time")]
    date: Option<i64>,
    error: Option<String>,
    #[serde(serialize_with = "answers::time")]
    created_at: i64,
    #[serde(serialize_with = "answers::time")]
    updated_at: i64,
}

impl EntryView {
    pub(super) fn of(entry: Shown, mailing: &Mailing) -> Self {
        Self {
            entry_id: entry.line,
            line: entry.line,
            original: entry.original.unwrap_or_else(|| entry.email.clone()),
            email: entry.email,
            status: entry.status,
            attempts: entry.attempts,
            last_attempt: entry.last_attempt,
            next_attempt: entry.next_attempt,
            external_id: entry.external_id,
            message_id: message_id(&mailing.id, entry.line, &mailing.message_domain),
            date: entry.mail_date.map(|date| date / 1_000_000 * 1_000_000),
            error: entry.error,
            created_at: entry.created_at,
            updated_at: entry.updated_at,
        }
    }
}

/// A mailing. `same_list_as` is the oldest other mailing to the same addresses.
pub(super) fn mailing(m: &Mailing, now: i64, same_list_as: Option<String>) -> Value {
    let time = |micros: Option<i64>| micros.map(|micros| Timestamp::from_micros(micros).to_string());
    let done = m.settled() + m.in_doubt;
    let progress = match m.phase.as_str() {
        "importing" => imported(m),
        _ if m.total == 0 => 1.0,
        _ => ratio(done, m.total),
    };
    let rate = rate(m, now);
    let left = m.pending() + m.sending;
    let eta = rate.filter(|rate| *rate > 0.0 && left > 0).map(|rate| {
        #[expect(clippy::cast_possible_truncation, clippy::cast_precision_loss, reason = "an estimate")]
        let micros = (left as f64 / rate * 1e6) as i64;
        now.saturating_add(micros)
    });
    let waits = m.status == "PROCESSING" && m.in_doubt > 0 && left == 0 && m.phase == "sending";
    let mut shown = json!({
        "mailingId": m.id,
        "filename": m.filename,
        "contentHash": m.content_hash,
        "contentBytes": m.content_bytes,
        "storageUrl": m.storage_url,
        "status": m.status,
        "phase": m.phase,
        "policy": m.policy,
        "counts": counts(m),
        "duplicateRows": m.duplicate_rows,
        "rejectedRows": m.rejected_rows,
        "blankRows": m.blank_rows,
        "warnings": { "plusTags": m.plus_tags, "mixedScripts": m.mixed_scripts },
        "progress": progress,
        "rate": rate,
        "eta": time(eta),
        "error": m.error.as_deref().or_else(|| without_entries(m)),
        "retryAt": time(m.retry_at.filter(|_| m.status == "FAILED")),
        "run": m.run,
        "sendAt": time(m.send_at),
        "lastAttempt": time(m.last_attempt),
        "createdAt": time(Some(m.created_at)),
        "updatedAt": time(Some(m.updated_at)),
    });
    if waits {
        shown["waitingFor"] = "decision".into();
    }
    if let Some(other) = same_list_as {
        shown["sameListAs"] = other.into();
    }
    shown
}

fn counts(m: &Mailing) -> Value {
    json!({
        "total": m.total,
        "pending": m.pending(),
        "sending": m.sending,
        "sent": m.sent,
        "failed": m.failed,
        "invalid": m.invalid,
        "suppressed": m.suppressed,
        "cancelled": m.cancelled,
        "inDoubt": m.in_doubt,
    })
}

/// Such a mailing is COMPLETED: there is nothing to send, and nothing to try again. A person should know.
fn without_entries(m: &Mailing) -> Option<&'static str> {
    (m.phase == "sending" && m.total == 0).then_some("no row of the file became an entry: see rejects.csv")
}

/// The part of the file that is imported.
fn imported(m: &Mailing) -> f64 {
    let place: Option<Value> = m.place.as_deref().and_then(|place| serde_json::from_str(place).ok());
    let offset = place.and_then(|place| place.pointer("/place/offset").and_then(Value::as_i64)).unwrap_or(0);
    ratio(offset.min(m.content_bytes), m.content_bytes.max(1))
}

/// Settled mails per second since the present run began.
fn rate(m: &Mailing, now: i64) -> Option<f64> {
    let since = m.rate_since.filter(|_| m.status == "PROCESSING" && m.active)?;
    let settled = m.settled() - m.rate_base;
    (now > since && settled > 0).then(|| (ratio(settled, now - since) * 1e6 * 10.0).round() / 10.0)
}

#[expect(clippy::cast_precision_loss, reason = "counts far below 2^53")]
fn ratio(part: i64, whole: i64) -> f64 {
    part as f64 / whole as f64
}
