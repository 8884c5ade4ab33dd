//! The section `[http]`.

use std::time::Duration;

use super::reader::Reader;

/// What connections may cost, of `semel serve` and of `semel gateway`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Http {
    /// How long a connection may take to send the head of its next request.
    pub head_timeout: Duration,
    /// How many connections are open at a time. Those beyond wait until one is closed.
    pub max_connections: usize,
    /// Whether each request is a line in the log.
    pub log_requests: bool,
}

impl Default for Http {
    fn default() -> Self {
        // Proxies keep idle connections for about a minute, and are to find most of them open. Four thousand heads of
        // the longest kind are 256 MiB.
        Self { head_timeout: Duration::from_secs(30), max_connections: 4096, log_requests: false }
    }
}

/// Below it, a client on a bad line would be cut off; above it, silence costs nothing.
const SHORTEST_HEAD: Duration = Duration::from_secs(1);
const LONGEST_HEAD: Duration = Duration::from_secs(600);

/// More than one process can serve in any way.
const MOST_CONNECTIONS: usize = 1_000_000;

impl Http {
    pub(super) fn read(reader: &mut Reader<'_>) -> Self {
        let default = Self::default();
        let read = Self {
            head_timeout: reader.field("http.head_timeout", || default.head_timeout),
            max_connections: reader.field("http.max_connections", || default.max_connections),
            log_requests: reader.field("http.log_requests", || default.log_requests),
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
