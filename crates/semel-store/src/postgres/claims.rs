//! Claims: new keys by the hot statement, known keys by reading first.

use std::{
    collections::{HashMap, HashSet},
    sync::Arc,
    time::{Duration, Instant},
};

use semel::{
    Error, Fence, Result, Timestamp, crash_point,
    machine::{Answer, Request},
    store::Applied,
};
use sqlx::PgConnection;

use super::{CLAIMS_WAIT, Postgres, commit, hot, inserts, roll_back, try_lock};
use crate::{
    Conn,
    apply::{Changes, load_by_id, load_by_key},
    batch::{self, ByKey},
    connection::{broken, is_held, is_lock_timeout},
};

/// How often the general path retries if rows have changed since they were read.
pub(super) const ROUNDS: usize = 10;

/// How often a locked row is tried before its claim is answered busy. A commit may take longer; callers should not wait
/// for it in the lane.
const TRIES: usize = 3;

/// How long the hot claim waits for another transaction once it is known that one has locked a key.
const SHORT: &str = "SET lock_timeout = '20ms'";

/// Begins a transaction that does not wait for locks.
const BEGIN_SHORT: &str = "BEGIN; SET LOCAL lock_timeout = '20ms'";

/// Into how many parts claims are split, and for how long at most: enough to find a few keys among 512.
const PARTS: usize = 8;
const APART: Duration = Duration::from_millis(400);

/// Answers to a batch, by the index of the request.
type Answers = HashMap<usize, Applied>;

impl Postgres {
    pub(crate) async fn claim(&self, requests: &[Arc<Request>]) -> Result<Vec<Applied>> {
        let mut answers = Answers::new();
        match self.claim_all(requests, &mut answers).await {
            // Committed answers are returned. The rest is sent again, and recognised by its token if it was made.
            Err(error) if error.is_transient() && answers.values().any(|applied| applied.answer != Answer::Busy) => {
                tracing::debug!(%error, "only a part of a batch of claims was committed");
            }
            done => done?,
        }
        let decided = |(i, _): &(usize, _)| answers.get(i).is_some_and(|applied| applied.answer != Answer::Busy);
        requests.iter().enumerate().filter(decided).for_each(|(_, request)| self.hints.remember(request));
        Ok((0..requests.len()).map(|i| answers.remove(&i).unwrap_or_else(|| Applied::busy(None))).collect())
    }

    /// Answers claims in rounds: those of new keys by the hot statement, the others by reading first. A key can change
    /// sides in between. Answers are stored as soon as they are durable, so that a later failure loses none.
    async fn claim_all(&self, requests: &[Arc<Request>], answers: &mut Answers) -> Result<()> {
        let order = batch::by_key(requests);
        let place = |i: usize| (&requests[i].scope, &requests[i].key);
        let (first, mut known) = batch::fold(requests, &order);
        let (seen, mut new): (Vec<usize>, Vec<usize>) =
            first.into_iter().partition(|i| self.hints.knows(&requests[*i]));
        known.extend(seen);
        for _ in 0..ROUNDS {
            known.extend(self.claims.answered(self.claim_first(requests, &new, answers)).await?);
            if known.is_empty() {
                return Ok(());
            }
            let blocked: HashSet<_> = new.iter().filter(|i| is_busy(answers, **i)).map(|i| place(*i)).collect();
            known.sort_unstable();
            let absent = self.lane.answered(self.claim_known(requests, known, answers)).await?;
            let (busy, absent): (Vec<usize>, Vec<usize>) =
                absent.into_iter().partition(|i| blocked.contains(&place(*i)));
            answers.extend(busy.into_iter().map(|i| (i, Applied::busy(None))));
            let absent: HashSet<usize> = absent.into_iter().collect();
            let again: Vec<usize> = order.iter().copied().filter(|i| absent.contains(i)).collect();
            (new, known) = batch::fold(requests, &again);
            if new.is_empty() {
                return Ok(());
            }
        }
        Ok(())
    }

    /// The hot path, in key order. Returns the claims whose key exists.
    async fn claim_first(&self, requests: &[Arc<Request>], new: &[usize], answers: &mut Answers) -> Result<Vec<usize>> {
        if new.is_empty() {
            return Ok(Vec::new());
        }
        let mut seat = self.claims.take().await?;
        let known = match self.insert(&mut seat, requests, new, answers).await? {
            true => unanswered(new, answers),
            false => self.claim_apart(&mut seat, requests, new, answers).await?,
        };
        seat.leave();
        Ok(known)
    }

    /// Claims of new keys, one of which another transaction has locked; a lock timeout does not say which. An insert
    /// waits for a transaction that changes the existing row or inserts the same key, and a frozen node may hold it for
    /// long. The other claims should not wait with it.
    async fn claim_apart(
        &self,
        seat: &mut PgConnection,
        requests: &[Arc<Request>],
        new: &[usize],
        answers: &mut Answers,
    ) -> Result<Vec<usize>> {
        let until = Instant::now() + APART;
        let mut reader = self.lane.take().await?;
        let keys = new.iter().map(|i| (&requests[*i].scope, &requests[*i].key));
        let rows = load_by_key(&mut Conn::Postgres(&mut reader), &self.sql, keys).await?;
        reader.leave();
        let is_there = |i: &usize| rows.contains_key(&(requests[*i].scope.clone(), requests[*i].key.clone()));
        let (mut known, absent): (Vec<usize>, Vec<usize>) = unanswered(new, answers).into_iter().partition(is_there);
        sqlx::raw_sql(SHORT).execute(&mut *seat).await.map_err(broken)?;
        let mut parts = vec![absent];
        while let Some(part) = parts.pop() {
            if Instant::now() >= until {
                answers.extend(part.into_iter().map(|i| (i, Applied::busy(None))));
            } else if self.insert(seat, requests, &part, answers).await? {
                known.extend(unanswered(&part, answers));
            } else if let [i] = *part {
                answers.insert(i, Applied::busy(None));
            } else {
                // Still in key order: the first part is pushed last.
                parts.extend(part.chunks(part.len().div_ceil(PARTS)).rev().map(<[usize]>::to_vec));
            }
        }
        sqlx::raw_sql(CLAIMS_WAIT).execute(&mut *seat).await.map_err(broken)?;
        Ok(known)
    }

    /// Inserts claims, and answers those whose key was new. False if it would have to wait; nothing was inserted then.
    async fn insert(
        &self,
        seat: &mut PgConnection,
        requests: &[Arc<Request>],
        first: &[usize],
        answers: &mut Answers,
    ) -> Result<bool> {
        // Claims that an earlier part has inserted exist, and have their answers.
        let (later, now): (Vec<usize>, Vec<usize>) =
            unanswered(first, answers).into_iter().partition(|i| requests[*i].later.is_some());
        for (some, enqueues) in [(now, false), (later, true)] {
            let made = match enqueues {
                _ if some.is_empty() => continue,
                false => {
                    inserts::claims(requests, &some, self.clock.fixed(), &self.sql.projections)
                        .fetch_all(&mut *seat)
                        .await
                }
                true => inserts::enqueues(requests, &some, self.clock.fixed()).fetch_all(&mut *seat).await,
            };
            let made = match made {
                Err(error) if is_lock_timeout(&error) => return Ok(false),
                made => made.map_err(broken)?,
            };
            crash_point!("store.claim.inserted");
            for (i, fence, now) in made {
                let i = usize::try_from(i)
                    .ok()
                    .filter(|i| *i < requests.len())
                    .ok_or(Error::Contradiction("an unknown claim was answered"))?;
                answers.insert(i, batch::first_claim(&requests[i], Fence(fence), Timestamp::from_micros(now)));
            }
        }
        Ok(true)
    }

    /// Claims of existing keys: reads first; rows that would change are locked and decided again. Returns the claims
    /// whose key does not exist.
    async fn claim_known(
        &self,
        requests: &[Arc<Request>],
        mut todo: Vec<usize>,
        answers: &mut Answers,
    ) -> Result<Vec<usize>> {
        let (mut absent, mut seat) = (Vec::new(), self.lane.take().await?);
        for round in 0..TRIES {
            let now: i64 =
                sqlx::query_scalar(hot::NOW).bind(self.clock.fixed()).fetch_one(&mut *seat).await.map_err(broken)?;
            let now = Timestamp::from_micros(now);
            let keys = todo.iter().map(|i| (&requests[*i].scope, &requests[*i].key));
            let rows = load_by_key(&mut Conn::Postgres(&mut seat), &self.sql, keys).await?;
            let row = |i: usize| rows.get(&(requests[i].scope.clone(), requests[i].key.clone())).cloned();
            let (there, gone): (Vec<usize>, Vec<usize>) = todo.into_iter().partition(|i| row(*i).is_some());
            absent.extend(gone);
            let (contested, calm) = batch::read_all(requests, &rows, there, now);
            answers.extend(calm.into_iter().map(|(i, answer)| (i, Applied { answer, operation: row(i), now })));
            if contested.is_empty() {
                break;
            }
            let (made, held) = self.claim_contested(&mut seat, requests, &rows, contested).await?;
            answers.extend(made);
            if held.is_empty() || round + 1 == TRIES {
                answers.extend(held.into_iter().map(|i| (i, Applied::busy(row(i).map(|row| (row, now))))));
                break;
            }
            todo = held;
            tokio::time::sleep(Duration::from_millis(1 << round)).await;
        }
        seat.leave();
        Ok(absent)
    }

    /// Locks rows that no other transaction has locked, and decides the claims on them. Returns the answers, and the
    /// claims whose rows are locked or have changed. A claim of an operation with an expired lease may also find the
    /// following row of a service locked: the claims are halved until they are separate.
    async fn claim_contested(
        &self,
        seat: &mut PgConnection,
        requests: &[Arc<Request>],
        seen: &ByKey,
        claims: Vec<usize>,
    ) -> Result<(Vec<(usize, Applied)>, Vec<usize>)> {
        let (mut answers, mut held, mut parts) = (Vec::new(), Vec::new(), vec![claims]);
        while let Some(mut part) = parts.pop() {
            match self.claim_free(seat, requests, seen, part.clone()).await {
                Ok((made, left)) => {
                    answers.extend(made);
                    held.extend(left);
                }
                Err(error) if is_held(&error) => {
                    roll_back(seat).await?;
                    if part.len() == 1 {
                        held.extend(part);
                    } else {
                        parts.push(part.split_off(part.len() / 2));
                        parts.push(part);
                    }
                }
                Err(error) => return Err(error),
            }
        }
        Ok((answers, held))
    }

    /// The same, in one transaction.
    async fn claim_free(
        &self,
        seat: &mut PgConnection,
        requests: &[Arc<Request>],
        seen: &ByKey,
        claims: Vec<usize>,
    ) -> Result<(Vec<(usize, Applied)>, Vec<usize>)> {
        let place = |i: usize| (requests[i].scope.clone(), requests[i].key.clone());
        let ids: Vec<i64> = claims.iter().filter_map(|i| seen.get(&place(*i)).map(|op| op.id)).collect();
        sqlx::raw_sql(BEGIN_SHORT).execute(&mut *seat).await.map_err(broken)?;
        let locked = try_lock(seat, &ids).await?;
        let rows = load_by_id(&mut Conn::Postgres(seat), &self.sql, &locked).await?;
        let mut rows: ByKey = rows.into_values().map(|op| ((op.scope.clone(), op.key.clone()), op)).collect();
        // Drawn under the lock: an earlier fence may be lower than that of the row.
        let (now, fences) = self.draw(seat, claims.len()).await?;
        let (free, held): (Vec<usize>, Vec<usize>) = claims.into_iter().partition(|i| rows.contains_key(&place(*i)));
        let mut changes = Changes::default();
        let claims = free.iter().zip(fences).map(|(i, fence)| (*i, &*requests[*i], fence));
        let answers = batch::claim_all(&mut changes, &mut rows, claims, now);
        if !changes.save(&mut Conn::Postgres(seat), &self.sql).await? {
            roll_back(seat).await?;
            return Ok((Vec::new(), [free, held].concat()));
        }
        crash_point!("store.claim.taken_over");
        commit(seat).await?;
        Ok((answers, held))
    }
}

/// The requests of a batch without an answer yet.
fn unanswered(claims: &[usize], answers: &Answers) -> Vec<usize> {
    claims.iter().copied().filter(|i| !answers.contains_key(i)).collect()
}

fn is_busy(answers: &Answers, i: usize) -> bool {
    answers.get(&i).is_some_and(|applied| applied.answer == Answer::Busy)
}
