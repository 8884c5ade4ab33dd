//! A connection pool for PostgreSQL.
//!
//! sqlx's own pool is not used, for two reasons. It takes back a connection whose future was dropped half-way, with a
//! transaction still open: later writes on it are acknowledged and never committed (measured: 25 of 300). And it pings
//! on every return, which would double the round trips of a lane. Here a connection is reused only if its user has
//! returned it as clean; otherwise, also after a dropped future, it is closed, and the server rolls back.

use std::{
    ops::{Deref, DerefMut},
    sync::Arc,
    time::{Duration, Instant},
};

use parking_lot::Mutex;
use semel::{Error, Result};
use sqlx::{ConnectOptions as _, Connection as _, PgConnection, postgres::PgConnectOptions};
use tokio::sync::{Notify, OwnedSemaphorePermit, Semaphore};

use super::room::{Kept, Rank, Room};
use crate::connection::{AWAY, broken};

/// How long to wait for a new or a free connection.
pub(super) const PATIENCE: Duration = Duration::from_secs(5);

/// How long a connection may be idle before it is pinged.
pub(super) const STALE: Duration = Duration::from_secs(1);

/// How long callers wait for a connection of their pool to be returned, before they open more. Most statements take a
/// few milliseconds. The tasks of an idle node all poll once a second, at the same moment: without this wait each of
/// them holds a connection.
const SHARE: Duration = Duration::from_millis(25);

/// Connections with the same settings.
pub(crate) struct Seats {
    room: Arc<Room>,
    pub(super) rank: Rank,
    pub(super) setup: &'static str,
    /// With the time of each return.
    idle: Mutex<Vec<(Kept, Instant)>>,
    free: Arc<Semaphore>,
    most: usize,
    /// Callers that wait for a returned connection: how many, and since when.
    line: Mutex<Option<(usize, Instant)>>,
    left: Notify,
    /// The time limit of an answer.
    answer_limit: Duration,
}

/// A connection in use. Dropping it closes it; [`Seat::leave`] returns it.
pub(crate) struct Seat {
    kept: Option<Kept>,
    seats: Arc<Seats>,
    reused: bool,
    _permit: OwnedSemaphorePermit,
}

impl Seats {
    /// For the ledger's own writes.
    pub(crate) fn new(room: &Arc<Room>, most: usize, setup: &'static str, answer_limit: Duration) -> Arc<Self> {
        Self::of(Rank::Ledger, room, most, setup, answer_limit)
    }

    /// For everything of lower rank than the ledger's own writes.
    pub(crate) fn later(room: &Arc<Room>, most: usize, setup: &'static str, answer_limit: Duration) -> Arc<Self> {
        Self::of(Rank::Later, room, most, setup, answer_limit)
    }

    fn of(rank: Rank, room: &Arc<Room>, most: usize, setup: &'static str, answer_limit: Duration) -> Arc<Self> {
        let free = Arc::new(Semaphore::new(most));
        let (idle, line, left) = (Mutex::default(), Mutex::default(), Notify::new());
        let seats = Arc::new(Self { room: room.clone(), rank, setup, idle, free, most, line, left, answer_limit });
        room.add(&seats);
        seats
    }

    /// The address of the server.
    pub(crate) fn options(&self) -> &PgConnectOptions {
        self.room.options()
    }

    /// Waits for an answer on these connections, up to the time limit: a connection that swallows everything must not
    /// block its caller, or a lane, for ever. It is closed with the request, so nothing of it can arrive later; the
    /// request is sent again under the same tokens and fences.
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
        let (kept, reused) = match self.idle().await {
            Some(kept) => (kept, true),
            // Boxed: opening a connection is rare and has a large future, which every statement would contain.
            None => Box::pin(self.shared_or_new()).await?,
        };
        Ok(Seat { kept: Some(kept), seats: self.clone(), reused, _permit: permit })
    }

    /// A connection that is returned soon, else another one. Also returns whether it was used before.
    async fn shared_or_new(&self) -> Result<(Kept, bool)> {
        match self.left_soon().await {
            Some(kept) => Ok((kept, true)),
            None => self.room.connection(self).await,
        }
    }

    /// A connection that is returned soon. On a busy node callers wait all the time, and only the first moment of that
    /// queue is waited for. The ledger's own writes do not wait.
    async fn left_soon(&self) -> Option<Kept> {
        let in_use = self.most.saturating_sub(self.free.available_permits());
        // One of these is the caller's own.
        if self.rank == Rank::Ledger || in_use < 2 {
            return None;
        }
        let in_line = InLine::join(&self.line);
        let until = tokio::time::Instant::from_std(in_line.since + SHARE);
        loop {
            if let Some(kept) = self.idle().await {
                return Some(kept);
            }
            if tokio::time::timeout_at(until, self.left.notified()).await.is_err() {
                return self.idle().await;
            }
        }
    }

    /// An idle connection that still answers. One that was used a moment ago is not pinged: that would cost a busy lane
    /// a round trip.
    async fn idle(&self) -> Option<Kept> {
        loop {
            let (mut kept, left) = self.idle.lock().pop()?;
            if left.elapsed() < STALE {
                return Some(kept);
            }
            let answer = tokio::time::timeout(STALE, Box::pin(kept.connection.ping())).await;
            if matches!(answer, Ok(Ok(()))) {
                return Some(kept);
            }
            self.forget();
        }
    }

    /// Adds an idle connection.
    pub(super) fn keep(&self, kept: Kept) {
        self.idle.lock().push((kept, Instant::now()));
        self.left.notify_one();
    }

    /// An idle connection for another pool, the oldest.
    pub(super) fn give_up_idle(&self, may_have: impl FnOnce(&Kept) -> bool) -> Option<Kept> {
        let mut idle = self.idle.lock();
        let is_so = idle.first().is_some_and(|(kept, _)| may_have(kept));
        is_so.then(|| idle.remove(0).0)
    }

    /// The connections that were idle for this long.
    pub(super) fn idle_since(&self, limit: Duration) -> Vec<Kept> {
        let mut idle = self.idle.lock();
        // In the order of their return.
        let long = idle.iter().take_while(|(_, left)| left.elapsed() >= limit).count();
        idle.drain(..long).map(|(kept, _)| kept).collect()
    }

    /// Drops the idle connections: one was dead, so the others most likely are too.
    pub(crate) fn forget(&self) {
        self.idle.lock().clear();
    }
}

/// A place in the queue for a returned connection.
struct InLine<'a> {
    line: &'a Mutex<Option<(usize, Instant)>>,
    /// When the queue began, which may have been before this caller joined it.
    since: Instant,
}

impl<'a> InLine<'a> {
    fn join(line: &'a Mutex<Option<(usize, Instant)>>) -> Self {
        let mut found = line.lock();
        let (before, since) = found.unwrap_or_else(|| (0, Instant::now()));
        *found = Some((before + 1, since));
        Self { line, since }
    }
}

impl Drop for InLine<'_> {
    fn drop(&mut self) {
        let mut line = self.line.lock();
        *line = line.and_then(|(waiting, since)| (waiting > 1).then(|| (waiting - 1, since)));
    }
}

/// For every connection. An acknowledged commit must be on disk, under any default of the server. Nothing may hang:
/// statements, lock waits and forgotten transactions time out.
pub(super) const SETUP: &str = "SELECT set_config('synchronous_commit', 'on', false) WHERE current_setting('synchronous_commit') IN ('off', 'local');
     SET statement_timeout = '10s'; SET lock_timeout = '10s'; SET idle_in_transaction_session_timeout = '30s'";

/// A connection with the settings that all of them have.
pub(super) async fn connect(options: &PgConnectOptions) -> Result<PgConnection> {
    let mut connection = options.connect().await.map_err(unavailable)?;
    set_up(&mut connection).await?;
    Ok(connection)
}

/// Makes the settings that all connections have.
pub(super) async fn set_up(connection: &mut PgConnection) -> Result<()> {
    sqlx::raw_sql(SETUP).execute(connection).await.map(drop).map_err(broken)
}

pub(super) fn unavailable(error: sqlx::Error) -> Error {
    match broken(error) {
        Error::Refused(why) => Error::Unavailable(why),
        other => other,
    }
}

impl Seat {
    /// Returns the connection. Only if no transaction is open and all answers were read.
    pub(crate) fn leave(mut self) {
        if let Some(kept) = self.kept.take() {
            self.seats.room.take_back(kept, |kept| self.seats.keep(kept));
        }
    }

    /// The time limit of an answer.
    pub(crate) fn answer_limit(&self) -> Duration {
        self.seats.answer_limit
    }

    /// Whether it was used before, and so may have died meanwhile.
    pub(crate) fn is_reused(&self) -> bool {
        self.reused
    }
}

impl Deref for Seat {
    type Target = PgConnection;
    #[expect(clippy::expect_used, reason = "it is taken only when the seat is given up")]
    fn deref(&self) -> &PgConnection {
        &self.kept.as_ref().expect("a seat has a connection").connection
    }
}

impl DerefMut for Seat {
    #[expect(clippy::expect_used, reason = "it is taken only when the seat is given up")]
    fn deref_mut(&mut self) -> &mut PgConnection {
        &mut self.kept.as_mut().expect("a seat has a connection").connection
    }
}
