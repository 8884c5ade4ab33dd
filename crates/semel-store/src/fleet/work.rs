//! How many operations of each kind wait and run, and which kinds are paused.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

use semel::{Result, Timestamp, prelude::*};

use crate::{Database, connection::read_failed, look, on};

/// A kind, over all tenants.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct KindOfWork {
    /// The service.
    pub service: String,
    /// The kind.
    pub kind: String,
    /// How many wait to run; [`KindOfWork::MOST`] if there are more.
    pub waiting: u64,
    /// How many of those are due now.
    pub due: u64,
    /// How many run, among the first [`KindOfWork::MOST`] leases.
    pub running: u64,
    /// How long the oldest due one has been due.
    pub oldest: Option<Duration>,
    /// The pause, if it is paused.
    pub paused: Option<Paused>,
}

/// A pause of a kind.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Paused {
    /// Since when.
    pub at: Timestamp,
    /// The person.
    pub actor: String,
    /// The reason.
    pub reason: String,
}

impl KindOfWork {
    /// The limit of counting: a listing costs the same however many wait.
    pub const MOST: u64 = 10_000;
}

/// The most kinds of one listing.
const MOST_KINDS: i64 = 1000;

/// How many pages of kinds and tenants are read per service.
const MOST_LOOKS: usize = 8;

impl Database {
    /// The kinds with waiting or running operations, and the paused ones, by service and kind.
    ///
    /// # Errors
    /// The database cannot be reached.
    pub async fn kinds_of_work(&self) -> Result<Vec<KindOfWork>> {
        let mut kinds = self.answered(self.look_at_work()).await?;
        let mut services: Vec<_> = kinds.keys().map(|(service, _)| service.clone()).collect();
        services.dedup();
        for service in services {
            self.look_at_oldest(&service, &mut kinds).await?;
        }
        Ok(kinds.into_values().collect())
    }

    /// The pause of a kind, if it is paused.
    ///
    /// # Errors
    /// The database cannot be reached.
    pub async fn pause_of(&self, service: &str, kind: &str) -> Result<Option<Paused>> {
        let found = self.read(async |conn| {
            on!(conn, c => sqlx::query_as(self.fleet_sql().pause_of).bind(service).bind(kind).fetch_optional(&mut **c).await)
                .map_err(read_failed)
        });
        let found: Option<(i64, String, String)> = self.answered(found).await?;
        Ok(found.map(|(at, actor, reason)| Paused { at: Timestamp::from_micros(at), actor, reason }))
    }

    /// The paused kinds of a service.
    ///
    /// # Errors
    /// The database cannot be reached.
    pub async fn paused_kinds(&self, service: &str) -> Result<BTreeSet<String>> {
        let found = self.read(async |conn| {
            on!(conn, c => sqlx::query_scalar(self.fleet_sql().paused_of).bind(service).fetch_all(&mut **c).await)
                .map_err(read_failed)
        });
        let kinds: Vec<String> = self.answered(found).await?;
        Ok(kinds.into_iter().collect())
    }

    async fn look_at_work(&self) -> Result<BTreeMap<(String, String), KindOfWork>> {
        let (sql, most) = (self.fleet_sql(), i64::try_from(KindOfWork::MOST).unwrap_or(i64::MAX));
        let mut reader = self.reader().await?;
        look::begin(&mut reader, look::IN_ORDER).await?;
        let waiting: Vec<(String, String, i64, i64)> = on!(reader.conn(), c => sqlx::query_as(sql.waiting)
            .bind(self.clock()).bind(MOST_KINDS).bind(most).fetch_all(&mut *c).await.map_err(read_failed)?);
        let running: Vec<(String, String, i64)> = on!(reader.conn(), c =>
            sqlx::query_as(sql.running).bind(most).fetch_all(&mut *c).await.map_err(read_failed)?);
        let paused: Vec<(String, String, i64, String, String)> = on!(reader.conn(), c =>
            sqlx::query_as(sql.paused).bind(MOST_KINDS).fetch_all(&mut *c).await.map_err(read_failed)?);
        look::end(reader).await?;
        let count = |n: i64| u64::try_from(n).unwrap_or(0);
        let mut kinds = BTreeMap::new();
        for (service, kind, waiting, due) in waiting {
            let of = of(&mut kinds, service, kind);
            (of.waiting, of.due) = (count(waiting), count(due));
        }
        for (service, kind, n) in running {
            of(&mut kinds, service, kind).running = count(n);
        }
        for (service, kind, at, actor, reason) in paused {
            of(&mut kinds, service, kind).paused = Some(Paused { at: Timestamp::from_micros(at), actor, reason });
        }
        Ok(kinds)
    }

    /// How long the first of each kind and tenant has been due: a few index steps each.
    async fn look_at_oldest(&self, service: &str, kinds: &mut BTreeMap<(String, String), KindOfWork>) -> Result<()> {
        let now = self.now().await?;
        let mut after = (String::new(), String::new());
        for _ in 0..MOST_LOOKS {
            let due = self.due_kinds(service, (&after.0, &after.1)).await?;
            let Some(last) = due.last() else { return Ok(()) };
            after = (last.kind.clone(), last.tenant.clone());
            for due in due.into_iter().filter(|due| due.wait.is_zero()) {
                let age = now.since(due.next);
                if let Some(of) = kinds.get_mut(&(service.to_owned(), due.kind)) {
                    of.oldest = of.oldest.max(Some(age));
                }
            }
        }
        Ok(())
    }
}

fn of(kinds: &mut BTreeMap<(String, String), KindOfWork>, service: String, kind: String) -> &mut KindOfWork {
    let new = KindOfWork { service: service.clone(), kind: kind.clone(), ..KindOfWork::default() };
    kinds.entry((service, kind)).or_insert(new)
}
