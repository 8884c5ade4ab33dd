//! Tallies: counters added up over hours, and what can be told from them.

use std::{collections::BTreeMap, time::Duration};

use super::{Count, Counted, bucket_floor};
use crate::State;

/// Which counters to add up. Everything set must hold.
#[derive(Clone, Debug, Default)]
pub struct TallyFilter {
    /// Of this tenant.
    pub tenant: String,
    /// Of this service.
    pub service: String,
    /// Of these kinds; if there are none here, of all.
    pub kinds: Vec<String>,
    /// With this first label; the empty text is none.
    pub label1: Option<String>,
    /// With this second label; the empty text is none.
    pub label2: Option<String>,
    /// From this hour since 1970 on.
    pub since_hour: i64,
    /// Before this hour since 1970.
    pub until_hour: Option<i64>,
    /// What is told one by one. The tally of days has none of it.
    pub by: TallyBy,
}

/// What a tally tells one by one beside what was counted; all else is added up, and reads as nothing. The fewer it
/// tells apart, the fewer sums there are.
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

/// One sum: how often something happened in all of the hours that were asked for.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Tally {
    /// Kind of operation.
    pub kind: String,
    /// The first label, or nothing.
    pub label1: String,
    /// The second label, or nothing.
    pub label2: String,
    /// What was counted.
    pub what: Counted,
    /// How often.
    pub n: i64,
}

/// One sum of a day, of all kinds and labels that were asked for.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct DayTally {
    /// The day by UTC, counted from 1970.
    pub day: i64,
    /// What was counted. The bucket says nothing.
    pub what: Counted,
    /// How often.
    pub n: i64,
}

/// Sums, at most [`Tallied::MOST`]: the largest.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tallied<T> {
    /// The sums, in order.
    pub lines: Vec<T>,
    /// Whether there are more, which were left out.
    pub cut: bool,
}

impl<T> Tallied<T> {
    /// How many sums are told at most. So many that a tally of days is whole for a year: there are 42 changes of state
    /// and some twenty answers, and each day has one sum of each at most. A label with more values than this is no
    /// dimension of a counter.
    pub const MOST: u32 = 25_000;
}

/// A line of counters or of sums of them.
pub trait Counting {
    /// What was counted.
    fn what(&self) -> &Counted;
    /// How often.
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

/// Adds up the lines whose change of state fits.
fn changes<'a, C: Counting + 'a>(counts: impl IntoIterator<Item = &'a C>, fits: impl Fn(&str, &str) -> bool) -> i64 {
    let count = |line: &C| match line.what() {
        Counted::Change { from, to, .. } if fits(from, to) => line.n(),
        _ => 0,
    };
    counts.into_iter().map(count).sum()
}

/// How many operations are in a state: what came in less what went out. Right only of all hours together.
#[must_use]
pub fn in_state<'a, C: Counting + 'a>(counts: impl IntoIterator<Item = &'a C>, state: State) -> i64 {
    let state = state.as_str();
    let change = |line: &C| match line.what() {
        Counted::Change { from, to, .. } => (i64::from(to == state) - i64::from(from == state)) * line.n(),
        Counted::Answer(_) => 0,
    };
    counts.into_iter().map(change).sum()
}

/// How many operations were there for the first time.
#[must_use]
pub fn appeared<'a, C: Counting + 'a>(counts: impl IntoIterator<Item = &'a C>) -> i64 {
    changes(counts, |from, _| from.is_empty())
}

/// How often a state was entered, from whichever: an operation that fails three times is counted three times.
#[must_use]
pub fn reached<'a, C: Counting + 'a>(counts: impl IntoIterator<Item = &'a C>, state: State) -> i64 {
    changes(counts, |_, to| to == state.as_str())
}

/// How many runs ended in a state. One that completed while newer data waited counts as completed, though the operation
/// was pending at once.
#[must_use]
pub fn runs<'a, C: Counting + 'a>(counts: impl IntoIterator<Item = &'a C>, ended: State) -> i64 {
    changes(counts, |from, to| from == State::Processing.as_str() && to == ended.as_str())
}

/// How many claims did not get the lease and were answered so, by [`Claim::word`](crate::Claim::word).
#[must_use]
pub fn answered<'a, C: Counting + 'a>(counts: impl IntoIterator<Item = &'a C>, word: &str) -> i64 {
    let count = |line: &C| match line.what() {
        Counted::Answer(answer) if answer == word => line.n(),
        _ => 0,
    };
    counts.into_iter().map(count).sum()
}

/// How long runs took, by the histogram. A bucket ends 19% above its beginning ([`bucket`](super::bucket)), so
/// nothing here is more exact than that; runs of more than 71 minutes count as 71 minutes.
#[derive(Clone, Debug, Default)]
pub struct Durations(BTreeMap<i32, i64>);

impl Durations {
    /// Of the runs that ended in a state, or of all that ended.
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

    /// How many runs.
    #[must_use]
    pub fn count(&self) -> i64 {
        self.0.values().sum()
    }

    /// What this part of the runs did not exceed, such as 0.95: the middle of its bucket, at most 9.1% off.
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

    /// No run was shorter; the shortest took at most 19% more.
    #[must_use]
    pub fn min(&self) -> Option<Duration> {
        let shortest = self.0.iter().find(|(_, n)| **n > 0)?.0;
        // The first bucket begins with what takes no time at all.
        Some(if *shortest == 0 { Duration::ZERO } else { bucket_floor(*shortest) })
    }

    /// No run was longer; the longest took at most 16% less.
    #[must_use]
    pub fn max(&self) -> Option<Duration> {
        self.0.iter().rfind(|(_, n)| **n > 0).map(|(bucket, _)| bucket_floor(*bucket + 1))
    }
}

/// The middle of a bucket by factor: its ends are 9.1% above and 8.3% below.
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
    fn sums_tell_states_runs_and_answers_apart() {
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
    fn nothing_has_no_durations() {
        let durations = Durations::of(&[line("", "processing", Duration::ZERO, 3), answer("replay", 1)], None);
        assert_eq!((durations.count(), durations.min(), durations.max()), (0, None, None));
        assert_eq!((durations.quantile(0.5), durations.mean()), (None, None));
    }

    #[test]
    fn durations_are_told_within_their_bounds() {
        // From a microsecond to an hour, and what takes no time.
        let runs: Vec<Duration> = (0..=1000_u64).map(|n| Duration::from_micros(n * n * n * 18 / 5)).collect();
        let mut lines: Vec<Tally> = runs.iter().map(|took| line("processing", "completed", *took, 1)).collect();
        lines.push(line("processing", "failed", Duration::from_secs(4000), 500));
        let durations = Durations::of(&lines, Some(State::Completed));
        assert_eq!(durations.count(), 1001);
        for (part, exact) in [(0.5, 500), (0.95, 950), (0.99, 990), (1.0, 1000)] {
            let (told, exact) = (durations.quantile(part).unwrap().as_secs_f64(), runs[exact].as_secs_f64());
            assert!((told / exact - 1.0).abs() < 0.091, "{part}: {told} instead of {exact}");
        }
        let mean = runs.iter().sum::<Duration>().as_secs_f64() / 1001.0;
        assert!((durations.mean().unwrap().as_secs_f64() / mean - 1.0).abs() < 0.091);
        assert_eq!(durations.min(), Some(Duration::ZERO));
        let (max, exact) = (durations.max().unwrap().as_secs_f64(), 3600.0);
        assert!(max >= exact && max < exact * 1.19, "{max}");
        assert_eq!(Durations::of(&lines, None).count(), 1501);
    }
}
