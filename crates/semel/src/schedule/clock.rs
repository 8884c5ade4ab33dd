//! A cron expression in a time zone, in seconds since 1970.
//!
//! croner parses expressions, and follows the local clock for those with a wildcard or a step. For fixed times it is
//! called without a zone, and clock changes are handled here: croner 4.0 also applies a gap that its search merely
//! crosses, so `0 1 * * *` would run at 01:00 and at 03:00.

use std::{fmt, str::FromStr as _};

use chrono::{DateTime, Days, NaiveDateTime, TimeDelta, TimeZone as _};
use chrono_tz::Tz;
use croner::{Cron, JobType};

/// The longest gap of a clock, in seconds: some islands have skipped a day.
const LONGEST_GAP: i64 = 26 * 3600;

#[derive(Clone, Debug)]
pub(super) struct Clock {
    cron: Cron,
    text: String,
    zone: Tz,
    /// Whether it is due at fixed times of the day.
    fixed: bool,
}

/// The expression and the place: `0 2 * * * Europe/Rome`.
impl fmt::Display for Clock {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.text, self.zone)
    }
}

impl Clock {
    pub(super) fn new(expression: &str, zone: Tz) -> Result<Self, String> {
        let cron = Cron::from_str(expression).map_err(|error| error.to_string())?;
        let text = expression.split_whitespace().collect::<Vec<_>>().join(" ");
        let clock = Self { fixed: cron.determine_job_type() == JobType::FixedTime, cron, text, zone };
        if clock.next(0).is_none() {
            return Err("it is never due".to_owned());
        }
        Ok(clock)
    }

    /// The first due time after a moment.
    pub(super) fn next(&self, after: i64) -> Option<i64> {
        let here = self.here(after)?;
        if !self.fixed {
            let next = self.cron.find_next_occurrence(&here, false).ok()?;
            return Some(next.timestamp()).filter(|next| *next > after);
        }
        // In the second of two equal hours, times of day recur that counted the first time.
        let mut local = here.naive_local();
        loop {
            local = self.cron.find_next_occurrence(&local, false).ok()?;
            let due = self.instant(local)?;
            if due > after {
                return Some(due);
            }
        }
    }

    /// The last due time up to a moment.
    pub(super) fn last(&self, until: i64) -> Option<i64> {
        let here = self.here(until)?;
        if !self.fixed {
            return Some(self.cron.find_previous_occurrence(&here, true).ok()?.timestamp());
        }
        // From a later time of the day on: in the second of two equal hours, it may have counted the first time.
        let mut local = here.naive_local().checked_add_days(Days::new(1))?;
        loop {
            local = self.cron.find_previous_occurrence(&local, false).ok()?;
            let due = self.instant(local)?;
            if due <= until {
                return Some(due);
            }
        }
    }

    fn here(&self, time: i64) -> Option<DateTime<Tz>> {
        Some(DateTime::from_timestamp(time, 0)?.with_timezone(&self.zone))
    }

    /// The moment at which local clocks show a time: the first of two. If they skip it, the first moment after the gap.
    fn instant(&self, local: NaiveDateTime) -> Option<i64> {
        let shown = |after: i64| {
            let local = local.checked_add_signed(TimeDelta::seconds(after))?;
            Some(self.zone.from_local_datetime(&local).earliest()?.timestamp())
        };
        if let Some(there) = shown(0) {
            return Some(there);
        }
        // Bisection: clocks show no time within the gap, and one right after it.
        let (mut hidden, mut visible) = (0, LONGEST_GAP);
        while visible - hidden > 1 {
            let middle = i64::midpoint(hidden, visible);
            match shown(middle) {
                Some(_) => visible = middle,
                None => hidden = middle,
            }
        }
        shown(visible)
    }
}
