//! The one writer of a SQLite file in this process.
//!
//! SQLite has one writer at a time. Here that is a connection behind a fair queue: lanes and
//! callers' transactions take it in turn. Other processes of the same host have their own; the
//! file's lock decides between them, and `BEGIN IMMEDIATE` takes it before anything is read, so
//! that no transaction has to be upgraded half-way (which fails without waiting).

use std::sync::{
    Arc,
    atomic::{AtomicBool, Ordering},
};

use semel::{Error, Operation, Outcome, Result, Timestamp, look::bucket};
use serde_json::Value;
use sqlx::{SqliteConnection, migrate::Migrator};
use tokio::sync::{Mutex, OwnedMutexGuard};

use super::hot;
use crate::{codec::encode, connection::broken};

/// SQLite's word for a column that must have a value.
const NOT_NULL: &str = "1299";

pub(crate) struct Writer {
    connection: SqliteConnection,
    /// A transaction was begun and has not ended: its future was dropped.
    open: bool,
}

/// A write transaction. Dropping it rolls back.
pub(crate) struct WriteTx {
    writer: Option<OwnedMutexGuard<Writer>>,
    /// What is to be counted at the commit, in the same hop.
    counts: Vec<Value>,
    /// Set while it is a caller's, who may take his time.
    held: Option<Held>,
}

/// Says that a caller's transaction is open, until dropped.
struct Held(Arc<AtomicBool>);

impl Drop for Held {
    fn drop(&mut self) {
        self.0.store(false, Ordering::Relaxed);
    }
}

impl Writer {
    pub(crate) fn new(connection: SqliteConnection) -> Arc<Mutex<Self>> {
        Arc::new(Mutex::new(Self { connection, open: false }))
    }

    /// Waits for its turn, and begins.
    pub(crate) async fn begin(writer: &Arc<Mutex<Self>>) -> Result<WriteTx> {
        let mut tx = Self::open(writer).await;
        sqlx::raw_sql("BEGIN IMMEDIATE").execute(tx.connection()).await.map_err(broken)?;
        Ok(tx)
    }

    /// Begins, and draws fences at once: the last of `n` new ones, and the time.
    pub(crate) async fn begin_and_draw(
        writer: &Arc<Mutex<Self>>,
        n: i64,
        host_clock: i64,
    ) -> Result<(WriteTx, i64, i64)> {
        let mut tx = Self::open(writer).await;
        let drawn = sqlx::query_as(hot::BEGIN_AND_DRAW).bind(n).bind(host_clock).fetch_all(tx.connection()).await;
        let mut drawn: Vec<(i64, i64)> = drawn.map_err(broken)?;
        let (last, now) = drawn.pop().ok_or(Error::Corrupt("semel_meta has no row"))?;
        Ok((tx, last, now))
    }

    /// Runs a service's own migrations.
    pub(crate) async fn migrate(writer: &Arc<Mutex<Self>>, migrator: &Migrator) -> Result<()> {
        let mut tx = Self::open(writer).await;
        let writer = tx.get();
        super::migrate(&mut writer.connection, migrator).await?;
        writer.open = false;
        Ok(())
    }

    async fn open(writer: &Arc<Mutex<Self>>) -> WriteTx {
        let mut tx = WriteTx { writer: Some(writer.clone().lock_owned().await), counts: Vec::new(), held: None };
        let writer = tx.get();
        if std::mem::replace(&mut writer.open, true) {
            sqlx::raw_sql("ROLLBACK").execute(&mut writer.connection).await.ok();
        }
        tx
    }
}

impl WriteTx {
    pub(crate) fn connection(&mut self) -> &mut SqliteConnection {
        &mut self.get().connection
    }

    /// Lets others know that the writer is a caller's now.
    pub(crate) fn held_by_caller(mut self, held: &Arc<AtomicBool>) -> Self {
        held.store(true, Ordering::Relaxed);
        self.held = Some(Held(held.clone()));
        self
    }

    /// Has these counted when it commits.
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
        self.get().open = false;
        Ok(())
    }

    /// Completes an operation and commits, in one hop; when it was completed. Nothing if that is no plain completion,
    /// or if there is more to count: the transaction goes on then.
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
                self.get().open = false;
                done.first().copied().map(Some).ok_or(sqlx::Error::RowNotFound)
            }
            Err(sqlx::Error::Database(refused)) if refused.code().as_deref() == Some(NOT_NULL) => Ok(None),
            Err(error) => Err(error),
        }
    }

    pub(crate) async fn roll_back(mut self) {
        let writer = self.get();
        if sqlx::raw_sql("ROLLBACK").execute(&mut writer.connection).await.is_ok() {
            writer.open = false;
        }
    }

    #[expect(clippy::expect_used, reason = "it is taken only in drop")]
    fn get(&mut self) -> &mut Writer {
        self.writer.as_mut().expect("a transaction has the writer")
    }
}

impl Drop for WriteTx {
    fn drop(&mut self) {
        // While it still has the writer: the next caller may say so right after.
        self.held = None;
        let Some(mut writer) = self.writer.take() else { return };
        if !writer.open {
            return;
        }
        // Other processes wait for the file's lock, so the rollback should not wait for the next
        // transaction here. Without a runtime it has to: `begin` makes up for it.
        if let Ok(runtime) = tokio::runtime::Handle::try_current() {
            runtime.spawn(async move {
                if sqlx::raw_sql("ROLLBACK").execute(&mut writer.connection).await.is_ok() {
                    writer.open = false;
                }
            });
        }
    }
}
