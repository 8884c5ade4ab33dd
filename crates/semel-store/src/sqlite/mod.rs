//! The ledger in a SQLite file.

mod checkpoint;
mod file;
mod flush;
mod held;
pub(crate) mod hot;
mod inserts;
mod queue;
mod repair;
mod turns;
mod watch;
mod writer;

use std::{
    collections::HashMap,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use semel::{
    Fence, Operation, Result, State, Timestamp, crash_point,
    journal::Note,
    machine::{Answer, Event, Request, Write, read, refusal},
    store::{Applied, Decision, LeaseWrite},
};
use serde_json::{Value, json};
use sqlx::{Connection as _, SqliteConnection, SqlitePool, migrate::Migrator, sqlite::SqlitePoolOptions};

#[cfg(test)]
pub(crate) use self::hot::ALL as HOT;
use self::{
    checkpoint::Checkpoints,
    flush::{complete_one, write_in},
    queue::Queue,
};
pub(crate) use self::{
    held::HeldClock,
    hot::TAKE_DELTAS,
    repair::repair_clock,
    writer::{WriteTx, Writer},
};
use crate::{
    Conn,
    apply::{Changes, Tally, load_by_id, load_by_key},
    batch::{self, late_renewal, saved},
    clock::Clock,
    connection::{broken, read_failed},
    hints::Hints,
    migrations,
    migrations::migration_failed,
    project::{Projection, Tables},
    sql::Dialect,
};

/// The number of readers.
const READERS: u32 = 4;

pub(crate) struct Sqlite {
    pub(crate) writer: Queue,
    /// Readers and the writer do not wait for one another.
    pub(crate) readers: SqlitePool,
    pub(crate) sql: Tables,
    pub(crate) clock: HeldClock,
    pub(crate) checkpoints: Arc<Checkpoints>,
    hints: Hints,
    /// Whether a caller's transaction has the writer.
    pub(crate) held: Arc<AtomicBool>,
}

impl Sqlite {
    pub(crate) async fn open(url: &str, clock: Clock, projections: &[Projection]) -> Result<Self> {
        let path = file::path(url)?;
        file::check_file_system(&path)?;
        file::check_log(&path)?;
        file::check_mark(&path)?;
        file::make_private(&path);
        let options = file::options(&path);
        let cannot = |error| file::cannot(&path, &error);
        let mut connection = file::open(&options).await.map_err(cannot)?;
        file::prove_writable(&mut connection).await.map_err(cannot)?;
        let mut migrator = migrations();
        migrator.dangerous_set_table_name("semel_migrations");
        migrate(&mut connection, &migrator).await?;
        let clock = HeldClock::of(clock, &mut connection).await?;
        if clock.is_to_be_kept() {
            clock.keep(&mut connection).await?;
        }
        // From here on the writer waits by itself, in turns.
        file::wait_for_others(&mut connection, Duration::ZERO).await.map_err(broken)?;
        let checkpoints = Arc::new(Checkpoints::new(options.clone()));
        let readers = SqlitePoolOptions::new().max_connections(READERS).connect_lazy_with(options.read_only(true));
        // SQLite keeps the log beside the file that a link leads to.
        let path = file::target(&path);
        Ok(Self {
            writer: Queue::of(Writer::new(connection, &path, checkpoints.clone())),
            readers,
            sql: Tables::new(Dialect::Sqlite, projections),
            clock,
            checkpoints,
            hints: Hints::default(),
            held: Arc::default(),
        })
    }

    /// Closes every connection, so that the file alone is the database if no other process has it open. The writer is
    /// the last, and moves the rest of the log into the file.
    pub(crate) async fn close(&self) {
        self.readers.close().await;
        self.checkpoints.close().await;
        if let Err(error) = Writer::close(&self.writer).await {
            // Nothing is lost: the next process to open the file reads the log.
            tracing::debug!(%error, "the log could not be moved into the file");
        }
    }

    /// Makes a test write.
    pub(crate) async fn probe(&self) -> Result<()> {
        let (tx, _, _) = Writer::begin_and_draw(&self.writer, 1, &self.clock).await?;
        tx.commit().await.map_err(broken)
    }

    pub(crate) async fn now(&self) -> Result<Timestamp> {
        let seen: i64 = sqlx::query_scalar(hot::NOW).fetch_one(&self.readers).await.map_err(broken)?;
        self.clock.saw(seen);
        Ok(Timestamp::from_micros(seen.max(self.clock.host())))
    }

    /// The answer to a claim that would change nothing, while a caller's transaction has the writer.
    pub(crate) async fn glimpse(&self, request: &Request) -> Result<Option<Applied>> {
        if !self.held.load(Ordering::Relaxed) {
            return Ok(None);
        }
        let now = self.now().await?;
        let mut reader = self.readers.acquire().await.map_err(broken)?;
        let key = std::iter::once((&request.scope, &request.key));
        let rows = load_by_key(&mut Conn::Sqlite(&mut reader), &self.sql, key).await?;
        let Some(operation) = rows.into_values().next() else { return Ok(None) };
        let answer = read(&operation, request, now);
        Ok(answer.map(|answer| Applied { answer, operation: Some(operation), now }))
    }

    pub(crate) async fn renew(&self, leases: &[(i64, Fence)]) -> Result<Vec<Answer>> {
        let mut tx = Writer::begin(&self.writer).await?;
        let conn = tx.connection();
        let (now, _) = self.draw(conn, 0).await?;
        let asked: Vec<Value> = leases.iter().map(|(id, fence)| json!([id, fence.0])).collect();
        let held: Vec<(i64, i64, i64, i64, i64, bool)> = sqlx::query_as(hot::HELD)
            .bind(Value::Array(asked).to_string())
            .bind(now.as_micros())
            .fetch_all(&mut *conn)
            .await
            .map_err(broken)?;
        let mut late: Vec<(i64, Note)> = Vec::new();
        let mut deadlines = HashMap::new();
        let mut renewed = Vec::new();
        for (id, fence, before, run_until, term, cancelled) in held {
            let deadline = (now.as_micros() + term).min(run_until).max(before);
            renewed.push(json!([id, fence, deadline]));
            deadlines.insert((id, Fence(fence)), (Timestamp::from_micros(deadline), cancelled));
            late.extend(late_renewal(Fence(fence), before, run_until, term, now.as_micros()).map(|note| (id, note)));
        }
        sqlx::query(hot::RENEW).bind(Value::Array(renewed).to_string()).execute(&mut *conn).await.map_err(broken)?;
        let lost = leases.iter().filter(|lease| !deadlines.contains_key(lease)).copied().collect();
        self.tell_renewals(conn, lost, late, now).await?;
        tx.commit().await.map_err(broken)?;
        let answer = |lease: &(i64, Fence)| {
            let renewed = deadlines.get(lease).copied();
            renewed.map_or(Answer::Lost, |(deadline, cancelled)| Answer::Renewed { deadline, cancelled })
        };
        Ok(leases.iter().map(answer).collect())
    }

    /// Writes the notes of unusual renewals into the journal: refused and late ones.
    async fn tell_renewals(
        &self,
        conn: &mut SqliteConnection,
        lost: Vec<(i64, Fence)>,
        late: Vec<(i64, Note)>,
        now: Timestamp,
    ) -> Result<()> {
        if lost.is_empty() && late.is_empty() {
            return Ok(());
        }
        let ids: Vec<i64> = lost.iter().map(|(id, _)| *id).chain(late.iter().map(|(id, _)| *id)).collect();
        let there: Vec<(i64, String, i64, String)> = sqlx::query_as(hot::STANDING)
            .bind(json!(ids).to_string())
            .fetch_all(&mut *conn)
            .await
            .map_err(read_failed)?;
        let there: HashMap<_, _> =
            there.into_iter().map(|(id, state, fence, owner)| (id, (state, fence, owner))).collect();
        let mut changes = Changes::default();
        for (id, fence) in lost {
            let Some((state, present, _)) = there.get(&id) else { continue };
            // Under the same fence its lease has expired, or its own holder has ended it: no note is needed.
            if let (Ok(state), true) = (state.parse::<State>(), *present != fence.0) {
                changes.note(id, refusal(fence, &Write::Renew, (state, Fence(*present)), now));
            }
        }
        for (id, note) in late {
            let actor = there.get(&id).map(|(.., owner)| owner.clone()).unwrap_or_default();
            changes.note(id, Note { actor, ..note });
        }
        saved(changes.save(&mut Conn::Sqlite(conn), &self.sql).await?)
    }

    pub(crate) async fn decide(&self, id: i64, decision: Decision, actor: &str, reason: &str) -> Result<Applied> {
        let mut tx = Writer::begin(&self.writer).await?;
        let applied = self.decide_in(tx.connection(), id, decision, (actor, reason)).await?;
        tx.commit().await.map_err(broken)?;
        Ok(applied)
    }

    /// A decision inside a transaction.
    pub(crate) async fn decide_in(
        &self,
        conn: &mut SqliteConnection,
        id: i64,
        decision: Decision,
        by: (&str, &str),
    ) -> Result<Applied> {
        let (now, fences) = self.draw(conn, 1).await?;
        batch::decide(&mut Conn::Sqlite(conn), &self.sql, id, decision, by, (now, fences[0])).await
    }

    /// A write under a lease in a caller's transaction, and what remains to be counted in it.
    pub(crate) async fn write_in(
        &self,
        conn: &mut SqliteConnection,
        write: LeaseWrite,
    ) -> Result<(Applied, Vec<Value>)> {
        if let Some((now, counts)) = complete_one(conn, &write, self.clock.host()).await? {
            crash_point!("store.write.completed");
            return Ok((Applied { answer: Answer::Settled { successor: false }, operation: None, now }, counts));
        }
        let (now, _) = self.draw(conn, 0).await?;
        let mut tally = Tally::default();
        let mut applied = write_in(conn, &self.sql, &[write], now, &mut tally).await?;
        Ok((applied.remove(0), tally.rows()))
    }

    /// Claims of different keys in the transaction of their effect.
    pub(crate) async fn claim_all_in(
        &self,
        conn: &mut SqliteConnection,
        requests: &[Arc<Request>],
    ) -> Result<Vec<Applied>> {
        let (now, fences) = self.draw(conn, requests.len()).await?;
        let mut conn = Conn::Sqlite(conn);
        let keys = requests.iter().map(|request| (&request.scope, &request.key));
        let rows = load_by_key(&mut conn, &self.sql, keys).await?;
        let mut changes = Changes::default();
        let claim = |(request, fence): (&Arc<Request>, Fence)| {
            let stored = rows.get(&(request.scope.clone(), request.key.clone()));
            changes.step(stored, &Event::ClaimInline { request, fence }, now)
        };
        let applied = requests.iter().zip(fences).map(claim).collect();
        saved(changes.save(&mut conn, &self.sql).await?)?;
        Ok(applied)
    }

    /// Reads a row after all its writers have ended: when it is our turn to write.
    pub(crate) async fn read_back(&self, id: i64) -> Result<Option<Operation>> {
        let mut tx = Writer::begin(&self.writer).await?;
        let mut rows = load_by_id(&mut Conn::Sqlite(tx.connection()), &self.sql, &[id]).await?;
        tx.roll_back().await;
        Ok(rows.remove(&id))
    }

    /// Stores the clock, if that is due.
    pub(crate) async fn keep_clock(&self) -> Result<()> {
        if self.clock.is_to_be_kept() {
            let mut tx = Writer::begin(&self.writer).await?;
            self.clock.keep(tx.connection()).await?;
            tx.commit().await.map_err(broken)?;
        }
        Ok(())
    }

    pub(crate) async fn draw(&self, conn: &mut SqliteConnection, n: usize) -> Result<(Timestamp, Vec<Fence>)> {
        let n = i64::try_from(n).unwrap_or(i64::MAX);
        let (last, now): (i64, i64) =
            sqlx::query_as(hot::DRAW).bind(n).bind(self.clock.host()).fetch_one(conn).await.map_err(broken)?;
        self.clock.saw(now);
        Ok((Timestamp::from_micros(now), (last - n + 1..=last).map(Fence).collect()))
    }
}

/// The schema of the ledger.
pub(crate) fn migrations() -> Migrator {
    migrations!(
        "../../migrations/sqlite",
        "0001_ledger",
        "0002_pinned",
        "0003_messages",
        "0004_due",
        "0007_set_aside",
        "0009_clock",
        "0010_secrets",
        "0011_queue",
        "0012_view",
        "0013_fleet",
        "0014_tried",
        "0016_newer",
        "0017_kept",
    )
}

/// Runs migrations once, however many processes open the file together: it takes the write lock first, so that the
/// second process finds them done. Uses sqlx's own transaction, because it begins nested ones.
async fn migrate(connection: &mut SqliteConnection, migrator: &Migrator) -> Result<()> {
    let mut tx = connection.begin_with("BEGIN IMMEDIATE").await.map_err(broken)?;
    migrator.run_direct(None, &mut *tx, false).await.map_err(|error| migration_failed(migrator, &error))?;
    tx.commit().await.map_err(broken)
}
