//! Moves pages from the log to the file while the writer continues.
//!
//! By default SQLite does this inside the commit that fills the log, and every caller waits for thousands of random
//! writes. Here another connection does most of it beside the writer; the commit does the rest when the log is full.
//!
//! The log restarts only at a moment without readers. Readers that overlap all the time leave no such moment, and the
//! log would grow without limit. So the writer empties a log that is too long, in its turn: once all pages are in the
//! file, new readers do not need the log, and the writer waits for the others to end.

use std::{
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};

use sqlx::{ConnectOptions as _, Connection as _, SqliteConnection, sqlite::SqliteConnectOptions};
use tokio::sync::Mutex;

use super::file;

/// The interval in calls: some thousand pages, a quarter of the log at most.
const CALLS: usize = 1000;

/// The size of a log that is too long, in bytes: twice its normal size.
const LONG: u64 = 64 << 20;

/// How long writers wait for readers of a log that is too long, and how often: a twentieth of the time at most.
const WAIT: Duration = Duration::from_millis(500);
const PAUSE: Duration = Duration::from_secs(10);

pub(crate) struct Checkpoints {
    options: Arc<SqliteConnectOptions>,
    calls: AtomicUsize,
    connection: Arc<Mutex<Option<SqliteConnection>>>,
    /// When a log that was too long could not be emptied.
    failed: parking_lot::Mutex<Option<Instant>>,
}

impl Checkpoints {
    pub(super) fn new(options: SqliteConnectOptions) -> Self {
        let (options, calls) = (Arc::new(options), AtomicUsize::new(0));
        Self { options, calls, connection: Arc::default(), failed: parking_lot::Mutex::default() }
    }

    /// Empties the log if it is too long and its readers end in time. Called by the writer, in its turn.
    pub(super) async fn bound(&self, size: u64, writer: &mut SqliteConnection) {
        let failed = || self.failed.lock();
        if size < LONG || failed().is_some_and(|failed| failed.elapsed() < PAUSE) {
            return;
        }
        let emptied = truncate(writer).await;
        if let Err(error) = &emptied {
            tracing::warn!(%error, "the write-ahead log cannot be emptied");
        }
        let done = emptied.unwrap_or(false);
        if !done {
            tracing::warn!(megabytes = size >> 20, "the write-ahead log grows because of a long-running reader");
        }
        *failed() = (!done).then(Instant::now);
    }

    /// Closes its connection, and stops.
    pub(crate) async fn close(&self) {
        self.calls.store(0, Ordering::Relaxed);
        if let Some(connection) = self.connection.lock().await.take() {
            connection.close().await.ok();
        }
    }

    /// Counts committed calls, and starts a checkpoint when one is due.
    pub(crate) fn count(&self, calls: usize) {
        if self.calls.fetch_add(calls, Ordering::Relaxed) + calls < CALLS {
            return;
        }
        let Ok(mut connection) = self.connection.clone().try_lock_owned() else { return };
        self.calls.store(0, Ordering::Relaxed);
        let options = self.options.clone();
        tokio::spawn(async move {
            if let Err(error) = checkpoint(&mut connection, &options).await {
                // Harmless: the writer makes its own checkpoints.
                tracing::debug!(%error, "a checkpoint beside the writer failed");
                *connection = None;
            }
        });
    }
}

async fn checkpoint(
    connection: &mut Option<SqliteConnection>,
    options: &SqliteConnectOptions,
) -> Result<(), sqlx::Error> {
    let connection = match connection {
        Some(connection) => connection,
        none => none.insert(options.connect().await?),
    };
    // Passive: does not block, and is not blocked.
    sqlx::raw_sql("PRAGMA wal_checkpoint(PASSIVE)").execute(connection).await.map(drop)
}

/// Moves the whole log into the file and empties it; whether it is empty.
pub(super) async fn truncate(writer: &mut SqliteConnection) -> sqlx::Result<bool> {
    file::wait_for_others(writer, WAIT).await?;
    let done = sqlx::query_as("PRAGMA wal_checkpoint(TRUNCATE)").fetch_one(&mut *writer).await;
    file::wait_for_others(writer, Duration::ZERO).await?;
    let (busy, _, _): (i64, i64, i64) = done?;
    Ok(busy == 0)
}
