//! The transactions of messaging.

use semel::{Error, Result, Timestamp, store::Commit};

use crate::{
    Conn, Database,
    connection::broken,
    database::Inner,
    postgres::{self, Seat},
    sqlite::{self, WriteTx},
    tx::commit_error,
};

/// Statements before a commit. If it is dropped, they are rolled back.
pub(super) enum Work {
    /// A single statement, which is its own commit.
    Statement(Seat),
    /// Several.
    Postgres(Seat),
    /// On SQLite both are the same, and use the writer.
    Sqlite(WriteTx),
}

impl Database {
    /// For a single statement.
    pub(super) async fn statement(&self) -> Result<Work> {
        Ok(match self.inner() {
            Inner::Postgres(db) => Work::Statement(db.messages.take().await?),
            Inner::Sqlite(db) => Work::Sqlite(sqlite::Writer::begin(&db.writer).await?),
        })
    }

    /// For several statements.
    pub(super) async fn work(&self) -> Result<Work> {
        Ok(match self.inner() {
            Inner::Postgres(db) => {
                let mut seat = db.messages.take().await?;
                postgres::begin(&mut seat).await?;
                Work::Postgres(seat)
            }
            Inner::Sqlite(db) => Work::Sqlite(sqlite::Writer::begin(&db.writer).await?),
        })
    }

    /// For a single statement that needs the time and a new token.
    pub(super) async fn drawn(&self) -> Result<(Work, Timestamp, i64)> {
        Ok(match self.inner() {
            Inner::Postgres(db) => {
                let mut seat = db.messages.take().await?;
                let (now, fences) = db.draw(&mut seat, 1).await?;
                let token = fences.first().ok_or(Error::Contradiction("a sequence that gives no number"))?.0;
                (Work::Statement(seat), now, token)
            }
            Inner::Sqlite(db) => {
                let (tx, token, now) = sqlite::Writer::begin_and_draw(&db.writer, 1, &db.clock).await?;
                (Work::Sqlite(tx), Timestamp::from_micros(now), token)
            }
        })
    }

    /// The value of `{now}`: a manual time, or on SQLite the host's.
    pub(crate) fn clock(&self) -> Option<i64> {
        match self.inner() {
            Inner::Postgres(db) => db.clock.fixed(),
            Inner::Sqlite(db) => Some(db.clock.host()),
        }
    }

    /// Waits for an answer, up to the time limit.
    pub(super) async fn answer<T>(&self, asked: impl Future<Output = Result<T>>) -> Result<T> {
        match self.inner() {
            Inner::Postgres(db) => db.messages.answered(asked).await,
            Inner::Sqlite(_) => asked.await,
        }
    }

    /// Commits; returns the database's answer. `rows` were written.
    pub(super) async fn end(&self, work: Work, rows: usize) -> Commit {
        let done = match work {
            Work::Statement(seat) => {
                seat.leave();
                return Commit::Done;
            }
            Work::Postgres(mut seat) => match sqlx::raw_sql("COMMIT").execute(&mut *seat).await {
                Ok(_) => {
                    seat.leave();
                    return Commit::Done;
                }
                Err(error) => Err(error),
            },
            Work::Sqlite(tx) => tx.commit().await,
        };
        match done {
            Ok(()) => {
                if let Inner::Sqlite(db) = self.inner() {
                    db.checkpoints.count(rows);
                }
                Commit::Done
            }
            Err(error) => commit_error(&error),
        }
    }

    /// Commits a transaction that is harmless to repeat: an unknown result is an error like any other.
    pub(super) async fn finish(&self, work: Work, rows: usize) -> Result<()> {
        match self.end(work, rows).await {
            Commit::Done => Ok(()),
            Commit::Unknown(why) | Commit::Refused(why) | Commit::Unavailable(why) => Err(Error::Unavailable(why)),
        }
    }
}

impl Work {
    pub(super) fn conn(&mut self) -> Conn<'_> {
        match self {
            Self::Statement(seat) | Self::Postgres(seat) => Conn::Postgres(seat),
            Self::Sqlite(tx) => Conn::Sqlite(tx.connection()),
        }
    }

    /// Nothing was written that matters.
    pub(super) async fn forget(self) {
        match self {
            Self::Statement(seat) => seat.leave(),
            Self::Postgres(mut seat) => {
                if sqlx::raw_sql("ROLLBACK").execute(&mut *seat).await.map_err(broken).is_ok() {
                    seat.leave();
                }
            }
            Self::Sqlite(tx) => tx.roll_back().await,
        }
    }
}
