//! Renews the leases of batches that a relay has in its hands.
//!
//! A lease is short, so that the rows of a killed relay are published by another one soon. A batch that is published and
//! marked at once costs nothing more; one that waits longer for the broker's word is renewed, together with all others
//! that do, in one statement every few seconds.

use std::{
    collections::{HashMap, HashSet},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use super::super::{MessageStore, Taken};
use crate::Uptime;

/// How many rounds of renewals fit into a lease: a batch is renewed in the first or second one after it was taken, and
/// three more may fail before it is lost.
const ROUNDS: u32 = 5;

/// The batches of a relay.
pub(super) struct Keeper {
    lease: Duration,
    /// By token.
    held: Mutex<HashMap<i64, Held>>,
}

struct Held {
    rows: Vec<i64>,
    /// When the lease was begun or last renewed, counted from before that was asked.
    leased: Uptime,
}

/// A batch in the relay's hands, renewed until this is dropped.
pub(super) struct InHand {
    token: i64,
    keeper: Arc<Keeper>,
}

impl Keeper {
    pub(super) fn new(lease: Duration) -> Arc<Self> {
        Arc::new(Self { lease, held: Mutex::default() })
    }

    /// Begins to renew what was leased by a take that was sent at `sent`.
    pub(super) fn keep(self: &Arc<Self>, taken: &Taken, sent: Uptime) -> InHand {
        let rows = taken.rows.iter().map(|row| row.id).collect();
        self.lock().insert(taken.token, Held { rows, leased: sent });
        InHand { token: taken.token, keeper: self.clone() }
    }

    /// Renews whatever has been in hand for a round or longer. Never ends.
    pub(super) async fn work<S: MessageStore>(self: Arc<Self>, store: S) {
        let mut round = tokio::time::interval(self.lease / ROUNDS);
        round.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        // Whether it was said already: once, not every round.
        let mut said = false;
        loop {
            round.tick().await;
            let rows = self.due();
            if rows.is_empty() {
                continue;
            }
            let sent = Uptime::now();
            // An answer that does not come must not keep us from asking again before the lease ends.
            let why = match tokio::time::timeout(self.lease / 2, store.hold(rows.clone(), self.lease)).await {
                Ok(Ok(ours)) => {
                    self.renewed(&rows, &ours.into_iter().collect(), sent);
                    said = false;
                    continue;
                }
                Ok(Err(error)) => error.to_string(),
                Err(_) => "no answer in time".to_owned(),
            };
            if !std::mem::replace(&mut said, true) {
                tracing::warn!(
                    rows = rows.len(),
                    error = why,
                    "leases of the outbox could not be renewed; trying again"
                );
            }
        }
    }

    fn due(&self) -> Vec<(i64, i64)> {
        let round = self.lease / ROUNDS;
        let held = self.lock();
        let due = held.iter().filter(|(_, batch)| (batch.leased + round).has_passed());
        due.flat_map(|(token, batch)| batch.rows.iter().map(|id| (*id, *token))).collect()
    }

    /// Rows that another relay has by now are renewed no more; whatever is said of them is refused by their token.
    fn renewed(&self, asked: &[(i64, i64)], ours: &HashSet<i64>, sent: Uptime) {
        let mut held = self.lock();
        let tokens: HashSet<i64> = asked.iter().map(|(_, token)| *token).collect();
        for token in tokens {
            let Some(batch) = held.get_mut(&token) else { continue };
            let before = batch.rows.len();
            batch.rows.retain(|id| ours.contains(id));
            if batch.rows.len() < before {
                let lost = before - batch.rows.len();
                // Another relay has them, or they were marked a moment ago.
                tracing::debug!(rows = lost, "rows of the outbox are not ours any more");
            }
            if !batch.rows.is_empty() {
                batch.leased = sent;
            }
        }
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<i64, Held>> {
        self.held.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl InHand {
    /// Whether any of its rows is still leased, by our own clock.
    pub(super) fn is_ours(&self) -> bool {
        let held = self.keeper.lock();
        held.get(&self.token).is_some_and(|batch| !(batch.leased + self.keeper.lease).has_passed())
    }
}

impl Drop for InHand {
    fn drop(&mut self) {
        self.keeper.lock().remove(&self.token);
    }
}
