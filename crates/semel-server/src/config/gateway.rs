//! The section `[gateway]`.

use std::{fmt, time::Duration};

use axum::http::{HeaderName, StatusCode};
use semel::{OnLost, Policy, Scope};

use super::{Listen, networks::Networks, reader::Reader, value::Value};

/// How `semel gateway` treats the requests that it passes on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Gateway {
    /// The service behind it.
    pub upstream: Option<Upstream>,
    /// Whose keys they are, where no header says so.
    pub tenant: String,
    /// The header in which a trusted proxy says whose request it is.
    pub tenant_header: Option<HeaderName>,
    /// Who may say so, and may say where a request came from.
    pub trusted_proxies: Networks,
    /// Whether a stored answer is given to whoever sends the key and the same request, with whatever credentials.
    pub shared: bool,
    /// The cookies that are credentials, beside `Authorization`.
    pub cookies: Cookies,
    /// What a request gets of which nobody knows whether it took effect.
    pub on_lost: OnLost,
    /// The 5xx by which the upstream says that it did nothing.
    pub not_executed_statuses: Statuses,
    /// How long the upstream may take to begin its answer.
    pub timeout: Duration,
    /// How long a connection to the upstream may take.
    pub connect_timeout: Duration,
    /// How long a request waits that finds its key in flight, unless it says so itself.
    pub wait: Duration,
    /// The longest body of a request with a key.
    pub request_limit: Size,
    /// The longest answer that is kept.
    pub answer_limit: Size,
    /// How long a key stays taken after a gateway that died.
    pub lease: Duration,
    /// How long an answer is kept.
    pub retention: Duration,
    /// Whether nobody can purge an answer before that, so that retries need not ask the database.
    pub pinned: bool,
}

/// A key that is forgotten sooner protects from nothing: clients retry for minutes.
const SHORTEST_RETENTION: Duration = Duration::from_secs(60);

/// A lease is renewed until this: longer than any answer that is worth waiting for.
const LONGEST_TIMEOUT: Duration = Duration::from_secs(3600);

pub(super) fn read(reader: &mut Reader<'_>, listen: &Listen) -> Gateway {
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
        reader.mistake("gateway.upstream", format!("{listen} is where the gateway itself listens"));
    }
    if gateway.tenant_header.is_some() && gateway.trusted_proxies.is_empty() {
        let message = "is believed from trusted proxies only, and gateway.trusted_proxies names none";
        reader.mistake("gateway.tenant_header", message.to_owned());
    }
    if gateway.shares_answers() && !gateway.cookies.0.is_empty() {
        let message = "are not looked at where gateway.shared or gateway.tenant_header says who may have an answer";
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
        let why = "must be at least 1m and at most 1000 years: a retry that comes after it is carried out again";
        reader.mistake("gateway.retention", why.to_owned());
    }
    gateway
}

impl Gateway {
    /// Whether the credentials of a repeat need not be those of its first request: because that was said, or because a
    /// proxy that authenticates says whose key it is.
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

/// Where the upstream is.
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
            return Err(
                "cannot be https: the gateway speaks plain HTTP to what is behind it; let it stand next to the \
                        upstream, or put a proxy that speaks TLS between the two"
                    .to_owned(),
            );
        }
        // The text may hold a password, so no message repeats it.
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

/// Whose something is.
pub(super) struct Tenant(pub(super) String);

impl Value for Tenant {
    const EXAMPLE: &'static str = "default";

    fn parse(text: &str) -> Result<Self, String> {
        match Scope::new(text, "gateway", "request") {
            Ok(_) => Ok(Self(text.to_owned())),
            Err(_) => Err("must be 1 to 64 bytes without / and control characters".to_owned()),
        }
    }

    fn to_toml(&self) -> toml::Value {
        self.0.as_str().into()
    }
}

/// Whether a header has a meaning of its own, is set by the gateway, or goes no further than one connection. A tenant
/// named after a token would lose its keys with it, and one that a client may set would be any tenant it likes.
fn has_another_meaning(name: &HeaderName) -> bool {
    const TAKEN: [&str; 31] = [
        "accept",
        "accept-encoding",
        "accept-language",
        "authorization",
        "cache-control",
        "connection",
        "cookie",
        "date",
        "expect",
        "forwarded",
        "host",
        "http2-settings",
        "idempotency-key",
        "idempotency-mismatch",
        "idempotent-replayed",
        "keep-alive",
        "origin",
        "prefer",
        "range",
        "referer",
        "semel-fence",
        "set-cookie",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
        "user-agent",
        "via",
        "x-api-key",
        "x-http-method-override",
        "x-real-ip",
    ];
    const FAMILIES: [&str; 7] = ["access-control-", "content-", "if-", "proxy-", "sec-", "x-forwarded-", "x-original-"];
    // To many servers an underscore, or a dot, is the same.
    let plain: String = name.as_str().chars().map(|c| if c.is_ascii_alphanumeric() { c } else { '-' }).collect();
    TAKEN.contains(&plain.as_str()) || FAMILIES.iter().any(|family| plain.starts_with(family))
}

impl Value for Option<HeaderName> {
    const EXAMPLE: &'static str = "x-tenant";

    fn parse(text: &str) -> Result<Self, String> {
        match text.parse::<HeaderName>() {
            _ if text.is_empty() => Ok(None),
            Ok(name) if has_another_meaning(&name) => {
                Err(format!("must be a header of its own such as x-tenant: {name} means something else"))
            }
            Ok(name) => Ok(Some(name)),
            Err(_) => Err(format!("must be the name of a header such as x-tenant, not \"{text}\"")),
        }
    }

    fn to_toml(&self) -> toml::Value {
        self.as_ref().map_or("", HeaderName::as_str).into()
    }
}

impl Value for OnLost {
    const EXAMPLE: &'static str = "hold";

    fn parse(text: &str) -> Result<Self, String> {
        match text {
            "hold" => Ok(Self::Hold),
            "rerun" => Ok(Self::Rerun),
            _ => Err(format!("must be hold or rerun, not \"{text}\"")),
        }
    }

    fn to_toml(&self) -> toml::Value {
        if self.doubts() { "hold".into() } else { "rerun".into() }
    }
}

/// Some of the 5xx.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Statuses(Vec<StatusCode>);

impl Statuses {
    /// Whether it is one of them.
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

/// A number of bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Size(pub usize);

impl Size {
    const UNITS: [(&'static str, usize); 4] = [("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10), ("B", 1)];
    /// The ledger takes no larger rows than this, with room for the answer's headers.
    const LARGEST: usize = 7 << 20;

    /// The number of bytes that a text such as `512KiB` means.
    pub(super) fn bytes(text: &str) -> Option<usize> {
        let (number, unit) = text.split_at(text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len()));
        let unit = Self::UNITS.iter().find(|(name, _)| *name == unit.trim()).map(|(_, bytes)| *bytes);
        let unit = unit.or((number == text).then_some(1))?;
        number.parse::<usize>().ok()?.checked_mul(unit)
    }
}

impl Value for Size {
    const EXAMPLE: &'static str = "1MiB";

    fn parse(text: &str) -> Result<Self, String> {
        match Self::bytes(text) {
            Some(bytes) if bytes <= Self::LARGEST => Ok(Self(bytes)),
            Some(_) => Err("must be at most 7MiB".to_owned()),
            None => Err(format!("must be a size such as 512KiB or 1MiB, not \"{text}\"")),
        }
    }

    fn from_toml(value: &toml::Value) -> Result<Self, String> {
        match value {
            toml::Value::Integer(bytes) => Self::parse(&bytes.to_string()),
            toml::Value::String(text) => Self::parse(text),
            _ => Err("must be a size such as \"1MiB\"".to_owned()),
        }
    }

    fn to_toml(&self) -> toml::Value {
        let whole = Self::UNITS.iter().find(|(_, bytes)| self.0 != 0 && self.0.is_multiple_of(*bytes));
        let (unit, bytes) = whole.unwrap_or(&("B", 1));
        format!("{}{unit}", self.0 / bytes).into()
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
    fn a_tenant_has_a_header_of_its_own() {
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
    fn a_size_is_shown_as_people_write_it() {
        for (text, shown) in [("1MiB", "1MiB"), ("1048576", "1MiB"), ("1536 KiB", "1536KiB"), ("7", "7B"), ("0", "0B")]
        {
            assert_eq!(Size::parse(text).map(|size| size.to_toml()), Ok(shown.into()), "{text}");
        }
        for text in ["", "MiB", "1 GB", "8MiB", "-1", "99999999999999999999", "1.5MiB"] {
            assert!(Size::parse(text).is_err(), "{text}");
        }
    }

    #[test]
    fn only_a_5xx_can_say_that_nothing_was_done() {
        assert!(Statuses::parse("503, 502").unwrap().contains(StatusCode::BAD_GATEWAY));
        assert_eq!(Statuses::parse(""), Ok(Statuses(Vec::new())));
        for text in ["200", "404", "600", "x"] {
            assert!(Statuses::parse(text).is_err(), "{text}");
        }
    }
}
