//! Reads the outbox, and what a person may do about it.

use semel::{
    Fence, Result, Timestamp,
    journal::{Event, Note},
    messaging::{Backlog, MessageId, OutboxFilter, OutboxListing, OutboxState, Topic},
};
use serde_json::json;
use sqlx::SqliteConnection;

use super::{News, rows, unread};
use crate::{
    Database,
    audit::Audit,
    connection::{broken, read_failed},
    database::Inner,
    on,
};

/// How long receipts are kept.
const RECEIPTS: i64 = 7 * 24 * 3600 * 1_000_000;

/// Id, state, topic, ordering key, number, failures, and the operation and fence of the run that put it.
type HeldRow = (i64, String, String, Option<String>, Option<i64>, i64, Option<i64>, Option<i64>);

/// The most messages that are returned for one operation.
const MOST_OF_OPERATION: i64 = 100;

/// A message that was not published at once.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HeldMessage {
    /// Its id.
    pub id: String,
    /// The destination.
    pub topic: String,
    /// Waiting, unroutable or parked.
    pub state: OutboxState,
    /// The error of the last attempt.
    pub error: Option<String>,
    /// When it was put.
    pub put_at: Timestamp,
}

type HeldMessageRow = (String, String, String, Option<Vec<u8>>, i64);

/// The state and the error of a row.
fn stands(state: &str, error: Option<Vec<u8>>) -> Result<(OutboxState, Option<String>)> {
    let state = OutboxState::parse(state).ok_or(semel::Error::Corrupt("a state in the outbox"))?;
    let error = error.map(crate::codec::decode).transpose()?;
    Ok((state, error.map(|error| String::from_utf8_lossy(&error).into_owned())))
}

impl Database {
    /// Messages of a tenant's operation that were not published at once: the first hundred, oldest first.
    ///
    /// # Errors
    /// The database cannot be reached.
    pub async fn held_messages(&self, tenant: &str, operation: i64) -> Result<Vec<HeldMessage>> {
        self.answer(async {
            let mut reader = self.reader().await?;
            let sql = self.messages().sql.held_of_operation;
            let rows: Vec<HeldMessageRow> = on!(reader.conn(), c => sqlx::query_as(sql)
                .bind(tenant).bind(operation).bind(MOST_OF_OPERATION).fetch_all(c).await.map_err(read_failed)?);
            reader.leave();
            let read = |(id, topic, state, error, put_at): HeldMessageRow| {
                let (state, error) = stands(&state, error)?;
                Ok(HeldMessage { id, topic, state, error, put_at: Timestamp::from_micros(put_at) })
            };
            rows.into_iter().map(read).collect()
        })
        .await
    }

    /// The single number of a statement without parameters.
    pub(super) async fn look(&self, sql: &'static str) -> Result<Option<i64>> {
        let mut reader = self.reader().await?;
        let found = on!(reader.conn(), c => sqlx::query_scalar(sql).fetch_optional(c).await.map_err(read_failed)?);
        reader.leave();
        Ok(found)
    }

    /// Whether a message is in the outbox: put, and neither published nor skipped yet.
    ///
    /// # Errors
    /// The database cannot be reached.
    pub async fn is_in_outbox(&self, tenant: &str, id: MessageId) -> Result<bool> {
        self.answer(async {
            let mut reader = self.reader().await?;
            let sql = "SELECT id FROM semel_outbox WHERE tenant = $1 AND message_id = $2";
            let found: Option<i64> = on!(reader.conn(), c =>
                sqlx::query_scalar(sql).bind(tenant).bind(id.to_string()).fetch_optional(c).await.map_err(read_failed)?);
            reader.leave();
            Ok(found.is_some())
        })
        .await
    }

    /// The state of a message in the outbox, with its last error; `None` once it is published or skipped.
    ///
    /// # Errors
    /// The database cannot be reached.
    pub async fn in_outbox(&self, tenant: &str, id: MessageId) -> Result<Option<(OutboxState, Option<String>)>> {
        self.answer(async {
            let mut reader = self.reader().await?;
            let sql = "SELECT state, error FROM semel_outbox WHERE tenant = $1 AND message_id = $2";
            let found: Option<(String, Option<Vec<u8>>)> = on!(reader.conn(), c =>
                sqlx::query_as(sql).bind(tenant).bind(id.to_string()).fetch_optional(c).await.map_err(read_failed)?);
            reader.leave();
            found.map(|(state, error)| stands(&state, error)).transpose()
        })
        .await
    }

    /// Counts of a tenant's unroutable and parked messages of a service's operations with this third label, by topic
    /// and state. Reads the first thousand of the tenant's, oldest first.
    ///
    /// # Errors
    /// The database cannot be reached.
    pub async fn stuck_messages(
        &self,
        tenant: &str,
        service: &str,
        label3: &str,
    ) -> Result<Vec<(String, OutboxState, u64)>> {
        self.answer(async {
            let mut reader = self.reader().await?;
            let sql = self.messages().sql.stuck_of_service;
            let found: Vec<(String, String, i64)> = on!(reader.conn(), c => sqlx::query_as(sql)
                .bind(tenant).bind(service).bind(label3).fetch_all(c).await.map_err(read_failed)?);
            reader.leave();
            let read = |(topic, state, n): (String, String, i64)| {
                let state = OutboxState::parse(&state).ok_or(semel::Error::Corrupt("a state in the outbox"))?;
                Ok((topic, state, u64::try_from(n).unwrap_or(0)))
            };
            found.into_iter().map(read).collect()
        })
        .await
    }

    /// The time, for a reader.
    pub(super) async fn look_now(&self) -> Result<i64> {
        let now = match self.inner() {
            Inner::Postgres(db) => db.now().await?,
            Inner::Sqlite(db) => db.now().await?,
        };
        Ok(now.as_micros())
    }

    /// The time on SQLite, in a transaction.
    pub(super) async fn host_now(&self, conn: &mut SqliteConnection) -> Result<i64> {
        sqlx::query_scalar("SELECT max($1, clock) FROM semel_meta WHERE only = 1")
            .bind(self.clock())
            .fetch_one(conn)
            .await
            .map_err(read_failed)
    }

    pub(super) async fn find_receipt(&self, tenant: &str, id: MessageId) -> Result<Option<Timestamp>> {
        let sql = self.messages().sql.receipt;
        let mut reader = self.reader().await?;
        let sent: Option<i64> = on!(reader.conn(), c => sqlx::query_scalar(sql).bind(tenant).bind(id.to_string())
            .fetch_optional(c).await.map_err(read_failed)?);
        reader.leave();
        Ok(sent.map(Timestamp::from_micros))
    }

    /// Deletes old receipts, at most this many; whether there may be more. Part of the sweep.
    pub(crate) async fn purge_receipts(&self, limit: u32) -> Result<bool> {
        let sql = &self.messages().sql;
        self.answer(async {
            let before = self.look_now().await? - RECEIPTS;
            let mut reader = self.reader().await?;
            let any: Option<i64> = on!(reader.conn(), c => sqlx::query_scalar(sql.any_receipts).bind(before)
                .fetch_optional(c).await.map_err(read_failed)?);
            reader.leave();
            if any.is_none() {
                return Ok(false);
            }
            let mut work = self.statement().await?;
            let purged = on!(work.conn(), c => sqlx::query(sql.purge_receipts).bind(before).bind(i64::from(limit))
                .execute(c).await.map(|done| done.rows_affected()))
            .map_err(broken)?;
            self.finish(work, 1).await?;
            Ok(purged >= u64::from(limit))
        })
        .await
    }

    pub(super) async fn list_outbox(
        &self,
        filter: &OutboxFilter,
        after: Option<i64>,
        limit: u32,
    ) -> Result<OutboxListing> {
        use OutboxState::{Parked, Unroutable, Waiting};
        let sql = match filter.state {
            Some(Waiting | Unroutable | Parked) => self.messages().sql.list_held,
            _ => self.messages().sql.list,
        };
        let limit = limit.clamp(1, 500);
        let mut reader = self.reader().await?;
        let rows = on!(reader.conn(), c => sqlx::query_as(sql)
            .bind(&filter.tenant)
            .bind(after.unwrap_or(0))
            .bind(filter.topic.as_ref().map(Topic::as_str))
            .bind(filter.state.map(OutboxState::as_str))
            // One more than requested: it shows whether there is another page.
            .bind(i64::from(limit) + 1)
            .fetch_all(c).await.map_err(read_failed)?);
        reader.leave();
        let (items, unreadable, next) = unread::page(rows, limit);
        Ok(OutboxListing { items, unreadable, next })
    }

    pub(super) async fn redrive_row(&self, tenant: &str, id: MessageId, actor: &str) -> Result<bool> {
        let sql = &self.messages().sql;
        let mut work = self.work().await?;
        let Some(held) = self.load_held(&mut work, tenant, id).await? else {
            work.forget().await;
            return Ok(false);
        };
        let done = on!(work.conn(), c => sqlx::query(sql.redrive).bind(held.0).execute(c).await
            .map(|done| done.rows_affected()));
        if done.map_err(broken)? == 0 {
            work.forget().await;
            return Ok(false);
        }
        let after = json!({ "state": OutboxState::Ready.as_str() });
        let audit = Audit { tenant, actor, action: "outbox.redrive", subject: &id.to_string(), reason: "" };
        self.audit(&mut work.conn(), audit, Some(before(&held)), Some(after)).await?;
        self.finish(work, 1).await?;
        self.wakes().wake(News::Outbox);
        Ok(true)
    }

    pub(super) async fn skip_row(&self, tenant: &str, id: MessageId, actor: &str, reason: &str) -> Result<bool> {
        let sql = &self.messages().sql;
        let mut work = self.work().await?;
        let Some(held) = self.load_held(&mut work, tenant, id).await? else {
            work.forget().await;
            return Ok(false);
        };
        let done = on!(work.conn(), c => sqlx::query(sql.skip).bind(held.0).execute(c).await
            .map(|done| done.rows_affected()));
        if done.map_err(broken)? == 0 {
            work.forget().await;
            return Ok(false);
        }
        if let (Some(key), Some(number)) = (&held.3, held.4) {
            on!(work.conn(), c => sqlx::query(sql.free_next).bind(tenant).bind(key).bind(number).bind(self.clock())
                .execute(c).await.map(drop))
            .map_err(broken)?;
        }
        let reason = rows::reason(reason);
        self.note_skip(&mut work.conn(), (id, &held), actor, &reason).await?;
        let audit = Audit { tenant, actor, action: "outbox.skip", subject: &id.to_string(), reason: &reason };
        self.audit(&mut work.conn(), audit, Some(before(&held)), None).await?;
        self.finish(work, 1).await?;
        self.wakes().wake(News::Outbox);
        Ok(true)
    }

    /// Notes a skipped message in the journal of its operation, if that still exists: nothing else there shows that the
    /// message was never published.
    async fn note_skip(
        &self,
        conn: &mut crate::Conn<'_>,
        (message, held): (MessageId, &HeldRow),
        actor: &str,
        reason: &str,
    ) -> Result<()> {
        let (Some(operation), Some(fence)) = (held.6, held.7) else { return Ok(()) };
        let sql = "SELECT id FROM semel_operations WHERE id = $1";
        let there: Option<i64> = on!(conn, c => sqlx::query_scalar(sql).bind(operation).fetch_optional(&mut **c).await.map_err(read_failed)?);
        if there.is_none() {
            return Ok(());
        }
        let note = Note {
            at: Timestamp::from_micros(self.look_now().await?),
            event: Event::Resolved,
            fence: Fence(fence),
            actor: actor.to_owned(),
            detail: semel::journal::skipped(&message.to_string(), reason),
        };
        conn.batch(self.sql().insert_journal, &[crate::rows::note(operation, &note)]).await.map(drop)
    }

    async fn load_held(&self, work: &mut super::work::Work, tenant: &str, id: MessageId) -> Result<Option<HeldRow>> {
        let sql = self.messages().sql.load_held;
        on!(work.conn(), c => sqlx::query_as(sql).bind(tenant).bind(id.to_string()).fetch_optional(c).await)
            .map_err(read_failed)
    }

    pub(super) async fn count_outbox(&self) -> Result<Backlog> {
        let sql = self.messages().sql.backlog;
        let most = i64::try_from(Backlog::MOST).unwrap_or(i64::MAX);
        let mut reader = self.reader().await?;
        let (ready, waiting, blocked, unroutable, parked, oldest): (i64, i64, i64, i64, i64, Option<i64>) =
            on!(reader.conn(), c => sqlx::query_as(sql).bind(most).fetch_one(c).await.map_err(read_failed)?);
        reader.leave();
        let counts = OutboxState::ALL.into_iter().map(|state| {
            let n = match state {
                OutboxState::Ready => ready,
                OutboxState::Waiting => waiting,
                OutboxState::Blocked => blocked,
                OutboxState::Unroutable => unroutable,
                OutboxState::Parked => parked,
            };
            (state, u64::try_from(n).unwrap_or(0))
        });
        Ok(Backlog { counts: counts.collect(), oldest: oldest.map(Timestamp::from_micros) })
    }
}

/// A row as it was, without its body.
fn before((_, state, topic, ordering_key, number, failures, ..): &HeldRow) -> serde_json::Value {
    json!({ "state": state, "topic": topic, "orderingKey": ordering_key, "number": number, "failures": failures })
}
