//! A period of time, as a range of ids.

use std::{ops::Range, time::Duration};

use crate::sql::statements;
use semel::{Result, Timestamp, micros};
use semel_store::{Conn, broken, on};

/// Ids follow time only roughly: a transaction takes its ids as it goes, and one that began earlier may have later ids.
/// No transaction is open for as long as this.
const GRACE: Duration = Duration::from_secs(60);

/// A period: from `since` on, before `until`.
#[derive(Clone, Copy, Default)]
pub(in super::super) struct Within {
    pub(in super::super) since: Option<Timestamp>,
    pub(in super::super) until: Option<Timestamp>,
}

/// The tables that are listed by time.
#[derive(Clone, Copy)]
pub(in super::super) enum Table {
    Notifications,
    Events,
}

/// The first id from a time on, and the last one before a time. One seek each in the index by time.
macro_rules! edges {
    ($table:literal) => {
        (
            concat!(
                "SELECT id FROM ",
                $table,
                " WHERE tenant = $1 AND created_at >= $2 ORDER BY created_at, id LIMIT 1"
            ),
            concat!(
                "SELECT id FROM ",
                $table,
                " WHERE tenant = $1 AND created_at < $2 ORDER BY created_at DESC, id DESC LIMIT 1"
            ),
        )
    };
}

const NOTIFICATIONS: (&str, &str) = edges!("notifications");
const EVENTS: (&str, &str) = edges!("notification_events");

impl Within {
    pub(in super::super) fn since(self) -> i64 {
        self.since.map_or(i64::MIN, Timestamp::as_micros)
    }

    pub(in super::super) fn until(self) -> i64 {
        self.until.map_or(i64::MAX, Timestamp::as_micros)
    }

    /// The range of ids of a period: a list is ordered by id, and must not read all newer rows.
    pub(in super::super) async fn ids(self, conn: &mut Conn<'_>, table: Table, tenant: &str) -> Result<Range<i64>> {
        let (first, last) = match table {
            Table::Notifications => NOTIFICATIONS,
            Table::Events => EVENTS,
        };
        let mut ids = 0..i64::MAX;
        if self.since.is_some() {
            let from = self.since().saturating_sub(micros(GRACE));
            ids.start = edge(conn, first, tenant, from).await?.unwrap_or(i64::MAX);
        }
        if self.until.is_some() {
            let to = self.until().saturating_add(micros(GRACE));
            ids.end = edge(conn, last, tenant, to).await?.map_or(0, |last| last.saturating_add(1));
        }
        Ok(ids)
    }
}

async fn edge(conn: &mut Conn<'_>, sql: &'static str, tenant: &str, at: i64) -> Result<Option<i64>> {
    on!(conn, c => sqlx::query_scalar(sql).bind(tenant).bind(at).fetch_optional(&mut **c).await.map_err(broken))
}

statements!(; "NOTIFICATIONS.0" = NOTIFICATIONS.0, "NOTIFICATIONS.1" = NOTIFICATIONS.1,
    "EVENTS.0" = EVENTS.0, "EVENTS.1" = EVENTS.1);
