//! Changing operations: claims, writes under leases, decisions, and statements in callers' transactions.

use std::{sync::Arc, time::Duration};

use semel::{
    Error, Fence, Operation, Outcome, Result, Token, crash_point,
    machine::{Answer, Request, Write},
    prelude::*,
    store::{
        AnswerCount, Applied, Decision, DueWake, Ended, LeaseWrite, Operations, SeenAgain, Take, complete_then_commit,
        two_commits,
    },
};
use serde_json::json;

use super::Inner;
use crate::{
    Conn, Database, Tx,
    connection::{broken, is_worth_asking_again, read_failed},
    on, postgres, repeats, sqlite,
    tx::Last,
    wakes::enqueued,
};

/// The largest outcome, in bytes, that is sent in one round trip with its commit: PostgreSQL gets it as text.
const LITERAL: usize = 16 << 10;

impl Operations for Database {
    async fn claim(&self, batch: Vec<Arc<Request>>) -> Result<Vec<Applied>> {
        let answers = match self.inner() {
            Inner::Postgres(db) => db.claim(&batch).await?,
            Inner::Sqlite(db) => db.flush(&batch, &[]).await?.0,
        };
        self.wake_for_enqueued(&batch);
        Ok(answers)
    }

    async fn write(&self, batch: Vec<LeaseWrite>) -> Result<Vec<Applied>> {
        let answers = match self.inner() {
            Inner::Postgres(db) => db.write(&batch).await?,
            Inner::Sqlite(db) => db.flush(&[], &batch).await?.1,
        };
        self.wake_for_released(&batch);
        Ok(answers)
    }

    fn one_writer(&self) -> bool {
        matches!(self.inner(), Inner::Sqlite(_))
    }

    async fn flush(&self, claims: Vec<Arc<Request>>, writes: Vec<LeaseWrite>) -> Result<(Vec<Applied>, Vec<Applied>)> {
        match self.inner() {
            Inner::Postgres(_) => Err(two_commits()),
            Inner::Sqlite(db) => {
                let answers = db.flush(&claims, &writes).await?;
                self.wake_for_enqueued(&claims);
                self.wake_for_released(&writes);
                Ok(answers)
            }
        }
    }

    fn is_worth_asking_again(&self, error: &Error) -> bool {
        is_worth_asking_again(error)
    }

    async fn glimpse(&self, request: &Arc<Request>) -> Result<Option<Applied>> {
        match self.inner() {
            // On PostgreSQL a claim waits only for claims of the same key.
            Inner::Postgres(_) => Ok(None),
            Inner::Sqlite(db) => db.glimpse(request).await,
        }
    }

    async fn held_by(&self, tokens: Vec<Token>) -> Result<Vec<(Token, i64, Fence)>> {
        self.answered(async {
            let rows: Vec<_> = tokens.iter().map(|token| json!({ "token": hex::encode(token.0) })).collect();
            let (sql, json) = (self.sql().find_tokens, serde_json::Value::Array(rows).to_string());
            let mut reader = self.reader().await?;
            let held: Vec<(Vec<u8>, i64, i64)> =
                on!(reader.conn(), c => sqlx::query_as(sql).bind(json).fetch_all(&mut *c).await.map_err(read_failed)?);
            reader.leave();
            let read = |(token, id, fence): (Vec<u8>, i64, i64)| {
                let token = token.try_into().map_err(|_| Error::Corrupt("a claim token"))?;
                Ok((Token(token), id, Fence(fence)))
            };
            held.into_iter().map(read).collect()
        })
        .await
    }

    async fn renew(&self, batch: Vec<(i64, Fence)>) -> Result<Vec<Answer>> {
        match self.inner() {
            Inner::Postgres(db) => db.renew(&batch).await,
            Inner::Sqlite(db) => db.renew(&batch).await,
        }
    }

    async fn tell_renewals(&self) -> Result<()> {
        match self.inner() {
            Inner::Postgres(db) => db.tell_renewals().await,
            // Written in the commit of the renewal.
            Inner::Sqlite(_) => Ok(()),
        }
    }

    async fn decide(&self, id: i64, decision: Decision, actor: &str, reason: &str) -> Result<Applied> {
        let decided = self
            .answered(async {
                match self.inner() {
                    Inner::Postgres(db) => db.decide(id, decision, actor, reason).await,
                    Inner::Sqlite(db) => db.decide(id, decision, actor, reason).await,
                }
            })
            .await?;
        self.tell_due();
        Ok(decided)
    }

    async fn write_in(&self, tx: &Tx, write: LeaseWrite) -> Result<Applied> {
        self.answered(async {
            let mut held = tx.connection().await?;
            if let (Inner::Sqlite(db), Some(tx)) = (self.inner(), held.sqlite()) {
                let (applied, counts) = db.write_in(tx.connection(), write).await?;
                tx.count(counts);
                return Ok(applied);
            }
            self.write_on(&mut held.get()?, write).await
        })
        .await
    }

    async fn claim_in(&self, tx: &Tx, request: Arc<Request>) -> Result<Applied> {
        if let Some(news) = enqueued(&request) {
            tx.wake_after_commit(self.wakes(), news);
        }
        self.answered(async {
            let mut held = tx.connection().await?;
            self.claim_on(&mut held.get()?, request).await
        })
        .await
    }

    async fn claim_all_in(&self, tx: &Tx, requests: Vec<Arc<Request>>) -> Result<Vec<Applied>> {
        requests
            .iter()
            .filter_map(|request| enqueued(request))
            .for_each(|news| tx.wake_after_commit(self.wakes(), news));
        self.answered(async {
            let mut held = tx.connection().await?;
            match (self.inner(), held.get()?) {
                (Inner::Postgres(db), Conn::Postgres(conn)) => db.claim_all_in(conn, &requests).await,
                (Inner::Sqlite(db), Conn::Sqlite(conn)) => db.claim_all_in(conn, &requests).await,
                _ => Err(of_another()),
            }
        })
        .await
    }

    async fn complete_and_commit(&self, tx: &Tx, held: &Operation, outcome: Outcome) -> Ended {
        if outcome.body.len() <= LITERAL {
            crash_point!("atomic.before_commit");
            let last = match self.inner() {
                Inner::Postgres(db) => Last::Postgres(db.complete_sql(held, &outcome)),
                Inner::Sqlite(db) => {
                    Last::Sqlite { held: Box::new(held.clone()), outcome: outcome.clone(), host_clock: db.clock.host() }
                }
            };
            // Otherwise it is not a plain completion: the lease is gone, or newer data waits.
            if let Some(ended) = tx.complete_and_commit(last).await {
                return ended;
            }
        }
        complete_then_commit(self, tx, held, outcome).await
    }

    async fn read_back(&self, id: i64) -> Result<Option<Operation>> {
        self.answered(async {
            match self.inner() {
                Inner::Postgres(db) => db.read_back(id).await,
                Inner::Sqlite(db) => db.read_back(id).await,
            }
        })
        .await
    }

    async fn note_repeats(&self, repeats: Vec<SeenAgain>, answers: Vec<AnswerCount>) -> Result<Vec<SeenAgain>> {
        self.answered(async {
            let hour = self.now().await?.hour();
            match self.inner() {
                Inner::Postgres(db) => {
                    let mut seat = db.lane_seat().await?;
                    let left = repeats::add(Conn::Postgres(&mut seat), &db.sql, repeats, answers, hour).await?;
                    postgres::commit(&mut seat).await?;
                    seat.leave();
                    Ok(left)
                }
                Inner::Sqlite(db) => {
                    let mut tx = sqlite::Writer::begin(&db.writer).await?;
                    let left = repeats::add(Conn::Sqlite(tx.connection()), &db.sql, repeats, answers, hour).await?;
                    tx.commit().await.map_err(broken)?;
                    Ok(left)
                }
            }
        })
        .await
    }

    async fn take_due(&self, take: Arc<Take>) -> Result<Vec<(usize, Applied)>> {
        self.take_work(&take).await
    }

    async fn give_back_starts(&self, service: &str, kind: &str, starts: u32, every: Duration) -> Result<bool> {
        self.give_back(service, kind, starts, every).await
    }

    fn due_wake(&self) -> DueWake {
        self.wakes().wait_for_due()
    }
}

impl Database {
    /// The fenced completion on the embedder's own connection, inside its transaction: the last statement before its
    /// commit. Roll back on any answer but settled.
    ///
    /// # Errors
    /// The database refuses; roll back then.
    pub async fn complete_on(&self, conn: &mut Conn<'_>, id: i64, fence: Fence, outcome: Outcome) -> Result<Applied> {
        self.write_on(conn, LeaseWrite { id, fence, write: Write::Complete(outcome) }).await
    }

    async fn write_on(&self, conn: &mut Conn<'_>, write: LeaseWrite) -> Result<Applied> {
        match (self.inner(), conn) {
            (Inner::Postgres(db), Conn::Postgres(conn)) => db.write_in(conn, write).await,
            (Inner::Sqlite(db), Conn::Sqlite(conn)) => {
                let (applied, counts) = db.write_in(conn, write).await?;
                Conn::Sqlite(conn).batch(db.sql.insert_deltas, &counts).await?;
                Ok(applied)
            }
            _ => Err(of_another()),
        }
    }

    /// A claim on the embedder's own connection, inside the transaction of its effect.
    ///
    /// # Errors
    /// The database refuses; roll back then.
    pub async fn claim_on(&self, conn: &mut Conn<'_>, request: Arc<Request>) -> Result<Applied> {
        match (self.inner(), conn) {
            (Inner::Postgres(db), Conn::Postgres(conn)) => db.claim_in(conn, &request).await,
            (Inner::Sqlite(db), Conn::Sqlite(conn)) => Ok(db.claim_all_in(conn, &[request]).await?.remove(0)),
            _ => Err(of_another()),
        }
    }
}

pub(crate) fn of_another() -> Error {
    Error::Invalid("the transaction belongs to another database".into())
}
