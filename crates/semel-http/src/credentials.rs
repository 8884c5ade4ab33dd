//! Compares the credentials of a repeat with those of the first request, for services without authentication.

use hmac::{Hmac, KeyInit as _, Mac as _};
use http::{HeaderMap, header};
use sha2::Sha256;

use crate::cookies::{line, readings, values};

/// Compares credentials without storing them. An operation stores an HMAC of the request's `Authorization` and of the
/// named cookies, which cannot be reversed, not even by guessing, without the secret.
#[derive(Clone)]
pub struct Credentials {
    keyed: Hmac<Sha256>,
    cookies: Vec<String>,
}

impl Credentials {
    /// With a secret that all nodes share. `None` never happens: an HMAC takes a secret of any length.
    #[must_use]
    pub fn new(secret: &[u8]) -> Option<Self> {
        Some(Self { keyed: Hmac::new_from_slice(secret).ok()?, cookies: Vec::new() })
    }

    /// Names cookies that are credentials, too. Other cookies may change between retries.
    #[must_use]
    pub fn cookies<T: Into<String>>(mut self, names: impl IntoIterator<Item = T>) -> Self {
        self.cookies = names.into_iter().map(Into::into).collect();
        self.cookies.sort_unstable();
        self.cookies.dedup();
        self
    }

    /// The stored mark of a request's credentials. A request without credentials has a mark, too: a request with some
    /// is not its repeat.
    pub(crate) fn mark(&self, headers: &HeaderMap) -> String {
        let mut mac = self.keyed.clone();
        // Each part is length-prefixed, so that no two lists of parts have the same bytes.
        let mut part = |bytes: &[u8]| {
            mac.update(&(bytes.len() as u64).to_be_bytes());
            mac.update(bytes);
        };
        part(b"semel credentials 1");
        let lines: Vec<_> = headers.get_all(header::AUTHORIZATION).iter().collect();
        part(&(lines.len() as u64).to_be_bytes());
        for line in lines {
            part(line.as_bytes());
        }
        let line = line(headers);
        for name in &self.cookies {
            part(name.as_bytes());
            let readings = readings(&line, name);
            // A cookie name cannot contain NUL, so this cannot be taken for the next name.
            let strange = readings.iter().flatten().flat_map(|pairs| [vec![&b"\0reading"[..]], pairs.clone()].concat());
            let strange: Vec<_> = strange.collect();
            let values = values(&line, name);
            part(&(values.len() as u64).to_be_bytes());
            for value in values.into_iter().chain(strange) {
                part(value);
            }
        }
        let code = mac.finalize().into_bytes();
        // Half of the HMAC cannot be made to collide without the secret, and a label should be short.
        format!("credentials:{}", hex::encode(&code[..16]))
    }
}

#[cfg(test)]
mod tests {
    use http::HeaderValue;

    use super::*;

    fn mark(credentials: &Credentials, lines: &[(&'static str, &'static str)]) -> String {
        let mut headers = HeaderMap::new();
        for (name, value) in lines {
            headers.append(*name, HeaderValue::from_static(value));
        }
        credentials.mark(&headers)
    }

    #[test]
    fn only_credentials_change_the_mark() {
        let named = Credentials::new(b"secret").unwrap().cookies(["session", "id"]);
        let base = [("authorization", "Bearer a"), ("cookie", "session=1; theme=dark")];
        let of = |lines: &[_]| mark(&named, lines);
        assert_eq!(
            of(&base),
            of(&[("cookie", "theme=light;session=1"), ("authorization", "Bearer a"), ("x-trace", "9")])
        );
        for other in [
            &[][..],
            &[("cookie", "session=1")],
            &[("authorization", "Bearer a")],
            &[("authorization", "Bearer b"), ("cookie", "session=1")],
            &[("authorization", "Bearer a"), ("cookie", "session=2")],
            &[("authorization", "Bearer a"), ("cookie", "id=1")],
            &[("authorization", "Bearer a"), ("cookie", "session=1; id=")],
            &[("authorization", "Bearer a"), ("cookie", "session=1"), ("cookie", "session=1")],
            &[("authorization", "Bearer a"), ("authorization", "Bearer a"), ("cookie", "session=1")],
        ] {
            assert_ne!(of(&base), of(other), "{other:?}");
        }
        let unnamed = Credentials::new(b"secret").unwrap();
        assert_eq!(mark(&unnamed, &base), mark(&unnamed, &base[..1]));
        assert_ne!(mark(&unnamed, &base[..1]), mark(&Credentials::new(b"other").unwrap(), &base[..1]));
    }

    fn of_session(cookie: &'static str) -> String {
        mark(&Credentials::new(b"secret").unwrap().cookies(["session"]), &[("cookie", cookie)])
    }

    #[test]
    fn cookies_that_some_server_reads_differently_have_different_marks() {
        for (one, other) in [
            // Of two cookies, some servers use the first and some the last.
            ("session=1; session=2", "session=2; session=1"),
            ("session=1", "session=1; session=2"),
            ("session=1", "session=2; session=1"),
            // With quotes, some servers read all as the value of `t`, others find `session` before or after.
            (r#"t="a; session=1; b""#, r#"t="a; b"; session=1"#),
            (r#"session="1; t=2""#, r#"session="1; t=3""#),
            (r#"session="1""#, "session=1"),
            (r#"t="\"; session=1; u="; session=2"#, r#"t="\"; session=2; u="; session=1"#),
            // Commas and spaces.
            ("t=a,session=1", "t=a,session=2"),
            ("t=a session=1", "t=a session=2"),
            ("session=1,2", "session=1,3"),
            // Names.
            ("Session=1", "Session=2"),
            ("SESSION=1; session=2", "session=1; SESSION=2"),
            ("%73ession=1", "%73ession=2"),
            ("session[a]=1", "session[a]=2"),
            ("session", "theme"),
            ("session; session=1", "session=1"),
            ("=session=1", "=session=2"),
            ("session =1", "session =2"),
            ("session=1", "session= 1"),
            ("session=1; t=2", "session=1 ; t=2"),
            ("session=%31", "session=1"),
        ] {
            assert_ne!(of_session(one), of_session(other), "{one} and {other}");
        }
        let named = Credentials::new(b"secret").unwrap().cookies(["session"]);
        let bytes = |line: &[u8]| {
            let mut headers = HeaderMap::new();
            headers.insert("cookie", HeaderValue::from_bytes(line).unwrap());
            named.mark(&headers)
        };
        assert_ne!(bytes(b"\xa0session=1"), bytes(b"\xc2\xa0session=2"), "to some, these are spaces");
        assert_ne!(bytes(b"\xa0session=1"), bytes(b"\xa0session=2"));
        let php = Credentials::new(b"secret").unwrap().cookies(["a.b"]);
        assert_ne!(mark(&php, &[("cookie", "a_b=1")]), mark(&php, &[("cookie", "a_b=2")]));
    }

    #[test]
    fn other_cookies_their_order_and_their_fields_do_not_change_the_mark() {
        for (one, other) in [
            ("session=1; theme=dark; lang=pt", "lang=en;session=1; sort=up"),
            ("session=a=b==; t=1", "t=2; session=a=b=="),
            (r#"t="a;b"; session=1"#, r#"session=1; t="c;d,e f""#),
            (r#"prefs={"a":1,"b":"x, y"}; session=1"#, r#"session=1; prefs={"a":2}; _ga=GA1.2.3"#),
            ("t=a, b c; session=1; u=%20", "session=1"),
            ("session=1; sessions=2; my_session=3; t=session; session2=4", "session=1"),
            (r#"session="a b, c"; t=1"#, r#"t=2; session="a b, c""#),
            ("SESSION=1; session=2; t=3", "t=4; SESSION=1; session=2"),
            ("; session=1;", "session=1"),
        ] {
            assert_eq!(of_session(one), of_session(other), "{one} and {other}");
        }
        let named = Credentials::new(b"secret").unwrap().cookies(["session", "id"]);
        let fields =
            |lines: &[&'static str]| mark(&named, &lines.iter().map(|line| ("cookie", *line)).collect::<Vec<_>>());
        let whole = fields(&["t=1; session=a; id=b"]);
        for crumbs in [&["session=a", "id=b"][..], &["id=b", "t=1", "session=a"], &["session=a; t=9", "id=b"]] {
            assert_eq!(fields(crumbs), whole, "{crumbs:?}");
        }
        assert_ne!(fields(&["session=b", "id=a"]), whole);
    }

    #[test]
    fn several_cookie_fields_become_one() {
        let mut headers = HeaderMap::new();
        for line in ["a=1", "b=2; c=3"] {
            headers.append("cookie", HeaderValue::from_static(line));
        }
        crate::cookies::join_cookies(&mut headers);
        assert_eq!(headers.get_all("cookie").iter().collect::<Vec<_>>(), ["a=1; b=2; c=3"]);
    }

    #[test]
    fn a_mark_is_a_short_label_that_reveals_nothing() {
        let mark = mark(&Credentials::new(b"secret").unwrap(), &[("authorization", "Bearer hunter2")]);
        assert_eq!(mark.len(), "credentials:".len() + 32);
        assert!(!mark.contains("hunter2"));
    }
}
