//! Moving pages from the log to the file while the writer goes on.
//!
//! Left to itself, SQLite does this inside the commit that fills the log, and everybody waits for
//! thousands of random writes. Here another connection does most of it beside the writer; what it has
//! not reached when the log is full, the commit still does, so the log stays bounded.

use std::sync::{
    Arc,
    atomic::{AtomicUsize, Ordering},
};

use sqlx::{ConnectOptions as _, SqliteConnection, sqlite::SqliteConnectOptions};
use tokio::sync::Mutex;

/// After how many calls: some thousand pages, a quarter of the log at most.
const CALLS: usize = 1000;

pub(crate) struct Checkpoints {
    options: Arc<SqliteConnectOptions>,
    calls: AtomicUsize,
    connection: Arc<Mutex<Option<SqliteConnection>>>,
}

impl Checkpoints {
    pub(super) fn new(options: SqliteConnectOptions) -> Self {
        Self { options: Arc::new(options), calls: AtomicUsize::new(0), connection: Arc::default() }
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
