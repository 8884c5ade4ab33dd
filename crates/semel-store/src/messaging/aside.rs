//! Taken messages that are unreadable. A damaged one waits for a person: in the outbox it is parked, in an embedded
//! queue it becomes a dead letter, as stored. One that another version or key has stored is postponed, until a node
//! that can read it takes it.

use std::{
    collections::{HashMap, HashSet},
    time::{Duration, Instant},
};

use parking_lot::Mutex;
use semel::{
    Error, Fingerprint, Result,
    messaging::{Mark, MarkRow},
    micros,
};
use serde_json::{Value, json};

use super::{rows, unread::Unread};
use crate::{Database, connection::broken, on};

/// When a postponed message is due again. Much longer than a lease, so that many of them cost the others little; short
/// enough for the moment when the last node of an older version is gone.
pub(super) const AGAIN: Duration = Duration::from_secs(300);

/// How long a postponed message is counted: until it is due, and a minute more in which some node takes and counts it
/// again, or reads it.
const COUNTED: Duration = Duration::from_secs(360);

/// How many postponed messages are counted.
const MOST: usize = 1000;

/// The table of a postponed message.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Table {
    Outbox,
    Queue,
    Retries,
}

/// The messages that this process could not read and has postponed, with the last time. In memory: an index for them
/// would cost every message, and the process meets them again when they are due.
#[derive(Default)]
pub(super) struct PutOff(Mutex<HashMap<(Table, i64), Instant>>);

impl PutOff {
    pub(super) fn note(&self, table: Table, ids: &[i64]) {
        if ids.is_empty() {
            return;
        }
        let (now, mut all) = (Instant::now(), self.0.lock());
        all.retain(|_, since| since.elapsed() < COUNTED);
        for id in ids {
            if all.len() < MOST || all.contains_key(&(table, *id)) {
                all.insert((table, *id), now);
            }
        }
    }

    fn count(&self) -> usize {
        let all = self.0.lock();
        all.values().filter(|since| since.elapsed() < COUNTED).count()
    }
}

impl Database {
    /// How many messages this process could not read in the last minutes and has postponed: in the outbox, in embedded
    /// queues, among the retries. Counting stops at 1000.
    #[must_use]
    pub fn count_put_off(&self) -> usize {
        self.messages().put_off.count()
    }

    /// Parks or postpones unreadable rows of a relay's take, in one statement, before the others of its batch are
    /// returned. If this fails, they are taken again when their lease expires.
    pub(super) async fn put_aside_outbox(&self, unread: Vec<Unread>) {
        if unread.is_empty() {
            return;
        }
        let mark = |row: &Unread| {
            let error = row.why.clone();
            let mark = if row.of_another { Mark::Later { error, after: AGAIN } } else { Mark::Park { error } };
            MarkRow { id: row.id, token: row.token, mark }
        };
        if let Err(error) = self.mark_rows(unread.iter().map(mark).collect()).await {
            tracing::warn!(%error, "unreadable messages of the outbox could not be set aside; they are taken again");
            return;
        }
        let (of_another, damaged): (Vec<_>, Vec<_>) = unread.into_iter().partition(|row| row.of_another);
        for Unread { id, why, .. } in damaged {
            tracing::error!(row = id, error = why, "a message in the outbox cannot be read; it is parked");
        }
        self.note_postponed(Table::Outbox, &of_another);
    }

    /// Turns unreadable messages of a queue into dead letters, or postpones them.
    pub(super) async fn put_aside_queue(&self, consumer: &str, unread: Vec<Unread>) -> Result<()> {
        let (mut of_another, damaged): (Vec<_>, Vec<_>) = unread.into_iter().partition(|row| row.of_another);
        let buried = self.bury_unread(consumer, &damaged).await?;
        for Unread { id, why, .. } in damaged.iter().filter(|row| buried.contains(&row.id)) {
            tracing::error!(
                consumer,
                row = id,
                error = why,
                "a message in a queue cannot be read; it became a dead letter"
            );
        }
        let later = self.put_off_queue(&of_another).await?;
        of_another.retain(|row| later.contains(&row.id));
        self.note_postponed(Table::Queue, &of_another);
        Ok(())
    }

    /// Turns damaged messages of a consumer into dead letters; returns the ids of the new letters. They are copied as
    /// stored: a person may repair and re-drive them. All in one commit, and only messages with a letter are deleted.
    async fn bury_unread(&self, consumer: &str, damaged: &[Unread]) -> Result<HashSet<i64>> {
        if damaged.is_empty() {
            return Ok(HashSet::new());
        }
        let (sql, clock) = (&self.messages().sql, self.clock());
        let letters = Value::Array(damaged.iter().map(|row| letter(consumer, row)).collect()).to_string();
        self.answer(async {
            let mut work = self.work().await?;
            let kept: Vec<String> = on!(work.conn(), c =>
                sqlx::query_scalar(sql.bury_unread).bind(letters).bind(clock).fetch_all(c).await)
            .map_err(broken)?;
            let kept: HashSet<String> = kept.into_iter().collect();
            let done: Vec<&Unread> = damaged.iter().filter(|row| kept.contains(&key(row))).collect();
            if done.is_empty() {
                work.forget().await;
                return Ok(HashSet::new());
            }
            let gone: Vec<i64> = on!(work.conn(), c =>
                sqlx::query_scalar(sql.acknowledge).bind(batch(done.iter().copied())).fetch_all(c).await)
            .map_err(broken)?;
            if gone.len() != done.len() {
                // Another consumer has taken one since the statement before, and would create a second letter of it.
                work.forget().await;
                return Err(Error::Unavailable("another consumer has taken some of the messages meanwhile".into()));
            }
            self.finish(work, 2 * gone.len()).await?;
            Ok(gone.into_iter().collect())
        })
        .await
    }

    /// Postpones messages of a queue; returns the ids of those that the caller still held.
    async fn put_off_queue(&self, rows: &[Unread]) -> Result<HashSet<i64>> {
        if rows.is_empty() {
            return Ok(HashSet::new());
        }
        let sql = self.messages().sql.put_off;
        self.answer(async {
            let mut work = self.statement().await?;
            let later: Vec<i64> = on!(work.conn(), c => sqlx::query_scalar(sql)
                .bind(batch(rows)).bind(self.clock()).bind(micros(AGAIN)).fetch_all(c).await)
            .map_err(broken)?;
            self.finish(work, rows.len()).await?;
            Ok(later.into_iter().collect())
        })
        .await
    }

    /// Counts postponed messages, and logs them in one line: there may be thousands, and each comes every five minutes.
    fn note_postponed(&self, table: Table, rows: &[Unread]) {
        let Some(Unread { id, why, .. }) = rows.first() else { return };
        let ids: Vec<i64> = rows.iter().map(|row| row.id).collect();
        self.messages().put_off.note(table, &ids);
        let (messages, place) = (rows.len(), if table == Table::Outbox { "the outbox" } else { "a queue" });
        tracing::warn!(messages, place, row = id, error = why, "messages of another version or key are postponed");
    }
}

/// The key of an unreadable message's letter, because its key in the inbox is unknown. The token is always new, so two
/// letters cannot collide, also if a restore has set the ids of rows back.
fn key(row: &Unread) -> String {
    format!("row:{}:{}", row.id, row.token)
}

fn letter(consumer: &str, row: &Unread) -> Value {
    let key = key(row);
    json!({
        "id": row.id,
        "token": row.token,
        "consumer": consumer,
        "fingerprint": hex::encode(Fingerprint::of_bytes(key.as_bytes()).as_bytes()),
        "key": key,
        "reason": rows::reason(&row.why),
    })
}

/// Rows and tokens as a batch.
fn batch<'a>(rows: impl IntoIterator<Item = &'a Unread>) -> String {
    let row = |row: &Unread| json!({ "id": row.id, "token": row.token });
    Value::Array(rows.into_iter().map(row).collect()).to_string()
}
