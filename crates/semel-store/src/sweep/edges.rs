//! Where the phases of the sweep begin to look.
//!
//! A phase goes through its rows in the order of an index, and removes them at its low end. On PostgreSQL the entries of
//! removed rows stay in the index while an old snapshot is held (a long dump), and whoever begins at the low end walks
//! over all of them: each round of a thousand would walk over what all rounds before it have removed. So a round begins
//! where the last one ended, and a pass of many rounds where the last pass ended. Now and then a pass begins at the low
//! end, for what was committed there late.
//!
//! This is about speed only. A place that is too high leaves rows for a later pass; none is lost.

use std::sync::{Mutex, MutexGuard, PoisonError};

use semel::{Timestamp, look::Task};

/// Every so many passes begin at the low end: every five minutes, with a pass each 15 s.
const WHOLE: u32 = 20;

/// What this process knows about the phases of its sweeps.
pub(crate) struct Edges {
    /// Whether removed rows leave entries behind.
    dead_entries: bool,
    places: Mutex<Places>,
}

#[derive(Default)]
struct Places {
    passes: u32,
    /// The last operation that was looked at for a missing lease; none before the first look of this process.
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
    /// Whether each row so far was done with.
    clean: bool,
    /// The phase has failed: it rests until the others are done.
    rests: bool,
}

impl Default for Turn {
    fn default() -> Self {
        Self { from: i64::MIN, floor: i64::MIN, clean: true, rests: false }
    }
}

/// How far a round has come.
pub(super) struct Edge {
    /// The place of its last row.
    pub(super) place: i64,
    /// Whether any row was done with.
    pub(super) moved: bool,
    /// Whether each was.
    pub(super) clean: bool,
}

/// A look at operations by number: from some number to the end, and from the low end to that number.
pub(super) struct Lap {
    begin: i64,
    at: i64,
    /// It has been at the end.
    turned: bool,
    /// It has been there twice: whatever lies below was looked at meanwhile.
    over: bool,
}

impl Lap {
    pub(super) fn from(begin: i64) -> Self {
        Self { begin, at: begin, turned: false, over: false }
    }

    /// After which number to look next.
    pub(super) fn at(&self) -> i64 {
        self.at
    }

    /// Whether there are numbers that were not looked at.
    pub(super) fn goes_on(&self) -> bool {
        !self.over && (!self.turned || self.at < self.begin)
    }

    /// It was looked up to this number; up to the end, if none.
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

    /// Where a phase begins its round; nowhere while it rests.
    pub(super) fn from(&self, task: Task, now: Timestamp) -> Option<i64> {
        let mut places = self.lock();
        let turn = places.of(task);
        // A clock that was set back: what is due by it lies below.
        if task == Task::Age && now.as_micros() < turn.from {
            *turn = Turn { rests: turn.rests, ..Turn::default() };
        }
        (!turn.rests).then_some(turn.from)
    }

    /// A phase has had its round; `more` rows may follow.
    pub(super) fn advance(&self, task: Task, reached: Edge, more: bool) {
        let (mut places, dead_entries) = (self.lock(), self.dead_entries);
        let turn = places.of(task);
        turn.clean &= reached.clean;
        // Rows may share a place. If none of these could be done with, the same ones would be found again.
        turn.from = if reached.moved { reached.place } else { reached.place.saturating_add(1) };
        if turn.clean && dead_entries {
            turn.floor = turn.from;
        }
        // Leases that have lapsed are looked for in every round, and among all leases: theirs is the work that waits.
        if task == Task::Lapse && !more {
            *turn = Turn::default();
        }
        // Numbers of removed counter rows are used again there.
        if task == Task::Fold && !dead_entries {
            turn.from = i64::MIN;
        }
    }

    /// A phase has failed. Where the others have many rounds to go, it does not fail in each.
    pub(super) fn rest(&self, task: Task) {
        self.lock().of(task).rests = true;
    }

    /// A phase has found nothing.
    pub(super) fn found_nothing(&self, task: Task) {
        if task == Task::Lapse {
            *self.lock().of(task) = Turn::default();
        }
    }

    /// All phases are done, and a new pass begins.
    pub(super) fn begin_anew(&self) {
        let mut places = self.lock();
        places.passes = places.passes.wrapping_add(1);
        let whole = places.passes.is_multiple_of(WHOLE);
        for task in [Task::Lapse, Task::Age, Task::Fold] {
            let turn = places.of(task);
            let floor = if whole || !turn.clean { i64::MIN } else { turn.floor };
            *turn = Turn { from: floor, floor, ..Turn::default() };
        }
    }

    /// After which operation the look for missing leases goes on; none before the first look of this process.
    pub(super) fn adrift(&self) -> Option<i64> {
        self.lock().adrift
    }

    /// The look for missing leases has come so far.
    pub(super) fn looked_adrift(&self, at: i64) {
        self.lock().adrift = Some(at);
    }

    fn lock(&self) -> MutexGuard<'_, Places> {
        self.places.lock().unwrap_or_else(PoisonError::into_inner)
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
    fn lapsed_leases_are_looked_for_among_all_in_every_round() {
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
    fn a_clock_that_is_set_back_hides_nothing() {
        let edges = Edges::new(true);
        edges.advance(Task::Age, done(NOW.as_micros()), true);
        assert_eq!(edges.from(Task::Age, NOW), Some(NOW.as_micros()));
        assert_eq!(edges.from(Task::Age, Timestamp::from_micros(5)), Some(i64::MIN));
    }
}
