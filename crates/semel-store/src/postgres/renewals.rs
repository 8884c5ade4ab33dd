//! Renewals, and what the journal is told of them.

use std::{
    collections::{HashMap, HashSet},
    sync::PoisonError,
};

use semel::{
    Error, Fence, Result, State, Timestamp,
    journal::Note,
    machine::{Answer, Write, refusal},
};

use super::{Postgres, hot};
use crate::{batch::late_renewal, codec::encode, connection::broken};

/// Connections of the renewals' own: with a single one busy, leases would wait for settles and sweeps. One is usual;
/// the others are opened when it does not answer, or when many leases are renewed by hand.
pub(super) const CONNECTIONS: usize = 4;

/// Stories that may wait to be told. With the database away for long, further ones are dropped: each of their leases
/// is lost by then, which the sweep will tell.
const MOST_UNTOLD: usize = 10_000;

/// Stories that are told in one statement.
const AT_ONCE: usize = 500;

/// What was out of the ordinary about a renewal.
pub(super) enum Untold {
    /// It came late.
    Late(i64, Note),
    /// It was refused.
    Refused(i64, Fence),
}

impl Untold {
    fn about(&self) -> (i64, Fence) {
        match self {
            Self::Late(id, note) => (*id, note.fence),
            Self::Refused(id, fence) => (*id, *fence),
        }
    }
}

/// Operation, fence, the new deadline (none if its row was locked), the deadline before, the end of the longest run,
/// the term, the time, and whether somebody has asked for the run to stop.
type RenewedRow = (i64, i64, Option<i64>, i64, i64, i64, i64, bool);

impl Postgres {
    /// Renews leases. One that another transaction has locked is left out, and keeps no other one waiting.
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
        // By fence too: a zombie's renewal may be in the same batch.
        let (mut untold, mut answers) = (Vec::new(), HashMap::new());
        for (id, fence, deadline, before, run_until, term, now, cancelled) in seen {
            let fence = Fence(fence);
            let answer = match deadline.map(Timestamp::from_micros) {
                Some(deadline) => Answer::Renewed { deadline, cancelled },
                None => Answer::Busy,
            };
            if deadline.is_some() {
                untold.extend(late_renewal(fence, before, run_until, term, now).map(|note| Untold::Late(id, note)));
            }
            answers.insert((id, fence), answer);
        }
        let lost = leases.iter().filter(|lease| !answers.contains_key(lease));
        untold.extend(lost.map(|(id, fence)| Untold::Refused(*id, *fence)));
        self.remember(untold);
        Ok(leases.iter().map(|lease| answers.remove(lease).unwrap_or(Answer::Lost)).collect())
    }

    /// Writes what was out of the ordinary into the journal. It waits for no lock: what cannot be written now is kept.
    pub(crate) async fn tell_renewals(&self) -> Result<()> {
        loop {
            let some: Vec<Untold> = {
                let mut untold = self.untold();
                let most = untold.len().min(AT_ONCE);
                untold.drain(..most).collect()
            };
            if some.is_empty() {
                return Ok(());
            }
            let told = self.lane.answered(self.tell(&some)).await;
            let left = match &told {
                Ok(told) => some.into_iter().filter(|story| !told.contains(&story.about())).collect(),
                Err(_) => some,
            };
            let is_stuck = !left.is_empty();
            self.remember(left);
            told?;
            if is_stuck {
                return Err(Error::Unavailable("another transaction has the row locked".into()));
            }
        }
    }

    /// Writes stories, and tells which are done with: written, or about an operation that is gone.
    async fn tell(&self, stories: &[Untold]) -> Result<HashSet<(i64, Fence)>> {
        let ids: Vec<i64> = stories.iter().map(|story| story.about().0).collect();
        let mut seat = self.lane.take().await?;
        let now: i64 =
            sqlx::query_scalar(hot::NOW).bind(self.clock.fixed()).fetch_one(&mut *seat).await.map_err(broken)?;
        let there: Vec<(i64, String, i64)> =
            sqlx::query_as(hot::STANDING).bind(&ids).fetch_all(&mut *seat).await.map_err(broken)?;
        let there: HashMap<i64, (String, i64)> =
            there.into_iter().map(|(id, state, fence)| (id, (state, fence))).collect();
        let mut done: HashSet<(i64, Fence)> = stories.iter().map(Untold::about).collect();
        let mut notes: Vec<(i64, Note)> = Vec::new();
        for story in stories {
            let Some((state, present)) = there.get(&story.about().0) else { continue };
            match story {
                Untold::Late(id, note) => notes.push((*id, note.clone())),
                // Its lease has lapsed, or was ended by its own holder: there is nothing to tell.
                Untold::Refused(_, fence) if fence.0 == *present => {}
                Untold::Refused(id, fence) => {
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

    fn remember(&self, more: Vec<Untold>) {
        let mut untold = self.untold();
        let room = MOST_UNTOLD.saturating_sub(untold.len());
        untold.extend(more.into_iter().take(room));
    }

    fn untold(&self) -> std::sync::MutexGuard<'_, Vec<Untold>> {
        self.untold.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
