//! The services, one folder each: what it is (`mod.rs`), its section of the configuration (`config.rs`), its problems,
//! its routes, its domain, its SQL and its work.

mod call;
pub mod mailings;
pub mod messages;
pub mod notifications;
pub mod operations;
pub mod proposals;
pub mod webhooks;

use semel_store::{Database, Projection, migrator};
use sqlx::migrate::Migrator;

use crate::{
    gateway, jobs,
    service::{Migration, Opened, Parts, Service},
    view::Telling,
};

/// Every service of the server.
pub static ALL: [&Service; 7] = [
    &proposals::PROPOSALS,
    &operations::OPERATIONS,
    &messages::MESSAGES,
    &notifications::NOTIFICATIONS,
    &webhooks::WEBHOOKS,
    &mailings::MAILINGS,
    &jobs::JOBS,
];

/// Opens every service, after its migrations.
///
/// # Errors
/// When the database cannot be reached, or a service cannot be used as configured.
pub async fn open(parts: &Parts<'_>) -> semel::Result<Vec<Opened>> {
    migrate(parts.ledger.store()).await?;
    let mut all = Vec::with_capacity(ALL.len());
    for service in ALL {
        all.push((service.open)(parts).await?);
    }
    Ok(all)
}

/// How the operations of a service are described. The gateway is a separate program and not in the list.
pub(crate) fn telling(service: &str) -> Telling {
    let known = ALL.into_iter().find(|known| known.name == service).map(|service| service.telling);
    known.unwrap_or(if service == gateway::SERVICE { gateway::TELLING } else { Telling::PLAIN })
}

/// Runs the migrations of all services.
///
/// # Errors
/// When the database cannot be reached.
pub async fn migrate(database: &Database) -> semel::Result<()> {
    let [postgres, sqlite] = [|m: &Migration| m.postgres, |m: &Migration| m.sqlite].map(migrations);
    database.migrate("semel_server_migrations", postgres, sqlite).await
}

/// The projections of all services: every process that opens the database needs them, whichever services it uses.
#[must_use]
pub fn projections() -> Vec<Projection> {
    ALL.iter().flat_map(|service| service.projections).copied().collect()
}

/// The migrations of all services for one database, in the order of their numbers.
fn migrations(text: fn(&Migration) -> &'static str) -> Migrator {
    let all = ALL.into_iter().flat_map(|service| service.migrations);
    let mut files: Vec<_> = all.map(|migration| (migration.name, text(migration))).collect();
    files.sort_unstable();
    migrator(&files)
}

#[cfg(test)]
mod tests {
    use super::*;

    // The released migrations, with the first digits of the SHA-384 of each as it was released.
    const POSTGRES: [(i64, &str); 7] = [
        (1, "f024e69d037d80aa"),
        (2, "acc4e102c67a9527"),
        (3, "787ec0dd5367658d"),
        (4, "36b1c144343fcabe"),
        (5, "ac833abc0c83ad3b"),
        (6, "107368c7961f364b"),
        (8, "59ccd5a0ae4cc234"),
    ];

    const SQLITE: [(i64, &str); 7] = [
        (1, "49c6fab5bf1a8b89"),
        (2, "2824f558395adcc4"),
        (3, "adcee62f0fc6babd"),
        (4, "beebed66b9d31bf7"),
        (5, "8bcb4f4646ed3523"),
        (6, "107368c7961f364b"),
        (8, "f5e7a53c3f2e6dd8"),
    ];

    #[test]
    fn databases_of_released_versions_accept_every_migration() {
        semel_store::all_as_released(&migrations(|m| m.postgres), &POSTGRES);
        semel_store::all_as_released(&migrations(|m| m.sqlite), &SQLITE);
    }

    #[test]
    fn every_migration_file_is_run_on_both_databases() {
        let mut listed: Vec<_> = ALL.iter().flat_map(|service| service.migrations).map(|m| m.name).collect();
        listed.sort_unstable();
        let numbers: std::collections::BTreeSet<_> = listed.iter().map(|name| name.split('_').next()).collect();
        assert_eq!(numbers.len(), listed.len(), "numbers are unique among all services: {listed:?}");
        for database in ["postgres", "sqlite"] {
            let mut files = Vec::new();
            for folder in ["src/services", "src"] {
                for entry in std::fs::read_dir(folder).unwrap().flatten() {
                    let Ok(folder) = std::fs::read_dir(entry.path().join("migrations").join(database)) else {
                        continue;
                    };
                    files.extend(folder.flatten().map(|file| file.file_name().into_string().unwrap()));
                }
            }
            files.sort_unstable();
            let listed: Vec<_> = listed.iter().map(|name| format!("{name}.sql")).collect();
            assert_eq!(files, listed, "{database}");
        }
    }

    #[test]
    fn names_of_services_are_unique() {
        let names: std::collections::BTreeSet<_> = ALL.iter().map(|service| service.name).collect();
        assert_eq!(names.len(), ALL.len());
    }
}
