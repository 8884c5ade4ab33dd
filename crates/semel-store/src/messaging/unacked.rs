//! The unacknowledged messages of a process's consumers, and the task that renews them.
//!
//! A message is leased for a short time, so that those of a killed process are delivered again soon. A message that is
//! handled at once needs no renewal. The others are renewed every few seconds, in one statement for all queues of the
//! process.

use std::{
    collections::{HashMap, HashSet},
    sync::{Arc, Weak},
    time::{Duration, Instant},
};

use parking_lot::Mutex;
use semel::Uptime;
use tokio::sync::Semaphore;

use crate::Database;

/// Renewal rounds per lease: a message is renewed in the first or second round after it was taken, and three more
/// rounds may fail before its lease expires.
const ROUNDS: u32 = 5;

/// The unacknowledged messages of a consumer.
pub(super) struct Unacked {
    /// By row and token: a message whose lease expired may come to the same consumer again.
    held: Mutex<HashMap<(i64, i64), Held>>,
    /// How many more it may take.
    pub(super) room: Semaphore,
    /// How long a message is leased.
    pub(super) lease: Duration,
}

struct Held {
    /// Whether the consumer has received it.
    received: bool,
    /// Since when it is abandoned: it will not be answered.
    abandoned: Option<Instant>,
    /// The time before the lease or its last renewal was requested.
    leased: Uptime,
    /// Whether another consumer has it by now.
    lost: bool,
}

/// Room for one message, released on drop.
pub(super) struct Room(Arc<Unacked>);

impl Drop for Room {
    fn drop(&mut self) {
        self.0.room.add_permits(1);
    }
}

impl Unacked {
    pub(super) fn new(room: usize, lease: Duration) -> Arc<Self> {
        Arc::new(Self { held: Mutex::default(), room: Semaphore::new(room), lease })
    }

    /// Adds a message of a take that was sent at `leased`.
    pub(super) fn take(&self, row: (i64, i64), leased: Uptime) {
        self.held.lock().insert(row, Held { received: false, abandoned: None, leased, lost: false });
    }

    /// The consumer has received it.
    pub(super) fn received(&self, row: (i64, i64)) {
        if let Some(held) = self.held.lock().get_mut(&row) {
            held.received = true;
        }
    }

    /// The consumer answers it.
    pub(super) fn remove(self: &Arc<Self>, row: (i64, i64)) -> Option<Room> {
        self.held.lock().remove(&row).map(|_| Room(self.clone()))
    }

    /// The consumer will not answer it. It occupies its room until its lease has expired; otherwise it would be taken
    /// and dropped in a loop.
    pub(super) fn abandon(self: &Arc<Self>, row: (i64, i64)) {
        let mut all = self.held.lock();
        match all.get_mut(&row) {
            Some(held) if held.lost => {
                all.remove(&row);
                drop(all);
                drop(Room(self.clone()));
            }
            Some(held) => held.abandoned = Some(Instant::now()),
            None => {}
        }
    }

    /// Whether it must not be begun: another consumer has it or may have it, because its lease was not renewed in time.
    /// A tenth of the lease is reserved for clock drift.
    pub(super) fn is_lost(&self, row: (i64, i64)) -> bool {
        let is_over = |held: &Held| held.lost || (held.leased + self.lease * 9 / 10).has_passed();
        self.held.lock().get(&row).is_none_or(is_over)
    }

    /// Removes all messages, each with whether the consumer has received it.
    pub(super) fn let_go(&self) -> Vec<(i64, i64, bool)> {
        self.held.lock().drain().map(|((id, token), held)| (id, token, held.received)).collect()
    }

    /// The messages that were leased a round ago or longer. Abandoned ones are left to lease expiry.
    fn due(self: &Arc<Self>) -> Vec<(i64, i64)> {
        let mut held = self.held.lock();
        let over = |held: &Held| held.abandoned.is_some_and(|since| since.elapsed() > self.lease);
        let gone: Vec<(i64, i64)> = held.iter().filter(|(_, held)| over(held)).map(|(row, _)| *row).collect();
        for row in gone {
            held.remove(&row);
            drop(Room(self.clone()));
        }
        let round = self.lease / ROUNDS;
        let is_due = |held: &Held| held.abandoned.is_none() && !held.lost && (held.leased + round).has_passed();
        held.iter().filter(|(_, held)| is_due(held)).map(|(row, _)| *row).collect()
    }

    /// Applies the answer of a renewal that was sent at `sent`: which are still held, and which are lost.
    fn renewed(&self, rows: &[(i64, i64)], ours: &HashSet<i64>, sent: Uptime) -> usize {
        let mut all = self.held.lock();
        let mut lost = 0;
        for row in rows {
            let Some(held) = all.get_mut(row) else { continue };
            if ours.contains(&row.0) {
                held.leased = sent;
            } else {
                held.lost = true;
                lost += 1;
            }
        }
        lost
    }
}

/// The messages of all consumers of a process.
#[derive(Default)]
pub(super) struct Keeper(Mutex<Vec<Weak<Unacked>>>);

impl Keeper {
    /// Also renews for this consumer, while it exists.
    pub(super) fn keep(&self, unacked: &Arc<Unacked>) {
        self.0.lock().push(Arc::downgrade(unacked));
    }

    fn all(&self) -> Vec<Arc<Unacked>> {
        let mut all = self.0.lock();
        all.retain(|unacked| unacked.strong_count() > 0);
        all.iter().filter_map(Weak::upgrade).collect()
    }

    /// Renews until the broker and its last consumer are dropped.
    pub(super) async fn work(keeper: Weak<Self>, store: Database, lease: Duration) {
        let mut round = tokio::time::interval(lease / ROUNDS);
        round.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        // Whether the failure was logged: once, not every round.
        let mut said = false;
        loop {
            round.tick().await;
            let Some(all) = keeper.upgrade().map(|keeper| keeper.all()) else { return };
            let due: Vec<_> = all.into_iter().map(|unacked| (unacked.due(), unacked)).collect();
            let rows: Vec<(i64, i64)> = due.iter().flat_map(|(rows, _)| rows).copied().collect();
            if rows.is_empty() {
                continue;
            }
            let sent = Uptime::now();
            // A lost answer must not delay the next attempt beyond the lease.
            let renewed = tokio::time::timeout(lease / 2, store.hold_messages(&rows, lease)).await;
            let why = match renewed {
                Ok(Ok(ours)) => {
                    said = false;
                    let ours = ours.into_iter().collect();
                    let lost: usize = due.iter().map(|(rows, unacked)| unacked.renewed(rows, &ours, sent)).sum();
                    if lost > 0 {
                        tracing::warn!(messages = lost, "leases of delivered messages expired before their renewal");
                    }
                    continue;
                }
                Ok(Err(error)) => error.to_string(),
                Err(_) => "no answer in time".to_owned(),
            };
            if !std::mem::replace(&mut said, true) {
                tracing::warn!(
                    messages = rows.len(),
                    error = why,
                    "leases of delivered messages could not be renewed; trying again"
                );
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LEASE: Duration = Duration::from_millis(500);

    #[test]
    fn a_message_taken_a_moment_ago_is_not_renewed() {
        let unacked = Unacked::new(1, LEASE);
        unacked.take((1, 7), Uptime::now());
        assert_eq!((unacked.due(), unacked.is_lost((1, 7))), (vec![], false));
        std::thread::sleep(LEASE / ROUNDS);
        assert_eq!(unacked.due(), [(1, 7)]);
    }

    #[test]
    fn a_lease_not_renewed_in_time_is_lost_by_the_nodes_clock_until_a_renewal() {
        let unacked = Unacked::new(1, LEASE);
        unacked.take((1, 7), Uptime::now());
        std::thread::sleep(LEASE);
        assert!(unacked.is_lost((1, 7)));
        assert_eq!(unacked.renewed(&[(1, 7)], &HashSet::from([1]), Uptime::now()), 0);
        assert!(!unacked.is_lost((1, 7)));
    }

    #[test]
    fn a_message_lost_to_another_consumer_is_not_renewed() {
        let unacked = Unacked::new(0, LEASE);
        unacked.take((1, 7), Uptime::now());
        assert_eq!(unacked.renewed(&[(1, 7)], &HashSet::new(), Uptime::now()), 1);
        std::thread::sleep(LEASE / ROUNDS);
        assert_eq!((unacked.is_lost((1, 7)), unacked.due()), (true, vec![]));
        unacked.abandon((1, 7));
        assert_eq!(unacked.room.available_permits(), 1, "its room is there for another message at once");
    }
}
