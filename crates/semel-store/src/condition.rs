//! How a database is: whether it can be written, and how far its clock is ahead.

use std::{
    sync::{Arc, PoisonError},
    time::{Duration, Instant},
};

use semel::{Error, Result, Timestamp};
use tokio::{sync::Mutex, time::timeout};

use crate::{Clock, Database, connection::broken, database::Inner, on, postgres, sqlite};

/// How often something is written only to find out whether that is possible.
const EVERY: Duration = Duration::from_secs(1);

/// How long one who asks waits for such a write. It waits its turn behind others, on SQLite behind a transaction of up
/// to five seconds, which says nothing about the database.
const PATIENCE: Duration = Duration::from_secs(1);

/// For how long an earlier write that succeeded counts while another one is on its way: longer than it can wait for its
/// turn, or for another process.
const LONGEST: Duration = Duration::from_secs(12);

/// What was last found out.
#[derive(Default)]
pub(crate) struct Condition {
    written: std::sync::Mutex<Option<(Instant, Result<()>)>>,
    writing: Arc<Mutex<()>>,
}

impl Condition {
    fn last(&self) -> Option<(Duration, Result<()>)> {
        let written = self.written.lock().unwrap_or_else(PoisonError::into_inner);
        written.as_ref().map(|(at, result)| (at.elapsed(), result.clone()))
    }
}

impl Database {
    /// Whether it can be written: found out by a small write, at most once a second. Those who ask meanwhile are told
    /// what the last one has shown.
    ///
    /// # Errors
    /// Why it cannot be written; see [`Error::reason`].
    pub async fn check_writes(&self) -> Result<()> {
        let condition = self.condition();
        if let Some((age, result)) = condition.last()
            && age < EVERY
        {
            return result;
        }
        let done = match condition.writing.clone().try_lock_owned() {
            Ok(writing) => {
                // In a task of its own, which goes on when this caller no longer waits.
                let database = self.clone();
                let write = tokio::spawn(async move {
                    let result = database.answered(database.write_something()).await;
                    let mut written = database.condition().written.lock().unwrap_or_else(PoisonError::into_inner);
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

    /// By how much the time in a SQLite file is ahead of its host's clock, if it is far ahead: the clock was ahead once
    /// and has been set back. PostgreSQL has a clock of its own.
    #[must_use]
    pub fn clock_is_ahead(&self) -> Option<Duration> {
        match self.inner() {
            Inner::Postgres(_) => None,
            Inner::Sqlite(db) => db.clock.ahead(),
        }
    }

    /// How many dead letters wait for a person, all tenants together; counted up to `most`.
    ///
    /// # Errors
    /// When the database cannot be reached.
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

    /// Ends its connections. Of a SQLite file, what is in the log goes into the file itself, which then is all there is
    /// unless another process has it open. Nothing can be asked after that.
    pub async fn close(&self) {
        match self.inner() {
            // The server notices by itself.
            Inner::Postgres(_) => {}
            Inner::Sqlite(db) => db.close().await,
        }
    }
}

/// How a clock was set back.
///
/// What was due is due now. What waits for a delay waits for the rest of that. What was to be kept until some moment is
/// kept until then, by the right clock: up to `by` longer. Times in the past of an operation's story stay as they were.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Repaired {
    /// The time in the file before.
    pub before: Timestamp,
    /// The time now.
    pub after: Timestamp,
    /// How far it was set back; nothing where it was not far ahead.
    pub by: Duration,
}

/// Sets the time in a SQLite file back to its host's clock. Nobody else may have the file open; see [`Repaired`] for
/// what becomes of the times in it. `columns` are further tables and columns with a time at which something is due.
///
/// # Errors
/// When the URL is not a file's, another process has it open, or something in it is leased.
pub async fn repair_clock(
    url: &str,
    clock: Clock,
    (actor, reason): (&str, &str),
    columns: &[(&'static str, &'static str)],
) -> Result<Repaired> {
    sqlite::repair_clock(url, clock, (actor, reason), columns).await
}

impl postgres::Postgres {
    /// Writes something, to find out whether that is possible.
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
