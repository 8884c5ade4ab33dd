//! Notifications with their payloads: a page of a list, a page of a stream, and one by its id.

use std::ops::Range;

use semel::{Error, Result};
use semel_store::{Conn, broken, codec, from_row, on};
use serde_json::value::RawValue;

use super::{
    super::model::{Channel, Kind, Notification},
    recipients,
    within::{Table, Within},
};
use crate::http::query::Place;
use crate::sql::statements;

/// The most bytes of payloads on a page, unless its first one alone has more. A payload may have 256 KiB; 500 of them
/// would be 128 MB of memory per request.
pub(super) const PAGE_BYTES: i64 = 4 << 20;

/// The same for a stream: a slow client keeps its page in memory, and there may be a thousand clients.
const STREAM_BYTES: i64 = 1 << 20;

const WHOLE: &str = "
    SELECT n.id, n.event_id, f.event_type, n.kind, n.user_id, n.notification_type, r.addresses, n.status, n.created_at,
        n.read_at, n.error, n.attempt, n.stream_seq, f.payload
    FROM notifications AS n
    LEFT JOIN notification_fanouts AS f ON f.tenant = n.tenant AND f.event_id = n.event_id AND f.kind = n.kind
    LEFT JOIN notification_recipients AS r
        ON r.tenant = n.tenant AND r.kind = n.kind AND r.user_id = n.user_id AND r.until IS NULL
    WHERE n.tenant = $1";

/// The same rows: only the sizes of their payloads.
const WEIGHT: &str = "
    SELECT n.id, CAST(COALESCE(length(f.payload), 0) AS BIGINT) AS weight
    FROM notifications AS n
    LEFT JOIN notification_fanouts AS f ON f.tenant = n.tenant AND f.event_id = n.event_id AND f.kind = n.kind
    WHERE n.tenant = $1";

/// How many of these rows fit a page: at least one, or a list would never advance.
pub(super) fn fitting(rows: &[(i64, i64)], most_bytes: i64) -> usize {
    let mut bytes = 0;
    let fits = |(_, weight): &&(i64, i64)| {
        bytes += weight;
        bytes <= most_bytes
    };
    rows.iter().take_while(fits).count().max(1).min(rows.len())
}

struct Row {
    id: i64,
    event_id: String,
    event_type: Option<String>,
    kind: String,
    user_id: String,
    notification_type: String,
    addresses: Option<Vec<u8>>,
    status: String,
    created_at: i64,
    read_at: Option<i64>,
    error: Option<String>,
    attempt: i64,
    stream_seq: Option<i64>,
    payload: Option<Vec<u8>>,
}

from_row!(Row {
    id,
    event_id,
    event_type,
    kind,
    user_id,
    notification_type,
    addresses,
    status,
    created_at,
    read_at,
    error,
    attempt,
    stream_seq,
    payload,
});

impl Row {
    /// Leaves out unreadable parts, and the error says so: one such row must not hide the others of its page.
    fn read(self) -> Notification {
        let payload = self.payload.map(read_payload).transpose();
        let address = self.addresses.map(recipients::read_addresses).transpose();
        let unreadable = payload.as_ref().err().or(address.as_ref().err()).map(|why| format!("unreadable: {why}"));
        // One column, two meanings: why it ended, or why the last attempt failed.
        let (last_error, error) = if self.status == "PENDING" { (self.error, None) } else { (None, self.error) };
        Notification {
            id: self.id,
            event_id: self.event_id,
            event_type: self.event_type,
            kind: self.kind,
            user_id: self.user_id,
            address: address.ok().flatten().and_then(|mut all| all.remove(&self.notification_type)),
            notification_type: self.notification_type,
            last_error,
            attempt: self.attempt,
            status: self.status,
            created_at: self.created_at,
            read_at: self.read_at,
            error: unreadable.or(error),
            payload: payload.ok().flatten(),
        }
    }
}

pub(super) fn read_payload(stored: Vec<u8>) -> Result<Box<RawValue>> {
    let text = String::from_utf8(codec::decode(stored)?.to_vec()).map_err(|_| Error::Corrupt("a stored payload"))?;
    RawValue::from_string(text).map_err(|_| Error::Corrupt("a stored payload"))
}

/// The filter of a list.
#[derive(Default)]
pub(in super::super) struct Filter {
    pub(in super::super) kind: Option<Kind>,
    pub(in super::super) user_id: Option<String>,
    pub(in super::super) event_id: Option<String>,
    pub(in super::super) unread: Option<bool>,
    pub(in super::super) status: Option<&'static str>,
    pub(in super::super) notification_type: Option<Channel>,
    pub(in super::super) within: Within,
}

impl Filter {
    /// A text for each set of filters: `$7 IS NULL OR …` would keep SQLite from using an index. All of it is ours; the
    /// caller's values are bound, from $7 on.
    fn conditions(&self) -> (String, Vec<&str>) {
        let mut sql = String::new();
        let mut binds = Vec::new();
        let mut equals = |sql: &mut String, column: &str, value| {
            binds.push(value);
            sql.push_str(&format!(" AND n.{column} = ${}", 6 + binds.len()));
        };
        match (self.kind, &self.user_id) {
            (Some(kind), _) => equals(&mut sql, "kind", kind.name()),
            // The index is by kind and user: search all kinds.
            (None, Some(_)) => sql.push_str(" AND n.kind IN ('restaurant', 'customer', 'agency', 'admin')"),
            (None, None) => {}
        }
        if let Some(user_id) = &self.user_id {
            equals(&mut sql, "user_id", user_id);
        }
        if let Some(event_id) = &self.event_id {
            equals(&mut sql, "event_id", event_id);
        }
        match self.status {
            Some("SENT") => sql.push_str(" AND n.status = 'SENT'"),
            // Repeated for SQLite, which uses a partial index only if its condition is in the query.
            Some(status) => sql.push_str(&format!(" AND n.status = '{status}' AND n.status <> 'SENT'")),
            None => {}
        }
        if let Some(channel) = self.notification_type {
            sql.push_str(&format!(" AND n.notification_type = '{}'", channel.name()));
        }
        match self.unread {
            Some(true) => sql.push_str(" AND n.read_at IS NULL"),
            Some(false) => sql.push_str(" AND n.read_at IS NOT NULL"),
            None => {}
        }
        (sql, binds)
    }
}

/// The text of a page.
fn text(select: &str, conditions: &str) -> String {
    let within = " AND n.id < $2 AND n.id >= $4 AND n.created_at >= $5 AND n.created_at < $6";
    format!("{select}{within}{conditions} ORDER BY n.id DESC LIMIT $3")
}

/// A selection of notifications.
struct Selection<'a> {
    tenant: &'a str,
    within: Within,
    /// The range of ids.
    ids: Range<i64>,
    conditions: String,
    binds: Vec<&'a str>,
}

impl Selection<'_> {
    async fn fetch<R>(&self, conn: &mut Conn<'_>, select: &str, before: i64, limit: i64) -> Result<Vec<R>>
    where
        R: for<'r> sqlx::FromRow<'r, sqlx::postgres::PgRow> + for<'r> sqlx::FromRow<'r, sqlx::sqlite::SqliteRow>,
        R: Send + Unpin,
    {
        let sql = text(select, &self.conditions);
        on!(conn, c => {
            let query = sqlx::query_as(sqlx::AssertSqlSafe(sql))
                .bind(self.tenant)
                .bind(before)
                .bind(limit)
                .bind(self.ids.start)
                .bind(self.within.since())
                .bind(self.within.until());
            let query = self.binds.iter().fold(query, |query, value| query.bind(*value));
            query.fetch_all(&mut **c).await.map_err(broken)
        })
    }
}

/// A page, newest first, and the cursor of the next one.
pub(in super::super) async fn page(
    conn: &mut Conn<'_>,
    tenant: &str,
    filter: &Filter,
    place: Place,
) -> Result<(Vec<Notification>, Option<String>)> {
    let (conditions, binds) = filter.conditions();
    let ids = filter.within.ids(conn, Table::Notifications, tenant).await?;
    let before = if place.after == 0 { ids.end } else { place.after.min(ids.end) };
    let selection = Selection { tenant, within: filter.within, ids, conditions, binds };
    let light: Vec<(i64, i64)> = selection.fetch(conn, WEIGHT, before, place.limit + 1).await?;
    let most = usize::try_from(place.limit).unwrap_or(usize::MAX);
    let kept = fitting(&light, PAGE_BYTES).min(most);
    let Some((newest, _)) = light.first() else { return Ok((Vec::new(), None)) };
    // From the same row on: others may have been inserted meanwhile.
    let rows: Vec<Row> =
        selection.fetch(conn, WHOLE, newest.saturating_add(1), i64::try_from(kept).unwrap_or(1)).await?;
    let next = (kept < light.len()).then(|| light[kept - 1].0.to_string());
    Ok((rows.into_iter().map(Row::read).collect(), next))
}

const FIND: &str = " AND n.id = $2";

/// One notification.
pub(in super::super) async fn find(conn: &mut Conn<'_>, tenant: &str, id: i64) -> Result<Option<Notification>> {
    let sql = format!("{WHOLE}{FIND}");
    let row: Option<Row> = on!(conn, c => sqlx::query_as(sqlx::AssertSqlSafe(sql))
        .bind(tenant)
        .bind(id)
        .fetch_optional(&mut **c)
        .await
        .map_err(broken)?);
    Ok(row.map(Row::read))
}

/// A notification in the stream.
pub(in super::super) struct Streamed {
    pub(in super::super) stream_seq: i64,
    pub(in super::super) notification: Notification,
}

const STREAM: &str = "
    AND n.kind = $2 AND n.user_id = $3 AND n.stream_seq > $4 ORDER BY n.stream_seq LIMIT $5";

/// A user's stream after a position: at most `most` rows, and no more than fit a page.
pub(in super::super) async fn stream(
    conn: &mut Conn<'_>,
    who: (&str, Kind, &str),
    after: i64,
    most: i64,
) -> Result<Vec<Streamed>> {
    let light: Vec<(i64, i64)> = stream_rows(conn, WEIGHT, who, after, most).await?;
    if light.is_empty() {
        return Ok(Vec::new());
    }
    let kept = i64::try_from(fitting(&light, STREAM_BYTES)).unwrap_or(1);
    let rows: Vec<Row> = stream_rows(conn, WHOLE, who, after, kept).await?;
    let read = |row: Row| Some(Streamed { stream_seq: row.stream_seq?, notification: row.read() });
    Ok(rows.into_iter().filter_map(read).collect())
}

async fn stream_rows<R>(
    conn: &mut Conn<'_>,
    select: &str,
    (tenant, kind, user_id): (&str, Kind, &str),
    after: i64,
    limit: i64,
) -> Result<Vec<R>>
where
    R: for<'r> sqlx::FromRow<'r, sqlx::postgres::PgRow> + for<'r> sqlx::FromRow<'r, sqlx::sqlite::SqliteRow>,
    R: Send + Unpin,
{
    let sql = format!("{select}{STREAM}");
    on!(conn, c => sqlx::query_as(sqlx::AssertSqlSafe(sql))
        .bind(tenant)
        .bind(kind.name())
        .bind(user_id)
        .bind(after)
        .bind(limit)
        .fetch_all(&mut **c)
        .await
        .map_err(broken))
}

statements!(
    WHOLE, WEIGHT;
    "page" = text(WHOLE, ""),
    "page by all filters" = text(WHOLE, &by_all_filters()),
    "find" = format!("{WHOLE}{FIND}"),
    "stream" = format!("{WHOLE}{STREAM}"),
);

#[cfg(test)]
fn by_all_filters() -> String {
    let filter = Filter {
        kind: Kind::ALL.first().copied(),
        user_id: Some("x".to_owned()),
        event_id: Some("x".to_owned()),
        unread: Some(true),
        status: Some("FAILED"),
        notification_type: Channel::ALL.first().copied(),
        within: Within::default(),
    };
    filter.conditions().0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_page_is_bounded_in_bytes_but_has_at_least_one_item() {
        assert_eq!(fitting(&[(9, 3), (8, 3), (7, 3)], 7), 2);
        assert_eq!(fitting(&[(9, 30), (8, 3)], 7), 1);
        assert_eq!(fitting(&[], 7), 0);
    }
}
