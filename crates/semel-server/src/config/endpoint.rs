//! The URL of an endpoint that Semel calls.

use std::fmt;

use url::Url;

use super::value::Value;

/// The URL of an endpoint. Only the parts without secrets are shown: in many webhook URLs the path is a secret.
#[derive(Clone, PartialEq, Eq)]
pub struct Endpoint(Url);

impl Endpoint {
    /// An endpoint at an address.
    #[cfg(test)]
    pub(crate) fn at(address: std::net::SocketAddr) -> Self {
        Option::<Self>::parse(&format!("http://{address}/")).unwrap().unwrap()
    }

    /// The whole URL: for the call, never for a log.
    #[must_use]
    pub fn expose(&self) -> &Url {
        &self.0
    }

    /// Whether the call is encrypted.
    #[must_use]
    pub fn is_https(&self) -> bool {
        self.0.scheme() == "https"
    }
}

impl fmt::Display for Endpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let origin = self.0.origin().ascii_serialization();
        let plain = self.0.path() == "/" && self.0.query().is_none() && self.0.username().is_empty();
        let rest = if plain && self.0.password().is_none() { "" } else { "***" };
        write!(f, "{origin}/{rest}")
    }
}

impl fmt::Debug for Endpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Endpoint({self})")
    }
}

impl Value for Option<Endpoint> {
    const EXAMPLE: &'static str = "https://mail.example.com/send";

    fn parse(text: &str) -> Result<Self, String> {
        if text.is_empty() {
            return Ok(None);
        }
        // The text may contain a password, so no error repeats it.
        let wrong = || "must be a URL such as https://mail.example.com/send".to_owned();
        let url = Url::parse(text).map_err(|_| wrong())?;
        let fits = ["http", "https"].contains(&url.scheme()) && url.has_host() && url.fragment().is_none();
        if fits { Ok(Some(Endpoint(url))) } else { Err(wrong()) }
    }

    fn to_toml(&self) -> toml::Value {
        self.as_ref().map(ToString::to_string).unwrap_or_default().into()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_endpoint_shows_no_secrets() {
        for (text, shown) in [
            ("https://me:geheim@mail.example.com/send?token=geheim", "https://mail.example.com/***"),
            ("https://geheim@mail.example.com", "https://mail.example.com/***"),
            ("https://mail.example.com:8443/hooks/geheim", "https://mail.example.com:8443/***"),
            ("http://[::1]:3000/?geheim", "http://[::1]:3000/***"),
            ("http://localhost:3000", "http://localhost:3000/"),
        ] {
            let endpoint = <Option<Endpoint>>::parse(text).unwrap().unwrap();
            assert_eq!(endpoint.to_string(), shown);
            assert_eq!(format!("{endpoint:?}"), format!("Endpoint({shown})"));
            assert_eq!(endpoint.is_https(), text.starts_with("https"));
            assert!(endpoint.expose().as_str().starts_with(text), "the call uses the whole URL");
        }
    }

    #[test]
    fn an_endpoint_is_reached_by_http() {
        assert_eq!(<Option<Endpoint>>::parse(""), Ok(None));
        for text in ["somewhere.org", "ftp://x/y", "file:///etc/passwd", "http://x/#a", "http://"] {
            let told = <Option<Endpoint>>::parse(text).unwrap_err();
            assert!(!told.contains(text), "{told}");
        }
    }
}
