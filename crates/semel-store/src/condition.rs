//! The condition of a database: whether it is writable, and how far its clock is ahead.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use semel::{Error, Result, Timestamp};
use tokio::{sync::Mutex, time::timeout};

use crate::{Clock, Database, connection::broken, database::Inner, on, postgres, sqlite};

/// The interval of test writes.
const EVERY: Duration = Duration::from_secs(1);

/// How long a caller waits for a test write. It queues behind other writes, on SQLite behind a transaction of up to
/// five seconds, which says nothing about the database.
const PATIENCE: Duration = Duration::from_secs(1);

/// How long an earlier successful write counts while another one is in flight: longer than it can wait for its turn, or
/// for another process.
const LONGEST: Duration = Duration::from_secs(12);

/// The last result.
#[derive(Default)]
pub(crate) struct Condition {
    written: parking_lot::Mutex<Option<(Instant, Result<()>)>>,
    writing: Arc<Mutex<()>>,
}

impl Condition {
    fn last(&self) -> Option<(Duration, Result<()>)> {
        let written = self.written.lock();
        written.as_ref().map(|(at, result)| (at.elapsed(), result.clone()))
    }
}

impl Database {
    /// Whether it is writable: tested by a small write, at most once a second. Callers in between get the last result.
    ///
    /// # Errors
    /// Why it is not writable; see [`Error::reason`].
    pub async fn check_writes(&self) -> Result<()> {
        let condition = self.condition();
        if let Some((age, result)) = condition.last()
            && age < EVERY
        {
            return result;
        }
        let done = match condition.writing.clone().try_lock_owned() {
            Ok(writing) => {
                // In its own task, which continues if this caller stops waiting.
                let database = self.clone();
                let write = tokio::spawn(async move {
                    let result = database.answered(database.write_something()).await;
                    let mut written = database.condition().written.lock();
                    *written = Some((Instant::now(), result));
                    drop(writing);
                });
                timeout(PATIENCE, write).await.is_ok()
            }
            Err(_) => timeout(PATIENCE, condition.writing.lock()).await.is_ok(),
        };
        match condition.last() {
            Some((_, result)) if done => result,
            Some((age, Ok(()))) if age < LONGEST => Ok(()),
            Some((_, Err(error))) => Err(error),
            _ => Err(Error::Unavailable(format!("no write was made within {} s", PATIENCE.as_secs()))),
        }
    }

    async fn write_something(&self) -> Result<()> {
        match self.inner() {
            Inner::Postgres(db) => db.probe().await,
            Inner::Sqlite(db) => db.probe().await,
        }
    }

    /// How far the time in a SQLite file is ahead of its host's clock, if it is far ahead: the clock was ahead once and
    /// has been set back. PostgreSQL has its own clock.
    #[must_use]
    pub fn clock_is_ahead(&self) -> Option<Duration> {
        match self.inner() {
            Inner::Postgres(_) => None,
            Inner::Sqlite(db) => db.clock.ahead(),
        }
    }

    /// The number of dead letters of all tenants; counted up to `most`.
    ///
    /// # Errors
    /// The database cannot be reached.
    pub async fn dead_letters(&self, most: u32) -> Result<u32> {
        self.answered(async {
            let sql = "SELECT count(*) FROM (SELECT id FROM semel_dead_letters LIMIT $1) AS letters";
            let mut reader = self.reader().await?;
            let n: i64 = on!(reader.conn(), c =>
                sqlx::query_scalar(sql).bind(i64::from(most)).fetch_one(&mut *c).await.map_err(broken)?);
            reader.leave();
            Ok(u32::try_from(n).unwrap_or(most))
        })
        .await
    }

    /// Closes its connections. The log of a SQLite file is written into the file, which is then complete unless another
    /// process has it open. No call may follow.
    pub async fn close(&self) {
        match self.inner() {
            // The server notices by itself.
            Inner::Postgres(_) => {}
            Inner::Sqlite(db) => db.close().await,
        }
    }
}

/// The result of setting a clock back.
///
/// Due operations are due now. Delays keep their remaining time. Retention ends at the same moment by the correct
/// clock: up to `by` later. Past times in the history of an operation do not change.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Repaired {
    /// The time in the file before.
    pub before: Timestamp,
    /// The time now.
    pub after: Timestamp,
    /// How far it was set back; zero if it was not far ahead.
    pub by: Duration,
}

/// Sets the time in a SQLite file back to its host's clock. No other process may have the file open; see [`Repaired`]
/// for the times in it.
///
/// # Errors
/// The URL is not that of a file, another process has it open, or it has live leases.
pub async fn repair_clock(url: &str, clock: Clock, (actor, reason): (&str, &str)) -> Result<Repaired> {
    sqlite::repair_clock(url, clock, (actor, reason)).await
}

impl postgres::Postgres {
    /// Makes a test write.
    async fn probe(&self) -> Result<()> {
        let sql =
            "INSERT INTO semel_probes (slot, at) VALUES ($1, (extract(epoch FROM clock_timestamp()) * 1000000)::bigint)
                   ON CONFLICT (slot) DO UPDATE SET at = EXCLUDED.at";
        let slot = i32::try_from(std::process::id() % 64).unwrap_or(0);
        let mut seat = self.lane_seat().await?;
        sqlx::query(sql).bind(slot).execute(&mut *seat).await.map_err(broken)?;
        postgres::commit(&mut seat).await?;
        seat.leave();
        Ok(())
    }
}
