//! The flush: claims and writes of a batch in one transaction.
//!
//! There is one writer, so claims and writes share one lane, and an fsync.

use std::{collections::HashMap, sync::Arc};

use semel::{
    Fence, Result, Timestamp, crash_point,
    look::Group,
    machine::{Answer, Request, Write},
    store::{Applied, LeaseWrite},
};
use serde_json::{Value, json};
use sqlx::SqliteConnection;

use super::{READERS, Sqlite, Writer, hot, inserts};
use crate::{
    Conn,
    apply::{Changes, Tally, load_by_id, load_by_key},
    batch::{self, in_order, saved},
    codec::encode,
    connection::{broken, read_failed},
    project::Tables,
};

impl Sqlite {
    /// Claims and writes under leases, in one commit. Claims that a reader can answer do not use the writer.
    pub(crate) async fn flush(
        &self,
        requests: &[Arc<Request>],
        writes: &[LeaseWrite],
    ) -> Result<(Vec<Applied>, Vec<Applied>)> {
        // If no reader is available, the writer answers.
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

    /// The answers to claims of recently seen keys that would change nothing.
    async fn read_known(&self, requests: &[Arc<Request>]) -> Result<HashMap<usize, Applied>> {
        let seen: Vec<usize> = (0..requests.len()).filter(|i| self.hints.knows(&requests[*i])).collect();
        if seen.is_empty() {
            return Ok(HashMap::new());
        }
        // Slow listings must not delay claims and settles.
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
        // Without changes there is nothing to make durable: replays cost no fsync.
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
    sql: &Tables,
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
    let new = first.iter().copied().zip(fences.iter().copied());
    let mut answers = inserts::all(conn, requests, &sql.projections, new, now, tally).await?;
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

pub(super) async fn write_in(
    conn: &mut SqliteConnection,
    sql: &Tables,
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

/// A plain completion in a caller's transaction, if it is one: its time, and what to count.
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

/// Id, fence, group, and the time of the claim.
type CompletedRow = (i64, i64, String, String, String, String, String, i64);

/// Completions of a batch that the hot statements can make.
async fn complete(
    conn: &mut SqliteConnection,
    writes: &[LeaseWrite],
    now: Timestamp,
    tally: &mut Tally,
) -> Result<HashMap<usize, Applied>> {
    // By fence too: the completion of a former owner may be in the same batch. Of two by the same lease the first
    // settles it, and the state machine answers the second.
    let mut asked: HashMap<(i64, i64), usize> = HashMap::new();
    let mut done = Vec::new();
    for (i, write) in writes.iter().enumerate() {
        let Write::Complete(outcome) = &write.write else { continue };
        if let std::collections::hash_map::Entry::Vacant(place) = asked.entry((write.id, write.fence.0)) {
            place.insert(i);
            done.push(json!([write.id, write.fence.0, hex::encode(encode(&outcome.body)), outcome.kept]));
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
