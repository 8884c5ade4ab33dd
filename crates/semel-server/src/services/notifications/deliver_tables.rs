//! The SQL of deliveries: one text for both databases, but where it says why not.

use semel::{Result, Timestamp};
use semel_store::{Conn, broken, from_row, on};
use serde_json::{Value, json};

/// A notification that is to be delivered.
#[derive(Clone, Debug)]
pub(super) struct Due {
    pub(super) id: i64,
    pub(super) tenant: String,
    pub(super) event_id: String,
    pub(super) kind: String,
    pub(super) user_id: String,
    pub(super) notification_type: String,
}

from_row!(Due { id, tenant, event_id, kind, user_id, notification_type });

const NEXT_DUE: &str = "
    SELECT due_at FROM notifications WHERE notification_type = $1 AND status = 'PENDING' ORDER BY due_at, id LIMIT 1";

/// When the next notification of a channel is to be looked at, if any is.
pub(super) async fn next_due(conn: &mut Conn<'_>, channel: &str) -> Result<Option<Timestamp>> {
    let due: Option<i64> =
        on!(conn, c => sqlx::query_scalar(NEXT_DUE).bind(channel).fetch_optional(&mut **c).await.map_err(broken)?);
    Ok(due.map(Timestamp::from_micros))
}

// Differs because many nodes take at the same time on PostgreSQL, and should not wait for one another.
const TAKE_POSTGRES: &str = "
    UPDATE notifications SET due_at = $3
    WHERE id IN (
        SELECT id FROM notifications WHERE notification_type = $1 AND status = 'PENDING' AND due_at <= $2
        ORDER BY due_at, id LIMIT $4 FOR UPDATE SKIP LOCKED)
    RETURNING id, tenant, event_id, kind, user_id, notification_type";
const TAKE_SQLITE: &str = "
    UPDATE notifications SET due_at = $3
    WHERE id IN (
        SELECT id FROM notifications WHERE notification_type = $1 AND status = 'PENDING' AND due_at <= $2
        ORDER BY due_at, id LIMIT $4)
    RETURNING id, tenant, event_id, kind, user_id, notification_type";

/// Takes up to `limit` notifications of a channel that are due; nobody else looks at them before `until`.
pub(super) async fn take(
    conn: &mut Conn<'_>,
    channel: &str,
    now: Timestamp,
    until: Timestamp,
    limit: i64,
) -> Result<Vec<Due>> {
    let sql = match conn {
        Conn::Postgres(_) => TAKE_POSTGRES,
        Conn::Sqlite(_) => TAKE_SQLITE,
    };
    on!(conn, c => sqlx::query_as(sql)
        .bind(channel)
        .bind(now.as_micros())
        .bind(until.as_micros())
        .bind(limit)
        .fetch_all(&mut **c)
        .await
        .map_err(broken))
}

/// What is to be written about a notification.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Mark {
    pub(super) tenant: String,
    pub(super) id: i64,
    pub(super) status: &'static str,
    /// Nothing leaves a notification that stays pending the last one that it had.
    pub(super) error: Option<String>,
    /// Which attempt this was, if one was made.
    pub(super) attempt: Option<u32>,
    pub(super) due_at: i64,
    pub(super) sent_at: Option<i64>,
}

impl Mark {
    fn json(&self) -> Value {
        json!({
            "tenant": self.tenant,
            "id": self.id,
            "status": self.status,
            "error": self.error,
            "attempt": self.attempt,
            "due_at": self.due_at,
            "sent_at": self.sent_at,
        })
    }
}

// Differs in how a batch is read from JSON.
const MARK_POSTGRES: &str = "
    UPDATE notifications AS n
    SET status = m.status, due_at = m.due_at, sent_at = m.sent_at, attempt = COALESCE(m.attempt, n.attempt),
        error = CASE WHEN m.status = 'PENDING' THEN COALESCE(m.error, n.error) ELSE m.error END
    FROM json_to_recordset($1::json)
        AS m (tenant TEXT, id BIGINT, status TEXT, error TEXT, attempt BIGINT, due_at BIGINT, sent_at BIGINT)
    WHERE n.tenant = m.tenant AND n.id = m.id AND n.status = 'PENDING'";
const MARK_SQLITE: &str = "
    UPDATE notifications
    SET status = m.status, due_at = m.due_at, sent_at = m.sent_at, attempt = COALESCE(m.attempt, notifications.attempt),
        error = CASE WHEN m.status = 'PENDING' THEN COALESCE(m.error, notifications.error) ELSE m.error END
    FROM (
        SELECT value ->> 'tenant' AS tenant, value ->> 'id' AS id, value ->> 'status' AS status,
            value ->> 'error' AS error, value ->> 'attempt' AS attempt, value ->> 'due_at' AS due_at,
            value ->> 'sent_at' AS sent_at
        FROM json_each($1)) AS m
    WHERE notifications.tenant = m.tenant AND notifications.id = m.id AND notifications.status = 'PENDING'";

/// Writes how notifications stand, those that are still pending.
pub(super) async fn mark(conn: &mut Conn<'_>, marks: &[Mark]) -> Result<()> {
    let batch = Value::from_iter(marks.iter().map(Mark::json)).to_string();
    let sql = match conn {
        Conn::Postgres(_) => MARK_POSTGRES,
        Conn::Sqlite(_) => MARK_SQLITE,
    };
    on!(conn, c => sqlx::query(sql).bind(batch).execute(&mut **c).await.map(drop).map_err(broken))
}

const FIND: &str = "SELECT notification_type, status FROM notifications WHERE tenant = $1 AND id = $2";

/// The channel and the status of a notification.
pub(super) async fn find(conn: &mut Conn<'_>, tenant: &str, id: i64) -> Result<Option<(String, String)>> {
    on!(conn, c => sqlx::query_as(FIND).bind(tenant).bind(id).fetch_optional(&mut **c).await.map_err(broken))
}

const RESOLVE: &str = "
    UPDATE notifications SET status = $3, error = $4, due_at = 0, sent_at = $5
    WHERE tenant = $1 AND id = $2 AND status <> 'SENT'";

/// Writes what a person decided.
pub(super) async fn resolve(conn: &mut Conn<'_>, mark: &Mark) -> Result<()> {
    on!(conn, c => sqlx::query(RESOLVE)
        .bind(&mark.tenant)
        .bind(mark.id)
        .bind(mark.status)
        .bind(&mark.error)
        .bind(mark.sent_at)
        .execute(&mut **c)
        .await
        .map(drop)
        .map_err(broken))
}
