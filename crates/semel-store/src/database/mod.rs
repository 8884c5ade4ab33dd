//! The store: one of the two databases behind the engine's traits.
//!
//! - `operations`, `transactions`, `look`: the engine's traits; `sweep` and `messaging` implement the others

mod look;
mod operations;
mod transactions;

use std::{sync::Arc, time::Duration};

use semel::{Error, Result};
use sqlx::migrate::Migrator;

pub(crate) use self::operations::of_another;
use crate::{
    Clock, Conn,
    condition::Condition,
    connection::broken,
    fleet::sql::FleetSql,
    fronts::Fronts,
    messaging::Messages,
    postgres,
    postgres::Postgres,
    project::{Projection, Tables},
    sql::{Dialect, LookSql, WorkSql},
    sqlite,
    sqlite::Sqlite,
    sweep::{Edges, sql::SweepSql},
    wakes::Wakes,
};

/// Options of a database.
#[derive(Clone)]
pub struct Settings {
    /// PostgreSQL: connections of each pool for the ledger's own writes: claims, settles, and the rest. They are opened
    /// on demand; without group commit, more are.
    pub lane_connections: usize,
    /// PostgreSQL: connections for callers' transactions and for reading.
    pub caller_connections: usize,
    /// PostgreSQL: how long to wait for an answer before a connection counts as dead. Longer than the server's
    /// statement timeout, which is 10 s.
    pub answer_limit: Duration,
    /// PostgreSQL: how long an idle connection is kept.
    pub idle_limit: Duration,
    /// PostgreSQL: how long a migrating node retries for its locks.
    pub migration_patience: Duration,
    /// The source of time.
    pub clock: Clock,
    /// Rows of services that follow their operations.
    pub projections: Vec<Projection>,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            lane_connections: 4,
            caller_connections: 16,
            answer_limit: Duration::from_secs(15),
            idle_limit: Duration::from_secs(60),
            migration_patience: Duration::from_secs(300),
            clock: Clock::default(),
            projections: Vec::new(),
        }
    }
}

/// A SQLite file or a PostgreSQL database. Cheap to clone.
#[derive(Clone)]
pub struct Database(Arc<Parts>);

/// The state that all clones share.
struct Parts {
    inner: Inner,
    work_sql: WorkSql,
    look_sql: LookSql,
    sweep_sql: SweepSql,
    fleet_sql: FleetSql,
    messages: Messages,
    wakes: Arc<Wakes>,
    condition: Condition,
    edges: Edges,
    fronts: Fronts,
}

pub(crate) enum Inner {
    Postgres(Postgres),
    Sqlite(Sqlite),
}

impl Database {
    /// Opens `sqlite:PATH` or `postgres://…`, and migrates its tables.
    ///
    /// # Errors
    /// The URL is invalid, the database cannot be reached, or its settings or file system would break the guarantees.
    pub async fn open(url: &str, settings: Settings) -> Result<Self> {
        let inner = if url.starts_with("postgres://") || url.starts_with("postgresql://") {
            let sizes = postgres::Sizes {
                lane: settings.lane_connections,
                callers: settings.caller_connections,
                answer_limit: settings.answer_limit,
                idle_limit: settings.idle_limit,
                migration_patience: settings.migration_patience,
            };
            Inner::Postgres(Postgres::open(url, sizes, settings.clock, &settings.projections).await?)
        } else if url.starts_with("sqlite:") {
            Inner::Sqlite(Sqlite::open(url, settings.clock, &settings.projections).await?)
        } else {
            return Err(Error::Invalid("database url: write sqlite:PATH or postgres://…".into()));
        };
        let (dialect, wakes) = match &inner {
            Inner::Postgres(db) => (Dialect::Postgres, Wakes::among_nodes(db)),
            Inner::Sqlite(_) => (Dialect::Sqlite, Wakes::alone()),
        };
        Ok(Self(Arc::new(Parts {
            inner,
            work_sql: WorkSql::new(dialect),
            look_sql: LookSql::new(dialect),
            sweep_sql: SweepSql::new(dialect),
            fleet_sql: FleetSql::new(dialect),
            messages: Messages::new(dialect),
            wakes,
            condition: Condition::default(),
            edges: Edges::new(dialect == Dialect::Postgres),
            fronts: Fronts::default(),
        })))
    }

    pub(crate) fn inner(&self) -> &Inner {
        &self.0.inner
    }

    /// The in-memory state of messaging.
    pub(crate) fn messages(&self) -> &Messages {
        &self.0.messages
    }

    /// Tasks of this process and of others that wait for new rows.
    pub(crate) fn wakes(&self) -> &Arc<Wakes> {
        &self.0.wakes
    }

    /// Its last known condition.
    pub(crate) fn condition(&self) -> &Condition {
        &self.0.condition
    }

    /// Where the phases of the sweep begin.
    /// Where a worker begins to read.
    pub(crate) fn fronts(&self) -> &Fronts {
        &self.0.fronts
    }

    pub(crate) fn edges(&self) -> &Edges {
        &self.0.edges
    }

    pub(crate) fn sql(&self) -> &Tables {
        match self.inner() {
            Inner::Postgres(db) => &db.sql,
            Inner::Sqlite(db) => &db.sql,
        }
    }

    pub(crate) fn work_sql(&self) -> &WorkSql {
        &self.0.work_sql
    }

    pub(crate) fn look_sql(&self) -> &LookSql {
        &self.0.look_sql
    }

    pub(crate) fn sweep_sql(&self) -> &SweepSql {
        &self.0.sweep_sql
    }

    pub(crate) fn fleet_sql(&self) -> &FleetSql {
        &self.0.fleet_sql
    }

    /// Waits for an answer, up to the time limit.
    pub(crate) async fn answered<T>(&self, asked: impl Future<Output = Result<T>>) -> Result<T> {
        match self.inner() {
            Inner::Postgres(db) => db.callers.answered(asked).await,
            // No network is involved, and SQLite has its own limit for a busy file.
            Inner::Sqlite(_) => asked.await,
        }
    }

    /// Migrates a service's own tables, recorded in a table of this name; once, even if many nodes start together.
    ///
    /// # Errors
    /// [`Error::Unavailable`] if the database cannot be reached or a migration fails.
    pub async fn migrate(&self, table: &'static str, mut postgres: Migrator, mut sqlite: Migrator) -> Result<()> {
        match self.inner() {
            Inner::Postgres(db) => {
                postgres.dangerous_set_table_name(table);
                db.migrate(&postgres).await
            }
            Inner::Sqlite(db) => {
                sqlite.dangerous_set_table_name(table);
                sqlite::Writer::migrate(&db.writer, &sqlite).await
            }
        }
    }

    /// Runs a service's own queries on a read-only connection, which waits for no writer.
    ///
    /// ```
    /// # use semel_store::{Database, broken, on};
    /// async fn count(database: &Database, tenant: &str) -> semel::Result<i64> {
    ///     let sql = "SELECT count(*) FROM orders WHERE tenant = $1";
    ///     database.read(async |conn| on!(conn, c => sqlx::query_scalar(sql).bind(tenant).fetch_one(&mut **c).await).map_err(broken)).await
    /// }
    /// ```
    ///
    /// # Errors
    /// [`Error::Unavailable`] if no connection is available; the error of `look`.
    pub async fn read<T>(&self, look: impl AsyncFnOnce(&mut Conn<'_>) -> Result<T>) -> Result<T> {
        let mut reader = self.reader().await?;
        let found = look(&mut reader.conn()).await?;
        // After a failure the connection may be in the middle of an answer: it is closed.
        reader.leave();
        Ok(found)
    }

    /// A read-only connection for a service's own queries, which waits for no writer.
    ///
    /// # Errors
    /// [`Error::Unavailable`] if none is available.
    pub async fn reader(&self) -> Result<Reader> {
        Ok(Reader(match self.inner() {
            Inner::Postgres(db) => Reading::Postgres(db.callers.take().await?),
            Inner::Sqlite(db) => Reading::Sqlite(db.readers.acquire().await.map_err(broken)?),
        }))
    }
}

/// A read-only connection. If it is dropped without [`leave`](Self::leave), it may be in the middle of an answer, and
/// is closed.
pub struct Reader(Reading);

enum Reading {
    Postgres(postgres::Seat),
    Sqlite(sqlx::pool::PoolConnection<sqlx::Sqlite>),
}

impl Reader {
    /// The connection, whichever database it is.
    pub fn conn(&mut self) -> Conn<'_> {
        match &mut self.0 {
            Reading::Postgres(seat) => Conn::Postgres(seat),
            Reading::Sqlite(conn) => Conn::Sqlite(conn),
        }
    }

    /// Returns it to the pool.
    pub fn leave(self) {
        match self.0 {
            Reading::Postgres(seat) => seat.leave(),
            Reading::Sqlite(conn) => drop(conn),
        }
    }
}
