//! The sections `[notifications.channels.PUSH]`, `.EMAIL` and `.SMS`.

use std::{collections::BTreeMap, fmt, time::Duration};

use semel::OnLost;
use url::Url;

use super::{reader::Reader, value::Value};

/// Where notifications are delivered to, by channel. A channel that is not here has no endpoint: its notifications stay
/// PENDING, for the application to fetch.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Channels(pub BTreeMap<&'static str, Channel>);

/// How the notifications of a channel are delivered.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Channel {
    /// Whom to call.
    pub url: Endpoint,
    /// How long a call may take.
    pub timeout: Duration,
    /// What becomes of a notification whose call may or may not have arrived.
    pub on_lost: OnLost,
    /// How many calls may fail before the notification has.
    pub max_attempts: usize,
    /// How long to wait after the first failure; then twice as long each time.
    pub backoff: Duration,
    /// How many calls a node has open at a time.
    pub concurrency: usize,
}

/// The longest that a call may take: a lease is renewed as long.
const LONGEST_TIMEOUT: Duration = Duration::from_secs(300);

/// The longest wait between two calls.
pub const LONGEST_BACKOFF: Duration = Duration::from_secs(600);

/// The most calls that may fail, and that may be open: both are far beyond what an endpoint is happy with.
const MOST: usize = 1000;

/// The names of a channel's fields: the reader wants each as it is written.
struct Names {
    channel: &'static str,
    url: &'static str,
    timeout: &'static str,
    on_lost: &'static str,
    max_attempts: &'static str,
    backoff: &'static str,
    concurrency: &'static str,
}

macro_rules! names {
    ($channel:literal) => {
        Names {
            channel: $channel,
            url: concat!("notifications.channels.", $channel, ".url"),
            timeout: concat!("notifications.channels.", $channel, ".timeout"),
            on_lost: concat!("notifications.channels.", $channel, ".on_lost"),
            max_attempts: concat!("notifications.channels.", $channel, ".max_attempts"),
            backoff: concat!("notifications.channels.", $channel, ".backoff"),
            concurrency: concat!("notifications.channels.", $channel, ".concurrency"),
        }
    };
}

/// Every channel that is delivered by a call. IN_APP is not: those are read from a stream.
const CHANNELS: [Names; 3] = [names!("EMAIL"), names!("PUSH"), names!("SMS")];

impl Channels {
    pub(super) fn read(reader: &mut Reader<'_>) -> Self {
        let channels = CHANNELS.into_iter().filter_map(|names| Some((names.channel, Channel::read(reader, &names)?)));
        Self(channels.collect())
    }
}

impl Channel {
    fn read(reader: &mut Reader<'_>, names: &Names) -> Option<Self> {
        let url: Option<Endpoint> = reader.field(names.url, || None);
        let timeout = reader.field(names.timeout, || Duration::from_secs(10));
        let on_lost = reader.field(names.on_lost, || OnLost::Hold);
        let max_attempts = reader.field(names.max_attempts, || 5);
        let backoff = reader.field(names.backoff, || Duration::from_secs(10));
        let concurrency = reader.field(names.concurrency, || 16);
        if timeout.is_zero() || timeout > LONGEST_TIMEOUT {
            reader.mistake(names.timeout, "must be longer than 0s and at most 5m".to_owned());
        }
        if backoff > LONGEST_BACKOFF {
            reader.mistake(names.backoff, "must be at most 10m".to_owned());
        }
        for (name, number) in [(names.max_attempts, max_attempts), (names.concurrency, concurrency)] {
            if !(1..=MOST).contains(&number) {
                reader.mistake(name, format!("must be 1 to {MOST}"));
            }
        }
        Some(Self { url: url?, timeout, on_lost, max_attempts, backoff, concurrency })
    }
}

/// The URL of an endpoint. Whatever may be a secret in it is not shown: of many that take webhooks, it is the path.
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
        // The text may hold a password, so no message repeats it.
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
            assert!(endpoint.expose().as_str().starts_with(text), "the call has all of it");
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
