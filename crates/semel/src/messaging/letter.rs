//! Messages that could not be handled: retries and dead letters.

use std::time::Duration;

use super::Received;
use crate::{Fingerprint, Timestamp};

/// The next step for a message that could not be handled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Retry {
    /// Retry it after this delay.
    After(Duration),
    /// Dead letter: a person decides.
    Dead,
}

/// A message that could not be handled, to be stored.
#[derive(Clone, Debug)]
pub struct NewLetter {
    /// The tenant.
    pub tenant: String,
    /// The consumer.
    pub consumer: String,
    /// Its key in that consumer's inbox.
    pub key: String,
    /// The fingerprint of its body.
    pub fingerprint: Fingerprint,
    /// The message.
    pub message: Received,
    /// How many runs have failed.
    pub failures: u32,
    /// The error of the last one.
    pub reason: String,
    /// Retry or dead letter.
    pub retry: Retry,
}

/// A leased retry.
#[derive(Clone, Debug)]
pub struct RetryRow {
    /// The row.
    pub id: i64,
    /// The token of the lease.
    pub token: i64,
    /// The tenant.
    pub tenant: String,
    /// Its key in the consumer's inbox.
    pub key: String,
    /// The fingerprint of its body.
    pub fingerprint: Fingerprint,
    /// The message.
    pub message: Received,
    /// How many runs have failed.
    pub failures: u32,
    /// How many runs have started, including this one. Those that did not fail were cut off or killed their process.
    pub starts: u32,
}

/// A message that failed too often or cannot be read.
#[derive(Clone, Debug)]
pub struct DeadLetter {
    /// The letter.
    pub id: i64,
    /// The tenant.
    pub tenant: String,
    /// The consumer.
    pub consumer: String,
    /// Its key in that consumer's inbox; a generated one if the message could not be read.
    pub key: String,
    /// The message.
    pub message: Received,
    /// How many runs have failed.
    pub failures: u32,
    /// The reason.
    pub reason: String,
    /// When it became a dead letter.
    pub died_at: Timestamp,
}

/// A filter of dead letters.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LetterFilter {
    /// Of this tenant.
    pub tenant: String,
    /// With one of these ids; an empty list is any.
    pub ids: Vec<i64>,
    /// Of this consumer.
    pub consumer: Option<String>,
    /// From this queue.
    pub queue: Option<String>,
    /// With this text in the reason.
    pub reason: Option<String>,
    /// Created at or after this time.
    pub since: Option<Timestamp>,
    /// Created before this time.
    pub before: Option<Timestamp>,
}

/// A page of dead letters.
#[derive(Clone, Debug)]
pub struct LetterPage {
    /// The letters.
    pub items: Vec<DeadLetter>,
    /// Unreadable ones of the page, newest first.
    pub unreadable: Vec<UnreadableLetter>,
    /// Where the next page begins.
    pub next: Option<i64>,
}

/// A dead letter that this version cannot read: damaged, or written by a newer version or with another key. The columns
/// that can be read, as stored.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UnreadableLetter {
    /// The letter.
    pub id: i64,
    /// The message's id, if it has one.
    pub message_id: Option<String>,
    /// The consumer.
    pub consumer: String,
    /// The queue it came from.
    pub queue: String,
    /// The kind of message.
    pub kind: String,
    /// Its key in that consumer's inbox; a generated one if the message could not be read.
    pub key: String,
    /// When it became a dead letter.
    pub died_at: Timestamp,
    /// Why it cannot be read.
    pub why: String,
}

/// A bounded count.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Count {
    /// The count; a lower bound unless `exact`.
    pub n: u64,
    /// Whether all were counted.
    pub exact: bool,
}
