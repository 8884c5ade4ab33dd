//! Connections to the upstream that wait for their next request.

use std::{
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use axum::body::Body;
use hyper::client::conn::http1::SendRequest;
use tokio::time::{Instant, sleep_until};

/// How long a connection may wait. A request that meets the upstream's own closing of an idle connection may or may not
/// have arrived, so it would be in doubt for nothing: this stays below the shortest time after which a common server
/// closes (2 s).
const IDLE: Duration = Duration::from_secs(1);
/// How many may wait. More than one gateway has requests in flight at a time is not worth the sockets.
const MOST: usize = 512;

/// Idle connections. Clones share them.
#[derive(Clone, Default)]
pub(super) struct Pool(Arc<Mutex<Waiting>>);

#[derive(Default)]
struct Waiting {
    /// The one that was used last is on top.
    idle: Vec<Idle>,
    /// Whether a task closes those that have waited too long. There is one as long as any wait.
    watched: bool,
}

struct Idle {
    connection: SendRequest<Body>,
    since: Instant,
}

impl Pool {
    /// A connection that was open a moment ago, if there is one.
    pub(super) fn take(&self) -> Option<SendRequest<Body>> {
        let mut waiting = self.lock();
        while let Some(Idle { connection, since }) = waiting.idle.pop() {
            if since.elapsed() >= IDLE {
                // Those below have waited longer.
                waiting.idle.clear();
                return None;
            }
            if connection.is_ready() {
                return Some(connection);
            }
        }
        None
    }

    /// Keeps the connection for another request, once its answer is read to the end.
    pub(super) fn give_back(&self, mut connection: SendRequest<Body>) {
        let pool = self.clone();
        tokio::spawn(async move {
            // An error: it was closed, or became another protocol.
            if connection.ready().await.is_ok() {
                pool.put(connection);
            }
        });
    }

    fn put(&self, connection: SendRequest<Body>) {
        let mut waiting = self.lock();
        if waiting.idle.len() < MOST {
            waiting.idle.push(Idle { connection, since: Instant::now() });
        }
        if !waiting.watched {
            waiting.watched = true;
            tokio::spawn(self.clone().close_in_time());
        }
    }

    /// Closes connections when they have waited long enough, until none waits. Otherwise those of a busy hour would
    /// stay open through the quiet one that follows, each of them a thread or more of some upstreams.
    async fn close_in_time(self) {
        while let Some(next) = self.close_stale() {
            sleep_until(next).await;
        }
    }

    /// Closes those that have waited too long, and says when the next will have.
    fn close_stale(&self) -> Option<Instant> {
        let mut waiting = self.lock();
        let stale = waiting.idle.iter().take_while(|idle| idle.since.elapsed() >= IDLE).count();
        waiting.idle.drain(..stale);
        let next = waiting.idle.first().map(|oldest| oldest.since + IDLE);
        waiting.watched = next.is_some();
        next
    }

    fn lock(&self) -> MutexGuard<'_, Waiting> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
