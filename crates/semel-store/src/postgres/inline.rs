//! Claims in the transaction of their effect.

use std::sync::Arc;

use semel::{
    Error, Fence, Operation, Result, Timestamp,
    machine::{Event, Request},
    store::Applied,
};
use sqlx::PgConnection;

use super::{Postgres, claims::ROUNDS, lock};
use crate::{
    Conn,
    apply::{Changes, load_by_id, load_by_key},
    connection::broken,
};

impl Postgres {
    /// A claim in the transaction of its effect. The insert waits for another transaction that inserts the same key.
    pub(crate) async fn claim_in(&self, conn: &mut PgConnection, request: &Request) -> Result<Applied> {
        for _ in 0..ROUNDS {
            let (now, fences) = self.draw(conn, 1).await?;
            let event = Event::ClaimInline { request, fence: fences[0] };
            let mut changes = Changes::default();
            let applied = changes.step(None, &event, now);
            if changes.save(&mut Conn::Postgres(conn), &self.sql).await? {
                return Ok(applied);
            }
            let key = std::iter::once((&request.scope, &request.key));
            let seen = load_by_key(&mut Conn::Postgres(conn), &self.sql, key).await?;
            let Some(seen) = seen.into_values().next() else { continue };
            if let Some(applied) = unchanged(&seen, request, fences[0], now) {
                return Ok(applied);
            }
            let id = seen.id;
            lock(conn, &[id]).await?;
            let rows = load_by_id(&mut Conn::Postgres(conn), &self.sql, &[id]).await?;
            let Some(row) = rows.get(&id) else { continue };
            // A new fence, drawn under the lock: the earlier one may be lower than that of the row.
            let (now, fences) = self.draw(conn, 1).await?;
            let event = Event::ClaimInline { request, fence: fences[0] };
            let mut changes = Changes::default();
            let applied = changes.step(Some(row), &event, now);
            if changes.save(&mut Conn::Postgres(conn), &self.sql).await? {
                return Ok(applied);
            }
        }
        Err(Error::Unavailable("the row is busy; ask again".into()))
    }

    /// Several claims with different keys. Sorted, so that two batches lock in the same order.
    pub(crate) async fn claim_all_in(
        &self,
        conn: &mut PgConnection,
        requests: &[Arc<Request>],
    ) -> Result<Vec<Applied>> {
        let mut order: Vec<usize> = (0..requests.len()).collect();
        order.sort_by(|a, b| by_key(&requests[*a]).cmp(&by_key(&requests[*b])));
        let keys = requests.iter().map(|request| (&request.scope, &request.key));
        let seen = load_by_key(&mut Conn::Postgres(conn), &self.sql, keys).await?;
        let row_of = |n: usize| seen.get(&(requests[n].scope.clone(), requests[n].key.clone()));
        let (now, fences) = self.draw(conn, 1).await?;
        let mut answers: Vec<Option<Applied>> =
            (0..requests.len()).map(|n| unchanged(row_of(n)?, &requests[n], fences[0], now)).collect();
        let new: Vec<usize> = order.iter().copied().filter(|n| row_of(*n).is_none()).collect();
        self.claim_new(conn, requests, &new, &mut answers).await?;
        for n in order {
            if answers[n].is_none() {
                answers[n] = Some(self.claim_in(conn, &requests[n]).await?);
            }
        }
        answers.into_iter().collect::<Option<_>>().ok_or(Error::Contradiction("a claim got no answer"))
    }

    /// The first claims of keys, all or none: if another transaction was faster with one of them, they are made one by
    /// one.
    async fn claim_new(
        &self,
        conn: &mut PgConnection,
        requests: &[Arc<Request>],
        new: &[usize],
        answers: &mut [Option<Applied>],
    ) -> Result<()> {
        if new.is_empty() {
            return Ok(());
        }
        let (now, fences) = self.draw(conn, new.len()).await?;
        let mut changes = Changes::default();
        let mut applied = Vec::with_capacity(new.len());
        for (n, fence) in new.iter().zip(fences) {
            applied.push((*n, changes.step(None, &Event::ClaimInline { request: &requests[*n], fence }, now)));
        }
        sqlx::raw_sql("SAVEPOINT semel_claims").execute(&mut *conn).await.map_err(broken)?;
        let made = changes.save(&mut Conn::Postgres(conn), &self.sql).await?;
        let end = if made { "RELEASE semel_claims" } else { "ROLLBACK TO semel_claims" };
        sqlx::raw_sql(end).execute(&mut *conn).await.map_err(broken)?;
        if made {
            applied.into_iter().for_each(|(n, applied)| answers[n] = Some(applied));
        }
        Ok(())
    }
}

/// The answer to a claim that changes nothing. It must not lock the row: two transactions that each have inserted keys
/// and wait for known keys of the other would deadlock.
fn unchanged(row: &Operation, request: &Request, fence: Fence, now: Timestamp) -> Option<Applied> {
    let mut changes = Changes::default();
    let applied = changes.step(Some(row), &Event::ClaimInline { request, fence }, now);
    changes.is_empty().then_some(applied)
}

fn by_key(request: &Request) -> (&str, &str, &str, &str) {
    (request.scope.tenant(), request.scope.service(), request.scope.kind(), request.key.as_str())
}
