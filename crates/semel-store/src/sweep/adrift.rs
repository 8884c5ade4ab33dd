//! Operations that are being run by their state and have no lease: damaged by hand, or restored without it. No
//! transaction leaves them so, and without a lease nothing ever ends them.
//!
//! There is no index by state, which every settle would pay for. So each round of the sweep looks at the next few by
//! number, within a bound in rows, bytes and time: a look costs the same however many operations there are.

use std::time::{Duration, Instant};

use semel::{Result, Timestamp, look::Task, store::Swept};

use super::{BYTES, round::by_ids, within};
use crate::{Database, from_row};

/// How many operations one look takes.
const SLICE: u32 = 1000;

/// How long a round goes on looking. Around ten looks of small operations, so that a million are gone through in half an
/// hour by a sweep each 15 s.
const TIME: Duration = Duration::from_millis(20);

/// The number of an operation.
struct Id {
    id: i64,
}

from_row!(Id { id });

impl Database {
    /// Looks at the next operations, and ends those without a lease as what they are: in doubt.
    pub(super) async fn end_adrift(&self, now: Timestamp, swept: &mut Swept) -> Result<()> {
        let begun = Instant::now();
        loop {
            let found = self.find_by(self.sweep_sql().find_next, now, self.edges().adrift(), SLICE).await?;
            let chosen = within(&found, BYTES);
            let adrift = self.without_lease(&chosen.iter().map(|row| row.id).collect::<Vec<_>>()).await?;
            if !adrift.is_empty() {
                self.by_halves(Task::Lapse, adrift, swept).await?;
            }
            let is_end = chosen.len() == found.len() && found.len() < SLICE as usize;
            self.edges().looked_adrift(chosen.last().filter(|_| !is_end).map(|row| row.id));
            if is_end || begun.elapsed() >= TIME {
                return Ok(());
            }
        }
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
}
