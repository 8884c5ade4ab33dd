//! Messages that could not be handled: to be tried again, and those that were tried too often.

use std::time::Duration;

use super::Received;
use crate::{Fingerprint, Timestamp};

/// What to do with a message that could not be handled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Retry {
    /// Try it again after a while.
    After(Duration),
    /// Keep it for a person.
    Dead,
}

/// A message that could not be handled, to be kept.
#[derive(Clone, Debug)]
pub struct NewLetter {
    /// Whose it is.
    pub tenant: String,
    /// Whose handler it was for.
    pub consumer: String,
    /// Its key in that consumer's inbox.
    pub key: String,
    /// What its body is known by.
    pub fingerprint: Fingerprint,
    /// The message.
    pub message: Received,
    /// How many runs have failed.
    pub failures: u32,
    /// Why the last one did.
    pub reason: String,
    /// What is to become of it.
    pub retry: Retry,
}

/// A retry in a consumer's hands.
#[derive(Clone, Debug)]
pub struct RetryRow {
    /// The row.
    pub id: i64,
    /// The number that says that it is ours.
    pub token: i64,
    /// Whose it is.
    pub tenant: String,
    /// Its key in the consumer's inbox.
    pub key: String,
    /// What its body is known by.
    pub fingerprint: Fingerprint,
    /// The message.
    pub message: Received,
    /// How many runs have failed.
    pub failures: u32,
    /// How many runs were begun, this one included. Those that did not fail have killed their process or were cut off.
    pub starts: u32,
}

/// A message that was tried too often, or that cannot be understood.
#[derive(Clone, Debug)]
pub struct DeadLetter {
    /// The letter.
    pub id: i64,
    /// Whose it is.
    pub tenant: String,
    /// Whose handler it was for.
    pub consumer: String,
    /// Its key in that consumer's inbox; a name of its own where the message could not be read, and so its key not be known.
    pub key: String,
    /// The message.
    pub message: Received,
    /// How many runs have failed.
    pub failures: u32,
    /// Why it is here.
    pub reason: String,
    /// When it came here.
    pub died_at: Timestamp,
}

/// Which dead letters are meant.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LetterFilter {
    /// Of this tenant.
    pub tenant: String,
    /// With one of these ids; none named is any.
    pub ids: Vec<i64>,
    /// Of this consumer.
    pub consumer: Option<String>,
    /// From this queue.
    pub queue: Option<String>,
    /// Whose reason has this in it.
    pub reason: Option<String>,
    /// That died at or after this time.
    pub since: Option<Timestamp>,
    /// That died before this time.
    pub before: Option<Timestamp>,
}

/// A page of dead letters.
#[derive(Clone, Debug)]
pub struct LetterPage {
    /// The letters.
    pub items: Vec<DeadLetter>,
    /// Those of the page that cannot be read, newest first.
    pub unreadable: Vec<UnreadableLetter>,
    /// Where the next page begins.
    pub next: Option<i64>,
}

/// A dead letter that this version cannot read: damaged, or written by a newer version or with another key. What can be
/// told of it all the same, as it is stored.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UnreadableLetter {
    /// The letter.
    pub id: i64,
    /// The message's id, if it said one.
    pub message_id: Option<String>,
    /// Whose handler it was for.
    pub consumer: String,
    /// From which queue it came.
    pub queue: String,
    /// Of which kind.
    pub kind: String,
    /// Its key in that consumer's inbox; a name of its own where the message could not be read, and so its key not be known.
    pub key: String,
    /// When it came here.
    pub died_at: Timestamp,
    /// What is wrong with it.
    pub why: String,
}

/// How many there are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Count {
    /// So many, at least.
    pub n: u64,
    /// Whether that is all of them.
    pub exact: bool,
}
