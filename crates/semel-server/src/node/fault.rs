//! A task that ends early is logged, and the server stops.

use std::{
    panic::AssertUnwindSafe,
    sync::{Arc, OnceLock},
};

use futures_util::FutureExt as _;
use semel::{Ledger, Store};

use crate::stop::Stop;

/// The first task of this process that ended early. Clones share it.
///
/// A server without its relay would answer every request and never do the rest of its work. A server that ends is
/// restarted by its supervisor; its leases expire, and the work is done again.
#[derive(Clone, Debug)]
pub struct Fault {
    task: Arc<OnceLock<&'static str>>,
    stop: Stop,
}

impl Fault {
    /// No fault yet; a fault requests this stop.
    #[must_use]
    pub fn new(stop: &Stop) -> Self {
        Self { task: Arc::default(), stop: stop.clone() }
    }

    /// The task that ended early, if one did.
    #[must_use]
    pub fn task(&self) -> Option<&'static str> {
        self.task.get().copied()
    }

    /// Reports a background task of a ledger that ends early.
    pub fn watch(&self, ledger: &Ledger<impl Store>) {
        let (fault, broken) = (self.clone(), ledger.broken());
        tokio::spawn(async move { fault.ended(broken.await) });
    }

    /// Runs a task that may end when `may` returns true, and must never panic.
    pub(super) async fn guard(self, name: &'static str, may: impl Fn() -> bool, task: impl Future<Output = ()>) {
        // The state that a panic left is not used again: the process ends.
        let ended = AssertUnwindSafe(task).catch_unwind().await;
        if ended.is_err() || !may() {
            self.ended(name);
        }
    }

    fn ended(&self, task: &'static str) {
        // Set it first: readiness reads it.
        let _ = self.task.set(task);
        tracing::error!(task, "a task ended early; this process stops, to be started again");
        self.stop.ask_once();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_task_that_panics_or_returns_too_early_asks_for_a_gentle_stop() {
        let stop = Stop::new();
        let fault = Fault::new(&stop);
        fault.clone().guard("in time", || true, async {}).await;
        assert!(fault.task().is_none() && !stop.is_asked());
        fault.clone().guard("too early", || false, async {}).await;
        assert!(stop.is_asked());
        fault.clone().guard("panics", || true, async { panic!("on purpose") }).await;
        assert_eq!(fault.task(), Some("too early"), "the first is the cause");
        assert!(stop.forced().now_or_never().is_none(), "a second one must not cut off what the first let finish");
    }
}
