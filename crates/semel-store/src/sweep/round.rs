//! A transaction of the sweep, on either database.

use semel::{Error, Fence, Result, Timestamp, look::Task};
use serde_json::{Value, json};

use super::Found;
use crate::{
    Conn, Database,
    connection::{broken, read_failed},
    database::Inner,
    look::IN_ORDER,
    on,
    postgres::{self, Seat},
    sqlite::{self, WriteTx},
};

/// How long the sweep waits for a lock on PostgreSQL. It skips locked rows; it may still wait for related rows: their
/// repeats, or a row of a service that follows them. Short, because it waits once for each half.
const LOCK_TIMEOUT: &str = "SET LOCAL lock_timeout = '50ms'";

/// Statements before a commit.
pub(super) enum Round {
    Postgres(Seat),
    Sqlite(WriteTx),
}

impl Round {
    pub(super) fn conn(&mut self) -> Conn<'_> {
        match self {
            Self::Postgres(seat) => Conn::Postgres(seat),
            Self::Sqlite(tx) => Conn::Sqlite(tx.connection()),
        }
    }

    /// Which of these rows can be handled: on PostgreSQL those that no other transaction has locked; locks them.
    /// Differs because SQLite has one writer.
    pub(super) async fn lock(&mut self, ids: &[i64]) -> Result<Vec<i64>> {
        match self {
            Self::Postgres(seat) => postgres::try_lock(seat, ids).await,
            Self::Sqlite(_) => Ok(ids.to_vec()),
        }
    }
}

impl Database {
    /// Runs in its own transaction. On any error it is rolled back and the connection is kept: halving a thousand rows
    /// must not open a connection for each half.
    pub(super) async fn in_round<T>(&self, rows: usize, work: impl AsyncFnOnce(&mut Round) -> Result<T>) -> Result<T> {
        self.lane_answered(async {
            let mut round = self.begin_round().await?;
            match work(&mut round).await {
                Ok(done) => self.commit_round(round, rows).await.map(|()| done),
                Err(error) => {
                    roll_back(round).await;
                    Err(error)
                }
            }
        })
        .await
    }

    async fn begin_round(&self) -> Result<Round> {
        Ok(match self.inner() {
            Inner::Postgres(db) => {
                let mut seat = db.lane_seat().await?;
                sqlx::raw_sql(LOCK_TIMEOUT).execute(&mut *seat).await.map_err(broken)?;
                Round::Postgres(seat)
            }
            Inner::Sqlite(db) => Round::Sqlite(sqlite::Writer::begin(&db.writer).await?),
        })
    }

    async fn commit_round(&self, round: Round, rows: usize) -> Result<()> {
        match round {
            Round::Postgres(mut seat) => {
                postgres::commit(&mut seat).await?;
                seat.leave();
            }
            Round::Sqlite(tx) => {
                tx.commit().await.map_err(broken)?;
                if let Inner::Sqlite(db) = self.inner() {
                    db.checkpoints.count(rows);
                }
            }
        }
        Ok(())
    }

    /// The time and new fences, in a transaction.
    pub(super) async fn draw(&self, round: &mut Round, n: usize) -> Result<(Timestamp, Vec<Fence>)> {
        match (self.inner(), round) {
            (Inner::Postgres(db), Round::Postgres(seat)) => db.draw(seat, n).await,
            (Inner::Sqlite(db), Round::Sqlite(tx)) => db.draw(tx.connection(), n).await,
            _ => Err(Error::Invalid("the transaction belongs to another database".into())),
        }
    }

    /// The rows that a phase should handle, in order.
    pub(super) async fn find(&self, task: Task, now: Timestamp, from: i64, limit: u32) -> Result<Vec<Found>> {
        let text = match task {
            Task::Lapse | Task::Run => self.sweep_sql().find_lapsed,
            Task::Age => self.sweep_sql().find_aged,
            Task::Fold => self.sweep_sql().find_deltas,
        };
        self.find_by(text, now, from, limit).await
    }

    /// The rows that a statement finds, in index order.
    pub(super) async fn find_by(
        &self,
        text: &'static str,
        now: Timestamp,
        from: i64,
        limit: u32,
    ) -> Result<Vec<Found>> {
        let (now, limit) = (now.as_micros(), i64::from(limit));
        self.lane_answered(async {
            match self.inner() {
                Inner::Postgres(db) => {
                    let mut seat = db.lane_take().await?;
                    // By its index, no further than requested: many may be due.
                    sqlx::raw_sql(IN_ORDER).execute(&mut *seat).await.map_err(broken)?;
                    let query = sqlx::query_as(text).bind(now).bind(from).bind(limit);
                    let found = query.fetch_all(&mut *seat).await.map_err(read_failed)?;
                    postgres::commit(&mut seat).await?;
                    seat.leave();
                    Ok(found)
                }
                // Most rounds find nothing; those do not take the writer.
                Inner::Sqlite(db) => {
                    let query = sqlx::query_as(text).bind(now).bind(from).bind(limit);
                    query.fetch_all(&db.readers).await.map_err(read_failed)
                }
            }
        })
        .await
    }

    async fn lane_answered<T>(&self, asked: impl Future<Output = Result<T>>) -> Result<T> {
        match self.inner() {
            Inner::Postgres(db) => db.lane_answered(asked).await,
            Inner::Sqlite(_) => asked.await,
        }
    }

    /// The time.
    pub(super) async fn database_now(&self) -> Result<Timestamp> {
        self.answered(async {
            match self.inner() {
                Inner::Postgres(db) => db.now().await,
                Inner::Sqlite(db) => db.now().await,
            }
        })
        .await
    }
}

async fn roll_back(round: Round) {
    match round {
        Round::Postgres(mut seat) => {
            if sqlx::raw_sql("ROLLBACK").execute(&mut *seat).await.is_ok() {
                seat.leave();
            }
        }
        Round::Sqlite(tx) => tx.roll_back().await,
    }
}

/// Ids as a statement with `{ids}` takes them: PostgreSQL as an array, SQLite as JSON.
pub(super) async fn by_ids<R>(conn: &mut Conn<'_>, text: &'static str, ids: &[i64]) -> Result<Vec<R>>
where
    R: for<'r> sqlx::FromRow<'r, sqlx::postgres::PgRow> + for<'r> sqlx::FromRow<'r, sqlx::sqlite::SqliteRow>,
    R: Send + Unpin,
{
    match conn {
        Conn::Postgres(c) => sqlx::query_as(text).bind(ids).fetch_all(&mut **c).await,
        Conn::Sqlite(c) => {
            let json = Value::Array(ids.iter().map(|id| json!({ "id": id })).collect()).to_string();
            sqlx::query_as(text).bind(json).fetch_all(&mut **c).await
        }
    }
    .map_err(read_failed)
}

/// A statement whose first parameter is a JSON batch, with one more.
pub(super) async fn batch_with<'q, T>(conn: &mut Conn<'_>, text: &'static str, rows: &[Value], more: T) -> Result<u64>
where
    T: sqlx::Type<sqlx::Postgres> + sqlx::Type<sqlx::Sqlite> + 'q,
    T: sqlx::Encode<'q, sqlx::Postgres> + sqlx::Encode<'q, sqlx::Sqlite>,
{
    if rows.is_empty() {
        return Ok(0);
    }
    let json = serde_json::to_string(rows).map_err(|error| Error::Invalid(error.to_string()))?;
    on!(conn, c => sqlx::query(text).bind(json).bind(more).execute(&mut **c).await.map(|done| done.rows_affected()))
        .map_err(broken)
}
