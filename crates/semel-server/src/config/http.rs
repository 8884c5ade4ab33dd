//! The section `[http]`.

use std::time::Duration;

use super::{Size, reader::Reader, value::Value};

/// Limits for the connections of `semel serve` and `semel gateway`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Http {
    /// How long a connection may take to send the head of its next request.
    pub head_timeout: Duration,
    /// How many connections are open at a time. Further ones wait until one is closed.
    pub max_connections: usize,
    /// Whether each request is a line in the log.
    pub log_requests: bool,
    /// How many bytes of request bodies are in memory at a time. Requests beyond it are refused.
    pub body_budget: Budget,
}

impl Default for Http {
    fn default() -> Self {
        // Proxies keep idle connections for about a minute and should find most of them open. Four thousand heads of
        // the longest kind are 256 MiB.
        let body_budget = Budget(crate::http::room::Budget::DEFAULT);
        Self { head_timeout: Duration::from_secs(30), max_connections: 4096, body_budget, log_requests: false }
    }
}

/// A shorter time would cut off clients on bad lines.
const SHORTEST_HEAD: Duration = Duration::from_secs(1);
const LONGEST_HEAD: Duration = Duration::from_secs(600);

/// More than one process can serve.
const MOST_CONNECTIONS: usize = 1_000_000;

impl Http {
    pub(super) fn read(reader: &mut Reader<'_>) -> Self {
        let default = Self::default();
        let read = Self {
            head_timeout: reader.field("http.head_timeout", || default.head_timeout),
            max_connections: reader.field("http.max_connections", || default.max_connections),
            log_requests: reader.field("http.log_requests", || default.log_requests),
            body_budget: reader.field("http.body_budget", || default.body_budget),
        };
        if !(SHORTEST_HEAD..=LONGEST_HEAD).contains(&read.head_timeout) {
            reader.mistake("http.head_timeout", "must be at least 1s and at most 10m".to_owned());
        }
        if !(1..=MOST_CONNECTIONS).contains(&read.max_connections) {
            reader.mistake("http.max_connections", format!("must be 1 to {MOST_CONNECTIONS}"));
        }
        read
    }
}

/// The budget of all request bodies together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Budget(pub usize);

impl Budget {
    /// The longest body that a route accepts must fit.
    const SMALLEST: usize = 8 << 20;
    /// More than any machine has.
    const LARGEST: usize = 1 << 40;
}

impl Value for Budget {
    const EXAMPLE: &'static str = "256MiB";

    fn parse(text: &str) -> Result<Self, String> {
        match Size::bytes(text) {
            Some(bytes @ Self::SMALLEST..=Self::LARGEST) => Ok(Self(bytes)),
            Some(_) => Err("must be at least 8MiB, the longest accepted body, and at most 1024GiB".to_owned()),
            None => Err(format!("must be a size such as 256MiB or 1GiB, not \"{text}\"")),
        }
    }

    fn from_toml(value: &toml::Value) -> Result<Self, String> {
        match value {
            toml::Value::Integer(bytes) => Self::parse(&bytes.to_string()),
            toml::Value::String(text) => Self::parse(text),
            _ => Err("must be a size such as \"256MiB\"".to_owned()),
        }
    }

    fn to_toml(&self) -> toml::Value {
        Size(self.0).to_toml()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_budget_is_at_least_the_longest_body() {
        for (text, bytes) in [("8MiB", 8 << 20), ("1GiB", 1 << 30), ("268435456", 256 << 20)] {
            assert_eq!(Budget::parse(text), Ok(Budget(bytes)), "{text}");
        }
        assert_eq!(Budget(1 << 30).to_toml(), "1GiB".into());
        for text in ["", "0", "1MiB", "8388607", "2048GiB", "much"] {
            assert!(Budget::parse(text).is_err(), "{text}");
        }
    }
}
