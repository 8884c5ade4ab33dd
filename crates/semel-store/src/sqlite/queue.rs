//! The queue for the one writer, and its errors while another process holds the file.
//!
//! A process outside of Semel may hold the lock of the file for any time: a transaction left open in `sqlite3`, a
//! backup. The transaction whose turn it is retries for [`PATIENCE`], counted from when the file was first found
//! locked. Each later transaction retries only for [`ONCE_MORE`], and those that still wait in the queue by then get
//! the error as well. So the waits of many callers do not add up, and the first one after the other process has let go
//! begins at once.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use semel::Result;
use tokio::{
    sync::{Mutex, OwnedMutexGuard},
    time::timeout,
};

use super::{
    file::{PATIENCE, held},
    writer::Writer,
};

/// How long a transaction retries if the file was locked for longer than [`PATIENCE`]: long enough for processes that
/// share the file by turns.
const ONCE_MORE: Duration = Duration::from_millis(200);

/// The shortest wait in the queue while the file is held: several transactions are ahead, each of which tries once
/// more.
const IN_QUEUE: Duration = Duration::from_millis(500);

/// How often waiting callers check whether the file is held.
const LOOK: Duration = Duration::from_millis(100);

/// If the file was not found locked for this long, it may have been free meanwhile: the count restarts.
const FORGET: Duration = Duration::from_secs(1);

/// The writer and its queue.
pub(crate) struct Queue {
    writer: Arc<Mutex<Writer>>,
    held: parking_lot::Mutex<Option<Held>>,
}

/// Another process holds the file.
#[derive(Clone, Copy)]
struct Held {
    since: Instant,
    seen: Instant,
}

impl Queue {
    pub(super) fn of(writer: Writer) -> Self {
        Self { writer: Arc::new(Mutex::new(writer)), held: parking_lot::Mutex::default() }
    }

    /// Waits for the writer, without a limit while this process writes.
    pub(super) async fn wait(&self) -> Result<OwnedMutexGuard<Writer>> {
        let arrived = Instant::now();
        // Pinned, so that its place in the queue is kept between two checks.
        let mut turn = std::pin::pin!(self.writer.clone().lock_owned());
        loop {
            if let Ok(writer) = timeout(LOOK, &mut turn).await {
                return Ok(writer);
            }
            if self.is_given_up() && arrived.elapsed() >= IN_QUEUE {
                return Err(held());
            }
        }
    }

    /// The writer, regardless of other processes.
    pub(super) async fn lock(&self) -> OwnedMutexGuard<Writer> {
        self.writer.clone().lock_owned().await
    }

    /// A transaction that began to wait at `begun` found the file locked. Whether to retry.
    pub(super) fn found_locked(&self, begun: Instant) -> Result<()> {
        let now = Instant::now();
        let mut state = self.held.lock();
        let since = state.filter(|held| held.seen + FORGET > now).map_or(begun, |held| held.since);
        *state = Some(Held { since, seen: now });
        if now > since + PATIENCE && now > begun + ONCE_MORE { Err(held()) } else { Ok(()) }
    }

    /// A transaction has begun: the file is not held.
    pub(super) fn found_free(&self) {
        *self.held.lock() = None;
    }

    fn is_given_up(&self) -> bool {
        let now = Instant::now();
        self.held.lock().is_some_and(|held| held.seen + FORGET > now && held.since + PATIENCE < now)
    }
}
