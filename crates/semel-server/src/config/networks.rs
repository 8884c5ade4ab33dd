//! Lists of addresses and networks.

use std::{fmt, net::IpAddr};

use super::value::{Value, wrong_type};

/// A set of networks.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Networks(Vec<Network>);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Network {
    address: IpAddr,
    /// How many leading bits count.
    prefix: u8,
}

impl Networks {
    /// Whether the set is empty.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Whether it contains the address. An IPv4-mapped IPv6 address counts as its IPv4 address.
    #[must_use]
    pub fn contains(&self, address: IpAddr) -> bool {
        self.0.iter().any(|network| network.contains(address.to_canonical()))
    }

    fn of<'a>(texts: impl Iterator<Item = &'a str>) -> Result<Self, String> {
        let texts = texts.map(str::trim).filter(|text| !text.is_empty());
        let read = |text| {
            Network::parse(text)
                .ok_or_else(|| format!("may only name addresses and networks such as 10.0.0.0/8, not \"{text}\""))
        };
        texts.map(read).collect::<Result<_, _>>().map(Self)
    }
}

impl Network {
    fn parse(text: &str) -> Option<Self> {
        let (address, prefix) = text.split_once('/').map_or((text, None), |(address, prefix)| (address, Some(prefix)));
        let address = address.parse::<IpAddr>().ok()?;
        let longest = if address.is_ipv4() { 32 } else { 128 };
        let prefix = prefix.map_or(Some(longest), |prefix| prefix.parse().ok()).filter(|prefix| *prefix <= longest)?;
        Some(Self { address, prefix })
    }

    fn contains(self, other: IpAddr) -> bool {
        // A shift by the full width overflows, so a prefix of 0 is handled separately.
        match (self.address, other) {
            (IpAddr::V4(own), IpAddr::V4(other)) => {
                (own.to_bits() ^ other.to_bits()).checked_shr(32 - u32::from(self.prefix)).unwrap_or(0) == 0
            }
            (IpAddr::V6(own), IpAddr::V6(other)) => {
                (own.to_bits() ^ other.to_bits()).checked_shr(128 - u32::from(self.prefix)).unwrap_or(0) == 0
            }
            _ => false,
        }
    }
}

impl fmt::Display for Network {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.address, self.prefix)
    }
}

impl Value for Networks {
    const EXAMPLE: &'static str = "127.0.0.1,10.0.0.0/8";

    fn parse(text: &str) -> Result<Self, String> {
        Self::of(text.split(','))
    }

    fn from_toml(value: &toml::Value) -> Result<Self, String> {
        match value {
            toml::Value::Array(items) => {
                let texts: Option<Vec<_>> = items.iter().map(toml::Value::as_str).collect();
                Self::of(texts.ok_or("must be a list of strings")?.into_iter())
            }
            toml::Value::String(text) => Self::parse(text),
            other => Err(wrong_type(other, Self::EXAMPLE)),
        }
    }

    fn to_toml(&self) -> toml::Value {
        self.0.iter().map(ToString::to_string).collect::<Vec<_>>().into()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_network_holds_its_own_addresses_and_no_others() {
        for (networks, inside, outside) in [
            ("127.0.0.1", "127.0.0.1", "127.0.0.2"),
            ("10.0.0.0/8", "10.255.0.1", "11.0.0.0"),
            ("192.168.2.0/23, 10.1.1.1", "192.168.3.255", "192.168.4.0"),
            ("0.0.0.0/0", "8.8.8.8", "::1"),
            ("::1", "::1", "::2"),
            ("fd00::/8", "fdff::1", "fe00::1"),
            ("10.0.0.0/8", "::ffff:10.0.0.1", "::ffff:11.0.0.1"),
        ] {
            let networks = Networks::parse(networks).unwrap();
            assert!(networks.contains(inside.parse().unwrap()), "{networks:?} {inside}");
            assert!(!networks.contains(outside.parse().unwrap()), "{networks:?} {outside}");
        }
        assert!(Networks::parse("").unwrap().is_empty());
        for text in ["10.0.0.0/33", "::/129", "localhost", "10.0.0", "10.0.0.0/", "10.0.0.0/-1"] {
            assert!(Networks::parse(text).is_err(), "{text}");
        }
    }
}
