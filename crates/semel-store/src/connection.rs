//! One way to run a statement on either database.

pub use semel::reasons::{AWAY, DISK_FULL, FILE_HELD, FILE_LOST, NO_CONNECTION, READ_ONLY};
use semel::{Error, Result};
use sqlx::{PgConnection, SqliteConnection};

/// A connection to one of the two databases, in its present transaction.
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

    /// Runs a statement whose only parameter is a JSON batch; returns the number of changed rows.
    pub(crate) async fn batch(&mut self, sql: &'static str, rows: &[serde_json::Value]) -> Result<u64> {
        if rows.is_empty() {
            return Ok(0);
        }
        let json = serde_json::to_string(rows).map_err(|e| Error::Invalid(e.to_string()))?;
        on!(self, c => sqlx::query(sql).bind(json).execute(&mut **c).await.map(|done| done.rows_affected()).map_err(broken))
    }
}

/// The prefix of the error for a row that another transaction holds for longer than the statement waits.
const HELD: &str = "another transaction holds a row";

/// Whether a statement failed because another transaction holds a row: the row is the cause, not the database.
#[must_use]
pub fn is_held(error: &Error) -> bool {
    matches!(error, Error::Unavailable(why) if why.starts_with(HELD))
}

/// Whether to retry at once after this error. Not if a file is lost, which only a restart repairs; nor if another
/// process holds the file, which was waited for already.
pub(crate) fn is_worth_asking_again(error: &Error) -> bool {
    error.is_transient() && !matches!(error.reason(), Some(FILE_LOST | FILE_HELD))
}

/// Converts a database's error for the engine, for callers that run their own statements.
#[must_use]
#[expect(clippy::needless_pass_by_value, reason = "it is given to map_err")]
pub fn broken(error: sqlx::Error) -> Error {
    use sqlx::Error as E;
    let passing = match &error {
        E::Io(_) | E::Tls(_) | E::PoolTimedOut | E::PoolClosed | E::WorkerCrashed | E::Protocol(_) => true,
        E::Database(db) => is_passing(db.as_ref()),
        _ => false,
    };
    if passing { Error::Unavailable(words(&error)) } else { Error::Refused(text(&error)) }
}

/// As [`broken`], for rows that the store itself has written: a value of the wrong type, which SQLite accepts, or
/// invalid text means that a stored row is damaged. For tables of callers, or rows of several tables, that would be
/// untrue.
pub(crate) fn read_failed(error: sqlx::Error) -> Error {
    if matches!(error, sqlx::Error::ColumnDecode { .. } | sqlx::Error::Decode(_)) {
        tracing::debug!(%error, "a stored row cannot be read");
        return Error::Corrupt("a column is not of its type");
    }
    broken(error)
}

/// The text of an error: it begins with the reason if the whole database is concerned.
pub(crate) fn words(error: &sqlx::Error) -> String {
    use sqlx::Error as E;
    let reason = match error {
        E::Io(_) | E::Tls(_) | E::WorkerCrashed | E::Protocol(_) => Some(AWAY),
        E::Database(_) if is_lock_timeout(error) => Some(HELD),
        E::Database(db) => reason_of(db.as_ref()),
        _ => None,
    };
    let text = text(error);
    reason.map_or_else(|| text.clone(), |reason| format!("{reason}: {text}"))
}

/// The error's own text. The driver appends the line number of the server's source code to errors of PostgreSQL, which
/// looks like that of a statement.
pub(crate) fn text(error: &sqlx::Error) -> String {
    let postgres = error.as_database_error().and_then(|db| db.try_downcast_ref::<sqlx::postgres::PgDatabaseError>());
    match postgres {
        Some(postgres) => format!("error returned from database: {}", postgres.message()),
        None => error.to_string(),
    }
}

/// The reason for a code that concerns the whole database.
fn reason_of(error: &dyn sqlx::error::DatabaseError) -> Option<&'static str> {
    let code = error.code().unwrap_or_default();
    match code.parse::<u32>() {
        // SQLite; the extended codes have these as their low byte: read-only, I/O error, full, cannot open.
        Ok(number) if code.len() < 5 => match number & 0xff {
            8 => Some(READ_ONLY),
            10 | 13 => Some(DISK_FULL),
            14 => Some(AWAY),
            _ => None,
        },
        // PostgreSQL: the server stops or starts; the connection; the disk; a standby or read-only server; too many
        // connections.
        _ => match &*code {
            "57P01" | "57P02" | "57P03" => Some(AWAY),
            "53100" | "58030" => Some(DISK_FULL),
            "25006" => Some(READ_ONLY),
            "53300" => Some(NO_CONNECTION),
            code if code.starts_with("08") => Some(AWAY),
            _ => None,
        },
    }
}

/// Whether PostgreSQL gave up waiting for a lock.
pub(crate) fn is_lock_timeout(error: &sqlx::Error) -> bool {
    error.as_database_error().and_then(|error| error.code()).is_some_and(|code| code == "55P03")
}

/// Whether the same statement may succeed if it is sent again.
pub(crate) fn is_passing(error: &dyn sqlx::error::DatabaseError) -> bool {
    if reason_of(error).is_some() {
        return true;
    }
    let code = error.code().unwrap_or_default();
    // PostgreSQL: connection failures, a full server, serialization failures and deadlocks, a server that stops or is
    // read-only after a failover, a cancelled statement, a full or broken disk.
    let postgres = ["08", "53", "40", "57", "58"].iter().any(|class| code.len() == 5 && code.starts_with(class))
        || code == "25006"
        || code == "25P03"
        || code == "55P03";
    // SQLite: busy, locked.
    let sqlite = code.len() < 5 && code.parse::<u32>().is_ok_and(|code| matches!(code & 0xff, 5 | 6));
    postgres || sqlite
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_value_of_another_type_is_a_damaged_row_only_in_tables_of_the_store() {
        let mistyped = || sqlx::Error::ColumnDecode { index: "n".into(), source: "not a number".into() };
        assert!(matches!(read_failed(mistyped()), Error::Corrupt(_)));
        // A handler reads its own tables: no row of the ledger is damaged.
        let of_others = broken(mistyped());
        assert!(matches!(&of_others, Error::Refused(why) if why.contains("not a number")), "{of_others}");
        for error in [|| sqlx::Error::PoolTimedOut, || sqlx::Error::WorkerCrashed] {
            assert!(read_failed(error()).is_transient() && broken(error()).is_transient());
        }
    }
}
