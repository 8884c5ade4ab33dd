//! One row per event, kind, recipient and channel: read marks and positions in the stream. `listing` reads them.

use crate::sql::statements;
use semel::Result;
use semel_store::{Conn, broken, on};

const WAITING: &str = "
    SELECT EXISTS (SELECT 1 FROM notifications WHERE notification_type = 'IN_APP' AND status = 'PENDING')";

/// Whether a notification waits for its position in the stream.
pub(in super::super) async fn any_waiting(conn: &mut Conn<'_>) -> Result<bool> {
    on!(conn, c => sqlx::query_scalar(WAITING).fetch_one(&mut **c).await.map_err(broken))
}

const LOCK_STREAM: &str = "UPDATE notification_stream SET last_seq = last_seq WHERE one = 1 RETURNING last_seq";

/// The last position in the stream; no other transaction assigns positions until this one ends.
pub(in super::super) async fn lock_stream(conn: &mut Conn<'_>) -> Result<i64> {
    on!(conn, c => sqlx::query_scalar(LOCK_STREAM).fetch_one(&mut **c).await.map_err(broken))
}

const GIVE_PLACES: &str = "
    UPDATE notifications SET status = 'SENT', sent_at = $3, stream_seq = $1 + p.number
    FROM (SELECT id, row_number() OVER (ORDER BY id) AS number FROM notifications
          WHERE notification_type = 'IN_APP' AND status = 'PENDING' ORDER BY id LIMIT $2) AS p
    WHERE notifications.id = p.id AND notifications.status = 'PENDING'";

/// Assigns the positions after `last` to the oldest that wait; returns how many.
pub(in super::super) async fn give_places(conn: &mut Conn<'_>, last: i64, most: i64, now: i64) -> Result<u64> {
    on!(conn, c => sqlx::query(GIVE_PLACES)
        .bind(last)
        .bind(most)
        .bind(now)
        .execute(&mut **c)
        .await
        .map(|done| done.rows_affected())
        .map_err(broken))
}

const ADVANCE_STREAM: &str = "UPDATE notification_stream SET last_seq = $1 WHERE one = 1";

pub(in super::super) async fn advance_stream(conn: &mut Conn<'_>, last: i64) -> Result<()> {
    on!(conn, c => sqlx::query(ADVANCE_STREAM).bind(last).execute(&mut **c).await.map(drop).map_err(broken))
}

const LAST_PLACE: &str = "SELECT last_seq FROM notification_stream WHERE one = 1";

/// The last position in the stream. Every position up to it is visible.
pub(in super::super) async fn last_place(conn: &mut Conn<'_>) -> Result<i64> {
    on!(conn, c => sqlx::query_scalar(LAST_PLACE).fetch_one(&mut **c).await.map_err(broken))
}

const WHO_HAS_NEWS: &str = "
    SELECT DISTINCT tenant, kind, user_id FROM notifications WHERE stream_seq > $1 AND stream_seq <= $2";

/// The users with news between two positions.
pub(in super::super) async fn who_has_news(
    conn: &mut Conn<'_>,
    after: i64,
    up_to: i64,
) -> Result<Vec<(String, String, String)>> {
    on!(conn, c => sqlx::query_as(WHO_HAS_NEWS).bind(after).bind(up_to).fetch_all(&mut **c).await.map_err(broken))
}

const READ: &str = "
    UPDATE notifications SET read_at = COALESCE(read_at, $3) WHERE tenant = $1 AND id = $2 RETURNING id";

/// Marks a notification as read; the first time counts. Returns whether it exists.
pub(in super::super) async fn read(conn: &mut Conn<'_>, tenant: &str, id: i64, now: i64) -> Result<bool> {
    let read: Option<i64> = on!(conn, c => sqlx::query_scalar(READ)
        .bind(tenant)
        .bind(id)
        .bind(now)
        .fetch_optional(&mut **c)
        .await
        .map_err(broken)?);
    Ok(read.is_some())
}

statements!(WAITING, LOCK_STREAM, GIVE_PLACES, ADVANCE_STREAM, LAST_PLACE, WHO_HAS_NEWS, READ);
