//! Messages that could not be handled: retries and dead letters.

use std::time::Duration;

use semel::{
    Result, Timestamp,
    messaging::{Backlog, DeadLetter, LetterCount, LetterFilter, LetterPage, NewLetter, Redriven, Retry, RetryRow},
    micros,
};
use serde_json::{Value, json};

use super::{
    News,
    aside::{AGAIN, Table},
    rows::{self, DeadRow, TakenRetry},
    unread::{self, Taken},
};
use crate::{
    Conn, Database, Tx,
    audit::Audit,
    connection::{broken, read_failed},
    on,
};

/// Binds a filter to `$1` to `$7` of a statement with `meant!`.
macro_rules! meant {
    ($query:expr, $filter:expr) => {
        $query
            .bind(&$filter.tenant)
            .bind(&$filter.consumer)
            .bind($filter.reason.as_deref().map(escape))
            .bind($filter.since.map_or(i64::MIN, Timestamp::as_micros))
            .bind($filter.before.map_or(i64::MAX, Timestamp::as_micros))
            .bind((!$filter.ids.is_empty()).then(|| ids(&$filter.ids)))
            .bind(&$filter.queue)
    };
}

impl Database {
    pub(super) async fn keep_letter(&self, letter: &NewLetter) -> Result<()> {
        let sql = &self.messages().sql;
        let text = if matches!(letter.retry, Retry::Dead) { sql.put_dead } else { sql.put_retry };
        let json = Value::Array(vec![rows::letter(letter)]).to_string();
        let mut work = self.statement().await?;
        on!(work.conn(), c => sqlx::query(text).bind(json).bind(self.clock()).execute(c).await.map(drop))
            .map_err(broken)?;
        self.finish(work, 1).await?;
        if letter.retry != Retry::Dead {
            self.wakes().wake(News::Retries);
        }
        Ok(())
    }

    pub(super) async fn take_retry_rows(&self, consumer: &str, limit: u32, lease: Duration) -> Result<Vec<RetryRow>> {
        loop {
            // Most rounds find nothing; those write nothing.
            match self.find_next_retry(consumer).await? {
                Some(due) if due.as_micros() <= self.look_now().await? => {}
                _ => return Ok(Vec::new()),
            }
            let (mut rows, any) = self.take_due_once(consumer, limit, lease).await?;
            // If all of them are unreadable, the next ones are taken at once.
            if !any || !rows.is_empty() {
                rows.sort_unstable_by_key(|row| row.id);
                return Ok(rows);
            }
        }
    }

    /// The readable ones that were taken, and whether any were taken. Unreadable ones are postponed.
    async fn take_due_once(&self, consumer: &str, limit: u32, lease: Duration) -> Result<(Vec<RetryRow>, bool)> {
        let sql = &self.messages().sql;
        let (mut work, now, token) = self.drawn().await?;
        let taken: Vec<Taken<TakenRetry>> = on!(work.conn(), c => sqlx::query_as(sql.take_retries)
            .bind(consumer)
            .bind(i64::from(limit))
            .bind(now.as_micros())
            .bind(micros(lease))
            .bind(token)
            .fetch_all(c).await)
        .map_err(read_failed)?;
        let (n, mut rows, mut unread) = (taken.len(), Vec::new(), Vec::new());
        for row in taken {
            let id = row.id;
            match row.read.map_err(read_failed).and_then(TakenRetry::read) {
                Ok(row) => rows.push(row),
                Err(error) => {
                    tracing::error!(consumer, row = id, %error, "a retry cannot be read");
                    unread.push(id);
                }
            }
        }
        if !unread.is_empty() {
            let again = now + lease.max(AGAIN);
            on!(work.conn(), c => sqlx::query(sql.retries_unread)
                .bind(ids(&unread)).bind(again.as_micros()).bind(token).execute(c).await.map(drop))
            .map_err(broken)?;
        }
        self.finish(work, n).await?;
        self.messages().put_off.note(Table::Retries, &unread);
        Ok((rows, n > 0))
    }

    pub(super) async fn end_retry(&self, tx: &Tx, id: i64, token: i64) -> Result<bool> {
        let sql = self.messages().sql.retry_done;
        let mut held = tx.connection().await?;
        let done = on!(held.get()?, c => sqlx::query(sql).bind(id).bind(token).execute(c).await
            .map(|done| done.rows_affected()));
        Ok(done.map_err(broken)? == 1)
    }

    pub(super) async fn give_back_retry(&self, id: i64, token: i64) -> Result<bool> {
        let sql = self.messages().sql.retry_not_begun;
        let mut work = self.statement().await?;
        let back = on!(work.conn(), c => sqlx::query(sql).bind(id).bind(token).bind(self.clock()).execute(c).await
            .map(|done| done.rows_affected()))
        .map_err(broken)?;
        self.finish(work, 1).await?;
        if back > 0 {
            self.wakes().wake(News::Retries);
        }
        Ok(back == 1)
    }

    pub(super) async fn fail_retry(&self, id: i64, token: i64, reason: &str, retry: Retry) -> Result<bool> {
        let sql = &self.messages().sql;
        let reason = rows::reason(reason);
        let done = match retry {
            Retry::After(after) => {
                let mut work = self.statement().await?;
                let done = on!(work.conn(), c => sqlx::query(sql.retry_later)
                    .bind(id).bind(token).bind(micros(after)).bind(reason).bind(self.clock())
                    .execute(c).await.map(|done| done.rows_affected()))
                .map_err(broken)?;
                self.finish(work, 1).await?;
                self.wakes().wake(News::Retries);
                done
            }
            Retry::Dead => {
                let mut work = self.work().await?;
                on!(work.conn(), c => sqlx::query(sql.retry_dead)
                    .bind(id).bind(token).bind(reason).bind(self.clock()).execute(c).await.map(drop))
                .map_err(broken)?;
                let done = on!(work.conn(), c => sqlx::query(sql.retry_done).bind(id).bind(token).execute(c).await
                    .map(|done| done.rows_affected()))
                .map_err(broken)?;
                if done == 0 {
                    // Another consumer has it, maybe only since the statement before: then it is not dead.
                    work.forget().await;
                    return Ok(false);
                }
                self.finish(work, 1).await?;
                done
            }
        };
        Ok(done == 1)
    }

    pub(super) async fn find_next_retry(&self, consumer: &str) -> Result<Option<Timestamp>> {
        let sql = self.messages().sql.next_retry;
        let mut reader = self.reader().await?;
        let due: Option<i64> = on!(reader.conn(), c => sqlx::query_scalar(sql).bind(consumer).fetch_optional(c).await.map_err(read_failed)?);
        reader.leave();
        Ok(due.map(Timestamp::from_micros))
    }

    pub(super) async fn list_letters(
        &self,
        filter: &LetterFilter,
        after: Option<i64>,
        limit: u32,
    ) -> Result<LetterPage> {
        let sql = self.messages().sql.letters;
        let limit = limit.clamp(1, 500);
        let mut reader = self.reader().await?;
        let rows = on!(reader.conn(), c => meant!(sqlx::query_as(sql), filter)
            .bind(after.unwrap_or(i64::MAX))
            .bind(i64::from(limit) + 1)
            .fetch_all(c).await.map_err(read_failed)?);
        reader.leave();
        let (items, unreadable, next) = unread::page(rows, limit);
        Ok(LetterPage { items, unreadable, next })
    }

    pub(super) async fn find_letter(&self, tenant: &str, id: i64) -> Result<Option<DeadLetter>> {
        let sql = self.messages().sql.letter;
        let mut reader = self.reader().await?;
        let row: Option<DeadRow> = on!(reader.conn(), c => sqlx::query_as(sql).bind(tenant).bind(id).fetch_optional(c).await.map_err(read_failed)?);
        reader.leave();
        row.map(DeadRow::read).transpose()
    }

    pub(super) async fn count_matching(&self, filter: &LetterFilter) -> Result<LetterCount> {
        let sql = self.messages().sql.count_letters;
        let most = i64::try_from(Backlog::MOST).unwrap_or(i64::MAX);
        let mut reader = self.reader().await?;
        let n: i64 = on!(reader.conn(), c => meant!(sqlx::query_scalar(sql), filter)
            // One more: it shows whether these are all.
            .bind(most + 1)
            .fetch_one(c).await.map_err(read_failed)?);
        reader.leave();
        Ok(LetterCount { n: u64::try_from(n.min(most)).unwrap_or(0), exact: n <= most })
    }

    /// Re-drives dead letters, as [`redrive_letters`](semel::messaging::LetterStore::redrive_letters), inside a
    /// caller's transaction, which wakes the consumers after its commit.
    ///
    /// # Errors
    /// The database refuses; roll back then.
    pub async fn redrive_letters_in(
        &self,
        tx: &Tx,
        filter: &LetterFilter,
        after: Option<i64>,
        limit: u32,
        actor: &str,
    ) -> Result<Redriven> {
        self.answer(async {
            let mut held = tx.connection().await?;
            let redriven = self.redrive_on(&mut held.get()?, filter, after, limit, actor).await?;
            if redriven.moved > 0 {
                tx.wake_after_commit(self.wakes(), News::Retries);
            }
            Ok(redriven)
        })
        .await
    }

    pub(super) async fn redrive_matching(
        &self,
        filter: &LetterFilter,
        after: Option<i64>,
        limit: u32,
        actor: &str,
    ) -> Result<Redriven> {
        let mut work = self.work().await?;
        let redriven = self.redrive_on(&mut work.conn(), filter, after, limit, actor).await?;
        if redriven.moved == 0 {
            work.forget().await;
            return Ok(redriven);
        }
        self.finish(work, usize::try_from(redriven.moved).unwrap_or(usize::MAX)).await?;
        self.wakes().wake(News::Retries);
        Ok(redriven)
    }

    async fn redrive_on(
        &self,
        conn: &mut Conn<'_>,
        filter: &LetterFilter,
        after: Option<i64>,
        limit: u32,
        actor: &str,
    ) -> Result<Redriven> {
        let sql = &self.messages().sql;
        let limit = limit.clamp(1, 10_000);
        let found: Vec<i64> = on!(conn, c => meant!(sqlx::query_scalar(sql.find_letters), filter)
            .bind(after.unwrap_or(0))
            .bind(i64::from(limit))
            .fetch_all(&mut **c).await.map_err(read_failed)?);
        let (last, more) = (found.last().copied(), found.len() >= limit as usize);
        if found.is_empty() {
            return Ok(Redriven { moved: 0, last, more });
        }
        let batch = ids(&found);
        on!(conn, c => sqlx::query(sql.redrive_letters).bind(&batch).bind(self.clock()).execute(&mut **c).await.map(drop)
            .map_err(broken)?);
        // Letters that were moved or discarded meanwhile are not counted.
        let moved = on!(conn, c => sqlx::query(sql.delete_letters).bind(&batch).execute(&mut **c).await
            .map(|done| done.rows_affected()).map_err(broken)?);
        let audit =
            Audit { tenant: &filter.tenant, actor, action: "letters.redrive", subject: "dead letters", reason: "" };
        let moved_ids = json!({ "moved": moved, "first": found.first(), "last": last });
        self.audit(conn, audit, Some(described(filter)), Some(moved_ids)).await?;
        Ok(Redriven { moved, last, more })
    }

    pub(super) async fn discard(&self, tenant: &str, id: i64, actor: &str, reason: &str) -> Result<bool> {
        let sql = self.messages().sql.discard_letter;
        let mut work = self.work().await?;
        let gone: Option<(String, String, String, i64, String)> = on!(work.conn(), c => sqlx::query_as(sql).bind(tenant).bind(id).fetch_optional(c).await.map_err(read_failed)?);
        let Some((consumer, key, queue, failures, why)) = gone else {
            work.forget().await;
            return Ok(false);
        };
        let before = json!({ "consumer": consumer, "key": key, "queue": queue, "failures": failures, "reason": why });
        let reason = rows::reason(reason);
        let audit = Audit { tenant, actor, action: "letters.discard", subject: &id.to_string(), reason: &reason };
        self.audit(&mut work.conn(), audit, Some(before), None).await?;
        self.finish(work, 1).await?;
        Ok(true)
    }
}

/// Ids as a batch.
fn ids(ids: &[i64]) -> String {
    Value::Array(ids.iter().map(|id| json!({ "id": id })).collect()).to_string()
}

/// Escapes the wildcards of a text.
fn escape(text: &str) -> String {
    text.replace('!', "!!").replace('%', "!%").replace('_', "!_").replace('\0', "\u{fffd}")
}

/// A filter, for the audit.
fn described(filter: &LetterFilter) -> Value {
    json!({
        "ids": (!filter.ids.is_empty()).then_some(&filter.ids),
        "consumer": filter.consumer,
        "queue": filter.queue,
        "reason": filter.reason,
        "since": filter.since.map(|time| time.to_string()),
        "before": filter.before.map(|time| time.to_string()),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn wildcards_stand_for_themselves() {
        assert_eq!(escape("100% of_it!"), "100!% of!_it!!");
    }
}
