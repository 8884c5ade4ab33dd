//! Strict JSON: accepts only what every reader reads alike.

use std::{borrow::Cow, collections::BTreeMap};

use semel::Fingerprint;
use serde::Deserialize;
use serde_json::value::RawValue;

use crate::http::json::{DEEPEST, flaw};

/// The members of an object, unparsed.
pub(super) type Members<'a> = BTreeMap<Cow<'a, str>, &'a RawValue>;

/// Names, borrowed if possible.
#[derive(Deserialize, PartialEq, Eq, PartialOrd, Ord)]
struct Name<'a>(#[serde(borrow)] Cow<'a, str>);

/// The fingerprint of a JSON text without the values at some pointers. Refuses duplicate members, invalid UTF-8, lone
/// surrogates, numbers beyond a double and deep nesting.
pub(super) fn fingerprint(body: &[u8], without: &[&str]) -> Result<Fingerprint, String> {
    if body.trim_ascii().is_empty() {
        return Err("is empty; it must be a JSON object".to_owned());
    }
    // Some senders have ids that no double can represent.
    let fingerprint = Fingerprint::of_json_by_digits(body, without);
    // The rules for stored JSON name the member, while the fingerprint knows only the byte. They apply to valid JSON
    // only.
    let text = std::str::from_utf8(body).ok();
    let no_json = match (&fingerprint, text) {
        (Err(_), Some(text)) => serde_json::from_str::<&RawValue>(text).err(),
        _ => None,
    };
    match (no_json, text) {
        (None, Some(text)) => {
            if let Some(flaw) = flaw(text, DEEPEST) {
                return Err(format!("has {flaw}"));
            }
        }
        // The error of the other routes, with line and column. The fingerprint's error is better for a byte order mark.
        (Some(error), Some(text)) if !text.starts_with('\u{feff}') => return Err(format!("is no JSON: {error}")),
        _ => {}
    }
    fingerprint.map_err(|error| error.to_string())
}

/// The members of an object; none for another value.
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
            (&br#"{"id":1,"id":2}"#[..], "has id twice"),
            (br#"{"a":{"b":1,"b":1}}"#, "has a.b twice"),
            (b"{\"a\":\"\xff\"}", "UTF-8"),
            (br#"{"a":"\ud800"}"#, "has at a half of a surrogate pair"),
            (b"\xef\xbb\xbf{}", "byte order mark"),
            (b"", "is empty; it must be a JSON object"),
            (b" \n", "is empty"),
            (b"{} {}", "trailing"),
            (b"{'a':1}", "is no JSON: key must be a string at line 1 column 2"),
            (&[b"[".repeat(10_000), b"]".repeat(10_000)].concat(), "more than 64 levels"),
            (&[b"[".repeat(65), b"]".repeat(65)].concat(), "more than 64 levels"),
        ] {
            let told = fingerprint(json, &[]).unwrap_err();
            assert!(told.contains(why), "{told}");
        }
        assert!(fingerprint(&[b"[".repeat(64), b"]".repeat(64)].concat(), &[]).is_ok());
        assert!(fingerprint(br#"{"a":"[[[\"[[[","b":"\u0000"}"#, &[]).is_ok());
    }

    #[test]
    fn integers_beyond_a_double_are_distinguished_by_their_digits() {
        for json in ["9223372036854775808", "9007199254740993"] {
            assert!(fingerprint(json.as_bytes(), &[]).is_ok(), "{json}");
        }
        for json in ["1e400", "[9007199254740993,1e400]", "[1e400,9007199254740993]"] {
            assert!(fingerprint(json.as_bytes(), &[]).is_err(), "{json}: to some it is infinite, to others an error");
        }
        assert_ne!(fingerprint(b"9007199254740993", &[]), fingerprint(b"9007199254740992", &[]));
    }
}
