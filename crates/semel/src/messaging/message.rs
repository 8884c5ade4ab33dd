//! A message: as put, as published, as delivered.

use std::{collections::BTreeMap, fmt, str::FromStr};

use bytes::Bytes;

use crate::{Error, Fence, Result, Timestamp};

/// The largest body. RabbitMQ accepts more, but a message should report an event, not carry a file.
pub(super) const LONGEST_BODY: usize = 1 << 20;

/// The total size of a message's headers.
pub(super) const LONGEST_HEADERS: usize = 16 << 10;

/// The id of a message, the same on every delivery: a UUID (version 7 if generated here).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct MessageId(uuid::Uuid);

impl MessageId {
    /// A new one.
    #[must_use]
    pub fn new() -> Self {
        Self(uuid::Uuid::now_v7())
    }
}

impl Default for MessageId {
    fn default() -> Self {
        Self::new()
    }
}

impl fmt::Display for MessageId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.hyphenated().fmt(f)
    }
}

impl FromStr for MessageId {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        uuid::Uuid::parse_str(text).map(Self).map_err(|_| Error::Invalid("message id: is not a UUID".into()))
    }
}

/// The destination: a queue's name, which is also the routing key.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Topic(String);

impl Topic {
    /// Parses a topic: 1 to 200 letters, digits, `.`, `-`, `_`, `:` and `/`.
    ///
    /// # Errors
    /// [`Error::Invalid`] for anything else.
    pub fn new(name: &str) -> Result<Self> {
        let fits = |c: char| c.is_ascii_alphanumeric() || ".-_:/".contains(c);
        if name.is_empty() || name.len() > 200 || !name.chars().all(fits) {
            return Err(Error::Invalid("topic: must be 1 to 200 letters, digits, '.', '-', '_', ':' or '/'".into()));
        }
        Ok(Self(name.to_owned()))
    }

    /// The name.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for Topic {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// The operation whose transaction put a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Origin {
    /// The operation's id.
    pub operation: i64,
    /// The fence of the run.
    pub fence: Fence,
}

/// A message to be put into the outbox.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Message {
    /// Its id, the same on every delivery.
    pub id: MessageId,
    /// The tenant.
    pub tenant: String,
    /// The destination.
    pub topic: Topic,
    /// The kind of message, for its consumers (AMQP's `type`).
    pub kind: String,
    /// The content.
    pub body: Bytes,
    /// Further headers.
    pub headers: BTreeMap<String, String>,
    /// Messages with the same ordering key (of a tenant) reach the broker in the order in which they were committed.
    pub ordering_key: Option<String>,
    /// It is not published before this time.
    pub not_before: Option<Timestamp>,
    /// Whether to store when it was published.
    pub receipt: bool,
    /// The operation whose transaction puts it.
    pub origin: Option<Origin>,
}

impl Message {
    /// A message with a new id and default options.
    #[must_use]
    pub fn new(tenant: impl Into<String>, topic: Topic, kind: impl Into<String>, body: impl Into<Bytes>) -> Self {
        Self {
            id: MessageId::new(),
            tenant: tenant.into(),
            topic,
            kind: kind.into(),
            body: body.into(),
            headers: BTreeMap::new(),
            ordering_key: None,
            not_before: None,
            receipt: false,
            origin: None,
        }
    }

    /// Validates the message.
    ///
    /// # Errors
    /// [`Error::Invalid`], naming every problem.
    pub fn check(&self) -> Result<()> {
        let mut wrong = Vec::new();
        let is_text = |text: &str, most: usize| text.len() <= most && !text.chars().any(char::is_control);
        if self.tenant.is_empty() || !is_text(&self.tenant, 255) {
            wrong.push("tenant: must be 1 to 255 bytes without control characters");
        }
        if !is_text(&self.kind, 255) {
            wrong.push("kind: must have at most 255 bytes and no control characters");
        }
        if self.body.len() > LONGEST_BODY {
            wrong.push("body: must have at most 1 MiB");
        }
        let bytes: usize = self.headers.iter().map(|(name, value)| name.len() + value.len()).sum();
        if bytes > LONGEST_HEADERS || self.headers.len() > 64 {
            wrong.push("headers: must be at most 64 of together at most 16 KiB");
        }
        if self.headers.keys().any(|name| name.is_empty() || !is_text(name, 128)) {
            wrong.push("headers: a name must be 1 to 128 bytes without control characters");
        }
        if self.headers.keys().any(|name| name.starts_with("semel-") || name.starts_with("x-")) {
            wrong.push("headers: names that begin with semel- or x- are not free");
        }
        if self.ordering_key.as_ref().is_some_and(|key| key.is_empty() || !is_text(key, 255)) {
            wrong.push("ordering_key: must be 1 to 255 bytes without control characters");
        }
        match wrong[..] {
            [] => Ok(()),
            _ => Err(Error::Invalid(wrong.join("; "))),
        }
    }
}

/// A message to publish.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Envelope {
    /// The message.
    pub message: Message,
    /// Its number within its ordering key, from 1 without gaps.
    pub number: Option<i64>,
    /// When it was put.
    pub put_at: Timestamp,
}

/// A delivered message. Any program may have sent it, so nothing about it is validated.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Received {
    /// Its id, if it has one.
    pub id: Option<String>,
    /// The tenant, if it names one.
    pub tenant: Option<String>,
    /// The queue it came from.
    pub queue: String,
    /// The kind of message.
    pub kind: String,
    /// The content.
    pub body: Bytes,
    /// Further headers, without Semel's own.
    pub headers: BTreeMap<String, String>,
    /// Its number within its ordering key.
    pub number: Option<i64>,
    /// When it was put, by the clock of the sender.
    pub put_at: Option<Timestamp>,
    /// The operation whose transaction put it.
    pub origin: Option<Origin>,
}
