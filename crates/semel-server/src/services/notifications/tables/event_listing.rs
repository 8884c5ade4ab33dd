//! A page of the accepted events.

use semel::Result;
use semel_store::{Conn, broken, from_row, on};
use serde::Serialize;
use serde_json::value::RawValue;

use super::{
    listing::{PAGE_BYTES, fitting, read_payload},
    within::{Table, Within},
};
use crate::{
    http::{answers::time, query::Place},
    sql::statements,
};

/// The filter of a list.
#[derive(Default)]
pub(in super::super) struct Filter {
    pub(in super::super) aggregate_type: Option<String>,
    pub(in super::super) aggregate_id: Option<String>,
    pub(in super::super) event_type: Option<String>,
    pub(in super::super) within: Within,
}

/// An event in a list, without its progress.
#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
pub(in super::super) struct Listed {
    event_id: String,
    aggregate_type: String,
    aggregate_id: Option<Box<RawValue>>,
    event_type: String,
    /// `None` if it cannot be read.
    payload: Option<Box<RawValue>>,
    #[serde(serialize_with = "time")]
    created_at: i64,
}

struct Row {
    event_id: String,
    aggregate_type: String,
    aggregate_id: Option<String>,
    event_type: String,
    payload: Vec<u8>,
    created_at: i64,
}

from_row!(Row { event_id, aggregate_type, aggregate_id, event_type, payload, created_at });

impl Row {
    fn read(self) -> Listed {
        Listed {
            event_id: self.event_id,
            aggregate_type: self.aggregate_type,
            aggregate_id: self.aggregate_id.and_then(|json| RawValue::from_string(json).ok()),
            event_type: self.event_type,
            payload: read_payload(self.payload).ok(),
            created_at: self.created_at,
        }
    }
}

const WHOLE: &str = "
    SELECT event_id, aggregate_type, aggregate_id, event_type, payload, created_at FROM notification_events
    WHERE tenant = $1";

/// The same rows: only the sizes of their payloads.
const WEIGHT: &str = "
    SELECT id, CAST(length(payload) AS BIGINT) AS weight FROM notification_events
    WHERE tenant = $1";

impl Filter {
    /// The SQL of a set of filters, and its parameters, from $7 on.
    fn conditions(&self) -> (String, Vec<String>) {
        let mut sql = String::new();
        let mut binds = Vec::new();
        let mut bind = |value: String| {
            binds.push(value);
            6 + binds.len()
        };
        if let Some(aggregate_type) = &self.aggregate_type {
            sql.push_str(&format!(" AND aggregate_type = ${}", bind(aggregate_type.clone())));
        }
        if let Some(id) = &self.aggregate_id {
            // Stored as written: 5 and "5" are the same identifier.
            let quoted = serde_json::Value::from(id.as_str()).to_string();
            let (plain, quoted) = (bind(id.clone()), bind(quoted));
            sql.push_str(&format!(" AND aggregate_id IN (${plain}, ${quoted})"));
        }
        if let Some(event_type) = &self.event_type {
            sql.push_str(&format!(" AND event_type = ${}", bind(event_type.clone())));
        }
        (sql, binds)
    }
}

/// A page, newest first, and the cursor of the next one.
pub(in super::super) async fn page(
    conn: &mut Conn<'_>,
    tenant: &str,
    filter: &Filter,
    place: Place,
) -> Result<(Vec<Listed>, Option<String>)> {
    let ids = filter.within.ids(conn, Table::Events, tenant).await?;
    let before = if place.after == 0 { ids.end } else { place.after.min(ids.end) };
    let asked = Asked { tenant, filter, first: ids.start };
    let light: Vec<(i64, i64)> = asked.fetch(conn, WEIGHT, before, place.limit + 1).await?;
    let Some((newest, _)) = light.first() else { return Ok((Vec::new(), None)) };
    let most = usize::try_from(place.limit).unwrap_or(usize::MAX);
    let kept = fitting(&light, PAGE_BYTES).min(most);
    let rows: Vec<Row> = asked.fetch(conn, WHOLE, newest.saturating_add(1), i64::try_from(kept).unwrap_or(1)).await?;
    let next = (kept < light.len()).then(|| light[kept - 1].0.to_string());
    Ok((rows.into_iter().map(Row::read).collect(), next))
}

/// The text of a page.
fn text(select: &str, conditions: &str) -> String {
    let within = " AND id < $2 AND id >= $4 AND created_at >= $5 AND created_at < $6";
    format!("{select}{within}{conditions} ORDER BY id DESC LIMIT $3")
}

struct Asked<'a> {
    tenant: &'a str,
    filter: &'a Filter,
    first: i64,
}

impl Asked<'_> {
    async fn fetch<R>(&self, conn: &mut Conn<'_>, select: &str, before: i64, limit: i64) -> Result<Vec<R>>
    where
        R: for<'r> sqlx::FromRow<'r, sqlx::postgres::PgRow> + for<'r> sqlx::FromRow<'r, sqlx::sqlite::SqliteRow>,
        R: Send + Unpin,
    {
        let (conditions, binds) = self.filter.conditions();
        let sql = text(select, &conditions);
        on!(conn, c => {
            let query = sqlx::query_as(sqlx::AssertSqlSafe(sql))
                .bind(self.tenant)
                .bind(before)
                .bind(limit)
                .bind(self.first)
                .bind(self.filter.within.since())
                .bind(self.filter.within.until());
            let query = binds.into_iter().fold(query, |query, value| query.bind(value));
            query.fetch_all(&mut **c).await.map_err(broken)
        })
    }
}

statements!(WHOLE, WEIGHT; "page" = text(WHOLE, ""), "page by all filters" = text(WHOLE, &by_all_filters()));

#[cfg(test)]
fn by_all_filters() -> String {
    let some = || Some("x".to_owned());
    let filter = Filter { aggregate_type: some(), aggregate_id: some(), event_type: some(), within: Within::default() };
    filter.conditions().0
}
