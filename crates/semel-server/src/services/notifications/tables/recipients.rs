//! The directory. An earlier revision stays readable as long as a fan-out needs it.

use std::collections::BTreeMap;

use semel::{Error, Result};
use semel_store::{Conn, broken, codec, from_row, on};

use super::super::{
    message::Whom,
    model::{Channel, Kind},
};
use crate::http::query::Place;
use crate::sql::statements;

/// Addresses by the name of their channel.
pub(in super::super) type Addresses = BTreeMap<String, String>;

/// An entry of the directory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(in super::super) struct Entry {
    pub(in super::super) group_id: String,
    pub(in super::super) channels: Vec<Channel>,
    pub(in super::super) addresses: Addresses,
}

/// A recipient in the directory.
pub(in super::super) struct Row {
    pub(in super::super) id: i64,
    pub(in super::super) user_id: String,
    group_id: String,
    channels: String,
    /// `None` if the column has another type: one row must not fail the whole listing.
    addresses: Option<Vec<u8>>,
    pub(in super::super) created_at: i64,
}

from_row!(Row, row => {
    id,
    user_id,
    group_id,
    channels,
    addresses: sqlx::Row::try_get(row, "addresses").ok(),
    created_at
});

impl Row {
    /// The entry without its addresses: they cannot be read, or must not be repeated.
    pub(in super::super) fn without_addresses(&self) -> Entry {
        let addresses = Addresses::new();
        Entry { group_id: self.group_id.clone(), channels: channels(&self.channels), addresses }
    }

    pub(in super::super) fn entry(&self) -> Result<Entry> {
        let stored = self.addresses.clone().ok_or(Error::Corrupt("the addresses of a recipient"))?;
        let addresses = read_addresses(stored)?;
        Ok(Entry { group_id: self.group_id.clone(), channels: channels(&self.channels), addresses })
    }
}

/// Decodes stored addresses.
pub(in super::super) fn read_addresses(stored: Vec<u8>) -> Result<Addresses> {
    serde_json::from_slice(&codec::decode(stored)?).map_err(|_| Error::Corrupt("the addresses of a recipient"))
}

fn channels(words: &str) -> Vec<Channel> {
    words.split(' ').filter_map(Channel::parse).collect()
}

const FIND: &str = "
    SELECT id, user_id, group_id, channels, addresses, created_at FROM notification_recipients
    WHERE tenant = $1 AND kind = $2 AND user_id = $3 AND until IS NULL";

pub(in super::super) async fn find(
    conn: &mut Conn<'_>,
    tenant: &str,
    kind: Kind,
    user_id: &str,
) -> Result<Option<Row>> {
    on!(conn, c => sqlx::query_as(FIND)
        .bind(tenant)
        .bind(kind.name())
        .bind(user_id)
        .fetch_optional(&mut **c)
        .await
        .map_err(broken))
}

macro_rules! list {
    ($filter:literal) => {
        concat!(
            "SELECT id, user_id, group_id, channels, addresses, created_at FROM notification_recipients
             WHERE tenant = $1 AND kind = $2 AND id > $3 AND until IS NULL",
            $filter,
            " ORDER BY id LIMIT $4"
        )
    };
}

const LIST: &str = list!("");
const LIST_GROUP: &str = list!(" AND group_id = $5");

/// A page of a kind or a group. A change moves a recipient to the end.
pub(in super::super) async fn list(
    conn: &mut Conn<'_>,
    tenant: &str,
    kind: Kind,
    group_id: Option<&str>,
    place: Place,
) -> Result<Vec<Row>> {
    let sql = if group_id.is_some() { LIST_GROUP } else { LIST };
    on!(conn, c => {
        let mut query = sqlx::query_as(sql).bind(tenant).bind(kind.name()).bind(place.after).bind(place.limit + 1);
        if let Some(group_id) = group_id {
            query = query.bind(group_id);
        }
        query.fetch_all(&mut **c).await.map_err(broken)
    })
}

const NEXT_REVISION: &str = "
    INSERT INTO notification_directories (tenant, revision) VALUES ($1, 1)
    ON CONFLICT (tenant) DO UPDATE SET revision = notification_directories.revision + 1
    RETURNING revision";

/// Begins a change: locks the directory until the transaction ends.
pub(in super::super) async fn next_revision(conn: &mut Conn<'_>, tenant: &str) -> Result<i64> {
    on!(conn, c => sqlx::query_scalar(NEXT_REVISION).bind(tenant).fetch_one(&mut **c).await.map_err(broken))
}

const END: &str = "
    UPDATE notification_recipients SET until = $4, ended_at = $5
    WHERE tenant = $1 AND kind = $2 AND user_id = $3 AND until IS NULL";

/// Ends the present version of a recipient's entry; returns whether there was one.
pub(in super::super) async fn end(
    conn: &mut Conn<'_>,
    (tenant, kind, user_id): (&str, Kind, &str),
    revision: i64,
    now: i64,
) -> Result<bool> {
    let ended = on!(conn, c => sqlx::query(END)
        .bind(tenant)
        .bind(kind.name())
        .bind(user_id)
        .bind(revision)
        .bind(now)
        .execute(&mut **c)
        .await
        .map_err(broken)?
        .rows_affected());
    Ok(ended > 0)
}

const INSERT: &str = "
    INSERT INTO notification_recipients (tenant, kind, user_id, group_id, channels, addresses, since, created_at)
    VALUES ($1, $2, $3, $4, $5, $6, $7, $8)";

/// Inserts a new version of a recipient's entry. `created_at` is the time of the first version.
pub(in super::super) async fn insert(
    conn: &mut Conn<'_>,
    (tenant, kind, user_id): (&str, Kind, &str),
    entry: &Entry,
    revision: i64,
    created_at: i64,
) -> Result<()> {
    let channels = entry.channels.iter().map(|channel| channel.name()).collect::<Vec<_>>().join(" ");
    let addresses = serde_json::to_vec(&entry.addresses).map_err(|error| Error::Invalid(error.to_string()))?;
    on!(conn, c => sqlx::query(INSERT)
        .bind(tenant)
        .bind(kind.name())
        .bind(user_id)
        .bind(&entry.group_id)
        .bind(channels)
        .bind(codec::encode(&addresses))
        .bind(revision)
        .bind(created_at)
        .execute(&mut **c)
        .await
        .map(drop)
        .map_err(broken))
}

const FORGET: &str = "
    DELETE FROM notification_recipients
    WHERE tenant = $1 AND kind = $2 AND user_id = $3 AND ended_at < $4
      AND until <= COALESCE((SELECT MIN(revision) FROM notification_fanouts WHERE tenant = $1 AND done_at IS NULL), until)";

/// Deletes versions that ended before a time, except those that a running fan-out needs. A fan-out that is not visible
/// yet began after that time.
pub(in super::super) async fn forget(
    conn: &mut Conn<'_>,
    (tenant, kind, user_id): (&str, Kind, &str),
    before: i64,
) -> Result<()> {
    on!(conn, c => sqlx::query(FORGET)
        .bind(tenant)
        .bind(kind.name())
        .bind(user_id)
        .bind(before)
        .execute(&mut **c)
        .await
        .map(drop)
        .map_err(broken))
}

/// The selected recipients of a kind at revision `$3`, after user `$4`.
macro_rules! as_of {
    ($select:literal, $end:literal, $($meant:literal)*) => {
        concat!(
            $select,
            " WHERE r.tenant = $1 AND r.kind = $2 AND r.since <= $3 AND (r.until IS NULL OR r.until > $3)
               AND r.user_id > $4 ",
            $($meant,)*
            $end
        )
    };
}

/// The texts for all users, a group, and named users. The last differs in how a JSON text becomes rows.
struct ForWhom {
    all: &'static str,
    group: &'static str,
    users_postgres: &'static str,
    users_sqlite: &'static str,
}

/// `$parameter` selects the recipients.
macro_rules! for_whom {
    ($parameter:literal, $select:literal, $end:literal) => {
        ForWhom {
            all: as_of!($select, $end,),
            group: as_of!($select, $end, "AND r.group_id = " $parameter),
            users_postgres: as_of!($select, $end, "AND r.user_id IN (SELECT json_array_elements_text(" $parameter "::json))"),
            users_sqlite: as_of!($select, $end, "AND r.user_id IN (SELECT value FROM json_each(" $parameter "))"),
        }
    };
}

impl ForWhom {
    fn text(&self, whom: &Whom, conn: &Conn<'_>) -> &'static str {
        match (whom, conn) {
            (Whom::All, _) => self.all,
            (Whom::Group(_), _) => self.group,
            (Whom::Users(_), Conn::Postgres(_)) => self.users_postgres,
            (Whom::Users(_), Conn::Sqlite(_)) => self.users_sqlite,
        }
    }
}

/// The parameter that selects the recipients, if one is needed.
fn meant(whom: &Whom) -> Option<String> {
    match whom {
        Whom::All => None,
        Whom::Group(group) => Some(group.clone()),
        Whom::Users(users) => Some(serde_json::json!(users).to_string()),
    }
}

/// A part of an audience: the recipients after a user, as of a revision.
pub(in super::super) struct Part<'a> {
    pub(in super::super) tenant: &'a str,
    pub(in super::super) kind: Kind,
    pub(in super::super) whom: &'a Whom,
    pub(in super::super) revision: i64,
    pub(in super::super) after: &'a str,
}

const FIRST: ForWhom =
    for_whom!("$6", "SELECT r.user_id, r.channels FROM notification_recipients AS r", " ORDER BY r.user_id LIMIT $5");

const NOTIFY: ForWhom = for_whom!(
            "$7",
            "INSERT INTO notifications (tenant, event_id, kind, user_id, notification_type, enqueued)
             SELECT r.tenant, $6, r.kind, r.user_id, c.channel, c.channel <> 'IN_APP'
             FROM notification_recipients AS r
             JOIN (SELECT 'PUSH' AS channel UNION ALL SELECT 'EMAIL' UNION ALL SELECT 'SMS' UNION ALL SELECT 'IN_APP') AS c
               ON ' ' || r.channels || ' ' LIKE '% ' || c.channel || ' %'",
            " AND r.user_id <= $5 ORDER BY r.user_id ON CONFLICT DO NOTHING RETURNING id, notification_type"
);

impl Part<'_> {
    /// The first of them in order: the user, and the number of channels.
    pub(in super::super) async fn first(&self, conn: &mut Conn<'_>, most: usize) -> Result<Vec<(String, usize)>> {
        let sql = FIRST.text(self.whom, conn);
        let found: Vec<(String, String)> = on!(conn, c => {
            let mut query = sqlx::query_as(sql)
                .bind(self.tenant)
                .bind(self.kind.name())
                .bind(self.revision)
                .bind(self.after)
                .bind(i64::try_from(most).unwrap_or(i64::MAX));
            if let Some(meant) = meant(self.whom) {
                query = query.bind(meant);
            }
            query.fetch_all(&mut **c).await.map_err(broken)?
        });
        Ok(found.into_iter().map(|(user, words)| (user, channels(&words).len())).collect())
    }

    /// Inserts the notifications of the recipients up to a user, one per channel. Returns the id and the channel of
    /// each new one. Existing ones stay. The caller enqueues the deliveries in the same transaction.
    pub(in super::super) async fn notify(
        &self,
        conn: &mut Conn<'_>,
        event_id: &str,
        up_to: &str,
    ) -> Result<Vec<(i64, String)>> {
        let sql = NOTIFY.text(self.whom, conn);
        on!(conn, c => {
            let mut query = sqlx::query_as(sql)
                .bind(self.tenant)
                .bind(self.kind.name())
                .bind(self.revision)
                .bind(self.after)
                .bind(up_to)
                .bind(event_id);
            if let Some(meant) = meant(self.whom) {
                query = query.bind(meant);
            }
            query.fetch_all(&mut **c).await.map_err(broken)
        })
    }
}

/// The present address of a recipient, if the directory has one.
pub(in super::super) async fn address(
    conn: &mut Conn<'_>,
    tenant: &str,
    kind: &str,
    user_id: &str,
    channel: &str,
) -> Result<Option<String>> {
    let Some(kind) = Kind::parse(kind) else { return Ok(None) };
    let found = find(conn, tenant, kind, user_id).await?.map(|row| row.entry()).transpose()?;
    Ok(found.and_then(|mut entry| entry.addresses.remove(channel)))
}

statements!(
    FIND, LIST, LIST_GROUP, NEXT_REVISION, END, INSERT, FORGET;
    "FIRST.all" = FIRST.all,
    "FIRST.group" = FIRST.group,
    "FIRST.users_POSTGRES" = FIRST.users_postgres,
    "FIRST.users_SQLITE" = FIRST.users_sqlite,
    "NOTIFY.all" = NOTIFY.all,
    "NOTIFY.group" = NOTIFY.group,
    "NOTIFY.users_POSTGRES" = NOTIFY.users_postgres,
    "NOTIFY.users_SQLITE" = NOTIFY.users_sqlite,
);
