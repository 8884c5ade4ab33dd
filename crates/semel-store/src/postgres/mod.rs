//! The ledger on PostgreSQL.

mod claims;
pub(crate) mod epoch;
pub(crate) mod hot;
mod inline;
mod inserts;
mod pooler;
mod renewals;
mod room;
mod schema;
mod seats;
mod settles;
mod takes;

use std::{collections::HashSet, sync::Arc, time::Duration};

use parking_lot::Mutex;
use semel::{
    Error, Fence, Operation, Result, Timestamp,
    store::{Applied, Decision},
};
use sqlx::{PgConnection, migrate::Migrator, postgres::PgConnectOptions};

#[cfg(test)]
pub(crate) use self::hot::ALL as HOT;
#[cfg(test)]
pub(crate) use self::schema::migrations;
use self::schema::{check_settings, run_migrations};
pub(crate) use self::{
    hot::{HOLD, TAKE_DELTAS, THERE},
    seats::{Seat, Seats},
};
use self::{room::Room, seats::connect};
use crate::{
    Conn,
    apply::load_by_id,
    batch,
    clock::Clock,
    connection::broken,
    hints::Hints,
    project::{Projection, Tables},
    sql::Dialect,
};

/// Planner settings of lane connections, for a table of any size: analysed or not, a batch finds its rows by index, in
/// the order of its arrays, and reads due operations in index order.
pub(crate) const LANE: &str =
    "SET enable_seqscan = off; SET enable_hashjoin = off; SET enable_mergejoin = off; SET enable_sort = off;
     SET enable_bitmapscan = off; SET jit = off; SET plan_cache_mode = force_generic_plan";

/// The hot claim joins only the rows that it has inserted, by hash. It waits for other transactions with one of its
/// keys: for a commit, which is short, but not for a frozen node.
pub(crate) const CLAIMS: &str = "SET enable_seqscan = off; SET enable_mergejoin = off; SET jit = off;
     SET plan_cache_mode = force_generic_plan; SET lock_timeout = '250ms'";

/// As [`CLAIMS`], to restore a connection that waited for less.
const CLAIMS_WAIT: &str = "SET lock_timeout = '250ms'";

pub(crate) struct Postgres {
    /// For the hot claim.
    claims: Arc<Seats>,
    /// For writes under leases.
    settles: Arc<Seats>,
    /// For renewals: they wait for no other write of this node.
    renewals: Arc<Seats>,
    /// For every other write of the ledger.
    lane: Arc<Seats>,
    /// For callers' transactions, and for reading.
    pub(crate) callers: Arc<Seats>,
    /// For messages: a busy relay must not delay the ledger.
    pub(crate) messages: Arc<Seats>,
    pub(crate) sql: Tables,
    hints: Hints,
    locked: settles::Locked,
    pending_notes: Mutex<Vec<renewals::PendingNote>>,
    pub(crate) clock: Clock,
    migration_patience: Duration,
}

/// How many connections of each pool, and their time limits.
pub(crate) struct Sizes {
    pub(crate) lane: usize,
    pub(crate) callers: usize,
    pub(crate) answer_limit: Duration,
    pub(crate) idle_limit: Duration,
    pub(crate) migration_patience: Duration,
}

impl Sizes {
    /// How many connections a node may have, including the listener.
    fn all(&self) -> usize {
        3 * self.lane + renewals::CONNECTIONS + self.lane.max(2) + self.callers + 1
    }
}

impl Postgres {
    pub(crate) async fn open(url: &str, sizes: Sizes, clock: Clock, projections: &[Projection]) -> Result<Self> {
        let options: PgConnectOptions = url.parse().map_err(|e| Error::Invalid(format!("database url: {e}")))?;
        // Floats are never read as text, and poolers refuse connection settings that they do not know.
        let options = options.application_name("semel").extra_float_digits(None);
        let mut migrator = schema::migrations();
        // An embedder's own migrations have their own table.
        migrator.dangerous_set_table_name("semel_migrations");
        // A separate connection: its settings are for this only.
        let mut conn = pooler::connect_checked(&options).await?;
        check_settings(&mut conn, sizes.all()).await?;
        run_migrations(&mut conn, &migrator, sizes.migration_patience).await?;
        epoch::check(&mut conn).await?;
        drop(conn);
        let room = Room::new(options);
        tokio::spawn(Room::close_idle(Arc::downgrade(&room), sizes.idle_limit));
        Ok(Self {
            claims: Seats::new(&room, sizes.lane, CLAIMS, sizes.answer_limit),
            settles: Seats::new(&room, sizes.lane, settles::SETUP, sizes.answer_limit),
            renewals: Seats::new(&room, renewals::CONNECTIONS, LANE, sizes.answer_limit),
            lane: Seats::new(&room, sizes.lane, LANE, sizes.answer_limit),
            messages: Seats::later(&room, sizes.lane.max(2), LANE, sizes.answer_limit),
            callers: Seats::later(&room, sizes.callers, "", sizes.answer_limit),
            migration_patience: sizes.migration_patience,
            sql: Tables::new(Dialect::Postgres, projections),
            hints: Hints::default(),
            locked: settles::Locked::default(),
            pending_notes: Mutex::default(),
            clock,
        })
    }

    /// Runs a service's own migrations.
    pub(crate) async fn migrate(&self, migrator: &Migrator) -> Result<()> {
        let mut conn = connect(self.callers.options()).await?;
        run_migrations(&mut conn, migrator, self.migration_patience).await
    }

    pub(crate) async fn now(&self) -> Result<Timestamp> {
        let mut seat = self.callers.take().await?;
        let now: i64 =
            sqlx::query_scalar(hot::NOW).bind(self.clock.fixed()).fetch_one(&mut *seat).await.map_err(broken)?;
        seat.leave();
        Ok(Timestamp::from_micros(now))
    }

    pub(crate) async fn decide(&self, id: i64, decision: Decision, actor: &str, reason: &str) -> Result<Applied> {
        let mut seat = self.lane.take().await?;
        begin(&mut seat).await?;
        let applied = self.decide_in(&mut seat, id, decision, (actor, reason)).await?;
        commit(&mut seat).await?;
        seat.leave();
        Ok(applied)
    }

    /// A decision inside a transaction.
    pub(crate) async fn decide_in(
        &self,
        conn: &mut PgConnection,
        id: i64,
        decision: Decision,
        by: (&str, &str),
    ) -> Result<Applied> {
        lock(conn, &[id]).await?;
        let (now, fences) = self.draw(conn, 1).await?;
        batch::decide(&mut Conn::Postgres(conn), &self.sql, id, decision, by, (now, fences[0])).await
    }

    /// Reads a row after all transactions that have locked it have ended.
    pub(crate) async fn read_back(&self, id: i64) -> Result<Option<Operation>> {
        let mut seat = self.lane.take().await?;
        begin(&mut seat).await?;
        lock(&mut seat, &[id]).await?;
        let mut rows = load_by_id(&mut Conn::Postgres(&mut seat), &self.sql, &[id]).await?;
        roll_back(&mut seat).await?;
        seat.leave();
        Ok(rows.remove(&id))
    }

    /// A lane connection with a transaction begun.
    pub(crate) async fn lane_seat(&self) -> Result<Seat> {
        let mut seat = self.lane.take().await?;
        begin(&mut seat).await?;
        Ok(seat)
    }

    /// A lane connection.
    pub(crate) async fn lane_take(&self) -> Result<Seat> {
        self.lane.take().await
    }

    /// Waits for an answer on a lane connection, up to the time limit.
    pub(crate) async fn lane_answered<T>(&self, asked: impl Future<Output = Result<T>>) -> Result<T> {
        self.lane.answered(asked).await
    }

    pub(crate) async fn draw(&self, conn: &mut PgConnection, n: usize) -> Result<(Timestamp, Vec<Fence>)> {
        let n = i32::try_from(n.max(1)).unwrap_or(i32::MAX);
        let drawn: Vec<(i64, i64)> =
            sqlx::query_as(hot::DRAW).bind(n).bind(self.clock.fixed()).fetch_all(conn).await.map_err(broken)?;
        let now = drawn.first().map_or(0, |(now, _)| *now);
        Ok((Timestamp::from_micros(now), drawn.into_iter().map(|(_, fence)| Fence(fence)).collect()))
    }
}

pub(crate) async fn begin(conn: &mut PgConnection) -> Result<()> {
    sqlx::raw_sql("BEGIN").execute(conn).await.map(drop).map_err(broken)
}

/// A transaction of the ledger's own: if its result is unknown, the batch is sent again.
pub(crate) async fn commit(conn: &mut PgConnection) -> Result<()> {
    sqlx::raw_sql("COMMIT").execute(conn).await.map(drop).map_err(broken)
}

pub(crate) async fn roll_back(conn: &mut PgConnection) -> Result<()> {
    sqlx::raw_sql("ROLLBACK").execute(conn).await.map(drop).map_err(broken)
}

/// Locks rows, waiting for the transactions that have them locked.
pub(crate) async fn lock(conn: &mut PgConnection, ids: &[i64]) -> Result<()> {
    lock_rows(conn, ids).await.map_err(broken)
}

/// The same, with the database's error if that fails.
async fn lock_rows(conn: &mut PgConnection, ids: &[i64]) -> Result<(), sqlx::Error> {
    for sql in [hot::LOCK_LEASES, hot::LOCK_OPERATIONS] {
        sqlx::query(sql).bind(ids).execute(&mut *conn).await?;
    }
    Ok(())
}

/// Locks the rows that no other transaction has locked; returns their ids.
pub(crate) async fn try_lock(conn: &mut PgConnection, ids: &[i64]) -> Result<Vec<i64>> {
    let mine: Vec<i64> =
        sqlx::query_scalar(hot::TRY_LOCK_OPERATIONS).bind(ids).fetch_all(&mut *conn).await.map_err(broken)?;
    let leases: Vec<i64> =
        sqlx::query_scalar(hot::TRY_LOCK_LEASES).bind(&mine).fetch_all(&mut *conn).await.map_err(broken)?;
    let all: Vec<i64> = sqlx::query_scalar("SELECT operation FROM semel_leases WHERE operation = ANY($1)")
        .bind(&mine)
        .fetch_all(conn)
        .await
        .map_err(broken)?;
    let leases: HashSet<i64> = leases.into_iter().collect();
    let held_by_others: HashSet<i64> = all.into_iter().filter(|id| !leases.contains(id)).collect();
    Ok(mine.into_iter().filter(|id| !held_by_others.contains(id)).collect())
}
