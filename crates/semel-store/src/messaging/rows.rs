//! Stored forms of messages.

use std::collections::BTreeMap;

use semel::{
    Error, Fence, Fingerprint, Result, Timestamp,
    messaging::{
        DeadLetter, Envelope, Lent, Message, NewLetter, Origin, OutboxRow, OutboxState, Received, Retry, RetryRow,
        Topic,
    },
    micros,
};
use serde_json::{Value, json};

use crate::{
    codec::{decode, encode},
    from_row,
};

/// The longest stored reason or error, in bytes.
const LONGEST_REASON: usize = 4096;

/// A message in a batch. `number` counts within its ordering key; `behind` is true if an earlier message of the same
/// batch has the same key.
pub(super) fn message(place: usize, message: &Message, number: Option<i64>, behind: bool) -> Value {
    json!({
        "place": place,
        "tenant": message.tenant,
        "message_id": message.id.to_string(),
        "topic": message.topic.as_str(),
        "kind": message.kind,
        "body": hex::encode(encode(&message.body)),
        "headers": headers(&message.headers),
        "ordering_key": message.ordering_key,
        "number": number,
        "not_before": message.not_before.map(Timestamp::as_micros),
        "receipt": message.receipt,
        "operation": message.origin.map(|origin| origin.operation),
        "fence": message.origin.map(|origin| origin.fence.0),
        "behind": behind,
    })
}

/// A message that is published to an embedded queue.
pub(super) fn published(place: usize, envelope: &Envelope) -> Value {
    let Envelope { message, number, put_at } = envelope;
    json!({
        "place": place,
        "queue": message.topic.as_str(),
        "tenant": message.tenant,
        "message_id": message.id.to_string(),
        "kind": message.kind,
        "body": hex::encode(encode(&message.body)),
        "headers": headers(&message.headers),
        "number": number,
        "put_at": put_at.as_micros(),
        "operation": message.origin.map(|origin| origin.operation),
        "fence": message.origin.map(|origin| origin.fence.0),
    })
}

/// A message that could not be handled.
pub(super) fn letter(letter: &NewLetter) -> Value {
    let message = &letter.message;
    json!({
        "tenant": clean(&letter.tenant),
        "consumer": clean(&letter.consumer),
        "key": clean(&letter.key),
        "fingerprint": hex::encode(letter.fingerprint.as_bytes()),
        "message_id": message.id.as_deref().map(clean),
        "message_tenant": message.tenant.as_deref().map(clean),
        "queue": clean(&message.queue),
        "kind": clean(&message.kind),
        "body": hex::encode(encode(&message.body)),
        "headers": headers(&message.headers),
        "number": message.number,
        "put_at": message.put_at.map(Timestamp::as_micros),
        "operation": message.origin.map(|origin| origin.operation),
        "fence": message.origin.map(|origin| origin.fence.0),
        "failures": letter.failures,
        "reason": reason(&letter.reason),
        "after": match letter.retry {
            Retry::After(after) => micros(after),
            Retry::Dead => 0,
        },
    })
}

/// Text from any sender, without characters that PostgreSQL cannot store.
fn clean(text: &str) -> String {
    text.replace('\0', "\u{fffd}")
}

/// A stored reason: the beginning of its text.
pub(super) fn reason(text: &str) -> String {
    let mut end = text.len().min(LONGEST_REASON);
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    clean(&text[..end])
}

/// A reason in a batch.
pub(super) fn stored_reason(text: &str) -> String {
    hex::encode(encode(reason(text).as_bytes()))
}

fn headers(headers: &BTreeMap<String, String>) -> String {
    serde_json::to_string(headers).unwrap_or_default()
}

fn read_headers(text: &str) -> Result<BTreeMap<String, String>> {
    serde_json::from_str(text).map_err(|_| Error::Corrupt("a message's headers"))
}

fn count(n: i64) -> u32 {
    u32::try_from(n).unwrap_or(if n < 0 { 0 } else { u32::MAX })
}

fn origin(operation: Option<i64>, fence: Option<i64>) -> Option<Origin> {
    Some(Origin { operation: operation?, fence: Fence(fence?) })
}

/// The columns of a message in the outbox.
pub(super) struct EnvelopeRow {
    id: i64,
    failures: i64,
    tenant: String,
    message_id: String,
    topic: String,
    kind: String,
    body: Vec<u8>,
    headers: String,
    ordering_key: Option<String>,
    number: Option<i64>,
    not_before: Option<i64>,
    receipt: bool,
    operation: Option<i64>,
    fence: Option<i64>,
    put_at: i64,
}

from_row!(EnvelopeRow {
    id,
    failures,
    tenant,
    message_id,
    topic,
    kind,
    body,
    headers,
    ordering_key,
    number,
    not_before,
    receipt,
    operation,
    fence,
    put_at,
});

impl EnvelopeRow {
    fn envelope(self) -> Result<Envelope> {
        let message = Message {
            id: self.message_id.parse().map_err(|_| Error::Corrupt("a message's id"))?,
            tenant: self.tenant,
            topic: Topic::new(&self.topic).map_err(|_| Error::Corrupt("a message's topic"))?,
            kind: self.kind,
            body: decode(self.body)?,
            headers: read_headers(&self.headers)?,
            ordering_key: self.ordering_key,
            not_before: self.not_before.map(Timestamp::from_micros),
            receipt: self.receipt,
            origin: origin(self.operation, self.fence),
        };
        Ok(Envelope { message, number: self.number, put_at: Timestamp::from_micros(self.put_at) })
    }
}

/// A row that a relay has taken.
pub(super) struct LentRow {
    row: EnvelopeRow,
}

from_row!(LentRow, row => { row: EnvelopeRow::from_row(row)? });

impl LentRow {
    /// The size of its body.
    pub(super) fn weight(&self) -> usize {
        self.row.body.len()
    }

    pub(super) fn read(self) -> Result<Lent> {
        Ok(Lent { id: self.row.id, failures: count(self.row.failures), envelope: self.row.envelope()? })
    }
}

/// A row of the outbox in a listing.
pub(super) struct ListedRow {
    row: EnvelopeRow,
    state: String,
    due_at: Option<i64>,
    error: Option<Vec<u8>>,
}

from_row!(ListedRow, row => { row: EnvelopeRow::from_row(row)?, state, due_at, error });

impl ListedRow {
    pub(super) fn read(self) -> Result<OutboxRow> {
        Ok(OutboxRow {
            id: self.row.id,
            state: OutboxState::parse(&self.state).ok_or(Error::Corrupt("a state"))?,
            failures: count(self.row.failures),
            error: self.error.map(text).transpose()?,
            due_at: self.due_at.map(Timestamp::from_micros),
            envelope: self.row.envelope()?,
        })
    }
}

fn text(stored: Vec<u8>) -> Result<String> {
    Ok(String::from_utf8_lossy(&decode(stored)?).into_owned())
}

/// A message in an embedded queue.
pub(super) struct QueueRow {
    id: i64,
    token: i64,
    deliveries: i64,
    queue: String,
    tenant: String,
    message_id: String,
    kind: String,
    body: Vec<u8>,
    headers: String,
    number: Option<i64>,
    put_at: i64,
    operation: Option<i64>,
    fence: Option<i64>,
}

from_row!(QueueRow {
    id,
    token,
    deliveries,
    queue,
    tenant,
    message_id,
    kind,
    body,
    headers,
    number,
    put_at,
    operation,
    fence,
});

/// A delivered message.
pub(super) struct Came {
    pub(super) id: i64,
    pub(super) token: i64,
    pub(super) redelivered: bool,
    pub(super) message: Received,
}

impl QueueRow {
    pub(super) fn read(self) -> Result<Came> {
        let (id, token, redelivered) = (self.id, self.token, self.deliveries > 1);
        let message = self.message()?;
        Ok(Came { id, token, redelivered, message })
    }

    fn message(self) -> Result<Received> {
        Ok(Received {
            id: Some(self.message_id),
            tenant: Some(self.tenant),
            queue: self.queue,
            kind: self.kind,
            body: decode(self.body)?,
            headers: read_headers(&self.headers)?,
            number: self.number,
            put_at: Some(Timestamp::from_micros(self.put_at)),
            origin: origin(self.operation, self.fence),
        })
    }
}

/// The columns of a message that could not be handled.
struct KeptRow {
    id: i64,
    tenant: String,
    key: String,
    message_id: Option<String>,
    message_tenant: Option<String>,
    queue: String,
    kind: String,
    body: Vec<u8>,
    headers: String,
    number: Option<i64>,
    put_at: Option<i64>,
    operation: Option<i64>,
    fence: Option<i64>,
    failures: i64,
}

from_row!(KeptRow {
    id,
    tenant,
    key,
    message_id,
    message_tenant,
    queue,
    kind,
    body,
    headers,
    number,
    put_at,
    operation,
    fence,
    failures,
});

impl KeptRow {
    fn message(&mut self) -> Result<Received> {
        Ok(Received {
            id: self.message_id.take(),
            tenant: self.message_tenant.take(),
            queue: std::mem::take(&mut self.queue),
            kind: std::mem::take(&mut self.kind),
            body: decode(std::mem::take(&mut self.body))?,
            headers: read_headers(&self.headers)?,
            number: self.number,
            put_at: self.put_at.map(Timestamp::from_micros),
            origin: origin(self.operation, self.fence),
        })
    }
}

/// A retry that a consumer has taken.
pub(super) struct TakenRetry {
    row: KeptRow,
    fingerprint: Vec<u8>,
    starts: i64,
    token: i64,
}

from_row!(TakenRetry, row => { row: KeptRow::from_row(row)?, fingerprint, starts, token });

impl TakenRetry {
    pub(super) fn read(mut self) -> Result<RetryRow> {
        Ok(RetryRow {
            id: self.row.id,
            token: self.token,
            message: self.row.message()?,
            tenant: self.row.tenant,
            key: self.row.key,
            fingerprint: Fingerprint::from_bytes(&self.fingerprint).map_err(|_| Error::Corrupt("a fingerprint"))?,
            failures: count(self.row.failures),
            starts: count(self.starts),
        })
    }
}

/// A dead letter.
pub(super) struct DeadRow {
    row: KeptRow,
    consumer: String,
    reason: String,
    died_at: i64,
}

from_row!(DeadRow, row => { row: KeptRow::from_row(row)?, consumer, reason, died_at });

impl DeadRow {
    pub(super) fn read(mut self) -> Result<DeadLetter> {
        Ok(DeadLetter {
            id: self.row.id,
            message: self.row.message()?,
            tenant: self.row.tenant,
            consumer: self.consumer,
            key: self.row.key,
            failures: count(self.row.failures),
            reason: self.reason,
            died_at: Timestamp::from_micros(self.died_at),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_reason_is_cut_between_characters_and_can_be_stored() {
        assert_eq!(reason("no\0pe"), "no\u{fffd}pe");
        let long = format!("x{}", "é".repeat(LONGEST_REASON));
        let cut = reason(&long);
        assert_eq!(cut.len(), LONGEST_REASON - 1);
        assert!(long.starts_with(&cut));
    }
}
