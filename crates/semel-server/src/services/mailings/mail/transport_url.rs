//! The address of a transport in the configuration.
//!
//! - `file:/var/spool/semel`: one file per mail
//! - `smtp://[user:password@]host[:port][?tls=none|opportunistic|required]`, `smtps://…`
//! - `https://[token@]host/path[?preset=resend|brevo|generic][&window=24h][&token=…]`
//!
//! Each takes `timeout=10s`, too. A password or token is never printed.

use std::{fmt, path::PathBuf, time::Duration};

use sha2::{Digest as _, Sha256};
use url::{Host, Url};

/// The window that Resend documents for its keys.
const RESEND_WINDOW: Duration = Duration::from_secs(24 * 3600);

/// Brevo's guide says 30 minutes, its changelog 15. We trust the shorter one.
const BREVO_WINDOW: Duration = Duration::from_secs(15 * 60);

/// A parsed address of a transport. `Display` and `Debug` show its origin only.
#[derive(Clone, PartialEq, Eq)]
pub(crate) struct TransportUrl {
    pub(super) target: Target,
    /// The time limit of each step, if the URL has one.
    pub(super) timeout: Option<Duration>,
    shown: String,
}

/// The kinds of transports.
#[derive(Clone, PartialEq, Eq)]
pub(super) enum Target {
    File(PathBuf),
    Smtp(Smtp),
    Http(Http),
}

/// A mail server.
#[derive(Clone, PartialEq, Eq)]
pub(super) struct Smtp {
    pub(super) host: String,
    pub(super) port: u16,
    pub(super) tls: Tls,
    /// User and password.
    pub(super) login: Option<(String, String)>,
}

/// How an SMTP connection is encrypted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Tls {
    /// Not at all.
    None,
    /// With STARTTLS if the server offers it.
    Opportunistic,
    /// With STARTTLS, or not at all connected.
    Required,
    /// From the first byte (smtps).
    Wrapped,
}

/// A mail service with a JSON API.
#[derive(Clone, PartialEq, Eq)]
pub(super) struct Http {
    /// Without credentials and without our own options.
    pub(super) url: Url,
    pub(super) preset: Preset,
    pub(super) token: Option<String>,
    /// How long the service remembers a key.
    pub(super) window: Option<Duration>,
    /// Distinguishes the account, without its secrets: another one does not know the same keys.
    pub(super) account: String,
}

/// The dialect of an API.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Preset {
    Generic,
    Resend,
    Brevo,
}

impl TransportUrl {
    /// Parses the address of a transport.
    ///
    /// # Errors
    /// Says what is wrong, without repeating the text, which may contain a password.
    pub(crate) fn parse(text: &str) -> Result<Self, String> {
        // Not by the URL parser: it would turn `file:mails` into the absolute path `/mails`.
        if let Some(dir) = text.strip_prefix("file:") {
            return Self::file(dir);
        }
        let url = Url::parse(text).map_err(|error| format!("is not a valid URL: {error}"))?;
        let mut options = Options::of(&url);
        let timeout = options.duration("timeout")?;
        let target = match url.scheme() {
            "smtp" | "smtps" => Target::Smtp(Smtp::of(&url, &mut options)?),
            "http" | "https" => Target::Http(Http::of(&url, &mut options)?),
            other => return Err(format!("{other:?} is not a transport; use file:, smtp:, smtps:, http: or https:")),
        };
        if let (Target::Smtp(_), Some((name, _))) = (&target, options.0.first()) {
            return Err(format!("there is no option {name:?} of this transport"));
        }
        let secret = if url.username().is_empty() && url.password().is_none() { "" } else { "***@" };
        let host = url.host_str().unwrap_or_default();
        let port = url.port().map(|port| format!(":{port}")).unwrap_or_default();
        Ok(Self { target, timeout, shown: format!("{}://{secret}{host}{port}", url.scheme()) })
    }

    fn file(dir: &str) -> Result<Self, String> {
        let dir = dir.strip_prefix("//").unwrap_or(dir);
        if dir.is_empty() {
            return Err("file: needs a directory".to_owned());
        }
        Ok(Self { target: Target::File(dir.into()), timeout: None, shown: format!("file:{dir}") })
    }
}

impl fmt::Display for TransportUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.shown)
    }
}

impl fmt::Debug for TransportUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "TransportUrl({})", self.shown)
    }
}

impl Smtp {
    fn of(url: &Url, options: &mut Options) -> Result<Self, String> {
        let host = url.host_str().filter(|host| !host.is_empty()).ok_or("needs a host")?;
        let host = host.trim_start_matches('[').trim_end_matches(']').to_owned();
        // The URL parser does not recognise addresses in schemes that it does not know.
        let is_local = match Host::parse(url.host_str().unwrap_or_default()) {
            Ok(Host::Ipv4(ip)) => ip.is_loopback(),
            Ok(Host::Ipv6(ip)) => ip.is_loopback(),
            Ok(Host::Domain(name)) => name == "localhost",
            Err(_) => return Err("has an invalid host".to_owned()),
        };
        let is_wrapped = url.scheme() == "smtps";
        let tls = match options.take("tls").as_deref() {
            None if is_wrapped => Tls::Wrapped,
            Some(_) if is_wrapped => return Err("smtps is always encrypted: remove the option tls".to_owned()),
            None if is_local => Tls::None,
            None | Some("required") => Tls::Required,
            Some("opportunistic") => Tls::Opportunistic,
            Some("none") => Tls::None,
            Some(_) => return Err("the option tls is none, opportunistic or required".to_owned()),
        };
        let login = match (decoded(url.username())?, url.password()) {
            (user, Some(password)) => Some((user, decoded(password)?)),
            (user, None) if user.is_empty() => None,
            _ => return Err("has a user but no password".to_owned()),
        };
        if login.is_some() && tls == Tls::Opportunistic && !is_local {
            return Err("tls=opportunistic could send the password in clear; use tls=required".to_owned());
        }
        let default = match tls {
            Tls::Wrapped => 465,
            Tls::None if login.is_none() => 25,
            _ => 587,
        };
        Ok(Self { host, port: url.port().unwrap_or(default), tls, login })
    }
}

impl Http {
    fn of(url: &Url, options: &mut Options) -> Result<Self, String> {
        let preset = match options.take("preset").as_deref() {
            None | Some("generic") => Preset::Generic,
            Some("resend") => Preset::Resend,
            Some("brevo") => Preset::Brevo,
            Some(_) => return Err("the option preset is resend, brevo or generic".to_owned()),
        };
        let window = options.duration("window")?;
        let window = match preset {
            Preset::Generic => window,
            _ if window.is_some() => return Err("the option window is for the preset generic only".to_owned()),
            Preset::Resend => Some(RESEND_WINDOW),
            Preset::Brevo => Some(BREVO_WINDOW),
        };
        let in_place_of_user = url.password().unwrap_or(url.username());
        let in_place_of_user = Some(decoded(in_place_of_user)?).filter(|token| !token.is_empty());
        let token = match (in_place_of_user, options.take("token")) {
            (Some(_), Some(_)) => return Err("has two tokens".to_owned()),
            (a, b) => a.or(b),
        };
        if token.as_ref().is_some_and(|token| token.bytes().any(|b| !b.is_ascii_graphic())) {
            return Err("the token has characters that a header cannot have".to_owned());
        }
        if token.is_none() && preset != Preset::Generic {
            return Err("this preset needs a token".to_owned());
        }
        let mut bare = url.clone();
        // Cannot fail: an HTTP URL has a host.
        let _ = bare.set_username("");
        let _ = bare.set_password(None);
        // Options that are not ours belong to the service.
        bare.set_query(None);
        if !options.0.is_empty() {
            bare.query_pairs_mut().extend_pairs(&options.0);
        }
        let account = account(&bare, preset, token.as_deref());
        Ok(Self { url: bare, preset, token, window, account })
    }
}

/// The origin of a service, and a hash of everything that its keys may depend on.
fn account(url: &Url, preset: Preset, token: Option<&str>) -> String {
    let mut hash = Sha256::new();
    for part in [url.as_str(), &format!("{preset:?}"), token.unwrap_or_default()] {
        hash.update((part.len() as u64).to_be_bytes());
        hash.update(part);
    }
    format!("{}#{}", url.origin().ascii_serialization(), hex::encode(&hash.finalize()[..8]))
}

/// The query of a URL; options are removed as they are read.
struct Options(Vec<(String, String)>);

impl Options {
    fn of(url: &Url) -> Self {
        Self(url.query_pairs().map(|(name, value)| (name.into_owned(), value.into_owned())).collect())
    }

    fn take(&mut self, name: &str) -> Option<String> {
        let at = self.0.iter().position(|(n, _)| n == name)?;
        Some(self.0.remove(at).1)
    }

    fn duration(&mut self, name: &str) -> Result<Option<Duration>, String> {
        let Some(text) = self.take(name) else { return Ok(None) };
        match humantime::parse_duration(&text) {
            Ok(time) if !time.is_zero() => Ok(Some(time)),
            _ => Err(format!("the option {name} is a time such as 30s or 24h")),
        }
    }
}

/// Percent-decodes a part of a URL. A plus sign stays one.
fn decoded(text: &str) -> Result<String, String> {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.bytes();
    while let Some(byte) = rest.next() {
        if byte != b'%' {
            bytes.push(byte);
            continue;
        }
        let digits = [rest.next(), rest.next()].map(|digit| char::from(digit.unwrap_or_default()).to_digit(16));
        let [Some(high), Some(low)] = digits else { return Err("has an invalid % in its user or password".to_owned()) };
        bytes.push((high * 16 + low) as u8);
    }
    String::from_utf8(bytes).map_err(|_| "has a user or password that is not UTF-8".to_owned())
}
