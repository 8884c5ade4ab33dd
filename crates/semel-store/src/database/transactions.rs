//! Callers' transactions, and the time.

use std::time::Duration;

use semel::{
    Result, Timestamp,
    store::{Commit, TimeSource, Transactions},
};

use super::Inner;
use crate::{Database, Tx, sqlite, tx::begin_on};

impl TimeSource for Database {
    async fn now(&self) -> Result<Timestamp> {
        self.answered(async {
            match self.inner() {
                Inner::Postgres(db) => db.now().await,
                Inner::Sqlite(db) => db.now().await,
            }
        })
        .await
    }
}

impl Transactions for Database {
    type Tx = Tx;

    fn longest_transaction(&self) -> Duration {
        match self.inner() {
            // Beyond this the server ends it, see `Seats`.
            Inner::Postgres(_) => Duration::from_secs(30),
            // It holds the only writer of the file.
            Inner::Sqlite(_) => Duration::from_secs(5),
        }
    }

    async fn begin(&self, limit: Duration) -> Result<Tx> {
        match self.inner() {
            Inner::Postgres(db) => begin_on(&db.callers, limit).await,
            Inner::Sqlite(db) => {
                let tx = sqlite::Writer::begin(&db.writer).await?;
                Ok(Tx::sqlite(tx.held_by_caller(&db.held), limit))
            }
        }
    }

    async fn commit(&self, tx: &Tx) -> Commit {
        tx.commit().await
    }

    async fn roll_back(&self, tx: &Tx) {
        tx.roll_back().await;
    }
}
