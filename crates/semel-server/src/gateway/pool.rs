//! Idle connections to the upstream.

use std::{sync::Arc, time::Duration};

use axum::body::Body;
use hyper::client::conn::http1::SendRequest;
use parking_lot::Mutex;
use tokio::time::{Instant, sleep_until};

/// How long a connection may be idle. A request that meets the upstream's closing of an idle connection may or may not
/// have arrived, so it would be in doubt for nothing. This is below the shortest idle time of common servers (2 s).
const IDLE: Duration = Duration::from_secs(1);
/// The most idle connections: more than a gateway has requests in flight.
const MOST: usize = 512;

/// Idle connections. Clones share them.
#[derive(Clone, Default)]
pub(super) struct Pool(Arc<Mutex<Waiting>>);

#[derive(Default)]
struct Waiting {
    /// The last one used is on top.
    idle: Vec<Idle>,
    /// Whether a task closes those that were idle too long. It runs as long as there are any.
    watched: bool,
}

struct Idle {
    connection: SendRequest<Body>,
    since: Instant,
}

impl Pool {
    /// A connection that was open a moment ago, if there is one.
    pub(super) fn take(&self) -> Option<SendRequest<Body>> {
        let mut waiting = self.0.lock();
        while let Some(Idle { connection, since }) = waiting.idle.pop() {
            if since.elapsed() >= IDLE {
                // Those below have been idle longer.
                waiting.idle.clear();
                return None;
            }
            if connection.is_ready() {
                return Some(connection);
            }
        }
        None
    }

    /// Returns a connection to the pool once its answer is read to the end.
    pub(super) fn give_back(&self, mut connection: SendRequest<Body>) {
        let pool = self.clone();
        tokio::spawn(async move {
            // An error: it was closed or upgraded.
            if connection.ready().await.is_ok() {
                pool.put(connection);
            }
        });
    }

    fn put(&self, connection: SendRequest<Body>) {
        let mut waiting = self.0.lock();
        if waiting.idle.len() < MOST {
            waiting.idle.push(Idle { connection, since: Instant::now() });
        }
        if !waiting.watched {
            waiting.watched = true;
            tokio::spawn(self.clone().close_in_time());
        }
    }

    /// Closes connections that were idle long enough, until none is left. Otherwise those of a busy hour would stay
    /// open afterwards, each holding a thread of some upstreams.
    async fn close_in_time(self) {
        while let Some(next) = self.close_stale() {
            sleep_until(next).await;
        }
    }

    /// Closes those that were idle too long, and returns when the next one will be.
    fn close_stale(&self) -> Option<Instant> {
        let mut waiting = self.0.lock();
        let stale = waiting.idle.iter().take_while(|idle| idle.since.elapsed() >= IDLE).count();
        waiting.idle.drain(..stale);
        let next = waiting.idle.first().map(|oldest| oldest.since + IDLE);
        waiting.watched = next.is_some();
        next
    }
}
