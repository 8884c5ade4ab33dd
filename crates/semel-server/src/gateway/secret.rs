//! The secret with which credentials are hashed. It is stored in the database, because all gateways of a database must
//! share it.

use crate::sql::statements;
use semel::{Error, Ledger, Result, Token};
use semel_store::{Database, Tx, broken, on};

/// Its name among the secrets of the database.
const NAME: &str = "gateway credentials";

const MAKE: &str = "INSERT INTO semel_secrets (name, secret) VALUES ($1, $2) ON CONFLICT (name) DO NOTHING";
const FIND: &str = "SELECT secret FROM semel_secrets WHERE name = $1";

/// The secret of a database, created if it has none. Of gateways that start together, one creates it.
///
/// # Errors
/// When the database cannot be reached.
pub async fn of(ledger: &Ledger<Database>) -> Result<Vec<u8>> {
    let new = [Token::random()?.0, Token::random()?.0].concat();
    ledger.transact(|tx| async move { find_or_make(&tx, new).await }).await
}

async fn find_or_make(tx: &Tx, new: Vec<u8>) -> Result<Vec<u8>> {
    let mut held = tx.connection().await?;
    let conn = held.get()?;
    on!(conn, c => {
        sqlx::query(MAKE).bind(NAME).bind(new).execute(&mut *c).await.map_err(broken)?;
        let secret: Option<Vec<u8>> = sqlx::query_scalar(FIND).bind(NAME).fetch_optional(&mut *c).await.map_err(broken)?;
        secret.ok_or(Error::Contradiction("a secret that was just made"))
    })
}

statements!(MAKE, FIND);
