//! Whether a repeat comes with the credentials of the first request, where nothing before the layer authenticates.

use hmac::{Hmac, KeyInit as _, Mac as _};
use http::{HeaderMap, header};
use sha2::Sha256;

/// Tells the credentials of requests apart, without keeping them: what is stored with an operation is an HMAC of its
/// `Authorization` and of the cookies that are named. It can be compared and not be turned back, not even by guessing,
/// without the secret.
#[derive(Clone)]
pub struct Credentials {
    keyed: Hmac<Sha256>,
    cookies: Vec<String>,
}

impl Credentials {
    /// Under a secret that all nodes share. `None` never happens: an HMAC takes a secret of any length.
    #[must_use]
    pub fn new(secret: &[u8]) -> Option<Self> {
        Some(Self { keyed: Hmac::new_from_slice(secret).ok()?, cookies: Vec::new() })
    }

    /// These cookies are credentials, too. Others, such as those of a tracker, change between honest tries.
    #[must_use]
    pub fn cookies<T: Into<String>>(mut self, names: impl IntoIterator<Item = T>) -> Self {
        self.cookies = names.into_iter().map(Into::into).collect();
        self.cookies.sort_unstable();
        self.cookies.dedup();
        self
    }

    /// What is stored of a request's credentials. A request without any has a mark like any other: one with some is not
    /// its repeat.
    pub(crate) fn mark(&self, headers: &HeaderMap) -> String {
        let mut mac = self.keyed.clone();
        // Each part has its length before it, so that no two lists of parts are the same bytes.
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
        for name in &self.cookies {
            let values: Vec<_> = values_of(headers, name).collect();
            part(name.as_bytes());
            part(&(values.len() as u64).to_be_bytes());
            for value in values {
                part(value);
            }
        }
        let code = mac.finalize().into_bytes();
        // Half of the code is more than anybody can make collide without the secret, and a label is to be short.
        let hex: String = code[..16].iter().map(|byte| format!("{byte:02x}")).collect();
        format!("credentials:{hex}")
    }
}

/// The values of a cookie. A name that a client sends twice has two: which one counts is for the upstream to say.
fn values_of<'a>(headers: &'a HeaderMap, name: &'a str) -> impl Iterator<Item = &'a [u8]> {
    let pairs = headers.get_all(header::COOKIE).iter().flat_map(|line| line.as_bytes().split(|byte| *byte == b';'));
    pairs.filter_map(move |pair| {
        let pair = pair.trim_ascii();
        let equals = pair.iter().position(|byte| *byte == b'=')?;
        (pair[..equals].trim_ascii() == name.as_bytes()).then(|| pair[equals + 1..].trim_ascii())
    })
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
    fn only_what_says_who_asks_counts() {
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

    #[test]
    fn a_mark_is_a_short_label_that_says_nothing() {
        let mark = mark(&Credentials::new(b"secret").unwrap(), &[("authorization", "Bearer hunter2")]);
        assert_eq!(mark.len(), "credentials:".len() + 32);
        assert!(!mark.contains("hunter2"));
    }
}
