//! The world around one key: a store, a few workers, a clock, and a budget of things that go wrong.

use std::time::Duration;

use semel::{
    Failure, Fence, OnLost, Operation, Retry, State,
    machine::{Answer, Event, Write},
};

/// What kind of world it is.
#[derive(Clone, Debug)]
pub(crate) struct World {
    /// The effect and its completion are one commit. Otherwise the effect is outside, and first.
    pub(crate) atomic: bool,
    pub(crate) on_lost: OnLost,
    /// The order of the payload that each worker brings.
    pub(crate) workers: Vec<i64>,
    /// Somebody looks what really happened whenever there is doubt. Since one may be told to run
    /// it again then, workers stop by their own clock; without, they may be as late as they like.
    pub(crate) prober: bool,
    /// Somebody may free the key.
    pub(crate) purger: bool,
    /// A claim may arrive a second time, long after its answer.
    pub(crate) echoes: bool,
    /// How often something goes wrong: a crash, a lost answer, an echo, work put back, a purge.
    pub(crate) faults: u8,
    /// How often a tick passes while somebody has something to do: a worker that is paused.
    pub(crate) pauses: u8,
    pub(crate) flaw: Option<Flaw>,
}

/// What a worse world would do. A checker that does not notice checks nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Flaw {
    /// Writes are made whatever fence they name.
    AnyFenceWillDo,
    /// Fences are counted on the row, and begin again when it is purged.
    FencesOfTheRow,
    /// A release of a run without failures always frees the key.
    ReleaseForgets,
    /// A transaction whose answer was lost is made again instead of read back.
    NoReadBack,
    /// Work begins without a look at the worker's own clock.
    LateWork,
    /// That clock forgets that renewals end with the longest run.
    EndlessRenewals,
}

/// A payload that takes effect: in which life of its key, in which row, under which fence.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct Effect {
    pub(crate) life: u8,
    pub(crate) id: i64,
    pub(crate) payload: i64,
    pub(crate) fence: Fence,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) enum Mind {
    /// Wants the lease.
    Idle,
    /// Sent a claim at that tick, and the answer was lost.
    Asked { token: u8, sent: u8 },
    /// Has the lease, or believes so: until then by its own clock, and never past the end of the
    /// longest run. It counts both from before it asked.
    Holds { effect: Effect, until: u8, end: u8, done: bool },
    /// Sent a commit, and the answer was lost.
    Unsure { effect: Effect },
    /// Has an answer that it can go home with.
    Content,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct Worker {
    pub(crate) brings: i64,
    pub(crate) mind: Mind,
    /// Its last claim, if that may arrive again.
    pub(crate) echo: Option<(i64, u8)>,
}

/// Everything there is at one moment.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Moment {
    pub(crate) now: u8,
    pub(crate) faults: u8,
    pub(crate) pauses: u8,
    /// The last fence that was given out.
    pub(crate) fence: i64,
    pub(crate) row: Option<Operation>,
    pub(crate) workers: Vec<Worker>,
    /// What happened in the outside world, or in the business tables.
    pub(crate) effects: Vec<Effect>,
    /// The completions that changed the row.
    pub(crate) completions: Vec<Effect>,
    /// The law that a step broke.
    pub(crate) broken: Option<&'static str>,
    /// How many lives the key has had before: only a purge ends one.
    pub(crate) life: u8,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Action {
    Claim(usize),
    ClaimUnheard(usize),
    Echo(usize),
    Work(usize),
    Complete(usize),
    CompleteUnheard(usize),
    Fail(usize),
    Release(usize),
    Doubt(usize),
    Renew(usize),
    ReadBack(usize),
    Crash(usize),
    Sweep,
    Probe,
    Purge,
    Tick,
}

impl World {
    pub(crate) fn begin(&self) -> Moment {
        let worker = |brings: &i64| Worker { brings: *brings, mind: Mind::Idle, echo: None };
        Moment {
            now: 0,
            faults: self.faults,
            pauses: self.pauses,
            fence: 0,
            row: None,
            workers: self.workers.iter().map(worker).collect(),
            effects: Vec::new(),
            completions: Vec::new(),
            broken: None,
            life: 0,
        }
    }

    /// What may happen next; some of it would change nothing.
    pub(crate) fn actions(&self, moment: &Moment) -> Vec<Action> {
        let (mut actions, mut faults, mut renewals) = (Vec::new(), Vec::new(), Vec::new());
        match moment.row.as_ref().map(|op| op.state) {
            Some(State::Processing) => actions.push(Action::Sweep),
            Some(State::InDoubt) if self.prober => actions.push(Action::Probe),
            _ => {}
        }
        if moment.row.is_some() && self.purger {
            faults.push(Action::Purge);
        }
        for (n, worker) in moment.workers.iter().enumerate() {
            match worker.mind {
                Mind::Idle | Mind::Asked { .. } => {
                    actions.push(Action::Claim(n));
                    faults.push(Action::ClaimUnheard(n));
                }
                Mind::Holds { done, .. } if done || self.atomic => {
                    actions.push(Action::Complete(n));
                    faults.extend([Action::CompleteUnheard(n), Action::Doubt(n)]);
                }
                Mind::Holds { .. } => actions.push(Action::Work(n)),
                Mind::Unsure { .. } => actions.push(Action::ReadBack(n)),
                Mind::Content => {}
            }
            if let Mind::Holds { done, .. } = worker.mind {
                renewals.push(Action::Renew(n));
                // What has taken effect outside is neither failed nor put back.
                if !done {
                    actions.push(Action::Fail(n));
                    faults.push(Action::Release(n));
                }
            }
            if !matches!(worker.mind, Mind::Idle | Mind::Content) {
                faults.push(Action::Crash(n));
            }
            if worker.echo.is_some() {
                faults.push(Action::Echo(n));
            }
        }
        // Time passes by itself only when nobody has anything else to do, and somebody waits.
        let waits = moment.workers.iter().any(|worker| matches!(worker.mind, Mind::Idle | Mind::Asked { .. }));
        let idle = || actions.iter().all(|action| self.after(moment, *action).is_none());
        if moment.pauses > 0 || (waits && idle()) {
            actions.push(Action::Tick);
        }
        actions.extend(renewals);
        if moment.faults > 0 {
            actions.extend(faults);
        }
        actions
    }

    /// The moment after an action, or nothing when it changes nothing.
    pub(crate) fn after(&self, before: &Moment, action: Action) -> Option<Moment> {
        let mut moment = before.clone();
        match action {
            Action::Claim(n) => self.claim(&mut moment, n, true),
            Action::ClaimUnheard(n) => self.claim(&mut moment, n, false),
            Action::Echo(n) => self.echo(&mut moment, n),
            Action::Work(n) => self.work(&mut moment, n),
            Action::Complete(n) => self.complete(&mut moment, n, true),
            Action::CompleteUnheard(n) => self.complete(&mut moment, n, false),
            Action::Fail(n) => {
                let failure = Failure { error: "no".into(), retry: Retry::Backoff };
                self.settle(&mut moment, n, Write::Fail(failure));
            }
            Action::Release(n) => self.settle(&mut moment, n, Write::Release { delay: Duration::ZERO, why: None }),
            Action::Doubt(n) => self.settle(&mut moment, n, Write::Doubt { reason: "who knows".into() }),
            Action::Renew(n) => self.renew(&mut moment, n),
            Action::ReadBack(n) => self.read_back(&mut moment, n),
            Action::Crash(n) => moment.workers[n].mind = Mind::Idle,
            Action::Sweep => {
                let fence = self.new_fence(&moment);
                self.apply(&mut moment, &Event::Lapse { fence });
            }
            Action::Probe => self.probe(&mut moment),
            Action::Purge => {
                let (actor, reason) = ("ann".to_owned(), String::new());
                moment.life += u8::from(self.apply(&mut moment, &Event::Purge { actor, reason }) == Answer::Purged);
            }
            Action::Tick => moment.now += 1,
        }
        if moment == *before {
            return None;
        }
        match action {
            Action::Tick if before.pauses > 0 => moment.pauses -= 1,
            Action::ClaimUnheard(_) | Action::Echo(_) | Action::CompleteUnheard(_) => moment.faults -= 1,
            Action::Crash(_) | Action::Release(_) | Action::Doubt(_) | Action::Purge => moment.faults -= 1,
            _ => {}
        }
        Some(moment)
    }

    /// Whether nothing can happen any more. Whoever holds a lease, or is not sure, can go on.
    pub(crate) fn is_over(&self, moment: &Moment) -> bool {
        let goes_on = |mind: Mind| matches!(mind, Mind::Holds { .. } | Mind::Unsure { .. });
        moment.pauses == 0
            && !moment.workers.iter().any(|worker| goes_on(worker.mind))
            && self.actions(moment).into_iter().all(|action| self.after(moment, action).is_none())
    }
}
