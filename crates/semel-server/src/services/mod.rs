//! The services, each a folder: its routes, its rules and its tables.

mod call;
pub mod messages;
pub mod notifications;
pub mod proposals;
pub mod webhooks;

use semel_store::{Database, migrations};
use sqlx::migrate::Migrator;

/// Brings the tables of all services up to date. Every service asks for it when it is opened; the first does it.
///
/// # Errors
/// When the database cannot be reached.
pub async fn migrate(database: &Database) -> semel::Result<()> {
    database.migrate("semel_server_migrations", postgres_migrations(), sqlite_migrations()).await
}

fn postgres_migrations() -> Migrator {
    migrations!(
        "../../migrations/postgres",
        "0001_proposals",
        "0002_notifications",
        "0003_jobs",
        "0004_deliveries",
        "0005_webhooks",
        "0006_listings",
        "0008_attempts",
    )
}

fn sqlite_migrations() -> Migrator {
    migrations!(
        "../../migrations/sqlite",
        "0001_proposals",
        "0002_notifications",
        "0003_jobs",
        "0004_deliveries",
        "0005_webhooks",
        "0006_listings",
        "0008_attempts",
    )
}

#[cfg(test)]
mod tests {
    #[test]
    fn every_migration_file_is_run() {
        semel_store::all_listed("migrations/postgres", &super::postgres_migrations());
        semel_store::all_listed("migrations/sqlite", &super::sqlite_migrations());
    }
}
