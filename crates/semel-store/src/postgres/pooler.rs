//! Refuses a pooler that assigns a session per transaction.
//!
//! Connections have settings (planner, timeouts) and prepared statements. With a pooler in transaction mode these stay
//! with the server's session, and the next transaction uses another one: settings would be lost, and affect other
//! clients.

use std::time::Duration;

use semel::{Error, Result, Token};
use sqlx::{ConnectOptions as _, PgConnection, Row as _, postgres::PgConnectOptions};

use super::seats::{PATIENCE, set_up, unavailable};
use crate::connection::broken;

/// How many times it is tried. A pooler assigns the most recently used session, so the first try shows it, unless other
/// clients use the pooler at that moment.
const ROUNDS: usize = 8;

const NAME: &str = "semel.session";

/// A connection, if its session is its own. Nothing is set before that is known: it would stay with a session that
/// other programs get.
pub(super) async fn connect_checked(options: &PgConnectOptions) -> Result<PgConnection> {
    let mut conn = options.connect().await.map_err(unavailable)?;
    // A second connection is needed for the test. If there is no room for one, the log says so later.
    if let Ok(Ok(mut other)) = tokio::time::timeout(PATIENCE, options.connect()).await {
        check(&mut conn, &mut other).await?;
    }
    set_up(&mut conn).await?;
    Ok(conn)
}

/// Names the session of one connection, and looks for the name while another one has a transaction open: the other must
/// not see it, and the first must.
async fn check(conn: &mut PgConnection, other: &mut PgConnection) -> Result<()> {
    let name = hex::encode(Token::random()?.0);
    let set = format!("SELECT set_config('{NAME}', '{name}', false)");
    ask(conn, set).await.map_err(broken)?;
    let look = format!("SELECT current_setting('{NAME}', true)");
    for _ in 0..ROUNDS {
        let theirs = match within(PATIENCE, ask(other, format!("BEGIN; {look}"))).await {
            Some(Ok(theirs)) => theirs,
            // A pooler in statement mode allows no transactions.
            Some(Err(sqlx::Error::Database(error))) => return Err(refused(&error.to_string())),
            Some(Err(error)) => return Err(broken(error)),
            // A pooler with one session for us, which it assigns to one connection at a time.
            None => return Ok(()),
        };
        let ours = match within(PATIENCE, ask(conn, look.clone())).await {
            Some(ours) => ours.map_err(broken)?,
            None => return Err(refused("a connection had to wait for the end of another one's transaction")),
        };
        ask(other, "ROLLBACK".to_owned()).await.map_err(broken)?;
        if theirs.as_deref() == Some(&name) || ours.as_deref() != Some(&name) {
            return Err(refused("a setting of one session was found in another"));
        }
    }
    Ok(())
}

async fn ask(conn: &mut PgConnection, sql: String) -> Result<Option<String>, sqlx::Error> {
    let rows = sqlx::raw_sql(sqlx::AssertSqlSafe(sql)).fetch_all(conn).await?;
    rows.last().map_or(Ok(None), |row| row.try_get(0))
}

async fn within<T>(limit: Duration, what: impl Future<Output = T>) -> Option<T> {
    tokio::time::timeout(limit, what).await.ok()
}

fn refused(why: &str) -> Error {
    Error::Invalid(format!(
        "there is a connection pooler before PostgreSQL whose sessions change with every transaction ({why}): use its \
         session mode (PgBouncer: pool_mode = session), or connect to PostgreSQL directly"
    ))
}
