//! Limits of connections: their number, and how long each may be idle.

use std::time::Duration;

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use super::DRAIN;
use crate::config;

/// Files that a server needs besides its connections: for the database, the broker, and called endpoints.
const OTHER_FILES: u64 = 256;

/// A connection is one file, and for the gateway another one to the upstream.
const FILES_EACH: u64 = 2;

/// The limits of a server's connections.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// How long a connection may take to send the head of its next request. This also bounds its idle time.
    pub head: Duration,
    /// How many connections are open at a time. Further ones wait, unaccepted, until one is closed.
    pub connections: usize,
    /// How long requests in flight may take after a stop request.
    pub drain: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        Self::of(&config::Http::default())
    }
}

impl Limits {
    fn of(config: &config::Http) -> Self {
        Self { head: config.head_timeout, connections: config.max_connections, drain: DRAIN }
    }

    /// As configured, but no more connections than this process may open files for: a server without free files cannot
    /// reach its database. First raises the limit of open files as far as the system allows.
    #[must_use]
    pub fn of_process(config: &config::Http) -> Self {
        let asked = Self::of(config);
        let connections = within(files_for(asked.connections), asked.connections);
        if connections < asked.connections {
            tracing::warn!(
                asked = asked.connections,
                connections,
                "fewer connections than configured: the system's limit of open files is too low"
            );
        }
        Self { connections, ..asked }
    }
}

/// How many files so many connections, and everything else, may need.
fn needed(connections: usize) -> u64 {
    u64::try_from(connections).unwrap_or(u64::MAX).saturating_mul(FILES_EACH).saturating_add(OTHER_FILES)
}

/// How many files this process may open, after raising the limit.
fn files_for(connections: usize) -> Option<u64> {
    let Rlimit { current, maximum } = getrlimit(Resource::Nofile);
    let needed = needed(connections);
    if current.is_none_or(|current| current >= needed) {
        return current;
    }
    let most = maximum.map_or(needed, |maximum| maximum.min(needed));
    match setrlimit(Resource::Nofile, Rlimit { current: Some(most), maximum }) {
        Ok(()) => Some(most),
        Err(_) => current,
    }
}

/// How many connections fit into so many files; at least one.
fn within(files: Option<u64>, asked: usize) -> usize {
    let Some(files) = files else { return asked };
    let fit = files.saturating_sub(OTHER_FILES) / FILES_EACH;
    usize::try_from(fit).unwrap_or(usize::MAX).clamp(1, asked.max(1))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_connection_limit_fits_the_file_limit() {
        assert_eq!(within(None, 4096), 4096);
        assert_eq!(within(Some(needed(4096)), 4096), 4096);
        assert_eq!(within(Some(needed(4096) - 1), 4096), 4095);
        assert_eq!(within(Some(1024), 4096), 384);
        assert_eq!(within(Some(64), 4096), 1, "at least one connection is served");
    }
}
