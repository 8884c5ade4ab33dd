//! What becomes of messages that were taken and cannot be read. One that is damaged waits for a person: in the outbox it is
//! parked, in an embedded queue it becomes a dead letter, as it is stored. One that another version or key has stored is
//! put off, until a node that can read it takes it.

use std::{
    collections::{HashMap, HashSet},
    sync::{Mutex, PoisonError},
    time::{Duration, Instant},
};

use semel::{
    Error, Fingerprint, Result,
    messaging::{Mark, MarkRow},
    micros,
};
use serde_json::{Value, json};

use super::{rows, unread::Unread};
use crate::{Database, codec::hex, connection::broken, on};

/// When a message that was put off is looked at again. Much longer than a lease, so that many of them cost the others
/// little; short enough for the moment when the last node of an older version is gone.
pub(super) const AGAIN: Duration = Duration::from_secs(300);

/// For how long a message that was put off is counted: until it is due, and a minute more in which some node takes it and
/// counts it anew, or reads it.
const COUNTED: Duration = Duration::from_secs(360);

/// How many messages that were put off are counted.
const MOST: usize = 1000;

/// Where a message is that was put off.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Table {
    Outbox,
    Queue,
    Retries,
}

/// The messages that this process could not read and has put off, and when it did so last. In memory: an index that finds
/// them among millions of rows would cost every message, and the process meets them again when they are due.
#[derive(Default)]
pub(super) struct PutOff(Mutex<HashMap<(Table, i64), Instant>>);

impl PutOff {
    pub(super) fn note(&self, table: Table, ids: &[i64]) {
        if ids.is_empty() {
            return;
        }
        let (now, mut all) = (Instant::now(), self.0.lock().unwrap_or_else(PoisonError::into_inner));
        all.retain(|_, since| since.elapsed() < COUNTED);
        for id in ids {
            if all.len() < MOST || all.contains_key(&(table, *id)) {
                all.insert((table, *id), now);
            }
        }
    }

    fn count(&self) -> usize {
        let all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        all.values().filter(|since| since.elapsed() < COUNTED).count()
    }
}

impl Database {
    /// How many messages this process could not read in the last minutes and has put off for five: in the outbox, in
    /// embedded queues, among the retries. Counting stops at 1000.
    #[must_use]
    pub fn count_put_off(&self) -> usize {
        self.messages().put_off.count()
    }

    /// Parks or puts off what a relay has taken and cannot read: in one statement, before the others of its batch are
    /// handed over. If it fails, they come again when their lease has ended.
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
            tracing::warn!(%error, "messages in the outbox that cannot be read could not be put aside; they come again");
            return;
        }
        let (of_another, damaged): (Vec<_>, Vec<_>) = unread.into_iter().partition(|row| row.of_another);
        for Unread { id, why, .. } in damaged {
            tracing::error!(row = id, error = why, "a message in the outbox cannot be read; it is parked");
        }
        self.tell_put_off(Table::Outbox, &of_another);
    }

    /// Makes dead letters of what a consumer of a queue has taken and cannot read, or puts it off.
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
        self.tell_put_off(Table::Queue, &of_another);
        Ok(())
    }

    /// Makes dead letters of damaged messages that a consumer has; the ids of those that are letters now. They are copied
    /// as they are stored: a person may mend them, and re-drive them. All in one commit, and only what has a letter is
    /// removed.
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
                // Another consumer has taken one since the statement before, and would make a second letter of it.
                work.forget().await;
                return Err(Error::Unavailable("another consumer has taken some of them meanwhile".into()));
            }
            self.finish(work, 2 * gone.len()).await?;
            Ok(gone.into_iter().collect())
        })
        .await
    }

    /// Puts messages of a queue off; the ids of those that were still the caller's.
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

    /// Counts what was put off, and tells the log in one line: there may be thousands, and each comes every five minutes.
    fn tell_put_off(&self, table: Table, rows: &[Unread]) {
        let Some(Unread { id, why, .. }) = rows.first() else { return };
        let ids: Vec<i64> = rows.iter().map(|row| row.id).collect();
        self.messages().put_off.note(table, &ids);
        let (messages, place) = (rows.len(), if table == Table::Outbox { "the outbox" } else { "a queue" });
        tracing::warn!(messages, place, row = id, error = why, "messages of another version or key are put off");
    }
}

/// What the letter of a message that cannot be read is kept under: its key in the inbox is not known. The token has never
/// been given before, so two letters cannot meet, also where a restore has set the numbers of the rows back.
fn key(row: &Unread) -> String {
    format!("row:{}:{}", row.id, row.token)
}

fn letter(consumer: &str, row: &Unread) -> Value {
    let key = key(row);
    json!({
        "id": row.id,
        "token": row.token,
        "consumer": consumer,
        "fingerprint": hex(Fingerprint::of_bytes(key.as_bytes()).as_bytes()),
        "key": key,
        "reason": rows::reason(&row.why),
    })
}

/// Rows and tokens as a batch.
fn batch<'a>(rows: impl IntoIterator<Item = &'a Unread>) -> String {
    let row = |row: &Unread| json!({ "id": row.id, "token": row.token });
    Value::Array(rows.into_iter().map(row).collect()).to_string()
}
