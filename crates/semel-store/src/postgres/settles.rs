//! What the holder of a lease writes: completions by the hot statement, the rest by the general path, and renewals.

use std::collections::HashMap;

use semel::{
    Fence, Operation, Outcome, Result, Timestamp, crash_point,
    machine::{Answer, Write},
    store::{Applied, LeaseWrite},
};
use sqlx::PgConnection;

use super::{Postgres, begin, commit, hot, lock};
use crate::{
    Conn,
    apply::{Changes, load_by_id},
    batch::{self, in_order, late_renewal, note_late, saved},
    codec::{encode, hex},
    connection::broken,
};

impl Postgres {
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
