//! Conflicts: other data under the id of an event. One SQL text for both databases.

use crate::sql::statements;
use semel::{Fingerprint, Result, Timestamp};
use semel_store::{Conn, broken, from_row, on};

/// Data that arrived under the id of an event with other data.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize)]
pub struct Conflict {
    /// The number of the row.
    pub id: i64,
    /// The kind of the event's operation.
    pub kind: String,
    /// The event.
    pub event_id: String,
    /// The type of the new data.
    pub event_type: String,
    /// The function of the delivery.
    pub webhook_function: String,
    /// The fingerprint of the new data.
    pub came_fingerprint: String,
    /// The fingerprint of the stored data at the first such delivery.
    pub stored_fingerprint: String,
    /// The creation time of the new data, in seconds since 1970.
    pub came_created: Option<i64>,
    /// The creation time of the stored data.
    pub stored_created: Option<i64>,
    /// The decision: `taken` if it was newer, or `skipped`.
    pub deed: String,
    /// How often it arrived.
    pub count: i64,
    /// When it first arrived, in microseconds since 1970.
    pub first_at: i64,
    /// When it last arrived.
    pub last_at: i64,
}

from_row!(Conflict {
    id,
    kind,
    event_id,
    event_type,
    webhook_function,
    came_fingerprint,
    stored_fingerprint,
    came_created,
    stored_created,
    deed,
    count,
    first_at,
    last_at,
});

impl Conflict {
    /// Whether it was skipped and is not older than the stored data: it may be the right one.
    pub(super) fn is_undecided(&self) -> bool {
        let older = self.came_created.zip(self.stored_created).is_some_and(|(came, there)| came < there);
        self.deed == SKIPPED && !older
    }

    /// Whether it superseded the event's data and is newer than the data of another conflict, which is then out of
    /// date.
    pub(super) fn settles(&self, other: &Self) -> bool {
        let newer = self.came_created.zip(other.came_created).is_some_and(|(own, others)| own > others);
        self.deed == TAKEN && newer && (&self.kind, &self.event_id) == (&other.kind, &other.event_id)
    }
}

/// The decisions.
const TAKEN: &str = "taken";
const SKIPPED: &str = "skipped";

/// A conflict to be recorded.
pub(super) struct Noted<'a> {
    pub(super) tenant: &'a str,
    pub(super) source: &'a str,
    pub(super) kind: &'a str,
    pub(super) event_id: &'a str,
    pub(super) event_type: &'a str,
    pub(super) function: &'a str,
    pub(super) came: (Fingerprint, Option<i64>),
    pub(super) stored: (Fingerprint, Option<i64>),
    pub(super) taken: bool,
    /// Whether it has just arrived, or only its record changes.
    pub(super) again: bool,
}

const NOTE: &str = "
    INSERT INTO semel_webhook_conflicts
        (tenant, source, kind, event_id, event_type, webhook_function, came_fingerprint, stored_fingerprint,
         came_created, stored_created, deed, count, first_at, last_at)
    VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, 1, $12, $12)
    ON CONFLICT (tenant, kind, event_id, came_fingerprint) DO UPDATE
    SET deed = excluded.deed, count = semel_webhook_conflicts.count + $13, last_at = excluded.last_at";

pub(super) async fn note(conn: &mut Conn<'_>, noted: &Noted<'_>, now: Timestamp) -> Result<()> {
    let deed = if noted.taken { TAKEN } else { SKIPPED };
    on!(conn, c => sqlx::query(NOTE)
        .bind(noted.tenant)
        .bind(noted.source)
        .bind(noted.kind)
        .bind(noted.event_id)
        .bind(noted.event_type)
        .bind(noted.function)
        .bind(noted.came.0.to_hex())
        .bind(noted.stored.0.to_hex())
        .bind(noted.came.1)
        .bind(noted.stored.1)
        .bind(deed)
        .bind(now.as_micros())
        .bind(i64::from(noted.again))
        .execute(&mut **c)
        .await
        .map(drop)
        .map_err(broken))
}

macro_rules! conflict {
    () => {
        "id, kind, event_id, event_type, webhook_function, came_fingerprint, stored_fingerprint, came_created,
         stored_created, deed, count, first_at, last_at"
    };
}

const LIST: &str = concat!(
    "SELECT ",
    conflict!(),
    " FROM semel_webhook_conflicts
     WHERE tenant = $1 AND source = $2 AND last_at >= $3
       AND (event_type = $4 OR $4 IS NULL) AND (webhook_function = $5 OR $5 IS NULL)
     ORDER BY last_at DESC, id DESC LIMIT $6"
);

/// The conflicts of a source since a time, optionally by type and function, latest first.
///
/// # Errors
/// When the database cannot be reached.
pub async fn list(
    conn: &mut Conn<'_>,
    tenant: &str,
    source: &str,
    since: Timestamp,
    (event_type, function): (Option<&str>, Option<&str>),
    limit: i64,
) -> Result<Vec<Conflict>> {
    on!(conn, c => sqlx::query_as(LIST)
        .bind(tenant)
        .bind(source)
        .bind(since.as_micros())
        .bind(event_type)
        .bind(function)
        .bind(limit)
        .fetch_all(&mut **c)
        .await
        .map_err(broken))
}

const OF_EVENT: &str = concat!(
    "SELECT ",
    conflict!(),
    " FROM semel_webhook_conflicts WHERE tenant = $1 AND kind = $2 AND event_id = $3 ORDER BY id LIMIT $4"
);

/// The conflicts of an event, in order. `kind` is the kind of its operation.
///
/// # Errors
/// When the database cannot be reached.
pub async fn of_event(
    conn: &mut Conn<'_>,
    tenant: &str,
    kind: &str,
    event_id: &str,
    limit: i64,
) -> Result<Vec<Conflict>> {
    on!(conn, c => sqlx::query_as(OF_EVENT)
        .bind(tenant)
        .bind(kind)
        .bind(event_id)
        .bind(limit)
        .fetch_all(&mut **c)
        .await
        .map_err(broken))
}

statements!(NOTE, LIST, OF_EVENT);
