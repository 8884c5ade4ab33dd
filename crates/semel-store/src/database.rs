//! The store: one of the two databases behind the engine's trait.

use std::{collections::HashMap, sync::Arc, time::Duration};

use semel::{
    Error, Fence, Key, Operation, Outcome, Result, Scope, State, Store, Timestamp, Token, crash_point,
    journal::{Repeat, Repeats},
    look::{Count, DayTally, Due, DueKind, Filter, Listing, Page, Tallied, Tally, TallyFilter},
    machine::{Answer, Request, Write},
    messaging::Wake,
    store::{
        AnswerCount, Applied, Commit, Decision, Ended, Glance, LeaseWrite, MOST_NOTES, SeenAgain, Story, Swept, Take,
        complete_then_commit, two_commits,
    },
};
use serde_json::json;

use sqlx::migrate::Migrator;

use crate::{
    Clock, Conn, Tx, apply,
    codec::hex,
    condition::Condition,
    connection::{broken, is_worth_asking_again, read_failed},
    counters::CountRow,
    messaging::{Messages, News},
    on, postgres,
    postgres::Postgres,
    repeats, rows,
    sql::{Dialect, Sql},
    sqlite,
    sqlite::Sqlite,
    sweep::{Edges, sql::SweepSql},
    tx::{Last, begin_on},
};

/// The largest outcome, in bytes, that goes along with its commit: to PostgreSQL it does so as text.
const LITERAL: usize = 16 << 10;

/// How a database is opened.
#[derive(Clone)]
pub struct Settings {
    /// PostgreSQL: connections of each sort for the ledger's own writes: claims, settles, and the rest. They are opened
    /// when they are needed; more are, where group commit is off.
    pub lane_connections: usize,
    /// PostgreSQL: connections for callers' transactions and for looking.
    pub caller_connections: usize,
    /// PostgreSQL: how long to wait for an answer before its connection counts as dead. Above the
    /// server's own limit for a statement, which is 10 s.
    pub answer_limit: Duration,
    /// PostgreSQL: how long a connection that nothing uses is kept.
    pub idle_limit: Duration,
    /// PostgreSQL: how long a node that has to migrate the tables asks for the locks again and again.
    pub migration_patience: Duration,
    /// Where the time comes from.
    pub clock: Clock,
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
        }
    }
}

/// A SQLite file or a PostgreSQL database. Cheap to clone.
#[derive(Clone)]
pub struct Database(Arc<Inner>, Arc<Messages>, Arc<Condition>, Arc<Sweeps>);

/// What this process keeps for its sweeps.
pub(crate) struct Sweeps {
    sql: SweepSql,
    edges: Edges,
}

pub(crate) enum Inner {
    Postgres(Postgres),
    Sqlite(Sqlite),
}

impl Database {
    /// Opens `sqlite:PATH` or `postgres://…`, and brings its tables up to date.
    ///
    /// # Errors
    /// When the URL is not one of these, the database cannot be reached, or its settings or its
    /// file system would break our promises.
    pub async fn open(url: &str, settings: Settings) -> Result<Self> {
        let inner = if url.starts_with("postgres://") || url.starts_with("postgresql://") {
            let sizes = postgres::Sizes {
                lane: settings.lane_connections,
                callers: settings.caller_connections,
                answer_limit: settings.answer_limit,
                idle_limit: settings.idle_limit,
                migration_patience: settings.migration_patience,
            };
            Inner::Postgres(Postgres::open(url, sizes, settings.clock).await?)
        } else if url.starts_with("sqlite:") {
            Inner::Sqlite(Sqlite::open(url, settings.clock).await?)
        } else {
            return Err(Error::Invalid("database url: write sqlite:PATH or postgres://…".into()));
        };
        let messages = Messages::new(&inner);
        let sweeps = match &inner {
            Inner::Postgres(_) => Sweeps { sql: SweepSql::new(Dialect::Postgres), edges: Edges::new(true) },
            Inner::Sqlite(_) => Sweeps { sql: SweepSql::new(Dialect::Sqlite), edges: Edges::new(false) },
        };
        Ok(Self(Arc::new(inner), Arc::new(messages), Arc::default(), Arc::new(sweeps)))
    }

    pub(crate) fn inner(&self) -> &Inner {
        &self.0
    }

    /// What this process keeps in mind about messages.
    pub(crate) fn messages(&self) -> &Arc<Messages> {
        &self.1
    }

    /// What was last found out about it.
    pub(crate) fn condition(&self) -> &Condition {
        &self.2
    }

    pub(crate) fn sweep_sql(&self) -> &SweepSql {
        &self.3.sql
    }

    /// Where the phases of the sweep begin.
    pub(crate) fn edges(&self) -> &Edges {
        &self.3.edges
    }

    pub(crate) fn sql(&self) -> &Sql {
        match &*self.0 {
            Inner::Postgres(db) => &db.sql,
            Inner::Sqlite(db) => &db.sql,
        }
    }

    /// Waits for an answer, for as long as one may take.
    pub(crate) async fn answered<T>(&self, asked: impl Future<Output = Result<T>>) -> Result<T> {
        match &*self.0 {
            Inner::Postgres(db) => db.callers.answered(asked).await,
            // There is no network in between, and SQLite has its own limit for a busy file.
            Inner::Sqlite(_) => asked.await,
        }
    }

    /// Brings a service's own tables up to date, in a table of migrations of that name, once even when
    /// many nodes start together.
    ///
    /// # Errors
    /// [`Error::Unavailable`] when the database cannot be reached or a migration fails.
    pub async fn migrate(&self, table: &'static str, mut postgres: Migrator, mut sqlite: Migrator) -> Result<()> {
        match &*self.0 {
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

    /// A connection that only looks, for a service's own queries: it waits for no writer.
    ///
    /// # Errors
    /// [`Error::Unavailable`] when there is none to be had.
    pub async fn reader(&self) -> Result<Reader> {
        Ok(Reader(match &*self.0 {
            Inner::Postgres(db) => Reading::Postgres(db.callers.take().await?),
            Inner::Sqlite(db) => Reading::Sqlite(db.readers.acquire().await.map_err(broken)?),
        }))
    }
}

/// A connection that only looks. One that is dropped without [`leave`](Self::leave) may be in the
/// middle of an answer, and is closed.
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

    /// Gives it back for others to use.
    pub fn leave(self) {
        match self.0 {
            Reading::Postgres(seat) => seat.leave(),
            Reading::Sqlite(conn) => drop(conn),
        }
    }
}

impl Store for Database {
    type Tx = Tx;

    async fn claim(&self, batch: Vec<Arc<Request>>) -> Result<Vec<Applied>> {
        let answers = match &*self.0 {
            Inner::Postgres(db) => db.claim(&batch).await?,
            Inner::Sqlite(db) => db.flush(&batch, &[]).await?.0,
        };
        self.tell_enqueued(&batch);
        Ok(answers)
    }

    async fn write(&self, batch: Vec<LeaseWrite>) -> Result<Vec<Applied>> {
        let answers = match &*self.0 {
            Inner::Postgres(db) => db.write(&batch).await?,
            Inner::Sqlite(db) => db.flush(&[], &batch).await?.1,
        };
        self.tell_put_back(&batch);
        Ok(answers)
    }

    fn one_writer(&self) -> bool {
        matches!(&*self.0, Inner::Sqlite(_))
    }

    async fn flush(&self, claims: Vec<Arc<Request>>, writes: Vec<LeaseWrite>) -> Result<(Vec<Applied>, Vec<Applied>)> {
        match &*self.0 {
            Inner::Postgres(_) => Err(two_commits()),
            Inner::Sqlite(db) => {
                let answers = db.flush(&claims, &writes).await?;
                self.tell_enqueued(&claims);
                self.tell_put_back(&writes);
                Ok(answers)
            }
        }
    }

    fn is_worth_asking_again(&self, error: &Error) -> bool {
        is_worth_asking_again(error)
    }

    async fn glimpse(&self, request: &Arc<Request>) -> Result<Option<Applied>> {
        match &*self.0 {
            // Claims wait for nobody there but those of the same key.
            Inner::Postgres(_) => Ok(None),
            Inner::Sqlite(db) => db.glimpse(request).await,
        }
    }

    async fn held_by(&self, tokens: Vec<Token>) -> Result<Vec<(Token, i64, Fence)>> {
        self.answered(async {
            let rows: Vec<_> = tokens.iter().map(|token| json!({ "token": hex(&token.0) })).collect();
            let (sql, json) = (self.sql().find_tokens, serde_json::Value::Array(rows).to_string());
            let mut reader = self.reader().await?;
            let held: Vec<(Vec<u8>, i64, i64)> =
                on!(reader.conn(), c => sqlx::query_as(sql).bind(json).fetch_all(&mut *c).await.map_err(read_failed)?);
            reader.leave();
            let read = |(token, id, fence): (Vec<u8>, i64, i64)| {
                let token = token.try_into().map_err(|_| Error::Corrupt("a claim token"))?;
                Ok((Token(token), id, Fence(fence)))
            };
            held.into_iter().map(read).collect()
        })
        .await
    }

    async fn renew(&self, batch: Vec<(i64, Fence)>) -> Result<Vec<Answer>> {
        match &*self.0 {
            Inner::Postgres(db) => db.renew(&batch).await,
            Inner::Sqlite(db) => db.renew(&batch).await,
        }
    }

    async fn tell_renewals(&self) -> Result<()> {
        match &*self.0 {
            Inner::Postgres(db) => db.tell_renewals().await,
            // Told in the commit of the renewal.
            Inner::Sqlite(_) => Ok(()),
        }
    }

    async fn decide(&self, id: i64, decision: Decision, actor: &str, reason: &str) -> Result<Applied> {
        let decided = self
            .answered(async {
                match &*self.0 {
                    Inner::Postgres(db) => db.decide(id, decision, actor, reason).await,
                    Inner::Sqlite(db) => db.decide(id, decision, actor, reason).await,
                }
            })
            .await?;
        self.tell_due();
        Ok(decided)
    }

    async fn take_due(&self, take: Arc<Take>) -> Result<Vec<(usize, Applied)>> {
        self.take_work(&take).await
    }

    fn due_wake(&self) -> Wake {
        self.messages().wakes.wait_for(News::Due)
    }

    fn longest_transaction(&self) -> Duration {
        match &*self.0 {
            // Beyond this the server ends it, see `Seats`.
            Inner::Postgres(_) => Duration::from_secs(30),
            // It holds the only writer of the file.
            Inner::Sqlite(_) => Duration::from_secs(5),
        }
    }

    async fn begin(&self, limit: Duration) -> Result<Tx> {
        match &*self.0 {
            Inner::Postgres(db) => begin_on(&db.callers, limit).await,
            Inner::Sqlite(db) => {
                let tx = sqlite::Writer::begin(&db.writer).await?;
                Ok(Tx::sqlite(tx.held_by_caller(&db.held), limit))
            }
        }
    }

    async fn complete_in(&self, tx: &Tx, id: i64, fence: Fence, outcome: Outcome) -> Result<Applied> {
        self.answered(async {
            let mut held = tx.connection().await?;
            if let (Inner::Sqlite(db), Some(tx)) = (&*self.0, held.sqlite()) {
                let write = LeaseWrite { id, fence, write: Write::Complete(outcome) };
                let (applied, counts) = db.complete_in(tx.connection(), write).await?;
                tx.count(counts);
                return Ok(applied);
            }
            self.complete_on(&mut held.get()?, id, fence, outcome).await
        })
        .await
    }

    async fn claim_in(&self, tx: &Tx, request: Arc<Request>) -> Result<Applied> {
        if request.later.is_some() {
            tx.tell(&self.messages().wakes, News::Due);
        }
        self.answered(async {
            let mut held = tx.connection().await?;
            self.claim_on(&mut held.get()?, request).await
        })
        .await
    }

    async fn claim_all_in(&self, tx: &Tx, requests: Vec<Arc<Request>>) -> Result<Vec<Applied>> {
        if requests.iter().any(|request| request.later.is_some()) {
            tx.tell(&self.messages().wakes, News::Due);
        }
        self.answered(async {
            let mut held = tx.connection().await?;
            match (&*self.0, held.get()?) {
                (Inner::Postgres(db), Conn::Postgres(conn)) => db.claim_all_in(conn, &requests).await,
                (Inner::Sqlite(db), Conn::Sqlite(conn)) => db.claim_all_in(conn, &requests).await,
                _ => Err(of_another()),
            }
        })
        .await
    }

    async fn complete_and_commit(&self, tx: &Tx, held: &Operation, outcome: Outcome) -> Ended {
        if outcome.body.len() <= LITERAL {
            crash_point!("atomic.before_commit");
            let last = match &*self.0 {
                Inner::Postgres(db) => Last::Postgres(db.complete_sql(held, &outcome)),
                Inner::Sqlite(db) => {
                    Last::Sqlite { held: Box::new(held.clone()), outcome: outcome.clone(), host_clock: db.clock.host() }
                }
            };
            // Otherwise it is no plain completion: the lease is gone, or newer data waits.
            if let Some(ended) = tx.complete_and_commit(last).await {
                return ended;
            }
        }
        complete_then_commit(self, tx, held, outcome).await
    }

    async fn commit(&self, tx: &Tx) -> Commit {
        tx.commit().await
    }

    async fn roll_back(&self, tx: &Tx) {
        tx.roll_back().await;
    }

    async fn read_back(&self, id: i64) -> Result<Option<Operation>> {
        self.answered(async {
            match &*self.0 {
                Inner::Postgres(db) => db.read_back(id).await,
                Inner::Sqlite(db) => db.read_back(id).await,
            }
        })
        .await
    }

    async fn sweep(&self, limit: u32) -> Result<Swept> {
        let swept = self.sweep_round(limit).await?;
        if swept.lapsed > 0 {
            self.tell_due();
        }
        Ok(swept)
    }

    async fn note_repeats(&self, repeats: Vec<SeenAgain>, answers: Vec<AnswerCount>) -> Result<Vec<SeenAgain>> {
        self.answered(async {
            let hour = self.now().await?.hour();
            match &*self.0 {
                Inner::Postgres(db) => {
                    let mut seat = db.lane_seat().await?;
                    let left = add_repeats(Conn::Postgres(&mut seat), &db.sql, repeats, answers, hour).await?;
                    postgres::commit(&mut seat).await?;
                    seat.leave();
                    Ok(left)
                }
                Inner::Sqlite(db) => {
                    let mut tx = sqlite::Writer::begin(&db.writer).await?;
                    let left = add_repeats(Conn::Sqlite(tx.connection()), &db.sql, repeats, answers, hour).await?;
                    tx.commit().await.map_err(broken)?;
                    Ok(left)
                }
            }
        })
        .await
    }

    async fn glance(&self, ids: Vec<i64>) -> Result<Vec<Glance>> {
        self.answered(async {
            let now = self.now().await?.as_micros();
            let rows: Vec<_> = ids.iter().map(|id| json!({ "id": id })).collect();
            let json = serde_json::Value::Array(rows).to_string();
            let mut reader = self.reader().await?;
            let sql = self.sql().glance;
            let seen: Vec<(i64, String, i64, Option<i64>)> =
                on!(reader.conn(), c => sqlx::query_as(sql).bind(json).fetch_all(&mut *c).await.map_err(read_failed)?);
            reader.leave();
            let glance = |(id, state, fence, deadline): (i64, String, i64, Option<i64>)| {
                let state: State = state.parse()?;
                Ok(Glance { id, state, fence: Fence(fence), live: deadline.is_some_and(|deadline| deadline > now) })
            };
            seen.into_iter().map(glance).collect()
        })
        .await
    }

    async fn now(&self) -> Result<Timestamp> {
        self.answered(async {
            match &*self.0 {
                Inner::Postgres(db) => db.now().await,
                Inner::Sqlite(db) => db.now().await,
            }
        })
        .await
    }

    async fn by_id(&self, tenant: &str, id: i64) -> Result<Option<Operation>> {
        self.answered(async {
            let mut reader = self.reader().await?;
            let found = apply::load_by_id(&mut reader.conn(), self.sql(), &[id]).await?.remove(&id);
            let found = found.filter(|op| op.scope.tenant() == tenant);
            let found = self.with_archived(&mut reader, found).await?;
            reader.leave();
            Ok(found)
        })
        .await
    }

    async fn by_key(&self, scope: &Scope, key: &Key) -> Result<Option<Operation>> {
        self.answered(async {
            let mut reader = self.reader().await?;
            let found = apply::load_by_key(&mut reader.conn(), self.sql(), std::iter::once((scope, key))).await?;
            let found = self.with_archived(&mut reader, found.into_values().next()).await?;
            reader.leave();
            Ok(found)
        })
        .await
    }

    async fn due(&self, scope: &Scope, limit: u32) -> Result<Due> {
        // In a box: it may have to set rows aside, and needs the room for that whether it does or not.
        self.answered(Box::pin(self.look_due(scope, limit))).await
    }

    async fn due_kinds(&self, service: &str, after: (&str, &str)) -> Result<Vec<DueKind>> {
        self.answered(self.look_due_kinds(service, after)).await
    }

    async fn not_due(&self, id: i64, fence: Fence) -> Result<()> {
        self.answered(self.take_off_due(id, fence)).await
    }

    async fn list(&self, filter: &Filter, page: Page) -> Result<Listing> {
        self.answered(self.look_list(filter, page)).await
    }

    async fn journal(&self, id: i64) -> Result<Story> {
        self.answered(async {
            let sql = self.sql();
            let mut reader = self.reader().await?;
            let most = i64::try_from(MOST_NOTES).unwrap_or(i64::MAX);
            let notes: Vec<rows::NoteRow> = on!(reader.conn(), c =>
                sqlx::query_as(sql.load_journal).bind(id).bind(most).fetch_all(&mut *c).await.map_err(read_failed)?);
            let repeats = load_repeats(&mut reader.conn(), sql, &[id]).await?;
            reader.leave();
            let notes = notes.into_iter().filter_map(rows::NoteRow::read).collect();
            let mut repeats: Vec<_> = repeats.into_iter().map(|((_, repeat), repeats)| (repeat, repeats)).collect();
            repeats.sort_by_key(|(repeat, _)| *repeat);
            Ok((notes, repeats))
        })
        .await
    }

    async fn counts(&self, tenant: &str, since_hour: i64) -> Result<Vec<Count>> {
        self.answered(async {
            let sql = self.sql().load_counts;
            let mut reader = self.reader().await?;
            let rows: Vec<CountRow> = on!(reader.conn(), c =>
                sqlx::query_as(sql).bind(tenant).bind(since_hour).fetch_all(&mut *c).await.map_err(read_failed)?);
            reader.leave();
            Ok(rows.into_iter().map(CountRow::read).collect())
        })
        .await
    }

    async fn tally(&self, filter: &TallyFilter) -> Result<Tallied<Tally>> {
        self.answered(self.look_tally(filter)).await
    }

    async fn tally_days(&self, filter: &TallyFilter) -> Result<Tallied<DayTally>> {
        self.answered(self.look_tally_days(filter)).await
    }
}

impl Database {
    /// The fenced completion on a connection of the embedder's own, inside its transaction: the
    /// last statement before its commit. Any answer but settled means: roll back.
    ///
    /// # Errors
    /// When the database refuses; roll back then.
    pub async fn complete_on(&self, conn: &mut Conn<'_>, id: i64, fence: Fence, outcome: Outcome) -> Result<Applied> {
        let write = LeaseWrite { id, fence, write: Write::Complete(outcome) };
        match (&*self.0, conn) {
            (Inner::Postgres(db), Conn::Postgres(conn)) => db.complete_in(conn, write).await,
            (Inner::Sqlite(db), Conn::Sqlite(conn)) => {
                let (applied, counts) = db.complete_in(conn, write).await?;
                Conn::Sqlite(conn).batch(db.sql.insert_deltas, &counts).await?;
                Ok(applied)
            }
            _ => Err(of_another()),
        }
    }

    /// A claim on a connection of the embedder's own, inside the transaction of its effect.
    ///
    /// # Errors
    /// When the database refuses; roll back then.
    pub async fn claim_on(&self, conn: &mut Conn<'_>, request: Arc<Request>) -> Result<Applied> {
        match (&*self.0, conn) {
            (Inner::Postgres(db), Conn::Postgres(conn)) => db.claim_in(conn, &request).await,
            (Inner::Sqlite(db), Conn::Sqlite(conn)) => Ok(db.claim_all_in(conn, &[request]).await?.remove(0)),
            _ => Err(of_another()),
        }
    }

    /// An archived operation with its data back in place, for whoever looks it up.
    async fn with_archived(&self, reader: &mut Reader, found: Option<Operation>) -> Result<Option<Operation>> {
        let Some(mut op) = found else { return Ok(None) };
        if op.archived {
            let sql = self.sql().load_archived;
            let data: Option<(Option<Vec<u8>>, Vec<u8>, bool)> = on!(reader.conn(), c =>
                sqlx::query_as(sql).bind(op.id).fetch_optional(&mut *c).await.map_err(read_failed)?);
            if let Some((payload, outcome, kept)) = data {
                op.payload = payload.map(crate::codec::decode).transpose()?;
                op.outcome = Some(Outcome { kept, body: crate::codec::decode(outcome)? });
            }
        }
        Ok(Some(op))
    }
}

pub(crate) fn of_another() -> Error {
    Error::Invalid("the transaction is of another database".into())
}

/// Adds repeats to what is stored of them, and answers to the counters. Returns the repeats of operations that another
/// transaction has locked.
async fn add_repeats(
    mut conn: Conn<'_>,
    sql: &Sql,
    mut again: Vec<SeenAgain>,
    answers: Vec<AnswerCount>,
    hour: i64,
) -> Result<Vec<SeenAgain>> {
    // In order of id: two nodes that add to the same rows wait in one direction.
    again.sort_by_key(|seen| (seen.id, seen.repeat));
    repeats::lock(&mut conn, &again.iter().map(|seen| seen.id).collect::<Vec<_>>()).await?;
    let mut left = Vec::new();
    for part in again.chunks(1000) {
        let ids: Vec<i64> = part.iter().map(|seen| seen.id).collect();
        let mut stored = load_repeats(&mut conn, sql, &ids).await?;
        let held = repeats::hold(&mut conn, &ids).await?;
        left.extend(part.iter().filter(|seen| held.locked.contains(&seen.id)).cloned());
        let mut rows = Vec::new();
        for seen in part.iter().filter(|seen| held.here.contains(&seen.id)) {
            let mut sum = stored.remove(&(seen.id, seen.repeat)).unwrap_or_default();
            sum.merge(seen.repeats.clone());
            rows.push(json!({ "id": seen.id, "repeat": seen.repeat.as_str(), "repeats": repeats::encode(&sum) }));
        }
        conn.batch(sql.put_repeats, &rows).await?;
    }
    let deltas: Vec<_> =
        answers.iter().map(|count| rows::delta(&count.group, hour, "", "", count.answer, 0, count.n)).collect();
    conn.batch(sql.insert_deltas, &deltas).await?;
    Ok(left)
}

async fn load_repeats(conn: &mut Conn<'_>, sql: &Sql, ids: &[i64]) -> Result<HashMap<(i64, Repeat), Repeats>> {
    let rows: Vec<_> = ids.iter().map(|id| json!({ "id": id })).collect();
    let json = serde_json::Value::Array(rows).to_string();
    let found: Vec<(i64, String, String)> =
        on!(conn, c => sqlx::query_as(sql.load_repeats).bind(json).fetch_all(&mut **c).await.map_err(read_failed)?);
    let read = |(id, repeat, text): (i64, String, String)| {
        let repeat = if repeat == Repeat::Conflict.as_str() { Repeat::Conflict } else { Repeat::Duplicate };
        Ok(((id, repeat), repeats::decode(&text)?))
    };
    found.into_iter().map(read).collect()
}
