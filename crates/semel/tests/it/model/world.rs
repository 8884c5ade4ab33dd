//! The world around one key: a store, a few workers, a clock, and a budget of faults.

use std::time::Duration;

use semel::{
    Failure, Fence, OnLost, Operation, Retry, State,
    machine::{Answer, Event, Write},
};

/// The configuration of a world.
#[derive(Clone, Debug)]
pub(crate) struct World {
    /// Atomic mode: the effect and its completion are one commit. Otherwise the effect is outside, and first.
    pub(crate) atomic: bool,
    pub(crate) on_lost: OnLost,
    /// The order of each worker's payload.
    pub(crate) workers: Vec<i64>,
    /// A probe resolves every doubt. Since it may let the operation run again, workers stop by their own clock; without
    /// a probe they may be arbitrarily late.
    pub(crate) prober: bool,
    /// A person may free the key.
    pub(crate) purger: bool,
    /// A claim may arrive a second time, long after its answer.
    pub(crate) echoes: bool,
    /// The budget of faults: a crash, a lost answer, a repeated claim, a release, a purge.
    pub(crate) faults: u8,
    /// The budget of ticks while a worker could act: a paused worker.
    pub(crate) pauses: u8,
    pub(crate) flaw: Option<Flaw>,
}

/// Flaws that break the protocol. The checker must find each.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Flaw {
    /// Writes are made under any fence.
    AnyFenceWillDo,
    /// Fences are counted per row, and restart after a purge.
    FencesOfTheRow,
    /// A release of a run without failures always frees the key.
    ReleaseForgets,
    /// A transaction whose answer was lost is repeated instead of read back.
    NoReadBack,
    /// Work begins without a check of the worker's own clock.
    LateWork,
    /// That clock ignores that renewals end with the longest run.
    EndlessRenewals,
}

/// A payload that took effect: in which life of its key, in which row, under which fence.
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
    /// Sent a claim at that tick; the answer was lost.
    Asked { token: u8, sent: u8 },
    /// Holds the lease, or believes so: until this tick by its own clock, and never past the end of the longest run.
    /// Both are counted from before the request.
    Holds { effect: Effect, until: u8, end: u8, done: bool },
    /// Sent a commit; the answer was lost.
    Unsure { effect: Effect },
    /// Has its final answer.
    Content,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct Worker {
    pub(crate) brings: i64,
    pub(crate) mind: Mind,
    /// Its last claim, if that may arrive again.
    pub(crate) echo: Option<(i64, u8)>,
}

/// The complete state at one moment.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Moment {
    pub(crate) now: u8,
    pub(crate) faults: u8,
    pub(crate) pauses: u8,
    /// The last fence.
    pub(crate) fence: i64,
    pub(crate) row: Option<Operation>,
    pub(crate) workers: Vec<Worker>,
    /// Effects in the outside world, or in the business tables.
    pub(crate) effects: Vec<Effect>,
    /// The completions that changed the row.
    pub(crate) completions: Vec<Effect>,
    /// The law that a step broke.
    pub(crate) broken: Option<&'static str>,
    /// How many times the key was purged.
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

    /// The possible next actions; some change nothing.
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
                // An effect outside is neither failed nor released.
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
        // Time passes by itself only if no worker can act, and one waits.
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

    /// The moment after an action, or nothing if it changes nothing.
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

    /// Whether no action is left. A worker that holds a lease, or is not sure, can act.
    pub(crate) fn is_over(&self, moment: &Moment) -> bool {
        let goes_on = |mind: Mind| matches!(mind, Mind::Holds { .. } | Mind::Unsure { .. });
        moment.pauses == 0
            && !moment.workers.iter().any(|worker| goes_on(worker.mind))
            && self.actions(moment).into_iter().all(|action| self.after(moment, action).is_none())
    }
}
