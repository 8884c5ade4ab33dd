//! The SQL of deliveries.

use bytes::Bytes;
use semel::Result;
use semel_store::{Conn, Projection, broken, codec, from_row, on};
use serde_json::json;

use super::deliver::{KINDS, SERVICE};
use crate::sql::statements;

/// The status of a notification follows its delivery. While it is PENDING, it keeps the number of the last attempt even
/// if a person has reset the attempts.
pub(super) const STATUS: Projection = Projection {
    service: SERVICE,
    kinds: KINDS,
    update: "
        UPDATE notifications AS n
        SET status = CASE WHEN o.state = 'completed' THEN 'SENT' WHEN o.state = 'in_doubt' THEN 'IN_DOUBT'
                          WHEN o.state <> 'processing' AND o.due IS NULL THEN 'FAILED' ELSE 'PENDING' END,
            error = o.error,
            attempt = CASE WHEN o.state = 'pending' AND o.attempt < n.attempt THEN n.attempt ELSE o.attempt END,
            sent_at = CASE WHEN o.state = 'completed' THEN o.settled_at END
        FROM {operations} AS o
        WHERE n.tenant = o.tenant AND n.id = CAST(o.key AS BIGINT) AND 'deliver.' || n.notification_type = o.kind",
};

/// A notification to be delivered, with the data of its event.
#[derive(Clone, Debug)]
pub(super) struct Due {
    pub(super) id: i64,
    pub(super) event_id: String,
    pub(super) kind: String,
    pub(super) user_id: String,
    pub(super) notification_type: String,
    pub(super) aggregate_type: String,
    pub(super) event_type: String,
    /// The JSON text as it arrived.
    pub(super) payload: Bytes,
}

const DUE: &str = "
    SELECT n.event_id, n.kind, n.user_id, n.notification_type, f.aggregate_type, f.event_type, f.payload
    FROM notifications AS n
    JOIN notification_fanouts AS f ON f.tenant = n.tenant AND f.event_id = n.event_id AND f.kind = n.kind
    WHERE n.tenant = $1 AND n.id = $2";

/// A notification with its event; a notification always has one.
pub(super) async fn due(conn: &mut Conn<'_>, tenant: &str, id: i64) -> Result<Option<Due>> {
    type Row = (String, String, String, String, String, String, Vec<u8>);
    let found: Option<Row> =
        on!(conn, c => sqlx::query_as(DUE).bind(tenant).bind(id).fetch_optional(&mut **c).await.map_err(broken)?);
    let read = |(event_id, kind, user_id, notification_type, aggregate_type, event_type, payload): Row| {
        let payload = codec::decode(payload)?;
        Ok(Due { id, event_id, kind, user_id, notification_type, aggregate_type, event_type, payload })
    };
    found.map(read).transpose()
}

const FIND: &str = "SELECT notification_type, status FROM notifications WHERE tenant = $1 AND id = $2";

/// The channel and the status of a notification.
pub(super) async fn find(conn: &mut Conn<'_>, tenant: &str, id: i64) -> Result<Option<(String, String)>> {
    on!(conn, c => sqlx::query_as(FIND).bind(tenant).bind(id).fetch_optional(&mut **c).await.map_err(broken))
}

/// What the migration reads of a notification.
pub(super) struct Bare {
    pub(super) id: i64,
    pub(super) tenant: String,
    pub(super) notification_type: String,
}

from_row!(Bare { id, tenant, notification_type });

/// The same, if it can be read: SQLite also stores bytes in a column of texts.
pub(super) struct Any {
    pub(super) id: i64,
    pub(super) bare: Option<Bare>,
}

from_row!(Any, row => { id: row.try_get("id")?, bare: sqlx::FromRow::from_row(row).ok() });

const BARE: &str = "
    SELECT id, tenant, notification_type FROM notifications
    WHERE status = 'PENDING' AND notification_type <> 'IN_APP' AND NOT enqueued AND id > $1
    ORDER BY id LIMIT $2";

/// The first notifications without an operation, after an id.
pub(super) async fn bare(conn: &mut Conn<'_>, after: i64, most: i64) -> Result<Vec<Any>> {
    on!(conn, c => sqlx::query_as(BARE).bind(after).bind(most).fetch_all(&mut **c).await.map_err(broken))
}

/// The first notification without an operation, readable or not.
pub(super) async fn first_bare(conn: &mut Conn<'_>) -> Result<Option<i64>> {
    on!(conn, c => sqlx::query_scalar(BARE).bind(0_i64).bind(1_i64).fetch_optional(&mut **c).await.map_err(broken))
}

const PAGE: &str = "
    SELECT max(id) FROM (SELECT id FROM notifications WHERE id > $1 ORDER BY id LIMIT $2) AS page";
const WAITING: &str = "
    SELECT id, tenant, notification_type FROM notifications
    WHERE id > $1 AND id <= $2 AND status = 'PENDING' AND notification_type <> 'IN_APP' AND enqueued
    ORDER BY id";

/// The pending notifications with an operation among the first ones after an id, and the last of all these. By the
/// primary key: no index has them, and a page is bounded whatever the statuses are.
pub(super) async fn waiting(conn: &mut Conn<'_>, after: i64, most: i64) -> Result<Option<(i64, Vec<Any>)>> {
    let last: Option<i64> =
        on!(conn, c => sqlx::query_scalar(PAGE).bind(after).bind(most).fetch_one(&mut **c).await.map_err(broken)?);
    let Some(last) = last else { return Ok(None) };
    let found =
        on!(conn, c => sqlx::query_as(WAITING).bind(after).bind(last).fetch_all(&mut **c).await.map_err(broken)?);
    Ok(Some((last, found)))
}

// Differs because JSON texts become rows in another way, and SQLite has no row locks: there is one writer.
const FREE_POSTGRES: &str = "
    SELECT id FROM notifications
    WHERE status = 'PENDING' AND id IN (SELECT CAST(value AS BIGINT) FROM json_array_elements_text($1::json))
    ORDER BY id FOR NO KEY UPDATE SKIP LOCKED";
const FREE_SQLITE: &str = "
    SELECT id FROM notifications WHERE status = 'PENDING' AND id IN (SELECT value FROM json_each($1)) ORDER BY id";

/// Locks those of these notifications that are pending and that no other transaction has locked.
pub(super) async fn free(conn: &mut Conn<'_>, ids: &[i64]) -> Result<Vec<i64>> {
    let sql = match conn {
        Conn::Postgres(_) => FREE_POSTGRES,
        Conn::Sqlite(_) => FREE_SQLITE,
    };
    let ids = json!(ids).to_string();
    on!(conn, c => sqlx::query_scalar(sql).bind(ids).fetch_all(&mut **c).await.map_err(broken))
}

// Differs because JSON texts become rows in another way.
const ENQUEUED_POSTGRES: &str = "
    UPDATE notifications SET enqueued = TRUE
    WHERE id IN (SELECT CAST(value AS BIGINT) FROM json_array_elements_text($1::json))";
const ENQUEUED_SQLITE: &str = "
    UPDATE notifications SET enqueued = TRUE WHERE id IN (SELECT value FROM json_each($1))";

/// Marks notifications as enqueued.
pub(super) async fn enqueued(conn: &mut Conn<'_>, ids: &[i64]) -> Result<()> {
    let sql = match conn {
        Conn::Postgres(_) => ENQUEUED_POSTGRES,
        Conn::Sqlite(_) => ENQUEUED_SQLITE,
    };
    let ids = json!(ids).to_string();
    on!(conn, c => sqlx::query(sql).bind(ids).execute(&mut **c).await.map(drop).map_err(broken))
}

statements!(STATUS, DUE, FIND, BARE, PAGE, WAITING, FREE_POSTGRES, FREE_SQLITE, ENQUEUED_POSTGRES, ENQUEUED_SQLITE);
