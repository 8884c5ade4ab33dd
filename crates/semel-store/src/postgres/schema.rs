//! The schema, and the required settings of the server.

use std::time::{Duration, Instant};

use semel::{Error, Result};
use sqlx::{
    PgConnection,
    migrate::{MigrateError, Migrator},
};

use super::epoch;
use crate::{connection::broken, migrations, migrations::migration_failed};

/// Refuses a server that may lose acknowledged commits, and a standby. A server with fewer connections than a node may
/// use is accepted: the node continues with those.
pub(super) async fn check_settings(conn: &mut PgConnection, wanted: usize) -> Result<()> {
    if sqlx::query_scalar("SELECT pg_is_in_recovery()").fetch_one(&mut *conn).await.map_err(broken)? {
        return Err(epoch::standby());
    }
    let settings: Vec<(String, String)> = sqlx::query_as(
        "SELECT name, setting FROM pg_settings WHERE name IN ('fsync', 'full_page_writes', 'synchronous_commit')",
    )
    .fetch_all(&mut *conn)
    .await
    .map_err(broken)?;
    let is_off = |name: &str| settings.iter().any(|(n, value)| n == name && value == "off");
    if is_off("fsync") {
        return Err(Error::Invalid("the server runs with fsync = off and may lose acknowledged commits".into()));
    }
    if is_off("full_page_writes") {
        tracing::warn!("the server runs with full_page_writes = off: a power failure may corrupt the ledger");
    }
    let allowed: i64 = sqlx::query_scalar(ALLOWED).fetch_one(conn).await.map_err(broken)?;
    if usize::try_from(allowed).is_ok_and(|allowed| allowed < wanted) {
        tracing::warn!(
            allowed,
            wanted,
            "PostgreSQL allows fewer connections than this node may use; callers may have to wait"
        );
    }
    Ok(())
}

/// The most connections of a node: the limits of the server, of the database and of the role.
const ALLOWED: &str = "SELECT least(
         current_setting('max_connections')::bigint - current_setting('superuser_reserved_connections')::bigint,
         (SELECT nullif(datconnlimit, -1) FROM pg_database WHERE datname = current_database()),
         (SELECT nullif(rolconnlimit, -1) FROM pg_roles WHERE rolname = current_user AND NOT rolsuper))";

/// The schema of the ledger.
pub(crate) fn migrations() -> Migrator {
    migrations!(
        "../../migrations/postgres",
        "0001_ledger",
        "0002_pinned",
        "0003_messages",
        "0004_due",
        "0005_complete",
        "0006_repeats",
        "0007_set_aside",
        "0008_epoch",
        "0009_probe",
        "0010_secrets",
        "0011_queue",
        "0012_view",
        "0013_fleet",
        "0014_tried",
        "0015_sql",
        "0016_newer",
        "0017_kept",
    )
}

/// How long a migration waits for one lock. All later statements on the table wait behind it for as long.
const LOCK_WAIT: &str = "SET statement_timeout = 0; SET lock_timeout = '1500ms'";

/// The longest pause before a migration retries its locks.
const LONGEST_PAUSE: Duration = Duration::from_secs(5);

/// How often the log says what a migration waits for.
const SAY_EVERY: Duration = Duration::from_secs(30);

/// Runs migrations. An `ALTER TABLE` waits for every reader of its table, a `pg_dump` for instance, and all other
/// statements on the table wait behind it. So it gives up after a moment, lets the others pass, and retries. So do
/// nodes that wait for another node's migration.
pub(super) async fn run_migrations(conn: &mut PgConnection, migrator: &Migrator, patience: Duration) -> Result<()> {
    sqlx::raw_sql(LOCK_WAIT).execute(&mut *conn).await.map_err(broken)?;
    let (begun, mut said, mut pause) = (Instant::now(), None::<Instant>, Duration::from_millis(250));
    loop {
        let error = match migrator.run_direct(None, conn, false).await {
            Ok(()) => return Ok(()),
            Err(error) => error,
        };
        let Some(waits_for) = waits_for(conn, &error).await? else {
            return Err(migration_failed(migrator, &error));
        };
        if begun.elapsed() >= patience {
            let tried = begun.elapsed().as_secs();
            return Err(Error::Unavailable(format!(
                "migrations: no lock within {tried} s: {waits_for}; end it, or start this node again later"
            )));
        }
        if said.is_none_or(|said| said.elapsed() >= SAY_EVERY) {
            tracing::warn!(%waits_for, "a migration waits for a lock and retries");
            said = Some(Instant::now());
        }
        // Nodes of other schemas migrate under the same lock.
        sqlx::raw_sql("SELECT pg_advisory_unlock_all()").execute(&mut *conn).await.map_err(broken)?;
        tokio::time::sleep(pause).await;
        pause = (pause * 2).min(LONGEST_PAUSE);
    }
}

/// The lock holders, if a migration failed because of a lock.
async fn waits_for(conn: &mut PgConnection, error: &MigrateError) -> Result<Option<String>> {
    let (MigrateError::Execute(sqlx::Error::Database(cause))
    | MigrateError::ExecuteMigration(sqlx::Error::Database(cause), _)) = error
    else {
        return Ok(None);
    };
    // A lock that was not available in time; a deadlock.
    if !matches!(cause.code().as_deref(), Some("55P03" | "40P01")) {
        return Ok(None);
    }
    let MigrateError::ExecuteMigration(_, version) = error else {
        return Ok(Some("another node is migrating".to_owned()));
    };
    let holders: Option<String> = sqlx::query_scalar(HOLDERS).fetch_one(conn).await.map_err(broken)?;
    let holders = holders.unwrap_or_else(|| "a transaction that has ended meanwhile".to_owned());
    Ok(Some(format!("migration {version} waits for {holders}")))
}

/// The oldest transactions that hold a lock of a table in our schema. Without their queries, which may contain secrets.
const HOLDERS: &str = "SELECT string_agg(format('%s (pid %s, user %s, %s for %s s)', coalesce(nullif(h.application_name, ''), 'a session'),
                              h.pid, h.usename, coalesce(h.state, 'open'), extract(epoch FROM now() - h.xact_start)::bigint), ', ')
     FROM (SELECT a.pid, a.application_name, a.usename, a.state, a.xact_start FROM pg_stat_activity AS a
           WHERE a.pid <> pg_backend_pid() AND a.pid IN (
               SELECT l.pid FROM pg_locks AS l JOIN pg_class AS c ON c.oid = l.relation
               WHERE l.granted AND c.relnamespace = current_schema()::regnamespace
                 AND l.database = (SELECT oid FROM pg_database WHERE datname = current_database()))
           ORDER BY a.xact_start LIMIT 3) AS h";
