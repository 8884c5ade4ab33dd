//! Logs go to stderr: stdout carries only the result of a command.

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

/// Starts the logging of a command. `RUST_LOG` sets the filter; without it, `level` does.
pub(crate) fn start(level: &str) {
    start_with(level, None);
}

/// The log filter of a server without `RUST_LOG`. The part that used a broken or slow connection reports it; the pool
/// and the RabbitMQ client would report it again at every try.
const SERVER: &str = "info,sqlx::postgres::notice=error,sqlx::pool=error,sqlx_core::pool=error,lapin=off";

/// Starts the logging of a server. An outage of its database is logged once.
pub(crate) fn start_server() -> Outage {
    let outage = Outage::default();
    start_with(SERVER, Some(outage.clone()));
    outage
}

fn start_with(level: &str, outage: Option<Outage>) {
    let asked = std::env::var("RUST_LOG").unwrap_or_default();
    // A filter that cannot be parsed must not silence a server: the log names the mistake and uses `level`.
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
        // A line that cannot be written is lost. Reporting it would print to the same stderr and panic if that fails: a
        // full disk or a closed pipe would then end the task that logs.
        .log_internal_errors(false);
    tracing_subscriber::registry().with(lines.with_filter(filter)).init();
    if let Some(mistake) = mistake {
        tracing::error!("RUST_LOG is not a log filter ({mistake}); logging at {level}");
    }
}
