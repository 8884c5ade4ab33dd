//! Claims: new keys by the hot statement, known ones by reading first.

use std::{
    collections::{HashMap, HashSet},
    sync::Arc,
    time::{Duration, Instant},
};

use semel::{
    Error, Fence, Result, Timestamp, crash_point,
    machine::{Answer, Request},
    micros,
    store::Applied,
};
use sqlx::PgConnection;

use super::{CLAIMS_WAIT, Postgres, begin, commit, hot, roll_back, try_lock};
use crate::{
    Conn,
    apply::{Changes, load_by_id, load_by_key},
    batch::{self, ByKey},
    codec::encode,
    connection::{broken, is_lock_timeout},
};

/// How often the general path tries again when rows were not as it had read them.
pub(super) const ROUNDS: usize = 10;

/// How often a row that another transaction holds is tried before its claim is told so. A commit may take longer; those
/// who wait for it should not do so in the lane.
const TRIES: usize = 3;

/// How long the hot claim waits for another's transaction once it is known that one is in the way.
const SHORT: &str = "SET lock_timeout = '20ms'";

/// In how many parts claims are set apart, and for how long at most: enough to find some keys among 512.
const PARTS: usize = 8;
const APART: Duration = Duration::from_millis(400);

/// A row that a hot statement has made: the number of the request, the fence, and the time.
type MadeRow = (i64, i64, i64);

/// Answers to a batch, by the number of the request.
type Answers = HashMap<usize, Applied>;

impl Postgres {
    pub(crate) async fn claim(&self, requests: &[Arc<Request>]) -> Result<Vec<Applied>> {
        let mut answers = Answers::new();
        match self.claim_all(requests, &mut answers).await {
            // What is committed is told. The rest is sent again, and known by its token if it was made.
            Err(error) if error.is_transient() && answers.values().any(|applied| applied.answer != Answer::Busy) => {
                tracing::debug!(%error, "a batch of claims was made in part");
            }
            done => done?,
        }
        let decided = |(i, _): &(usize, _)| answers.get(i).is_some_and(|applied| applied.answer != Answer::Busy);
        requests.iter().enumerate().filter(decided).for_each(|(_, request)| self.hints.remember(request));
        Ok((0..requests.len()).map(|i| answers.remove(&i).unwrap_or_else(|| Applied::busy(None))).collect())
    }

    /// Answers claims in rounds: those of new keys by the hot statement, the others by reading first. A key can change
    /// sides in between. Answers are put in as soon as they are durable, so that none is lost with what follows.
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

    /// The hot path, in key order. Returns those whose key is there already.
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

    /// Claims of new keys, one of which another transaction holds; a lock time-out does not say which. An insert waits
    /// for whoever changes the row that is in its way, and for whoever inserts the same key, and a node that was frozen
    /// on its way to a commit may be at it for long. The others should not wait with it.
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
                // In key order still: the first part is the last to be pushed.
                parts.extend(part.chunks(part.len().div_ceil(PARTS)).rev().map(<[usize]>::to_vec));
            }
        }
        sqlx::raw_sql(CLAIMS_WAIT).execute(&mut *seat).await.map_err(broken)?;
        Ok(known)
    }

    /// Inserts claims, and answers those whose key was not there. False if it would have to wait; nothing was inserted
    /// then.
    async fn insert(
        &self,
        seat: &mut PgConnection,
        requests: &[Arc<Request>],
        first: &[usize],
        answers: &mut Answers,
    ) -> Result<bool> {
        // Those that an earlier part has made already are there, and have their answers.
        let (later, now): (Vec<usize>, Vec<usize>) =
            unanswered(first, answers).into_iter().partition(|i| requests[*i].later.is_some());
        for (some, enqueues) in [(now, false), (later, true)] {
            let made = match enqueues {
                _ if some.is_empty() => continue,
                false => self.insert_claims(seat, requests, &some).await,
                true => self.insert_enqueues(seat, requests, &some).await,
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
                    .ok_or(Error::Contradiction("a claim's number"))?;
                answers.insert(i, batch::first_claim(&requests[i], Fence(fence), Timestamp::from_micros(now)));
            }
        }
        Ok(true)
    }

    async fn insert_claims(
        &self,
        seat: &mut PgConnection,
        requests: &[Arc<Request>],
        first: &[usize],
    ) -> sqlx::Result<Vec<MadeRow>> {
        let list = || first.iter().map(|i| &requests[*i]);
        let text = |get: &dyn Fn(&Request) -> &str| list().map(|r| get(r).to_owned()).collect::<Vec<String>>();
        let label = |slot: usize| list().map(|r| r.labels.0[slot].clone()).collect::<Vec<Option<String>>>();
        let span = |get: &dyn Fn(&Request) -> Option<Duration>| {
            list().map(|r| get(r).map(micros)).collect::<Vec<Option<i64>>>()
        };
        sqlx::query_as(hot::CLAIM)
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
            .fetch_all(seat)
            .await
    }

    async fn insert_enqueues(
        &self,
        seat: &mut PgConnection,
        requests: &[Arc<Request>],
        first: &[usize],
    ) -> sqlx::Result<Vec<MadeRow>> {
        let list = || first.iter().map(|i| &requests[*i]);
        let text = |get: &dyn Fn(&Request) -> &str| list().map(|r| get(r).to_owned()).collect::<Vec<String>>();
        let label = |slot: usize| list().map(|r| r.labels.0[slot].clone()).collect::<Vec<Option<String>>>();
        let later = || list().map(|r| r.later.unwrap_or_default());
        let first_look = |r: &Arc<Request>| r.policy.retention.into_iter().chain(r.policy.tombstone).min().map(micros);
        let terms = |r: &Arc<Request>| r.later.is_some_and(|later| later.keeps_policy).then(|| r.policy.to_terms());
        sqlx::query_as(hot::ENQUEUE)
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
            .bind(list().map(first_look).collect::<Vec<_>>())
            .bind(later().map(|later| later.not_before.map(Timestamp::as_micros)).collect::<Vec<_>>())
            .bind(later().map(|later| micros(later.delay)).collect::<Vec<_>>())
            .bind(later().map(|later| i64::from(later.priority.get())).collect::<Vec<_>>())
            .bind(list().map(terms).collect::<Vec<_>>())
            .bind(first.iter().map(|i| i64::try_from(*i).unwrap_or(i64::MAX)).collect::<Vec<_>>())
            .bind(self.clock.fixed())
            .fetch_all(seat)
            .await
    }

    /// Claims on keys that are there already: read first; what would change is locked and decided again. Returns those
    /// whose key is not there.
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

    /// Locks rows that nobody else holds, and decides about the claims on them. Returns the answers, and the claims whose
    /// rows are held or have changed.
    async fn claim_contested(
        &self,
        seat: &mut PgConnection,
        requests: &[Arc<Request>],
        seen: &ByKey,
        claims: Vec<usize>,
    ) -> Result<(Vec<(usize, Applied)>, Vec<usize>)> {
        let place = |i: usize| (requests[i].scope.clone(), requests[i].key.clone());
        let ids: Vec<i64> = claims.iter().filter_map(|i| seen.get(&place(*i)).map(|op| op.id)).collect();
        begin(seat).await?;
        let locked = try_lock(seat, &ids).await?;
        let rows = load_by_id(&mut Conn::Postgres(seat), &self.sql, &locked).await?;
        let mut rows: ByKey = rows.into_values().map(|op| ((op.scope.clone(), op.key.clone()), op)).collect();
        // Drawn under the lock: fences from before it may be lower than what the row has by now.
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

/// Those of a batch that are yet to be answered.
fn unanswered(claims: &[usize], answers: &Answers) -> Vec<usize> {
    claims.iter().copied().filter(|i| !answers.contains_key(i)).collect()
}

fn is_busy(answers: &Answers, i: usize) -> bool {
    answers.get(&i).is_some_and(|applied| applied.answer == Answer::Busy)
}
