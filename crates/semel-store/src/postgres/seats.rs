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
    time::{Duration, Instant},
};

use semel::{Error, Result};
use sqlx::{ConnectOptions as _, Connection as _, PgConnection, postgres::PgConnectOptions};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use super::epoch;
use crate::connection::{AWAY, broken};

/// How long to wait for a new connection, or for one to become free.
const PATIENCE: Duration = Duration::from_secs(5);

/// How long a connection may have been idle before it is asked whether it still lives.
const STALE: Duration = Duration::from_secs(1);

/// A number of connections with the same settings.
pub(crate) struct Seats {
    options: PgConnectOptions,
    setup: &'static str,
    /// With the moment each was left.
    idle: Mutex<Vec<(PgConnection, Instant)>>,
    free: Arc<Semaphore>,
    /// How long an answer may take.
    answer_limit: Duration,
}

/// A connection in use. Dropping it closes it; [`Seat::leave`] gives it back.
pub(crate) struct Seat {
    connection: Option<PgConnection>,
    seats: Arc<Seats>,
    reused: bool,
    _permit: OwnedSemaphorePermit,
}

impl Seats {
    pub(crate) fn new(
        options: PgConnectOptions,
        most: usize,
        setup: &'static str,
        answer_limit: Duration,
    ) -> Arc<Self> {
        Arc::new(Self { options, setup, idle: Mutex::default(), free: Arc::new(Semaphore::new(most)), answer_limit })
    }

    /// How to reach the server.
    pub(crate) fn options(&self) -> &PgConnectOptions {
        &self.options
    }

    /// Waits for what is asked on these connections, for as long as an answer may take: one that
    /// swallows everything must not hold up its caller, or a lane, for ever. It is closed with what
    /// was asked, so nothing of it can arrive later; what became of it is asked again under the
    /// same tokens and fences.
    pub(crate) async fn answered<T>(&self, asked: impl Future<Output = Result<T>>) -> Result<T> {
        let done = tokio::time::timeout(self.answer_limit, asked).await;
        let done = done.unwrap_or_else(|_| Err(Error::Unavailable(format!("{AWAY}: no answer in time"))));
        if done.as_ref().is_err_and(Error::is_transient) {
            self.forget();
        }
        done
    }

    /// Takes a connection, opening one if none is idle.
    pub(crate) async fn take(self: &Arc<Self>) -> Result<Seat> {
        let permit = tokio::time::timeout(PATIENCE, self.free.clone().acquire_owned())
            .await
            .map_err(|_| Error::Unavailable("all connections are in use".into()))?
            .map_err(|_| Error::Stopping)?;
        let idle = self.idle().await;
        let reused = idle.is_some();
        let connection = match idle {
            Some(connection) => connection,
            None => tokio::time::timeout(PATIENCE, self.open())
                .await
                .map_err(|_| Error::Unavailable(format!("{AWAY}: no connection in time")))??,
        };
        Ok(Seat { connection: Some(connection), seats: self.clone(), reused, _permit: permit })
    }

    /// An idle connection that still answers. One that was used a moment ago is not asked: that
    /// would cost a busy lane a round trip, and it would notice by itself.
    async fn idle(&self) -> Option<PgConnection> {
        loop {
            let (mut connection, left) = self.lock().pop()?;
            if left.elapsed() < STALE {
                return Some(connection);
            }
            let answer = tokio::time::timeout(STALE, connection.ping()).await;
            if matches!(answer, Ok(Ok(()))) {
                return Some(connection);
            }
            self.forget();
        }
    }

    async fn open(&self) -> Result<PgConnection> {
        let mut connection = connect(&self.options).await?;
        sqlx::raw_sql(self.setup).execute(&mut connection).await.map_err(broken)?;
        epoch::check(&mut connection).await?;
        Ok(connection)
    }

    /// Forgets the idle connections: one has turned out dead, so the others most likely are too.
    pub(crate) fn forget(&self) {
        self.lock().clear();
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Vec<(PgConnection, Instant)>> {
        self.idle.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// For every connection. A commit that is acknowledged must be on disk, whatever the server's
/// default. Nothing may hang: a statement, a wait for a lock or a forgotten transaction ends.
const SETUP: &str = "SELECT set_config('synchronous_commit', 'on', false) WHERE current_setting('synchronous_commit') IN ('off', 'local');
     SET statement_timeout = '10s'; SET lock_timeout = '10s'; SET idle_in_transaction_session_timeout = '30s'";

/// A connection with the settings that all of them have.
pub(super) async fn connect(options: &PgConnectOptions) -> Result<PgConnection> {
    let mut connection = options.connect().await.map_err(unavailable)?;
    sqlx::raw_sql(SETUP).execute(&mut connection).await.map_err(broken)?;
    Ok(connection)
}

fn unavailable(error: sqlx::Error) -> Error {
    match broken(error) {
        Error::Refused(why) => Error::Unavailable(why),
        other => other,
    }
}

impl Seat {
    /// Gives the connection back. Only for one that is in no transaction and has answered
    /// everything it was asked.
    pub(crate) fn leave(mut self) {
        if let Some(connection) = self.connection.take() {
            self.seats.lock().push((connection, Instant::now()));
        }
    }

    /// How long an answer may take.
    pub(crate) fn answer_limit(&self) -> Duration {
        self.seats.answer_limit
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
