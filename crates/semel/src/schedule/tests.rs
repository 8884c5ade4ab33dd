use chrono_tz::{America, Australia, Europe, UTC};
use proptest::prelude::*;

use super::*;

fn scope() -> Scope {
    Scope::new("acme", "bank", "report").unwrap()
}

fn cron(expression: &str, zone: Tz) -> Schedule {
    Schedule::cron("nightly", expression, zone, scope()).unwrap()
}

fn at(text: &str) -> Timestamp {
    Timestamp::from_micros(DateTime::parse_from_rfc3339(text).unwrap().timestamp_micros())
}

/// The due times after one moment and up to another.
fn between(schedule: &Schedule, from: &str, until: &str) -> Vec<String> {
    let dues = std::iter::successors(schedule.next(at(from)), |due| schedule.next(*due));
    dues.take_while(|due| *due <= at(until)).map(|due| due.to_string().replace(".000000", "")).collect()
}

#[test]
fn a_time_that_does_not_exist_is_made_up_for_after_the_gap() {
    // In Rome, 2026-03-29 has no 02:30: clocks go from 02:00 to 03:00, which is 01:00 UTC.
    let due = between(&cron("30 2 * * *", Europe::Rome), "2026-03-27T12:00:00Z", "2026-03-31T12:00:00Z");
    assert_eq!(due, ["2026-03-28T01:30:00Z", "2026-03-29T01:00:00Z", "2026-03-30T00:30:00Z", "2026-03-31T00:30:00Z"]);
}

#[test]
fn a_time_that_exists_twice_counts_the_first_time() {
    // In Rome, 2026-10-25 has two 02:30: 00:30 and 01:30 UTC.
    let due = between(&cron("30 2 * * *", Europe::Rome), "2026-10-23T12:00:00Z", "2026-10-26T12:00:00Z");
    assert_eq!(due, ["2026-10-24T00:30:00Z", "2026-10-25T00:30:00Z", "2026-10-26T01:30:00Z"]);
}

#[test]
fn steps_follow_the_clock_through_both_changes() {
    let half_hourly = cron("*/30 * * * *", Europe::Rome);
    let spring = between(&half_hourly, "2026-03-29T00:00:00Z", "2026-03-29T02:00:00Z");
    let autumn = between(&half_hourly, "2026-10-25T00:00:00Z", "2026-10-25T02:00:00Z");
    assert_eq!((spring.len(), autumn.len()), (4, 4), "every half hour that passes: {spring:?} {autumn:?}");
}

#[test]
fn the_time_zone_decides_when_02_00_is_due() {
    for (zone, due) in [
        (Europe::Rome, "2026-07-01T00:00:00Z"),
        (America::New_York, "2026-07-01T06:00:00Z"),
        (UTC, "2026-07-01T02:00:00Z"),
    ] {
        assert_eq!(cron("0 2 * * *", zone).next(at("2026-06-30T20:00:00Z")), Some(at(due)));
    }
}

#[test]
fn an_interval_is_due_at_its_multiples() {
    let schedule = Schedule::every("clean-up", Duration::from_secs(15), scope()).unwrap();
    assert_eq!(between(&schedule, "2026-01-01T00:00:01Z", "2026-01-01T00:00:30Z").len(), 2);
    assert_eq!(schedule.next(at("2026-01-01T00:00:15Z")), Some(at("2026-01-01T00:00:30Z")));
    assert_eq!(schedule.last(at("2026-01-01T00:00:15Z")), Some(at("2026-01-01T00:00:15Z")));
}

#[test]
fn a_key_names_the_schedule_and_its_due_time() {
    let due = at("2026-03-01T01:00:00Z");
    let key = cron("0 2 * * *", Europe::Rome).key(due).unwrap();
    assert_eq!(key.as_str(), "nightly@2026-03-01T01:00:00Z");
    let half = Schedule::every("a@b", Duration::from_millis(1500), scope()).unwrap();
    let half = half.key(half.next(due).unwrap()).unwrap();
    assert_eq!(half.as_str(), "a@b@2026-03-01T01:00:01.500Z");
}

#[test]
fn after_an_outage_missed_runs_follow_the_schedules_choice() {
    let (mark, now) = (at("2026-01-01T02:00:00Z"), at("2026-01-05T12:00:00Z"));
    let owed = |missed| cron("0 2 * * *", UTC).missed(missed).owed(mark, now);
    let days = |from: u32| (from..=5).map(|day| at(&format!("2026-01-0{day}T02:00:00Z"))).collect::<Vec<_>>();
    assert_eq!(owed(Missed::Latest), days(5));
    assert_eq!(owed(Missed::All(100)), days(2));
    assert_eq!(owed(Missed::All(2)), days(4), "the latest, oldest first");
    assert_eq!(owed(Missed::None), []);
    let on_time = cron("0 2 * * *", UTC).missed(Missed::None).owed(mark, at("2026-01-05T02:00:59Z"));
    assert_eq!(on_time, days(5), "one that is not a minute late is not missed");
    assert_eq!(cron("0 2 * * *", UTC).owed(now, now), [], "nothing since the mark");
}

#[test]
fn the_latest_of_many_missed_runs_are_kept_over_several_steps() {
    let schedule = cron("*/5 * * * * *", UTC).missed(Missed::All(2500));
    let (mut mark, now, mut owed) = (at("2026-01-01T00:00:00Z"), at("2026-01-02T00:00:00Z"), Vec::new());
    loop {
        let some = schedule.owed(mark, now);
        let Some(last) = some.last() else { break };
        (mark, owed) = (*last, [owed, some].concat());
    }
    let first = now.as_micros() - 2499 * 5_000_000;
    assert_eq!(owed, (0..2500).map(|n| Timestamp::from_micros(first + n * 5_000_000)).collect::<Vec<_>>());
}

#[test]
fn a_year_of_missed_seconds_costs_no_more_than_one() {
    let schedule = cron("* * * * * *", UTC).missed(Missed::All(3));
    assert_eq!(schedule.owed(at("2025-01-01T00:00:00Z"), at("2026-01-01T00:00:00Z")).len(), 3);
}

#[test]
fn an_invalid_schedule_is_refused_with_the_reason() {
    for (expression, why) in [("0 2 * *", "fields"), ("0 25 * * *", "25"), ("0 0 30 2 *", "never due"), ("", "empty")] {
        let error = Schedule::cron("nightly", expression, UTC, scope()).unwrap_err().to_string();
        assert!(error.contains(why) && error.contains("nightly"), "{expression}: {error}");
    }
    assert!(Schedule::every("often", Duration::from_millis(999), scope()).is_err());
    for name in ["", "a\nb", &"n".repeat(201)] {
        assert!(Schedule::every(name, Duration::from_secs(1), scope()).is_err(), "{name:?}");
    }
}

#[test]
fn different_schedules_have_different_specs() {
    assert_eq!(cron("0  2 * * *", Europe::Rome).spec(), "0 2 * * * Europe/Rome");
    assert_eq!(Schedule::every("x", Duration::from_secs(15), scope()).unwrap().spec(), "every 15s");
}

#[test]
fn a_gap_brings_no_run_to_a_schedule_of_another_time() {
    let due = between(&cron("0 1 * * *", Europe::Rome), "2026-03-28T12:00:00Z", "2026-03-29T12:00:00Z");
    assert_eq!(due, ["2026-03-29T00:00:00Z"]);
}

/// The due times by definition: every minute is checked.
fn by_the_rules(minute: &str, hour: &str, zone: Tz, from: Timestamp, until: Timestamp) -> Vec<Timestamp> {
    use chrono::{TimeDelta, TimeZone as _};
    let fits = |field: &str, n: u32| match field.strip_prefix("*/") {
        Some(step) => n.is_multiple_of(step.parse().unwrap()),
        None => field == "*" || field == n.to_string(),
    };
    let (fixed, mut due) = (!minute.contains('*') && !hour.contains('*'), Vec::new());
    let mut now = DateTime::from_timestamp(from.as_micros() / SECOND / 60 * 60, 0).unwrap();
    while now.timestamp_micros() <= until.as_micros() {
        use chrono::Timelike as _;
        let (here, at) = (now.with_timezone(&zone), Timestamp::from_micros(now.timestamp_micros()));
        let shows = |local: chrono::NaiveDateTime| fits(minute, local.minute()) && fits(hour, local.hour());
        let again = zone.from_local_datetime(&here.naive_local()).earliest().is_some_and(|first| first < here);
        let before = (now - TimeDelta::minutes(1)).with_timezone(&zone).naive_local();
        let skipped = (here.naive_local() - before).num_minutes();
        let made_up = (1..skipped).any(|n| shows(before + TimeDelta::minutes(n)));
        let is_due = if fixed { (shows(here.naive_local()) && !again) || made_up } else { shows(here.naive_local()) };
        if is_due && at > from {
            due.push(at);
        }
        now += TimeDelta::minutes(1);
    }
    due
}

proptest! {
    /// Across clock changes, due times follow the definition. The search backwards finds what the search forwards
    /// finds: otherwise a missed run would be enqueued under another key, or not at all.
    #[test]
    fn due_times_follow_the_definition_ahead_and_back(
        minute in prop_oneof![Just("*/20".to_owned()), Just("*".to_owned()), (0..60u32).prop_map(|n| n.to_string())],
        hour in prop_oneof![Just("*".to_owned()), Just("*/2".to_owned()), (0..5u32).prop_map(|n| n.to_string())],
        zone in prop_oneof![Just(Europe::Rome), Just(America::New_York), Just(Australia::Lord_Howe), Just(UTC)],
        start in prop_oneof![
            Just("2026-03-07"), Just("2026-03-28"), Just("2026-04-04"), Just("2026-10-03"), Just("2026-10-24"), Just("2026-10-31")
        ],
        second in 0..86_400u64,
    ) {
        let schedule = cron(&format!("{minute} {hour} * * *"), zone).missed(Missed::All(10_000));
        let from = at(&format!("{start}T00:00:00Z")) + Duration::from_secs(second);
        let until = from + Duration::from_secs(36 * 3600);
        let ahead: Vec<_> = std::iter::successors(schedule.next(from), |due| schedule.next(*due))
            .take_while(|due| *due <= until)
            .collect();
        prop_assert_eq!(&ahead, &by_the_rules(&minute, &hour, zone, from, until));
        let before = |due: &Timestamp| schedule.last(Timestamp::from_micros(due.as_micros() - 1));
        let mut back: Vec<_> =
            std::iter::successors(schedule.last(until), before).take_while(|due| *due > from).collect();
        back.reverse();
        prop_assert_eq!(&back, &ahead);
        prop_assert_eq!(schedule.owed(from, until), &ahead[..ahead.len().min(1000)]);
    }
}
