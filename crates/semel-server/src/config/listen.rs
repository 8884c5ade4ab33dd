//! The address to serve on.

use std::{fmt, net::IpAddr};

use super::value::Value;

/// A host (address or name) and a port.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Listen {
    host: String,
    port: u16,
}

impl Listen {
    /// The host, an IPv6 address without its brackets.
    #[must_use]
    pub fn host(&self) -> &str {
        &self.host
    }

    /// The port; 0 takes any free one.
    #[must_use]
    pub fn port(&self) -> u16 {
        self.port
    }

    /// Whether only this machine can reach it, as far as that is known without a DNS query.
    #[must_use]
    pub fn is_loopback(&self) -> bool {
        match self.host.parse::<IpAddr>() {
            Ok(address) => address.is_loopback(),
            Err(_) => self.host.eq_ignore_ascii_case("localhost"),
        }
    }
}

impl Default for Listen {
    fn default() -> Self {
        Self { host: "127.0.0.1".to_owned(), port: 8080 }
    }
}

impl fmt::Display for Listen {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.host.contains(':') {
            write!(f, "[{}]:{}", self.host, self.port)
        } else {
            write!(f, "{}:{}", self.host, self.port)
        }
    }
}

impl Value for Listen {
    const EXAMPLE: &'static str = "127.0.0.1:8080";

    fn parse(text: &str) -> Result<Self, String> {
        let wrong = |what: &str| format!("must be an address such as 127.0.0.1:8080, but in \"{text}\" {what}");
        let is_port = !text.is_empty() && text.bytes().all(|b| b.is_ascii_digit());
        let missing = if is_port { "the host is missing" } else { "there is no port" };
        let (host, port) = text.rsplit_once(':').ok_or_else(|| wrong(missing))?;
        let host = match host.strip_prefix('[').and_then(|host| host.strip_suffix(']')) {
            Some(v6) if v6.parse::<std::net::Ipv6Addr>().is_ok() => v6,
            Some(_) => return Err(wrong("the brackets hold no IPv6 address")),
            None if host.contains(':') => return Err(wrong("the IPv6 address lacks its brackets, as in [::1]:8080")),
            None if is_name(host) => host,
            None if host.is_empty() => return Err(wrong("there is no host")),
            None => return Err(wrong("the host is neither an address nor a name")),
        };
        // `parse` alone would accept a port with a plus sign.
        let port = Some(port)
            .filter(|port| port.bytes().all(|b| b.is_ascii_digit()))
            .and_then(|port| port.parse().ok())
            .ok_or_else(|| wrong("the port is not a number from 0 to 65535"))?;
        Ok(Self { host: host.to_owned(), port })
    }

    fn to_toml(&self) -> toml::Value {
        self.to_string().into()
    }
}

fn is_name(host: &str) -> bool {
    !host.is_empty() && host.chars().all(|c| c.is_ascii_alphanumeric() || matches!(c, '.' | '-' | '_'))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_is_shown_as_it_was_written() {
        for text in ["127.0.0.1:8080", "[::1]:0", "localhost:80", "0.0.0.0:65535", "db-1.example.com:1"] {
            assert_eq!(Listen::parse(text).map(|listen| listen.to_string()).as_deref(), Ok(text));
        }
    }

    #[test]
    fn an_invalid_address_is_refused() {
        for text in ["", "8080", ":8080", "localhost", "::1:8080", "[::g]:1", "[::1]", "h:65536", "h:+1", "h:", "a b:1"]
        {
            assert!(Listen::parse(text).is_err(), "{text}");
        }
    }

    #[test]
    fn an_error_names_the_missing_part_of_an_address() {
        assert!(Listen::parse("8088").unwrap_err().ends_with("in \"8088\" the host is missing"));
        assert!(Listen::parse("localhost").unwrap_err().ends_with("there is no port"));
    }

    #[test]
    fn only_this_machines_own_addresses_are_loopback() {
        for (text, loopback) in [
            ("127.0.0.1:1", true),
            ("127.9.9.9:1", true),
            ("[::1]:1", true),
            ("LocalHost:1", true),
            ("0.0.0.0:1", false),
            ("[::]:1", false),
            ("10.0.0.1:1", false),
            ("localhost.example.com:1", false),
        ] {
            assert_eq!(Listen::parse(text).map(|listen| listen.is_loopback()), Ok(loopback), "{text}");
        }
    }
}
