//! The flush: claims and writes of a batch in one transaction.
//!
//! There is one writer, so both kinds of call come here in one lane, and share an fsync.

use std::{
    collections::{HashMap, HashSet},
    sync::Arc,
};

use semel::{
    Fence, Result, Timestamp, crash_point,
    look::Group,
    machine::{Answer, Request, Write},
    micros,
    store::{Applied, LeaseWrite},
};
use serde_json::{Value, json};
use sqlx::SqliteConnection;

use super::{READERS, Sqlite, Writer, hot};
use crate::{
    Conn,
    apply::{Changes, Tally, load_by_id, load_by_key},
    batch::{self, in_order, saved},
    codec::{encode, hex},
    connection::{broken, read_failed},
    sql::Sql,
};

impl Sqlite {
    /// Claims and writes under leases, in one commit. Claims that a reader can answer do not go to the writer.
    pub(crate) async fn flush(
        &self,
        requests: &[Arc<Request>],
        writes: &[LeaseWrite],
    ) -> Result<(Vec<Applied>, Vec<Applied>)> {
        // A reader that is away, or in use, only means that the writer has to answer.
        let mut answers = self.read_known(requests).await.unwrap_or_default();
        requests.iter().for_each(|request| self.hints.remember(request));
        if answers.is_empty() {
            return self.flush_all(requests, writes).await;
        }
        let left: Vec<usize> = (0..requests.len()).filter(|i| !answers.contains_key(i)).collect();
        let mut written = Vec::new();
        if !left.is_empty() || !writes.is_empty() {
            let requests: Vec<_> = left.iter().map(|i| requests[*i].clone()).collect();
            let claimed;
            (claimed, written) = self.flush_all(&requests, writes).await?;
            answers.extend(left.into_iter().zip(claimed));
        }
        Ok((in_order(answers, requests.len())?, written))
    }

    /// The answers to those claims whose key was seen a moment ago and that would change nothing.
    async fn read_known(&self, requests: &[Arc<Request>]) -> Result<HashMap<usize, Applied>> {
        let seen: Vec<usize> = (0..requests.len()).filter(|i| self.hints.knows(&requests[*i])).collect();
        if seen.is_empty() {
            return Ok(HashMap::new());
        }
        // Slow looks at everything must not keep claims and settles waiting.
        let mut reader = match self.readers.try_acquire() {
            Some(reader) => reader,
            None if self.readers.size() < READERS => self.readers.acquire().await.map_err(broken)?,
            None => return Ok(HashMap::new()),
        };
        let clock: i64 = sqlx::query_scalar(hot::NOW).fetch_one(&mut *reader).await.map_err(broken)?;
        self.clock.saw(clock);
        let now = Timestamp::from_micros(clock.max(self.clock.host()));
        let keys = seen.iter().map(|i| (&requests[*i].scope, &requests[*i].key));
        let rows = load_by_key(&mut Conn::Sqlite(&mut reader), &self.sql, keys).await?;
        let (_, calm) = batch::read_all(requests, &rows, seen, now);
        let row = |i: usize| rows.get(&(requests[i].scope.clone(), requests[i].key.clone())).cloned();
        Ok(calm.into_iter().map(|(i, answer)| (i, Applied { answer, operation: row(i), now })).collect())
    }

    async fn flush_all(
        &self,
        requests: &[Arc<Request>],
        writes: &[LeaseWrite],
    ) -> Result<(Vec<Applied>, Vec<Applied>)> {
        let n = i64::try_from(requests.len()).unwrap_or(i64::MAX);
        let (mut tx, last, now) = Writer::begin_and_draw(&self.writer, n, &self.clock).await?;
        let fences = (last - n + 1..=last).map(Fence).collect();
        let now = Timestamp::from_micros(now);
        let (mut tally, mut changed) = (Tally::default(), !writes.is_empty());
        let written = write_in(tx.connection(), &self.sql, writes, now, &mut tally).await?;
        let claimed = claim_in(tx.connection(), &self.sql, requests, fences, now, &mut tally, &mut changed).await?;
        // Where nothing was claimed there is nothing to make durable: replays cost no fsync.
        if changed {
            tx.count(tally.rows());
            tx.commit().await.map_err(broken)?;
            self.checkpoints.count(requests.len() + writes.len());
        } else {
            tx.roll_back().await;
        }
        Ok((claimed, written))
    }
}

async fn claim_in(
    conn: &mut SqliteConnection,
    sql: &Sql,
    requests: &[Arc<Request>],
    mut fences: Vec<Fence>,
    now: Timestamp,
    tally: &mut Tally,
    changed: &mut bool,
) -> Result<Vec<Applied>> {
    if requests.is_empty() {
        return Ok(Vec::new());
    }
    let order = batch::by_key(requests);
    let (first, rest) = batch::fold(requests, &order);
    let later = fences.split_off(first.len());
    let mut answers = claim_first(conn, requests, &first, &fences, now, tally).await?;
    answers.extend(enqueue_first(conn, requests, &first, &fences, now, tally).await?);
    crash_point!("store.claim.inserted");
    *changed |= !answers.is_empty();
    let losers = first.into_iter().zip(fences).filter(|(i, _)| !answers.contains_key(i));
    let mut claims: Vec<_> = losers.chain(rest.into_iter().zip(later)).collect();
    if !claims.is_empty() {
        claims.sort_unstable();
        let mut conn = Conn::Sqlite(conn);
        let keys = claims.iter().map(|(i, _)| (&requests[*i].scope, &requests[*i].key));
        let mut rows = load_by_key(&mut conn, sql, keys).await?;
        let mut changes = Changes::default();
        let claims = claims.iter().map(|(i, fence)| (*i, &*requests[*i], *fence));
        answers.extend(batch::claim_all(&mut changes, &mut rows, claims, now));
        saved(changes.save(&mut conn, sql).await?)?;
        *changed |= !changes.is_empty();
        crash_point!("store.claim.taken_over");
    }
    in_order(answers, requests.len())
}

/// The hot path: those of `first` whose key was not there.
async fn claim_first(
    conn: &mut SqliteConnection,
    requests: &[Arc<Request>],
    first: &[usize],
    fences: &[Fence],
    now: Timestamp,
    tally: &mut Tally,
) -> Result<HashMap<usize, Applied>> {
    let (mut operations, mut leases) = (Vec::new(), Vec::new());
    let claims: Vec<(usize, Fence)> =
        first.iter().copied().zip(fences.iter().copied()).filter(|(i, _)| requests[*i].later.is_none()).collect();
    if claims.is_empty() {
        return Ok(HashMap::new());
    }
    for (i, fence) in &claims {
        let r = &requests[*i];
        let policy = &r.policy;
        let first_look =
            policy.retention.into_iter().chain(policy.tombstone).min().map(|kept| (now + kept).as_micros());
        operations.push(json!([
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
            first_look,
            policy.pinned
        ]));
        leases.push(json!([
            fence.0,
            hex(&r.token.0),
            micros(policy.lease),
            micros(policy.max_run),
            policy.retention.map(micros),
            policy.tombstone.map(micros),
            policy.to_terms()
        ]));
    }
    let operations = Value::Array(operations).to_string();
    let made = sqlx::query(hot::CLAIM)
        .bind(&operations)
        .bind(Value::Array(leases).to_string())
        .bind(now.as_micros())
        .execute(&mut *conn)
        .await
        .map_err(broken)?;
    let made: HashSet<i64> = match usize::try_from(made.rows_affected()) {
        // The usual case: a row and a lease for each. Rows that come back one by one cost more than
        // the insert.
        Ok(n) if n == 2 * claims.len() => claims.iter().map(|(_, fence)| fence.0).collect(),
        Ok(0) => return Ok(HashMap::new()),
        _ => {
            let made: Vec<i64> =
                sqlx::query_scalar(hot::MADE).bind(operations).fetch_all(&mut *conn).await.map_err(read_failed)?;
            made.into_iter().collect()
        }
    };
    Ok(made_of(&claims, &made, requests, now, tally))
}

/// The same of enqueues.
async fn enqueue_first(
    conn: &mut SqliteConnection,
    requests: &[Arc<Request>],
    first: &[usize],
    fences: &[Fence],
    now: Timestamp,
    tally: &mut Tally,
) -> Result<HashMap<usize, Applied>> {
    let (mut enqueues, mut rows) = (Vec::new(), Vec::new());
    for (i, fence) in first.iter().copied().zip(fences.iter().copied()) {
        let r = &requests[i];
        let Some(later) = &r.later else { continue };
        enqueues.push((i, fence));
        let first_look = r.policy.retention.into_iter().chain(r.policy.tombstone).min();
        rows.push(json!([
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
            later.from(now).unwrap_or(now).as_micros(),
            first_look.map(|kept| (now + kept).as_micros()),
            later.priority.get(),
            later.keeps_policy.then(|| r.policy.to_terms())
        ]));
    }
    if enqueues.is_empty() {
        return Ok(HashMap::new());
    }
    let rows = Value::Array(rows).to_string();
    let made = sqlx::query(hot::ENQUEUE).bind(&rows).bind(now.as_micros()).execute(&mut *conn).await.map_err(broken)?;
    let made: HashSet<i64> = match usize::try_from(made.rows_affected()) {
        // The usual case: an operation and a place in the backlog for each.
        Ok(n) if n == 2 * enqueues.len() => enqueues.iter().map(|(_, fence)| fence.0).collect(),
        _ => {
            let made: Vec<i64> =
                sqlx::query_scalar(hot::MADE).bind(rows).fetch_all(&mut *conn).await.map_err(read_failed)?;
            made.into_iter().collect()
        }
    };
    Ok(made_of(&enqueues, &made, requests, now, tally))
}

/// The answers to those whose row was made.
fn made_of(
    asked: &[(usize, Fence)],
    made: &HashSet<i64>,
    requests: &[Arc<Request>],
    now: Timestamp,
    tally: &mut Tally,
) -> HashMap<usize, Applied> {
    let mut answers = HashMap::new();
    for (i, fence) in asked.iter().filter(|(_, fence)| made.contains(&fence.0)) {
        let applied = batch::first_claim(&requests[*i], *fence, now);
        tally.add(None, applied.operation.as_ref(), None, now);
        answers.insert(*i, applied);
    }
    answers
}

pub(super) async fn write_in(
    conn: &mut SqliteConnection,
    sql: &Sql,
    writes: &[LeaseWrite],
    now: Timestamp,
    tally: &mut Tally,
) -> Result<Vec<Applied>> {
    if writes.is_empty() {
        return Ok(Vec::new());
    }
    let mut answers = complete(conn, writes, now, tally).await?;
    crash_point!("store.write.completed");
    let rest: Vec<usize> = (0..writes.len()).filter(|i| !answers.contains_key(i)).collect();
    if !rest.is_empty() {
        let ids: Vec<i64> = rest.iter().map(|i| writes[*i].id).collect();
        let mut conn = Conn::Sqlite(conn);
        let mut rows = load_by_id(&mut conn, sql, &ids).await?;
        let mut changes = Changes::default();
        let list = rest.iter().map(|i| (*i, writes[*i].clone()));
        answers.extend(batch::write_all(&mut changes, &mut rows, list, now));
        saved(changes.save(&mut conn, sql).await?)?;
    }
    crash_point!("store.write.saved");
    in_order(answers, writes.len())
}

/// A plain completion in a caller's transaction, if it is one: when it was made, and what to count.
pub(super) async fn complete_one(
    conn: &mut SqliteConnection,
    write: &LeaseWrite,
    host_clock: i64,
) -> Result<Option<(Timestamp, Vec<Value>)>> {
    let LeaseWrite { id, fence, write: Write::Complete(outcome) } = write else { return Ok(None) };
    let rows: Vec<(String, String, String, String, String, i64, i64)> = sqlx::query_as(hot::COMPLETE_ONE)
        .bind(id)
        .bind(fence.0)
        .bind(encode(&outcome.body))
        .bind(outcome.kept)
        .bind(host_clock)
        .fetch_all(conn)
        .await
        .map_err(read_failed)?;
    let done = rows.into_iter().next().map(|(tenant, service, kind, label1, label2, claimed_at, now)| {
        let (now, mut tally) = (Timestamp::from_micros(now), Tally::default());
        tally.completed(Group { tenant, service, kind, label1, label2 }, Timestamp::from_micros(claimed_at), now);
        (now, tally.rows())
    });
    Ok(done)
}

/// Id, fence, group, and when it was claimed.
type CompletedRow = (i64, i64, String, String, String, String, String, i64);

/// Completions of a batch that need nothing but the hot statements.
async fn complete(
    conn: &mut SqliteConnection,
    writes: &[LeaseWrite],
    now: Timestamp,
    tally: &mut Tally,
) -> Result<HashMap<usize, Applied>> {
    // By fence too: a zombie's completion may be in the same batch. Of two by the same lease the
    // first settles it, and the second is told so by the machine.
    let mut asked: HashMap<(i64, i64), usize> = HashMap::new();
    let mut done = Vec::new();
    for (i, write) in writes.iter().enumerate() {
        let Write::Complete(outcome) = &write.write else { continue };
        if let std::collections::hash_map::Entry::Vacant(place) = asked.entry((write.id, write.fence.0)) {
            place.insert(i);
            done.push(json!([write.id, write.fence.0, hex(&encode(&outcome.body)), outcome.kept]));
        }
    }
    if done.is_empty() {
        return Ok(HashMap::new());
    }
    let rows: Vec<CompletedRow> = sqlx::query_as(hot::COMPLETE)
        .bind(Value::Array(done).to_string())
        .bind(now.as_micros())
        .fetch_all(&mut *conn)
        .await
        .map_err(read_failed)?;
    let mut answers = HashMap::new();
    for (id, fence, tenant, service, kind, label1, label2, claimed_at) in rows {
        let Some(i) = asked.remove(&(id, fence)) else { continue };
        tally.completed(Group { tenant, service, kind, label1, label2 }, Timestamp::from_micros(claimed_at), now);
        answers.insert(i, Applied { answer: Answer::Settled { successor: false }, operation: None, now });
    }
    Ok(answers)
}
