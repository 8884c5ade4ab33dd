//! The timetable: enqueues the runs of schedules when they are due.
//!
//! A run and its mark are stored in one transaction, and a mark moves only from the value that was read: of any number
//! of nodes one enqueues a run. The key of the run is a second guard.

use std::time::Duration;

use tokio::sync::watch;

use super::is_over;
use crate::{
    Error, Ledger, Result, Schedule, Timestamp, Work, crash_point,
    fleet::{Fleet, Mark},
    store::Commit,
};

/// How often to read marks when nothing is due: the database's clock may be set, and schedules may change.
const RECHECK: Duration = Duration::from_secs(60);

/// The same while the kind of a schedule is paused: after a resume, missed runs should start soon.
const PAUSED: Duration = Duration::from_secs(10);

/// The retry interval if another node has locked a mark, or the database is unavailable.
const AGAIN: Duration = Duration::from_secs(1);

/// The time limit of a run's transaction. A node that freezes in it blocks this schedule for other nodes for this long.
const LIMIT: Duration = Duration::from_secs(5);

/// How long this node must have seen that a schedule with another spec is overdue before it takes the schedule over.
const ABANDONED: Duration = Duration::from_secs(60);

/// The longest time between two looks of that watch, three times the usual one. After a longer one the watch begins anew: the database was away, or
/// this node was frozen, and the node that runs the schedule has had no time either.
const GAP: Duration = Duration::from_secs(30);

/// Schedules and their next due times. A [`Worker`](crate::Worker) has one; a program without a worker can run one
/// itself.
pub struct Timetable<S: Fleet> {
    ledger: Ledger<S>,
    schedules: Vec<Schedule>,
    /// By schedule: what this node remembers.
    known: Vec<Known>,
}

#[derive(Clone, Default)]
struct Known {
    /// Whether this process has read its mark: another spec that appears later comes from a newer node.
    seen: bool,
    /// The watch over a mark of another spec that is overdue.
    watch: Option<Watch>,
    /// The last error. It is logged once.
    trouble: Option<String>,
}

/// This process has seen a mark overdue in all of its looks, by the database's clock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Watch {
    /// Every due time up to this one is handled: another time is another watch.
    at: Timestamp,
    /// The first look.
    since: Timestamp,
    /// The last look.
    last: Timestamp,
}

impl Watch {
    /// The watch after a look. It is over when the mark has moved, or may not move: while the kind is paused, its runs
    /// are overdue on every node.
    fn look(before: Option<Self>, schedule: &Schedule, mark: Option<&Mark>, now: Timestamp) -> Option<Self> {
        let mark = mark.filter(|mark| mark.spec != schedule.spec() && !mark.paused)?;
        if mark.next.is_some_and(|next| next > now) {
            return None;
        }
        let goes_on = |watch: &Self| watch.at == mark.at && watch.last <= now && now.since(watch.last) <= GAP;
        let since = before.filter(goes_on).map_or(now, |watch| watch.since);
        Some(Self { at: mark.at, since, last: now })
    }

    /// How long the mark was seen overdue.
    fn time(self) -> Duration {
        self.last.since(self.since)
    }
}

/// The next action for a schedule.
#[derive(Debug, PartialEq, Eq)]
enum Step {
    /// Store this mark in place of the one that was read, with these runs.
    Move { to: Mark, runs: Vec<Timestamp> },
    /// Nothing to do until this time.
    Wait(Option<Timestamp>),
    /// Its kind is paused, or another node runs it.
    Leave,
}

impl<S: Fleet> Timetable<S> {
    /// The timetable of some schedules. Of two with the same scope and name, the last one counts.
    pub fn new(ledger: &Ledger<S>, schedules: Vec<Schedule>) -> Self {
        let mut distinct: Vec<Schedule> = Vec::new();
        for schedule in schedules {
            distinct.retain(|other| (other.scope(), other.name()) != (schedule.scope(), schedule.name()));
            distinct.push(schedule);
        }
        Self { ledger: ledger.clone(), known: vec![Known::default(); distinct.len()], schedules: distinct }
    }

    /// Enqueues due runs, until `stop` turns true or its sender is dropped.
    pub async fn run(mut self, mut stop: watch::Receiver<bool>) {
        let mut logged = false;
        while !self.schedules.is_empty() && !is_over(&stop) {
            let wait = match self.round().await {
                Ok(wait) => {
                    logged = false;
                    wait
                }
                Err(Error::Stopping) => return,
                Err(error) => {
                    if !std::mem::replace(&mut logged, true) {
                        tracing::warn!(%error, "schedules could not be looked up; trying again every second");
                    }
                    AGAIN
                }
            };
            tokio::select! {
                () = tokio::time::sleep(wait) => {}
                _ = stop.wait_for(|stop| *stop) => {}
            }
        }
    }

    /// Enqueues the runs due now; returns how long to wait for the next round. A schedule that fails delays no other.
    ///
    /// # Errors
    /// Errors of the store, if no mark could be read.
    pub async fn round(&mut self) -> Result<Duration> {
        if self.ledger.is_stopping() {
            return Err(Error::Stopping);
        }
        let (marks, now) = self.ledger.store().marks(&self.schedules).await?;
        let mut wait = RECHECK;
        for (schedule, known) in self.schedules.iter().zip(&mut self.known) {
            let mark = marks.iter().find(|mark| mark.is_of(schedule));
            known.watch = Watch::look(known.watch, schedule, mark, now);
            let next = match tend(&self.ledger, schedule, mark, known, now).await {
                Ok((next, moved)) => {
                    // A mark of another spec that could not be moved yet is still this node's to take over.
                    known.seen |= moved || mark.is_some_and(|mark| mark.spec == schedule.spec());
                    if let Some(after) = known.trouble.take() {
                        tracing::info!(schedule = schedule.name(), after, "a schedule works again");
                    }
                    next
                }
                Err(error) => {
                    let (why, transient) = (error.to_string(), error.is_transient());
                    if known.trouble.as_ref() != Some(&why) {
                        tracing::warn!(schedule = schedule.name(), %error, "a run could not be enqueued; trying again");
                        known.trouble = Some(why);
                    }
                    if transient { AGAIN } else { RECHECK }
                }
            };
            wait = wait.min(next);
        }
        Ok(wait)
    }
}

/// Performs the next action of a schedule; returns how long to wait for the next look, and whether the mark has moved.
async fn tend<S: Fleet>(
    ledger: &Ledger<S>,
    schedule: &Schedule,
    mark: Option<&Mark>,
    known: &Known,
    now: Timestamp,
) -> Result<(Duration, bool)> {
    Ok(match step(schedule, mark, known, now) {
        Step::Leave => (PAUSED, false),
        Step::Wait(next) => (next.map_or(RECHECK, |next| next.since(now)), false),
        Step::Move { to, runs } => {
            let works = runs.into_iter().map(|due| schedule.work(due)).collect::<Result<Vec<_>>>()?;
            let next = to.next;
            match move_mark(ledger, mark, &to, works).await? {
                true => (next.map_or(RECHECK, |next| next.since(now)), true),
                false => (AGAIN, false),
            }
        }
    })
}

/// The next action of a schedule, by its mark and what this process remembers, at a time.
fn step(schedule: &Schedule, mark: Option<&Mark>, known: &Known, now: Timestamp) -> Step {
    let Some(mark) = mark else {
        return Step::Move { to: Mark::new(schedule, now), runs: Vec::new() };
    };
    if mark.spec != schedule.spec() {
        // While two versions of a program run side by side, the one that started last decides. If its node is gone,
        // another one takes over, and makes up for the run that it saw overdue.
        let abandoned = known.watch.is_some_and(|watch| watch.time() >= ABANDONED);
        if known.seen && !abandoned {
            return Step::Leave;
        }
        let missed = mark.next.filter(|_| known.seen && schedule.makes_up());
        let (since, last) = (now.max(mark.at), missed.or(mark.last));
        return Step::Move { to: Mark { last, ..Mark::new(schedule, since) }, runs: missed.into_iter().collect() };
    }
    let next = schedule.next(mark.at);
    if next.is_none_or(|next| next > now) {
        return Step::Wait(next);
    }
    if mark.paused {
        return Step::Leave;
    }
    let runs = schedule.owed(mark.at, now);
    let at = match runs.last() {
        // More runs than fit one transaction: the mark is behind the others, and the next step follows at once.
        Some(last) if runs.len() >= schedule.at_once() => *last,
        // The latest due time, also if its run is skipped: no time up to it is considered again.
        _ => schedule.last(now).unwrap_or(now),
    };
    let at = at.max(mark.at);
    let last = runs.last().copied().or(mark.last);
    Step::Move { to: Mark { at, last, next: schedule.next(at), ..mark.clone() }, runs }
}

/// Moves a mark and enqueues the due runs, in one transaction. False if another node has done so or has locked the
/// mark.
async fn move_mark<S: Fleet>(ledger: &Ledger<S>, from: Option<&Mark>, to: &Mark, works: Vec<Work>) -> Result<bool> {
    let store = ledger.store();
    let tx = store.begin(LIMIT.min(store.longest_transaction())).await?;
    let enqueued = async {
        let moved = store.move_mark(&tx, from, to).await?;
        if moved {
            ledger.enqueue_in(&tx, works).await?;
        }
        Ok(moved)
    };
    match enqueued.await {
        Ok(true) => {}
        not_moved => {
            store.roll_back(&tx).await;
            return not_moved;
        }
    }
    crash_point!("schedule.before_commit");
    let committed = store.commit(&tx).await;
    crash_point!("schedule.after_commit");
    match committed {
        Commit::Done => Ok(true),
        // The next look reads whether the mark has moved.
        Commit::Unknown(why) | Commit::Unavailable(why) => Err(Error::Unavailable(why)),
        Commit::Refused(why) => Err(Error::Refused(why)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Missed, Scope};

    const HOUR: i64 = 3_600_000_000;

    fn hourly() -> Schedule {
        Schedule::every("hourly", Duration::from_secs(3600), Scope::new("a", "b", "c").unwrap()).unwrap()
    }

    fn at(hours: i64, seconds: i64) -> Timestamp {
        Timestamp::from_micros(hours * HOUR + seconds * 1_000_000)
    }

    /// A process that has read the mark of its schedule before.
    fn seen() -> Known {
        Known { seen: true, ..Known::default() }
    }

    #[test]
    fn a_new_schedule_starts_now() {
        let Step::Move { to, runs } = step(&hourly(), None, &Known::default(), at(5, 10)) else { panic!() };
        assert_eq!((to.at, to.next, runs), (at(5, 10), Some(at(6, 0)), vec![]));
    }

    #[test]
    fn a_run_moves_the_mark_to_its_due_time() {
        let mark = Mark::new(&hourly(), at(5, 10));
        assert_eq!(step(&hourly(), Some(&mark), &seen(), at(5, 3599)), Step::Wait(Some(at(6, 0))));
        let Step::Move { to, runs } = step(&hourly(), Some(&mark), &seen(), at(6, 1)) else { panic!() };
        assert_eq!((to.at, to.last, to.next, runs), (at(6, 0), Some(at(6, 0)), Some(at(7, 0)), vec![at(6, 0)]));
    }

    #[test]
    fn runs_that_are_left_out_move_the_mark_too() {
        let (schedule, mark) = (hourly().missed(Missed::None), Mark::new(&hourly(), at(5, 10)));
        let Step::Move { to, runs } = step(&schedule, Some(&mark), &seen(), at(9, 600)) else { panic!() };
        assert_eq!((to.at, to.last, runs), (at(9, 0), None, vec![]));
    }

    #[test]
    fn runs_of_a_long_outage_are_enqueued_in_several_transactions() {
        let (schedule, now) = (hourly().missed(Missed::All(u32::MAX)), at(2505, 10));
        let (mut mark, mut steps, mut all) = (Mark::new(&schedule, at(5, 10)), Vec::new(), Vec::new());
        while let Step::Move { to, runs } = step(&schedule, Some(&mark), &seen(), now) {
            assert_eq!((Some(to.at), to.last), (runs.last().copied(), runs.last().copied()));
            steps.push(runs.len());
            all.extend(runs);
            mark = to;
        }
        assert_eq!(steps, [1000, 1000, 500]);
        assert_eq!(all, (6..=2505).map(|hour| at(hour, 0)).collect::<Vec<_>>());
        assert_eq!(mark.next, Some(at(2506, 0)));
        let large = schedule.payload(vec![0; 4 << 20]);
        let Step::Move { runs, .. } = step(&large, Some(&Mark::new(&large, at(5, 10))), &seen(), now) else { panic!() };
        assert_eq!(runs.len(), 4, "bounded in bytes, too");
    }

    #[test]
    fn a_clock_that_goes_back_brings_no_run_again() {
        let mark = Mark { at: at(9, 0), next: Some(at(10, 0)), ..Mark::new(&hourly(), at(5, 10)) };
        assert_eq!(step(&hourly(), Some(&mark), &seen(), at(7, 1)), Step::Wait(Some(at(10, 0))));
        let other = Mark { spec: "other".into(), ..mark };
        let Step::Move { to, .. } = step(&hourly(), Some(&other), &Known::default(), at(7, 1)) else { panic!() };
        assert_eq!(to.at, at(9, 0), "nor does a changed schedule");
    }

    #[test]
    fn a_paused_kind_keeps_its_mark() {
        let mark = Mark { paused: true, ..Mark::new(&hourly(), at(5, 10)) };
        assert_eq!(step(&hourly(), Some(&mark), &seen(), at(8, 0)), Step::Leave);
    }

    #[test]
    fn a_changed_schedule_counts_from_now_and_the_newest_node_decides() {
        let mark = Mark { spec: "other".into(), ..Mark::new(&hourly(), at(5, 10)) };
        let Step::Move { to, runs } = step(&hourly(), Some(&mark), &Known::default(), at(9, 10)) else { panic!() };
        assert_eq!((to.at, to.since, to.spec, runs), (at(9, 10), at(9, 10), hourly().spec(), vec![]));
        assert_eq!(step(&hourly(), Some(&mark), &seen(), at(6, 90)), Step::Leave, "an older node stands back");
        let paused = Mark { paused: true, ..mark };
        assert_eq!(step(&hourly(), Some(&paused), &seen(), at(6, 90)), Step::Leave, "also if its kind is paused");
    }

    /// What a process remembers after looks at the mark of another spec, at these times.
    fn after(mark: &Mark, looks: impl IntoIterator<Item = Timestamp>) -> Known {
        let watch = looks.into_iter().fold(None, |watch, now| Watch::look(watch, &hourly(), Some(mark), now));
        Known { watch, ..seen() }
    }

    #[test]
    fn an_older_node_takes_over_what_it_has_seen_overdue_for_a_minute_and_makes_up_for_the_run() {
        let mark = Mark { spec: "other".into(), ..Mark::new(&hourly(), at(5, 10)) };
        let looks = |seconds: i64| (0..=seconds).step_by(10).map(|after| at(6, 5 + after));
        assert_eq!(step(&hourly(), Some(&mark), &after(&mark, looks(50)), at(6, 55)), Step::Leave);
        let watched = after(&mark, looks(60));
        let Step::Move { to, runs } = step(&hourly(), Some(&mark), &watched, at(6, 65)) else { panic!() };
        assert_eq!((to.at, to.last, to.spec), (at(6, 65), Some(at(6, 0)), hourly().spec()));
        assert_eq!(runs, [at(6, 0)], "the run that the other node did not enqueue");
        let none = hourly().missed(Missed::None);
        let Step::Move { to, runs } = step(&none, Some(&mark), &watched, at(6, 65)) else { panic!() };
        assert_eq!((to.last, runs), (None, vec![]), "unless the schedule leaves missed runs out");
    }

    #[test]
    fn time_in_which_a_node_did_not_look_does_not_count_as_overdue() {
        let mark = Mark { spec: "other".into(), ..Mark::new(&hourly(), at(5, 10)) };
        let time = |looks: &[(i64, i64)]| after(&mark, looks.iter().map(|(h, s)| at(*h, *s))).watch.map(Watch::time);
        assert_eq!(time(&[(6, 5), (6, 15)]), Some(Duration::from_secs(10)));
        assert_eq!(time(&[(6, 5), (6, 15), (9, 0), (9, 10)]), Some(Duration::from_secs(10)), "an outage, or a freeze");
        assert_eq!(time(&[(6, 50), (6, 20), (6, 30)]), Some(Duration::from_secs(10)), "a clock that goes back");
        assert_eq!(time(&[(5, 50), (5, 55)]), None, "it is not due");
        let before = after(&mark, [at(6, 5), at(6, 15)]).watch;
        let look = |mark: &Mark| Watch::look(before, &hourly(), Some(mark), at(6, 25)).map(Watch::time);
        assert_eq!(look(&mark), Some(Duration::from_secs(20)));
        assert_eq!(look(&Mark { paused: true, ..mark.clone() }), None, "its kind is paused");
        assert_eq!(look(&Mark { at: at(6, 0), ..mark.clone() }), Some(Duration::ZERO), "it has moved since");
        assert_eq!(look(&Mark { spec: hourly().spec(), ..mark }), None, "it is this node's own");
    }
}
