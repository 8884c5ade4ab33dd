//! The progress of an event's fan-out to one kind.

use semel::Result;
use semel_store::{Conn, broken, codec, from_row, on};

use super::super::{message::Body, model::Kind};
use crate::sql::statements;

/// A fan-out and its progress.
pub(in super::super) struct Fanout {
    pub(in super::super) kind: String,
    /// Its revision of the directory.
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

/// Begins a fan-out with the present revision of the directory: every change up to it is committed. A fan-out that
/// began before keeps its revision.
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

/// The fan-outs of all kinds.
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

const ADVANCE_POSTGRES: &str = advance!("(extract(epoch FROM clock_timestamp()) * 1000000)::bigint");
const ADVANCE_SQLITE: &str = advance!("CAST(round(unixepoch('subsec') * 1000) AS INTEGER) * 1000");

/// Records that more recipients were reached, and whether these were the last.
pub(in super::super) async fn advance(
    conn: &mut Conn<'_>,
    (tenant, event_id, kind): (&str, &str, Kind),
    recipients: usize,
    notifications: usize,
    done: bool,
) -> Result<()> {
    let sql = match conn {
        Conn::Postgres(_) => ADVANCE_POSTGRES,
        Conn::Sqlite(_) => ADVANCE_SQLITE,
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

statements!(BEGIN, FIND, ALL, ADVANCE_POSTGRES, ADVANCE_SQLITE);
