//! Connections to the upstream that wait for their next request.

use std::{
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use axum::body::Body;
use hyper::client::conn::http1::SendRequest;

/// How long a connection may wait. A request that meets the upstream's own closing of an idle connection may or may not
/// have arrived, so it would be in doubt for nothing: this stays below the shortest time after which a common server
/// closes (2 s).
const IDLE: Duration = Duration::from_secs(1);
/// How many may wait. More than one gateway has requests in flight at a time is not worth the sockets.
const MOST: usize = 512;

/// Idle connections, the one that was used last on top. Clones share it.
#[derive(Clone, Default)]
pub(super) struct Pool(Arc<Mutex<Vec<Idle>>>);

struct Idle {
    connection: SendRequest<Body>,
    since: Instant,
}

impl Pool {
    /// A connection that was open a moment ago, if there is one.
    pub(super) fn take(&self) -> Option<SendRequest<Body>> {
        let mut idle = self.lock();
        while let Some(Idle { connection, since }) = idle.pop() {
            if since.elapsed() >= IDLE {
                // Those below have waited longer.
                idle.clear();
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
        let mut idle = self.lock();
        let stale = idle.iter().take_while(|idle| idle.since.elapsed() >= IDLE).count();
        idle.drain(..stale);
        if idle.len() < MOST {
            idle.push(Idle { connection, since: Instant::now() });
        }
    }

    fn lock(&self) -> MutexGuard<'_, Vec<Idle>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
