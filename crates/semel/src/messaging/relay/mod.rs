//! The relay: outbox to broker.
//!
//! - `mod.rs`: the loop that takes
//! - `publish.rs`: a batch on its way, and what is said of its rows
//! - `marker.rs`: says it, for several batches at once
//! - `keeper.rs`: renews the leases of batches that wait for the broker's word
//! - `pace.rs`: how much at once, and when to pause

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
    Broker, MessageStore, Wake,
    pause::{Pause, Stop},
};
use crate::{Backoff, Result, Uptime, crash_point};

/// The shortest time between two looks at what is due.
const SOONEST: Duration = Duration::from_millis(10);

/// How a relay works.
#[derive(Clone, Debug)]
pub struct RelayOptions {
    /// Rows that are leased at once.
    pub batch: u32,
    /// Batches that are on their way to the broker at the same time.
    pub in_flight: usize,
    /// How long rows are leased. Short, because the rows of a killed relay wait for it; renewed for as long as the relay
    /// has them.
    pub lease: Duration,
    /// How long the broker may take for its word on a batch.
    pub patience: Duration,
    /// How often to look without being woken.
    pub poll: Duration,
    /// How many times the broker may refuse a message before a person decides.
    pub max_failures: u32,
    /// How long to wait after a refusal.
    pub backoff: Backoff,
    /// How long to wait before an unroutable message is tried again.
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
            max_failures: 10,
            backoff: Backoff::default(),
            unroutable: Duration::from_secs(60),
        }
    }
}

/// Brings messages from the outbox to the broker, until it is stopped. There may be any number of them, on any number
/// of nodes.
///
/// A message is published at least once: a relay that dies between the broker's word and the mark leaves a row that is
/// published again, under the same id. The inbox of the [`Consumer`](super::Consumer) makes that harmless.
///
/// ```
/// use std::sync::Arc;
///
/// use semel::messaging::{Broker, MessageStore, Relay, RelayOptions};
/// use tokio::sync::watch;
///
/// async fn relay<S: MessageStore>(store: S, broker: Arc<dyn Broker>, stop: watch::Receiver<bool>) {
///     Relay::new(store, broker, RelayOptions::default()).run(stop).await;
/// }
/// ```
pub struct Relay<S: MessageStore> {
    store: S,
    broker: Arc<dyn Broker>,
    options: RelayOptions,
}

/// What the loop remembers from round to round.
struct Loop {
    stop: Stop,
    /// To the marker.
    finished: mpsc::Sender<Finished>,
    marked: Arc<Marked>,
    keeper: Arc<Keeper>,
    /// Asked for once: what it is woken for before the first wait is not missed.
    wake: Wake,
    publisher: Arc<Publisher>,
    publishing: JoinSet<Summary>,
    pace: Pace,
    /// Between two tries at a store that is away.
    store_pause: Pause,
    /// When to tend the outbox, at the latest.
    tend_at: Instant,
}

/// What a take has found.
enum Found {
    /// As much as was asked for: there may be more.
    Full,
    /// Less than that.
    Some,
    /// Nothing.
    Nothing,
}

impl<S: MessageStore> Relay<S> {
    /// A relay between a database's outbox and a broker.
    #[must_use]
    pub fn new(store: S, broker: Arc<dyn Broker>, options: RelayOptions) -> Self {
        Self { store, broker, options }
    }

    /// Works until `stop` turns true; then takes nothing new, waits for the broker's word on what is on its way, and
    /// puts the rest back.
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
        // Without its marker it would publish everything again and again: then it ends, and its owner sees that.
        while !state.stop.is_now() && !marker.is_finished() {
            self.round(&mut state).await;
        }
        // Each is bounded by the relay's patience, and so is the marker.
        while state.publishing.join_next().await.is_some() {}
        drop(state);
        let _ = marker.await;
        drop(renewals);
    }

    /// Takes once, and waits if there was nothing more to take.
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
        // Woken for nothing that is ready: something waits, for a time or for what is before it.
        if Instant::now() >= state.tend_at || (woken && matches!(found, Found::Nothing)) {
            let tended = self.store.tend().await?;
            let due = match tended.next_due {
                Some(due) => due.since(self.store.now().await?),
                None => self.options.poll,
            };
            // What is due and yet not ready is in another relay's hands, for a moment.
            state.tend_at = Instant::now() + due.max(SOONEST).min(self.options.poll);
            if tended.more {
                state.tend_at = Instant::now();
            }
            return Ok(tended.ready > 0 || tended.more || matches!(found, Found::Full));
        }
        Ok(matches!(found, Found::Full))
    }

    /// Leases rows, and sends them on their way.
    async fn take(&self, state: &mut Loop) -> Result<Found> {
        let limit = state.pace.batch();
        // Counted from before the take, so that our time is up before the database's.
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
            let _ = finished.send(publisher.put_back(taken, in_hand)).await;
            return Ok(Found::Some);
        }
        state.publishing.spawn(async move {
            let (marks, summary) = publisher.publish(taken, sent, in_hand).await;
            // The marker goes on for as long as there is somebody to send to it.
            let _ = finished.send(marks).await;
            summary
        });
        Ok(if full { Found::Full } else { Found::Some })
    }

    /// Waits for something to do.
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
    /// Waits until another batch may be on its way; `false` when it is time to stop or to pause.
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
            // Its rows come back when their lease ends.
            Err(error) => tracing::error!(%error, "publishing a batch ended early"),
        }
    }
}
