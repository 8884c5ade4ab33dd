//! Waits that end early when the task is stopped.

use std::time::Duration;

use tokio::sync::watch;

/// A delay that doubles each time.
pub(super) struct Pause {
    last: Duration,
}

impl Pause {
    /// The first delay: long enough not to be a busy loop.
    const FIRST: Duration = Duration::from_millis(100);
    /// The longest delay: the recovery of a server should be noticed within this time.
    const LONGEST: Duration = Duration::from_secs(5);

    pub(super) const fn new() -> Self {
        Self { last: Duration::ZERO }
    }

    /// Resets the delay after a success.
    pub(super) fn reset(&mut self) {
        self.last = Duration::ZERO;
    }

    /// The next delay, shortened by up to a quarter at random, so that nodes do not retry together.
    pub(super) fn next(&mut self) -> Duration {
        self.last = (self.last * 2).clamp(Self::FIRST, Self::LONGEST);
        self.last.mul_f64(1.0 - fastrand::f64() / 4.0)
    }

    /// Waits; `false` if stopped.
    pub(super) async fn wait(&mut self, stop: &mut Stop) -> bool {
        let time = self.next();
        stop.sleep(time).await
    }
}

/// Whether to stop. A dropped sender counts as a stop request.
#[derive(Clone)]
pub(super) struct Stop(watch::Receiver<bool>);

impl Stop {
    pub(super) fn new(stop: watch::Receiver<bool>) -> Self {
        Self(stop)
    }

    pub(super) fn is_now(&self) -> bool {
        *self.0.borrow() || self.0.has_changed().is_err()
    }

    /// Waits for the stop.
    pub(super) async fn come(&mut self) {
        let _ = self.0.wait_for(|stop| *stop).await;
    }

    /// Sleeps; `false` if stopped.
    pub(super) async fn sleep(&mut self, time: Duration) -> bool {
        tokio::time::timeout(time, self.come()).await.is_err()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_grow_up_to_their_limit_and_begin_anew() {
        let mut pause = Pause::new();
        let all: Vec<_> = (0..12).map(|_| pause.next()).collect();
        assert!(all[0] <= Pause::FIRST && all[0] >= Pause::FIRST.mul_f64(0.75), "{all:?}");
        assert!(all[11] <= Pause::LONGEST && all[11] >= Pause::LONGEST.mul_f64(0.75), "{all:?}");
        pause.reset();
        assert!(pause.next() <= Pause::FIRST);
    }

    #[tokio::test]
    async fn a_sleep_ends_when_it_is_time_to_stop() {
        let (sender, receiver) = watch::channel(false);
        let mut stop = Stop::new(receiver);
        assert!(stop.sleep(Duration::ZERO).await);
        sender.send_replace(true);
        assert!(!stop.sleep(Duration::from_secs(3600)).await);
        assert!(stop.is_now());
    }

    #[tokio::test]
    async fn a_dropped_stop_sender_counts_as_a_stop() {
        let (sender, receiver) = watch::channel(false);
        let mut stop = Stop::new(receiver);
        drop(sender);
        assert!(stop.is_now());
        assert!(!stop.sleep(Duration::from_secs(3600)).await);
    }
}
