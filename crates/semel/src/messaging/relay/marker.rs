//! Says what became of batches, of several at once where several are done.

use std::{
    sync::{Arc, Mutex, PoisonError},
    time::{Duration, Instant},
};

use tokio::sync::{Notify, mpsc};

use super::{
    super::{Mark, MarkRow, MessageStore, away::Away},
    keeper::InHand,
};
use crate::{Error, Uptime, crash_point};

/// How many batches are marked together at most: several share a commit, and none waits for long.
const TOGETHER: usize = 8;

/// A batch that came back from the broker.
pub(super) struct Finished {
    /// What is to be said of its rows.
    pub(super) marks: Vec<MarkRow>,
    /// How long to go on trying, at most.
    pub(super) until: Uptime,
    /// Renews its rows until they are marked.
    pub(super) in_hand: InHand,
}

/// How long marks are tried: until their time is up, or until none of the rows is ours any more.
struct Patience {
    until: Uptime,
    in_hand: Vec<InHand>,
}

impl Patience {
    fn is_over(&self) -> bool {
        self.until.has_passed() || !self.in_hand.iter().any(InHand::is_ours)
    }
}

/// What the loop should know of marks.
#[derive(Default)]
pub(super) struct Marked {
    more: Notify,
    due: Mutex<Option<Instant>>,
    away: Away,
}

impl Marked {
    /// Waits until marks made rows ready, or did so since the last wait.
    pub(super) async fn more(&self) {
        self.more.notified().await;
    }

    /// When the next row that was marked to be tried later is due.
    pub(super) fn due(&self) -> Option<Instant> {
        *self.due.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The next one was seen to.
    pub(super) fn forget_due(&self) {
        *self.due.lock().unwrap_or_else(PoisonError::into_inner) = None;
    }

    pub(super) fn store_is_away(&self, error: &Error) {
        let error = error.to_string();
        self.away.begins(&error, || tracing::warn!(error, "the outbox cannot be reached; the relay waits"));
    }

    pub(super) fn store_is_back(&self) {
        self.away.ends(|after| tracing::info!(after, "the outbox is back; the relay goes on"));
    }

    fn made(&self, ready: u64, put_back: bool, after: Option<Duration>) {
        if let Some(due) = after.map(|after| Instant::now() + after) {
            let mut next = self.due.lock().unwrap_or_else(PoisonError::into_inner);
            *next = Some(next.map_or(due, |next| next.min(due)));
        }
        if ready > 0 || put_back || after.is_some() {
            // Also where something waits: the loop has to know until when.
            self.more.notify_one();
        }
    }
}

/// Marks until nobody is left to send.
pub(super) async fn work<S: MessageStore>(store: S, mut finished: mpsc::Receiver<Finished>, marked: Arc<Marked>) {
    let mut batches = Vec::new();
    while finished.recv_many(&mut batches, TOGETHER).await > 0 {
        let Some(until) = batches.iter().map(|batch| batch.until).max() else { continue };
        let (marks, in_hand): (Vec<_>, Vec<_>) = batches.drain(..).map(|batch| (batch.marks, batch.in_hand)).unzip();
        mark_all(&store, marks.concat(), &Patience { until, in_hand }, &marked).await;
    }
}

/// Marks; what the database refuses is halved until only the culprit is left. Those that cannot be marked come back
/// when their lease ends, and are published again under the same id.
async fn mark_all<S: MessageStore>(store: &S, marks: Vec<MarkRow>, patience: &Patience, marked: &Marked) {
    let mut todo = vec![marks];
    while let Some(mut marks) = todo.pop() {
        match patiently(store, &marks, patience, marked).await {
            Ok(ready) => {
                crash_point!("relay.marked");
                let put_back = marks.iter().any(|row| row.mark == Mark::PutBack);
                let after = marks.iter().filter_map(|row| match row.mark {
                    Mark::Retry { after, .. } | Mark::Later { after, .. } | Mark::Unroutable { after, .. } => {
                        Some(after)
                    }
                    Mark::Sent | Mark::PutBack | Mark::Park { .. } => None,
                });
                marked.made(ready, put_back, after.min());
            }
            Err(error) if !error.is_transient() && marks.len() > 1 => {
                let second = marks.split_off(marks.len() / 2);
                todo.extend([second, marks]);
            }
            Err(error) => tracing::warn!(%error, rows = marks.len(), "messages could not be marked in time"),
        }
    }
}

/// Asks a store that is away again until the rows are not ours any more.
async fn patiently<S: MessageStore>(
    store: &S,
    marks: &[MarkRow],
    patience: &Patience,
    marked: &Marked,
) -> crate::Result<u64> {
    let mut pause = Duration::from_millis(20);
    loop {
        match store.mark(marks.to_vec()).await {
            Err(error) if error.is_transient() && !patience.is_over() => {
                marked.store_is_away(&error);
                tokio::time::sleep(pause.min(patience.until.remaining())).await;
                pause = (pause * 2).min(Duration::from_secs(1));
            }
            done => return done,
        }
    }
}
