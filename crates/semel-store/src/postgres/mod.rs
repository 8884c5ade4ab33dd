//! The ledger on PostgreSQL.

mod hot;
mod inline;
mod seats;

use std::{
    collections::{HashMap, HashSet},
    sync::Arc,
    time::Duration,
};

use semel::{
    Error, Fence, Operation, Outcome, Result, Timestamp, crash_point,
    machine::{Answer, Request, Write},
    micros,
    store::{Applied, Decision, LeaseWrite, Swept},
};
use sqlx::{PgConnection, migrate::Migrator, postgres::PgConnectOptions};

#[cfg(test)]
pub(crate) use self::hot::ALL as HOT;
pub(crate) use self::seats::{Seat, Seats};
use crate::{
    Conn,
    apply::{Changes, load_by_id, load_by_key},
    batch::{self, ByKey, in_order, late_renewal, note_late, saved, swept_rows},
    clock::Clock,
    codec::{encode, hex},
    connection::broken,
    counters,
    hints::Hints,
    sql::{Dialect, Sql},
};

/// When to ask again about a row that somebody has locked.
const BUSY: Duration = Duration::from_secs(1);

/// How often the general path tries again when rows were not as it had read them.
const ROUNDS: usize = 10;

/// Lane connections plan for a table of any size: never analysed or just analysed, a batch finds
/// its rows by index, in the order of its arrays.
const LANE: &str = "SET enable_seqscan = off; SET enable_hashjoin = off; SET enable_mergejoin = off; SET jit = off;
     SET plan_cache_mode = force_generic_plan";

/// The hot claim joins only what it has just made, by hash. It waits for others' transactions that
/// are at one of its keys: for a commit, which is short, but not for a node that is frozen.
const CLAIMS: &str =
    "SET enable_seqscan = off; SET enable_mergejoin = off; SET jit = off; SET plan_cache_mode = force_generic_plan;
     SET lock_timeout = '250ms'";

pub(crate) struct Postgres {
    /// For the hot claim.
    claims: Arc<Seats>,
    /// For every other write of the ledger.
    lane: Arc<Seats>,
    /// For callers' transactions, and for looking.
    pub(crate) callers: Arc<Seats>,
    /// For messages: a busy relay must not keep the ledger waiting.
    pub(crate) messages: Arc<Seats>,
    pub(crate) sql: Sql,
    hints: Hints,
    pub(crate) clock: Clock,
}

/// How many connections of each sort, and how long each may take to answer.
pub(crate) struct Sizes {
    pub(crate) lane: usize,
    pub(crate) callers: usize,
    pub(crate) answer_limit: Duration,
}

impl Postgres {
    pub(crate) async fn open(url: &str, sizes: Sizes, clock: Clock) -> Result<Self> {
        let options: PgConnectOptions = url.parse().map_err(|e| Error::Invalid(format!("database url: {e}")))?;
        let options = options.application_name("semel");
        let callers = Seats::new(options.clone(), sizes.callers, "", sizes.answer_limit);
        let mut seat = callers.take().await?;
        check_settings(&mut seat).await?;
        let mut migrator = sqlx::migrate!("migrations/postgres");
        // An embedder's own migrations keep their table to themselves.
        migrator.dangerous_set_table_name("semel_migrations");
        run_migrations(&mut seat, &migrator).await?;
        drop(seat);
        Ok(Self {
            claims: Seats::new(options.clone(), sizes.lane, CLAIMS, sizes.answer_limit),
            lane: Seats::new(options.clone(), sizes.lane, LANE, sizes.answer_limit),
            messages: Seats::new(options, sizes.lane.max(2), LANE, sizes.answer_limit),
            callers,
            sql: Sql::new(Dialect::Postgres),
            hints: Hints::default(),
            clock,
        })
    }

    /// Runs a service's own migrations.
    pub(crate) async fn migrate(&self, migrator: &Migrator) -> Result<()> {
        // Not given back: its settings are for this only.
        run_migrations(&mut *self.callers.take().await?, migrator).await
    }

    pub(crate) async fn now(&self) -> Result<Timestamp> {
        let mut seat = self.callers.take().await?;
        let now: i64 =
            sqlx::query_scalar(hot::NOW).bind(self.clock.fixed()).fetch_one(&mut *seat).await.map_err(broken)?;
        seat.leave();
        Ok(Timestamp::from_micros(now))
    }

    pub(crate) async fn claim(&self, requests: &[Arc<Request>]) -> Result<Vec<Applied>> {
        self.claims.answered(self.claim_batch(requests)).await
    }

    async fn claim_batch(&self, requests: &[Arc<Request>]) -> Result<Vec<Applied>> {
        let order = batch::by_key(requests);
        let (first, mut rest) = batch::fold(requests, &order);
        let (seen, new): (Vec<usize>, Vec<usize>) = first.into_iter().partition(|i| self.hints.knows(&requests[*i]));
        let mut answers: HashMap<usize, Applied> = self.claim_first(requests, &new).await?;
        rest.extend(seen);
        rest.extend(new.iter().filter(|i| !answers.contains_key(i)));
        if !rest.is_empty() {
            rest.sort_unstable();
            answers.extend(self.claim_known(requests, rest).await?);
        }
        requests.iter().for_each(|request| self.hints.remember(request));
        in_order(answers, requests.len())
    }

    /// The hot path: those of `first` whose key was not there.
    async fn claim_first(&self, requests: &[Arc<Request>], first: &[usize]) -> Result<HashMap<usize, Applied>> {
        let mut first = first.to_vec();
        for _ in 0..ROUNDS {
            if let Some(made) = self.claim_absent(requests, &first).await? {
                return Ok(made);
            }
            // An insert waits for whoever changes the row that is in its way, and a node that was
            // frozen on its way to a commit may be at it for long. What is there already is no
            // first claim; the rest should not wait with it.
            let mut seat = self.lane.take().await?;
            let keys = first.iter().map(|i| (&requests[*i].scope, &requests[*i].key));
            let known = load_by_key(&mut Conn::Postgres(&mut seat), &self.sql, keys).await?;
            seat.leave();
            first.retain(|i| !known.contains_key(&(requests[*i].scope.clone(), requests[*i].key.clone())));
        }
        Err(Error::Unavailable("the row is busy; ask again".into()))
    }

    /// Inserts claims; nothing if it would have to wait.
    async fn claim_absent(
        &self,
        requests: &[Arc<Request>],
        first: &[usize],
    ) -> Result<Option<HashMap<usize, Applied>>> {
        if first.is_empty() {
            return Ok(Some(HashMap::new()));
        }
        let list = || first.iter().map(|i| &requests[*i]);
        let text = |get: &dyn Fn(&Request) -> &str| list().map(|r| get(r).to_owned()).collect::<Vec<String>>();
        let label = |slot: usize| list().map(|r| r.labels.0[slot].clone()).collect::<Vec<Option<String>>>();
        let span = |get: &dyn Fn(&Request) -> Option<Duration>| {
            list().map(|r| get(r).map(micros)).collect::<Vec<Option<i64>>>()
        };
        let mut seat = self.claims.take().await?;
        let made = sqlx::query_as(hot::CLAIM)
            .bind(text(&|r| r.scope.tenant()))
            .bind(text(&|r| r.scope.service()))
            .bind(text(&|r| r.scope.kind()))
            .bind(text(&|r| r.key.as_str()))
            .bind(list().map(|r| r.fingerprint.as_bytes().to_vec()).collect::<Vec<_>>())
            .bind(list().map(|r| r.order).collect::<Vec<_>>())
            .bind(list().map(|r| r.payload.as_ref().map(|payload| encode(payload))).collect::<Vec<_>>())
            .bind(label(0))
            .bind(label(1))
            .bind(label(2))
            .bind(label(3))
            .bind(list().map(|r| r.token.0.to_vec()).collect::<Vec<_>>())
            .bind(span(&|r| Some(r.policy.lease)))
            .bind(span(&|r| Some(r.policy.max_run)))
            .bind(span(&|r| r.policy.retention))
            .bind(span(&|r| r.policy.tombstone))
            .bind(span(&|r| r.policy.retention.into_iter().chain(r.policy.tombstone).min()))
            .bind(list().map(|r| r.policy.to_terms()).collect::<Vec<_>>())
            .bind(text(&|r| &r.owner))
            .bind(first.iter().map(|i| i64::try_from(*i).unwrap_or(i64::MAX)).collect::<Vec<_>>())
            .bind(list().map(|r| r.policy.pinned).collect::<Vec<_>>())
            .bind(self.clock.fixed())
            .fetch_all(&mut *seat)
            .await;
        let made: Vec<(i64, i64, i64)> = match made {
            Err(error) if is_lock_timeout(&error) => {
                seat.leave();
                return Ok(None);
            }
            made => made.map_err(broken)?,
        };
        crash_point!("store.claim.inserted");
        seat.leave();
        let applied = |(i, fence, now): (i64, i64, i64)| {
            let i =
                usize::try_from(i).ok().filter(|i| *i < requests.len()).ok_or(Error::Corrupt("a claim's number"))?;
            Ok((i, batch::first_claim(&requests[i], Fence(fence), Timestamp::from_micros(now))))
        };
        made.into_iter().map(applied).collect::<Result<_>>().map(Some)
    }

    /// Claims on keys that are there already: read first; what would change is locked and decided
    /// again. A row that somebody else has locked is being decided about this very moment.
    async fn claim_known(&self, requests: &[Arc<Request>], mut todo: Vec<usize>) -> Result<HashMap<usize, Applied>> {
        let mut answers = HashMap::new();
        let mut seat = self.lane.take().await?;
        for round in 0..ROUNDS {
            let now: i64 =
                sqlx::query_scalar(hot::NOW).bind(self.clock.fixed()).fetch_one(&mut *seat).await.map_err(broken)?;
            let now = Timestamp::from_micros(now);
            let keys = todo.iter().map(|i| (&requests[*i].scope, &requests[*i].key));
            let rows = load_by_key(&mut Conn::Postgres(&mut seat), &self.sql, keys).await?;
            let place = |i: usize| (requests[i].scope.clone(), requests[i].key.clone());
            let (contested, calm) = batch::read_all(requests, &rows, todo, now);
            let answer = |(i, answer)| (i, Applied { answer, operation: rows.get(&place(i)).cloned(), now });
            answers.extend(calm.into_iter().map(answer));
            if contested.is_empty() {
                seat.leave();
                return Ok(answers);
            }
            let (decided, left) = self.claim_contested(&mut seat, requests, &rows, contested).await?;
            answers.extend(decided);
            todo = left;
            if todo.is_empty() {
                seat.leave();
                return Ok(answers);
            }
            if round + 1 == ROUNDS {
                // Somebody holds these rows for long. One such row must not hold up everybody else
                // in the lane: whoever has it is at it, and that is an answer.
                let busy = Answer::InFlight { until: now + BUSY, kept: false };
                let answer = |i| {
                    rows.get(&place(i))
                        .map(|op| (i, Applied { answer: busy.clone(), operation: Some(op.clone()), now }))
                };
                answers.extend(todo.drain(..).filter_map(answer));
            } else if round > 1 {
                tokio::time::sleep(Duration::from_millis(2 << round.min(5))).await;
            }
        }
        seat.leave();
        Ok(answers)
    }

    async fn claim_contested(
        &self,
        seat: &mut PgConnection,
        requests: &[Arc<Request>],
        seen: &ByKey,
        mut claims: Vec<usize>,
    ) -> Result<(Vec<(usize, Applied)>, Vec<usize>)> {
        let place = |i: usize| (requests[i].scope.clone(), requests[i].key.clone());
        // In key order, like the hot path: rows that are not there are inserted in the order of
        // their fences, and an insert waits for whoever else inserts the same key.
        claims.sort_by_cached_key(|i| place(*i));
        let ids: Vec<i64> = claims.iter().filter_map(|i| seen.get(&place(*i)).map(|op| op.id)).collect();
        begin(seat).await?;
        let locked = try_lock(seat, &ids).await?;
        let rows = load_by_id(&mut Conn::Postgres(seat), &self.sql, &locked).await?;
        let mut rows: ByKey = rows.into_values().map(|op| ((op.scope.clone(), op.key.clone()), op)).collect();
        // Drawn under the lock: fences from before it may be lower than what the row has by now.
        let (now, fences) = self.draw(seat, claims.len()).await?;
        let claims: Vec<_> = claims.into_iter().zip(fences).collect();
        let is_free = |i: usize| !seen.contains_key(&place(i)) || rows.contains_key(&place(i));
        let (free, busy): (Vec<_>, Vec<_>) = claims.into_iter().partition(|(i, _)| is_free(*i));
        let mut left: Vec<usize> = busy.into_iter().map(|(i, _)| i).collect();
        let mut changes = Changes::default();
        let claims = free.iter().map(|(i, fence)| (*i, &*requests[*i], *fence));
        let answers = batch::claim_all(&mut changes, &mut rows, claims, now);
        if !changes.save(&mut Conn::Postgres(seat), &self.sql).await? {
            roll_back(seat).await?;
            left.extend(answers.into_iter().map(|(i, _)| i));
            return Ok((Vec::new(), left));
        }
        crash_point!("store.claim.taken_over");
        commit(seat).await?;
        Ok((answers, left))
    }

    pub(crate) async fn write(&self, writes: &[LeaseWrite]) -> Result<Vec<Applied>> {
        self.lane.answered(self.write_batch(writes)).await
    }

    async fn write_batch(&self, writes: &[LeaseWrite]) -> Result<Vec<Applied>> {
        let mut order: Vec<usize> = (0..writes.len()).collect();
        order.sort_by_key(|i| writes[*i].id);
        let mut seat = self.lane.take().await?;
        let mut answers = complete(&mut seat, writes, &order, self.clock.fixed()).await?;
        crash_point!("store.write.completed");
        order.retain(|i| !answers.contains_key(i));
        if !order.is_empty() {
            begin(&mut seat).await?;
            let ids: Vec<i64> = order.iter().map(|i| writes[*i].id).collect();
            lock(&mut seat, &ids).await?;
            let (now, _) = self.draw(&mut seat, 1).await?;
            answers.extend(self.write_locked(&mut seat, writes, &order, now).await?);
            crash_point!("store.write.saved");
            commit(&mut seat).await?;
        }
        seat.leave();
        in_order(answers, writes.len())
    }

    async fn write_locked(
        &self,
        seat: &mut PgConnection,
        writes: &[LeaseWrite],
        order: &[usize],
        now: Timestamp,
    ) -> Result<Vec<(usize, Applied)>> {
        let ids: Vec<i64> = order.iter().map(|i| writes[*i].id).collect();
        let mut rows = load_by_id(&mut Conn::Postgres(seat), &self.sql, &ids).await?;
        let mut changes = Changes::default();
        let list = order.iter().map(|i| (*i, writes[*i].clone()));
        let answers = batch::write_all(&mut changes, &mut rows, list, now);
        saved(changes.save(&mut Conn::Postgres(seat), &self.sql).await?)?;
        Ok(answers)
    }

    pub(crate) async fn renew(&self, leases: &[(i64, Fence)]) -> Result<Vec<Answer>> {
        self.lane.answered(self.renew_batch(leases)).await
    }

    async fn renew_batch(&self, leases: &[(i64, Fence)]) -> Result<Vec<Answer>> {
        let mut sorted = leases.to_vec();
        sorted.sort_unstable();
        let mut seat = self.lane.take().await?;
        let renewed: Vec<(i64, i64, i64, i64, i64, i64, i64)> = sqlx::query_as(hot::RENEW)
            .bind(sorted.iter().map(|(id, _)| *id).collect::<Vec<_>>())
            .bind(sorted.iter().map(|(_, fence)| fence.0).collect::<Vec<_>>())
            .bind(self.clock.fixed())
            .fetch_all(&mut *seat)
            .await
            .map_err(broken)?;
        seat.leave();
        // By fence too: a zombie's renewal may be in the same batch.
        let (mut late, mut deadlines) = (Vec::new(), HashMap::new());
        for (id, fence, deadline, before, run_until, term, now) in renewed {
            deadlines.insert((id, Fence(fence)), Timestamp::from_micros(deadline));
            late.extend(late_renewal(Fence(fence), before, run_until, term, now).map(|note| (id, note)));
        }
        // The refused ones are told why, and their late write is part of the story.
        let lost: Vec<_> = leases.iter().filter(|lease| !deadlines.contains_key(lease)).collect();
        if !lost.is_empty() || !late.is_empty() {
            let write = |(id, fence): &&(i64, Fence)| LeaseWrite { id: *id, fence: *fence, write: Write::Renew };
            let writes: Vec<_> = lost.iter().map(write).collect();
            let order: Vec<usize> = (0..writes.len()).collect();
            let mut seat = self.lane.take().await?;
            begin(&mut seat).await?;
            lock(&mut seat, &writes.iter().map(|write| write.id).collect::<Vec<_>>()).await?;
            let (now, _) = self.draw(&mut seat, 1).await?;
            for (i, applied) in self.write_locked(&mut seat, &writes, &order, now).await? {
                if let Answer::Renewed { deadline } = applied.answer {
                    deadlines.insert((writes[i].id, writes[i].fence), deadline);
                }
            }
            note_late(&mut Conn::Postgres(&mut seat), &self.sql, late).await?;
            commit(&mut seat).await?;
            seat.leave();
        }
        let answer = |lease: &(i64, Fence)| {
            deadlines.get(lease).map_or(Answer::Lost, |deadline| Answer::Renewed { deadline: *deadline })
        };
        Ok(leases.iter().map(answer).collect())
    }

    pub(crate) async fn decide(&self, id: i64, decision: Decision, actor: &str, reason: &str) -> Result<Applied> {
        let mut seat = self.lane.take().await?;
        begin(&mut seat).await?;
        lock(&mut seat, &[id]).await?;
        let (now, fences) = self.draw(&mut seat, 1).await?;
        let mut conn = Conn::Postgres(&mut seat);
        let applied = batch::decide(&mut conn, &self.sql, id, decision, (actor, reason), (now, fences[0])).await?;
        commit(&mut seat).await?;
        seat.leave();
        Ok(applied)
    }

    /// The fenced completion as text, to go along with a commit.
    pub(crate) fn complete_sql(&self, held: &Operation, outcome: &Outcome) -> String {
        let (id, fence, kept) = (held.id, held.fence, outcome.kept);
        let body = hex(&encode(&outcome.body));
        let fixed = self.clock.fixed().map_or_else(|| "NULL".to_owned(), |fixed| fixed.to_string());
        format!("SELECT semel_complete({id}, {fence}, decode('{body}', 'hex'), {kept}, {fixed})")
    }

    /// The fenced completion in a caller's transaction.
    pub(crate) async fn complete_in(&self, conn: &mut PgConnection, write: LeaseWrite) -> Result<Applied> {
        let writes = [write];
        if let LeaseWrite { id, fence, write: Write::Complete(outcome) } = &writes[0] {
            let done: Option<i64> = sqlx::query_scalar(hot::COMPLETE_ONE)
                .bind(id)
                .bind(fence.0)
                .bind(encode(&outcome.body))
                .bind(outcome.kept)
                .bind(self.clock.fixed())
                .fetch_optional(&mut *conn)
                .await
                .map_err(broken)?;
            if let Some(now) = done.map(Timestamp::from_micros) {
                return Ok(Applied { answer: Answer::Settled { successor: false }, operation: None, now });
            }
        }
        lock(conn, &[writes[0].id]).await?;
        let (now, _) = self.draw(conn, 1).await?;
        let mut answers = self.write_locked(conn, &writes, &[0], now).await?;
        Ok(answers.remove(0).1)
    }

    /// Reads a row when everybody who is at it has finished.
    pub(crate) async fn read_back(&self, id: i64) -> Result<Option<Operation>> {
        let mut seat = self.lane.take().await?;
        begin(&mut seat).await?;
        lock(&mut seat, &[id]).await?;
        let mut rows = load_by_id(&mut Conn::Postgres(&mut seat), &self.sql, &[id]).await?;
        roll_back(&mut seat).await?;
        seat.leave();
        Ok(rows.remove(&id))
    }

    pub(crate) async fn sweep(&self, limit: u32) -> Result<Swept> {
        let mut swept = Swept::default();
        for find in [self.sql.find_lapsed, self.sql.find_due] {
            self.lane.answered(self.sweep_found(&mut swept, find, limit)).await?;
        }
        self.lane.answered(self.fold(&mut swept, limit)).await?;
        Ok(swept)
    }

    async fn sweep_found(&self, swept: &mut Swept, find: &'static str, limit: u32) -> Result<()> {
        let mut seat = self.lane.take().await?;
        let (now, _) = self.draw(&mut seat, 1).await?;
        let ids: Vec<i64> = sqlx::query_scalar(find)
            .bind(now.as_micros())
            .bind(i64::from(limit))
            .fetch_all(&mut *seat)
            .await
            .map_err(broken)?;
        if ids.is_empty() {
            seat.leave();
            return Ok(());
        }
        begin(&mut seat).await?;
        let locked = try_lock(&mut seat, &ids).await?;
        // If others hold all of them, going round again at once would only burn their time.
        swept.more |= ids.len() >= limit as usize && !locked.is_empty();
        let (now, fences) = self.draw(&mut seat, locked.len()).await?;
        let rows = load_by_id(&mut Conn::Postgres(&mut seat), &self.sql, &locked).await?;
        let mut changes = Changes::default();
        swept_rows(swept, &mut changes, rows, fences, now, find == self.sql.find_lapsed);
        saved(changes.save(&mut Conn::Postgres(&mut seat), &self.sql).await?)?;
        match find == self.sql.find_lapsed {
            true => crash_point!("sweep.lapsed"),
            false => crash_point!("sweep.tended"),
        }
        commit(&mut seat).await?;
        seat.leave();
        Ok(())
    }

    async fn fold(&self, swept: &mut Swept, limit: u32) -> Result<()> {
        let mut seat = self.lane.take().await?;
        begin(&mut seat).await?;
        let taken: Vec<counters::CountRow> =
            sqlx::query_as(hot::TAKE_DELTAS).bind(i64::from(limit)).fetch_all(&mut *seat).await.map_err(broken)?;
        swept.folded += taken.len() as u64;
        swept.more |= taken.len() >= limit as usize;
        let folded = counters::fold(taken);
        Conn::Postgres(&mut seat).batch(self.sql.fold_counters, &folded).await?;
        crash_point!("sweep.folded");
        commit(&mut seat).await?;
        seat.leave();
        Ok(())
    }

    /// A lane connection with a transaction of its own begun on it.
    pub(crate) async fn lane_seat(&self) -> Result<Seat> {
        let mut seat = self.lane.take().await?;
        begin(&mut seat).await?;
        Ok(seat)
    }

    pub(crate) async fn draw(&self, conn: &mut PgConnection, n: usize) -> Result<(Timestamp, Vec<Fence>)> {
        let n = i32::try_from(n.max(1)).unwrap_or(i32::MAX);
        let drawn: Vec<(i64, i64)> =
            sqlx::query_as(hot::DRAW).bind(n).bind(self.clock.fixed()).fetch_all(conn).await.map_err(broken)?;
        let now = drawn.first().map_or(0, |(now, _)| *now);
        Ok((Timestamp::from_micros(now), drawn.into_iter().map(|(_, fence)| Fence(fence)).collect()))
    }
}

/// Completions of a batch that need nothing but the hot statement.
async fn complete(
    conn: &mut PgConnection,
    writes: &[LeaseWrite],
    order: &[usize],
    fixed: Option<i64>,
) -> Result<HashMap<usize, Applied>> {
    let plain = order.iter().filter_map(|i| match &writes[*i].write {
        Write::Complete(outcome) => Some((*i, &writes[*i], outcome)),
        _ => None,
    });
    let plain: Vec<_> = plain.collect();
    if plain.is_empty() {
        return Ok(HashMap::new());
    }
    let done: Vec<(i64, i64, i64)> = sqlx::query_as(hot::COMPLETE)
        .bind(plain.iter().map(|(_, write, _)| write.id).collect::<Vec<_>>())
        .bind(plain.iter().map(|(_, write, _)| write.fence.0).collect::<Vec<_>>())
        .bind(plain.iter().map(|(_, _, outcome)| encode(&outcome.body)).collect::<Vec<_>>())
        .bind(plain.iter().map(|(_, _, outcome)| outcome.kept).collect::<Vec<_>>())
        .bind(fixed)
        .fetch_all(conn)
        .await
        .map_err(broken)?;
    // By fence too: a zombie's completion may be in the same batch.
    let done: HashMap<(i64, Fence), i64> = done.into_iter().map(|(id, fence, now)| ((id, Fence(fence)), now)).collect();
    let applied = |now: &i64| Applied {
        answer: Answer::Settled { successor: false },
        operation: None,
        now: Timestamp::from_micros(*now),
    };
    Ok(plain
        .iter()
        .filter_map(|(i, write, _)| done.get(&(write.id, write.fence)).map(|now| (*i, applied(now))))
        .collect())
}

fn is_lock_timeout(error: &sqlx::Error) -> bool {
    error.as_database_error().and_then(|error| error.code()).is_some_and(|code| code == "55P03")
}

pub(crate) async fn begin(conn: &mut PgConnection) -> Result<()> {
    sqlx::raw_sql("BEGIN").execute(conn).await.map(drop).map_err(broken)
}

/// A transaction of the ledger's own: if its end is unknown, the batch is asked again.
pub(crate) async fn commit(conn: &mut PgConnection) -> Result<()> {
    sqlx::raw_sql("COMMIT").execute(conn).await.map(drop).map_err(broken)
}

async fn roll_back(conn: &mut PgConnection) -> Result<()> {
    sqlx::raw_sql("ROLLBACK").execute(conn).await.map(drop).map_err(broken)
}

/// Locks rows, waiting for whoever holds them.
pub(crate) async fn lock(conn: &mut PgConnection, ids: &[i64]) -> Result<()> {
    for sql in [hot::LOCK_LEASES, hot::LOCK_OPERATIONS] {
        sqlx::query(sql).bind(ids).execute(&mut *conn).await.map_err(broken)?;
    }
    Ok(())
}

/// Locks the rows that nobody holds; their ids.
async fn try_lock(conn: &mut PgConnection, ids: &[i64]) -> Result<Vec<i64>> {
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

/// A server that may forget what it has acknowledged is refused.
async fn check_settings(conn: &mut PgConnection) -> Result<()> {
    let settings: Vec<(String, String)> = sqlx::query_as(
        "SELECT name, setting FROM pg_settings WHERE name IN ('fsync', 'full_page_writes', 'synchronous_commit')",
    )
    .fetch_all(&mut *conn)
    .await
    .map_err(broken)?;
    let is_off = |name: &str| settings.iter().any(|(n, value)| n == name && value == "off");
    if is_off("fsync") {
        return Err(Error::Invalid("the server runs with fsync = off and may forget what it has acknowledged".into()));
    }
    if is_off("full_page_writes") {
        tracing::warn!("the server runs with full_page_writes = off: a power failure may corrupt the ledger");
    }
    Ok(())
}

async fn run_migrations(conn: &mut PgConnection, migrator: &Migrator) -> Result<()> {
    // A server with a hundred nodes waiting for the first to migrate is slow, not broken.
    sqlx::raw_sql("SET statement_timeout = 0; SET lock_timeout = 0").execute(&mut *conn).await.map_err(broken)?;
    migrator.run_direct(None, conn, false).await.map_err(|e| Error::Unavailable(format!("migrations: {e}")))
}
