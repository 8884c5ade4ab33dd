//! Time in the ledger: microseconds since 1970 by the **database's** clock.
//!
//! A node's own clock is never compared with stored times; it decides only when a lease holder must stop early (see
//! [`Uptime`]).

use std::{fmt, ops, time::Duration};

use serde::{Deserialize, Serialize};

/// A moment by the database's clock, in microseconds since 1970-01-01 UTC.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Timestamp(i64);

impl Timestamp {
    /// The value of a time that has not come.
    pub(crate) const NEVER: Self = Self(0);

    /// From microseconds since 1970.
    #[must_use]
    pub const fn from_micros(micros: i64) -> Self {
        Self(micros)
    }

    /// Microseconds since 1970.
    #[must_use]
    pub const fn as_micros(self) -> i64 {
        self.0
    }

    /// The time from `earlier` to this moment; zero if `earlier` is later.
    #[must_use]
    pub fn since(self, earlier: Self) -> Duration {
        Duration::from_micros(u64::try_from(self.0.saturating_sub(earlier.0)).unwrap_or(0))
    }

    /// The whole hour this moment falls in, counted from 1970: the grain of the counters.
    #[must_use]
    pub const fn hour(self) -> i64 {
        self.0.div_euclid(3_600_000_000)
    }
}

/// Microseconds of a duration, saturating: a policy of "a thousand years" must not wrap around.
#[must_use]
pub fn micros(duration: Duration) -> i64 {
    i64::try_from(duration.as_micros()).unwrap_or(i64::MAX)
}

impl ops::Add<Duration> for Timestamp {
    type Output = Self;
    fn add(self, duration: Duration) -> Self {
        Self(self.0.saturating_add(micros(duration)))
    }
}

/// RFC 3339, UTC, with microseconds.
impl fmt::Display for Timestamp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match chrono::DateTime::from_timestamp_micros(self.0) {
            Some(time) => f.write_str(&time.to_rfc3339_opts(chrono::SecondsFormat::Micros, true)),
            None => write!(f, "{}us", self.0),
        }
    }
}

/// A moment by this machine's boot clock, which runs while the machine is suspended and cannot be set. A lease holder
/// measures its deadline with it: a laptop that slept through its lease must notice when it wakes, and
/// `std::time::Instant` would not.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Uptime(Duration);

impl Uptime {
    /// The present moment.
    #[must_use]
    pub fn now() -> Self {
        let time = rustix::time::clock_gettime(rustix::time::ClockId::Boottime);
        let seconds = u64::try_from(time.tv_sec).unwrap_or(0);
        let nanos = u32::try_from(time.tv_nsec).unwrap_or(0);
        Self(Duration::new(seconds, nanos))
    }

    /// How long until this moment; zero if it has passed.
    #[must_use]
    pub fn remaining(self) -> Duration {
        self.0.saturating_sub(Self::now().0)
    }

    /// Whether this moment has passed.
    #[must_use]
    pub fn has_passed(self) -> bool {
        self.remaining().is_zero()
    }
}

impl ops::Add<Duration> for Uptime {
    type Output = Self;
    fn add(self, duration: Duration) -> Self {
        Self(self.0.saturating_add(duration))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_written_in_utc_with_microseconds() {
        let time = Timestamp::from_micros(1_700_000_000_000_001);
        assert_eq!(time.to_string(), "2023-11-14T22:13:20.000001Z");
    }

    #[test]
    fn a_policy_of_ages_does_not_wrap() {
        let never = Timestamp::from_micros(1) + Duration::MAX;
        assert_eq!(never.as_micros(), i64::MAX);
    }

    #[test]
    fn the_hour_of_a_moment_before_1970_is_below_zero() {
        assert_eq!(Timestamp::from_micros(-1).hour(), -1);
    }
}
