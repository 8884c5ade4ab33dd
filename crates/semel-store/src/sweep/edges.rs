//! Where the phases of the sweep begin to read.
//!
//! A phase goes through its rows in index order, and deletes them at the low end. On PostgreSQL the entries of deleted
//! rows stay in the index while an old snapshot is held (a long dump), and a scan from the low end reads over all of
//! them: each round of a thousand would read over what all rounds before it have deleted. So a round begins where the
//! last one ended, and a pass of many rounds where the last pass ended. From time to time a pass begins at the low end,
//! for rows that were committed there late.
//!
//! This concerns speed only. A position that is too high leaves rows for a later pass; none is lost.

use parking_lot::Mutex;
use semel::{Timestamp, look::Task};

/// One of this many passes begins at the low end: every five minutes, with a pass each 15 s.
const WHOLE: u32 = 20;

/// The positions of this process's sweeps.
pub(crate) struct Edges {
    /// Whether deleted rows leave entries behind.
    dead_entries: bool,
    places: Mutex<Places>,
}

#[derive(Default)]
struct Places {
    passes: u32,
    /// The last operation that was checked for a missing lease; `None` before the first check of this process.
    adrift: Option<i64>,
    lapse: Turn,
    age: Turn,
    fold: Turn,
}

#[derive(Clone, Copy)]
struct Turn {
    /// Where the next round begins.
    from: i64,
    /// Where the next pass begins.
    floor: i64,
    /// Whether every row so far was handled.
    clean: bool,
    /// The phase has failed: it is skipped until the others are done.
    rests: bool,
}

impl Default for Turn {
    fn default() -> Self {
        Self { from: i64::MIN, floor: i64::MIN, clean: true, rests: false }
    }
}

/// The progress of a round.
pub(super) struct Edge {
    /// The position of its last row.
    pub(super) place: i64,
    /// Whether any row was handled.
    pub(super) moved: bool,
    /// Whether every row was.
    pub(super) clean: bool,
}

/// A pass over operations by id: from some id to the end, and from the low end to that id.
pub(super) struct Lap {
    begin: i64,
    at: i64,
    /// It has reached the end.
    turned: bool,
    /// It has reached the end twice: everything below was checked meanwhile.
    over: bool,
}

impl Lap {
    pub(super) fn from(begin: i64) -> Self {
        Self { begin, at: begin, turned: false, over: false }
    }

    /// The id after which to continue.
    pub(super) fn at(&self) -> i64 {
        self.at
    }

    /// Whether there are ids left to check.
    pub(super) fn goes_on(&self) -> bool {
        !self.over && (!self.turned || self.at < self.begin)
    }

    /// Ids up to this one were checked; up to the end, if `None`.
    pub(super) fn looked(&mut self, next: Option<i64>) {
        self.over |= self.turned && next.is_none();
        self.turned |= next.is_none();
        self.at = next.unwrap_or(0);
    }
}

impl Edges {
    pub(crate) fn new(dead_entries: bool) -> Self {
        Self { dead_entries, places: Mutex::default() }
    }

    /// Where a phase begins its round; `None` while it is skipped.
    pub(super) fn from(&self, task: Task, now: Timestamp) -> Option<i64> {
        let mut places = self.places.lock();
        let turn = places.of(task);
        // The clock was set back: rows that are due by it have lower positions.
        if task == Task::Age && now.as_micros() < turn.from {
            *turn = Turn { rests: turn.rests, ..Turn::default() };
        }
        (!turn.rests).then_some(turn.from)
    }

    /// A phase has done its round; `more` rows may follow.
    pub(super) fn advance(&self, task: Task, reached: Edge, more: bool) {
        let (mut places, dead_entries) = (self.places.lock(), self.dead_entries);
        let turn = places.of(task);
        turn.clean &= reached.clean;
        // Rows may share a position. If none of these could be handled, the same ones would be found again.
        turn.from = if reached.moved { reached.place } else { reached.place.saturating_add(1) };
        if turn.clean && dead_entries {
            turn.floor = turn.from;
        }
        // Expired leases are looked for in every round, and among all leases: their operations wait.
        if task == Task::Lapse && !more {
            *turn = Turn::default();
        }
        // There, ids of deleted counter rows are used again.
        if task == Task::Fold && !dead_entries {
            turn.from = i64::MIN;
        }
    }

    /// A phase has failed. If the others have many rounds to go, it does not fail in each.
    pub(super) fn rest(&self, task: Task) {
        self.places.lock().of(task).rests = true;
    }

    /// A phase has found nothing.
    pub(super) fn found_nothing(&self, task: Task) {
        if task == Task::Lapse {
            *self.places.lock().of(task) = Turn::default();
        }
    }

    /// All phases are done, and a new pass begins.
    pub(super) fn begin_anew(&self) {
        let mut places = self.places.lock();
        places.passes = places.passes.wrapping_add(1);
        let whole = places.passes.is_multiple_of(WHOLE);
        for task in [Task::Lapse, Task::Age, Task::Fold] {
            let turn = places.of(task);
            let floor = if whole || !turn.clean { i64::MIN } else { turn.floor };
            *turn = Turn { from: floor, floor, ..Turn::default() };
        }
    }

    /// The operation after which the check for missing leases continues; `None` before the first check of this process.
    pub(super) fn adrift(&self) -> Option<i64> {
        self.places.lock().adrift
    }

    /// The check for missing leases has got this far.
    pub(super) fn looked_adrift(&self, at: i64) {
        self.places.lock().adrift = Some(at);
    }
}

impl Places {
    fn of(&mut self, task: Task) -> &mut Turn {
        match task {
            Task::Lapse | Task::Run => &mut self.lapse,
            Task::Age => &mut self.age,
            Task::Fold => &mut self.fold,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOW: Timestamp = Timestamp::from_micros(1_000_000);

    fn done(place: i64) -> Edge {
        Edge { place, moved: true, clean: true }
    }

    #[test]
    fn a_round_and_a_pass_begin_where_the_last_one_ended() {
        let edges = Edges::new(true);
        for task in [Task::Age, Task::Fold] {
            assert_eq!(edges.from(task, NOW), Some(i64::MIN));
            edges.advance(task, done(10), true);
            assert_eq!(edges.from(task, NOW), Some(10));
            edges.advance(task, done(15), false);
            assert_eq!(edges.from(task, NOW), Some(15));
        }
        edges.begin_anew();
        for task in [Task::Age, Task::Fold] {
            assert_eq!(edges.from(task, NOW), Some(15));
        }
    }

    #[test]
    fn now_and_then_a_pass_begins_at_the_low_end() {
        let edges = Edges::new(true);
        edges.advance(Task::Fold, done(10), false);
        let low = |_: &u32| {
            edges.begin_anew();
            edges.from(Task::Fold, NOW) == Some(i64::MIN)
        };
        assert_eq!((0..WHOLE).filter(low).count(), 1);
    }

    #[test]
    fn rows_that_were_left_are_found_again_by_the_next_pass() {
        let edges = Edges::new(true);
        edges.advance(Task::Age, Edge { clean: false, ..done(10) }, true);
        edges.advance(Task::Age, done(20), false);
        edges.begin_anew();
        assert_eq!(edges.from(Task::Age, NOW), Some(i64::MIN));
    }

    #[test]
    fn a_round_that_could_do_nothing_is_not_repeated() {
        let edges = Edges::new(true);
        edges.advance(Task::Age, Edge { moved: false, clean: false, place: 10 }, true);
        assert_eq!(edges.from(Task::Age, NOW), Some(11));
    }

    #[test]
    fn expired_leases_are_looked_for_among_all_in_every_round() {
        let edges = Edges::new(true);
        edges.advance(Task::Lapse, done(10), true);
        assert_eq!(edges.from(Task::Lapse, NOW), Some(10));
        edges.advance(Task::Lapse, done(20), false);
        assert_eq!(edges.from(Task::Lapse, NOW), Some(i64::MIN));
        edges.advance(Task::Lapse, done(10), true);
        edges.found_nothing(Task::Lapse);
        assert_eq!(edges.from(Task::Lapse, NOW), Some(i64::MIN));
    }

    #[test]
    fn a_phase_that_failed_rests_until_the_next_pass() {
        let edges = Edges::new(true);
        edges.rest(Task::Age);
        assert_eq!((edges.from(Task::Age, NOW), edges.from(Task::Fold, NOW)), (None, Some(i64::MIN)));
        edges.begin_anew();
        assert_eq!(edges.from(Task::Age, NOW), Some(i64::MIN));
    }

    #[test]
    fn without_dead_entries_a_pass_begins_at_the_low_end() {
        let edges = Edges::new(false);
        edges.advance(Task::Age, done(10), true);
        edges.advance(Task::Age, done(20), false);
        edges.begin_anew();
        assert_eq!(edges.from(Task::Age, NOW), Some(i64::MIN));
    }

    #[test]
    fn a_lap_looks_at_every_number_once_wherever_it_begins() {
        const LAST: i64 = 25;
        for begin in 0..=LAST + 3 {
            let (mut lap, mut seen) = (Lap::from(begin), Vec::new());
            while lap.goes_on() {
                let slice: Vec<_> = (lap.at() + 1..=LAST).take(10).collect();
                lap.looked(slice.last().copied().filter(|_| slice.len() == 10));
                seen.extend(slice);
            }
            let missing: Vec<_> = (1..=LAST).filter(|n| !seen.contains(n)).collect();
            assert!(missing.is_empty(), "from {begin}: {missing:?} are missing");
            // The last slice of a lap may go beyond where it began.
            assert!(seen.len() < LAST as usize + 10, "from {begin}: {seen:?}");
        }
    }

    #[test]
    fn after_a_clock_is_set_back_the_sweep_starts_at_the_low_end() {
        let edges = Edges::new(true);
        edges.advance(Task::Age, done(NOW.as_micros()), true);
        assert_eq!(edges.from(Task::Age, NOW), Some(NOW.as_micros()));
        assert_eq!(edges.from(Task::Age, Timestamp::from_micros(5)), Some(i64::MIN));
    }
}
