//! The queue for the one writer, and what those in it are told while another process holds the file.
//!
//! A process outside of Semel may keep the lock of the file for as long as it likes: a transaction that was left open in
//! `sqlite3`, a backup. The transaction whose turn it is asks for the file again and again, for [`PATIENCE`] counted from
//! when the file was first found locked. Each transaction after it asks only for [`ONCE_MORE`], and those that still wait
//! in the queue by then are told as well. So the waits of many callers do not add up, and the first one after the other
//! process has let go begins at once.

use std::{
    sync::{Arc, Mutex as StdMutex, PoisonError},
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

/// How long a transaction asks for a file that was locked for longer than the patience of those before it: long enough for
/// the processes that share the file by turns.
const ONCE_MORE: Duration = Duration::from_millis(200);

/// How long one waits in the queue at least, while the file is held: several transactions are before it, each of which asks
/// once more.
const IN_QUEUE: Duration = Duration::from_millis(500);

/// How often those in the queue look whether the file is held.
const LOOK: Duration = Duration::from_millis(100);

/// If the file was not found locked for so long, it may have been free meanwhile: the patience begins anew.
const FORGET: Duration = Duration::from_secs(1);

/// The writer, and those who wait for it.
pub(crate) struct Queue {
    writer: Arc<Mutex<Writer>>,
    held: StdMutex<Option<Held>>,
}

/// Another process has the file.
#[derive(Clone, Copy)]
struct Held {
    since: Instant,
    seen: Instant,
}

impl Queue {
    pub(super) fn of(writer: Writer) -> Self {
        Self { writer: Arc::new(Mutex::new(writer)), held: StdMutex::default() }
    }

    /// Waits for the writer, without limit while this process writes.
    pub(super) async fn wait(&self) -> Result<OwnedMutexGuard<Writer>> {
        let arrived = Instant::now();
        // Pinned, so that its place in the queue is kept from one look to the next.
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

    /// The writer, whatever other processes do.
    pub(super) async fn lock(&self) -> OwnedMutexGuard<Writer> {
        self.writer.clone().lock_owned().await
    }

    /// The file was found locked by one who asks since `begun`. Whether to ask again.
    pub(super) fn found_locked(&self, begun: Instant) -> Result<()> {
        let now = Instant::now();
        let mut state = self.state();
        let since = state.filter(|held| held.seen + FORGET > now).map_or(begun, |held| held.since);
        *state = Some(Held { since, seen: now });
        if now > since + PATIENCE && now > begun + ONCE_MORE { Err(held()) } else { Ok(()) }
    }

    /// A transaction has begun: the file is not held.
    pub(super) fn found_free(&self) {
        *self.state() = None;
    }

    fn is_given_up(&self) -> bool {
        let now = Instant::now();
        self.state().is_some_and(|held| held.seen + FORGET > now && held.since + PATIENCE < now)
    }

    fn state(&self) -> std::sync::MutexGuard<'_, Option<Held>> {
        self.held.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
