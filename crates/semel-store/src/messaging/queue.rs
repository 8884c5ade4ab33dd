//! The queues of the embedded broker: their rows.

use std::{collections::HashSet, time::Duration};

use semel::{
    Result, Uptime,
    messaging::{Envelope, Published, Queue},
    micros,
    store::Commit,
};
use serde_json::{Value, json};
use tokio::time::timeout;

use super::{
    News,
    rows::{self, Came, QueueRow},
    sql::{DELIVER_POSTGRES, DELIVER_SQLITE},
    unread::{self, Taken, Unread},
};
use crate::{
    Conn, Database,
    connection::{broken, read_failed},
    database::Inner,
    on,
    tx::commit_error,
};

/// The lease of a delivered message, unless its consumer renews it. Short, because the messages of a killed node wait
/// for it; a slow consumer renews.
pub(super) const VISIBILITY: Duration = Duration::from_secs(10);

/// How long after the deadline an answer may still come.
const GRACE: Duration = Duration::from_secs(2);

impl Database {
    pub(super) async fn declare_queues(&self, queues: &[Queue]) -> Result<()> {
        let names: Vec<_> = queues.iter().map(|queue| queue.name.as_str()).collect();
        let there: HashSet<String> = self.find_queues(&names).await?.into_iter().collect();
        // Sorted, for transactions that declare the same queues at the same time.
        let mut names: Vec<_> = names.into_iter().filter(|name| !there.contains(*name)).collect();
        names.sort_unstable();
        if names.is_empty() {
            return Ok(());
        }
        let sql = self.messages().sql.declare;
        self.answer(async {
            let mut work = self.statement().await?;
            on!(work.conn(), c => sqlx::query(sql).bind(named(&names)).execute(c).await.map(drop)).map_err(broken)?;
            self.finish(work, names.len()).await
        })
        .await
    }

    /// Which of these queues exist.
    pub(super) async fn find_queues(&self, names: &[&str]) -> Result<Vec<String>> {
        let sql = self.messages().sql.find_queues;
        self.answer(async {
            let mut reader = self.reader().await?;
            let found =
                on!(reader.conn(), c => sqlx::query_scalar(sql).bind(named(names)).fetch_all(c).await.map_err(read_failed)?);
            reader.leave();
            Ok(found)
        })
        .await
    }

    /// Publishes messages whose queues exist: all or none; returns the result of each.
    pub(super) async fn publish_rows(&self, batch: &[Envelope], until: Uptime) -> Published {
        if until.has_passed() {
            return Published::NotSent("the time was up".into());
        }
        let begun = timeout(until.remaining(), self.statement()).await;
        let mut work = match begun {
            Ok(Ok(work)) => work,
            Ok(Err(error)) => return Published::NotSent(error.to_string()),
            Err(_) => return Published::NotSent("no connection before the time was up".into()),
        };
        let rows: Vec<Value> = batch.iter().enumerate().map(|(place, e)| rows::published(place, e)).collect();
        let (sql, json) = (self.messages().sql.publish, Value::Array(rows).to_string());
        let sent = timeout(until.remaining() + GRACE, async {
            let done = on!(work.conn(), c => sqlx::query(sql).bind(json).execute(c).await.map(drop));
            if let Err(error) = done {
                // On SQLite the commit does it, and there was none.
                let surely_not =
                    matches!(self.inner(), Inner::Sqlite(_)) || !matches!(commit_error(&error), Commit::Unknown(_));
                let why = error.to_string();
                return match surely_not {
                    true if is_about_data(&error) => Published::Refused(why),
                    true => Published::NotSent(why),
                    false => Published::Unknown(why),
                };
            }
            match self.end(work, batch.len()).await {
                Commit::Done => Published::Confirmed,
                Commit::Refused(why) | Commit::Unavailable(why) => Published::NotSent(why),
                Commit::Unknown(why) => Published::Unknown(why),
            }
        })
        .await
        .unwrap_or_else(|_| Published::Unknown("no answer in time".into()));
        if sent == Published::Confirmed {
            let queues: HashSet<&str> = batch.iter().map(|envelope| envelope.message.topic.as_str()).collect();
            queues.into_iter().for_each(|queue| self.wakes().wake(News::Queue(queue.to_owned())));
        }
        sent
    }

    /// Takes messages of a queue: the readable ones, and the unreadable ones.
    pub(super) async fn deliver_rows(
        &self,
        queue: &str,
        limit: usize,
        lease: Duration,
    ) -> Result<(Vec<Came>, Vec<Unread>)> {
        let (limit, lease) = (i64::try_from(limit).unwrap_or(i64::MAX), micros(lease));
        self.answer(async {
            let rows: Vec<Taken<QueueRow>> = match self.inner() {
                Inner::Postgres(db) => {
                    let mut seat = db.messages.take().await?;
                    let rows = sqlx::query_as(DELIVER_POSTGRES)
                        .bind(queue)
                        .bind(limit)
                        .bind(lease)
                        .bind(db.clock.fixed())
                        .fetch_all(&mut *seat)
                        .await
                        .map_err(read_failed)?;
                    seat.leave();
                    rows
                }
                Inner::Sqlite(_) => {
                    let (mut work, now, token) = self.drawn().await?;
                    let Conn::Sqlite(conn) = work.conn() else { return Ok(Default::default()) };
                    let rows: Vec<Taken<QueueRow>> = sqlx::query_as(DELIVER_SQLITE)
                        .bind(queue)
                        .bind(limit)
                        .bind(lease)
                        .bind(now.as_micros())
                        .bind(token)
                        .fetch_all(conn)
                        .await
                        .map_err(read_failed)?;
                    match rows.len() {
                        0 => work.forget().await,
                        n => self.finish(work, n).await?,
                    }
                    rows
                }
            };
            let (mut rows, unread) = unread::sorted(rows, QueueRow::read);
            rows.sort_unstable_by_key(|row| row.id);
            Ok((rows, unread))
        })
        .await
    }

    /// Deletes acknowledged messages; returns the ids of those still held.
    pub(super) async fn acknowledge_rows(&self, rows: &[(i64, i64)]) -> Result<Vec<i64>> {
        let sql = self.messages().sql.acknowledge;
        let batch: Vec<Value> = rows.iter().map(|(id, token)| json!({ "id": id, "token": token })).collect();
        let json = Value::Array(batch).to_string();
        self.answer(async {
            let mut work = self.statement().await?;
            let gone =
                on!(work.conn(), c => sqlx::query_scalar(sql).bind(json).fetch_all(c).await).map_err(read_failed)?;
            self.finish(work, rows.len()).await?;
            Ok(gone)
        })
        .await
    }

    /// Returns messages to their queue; the ids of those still held. Each with whether it cannot have been begun.
    pub(super) async fn requeue_rows(&self, rows: &[(i64, i64, bool)]) -> Result<Vec<i64>> {
        let sql = self.messages().sql.requeue;
        let row = |(id, token, unbegun): &(i64, i64, bool)| json!({ "message": id, "held": token, "unbegun": i64::from(*unbegun) });
        let json = Value::Array(rows.iter().map(row).collect()).to_string();
        let back: Vec<(i64, String)> = self
            .answer(async {
                let mut work = self.statement().await?;
                let back =
                    on!(work.conn(), c => sqlx::query_as(sql).bind(json).fetch_all(c).await).map_err(read_failed)?;
                self.finish(work, rows.len()).await?;
                Ok(back)
            })
            .await?;
        let queues: HashSet<String> = back.iter().map(|(_, queue)| queue.clone()).collect();
        queues.into_iter().for_each(|queue| self.wakes().wake(News::Queue(queue)));
        Ok(back.into_iter().map(|(id, _)| id).collect())
    }

    /// Renews delivered messages; returns the ids of those still held.
    pub(super) async fn hold_messages(&self, rows: &[(i64, i64)], lease: Duration) -> Result<Vec<i64>> {
        let sql = &self.messages().sql;
        self.hold_rows((sql.hold_queue, sql.held_queue), rows, lease).await
    }
}

/// Whether the database refuses these data, not writes in general.
fn is_about_data(error: &sqlx::Error) -> bool {
    let code = error.as_database_error().and_then(sqlx::error::DatabaseError::code).unwrap_or_default();
    match code.len() {
        // PostgreSQL: data that cannot be stored, a constraint, a limit.
        5 => ["22", "23", "54"].iter().any(|class| code.starts_with(class)),
        // SQLite: too big, a constraint, a mismatch.
        _ => code.parse::<u32>().is_ok_and(|code| matches!(code & 0xff, 18..=20)),
    }
}

fn named(names: &[&str]) -> String {
    Value::Array(names.iter().map(|name| json!({ "name": name })).collect()).to_string()
}
