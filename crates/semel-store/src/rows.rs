//! Rows: operations as the tables hold them.

use bytes::Bytes;
use semel::{
    Error, Fence, Fingerprint, Key, Labels, LeaseRow, Operation, Outcome, Policy, Priority, Result, Scope, Successor,
    Timestamp, Token,
    journal::Note,
    look::{Group, Unreadable},
    micros,
};
use serde_json::{Value, json};
use sqlx::Row as _;

use crate::{
    codec::{decode, encode},
    from_row,
};

/// A row of `operation!` in `sql.rs`.
pub(crate) struct OperationRow {
    id: i64,
    tenant: String,
    service: String,
    kind: String,
    key: String,
    fingerprint: Vec<u8>,
    payload_order: Option<i64>,
    payload: Option<Vec<u8>>,
    label1: Option<String>,
    label2: Option<String>,
    label3: Option<String>,
    label4: Option<String>,
    state: String,
    fence: i64,
    failures: i64,
    crashes: i64,
    parked: bool,
    never_due: bool,
    pinned: bool,
    priority: i64,
    own_terms: Option<String>,
    owner: String,
    created_at: i64,
    claimed_at: i64,
    tried_since: Option<i64>,
    settled_at: Option<i64>,
    not_before: Option<i64>,
    expires_at: Option<i64>,
    archive_at: Option<i64>,
    archived: bool,
    look_at: Option<i64>,
    outcome: Option<Vec<u8>>,
    outcome_kept: Option<bool>,
    error: Option<Vec<u8>>,
    checkpoint: Option<Vec<u8>>,
    token: Option<Vec<u8>>,
    deadline: Option<i64>,
    run_until: Option<i64>,
    terms: Option<String>,
    cancelled: Option<bool>,
    successor_fingerprint: Option<Vec<u8>>,
    successor_order: Option<i64>,
    successor_payload: Option<Vec<u8>>,
    successor_terms: Option<String>,
}

from_row!(OperationRow {
    id,
    tenant,
    service,
    kind,
    key,
    fingerprint,
    payload_order,
    payload,
    label1,
    label2,
    label3,
    label4,
    state,
    fence,
    failures,
    crashes,
    parked,
    never_due,
    pinned,
    priority,
    own_terms,
    owner,
    created_at,
    claimed_at,
    tried_since,
    settled_at,
    not_before,
    expires_at,
    archive_at,
    archived,
    look_at,
    outcome,
    outcome_kept,
    error,
    checkpoint,
    token,
    deadline,
    run_until,
    terms,
    cancelled,
    successor_fingerprint,
    successor_order,
    successor_payload,
    successor_terms,
});

impl OperationRow {
    pub(crate) fn read(self) -> Result<Operation> {
        let time = |at: Option<i64>| at.map(Timestamp::from_micros);
        let lease = match (self.token, self.deadline, self.run_until, self.terms) {
            (Some(token), Some(deadline), Some(run_until), Some(terms)) => Some(LeaseRow {
                token: Token(token.try_into().map_err(|_| Error::Corrupt("a claim token"))?),
                deadline: Timestamp::from_micros(deadline),
                run_until: Timestamp::from_micros(run_until),
                terms: Policy::from_terms(&terms)?,
                cancelled: self.cancelled.unwrap_or(false),
            }),
            _ => None,
        };
        let priority = Priority::new(self.priority).map_err(|_| Error::Corrupt("a priority"))?;
        let terms = self.own_terms.as_deref().map(Policy::from_terms).transpose()?;
        let successor = match (self.successor_fingerprint, self.successor_order) {
            (Some(fingerprint), Some(order)) => {
                let payload = self.successor_payload.map(decode).transpose()?;
                let fingerprint = read_fingerprint(&fingerprint)?;
                // Earlier versions stored no terms: those of the older data apply.
                let terms = terms.clone();
                let newer = Successor { fingerprint, order, payload, not_before: None, priority, terms };
                Some(match self.successor_terms {
                    Some(text) => newer.with_terms(&text)?,
                    None => newer,
                })
            }
            _ => None,
        };
        let outcome = match (self.outcome, self.outcome_kept) {
            (Some(body), Some(kept)) => Some(Outcome { kept, body: decode(body)? }),
            _ => None,
        };
        Ok(Operation {
            id: self.id,
            scope: Scope::new(&self.tenant, &self.service, &self.kind).map_err(|_| Error::Corrupt("a scope"))?,
            key: Key::new(&self.key).map_err(|_| Error::Corrupt("a key"))?,
            labels: Labels([self.label1, self.label2, self.label3, self.label4]),
            fingerprint: read_fingerprint(&self.fingerprint)?,
            order: self.payload_order,
            payload: self.payload.map(decode).transpose()?,
            state: self.state.parse().map_err(|_| Error::Corrupt("a state"))?,
            fence: Fence(self.fence),
            failures: u32::try_from(self.failures).unwrap_or(u32::MAX),
            crashes: u32::try_from(self.crashes).unwrap_or(u32::MAX),
            parked: self.parked,
            never_due: self.never_due,
            pinned: self.pinned,
            priority,
            terms,
            owner: self.owner,
            created_at: Timestamp::from_micros(self.created_at),
            claimed_at: Timestamp::from_micros(self.claimed_at),
            tried_since: time(self.tried_since),
            settled_at: time(self.settled_at),
            not_before: time(self.not_before),
            expires_at: time(self.expires_at),
            archive_at: time(self.archive_at),
            archived: self.archived,
            look_at: time(self.look_at),
            outcome,
            error: self.error.map(text).transpose()?,
            checkpoint: self.checkpoint.map(decode).transpose()?,
            lease,
            successor,
        })
    }
}

/// An operation, or the readable columns of an unreadable one: one row must not fail the others of its query.
pub(crate) struct Read(std::result::Result<Box<Operation>, Unreadable>);

impl Read {
    pub(crate) fn id(&self) -> i64 {
        match &self.0 {
            Ok(operation) => operation.id,
            Err(unreadable) => unreadable.id,
        }
    }

    /// The readable ones and the unreadable ones.
    pub(crate) fn sorted(rows: Vec<Self>) -> (Vec<Operation>, Vec<Unreadable>) {
        let (mut operations, mut unreadable) = (Vec::new(), Vec::new());
        for Self(row) in rows {
            match row {
                Ok(operation) => operations.push(*operation),
                Err(row) => unreadable.push(row),
            }
        }
        (operations, unreadable)
    }
}

macro_rules! read_from {
    ($($row:ty),+) => {$(
        impl sqlx::FromRow<'_, $row> for Read {
            fn from_row(row: &$row) -> std::result::Result<Self, sqlx::Error> {
                let why = match OperationRow::from_row(row).map(OperationRow::read) {
                    Ok(Ok(operation)) => return Ok(Self(Ok(Box::new(operation)))),
                    Ok(Err(error)) => error.to_string(),
                    Err(error) => error.to_string(),
                };
                let text = |column| row.try_get::<String, _>(column).unwrap_or_default();
                Ok(Self(Err(Unreadable {
                    // Without an id, no action is possible.
                    id: row.try_get("id")?,
                    tenant: text("tenant"),
                    service: text("service"),
                    kind: text("kind"),
                    key: text("key"),
                    state: text("state"),
                    created_at: Timestamp::from_micros(row.try_get("created_at").unwrap_or_default()),
                    why,
                })))
            }
        }
    )+};
}
read_from!(sqlx::postgres::PgRow, sqlx::sqlite::SqliteRow);

fn read_fingerprint(bytes: &[u8]) -> Result<Fingerprint> {
    Fingerprint::from_bytes(bytes).map_err(|_| Error::Corrupt("a fingerprint"))
}

fn text(stored: Vec<u8>) -> Result<String> {
    Ok(String::from_utf8_lossy(&decode(stored)?).into_owned())
}

fn stored(bytes: &Bytes) -> String {
    hex::encode(encode(bytes))
}

fn at(time: Option<Timestamp>) -> Option<i64> {
    time.map(Timestamp::as_micros)
}

/// An operation's own columns. `old_fence` is the fence that was read.
pub(crate) fn operation(op: &Operation, old_fence: Fence) -> Value {
    json!({
        "id": op.id,
        "old_fence": old_fence.0,
        "tenant": op.scope.tenant(),
        "service": op.scope.service(),
        "kind": op.scope.kind(),
        "key": op.key.as_str(),
        "fingerprint": hex::encode(op.fingerprint.as_bytes()),
        "payload_order": op.order,
        "payload": op.payload.as_ref().map(stored),
        "label1": op.labels.0[0],
        "label2": op.labels.0[1],
        "label3": op.labels.0[2],
        "label4": op.labels.0[3],
        "state": op.state.as_str(),
        "fence": op.fence.0,
        "failures": op.failures,
        "crashes": op.crashes,
        "parked": op.parked,
        "pinned": op.pinned,
        "priority": (op.priority != Priority::default()).then(|| op.priority.get()),
        "terms": op.terms.as_ref().map(Policy::to_terms),
        "owner": op.owner,
        "created_at": op.created_at.as_micros(),
        "claimed_at": op.claimed_at.as_micros(),
        "tried_since": at(op.tried_since),
        "settled_at": at(op.settled_at),
        "not_before": at(op.not_before),
        "expires_at": at(op.expires_at),
        "archive_at": at(op.archive_at),
        "archived": op.archived,
        "look_at": at(op.look_at),
        "outcome": op.outcome.as_ref().map(|outcome| stored(&outcome.body)),
        "outcome_kept": op.outcome.as_ref().map(|outcome| outcome.kept),
        "error": op.error.as_ref().map(|error| hex::encode(encode(error.as_bytes()))),
        "checkpoint": op.checkpoint.as_ref().map(stored),
    })
}

/// The columns of an operation that change when it is claimed again.
pub(crate) fn brief(op: &Operation, old_fence: Fence) -> Value {
    json!({
        "id": op.id,
        "old_fence": old_fence.0,
        "state": op.state.as_str(),
        "fence": op.fence.0,
        "failures": op.failures,
        "crashes": op.crashes,
        "parked": op.parked,
        "pinned": op.pinned,
        "owner": op.owner,
        "claimed_at": op.claimed_at.as_micros(),
        "tried_since": at(op.tried_since),
        "settled_at": at(op.settled_at),
        "not_before": at(op.not_before),
        "expires_at": at(op.expires_at),
        "archive_at": at(op.archive_at),
        "archived": op.archived,
        "look_at": at(op.look_at),
    })
}

/// Whether a change touches nothing but the columns of [`brief`].
pub(crate) fn is_brief(old: &Operation, new: &Operation) -> bool {
    old.outcome.is_none()
        && new.outcome.is_none()
        && (old.fingerprint, old.order, &old.payload) == (new.fingerprint, new.order, &new.payload)
        && (&old.error, &old.checkpoint) == (&new.error, &new.checkpoint)
        && (old.priority, &old.terms) == (new.priority, &new.terms)
}

/// An operation's lease, if it has one. If newer data waits, or a row of a service follows the operation, the hot
/// statement must not complete it: the column `successor` prevents that.
pub(crate) fn lease(op: &Operation, followed: bool) -> Option<Value> {
    let lease = op.lease.as_ref()?;
    Some(json!({
        "id": op.id,
        "fence": op.fence.0,
        "token": hex::encode(lease.token.0),
        "deadline": lease.deadline.as_micros(),
        "run_until": lease.run_until.as_micros(),
        "term": micros(lease.terms.lease),
        "retention": lease.terms.retention.map(micros),
        "tombstone": lease.terms.tombstone.map(micros),
        "successor": followed || op.successor.is_some(),
        "terms": lease.terms.to_terms(),
        "cancelled": lease.cancelled,
    }))
}

/// A row of the backlog: an operation, and from when on it may run.
pub(crate) fn listed(op: &Operation, due: Option<Timestamp>) -> Value {
    json!({
        "id": op.id,
        "tenant": op.scope.tenant(),
        "service": op.scope.service(),
        "kind": op.listed_kind(),
        "state": op.state.as_str(),
        "due": at(due),
        "priority": op.priority.get(),
    })
}

/// An operation's newer data, if any.
pub(crate) fn successor(op: &Operation) -> Option<Value> {
    let successor = op.successor.as_ref()?;
    Some(json!({
        "id": op.id,
        "fingerprint": hex::encode(successor.fingerprint.as_bytes()),
        "payload_order": successor.order,
        "payload": successor.payload.as_ref().map(stored),
        "terms": successor.to_terms(),
    }))
}

/// The data of an operation for the archive.
pub(crate) fn archived(op: &Operation, now: Timestamp) -> Option<Value> {
    let outcome = op.outcome.as_ref()?;
    Some(json!({
        "id": op.id,
        "archived_at": now.as_micros(),
        "payload": op.payload.as_ref().map(stored),
        "outcome": stored(&outcome.body),
        "outcome_kept": outcome.kept,
    }))
}

/// A row of the journal.
pub(crate) fn note(id: i64, note: &Note) -> Value {
    json!({
        "id": id,
        "at": note.at.as_micros(),
        "event": note.event.as_str(),
        "fence": note.fence.0,
        "actor": note.actor.replace(char::is_control, " "),
        "detail": hex::encode(encode(note.detail.as_bytes())),
    })
}

/// A row of the journal.
pub(crate) struct NoteRow {
    at: i64,
    event: String,
    fence: i64,
    actor: String,
    detail: Vec<u8>,
}

from_row!(NoteRow { at, event, fence, actor, detail });

impl NoteRow {
    /// The note; `None` if a newer version has written an event that this one does not know. An unreadable note says so
    /// in its text, so that the others can be shown.
    pub(crate) fn read(self) -> Option<Note> {
        Some(Note {
            at: Timestamp::from_micros(self.at),
            event: self.event.parse().ok()?,
            fence: Fence(self.fence),
            actor: self.actor,
            detail: text(self.detail).unwrap_or_else(|error| format!("(unreadable: {error})")),
        })
    }
}

/// A count of changes (`answer` empty) or answers.
pub(crate) fn delta(group: &Group, hour: i64, from: &str, to: &str, answer: &str, bucket: i32, n: i64) -> Value {
    json!({
        "tenant": group.tenant,
        "service": group.service,
        "kind": group.kind,
        "label1": group.label1,
        "label2": group.label2,
        "hour": hour,
        "from_state": from,
        "to_state": to,
        "answer": answer,
        "bucket": bucket,
        "n": n,
    })
}
