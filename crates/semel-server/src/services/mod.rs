//! The services, each a folder: its routes, its rules and its tables.

mod call;
pub mod messages;
pub mod notifications;
pub mod proposals;
pub mod webhooks;

use semel_store::Database;

/// Brings the tables of all services up to date. Every service asks for it when it is opened; the first does it.
///
/// # Errors
/// When the database cannot be reached.
pub async fn migrate(database: &Database) -> semel::Result<()> {
    let (postgres, sqlite) = (sqlx::migrate!("migrations/postgres"), sqlx::migrate!("migrations/sqlite"));
    database.migrate("semel_server_migrations", postgres, sqlite).await
}
