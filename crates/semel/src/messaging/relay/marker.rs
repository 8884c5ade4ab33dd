//! Marks published batches, several in one commit.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use parking_lot::Mutex;
use tokio::sync::{Notify, mpsc};

use super::{
    super::{Mark, MarkRow, RelayStore, away::Away},
    keeper::InHand,
};
use crate::{Error, Uptime, crash_point};

/// The most batches per commit: several share one, and none waits for long.
const TOGETHER: usize = 8;

/// A batch that the broker has answered.
pub(super) struct Finished {
    /// The marks of its rows.
    pub(super) marks: Vec<MarkRow>,
    /// How long to retry, at most.
    pub(super) until: Uptime,
    /// Renews its rows until they are marked.
    pub(super) in_hand: InHand,
}

/// How long to retry marks: until the time is up, or until no row is leased any more.
struct Patience {
    until: Uptime,
    in_hand: Vec<InHand>,
}

impl Patience {
    fn is_over(&self) -> bool {
        self.until.has_passed() || !self.in_hand.iter().any(InHand::is_ours)
    }
}

/// The state of marks that the relay's loop reads.
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

    /// When the next row that was marked for a later retry is due.
    pub(super) fn due(&self) -> Option<Instant> {
        *self.due.lock()
    }

    /// The relay's loop has handled the next one.
    pub(super) fn forget_due(&self) {
        *self.due.lock() = None;
    }

    pub(super) fn store_is_away(&self, error: &Error) {
        let error = error.to_string();
        self.away.begins(&error, || tracing::warn!(error, "the outbox cannot be reached; the relay waits"));
    }

    pub(super) fn store_is_back(&self) {
        self.away.ends(|after| tracing::info!(after, "the outbox is back; the relay continues"));
    }

    fn made(&self, ready: u64, released: bool, after: Option<Duration>) {
        if let Some(due) = after.map(|after| Instant::now() + after) {
            let mut next = self.due.lock();
            *next = Some(next.map_or(due, |next| next.min(due)));
        }
        if ready > 0 || released || after.is_some() {
            // Also if a row waits: the loop needs to know until when.
            self.more.notify_one();
        }
    }
}

/// Marks until all senders are gone.
pub(super) async fn work<S: RelayStore>(store: S, mut finished: mpsc::Receiver<Finished>, marked: Arc<Marked>) {
    let mut batches = Vec::new();
    while finished.recv_many(&mut batches, TOGETHER).await > 0 {
        let Some(until) = batches.iter().map(|batch| batch.until).max() else { continue };
        let (marks, in_hand): (Vec<_>, Vec<_>) = batches.drain(..).map(|batch| (batch.marks, batch.in_hand)).unzip();
        mark_all(&store, marks.concat(), &Patience { until, in_hand }, &marked).await;
    }
}

/// Marks. A batch that the database refuses is halved until only the offending row is left. Rows that cannot be marked
/// are published again under the same id when their lease expires.
async fn mark_all<S: RelayStore>(store: &S, marks: Vec<MarkRow>, patience: &Patience, marked: &Marked) {
    let mut todo = vec![marks];
    while let Some(mut marks) = todo.pop() {
        match patiently(store, &marks, patience, marked).await {
            Ok(ready) => {
                crash_point!("relay.marked");
                let released = marks.iter().any(|row| row.mark == Mark::PutBack);
                let after = marks.iter().filter_map(|row| match row.mark {
                    Mark::Retry { after, .. } | Mark::Later { after, .. } | Mark::Unroutable { after, .. } => {
                        Some(after)
                    }
                    Mark::Sent | Mark::PutBack | Mark::Park { .. } => None,
                });
                marked.made(ready, released, after.min());
            }
            Err(error) if !error.is_transient() && marks.len() > 1 => {
                let second = marks.split_off(marks.len() / 2);
                todo.extend([second, marks]);
            }
            Err(error) => tracing::warn!(%error, rows = marks.len(), "messages could not be marked in time"),
        }
    }
}

/// Retries an unavailable store until the leases have expired.
async fn patiently<S: RelayStore>(
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
