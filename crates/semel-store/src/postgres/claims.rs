//! Claims: new keys by the hot statement, known ones by reading first.

use std::{collections::HashMap, sync::Arc, time::Duration};

use semel::{
    Error, Fence, Result, Timestamp, crash_point,
    machine::{Answer, Request},
    micros,
    store::Applied,
};
use sqlx::PgConnection;

use super::{Postgres, begin, commit, hot, roll_back, try_lock};
use crate::{
    Conn,
    apply::{Changes, load_by_id, load_by_key},
    batch::{self, ByKey, in_order},
    codec::encode,
    connection::broken,
};

/// When to ask again about a row that somebody has locked.
const BUSY: Duration = Duration::from_secs(1);

/// How often the general path tries again when rows were not as it had read them.
pub(super) const ROUNDS: usize = 10;

impl Postgres {
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
}

fn is_lock_timeout(error: &sqlx::Error) -> bool {
    error.as_database_error().and_then(|error| error.code()).is_some_and(|code| code == "55P03")
}
