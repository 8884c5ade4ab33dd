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
use tokio::sync::{Notify, OwnedSemaphorePermit, Semaphore};

use super::room::{Kept, Rank, Room};
use crate::connection::{AWAY, broken};

/// How long to wait for a new connection, or for one to become free.
pub(super) const PATIENCE: Duration = Duration::from_secs(5);

/// How long a connection may have been idle before it is asked whether it still lives.
pub(super) const STALE: Duration = Duration::from_secs(1);

/// For how long there may be callers that wait for a connection of their sort to be left, before they open more. Most
/// statements take a few milliseconds. The tasks of an idle node all look once a second, at the same moment: without this
/// wait each of them holds a connection.
const SHARE: Duration = Duration::from_millis(25);

/// A number of connections with the same settings.
pub(crate) struct Seats {
    room: Arc<Room>,
    pub(super) rank: Rank,
    pub(super) setup: &'static str,
    /// With the moment each was left.
    idle: Mutex<Vec<(Kept, Instant)>>,
    free: Arc<Semaphore>,
    most: usize,
    /// Callers that wait for a connection to be left: how many, and since when there have been any.
    line: Mutex<Option<(usize, Instant)>>,
    left: Notify,
    /// How long an answer may take.
    answer_limit: Duration,
}

/// A connection in use. Dropping it closes it; [`Seat::leave`] gives it back.
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

    /// For everything that the ledger's own writes go before, where connections are few.
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

    /// How to reach the server.
    pub(crate) fn options(&self) -> &PgConnectOptions {
        self.room.options()
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
        let (kept, reused) = match self.idle().await {
            Some(kept) => (kept, true),
            // In a box: opening a connection is rare and needs much room, which every statement would carry about.
            None => Box::pin(self.shared_or_new()).await?,
        };
        Ok(Seat { kept: Some(kept), seats: self.clone(), reused, _permit: permit })
    }

    /// A connection that its user leaves soon, else another one. Also whether it was used before.
    async fn shared_or_new(&self) -> Result<(Kept, bool)> {
        match self.left_soon().await {
            Some(kept) => Ok((kept, true)),
            None => self.room.connection(self).await,
        }
    }

    /// A connection that its user leaves soon. Where callers keep coming, as on a busy node, there is a line all the
    /// time, and only its first moment is waited for. The ledger's own writes wait for none.
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

    /// An idle connection that still answers. One that was used a moment ago is not asked: that
    /// would cost a busy lane a round trip, and it would notice by itself.
    async fn idle(&self) -> Option<Kept> {
        loop {
            let (mut kept, left) = self.lock().pop()?;
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

    /// Has a connection idle.
    pub(super) fn keep(&self, kept: Kept) {
        self.lock().push((kept, Instant::now()));
        self.left.notify_one();
    }

    /// An idle connection for another sort, the one that was left first.
    pub(super) fn give_up_idle(&self, may_have: impl FnOnce(&Kept) -> bool) -> Option<Kept> {
        let mut idle = self.lock();
        let is_so = idle.first().is_some_and(|(kept, _)| may_have(kept));
        is_so.then(|| idle.remove(0).0)
    }

    /// The connections that were left so long ago.
    pub(super) fn idle_since(&self, limit: Duration) -> Vec<Kept> {
        let mut idle = self.lock();
        // In the order in which they were left.
        let long = idle.iter().take_while(|(_, left)| left.elapsed() >= limit).count();
        idle.drain(..long).map(|(kept, _)| kept).collect()
    }

    /// Forgets the idle connections: one has turned out dead, so the others most likely are too.
    pub(crate) fn forget(&self) {
        self.lock().clear();
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Vec<(Kept, Instant)>> {
        self.idle.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A place in the line of those who wait for a connection to be left.
struct InLine<'a> {
    line: &'a Mutex<Option<(usize, Instant)>>,
    /// When the line began, which may have been before this one joined it.
    since: Instant,
}

impl<'a> InLine<'a> {
    fn join(line: &'a Mutex<Option<(usize, Instant)>>) -> Self {
        let mut found = line.lock().unwrap_or_else(PoisonError::into_inner);
        let (before, since) = found.unwrap_or_else(|| (0, Instant::now()));
        *found = Some((before + 1, since));
        Self { line, since }
    }
}

impl Drop for InLine<'_> {
    fn drop(&mut self) {
        let mut line = self.line.lock().unwrap_or_else(PoisonError::into_inner);
        *line = line.and_then(|(waiting, since)| (waiting > 1).then(|| (waiting - 1, since)));
    }
}

/// For every connection. A commit that is acknowledged must be on disk, whatever the server's
/// default. Nothing may hang: a statement, a wait for a lock or a forgotten transaction ends.
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
    /// Gives the connection back. Only for one that is in no transaction and has answered
    /// everything it was asked.
    pub(crate) fn leave(mut self) {
        if let Some(kept) = self.kept.take() {
            self.seats.room.take_back(kept, |kept| self.seats.keep(kept));
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
        &self.kept.as_ref().expect("a seat has a connection").connection
    }
}

impl DerefMut for Seat {
    #[expect(clippy::expect_used, reason = "it is taken only when the seat is given up")]
    fn deref_mut(&mut self) -> &mut PgConnection {
        &mut self.kept.as_mut().expect("a seat has a connection").connection
    }
}
