//! How far an event has been brought to the recipients of a kind.

use bytes::Bytes;
use semel::Result;
use semel_store::{Conn, broken, codec, from_row, on};

use super::super::{message::Body, model::Kind};

/// A fan-out, as it stands.
pub(in super::super) struct Fanout {
    pub(in super::super) kind: String,
    /// The revision of the directory that it goes by.
    pub(in super::super) revision: i64,
    pub(in super::super) notifications: i64,
    pub(in super::super) begun_at: i64,
    pub(in super::super) done_at: Option<i64>,
}

from_row!(Fanout { kind, revision, notifications, begun_at, done_at });

const BEGIN: &str = "
    INSERT INTO notification_fanouts (tenant, event_id, kind, aggregate_type, event_type, payload, revision)
    VALUES ($1, $2, $3, $4, $5, $6, COALESCE((SELECT revision FROM notification_directories WHERE tenant = $1), 0))
    ON CONFLICT (tenant, event_id, kind) DO NOTHING
    RETURNING kind, revision, notifications, begun_at, done_at";

/// Begins a fan-out, as of the present revision of the directory: every change up to it has been committed. One that
/// has begun before goes by what it began with.
pub(in super::super) async fn begin(
    conn: &mut Conn<'_>,
    tenant: &str,
    kind: Kind,
    body: &Body,
) -> Result<Option<Fanout>> {
    let payload = body.payload.as_ref().map_or("{}", |payload| payload.get());
    let begun = on!(conn, c => sqlx::query_as(BEGIN)
        .bind(tenant)
        .bind(&body.event_id)
        .bind(kind.name())
        .bind(&body.aggregate_type)
        .bind(&body.event_type)
        .bind(codec::encode(payload.as_bytes()))
        .fetch_optional(&mut **c)
        .await
        .map_err(broken)?);
    if begun.is_some() { Ok(begun) } else { find(conn, tenant, &body.event_id, kind).await }
}

const FIND: &str = "
    SELECT kind, revision, notifications, begun_at, done_at FROM notification_fanouts
    WHERE tenant = $1 AND event_id = $2 AND kind = $3";

pub(in super::super) async fn find(
    conn: &mut Conn<'_>,
    tenant: &str,
    event_id: &str,
    kind: Kind,
) -> Result<Option<Fanout>> {
    on!(conn, c => sqlx::query_as(FIND)
        .bind(tenant)
        .bind(event_id)
        .bind(kind.name())
        .fetch_optional(&mut **c)
        .await
        .map_err(broken))
}

const ALL: &str = "
    SELECT kind, revision, notifications, begun_at, done_at FROM notification_fanouts
    WHERE tenant = $1 AND event_id = $2";

/// Those of all kinds.
pub(in super::super) async fn all(conn: &mut Conn<'_>, tenant: &str, event_id: &str) -> Result<Vec<Fanout>> {
    on!(conn, c => sqlx::query_as(ALL).bind(tenant).bind(event_id).fetch_all(&mut **c).await.map_err(broken))
}

/// Differs in the clock.
macro_rules! advance {
    ($clock:literal) => {
        concat!(
            "UPDATE notification_fanouts
             SET recipients = recipients + $4, notifications = notifications + $5, done_at = CASE WHEN $6 THEN ",
            $clock,
            " END WHERE tenant = $1 AND event_id = $2 AND kind = $3"
        )
    };
}

/// Notes that more recipients were reached, and whether these were the last.
pub(in super::super) async fn advance(
    conn: &mut Conn<'_>,
    (tenant, event_id, kind): (&str, &str, Kind),
    recipients: usize,
    notifications: usize,
    done: bool,
) -> Result<()> {
    let sql = match conn {
        Conn::Postgres(_) => advance!("(extract(epoch FROM clock_timestamp()) * 1000000)::bigint"),
        Conn::Sqlite(_) => advance!("CAST(round(unixepoch('subsec') * 1000) AS INTEGER) * 1000"),
    };
    on!(conn, c => sqlx::query(sql)
        .bind(tenant)
        .bind(event_id)
        .bind(kind.name())
        .bind(i64::try_from(recipients).unwrap_or(i64::MAX))
        .bind(i64::try_from(notifications).unwrap_or(i64::MAX))
        .bind(done)
        .execute(&mut **c)
        .await
        .map(drop)
        .map_err(broken))
}

/// What an event says to a kind of recipient, for who delivers it.
pub(in super::super) struct Content {
    /// The type of the aggregate.
    pub(in super::super) aggregate_type: String,
    /// The type of the event.
    pub(in super::super) event_type: String,
    /// The payload: the text of a JSON object, as it came.
    pub(in super::super) payload: Bytes,
}

const CONTENT: &str = "
    SELECT aggregate_type, event_type, payload FROM notification_fanouts
    WHERE tenant = $1 AND event_id = $2 AND kind = $3";

/// What an event says to a kind of recipient; there whenever there is a notification of it.
pub(in super::super) async fn content(
    conn: &mut Conn<'_>,
    tenant: &str,
    event_id: &str,
    kind: &str,
) -> Result<Option<Content>> {
    let found: Option<(String, String, Vec<u8>)> = on!(conn, c => sqlx::query_as(CONTENT)
        .bind(tenant)
        .bind(event_id)
        .bind(kind)
        .fetch_optional(&mut **c)
        .await
        .map_err(broken)?);
    let read = |(aggregate_type, event_type, payload)| {
        Ok(Content { aggregate_type, event_type, payload: codec::decode(payload)? })
    };
    found.map(read).transpose()
}
