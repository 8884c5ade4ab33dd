//! Writes under leases: completions by the hot statement, the rest by the general path.
//!
//! A batch waits for a locked row a short moment only. Then the free rows are written, and the writes of the locked
//! ones are answered [`Answer::Busy`]; until they succeed, they are sent separately, so that later batches do not wait
//! at all.

use std::{
    collections::{HashMap, HashSet},
    time::{Duration, Instant},
};

use parking_lot::Mutex;
use semel::{
    Fence, Operation, Outcome, Result, Timestamp, crash_point,
    machine::{Answer, Write},
    store::{Applied, LeaseWrite},
};
use sqlx::PgConnection;

use super::{Postgres, begin, commit, hot, lock, lock_rows, roll_back, try_lock};
use crate::{
    Conn,
    apply::{Changes, load_by_id},
    batch::{self, in_order, saved},
    codec::encode,
    connection::{broken, is_held, is_lock_timeout},
};

/// Settings of the connections for writes under leases. Another write of the row ends within milliseconds; a longer
/// lock belongs to a peer that was cut off or is frozen.
pub(super) const SETUP: &str = "SET enable_seqscan = off; SET enable_hashjoin = off; SET enable_mergejoin = off;
     SET jit = off; SET plan_cache_mode = force_generic_plan; SET lock_timeout = '250ms'";

/// Begins a transaction that does not wait for locks: a statement that would have to fails.
const BEGIN_WITHOUT_WAITING: &str = "BEGIN; SET LOCAL lock_timeout = '1ms'";

/// Into how many parts writes are split, and for how long at most.
const PARTS: usize = 8;
const APART: Duration = Duration::from_millis(400);

impl Postgres {
    pub(crate) async fn write(&self, writes: &[LeaseWrite]) -> Result<Vec<Applied>> {
        self.settles.answered(self.write_batch(writes)).await
    }

    async fn write_batch(&self, writes: &[LeaseWrite]) -> Result<Vec<Applied>> {
        let mut order: Vec<usize> = (0..writes.len()).collect();
        order.sort_by_key(|i| writes[*i].id);
        let (mut slow, quick): (Vec<usize>, Vec<usize>) =
            order.into_iter().partition(|i| self.locked.has(writes[*i].id));
        let mut seat = self.settles.take().await?;
        let mut answers = HashMap::new();
        if !quick.is_empty() && !self.write_quickly(&mut seat, writes, &quick, &mut answers).await? {
            slow.extend(quick.into_iter().filter(|i| !answers.contains_key(i)));
        }
        if !slow.is_empty() {
            slow.sort_by_key(|i| writes[*i].id);
            answers.extend(self.write_unlocked(&mut seat, writes, &slow).await?);
        }
        seat.leave();
        in_order(answers, writes.len())
    }

    /// Writes as if no row were locked. False if a row stayed locked: then only what `answers` has is written.
    async fn write_quickly(
        &self,
        seat: &mut PgConnection,
        writes: &[LeaseWrite],
        order: &[usize],
        answers: &mut HashMap<usize, Applied>,
    ) -> Result<bool> {
        match complete(seat, writes, order, self.clock.fixed()).await {
            Ok(completed) => answers.extend(completed),
            Err(error) if is_lock_timeout(&error) => return Ok(false),
            Err(error) => return Err(broken(error)),
        }
        crash_point!("store.write.completed");
        let rest: Vec<usize> = order.iter().copied().filter(|i| !answers.contains_key(i)).collect();
        if rest.is_empty() {
            return Ok(true);
        }
        begin(seat).await?;
        match lock_rows(seat, &ids(writes, &rest)).await {
            Ok(()) => {}
            Err(error) if is_lock_timeout(&error) => {
                roll_back(seat).await?;
                return Ok(false);
            }
            Err(error) => return Err(broken(error)),
        }
        let (now, _) = self.draw(seat, 1).await?;
        match self.write_locked(seat, writes, &rest, now).await {
            Ok(written) => answers.extend(written),
            // A row of a service that follows one of them.
            Err(error) if is_held(&error) => {
                roll_back(seat).await?;
                return Ok(false);
            }
            Err(error) => return Err(error),
        }
        crash_point!("store.write.saved");
        commit(seat).await?;
        Ok(true)
    }

    /// Writes to the rows that no other transaction has locked. The others are busy. A row of a service that follows an
    /// operation can be locked, too: the database does not say which, so the writes are split until they are separate.
    async fn write_unlocked(
        &self,
        seat: &mut PgConnection,
        writes: &[LeaseWrite],
        order: &[usize],
    ) -> Result<HashMap<usize, Applied>> {
        let (mut answers, mut busy) = (HashMap::new(), HashSet::new());
        let (until, mut parts) = (Instant::now() + APART, vec![order.to_vec()]);
        while let Some(part) = parts.pop() {
            match self.write_free(seat, writes, &part).await {
                Ok((written, locked)) => {
                    answers.extend(written);
                    busy.extend(locked);
                }
                Err(error) if is_held(&error) => {
                    roll_back(seat).await?;
                    if part.len() == 1 || Instant::now() >= until {
                        busy.extend(ids(writes, &part));
                    } else {
                        parts.extend(part.chunks(part.len().div_ceil(PARTS)).rev().map(<[usize]>::to_vec));
                    }
                }
                Err(error) => return Err(error),
            }
        }
        self.locked.update(&ids(writes, order), &busy);
        for i in order.iter().filter(|i| busy.contains(&writes[**i].id)) {
            answers.entry(*i).or_insert_with(|| Applied::busy(None));
        }
        Ok(answers)
    }

    /// Writes to the free rows of a batch, in one transaction; returns the answers, and the operations that are not
    /// free.
    async fn write_free(
        &self,
        seat: &mut PgConnection,
        writes: &[LeaseWrite],
        order: &[usize],
    ) -> Result<(HashMap<usize, Applied>, HashSet<i64>)> {
        let asked = ids(writes, order);
        sqlx::raw_sql(BEGIN_WITHOUT_WAITING).execute(&mut *seat).await.map_err(broken)?;
        let mine: HashSet<i64> = try_lock(seat, &asked).await?.into_iter().collect();
        let there: Vec<i64> =
            sqlx::query_scalar(hot::THERE).bind(&asked).fetch_all(&mut *seat).await.map_err(broken)?;
        // A deleted row is not busy: its lease is lost.
        let busy: HashSet<i64> = there.into_iter().filter(|id| !mine.contains(id)).collect();
        let free: Vec<usize> = order.iter().copied().filter(|i| !busy.contains(&writes[*i].id)).collect();
        let mut answers = complete(seat, writes, &free, self.clock.fixed()).await.map_err(broken)?;
        let (now, _) = self.draw(seat, 1).await?;
        let rest: Vec<usize> = free.into_iter().filter(|i| !answers.contains_key(i)).collect();
        answers.extend(self.write_locked(seat, writes, &rest, now).await?);
        commit(seat).await?;
        Ok((answers, busy))
    }

    async fn write_locked(
        &self,
        seat: &mut PgConnection,
        writes: &[LeaseWrite],
        order: &[usize],
        now: Timestamp,
    ) -> Result<Vec<(usize, Applied)>> {
        let mut rows = load_by_id(&mut Conn::Postgres(seat), &self.sql, &ids(writes, order)).await?;
        let mut changes = Changes::default();
        let list = order.iter().map(|i| (*i, writes[*i].clone()));
        let answers = batch::write_all(&mut changes, &mut rows, list, now);
        saved(changes.save(&mut Conn::Postgres(seat), &self.sql).await?)?;
        Ok(answers)
    }

    /// The fenced completion as text, to be sent with a commit.
    pub(crate) fn complete_sql(&self, held: &Operation, outcome: &Outcome) -> String {
        let (id, fence, kept) = (held.id, held.fence, outcome.kept);
        let body = hex::encode(encode(&outcome.body));
        let fixed = self.clock.fixed().map_or_else(|| "NULL".to_owned(), |fixed| fixed.to_string());
        format!("SELECT semel_complete({id}, {fence}, decode('{body}', 'hex'), {kept}, {fixed})")
    }

    /// A write under a lease in a caller's transaction.
    pub(crate) async fn write_in(&self, conn: &mut PgConnection, write: LeaseWrite) -> Result<Applied> {
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
        if let LeaseWrite { id, fence, write: write @ (Write::Progress(data) | Write::Checkpoint(data)) } = &writes[0] {
            let done: Option<i64> = sqlx::query_scalar(hot::CHECKPOINT_ONE)
                .bind(id)
                .bind(fence.0)
                .bind(encode(data))
                .bind(self.clock.fixed())
                .bind(matches!(write, Write::Progress(_)))
                .fetch_optional(&mut *conn)
                .await
                .map_err(broken)?;
            if let Some(now) = done.map(Timestamp::from_micros) {
                return Ok(Applied { answer: Answer::Written, operation: None, now });
            }
        }
        // Lost, or not plain: the state machine says what it means.
        lock(conn, &[writes[0].id]).await?;
        let (now, _) = self.draw(conn, 1).await?;
        let mut answers = self.write_locked(conn, &writes, &[0], now).await?;
        Ok(answers.remove(0).1)
    }
}

/// Completions of a batch that the hot statement can make.
async fn complete(
    conn: &mut PgConnection,
    writes: &[LeaseWrite],
    order: &[usize],
    fixed: Option<i64>,
) -> Result<HashMap<usize, Applied>, sqlx::Error> {
    // Of two completions by the same lease the first settles it, and the state machine answers the second: its outcome may
    // be another one.
    let mut seen = HashSet::new();
    let plain = order.iter().filter_map(|i| match &writes[*i].write {
        Write::Complete(outcome) => Some((*i, &writes[*i], outcome)),
        _ => None,
    });
    let plain: Vec<_> = plain.filter(|(_, write, _)| seen.insert((write.id, write.fence))).collect();
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
        .await?;
    // By fence too: the completion of a former owner may be in the same batch.
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

fn ids(writes: &[LeaseWrite], order: &[usize]) -> Vec<i64> {
    order.iter().map(|i| writes[*i].id).collect()
}

/// Operations whose rows were recently locked. Writes to them are sent separately, and do not wait.
#[derive(Default)]
pub(super) struct Locked(Mutex<HashMap<i64, Instant>>);

impl Locked {
    /// How long an operation is remembered without another write: its writer has given up.
    const REMEMBERED: Duration = Duration::from_secs(10);

    fn has(&self, id: i64) -> bool {
        self.0.lock().contains_key(&id)
    }

    /// Records which of these were locked.
    fn update(&self, asked: &[i64], busy: &HashSet<i64>) {
        let (now, mut locked) = (Instant::now(), self.0.lock());
        for id in asked {
            match busy.contains(id) {
                true => locked.insert(*id, now),
                false => locked.remove(id),
            };
        }
        locked.retain(|_, seen| now.duration_since(*seen) < Self::REMEMBERED);
    }
}
