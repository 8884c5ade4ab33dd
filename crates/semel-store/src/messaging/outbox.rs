//! The outbox: put, take, mark and tend.

use std::{collections::BTreeMap, time::Duration};

use semel::{
    Error, Result, Timestamp,
    messaging::{Lent, Mark, MarkRow, Message, OutboxState, Taken, Tended},
    micros,
};
use serde_json::{Value, json};

use super::{
    News,
    rows::{self, LentRow},
    sql::{SENT_POSTGRES, SENT_SQLITE, TAKE_POSTGRES, TAKE_SQLITE},
    unread,
};
use crate::{
    Conn, Database,
    connection::{broken, read_failed},
    database::Inner,
    on,
};

/// How many rows one round of tending makes ready.
const DUE: usize = 1000;

/// How many ordering keys one round of tending checks.
const KEYS: usize = 1000;

impl Database {
    /// Puts messages into the outbox on the embedder's own connection, inside its transaction. After the commit,
    /// [`wake_outbox`](Self::wake_outbox) spares them the relay's polling interval.
    ///
    /// # Errors
    /// [`Error::Invalid`] for an invalid message, [`Error::Refused`] for an id that is in the outbox already, and
    /// errors of the database; roll back then.
    pub async fn put_on(&self, conn: &mut Conn<'_>, messages: Vec<Message>) -> Result<()> {
        if messages.is_empty() {
            return Ok(());
        }
        for message in &messages {
            message.check()?;
        }
        let mut numbers = self.number(conn, &messages).await?;
        let mut batch = Vec::with_capacity(messages.len());
        for (place, message) in messages.iter().enumerate() {
            let line = message.ordering_key.as_deref().and_then(|key| numbers.get_mut(&(&message.tenant, key)));
            let (mut number, mut behind) = (None, false);
            if let Some((next, first)) = line {
                number = Some(*next);
                *next += 1;
                behind = !std::mem::replace(first, false);
            }
            batch.push(rows::message(place, message, number, behind));
        }
        let (sql, clock) = (self.messages().sql.put, self.clock());
        let json = Value::Array(batch).to_string();
        let put = on!(conn, c => sqlx::query(sql).bind(json).bind(clock).execute(&mut **c).await.map(drop));
        put.map_err(|error| match error.as_database_error() {
            Some(db) if db.is_unique_violation() => {
                Error::Refused("a message with this id is in the outbox already".into())
            }
            _ => broken(error),
        })
    }

    /// The first of the new numbers of each ordering key. In key order: two transactions with the same keys lock in the
    /// same order.
    async fn number<'a>(
        &self,
        conn: &mut Conn<'_>,
        messages: &'a [Message],
    ) -> Result<BTreeMap<(&'a str, &'a str), (i64, bool)>> {
        let mut counts: BTreeMap<(&str, &str), i64> = BTreeMap::new();
        for message in messages {
            if let Some(key) = &message.ordering_key {
                *counts.entry((&message.tenant, key)).or_default() += 1;
            }
        }
        if counts.is_empty() {
            return Ok(BTreeMap::new());
        }
        let asked: Vec<Value> =
            counts.iter().map(|((tenant, key), n)| json!({ "tenant": tenant, "ordering_key": key, "n": n })).collect();
        let (sql, json) = (self.messages().sql.number_keys, Value::Array(asked).to_string());
        let last: Vec<(String, String, i64)> =
            on!(conn, c => sqlx::query_as(sql).bind(json).fetch_all(&mut **c).await.map_err(read_failed)?);
        let last: BTreeMap<(&str, &str), i64> =
            last.iter().map(|(tenant, key, last)| ((tenant.as_str(), key.as_str()), *last)).collect();
        let first = |(key, n): ((&'a str, &'a str), i64)| {
            let last = last.get(&key).ok_or(Error::Contradiction("an ordering key without a number"))?;
            Ok((key, (last - n + 1, true)))
        };
        counts.into_iter().map(first).collect()
    }

    pub(super) async fn take_rows(&self, limit: u32, lease: Duration) -> Result<Taken> {
        let (most, lease) = (i64::from(limit), micros(lease));
        let bytes = i64::try_from(Taken::MOST_BYTES).unwrap_or(i64::MAX);
        let rows: Vec<unread::Taken<LentRow>> = match self.inner() {
            Inner::Postgres(db) => {
                let mut seat = db.messages.take().await?;
                let rows = sqlx::query_as(TAKE_POSTGRES)
                    .bind(most)
                    .bind(lease)
                    .bind(db.clock.fixed())
                    .bind(bytes)
                    .fetch_all(&mut *seat)
                    .await
                    .map_err(read_failed)?;
                seat.leave();
                rows
            }
            Inner::Sqlite(_) => {
                let (mut work, now, token) = self.drawn().await?;
                let Conn::Sqlite(conn) = work.conn() else { return Ok(Taken::default()) };
                let rows: Vec<unread::Taken<LentRow>> = sqlx::query_as(TAKE_SQLITE)
                    .bind(most)
                    .bind(lease)
                    .bind(now.as_micros())
                    .bind(token)
                    .bind(bytes)
                    .fetch_all(conn)
                    .await
                    .map_err(read_failed)?;
                match rows.len() {
                    // Nothing that is worth an fsync.
                    0 => work.forget().await,
                    n => self.finish(work, n).await?,
                }
                rows
            }
        };
        let full = rows.len() >= limit as usize;
        let token = rows.first().map_or(0, |row| row.token);
        let bytes: usize = rows.iter().filter_map(|row| row.read.as_ref().ok()).map(LentRow::weight).sum();
        let more = full || bytes >= Taken::MOST_BYTES;
        let (mut rows, unread): (Vec<Lent>, _) = unread::sorted(rows, LentRow::read);
        self.put_aside_outbox(unread).await;
        rows.sort_unstable_by_key(|row| row.id);
        Ok(Taken { rows, token, more })
    }

    pub(super) async fn mark_rows(&self, marks: Vec<MarkRow>) -> Result<u64> {
        let mut marks = marks;
        marks.sort_by_key(|mark| mark.id);
        let (sent, rest): (Vec<_>, Vec<_>) = marks.into_iter().partition(|row| row.mark == Mark::Sent);
        let rest: Vec<Value> = rest.into_iter().map(marked).collect();
        let rows = sent.len() + rest.len();
        if rows == 0 {
            return Ok(0);
        }
        let both = !sent.is_empty() && !rest.is_empty();
        let mut work = if both { self.work().await? } else { self.statement().await? };
        if !rest.is_empty() {
            let (sql, clock, json) = (self.messages().sql.mark, self.clock(), Value::Array(rest).to_string());
            on!(work.conn(), c => sqlx::query(sql).bind(json).bind(clock).execute(c).await.map(drop))
                .map_err(broken)?;
        }
        let freed = if sent.is_empty() { Vec::new() } else { self.sent(&mut work.conn(), &sent).await? };
        self.finish(work, rows).await?;
        Ok(freed.iter().filter(|state| *state == OutboxState::Ready.as_str()).count() as u64)
    }

    /// Deletes published rows; returns the states of the rows behind them.
    async fn sent(&self, conn: &mut Conn<'_>, sent: &[MarkRow]) -> Result<Vec<String>> {
        match conn {
            Conn::Postgres(conn) => sqlx::query_scalar(SENT_POSTGRES)
                .bind(sent.iter().map(|row| row.id).collect::<Vec<_>>())
                .bind(sent.iter().map(|row| row.token).collect::<Vec<_>>())
                .bind(self.clock())
                .fetch_all(&mut **conn)
                .await
                .map_err(read_failed),
            Conn::Sqlite(conn) => {
                let now = self.host_now(conn).await?;
                let asked: Vec<Value> = sent.iter().map(|row| json!([row.id, row.token])).collect();
                sqlx::query_scalar(SENT_SQLITE)
                    .bind(Value::Array(asked).to_string())
                    .bind(now)
                    .fetch_all(&mut **conn)
                    .await
                    .map_err(read_failed)
            }
        }
    }

    pub(super) async fn tend_rows(&self) -> Result<Tended> {
        let mut tended = Tended::default();
        let now = self.look_now().await?;
        let sql = &self.messages().sql;
        let due: Option<i64> = self.look(sql.next_due).await?;
        if due.is_some_and(|due| due <= now) {
            let mut work = self.statement().await?;
            let limit = i64::try_from(DUE).unwrap_or(i64::MAX);
            let done = on!(work.conn(), c => sqlx::query(sql.ready_due).bind(self.clock()).bind(limit).execute(c).await
                .map(|done| done.rows_affected()));
            tended.ready = done.map_err(broken)?;
            self.finish(work, DUE).await?;
            tended.more = tended.ready >= DUE as u64;
        }
        tended.ready += self.free_stuck().await?;
        tended.next_due = match due.is_some_and(|due| due <= now) {
            true => self.look(sql.next_due).await?,
            false => due,
        }
        .map(Timestamp::from_micros);
        Ok(tended)
    }

    /// A message may be marked blocked although nothing blocks it: when it was put, it saw the previous message, which
    /// was deleted before the new one was visible. Checks the next keys for such rows.
    async fn free_stuck(&self) -> Result<u64> {
        let sql = &self.messages().sql;
        let (tenant, key) = self.messages().looked_at();
        let mut reader = self.reader().await?;
        let line: Vec<(i64, String, String, bool)> = on!(reader.conn(), c => sqlx::query_as(sql.find_stuck)
            .bind(&tenant).bind(&key).bind(i64::try_from(KEYS).unwrap_or(i64::MAX)).fetch_all(c).await)
        .map_err(read_failed)?;
        reader.leave();
        // After the last key it starts from the first.
        let last = line.last().filter(|_| line.len() >= KEYS).map(|(_, tenant, key, _)| (tenant.clone(), key.clone()));
        self.messages().look_on_from(last.unwrap_or_default());
        let stuck: Vec<Value> =
            line.into_iter().filter(|(.., stuck)| *stuck).map(|(id, ..)| json!({ "id": id })).collect();
        if stuck.is_empty() {
            return Ok(0);
        }
        let rows = stuck.len();
        let json = Value::Array(stuck).to_string();
        let mut work = self.statement().await?;
        let freed: Vec<String> = on!(work.conn(), c => sqlx::query_scalar(sql.free_stuck)
            .bind(json).bind(self.clock()).fetch_all(c).await)
        .map_err(read_failed)?;
        self.finish(work, rows).await?;
        Ok(freed.iter().filter(|state| *state == OutboxState::Ready.as_str()).count() as u64)
    }

    /// Wakes the relays, here and on other nodes: for messages put on the embedder's own connection.
    pub fn wake_outbox(&self) {
        self.wakes().wake(News::Outbox);
    }
}

/// The new state of a marked row.
fn marked(row: MarkRow) -> Value {
    let (state, after, failed, error) = match row.mark {
        Mark::Sent | Mark::PutBack => (OutboxState::Ready, None, 0, None),
        Mark::Retry { error, after } => (OutboxState::Waiting, Some(after), 1, Some(error)),
        Mark::Later { error, after } => (OutboxState::Waiting, Some(after), 0, Some(error)),
        // The message was not at fault: no failure is counted.
        Mark::Unroutable { error, after } => (OutboxState::Unroutable, Some(after), 0, Some(error)),
        Mark::Park { error } => (OutboxState::Parked, None, 1, Some(error)),
    };
    json!({
        "id": row.id,
        "token": row.token,
        "state": state.as_str(),
        "after": after.map(micros),
        "failed": failed,
        "error": error.map(|error| rows::stored_reason(&error)),
    })
}
