//! What the consumers of a process have in their hands, and the task that renews it.
//!
//! A message is leased for a short time, so that those of a killed process come back soon. One that is handled at once
//! costs nothing more. What stays in hand for longer is renewed: every few seconds, one statement for all queues of the
//! process.

use std::{
    collections::{HashMap, HashSet},
    sync::{Arc, Mutex, MutexGuard, PoisonError, Weak},
    time::{Duration, Instant},
};

use semel::Uptime;
use tokio::sync::Semaphore;

use crate::Database;

/// How many rounds of renewals fit into a lease: a message is renewed in the first or second one after it was taken, and
/// three more may fail before it is lost.
const ROUNDS: u32 = 5;

/// What is in a consumer's hands.
pub(super) struct Hands {
    /// By row and token: one whose time was over may come to the same consumer again.
    held: Mutex<HashMap<(i64, i64), Held>>,
    /// How many more it may have.
    pub(super) room: Semaphore,
    /// How long a message is leased.
    pub(super) visibility: Duration,
}

struct Held {
    /// Whether the consumer has seen it.
    handed: bool,
    /// Since when nothing will be said about it.
    abandoned: Option<Instant>,
    /// When its lease was begun or last renewed, counted from before that was asked.
    leased: Uptime,
    /// Whether another consumer has it by now.
    lost: bool,
}

/// Room for one message. It is given back when this is dropped.
pub(super) struct Room(Arc<Hands>);

impl Drop for Room {
    fn drop(&mut self) {
        self.0.room.add_permits(1);
    }
}

impl Hands {
    pub(super) fn new(room: usize, visibility: Duration) -> Arc<Self> {
        Arc::new(Self { held: Mutex::default(), room: Semaphore::new(room), visibility })
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<(i64, i64), Held>> {
        self.held.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A message that was taken by what was sent at `leased`.
    pub(super) fn take(&self, row: (i64, i64), leased: Uptime) {
        self.lock().insert(row, Held { handed: false, abandoned: None, leased, lost: false });
    }

    /// The consumer has seen it.
    pub(super) fn hand(&self, row: (i64, i64)) {
        if let Some(held) = self.lock().get_mut(&row) {
            held.handed = true;
        }
    }

    /// The consumer says what became of it.
    pub(super) fn remove(self: &Arc<Self>, row: (i64, i64)) -> Option<Room> {
        self.lock().remove(&row).map(|_| Room(self.clone()))
    }

    /// The consumer will say nothing about it. It takes up room until its lease has ended, or it would be taken, dropped
    /// and taken again.
    pub(super) fn abandon(self: &Arc<Self>, row: (i64, i64)) {
        let mut all = self.lock();
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

    /// Whether it must not be begun: another consumer has it, or may have it, because our own lease was not renewed in
    /// time. A tenth of the lease is left for clocks that do not go alike.
    pub(super) fn is_lost(&self, row: (i64, i64)) -> bool {
        let is_over = |held: &Held| held.lost || (held.leased + self.visibility * 9 / 10).has_passed();
        self.lock().get(&row).is_none_or(is_over)
    }

    /// Everything, with each whether the consumer has seen it. The hands are empty after that.
    pub(super) fn let_go(&self) -> Vec<(i64, i64, bool)> {
        self.lock().drain().map(|((id, token), held)| (id, token, held.handed)).collect()
    }

    /// What has been in hand for a round or longer. What was abandoned is let go in its time.
    fn due(self: &Arc<Self>) -> Vec<(i64, i64)> {
        let mut held = self.lock();
        let over = |held: &Held| held.abandoned.is_some_and(|since| since.elapsed() > self.visibility);
        let gone: Vec<(i64, i64)> = held.iter().filter(|(_, held)| over(held)).map(|(row, _)| *row).collect();
        for row in gone {
            held.remove(&row);
            drop(Room(self.clone()));
        }
        let round = self.visibility / ROUNDS;
        let is_due = |held: &Held| held.abandoned.is_none() && !held.lost && (held.leased + round).has_passed();
        held.iter().filter(|(_, held)| is_due(held)).map(|(row, _)| *row).collect()
    }

    /// What a renewal that was sent at `sent` has found to be ours, and what it has not.
    fn renewed(&self, rows: &[(i64, i64)], ours: &HashSet<i64>, sent: Uptime) -> usize {
        let mut all = self.lock();
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

/// The hands of all consumers of a process.
#[derive(Default)]
pub(super) struct Keeper(Mutex<Vec<Weak<Hands>>>);

impl Keeper {
    /// Renews for these hands, too, for as long as they are there.
    pub(super) fn keep(&self, hands: &Arc<Hands>) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).push(Arc::downgrade(hands));
    }

    fn all(&self) -> Vec<Arc<Hands>> {
        let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        all.retain(|hands| hands.strong_count() > 0);
        all.iter().filter_map(Weak::upgrade).collect()
    }

    /// Renews until the keeper is gone: with its broker and the last consumer.
    pub(super) async fn work(keeper: Weak<Self>, store: Database, visibility: Duration) {
        let mut round = tokio::time::interval(visibility / ROUNDS);
        round.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        // Whether it was said already: once, not every round.
        let mut said = false;
        loop {
            round.tick().await;
            let Some(all) = keeper.upgrade().map(|keeper| keeper.all()) else { return };
            let due: Vec<_> = all.into_iter().map(|hands| (hands.due(), hands)).collect();
            let rows: Vec<(i64, i64)> = due.iter().flat_map(|(rows, _)| rows).copied().collect();
            if rows.is_empty() {
                continue;
            }
            let sent = Uptime::now();
            // An answer that does not come must not keep us from asking again before the lease ends.
            let renewed = tokio::time::timeout(visibility / 2, store.hold_messages(&rows, visibility)).await;
            let why = match renewed {
                Ok(Ok(ours)) => {
                    said = false;
                    let ours = ours.into_iter().collect();
                    let lost: usize = due.iter().map(|(rows, hands)| hands.renewed(rows, &ours, sent)).sum();
                    if lost > 0 {
                        tracing::warn!(messages = lost, "messages in hand were lost: their leases ended before");
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
                    "messages in hand could not be renewed; trying again"
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
    fn what_was_taken_a_moment_ago_is_not_renewed() {
        let hands = Hands::new(1, LEASE);
        hands.take((1, 7), Uptime::now());
        assert_eq!((hands.due(), hands.is_lost((1, 7))), (vec![], false));
        std::thread::sleep(LEASE / ROUNDS);
        assert_eq!(hands.due(), [(1, 7)]);
    }

    #[test]
    fn what_was_not_renewed_in_time_is_lost_by_our_own_clock_and_a_renewal_brings_it_back() {
        let hands = Hands::new(1, LEASE);
        hands.take((1, 7), Uptime::now());
        std::thread::sleep(LEASE);
        assert!(hands.is_lost((1, 7)));
        assert_eq!(hands.renewed(&[(1, 7)], &HashSet::from([1]), Uptime::now()), 0);
        assert!(!hands.is_lost((1, 7)));
    }

    #[test]
    fn what_another_has_is_lost_and_is_renewed_no_more() {
        let hands = Hands::new(0, LEASE);
        hands.take((1, 7), Uptime::now());
        assert_eq!(hands.renewed(&[(1, 7)], &HashSet::new(), Uptime::now()), 1);
        std::thread::sleep(LEASE / ROUNDS);
        assert_eq!((hands.is_lost((1, 7)), hands.due()), (true, vec![]));
        hands.abandon((1, 7));
        assert_eq!(hands.room.available_permits(), 1, "its room is there for another message at once");
    }
}
