//! Policy: the rules of a scope.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::{Error, time::micros};

/// The rules for the operations of a scope.
///
/// Every claim brings its policy. The parts that must outlive the call (`on_lost`, retention) are stored with the
/// lease, so that the sweep of another node decides in the same way.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Policy {
    /// How long a lease lasts unless renewed.
    pub lease: Duration,
    /// The longest run, however often it renews: bounds a run that lives but is stuck.
    pub max_run: Duration,
    /// How long a settled operation is kept, counted from when it was settled; `None` is for ever.
    pub retention: Option<Duration>,
    /// When a completed operation is archived, counted from its settle: its data moves to the archive,
    /// its key stays taken. `None` is never.
    pub tombstone: Option<Duration>,
    /// How many runs may fail before the operation is exhausted; `None` is no limit. Expired leases are
    /// counted separately, by `max_crashes`.
    pub max_attempts: Option<u32>,
    /// How many leases may expire before the operation is parked: a payload that kills its process must
    /// not kill one node after the other.
    pub max_crashes: u32,
    /// The wait after a failure.
    pub backoff: Backoff,
    /// The answer to a claim with another fingerprint.
    pub on_mismatch: OnMismatch,
    /// The next state of the operation after lease expiry.
    pub on_lost: OnLost,
    /// Whether a completed operation is final until its retention ends: it cannot be purged or run again,
    /// not even with newer data. So a node may replay it from memory.
    pub pinned: bool,
    /// Who runs an operation that waits for its next run.
    pub runner: Runner,
}

/// Who runs an operation that waits for its next run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Runner {
    /// A worker that has a handler for its kind, or a caller that claims its key.
    #[default]
    Worker,
    /// Only callers that claim its key: no worker takes it. Counts for an operation that such a claim created; its
    /// policy is then stored with it.
    Caller,
    /// A worker or a program that asks for its kind and its first label: it is due under both, as `kind:label`, and not
    /// under its kind. Workers of the kind do not get it.
    ByLabel,
}

impl Runner {
    /// Its stored number; a worker is left out.
    const fn code(self) -> Option<u8> {
        match self {
            Self::Worker => None,
            Self::Caller => Some(1),
            Self::ByLabel => Some(2),
        }
    }
}

impl Default for Policy {
    fn default() -> Self {
        Self {
            lease: Duration::from_secs(30),
            max_run: Duration::from_secs(15 * 60),
            retention: Some(Duration::from_secs(24 * 3600)),
            tombstone: None,
            max_attempts: None,
            max_crashes: 5,
            backoff: Backoff::default(),
            on_mismatch: OnMismatch::Reject,
            on_lost: OnLost::Rerun,
            pinned: false,
            runner: Runner::Worker,
        }
    }
}

impl Policy {
    /// The shortest lease: an ordinary pause of a busy machine would let a shorter one expire.
    pub const SHORTEST_LEASE: Duration = Duration::from_millis(100);

    /// The longest duration: sums of times must not overflow.
    pub const LONGEST: Duration = Duration::from_secs(1000 * 366 * 24 * 3600);

    /// How long after the claim the sweep first looks at an operation: when its outcome expires or is archived,
    /// whichever is first.
    #[must_use]
    pub fn first_look(&self) -> Option<Duration> {
        self.retention.into_iter().chain(self.tombstone).min()
    }

    /// Refuses an invalid policy.
    ///
    /// # Errors
    /// [`Error::Invalid`], naming every wrong field.
    pub fn check(&self) -> Result<(), Error> {
        let mut wrong = Vec::new();
        if self.lease < Self::SHORTEST_LEASE {
            wrong.push("lease: is shorter than 100ms");
        }
        if self.max_run < self.lease {
            wrong.push("max_run: is shorter than the lease");
        }
        if self.max_attempts == Some(0) {
            wrong.push("max_attempts: is 0, so the operation would never run");
        }
        if self.max_crashes == 0 {
            wrong.push("max_crashes: is 0, so the first lost lease would park the operation");
        }
        let spans = [Some(self.lease), Some(self.max_run), self.retention, self.tombstone, Some(self.backoff.cap)];
        if spans.into_iter().flatten().any(|span| span > Self::LONGEST) {
            wrong.push("a duration: is longer than 1000 years; leave retention out to keep for ever");
        }
        if self.backoff.cap < self.backoff.first {
            wrong.push("backoff: the cap is below the first delay");
        }
        if self.pinned && self.on_mismatch == OnMismatch::SupersedeIfNewer {
            wrong.push("pinned: cannot be combined with on_mismatch = supersede_if_newer");
        }
        match wrong[..] {
            [] => Ok(()),
            _ => Err(Error::Invalid(wrong.join("; "))),
        }
    }

    /// Refuses a policy that is invalid for work that a worker runs: a worker has no probe.
    ///
    /// # Errors
    /// As [`Policy::check`].
    pub(crate) fn check_for_worker(&self) -> Result<(), Error> {
        self.check()?;
        if self.runner == Runner::Caller {
            return Err(Error::Invalid("runner: leaves the operation to callers, so no worker would run it".into()));
        }
        match self.on_lost {
            OnLost::Probe => Err(Error::Invalid("on_lost: is probe, and a worker has no probe; set hold".into())),
            OnLost::Rerun | OnLost::Hold => Ok(()),
        }
    }
}

/// The answer to a claim with another fingerprint.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum OnMismatch {
    /// A mismatch, in every state of the operation.
    Reject,
    /// The answer of an equal fingerprint; a replay is marked as a mismatch.
    Replay,
    /// Data with a higher `order` replaces the older; any other data is a mismatch.
    SupersedeIfNewer,
}

/// The next state of an operation after lease expiry.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum OnLost {
    /// It may run again: right if the effect is atomic with the completion, or idempotent.
    Rerun,
    /// It is in doubt until a person resolves it.
    Hold,
    /// It is in doubt until a probe (or a person) resolves it. For runs with a probe
    /// ([`Ledger::run_with_probe`](crate::Ledger::run_with_probe)); refused for enqueued work.
    Probe,
}

impl OnLost {
    /// Whether a run with an unknown end is in doubt (instead of run again).
    #[must_use]
    pub fn doubts(self) -> bool {
        matches!(self, Self::Hold | Self::Probe)
    }
}

/// The wait after a failure: `first`, doubling up to `cap`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Backoff {
    /// The wait after the first failure.
    pub first: Duration,
    /// The longest wait.
    pub cap: Duration,
}

impl Default for Backoff {
    fn default() -> Self {
        Self { first: Duration::from_secs(1), cap: Duration::from_secs(300) }
    }
}

impl Backoff {
    /// No wait.
    pub const NONE: Self = Self { first: Duration::ZERO, cap: Duration::ZERO };

    /// The wait after the `nth` failure (from 1), up to a fifth shorter by the operation's id, so that a
    /// thousand operations that failed together do not run again together.
    #[must_use]
    pub fn after(&self, nth: u32, id: i64) -> Duration {
        let doublings = nth.saturating_sub(1).min(40);
        let whole = self.first.saturating_mul(1_u32 << doublings.min(31)).min(self.cap);
        // A fixed mix of the two numbers (Weyl's constant), not a random number: the machine must stay a pure function.
        let mixed = id.unsigned_abs().wrapping_add(u64::from(nth)).wrapping_mul(0x9E37_79B9_7F4A_7C15);
        let fifth = u64::try_from(micros(whole) / 5).unwrap_or(0);
        let off = if fifth == 0 { 0 } else { (mixed >> 33) % fifth };
        whole.saturating_sub(Duration::from_micros(off))
    }
}

/// A policy as it is stored with a lease: whole microseconds, no names. Every claim writes it, so it must be
/// short. The last parts are left out if they have their defaults, so that older nodes can read the rest.
#[derive(Serialize, Deserialize)]
struct Terms(
    i64,
    i64,
    Option<i64>,
    Option<i64>,
    Option<u32>,
    u32,
    i64,
    i64,
    OnMismatch,
    OnLost,
    #[serde(default, skip_serializing_if = "Option::is_none")] Option<bool>,
    #[serde(default, skip_serializing_if = "Option::is_none")] Option<u8>,
);

impl Policy {
    /// The stored form of the policy.
    #[must_use]
    pub fn to_terms(&self) -> String {
        let terms = Terms(
            micros(self.lease),
            micros(self.max_run),
            self.retention.map(micros),
            self.tombstone.map(micros),
            self.max_attempts,
            self.max_crashes,
            micros(self.backoff.first),
            micros(self.backoff.cap),
            self.on_mismatch,
            self.on_lost,
            (self.pinned || self.runner != Runner::Worker).then_some(self.pinned),
            self.runner.code(),
        );
        serde_json::to_string(&terms).unwrap_or_default()
    }

    /// Reads what [`Policy::to_terms`] wrote.
    ///
    /// # Errors
    /// [`Error::Corrupt`] when the text is not such a policy.
    pub fn from_terms(text: &str) -> Result<Self, Error> {
        let Terms(
            lease,
            max_run,
            retention,
            tombstone,
            max_attempts,
            max_crashes,
            first,
            cap,
            on_mismatch,
            on_lost,
            pinned,
            runner,
        ) = serde_json::from_str(text).map_err(|_| Error::Corrupt("the terms of a lease"))?;
        let duration = |micros: i64| Duration::from_micros(u64::try_from(micros).unwrap_or(0));
        Ok(Self {
            lease: duration(lease),
            max_run: duration(max_run),
            retention: retention.map(duration),
            tombstone: tombstone.map(duration),
            max_attempts,
            max_crashes,
            backoff: Backoff { first: duration(first), cap: duration(cap) },
            on_mismatch,
            on_lost,
            pinned: pinned.unwrap_or(false),
            runner: [Runner::Worker, Runner::Caller, Runner::ByLabel]
                .into_iter()
                .find(|known| known.code() == runner)
                .ok_or(Error::Corrupt("the runner in the terms of a lease"))?,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_wrong_field_is_named_at_once() {
        let policy = Policy { lease: Duration::ZERO, max_attempts: Some(0), max_crashes: 0, ..Policy::default() };
        let said = policy.check().unwrap_err().to_string();
        for field in ["lease", "max_attempts", "max_crashes"] {
            assert!(said.contains(field), "{said}");
        }
    }

    #[test]
    fn backoff_doubles_up_to_its_cap_and_spreads() {
        let backoff = Backoff { first: Duration::from_secs(1), cap: Duration::from_secs(8) };
        for (nth, whole) in [(1, 1), (2, 2), (3, 4), (4, 8), (5, 8), (1000, 8)] {
            let whole = Duration::from_secs(whole);
            let wait = backoff.after(nth, 7);
            assert!(wait <= whole && wait > whole * 4 / 5, "{nth}: {wait:?}");
        }
        assert_ne!(backoff.after(1, 1), backoff.after(1, 2));
        assert_eq!(Backoff::NONE.after(3, 1), Duration::ZERO);
    }

    #[test]
    fn a_stored_policy_is_read_back_unchanged() {
        let policy = Policy { tombstone: Some(Duration::from_secs(5)), ..Policy::default() };
        for (pinned, runner) in
            [false, true].into_iter().flat_map(|p| [(p, Runner::Worker), (p, Runner::Caller), (p, Runner::ByLabel)])
        {
            let policy = Policy { pinned, runner, ..policy.clone() };
            assert_eq!(Policy::from_terms(&policy.to_terms()).unwrap(), policy);
        }
        assert!(Policy::from_terms("[]").is_err());
        let unknown = Policy { runner: Runner::Caller, ..policy }.to_terms().replace(",1]", ",7]");
        assert!(Policy::from_terms(&unknown).is_err(), "{unknown}");
    }

    #[test]
    fn terms_are_compatible_with_older_nodes() {
        let older = r#"[30000000,900000000,86400000000,null,null,5,1000000,300000000,"reject","rerun"]"#;
        assert_eq!(Policy::from_terms(older).unwrap(), Policy::default());
        assert_eq!(Policy::default().to_terms(), older);
    }

    #[test]
    fn supersede_if_newer_cannot_be_pinned() {
        for (on_mismatch, fits) in
            [(OnMismatch::Reject, true), (OnMismatch::Replay, true), (OnMismatch::SupersedeIfNewer, false)]
        {
            let policy = Policy { pinned: true, on_mismatch, ..Policy::default() };
            assert_eq!(policy.check().is_ok(), fits, "{on_mismatch:?}");
        }
    }
}
