//! The schema, and what the server must be set to.

use semel::{Error, Result};
use sqlx::{PgConnection, migrate::Migrator};

use crate::{connection::broken, migrations};

/// A server that may forget what it has acknowledged is refused.
pub(super) async fn check_settings(conn: &mut PgConnection) -> Result<()> {
    let settings: Vec<(String, String)> = sqlx::query_as(
        "SELECT name, setting FROM pg_settings WHERE name IN ('fsync', 'full_page_writes', 'synchronous_commit')",
    )
    .fetch_all(&mut *conn)
    .await
    .map_err(broken)?;
    let is_off = |name: &str| settings.iter().any(|(n, value)| n == name && value == "off");
    if is_off("fsync") {
        return Err(Error::Invalid("the server runs with fsync = off and may forget what it has acknowledged".into()));
    }
    if is_off("full_page_writes") {
        tracing::warn!("the server runs with full_page_writes = off: a power failure may corrupt the ledger");
    }
    Ok(())
}

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
    )
}

pub(super) async fn run_migrations(conn: &mut PgConnection, migrator: &Migrator) -> Result<()> {
    // A server with a hundred nodes waiting for the first to migrate is slow, not broken.
    sqlx::raw_sql("SET statement_timeout = 0; SET lock_timeout = 0").execute(&mut *conn).await.map_err(broken)?;
    migrator.run_direct(None, conn, false).await.map_err(|e| Error::Unavailable(format!("migrations: {e}")))
}
