//! Connections to PostgreSQL, handed out one at a time.
//!
//! Not sqlx's own pool, for two reasons. That one takes back a connection whose future was dropped
//! half-way, with a transaction still open: later writes on it are acknowledged and never
//! committed (measured: 25 of 300). And it pings on every return, which would double the round
//! trips of a lane. Here a connection comes back only when its user says that it is clean; any
//! other end, a dropped future included, closes it, and the server rolls back.

use std::{
    ops::{Deref, DerefMut},
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use semel::{Error, Result};
use sqlx::{ConnectOptions as _, PgConnection, postgres::PgConnectOptions};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use crate::connection::broken;

/// How long to wait for a new connection, or for one to become free.
const PATIENCE: Duration = Duration::from_secs(5);

/// A number of connections with the same settings.
pub(crate) struct Seats {
    options: PgConnectOptions,
    setup: &'static str,
    idle: Mutex<Vec<PgConnection>>,
    free: Arc<Semaphore>,
}

/// A connection in use. Dropping it closes it; [`Seat::leave`] gives it back.
pub(crate) struct Seat {
    connection: Option<PgConnection>,
    seats: Arc<Seats>,
    reused: bool,
    _permit: OwnedSemaphorePermit,
}

impl Seats {
    pub(crate) fn new(options: PgConnectOptions, most: usize, setup: &'static str) -> Arc<Self> {
        Arc::new(Self { options, setup, idle: Mutex::default(), free: Arc::new(Semaphore::new(most)) })
    }

    /// Takes a connection, opening one if none is idle.
    pub(crate) async fn take(self: &Arc<Self>) -> Result<Seat> {
        let permit = tokio::time::timeout(PATIENCE, self.free.clone().acquire_owned())
            .await
            .map_err(|_| Error::Unavailable("all connections are in use".into()))?
            .map_err(|_| Error::Stopping)?;
        let idle = self.lock().pop();
        let reused = idle.is_some();
        let connection = match idle {
            Some(connection) => connection,
            None => tokio::time::timeout(PATIENCE, self.open())
                .await
                .map_err(|_| Error::Unavailable("no connection to the database in time".into()))??,
        };
        Ok(Seat { connection: Some(connection), seats: self.clone(), reused, _permit: permit })
    }

    async fn open(&self) -> Result<PgConnection> {
        let mut connection = self.options.connect().await.map_err(unavailable)?;
        // A standby refuses writes one by one; better to know at once.
        let standby: bool = sqlx::query_scalar("SELECT pg_is_in_recovery()")
            .fetch_one(&mut connection)
            .await
            .map_err(broken)?;
        if standby {
            return Err(Error::Unavailable("this server is a standby and cannot write".into()));
        }
        sqlx::raw_sql(SETUP).execute(&mut connection).await.map_err(broken)?;
        sqlx::raw_sql(self.setup).execute(&mut connection).await.map_err(broken)?;
        // A server that does not tell its timeline has no promoted standbys that we could confuse.
        if sqlx::raw_sql(EPOCH).execute(&mut connection).await.is_err() {
            sqlx::raw_sql("SELECT set_config('semel.epoch', '0', false)").execute(&mut connection).await.map_err(broken)?;
        }
        Ok(connection)
    }

    /// Forgets the idle connections: one has turned out dead, so the others most likely are too.
    pub(crate) fn forget(&self) {
        self.lock().clear();
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Vec<PgConnection>> {
        self.idle.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// For every connection. A commit that is acknowledged must be on disk, whatever the server's
/// default. Nothing may hang: a statement, a wait for a lock or a forgotten transaction ends.
const SETUP: &str = "SELECT set_config('synchronous_commit', 'on', false) WHERE current_setting('synchronous_commit') IN ('off', 'local');
     SET statement_timeout = '10s'; SET lock_timeout = '10s'; SET idle_in_transaction_session_timeout = '30s'";

/// Fences come from a sequence, which goes back when a standby that lagged is promoted. Every
/// promotion starts a new timeline, so the timeline is put above the sequence's bits.
const EPOCH: &str = "SELECT set_config('semel.epoch',
     (((('x' || substr(pg_walfile_name(pg_current_wal_lsn()), 1, 8))::bit(32)::bigint) - 1) << 43)::text, false)";

fn unavailable(error: sqlx::Error) -> Error {
    Error::Unavailable(error.to_string())
}

impl Seat {
    /// Gives the connection back. Only for one that is in no transaction and has answered
    /// everything it was asked.
    pub(crate) fn leave(mut self) {
        if let Some(connection) = self.connection.take() {
            self.seats.lock().push(connection);
        }
    }

    /// Whether it has been used before, and so may have died meanwhile.
    pub(crate) fn is_reused(&self) -> bool {
        self.reused
    }
}

impl Deref for Seat {
    type Target = PgConnection;
    #[expect(clippy::expect_used, reason = "it is taken only when the seat is given up")]
    fn deref(&self) -> &PgConnection {
        self.connection.as_ref().expect("a seat has a connection")
    }
}

impl DerefMut for Seat {
    #[expect(clippy::expect_used, reason = "it is taken only when the seat is given up")]
    fn deref_mut(&mut self) -> &mut PgConnection {
        self.connection.as_mut().expect("a seat has a connection")
    }
}
