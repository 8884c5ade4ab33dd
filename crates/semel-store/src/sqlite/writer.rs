//! The one writer of a SQLite file in this process.
//!
//! SQLite has one writer at a time. Here that is a connection behind a fair queue: lanes and callers' transactions take
//! turns. Other processes of the host have their own; the file's lock decides between them (see `turns`), and `BEGIN
//! IMMEDIATE` takes it before anything is read, so that no transaction has to be upgraded half-way (which fails without
//! waiting).

use std::{
    path::Path,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use semel::{Error, Operation, Outcome, Result, Timestamp, look::bucket};
use serde_json::Value;
use sqlx::{Connection as _, SqliteConnection, migrate::Migrator};
use tokio::{sync::OwnedMutexGuard, time::sleep};

use super::{
    checkpoint::{self, Checkpoints},
    file::{self, is_locked},
    held::HeldClock,
    hot,
    queue::Queue,
    turns::{GLANCE, Next, Turns},
    watch::Watch,
};
use crate::{
    codec::encode,
    connection::{FILE_LOST, broken},
};

/// SQLite's error for a missing NOT NULL value.
const NOT_NULL: &str = "1299";

pub(crate) struct Writer {
    /// `None` after it was closed.
    connection: Option<SqliteConnection>,
    /// A transaction was begun and has not ended: its future was dropped.
    open: bool,
    turns: Turns,
    watch: Watch,
    /// Whether the loss of a file was logged.
    loss_logged: bool,
    checkpoints: Arc<Checkpoints>,
}

/// A write transaction. Dropping it rolls back.
pub(crate) struct WriteTx {
    writer: Option<OwnedMutexGuard<Writer>>,
    /// The counts to write at the commit, in the same hop.
    counts: Vec<Value>,
    /// Set while it belongs to a caller, who may take long.
    held: Option<Held>,
}

/// Marks a caller's transaction as open, until dropped.
struct Held(Arc<AtomicBool>);

impl Drop for Held {
    fn drop(&mut self) {
        self.0.store(false, Ordering::Relaxed);
    }
}

impl Writer {
    /// The writer of a database that has been written to.
    pub(crate) fn new(connection: SqliteConnection, path: &Path, checkpoints: Arc<Checkpoints>) -> Self {
        Self {
            connection: Some(connection),
            open: false,
            turns: Turns::beside(path),
            watch: Watch::over(path),
            loss_logged: false,
            checkpoints,
        }
    }

    /// Waits for its turn, and begins.
    pub(crate) async fn begin(queue: &Queue) -> Result<WriteTx> {
        let mut tx = Self::open(queue).await?;
        let next = tx.get().next().await;
        let begun = Instant::now();
        while let Err(error) = sqlx::raw_sql("BEGIN IMMEDIATE").execute(tx.connection()).await {
            look_again(error, queue, begun).await?;
        }
        queue.found_free();
        drop(next);
        Ok(tx)
    }

    /// Begins, and draws fences at once: the last of `n` new ones, and the time.
    pub(crate) async fn begin_and_draw(queue: &Queue, n: i64, clock: &HeldClock) -> Result<(WriteTx, i64, i64)> {
        let mut tx = Self::open(queue).await?;
        let next = tx.get().next().await;
        let begun = Instant::now();
        let mut drawn: Vec<(i64, i64)> = loop {
            let draw = sqlx::query_as(hot::BEGIN_AND_DRAW).bind(n).bind(clock.host());
            match draw.fetch_all(tx.connection()).await {
                Ok(drawn) => break drawn,
                Err(error) => look_again(error, queue, begun).await?,
            }
        };
        queue.found_free();
        drop(next);
        let (last, now) = drawn.pop().ok_or(Error::Contradiction("semel_meta has no row"))?;
        clock.saw(now);
        Ok((tx, last, now))
    }

    /// Runs a service's own migrations.
    pub(crate) async fn migrate(queue: &Queue, migrator: &Migrator) -> Result<()> {
        let mut tx = Self::open(queue).await?;
        // The migrations begin their own transaction, so here SQLite waits for other processes.
        file::wait_for_others(tx.connection(), file::PATIENCE).await.map_err(broken)?;
        let done = super::migrate(tx.connection(), migrator).await;
        file::wait_for_others(tx.connection(), Duration::ZERO).await.map_err(broken)?;
        done?;
        tx.get().open = false;
        Ok(())
    }

    /// Moves the whole log into the file, and closes the connection. The last process to do so also removes the log.
    pub(crate) async fn close(queue: &Queue) -> Result<(), sqlx::Error> {
        let mut writer = queue.lock().await;
        let unended = std::mem::take(&mut writer.open);
        let Some(connection) = &mut writer.connection else { return Ok(()) };
        if unended {
            sqlx::raw_sql("ROLLBACK").execute(connection).await.ok();
        }
        // A loss since the last write was not noticed yet.
        if let Some(lost) = writer.watch.lost().map(Path::to_owned) {
            writer.rescue(&lost).await;
        }
        let Some(mut connection) = writer.connection.take() else { return Ok(()) };
        if writer.watch.is_emptied() {
            // Closing would move the log into a file that lacks all the rest, and remove the log. So it stays open: the
            // process ends soon.
            std::mem::forget(connection);
            return Ok(());
        }
        // Another process may be reading from the log; it moves the rest when it ends.
        checkpoint::truncate(&mut connection).await.ok();
        connection.close().await
    }

    async fn open(queue: &Queue) -> Result<WriteTx> {
        let mut tx = WriteTx { writer: Some(queue.wait().await?), counts: Vec::new(), held: None };
        let writer = tx.get();
        let Some(connection) = &mut writer.connection else {
            return Err(Error::Stopping);
        };
        if std::mem::replace(&mut writer.open, true) {
            sqlx::raw_sql("ROLLBACK").execute(connection).await.ok();
        }
        if let Some(lost) = writer.watch.lost().map(Path::to_owned) {
            writer.rescue(&lost).await;
            return Err(Error::Unavailable(format!(
                "{FILE_LOST}: {} was deleted, emptied or replaced while this process had it open; {}",
                lost.display(),
                writer.then(&lost),
            )));
        }
        Ok(tx)
    }

    /// Waits until other processes have had their turn. No one else here writes meanwhile, so this is also the moment
    /// to empty a log that is too long.
    async fn next(&mut self) -> Option<Next> {
        let next = self.turns.next().await;
        if let Some(connection) = &mut self.connection {
            self.checkpoints.bound(self.watch.log_size(), connection).await;
        }
        next
    }

    /// Committed data is in the deleted log. While this process has it open, it can still be moved into the database.
    /// If the database itself was deleted, a mark keeps the next start from creating a new one.
    async fn rescue(&mut self, lost: &Path) {
        if std::mem::replace(&mut self.loss_logged, true) {
            return;
        }
        tracing::error!(
            file = %lost.display(),
            "a file of the database was deleted, emptied or replaced under this process, which writes nothing from now on; {}",
            self.then(lost)
        );
        if lost == self.watch.database() {
            file::mark_lost(lost);
        }
        // The log alone does not make a database of a truncated file.
        if let Some(connection) = self.connection.as_mut().filter(|_| !self.watch.is_emptied()) {
            sqlx::raw_sql("PRAGMA wal_checkpoint(PASSIVE)").execute(connection).await.ok();
        }
    }

    /// The remedy for a lost file.
    fn then(&self, lost: &Path) -> &'static str {
        if lost == self.watch.database() {
            "put the file back, then restart it: without the file a restart would begin an empty ledger, and is refused"
        } else {
            "restart it"
        }
    }
}

/// Waits a moment if another process writes, unless that has lasted for too long.
async fn look_again(error: sqlx::Error, queue: &Queue, begun: Instant) -> Result<()> {
    if !is_locked(&error) {
        return Err(broken(error));
    }
    queue.found_locked(begun)?;
    sleep(GLANCE).await;
    Ok(())
}

impl WriteTx {
    #[expect(clippy::expect_used, reason = "it is closed only while there is no transaction")]
    pub(crate) fn connection(&mut self) -> &mut SqliteConnection {
        self.get().connection.as_mut().expect("an open writer has a connection")
    }

    /// Marks the writer as a caller's.
    pub(crate) fn held_by_caller(mut self, held: &Arc<AtomicBool>) -> Self {
        held.store(true, Ordering::Relaxed);
        self.held = Some(Held(held.clone()));
        self
    }

    /// Counts these at the commit.
    pub(crate) fn count(&mut self, deltas: Vec<Value>) {
        self.counts.extend(deltas);
    }

    pub(crate) async fn commit(mut self) -> Result<(), sqlx::Error> {
        let counts = std::mem::take(&mut self.counts);
        let connection = self.connection();
        if counts.is_empty() {
            sqlx::raw_sql("COMMIT").execute(connection).await?;
        } else {
            sqlx::query(hot::COUNT_AND_COMMIT).bind(Value::Array(counts).to_string()).execute(connection).await?;
        }
        self.committed();
        Ok(())
    }

    fn committed(&mut self) {
        let writer = self.get();
        writer.open = false;
        writer.checkpoints.count(1);
    }

    /// Completes an operation and commits, in one hop; returns the time of the completion. `None` if it is not a plain
    /// completion, or if there is more to count: the transaction continues then.
    pub(crate) async fn complete_and_commit(
        &mut self,
        held: &Operation,
        outcome: &Outcome,
        host_clock: i64,
    ) -> Result<Option<i64>, sqlx::Error> {
        if !self.counts.is_empty() {
            return Ok(None);
        }
        let took = Timestamp::from_micros(host_clock).since(held.claimed_at);
        let label = |slot: usize| held.labels.0[slot].as_deref().unwrap_or_default();
        let done = sqlx::query_scalar(hot::COMPLETE_AND_COMMIT)
            .bind(held.id)
            .bind(held.fence.0)
            .bind(encode(&outcome.body))
            .bind(outcome.kept)
            .bind(host_clock)
            .bind(held.scope.service())
            .bind(held.scope.kind())
            .bind(label(0))
            .bind(label(1))
            .bind(bucket(took))
            .fetch_all(self.connection())
            .await;
        match done {
            Ok(done) => {
                self.committed();
                done.first().copied().map(Some).ok_or(sqlx::Error::RowNotFound)
            }
            Err(sqlx::Error::Database(refused)) if refused.code().as_deref() == Some(NOT_NULL) => Ok(None),
            Err(error) => Err(error),
        }
    }

    pub(crate) async fn roll_back(mut self) {
        if sqlx::raw_sql("ROLLBACK").execute(self.connection()).await.is_ok() {
            self.get().open = false;
        }
    }

    #[expect(clippy::expect_used, reason = "it is taken only in drop")]
    fn get(&mut self) -> &mut Writer {
        self.writer.as_mut().expect("a transaction has the writer")
    }
}

impl Drop for WriteTx {
    fn drop(&mut self) {
        // While it still has the writer: the next caller may set it right after.
        self.held = None;
        let Some(mut writer) = self.writer.take() else { return };
        if !writer.open {
            return;
        }
        // Other processes wait for the file's lock, so the rollback should not wait for the next transaction here.
        // Without a runtime it has to: `begin` rolls back then.
        if let Ok(runtime) = tokio::runtime::Handle::try_current() {
            runtime.spawn(async move {
                let Some(connection) = &mut writer.connection else { return };
                if sqlx::raw_sql("ROLLBACK").execute(connection).await.is_ok() {
                    writer.open = false;
                }
            });
        }
    }
}
