//! What the holder of a lease writes: completions by the hot statement, the rest by the general path.
//!
//! A batch waits for a locked row a short moment only. Then the rows that are free are written, and the writes of the
//! locked ones are answered [`Answer::Busy`]; until they succeed, they go apart, so that later batches do not wait at all.

use std::{
    collections::{HashMap, HashSet},
    sync::{Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

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
    codec::{encode, hex},
    connection::{broken, is_lock_timeout},
};

/// Settings of the connections for writes under leases. Another write of the row is over within milliseconds; what has it locked
/// for longer is a peer that was cut off or is frozen.
pub(super) const SETUP: &str = "SET enable_seqscan = off; SET enable_hashjoin = off; SET enable_mergejoin = off;
     SET jit = off; SET plan_cache_mode = force_generic_plan; SET lock_timeout = '250ms'";

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

    /// Writes as if no row were locked. False if one was, for longer than is worth waiting: what `answers` has by then
    /// is written, and nothing else.
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
        answers.extend(self.write_locked(seat, writes, &rest, now).await?);
        crash_point!("store.write.saved");
        commit(seat).await?;
        Ok(true)
    }

    /// Writes to the rows that no other transaction has locked. Those of the others are busy.
    async fn write_unlocked(
        &self,
        seat: &mut PgConnection,
        writes: &[LeaseWrite],
        order: &[usize],
    ) -> Result<HashMap<usize, Applied>> {
        let asked = ids(writes, order);
        begin(seat).await?;
        let mine: HashSet<i64> = try_lock(seat, &asked).await?.into_iter().collect();
        let there: Vec<i64> =
            sqlx::query_scalar(hot::THERE).bind(&asked).fetch_all(&mut *seat).await.map_err(broken)?;
        // A row that is gone is not busy: its lease is lost.
        let busy: HashSet<i64> = there.into_iter().filter(|id| !mine.contains(id)).collect();
        let (waiting, free): (Vec<usize>, Vec<usize>) = order.iter().partition(|i| busy.contains(&writes[**i].id));
        let mut answers = complete(seat, writes, &free, self.clock.fixed()).await.map_err(broken)?;
        let (now, _) = self.draw(seat, 1).await?;
        let rest: Vec<usize> = free.into_iter().filter(|i| !answers.contains_key(i)).collect();
        answers.extend(self.write_locked(seat, writes, &rest, now).await?);
        commit(seat).await?;
        self.locked.update(&asked, &busy);
        answers.extend(waiting.into_iter().map(|i| (i, Applied::busy(None))));
        Ok(answers)
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
}

/// Completions of a batch that need nothing but the hot statement.
async fn complete(
    conn: &mut PgConnection,
    writes: &[LeaseWrite],
    order: &[usize],
    fixed: Option<i64>,
) -> Result<HashMap<usize, Applied>, sqlx::Error> {
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
        .await?;
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

fn ids(writes: &[LeaseWrite], order: &[usize]) -> Vec<i64> {
    order.iter().map(|i| writes[*i].id).collect()
}

/// Operations whose rows were found locked a moment ago. Writes to them go apart from all others, and do not wait.
#[derive(Default)]
pub(super) struct Locked(Mutex<HashMap<i64, Instant>>);

impl Locked {
    /// How long an operation is remembered that is not asked for again: its writer has given up.
    const REMEMBERED: Duration = Duration::from_secs(10);

    fn has(&self, id: i64) -> bool {
        self.lock().contains_key(&id)
    }

    /// Takes note of which of these were locked.
    fn update(&self, asked: &[i64], busy: &HashSet<i64>) {
        let (now, mut locked) = (Instant::now(), self.lock());
        for id in asked {
            match busy.contains(id) {
                true => locked.insert(*id, now),
                false => locked.remove(id),
            };
        }
        locked.retain(|_, seen| now.duration_since(*seen) < Self::REMEMBERED);
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<i64, Instant>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
