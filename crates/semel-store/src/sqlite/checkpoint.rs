//! Moving pages from the log to the file while the writer goes on.
//!
//! Left to itself, SQLite does this inside the commit that fills the log, and everybody waits for
//! thousands of random writes. Here another connection does most of it beside the writer; what it has
//! not reached when the log is full, the commit still does.
//!
//! The log begins anew only at a moment when nobody reads from it. Readers that overlap without end leave no such
//! moment, and it would grow for ever. So a log that is too long is emptied by the writer, in its turn: once all pages
//! are in the file, new readers do not need the log, and the writer waits for the others to end.

use std::{
    sync::{
        Arc, PoisonError,
        atomic::{AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};

use sqlx::{ConnectOptions as _, Connection as _, SqliteConnection, sqlite::SqliteConnectOptions};
use tokio::sync::Mutex;

use super::file;

/// After how many calls: some thousand pages, a quarter of the log at most.
const CALLS: usize = 1000;

/// The size of a log that is too long, in bytes: twice what it has when all is well.
const LONG: u64 = 64 << 20;

/// How long writers wait for readers of a log that is too long, and how often: a twentieth of the time at most.
const WAIT: Duration = Duration::from_millis(500);
const PAUSE: Duration = Duration::from_secs(10);

pub(crate) struct Checkpoints {
    options: Arc<SqliteConnectOptions>,
    calls: AtomicUsize,
    connection: Arc<Mutex<Option<SqliteConnection>>>,
    /// When a log that was too long could not be emptied.
    failed: std::sync::Mutex<Option<Instant>>,
}

impl Checkpoints {
    pub(super) fn new(options: SqliteConnectOptions) -> Self {
        let (options, calls) = (Arc::new(options), AtomicUsize::new(0));
        Self { options, calls, connection: Arc::default(), failed: std::sync::Mutex::default() }
    }

    /// Empties the log if it is too long for its size, and its readers end in time. For the writer, in its turn.
    pub(super) async fn bound(&self, size: u64, writer: &mut SqliteConnection) {
        let failed = || self.failed.lock().unwrap_or_else(PoisonError::into_inner);
        if size < LONG || failed().is_some_and(|failed| failed.elapsed() < PAUSE) {
            return;
        }
        let emptied = truncate(writer).await;
        if let Err(error) = &emptied {
            tracing::warn!(%error, "the write-ahead log cannot be emptied");
        }
        let done = emptied.unwrap_or(false);
        if !done {
            tracing::warn!(megabytes = size >> 20, "the write-ahead log grows: a reader has been at it for long");
        }
        *failed() = (!done).then(Instant::now);
    }

    /// Closes the connection of its own, and does no more.
    pub(crate) async fn close(&self) {
        self.calls.store(0, Ordering::Relaxed);
        if let Some(connection) = self.connection.lock().await.take() {
            connection.close().await.ok();
        }
    }

    /// Counts calls that were committed, and begins a checkpoint when it is time for one.
    pub(crate) fn count(&self, calls: usize) {
        if self.calls.fetch_add(calls, Ordering::Relaxed) + calls < CALLS {
            return;
        }
        let Ok(mut connection) = self.connection.clone().try_lock_owned() else { return };
        self.calls.store(0, Ordering::Relaxed);
        let options = self.options.clone();
        tokio::spawn(async move {
            if let Err(error) = checkpoint(&mut connection, &options).await {
                // Nothing is lost by it: the writer does its own.
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
    // Passive: waits for nobody, and nobody for it.
    sqlx::raw_sql("PRAGMA wal_checkpoint(PASSIVE)").execute(connection).await.map(drop)
}

/// Brings all of the log into the file and empties it; whether it is empty.
pub(super) async fn truncate(writer: &mut SqliteConnection) -> sqlx::Result<bool> {
    file::wait_for_others(writer, WAIT).await?;
    let done = sqlx::query_as("PRAGMA wal_checkpoint(TRUNCATE)").fetch_one(&mut *writer).await;
    file::wait_for_others(writer, Duration::ZERO).await?;
    let (busy, _, _): (i64, i64, i64) = done?;
    Ok(busy == 0)
}
