//! The fingerprint of a request: method, path, query, content type and body.

use std::borrow::Cow;

use http::{header, request::Parts};
use semel::Fingerprint;

/// The parts of a request that are compared.
#[derive(Clone, Debug, Default)]
pub(crate) struct Sameness {
    /// JSON bodies are compared by value, not by bytes.
    pub(crate) canonical_json: bool,
    /// The host is compared.
    pub(crate) host: bool,
    /// Query parameters that are not compared.
    pub(crate) ignored_query: Vec<String>,
    /// Members of a JSON body that are not compared, as JSON pointers.
    pub(crate) ignored_fields: Vec<String>,
}

impl Sameness {
    pub(crate) fn fingerprint(&self, head: &Parts, path: &str, body: &[u8]) -> Fingerprint {
        let content_type = head.headers.get(header::CONTENT_TYPE).map_or(&b""[..], |value| value.as_bytes());
        let content_type = lower_case(String::from_utf8_lossy(content_type));
        let content_type = content_type.trim();
        let fields = Fingerprint::fields()
            .field("method", head.method.as_str().as_bytes())
            .field("path", path.as_bytes())
            .field("query", self.query(head).as_bytes());
        let fields = if self.host { fields.field("host", host(head).as_bytes()) } else { fields };
        if let Some(boundary) = boundary(head) {
            // A client uses a new boundary for each try.
            let essence = content_type.split(';').next().unwrap_or_default().trim_end();
            let fields = fields.field("content-type", essence.as_bytes());
            return fields.field("body", &without(body, boundary.as_bytes())).finish();
        }
        let canonical = (self.canonical_json || !self.ignored_fields.is_empty()) && is_json(content_type);
        let fields = fields.field("content-type", content_type.as_bytes());
        if canonical {
            let pointers: Vec<&str> = self.ignored_fields.iter().map(String::as_str).collect();
            // Invalid or ambiguous JSON is compared by its bytes.
            if let Ok(json) = Fingerprint::of_json_without(body, &pointers) {
                return fields.fingerprint("body", json).finish();
            }
        }
        fields.field("body", body).finish()
    }

    fn query<'a>(&self, head: &'a Parts) -> Cow<'a, str> {
        let query = head.uri.query().unwrap_or_default();
        if self.ignored_query.is_empty() {
            return query.into();
        }
        let counts = |pair: &&str| {
            let name = pair.split_once('=').map_or(*pair, |(name, _)| name);
            !self.ignored_query.iter().any(|ignored| ignored == name)
        };
        query.split('&').filter(counts).collect::<Vec<_>>().join("&").into()
    }
}

fn host(head: &Parts) -> String {
    let named = head.headers.get(header::HOST).map(|value| String::from_utf8_lossy(value.as_bytes()).into_owned());
    named.or_else(|| head.uri.authority().map(ToString::to_string)).unwrap_or_default().to_ascii_lowercase()
}

/// The text in lower case; most is already.
fn lower_case(text: Cow<'_, str>) -> Cow<'_, str> {
    if text.bytes().any(|byte| byte.is_ascii_uppercase()) { text.to_ascii_lowercase().into() } else { text }
}

fn is_json(content_type: &str) -> bool {
    let essence = content_type.split(';').next().unwrap_or_default().trim();
    essence == "application/json" || essence.ends_with("+json")
}

/// The boundary between the parts of a multipart body.
fn boundary(head: &Parts) -> Option<&str> {
    let content_type = head.headers.get(header::CONTENT_TYPE)?.to_str().ok()?;
    let mut pieces = content_type.split(';').map(str::trim);
    pieces.next().filter(|essence| essence.to_ascii_lowercase().starts_with("multipart/"))?;
    let (_, value) = pieces
        .filter_map(|piece| piece.split_once('='))
        .find(|(name, _)| name.trim().eq_ignore_ascii_case("boundary"))?;
    let value = value.trim().trim_matches('"');
    // RFC 2046: 1 to 70 characters.
    (1..=70).contains(&value.len()).then_some(value)
}

/// A multipart body without its boundary: alternately the bytes between delimiters and the rest of each delimiter's
/// line. Each is length-prefixed, so that no line of a part can pass for a delimiter.
fn without(body: &[u8], boundary: &[u8]) -> Vec<u8> {
    let delimiter = [b"--", boundary].concat();
    let mut out = Vec::with_capacity(body.len());
    let mut push = |piece: &[u8]| {
        out.extend_from_slice(&(piece.len() as u64).to_be_bytes());
        out.extend_from_slice(piece);
    };
    let (mut from, mut at) = (0, 0);
    for line in body.split_inclusive(|byte| *byte == b'\n') {
        if let Some(rest) = line.strip_prefix(&delimiter[..]) {
            push(&body[from..at]);
            push(rest);
            from = at + line.len();
        }
        at += line.len();
    }
    push(&body[from..]);
    out
}

/// The normal form of a path: `%7e` is `~`, `%2f` is `%2F`, and `é` is `%C3%A9`.
pub(crate) fn normal_path(path: &str) -> Cow<'_, str> {
    let bytes = path.as_bytes();
    if bytes.iter().all(|byte| byte.is_ascii_graphic() && *byte != b'%') {
        return path.into();
    }
    let mut out = String::with_capacity(path.len());
    let mut at = 0;
    while let Some(byte) = bytes.get(at) {
        let hex = |i: usize| bytes.get(i).and_then(|byte| char::from(*byte).to_digit(16));
        match (byte, hex(at + 1), hex(at + 2)) {
            (b'%', Some(high), Some(low)) => {
                let decoded = char::from(u8::try_from(high * 16 + low).unwrap_or(b'%'));
                match decoded {
                    'a'..='z' | 'A'..='Z' | '0'..='9' | '-' | '.' | '_' | '~' => out.push(decoded),
                    _ => out.push_str(&path[at..at + 3].to_ascii_uppercase()),
                }
                at += 3;
            }
            _ if byte.is_ascii_graphic() => {
                out.push(char::from(*byte));
                at += 1;
            }
            _ => {
                out.push_str(&format!("%{byte:02X}"));
                at += 1;
            }
        }
    }
    out.into()
}

#[cfg(test)]
mod tests {
    use http::Request;

    use super::*;

    fn of(sameness: &Sameness, uri: &str, content_type: &str, body: &str) -> Fingerprint {
        let request = Request::post(uri).header("content-type", content_type).body(()).unwrap();
        let (head, ()) = request.into_parts();
        sameness.fingerprint(&head, head.uri.path(), body.as_bytes())
    }

    #[test]
    fn every_compared_part_changes_the_fingerprint() {
        let plain = Sameness::default();
        let base = of(&plain, "/a?x=1", "application/json", "{}");
        assert_eq!(base, of(&plain, "/a?x=1", "Application/JSON", "{}"));
        for (uri, content_type, body) in [
            ("/b?x=1", "application/json", "{}"),
            ("/a?x=2", "application/json", "{}"),
            ("/a", "application/json", "{}"),
            ("/a?x=1&x=1", "application/json", "{}"),
            ("/a?x=1", "text/plain", "{}"),
            ("/a?x=1", "application/json", "{ }"),
        ] {
            assert_ne!(base, of(&plain, uri, content_type, body), "{uri} {content_type} {body}");
        }
    }

    #[test]
    fn the_host_counts_only_if_the_route_compares_it() {
        let of = |host: bool, name: &str| {
            let (head, ()) = Request::post("/a").header("host", name).body(()).unwrap().into_parts();
            Sameness { host, ..Sameness::default() }.fingerprint(&head, "/a", b"")
        };
        assert_eq!(of(false, "a.example"), of(false, "b.example"));
        assert_ne!(of(true, "a.example"), of(true, "b.example"));
        assert_eq!(of(true, "a.example"), of(true, "A.EXAMPLE"));
    }

    #[test]
    fn ignored_parts_do_not_change_the_fingerprint() {
        let sameness = Sameness {
            canonical_json: true,
            host: false,
            ignored_query: vec!["trace".into()],
            ignored_fields: vec!["/sent_at".into()],
        };
        let base = of(&sameness, "/a?x=1", "application/json", r#"{"a":1,"b":2}"#);
        let same = of(&sameness, "/a?trace=7&x=1", "application/json", r#"{ "b":2, "a":1, "sent_at":9 }"#);
        assert_eq!(base, same);
        assert_ne!(base, of(&sameness, "/a?x=1", "application/json", r#"{"a":1.0,"b":2}"#), "1 and 1.0");
        let twice = r#"{"a":1,"a":1}"#;
        assert_ne!(
            of(&sameness, "/a", "application/json", twice),
            of(&sameness, "/a", "application/json", r#"{"a":1}"#),
            "a member given twice is not merged"
        );
        assert_ne!(
            of(&sameness, "/a", "text/plain", r#"{"a":1}"#),
            of(&sameness, "/a", "text/plain", r#"{"a": 1}"#),
            "only JSON is read as JSON"
        );
    }

    #[test]
    fn the_boundary_of_a_multipart_body_does_not_count() {
        let form = |boundary: &str, text: &str| {
            let body = format!(
                "--{boundary}\r\ncontent-disposition: form-data; name=\"a\"\r\n\r\n{text}\r\n--{boundary}--\r\n"
            );
            of(&Sameness::default(), "/a", &format!("multipart/form-data; boundary={boundary}"), &body)
        };
        assert_eq!(form("x1", "hello"), form("y2", "hello"));
        assert_ne!(form("x1", "hello"), form("x1", "other"));
        let split = "content-disposition: form-data; name=\"b\"\r\n\r\n";
        let (two_parts, one_part) = (format!("a\r\n--x1\r\n{split}b"), format!("a\r\n--\r\n{split}b"));
        assert_ne!(form("x1", &two_parts), form("x1", &one_part), "a line of a part is no delimiter");
        let of_type = |kind: &str| of(&Sameness::default(), "/a", &format!("multipart/{kind}; boundary=x"), "--x--");
        assert_ne!(of_type("form-data"), of_type("mixed"));
        let ends = |line: &str| of(&Sameness::default(), "/a", "multipart/form-data; boundary=x", line);
        assert_ne!(ends("--x--\r\n"), ends("--x\r\n"), "the last delimiter is not like the others");
    }

    #[test]
    fn a_path_has_one_normal_form() {
        assert_eq!(normal_path("/a%2fb/%7Ec/%c3%a9"), "/a%2Fb/~c/%C3%A9");
        assert_ne!(normal_path("/a%2Fb"), normal_path("/a/b"));
        assert_eq!(normal_path("/100%"), "/100%");
        assert_eq!(normal_path("/\u{e9}\u{c0}\u{7f}"), "/%C3%A9%C3%80%7F", "nothing that a label may not have");
    }
}
