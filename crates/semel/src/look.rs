//! Reading operations: by id, key, label, state and age; counters. Keyset pages, never offsets.

mod tally;

use std::time::Duration;

pub use self::tally::{
    Counting, DayTally, Durations, Tallied, Tally, TallyBy, TallyFilter, answered, appeared, in_state, reached, runs,
};
use crate::{Labels, Operation, Scope, State, Timestamp};

/// Selects operations. All set fields must match.
#[derive(Clone, Debug, Default)]
pub struct Filter {
    /// The tenant. A listing never crosses tenants.
    pub tenant: String,
    /// The service.
    pub service: Option<String>,
    /// The kind.
    pub kind: Option<String>,
    /// The labels that are set must match.
    pub labels: Labels,
    /// The state.
    pub state: Option<State>,
    /// First claimed at this time or later.
    pub since: Option<Timestamp>,
    /// First claimed before this time.
    pub before: Option<Timestamp>,
    /// Whether its data is archived.
    pub archived: Option<bool>,
}

impl Filter {
    /// All operations of a tenant.
    #[must_use]
    pub fn tenant(tenant: &str) -> Self {
        Self { tenant: tenant.to_owned(), ..Self::default() }
    }

    /// All operations of a scope.
    #[must_use]
    pub fn scope(scope: &Scope) -> Self {
        Self {
            service: Some(scope.service().to_owned()),
            kind: Some(scope.kind().to_owned()),
            ..Self::tenant(scope.tenant())
        }
    }
}

/// The start and the length of a page.
#[derive(Clone, Copy, Debug)]
pub struct Page {
    /// Only operations with a lower id; the `next` of the previous page.
    pub after: Option<i64>,
    /// The most operations.
    pub limit: u32,
}

impl Default for Page {
    fn default() -> Self {
        Self { after: None, limit: 50 }
    }
}

/// One page, newest first, without payloads, outcomes' bodies and checkpoints; errors are cut to 512 bytes.
#[derive(Clone, Debug, Default)]
pub struct Listing {
    /// The operations.
    pub items: Vec<Operation>,
    /// The unreadable operations of the page, newest first.
    pub unreadable: Vec<Unreadable>,
    /// The start of the next page, if there is one.
    pub next: Option<i64>,
}

/// An operation that this version cannot read: damaged, or written by a newer version or with another encryption key.
/// These are its readable columns.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Unreadable {
    /// Its id.
    pub id: i64,
    /// Its tenant.
    pub tenant: String,
    /// Its service.
    pub service: String,
    /// Its kind.
    pub kind: String,
    /// Its key.
    pub key: String,
    /// Its state.
    pub state: String,
    /// When it was first claimed.
    pub created_at: Timestamp,
    /// The reason.
    pub why: String,
}

/// A task of the sweep or a worker that failed for one row, because the row cannot be read or the database refuses to
/// change it. The row is skipped until `retry_at`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SetAside {
    /// The task.
    pub what: Task,
    /// The operation; for [`Task::Fold`], the id of a row of the counters.
    pub id: i64,
    /// The time of the first failure.
    pub since: Timestamp,
    /// The number of tries.
    pub tries: i64,
    /// The time of the next try.
    pub retry_at: Timestamp,
    /// The last error.
    pub reason: String,
}

/// The tasks that can fail for one row.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Task {
    /// The sweep ends an expired lease.
    Lapse,
    /// The sweep deletes, archives or postpones an operation by its age.
    Age,
    /// The sweep adds a row to the counters.
    Fold,
    /// A worker claims a due operation.
    Run,
}

impl Task {
    /// All tasks.
    pub const ALL: [Self; 4] = [Self::Lapse, Self::Age, Self::Fold, Self::Run];

    /// Its word in SQL and JSON.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Lapse => "lapse",
            Self::Age => "age",
            Self::Fold => "fold",
            Self::Run => "run",
        }
    }

    /// The task in words that follow "cannot".
    #[must_use]
    pub const fn in_words(self) -> &'static str {
        match self {
            Self::Lapse => "end its expired lease",
            Self::Age => "remove, archive or postpone it by its age",
            Self::Fold => "add it to the counters",
            Self::Run => "run it",
        }
    }
}

/// A kind and tenant with operations that are due now or later.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DueKind {
    /// The kind.
    pub kind: String,
    /// The tenant.
    pub tenant: String,
    /// When the first of them is due.
    pub next: Timestamp,
    /// The time until then, by the database's clock; zero if it is due.
    pub wait: Duration,
}

impl DueKind {
    /// The most kinds of one listing. If it has that many, the rest follow after the last.
    pub const MOST: u32 = 1000;
}

/// The dimensions of a counter: the first two labels must have few values.
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
    /// The group of an operation.
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

/// One line of the counters: the number of events in an hour.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Count {
    /// The group.
    pub group: Group,
    /// The hour since 1970.
    pub hour: i64,
    /// The event.
    pub what: Counted,
    /// The number.
    pub n: i64,
}

/// The events that are counted.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Counted {
    /// Operations that changed from one state to another; the empty word is absence. The number in a state
    /// is the entries less the exits, exact after any crash.
    Change {
        /// From.
        from: String,
        /// To.
        to: String,
        /// For the end of a run: the bucket of its duration, see [`bucket`].
        bucket: i32,
    },
    /// Claims without the lease, by answer. These may lag a second.
    Answer(String),
}

/// The histogram bucket of a run's duration: four per doubling of microseconds, so a quantile is exact
/// to 19%.
#[must_use]
pub fn bucket(duration: Duration) -> i32 {
    let micros = u32::try_from(duration.as_micros()).map_or(f64::from(u32::MAX), f64::from).max(1.0);
    #[expect(clippy::cast_possible_truncation, reason = "at most 128")]
    let bucket = (micros.log2() * 4.0).floor() as i32;
    bucket
}

/// The lower end of a bucket.
#[must_use]
pub(crate) fn bucket_floor(bucket: i32) -> Duration {
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
