//! The canonical form of a JSON text (RFC 8785, "JCS"), for fingerprints that must not change when
//! a client orders its members or lays out its white space differently on a retry.
//!
//! The reader is our own, because `serde_json::Value` keeps the last of two equal members, although other languages
//! read such a text differently, and forgets how a number was written, so that `1` and `1.0` would be one payload. A
//! fingerprint that merges different payloads replays the wrong outcome. So a text with two readings is refused here,
//! and what RFC 8785 merges is kept beside the bytes as a [`Literal`].

mod exclusion;
mod reader;
mod writer;

#[cfg(test)]
mod tests;

/// The deepest nesting of arrays and objects that is read. Reader and writer recurse once per level. 128 is the default
/// of other JSON readers and takes 64 KiB of stack (a debug build: 320 KiB) of a thread's 2 MiB.
const MAX_DEPTH: usize = 128;

/// The canonical form of `bytes` without the values that `pointers` name, for payloads in which
/// some member differs on an honest retry (`/pending_webhooks`, `/meta/sent_at`).
///
/// Members are sorted by the UTF-16 code units of their names, strings are escaped in one way,
/// numbers are printed as ECMAScript prints the nearest double, and no white space is left. Strings
/// are not normalised: `é` as one code point and as two are different strings.
///
/// Pointers (RFC 6901) refer to the text as received, so the second of `/a/0` and `/a/1` still means the second
/// element. A pointer without a match excludes nothing. Excluded values must be well formed, but may exceed the limits
/// of numbers: a nanosecond timestamp is a reason to exclude one.
pub(crate) fn canonicalize_without(bytes: &[u8], pointers: &[&str]) -> Result<Canonical, JsonError> {
    canonical(bytes, pointers, Inexact::Refused)
}

/// How to treat an integer that no double holds.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Inexact {
    /// Refuse it.
    Refused,
    /// It is printed as its nearest double, and its [`Literal`] keeps the digits.
    Kept,
}

pub(crate) fn canonical(bytes: &[u8], pointers: &[&str], inexact: Inexact) -> Result<Canonical, JsonError> {
    let exclusions = exclusion::parse(pointers)?;
    let mut document = reader::read(bytes)?;
    for path in &exclusions {
        exclusion::apply(&mut document, path);
    }
    writer::write(&document, inexact)
}

/// A JSON text in canonical form, and what that form does not show.
///
/// The two together distinguish any two texts that differ in more than member order, white space and the escaping of
/// strings; `bytes` alone is exactly the form of RFC 8785.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Canonical {
    /// The canonical text.
    pub(crate) bytes: Vec<u8>,
    /// The numbers that were not written canonically, in the order of `bytes`.
    pub(crate) literals: Vec<Literal>,
}

/// A number as the sender wrote it, where that is not how RFC 8785 writes it: `1.0`, `1e2`, `-0`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Literal {
    /// Where the canonical number begins in [`Canonical::bytes`]: it ties the literal to its field,
    /// so that `[1,1.0]` and `[1.0,1]` stay different.
    pub(crate) at: usize,
    /// The number as it was written.
    pub(crate) text: String,
}

/// Why a text has no canonical form. Offsets count bytes from the start of the input; nothing of
/// the payload itself is repeated, because errors end up in logs.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum JsonError {
    /// The bytes are not UTF-8.
    #[error("invalid UTF-8 at byte {at}")]
    InvalidUtf8 {
        /// The first byte that fits no character.
        at: usize,
    },
    /// The text begins with a byte order mark, which RFC 8259 forbids and readers treat
    /// differently.
    #[error("byte order mark at byte 0")]
    ByteOrderMark,
    /// The text is not JSON.
    #[error("expected {expected} at byte {at}")]
    Syntax {
        /// The first byte that does not fit, or the length of a text that ends too early.
        at: usize,
        /// The expected token.
        expected: &'static str,
    },
    /// More text follows the value.
    #[error("trailing data at byte {at}")]
    TrailingData {
        /// Where it begins.
        at: usize,
    },
    /// A name occurs twice in one object; readers differ in which member they use.
    #[error("duplicate member at byte {at}")]
    DuplicateMember {
        /// The opening quote of the repeated name.
        at: usize,
    },
    /// A `\u` escape is one half of a surrogate pair without the other, which no UTF-8 text can
    /// hold.
    #[error("lone surrogate at byte {at}")]
    LoneSurrogate {
        /// The backslash of the escape.
        at: usize,
    },
    /// Arrays and objects are nested more than 128 deep.
    #[error("nested deeper than 128 levels at byte {at}")]
    TooDeep {
        /// The bracket that opens the level too many.
        at: usize,
    },
    /// A number is too large for a double and would become infinity.
    #[error("number out of range at byte {at}")]
    NumberOverflow {
        /// The first byte of the number.
        at: usize,
    },
    /// An integer beyond 2^53 falls between two doubles (RFC 7493): most readers would turn it into
    /// its neighbour. Such values belong in a string.
    #[error("integer that no double holds exactly at byte {at}; send it as a string")]
    InexactInteger {
        /// The first byte of the number.
        at: usize,
    },
    /// An exclusion is not a JSON pointer, or is the empty one, which names the whole text.
    #[error("`{pointer}` is not a JSON pointer to a part of the payload, such as /a/b")]
    InvalidPointer {
        /// The pointer as it was given; it comes from configuration, not from a payload.
        pointer: String,
    },
}

impl JsonError {
    /// The position of the fault in the input; `None` if the input is not at fault.
    pub fn offset(&self) -> Option<usize> {
        match *self {
            Self::ByteOrderMark => Some(0),
            Self::InvalidUtf8 { at }
            | Self::Syntax { at, .. }
            | Self::TrailingData { at }
            | Self::DuplicateMember { at }
            | Self::LoneSurrogate { at }
            | Self::TooDeep { at }
            | Self::NumberOverflow { at }
            | Self::InexactInteger { at } => Some(at),
            Self::InvalidPointer { .. } => None,
        }
    }
}
