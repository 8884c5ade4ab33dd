//! What connections may cost: how many there are, and how long each may be silent.

use std::time::Duration;

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use super::DRAIN;
use crate::config;

/// The files that a server needs beside its connections: the database's, the broker's, endpoints that are called.
const OTHER_FILES: u64 = 256;

/// A connection is a file, and behind the gateway another one, to the upstream.
const FILES_EACH: u64 = 2;

/// What a server allows those who connect.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// How long a connection may take to send the head of its next request; so it may be idle for no longer, either.
    pub head: Duration,
    /// How many connections are open at a time. Those beyond wait, unaccepted, until one is closed.
    pub connections: usize,
    /// How long requests in flight may take after a stop was asked for.
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

    /// As configured, and no more connections than this process may open files for: a server that has none left cannot
    /// reach its database either. It may first have as many as the system lets it ask for.
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

/// How many files so many connections, and all else, may need.
fn needed(connections: usize) -> u64 {
    u64::try_from(connections).unwrap_or(u64::MAX).saturating_mul(FILES_EACH).saturating_add(OTHER_FILES)
}

/// How many files this process may have open, after asking for what it needs.
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

/// How many of the connections that were asked for fit into so many files; one always.
fn within(files: Option<u64>, asked: usize) -> usize {
    let Some(files) = files else { return asked };
    let fit = files.saturating_sub(OTHER_FILES) / FILES_EACH;
    usize::try_from(fit).unwrap_or(usize::MAX).clamp(1, asked.max(1))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_more_connections_than_there_are_files_for() {
        assert_eq!(within(None, 4096), 4096);
        assert_eq!(within(Some(needed(4096)), 4096), 4096);
        assert_eq!(within(Some(needed(4096) - 1), 4096), 4095);
        assert_eq!(within(Some(1024), 4096), 384);
        assert_eq!(within(Some(64), 4096), 1, "a server that serves nobody is none");
    }
}
