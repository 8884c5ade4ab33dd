//! One row per event, kind, recipient and channel.

use semel::Result;
use semel_store::{Conn, broken, from_row, on};

use super::super::model::{Kind, Notification};
use crate::http::query::Place;

macro_rules! columns {
    () => {
        "id, event_id, kind, user_id, notification_type, status, created_at, read_at, error"
    };
}

/// Which notifications are asked for.
#[derive(Default)]
pub(in super::super) struct Filter {
    pub(in super::super) kind: Option<Kind>,
    pub(in super::super) user_id: Option<String>,
    pub(in super::super) event_id: Option<String>,
    pub(in super::super) unread: Option<bool>,
}

/// A page, newest first.
pub(in super::super) async fn list(
    conn: &mut Conn<'_>,
    tenant: &str,
    filter: &Filter,
    place: Place,
) -> Result<Vec<Notification>> {
    // A text for each set of filters: `$4 IS NULL OR …` would keep SQLite from using an index. All of it is ours.
    let mut sql = concat!("SELECT ", columns!(), " FROM notifications WHERE tenant = $1 AND id < $2").to_owned();
    let mut binds = Vec::new();
    let mut equals = |column: &str, value: &str, sql: &mut String| {
        binds.push(value.to_owned());
        sql.push_str(&format!(" AND {column} = ${}", 3 + binds.len()));
    };
    match (filter.kind, &filter.user_id) {
        (Some(kind), _) => equals("kind", kind.name(), &mut sql),
        // Users are found by kind and id: of whichever kind it is.
        (None, Some(_)) => sql.push_str(" AND kind IN ('restaurant', 'customer', 'agency', 'admin')"),
        (None, None) => {}
    }
    if let Some(user_id) = &filter.user_id {
        equals("user_id", user_id, &mut sql);
    }
    if let Some(event_id) = &filter.event_id {
        equals("event_id", event_id, &mut sql);
    }
    match filter.unread {
        Some(true) => sql.push_str(" AND read_at IS NULL"),
        Some(false) => sql.push_str(" AND read_at IS NOT NULL"),
        None => {}
    }
    sql.push_str(" ORDER BY id DESC LIMIT $3");
    let before = if place.after == 0 { i64::MAX } else { place.after };
    on!(conn, c => {
        let query = sqlx::query_as(sqlx::AssertSqlSafe(sql)).bind(tenant).bind(before).bind(place.limit + 1);
        let query = binds.into_iter().fold(query, |query, value| query.bind(value));
        query.fetch_all(&mut **c).await.map_err(broken)
    })
}

const READ: &str = concat!(
    "UPDATE notifications SET read_at = COALESCE(read_at, $3) WHERE tenant = $1 AND id = $2 RETURNING ",
    columns!()
);

/// Notes that one was read; the first time counts.
pub(in super::super) async fn read(
    conn: &mut Conn<'_>,
    tenant: &str,
    id: i64,
    now: i64,
) -> Result<Option<Notification>> {
    on!(conn, c => sqlx::query_as(READ).bind(tenant).bind(id).bind(now).fetch_optional(&mut **c).await.map_err(broken))
}

const WAITING: &str = "
    SELECT EXISTS (SELECT 1 FROM notifications WHERE notification_type = 'IN_APP' AND status = 'PENDING')";

/// Whether any waits for its place in the stream.
pub(in super::super) async fn any_waiting(conn: &mut Conn<'_>) -> Result<bool> {
    on!(conn, c => sqlx::query_scalar(WAITING).fetch_one(&mut **c).await.map_err(broken))
}

const LOCK_STREAM: &str = "UPDATE notification_stream SET last_seq = last_seq WHERE one = 1 RETURNING last_seq";

/// The last place in the stream; nobody else gives places until this transaction ends.
pub(in super::super) async fn lock_stream(conn: &mut Conn<'_>) -> Result<i64> {
    on!(conn, c => sqlx::query_scalar(LOCK_STREAM).fetch_one(&mut **c).await.map_err(broken))
}

const GIVE_PLACES: &str = "
    UPDATE notifications SET status = 'SENT', sent_at = $3, stream_seq = $1 + p.number
    FROM (SELECT id, row_number() OVER (ORDER BY id) AS number FROM notifications
          WHERE notification_type = 'IN_APP' AND status = 'PENDING' ORDER BY id LIMIT $2) AS p
    WHERE notifications.id = p.id AND notifications.status = 'PENDING'";

/// Gives the oldest that wait the places after `last`; how many it were.
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

/// The last place in the stream. Every place up to it is visible.
pub(in super::super) async fn last_place(conn: &mut Conn<'_>) -> Result<i64> {
    on!(conn, c => sqlx::query_scalar(LAST_PLACE).fetch_one(&mut **c).await.map_err(broken))
}

const WHO_HAS_NEWS: &str = "
    SELECT DISTINCT tenant, kind, user_id FROM notifications WHERE stream_seq > $1 AND stream_seq <= $2";

/// Whose streams have something new between two places.
pub(in super::super) async fn who_has_news(
    conn: &mut Conn<'_>,
    after: i64,
    up_to: i64,
) -> Result<Vec<(String, String, String)>> {
    on!(conn, c => sqlx::query_as(WHO_HAS_NEWS).bind(after).bind(up_to).fetch_all(&mut **c).await.map_err(broken))
}

/// A notification in the stream.
pub(in super::super) struct Streamed {
    pub(in super::super) stream_seq: i64,
    pub(in super::super) notification: Notification,
}

from_row!(Streamed, row => { stream_seq, notification: Notification::from_row(row)? });

const STREAM: &str = concat!(
    "SELECT stream_seq, ",
    columns!(),
    " FROM notifications WHERE tenant = $1 AND kind = $2 AND user_id = $3 AND stream_seq > $4
      ORDER BY stream_seq LIMIT $5"
);

/// What a user's stream has after a place.
pub(in super::super) async fn stream(
    conn: &mut Conn<'_>,
    (tenant, kind, user_id): (&str, Kind, &str),
    after: i64,
    most: i64,
) -> Result<Vec<Streamed>> {
    on!(conn, c => sqlx::query_as(STREAM)
        .bind(tenant)
        .bind(kind.name())
        .bind(user_id)
        .bind(after)
        .bind(most)
        .fetch_all(&mut **c)
        .await
        .map_err(broken))
}
