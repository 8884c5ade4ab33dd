//! The clock: the database's, unless a test sets the time.

use std::{
    sync::{
        Arc,
        atomic::{AtomicI64, Ordering},
    },
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use semel::{Timestamp, micros};

/// The source of time.
#[derive(Clone, Default)]
pub struct Clock(Option<Arc<Manual>>);

/// The two clocks of a host; they stand still until they are moved.
struct Manual {
    /// The wall clock, which can be set.
    wall: AtomicI64,
    /// The boot clock, which cannot be set.
    boot: AtomicI64,
}

impl Clock {
    /// A clock for tests that stands still until it is moved.
    #[must_use]
    pub fn manual(start: Timestamp) -> Self {
        Self(Some(Arc::new(Manual { wall: AtomicI64::new(start.as_micros()), boot: AtomicI64::new(0) })))
    }

    /// Advances a manual clock. Does nothing to a real one.
    pub fn advance(&self, by: Duration) {
        if let Some(host) = &self.0 {
            host.wall.fetch_add(micros(by), Ordering::SeqCst);
            host.boot.fetch_add(micros(by), Ordering::SeqCst);
        }
    }

    /// Sets a manual wall clock, also back; the boot clock does not move.
    pub fn set(&self, time: Timestamp) {
        if let Some(host) = &self.0 {
            host.wall.store(time.as_micros(), Ordering::SeqCst);
        }
    }

    /// The manual time, if any.
    pub(crate) fn fixed(&self) -> Option<i64> {
        self.0.as_ref().map(|host| host.wall.load(Ordering::SeqCst))
    }

    /// The manual time, else this host's.
    pub(crate) fn wall(&self) -> i64 {
        self.fixed().unwrap_or_else(|| micros(SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default()))
    }

    /// How long the host has been up, including suspension.
    pub(crate) fn boot(&self) -> i64 {
        match &self.0 {
            Some(host) => host.boot.load(Ordering::SeqCst),
            None => {
                let up = rustix::time::clock_gettime(rustix::time::ClockId::Boottime);
                up.tv_sec.saturating_mul(1_000_000).saturating_add(up.tv_nsec / 1000)
            }
        }
    }

    /// Identifies the boot that [`boot`](Self::boot) counts from; `None` if unknown. It includes the time namespace,
    /// because a container may have its own boot clock.
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
