//! One way to run a statement on either database.

use semel::{Error, Result};
use sqlx::{PgConnection, SqliteConnection};

/// A connection to one of the two databases, inside whatever transaction it is in.
pub enum Conn<'a> {
    /// PostgreSQL.
    Postgres(&'a mut PgConnection),
    /// SQLite.
    Sqlite(&'a mut SqliteConnection),
}

/// Runs the same code on whichever connection it is: `on!(conn, c => query.execute(&mut **c).await)`.
/// The body is checked by the compiler once for each database.
#[macro_export]
macro_rules! on {
    ($conn:expr, $c:ident => $body:expr) => {
        match $conn {
            $crate::Conn::Postgres($c) => $body,
            $crate::Conn::Sqlite($c) => $body,
        }
    };
}

impl Conn<'_> {
    /// The same connection, borrowed again.
    pub fn again(&mut self) -> Conn<'_> {
        match self {
            Conn::Postgres(c) => Conn::Postgres(c),
            Conn::Sqlite(c) => Conn::Sqlite(c),
        }
    }

    /// Runs a statement whose only parameter is a JSON batch; how many rows it changed.
    pub(crate) async fn batch(&mut self, sql: &'static str, rows: &[serde_json::Value]) -> Result<u64> {
        if rows.is_empty() {
            return Ok(0);
        }
        let json = serde_json::to_string(rows).map_err(|e| Error::Invalid(e.to_string()))?;
        on!(self, c => sqlx::query(sql).bind(json).execute(&mut **c).await.map(|done| done.rows_affected()).map_err(broken))
    }
}

/// What a database's error means to the engine, for those who run statements of their own.
#[must_use]
#[expect(clippy::needless_pass_by_value, reason = "it is given to map_err")]
pub fn broken(error: sqlx::Error) -> Error {
    use sqlx::Error as E;
    match &error {
        E::Io(_) | E::Tls(_) | E::PoolTimedOut | E::PoolClosed | E::WorkerCrashed | E::Protocol(_) => {
            Error::Unavailable(error.to_string())
        }
        E::Database(db) if is_passing(db.as_ref()) => Error::Unavailable(error.to_string()),
        _ => Error::Refused(error.to_string()),
    }
}

/// Whether PostgreSQL gave up waiting for a lock.
pub(crate) fn is_lock_timeout(error: &sqlx::Error) -> bool {
    error.as_database_error().and_then(|error| error.code()).is_some_and(|code| code == "55P03")
}

/// Whether the same statement may succeed when it is sent again.
pub(crate) fn is_passing(error: &dyn sqlx::error::DatabaseError) -> bool {
    let code = error.code().unwrap_or_default();
    // PostgreSQL: connection trouble, a full server, serialization and deadlocks, a server that
    // stops or is read-only after a failover, a cancelled statement, a disk that is full or broken.
    let postgres = ["08", "53", "40", "57", "58"].iter().any(|class| code.len() == 5 && code.starts_with(class))
        || code == "25006"
        || code == "25P03"
        || code == "55P03";
    // SQLite: busy, locked, I/O errors, full; the extended codes have these as their low byte.
    let sqlite = code.len() < 5 && code.parse::<u32>().is_ok_and(|code| matches!(code & 0xff, 5 | 6 | 10 | 13));
    postgres || sqlite
}
