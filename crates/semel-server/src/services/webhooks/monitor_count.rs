//! What the counters of a source say: pure sums, of any number of events in the same time.
//!
//! Counters know how many events came and which states were entered and left in an hour, but not by which events. So
//! where the events of a period stand now is told by those that have not completed: they are few, and listed with a
//! limit. Only where there are more of them than that, the counters stand in: what came into a state less what left it.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

use semel::{
    Operation, State, Timestamp,
    look::{Counted, Counting, DayTally, Durations, Tally, appeared, in_state},
};
use serde::Serialize;

use super::{health::share, source::Source};

/// How many events in each state are looked at.
pub(super) const MOST_OPEN: u32 = 500;

/// How many types, and how many functions, are told one by one; those with the most events.
const MOST_GROUPS: usize = 200;

/// The length of an hour and of a day, in the ledger's grain.
const HOUR: i64 = 3_600_000_000;
const DAY: i64 = 24 * HOUR;

/// The beginning of an hour.
pub(super) const fn hour(hour: i64) -> Timestamp {
    Timestamp::from_micros(hour.saturating_mul(HOUR))
}

/// The kinds of operations that a source's events are. Refusals are counted under its name, whatever its functions.
pub(super) fn kinds(source: &Source, functions: &[String]) -> Vec<String> {
    let own = functions.iter().map(|function| source.kind(function));
    [source.name.clone()].into_iter().chain(own).collect::<BTreeSet<_>>().into_iter().collect()
}

/// The kinds that the bodies of its events are, the second key.
pub(super) fn body_kinds(source: &Source, functions: &[String]) -> Vec<String> {
    kinds(source, functions).into_iter().map(|kind| format!("{kind}/body")).collect()
}

/// The events that have not completed, as far as they were looked at.
pub(super) struct Open {
    /// By state, the newest first.
    pub(super) states: Vec<(State, Vec<Operation>, bool)>,
    /// When the period began.
    pub(super) since: Timestamp,
}

impl Open {
    /// The states of what has not completed.
    pub(super) const STATES: [State; 4] = [State::Processing, State::Failed, State::TimedOut, State::Pending];

    /// Those in a state that came in the period.
    pub(super) fn of_period(&self, state: State) -> impl Iterator<Item = &Operation> {
        self.all(state).filter(|operation| operation.created_at >= self.since)
    }

    /// Those in a state, whenever they came.
    pub(super) fn all(&self, state: State) -> impl Iterator<Item = &Operation> {
        self.states.iter().filter(move |(known, ..)| *known == state).flat_map(|(_, operations, _)| operations)
    }

    /// Whether all of those in a state were looked at that came in the period. The newest are looked at first.
    fn is_whole(&self, state: State) -> bool {
        let past = |operations: &Vec<Operation>| operations.last().is_some_and(|last| last.created_at < self.since);
        self.states.iter().any(|(known, operations, more)| *known == state && (!more || past(operations)))
    }

    /// Whether there are more than were looked at.
    pub(super) fn is_flooded(&self) -> bool {
        self.states.iter().any(|(state, _, more)| *more && *state != State::Processing)
    }
}

/// Where the events stand that came in a period.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub(super) struct Stand {
    pub(super) total: i64,
    pub(super) processing: i64,
    pub(super) completed: i64,
    pub(super) failed: i64,
    pub(super) timeout: i64,
    pub(super) pending: i64,
}

impl Stand {
    /// By the counters of some events, and by which of the open ones are among them.
    pub(super) fn of<'a, C: Counting + 'a>(counts: &[&'a C], open: &Open, among: impl Fn(&Operation) -> bool) -> Self {
        let number = |state| {
            let seen = open.of_period(state).filter(|operation| among(operation)).count();
            let seen = i64::try_from(seen).unwrap_or(i64::MAX);
            if open.is_whole(state) { seen } else { in_state(counts.iter().copied(), state).max(seen) }
        };
        let [processing, failed, timeout, pending] = Open::STATES.map(number);
        let open = processing + failed + timeout + pending;
        // What came between the two looks is among the open ones alone.
        let total = appeared(counts.iter().copied()).max(open);
        Self { total, processing, completed: total - open, failed, timeout, pending }
    }

    /// The rates, of all that came; none where nothing did.
    pub(super) fn rates(&self) -> Rates {
        Rates {
            success_rate: share(self.completed, self.total),
            failure_rate: share(self.failed, self.total),
            timeout_rate: share(self.timeout, self.total),
        }
    }
}

/// Parts of the total.
#[derive(Debug, PartialEq, Serialize)]
pub(super) struct Rates {
    success_rate: Option<f64>,
    failure_rate: Option<f64>,
    timeout_rate: Option<f64>,
}

/// Where the events of one day, type or function stand.
#[derive(Debug, Serialize)]
pub(super) struct Line {
    /// Which, under the name of what they have in common.
    #[serde(flatten)]
    named: BTreeMap<&'static str, String>,
    #[serde(flatten)]
    stand: Stand,
}

impl Line {
    fn new(name: &'static str, value: &str, stand: Stand) -> Self {
        Self { named: [(name, value.to_owned())].into(), stand }
    }
}

/// The days on which something came, the first first.
pub(super) fn by_day(days: &[&DayTally], open: &Open) -> Vec<Line> {
    let day_of = |operation: &Operation| operation.created_at.as_micros().div_euclid(DAY);
    let mut groups: BTreeMap<i64, Vec<&DayTally>> = BTreeMap::new();
    for line in days {
        groups.entry(line.day).or_default().push(line);
    }
    let stands = groups.into_iter().map(|(day, lines)| (day, Stand::of(&lines, open, |event| day_of(event) == day)));
    let came = stands.filter(|(_, stand)| stand.total > 0);
    came.map(|(day, stand)| Line::new("day", &date(day), stand)).collect()
}

fn date(day: i64) -> String {
    Timestamp::from_micros(day.saturating_mul(DAY)).to_string().chars().take(10).collect()
}

/// The events by one of the first two labels, those with the most first.
pub(super) fn by_label(lines: &[Tally], open: &Open, slot: usize, name: &'static str) -> (Vec<Line>, bool) {
    let mut groups: BTreeMap<&str, Vec<&Tally>> = BTreeMap::new();
    for line in lines {
        groups.entry(if slot == 0 { &line.label1 } else { &line.label2 }).or_default().push(line);
    }
    let is = |event: &Operation, label: &str| event.labels.0[slot].as_deref().unwrap_or_default() == label;
    let stands = groups.into_iter().map(|(label, lines)| (label, Stand::of(&lines, open, |event| is(event, label))));
    let mut came: Vec<_> = stands.filter(|(_, stand)| stand.total > 0).collect();
    came.sort_by_key(|(_, stand)| std::cmp::Reverse(stand.total));
    let more = came.len() > MOST_GROUPS;
    came.truncate(MOST_GROUPS);
    (came.into_iter().map(|(label, stand)| Line::new(name, label, stand)).collect(), more)
}

/// How long the runs took that completed, in milliseconds.
#[derive(Debug, Default, PartialEq, Serialize)]
pub(super) struct Times {
    count: i64,
    min: Option<f64>,
    mean: Option<f64>,
    max: Option<f64>,
    p50: Option<f64>,
    p95: Option<f64>,
    p99: Option<f64>,
}

impl Times {
    pub(super) fn of(lines: &[Tally]) -> Self {
        let took = Durations::of(lines, Some(State::Completed));
        // To the microsecond: what follows is no more than how a number is written in base two.
        let millis = |duration: Option<Duration>| duration.map(|it| (it.as_secs_f64() * 1e6).round() / 1e3);
        Self {
            count: took.count(),
            min: millis(took.min()),
            mean: millis(took.mean()),
            max: millis(took.max()),
            p50: millis(took.quantile(0.5)),
            p95: millis(took.quantile(0.95)),
            p99: millis(took.quantile(0.99)),
        }
    }
}

/// How often an event that had failed or been lost was let run again.
pub(super) fn retries<'a, C: Counting + 'a>(counts: &[&'a C]) -> i64 {
    let again = |line: &&C| match line.what() {
        Counted::Change { from, to, .. } => {
            let is = |word: &str, states: [State; 2]| states.iter().any(|state| state.as_str() == word);
            is(from, [State::Failed, State::TimedOut]) && is(to, [State::Processing, State::Pending])
        }
        Counted::Answer(_) => false,
    };
    counts.iter().filter(|line| again(line)).map(|line| line.n()).sum()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        config::{self, Secrets, SourceKind},
        services::webhooks::Handlers,
    };

    fn change(label: &str, from: &str, to: &str, n: i64) -> Tally {
        let what = Counted::Change { from: from.into(), to: to.into(), bucket: 40 };
        Tally { kind: "stripe".into(), label1: label.into(), label2: "f".into(), what, n }
    }

    #[test]
    fn a_source_knows_its_own_kinds() {
        let mut config = config::Source::new(SourceKind::Stripe, Secrets(vec!["a good secret".into()]));
        let functions = ["connect".to_owned(), "body".to_owned()];
        let source = Source::open("stripe", config.clone(), &Handlers::default()).unwrap();
        assert_eq!(kinds(&source, &functions), ["stripe"], "functions are labels");
        assert_eq!(body_kinds(&source, &[]), ["stripe/body"]);
        config.dedup_per_function = true;
        config.functions.0.extend(functions.clone());
        let source = Source::open("stripe", config, &Handlers::default()).unwrap();
        assert_eq!(kinds(&source, &functions), ["stripe", "stripe.body", "stripe.connect"]);
        assert_eq!(body_kinds(&source, &functions), ["stripe/body", "stripe.body/body", "stripe.connect/body"]);
    }

    #[test]
    fn states_add_up_to_the_total_where_there_are_too_many_to_look_at() {
        let lines = [
            change("a", "", "processing", 1000),
            change("a", "processing", "completed", 100),
            change("a", "processing", "failed", 950),
            change("a", "failed", "processing", 60),
            change("a", "failed", "pending", 5),
        ];
        let lines: Vec<_> = lines.iter().collect();
        let states = Open::STATES.map(|state| (state, Vec::new(), state == State::Failed)).to_vec();
        let open = Open { states, since: hour(0) };
        let stand = Stand::of(&lines, &open, |_| true);
        assert_eq!((stand.total, stand.failed, stand.completed), (1000, 885, 115));
        assert_eq!(retries(&lines), 65);
        assert!(open.is_flooded());
    }

    #[test]
    fn what_left_a_state_before_it_came_is_not_below_nothing() {
        let lines = [change("a", "failed", "pending", 7), change("a", "", "processing", 2)];
        let lines: Vec<_> = lines.iter().collect();
        let states = Open::STATES.map(|state| (state, Vec::new(), true)).to_vec();
        let stand = Stand::of(&lines, &Open { states, since: hour(0) }, |_| true);
        assert_eq!((stand.total, stand.failed), (9, 0));
        assert_eq!(stand.total, stand.processing + stand.completed + stand.failed + stand.timeout + stand.pending);
    }

    #[test]
    fn nothing_has_no_rates_and_no_times() {
        let none = Stand::of::<Tally>(&[], &Open { states: Vec::new(), since: hour(0) }, |_| true);
        assert_eq!(none, Stand::default());
        assert_eq!(none.rates(), Rates { success_rate: None, failure_rate: None, timeout_rate: None });
        assert_eq!(Times::of(&[]), Times::default());
    }

    #[test]
    fn types_are_told_by_how_many_there_are_and_not_all() {
        let lines: Vec<_> = (0..201).map(|n| change(&format!("t{n}"), "", "processing", n + 1)).collect();
        let states = Open::STATES.map(|state| (state, Vec::new(), false)).to_vec();
        let (told, more) = by_label(&lines, &Open { states, since: hour(0) }, 0, "event_type");
        assert_eq!((told.len(), more), (200, true));
        assert_eq!((told[0].named["event_type"].as_str(), told[0].stand.total), ("t200", 201));
    }

    #[test]
    fn a_day_is_written_as_people_do() {
        assert_eq!((date(0), date(20_773)), ("1970-01-01".to_owned(), "2026-11-16".to_owned()));
    }
}
