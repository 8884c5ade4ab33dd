//! The sweep: expired leases, missing leases, retention, the archive, the folding of counters, old receipts, dead
//! nodes.
//!
//! Every phase runs in every round, even if others fail. A phase selects its rows within limits of number and size, and
//! handles them in one transaction. If that fails, the rows are halved until only those remain that cannot be read or
//! written; these are set aside (`aside.rs`) and the others continue. Rows that another transaction has locked are
//! skipped.

mod adrift;
mod aged;
mod aside;
mod edges;
mod fold;
mod lapsed;
mod round;
pub(crate) mod sql;

use semel::{
    Result, Timestamp,
    look::Task,
    prelude::*,
    store::{Sweep, Swept, Trouble},
};

use self::edges::Edge;
pub(crate) use self::edges::Edges;
use crate::{Database, database::Inner, from_row};

/// The most bytes of stored data per transaction of a phase, unless its first row alone has more. Loaded data takes
/// several times that in memory, as JSON; moved or deleted data is written to the log of the database, and on SQLite
/// other writers wait for it.
const BYTES: i64 = 8 << 20;

/// How many transactions of one round of a phase may fail: enough to find a few offending rows among a thousand by
/// bisection.
const MOST_FAILURES: u32 = 64;

/// How many of them may fail for a lock or a timeout: enough to find one such row among a thousand.
const MOST_WAITS: u32 = 12;

/// If this many rows in a row are refused and none succeeds, a few rows elsewhere are tried. If those are refused as
/// well, the rows are not the cause.
const MOST_CULPRITS: usize = 8;

/// How many rows that were set aside are tried again per round.
const AGAIN: u32 = 64;

/// The phases that go through rows, in order, with their names for the log.
const PHASES: [(&str, Task); 3] =
    [("expired leases", Task::Lapse), ("expiry and archive", Task::Age), ("counters", Task::Fold)];

/// A row that a phase has selected.
#[derive(Clone, Copy)]
struct Found {
    id: i64,
    /// Its position in the order of the phase.
    place: i64,
    /// Its stored bytes.
    bytes: i64,
}

from_row!(Found { id, place, bytes });

impl Sweep for Database {
    async fn sweep(&self, limit: u32) -> Result<Swept> {
        Ok(self.wake_for(self.sweep_round(limit).await?))
    }

    async fn end_expired_leases(&self, limit: u32) -> Result<Swept> {
        let now = self.database_now().await?;
        let from = self.edges().from(Task::Lapse, now).unwrap_or(i64::MIN);
        let mut swept = Swept::default();
        self.phase_from(Task::Lapse, from, now, limit, &mut swept).await?;
        Ok(self.wake_for(swept))
    }
}

/// The result of one transaction.
#[derive(Default)]
struct Part {
    /// Rows that exist and were not locked by another transaction.
    handled: usize,
    swept: Swept,
    /// Unreadable rows, with the reason.
    unreadable: Vec<(i64, String)>,
}

impl Database {
    /// Wakes the workers of this process if a round has made work due.
    fn wake_for(&self, swept: Swept) -> Swept {
        if swept.lapsed > 0 {
            self.tell_due();
        }
        swept
    }

    pub(crate) async fn sweep_round(&self, limit: u32) -> Result<Swept> {
        // If the database is unavailable, no phase can do anything.
        let now = self.database_now().await?;
        let mut swept = Swept::default();
        if let Inner::Sqlite(db) = self.inner() {
            let result = db.keep_clock().await;
            note(&mut swept, "the clock", result);
        }
        let result = self.again(now, &mut swept).await;
        note(&mut swept, "rows set aside", result);
        for (phase, task) in PHASES {
            let result = self.phase(task, now, limit, &mut swept).await;
            note(&mut swept, phase, result);
        }
        let result = self.end_adrift(now, &mut swept).await;
        note(&mut swept, "missing leases", result);
        let result = self.purge_receipts(limit).await;
        swept.more |= matches!(result, Ok(true));
        note(&mut swept, "receipts", result);
        let result = self.forget_nodes(now).await;
        note(&mut swept, "signs of life", result);
        if !swept.more {
            self.edges().begin_anew();
        }
        Ok(swept)
    }

    /// One round of one phase: up to the limits of rows and bytes.
    async fn phase(&self, task: Task, now: Timestamp, limit: u32, swept: &mut Swept) -> Result<()> {
        let Some(from) = self.edges().from(task, now) else { return Ok(()) };
        let result = self.phase_from(task, from, now, limit, swept).await;
        if result.is_err() {
            self.edges().rest(task);
        }
        result
    }

    async fn phase_from(&self, task: Task, from: i64, now: Timestamp, limit: u32, swept: &mut Swept) -> Result<()> {
        let found = self.find(task, now, from, limit).await?;
        let full = found.len() >= limit as usize;
        let chosen = within(&found, BYTES);
        let cut = chosen.len() < found.len();
        let Some(last) = chosen.last() else {
            self.edges().found_nothing(task);
            return Ok(());
        };
        let ids: Vec<i64> = chosen.iter().map(|row| row.id).collect();
        let beyond = found.last().filter(|_| cut).map(|row| row.id);
        let (done, all) = self.by_halves(task, ids, beyond, swept).await?;
        let reached = Edge { place: last.place, moved: done > 0, clean: done == all };
        self.edges().advance(task, reached, full || cut);
        swept.more |= full || cut;
        Ok(())
    }

    /// Handles rows in one transaction, or if that fails in two halves each; a single row that fails is set aside. A
    /// row of `beyond` is tried only to find out whether the rows are the cause. Returns how many rows were handled,
    /// and of how many.
    async fn by_halves(
        &self,
        task: Task,
        ids: Vec<i64>,
        beyond: Option<i64>,
        swept: &mut Swept,
    ) -> Result<(usize, usize)> {
        let (mut all, mut done, mut culprits) = (ids.len(), 0, Vec::new());
        let (mut parts, mut enough) = (vec![ids], MOST_CULPRITS);
        let (mut failures, mut waits) = (0, 0);
        while let Some(mut ids) = parts.pop() {
            let error = match self.attempt(task, &ids).await {
                Ok(part) => {
                    done += part.handled;
                    add(swept, part.swept);
                    self.set_aside(task, &part.unreadable, swept).await?;
                    continue;
                }
                Err(error) => error,
            };
            failures += 1;
            if error.is_transient() {
                waits += 1;
                // If the writer is busy or the database does not answer, the rows are not the cause; and waiting again
                // for each half would delay the other phases.
                if self.one_writer() || waits > MOST_WAITS {
                    return Err(error);
                }
                self.database_now().await?;
            }
            match &ids[..] {
                // A related row is locked, or it takes too long: both are transient.
                [id] if error.is_transient() => tracing::debug!(operation = id, %error, "left for a later sweep"),
                [id] => culprits.push((*id, error.to_string())),
                _ => {
                    parts.push(ids.split_off(ids.len() / 2));
                    parts.push(ids);
                }
            }
            // Refused rows may be adjacent, at the start of every round: one row of each remaining part shows.
            if done == 0 && culprits.len() == MOST_CULPRITS && enough == MOST_CULPRITS {
                let samples = one_of_each(&mut parts, beyond);
                all += usize::from(beyond.is_some());
                enough += samples.len();
                parts.extend(samples);
            }
            if failures >= MOST_FAILURES || (done == 0 && culprits.len() >= enough) {
                break;
            }
        }
        if done == 0 && culprits.len() >= MOST_CULPRITS {
            let (_, why) = culprits.swap_remove(0);
            return Err(semel::Error::Refused(format!("every row is refused: {why}")));
        }
        self.set_aside(task, &culprits, swept).await?;
        Ok((done + culprits.len(), all))
    }

    async fn attempt(&self, task: Task, ids: &[i64]) -> Result<Part> {
        match task {
            Task::Lapse => self.lapse(ids).await,
            Task::Age => self.age(ids).await,
            Task::Fold => self.fold(ids).await,
            Task::Run => self.readable(ids).await,
        }
    }

    /// Tries rows again that were set aside and whose time has come, each alone. A row that times out blocks no other,
    /// and is reported at the end.
    async fn again(&self, now: Timestamp, swept: &mut Swept) -> Result<()> {
        let (mut waits, mut trouble) = (0, Ok(()));
        for (id, task, is_there) in self.find_again(now, AGAIN).await? {
            if !is_there {
                self.resume(task, id, now).await?;
                continue;
            }
            match self.attempt(task, &[id]).await {
                Ok(Part { unreadable, .. }) if !unreadable.is_empty() => {
                    self.set_aside(task, &unreadable, swept).await?
                }
                // Locked: the next round tries again.
                Ok(Part { handled: 0, .. }) => {}
                Ok(part) => {
                    add(swept, part.swept);
                    self.resume(task, id, now).await?;
                }
                Err(error) if error.is_transient() => {
                    waits += 1;
                    // As in `by_halves`: the row is not the cause.
                    if self.one_writer() || waits > MOST_WAITS {
                        return Err(error);
                    }
                    self.database_now().await?;
                    trouble = Err(error);
                }
                Err(error) => self.set_aside(task, &[(id, error.to_string())], swept).await?,
            }
        }
        trouble
    }
}

/// Takes the last row out of each part, and adds it to `beyond`.
fn one_of_each(parts: &mut Vec<Vec<i64>>, beyond: Option<i64>) -> Vec<Vec<i64>> {
    let samples = parts.iter_mut().filter_map(Vec::pop).chain(beyond).map(|id| vec![id]).collect();
    parts.retain(|part| !part.is_empty());
    samples
}

fn note<T>(swept: &mut Swept, phase: &'static str, result: Result<T>) {
    if let Err(error) = result {
        swept.troubles.push(Trouble { phase, why: error.to_string() });
    }
}

/// Adds up the results; whether there is more is known at the end of the phase.
fn add(swept: &mut Swept, part: Swept) {
    let more = swept.more;
    *swept += part;
    swept.more = more;
}

/// The first of them, as many as fit; at least one.
fn within(found: &[Found], most: i64) -> &[Found] {
    let mut bytes = 0_i64;
    let too_many = found.iter().position(|row| {
        bytes = bytes.saturating_add(row.bytes);
        bytes > most
    });
    &found[..too_many.map_or(found.len(), |fitting| fitting.max(1))]
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(sizes: &[i64]) -> Vec<Found> {
        sizes.iter().map(|bytes| Found { id: 1, place: 1, bytes: *bytes }).collect()
    }

    #[test]
    fn a_round_is_bounded_in_bytes_but_takes_at_least_one_row() {
        for (sizes, fit) in [
            (&[][..], 0),
            (&[1], 1),
            (&[11], 1),
            (&[11, 1], 1),
            (&[5, 5, 1], 2),
            (&[0, 0, 0], 3),
            (&[1, 10, 1], 1),
            (&[i64::MAX, i64::MAX], 1),
        ] {
            assert_eq!(within(&found(sizes), 10).len(), fit, "{sizes:?}");
        }
    }
}
