//! When events are archived.

use std::time::Duration;

use chrono::{DateTime, NaiveTime, TimeDelta, TimeZone as _, Utc};
use chrono_tz::Tz;

use crate::config::Value;

/// The age of an event at which it is archived, and the time of the day.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Archive {
    /// The age.
    pub after: Duration,
    /// The time of the day.
    pub at: TimeOfDay,
    /// The time zone.
    pub zone: Tz,
}

impl Default for Archive {
    fn default() -> Self {
        Self { after: Duration::from_secs(90 * 24 * 3600), at: TimeOfDay(TWO), zone: Tz::UTC }
    }
}

/// At night, when there is least traffic.
const TWO: NaiveTime = NaiveTime::from_hms_opt(2, 0, 0).unwrap();

impl Archive {
    /// How long after `now` an event of now is archived: at the first such time of the day in the zone at which it is
    /// old enough. If a clock change skips that time, right after the change.
    #[must_use]
    pub fn tombstone(&self, now: DateTime<Utc>) -> Duration {
        let old_enough = TimeDelta::from_std(self.after).ok().and_then(|after| now.checked_add_signed(after));
        let at = old_enough.and_then(|earliest| self.next(earliest));
        // Beyond the end of the calendar there is no time of the day.
        at.and_then(|at| (at - now).to_std().ok()).unwrap_or(self.after)
    }

    /// The first such time that is not before `earliest`.
    fn next(&self, earliest: DateTime<Utc>) -> Option<DateTime<Utc>> {
        let mut day = earliest.with_timezone(&self.zone).date_naive();
        // Clocks change by hours, not by days: one of three days has it.
        for _ in 0..3 {
            let shown = day.and_time(self.at.0);
            let at = (0..=4).find_map(|hour| {
                let shown = shown.checked_add_signed(TimeDelta::hours(hour))?;
                self.zone.from_local_datetime(&shown).earliest()
            });
            if let Some(at) = at.map(|at| at.with_timezone(&Utc)).filter(|at| *at >= earliest) {
                return Some(at);
            }
            day = day.succ_opt()?;
        }
        None
    }
}

/// A time of the day.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TimeOfDay(NaiveTime);

impl Value for TimeOfDay {
    const EXAMPLE: &'static str = "02:00";

    fn parse(text: &str) -> Result<Self, String> {
        let read = NaiveTime::parse_from_str(text, "%H:%M").ok().filter(|_| text.len() == 5);
        read.map(Self).ok_or_else(|| format!("must be a time of the day such as 02:00, not \"{text}\""))
    }

    fn to_toml(&self) -> toml::Value {
        self.0.format("%H:%M").to_string().into()
    }
}

impl Value for Tz {
    const EXAMPLE: &'static str = "Europe/Lisbon";

    fn parse(text: &str) -> Result<Self, String> {
        let wrong = || format!("must be a time zone such as UTC or Europe/Lisbon, not \"{text}\"");
        text.parse().map_err(|_| wrong())
    }

    fn to_toml(&self) -> toml::Value {
        self.name().into()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn archived(zone: &str, after: &str, now: &str) -> String {
        let archive =
            Archive { after: Duration::parse(after).unwrap(), zone: Tz::parse(zone).unwrap(), ..Archive::default() };
        let now: DateTime<Utc> = now.parse().unwrap();
        (now + archive.tombstone(now)).to_rfc3339()
    }

    #[test]
    fn an_event_is_archived_at_the_first_two_oclock_after_its_time() {
        for (zone, after, now, at) in [
            ("UTC", "90days", "2026-01-01T00:00:00Z", "2026-04-01T02:00:00+00:00"),
            ("UTC", "90days", "2026-01-01T02:00:00Z", "2026-04-01T02:00:00+00:00"),
            ("UTC", "90days", "2026-01-01T02:00:01Z", "2026-04-02T02:00:00+00:00"),
            ("America/Sao_Paulo", "90days", "2026-01-01T00:00:00Z", "2026-04-01T05:00:00+00:00"),
            ("Asia/Kolkata", "1day", "2026-01-01T00:00:00Z", "2026-01-02T20:30:00+00:00"),
        ] {
            assert_eq!(archived(zone, after, now), at, "{zone} {now}");
        }
    }

    #[test]
    fn clocks_that_skip_or_repeat_two_oclock_archive_once_that_night() {
        // Spain's clocks go from two to three on 29 March 2026, and from three back to two on 25 October.
        for (now, at) in [
            ("2026-03-27T12:00:00Z", "2026-03-29T01:00:00+00:00"),
            ("2026-03-28T01:00:00Z", "2026-03-29T01:00:00+00:00"),
            ("2026-03-28T01:00:01Z", "2026-03-30T00:00:00+00:00"),
            ("2026-10-23T12:00:00Z", "2026-10-25T00:00:00+00:00"),
            ("2026-10-24T00:30:00Z", "2026-10-26T01:00:00+00:00"),
        ] {
            assert_eq!(archived("Europe/Madrid", "1day", now), at, "{now}");
        }
    }

    #[test]
    fn a_time_beyond_the_calendar_is_no_panic() {
        let after = semel::Policy::LONGEST;
        let archive = Archive { after, ..Archive::default() };
        assert!(archive.tombstone(DateTime::<Utc>::MAX_UTC) == after);
    }

    #[test]
    fn a_time_of_the_day_is_read_as_it_is_shown() {
        for text in ["00:00", "02:00", "23:59"] {
            assert_eq!(TimeOfDay::parse(text).unwrap().to_toml(), text.into());
        }
        for text in ["", "2", "2:00", "24:00", "02:60", "02:00:00", "two"] {
            assert!(TimeOfDay::parse(text).is_err(), "{text}");
        }
        assert!(Tz::parse("Mars/Olympus").is_err());
    }
}
