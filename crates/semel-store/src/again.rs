//! Goes through completed operations of a service, to run some of them once more.

use bytes::Bytes;
use semel::{
    Fence, Outcome, Result, Timestamp, Verdict,
    look::Listing,
    store::{Applied, Decision},
};
use serde_json::{Value, json};

use crate::{
    Conn, Database, Tx, apply, codec,
    connection::{broken, read_failed},
    database::{Inner, of_another},
    on,
    rows::Read,
    wakes::News,
};

/// The longest outcome that is read: a longer one says more than that there was nothing to do.
const LONGEST_OUTCOME: i64 = 512;

/// An operation that was visited.
#[derive(Clone, Debug)]
pub struct Passed {
    /// The operation.
    pub id: i64,
    /// Its fence at the time of reading.
    pub fence: Fence,
    /// Its service.
    pub service: String,
    /// Its kind.
    pub kind: String,
    /// Its first label.
    pub label1: Option<String>,
    /// Its second label.
    pub label2: Option<String>,
    /// When it was first claimed.
    pub created_at: Timestamp,
    /// Whether its data is archived.
    pub archived: bool,
    /// Its outcome, if it has completed and the outcome is short.
    pub outcome: Option<Outcome>,
}

/// Id, fence, service, kind, two labels, time of creation, whether it is archived, outcome and whether that was kept.
type Row = (i64, i64, String, String, Option<String>, Option<String>, i64, bool, Option<Vec<u8>>, Option<bool>);

impl Database {
    /// The operations of a tenant with this third label, newest first, after `after`; at most `limit`, read in the
    /// caller's transaction. An unreadable outcome is omitted.
    ///
    /// # Errors
    /// The database cannot be reached.
    pub async fn passed_in(
        &self,
        tx: &Tx,
        (tenant, label3): (&str, &str),
        after: Option<i64>,
        limit: u32,
    ) -> Result<Vec<Passed>> {
        self.answered(async {
            let (sql, mut held) = (self.look_sql().pass_by_label, tx.connection().await?);
            pass(&mut held.get()?, sql, (tenant, label3), after, limit).await
        })
        .await
    }

    /// As [`Database::passed_in`], outside of a transaction: for reading only.
    ///
    /// # Errors
    /// The database cannot be reached.
    pub async fn passed(&self, of: (&str, &str), after: Option<i64>, limit: u32) -> Result<Vec<Passed>> {
        self.answered(async {
            let mut reader = self.reader().await?;
            let passed = pass(&mut reader.conn(), self.look_sql().pass_by_label, of, after, limit).await?;
            reader.leave();
            Ok(passed)
        })
        .await
    }

    /// These operations of a tenant as a listing shows them, newest first, in one statement.
    ///
    /// # Errors
    /// The database cannot be reached.
    pub async fn listed(&self, tenant: &str, ids: &[i64]) -> Result<Listing> {
        if ids.is_empty() {
            return Ok(Listing::default());
        }
        self.answered(async {
            let ids = Value::Array(ids.iter().map(|id| json!({ "id": id })).collect()).to_string();
            let mut reader = self.reader().await?;
            let rows = on!(reader.conn(), c => sqlx::query_as(self.look_sql().list_by_id)
                .bind(ids)
                .bind(tenant)
                .fetch_all(&mut *c)
                .await
                .map_err(read_failed)?);
            reader.leave();
            let (items, unreadable) = Read::sorted(rows);
            Ok(Listing { items, unreadable, next: None })
        })
        .await
    }

    /// These operations of a tenant with all their data, in one statement. Unreadable ones are returned separately.
    ///
    /// # Errors
    /// The database cannot be reached.
    pub async fn loaded(&self, tenant: &str, ids: &[i64]) -> Result<Listing> {
        self.answered(async {
            let mut reader = self.reader().await?;
            let (mut items, mut unreadable) = apply::load_each(&mut reader.conn(), self.sql(), ids).await?;
            reader.leave();
            items.retain(|operation| operation.scope.tenant() == tenant);
            unreadable.retain(|row| row.tenant == tenant);
            Ok(Listing { items, unreadable, next: None })
        })
        .await
    }

    /// Runs a completed operation once more, in the caller's transaction, if it still has this fence: with its data,
    /// also if that is archived. Audited in the same transaction.
    ///
    /// # Errors
    /// The database cannot be reached; roll back then.
    pub async fn rerun_in(&self, tx: &Tx, id: i64, fence: Fence, by: (&str, &str)) -> Result<Applied> {
        tx.wake_after_commit(self.wakes(), News::Due(None));
        self.answered(async {
            let mut held = tx.connection().await?;
            let sql = self.look_sql().load_archived;
            let data: Option<(Option<Vec<u8>>, Vec<u8>, bool)> = on!(held.get()?, c =>
                sqlx::query_as(sql).bind(id).fetch_optional(&mut *c).await.map_err(read_failed)?);
            let archived: Option<Bytes> = data.and_then(|(payload, ..)| payload).map(codec::decode).transpose()?;
            let decision = Decision::Resolve { verdict: Verdict::Rerun { archived }, expected: Some(fence) };
            match (self.inner(), held.get()?) {
                (Inner::Postgres(db), Conn::Postgres(conn)) => db.decide_in(conn, id, decision, by).await,
                (Inner::Sqlite(db), Conn::Sqlite(conn)) => db.decide_in(conn, id, decision, by).await,
                _ => Err(of_another()),
            }
        })
        .await
    }
}

async fn pass(
    conn: &mut Conn<'_>,
    sql: &'static str,
    (tenant, label3): (&str, &str),
    after: Option<i64>,
    limit: u32,
) -> Result<Vec<Passed>> {
    let rows: Vec<Row> = on!(conn, c => sqlx::query_as(sql)
        .bind(tenant)
        .bind(label3)
        .bind(after.unwrap_or(i64::MAX))
        .bind(i64::from(limit))
        .bind(LONGEST_OUTCOME)
        .fetch_all(&mut **c).await.map_err(broken)?);
    Ok(rows.into_iter().map(read).collect())
}

fn read((id, fence, service, kind, label1, label2, created_at, archived, outcome, kept): Row) -> Passed {
    let outcome = outcome.and_then(|stored| codec::decode(stored).ok()).zip(kept);
    Passed {
        id,
        fence: Fence(fence),
        service,
        kind,
        label1,
        label2,
        created_at: Timestamp::from_micros(created_at),
        archived,
        outcome: outcome.map(|(body, kept)| Outcome { kept, body }),
    }
}
