//! The section `[operations]`.

use std::time::Duration;

use semel::{Backoff, OnLost, Policy, Runner};

use crate::config::Reader;

/// The rules of operations whose requests do not bring their own.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Operations {
    /// The lease of a claim.
    pub lease: Duration,
    /// The longest run, however often its lease is renewed.
    pub max_run: Duration,
    /// How long a settled operation is kept: the TTL.
    pub retention: Duration,
    /// How many runs may fail before a person has to decide.
    pub max_attempts: usize,
    /// How many leases may expire before a person has to decide.
    pub max_crashes: usize,
    /// The backoff after failures.
    pub backoff: Backoff,
}

impl Default for Operations {
    fn default() -> Self {
        Self {
            lease: Duration::from_secs(60),
            max_run: Duration::from_secs(24 * 3600),
            retention: Duration::from_secs(24 * 3600),
            max_attempts: 4,
            max_crashes: 5,
            backoff: Backoff::default(),
        }
    }
}

/// The bounds of a lease.
pub(super) const LEASES: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(24 * 3600));

/// The bounds of a TTL: a client must have time to retry.
pub(super) const TTLS: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(10 * 366 * 24 * 3600));

/// The most retries.
pub(super) const MOST_RETRIES: usize = 1000;

impl Operations {
    pub(crate) fn read(reader: &mut Reader<'_>) -> Self {
        let default = Self::default();
        let read = Self {
            lease: reader.field("operations.lease", || default.lease),
            max_run: reader.field("operations.max_run", || default.max_run),
            retention: reader.field("operations.retention", || default.retention),
            max_attempts: reader.field("operations.max_attempts", || default.max_attempts),
            max_crashes: reader.field("operations.max_crashes", || default.max_crashes),
            backoff: Backoff {
                first: reader.field("operations.backoff", || default.backoff.first),
                cap: reader.field("operations.backoff_cap", || default.backoff.cap),
            },
        };
        let between = |(least, most): (Duration, Duration), time: Duration| (least..=most).contains(&time);
        if !between(LEASES, read.lease) {
            reader.mistake("operations.lease", "must be at least 1s and at most 1day".to_owned());
        }
        if !between(TTLS, read.retention) {
            let why = "must be at least 1s and at most 10 years: a later retry is executed again";
            reader.mistake("operations.retention", why.to_owned());
        }
        if read.max_run < read.lease || read.max_run > TTLS.1 {
            reader.mistake("operations.max_run", "must be at least operations.lease and at most 10 years".to_owned());
        }
        for (name, number) in
            [("operations.max_attempts", read.max_attempts), ("operations.max_crashes", read.max_crashes)]
        {
            if !(1..=MOST_RETRIES + 1).contains(&number) {
                reader.mistake(name, format!("must be 1 to {}", MOST_RETRIES + 1));
            }
        }
        if read.backoff.cap < read.backoff.first || read.backoff.cap > TTLS.1 {
            let why = "must be at least operations.backoff and at most 10 years";
            reader.mistake("operations.backoff_cap", why.to_owned());
        }
        read
    }

    /// The policy of a claim by key, which its request may change.
    pub(super) fn policy(&self) -> Policy {
        Policy {
            lease: self.lease,
            max_run: self.max_run.max(self.lease),
            retention: Some(self.retention),
            max_attempts: u32::try_from(self.max_attempts).ok(),
            max_crashes: u32::try_from(self.max_crashes).unwrap_or(u32::MAX),
            backoff: self.backoff,
            on_lost: OnLost::Hold,
            runner: Runner::Caller,
            ..Policy::default()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_defaults_are_those_of_the_design() {
        let policy = Operations::default().policy();
        assert_eq!((policy.lease, policy.retention), (Duration::from_secs(60), Some(Duration::from_secs(86_400))));
        assert_eq!((policy.max_attempts, policy.on_lost), (Some(4), OnLost::Hold));
    }
}
