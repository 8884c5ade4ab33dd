//! Fresh databases: a directory for SQLite, a schema for PostgreSQL.

use std::{fmt, path::PathBuf, time::Duration};

use anyhow::{Context as _, Result};
use clap::ValueEnum;
use semel::{Ledger, Options};
use semel_store::{Database, Settings};
use sqlx::{AssertSqlSafe, Connection as _, PgConnection};
use tempfile::TempDir;

use crate::{Plan, cpu::Cpu};

/// The database to measure.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Backend {
    Sqlite,
    Postgres,
}

impl fmt::Display for Backend {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Sqlite => "SQLite",
            Self::Postgres => "PostgreSQL",
        })
    }
}

/// An empty database with the ledger's tables.
pub(crate) struct Site {
    pub(crate) backend: Backend,
    pub(crate) url: String,
    pub(crate) cpu: Cpu,
    place: Place,
}

enum Place {
    /// Removed when dropped.
    Directory(#[expect(dead_code, reason = "it is there to be dropped")] TempDir),
    Schema {
        server: String,
        name: String,
    },
}

impl Site {
    pub(crate) async fn fresh(plan: &Plan, backend: Backend) -> Result<Self> {
        let site = match backend {
            Backend::Sqlite => {
                let directory = tempfile::Builder::new().prefix("bench.").tempdir_in(target_directory()?)?;
                let url = format!("sqlite:{}", directory.path().join("ledger.db").display());
                Self { backend, url, cpu: Cpu::of_this_process(), place: Place::Directory(directory) }
            }
            Backend::Postgres => {
                let server = plan.postgres_url.clone();
                let server = server.context("SEMEL_TEST_POSTGRES_URL is not set; scripts/bench.sh sets it")?;
                let mut connection = PgConnection::connect(&server).await.context("connecting to PostgreSQL")?;
                let name = format!("semel_bench_{:016x}", fastrand::u64(..));
                sqlx::raw_sql(AssertSqlSafe(format!("CREATE SCHEMA {name}"))).execute(&mut connection).await?;
                let cpu = Cpu::with_server(&mut connection).await?;
                let url =
                    format!("{server}{}options=-csearch_path%3D{name}", if server.contains('?') { '&' } else { '?' });
                Self { backend, url, cpu, place: Place::Schema { server, name } }
            }
        };
        // Opening it creates the tables.
        site.ledger(true).await?;
        Ok(site)
    }

    /// A ledger on it. Without group commit, PostgreSQL gets the connections that a pool would have.
    pub(crate) async fn ledger(&self, group_commit: bool) -> Result<Ledger<Database>> {
        let lane_connections = if group_commit { Settings::default().lane_connections } else { 16 };
        let database = Database::open(&self.url, Settings { lane_connections, ..Settings::default() }).await?;
        Ok(Ledger::new(database, Options { group_commit, ..Options::default() })?)
    }

    /// Cleans up after a measurement: that is its own cost, not that of the next one. Otherwise PostgreSQL would begin
    /// to vacuum up to a minute later, during another measurement.
    pub(crate) async fn tidy(&self, ledger: &Ledger<Database>) -> Result<()> {
        ledger.flush().await;
        ledger.sweep().await?;
        self.vacuum().await
    }

    /// Lets PostgreSQL vacuum, as autovacuum does periodically.
    pub(crate) async fn vacuum(&self) -> Result<()> {
        if let Place::Schema { .. } = &self.place {
            let mut connection = PgConnection::connect(&self.url).await?;
            let tables =
                "VACUUM semel_operations, semel_leases, semel_backlog, semel_deltas, semel_repeats, semel_outbox";
            sqlx::raw_sql(tables).execute(&mut connection).await?;
        }
        Ok(())
    }

    /// Removes it. After an error it stays, on a server that is thrown away.
    pub(crate) async fn remove(self) -> Result<()> {
        if let Place::Schema { server, name } = &self.place {
            let mut connection = PgConnection::connect(server).await?;
            sqlx::raw_sql(AssertSqlSafe(format!("DROP SCHEMA {name} CASCADE"))).execute(&mut connection).await?;
        }
        Ok(())
    }
}

/// Stops a ledger, and writes what it still has in memory.
pub(crate) async fn close(ledger: Ledger<Database>) {
    ledger.stop(Duration::ZERO).await;
}

/// Cargo's target directory: on a real disk, unlike /tmp perhaps.
fn target_directory() -> Result<PathBuf> {
    let program = std::env::current_exe()?;
    Ok(program.parent().and_then(|release| release.parent()).context("this program is in no directory")?.to_owned())
}
