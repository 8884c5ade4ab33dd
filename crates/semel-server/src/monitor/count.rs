//! Sums of counters: pure functions that cost the same for any number of operations.
//!
//! Counters know how many operations arrived and which states were entered and left in an hour, but not which
//! operations. So the present states of a period's operations come from those that have not completed: they are few,
//! and read with a limit. Only beyond that limit, the counters are used: entries of a state less exits.

use std::{collections::BTreeMap, time::Duration};

use semel::{
    Operation, State, Timestamp,
    look::{Counted, Counting, DayTally, Durations, Tally, appeared, in_state},
};
use serde::Serialize;

use super::health::share;

/// How many operations of each state are read.
pub(super) const MOST_OPEN: u32 = 500;

/// How many labels are listed; those with the most operations.
const MOST_GROUPS: usize = 200;

/// An hour and a day in microseconds.
const HOUR: i64 = 3_600_000_000;
const DAY: i64 = 24 * HOUR;

/// The beginning of an hour.
pub(super) const fn hour(hour: i64) -> Timestamp {
    Timestamp::from_micros(hour.saturating_mul(HOUR))
}

/// The operations that have not completed, up to the limit.
pub(super) struct Open {
    /// By state, newest first.
    pub(super) states: Vec<(State, Vec<Operation>, bool)>,
    /// When the period began.
    pub(super) since: Timestamp,
}

impl Open {
    /// The states of operations that have not completed.
    pub(super) const STATES: [State; 5] =
        [State::Processing, State::Failed, State::TimedOut, State::InDoubt, State::Pending];

    /// All of them.
    pub(super) fn every(&self) -> impl Iterator<Item = &Operation> {
        Self::STATES.into_iter().flat_map(|state| self.all(state))
    }

    /// Those that wait for a run or for a person.
    pub(super) fn idle(&self) -> impl Iterator<Item = &Operation> {
        [State::Failed, State::TimedOut, State::Pending].into_iter().flat_map(|state| self.all(state))
    }

    /// Those in a state that arrived in the period.
    pub(super) fn of_period(&self, state: State) -> impl Iterator<Item = &Operation> {
        self.all(state).filter(|operation| operation.created_at >= self.since)
    }

    /// Those in a state, whenever they arrived.
    pub(super) fn all(&self, state: State) -> impl Iterator<Item = &Operation> {
        self.states.iter().filter(move |(known, ..)| *known == state).flat_map(|(_, operations, _)| operations)
    }

    /// Whether all operations of the period in a state were read. The newest are read first.
    fn is_whole(&self, state: State) -> bool {
        let past = |operations: &Vec<Operation>| operations.last().is_some_and(|last| last.created_at < self.since);
        self.states.iter().any(|(known, operations, more)| *known == state && (!more || past(operations)))
    }

    /// Whether there are more than were read.
    pub(super) fn is_flooded(&self) -> bool {
        self.states.iter().any(|(state, _, more)| *more && *state != State::Processing)
    }
}

/// The states of the operations that arrived in a period.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Stand {
    /// How many arrived.
    pub total: i64,
    /// A worker or a caller runs them.
    pub processing: i64,
    /// They took effect.
    pub completed: i64,
    /// Their last run failed.
    pub failed: i64,
    /// The lease of their last run expired.
    pub timed_out: i64,
    /// It is not known whether they took effect.
    pub in_doubt: i64,
    /// They wait to be run.
    pub pending: i64,
}

impl Stand {
    /// From the counters of some operations, and the open ones among them.
    pub(super) fn of<'a, C: Counting + 'a>(counts: &[&'a C], open: &Open, among: impl Fn(&Operation) -> bool) -> Self {
        let number = |state| {
            let seen = open.of_period(state).filter(|operation| among(operation)).count();
            let seen = i64::try_from(seen).unwrap_or(i64::MAX);
            if open.is_whole(state) { seen } else { in_state(counts.iter().copied(), state).max(seen) }
        };
        let [processing, failed, timed_out, in_doubt, pending] = Open::STATES.map(number);
        let open = processing + failed + timed_out + in_doubt + pending;
        // Operations that arrived between the two reads are among the open ones only.
        let total = appeared(counts.iter().copied()).max(open);
        Self { total, processing, completed: total - open, failed, timed_out, in_doubt, pending }
    }

    /// Rates of the total; none if it is 0.
    #[must_use]
    pub fn rates(&self) -> Rates {
        Rates {
            success: share(self.completed, self.total),
            failure: share(self.failed, self.total),
            timeout: share(self.timed_out + self.in_doubt, self.total),
        }
    }
}

/// Rates of the total.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Rates {
    /// The rate of completed operations.
    pub success: Option<f64>,
    /// The rate of failed operations.
    pub failure: Option<f64>,
    /// The rate of operations whose lease expired.
    pub timeout: Option<f64>,
}

/// The states of the operations of one day or label.
#[derive(Clone, Debug, Serialize)]
pub struct Line {
    /// The day or label.
    pub name: String,
    /// The states.
    #[serde(flatten)]
    pub stand: Stand,
}

/// The days with operations, in order.
pub(super) fn by_day(days: &[&DayTally], open: &Open) -> Vec<Line> {
    let day_of = |operation: &Operation| operation.created_at.as_micros().div_euclid(DAY);
    let mut groups: BTreeMap<i64, Vec<&DayTally>> = BTreeMap::new();
    for line in days {
        groups.entry(line.day).or_default().push(line);
    }
    let stands = groups.into_iter().map(|(day, lines)| (day, Stand::of(&lines, open, |op| day_of(op) == day)));
    let came = stands.filter(|(_, stand)| stand.total > 0);
    came.map(|(day, stand)| Line { name: date(day), stand }).collect()
}

fn date(day: i64) -> String {
    Timestamp::from_micros(day.saturating_mul(DAY)).to_string().chars().take(10).collect()
}

/// The operations by one of the first two labels, most frequent first; and whether there are more labels.
pub(super) fn by_label(lines: &[Tally], open: &Open, slot: usize) -> (Vec<Line>, bool) {
    let mut groups: BTreeMap<&str, Vec<&Tally>> = BTreeMap::new();
    for line in lines {
        groups.entry(if slot == 0 { &line.label1 } else { &line.label2 }).or_default().push(line);
    }
    let is = |op: &Operation, label: &str| op.labels.0[slot].as_deref().unwrap_or_default() == label;
    let stands = groups.into_iter().map(|(label, lines)| (label, Stand::of(&lines, open, |op| is(op, label))));
    let mut came: Vec<_> = stands.filter(|(_, stand)| stand.total > 0).collect();
    came.sort_by_key(|(_, stand)| std::cmp::Reverse(stand.total));
    let more = came.len() > MOST_GROUPS;
    came.truncate(MOST_GROUPS);
    (came.into_iter().map(|(label, stand)| Line { name: label.to_owned(), stand }).collect(), more)
}

/// The durations of completed runs, in milliseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Times {
    /// How many runs.
    pub count: i64,
    /// The shortest.
    pub min: Option<f64>,
    /// The mean.
    pub mean: Option<f64>,
    /// The longest.
    pub max: Option<f64>,
    /// The median.
    pub p50: Option<f64>,
    /// The 95th percentile.
    pub p95: Option<f64>,
    /// The 99th percentile.
    pub p99: Option<f64>,
}

impl Times {
    pub(super) fn of(lines: &[Tally]) -> Self {
        let took = Durations::of(lines, Some(State::Completed));
        // Rounded to microseconds: more digits are only noise of the conversion.
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

/// How often a failed or lost operation ran again.
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

    fn change(label: &str, from: &str, to: &str, n: i64) -> Tally {
        let what = Counted::Change { from: from.into(), to: to.into(), bucket: 40 };
        Tally { kind: "stripe".into(), label1: label.into(), label2: "f".into(), what, n }
    }

    #[test]
    fn states_add_up_to_the_total_even_if_there_are_too_many_to_read() {
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
    fn a_count_is_never_negative() {
        let lines = [change("a", "failed", "pending", 7), change("a", "", "processing", 2)];
        let lines: Vec<_> = lines.iter().collect();
        let states = Open::STATES.map(|state| (state, Vec::new(), true)).to_vec();
        let stand = Stand::of(&lines, &Open { states, since: hour(0) }, |_| true);
        assert_eq!((stand.total, stand.failed), (9, 0));
        let Stand { total, processing, completed, failed, timed_out, in_doubt, pending } = stand;
        assert_eq!(total, processing + completed + failed + timed_out + in_doubt + pending);
    }

    #[test]
    fn without_operations_there_are_no_rates_and_no_times() {
        let none = Stand::of::<Tally>(&[], &Open { states: Vec::new(), since: hour(0) }, |_| true);
        assert_eq!(none, Stand::default());
        assert_eq!(none.rates(), Rates { success: None, failure: None, timeout: None });
        assert_eq!(Times::of(&[]), Times::default());
    }

    #[test]
    fn at_most_200_labels_are_listed_largest_first() {
        let lines: Vec<_> = (0..201).map(|n| change(&format!("t{n}"), "", "processing", n + 1)).collect();
        let states = Open::STATES.map(|state| (state, Vec::new(), false)).to_vec();
        let (told, more) = by_label(&lines, &Open { states, since: hour(0) }, 0);
        assert_eq!((told.len(), more), (200, true));
        assert_eq!((told[0].name.as_str(), told[0].stand.total), ("t200", 201));
    }

    #[test]
    fn a_day_is_written_as_an_iso_date() {
        assert_eq!((date(0), date(20_773)), ("1970-01-01".to_owned(), "2026-11-16".to_owned()));
    }
}
