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
pub struct Clock(Option<Arc<Manual>>);

/// The two clocks of a host that stands until it is moved.
struct Manual {
    /// What a person can set.
    wall: AtomicI64,
    /// How long the host has been up, which nobody can set.
    boot: AtomicI64,
}

impl Clock {
    /// A clock that stands until it is moved, for tests.
    #[must_use]
    pub fn manual(start: Timestamp) -> Self {
        Self(Some(Arc::new(Manual { wall: AtomicI64::new(start.as_micros()), boot: AtomicI64::new(0) })))
    }

    /// Moves a manual clock on: time passes. Does nothing to a real one.
    pub fn advance(&self, by: Duration) {
        if let Some(host) = &self.0 {
            host.wall.fetch_add(micros(by), Ordering::SeqCst);
            host.boot.fetch_add(micros(by), Ordering::SeqCst);
        }
    }

    /// Sets a manual clock, also back, while no time passes.
    pub fn set(&self, time: Timestamp) {
        if let Some(host) = &self.0 {
            host.wall.store(time.as_micros(), Ordering::SeqCst);
        }
    }

    /// The time that was set, if any.
    pub(crate) fn fixed(&self) -> Option<i64> {
        self.0.as_ref().map(|host| host.wall.load(Ordering::SeqCst))
    }

    /// The time that was set, else this host's.
    pub(crate) fn wall(&self) -> i64 {
        self.fixed().unwrap_or_else(|| micros(SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default()))
    }

    /// How long the host has been up, suspended or not.
    pub(crate) fn boot(&self) -> i64 {
        match &self.0 {
            Some(host) => host.boot.load(Ordering::SeqCst),
            None => {
                let up = rustix::time::clock_gettime(rustix::time::ClockId::Boottime);
                up.tv_sec.saturating_mul(1_000_000).saturating_add(up.tv_nsec / 1000)
            }
        }
    }

    /// Which start of which host [`boot`](Self::boot) counts from; none where that cannot be told. A container may have
    /// its own boot clock, so its time namespace is part of it.
    pub(crate) fn boot_id(&self) -> Option<String> {
        match &self.0 {
            Some(host) => Some(format!("{:p}", Arc::as_ptr(host))),
            None => {
                let id = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").ok()?;
                let space = std::fs::read_link("/proc/self/ns/time").unwrap_or_default();
                Some(format!("{} {}", id.trim(), space.display()))
            }
        }
    }
}
