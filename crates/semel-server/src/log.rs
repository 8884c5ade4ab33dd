//! Logs go to stderr, so that stdout carries only what a command was asked for.

mod outage;

use std::io::{self, IsTerminal as _};

use tracing_subscriber::{
    EnvFilter, Layer as _,
    filter::FilterExt as _,
    layer::{Filter, SubscriberExt as _},
    registry::Registry,
    util::SubscriberInitExt as _,
};

pub(crate) use outage::Outage;

/// Starts the logging of a command, filtered by `RUST_LOG`, or from `level` on when it is not set.
pub(crate) fn start(level: &str) {
    start_with(level, None);
}

/// What a server logs when `RUST_LOG` does not say otherwise. Of a connection that broke, or that was slow to come, the
/// part that needed it tells; the lines of the pool, or of the client of RabbitMQ, only say it once more, at every try.
const SERVER: &str = "info,sqlx::postgres::notice=error,sqlx::pool=error,sqlx_core::pool=error,lapin=off";

/// Starts the logging of a server, which says once that its database is away.
pub(crate) fn start_server() -> Outage {
    let outage = Outage::default();
    start_with(SERVER, Some(outage.clone()));
    outage
}

fn start_with(level: &str, outage: Option<Outage>) {
    let asked = std::env::var("RUST_LOG").unwrap_or_default();
    // A filter that cannot be read must not silence a server: it is named, and `level` stands in.
    let (filter, mistake) = match EnvFilter::builder().parse(if asked.is_empty() { level } else { &asked }) {
        Ok(filter) => (filter, None),
        Err(mistake) => (EnvFilter::new(level), Some(mistake)),
    };
    let filter: Box<dyn Filter<Registry> + Send + Sync> = match outage {
        Some(outage) => Box::new(filter.and(outage)),
        None => Box::new(filter),
    };
    let lines = tracing_subscriber::fmt::layer()
        .with_writer(io::stderr)
        .with_ansi(io::stderr().is_terminal())
        // A line that cannot be written is lost. To say so, the subscriber would print to the same stderr, and panic
        // when that fails: a full disk, or a reader that went away, would end whatever task had something to say.
        .log_internal_errors(false);
    tracing_subscriber::registry().with(lines.with_filter(filter)).init();
    if let Some(mistake) = mistake {
        tracing::error!("RUST_LOG is not a log filter ({mistake}); logging at {level}");
    }
}
