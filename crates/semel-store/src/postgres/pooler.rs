//! A pooler that gives every transaction another session is refused.
//!
//! Connections here have settings (how to plan, how long to wait) and prepared statements. Behind a pooler in transaction
//! mode these stay with the server's session, and the next transaction is in another one: settings would be lost, and
//! found by others.

use std::time::Duration;

use semel::{Error, Result, Token};
use sqlx::{ConnectOptions as _, PgConnection, Row as _, postgres::PgConnectOptions};

use super::seats::{PATIENCE, set_up, unavailable};
use crate::connection::broken;

/// How often it is tried. A pooler gives out the session that was left last, so the first time tells, unless others use
/// the pooler at that moment.
const ROUNDS: usize = 8;

const NAME: &str = "semel.session";

/// A connection, if its session is its own. Nothing is set before that is known: it would stay with the session, which
/// other programs get.
pub(super) async fn connect_checked(options: &PgConnectOptions) -> Result<PgConnection> {
    let mut conn = options.connect().await.map_err(unavailable)?;
    // Without a second connection there is nothing to tell by. If there is no room for one, the log says so later.
    if let Ok(Ok(mut other)) = tokio::time::timeout(PATIENCE, options.connect()).await {
        check(&mut conn, &mut other).await?;
    }
    set_up(&mut conn).await?;
    Ok(conn)
}

/// Names the session of one connection, and looks for the name while another one has a transaction open: that one must
/// not see it, and the first must.
async fn check(conn: &mut PgConnection, other: &mut PgConnection) -> Result<()> {
    let name: String = Token::random()?.0.iter().map(|byte| format!("{byte:02x}")).collect();
    let set = format!("SELECT set_config('{NAME}', '{name}', false)");
    ask(conn, set).await.map_err(broken)?;
    let look = format!("SELECT current_setting('{NAME}', true)");
    for _ in 0..ROUNDS {
        let theirs = match within(PATIENCE, ask(other, format!("BEGIN; {look}"))).await {
            Some(Ok(theirs)) => theirs,
            // A pooler in statement mode allows no transactions.
            Some(Err(sqlx::Error::Database(error))) => return Err(refused(&error.to_string())),
            Some(Err(error)) => return Err(broken(error)),
            // A pooler that has one session for us, and gives it to one connection at a time.
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
