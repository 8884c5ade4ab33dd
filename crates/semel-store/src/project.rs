//! Projections: rows of a service that follow its operations.
//!
//! A service may keep its own row beside an operation (a notification, a mail) that shows the state of the operation. A
//! projection is the statement that updates such rows. The store runs it in the transaction that changes the
//! operations, once per batch. So the two agree after every commit, also after a kill: no mark is written later, and no
//! loop repairs one.

use std::{collections::HashMap, ops::Deref};

use semel::{Fence, Key, Operation, Result, Scope, State, Timestamp, crash_point};
use serde_json::{Value, json};

use crate::{
    Conn, Database, Tx,
    apply::load_by_id,
    connection::broken,
    on, postgres,
    sql::{Dialect, Sql, render},
};

/// The placeholder for the changed operations in a projection's statement.
const OPERATIONS: &str = "{rows $1: id int, tenant text, kind text, key text, state text, due int, error text, \
                          attempt int, settled_at int}";

/// The state of a purged operation in the row of a service, and its error if it had not failed.
pub(crate) const PURGED: &str = "purged";

/// Rows of a service that follow its operations. Every process that opens the database must have it in its
/// [`Settings`](crate::Settings): a process without the projection changes operations without it.
///
/// `update` is one text for both databases. It reads the changed operations from `{operations}`:
///
/// | column | holds |
/// |---|---|
/// | `id` | the operation |
/// | `tenant`, `kind`, `key` | its scope and key |
/// | `state` | the word for its [`State`], or `purged` |
/// | `due` | from when on a worker may run it; null while it runs, and if no worker will run it |
/// | `error` | the error of the last failed run, or the reason of a doubt |
/// | `attempt` | the number of the last run, or of the next one if that run was released; 0 if there was none |
/// | `settled_at` | when it reached its state, if that is a settled one |
///
/// The statement runs when an operation completes, fails, is released, is in doubt, is cancelled, loses its lease or
/// runs out of attempts, and when a person decides. It runs for a purge, too, unless the
/// operation is completed or in doubt: then the error is `purged`, or that of the last run. It does not run for an
/// enqueue, a claim or an expiry.
///
/// Each operation should have its own row. The batch is ordered by `id`, so two batches lock in the same order. A
/// statement that fails fails the change, and only that: batches are halved down to the offending row. A row that
/// another transaction has locked delays only the change of its own operation.
///
/// ```
/// # use semel_store::Projection;
/// const ENTRIES: Projection = Projection {
///     service: "mailings",
///     kinds: "send.",
///     update: "UPDATE entries AS e SET sent_at = o.settled_at FROM {operations} AS o
///              WHERE e.tenant = o.tenant AND e.id = CAST(o.key AS BIGINT) AND o.state = 'completed'",
/// };
/// ```
#[derive(Clone, Copy, Debug)]
pub struct Projection {
    /// The service whose operations are followed.
    pub service: &'static str,
    /// The prefix of their kinds.
    pub kinds: &'static str,
    /// The statement.
    pub update: &'static str,
}

impl Projection {
    /// The statement as it runs on PostgreSQL and on SQLite: a test can prepare it. It has one parameter, the changed
    /// operations.
    #[must_use]
    pub fn texts(&self) -> [String; 2] {
        [Dialect::Postgres, Dialect::Sqlite].map(|dialect| self.text(dialect))
    }

    fn text(&self, dialect: Dialect) -> String {
        render(&self.update.replace("{operations}", OPERATIONS), dialect)
    }
}

/// The statements of the ledger and the projections.
pub(crate) struct Tables {
    sql: Sql,
    pub(crate) projections: Projections,
}

impl Tables {
    pub(crate) fn new(dialect: Dialect, projections: &[Projection]) -> Self {
        let rendered = |projection: &Projection| {
            // They live as long as the process, like the statements of the ledger.
            Projection { update: Box::leak(projection.text(dialect).into_boxed_str()), ..*projection }
        };
        Self { sql: Sql::new(dialect), projections: Projections(projections.iter().map(rendered).collect()) }
    }
}

impl Deref for Tables {
    type Target = Sql;
    fn deref(&self) -> &Sql {
        &self.sql
    }
}

pub(crate) struct Projections(Vec<Projection>);

/// Changed operations: the index of the projection, and the operation as its statement reads it.
#[derive(Default)]
pub(crate) struct Followed(Vec<(usize, Value)>);

impl Projections {
    /// Whether a row of a service follows the operations of a scope.
    pub(crate) fn follow(&self, scope: &Scope) -> bool {
        self.of(scope).is_some()
    }

    fn of(&self, scope: &Scope) -> Option<usize> {
        self.0.iter().position(|of| of.service == scope.service() && scope.kind().starts_with(of.kinds))
    }

    /// Adds a changed operation, if a row follows it. `due` is from when on a worker may run it.
    pub(crate) fn add(&self, to: &mut Followed, op: &Operation, due: Value) {
        if let Some(of) = self.of(&op.scope) {
            to.0.push((of, row(op, due)));
        }
    }

    /// Adds an operation that a person has purged, if a row follows it.
    pub(crate) fn add_purged(&self, to: &mut Followed, op: &Operation) {
        if let Some(of) = self.of(&op.scope) {
            let mut row = row(op, Value::Null);
            row["state"] = PURGED.into();
            to.0.push((of, row));
        }
    }

    /// Updates the rows, in the present transaction of `conn`.
    pub(crate) async fn run(&self, conn: &mut Conn<'_>, followed: Followed) -> Result<()> {
        for (n, projection) in self.0.iter().enumerate() {
            let rows: Vec<Value> =
                followed.0.iter().filter(|(of, _)| *of == n).map(|(_, changed)| changed.clone()).collect();
            conn.batch(projection.update, &rows).await?;
        }
        if !followed.0.is_empty() {
            crash_point!("store.projected");
        }
        Ok(())
    }
}

/// Whether a row follows this change of its operation.
pub(crate) fn is_news(old: Option<&Operation>, new: &Operation) -> bool {
    let shown = |op: &Operation| (op.state, op.parked, op.failures, op.crashes, op.not_before, op.settled_at);
    match (old, new.state) {
        (None, State::Pending | State::Processing) => false,
        // A claim, unless it takes over from a run that was lost.
        (Some(old), State::Processing) => old.state == State::Processing && old.fence != new.fence,
        (Some(old), _) => shown(old) != shown(new) || old.error != new.error,
        (None, _) => true,
    }
}

fn row(op: &Operation, due: Value) -> Value {
    json!({
        "id": op.id,
        "tenant": op.scope.tenant(),
        "kind": op.scope.kind(),
        "key": op.key.as_str(),
        "state": op.state.as_str(),
        "due": due,
        // PostgreSQL stores no NUL in a text.
        "error": op.error.as_ref().map(|error| error.replace('\0', "\u{fffd}")),
        "attempt": if op.was_claimed() { op.attempt() } else { 0 },
        "settled_at": op.settled_at.map(Timestamp::as_micros),
    })
}

impl Database {
    /// Updates the rows that follow these operations, in a transaction: for rows that are older than their projection,
    /// or whose operations a process without the projection has changed. It reads the operations under their locks, so
    /// it writes nothing outdated. Returns the operations of the updated rows: those that another transaction has
    /// locked are left out.
    ///
    /// # Errors
    /// The database refuses; roll back then.
    pub async fn project_in(&self, tx: &Tx, ids: &[i64]) -> Result<Vec<i64>> {
        self.answered(async {
            let (sql, mut held) = (self.sql(), tx.connection().await?);
            let mut ids = match held.get()? {
                Conn::Postgres(conn) => postgres::try_lock(conn, ids).await?,
                // There is one writer.
                Conn::Sqlite(_) => ids.to_vec(),
            };
            // In this order everywhere, so that two batches lock in the same order.
            ids.sort_unstable();
            let mut conn = held.get()?;
            let (operations, due) = (load_by_id(&mut conn, sql, &ids).await?, self.due_of(&mut conn, &ids).await?);
            let mut followed = Followed::default();
            for op in ids.iter().filter_map(|id| operations.get(id)) {
                sql.projections.add(&mut followed, op, json!(due.get(&op.id)));
            }
            sql.projections.run(&mut conn, followed).await?;
            Ok(ids)
        })
        .await
    }

    /// From when on a worker may run each of these operations. The backlog has it, not the operation: the terms of the
    /// last run may have left no attempts.
    async fn due_of(&self, conn: &mut Conn<'_>, ids: &[i64]) -> Result<HashMap<i64, i64>> {
        let ids = Value::from_iter(ids.iter().map(|id| json!({ "id": id }))).to_string();
        let due: Vec<(i64, i64)> = on!(conn, c =>
            sqlx::query_as(self.work_sql().due_of).bind(ids).fetch_all(&mut **c).await.map_err(broken)?);
        Ok(due.into_iter().collect())
    }

    /// The id of each of these operations that has ended: it is completed, in doubt, or without another attempt.
    /// Nothing for one that runs, that a worker will run, or that does not exist.
    ///
    /// # Errors
    /// The database cannot be reached.
    pub async fn ended(&self, operations: &[(Scope, Key)]) -> Result<Vec<Option<i64>>> {
        let mut ended = vec![None; operations.len()];
        if operations.is_empty() {
            return Ok(ended);
        }
        let row = |(n, (scope, key)): (usize, &(Scope, Key))| {
            let (tenant, service, kind) = (scope.tenant(), scope.service(), scope.kind());
            json!({ "n": n, "tenant": tenant, "service": service, "kind": kind, "key": key.as_str() })
        };
        let rows = Value::from_iter(operations.iter().enumerate().map(row)).to_string();
        let found: Vec<(i64, i64)> = self
            .read(async |conn| {
                on!(conn, c =>
                    sqlx::query_as(self.work_sql().ended).bind(&rows).fetch_all(&mut **c).await.map_err(broken))
            })
            .await?;
        for (n, id) in found {
            if let Some(place) = usize::try_from(n).ok().and_then(|n| ended.get_mut(n)) {
                *place = Some(id);
            }
        }
        Ok(ended)
    }

    /// Updates the row of an operation that is out of attempts: no worker runs it any more. Does nothing if the
    /// operation has changed since.
    pub(crate) async fn give_up(&self, conn: &mut Conn<'_>, id: i64, fence: Fence) -> Result<()> {
        let sql = self.sql();
        let off = on!(conn, c => sqlx::query(self.work_sql().not_due).bind(id).bind(fence.0).execute(&mut **c).await
            .map(|done| done.rows_affected()).map_err(broken)?);
        if off == 0 || sql.projections.0.is_empty() {
            return Ok(());
        }
        let mut followed = Followed::default();
        if let Some(op) = load_by_id(conn, sql, &[id]).await?.get(&id) {
            sql.projections.add(&mut followed, op, Value::Null);
        }
        sql.projections.run(conn, followed).await
    }
}
