//! The section `[mailings]`, and `mail_transport`.

use std::time::Duration;

use crate::{
    config::{Reader, Value},
    services::mailings::mail::transport_url::TransportUrl,
};

/// How mailings are sent.
#[derive(Clone, Debug)]
pub struct Mailings {
    /// Where mails go; none: files in the data directory.
    pub(crate) transport: Option<TransportUrl>,
    /// The sender of mailings without one.
    pub from: String,
    /// The subject of mailings without one.
    pub subject: String,
    /// The text of mailings without one.
    pub body: String,
    /// The HTML of mailings without one.
    pub html: String,
    /// How many mails a node sends at a time.
    pub connections: usize,
    /// The longest time of one mail.
    pub timeout: Duration,
    /// How many mails all nodes send in a time.
    pub rate: Option<Rate>,
    /// How many mailings a node processes at a time.
    pub at_once: usize,
    /// The lease of a run: a killed node's mailings go on after it.
    pub lease: Duration,
    /// How often a mail is tried.
    pub max_attempts: usize,
    /// The first wait before another attempt; it doubles.
    pub backoff: Duration,
    /// The largest file.
    pub max_file: FileSize,
    /// The domain of Message-IDs.
    pub message_domain: String,
    /// The domain, the selector and the private key (PEM) that mails are signed with by DKIM.
    pub dkim_domain: String,
    /// The selector.
    pub dkim_selector: String,
    /// The key.
    pub(crate) dkim_key: Key,
    /// The address of this server for links in mails.
    pub public_url: Option<PublicUrl>,
}

impl Default for Mailings {
    fn default() -> Self {
        Self {
            transport: None,
            from: String::new(),
            subject: String::new(),
            body: String::new(),
            html: String::new(),
            connections: 16,
            timeout: Duration::from_secs(30),
            rate: None,
            at_once: 8,
            lease: Duration::from_secs(30),
            max_attempts: 4,
            backoff: Duration::from_secs(60),
            max_file: FileSize(4 << 30),
            message_domain: "semel.invalid".to_owned(),
            dkim_domain: String::new(),
            dkim_selector: String::new(),
            dkim_key: Key(String::new()),
            public_url: None,
        }
    }
}

/// The longest wait between two attempts.
pub(super) const LONGEST_BACKOFF: Duration = Duration::from_secs(3600);

/// How long a transport that cannot be reached is left alone at most.
const AWAY: Duration = Duration::from_secs(15);

impl Mailings {
    /// How long a transport that cannot be reached is left alone.
    pub(super) fn away(&self) -> Duration {
        self.backoff.min(AWAY)
    }

    pub(super) fn read(reader: &mut Reader<'_>) -> Self {
        let default = Self::default();
        let text = |reader: &mut Reader<'_>, name: &'static str| reader.field(name, || Text(String::new())).0;
        let read = Self {
            transport: reader.field("mail_transport", || None),
            from: text(reader, "mailings.from"),
            subject: text(reader, "mailings.subject"),
            body: text(reader, "mailings.body"),
            html: text(reader, "mailings.html"),
            connections: reader.field("mailings.connections", || default.connections),
            timeout: reader.field("mailings.timeout", || default.timeout),
            rate: reader.field("mailings.rate", || None),
            at_once: reader.field("mailings.at_once", || default.at_once),
            lease: reader.field("mailings.lease", || default.lease),
            max_attempts: reader.field("mailings.max_attempts", || default.max_attempts),
            backoff: reader.field("mailings.backoff", || default.backoff),
            max_file: reader.field("mailings.max_file", || default.max_file),
            message_domain: reader.field("mailings.message_domain", || Text(default.message_domain)).0,
            dkim_domain: text(reader, "mailings.dkim_domain"),
            dkim_selector: text(reader, "mailings.dkim_selector"),
            dkim_key: reader.field("mailings.dkim_key", || default.dkim_key),
            public_url: reader.field("public_url", || None),
        };
        for (name, number, most) in [
            ("mailings.connections", read.connections, 1000),
            ("mailings.at_once", read.at_once, 1000),
            ("mailings.max_attempts", read.max_attempts, 1000),
        ] {
            if !(1..=most).contains(&number) {
                reader.mistake(name, format!("must be 1 to {most}"));
            }
        }
        if read.timeout.is_zero() || read.timeout > Duration::from_secs(300) {
            reader.mistake("mailings.timeout", "must be longer than 0s and at most 5m".to_owned());
        }
        if !(Duration::from_secs(1)..=Duration::from_secs(3600)).contains(&read.lease) {
            reader.mistake("mailings.lease", "must be at least 1s and at most 1h".to_owned());
        }
        if read.backoff > LONGEST_BACKOFF {
            reader.mistake("mailings.backoff", "must be at most 1h".to_owned());
        }
        let fits = |c: char| c.is_ascii_alphanumeric() || ".-".contains(c);
        if read.message_domain.is_empty() || !read.message_domain.chars().all(fits) {
            reader.mistake("mailings.message_domain", "must be a domain such as example.com".to_owned());
        }
        let given = [&read.dkim_domain, &read.dkim_selector, &read.dkim_key.0].map(|text| !text.is_empty());
        if given.contains(&true) && given.contains(&false) {
            let message = "must be set together: dkim_domain, dkim_selector and dkim_key".to_owned();
            reader.mistake("mailings.dkim_domain", message);
        }
        read
    }
}

/// Any text, possibly empty.
struct Text(String);

impl Value for Text {
    const EXAMPLE: &'static str = "News <news@example.com>";

    fn parse(text: &str) -> Result<Self, String> {
        Ok(Self(text.to_owned()))
    }

    fn to_toml(&self) -> toml::Value {
        self.0.as_str().into()
    }
}

/// A private key, never shown.
#[derive(Clone)]
pub(crate) struct Key(pub(crate) String);

impl std::fmt::Debug for Key {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(if self.0.is_empty() { "none" } else { "***" })
    }
}

impl Value for Key {
    const EXAMPLE: &'static str = "${DKIM_KEY}";

    fn parse(text: &str) -> Result<Self, String> {
        Ok(Self(text.to_owned()))
    }

    fn to_toml(&self) -> toml::Value {
        if self.0.is_empty() { "".into() } else { "***".into() }
    }
}

/// A number of mails in a time, over all nodes: `100/s`, `3000/h`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rate {
    mails: u32,
    unit: char,
}

impl Rate {
    /// The time between two mails, in microseconds.
    #[must_use]
    pub fn every(self) -> i64 {
        let unit: i64 = match self.unit {
            's' => 1_000_000,
            'm' => 60_000_000,
            _ => 3_600_000_000,
        };
        (unit / i64::from(self.mails.max(1))).max(1)
    }
}

impl Value for Option<Rate> {
    const EXAMPLE: &'static str = "100/s";

    fn parse(text: &str) -> Result<Self, String> {
        let wrong = || format!("must be a rate such as 100/s, 600/m or 3000/h, not \"{text}\"");
        if text.is_empty() {
            return Ok(None);
        }
        let (mails, unit) = text.split_once('/').ok_or_else(wrong)?;
        let mails: u32 = mails.trim().parse().ok().filter(|mails| (1..=1_000_000).contains(mails)).ok_or_else(wrong)?;
        let unit = match unit.trim() {
            "s" => 's',
            "m" | "min" => 'm',
            "h" => 'h',
            _ => return Err(wrong()),
        };
        Ok(Some(Rate { mails, unit }))
    }

    fn to_toml(&self) -> toml::Value {
        self.map_or_else(|| "".into(), |rate| format!("{}/{}", rate.mails, rate.unit).into())
    }
}

/// The size of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FileSize(pub u64);

impl Value for FileSize {
    const EXAMPLE: &'static str = "4GiB";

    fn parse(text: &str) -> Result<Self, String> {
        let bytes = crate::config::Size::bytes(text).and_then(|bytes| u64::try_from(bytes).ok());
        let bytes = bytes.filter(|bytes| *bytes > 0);
        bytes.map(Self).ok_or_else(|| format!("must be a size such as 100MiB or 4GiB, not \"{text}\""))
    }

    fn to_toml(&self) -> toml::Value {
        match self.0 {
            bytes if bytes % (1 << 30) == 0 => format!("{}GiB", bytes >> 30).into(),
            bytes if bytes % (1 << 20) == 0 => format!("{}MiB", bytes >> 20).into(),
            bytes => format!("{bytes}B").into(),
        }
    }
}

/// The address of this server, without a slash at its end.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PublicUrl(pub String);

impl Value for Option<PublicUrl> {
    const EXAMPLE: &'static str = "https://mail.example.com";

    fn parse(text: &str) -> Result<Self, String> {
        if text.is_empty() {
            return Ok(None);
        }
        let url = url::Url::parse(text).map_err(|error| format!("is not a valid URL: {error}"))?;
        if !["http", "https"].contains(&url.scheme()) || url.query().is_some() || url.fragment().is_some() {
            return Err("must be an http or https URL without a query".to_owned());
        }
        if url.password().is_some() || !url.username().is_empty() {
            return Err("must have no user and no password: it is sent to everyone".to_owned());
        }
        Ok(Some(PublicUrl(text.trim_end_matches('/').to_owned())))
    }

    fn to_toml(&self) -> toml::Value {
        self.as_ref().map_or_else(|| "".into(), |url| url.0.as_str().into())
    }
}

impl Value for Option<TransportUrl> {
    const EXAMPLE: &'static str = "smtp://user:password@mail.example.com:587";

    fn parse(text: &str) -> Result<Self, String> {
        if text.is_empty() { Ok(None) } else { TransportUrl::parse(text).map(Some) }
    }

    fn to_toml(&self) -> toml::Value {
        self.as_ref().map_or_else(|| "".into(), |url| url.to_string().into())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rate_is_a_number_of_mails_in_a_second_a_minute_or_an_hour() {
        let every = |text| Option::<Rate>::parse(text).unwrap().unwrap().every();
        assert_eq!((every("100/s"), every("600/m"), every("3600/h")), (10_000, 100_000, 1_000_000));
        for wrong in ["100", "0/s", "-1/s", "x/s", "1/d", "1/"] {
            assert!(Option::<Rate>::parse(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn a_public_url_has_no_password_and_no_slash_at_its_end() {
        let url = Option::<PublicUrl>::parse("https://mail.example.com/semel/").unwrap().unwrap();
        assert_eq!(url.0, "https://mail.example.com/semel");
        for wrong in ["mail.example.com", "ftp://x", "https://a:b@x", "https://x/?q=1"] {
            assert!(Option::<PublicUrl>::parse(wrong).is_err(), "{wrong}");
        }
    }
}
