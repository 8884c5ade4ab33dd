//! Tallies: sums of counters over hours.

use std::{collections::BTreeMap, time::Duration};

use super::{Count, Counted, bucket_floor};
use crate::State;

/// Selects counters. All set fields must match.
#[derive(Clone, Debug, Default)]
pub struct TallyFilter {
    /// The tenant.
    pub tenant: String,
    /// The service.
    pub service: String,
    /// The kinds; if empty, all.
    pub kinds: Vec<String>,
    /// The first label; the empty text selects those without one.
    pub label1: Option<String>,
    /// The second label; the empty text selects those without one.
    pub label2: Option<String>,
    /// From this hour since 1970.
    pub since_hour: i64,
    /// Before this hour since 1970.
    pub until_hour: Option<i64>,
    /// The dimensions that are kept separate. A tally of days has none.
    pub by: TallyBy,
}

/// The dimensions that a tally keeps separate; the others are summed up and left empty. Fewer dimensions make fewer
/// sums.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum TallyBy {
    /// Kinds, both labels and durations.
    #[default]
    All,
    /// The first label.
    Label1,
    /// The second label.
    Label2,
    /// The durations of runs.
    Duration,
}

impl TallyBy {
    /// Its word.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::All => "all",
            Self::Label1 => "label1",
            Self::Label2 => "label2",
            Self::Duration => "duration",
        }
    }
}

/// One sum over all selected hours.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Tally {
    /// Kind of operation.
    pub kind: String,
    /// The first label, or nothing.
    pub label1: String,
    /// The second label, or nothing.
    pub label2: String,
    /// The event.
    pub what: Counted,
    /// The number.
    pub n: i64,
}

/// One sum of a day, over all selected kinds and labels.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct DayTally {
    /// The day (UTC), counted from 1970.
    pub day: i64,
    /// The event, without its bucket.
    pub what: Counted,
    /// The number.
    pub n: i64,
}

/// Sums, at most [`Tallied::MOST`], the largest.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tallied<T> {
    /// The sums, in order.
    pub lines: Vec<T>,
    /// Whether smaller ones were left out.
    pub cut: bool,
}

impl<T> Tallied<T> {
    /// The most sums. It is enough for a tally of a year's days: there are 42 changes of state and some twenty answers,
    /// and each day has at most one sum of each. A label with more values than this is no dimension of a counter.
    pub const MOST: u32 = 25_000;
}

/// A line of counters, or a sum of them.
pub trait Counting {
    /// The event.
    fn what(&self) -> &Counted;
    /// The number.
    fn n(&self) -> i64;
}

macro_rules! counting {
    ($($line:ty),+) => {
        $(impl Counting for $line {
            fn what(&self) -> &Counted {
                &self.what
            }

            fn n(&self) -> i64 {
                self.n
            }
        })+
    };
}
counting!(Count, Tally, DayTally);

/// Sums up the lines with a matching change of state.
fn changes<'a, C: Counting + 'a>(counts: impl IntoIterator<Item = &'a C>, fits: impl Fn(&str, &str) -> bool) -> i64 {
    let count = |line: &C| match line.what() {
        Counted::Change { from, to, .. } if fits(from, to) => line.n(),
        _ => 0,
    };
    counts.into_iter().map(count).sum()
}

/// The number of operations in a state: entries less exits. Correct only over all hours together.
#[must_use]
pub fn in_state<'a, C: Counting + 'a>(counts: impl IntoIterator<Item = &'a C>, state: State) -> i64 {
    let state = state.as_str();
    let change = |line: &C| match line.what() {
        Counted::Change { from, to, .. } => (i64::from(to == state) - i64::from(from == state)) * line.n(),
        Counted::Answer(_) => 0,
    };
    counts.into_iter().map(change).sum()
}

/// The number of new operations.
#[must_use]
pub fn appeared<'a, C: Counting + 'a>(counts: impl IntoIterator<Item = &'a C>) -> i64 {
    changes(counts, |from, _| from.is_empty())
}

/// How often a state was entered: an operation that fails three times is counted three times.
#[must_use]
pub fn reached<'a, C: Counting + 'a>(counts: impl IntoIterator<Item = &'a C>, state: State) -> i64 {
    changes(counts, |_, to| to == state.as_str())
}

/// The number of runs that ended in a state. A run that completed while a successor waited counts as completed,
/// although the operation became pending at once.
#[must_use]
pub fn runs<'a, C: Counting + 'a>(counts: impl IntoIterator<Item = &'a C>, ended: State) -> i64 {
    changes(counts, |from, to| from == State::Processing.as_str() && to == ended.as_str())
}

/// The number of claims without the lease, by answer ([`Claim::word`](crate::Claim::word)).
#[must_use]
pub fn answered<'a, C: Counting + 'a>(counts: impl IntoIterator<Item = &'a C>, word: &str) -> i64 {
    let count = |line: &C| match line.what() {
        Counted::Answer(answer) if answer == word => line.n(),
        _ => 0,
    };
    counts.into_iter().map(count).sum()
}

/// Durations of runs, from the histogram. A bucket ends 19% above its beginning ([`bucket`](super::bucket)), which
/// limits the precision; runs of more than 71 minutes count as 71 minutes.
#[derive(Clone, Debug, Default)]
pub struct Durations(BTreeMap<i32, i64>);

impl Durations {
    /// Of the runs that ended in a state, or of all.
    #[must_use]
    pub fn of<'a, C: Counting + 'a>(counts: impl IntoIterator<Item = &'a C>, ended: Option<State>) -> Self {
        let mut buckets = BTreeMap::new();
        for line in counts {
            if let Counted::Change { from, to, bucket } = line.what()
                && from == State::Processing.as_str()
                && ended.is_none_or(|state| to == state.as_str())
            {
                *buckets.entry(*bucket).or_default() += line.n();
            }
        }
        Self(buckets)
    }

    /// The number of runs.
    #[must_use]
    pub fn count(&self) -> i64 {
        self.0.values().sum()
    }

    /// The quantile, such as 0.95: the middle of its bucket, at most 9.1% off.
    #[must_use]
    pub fn quantile(&self, part: f64) -> Option<Duration> {
        let all = self.count();
        #[expect(clippy::cast_precision_loss, clippy::cast_possible_truncation, reason = "a count of runs fits")]
        let rank = ((part.clamp(0.0, 1.0) * all as f64).ceil() as i64).max(1);
        let mut seen = 0;
        self.0.iter().find_map(|(bucket, n)| {
            seen += n;
            (seen >= rank).then(|| middle(*bucket))
        })
    }

    /// The mean, at most 9.1% off.
    #[must_use]
    pub fn mean(&self) -> Option<Duration> {
        let all = self.count();
        #[expect(clippy::cast_precision_loss, reason = "a count of runs fits")]
        let total: f64 = self.0.iter().map(|(bucket, n)| middle(*bucket).as_secs_f64() * *n as f64).sum();
        #[expect(clippy::cast_precision_loss, reason = "a count of runs fits")]
        let mean = |all: i64| Duration::from_secs_f64(total / all as f64);
        (all > 0).then(|| mean(all))
    }

    /// The shortest run took at least this long, and at most 19% longer.
    #[must_use]
    pub fn min(&self) -> Option<Duration> {
        let shortest = self.0.iter().find(|(_, n)| **n > 0)?.0;
        // The first bucket includes zero.
        Some(if *shortest == 0 { Duration::ZERO } else { bucket_floor(*shortest) })
    }

    /// The longest run took at most this long, and at most 16% less.
    #[must_use]
    pub fn max(&self) -> Option<Duration> {
        self.0.iter().rfind(|(_, n)| **n > 0).map(|(bucket, _)| bucket_floor(*bucket + 1))
    }
}

/// The geometric middle of a bucket: its ends are 9.1% above and 8.3% below.
fn middle(bucket: i32) -> Duration {
    Duration::from_secs_f64((f64::from(bucket) / 4.0 + 0.125).exp2() / 1e6)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::look::bucket;

    fn line(from: &str, to: &str, took: Duration, n: i64) -> Tally {
        let what = Counted::Change { from: from.into(), to: to.into(), bucket: bucket(took) };
        Tally { kind: "k".into(), label1: String::new(), label2: String::new(), what, n }
    }

    fn answer(word: &str, n: i64) -> Tally {
        Tally { what: Counted::Answer(word.into()), ..line("", "", Duration::ZERO, n) }
    }

    #[test]
    fn sums_separate_states_runs_and_answers() {
        let none = Duration::ZERO;
        let lines = [
            line("", "processing", none, 7),
            line("", "completed", none, 2),
            line("processing", "completed", none, 4),
            line("processing", "failed", none, 3),
            line("failed", "processing", none, 1),
            line("failed", "pending", none, 1),
            line("in_doubt", "completed", none, 5),
            answer("replay", 9),
        ];
        assert_eq!(appeared(&lines), 9);
        assert_eq!(reached(&lines, State::Completed), 11);
        assert_eq!((runs(&lines, State::Completed), runs(&lines, State::Failed)), (4, 3));
        assert_eq!((in_state(&lines, State::Failed), in_state(&lines, State::Processing)), (1, 1));
        assert_eq!((answered(&lines, "replay"), answered(&lines, "mismatch")), (9, 0));
        assert_eq!(appeared(lines.iter().filter(|line| line.n > 2)), 7, "of some of them");
    }

    #[test]
    fn an_empty_tally_has_no_durations() {
        let durations = Durations::of(&[line("", "processing", Duration::ZERO, 3), answer("replay", 1)], None);
        assert_eq!((durations.count(), durations.min(), durations.max()), (0, None, None));
        assert_eq!((durations.quantile(0.5), durations.mean()), (None, None));
    }

    #[test]
    fn durations_are_exact_within_their_bounds() {
        // From a microsecond to an hour, and what takes no time.
        let runs: Vec<Duration> = (0..=1000_u64).map(|n| Duration::from_micros(n * n * n * 18 / 5)).collect();
        let mut lines: Vec<Tally> = runs.iter().map(|took| line("processing", "completed", *took, 1)).collect();
        lines.push(line("processing", "failed", Duration::from_secs(4000), 500));
        let durations = Durations::of(&lines, Some(State::Completed));
        assert_eq!(durations.count(), 1001);
        for (part, exact) in [(0.5, 500), (0.95, 950), (0.99, 990), (1.0, 1000)] {
            let (estimate, exact) = (durations.quantile(part).unwrap().as_secs_f64(), runs[exact].as_secs_f64());
            assert!((estimate / exact - 1.0).abs() < 0.091, "{part}: {estimate} instead of {exact}");
        }
        let mean = runs.iter().sum::<Duration>().as_secs_f64() / 1001.0;
        assert!((durations.mean().unwrap().as_secs_f64() / mean - 1.0).abs() < 0.091);
        assert_eq!(durations.min(), Some(Duration::ZERO));
        let (max, exact) = (durations.max().unwrap().as_secs_f64(), 3600.0);
        assert!(max >= exact && max < exact * 1.19, "{max}");
        assert_eq!(Durations::of(&lines, None).count(), 1501);
    }
}
