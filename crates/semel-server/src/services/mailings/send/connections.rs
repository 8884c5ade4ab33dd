//! The connections of a node: its runs share them.

use std::sync::{
    Arc,
    atomic::{AtomicUsize, Ordering},
};

use tokio::sync::Semaphore;

/// The connections of a node, shared by its runs.
pub(in super::super) struct Connections {
    pub(super) seats: Arc<Semaphore>,
    all: usize,
    runs: AtomicUsize,
}

impl Connections {
    pub(in super::super) fn new(all: usize) -> Self {
        Self { seats: Arc::new(Semaphore::new(all)), all, runs: AtomicUsize::new(0) }
    }

    pub(super) fn enter(self: &Arc<Self>) -> Entered {
        self.runs.fetch_add(1, Ordering::Relaxed);
        Entered(self.clone())
    }

    /// How many connections one of the present runs may use.
    pub(super) fn share(&self) -> usize {
        (self.all / self.runs.load(Ordering::Relaxed).max(1)).max(1)
    }
}

/// Counts a run among those that share the connections.
pub(super) struct Entered(Arc<Connections>);

impl Drop for Entered {
    fn drop(&mut self) {
        self.0.runs.fetch_sub(1, Ordering::Relaxed);
    }
}
