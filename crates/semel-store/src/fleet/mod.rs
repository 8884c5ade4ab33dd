//! The data that nodes share besides operations: the marks of schedules, signs of life, and counts of work.

mod nodes;
mod schedules;
pub(crate) mod sql;
mod work;

use semel::{
    Result, Schedule, Timestamp,
    fleet::{Fleet, Mark, Sign},
};

pub use self::work::{KindOfWork, Paused};
use crate::{Conn, Database, Tx, connection::broken, database::Inner, postgres, sqlite};

impl Fleet for Database {
    async fn marks(&self, schedules: &[Schedule]) -> Result<(Vec<Mark>, Timestamp)> {
        self.answered(self.load_marks(schedules)).await
    }

    async fn move_mark(&self, tx: &Tx, from: Option<&Mark>, to: &Mark) -> Result<bool> {
        self.answered(self.move_mark_in(tx, from, to)).await
    }

    async fn leave_sign(&self, owner: &str, sign: &Sign, since: Option<Timestamp>) -> Result<Timestamp> {
        self.put_sign(owner, sign, since).await
    }

    async fn remove_sign(&self, owner: &str, since: Timestamp) -> Result<()> {
        self.delete_sign(owner, since).await
    }
}

impl Database {
    /// Runs one or two statements in a short transaction of the ledger's own.
    pub(crate) async fn in_short<T>(&self, work: impl AsyncFnOnce(&mut Conn<'_>) -> Result<T>) -> Result<T> {
        match self.inner() {
            Inner::Postgres(db) => {
                db.lane_answered(async {
                    let mut seat = db.lane_seat().await?;
                    let done = work(&mut Conn::Postgres(&mut seat)).await?;
                    postgres::commit(&mut seat).await?;
                    seat.leave();
                    Ok(done)
                })
                .await
            }
            Inner::Sqlite(db) => {
                let mut tx = sqlite::Writer::begin(&db.writer).await?;
                let done = work(&mut Conn::Sqlite(tx.connection())).await?;
                tx.commit().await.map_err(broken)?;
                Ok(done)
            }
        }
    }
}
