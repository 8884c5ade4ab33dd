//! Logs go to stderr, so that stdout carries only what a command was asked for.

use std::io::{self, IsTerminal as _};

use tracing_subscriber::EnvFilter;

/// Starts logging, filtered by `RUST_LOG`, or from `level` on when it is not set.
pub(crate) fn start(level: &str) {
    let asked = std::env::var("RUST_LOG").unwrap_or_default();
    // A filter that cannot be read must not silence a server: it is named, and `level` stands in.
    let (filter, mistake) = match EnvFilter::builder().parse(if asked.is_empty() { level } else { &asked }) {
        Ok(filter) => (filter, None),
        Err(mistake) => (EnvFilter::new(level), Some(mistake)),
    };
    tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(io::stderr)
        .with_ansi(io::stderr().is_terminal())
        // A line that cannot be written is lost. To say so, the subscriber would print to the same stderr, and panic
        // when that fails: a full disk, or a reader that went away, would end whatever task had something to say.
        .log_internal_errors(false)
        .init();
    if let Some(mistake) = mistake {
        tracing::error!("RUST_LOG is not a log filter ({mistake}); logging at {level}");
    }
}
