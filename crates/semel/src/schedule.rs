//! Schedule: operations that are enqueued at cron times or at an interval.
//!
//! Pure functions of time; a [`Timetable`](crate::Timetable) calls them.

mod clock;

use std::time::Duration;

use bytes::Bytes;
use chrono::{DateTime, SecondsFormat};
use chrono_tz::Tz;

use self::clock::Clock;
use crate::{Error, Fingerprint, Key, Operation, Policy, Priority, Result, Scope, Timestamp, Work, micros};

/// The shortest interval: a run is an operation, and a mark is written with each.
const SHORTEST: Duration = Duration::from_secs(1);

/// The longest name: with a due time behind it, it must fit into a key.
const LONGEST_NAME: usize = 200;

/// Microseconds of a second: no cron expression is finer.
const SECOND: i64 = 1_000_000;

/// A run that is later than this counts as missed.
const LATE: Duration = Duration::from_secs(60);

/// The most runs that one transaction enqueues, and the most bytes of their payloads. After a long outage there may be
/// hundreds of thousands, which would exceed the time of a transaction again and again.
const AT_ONCE: (usize, usize) = (1000, 16 << 20);

/// Recurring work. Each run is an operation of the schedule's scope whose key is the schedule's name and the due time,
/// such as `nightly@2026-03-01T01:00:00Z`, so any number of nodes run it once.
#[derive(Clone, Debug)]
pub struct Schedule {
    name: String,
    scope: Scope,
    when: When,
    missed: Missed,
    payload: Option<Bytes>,
    policy: Option<Policy>,
    priority: Priority,
}

/// When runs are due.
#[derive(Clone, Debug)]
enum When {
    /// A cron expression in a time zone.
    Clock(Box<Clock>),
    /// At the multiples of an interval since 1970, in microseconds: all nodes agree on them.
    Every(i64),
}

/// How to treat runs that were due while no node ran, or while their kind was paused.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Missed {
    /// Enqueue the latest of them.
    #[default]
    Latest,
    /// Enqueue all of them, at most this many: the latest.
    All(u32),
    /// Enqueue none: a run that could not be enqueued within a minute is skipped.
    None,
}

impl Schedule {
    /// Due by a cron expression in a time zone: `"0 2 * * *"` in `Europe/Rome`. The expression has five fields, or six
    /// with seconds first.
    ///
    /// Clock changes: a time of day that is skipped runs at the first moment after the gap, and one that occurs twice
    /// runs the first time. Expressions with a wildcard or a step in seconds, minutes or hours follow the clock
    /// instead: they skip the gap, and run in both of the equal hours.
    ///
    /// # Errors
    /// [`Error::Invalid`], with the fault of the name or the expression.
    pub fn cron(name: &str, expression: &str, zone: Tz, scope: Scope) -> Result<Self> {
        let wrong = |why| Error::Invalid(format!("schedule {name:?}: cron expression {expression:?}: {why}"));
        let clock = Clock::new(expression, zone).map_err(wrong)?;
        Self::new(name, scope, When::Clock(Box::new(clock)))
    }

    /// Due at the multiples of an interval since 1970.
    ///
    /// # Errors
    /// [`Error::Invalid`] if the interval is shorter than a second or longer than 1000 years, or the name is invalid.
    pub fn every(name: &str, interval: Duration, scope: Scope) -> Result<Self> {
        if interval < SHORTEST || interval > Policy::LONGEST {
            return Err(Error::Invalid(format!("schedule {name:?}: the interval must be 1 second to 1000 years")));
        }
        Self::new(name, scope, When::Every(micros(interval)))
    }

    fn new(name: &str, scope: Scope, when: When) -> Result<Self> {
        if name.is_empty() || name.len() > LONGEST_NAME || name.chars().any(char::is_control) {
            let wrong = format!("schedule {name:?}: a name is 1 to {LONGEST_NAME} bytes without control characters");
            return Err(Error::Invalid(wrong));
        }
        let (missed, priority) = (Missed::default(), Priority::default());
        Ok(Self { name: name.to_owned(), scope, when, missed, payload: None, policy: None, priority })
    }

    /// How to treat missed runs.
    #[must_use]
    pub fn missed(self, missed: Missed) -> Self {
        Self { missed, ..self }
    }

    /// The payload of each run.
    #[must_use]
    pub fn payload(self, payload: impl Into<Bytes>) -> Self {
        Self { payload: Some(payload.into()), ..self }
    }

    /// The policy of its runs. The default is the worker's.
    #[must_use]
    pub fn policy(self, policy: Policy) -> Self {
        Self { policy: Some(policy), ..self }
    }

    /// The priority of its runs.
    #[must_use]
    pub fn priority(self, priority: Priority) -> Self {
        Self { priority, ..self }
    }

    /// Its name, unique within a scope.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The scope of its runs.
    #[must_use]
    pub fn scope(&self) -> &Scope {
        &self.scope
    }

    /// When it is due, as text: `0 2 * * * Europe/Rome`, `every 15s`.
    #[must_use]
    pub fn spec(&self) -> String {
        match &self.when {
            When::Clock(clock) => clock.to_string(),
            When::Every(interval) => format!("every {:?}", Duration::from_micros(interval.unsigned_abs())),
        }
    }

    /// The first due time after a moment; `None` if there is none.
    #[must_use]
    pub fn next(&self, after: Timestamp) -> Option<Timestamp> {
        match &self.when {
            When::Clock(clock) => {
                let next = clock.next(after.as_micros().div_euclid(SECOND))?;
                Some(Timestamp::from_micros(next.checked_mul(SECOND)?))
            }
            When::Every(interval) => {
                let next = after.as_micros().div_euclid(*interval).checked_add(1)?.checked_mul(*interval)?;
                Some(Timestamp::from_micros(next))
            }
        }
    }

    /// The last due time up to a moment; `None` if there was none.
    #[must_use]
    pub fn last(&self, until: Timestamp) -> Option<Timestamp> {
        match &self.when {
            When::Clock(clock) => {
                let last = clock.last(until.as_micros().div_euclid(SECOND))?;
                Some(Timestamp::from_micros(last.checked_mul(SECOND)?))
            }
            When::Every(interval) => {
                Some(Timestamp::from_micros(until.as_micros().div_euclid(*interval).checked_mul(*interval)?))
            }
        }
    }

    /// The key of the run that is due at a time.
    ///
    /// # Errors
    /// [`Error::Invalid`] if the time cannot be written.
    pub fn key(&self, due: Timestamp) -> Result<Key> {
        run_key(&self.name, due)
    }

    /// The due time of a schedule's run; `None` for other operations.
    #[must_use]
    pub fn due(run: &Operation) -> Option<Timestamp> {
        let (_, time) = run.key.as_str().rsplit_once('@')?;
        Some(Timestamp::from_micros(DateTime::parse_from_rfc3339(time).ok()?.timestamp_micros()))
    }

    /// The runs to enqueue at a time, oldest first, if all due times up to the mark are handled; at most as many as fit
    /// one transaction. The cost depends on the number of runs that are not skipped, not on the age of the mark.
    pub(crate) fn owed(&self, mark: Timestamp, now: Timestamp) -> Vec<Timestamp> {
        let (most, mark) = match self.missed {
            Missed::Latest => (1, mark),
            Missed::All(most) => (most, mark),
            Missed::None => {
                let late = now.as_micros().saturating_sub(micros(LATE));
                (1, mark.max(Timestamp::from_micros(late.saturating_sub(1))))
            }
        };
        let dues = std::iter::successors(self.next(self.skipped(most, mark, now)), |due| self.next(*due));
        dues.take_while(|due| *due <= now).take(self.at_once()).collect()
    }

    /// The time up to which runs are skipped, so that no more than `most` are left: the mark, if there are not so many.
    fn skipped(&self, most: u32, mark: Timestamp, now: Timestamp) -> Timestamp {
        // Runs are at least a second apart: usually they need not be counted.
        if now.since(mark) < SHORTEST * most {
            return mark;
        }
        let before = |due: &Timestamp| self.last(Timestamp::from_micros(due.as_micros().saturating_sub(1)));
        let mut dues = std::iter::successors(self.last(now), before).take_while(|due| *due > mark);
        dues.nth(most as usize).unwrap_or(mark)
    }

    /// Whether it makes up for a run that was missed.
    pub(crate) fn makes_up(&self) -> bool {
        self.missed != Missed::None
    }

    /// How many runs fit one transaction.
    pub(crate) fn at_once(&self) -> usize {
        let size = self.payload.as_ref().map_or(0, Bytes::len);
        AT_ONCE.0.min(AT_ONCE.1 / size.max(1)).max(1)
    }

    /// The run of a due time.
    pub(crate) fn work(&self, due: Timestamp) -> Result<Work> {
        let fingerprint = Fingerprint::of_bytes(self.payload.as_deref().unwrap_or_default());
        let mut work = Work::new(self.scope.clone(), self.key(due)?, fingerprint).priority(self.priority);
        if let Some(payload) = &self.payload {
            work = work.payload(payload.clone());
        }
        Ok(match &self.policy {
            Some(policy) => work.policy(policy.clone()),
            None => work,
        })
    }
}

/// The key of a schedule's run at a due time.
pub(crate) fn run_key(name: &str, due: Timestamp) -> Result<Key> {
    let time = DateTime::from_timestamp_micros(due.as_micros());
    let time = time.ok_or_else(|| Error::Invalid(format!("schedule {name:?}: the time {due} cannot be written")))?;
    Key::new(&format!("{name}@{}", time.to_rfc3339_opts(SecondsFormat::AutoSi, true)))
}

#[cfg(test)]
mod tests;
