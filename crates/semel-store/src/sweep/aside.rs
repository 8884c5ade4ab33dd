//! Rows set aside: those that cannot be read, or that the database refuses to change. A person sees them, and the sweep
//! continues with the others.

use std::{collections::HashMap, time::Duration};

use semel::{
    Error, Key, Result, Scope, Timestamp,
    look::{SetAside, Task, Unreadable},
    store::Swept,
};
use serde_json::{Value, json};

use super::round::batch_with;
use crate::{
    Database,
    connection::{broken, read_failed},
    from_row, on,
};

/// When a row that was set aside is tried again. Rarely: the cause most likely persists until a new version or a person
/// fixes it. A person can have it tried at once.
const AGAIN_AFTER: Duration = Duration::from_secs(6 * 3600);

/// The longest stored reason.
const REASON: usize = 500;

/// A row of `semel_set_aside`.
struct AsideRow {
    item: i64,
    what: String,
    since: i64,
    tries: i64,
    retry_at: i64,
    reason: String,
}

from_row!(AsideRow { item, what, since, tries, retry_at, reason });

impl AsideRow {
    fn read(self) -> Option<SetAside> {
        Some(SetAside {
            what: task(&self.what)?,
            id: self.item,
            since: Timestamp::from_micros(self.since),
            tries: self.tries,
            retry_at: Timestamp::from_micros(self.retry_at),
            reason: self.reason,
        })
    }
}

/// The columns of an operation that are readable without its stored data.
struct GlimpseRow {
    id: i64,
    tenant: String,
    service: String,
    kind: String,
    key: String,
    state: String,
    created_at: i64,
}

from_row!(GlimpseRow { id, tenant, service, kind, key, state, created_at });

impl Database {
    /// Sets rows aside, and logs those that are new.
    pub(crate) async fn set_aside(&self, task: Task, rows: &[(i64, String)], swept: &mut Swept) -> Result<()> {
        if rows.is_empty() {
            return Ok(());
        }
        let items: Vec<_> =
            rows.iter().map(|(id, why)| json!({ "item": id, "what": task.as_str(), "reason": short(why) })).collect();
        let set_aside = self
            .in_round(rows.len(), async |round| {
                let (now, _) = self.draw(round, 0).await?;
                let (now, later) = (now.as_micros(), (now + AGAIN_AFTER).as_micros());
                if task == Task::Run {
                    batch_with(&mut round.conn(), self.sweep_sql().put_off, &items, later).await?;
                }
                let (text, items) = (self.sweep_sql().set_aside, Value::Array(items).to_string());
                let set_aside: Vec<(i64, String, i64, String)> = on!(round.conn(), c => sqlx::query_as(text)
                    .bind(items).bind(now).bind(later).fetch_all(&mut *c).await.map_err(read_failed)?);
                Ok(set_aside)
            })
            .await?;
        for (id, _, tries, reason) in set_aside {
            swept.set_aside += 1;
            if tries == 1 {
                let what = task.in_words();
                tracing::warn!(
                    operation = id,
                    reason,
                    "set aside: cannot {what}; other rows continue, and this one is retried in hours"
                );
            }
        }
        Ok(())
    }

    /// The rows to try again, and whether they still exist.
    pub(super) async fn find_again(&self, now: Timestamp, limit: u32) -> Result<Vec<(i64, Task, bool)>> {
        let text = self.sweep_sql().find_again;
        self.answered(async {
            let mut reader = self.reader().await?;
            let found: Vec<(i64, String, bool)> = on!(reader.conn(), c => sqlx::query_as(text)
                .bind(now.as_micros()).bind(i64::from(limit)).fetch_all(&mut *c).await.map_err(read_failed)?);
            reader.leave();
            Ok(found.into_iter().filter_map(|(id, what, there)| Some((id, task(&what)?, there))).collect())
        })
        .await
    }

    /// Removes a row from those set aside.
    pub(super) async fn resume(&self, task: Task, id: i64, now: Timestamp) -> Result<()> {
        let item = [json!({ "item": id, "what": task.as_str() })];
        self.in_round(1, async |round| {
            batch_with(&mut round.conn(), self.sweep_sql().put_on, &item, now.as_micros()).await?;
            round.conn().batch(self.sweep_sql().resume, &item).await
        })
        .await
        .map(drop)
    }

    /// Lets the next sweep try all rows that were set aside; returns how many.
    ///
    /// # Errors
    /// The database cannot be reached.
    pub async fn try_set_aside_again(&self) -> Result<u64> {
        let text = self.sweep_sql().try_again;
        self.in_round(1, async |round| {
            on!(round.conn(), c => sqlx::query(text).execute(&mut *c).await.map(|done| done.rows_affected()))
                .map_err(broken)
        })
        .await
    }

    /// The operations of a tenant that were set aside, the newest first; at most `limit`.
    ///
    /// # Errors
    /// The database cannot be reached.
    pub async fn list_set_aside(&self, tenant: &str, limit: u32) -> Result<Vec<SetAside>> {
        let text = self.sweep_sql().list_set_aside;
        self.answered(async {
            let mut reader = self.reader().await?;
            let rows: Vec<AsideRow> = on!(reader.conn(), c => sqlx::query_as(text)
                .bind(tenant).bind(i64::from(limit)).fetch_all(&mut *c).await.map_err(read_failed)?);
            reader.leave();
            Ok(rows.into_iter().filter_map(AsideRow::read).collect())
        })
        .await
    }

    /// Which of these operations were set aside, and why.
    ///
    /// # Errors
    /// The database cannot be reached.
    pub async fn set_aside_of(&self, ids: &[i64]) -> Result<HashMap<i64, Vec<SetAside>>> {
        if ids.is_empty() {
            return Ok(HashMap::new());
        }
        let text = self.sweep_sql().set_aside_of;
        let ids = Value::Array(ids.iter().map(|id| json!({ "id": id })).collect()).to_string();
        self.answered(async {
            let mut reader = self.reader().await?;
            let rows: Vec<AsideRow> =
                on!(reader.conn(), c => sqlx::query_as(text).bind(ids).fetch_all(&mut *c).await.map_err(read_failed)?);
            reader.leave();
            let mut found = HashMap::<_, Vec<_>>::new();
            for aside in rows.into_iter().filter_map(AsideRow::read) {
                found.entry(aside.id).or_default().push(aside);
            }
            Ok(found)
        })
        .await
    }

    /// How many rows are set aside, by task.
    ///
    /// # Errors
    /// The database cannot be reached.
    pub async fn count_set_aside(&self) -> Result<Vec<(Task, i64)>> {
        let text = self.sweep_sql().count_set_aside;
        self.answered(async {
            let mut reader = self.reader().await?;
            let rows: Vec<(String, i64)> =
                on!(reader.conn(), c => sqlx::query_as(text).fetch_all(&mut *c).await.map_err(read_failed)?);
            reader.leave();
            Ok(rows.into_iter().filter_map(|(what, n)| Some((task(&what)?, n))).collect())
        })
        .await
    }

    /// The readable columns of an operation that [`Look::by_id`](semel::store::Look::by_id) cannot read; `why` is its
    /// error.
    ///
    /// # Errors
    /// The database cannot be reached.
    pub async fn unreadable_by_id(&self, tenant: &str, id: i64, why: &Error) -> Result<Option<Unreadable>> {
        let text = self.sweep_sql().glimpse_id;
        self.answered(async {
            let mut reader = self.reader().await?;
            let row: Option<GlimpseRow> = on!(reader.conn(), c => sqlx::query_as(text)
                .bind(tenant).bind(id).fetch_optional(&mut *c).await.map_err(read_failed)?);
            reader.leave();
            Ok(row.map(|row| row.unreadable(why)))
        })
        .await
    }

    /// The readable columns of an operation that [`Look::by_key`](semel::store::Look::by_key) cannot read; `why` is its
    /// error.
    ///
    /// # Errors
    /// The database cannot be reached.
    pub async fn unreadable_by_key(&self, scope: &Scope, key: &Key, why: &Error) -> Result<Option<Unreadable>> {
        let text = self.sweep_sql().glimpse_key;
        self.answered(async {
            let mut reader = self.reader().await?;
            let row: Option<GlimpseRow> = on!(reader.conn(), c => sqlx::query_as(text)
                .bind(scope.tenant()).bind(scope.service()).bind(scope.kind()).bind(key.as_str())
                .fetch_optional(&mut *c).await.map_err(read_failed)?);
            reader.leave();
            Ok(row.map(|row| row.unreadable(why)))
        })
        .await
    }
}

impl GlimpseRow {
    fn unreadable(self, why: &Error) -> Unreadable {
        let Self { id, tenant, service, kind, key, state, created_at } = self;
        let created_at = Timestamp::from_micros(created_at);
        Unreadable { id, tenant, service, kind, key, state, created_at, why: why.to_string() }
    }
}

fn task(word: &str) -> Option<Task> {
    Task::ALL.into_iter().find(|task| task.as_str() == word)
}

/// A reason that fits its column: PostgreSQL stores no NUL.
fn short(why: &str) -> String {
    let mut end = why.len().min(REASON);
    while !why.is_char_boundary(end) {
        end -= 1;
    }
    why[..end].replace('\0', "\u{fffd}")
}
