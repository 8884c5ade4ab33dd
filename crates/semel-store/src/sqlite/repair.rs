//! Sets the time in a file back to the host's clock.
//!
//! The time in a file never goes back by itself: an expired lease stays expired. A person may set it back, after the
//! host's clock was ahead. No lease may be live at that moment, since it would last longer by as much as the time goes
//! back; and no other process may have the file open, since it would continue from the time it knows.

use std::time::Duration;

use semel::{Error, Result, Scope, Timestamp};
use serde_json::json;
use sqlx::{
    AssertSqlSafe, ConnectOptions as _, Connection as _, SqliteConnection,
    sqlite::{SqliteConnectOptions, SqliteJournalMode},
};

use super::{file, held::HeldClock};
use crate::{
    Conn,
    audit::Audit,
    clock::Clock,
    condition::Repaired,
    connection::broken,
    sql::{Dialect, Sql},
};

/// How long to wait for others to close the file.
const PATIENCE: Duration = Duration::from_secs(1);

/// Due times: columns that are set back.
const DUE: [(&str, &str); 6] = [
    ("semel_operations", "not_before"),
    ("semel_backlog", "due"),
    ("semel_outbox", "due_at"),
    ("semel_outbox", "lease_until"),
    ("semel_queue", "visible_at"),
    ("semel_retries", "due_at"),
];

/// The rows that can be leased, in words and in SQL.
const LEASED: [(&str, &str); 4] = [
    ("operations", "SELECT count(*) FROM semel_leases WHERE deadline > 0 AND $1 > 0"),
    ("messages of the outbox", "SELECT count(*) FROM semel_outbox WHERE lease_until > $1"),
    ("messages of queues", "SELECT count(*) FROM semel_queue WHERE visible_at > $1 AND token <> 0"),
    ("retries", "SELECT count(*) FROM semel_retries WHERE due_at > $1 AND token <> 0"),
];

pub(crate) async fn repair_clock(url: &str, clock: Clock, (actor, reason): (&str, &str)) -> Result<Repaired> {
    let path = file::path(url)?;
    file::check_log(&path)?;
    let mut connection = alone(&path).await?;
    let clock = HeldClock::of(clock, &mut connection).await?;
    let (before, after) = (clock.host(), clock.wall());
    let times = (Timestamp::from_micros(before), Timestamp::from_micros(after));
    let by = clock.ahead().unwrap_or_default();
    if !by.is_zero() {
        let mut tx = connection.begin_with("BEGIN IMMEDIATE").await.map_err(broken)?;
        nothing_leased(&mut tx, before).await?;
        for (table, column) in DUE {
            set_back(&mut tx, table, column, (before, after)).await?;
        }
        sqlx::query("UPDATE semel_meta SET clock = $1, mark = NULL, boot = NULL, boot_id = NULL WHERE only = 1")
            .bind(after)
            .execute(&mut *tx)
            .await
            .map_err(broken)?;
        let audit =
            Audit { tenant: Scope::DEFAULT_TENANT, actor, action: "clock.repair", subject: "the clock", reason };
        let (was, is) = (json!({ "time": times.0.to_string() }), json!({ "time": times.1.to_string() }));
        let sql = Sql::new(Dialect::Sqlite);
        audit.write(&mut Conn::Sqlite(&mut tx), &sql, Some(was), Some(is), Some(after)).await?;
        tx.commit().await.map_err(broken)?;
    }
    connection.close().await.map_err(broken)?;
    Ok(Repaired { before: times.0, after: times.1, by })
}

/// A connection to a file that no other process has open: only then can the log be switched off. The next opening
/// switches it on again.
async fn alone(path: &std::path::Path) -> Result<SqliteConnection> {
    let options = SqliteConnectOptions::new()
        .filename(path)
        .journal_mode(SqliteJournalMode::Delete)
        .busy_timeout(PATIENCE)
        .disable_statement_logging();
    options.connect().await.map_err(|error| match file::is_locked(&error) {
        true => Error::Invalid(format!(
            "another process has {} open and keeps its time in memory; stop it first",
            path.display()
        )),
        false => file::cannot(path, &error),
    })
}

async fn nothing_leased(conn: &mut SqliteConnection, now: i64) -> Result<()> {
    for (what, sql) in LEASED {
        let n: i64 = sqlx::query_scalar(sql).bind(now).fetch_one(&mut *conn).await.map_err(broken)?;
        if n > 0 {
            return Err(Error::Invalid(format!(
                "{n} {what} are leased, and their leases would last longer by as much as the clock is set back; wait \
                 until they have ended"
            )));
        }
    }
    Ok(())
}

/// A time that was due at `before` is due at `after`; a later one keeps its distance.
async fn set_back(conn: &mut SqliteConnection, table: &str, column: &str, (before, after): (i64, i64)) -> Result<()> {
    let sql = format!("UPDATE {table} SET {column} = max($2, {column} - ($1 - $2)) WHERE {column} > $2");
    sqlx::query(AssertSqlSafe(sql)).bind(before).bind(after).execute(conn).await.map(drop).map_err(broken)
}
