//! A URL that may contain a password.

use std::fmt;

use url::Url;

/// A URL that prints its password as `***`; only [`SecretUrl::expose`] returns it.
#[derive(Clone, PartialEq, Eq)]
pub struct SecretUrl {
    // As written: the parser's normalised form may not be what a driver expects.
    text: String,
    masked: String,
}

impl SecretUrl {
    /// The whole URL with its password: for the driver, never for a log.
    #[must_use]
    pub fn expose(&self) -> &str {
        &self.text
    }

    /// Parses a URL. The error never repeats the text.
    pub(super) fn parse(text: &str) -> Result<Self, String> {
        let url = Url::parse(text).map_err(|error| format!("is not a valid URL: {error}"))?;
        Ok(Self { text: text.to_owned(), masked: masked(url) })
    }
}

fn masked(mut url: Url) -> String {
    if url.password().is_some() {
        // Cannot fail: a URL with a password has a host.
        let _ = url.set_password(Some("***"));
    }
    // PostgreSQL also accepts the password, and that of a client key, as an option.
    if let Some(query) = url.query() {
        let pairs = query.split('&').map(|pair| match pair.split_once('=') {
            Some((name, _)) if name.to_ascii_lowercase().contains("pass") => format!("{name}=***"),
            _ => pair.to_owned(),
        });
        let query = pairs.collect::<Vec<_>>().join("&");
        url.set_query(Some(&query));
    }
    url.into()
}

impl fmt::Display for SecretUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.masked)
    }
}

impl fmt::Debug for SecretUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "SecretUrl({})", self.masked)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_password_is_never_printed() {
        for (text, shown) in [
            ("postgres://ana:geheim@db/x", "postgres://ana:***@db/x"),
            ("postgres://ana@db/x", "postgres://ana@db/x"),
            ("postgres://ana:geh%40im@[::1]:5432/x?sslmode=require", "postgres://ana:***@[::1]:5432/x?sslmode=require"),
            ("postgres://db/x?user=ana&password=geheim&a=1", "postgres://db/x?user=ana&password=***&a=1"),
            ("postgres://db/x?sslpassword=geheim", "postgres://db/x?sslpassword=***"),
            ("amqps://ana:geheim@mq:5671/%2f", "amqps://ana:***@mq:5671/%2f"),
        ] {
            let url = SecretUrl::parse(text).unwrap();
            assert_eq!(url.to_string(), shown);
            assert_eq!(url.expose(), text);
            assert!(!format!("{url:?}").contains("geh"));
        }
    }

    #[test]
    fn a_wrong_url_is_not_repeated() {
        let message = SecretUrl::parse("postgres://ana:geheim@db:port/x").unwrap_err();
        assert!(!message.contains("geheim"), "{message}");
    }
}
