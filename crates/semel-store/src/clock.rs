//! The clock: the database's, unless a test sets the time.

use std::{
    sync::{
        Arc,
        atomic::{AtomicI64, Ordering},
    },
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use semel::{Timestamp, micros};

/// Where the time comes from.
#[derive(Clone, Default)]
pub struct Clock(Option<Arc<AtomicI64>>);

impl Clock {
    /// A clock that stands until it is moved, for tests.
    #[must_use]
    pub fn manual(start: Timestamp) -> Self {
        Self(Some(Arc::new(AtomicI64::new(start.as_micros()))))
    }

    /// Moves a manual clock on. Does nothing to a real one.
    pub fn advance(&self, by: Duration) {
        if let Some(time) = &self.0 {
            time.fetch_add(micros(by), Ordering::SeqCst);
        }
    }

    /// Sets a manual clock, also back.
    pub fn set(&self, time: Timestamp) {
        if let Some(now) = &self.0 {
            now.store(time.as_micros(), Ordering::SeqCst);
        }
    }

    /// The time that was set, if any.
    pub(crate) fn fixed(&self) -> Option<i64> {
        self.0.as_ref().map(|time| time.load(Ordering::SeqCst))
    }

    /// The time that was set, else this host's.
    pub(crate) fn host(&self) -> i64 {
        self.fixed().unwrap_or_else(|| micros(SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default()))
    }
}
