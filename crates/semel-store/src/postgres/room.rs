//! The connections of one node, over all pools, if the server has few.
//!
//! Each pool ([`Seats`]) opens connections on demand and closes idle ones; callers wait a moment for a shared
//! connection before they open more. When the server has none left (`max_connections`, a limit of the role or of the
//! database, the pool of a pooler), a pool gets an idle connection of another pool, or the next one that is returned.
//! The ledger's own pools come first, and callers leave two connections to them: a lease that is not renewed is lost.

use std::{
    collections::VecDeque,
    sync::{
        Arc, Weak,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use parking_lot::Mutex;
use semel::{Error, Result};
use sqlx::{ConnectOptions as _, Connection as _, PgConnection, postgres::PgConnectOptions};
use tokio::{
    sync::oneshot,
    time::{Instant, timeout_at},
};

use super::{
    epoch,
    seats::{PATIENCE, SETUP, STALE, Seats, set_up, unavailable},
};
use crate::connection::{AWAY, NO_CONNECTION, broken, text};

/// How long after a refusal no further connection is requested.
const REFUSED_FOR: Duration = Duration::from_millis(500);

/// How many connections callers leave to the ledger.
const RESERVED: usize = 2;

/// How often the log says that the server has no connection left.
const SAY_EVERY: Duration = Duration::from_secs(60);

/// The priority when connections are few.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Rank {
    /// Claims, settles and renewals.
    Ledger,
    /// Callers' transactions, reading, messages.
    Later,
}

/// A connection, and the pool it is set up for.
pub(super) struct Kept {
    pub(super) connection: PgConnection,
    setup: &'static str,
    held: Held,
}

/// Counts a connection for as long as it is open.
struct Held(Arc<Room>, Rank);

impl Held {
    fn new(room: &Arc<Room>, rank: Rank) -> Self {
        room.held[rank as usize].fetch_add(1, Ordering::SeqCst);
        Self(room.clone(), rank)
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        self.0.held[self.1 as usize].fetch_sub(1, Ordering::SeqCst);
    }
}

/// All connections of a node to one database.
pub(crate) struct Room {
    options: PgConnectOptions,
    sorts: Mutex<Vec<Weak<Seats>>>,
    /// Waiting pools, by rank.
    waiting: Mutex<[VecDeque<oneshot::Sender<Kept>>; 2]>,
    /// How many are open, by rank.
    held: [AtomicUsize; 2],
    providing: tokio::sync::Mutex<()>,
    /// When the server last refused one, and when that was last logged.
    refused: Mutex<(Option<Instant>, Option<Instant>)>,
}

impl Room {
    pub(crate) fn new(options: PgConnectOptions) -> Arc<Self> {
        Arc::new(Self {
            options,
            sorts: Mutex::default(),
            waiting: Mutex::default(),
            held: Default::default(),
            providing: tokio::sync::Mutex::default(),
            refused: Mutex::default(),
        })
    }

    pub(super) fn options(&self) -> &PgConnectOptions {
        &self.options
    }

    pub(super) fn add(&self, sort: &Arc<Seats>) {
        self.sorts.lock().push(Arc::downgrade(sort));
    }

    /// A connection for a pool without an idle one: a new one, or one of another pool if the server has no more. Also
    /// returns whether it was used before.
    pub(super) async fn connection(self: &Arc<Self>, sort: &Seats) -> Result<(Kept, bool)> {
        let over = Instant::now() + PATIENCE;
        if sort.rank == Rank::Later && self.held_by(Rank::Later) >= RESERVED {
            // A failure here is no error: the ledger then opens them itself.
            let _ = timeout_at(over, self.provide_for_ledger()).await;
        }
        loop {
            if !self.was_refused()
                && let Some(found) = self.open_or_spare(sort, over).await?
            {
                return Ok(found);
            }
            if let Some(kept) = self.spare(sort, over.min(Instant::now() + REFUSED_FOR)).await
                && let Ok(kept) = kept.set_up_for(self, sort).await
            {
                return Ok((kept, true));
            }
            if Instant::now() >= over {
                let held = self.held();
                return Err(Error::Unavailable(format!("{NO_CONNECTION}: all {held} of this node are in use")));
            }
        }
    }

    /// A new connection; one of another pool if that takes long. A pooler lets clients wait instead of refusing them,
    /// possibly for a connection of our own. `None` if the server has no more.
    async fn open_or_spare(self: &Arc<Self>, sort: &Seats, over: Instant) -> Result<Option<(Kept, bool)>> {
        let mut opening = std::pin::pin!(self.open(sort));
        let opened = match timeout_at(over.min(Instant::now() + REFUSED_FOR), &mut opening).await {
            Ok(opened) => opened?,
            Err(_) => tokio::select! {
                opened = timeout_at(over, &mut opening) => match opened {
                    Ok(opened) => opened?,
                    Err(_) => return Err(Error::Unavailable(format!("{AWAY}: no connection in time"))),
                },
                Some(kept) = self.spare(sort, over) => {
                    return Ok(kept.set_up_for(self, sort).await.ok().map(|kept| (kept, true)));
                }
            },
        };
        Ok(opened.map(|kept| (kept, false)))
    }

    /// Opens the connections that callers leave to the ledger, before callers have taken all that the server has.
    async fn provide_for_ledger(self: &Arc<Self>) {
        let _one_at_a_time = self.providing.lock().await;
        for sort in self.sorts().into_iter().filter(|sort| sort.rank == Rank::Ledger) {
            if self.held_by(Rank::Ledger) >= RESERVED || self.was_refused() {
                return;
            }
            if let Ok(Some(kept)) = self.open(&sort).await {
                self.take_back(kept, |kept| sort.keep(kept));
            }
        }
    }

    fn sorts(&self) -> Vec<Arc<Seats>> {
        self.sorts.lock().iter().filter_map(Weak::upgrade).collect()
    }

    /// A new connection; `None` if the server has none left, but this node has some.
    async fn open(self: &Arc<Self>, sort: &Seats) -> Result<Option<Kept>> {
        let held = Held::new(self, sort.rank);
        let mut connection = match self.options.connect().await {
            Ok(connection) => connection,
            Err(error) if is_full(&error) => {
                drop(held);
                if self.held() == 0 {
                    return Err(full(&error));
                }
                self.note_refusal(&error);
                return Ok(None);
            }
            Err(error) => return Err(unavailable(error)),
        };
        set_up(&mut connection).await?;
        sqlx::raw_sql(sort.setup).execute(&mut connection).await.map_err(broken)?;
        epoch::check(&mut connection).await?;
        Ok(Some(Kept { connection, setup: sort.setup, held }))
    }

    fn note_refusal(&self, error: &sqlx::Error) {
        let mut refused = self.refused.lock();
        refused.0 = Some(Instant::now());
        if refused.1.is_none_or(|said| said.elapsed() >= SAY_EVERY) {
            refused.1 = refused.0;
            let (held, error) = (self.held(), text(error));
            tracing::warn!(
                held,
                error,
                "PostgreSQL has no further connection for this node, which continues with those it has"
            );
        }
    }

    fn was_refused(&self) -> bool {
        self.refused.lock().0.is_some_and(|refused| refused.elapsed() < REFUSED_FOR) && self.held() > 0
    }

    /// How many are open, or being opened.
    fn held(&self) -> usize {
        self.held_by(Rank::Ledger) + self.held_by(Rank::Later)
    }

    fn held_by(&self, rank: Rank) -> usize {
        self.held[rank as usize].load(Ordering::SeqCst)
    }

    /// Whether a pool of this rank may have a connection of this one.
    fn may_have(&self, asks: Rank, kept: &Kept) -> bool {
        asks == Rank::Ledger
            || kept.held.1 == Rank::Later
            || self.held_by(Rank::Ledger) > RESERVED
            || self.held_by(Rank::Later) == 0
    }

    /// An idle connection of another pool, or the next one that is returned.
    async fn spare(&self, sort: &Seats, until: Instant) -> Option<Kept> {
        let next = {
            let mut waiting = self.waiting.lock();
            for other in self.sorts() {
                if let Some(kept) = other.give_up_idle(|kept| self.may_have(sort.rank, kept)) {
                    return Some(kept);
                }
            }
            let (sender, receiver) = oneshot::channel();
            waiting[sort.rank as usize].push_back(sender);
            receiver
        };
        timeout_at(until, next).await.ok()?.ok()
    }

    /// Returns a connection: to a waiting pool, else to its own.
    pub(super) fn take_back(&self, mut kept: Kept, keep: impl FnOnce(Kept)) {
        let mut waiting = self.waiting.lock();
        for rank in [Rank::Ledger, Rank::Later] {
            while !waiting[rank as usize].is_empty() && self.may_have(rank, &kept) {
                let Some(waits) = waiting[rank as usize].pop_front() else { break };
                match waits.send(kept) {
                    Ok(()) => return,
                    // It has stopped waiting.
                    Err(back) => kept = back,
                }
            }
        }
        keep(kept);
    }

    /// Closes connections that were idle for this long, as long as the room exists.
    pub(crate) async fn close_idle(room: Weak<Self>, limit: Duration) {
        loop {
            tokio::time::sleep((limit / 4).max(Duration::from_millis(10))).await;
            let Some(room) = room.upgrade() else { return };
            for kept in room.sorts().iter().flat_map(|sort| sort.idle_since(limit)) {
                let _ = kept.connection.close().await;
            }
        }
    }
}

impl Kept {
    /// Sets a connection up for another pool, if it still answers. Its prepared statements are dropped, because their
    /// plans would stay.
    async fn set_up_for(mut self, room: &Arc<Room>, sort: &Seats) -> Result<Self> {
        let set_up = async {
            if self.setup == sort.setup {
                return self.connection.ping().await;
            }
            self.connection.clear_cached_statements().await?;
            let reset = format!("RESET ALL; {SETUP}; {}", sort.setup);
            sqlx::raw_sql(sqlx::AssertSqlSafe(reset)).execute(&mut self.connection).await.map(drop)
        };
        match tokio::time::timeout(STALE, set_up).await {
            Ok(done) => done.map_err(broken)?,
            Err(_) => return Err(Error::Unavailable("no answer from the database in time".into())),
        }
        Ok(Self { connection: self.connection, setup: sort.setup, held: Held::new(room, sort.rank) })
    }
}

/// Whether the server, or a pooler in front of it, has no connection left.
fn is_full(error: &sqlx::Error) -> bool {
    let sqlx::Error::Database(error) = error else { return false };
    error.code().as_deref() == Some("53300") || error.message().contains("no more connections allowed")
}

fn full(error: &sqlx::Error) -> Error {
    Error::Unavailable(format!("{NO_CONNECTION}: {}", text(error)))
}
