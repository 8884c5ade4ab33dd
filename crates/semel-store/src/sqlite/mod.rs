//! The ledger in a SQLite file.

mod file;
mod hot;
mod writer;

use std::{collections::HashMap, sync::Arc};

use semel::{
    Error, Fence, Operation, Result, Timestamp, crash_point,
    look::{Group, bucket},
    machine::{Answer, Event, Request, Write},
    micros,
    store::{Applied, Decision, LeaseWrite, Swept},
};
use serde_json::{Value, json};
use sqlx::{ConnectOptions as _, Connection as _, SqliteConnection, SqlitePool, sqlite::SqlitePoolOptions};
use tokio::sync::Mutex;

#[cfg(test)]
pub(crate) use self::hot::ALL as HOT;
pub(crate) use self::writer::{WriteTx, Writer};
use crate::{
    Conn,
    apply::{Changes, load_by_id, load_by_key},
    batch::{self, decided, in_order, late_renewal, note_late, saved, swept_rows},
    clock::Clock,
    codec::{encode, hex},
    connection::broken,
    counters, rows,
    sql::{Dialect, Sql},
};

pub(crate) struct Sqlite {
    pub(crate) writer: Arc<Mutex<Writer>>,
    /// Readers do not wait for the writer, nor it for them.
    pub(crate) readers: SqlitePool,
    pub(crate) sql: Sql,
    clock: Clock,
}

impl Sqlite {
    pub(crate) async fn open(url: &str, clock: Clock) -> Result<Self> {
        let path = file::path(url)?;
        file::check_file_system(&path)?;
        let options = file::options(&path);
        let mut connection = options
            .connect()
            .await
            .map_err(|e| Error::Unavailable(format!("{} cannot be opened: {e}", path.display())))?;
        migrate(&mut connection).await?;
        let readers = SqlitePoolOptions::new().max_connections(4).connect_lazy_with(options.read_only(true));
        Ok(Self { writer: Writer::new(connection), readers, sql: Sql::new(Dialect::Sqlite), clock })
    }

    pub(crate) async fn now(&self) -> Result<Timestamp> {
        let seen: i64 = sqlx::query_scalar(hot::NOW).fetch_one(&self.readers).await.map_err(broken)?;
        Ok(Timestamp::from_micros(seen.max(self.clock.host())))
    }

    pub(crate) async fn claim(&self, requests: &[Arc<Request>]) -> Result<Vec<Applied>> {
        let order = batch::by_key(requests);
        let (first, mut rest) = batch::fold(requests, &order);
        let mut tx = Writer::begin(&self.writer).await?;
        let (now, mut fences) = self.draw(tx.connection(), requests.len()).await?;
        let later = fences.split_off(first.len());
        let mut answers = claim_first(tx.connection(), &self.sql, requests, &first, &fences, now).await?;
        crash_point!("store.claim.inserted");
        let mut changed = !answers.is_empty();
        let losers: Vec<_> =
            first.iter().zip(fences).filter(|(i, _)| !answers.contains_key(i)).map(|(i, f)| (*i, f)).collect();
        let mut claims: Vec<_> = losers.into_iter().chain(rest.drain(..).zip(later)).collect();
        if !claims.is_empty() {
            claims.sort_unstable();
            let mut conn = Conn::Sqlite(tx.connection());
            let keys = claims.iter().map(|(i, _)| (&requests[*i].scope, &requests[*i].key));
            let mut rows = load_by_key(&mut conn, &self.sql, keys).await?;
            let mut changes = Changes::default();
            let claims = claims.iter().map(|(i, fence)| (*i, &*requests[*i], *fence));
            answers.extend(batch::claim_all(&mut changes, &mut rows, claims, now));
            saved(changes.save(&mut conn, &self.sql).await?)?;
            changed |= !changes.is_empty();
            crash_point!("store.claim.taken_over");
        }
        // Where nothing was claimed there is nothing to make durable: replays cost no fsync.
        if changed {
            tx.commit().await.map_err(broken)?;
        } else {
            tx.roll_back().await;
        }
        in_order(answers, requests.len())
    }

    pub(crate) async fn write(&self, writes: &[LeaseWrite]) -> Result<Vec<Applied>> {
        let mut tx = Writer::begin(&self.writer).await?;
        let answers = self.write_in(tx.connection(), writes).await?;
        crash_point!("store.write.saved");
        tx.commit().await.map_err(broken)?;
        Ok(answers)
    }

    async fn write_in(&self, conn: &mut SqliteConnection, writes: &[LeaseWrite]) -> Result<Vec<Applied>> {
        let (now, _) = self.draw(conn, 0).await?;
        let mut answers = complete(conn, &self.sql, writes, now).await?;
        crash_point!("store.write.completed");
        let rest: Vec<usize> = (0..writes.len()).filter(|i| !answers.contains_key(i)).collect();
        if !rest.is_empty() {
            let ids: Vec<i64> = rest.iter().map(|i| writes[*i].id).collect();
            let mut conn = Conn::Sqlite(conn);
            let mut rows = load_by_id(&mut conn, &self.sql, &ids).await?;
            let mut changes = Changes::default();
            let list = rest.iter().map(|i| (*i, writes[*i].clone()));
            answers.extend(batch::write_all(&mut changes, &mut rows, list, now));
            saved(changes.save(&mut conn, &self.sql).await?)?;
        }
        in_order(answers, writes.len())
    }

    pub(crate) async fn renew(&self, leases: &[(i64, Fence)]) -> Result<Vec<Answer>> {
        let mut tx = Writer::begin(&self.writer).await?;
        let conn = tx.connection();
        let (now, _) = self.draw(conn, 0).await?;
        let asked: Vec<Value> = leases.iter().map(|(id, fence)| json!([id, fence.0])).collect();
        let held: Vec<(i64, i64, i64, i64, i64)> = sqlx::query_as(hot::HELD)
            .bind(Value::Array(asked).to_string())
            .bind(now.as_micros())
            .fetch_all(&mut *conn)
            .await
            .map_err(broken)?;
        let mut late = Vec::new();
        let mut deadlines = HashMap::new();
        let mut renewed = Vec::new();
        for (id, fence, before, run_until, term) in held {
            let deadline = (now.as_micros() + term).min(run_until).max(before);
            renewed.push(json!([id, fence, deadline]));
            deadlines.insert((id, Fence(fence)), Timestamp::from_micros(deadline));
            late.extend(late_renewal(Fence(fence), before, run_until, term, now.as_micros()).map(|note| (id, note)));
        }
        sqlx::query(hot::RENEW).bind(Value::Array(renewed).to_string()).execute(&mut *conn).await.map_err(broken)?;
        // The refused ones are told why, and their late write is part of the story.
        let lost: Vec<_> = leases.iter().filter(|lease| !deadlines.contains_key(lease)).collect();
        let mut conn = Conn::Sqlite(conn);
        let mut rows = load_by_id(&mut conn, &self.sql, &lost.iter().map(|(id, _)| *id).collect::<Vec<_>>()).await?;
        let list = lost.iter().map(|(id, fence)| (0, LeaseWrite { id: *id, fence: *fence, write: Write::Renew }));
        let mut changes = Changes::default();
        batch::write_all(&mut changes, &mut rows, list, now);
        saved(changes.save(&mut conn, &self.sql).await?)?;
        note_late(&mut conn, &self.sql, late).await?;
        tx.commit().await.map_err(broken)?;
        let answer = |lease: &(i64, Fence)| {
            deadlines.get(lease).map_or(Answer::Lost, |deadline| Answer::Renewed { deadline: *deadline })
        };
        Ok(leases.iter().map(answer).collect())
    }

    pub(crate) async fn decide(&self, id: i64, decision: Decision, actor: &str, reason: &str) -> Result<Applied> {
        let mut tx = Writer::begin(&self.writer).await?;
        let (now, fences) = self.draw(tx.connection(), 1).await?;
        let mut conn = Conn::Sqlite(tx.connection());
        let rows = load_by_id(&mut conn, &self.sql, &[id]).await?;
        let mut changes = Changes::default();
        let applied = changes.step(rows.get(&id), &decided(decision, fences[0], actor, reason), now);
        saved(changes.save(&mut conn, &self.sql).await?)?;
        tx.commit().await.map_err(broken)?;
        Ok(applied)
    }

    /// The fenced completion in a caller's transaction.
    pub(crate) async fn complete_in(&self, conn: &mut SqliteConnection, write: LeaseWrite) -> Result<Applied> {
        Ok(self.write_in(conn, &[write]).await?.remove(0))
    }

    /// A claim in the transaction of its effect.
    pub(crate) async fn claim_in(&self, conn: &mut SqliteConnection, request: &Request) -> Result<Applied> {
        let (now, fences) = self.draw(conn, 1).await?;
        let mut conn = Conn::Sqlite(conn);
        let key = std::iter::once((&request.scope, &request.key));
        let rows = load_by_key(&mut conn, &self.sql, key).await?;
        let mut changes = Changes::default();
        let applied = changes.step(rows.values().next(), &Event::ClaimInline { request, fence: fences[0] }, now);
        saved(changes.save(&mut conn, &self.sql).await?)?;
        Ok(applied)
    }

    /// Reads a row when everybody who is at it has finished: when it is our turn to write.
    pub(crate) async fn read_back(&self, id: i64) -> Result<Option<Operation>> {
        let mut tx = Writer::begin(&self.writer).await?;
        let mut rows = load_by_id(&mut Conn::Sqlite(tx.connection()), &self.sql, &[id]).await?;
        tx.roll_back().await;
        Ok(rows.remove(&id))
    }

    pub(crate) async fn sweep(&self, limit: u32) -> Result<Swept> {
        let mut swept = Swept::default();
        for find in [self.sql.find_lapsed, self.sql.find_due] {
            let lapse = find == self.sql.find_lapsed;
            // Most rounds find nothing; those do not take the writer.
            let now = self.now().await?;
            let ids = find_ids(&self.readers, find, now, limit).await?;
            swept.more |= ids.len() >= limit as usize;
            if ids.is_empty() {
                continue;
            }
            let mut tx = Writer::begin(&self.writer).await?;
            let (now, fences) = self.draw(tx.connection(), ids.len()).await?;
            let mut conn = Conn::Sqlite(tx.connection());
            let rows = load_by_id(&mut conn, &self.sql, &ids).await?;
            let mut changes = Changes::default();
            swept_rows(&mut swept, &mut changes, rows, fences, now, lapse);
            saved(changes.save(&mut conn, &self.sql).await?)?;
            match lapse {
                true => crash_point!("sweep.lapsed"),
                false => crash_point!("sweep.tended"),
            }
            tx.commit().await.map_err(broken)?;
        }
        self.fold(&mut swept, limit).await?;
        Ok(swept)
    }

    async fn fold(&self, swept: &mut Swept, limit: u32) -> Result<()> {
        let any: Option<i64> = sqlx::query_scalar("SELECT id FROM semel_deltas LIMIT 1")
            .fetch_optional(&self.readers)
            .await
            .map_err(broken)?;
        if any.is_none() {
            return Ok(());
        }
        let mut tx = Writer::begin(&self.writer).await?;
        let taken: Vec<counters::CountRow> =
            sqlx::query_as(hot::TAKE_DELTAS).bind(i64::from(limit)).fetch_all(tx.connection()).await.map_err(broken)?;
        swept.folded += taken.len() as u64;
        swept.more |= taken.len() >= limit as usize;
        Conn::Sqlite(tx.connection()).batch(self.sql.fold_counters, &counters::fold(taken)).await?;
        crash_point!("sweep.folded");
        tx.commit().await.map_err(broken)
    }

    async fn draw(&self, conn: &mut SqliteConnection, n: usize) -> Result<(Timestamp, Vec<Fence>)> {
        let n = i64::try_from(n).unwrap_or(i64::MAX);
        let (last, now): (i64, i64) =
            sqlx::query_as(hot::DRAW).bind(n).bind(self.clock.host()).fetch_one(conn).await.map_err(broken)?;
        Ok((Timestamp::from_micros(now), (last - n + 1..=last).map(Fence).collect()))
    }
}

/// Runs the migrations once, however many processes open the file together: the write lock is
/// taken first, and whoever comes second finds them done.
async fn migrate(connection: &mut SqliteConnection) -> Result<()> {
    let mut migrator = sqlx::migrate!("migrations/sqlite");
    migrator.dangerous_set_table_name("semel_migrations");
    let mut tx = connection.begin_with("BEGIN IMMEDIATE").await.map_err(broken)?;
    migrator.run_direct(None, &mut *tx, false).await.map_err(|e| Error::Unavailable(format!("migrations: {e}")))?;
    tx.commit().await.map_err(broken)
}

async fn find_ids(readers: &SqlitePool, find: &'static str, now: Timestamp, limit: u32) -> Result<Vec<i64>> {
    let query = sqlx::query_scalar(find).bind(now.as_micros()).bind(i64::from(limit));
    query.fetch_all(readers).await.map_err(broken)
}

/// The hot path: those of `first` whose key was not there.
async fn claim_first(
    conn: &mut SqliteConnection,
    sql: &Sql,
    requests: &[Arc<Request>],
    first: &[usize],
    fences: &[Fence],
    now: Timestamp,
) -> Result<HashMap<usize, Applied>> {
    let row = |(i, fence): (&usize, &Fence)| {
        let r = &requests[*i];
        let first_look =
            r.policy.retention.into_iter().chain(r.policy.tombstone).min().map(|kept| (now + kept).as_micros());
        json!([
            fence.0,
            r.scope.tenant(),
            r.scope.service(),
            r.scope.kind(),
            r.key.as_str(),
            hex(r.fingerprint.as_bytes()),
            r.order,
            r.payload.as_ref().map(|payload| hex(&encode(payload))),
            r.labels.0[0],
            r.labels.0[1],
            r.labels.0[2],
            r.labels.0[3],
            r.owner,
            first_look
        ])
    };
    let asked: Vec<Value> = first.iter().zip(fences).map(row).collect();
    let asked = Value::Array(asked).to_string();
    let made = sqlx::query(hot::CLAIM).bind(&asked).bind(now.as_micros()).execute(&mut *conn).await.map_err(broken)?;
    let made: std::collections::HashSet<i64> = match usize::try_from(made.rows_affected()) {
        // The usual case. Rows that come back one by one cost more than the insert.
        Ok(n) if n == first.len() => fences.iter().map(|fence| fence.0).collect(),
        Ok(0) => return Ok(HashMap::new()),
        _ => {
            let made: Vec<i64> =
                sqlx::query_scalar(hot::MADE).bind(asked).fetch_all(&mut *conn).await.map_err(broken)?;
            made.into_iter().collect()
        }
    };
    let (mut leases, mut answers, mut tally) = (Vec::new(), HashMap::new(), crate::apply::Tally::default());
    for (i, fence) in first.iter().zip(fences).filter(|(_, fence)| made.contains(&fence.0)) {
        let (r, policy) = (&requests[*i], &requests[*i].policy);
        leases.push(json!([
            fence.0,
            hex(&r.token.0),
            micros(policy.lease),
            micros(policy.max_run),
            policy.retention.map(micros),
            policy.tombstone.map(micros),
            policy.to_terms()
        ]));
        let applied = batch::first_claim(r, *fence, now);
        tally.add(None, applied.operation.as_ref(), now);
        answers.insert(*i, applied);
    }
    let leases = Value::Array(leases).to_string();
    sqlx::query(hot::LEASE).bind(leases).bind(now.as_micros()).execute(&mut *conn).await.map_err(broken)?;
    Conn::Sqlite(conn).batch(sql.insert_deltas, &tally.rows()).await?;
    Ok(answers)
}

/// Completions of a batch that need nothing but the hot statements.
async fn complete(
    conn: &mut SqliteConnection,
    sql: &Sql,
    writes: &[LeaseWrite],
    now: Timestamp,
) -> Result<HashMap<usize, Applied>> {
    let asked = writes.iter().filter(|write| matches!(write.write, Write::Complete(_)));
    let asked: Vec<Value> = asked.map(|write| json!([write.id, write.fence.0])).collect();
    if asked.is_empty() {
        return Ok(HashMap::new());
    }
    let ended: Vec<(i64, i64, Option<i64>, Option<i64>)> = sqlx::query_as(hot::END_LEASES)
        .bind(Value::Array(asked).to_string())
        .fetch_all(&mut *conn)
        .await
        .map_err(broken)?;
    // By fence too: a zombie's completion may be in the same batch.
    let mut ended: HashMap<(i64, Fence), (Option<i64>, Option<i64>)> = ended
        .into_iter()
        .map(|(id, fence, retention, tombstone)| ((id, Fence(fence)), (retention, tombstone)))
        .collect();
    let (mut done, mut answers) = (Vec::new(), HashMap::new());
    for (i, write) in writes.iter().enumerate() {
        // The lease of a batch's second completion of the same operation has just gone.
        let Write::Complete(outcome) = &write.write else { continue };
        let Some((retention, tombstone)) = ended.remove(&(write.id, write.fence)) else { continue };
        done.push(json!([write.id, write.fence.0, retention, tombstone, hex(&encode(&outcome.body)), outcome.kept]));
        answers.insert(i, Applied { answer: Answer::Settled { successor: false }, operation: None, now });
    }
    let rows: Vec<(i64, String, String, String, String, String, i64)> = sqlx::query_as(hot::COMPLETE)
        .bind(Value::Array(done).to_string())
        .bind(now.as_micros())
        .fetch_all(&mut *conn)
        .await
        .map_err(broken)?;
    saved(rows.len() == answers.len())?;
    let mut counts: std::collections::BTreeMap<(Group, i32), i64> = std::collections::BTreeMap::new();
    for (_, tenant, service, kind, label1, label2, claimed_at) in rows {
        let took = bucket(now.since(Timestamp::from_micros(claimed_at)));
        *counts.entry((Group { tenant, service, kind, label1, label2 }, took)).or_default() += 1;
    }
    let delta = |((group, took), n): (&(Group, i32), &i64)| {
        rows::delta(group, now.hour(), "processing", "completed", "", *took, *n)
    };
    let deltas: Vec<_> = counts.iter().map(delta).collect();
    Conn::Sqlite(conn).batch(sql.insert_deltas, &deltas).await?;
    Ok(answers)
}
