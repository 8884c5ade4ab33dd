//! The cookies of a request, in all the ways in which servers parse them.
//!
//! RFC 6265 defines how a client writes `Cookie`, but not how a server parses it. Servers differ: some take a quoted
//! value as one, including `;` (Python's `http.cookies`, Java); some also end a value at a comma (RFC 2109) or at a
//! space; some compare names without case (ASP.NET), decode `%73` in them (Rack and PHP for years) or read `a.b` and
//! `a[x]` as `a_b` and `a` (PHP); of two cookies with one name some use the first and some the last. A client must not
//! be able to pass for another by the choice of a spelling, so all these readings are compared.

use http::{HeaderMap, HeaderValue, header};
use percent_encoding::percent_decode;

/// Joins several `Cookie` fields into one, as RFC 9113 (8.2.3) requires of HTTP/2 crumbs: some servers read only the
/// first or the last field.
pub(crate) fn join_cookies(headers: &mut HeaderMap) {
    if headers.get_all(header::COOKIE).iter().nth(1).is_none() {
        return;
    }
    // Cannot fail: the parts and the separator are valid values.
    if let Ok(joined) = HeaderValue::from_bytes(&line(headers)) {
        headers.insert(header::COOKIE, joined);
    }
}

/// All `Cookie` fields as one.
pub(crate) fn line(headers: &HeaderMap) -> Vec<u8> {
    headers.get_all(header::COOKIE).iter().map(HeaderValue::as_bytes).collect::<Vec<_>>().join(&b"; "[..])
}

/// The values of a cookie, for a client that follows the RFC. A name that is sent twice has two values, in their
/// order: the server decides which one counts.
pub(crate) fn values<'a>(line: &'a [u8], name: &str) -> Vec<&'a [u8]> {
    let value = |pair: &'a [u8]| pair.strip_prefix(name.as_bytes()).and_then(|rest| rest.strip_prefix(b"="));
    pairs(line, &READINGS[0]).into_iter().filter_map(value).collect()
}

/// The values under the other readings, if they differ from [`values`].
pub(crate) fn readings<'a>(line: &'a [u8], name: &str) -> Option<Vec<Vec<&'a [u8]>>> {
    let of = |reading| pairs(line, reading).into_iter().filter(|pair| could_be(pair, name)).collect::<Vec<_>>();
    let all: Vec<_> = READINGS.iter().map(of).collect();
    let plain = |pair: &&[u8]| pair.strip_prefix(name.as_bytes()).is_some_and(|rest| rest.starts_with(b"="));
    let agreed = all.iter().all(|pairs| *pairs == all[0]) && all[0].iter().all(plain);
    (!agreed).then_some(all)
}

/// A way to split a line into pairs.
struct Reading {
    separators: &'static [u8],
    /// Whether a quoted value ends only at its closing quote.
    quotes: bool,
}

const READINGS: [Reading; 6] = [
    Reading { separators: b";", quotes: false },
    Reading { separators: b";,", quotes: false },
    Reading { separators: b";, \t", quotes: false },
    Reading { separators: b";", quotes: true },
    Reading { separators: b";,", quotes: true },
    Reading { separators: b";, \t", quotes: true },
];

/// The pairs of a line, without leading white space.
fn pairs<'a>(line: &'a [u8], reading: &Reading) -> Vec<&'a [u8]> {
    let (mut found, mut begin, mut at) = (Vec::new(), 0, 0);
    while at < line.len() {
        if reading.separators.contains(&line[at]) {
            found.push(&line[begin..at]);
            begin = at + 1;
        } else if reading.quotes && line[at] == b'=' {
            at += quoted(&line[at + 1..]);
        }
        at += 1;
    }
    found.push(&line[begin..]);
    let begun = |pair: &'a [u8]| pair.trim_ascii_start();
    found.into_iter().map(begun).filter(|pair| !pair.is_empty()).collect()
}

/// The length of the quoted text at the beginning of a value; none if it has no closing quote.
fn quoted(value: &[u8]) -> usize {
    let open = value.iter().position(|byte| !matches!(byte, b' ' | b'\t'));
    let Some(open) = open.filter(|open| value[*open] == b'"') else { return 0 };
    let mut at = open + 1;
    while let Some(byte) = value.get(at) {
        match byte {
            b'"' => return at + 1,
            b'\\' => at += 2,
            _ => at += 1,
        }
    }
    0
}

/// Whether some server would read a pair as the cookie of this name.
fn could_be(pair: &[u8], name: &str) -> bool {
    // Some servers skip the `=` of a cookie without a name.
    let begin = pair.iter().position(|byte| *byte != b'=' && byte.is_ascii_graphic()).unwrap_or(pair.len());
    let pair = &pair[begin..];
    let end = pair.iter().position(|byte| *byte == b'=').unwrap_or(pair.len());
    folded(&pair[..end]) == folded(name.as_bytes())
}

/// A name without all that some server ignores in names.
fn folded(name: &[u8]) -> Vec<u8> {
    let decoded: Vec<u8> = percent_decode(name).collect();
    // Python strips all Unicode white space: every non-ASCII character at the edges counts as such.
    let edge = |byte: &u8| byte.is_ascii_graphic();
    let begin = decoded.iter().position(edge).unwrap_or(decoded.len());
    let end = decoded.iter().rposition(edge).map_or(begin, |last| last + 1);
    let name = &decoded[begin..end];
    let array = name.iter().skip(1).position(|byte| *byte == b'[').map_or(name.len(), |at| at + 1);
    let fold = |byte: &u8| match byte {
        b'.' | b' ' | b'+' | b'[' => b'_',
        byte => byte.to_ascii_lowercase(),
    };
    name[..array].iter().map(fold).collect()
}
