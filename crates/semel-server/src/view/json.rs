//! Operations as JSON: camelCase, times in RFC 3339 with microseconds, bytes as text if they are text.

use std::collections::HashMap;

use base64::{Engine as _, engine::general_purpose::STANDARD};
use semel::{
    LeaseRow, Operation, Timestamp,
    journal::{Note, Repeat, Repeats, Sighting},
    look::{Listing, SetAside, Unreadable},
};
use semel_store::{Audited, HeldMessage, Paused};
use serde_json::{Value, json};

use super::{Attempt, View};

impl View {
    /// Its runs.
    pub(crate) fn runs_json(&self) -> Value {
        self.attempts().iter().map(attempt).collect()
    }

    /// All data. The sentences are in [`View::story`].
    pub(crate) fn json(&self) -> Value {
        json!({
            "now": time(self.now),
            "operation": whole(&self.operation),
            "standing": self.standing().as_str(),
            "attempts": self.runs_json(),
            "journal": journal(&self.notes),
            "repeats": repeats(&self.repeats),
            "messages": self.messages.iter().map(message).collect::<Value>(),
            "audit": audit(&self.audit),
            "setAside": set_aside(&self.aside),
            "paused": self.paused.as_ref().map(paused),
            "hasHandler": self.has_handler,
        })
    }
}

/// A page of operations, including unreadable ones, with the reasons why some were set aside.
pub(crate) fn page(listing: &Listing, aside: &HashMap<i64, Vec<SetAside>>) -> Value {
    let mut items: Vec<_> = listing.items.iter().map(|op| (op.id, brief(op))).collect();
    items.extend(listing.unreadable.iter().map(|row| (row.id, unreadable(row))));
    items.sort_by_key(|(id, _)| std::cmp::Reverse(*id));
    let items = items.into_iter().map(|(id, item)| with_aside(item, aside.get(&id).map_or(&[], |aside| aside)));
    json!({ "items": items.collect::<Value>(), "next": listing.next })
}

/// An operation with the reasons why it was set aside, if it was.
pub(crate) fn with_aside(mut operation: Value, aside: &[SetAside]) -> Value {
    if !aside.is_empty() {
        operation["setAside"] = set_aside(aside);
    }
    operation
}

/// An operation without its large fields: for a list.
fn brief(op: &Operation) -> Value {
    json!({
        "id": op.id,
        "tenant": op.scope.tenant(),
        "service": op.scope.service(),
        "kind": op.scope.kind(),
        "key": op.key.as_str(),
        "keyHash": op.short_hash(),
        "labels": op.labels.0,
        "state": op.state.as_str(),
        "attempt": if op.was_claimed() { op.attempt() } else { 0 },
        "failures": op.failures,
        "crashes": op.crashes,
        "parked": op.parked,
        "pinned": op.pinned,
        "priority": op.priority.get(),
        "owner": op.owner,
        "fence": op.fence.0,
        "fingerprint": op.fingerprint.to_hex(),
        "order": op.order,
        "createdAt": time(op.created_at),
        "claimedAt": op.was_claimed().then(|| time(op.claimed_at)),
        "settledAt": op.settled_at.map(time),
        "notBefore": op.not_before.map(time),
        "expiresAt": op.expires_at.map(time),
        "archiveAt": op.archive_at.map(time),
        "archived": op.archived,
        "lease": op.lease.as_ref().map(lease),
        "error": op.error,
    })
}

/// The readable columns of an unreadable operation.
pub(crate) fn unreadable(row: &Unreadable) -> Value {
    json!({
        "id": row.id,
        "tenant": row.tenant,
        "service": row.service,
        "kind": row.kind,
        "key": row.key,
        "state": row.state,
        "createdAt": time(row.created_at),
        "unreadable": row.why,
    })
}

/// Why an operation was set aside.
pub(crate) fn set_aside(all: &[SetAside]) -> Value {
    let one = |aside: &SetAside| {
        json!({
            "task": aside.what.as_str(),
            "since": time(aside.since),
            "tries": aside.tries,
            "retryAt": time(aside.retry_at),
            "reason": aside.reason,
        })
    };
    all.iter().map(one).collect()
}

/// A whole operation.
pub(crate) fn whole(op: &Operation) -> Value {
    let mut json = brief(op);
    json["payload"] = op.payload.as_deref().map_or(Value::Null, bytes);
    json["checkpoint"] = op.checkpoint.as_deref().map_or(Value::Null, bytes);
    json["outcome"] = match &op.outcome {
        Some(outcome) => json!({ "kept": outcome.kept, "body": bytes(&outcome.body) }),
        None => Value::Null,
    };
    json["successor"] = match &op.successor {
        Some(next) => json!({
            "fingerprint": next.fingerprint.to_hex(),
            "order": next.order,
            "payload": next.payload.as_deref().map_or(Value::Null, bytes),
        }),
        None => Value::Null,
    };
    json
}

/// The journal of an operation.
pub(crate) fn journal(notes: &[Note]) -> Value {
    let note = |note: &Note| {
        json!({
            "at": time(note.at),
            "event": note.event.as_str(),
            "fence": note.fence.0,
            "actor": note.actor,
            "detail": note.detail,
        })
    };
    notes.iter().map(note).collect()
}

/// The actions of people.
pub(crate) fn audit(audited: &[Audited]) -> Value {
    let one = |did: &Audited| {
        let [before, after] = &did.stood;
        json!({
            "at": time(did.at),
            "actor": did.actor,
            "action": did.action,
            "reason": did.reason,
            "before": before,
            "after": after,
        })
    };
    audited.iter().map(one).collect()
}

/// The repeats of its key: both sorts, even if there were none.
fn repeats(all: &[(Repeat, Repeats)]) -> Value {
    let of = |sort: Repeat| {
        let found = all.iter().find(|(repeat, _)| *repeat == sort).map(|(_, repeats)| repeats.clone());
        let Repeats { count, first, last } = found.unwrap_or_default();
        let list = |list: &[Sighting]| list.iter().map(sighting).collect::<Value>();
        json!({ "count": count, "first": list(&first), "last": list(&last) })
    };
    json!({ "duplicate": of(Repeat::Duplicate), "conflict": of(Repeat::Conflict) })
}

/// The pause of a kind.
pub(crate) fn paused(paused: &Paused) -> Value {
    json!({ "since": time(paused.at), "by": paused.actor, "reason": paused.reason })
}

fn attempt(run: &Attempt) -> Value {
    json!({
        "startedAt": run.started_at.map(time),
        "endedAt": run.ended_at.map(time),
        "end": run.end.map(|end| end.as_str()),
        "error": run.error,
        "owner": run.owner,
    })
}

fn message(message: &HeldMessage) -> Value {
    json!({
        "id": message.id,
        "topic": message.topic,
        "state": message.state.as_str(),
        "error": message.error,
        "putAt": time(message.put_at),
    })
}

fn sighting(seen: &Sighting) -> Value {
    json!({ "at": time(seen.at), "answer": seen.answer, "fingerprint": seen.fingerprint })
}

fn lease(lease: &LeaseRow) -> Value {
    json!({
        "endsAt": time(lease.deadline),
        "runUntil": time(lease.run_until),
        "maxAttempts": lease.terms.max_attempts,
        "onLost": lease.terms.on_lost,
        "cancelled": lease.cancelled,
    })
}

fn time(at: Timestamp) -> Value {
    at.to_string().into()
}

/// Bytes as text, or in base64.
pub(crate) fn bytes(bytes: &[u8]) -> Value {
    match std::str::from_utf8(bytes) {
        Ok(text) => text.into(),
        Err(_) => json!({ "base64": STANDARD.encode(bytes) }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_that_are_not_text_are_shown_as_base64() {
        assert_eq!(bytes("grüße\n".as_bytes()), json!("grüße\n"));
        assert_eq!(bytes(b"\xff\x00"), json!({ "base64": "/wA=" }));
    }
}
