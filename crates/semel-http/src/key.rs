//! The `Idempotency-Key` header.
//!
//! An RFC 8941 string (`"abc"`) and a bare word (`abc`) are the same key, because clients send both.
//! Ambiguous headers are refused: a proxy and the service behind it must never read different keys
//! from one request.

use http::{HeaderMap, HeaderName};
use semel::Key;

use crate::problem::{KEY_INVALID, Problem};

/// The header's name.
pub const IDEMPOTENCY_KEY: HeaderName = HeaderName::from_static("idempotency-key");

/// The key of a request, if it has one. `strict` refuses bare words.
///
/// # Errors
/// `key-invalid`, with the reason.
pub fn read(headers: &HeaderMap, strict: bool) -> Result<Option<Key>, Problem> {
    let mut lines = headers.get_all(&IDEMPOTENCY_KEY).iter();
    let Some(line) = lines.next() else { return Ok(None) };
    if lines.next().is_some() {
        return Err(invalid("The header was sent more than once."));
    }
    let text = line.as_bytes().trim_ascii();
    let key = match text.strip_prefix(b"\"") {
        Some(quoted) => string(quoted)?,
        None if strict => return Err(invalid("The key must be a quoted string, such as \"abc\".")),
        None => bare(text)?,
    };
    if key.is_empty() {
        return Err(invalid("The key is empty."));
    }
    if key.len() > Key::MAX_BYTES {
        return Err(invalid("The key is longer than 255 bytes."));
    }
    Key::new(&key).map(Some).map_err(|error| invalid(&error.to_string()))
}

/// A word without quotes.
fn bare(text: &[u8]) -> Result<String, Problem> {
    match text.iter().find(|byte| !byte.is_ascii_graphic() || matches!(byte, b'"' | b',')) {
        None => Ok(String::from_utf8_lossy(text).into_owned()),
        Some(b',') => Err(invalid("The header is a list; it must be one key.")),
        Some(b'"') => Err(invalid("The key contains a quote; write it as a string, with \\\" for the quote.")),
        Some(_) => Err(invisible()),
    }
}

/// The rest of an RFC 8941 string after its opening quote. Parameters are allowed, and ignored.
fn string(text: &[u8]) -> Result<String, Problem> {
    let mut key = String::new();
    let mut bytes = text.iter();
    loop {
        match bytes.next() {
            None => return Err(invalid("The key's closing quote is missing.")),
            Some(b'"') => break,
            Some(b'\\') => match bytes.next() {
                Some(byte @ (b'"' | b'\\')) => key.push(char::from(*byte)),
                _ => return Err(invalid("A backslash may stand only before a quote or a backslash.")),
            },
            Some(byte) if byte.is_ascii_graphic() => key.push(char::from(*byte)),
            Some(_) => return Err(invisible()),
        }
    }
    match bytes.as_slice().trim_ascii_start() {
        [] => Ok(key),
        [b';', parameters @ ..] if parameters.iter().all(|byte| matches!(byte, b' '..=b'~') && *byte != b',') => {
            Ok(key)
        }
        [b',', ..] | [b';', ..] => Err(invalid("The header is a list; it must be one key.")),
        _ => Err(invalid("Something follows the key's closing quote.")),
    }
}

fn invalid(why: &str) -> Problem {
    Problem::new(&KEY_INVALID).detail(why)
}

fn invisible() -> Problem {
    invalid("A key consists of visible ASCII characters: no spaces, control characters or accents.")
}

#[cfg(test)]
mod tests {
    use http::HeaderValue;

    use super::*;

    fn key(lines: &[&[u8]], strict: bool) -> Result<Option<String>, String> {
        let mut headers = HeaderMap::new();
        for line in lines {
            headers.append(IDEMPOTENCY_KEY, HeaderValue::from_bytes(line).unwrap());
        }
        match read(&headers, strict) {
            Ok(key) => Ok(key.map(|key| key.as_str().to_owned())),
            Err(problem) => Err(problem.kind().name.to_owned()),
        }
    }

    #[test]
    fn quoted_and_bare_are_the_same_key() {
        for line in ["abc", "\"abc\"", " abc ", "\"abc\";p=1", "\"abc\" ; p=\"x\";q"] {
            assert_eq!(key(&[line.as_bytes()], false), Ok(Some("abc".into())), "{line}");
        }
        assert_eq!(key(&[br#""a\"b\\c""#], false), Ok(Some("a\"b\\c".into())));
        assert_eq!(key(&[b"a%20b;c=d:e"], false), Ok(Some("a%20b;c=d:e".into())), "a bare word is taken as it is");
        assert_eq!(key(&[], false), Ok(None));
    }

    #[test]
    fn strict_refuses_bare_words() {
        assert_eq!(key(&[b"abc"], true), Err("key-invalid".into()));
        assert_eq!(key(&[b"\"abc\""], true), Ok(Some("abc".into())));
    }

    #[test]
    fn an_ambiguous_key_is_refused() {
        let long = format!("\"{}\"", "k".repeat(256));
        let lines: [&[u8]; 17] = [
            b"",
            b"\"\"",
            b"   ",
            b"a, b",
            b"a,b",
            b"\"a\", \"b\"",
            b"\"a\";p=1, \"b\"",
            b"\"a",
            b"a\"",
            b"\"a\"b",
            b"a b",
            b"\"a b\"",
            b"\"a\\b\"",
            b"a\tb",
            b"caf\xc3\xa9",
            b"\"\xff\"",
            long.as_bytes(),
        ];
        for line in lines {
            assert_eq!(key(&[line], false), Err("key-invalid".into()), "{}", String::from_utf8_lossy(line));
        }
        assert_eq!(key(&[b"a", b"a"], false), Err("key-invalid".into()), "two lines, even if they agree");
        let longest = "k".repeat(255);
        assert_eq!(key(&[longest.as_bytes()], false), Ok(Some(longest.clone())));
    }
}
