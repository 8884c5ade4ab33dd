//! An event: parsed strictly from a delivery, or read from the ledger.

#[cfg(test)]
mod fuzz;
#[cfg(test)]
mod fuzz_made;
mod read;
mod strict;
#[cfg(test)]
mod tests;

use bytes::Bytes;
use semel::{Fingerprint, Operation};

use super::source::Source;

pub(super) use read::{NoEvent, body_hash, read};

/// An event of a source.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Event {
    /// Its tenant.
    pub tenant: String,
    /// Its source.
    pub source: String,
    /// Its function: the source's name unless the path names another.
    pub function: String,
    /// The sender's id of it.
    pub id: String,
    /// Its type.
    pub kind: String,
    /// Its creation time in seconds since 1970, if the sender states it.
    pub created: Option<i64>,
    /// Tells it from other data under the same id.
    pub fingerprint: Fingerprint,
    /// The delivery's body, byte for byte: one JSON object.
    pub body: Bytes,
}

/// The type of an event without one.
pub(super) const UNTYPED: &str = "unknown";

impl Event {
    /// The event of an operation; none if its data is archived.
    pub(super) fn of(operation: &Operation, source: &Source) -> Option<Self> {
        let [kind, function, ..] = &operation.labels.0;
        let body = operation.payload.clone()?;
        // Newer data under the same id may have another type than the label.
        let kind = read::kind_in(&body, source).or_else(|| kind.clone()).unwrap_or_else(|| UNTYPED.to_owned());
        Some(Self {
            tenant: operation.scope.tenant().to_owned(),
            source: source.name.clone(),
            function: function.clone().unwrap_or_else(|| source.name.clone()),
            id: operation.key.as_str().to_owned(),
            kind,
            created: operation.order,
            fingerprint: operation.fingerprint,
            body,
        })
    }
}
