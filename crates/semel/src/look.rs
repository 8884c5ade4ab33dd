//! Looking: by id, by key, by label, by state and age; counters. Keyset pages, never offsets.

mod tally;

use std::time::Duration;

pub use self::tally::{
    Counting, DayTally, Durations, Tallied, Tally, TallyBy, TallyFilter, answered, appeared, in_state, reached, runs,
};
use crate::{Labels, Operation, Scope, State, Timestamp};

/// Which operations to list. Everything set must hold.
#[derive(Clone, Debug, Default)]
pub struct Filter {
    /// Of this tenant. A listing never crosses tenants.
    pub tenant: String,
    /// Of this service.
    pub service: Option<String>,
    /// Of this kind.
    pub kind: Option<String>,
    /// With the text of each label that is set.
    pub labels: Labels,
    /// In this state.
    pub state: Option<State>,
    /// First claimed at this moment or later.
    pub since: Option<Timestamp>,
    /// First claimed before this moment.
    pub before: Option<Timestamp>,
    /// Whether its data has gone to the archive.
    pub archived: Option<bool>,
}

impl Filter {
    /// Everything of a tenant.
    #[must_use]
    pub fn tenant(tenant: &str) -> Self {
        Self { tenant: tenant.to_owned(), ..Self::default() }
    }

    /// Everything of a scope.
    #[must_use]
    pub fn scope(scope: &Scope) -> Self {
        Self {
            service: Some(scope.service().to_owned()),
            kind: Some(scope.kind().to_owned()),
            ..Self::tenant(scope.tenant())
        }
    }
}

/// Where a page begins and how long it may be.
#[derive(Clone, Copy, Debug)]
pub struct Page {
    /// Only operations with a lower id than this; the `next` of the page before.
    pub after: Option<i64>,
    /// How many at most.
    pub limit: u32,
}

impl Default for Page {
    fn default() -> Self {
        Self { after: None, limit: 50 }
    }
}

/// One page, newest first. What may be large is left out: payloads, outcomes' bodies, checkpoints;
/// errors are cut to 512 bytes.
#[derive(Clone, Debug, Default)]
pub struct Listing {
    /// The operations.
    pub items: Vec<Operation>,
    /// Those of the page that cannot be read, newest first.
    pub unreadable: Vec<Unreadable>,
    /// Where the next page begins, if there is one.
    pub next: Option<i64>,
}

/// An operation that this version cannot read: damaged, or written by a newer version or with another key. What can be
/// told of it all the same, as it is stored.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Unreadable {
    /// Its number.
    pub id: i64,
    /// Whose it is.
    pub tenant: String,
    /// Of which service.
    pub service: String,
    /// Of which kind.
    pub kind: String,
    /// The caller's name for it.
    pub key: String,
    /// The word of its state.
    pub state: String,
    /// When it was first claimed.
    pub created_at: Timestamp,
    /// What is wrong with it.
    pub why: String,
}

/// What the sweep or a worker could not do to a row, because the row cannot be read or the database refuses to change
/// it. It is left alone until `retry_at`, so that the other rows have their turn.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SetAside {
    /// What could not be done.
    pub what: Task,
    /// The operation; for [`Task::Fold`], the number of a row of the counters.
    pub id: i64,
    /// Since when.
    pub since: Timestamp,
    /// How often it was tried.
    pub tries: i64,
    /// When it is tried again.
    pub retry_at: Timestamp,
    /// What was wrong the last time.
    pub reason: String,
}

/// What can fail for one row.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Task {
    /// The sweep ends a lapsed lease.
    Lapse,
    /// The sweep removes, archives or puts off an operation by its age.
    Age,
    /// The sweep adds a row to the counters.
    Fold,
    /// A worker takes up an operation that is due.
    Run,
}

impl Task {
    /// All of them.
    pub const ALL: [Self; 4] = [Self::Lapse, Self::Age, Self::Fold, Self::Run];

    /// The word for it, in SQL and JSON.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Lapse => "lapse",
            Self::Age => "age",
            Self::Fold => "fold",
            Self::Run => "run",
        }
    }

    /// What could not be done, in words that follow "cannot".
    #[must_use]
    pub const fn in_words(self) -> &'static str {
        match self {
            Self::Lapse => "end its lapsed lease",
            Self::Age => "remove, archive or put it off by its age",
            Self::Fold => "add it to the counters",
            Self::Run => "run it",
        }
    }
}

/// What nobody runs and may be claimed of a scope, the longest due first.
#[derive(Clone, Debug, Default)]
pub struct Due {
    /// The operations, whole: what was stored with them is what should run.
    pub operations: Vec<Operation>,
    /// When the first one is due that is not among these. If that is in the past, there are more already.
    pub next: Option<Timestamp>,
    /// How long that is from now, by the database's clock.
    pub wait: Option<Duration>,
}

impl Due {
    /// How many operations are told of at most.
    pub const MOST: u32 = 64;

    /// How many bytes of stored data, unless the first one alone has more.
    pub const BYTES: usize = 16 << 20;
}

/// A kind of which a tenant has something that is due or will be.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DueKind {
    /// The kind.
    pub kind: String,
    /// The tenant.
    pub tenant: String,
    /// When the first of it is due.
    pub next: Timestamp,
    /// How long that is from now, by the database's clock; zero if it is due already.
    pub wait: Duration,
}

impl DueKind {
    /// How many kinds are told of at most. If it is that many, the rest come after the last of them.
    pub const MOST: u32 = 1000;
}

/// What a counter counts by: the first two labels are few-valued by contract.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Group {
    /// Tenant.
    pub tenant: String,
    /// Service.
    pub service: String,
    /// Kind of operation.
    pub kind: String,
    /// The first label, or nothing.
    pub label1: String,
    /// The second label, or nothing.
    pub label2: String,
}

impl Group {
    /// The group an operation is counted in.
    #[must_use]
    pub fn of(operation: &Operation) -> Self {
        Self::new(&operation.scope, &operation.labels)
    }

    /// The group of a scope and labels.
    #[must_use]
    pub fn new(scope: &Scope, labels: &Labels) -> Self {
        let label = |slot: usize| labels.0[slot].clone().unwrap_or_default();
        Self {
            tenant: scope.tenant().to_owned(),
            service: scope.service().to_owned(),
            kind: scope.kind().to_owned(),
            label1: label(0),
            label2: label(1),
        }
    }
}

/// One line of the counters: how often something happened in an hour.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Count {
    /// By what.
    pub group: Group,
    /// In which hour since 1970.
    pub hour: i64,
    /// What was counted.
    pub what: Counted,
    /// How often.
    pub n: i64,
}

/// What is counted.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Counted {
    /// Operations that went from one state to another; the empty word is absence. The number in
    /// a state is what came in less what went out, exact whatever died in between.
    Change {
        /// From.
        from: String,
        /// To.
        to: String,
        /// For a run that ended: its duration's bucket, see [`bucket`].
        bucket: i32,
    },
    /// Claims that did not get the lease, by answer. These may lag a second.
    Answer(String),
}

/// The histogram bucket of a run's duration: four to each doubling of microseconds, so that a
/// quantile is known to within 19%.
#[must_use]
pub fn bucket(duration: Duration) -> i32 {
    let micros = u32::try_from(duration.as_micros()).map_or(f64::from(u32::MAX), f64::from).max(1.0);
    #[expect(clippy::cast_possible_truncation, reason = "at most 128")]
    let bucket = (micros.log2() * 4.0).floor() as i32;
    bucket
}

/// The lower end of a bucket.
#[must_use]
pub fn bucket_floor(bucket: i32) -> Duration {
    Duration::from_secs_f64((f64::from(bucket) / 4.0).exp2() / 1e6)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bucket_holds_its_duration() {
        for micros in [0, 1, 2, 3, 999, 1_000_000, 3_600_000_000] {
            let duration = Duration::from_micros(micros);
            let at = bucket(duration);
            assert!(bucket_floor(at) <= duration.max(Duration::from_micros(1)));
            assert!(bucket_floor(at + 1) >= duration);
        }
    }
}
