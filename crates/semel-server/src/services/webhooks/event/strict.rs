//! JSON that every reader reads alike, or none at all.

use std::{borrow::Cow, collections::BTreeMap};

use semel::Fingerprint;
use serde::Deserialize;
use serde_json::value::RawValue;

/// The deepest nesting: real events have about ten levels, and whoever handles them may read them by recursion.
const DEEPEST: usize = 64;

/// The members of an object, each as it is written.
pub(super) type Members<'a> = BTreeMap<Cow<'a, str>, &'a RawValue>;

/// Names that are borrowed where they can be.
#[derive(Deserialize, PartialEq, Eq, PartialOrd, Ord)]
struct Name<'a>(#[serde(borrow)] Cow<'a, str>);

/// The fingerprint of a JSON text without the values that pointers name, if it is one that can be trusted: no member
/// twice, valid UTF-8, no half of a surrogate pair, no number beyond all measure, not too deep.
pub(super) fn fingerprint(body: &[u8], without: &[&str]) -> Result<Fingerprint, String> {
    // Some senders have ids that no double holds.
    let fingerprint = Fingerprint::of_json_by_digits(body, without).map_err(|error| error.to_string())?;
    match depth(body) {
        0..=DEEPEST => Ok(fingerprint),
        _ => Err(format!("nested deeper than {DEEPEST} levels")),
    }
}

/// How deep the arrays and objects of a JSON text are nested.
fn depth(json: &[u8]) -> usize {
    let (mut depth, mut deepest) = (0_usize, 0);
    let mut bytes = json.iter();
    while let Some(byte) = bytes.next() {
        match byte {
            b'[' | b'{' => {
                depth += 1;
                deepest = deepest.max(depth);
            }
            b']' | b'}' => depth = depth.saturating_sub(1),
            b'"' => {
                while let Some(byte) = bytes.next() {
                    match byte {
                        b'"' => break,
                        b'\\' => drop(bytes.next()),
                        _ => {}
                    }
                }
            }
            _ => {}
        }
    }
    deepest
}

/// The members of an object; none if it is something else.
pub(super) fn members(json: &[u8]) -> Option<Members<'_>> {
    let members: BTreeMap<Name<'_>, &RawValue> = serde_json::from_slice(json).ok()?;
    Some(members.into_iter().map(|(Name(name), value)| (name, value)).collect())
}

/// The text of a string.
pub(super) fn text(value: &RawValue) -> Option<Cow<'_, str>> {
    serde_json::from_str::<Name<'_>>(value.get()).ok().map(|Name(text)| text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn json_that_readers_differ_about_is_refused() {
        for (json, why) in [
            (&br#"{"id":1,"id":2}"#[..], "duplicate member"),
            (br#"{"a":{"b":1,"b":1}}"#, "duplicate member"),
            (b"{\"a\":\"\xff\"}", "UTF-8"),
            (br#"{"a":"\ud800"}"#, "surrogate"),
            (b"\xef\xbb\xbf{}", "byte order mark"),
            (b"", "expected a value"),
            (b"{} {}", "trailing"),
            (b"{'a':1}", "expected"),
            (&[b"[".repeat(10_000), b"]".repeat(10_000)].concat(), "nested deeper"),
            (&[b"[".repeat(65), b"]".repeat(65)].concat(), "nested deeper than 64"),
        ] {
            let told = fingerprint(json, &[]).unwrap_err();
            assert!(told.contains(why), "{told}");
        }
        assert!(fingerprint(&[b"[".repeat(64), b"]".repeat(64)].concat(), &[]).is_ok());
        assert!(fingerprint(br#"{"a":"[[[\"[[[","b":"\u0000"}"#, &[]).is_ok());
    }

    #[test]
    fn numbers_that_no_double_holds_are_told_apart_by_their_digits() {
        for json in ["9223372036854775808", "9007199254740993"] {
            assert!(fingerprint(json.as_bytes(), &[]).is_ok(), "{json}");
        }
        for json in ["1e400", "[9007199254740993,1e400]", "[1e400,9007199254740993]"] {
            assert!(fingerprint(json.as_bytes(), &[]).is_err(), "{json}: to some it is infinite, to others an error");
        }
        assert_ne!(fingerprint(b"9007199254740993", &[]), fingerprint(b"9007199254740992", &[]));
    }

    #[test]
    fn depth_counts_what_is_open_at_once() {
        for (json, deep) in [("1", 0), ("[]", 1), ("[[],[]]", 2), (r#"{"a":{"b":[]}}"#, 3), (r#"["[[","\"[["]"#, 1)] {
            assert_eq!(depth(json.as_bytes()), deep, "{json}");
        }
    }
}
