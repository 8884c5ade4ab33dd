//! Renewals, and their journal notes.

use std::collections::{HashMap, HashSet};

use semel::{
    Error, Fence, Result, State, Timestamp,
    journal::Note,
    machine::{Answer, Write, refusal},
};

use super::{Postgres, hot};
use crate::{batch::late_renewal, codec::encode, connection::broken};

/// Connections for renewals only: on a shared one, leases would wait for settles and sweeps. One is usual; the others
/// are opened if it does not answer, or if many leases are renewed explicitly.
pub(super) const CONNECTIONS: usize = 4;

/// The most pending notes. If the database is unavailable for long, further ones are dropped: their leases have expired
/// by then, which the sweep notes.
const MOST_PENDING: usize = 10_000;

/// The most notes per statement.
const AT_ONCE: usize = 500;

/// An unusual renewal.
pub(super) enum PendingNote {
    /// It came late.
    Late(i64, Note),
    /// It was refused.
    Refused(i64, Fence),
}

impl PendingNote {
    fn about(&self) -> (i64, Fence) {
        match self {
            Self::Late(id, note) => (*id, note.fence),
            Self::Refused(id, fence) => (*id, *fence),
        }
    }
}

/// Operation, fence, the new deadline (none if its row was locked), the previous deadline, the end of the longest run,
/// the term, the time, and whether the run was asked to stop.
type RenewedRow = (i64, i64, Option<i64>, i64, i64, i64, i64, bool);

impl Postgres {
    /// Renews leases. A locked one is skipped, and delays no other.
    pub(crate) async fn renew(&self, leases: &[(i64, Fence)]) -> Result<Vec<Answer>> {
        self.renewals.answered(self.renew_batch(leases)).await
    }

    async fn renew_batch(&self, leases: &[(i64, Fence)]) -> Result<Vec<Answer>> {
        let mut sorted = leases.to_vec();
        sorted.sort_unstable();
        let mut seat = self.renewals.take().await?;
        let seen: Vec<RenewedRow> = sqlx::query_as(hot::RENEW)
            .bind(sorted.iter().map(|(id, _)| *id).collect::<Vec<_>>())
            .bind(sorted.iter().map(|(_, fence)| fence.0).collect::<Vec<_>>())
            .bind(self.clock.fixed())
            .fetch_all(&mut *seat)
            .await
            .map_err(broken)?;
        seat.leave();
        // By fence too: the renewal of a former owner may be in the same batch.
        let (mut pending, mut answers) = (Vec::new(), HashMap::new());
        for (id, fence, deadline, before, run_until, term, now, cancelled) in seen {
            let fence = Fence(fence);
            let answer = match deadline.map(Timestamp::from_micros) {
                Some(deadline) => Answer::Renewed { deadline, cancelled },
                None => Answer::Busy,
            };
            if deadline.is_some() {
                pending
                    .extend(late_renewal(fence, before, run_until, term, now).map(|note| PendingNote::Late(id, note)));
            }
            answers.insert((id, fence), answer);
        }
        let lost = leases.iter().filter(|lease| !answers.contains_key(lease));
        pending.extend(lost.map(|(id, fence)| PendingNote::Refused(*id, *fence)));
        self.remember(pending);
        Ok(leases.iter().map(|lease| answers.remove(lease).unwrap_or(Answer::Lost)).collect())
    }

    /// Writes the notes of unusual renewals. It waits for no lock: a note that cannot be written now is kept.
    pub(crate) async fn tell_renewals(&self) -> Result<()> {
        loop {
            let some: Vec<PendingNote> = {
                let mut pending = self.pending_notes.lock();
                let most = pending.len().min(AT_ONCE);
                pending.drain(..most).collect()
            };
            if some.is_empty() {
                return Ok(());
            }
            let written = self.lane.answered(self.write_notes(&some)).await;
            let left = match &written {
                Ok(written) => some.into_iter().filter(|one| !written.contains(&one.about())).collect(),
                Err(_) => some,
            };
            let is_stuck = !left.is_empty();
            self.remember(left);
            written?;
            if is_stuck {
                return Err(Error::Unavailable("another transaction has the row locked".into()));
            }
        }
    }

    /// Writes notes, and returns which are done: written, or of a deleted operation.
    async fn write_notes(&self, pending: &[PendingNote]) -> Result<HashSet<(i64, Fence)>> {
        let ids: Vec<i64> = pending.iter().map(|one| one.about().0).collect();
        let mut seat = self.lane.take().await?;
        let now: i64 =
            sqlx::query_scalar(hot::NOW).bind(self.clock.fixed()).fetch_one(&mut *seat).await.map_err(broken)?;
        let there: Vec<(i64, String, i64)> =
            sqlx::query_as(hot::STANDING).bind(&ids).fetch_all(&mut *seat).await.map_err(broken)?;
        let there: HashMap<i64, (String, i64)> =
            there.into_iter().map(|(id, state, fence)| (id, (state, fence))).collect();
        let mut done: HashSet<(i64, Fence)> = pending.iter().map(PendingNote::about).collect();
        let mut notes: Vec<(i64, Note)> = Vec::new();
        for one in pending {
            let Some((state, present)) = there.get(&one.about().0) else { continue };
            match one {
                PendingNote::Late(id, note) => notes.push((*id, note.clone())),
                // Its lease has expired, or its own holder has ended it: no note is needed.
                PendingNote::Refused(_, fence) if fence.0 == *present => {}
                PendingNote::Refused(id, fence) => {
                    let present = (state.parse::<State>()?, Fence(*present));
                    notes.push((*id, refusal(*fence, &Write::Renew, present, Timestamp::from_micros(now))));
                }
            }
        }
        for (id, note) in &notes {
            done.remove(&(*id, note.fence));
        }
        let written: Vec<(i64, i64)> = sqlx::query_as(hot::NOTE)
            .bind(notes.iter().map(|(id, _)| *id).collect::<Vec<_>>())
            .bind(notes.iter().map(|(_, note)| note.at.as_micros()).collect::<Vec<_>>())
            .bind(notes.iter().map(|(_, note)| note.event.as_str()).collect::<Vec<_>>())
            .bind(notes.iter().map(|(_, note)| note.fence.0).collect::<Vec<_>>())
            .bind(notes.iter().map(|(_, note)| encode(note.detail.as_bytes())).collect::<Vec<_>>())
            .fetch_all(&mut *seat)
            .await
            .map_err(broken)?;
        seat.leave();
        done.extend(written.into_iter().map(|(id, fence)| (id, Fence(fence))));
        Ok(done)
    }

    fn remember(&self, more: Vec<PendingNote>) {
        let mut pending = self.pending_notes.lock();
        let room = MOST_PENDING.saturating_sub(pending.len());
        pending.extend(more.into_iter().take(room));
    }
}
