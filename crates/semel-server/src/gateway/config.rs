//! The section `[gateway]`.

use std::{fmt, time::Duration};

use axum::http::{HeaderName, StatusCode};
use semel::{OnLost, Policy, Scope};

use super::headers;
use crate::config::{Listen, Networks, Reader, Size, Tenant, Value};

/// How `semel gateway` treats requests.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Gateway {
    /// The service behind the gateway.
    pub upstream: Option<Upstream>,
    /// The tenant of requests without a tenant header.
    pub tenant: String,
    /// The header in which a trusted proxy names the tenant.
    pub tenant_header: Option<HeaderName>,
    /// The proxies whose tenant header and forwarded address are trusted.
    pub trusted_proxies: Networks,
    /// Whether a stored answer is given to any client that sends the key and the same request, with any
    /// credentials.
    pub shared: bool,
    /// The cookies that are credentials, beside `Authorization`.
    pub cookies: Cookies,
    /// The rule for a request whose effect is unknown.
    pub on_lost: OnLost,
    /// The 5xx statuses by which the upstream says that it did nothing.
    pub not_executed_statuses: Statuses,
    /// How long the upstream may take to begin its answer.
    pub timeout: Duration,
    /// How long a connection to the upstream may take.
    pub connect_timeout: Duration,
    /// How long a request waits if its key is in flight. A request may set its own time.
    pub wait: Duration,
    /// The longest body of a request with a key.
    pub request_limit: Size,
    /// The longest answer that is stored.
    pub answer_limit: Size,
    /// How long a key stays taken after its gateway died.
    pub lease: Duration,
    /// How long an answer is stored.
    pub retention: Duration,
    /// Whether stored answers cannot be purged before that. Retries then need no query.
    pub pinned: bool,
}

/// Clients retry for minutes: a key with a shorter retention protects from nothing.
const SHORTEST_RETENTION: Duration = Duration::from_secs(60);

/// The lease is renewed up to this limit: longer than a client would wait for an answer.
const LONGEST_TIMEOUT: Duration = Duration::from_secs(3600);

/// Reads the section; `listen` is the gateway's own address.
pub(crate) fn read(reader: &mut Reader<'_>, listen: &Listen) -> Gateway {
    let policy = Policy::default();
    let gateway = Gateway {
        upstream: reader.field("gateway.upstream", || None),
        tenant: reader.field("gateway.tenant", || Tenant(Scope::DEFAULT_TENANT.to_owned())).0,
        tenant_header: reader.field("gateway.tenant_header", || None),
        trusted_proxies: reader.field("gateway.trusted_proxies", Networks::default),
        shared: reader.field("gateway.shared", || false),
        cookies: reader.field("gateway.cookies", Cookies::default),
        on_lost: reader.field("gateway.on_lost", || OnLost::Hold),
        not_executed_statuses: reader
            .field("gateway.not_executed_statuses", || Statuses(vec![StatusCode::SERVICE_UNAVAILABLE])),
        timeout: reader.field("gateway.timeout", || Duration::from_secs(60)),
        connect_timeout: reader.field("gateway.connect_timeout", || Duration::from_secs(5)),
        wait: reader.field("gateway.wait", || Duration::ZERO),
        request_limit: reader.field("gateway.request_limit", || Size(1 << 20)),
        answer_limit: reader.field("gateway.answer_limit", || Size(1 << 20)),
        lease: reader.field("gateway.lease", || policy.lease),
        retention: reader.field("gateway.retention", || policy.retention.unwrap_or(Policy::LONGEST)),
        pinned: reader.field("gateway.pinned", || false),
    };

    if gateway.upstream.as_ref().is_some_and(|upstream| upstream.0 == *listen) {
        reader.mistake("gateway.upstream", format!("{listen} is the address of the gateway itself"));
    }
    if gateway.tenant_header.is_some() && gateway.trusted_proxies.is_empty() {
        let message = "is read from trusted proxies only, and gateway.trusted_proxies is empty";
        reader.mistake("gateway.tenant_header", message.to_owned());
    }
    if gateway.shares_answers() && !gateway.cookies.0.is_empty() {
        let message = "are ignored, because gateway.shared or gateway.tenant_header is set";
        reader.mistake("gateway.cookies", message.to_owned());
    }
    for (field, span) in [("gateway.timeout", gateway.timeout), ("gateway.connect_timeout", gateway.connect_timeout)] {
        if span.is_zero() || span > LONGEST_TIMEOUT {
            reader.mistake(field, "must be longer than 0s and at most 1h".to_owned());
        }
    }
    if gateway.lease < Policy::SHORTEST_LEASE || gateway.lease > LONGEST_TIMEOUT {
        reader.mistake("gateway.lease", "must be 100ms to 1h".to_owned());
    }
    if !(SHORTEST_RETENTION..=Policy::LONGEST).contains(&gateway.retention) {
        let why = "must be at least 1m and at most 1000 years: a later retry is executed again";
        reader.mistake("gateway.retention", why.to_owned());
    }
    gateway
}

impl Gateway {
    /// Whether a repeat may have other credentials than its first request: `shared` is set, or an authenticating proxy
    /// names the tenant.
    #[must_use]
    pub fn shares_answers(&self) -> bool {
        self.shared || self.tenant_header.is_some()
    }
}

/// Names of cookies.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Cookies(pub Vec<String>);

impl Cookies {
    fn of<'a>(names: impl Iterator<Item = &'a str>) -> Result<Self, String> {
        // RFC 6265: a cookie's name is a token, as the name of a header is.
        let name = |name: &str| match name.parse::<HeaderName>() {
            Ok(_) => Ok(name.to_owned()),
            Err(_) => Err(format!("must be names of cookies such as session, not \"{name}\"")),
        };
        names.map(name).collect::<Result<_, _>>().map(Self)
    }
}

impl Value for Cookies {
    const EXAMPLE: &'static str = "session,remember_me";

    fn parse(text: &str) -> Result<Self, String> {
        Self::of(text.split(',').map(str::trim).filter(|name| !name.is_empty()))
    }

    fn from_toml(value: &toml::Value) -> Result<Self, String> {
        let wrong = || "must be a list of names such as [\"session\"]".to_owned();
        match value {
            toml::Value::Array(items) => {
                let names = items.iter().map(|item| item.as_str().ok_or_else(wrong)).collect::<Result<Vec<_>, _>>()?;
                Self::of(names.into_iter())
            }
            toml::Value::String(text) => Self::parse(text),
            _ => Err(wrong()),
        }
    }

    fn to_toml(&self) -> toml::Value {
        self.0.clone().into()
    }
}

/// The address of the upstream.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Upstream(Listen);

impl Upstream {
    /// A service at an address.
    #[cfg(test)]
    pub(crate) fn at(address: std::net::SocketAddr) -> Self {
        Option::<Self>::parse(&format!("http://{address}")).unwrap().unwrap()
    }

    /// The host, an IPv6 address without its brackets.
    #[must_use]
    pub fn host(&self) -> &str {
        self.0.host()
    }

    /// The port.
    #[must_use]
    pub fn port(&self) -> u16 {
        self.0.port()
    }

    /// Both, as in a `Host` header.
    #[must_use]
    pub fn authority(&self) -> String {
        self.0.to_string()
    }
}

impl fmt::Display for Upstream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "http://{}", self.0)
    }
}

impl Value for Option<Upstream> {
    const EXAMPLE: &'static str = "http://127.0.0.1:3000";

    fn parse(text: &str) -> Result<Self, String> {
        if text.is_empty() {
            return Ok(None);
        }
        if text.starts_with("https://") {
            return Err("cannot be https: the gateway speaks plain HTTP to its upstream; run it next to the \
                        upstream, or put a proxy that speaks TLS between the two"
                .to_owned());
        }
        // The text may contain a password, so no error repeats it.
        let wrong = || "must be a URL such as http://127.0.0.1:3000, with nothing after the port".to_owned();
        let url = url::Url::parse(text).map_err(|_| wrong())?;
        let bare = url.scheme() == "http" && url.path() == "/" && url.query().is_none() && url.fragment().is_none();
        if !bare || !url.username().is_empty() || url.password().is_some() {
            return Err(wrong());
        }
        let (host, port) = url.host_str().zip(url.port_or_known_default()).ok_or_else(wrong)?;
        Listen::parse(&format!("{host}:{port}")).map(|at| Some(Upstream(at))).map_err(|_| wrong())
    }

    fn to_toml(&self) -> toml::Value {
        self.as_ref().map(ToString::to_string).unwrap_or_default().into()
    }
}

/// Whether a header has a meaning of its own, is set by the gateway, or is hop-by-hop. A tenant derived from a
/// credential would lose its keys when the credential changes; a header that clients set would let them choose any
/// tenant.
fn has_another_meaning(name: &HeaderName) -> bool {
    const TAKEN: [&str; 15] = [
        "accept",
        "accept-encoding",
        "accept-language",
        "cache-control",
        "date",
        "expect",
        "origin",
        "prefer",
        "range",
        "referer",
        "set-cookie",
        "user-agent",
        "via",
        "x-api-key",
        "x-http-method-override",
    ];
    const FAMILIES: [&str; 7] = ["access-control-", "content-", "if-", "proxy-", "sec-", "x-forwarded-", "x-original-"];
    // Many servers treat underscores and dots in header names as the same character.
    let plain = headers::plain(name);
    headers::is_known(&plain)
        || TAKEN.contains(&plain.as_str())
        || FAMILIES.iter().any(|family| plain.starts_with(family))
}

impl Value for Option<HeaderName> {
    const EXAMPLE: &'static str = "x-tenant";

    fn parse(text: &str) -> Result<Self, String> {
        match text.parse::<HeaderName>() {
            _ if text.is_empty() => Ok(None),
            Ok(name) if has_another_meaning(&name) => {
                Err(format!("must be a dedicated header such as x-tenant: {name} has another meaning"))
            }
            Ok(name) => Ok(Some(name)),
            Err(_) => Err(format!("must be the name of a header such as x-tenant, not \"{text}\"")),
        }
    }

    fn to_toml(&self) -> toml::Value {
        self.as_ref().map_or("", HeaderName::as_str).into()
    }
}

/// A set of 5xx statuses.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Statuses(Vec<StatusCode>);

impl Statuses {
    /// Whether the set contains the status.
    #[must_use]
    pub fn contains(&self, status: StatusCode) -> bool {
        self.0.contains(&status)
    }

    fn status(code: Option<u16>) -> Result<StatusCode, String> {
        let status = code.and_then(|code| StatusCode::from_u16(code).ok()).filter(StatusCode::is_server_error);
        status.ok_or_else(|| "may only name statuses from 500 to 599".to_owned())
    }
}

impl Value for Statuses {
    const EXAMPLE: &'static str = "502,503";

    fn parse(text: &str) -> Result<Self, String> {
        let codes = text.split(',').map(str::trim).filter(|code| !code.is_empty());
        codes.map(|code| Self::status(code.parse().ok())).collect::<Result<_, _>>().map(Self)
    }

    fn from_toml(value: &toml::Value) -> Result<Self, String> {
        match value {
            toml::Value::Array(items) => {
                let codes = items.iter().map(|item| item.as_integer().and_then(|code| u16::try_from(code).ok()));
                codes.map(Self::status).collect::<Result<_, _>>().map(Self)
            }
            toml::Value::String(text) => Self::parse(text),
            _ => Err("must be a list of numbers such as [502, 503]".to_owned()),
        }
    }

    fn to_toml(&self) -> toml::Value {
        self.0.iter().map(|status| i64::from(status.as_u16())).collect::<Vec<_>>().into()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_upstream_is_a_host_and_a_port() {
        let read = |text| <Option<Upstream> as Value>::parse(text).map(|upstream| upstream.unwrap().to_string());
        assert_eq!(read("http://127.0.0.1:3000").as_deref(), Ok("http://127.0.0.1:3000"));
        assert_eq!(read("http://app/").as_deref(), Ok("http://app:80"));
        assert_eq!(read("http://[::1]:3000").as_deref(), Ok("http://[::1]:3000"));
        for text in ["http://a:1/b", "http://a:1/?q", "ftp://a:1", "a:1", "http://u:geheim@a:1", "https://a"] {
            let message = read(text).unwrap_err();
            assert!(!message.contains("geheim"), "{message}");
        }
        assert!(read("https://a").unwrap_err().contains("cannot be https"));
    }

    #[test]
    fn the_tenant_header_must_be_a_dedicated_header() {
        let read = <Option<HeaderName> as Value>::parse;
        assert_eq!(read("X-Tenant"), Ok(Some(HeaderName::from_static("x-tenant"))));
        assert_eq!(read(""), Ok(None));
        assert_eq!(read("x-user"), Ok(Some(HeaderName::from_static("x-user"))));
        for text in [
            "Authorization",
            "Cookie",
            "Host",
            "Idempotency-Key",
            "idempotency_key",
            "authoriZation",
            "proxy.authorization",
            "Semel-Fence",
            "Upgrade",
            "Content-Length",
            "X-Forwarded-For",
            "X_Forwarded_User",
            "Connection",
            "TE",
            "a b",
        ] {
            assert!(read(text).is_err(), "{text}");
        }
    }

    #[test]
    fn only_5xx_can_be_a_not_executed_status() {
        assert!(Statuses::parse("503, 502").unwrap().contains(StatusCode::BAD_GATEWAY));
        assert_eq!(Statuses::parse(""), Ok(Statuses(Vec::new())));
        for text in ["200", "404", "600", "x"] {
            assert!(Statuses::parse(text).is_err(), "{text}");
        }
    }
}
