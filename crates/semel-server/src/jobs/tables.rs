//! The SQL of jobs: one text for both databases, but where it says why not.

use semel::{Error, Result, Timestamp};
use semel_store::{Conn, broken, from_row, on};

use super::model::{Job, JobId, JobState, NewJob, Step};

/// The columns of a job, in the order of [`Row`].
macro_rules! job {
    () => {
        "id, tenant, kind, params, actor, state, done, total, cursor, error, created_at, updated_at, ended_at"
    };
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

/// A row of which not everything may be readable. Its job is shown, and keeps no other waiting.
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
    /// The job; or what can be said of one that cannot be read, as one that failed. Nothing if even its id is damaged.
    fn read(self) -> Option<Job> {
        let why =
            match self.row.map_err(|error| error.to_string()).and_then(|row| row.read().map_err(|e| e.to_string())) {
                Ok(job) => return Some(job),
                Err(why) => why,
            };
        let never = Timestamp::from_micros(0);
        Some(Job {
            id: JobId::parse(self.id.as_deref()?)?,
            tenant: self.tenant.unwrap_or_default(),
            kind: UNREADABLE.to_owned(),
            params: serde_json::Value::Null,
            actor: String::new(),
            state: JobState::Failed,
            done: 0,
            total: None,
            cursor: None,
            error: Some(format!("{UNREADABLE}: {why}")),
            created_at: never,
            updated_at: never,
            ended_at: None,
        })
    }
}

/// The kind of a job whose row cannot be read.
const UNREADABLE: &str = "unreadable";

impl Row {
    fn read(self) -> Result<Job> {
        Ok(Job {
            id: JobId::parse(&self.id).ok_or(Error::Corrupt("a job's id"))?,
            tenant: self.tenant,
            kind: self.kind,
            params: serde_json::from_str(&self.params).map_err(|_| Error::Corrupt("a job's params"))?,
            actor: self.actor,
            state: JobState::parse(&self.state).ok_or(Error::Corrupt("a job's state"))?,
            done: self.done,
            total: self.total,
            cursor: self.cursor,
            error: self.error,
            created_at: Timestamp::from_micros(self.created_at),
            updated_at: Timestamp::from_micros(self.updated_at),
            ended_at: self.ended_at.map(Timestamp::from_micros),
        })
    }
}

const INSERT: &str = concat!(
    "INSERT INTO semel_jobs (id, tenant, kind, params, actor, state) VALUES ($1, $2, $3, $4, $5, 'running')
     RETURNING ",
    job!()
);

pub(super) async fn insert(conn: &mut Conn<'_>, new: &NewJob) -> Result<Job> {
    let row: Row = on!(conn, c => sqlx::query_as(INSERT)
        .bind(JobId::new().to_string())
        .bind(&new.tenant)
        .bind(new.kind)
        .bind(new.params.to_string())
        .bind(&new.actor)
        .fetch_one(&mut **c)
        .await
        .map_err(broken)?);
    row.read()
}

const FIND: &str = concat!("SELECT ", job!(), " FROM semel_jobs WHERE tenant = $1 AND id = $2");

pub(super) async fn find(conn: &mut Conn<'_>, tenant: &str, id: JobId) -> Result<Option<Job>> {
    let row: Option<Row> = on!(conn, c => sqlx::query_as(FIND)
        .bind(tenant)
        .bind(id.to_string())
        .fetch_optional(&mut **c)
        .await
        .map_err(broken)?);
    row.map(Row::read).transpose()
}

// Differs because SQLite has no row locks and needs none: whoever writes is alone.
const LOCK_POSTGRES: &str =
    concat!("SELECT ", job!(), " FROM semel_jobs WHERE tenant = $1 AND id = $2 AND state = 'running' FOR UPDATE");
const LOCK_SQLITE: &str =
    concat!("SELECT ", job!(), " FROM semel_jobs WHERE tenant = $1 AND id = $2 AND state = 'running'");

/// A job that has not ended, for the transaction to move on: nobody else can until it commits.
pub(super) async fn lock(conn: &mut Conn<'_>, tenant: &str, id: JobId) -> Result<Option<Job>> {
    let sql = match conn {
        Conn::Postgres(_) => LOCK_POSTGRES,
        Conn::Sqlite(_) => LOCK_SQLITE,
    };
    let row: Option<Row> = on!(conn, c => sqlx::query_as(sql)
        .bind(tenant)
        .bind(id.to_string())
        .fetch_optional(&mut **c)
        .await
        .map_err(broken)?);
    row.map(Row::read).transpose()
}

const LIST: &str = concat!(
    "SELECT ",
    job!(),
    " FROM semel_jobs WHERE tenant = $1 AND ($2 IS NULL OR id < $2) AND ($3 IS NULL OR state = $3)
     ORDER BY id DESC LIMIT $4"
);

/// A tenant's jobs, newest first.
pub(super) async fn list(
    conn: &mut Conn<'_>,
    tenant: &str,
    before: Option<JobId>,
    state: Option<JobState>,
    limit: i64,
) -> Result<Vec<Job>> {
    let rows: Vec<Any> = on!(conn, c => sqlx::query_as(LIST)
        .bind(tenant)
        .bind(before.map(|id| id.to_string()))
        .bind(state.map(JobState::as_str))
        .bind(limit)
        .fetch_all(&mut **c)
        .await
        .map_err(broken)?);
    Ok(rows.into_iter().filter_map(Any::read).collect())
}

const RUNNING: &str =
    concat!("SELECT ", job!(), " FROM semel_jobs WHERE state = 'running' AND id > $1 ORDER BY id LIMIT $2");

/// Jobs of all tenants that have not ended, oldest first; after which id to look for more, if there may be more. One that
/// cannot be read is of no kind that a node knows.
pub(super) async fn running(conn: &mut Conn<'_>, after: &str, limit: i64) -> Result<(Vec<Job>, Option<String>)> {
    let rows: Vec<Any> = on!(conn, c => sqlx::query_as(RUNNING)
        .bind(after)
        .bind(limit)
        .fetch_all(&mut **c)
        .await
        .map_err(broken)?);
    let full = i64::try_from(rows.len()).is_ok_and(|rows| rows >= limit);
    let next = rows.iter().rev().find_map(|row| row.id.clone()).filter(|_| full);
    Ok((rows.into_iter().filter_map(Any::read).collect(), next))
}

const SET_TOTAL: &str = "
    UPDATE semel_jobs SET total = $3 WHERE tenant = $1 AND id = $2 AND state = 'running' AND total IS NULL";

pub(super) async fn set_total(conn: &mut Conn<'_>, tenant: &str, id: JobId, total: i64) -> Result<()> {
    on!(conn, c => sqlx::query(SET_TOTAL)
        .bind(tenant)
        .bind(id.to_string())
        .bind(total)
        .execute(&mut **c)
        .await
        .map(drop)
        .map_err(broken))
}

const ADVANCE: &str = "
    UPDATE semel_jobs
    SET done = done + $3, cursor = $4, updated_at = $5, state = $6, ended_at = CASE WHEN $6 = 'done' THEN $5 END,
        total = CASE WHEN $6 = 'done' OR total < done + $3 THEN done + $3 ELSE total END
    WHERE tenant = $1 AND id = $2 AND state = 'running'";

/// Moves a job on by what a step did. A total that was counted too low, or too high, is put right.
pub(super) async fn advance(conn: &mut Conn<'_>, job: &Job, step: &Step, now: Timestamp) -> Result<()> {
    let state = if step.more { JobState::Running } else { JobState::Done };
    on!(conn, c => sqlx::query(ADVANCE)
        .bind(&job.tenant)
        .bind(job.id.to_string())
        .bind(i64::try_from(step.done).unwrap_or(i64::MAX))
        .bind(&step.cursor)
        .bind(now.as_micros())
        .bind(state.as_str())
        .execute(&mut **c)
        .await
        .map(drop)
        .map_err(broken))
}

const FAIL: &str = "
    UPDATE semel_jobs SET state = 'failed', error = $3, updated_at = $4, ended_at = $4
    WHERE tenant = $1 AND id = $2 AND state = 'running'";

pub(super) async fn fail(conn: &mut Conn<'_>, job: &Job, error: &str, now: Timestamp) -> Result<()> {
    on!(conn, c => sqlx::query(FAIL)
        .bind(&job.tenant)
        .bind(job.id.to_string())
        .bind(error)
        .bind(now.as_micros())
        .execute(&mut **c)
        .await
        .map(drop)
        .map_err(broken))
}
