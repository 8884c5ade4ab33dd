//! Operations in the state processing without a lease: damaged by hand, or restored without it. No transaction leaves
//! them so, and without a lease they would never end.
//!
//! There is no index by state, which every settle would pay for. So each round of the sweep checks the next few by id,
//! within limits of rows, bytes and time: it costs the same however many operations there are. A process starts at a
//! random id, so that one which is often restarted does not always check the same ones. A person can have all of them
//! checked at once.

use std::time::{Duration, Instant};

use semel::{Result, Timestamp, look::Task, store::Swept};

use super::{BYTES, edges::Lap, round::by_ids, within};
use crate::{Database, connection::broken, from_row, on};

/// How many operations one look reads.
const SLICE: u32 = 1000;

/// The time limit per round. About ten looks of small operations, so that a sweep every 15 s checks a million in half
/// an hour.
const TIME: Duration = Duration::from_millis(20);

/// The id of an operation.
struct Id {
    id: i64,
}

from_row!(Id { id });

/// The result of one look: operations without a lease, and the id after which the next look continues.
struct Look {
    adrift: Vec<i64>,
    /// `None` at the end.
    next: Option<i64>,
}

impl Database {
    /// Checks all operations once, and ends those without a lease. A server does so bit by bit; this is for `semel
    /// sweep`, whose process ends after one sweep.
    ///
    /// # Errors
    /// The database cannot be reached, or refuses the change of every such operation among a thousand; the others have
    /// been checked.
    pub async fn end_missing_leases(&self, swept: &mut Swept) -> Result<()> {
        let now = self.database_now().await?;
        let (mut at, mut result) = (Some(0), Ok(()));
        while let Some(after) = at {
            let look = self.look_adrift(now, after).await?;
            at = look.next;
            match self.end_each(look.adrift, swept).await {
                Err(error) if error.is_transient() => return Err(error),
                Err(error) if result.is_ok() => result = Err(error),
                _ => {}
            }
        }
        result
    }

    /// Checks the next operations, and puts those without a lease in doubt.
    pub(super) async fn end_adrift(&self, now: Timestamp, swept: &mut Swept) -> Result<()> {
        let begun = Instant::now();
        let begin = match self.edges().adrift() {
            Some(at) => at,
            None => fastrand::i64(0..=self.last_operation().await?),
        };
        let mut lap = Lap::from(begin);
        while lap.goes_on() {
            let look = self.look_adrift(now, lap.at()).await?;
            // Before any write: rows that the database always refuses must not block those after them.
            lap.looked(look.next);
            self.edges().looked_adrift(lap.at());
            self.end_each(look.adrift, swept).await?;
            if begun.elapsed() >= TIME {
                break;
            }
        }
        Ok(())
    }

    async fn look_adrift(&self, now: Timestamp, after: i64) -> Result<Look> {
        let found = self.find_by(self.sweep_sql().find_next, now, after, SLICE).await?;
        let chosen = within(&found, BYTES);
        let is_end = chosen.len() == found.len() && found.len() < SLICE as usize;
        let adrift = self.without_lease(&chosen.iter().map(|row| row.id).collect::<Vec<_>>()).await?;
        Ok(Look { adrift, next: chosen.last().filter(|_| !is_end).map(|row| row.id) })
    }

    async fn end_each(&self, adrift: Vec<i64>, swept: &mut Swept) -> Result<()> {
        if adrift.is_empty() {
            return Ok(());
        }
        self.by_halves(Task::Lapse, adrift, None, swept).await.map(drop)
    }

    async fn without_lease(&self, ids: &[i64]) -> Result<Vec<i64>> {
        if ids.is_empty() {
            return Ok(Vec::new());
        }
        self.answered(async {
            let mut reader = self.reader().await?;
            let found: Vec<Id> = by_ids(&mut reader.conn(), self.sweep_sql().without_lease, ids).await?;
            reader.leave();
            Ok(found.into_iter().map(|row| row.id).collect())
        })
        .await
    }

    /// The highest id of an operation; 0 if there is none.
    async fn last_operation(&self) -> Result<i64> {
        let text = self.sweep_sql().last_operation;
        self.answered(async {
            let mut reader = self.reader().await?;
            let last: i64 = on!(reader.conn(), c => sqlx::query_scalar(text).fetch_one(&mut *c).await.map_err(broken)?);
            reader.leave();
            Ok(last)
        })
        .await
    }
}
