//! An event: read from a delivery, strictly, and from the ledger.

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

/// Something that a source says has happened.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Event {
    /// Whose it is.
    pub tenant: String,
    /// Who sent it.
    pub source: String,
    /// The function that it was sent to; the source's name unless the path says otherwise.
    pub function: String,
    /// The sender's name for it.
    pub id: String,
    /// What kind of thing has happened.
    pub kind: String,
    /// When, in seconds since 1970, where the sender says so.
    pub created: Option<i64>,
    /// What tells it from another one under the same id.
    pub fingerprint: Fingerprint,
    /// The delivery's body, byte for byte: one JSON object.
    pub body: Bytes,
}

/// The type of an event whose sender names none.
pub(super) const UNTYPED: &str = "unknown";

impl Event {
    /// The event that an operation holds; none if it holds no data, as an archived one.
    pub(super) fn of(operation: &Operation, source: &Source) -> Option<Self> {
        let [kind, function, ..] = &operation.labels.0;
        let body = operation.payload.clone()?;
        // Newer data under the same id may be of another type than what the operation was first labelled with.
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
