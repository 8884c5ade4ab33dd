//! Waits for another caller's run, without holding a connection.
//!
//! A settle in this process wakes its waiters at once. For runs on other nodes one task reads all operations that this
//! node waits for, in one statement, every 50 ms; without waiters it does nothing.

use std::{collections::HashMap, sync::Arc, time::Duration};

use parking_lot::Mutex;
use tokio::sync::Notify;

use crate::{
    Fence, State,
    store::{Glance, Store},
};

/// Half of the promised time (about 100 ms from another node), to leave room for a slow query.
const EVERY: Duration = Duration::from_millis(50);

#[derive(Default)]
pub(crate) struct Waiters {
    waiting: Mutex<HashMap<i64, Entry>>,
    arrived: Notify,
}

struct Entry {
    fence: Fence,
    waiters: usize,
    wake: Arc<Notify>,
}

/// The place of one waiter; released on drop.
pub(crate) struct Place {
    id: i64,
    wake: Arc<Notify>,
    waiters: Arc<Waiters>,
}

impl Waiters {
    /// Registers a waiter for the end of the run of `id` under `fence`.
    pub(crate) fn join(self: &Arc<Self>, id: i64, fence: Fence) -> Place {
        let mut waiting = self.waiting.lock();
        let entry = waiting.entry(id).or_insert_with(|| Entry { fence, waiters: 0, wake: Arc::default() });
        // The latest reader has the fence of the present run.
        entry.fence = entry.fence.max(fence);
        entry.waiters += 1;
        let wake = entry.wake.clone();
        drop(waiting);
        self.arrived.notify_one();
        Place { id, wake, waiters: self.clone() }
    }

    /// Wakes all waiters of `id`.
    pub(crate) fn wake(&self, id: i64) {
        if let Some(entry) = self.waiting.lock().get(&id) {
            entry.wake.notify_waiters();
        }
    }

    /// Watches the runs of other nodes. Never ends.
    pub(crate) async fn watch<S: Store>(self: Arc<Self>, store: S) {
        loop {
            let ids: Vec<i64> = self.waiting.lock().keys().copied().collect();
            if ids.is_empty() {
                self.arrived.notified().await;
                continue;
            }
            // An unavailable store is asked again; waiters have their own time limit.
            if let Ok(seen) = store.glance(ids.clone()).await {
                self.wake_ended(&ids, &seen);
            }
            tokio::time::sleep(EVERY).await;
        }
    }

    /// Wakes waiters whose run has ended, by one read of all `ids`.
    fn wake_ended(&self, ids: &[i64], seen: &[Glance]) {
        let running = seen.iter().filter(|glance| glance.live && glance.state == State::Processing);
        let running: HashMap<i64, Fence> = running.map(|glance| (glance.id, glance.fence)).collect();
        let waiting = self.waiting.lock();
        for id in ids {
            if let Some(entry) = waiting.get(id).filter(|entry| running.get(id) != Some(&entry.fence)) {
                entry.wake.notify_waiters();
            }
        }
    }
}

impl Place {
    /// Completes when the run has ended. It must be enabled (polled once) before the last read of the row, so that no
    /// wake is missed in between.
    pub(crate) fn woken(&self) -> tokio::sync::futures::Notified<'_> {
        self.wake.notified()
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let mut waiting = self.waiters.waiting.lock();
        if let Some(entry) = waiting.get_mut(&self.id) {
            entry.waiters -= 1;
            if entry.waiters == 0 {
                waiting.remove(&self.id);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use super::*;

    /// This many runs, each with a waiter.
    fn crowd(n: i64) -> (Arc<Waiters>, Vec<Place>) {
        let waiters = Arc::<Waiters>::default();
        let places = (0..n).map(|id| waiters.join(id, Fence(id))).collect();
        (waiters, places)
    }

    /// The least of several measurements: other load of the machine only adds to them.
    fn least(measured: impl Fn()) -> Duration {
        let times = (0..10).map(|_| {
            let begun = Instant::now();
            measured();
            begun.elapsed()
        });
        times.min().unwrap_or_default()
    }

    /// A linear scan would take a thousand times as long among a thousand times as many.
    #[test]
    fn the_cost_of_a_wake_up_is_independent_of_the_number_of_waiters() {
        let cost = |n| {
            let (waiters, _places) = crowd(n);
            least(|| {
                for id in 0..100 {
                    waiters.wake(id);
                    drop(waiters.join(-1 - id, Fence(1)));
                }
            })
        };
        let (few, many) = (cost(100), cost(100_000));
        assert!(many < 30 * few, "{few:?} among a hundred, {many:?} among a hundred thousand");
    }

    /// A linear scan for each would take forty thousand times as long for two hundred times as many.
    #[test]
    fn the_cost_of_a_glance_per_run_is_independent_of_their_number() {
        let cost = |n: i64| {
            let (waiters, _places) = crowd(n);
            let ids: Vec<i64> = (0..n).collect();
            let running = |id: &i64| Glance { id: *id, state: State::Processing, fence: Fence(*id), live: true };
            let seen: Vec<Glance> = ids.iter().map(running).collect();
            least(|| waiters.wake_ended(&ids, &seen))
        };
        let (few, many) = (cost(100), cost(20_000));
        assert!(many < 200 * 30 * few, "{few:?} for a hundred, {many:?} for twenty thousand");
    }
}
