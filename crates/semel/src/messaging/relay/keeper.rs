//! Renews the leases of a relay's batches.
//!
//! A lease is short, so that another relay soon publishes the rows of a killed one. A batch that is confirmed at once
//! needs no renewal. Batches that wait longer for the broker's confirmation are renewed together, in one statement
//! every few seconds.

use std::{
    collections::{HashMap, HashSet},
    sync::Arc,
    time::Duration,
};

use parking_lot::Mutex;

use super::super::{RelayStore, Taken};
use crate::Uptime;

/// Renewal rounds per lease: a batch is renewed in the first or second round after it was taken, and three more rounds
/// may fail before its lease expires.
const ROUNDS: u32 = 5;

/// The leased batches of a relay.
pub(super) struct Keeper {
    lease: Duration,
    /// By token.
    held: Mutex<HashMap<i64, Held>>,
}

struct Held {
    rows: Vec<i64>,
    /// The time before the lease or its last renewal was requested.
    leased: Uptime,
}

/// A leased batch; renewed until this is dropped.
pub(super) struct InHand {
    token: i64,
    keeper: Arc<Keeper>,
}

impl Keeper {
    pub(super) fn new(lease: Duration) -> Arc<Self> {
        Arc::new(Self { lease, held: Mutex::default() })
    }

    /// Starts to renew the rows of a take that was sent at `sent`.
    pub(super) fn keep(self: &Arc<Self>, taken: &Taken, sent: Uptime) -> InHand {
        let rows = taken.rows.iter().map(|row| row.id).collect();
        self.held.lock().insert(taken.token, Held { rows, leased: sent });
        InHand { token: taken.token, keeper: self.clone() }
    }

    /// Renews every batch that was leased a round ago or longer. Never ends.
    pub(super) async fn work<S: RelayStore>(self: Arc<Self>, store: S) {
        let mut round = tokio::time::interval(self.lease / ROUNDS);
        round.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        // Whether the failure was logged: once, not every round.
        let mut said = false;
        loop {
            round.tick().await;
            let rows = self.due();
            if rows.is_empty() {
                continue;
            }
            let sent = Uptime::now();
            // A lost answer must not delay the next attempt beyond the lease.
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
        let held = self.held.lock();
        let due = held.iter().filter(|(_, batch)| (batch.leased + round).has_passed());
        due.flat_map(|(token, batch)| batch.rows.iter().map(|id| (*id, *token))).collect()
    }

    /// Rows that another relay has leased are not renewed; marks for them are refused by their token.
    fn renewed(&self, asked: &[(i64, i64)], ours: &HashSet<i64>, sent: Uptime) {
        let mut held = self.held.lock();
        let tokens: HashSet<i64> = asked.iter().map(|(_, token)| *token).collect();
        for token in tokens {
            let Some(batch) = held.get_mut(&token) else { continue };
            let before = batch.rows.len();
            batch.rows.retain(|id| ours.contains(id));
            if batch.rows.len() < before {
                let lost = before - batch.rows.len();
                // Another relay has them, or they have just been marked.
                tracing::debug!(rows = lost, "leases of outbox rows were lost or already marked");
            }
            if !batch.rows.is_empty() {
                batch.leased = sent;
            }
        }
    }
}

impl InHand {
    /// Whether any of its rows is still leased, by the node's clock.
    pub(super) fn is_ours(&self) -> bool {
        let held = self.keeper.held.lock();
        held.get(&self.token).is_some_and(|batch| !(batch.leased + self.keeper.lease).has_passed())
    }
}

impl Drop for InHand {
    fn drop(&mut self) {
        self.keeper.held.lock().remove(&self.token);
    }
}
