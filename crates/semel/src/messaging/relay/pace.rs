//! Batch sizes and pauses.

use std::time::{Duration, Instant};

use super::{
    super::{
        Broker, BrokerHealth,
        away::Away,
        pause::{Pause, Stop},
    },
    publish::Summary,
};

/// How often to check the state of an unreachable broker. The check sends no request.
const GLANCE: Duration = Duration::from_millis(20);

/// The pace of a relay.
///
/// A message that breaks its connection leaves every message in flight unconfirmed, and the cause is unknown. So after
/// a batch without confirmations the batches get smaller, in the end one message each, and only that message waits.
pub(super) struct Pace {
    most: u32,
    in_flight: usize,
    batch: u32,
    pause: Pause,
    must_pause: bool,
    away: Away,
    woken: bool,
}

impl Pace {
    pub(super) fn new(most: u32, in_flight: usize) -> Self {
        let most = most.max(1);
        Self {
            most,
            in_flight,
            batch: most,
            pause: Pause::new(),
            must_pause: false,
            away: Away::default(),
            woken: false,
        }
    }

    /// How many rows to take.
    pub(super) fn batch(&self) -> u32 {
        self.batch
    }

    /// How many batches may be in flight.
    pub(super) fn in_flight(&self) -> usize {
        if self.batch < self.most { 1 } else { self.in_flight }
    }

    /// Notes that rows may be ready.
    pub(super) fn woken(&mut self) {
        self.woken = true;
    }

    /// Whether rows may have become ready since the last call.
    pub(super) fn was_woken(&mut self) -> bool {
        std::mem::take(&mut self.woken)
    }

    /// A batch has been answered.
    pub(super) fn ended(&mut self, summary: Summary) {
        if summary.answered > 0 {
            self.pause.reset();
            self.away.ends(|after| tracing::info!(after, "the broker answers again; the relay continues"));
        } else {
            self.must_pause = true;
            self.say(summary.why.as_deref().unwrap_or("no answer"));
        }
        if summary.unknown > 0 {
            self.batch = (self.batch / 2).max(1);
        } else if summary.answered > 0 {
            self.batch = self.batch.saturating_mul(2).min(self.most);
        }
    }

    /// Whether to take nothing now.
    pub(super) fn must_pause(&self) -> bool {
        self.must_pause
    }

    /// Pauses if needed: for a while, or until an unreachable broker is back. While the broker asks for a pause nothing
    /// is leased.
    pub(super) async fn hold(&mut self, broker: &dyn Broker, stop: &mut Stop) {
        let was_up = broker.health() == BrokerHealth::Up;
        let end = Instant::now() + if self.must_pause { self.pause.next() } else { Duration::ZERO };
        self.must_pause = false;
        loop {
            match broker.health() {
                BrokerHealth::Up if !was_up => return,
                BrokerHealth::Blocked(why) => self.say(&why),
                BrokerHealth::Up | BrokerHealth::Down(_) if Instant::now() >= end => return,
                BrokerHealth::Up | BrokerHealth::Down(_) => {}
            }
            if !stop.sleep(GLANCE).await {
                return;
            }
        }
    }

    fn say(&mut self, why: &str) {
        self.away.begins(why, || tracing::warn!(why, "the broker accepts no messages; the relay waits"));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ended(answered: usize, unknown: usize) -> Summary {
        Summary { answered, unknown, why: None }
    }

    #[test]
    fn after_a_batch_without_answers_batches_are_smaller_and_sent_one_at_a_time() {
        let mut pace = Pace::new(8, 4);
        assert_eq!((pace.batch(), pace.in_flight()), (8, 4));
        for batch in [4, 2, 1, 1] {
            pace.ended(ended(0, 8));
            assert_eq!((pace.batch(), pace.in_flight(), pace.must_pause()), (batch, 1, true));
        }
        for batch in [2, 4, 8, 8] {
            pace.ended(ended(1, 0));
            assert_eq!(pace.batch(), batch);
        }
        assert_eq!(pace.in_flight(), 4);
    }

    #[test]
    fn an_unreachable_broker_does_not_make_batches_smaller() {
        let mut pace = Pace::new(8, 4);
        pace.ended(ended(0, 0));
        assert_eq!((pace.batch(), pace.in_flight(), pace.must_pause()), (8, 4, true));
    }
}
