//! Migrates jobs of older versions: they were rows of the table `semel_jobs`, and become operations.
//!
//! A row is deleted in the transaction that enqueues its operation, so each job is in one of the two places. A node of
//! an older version that runs the job finds its row gone at the next step, and stops.

use std::time::Duration;

use semel::{Context, Error, Fingerprint, Kind, Ledger, Outcome, Policy, Result, Scope, Unfinished, Work, crash_point};
use semel_store::{Conn, Database, Tx, broken, from_row, on};
use serde_json::Value;

use super::{
    Jobs, look,
    model::{Former, JobId, Progress, Stored},
    work::policy,
    work_of,
};
use crate::{sql::statements, unfinished::unfinished};

/// How many rows a step migrates.
const AT_ONCE: usize = 100;

/// How long to wait for rows that another transaction holds: a node of an older version runs a step of them.
const HELD: Duration = Duration::from_secs(1);

/// The retention of operations that only serve the migration.
const KEPT: Duration = Duration::from_secs(24 * 3600);

/// The scope of the operation that migrates rows, for all tenants.
const SERVICE: &str = "jobs";
const KIND: &str = "carry-over";

/// Enqueues the migration, if there are rows. Each node does this at its start: two that migrate at the same time get
/// different rows.
pub(super) async fn enqueue(ledger: &Ledger<Database>) -> Result<()> {
    if rows_left(ledger.store()).await? == 0 {
        return Ok(());
    }
    let (scope, key) = (Scope::new(Scope::DEFAULT_TENANT, SERVICE, KIND)?, look::key(JobId::new())?);
    let work = Work::new(scope, key, Fingerprint::of_bytes(KIND.as_bytes())).payload("");
    ledger.enqueue(work.policy(Policy { retention: Some(KEPT), ..policy() })).await?;
    Ok(())
}

/// The kind of work that migrates rows.
pub(super) fn kind(jobs: &Jobs) -> Kind<Database> {
    let jobs = jobs.clone();
    let kind = Kind::leased(SERVICE, KIND, move |context| {
        let jobs = jobs.clone();
        async move { carry_over(&jobs, &context).await }
    });
    kind.policy(policy()).at_once(1)
}

/// The kind of work that completes the operations of older versions, each a lease on a row. One that was released, by a
/// stop or an outage, is pending: no node of this version would claim it again, and a pending operation never expires.
///
/// If its row is still there, a node of an older version has made the job after the migration. The row is migrated now:
/// that node does not get the lease of a completed operation.
pub(super) fn former(jobs: &Jobs) -> Kind<Database> {
    let jobs = jobs.clone();
    let kind = Kind::leased(SERVICE, "", move |_| {
        let jobs = jobs.clone();
        async move {
            enqueue(&jobs.0.ledger).await.map_err(unfinished)?;
            Ok(Outcome::kept(""))
        }
    });
    kind.taking(|kind, _| kind != KIND).policy(Policy { retention: Some(KEPT), ..policy() })
}

/// Migrates the table in batches. Unreadable rows stay.
async fn carry_over(jobs: &Jobs, context: &Context<Database>) -> Result<Outcome, Unfinished> {
    let (mut after, mut damaged) = (Some((String::new(), String::new())), 0);
    while let Some((tenant, id)) = after {
        if context.turn_is_over() {
            return Err(Unfinished::TurnOver);
        }
        let step = context.step(|tx: Tx| async move {
            let (last, left) = batch(jobs, &tx, (&tenant, &id)).await.map_err(unfinished)?;
            crash_point!("job.carried");
            // If it is lost it begins anew: migrated rows are not in the table any more.
            Ok(("", (last, left)))
        });
        let (last, left) = step.await?;
        (after, damaged) = (last, damaged + left);
    }
    if rows_left(jobs.0.ledger.store()).await.map_err(unfinished)? > damaged {
        return Err(Unfinished::released(HELD));
    }
    if damaged > 0 {
        tracing::warn!(
            rows = damaged,
            "rows of semel_jobs cannot be read and stay there; every other job was carried over"
        );
    }
    Ok(Outcome::kept(""))
}

/// Migrates the next rows in a transaction. Returns the last of them, if there may be more, and how many are
/// unreadable.
async fn batch(jobs: &Jobs, tx: &Tx, after: (&str, &str)) -> Result<(Option<(String, String)>, i64)> {
    let rows = next(&mut tx.connection().await?.get()?, after).await?;
    let all = rows.len();
    let last = rows.iter().rev().find_map(Any::place).filter(|_| all >= AT_ONCE);
    let whole: Vec<Row> = rows.into_iter().filter_map(|any| any.row.ok()).collect();
    let works = whole.iter().map(Row::work).collect::<Vec<Result<Work>>>();
    let (rows, works): (Vec<_>, Vec<_>) =
        whole.iter().zip(works).filter_map(|(row, work)| Some((row, work.ok()?))).unzip();
    jobs.0.ledger.enqueue_in(tx, works).await?;
    let mut held = tx.connection().await?;
    for row in &rows {
        on!(held.get()?, c => sqlx::query(DELETE)
            .bind(&row.tenant)
            .bind(&row.id)
            .execute(&mut *c)
            .await
            .map(drop)
            .map_err(broken)?);
    }
    Ok((last, i64::try_from(all - rows.len()).unwrap_or(i64::MAX)))
}

const DELETE: &str = "DELETE FROM semel_jobs WHERE tenant = $1 AND id = $2";

const LEFT: &str = "SELECT count(*) FROM semel_jobs";

async fn rows_left(store: &Database) -> Result<i64> {
    store.read(async |conn| on!(conn, c => sqlx::query_scalar(LEFT).fetch_one(&mut **c).await).map_err(broken)).await
}

struct Row {
    id: String,
    tenant: String,
    kind: String,
    params: String,
    actor: String,
    state: String,
    done: i64,
    total: Option<i64>,
    cursor: Option<String>,
    error: Option<String>,
    created_at: i64,
    updated_at: i64,
    ended_at: Option<i64>,
}

from_row!(Row { id, tenant, kind, params, actor, state, done, total, cursor, error, created_at, updated_at, ended_at });

/// A row, some columns of which may be unreadable.
struct Any {
    id: Option<String>,
    tenant: Option<String>,
    row: Result<Row, sqlx::Error>,
}

from_row!(Any, row => {
    id: row.try_get("id").ok(),
    tenant: row.try_get("tenant").ok(),
    row: sqlx::FromRow::from_row(row),
});

impl Any {
    fn place(&self) -> Option<(String, String)> {
        Some((self.tenant.clone()?, self.id.clone()?))
    }
}

impl Row {
    /// The operation that continues the row. Params that are not JSON are kept as a text, which no kind accepts.
    fn work(&self) -> Result<Work> {
        let id = JobId::parse(&self.id).ok_or(Error::Corrupt("a job's id"))?;
        let at = Some(self.updated_at);
        let progress = Progress {
            done: self.done,
            total: self.total,
            cursor: self.cursor.clone(),
            at,
            over: self.state == "done",
        };
        let former =
            Former { created_at: self.created_at, progress, ended_at: self.ended_at, error: self.error.clone() };
        let params = serde_json::from_str(&self.params).unwrap_or_else(|_| Value::String(self.params.clone()));
        work_of(&self.tenant, &self.kind, id, &Stored { params, actor: self.actor.clone(), former: Some(former) })
    }
}

macro_rules! next {
    ($lock:literal) => {
        concat!(
            "SELECT id, tenant, kind, params, actor, state, done, total, cursor, error, created_at, updated_at, ended_at
             FROM semel_jobs WHERE (tenant, id) > ($1, $2) ORDER BY tenant, id LIMIT $3",
            $lock
        )
    };
}

// Differs because SQLite has no row locks and needs none: there is one writer.
const NEXT_POSTGRES: &str = next!(" FOR UPDATE SKIP LOCKED");
const NEXT_SQLITE: &str = next!("");

async fn next(conn: &mut Conn<'_>, (tenant, id): (&str, &str)) -> Result<Vec<Any>> {
    let sql = match conn {
        Conn::Postgres(_) => NEXT_POSTGRES,
        Conn::Sqlite(_) => NEXT_SQLITE,
    };
    let limit = i64::try_from(AT_ONCE).unwrap_or(i64::MAX);
    on!(conn, c => sqlx::query_as(sql).bind(tenant).bind(id).bind(limit).fetch_all(&mut **c).await.map_err(broken))
}

statements!(DELETE, LEFT, NEXT_POSTGRES, NEXT_SQLITE);
