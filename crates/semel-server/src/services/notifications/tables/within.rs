//! A span of time, as the ids that can lie in it.

use std::{ops::Range, time::Duration};

use semel::{Result, Timestamp, micros};
use semel_store::{Conn, broken, on};

/// Ids are given in about the order of time: a transaction takes its ids as it goes, and one that began earlier may
/// have later ones. None is open for as long as this.
const GRACE: Duration = Duration::from_secs(60);

/// A span of time: from `since` on, before `until`.
#[derive(Clone, Copy, Default)]
pub(in super::super) struct Within {
    pub(in super::super) since: Option<Timestamp>,
    pub(in super::super) until: Option<Timestamp>,
}

/// What is listed by time.
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

impl Within {
    pub(in super::super) fn since(self) -> i64 {
        self.since.map_or(i64::MIN, Timestamp::as_micros)
    }

    pub(in super::super) fn until(self) -> i64 {
        self.until.map_or(i64::MAX, Timestamp::as_micros)
    }

    /// The ids that can lie in it: a list goes by id, and must not read everything that is newer than it.
    pub(in super::super) async fn ids(self, conn: &mut Conn<'_>, table: Table, tenant: &str) -> Result<Range<i64>> {
        let (first, last) = match table {
            Table::Notifications => edges!("notifications"),
            Table::Events => edges!("notification_events"),
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
