//! Waiting for somebody else's run, without holding a connection.
//!
//! A settle in this process wakes its waiters at once. For runs on other nodes one task glances at
//! all operations that anybody here waits for, in one statement, every 50 ms; with no waiters it
//! does nothing.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use tokio::sync::Notify;

use crate::{
    Fence, State,
    store::{Glance, Store},
};

/// Half of what we promise (about 100 ms from another node), so that it holds with a slow query.
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

/// One waiter's place; it is given up on drop.
pub(crate) struct Place {
    id: i64,
    wake: Arc<Notify>,
    waiters: Arc<Waiters>,
}

impl Waiters {
    /// Takes a place to wait for the run of `id` under `fence` to end.
    pub(crate) fn join(self: &Arc<Self>, id: i64, fence: Fence) -> Place {
        let mut waiting = self.lock();
        let entry = waiting.entry(id).or_insert_with(|| Entry { fence, waiters: 0, wake: Arc::default() });
        // Whoever looked last knows the run that is waited for.
        entry.fence = entry.fence.max(fence);
        entry.waiters += 1;
        let wake = entry.wake.clone();
        drop(waiting);
        self.arrived.notify_one();
        Place { id, wake, waiters: self.clone() }
    }

    /// Wakes everybody who waits for `id`.
    pub(crate) fn wake(&self, id: i64) {
        if let Some(entry) = self.lock().get(&id) {
            entry.wake.notify_waiters();
        }
    }

    /// Watches the runs of other nodes. Never ends.
    pub(crate) async fn watch<S: Store>(self: Arc<Self>, store: S) {
        loop {
            let ids: Vec<i64> = self.lock().keys().copied().collect();
            if ids.is_empty() {
                self.arrived.notified().await;
                continue;
            }
            // A store that cannot be asked now is asked again; waiters have their own time limit.
            if let Ok(seen) = store.glance(ids.clone()).await {
                self.wake_ended(&ids, &seen);
            }
            tokio::time::sleep(EVERY).await;
        }
    }

    /// Wakes those whose run has ended, by a glance at each of `ids`.
    fn wake_ended(&self, ids: &[i64], seen: &[Glance]) {
        let running = seen.iter().filter(|glance| glance.live && glance.state == State::Processing);
        let running: HashMap<i64, Fence> = running.map(|glance| (glance.id, glance.fence)).collect();
        let waiting = self.lock();
        for id in ids {
            if let Some(entry) = waiting.get(id).filter(|entry| running.get(id) != Some(&entry.fence)) {
                entry.wake.notify_waiters();
            }
        }
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, HashMap<i64, Entry>> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Place {
    /// A future that is done when the run has ended. It must be enabled (polled once) before the
    /// last look at the row, so that no wake-up falls in between.
    pub(crate) fn woken(&self) -> tokio::sync::futures::Notified<'_> {
        self.wake.notified()
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let mut waiting = self.waiters.lock();
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

    /// As many runs, each with somebody who waits for it.
    fn crowd(n: i64) -> (Arc<Waiters>, Vec<Place>) {
        let waiters = Arc::<Waiters>::default();
        let places = (0..n).map(|id| waiters.join(id, Fence(id))).collect();
        (waiters, places)
    }

    /// The least of several measurements: whatever else the machine does only adds to them.
    fn least(measured: impl Fn()) -> Duration {
        let times = (0..10).map(|_| {
            let begun = Instant::now();
            measured();
            begun.elapsed()
        });
        times.min().unwrap_or_default()
    }

    /// A look through all of them would take a thousand times as long among a thousand times as many.
    #[test]
    fn a_wake_up_costs_the_same_however_many_wait() {
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

    /// A look through all of them for each would take forty thousand times as long for two hundred times as many.
    #[test]
    fn a_glance_costs_each_run_the_same_however_many_are_waited_for() {
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
