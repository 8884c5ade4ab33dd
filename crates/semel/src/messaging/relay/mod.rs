//! The relay: outbox to broker.
//!
//! - `mod.rs`: the loop that leases rows
//! - `publish.rs`: publishes a batch and turns the broker's answers into marks
//! - `marker.rs`: stores marks, several batches per commit
//! - `keeper.rs`: renews the leases of batches that wait for confirmations
//! - `pace.rs`: batch sizes and pauses

mod keeper;
mod marker;
mod pace;
mod publish;

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use tokio::{sync::mpsc, task::JoinSet};

use self::{
    keeper::Keeper,
    marker::{Finished, Marked},
    pace::Pace,
    publish::{Publisher, Summary},
};
use super::{
    Broker, RelayStore, Wake,
    pause::{Pause, Stop},
};
use crate::{Backoff, Result, Uptime, crash_point};

/// The shortest interval between two looks for due rows.
const SOONEST: Duration = Duration::from_millis(10);

/// Options of a relay.
#[derive(Clone, Debug)]
pub struct RelayOptions {
    /// The most rows per batch.
    pub batch: u32,
    /// The most concurrent batches.
    pub in_flight: usize,
    /// The lease of a row. Short, because the rows of a killed relay wait for it; renewed while the relay has them.
    pub lease: Duration,
    /// How long to wait for the broker's confirmations of a batch.
    pub patience: Duration,
    /// The polling interval, without a wake.
    pub poll: Duration,
    /// How many times the broker may refuse a message before it is parked.
    pub max_attempts: u32,
    /// The delay after a refusal.
    pub backoff: Backoff,
    /// The delay before an unroutable message is tried again.
    pub unroutable: Duration,
}

impl Default for RelayOptions {
    fn default() -> Self {
        Self {
            batch: 512,
            in_flight: 4,
            lease: Duration::from_secs(10),
            patience: Duration::from_secs(30),
            poll: Duration::from_secs(1),
            max_attempts: 10,
            backoff: Backoff::default(),
            unroutable: Duration::from_secs(60),
        }
    }
}

/// Publishes messages from the outbox to the broker, until it is stopped. Any number of relays may run, on any number
/// of nodes.
///
/// A message is published at least once: if a relay dies between the confirmation and the mark, the row is published
/// again under the same id. The inbox of the [`Consumer`](super::Consumer) deduplicates it.
///
/// ```
/// use std::sync::Arc;
///
/// use semel::messaging::{Broker, RelayStore, Relay, RelayOptions};
/// use tokio::sync::watch;
///
/// async fn relay<S: RelayStore>(store: S, broker: Arc<dyn Broker>, stop: watch::Receiver<bool>) {
///     Relay::new(store, broker, RelayOptions::default()).run(stop).await;
/// }
/// ```
pub struct Relay<S: RelayStore> {
    store: S,
    broker: Arc<dyn Broker>,
    options: RelayOptions,
}

/// The state of the loop between rounds.
struct Loop {
    stop: Stop,
    /// To the marker.
    finished: mpsc::Sender<Finished>,
    marked: Arc<Marked>,
    keeper: Arc<Keeper>,
    /// Created once, so that a wake before the first wait is not missed.
    wake: Wake,
    publisher: Arc<Publisher>,
    publishing: JoinSet<Summary>,
    pace: Pace,
    /// The delay between two attempts at an unavailable store.
    store_pause: Pause,
    /// The latest time of the next tending of the outbox.
    tend_at: Instant,
}

/// The result of a take.
enum Found {
    /// As much as requested: there may be more.
    Full,
    /// Less than that.
    Some,
    /// Nothing.
    Nothing,
}

impl<S: RelayStore> Relay<S> {
    /// A relay between a database's outbox and a broker.
    #[must_use]
    pub fn new(store: S, broker: Arc<dyn Broker>, options: RelayOptions) -> Self {
        Self { store, broker, options }
    }

    /// Works until `stop` turns true; then takes nothing new, waits for confirmations of published batches, and
    /// releases the rest.
    pub async fn run(self, stop: tokio::sync::watch::Receiver<bool>) {
        let in_flight = self.options.in_flight.max(1);
        let (finished, to_mark) = mpsc::channel(in_flight);
        let marked = Arc::<Marked>::default();
        let marker = tokio::spawn(marker::work(self.store.clone(), to_mark, marked.clone()));
        let keeper = Keeper::new(self.options.lease);
        // Aborted when it is dropped, at the end.
        let mut renewals = JoinSet::new();
        renewals.spawn(keeper.clone().work(self.store.clone()));
        let mut state = Loop {
            stop: Stop::new(stop),
            finished,
            marked,
            keeper,
            wake: self.store.outbox_wake(),
            publisher: Arc::new(Publisher::new(self.broker.clone(), self.options.clone())),
            publishing: JoinSet::new(),
            pace: Pace::new(self.options.batch, in_flight),
            store_pause: Pause::new(),
            tend_at: Instant::now(),
        };
        // Without its marker the relay would publish everything again and again. It ends instead, and its owner sees
        // that.
        while !state.stop.is_now() && !marker.is_finished() {
            self.round(&mut state).await;
        }
        // Each is bounded by `patience`, and so is the marker.
        while state.publishing.join_next().await.is_some() {}
        drop(state);
        let _ = marker.await;
        drop(renewals);
    }

    /// Takes once, and waits if there is nothing more to take.
    async fn round(&self, state: &mut Loop) {
        state.pace.hold(&*self.broker, &mut state.stop).await;
        if !state.has_room().await {
            return;
        }
        match self.work(state).await {
            Ok(true) => state.store_pause.reset(),
            Ok(false) => {
                state.store_pause.reset();
                self.wait(state).await;
            }
            Err(error) => {
                state.marked.store_is_away(&error);
                state.store_pause.wait(&mut state.stop).await;
            }
        }
    }

    /// Takes and tends; whether there may be more at once.
    async fn work(&self, state: &mut Loop) -> Result<bool> {
        if state.stop.is_now() {
            return Ok(false);
        }
        let woken = state.pace.was_woken();
        let found = self.take(state).await?;
        state.marked.store_is_back();
        // Woken, but nothing is ready: a row waits for a time or for an earlier row of its ordering key.
        if Instant::now() >= state.tend_at || (woken && matches!(found, Found::Nothing)) {
            let tended = self.store.tend().await?;
            let due = match tended.next_due {
                Some(due) => due.since(self.store.now().await?),
                None => self.options.poll,
            };
            // A row that is due but not ready is leased by another relay for a moment.
            state.tend_at = Instant::now() + due.max(SOONEST).min(self.options.poll);
            if tended.more {
                state.tend_at = Instant::now();
            }
            return Ok(tended.ready > 0 || tended.more || matches!(found, Found::Full));
        }
        Ok(matches!(found, Found::Full))
    }

    /// Leases rows and publishes them in a task.
    async fn take(&self, state: &mut Loop) -> Result<Found> {
        let limit = state.pace.batch();
        // Taken before the request, so that the node's deadline is earlier than the database's.
        let sent = Uptime::now();
        let taken = self.store.take(limit, self.options.lease).await?;
        let full = taken.more;
        if taken.rows.is_empty() {
            return Ok(if full { Found::Full } else { Found::Nothing });
        }
        crash_point!("relay.taken");
        let (publisher, finished) = (state.publisher.clone(), state.finished.clone());
        let in_hand = state.keeper.keep(&taken, sent);
        if state.stop.is_now() {
            let _ = finished.send(publisher.release(taken, in_hand)).await;
            return Ok(Found::Some);
        }
        state.publishing.spawn(async move {
            let (marks, summary) = publisher.publish(taken, sent, in_hand).await;
            // The marker runs until all its senders are gone.
            let _ = finished.send(marks).await;
            summary
        });
        Ok(if full { Found::Full } else { Found::Some })
    }

    /// Waits for work.
    async fn wait(&self, state: &mut Loop) {
        loop {
            let tend_at = state.marked.due().map_or(state.tend_at, |due| due.min(state.tend_at));
            tokio::select! {
                () = state.stop.come() => return,
                () = state.wake.woken() => return state.pace.woken(),
                () = state.marked.more() => return,
                () = tokio::time::sleep_until(tend_at.into()) => {
                    state.tend_at = Instant::now();
                    return state.marked.forget_due();
                }
                Some(ended) = state.publishing.join_next() => {
                    state.ended(ended);
                    if state.pace.must_pause() {
                        return;
                    }
                }
            }
        }
    }
}

impl Loop {
    /// Waits until another batch may be published; `false` if stopped or pausing.
    async fn has_room(&mut self) -> bool {
        while let Some(ended) = self.publishing.try_join_next() {
            self.ended(ended);
        }
        while self.publishing.len() >= self.pace.in_flight() {
            tokio::select! {
                () = self.stop.come() => return false,
                Some(ended) = self.publishing.join_next() => self.ended(ended),
            }
        }
        !self.pace.must_pause()
    }

    fn ended(&mut self, ended: std::result::Result<Summary, tokio::task::JoinError>) {
        match ended {
            Ok(summary) => self.pace.ended(summary),
            // Its rows are published again when their lease expires.
            Err(error) => tracing::error!(%error, "publishing a batch ended early"),
        }
    }
}
