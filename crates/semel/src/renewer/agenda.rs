//! The held leases, in the order of their next action.
//!
//! A node may hold ten thousand leases, and claims a thousand a second. Adding, removing and finding the next one cost
//! a few steps of an ordered set each, however many leases there are.

use std::{
    cmp::Ordering,
    collections::{BTreeSet, HashMap},
    time::Duration,
};

use tokio::sync::watch;

use super::{OwnDeadline, ROUNDS_PER_LEASE, Standing};
use crate::{Fence, Uptime, machine::Answer};

/// An operation and its fence.
pub(super) type LeaseId = (i64, Fence);

/// A lease that is renewed.
pub(super) struct Held {
    pub(super) term: Duration,
    /// When to renew it.
    pub(super) due: Uptime,
    /// When the holder must have stopped, by the node's clock.
    pub(super) deadline: OwnDeadline,
    /// The state of the lease, for its holder.
    pub(super) signal: watch::Sender<Standing>,
}

impl Held {
    fn next(&self) -> Moment {
        Moment(self.due.min(self.deadline.at()))
    }
}

/// The leases, ordered by their next action.
#[derive(Default)]
pub(super) struct Agenda {
    held: HashMap<LeaseId, Held>,
    next: BTreeSet<(Moment, LeaseId)>,
}

impl Agenda {
    /// Adds a lease. True if it is the next one to act on.
    pub(super) fn add(&mut self, id: LeaseId, held: Held) -> bool {
        self.next.insert((held.next(), id));
        self.held.insert(id, held);
        self.next.first().is_some_and(|(_, first)| *first == id)
    }

    pub(super) fn remove(&mut self, id: LeaseId) {
        if let Some(held) = self.held.remove(&id) {
            self.next.remove(&(held.next(), id));
        }
    }

    /// When the next lease has to be acted on.
    pub(super) fn next(&self) -> Option<Uptime> {
        self.next.first().map(|(moment, _)| moment.0)
    }

    /// Signals the holders of leases that have expired.
    pub(super) fn end_overdue(&mut self, now: Uptime) {
        let seen = self.next.iter().take_while(|(moment, _)| moment.0 <= now).map(|(_, id)| *id);
        let over = seen.filter(|id| self.held.get(id).is_some_and(|held| held.deadline.at() <= now));
        for id in over.collect::<Vec<_>>() {
            self.lose(id);
        }
    }

    /// The leases to renew now: those that are due, and the following ones that are due within a tenth of their term,
    /// so that one statement covers both. Each has a third of its term to be answered; then it is due again.
    pub(super) fn take_due(&mut self, now: Uptime) -> Vec<LeaseId> {
        self.end_overdue(now);
        let nearly = |id: &LeaseId| self.held.get(id).is_some_and(|held| held.due <= now + held.term / 10);
        let due: Vec<LeaseId> = self.next.iter().map(|(_, id)| *id).take_while(nearly).collect();
        for id in &due {
            self.change(*id, |held| held.due = now + patience(held.term));
        }
        due
    }

    /// The longest time that any of these leases can wait for its answer.
    pub(super) fn longest_patience(&self, ids: &[LeaseId]) -> Duration {
        ids.iter().filter_map(|id| self.held.get(id)).map(|held| patience(held.term)).max().unwrap_or_default()
    }

    /// Applies the answer to a request that was sent at a moment.
    pub(super) fn answered(&mut self, id: LeaseId, answer: &Answer, sent: Uptime) {
        match answer {
            Answer::Renewed { cancelled, .. } => self.change(id, |held| {
                if *cancelled {
                    held.signal.send_modify(|standing| standing.cancelled = true);
                }
                held.due = held.due.max(sent + patience(held.term));
                // The answer to a later request may have come before this one.
                let renewed = held.deadline.renewed(sent);
                if renewed.at() > held.deadline.at() {
                    held.deadline = renewed;
                    held.signal.send_modify(|standing| standing.until = Some(renewed.at()));
                }
            }),
            Answer::Busy => self.ask_soon(id),
            _ => self.lose(id),
        }
    }

    /// Signals the holder of a lease that its run was asked to stop.
    pub(super) fn cancel(&mut self, id: LeaseId) {
        if let Some(held) = self.held.get(&id) {
            held.signal.send_modify(|standing| standing.cancelled = true);
        }
    }

    /// Renews a lease again after a short while.
    pub(super) fn ask_soon(&mut self, id: LeaseId) {
        let now = Uptime::now();
        self.change(id, |held| held.due = held.due.min(now + soon(held.term)));
    }

    fn lose(&mut self, id: LeaseId) {
        if let Some(held) = self.held.get(&id) {
            held.signal.send_modify(|standing| standing.until = None);
            self.remove(id);
        }
    }

    fn change(&mut self, id: LeaseId, change: impl FnOnce(&mut Held)) {
        if let Some(held) = self.held.get_mut(&id) {
            self.next.remove(&(held.next(), id));
            change(held);
            self.next.insert((held.next(), id));
        }
    }
}

/// How long a lease waits for its answer: two more requests fit into its term.
fn patience(term: Duration) -> Duration {
    term / ROUNDS_PER_LEASE
}

/// How long to wait before a lease is requested again that could not be renewed: often enough for a short lease, and
/// rarely enough for an overloaded database.
fn soon(term: Duration) -> Duration {
    (term / 20).min(Duration::from_secs(1))
}

/// A moment of the agenda. The tests count comparisons.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Moment(Uptime);

impl Ord for Moment {
    fn cmp(&self, other: &Self) -> Ordering {
        #[cfg(test)]
        tests::COMPARED.with(|compared| compared.set(compared.get() + 1));
        self.0.cmp(&other.0)
    }
}

impl PartialOrd for Moment {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;
    use crate::{Policy, Timestamp};

    thread_local! {
        pub(super) static COMPARED: Cell<usize> = const { Cell::new(0) };
    }

    const MINUTE: Duration = Duration::from_secs(60);

    fn held(term: Duration, due: Uptime) -> (Held, watch::Receiver<Standing>) {
        let policy = Policy { lease: term, max_run: 100 * term, ..Policy::default() };
        let deadline = OwnDeadline::of_claim(Uptime::now(), &policy);
        let (signal, until) = watch::channel(Standing { until: Some(deadline.at()), cancelled: false });
        (Held { term, due, deadline, signal }, until)
    }

    fn renewed() -> Answer {
        Answer::Renewed { deadline: Timestamp::from_micros(0), cancelled: false }
    }

    /// A linear scan per new lease would need a hundred thousand comparisons here.
    #[test]
    fn a_lease_costs_a_few_steps_among_a_hundred_thousand() {
        let (mut agenda, now) = (Agenda::default(), Uptime::now());
        for n in 0..100_000 {
            agenda.add((n, Fence(n)), held(MINUTE, now + MINUTE + Duration::from_micros(7919 * n as u64 % 100_000)).0);
        }
        let before = COMPARED.get();
        agenda.add((-1, Fence(1)), held(MINUTE, now).0);
        assert_eq!(agenda.take_due(now), [(-1, Fence(1))]);
        agenda.answered((-1, Fence(1)), &renewed(), now);
        assert!(agenda.next().is_some());
        agenda.remove((-1, Fence(1)));
        let steps = COMPARED.get() - before;
        assert!(steps < 1000, "{steps} comparisons");
    }

    #[test]
    fn leases_that_are_nearly_due_are_renewed_with_the_due_ones() {
        let (mut agenda, now) = (Agenda::default(), Uptime::now());
        let after = |seconds| now + Duration::from_secs(seconds);
        for (n, due) in [now, after(5), after(7), after(30)].into_iter().enumerate() {
            agenda.add((n as i64, Fence(1)), held(MINUTE, due).0);
        }
        assert_eq!(agenda.take_due(now), [(0, Fence(1)), (1, Fence(1))]);
        assert_eq!(agenda.take_due(now), [], "each has a third of its term to be answered");
        assert_eq!(agenda.take_due(after(7)), [(2, Fence(1))]);
        assert_eq!(agenda.take_due(after(20)), [(0, Fence(1)), (1, Fence(1))], "no answer came");
    }

    #[test]
    fn a_busy_lease_is_asked_for_again_soon_and_lost_at_its_own_deadline() {
        let (mut agenda, now) = (Agenda::default(), Uptime::now());
        let (lease, until) = held(MINUTE, now);
        agenda.add((1, Fence(1)), lease);
        assert_eq!(agenda.take_due(now), [(1, Fence(1))]);
        agenda.answered((1, Fence(1)), &Answer::Busy, now);
        assert!(agenda.next().unwrap() <= Uptime::now() + Duration::from_secs(1));
        assert!(until.borrow().until.is_some(), "it may be renewed yet");
        agenda.end_overdue(now + MINUTE);
        assert_eq!(until.borrow().until, None);
        assert_eq!(agenda.next(), None);
    }

    /// A late answer to an earlier request does not undo the extension of a later one.
    #[test]
    fn an_answer_out_of_order_does_not_shorten_a_lease() {
        let (mut agenda, now) = (Agenda::default(), Uptime::now());
        let (lease, until) = held(MINUTE, now);
        agenda.add((1, Fence(1)), lease);
        let later = now + Duration::from_secs(20);
        agenda.answered((1, Fence(1)), &renewed(), later);
        agenda.answered((1, Fence(1)), &renewed(), now);
        assert_eq!(until.borrow().until, Some(later + Duration::from_secs(54)));
    }

    /// Between the decision and the signal, the run may have ended and the next one begun.
    #[test]
    fn a_cancel_stops_no_later_run_of_its_operation() {
        let (mut agenda, now) = (Agenda::default(), Uptime::now());
        let [(earlier, asked), (later, next)] = [held(MINUTE, now), held(MINUTE, now)];
        agenda.add((1, Fence(1)), earlier);
        agenda.add((1, Fence(2)), later);
        agenda.cancel((1, Fence(1)));
        assert_eq!((asked.borrow().cancelled, next.borrow().cancelled), (true, false));
    }

    #[test]
    fn a_lease_that_ends_soon_blocks_no_other_renewal() {
        let (mut agenda, now) = (Agenda::default(), Uptime::now());
        let (mut ending, _) = held(MINUTE, now + 2 * MINUTE);
        ending.deadline = OwnDeadline::of_claim(now, &Policy { lease: MINUTE / 60, ..Policy::default() });
        agenda.add((1, Fence(1)), ending);
        agenda.add((2, Fence(1)), held(MINUTE, now + MINUTE / 60).0);
        assert_eq!(agenda.take_due(now + MINUTE / 60), [(2, Fence(1))]);
    }
}
