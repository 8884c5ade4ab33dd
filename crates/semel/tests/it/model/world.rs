//! The world around one key: a store that is nothing but `machine::step`, a few workers, a clock,
//! and a budget of things that go wrong.

use std::time::Duration;

use semel::{
    Backoff, Failure, Fence, Fingerprint, Key, Labels, OnLost, OnMismatch, Operation, Outcome, Policy, Retry, Scope,
    State, Timestamp, Token, Verdict,
    machine::{Answer, Event, Next, Request, Step, Write, step},
};

/// How long a lease lasts, in ticks: long enough to be renewed once.
const LEASE: u8 = 2;

/// What kind of world it is.
#[derive(Clone, Debug)]
pub(crate) struct World {
    /// The effect and its completion are one commit. Otherwise the effect is outside, and first.
    pub(crate) atomic: bool,
    pub(crate) on_lost: OnLost,
    /// The order of the payload that each worker brings.
    pub(crate) workers: Vec<i64>,
    /// Somebody looks what really happened whenever there is doubt. Where one may be told to run
    /// it again, a worker must stop by its own clock; without, it may be as late as it likes.
    pub(crate) prober: bool,
    /// Somebody may free the key.
    pub(crate) purger: bool,
    /// How often something goes wrong: a crash, a lost answer, work that is put back, a purge.
    pub(crate) faults: u8,
    /// How often a tick passes while somebody has something to do: a worker that is paused.
    pub(crate) pauses: u8,
    pub(crate) flaw: Option<Flaw>,
}

/// What a worse store would do. A checker that does not notice checks nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Flaw {
    /// Writes are made whatever fence they name.
    AnyFenceWillDo,
    /// Fences are counted on the row, and begin again when it is purged.
    FencesOfTheRow,
    /// A release without data always frees the key.
    ReleaseForgets,
    /// A settle that was made before is not told from a new one: a commit may be sent again.
    NoReadBack,
}

/// A payload that took effect, in which life of the key, under which fence.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct Effect {
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
    /// Has the lease, or believes so.
    Holds { effect: Effect, until: u8, done: bool },
    /// Sent a commit, and the answer was lost.
    Unsure { effect: Effect },
    /// Has an answer that it can go home with.
    Content,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct Worker {
    pub(crate) brings: i64,
    pub(crate) mind: Mind,
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
    /// Laws that a step broke.
    pub(crate) broken: Vec<&'static str>,
    pub(crate) purged: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Action {
    Claim(usize),
    ClaimUnheard(usize),
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
        let worker = |brings: &i64| Worker { brings: *brings, mind: Mind::Idle };
        Moment {
            now: 0,
            faults: self.faults,
            pauses: self.pauses,
            fence: 0,
            row: None,
            workers: self.workers.iter().map(worker).collect(),
            effects: Vec::new(),
            completions: Vec::new(),
            broken: Vec::new(),
            purged: false,
        }
    }

    /// What can happen next. Time passes by itself only when nobody has anything else to do.
    pub(crate) fn actions(&self, moment: &Moment) -> Vec<Action> {
        let mut actions = vec![Action::Sweep, Action::Probe];
        let mut faults = Vec::new();
        for (n, worker) in moment.workers.iter().enumerate() {
            match worker.mind {
                Mind::Idle | Mind::Asked { .. } => {
                    actions.push(Action::Claim(n));
                    faults.extend([Action::ClaimUnheard(n), Action::Crash(n)]);
                }
                Mind::Holds { done, .. } if done || self.atomic => {
                    actions.push(Action::Complete(n));
                    faults.extend([Action::CompleteUnheard(n), Action::Crash(n), Action::Doubt(n)]);
                }
                Mind::Holds { .. } => {
                    actions.push(Action::Work(n));
                    faults.push(Action::Crash(n));
                }
                Mind::Unsure { .. } => {
                    actions.push(Action::ReadBack(n));
                    faults.push(Action::Crash(n));
                }
                Mind::Content => {}
            }
            if let Mind::Holds { done: false, .. } = worker.mind {
                actions.push(Action::Fail(n));
                faults.push(Action::Release(n));
            }
        }
        actions.retain(|action| self.after(moment, *action).is_some());
        let waits = moment.workers.iter().any(|worker| matches!(worker.mind, Mind::Idle | Mind::Asked { .. }));
        if moment.pauses > 0 || (actions.is_empty() && waits) {
            actions.push(Action::Tick);
        }
        actions.extend((0..moment.workers.len()).map(Action::Renew));
        if moment.faults > 0 {
            actions.extend(faults);
            actions.push(Action::Purge);
        }
        actions.retain(|action| self.after(moment, *action).is_some());
        actions
    }

    /// The moment after an action, or nothing when it changes nothing.
    pub(crate) fn after(&self, before: &Moment, action: Action) -> Option<Moment> {
        let mut moment = before.clone();
        match action {
            Action::Claim(n) => self.claim(&mut moment, n, true),
            Action::ClaimUnheard(n) => self.claim(&mut moment, n, false),
            Action::Work(n) => self.work(&mut moment, n),
            Action::Complete(n) => self.complete(&mut moment, n, true),
            Action::CompleteUnheard(n) => self.complete(&mut moment, n, false),
            Action::Fail(n) => {
                let failure = Failure { error: "no".into(), retry: Retry::Backoff };
                self.settle(&mut moment, n, Write::Fail(failure));
            }
            Action::Release(n) => self.settle(&mut moment, n, Write::Release { delay: Duration::ZERO }),
            Action::Doubt(n) => self.settle(&mut moment, n, Write::Doubt { reason: "who knows".into() }),
            Action::Renew(n) => self.renew(&mut moment, n),
            Action::ReadBack(n) => self.read_back(&mut moment, n),
            Action::Crash(n) => moment.workers[n].mind = Mind::Idle,
            Action::Sweep => {
                let fence = self.new_fence(&moment);
                self.apply(&mut moment, &Event::Lapse { fence });
            }
            Action::Probe => self.probe(&mut moment),
            Action::Purge if self.purger && before.row.is_some() => {
                let (actor, reason) = ("ann".to_owned(), String::new());
                moment.purged = self.apply(&mut moment, &Event::Purge { actor, reason }) == Answer::Purged;
            }
            Action::Purge => {}
            Action::Tick => moment.now += 1,
        }
        let changed = moment != *before;
        match action {
            Action::Tick if moment.pauses > 0 => moment.pauses -= 1,
            Action::ClaimUnheard(_) | Action::CompleteUnheard(_) | Action::Crash(_) => moment.faults -= 1,
            Action::Release(_) | Action::Doubt(_) | Action::Purge => moment.faults -= 1,
            _ => {}
        }
        changed.then_some(moment)
    }

    fn new_fence(&self, moment: &Moment) -> Fence {
        match (self.flaw, &moment.row) {
            (Some(Flaw::FencesOfTheRow), row) => Fence(row.as_ref().map_or(0, |op| op.fence.0) + 1),
            _ => Fence(moment.fence + 1),
        }
    }

    /// The store: `machine::step`, with what its caller is promised watched over.
    fn apply(&self, moment: &mut Moment, event: &Event<'_>) -> Answer {
        let now = Timestamp::from_micros(i64::from(moment.now) * 1_000_000);
        let before = moment.row.take();
        let Step { next, answer, .. } = self.flawed_step(before.as_ref(), event, now);
        let changed = next != Next::Same;
        moment.row = match next {
            Next::Same => before.clone(),
            Next::Put(op) | Next::Anew(op) => Some(*op),
            Next::Gone => None,
        };
        moment.fence = moment.fence.max(moment.row.as_ref().map_or(0, |op| op.fence.0));
        if let (Event::Write { fence, write }, Some(op), true) = (event, &before, changed) {
            if op.fence != *fence {
                moment.broken.push("a write under an old fence changed the row");
            }
            if matches!(write, Write::Complete(_)) {
                moment.completions.push(effect_of(op));
            }
        }
        if let (Event::Resolve { verdict: Verdict::Completed(_), .. }, Some(op), true) = (event, &before, changed) {
            moment.completions.push(effect_of(op));
        }
        let same_data = |old: &&Operation, new: &Operation| old.id == new.id && old.fingerprint == new.fingerprint;
        let given = before.as_ref().filter(|op| op.state == State::Completed);
        if let (Some(old), Some(new)) = (given, &moment.row)
            && same_data(&old, new)
            && old.outcome != new.outcome
        {
            moment.broken.push("an outcome that was given has changed");
        }
        answer
    }

    fn flawed_step(&self, row: Option<&Operation>, event: &Event<'_>, now: Timestamp) -> Step {
        match (self.flaw, event, row) {
            (Some(Flaw::AnyFenceWillDo), Event::Write { write, .. }, Some(op)) => {
                step(row, &Event::Write { fence: op.fence, write: write.clone() }, now)
            }
            (Some(Flaw::ReleaseForgets), Event::Write { fence, write: Write::Release { .. } }, Some(op))
                if op.fence == *fence && op.lease.is_some() && op.failures + op.crashes == 0 =>
            {
                Step { next: Next::Gone, answer: Answer::Settled { successor: false }, notes: Vec::new() }
            }
            _ => step(row, event, now),
        }
    }

    fn claim(&self, moment: &mut Moment, n: usize, heard: bool) {
        let Worker { brings, mind } = moment.workers[n];
        let fence = self.new_fence(moment);
        // A new token is a new fence's number: as good as random, and the same for any worker.
        let fresh = u8::try_from(moment.fence + 1).expect("few fences are enough");
        let (token, sent) = match mind {
            Mind::Asked { token, sent } => (token, sent),
            _ => (fresh, moment.now),
        };
        let row = moment.row.clone();
        let request = self.request(brings, token);
        let answer = self.apply(moment, &Event::Claim { request: &request, fence });
        moment.workers[n].mind = match (answer, &moment.row) {
            _ if !heard && row != moment.row => Mind::Asked { token, sent },
            _ if !heard => return,
            (Answer::Acquired, Some(op)) => {
                Mind::Holds { effect: effect_of(op), until: sent + LEASE, done: false }
            }
            (Answer::Replay { .. } | Answer::Mismatch | Answer::Exhausted, _) => Mind::Content,
            (Answer::InDoubt { .. }, _) if !self.prober => Mind::Content,
            // In flight, backing off, or being looked into: asks again.
            _ => Mind::Idle,
        };
    }

    fn work(&self, moment: &mut Moment, n: usize) {
        if let Mind::Holds { effect, until, done: false } = moment.workers[n].mind {
            if self.prober && until <= moment.now {
                // Its own clock says that it is late, so it does not begin.
                moment.workers[n].mind = Mind::Idle;
                return;
            }
            moment.effects.push(effect);
            moment.workers[n].mind = Mind::Holds { effect, until, done: true };
        }
    }

    fn complete(&self, moment: &mut Moment, n: usize, heard: bool) {
        let Mind::Holds { effect, .. } = moment.workers[n].mind else { return };
        let outcome = Outcome::kept(effect.fence.to_string());
        let answer = self.write(moment, effect, Write::Complete(outcome));
        if self.atomic && matches!(answer, Answer::Settled { .. }) {
            moment.effects.push(effect);
        }
        moment.workers[n].mind = match (heard, self.atomic) {
            (true, _) => self.home(moment, n, &answer),
            // The same completion again is harmless; the same transaction again is not.
            (false, true) if self.flaw != Some(Flaw::NoReadBack) => Mind::Unsure { effect },
            (false, _) => return,
        };
    }

    fn settle(&self, moment: &mut Moment, n: usize, write: Write) {
        let Mind::Holds { effect, .. } = moment.workers[n].mind else { return };
        let answer = self.write(moment, effect, write);
        moment.workers[n].mind = self.home(moment, n, &answer);
    }

    /// After a settle: a worker whose newer data waits goes on with that, as a run does.
    fn home(&self, moment: &mut Moment, n: usize, answer: &Answer) -> Mind {
        if let (Answer::Settled { successor: true }, Some(op)) = (answer, &moment.row) {
            moment.workers[n].brings = op.order.unwrap_or(0);
        }
        Mind::Idle
    }

    fn renew(&self, moment: &mut Moment, n: usize) {
        let Mind::Holds { effect, done, .. } = moment.workers[n].mind else { return };
        if let Answer::Renewed { .. } = self.write(moment, effect, Write::Renew) {
            moment.workers[n].mind = Mind::Holds { effect, until: moment.now + LEASE, done };
        }
    }

    fn write(&self, moment: &mut Moment, effect: Effect, write: Write) -> Answer {
        // A write goes to a row by its id: of a purged one, none is left.
        let there = moment.row.as_ref().is_some_and(|op| op.id == effect.id);
        if !there {
            return Answer::Lost;
        }
        self.apply(moment, &Event::Write { fence: effect.fence, write })
    }

    /// A commit whose answer was lost: what became of it is read, never guessed.
    fn read_back(&self, moment: &mut Moment, n: usize) {
        let Mind::Unsure { effect } = moment.workers[n].mind else { return };
        let row = moment.row.as_ref().filter(|op| op.fence == effect.fence);
        moment.workers[n].mind = match row {
            Some(op) if op.state == State::Processing => Mind::Holds { effect, until: moment.now, done: false },
            _ => Mind::Idle,
        };
    }

    /// Somebody looks whether it took effect, and says so.
    fn probe(&self, moment: &mut Moment) {
        let Some(op) = moment.row.as_ref().filter(|op| self.prober && op.state == State::InDoubt) else { return };
        let (id, payload) = (op.id, op.order.unwrap_or(0));
        let found = moment.effects.iter().find(|effect| (effect.id, effect.payload) == (id, payload));
        let verdict = match found {
            Some(effect) => Verdict::Completed(Outcome::kept(effect.fence.to_string())),
            None => Verdict::Retry,
        };
        let (fence, expected) = (self.new_fence(moment), Some(op.fence));
        let (actor, reason) = ("probe".to_owned(), String::new());
        self.apply(moment, &Event::Resolve { fence, expected, verdict, actor, reason });
    }

    fn request(&self, payload: i64, token: u8) -> Request {
        let tick = Duration::from_secs(1);
        Request {
            scope: Scope::new("acme", "model", "once").expect("a scope"),
            key: Key::new("k").expect("a key"),
            fingerprint: Fingerprint::of_bytes(&payload.to_be_bytes()),
            order: Some(payload),
            payload: None,
            labels: Labels::default(),
            policy: Policy {
                lease: tick * u32::from(LEASE),
                max_run: tick * u32::from(LEASE) * 2,
                retention: None,
                tombstone: None,
                max_attempts: Some(2),
                max_crashes: 3,
                backoff: Backoff { first: tick, cap: tick },
                on_mismatch: OnMismatch::SupersedeIfNewer,
                on_lost: self.on_lost,
            },
            token: Token([token; 16]),
            owner: "worker".into(),
        }
    }
}

fn effect_of(op: &Operation) -> Effect {
    Effect { id: op.id, payload: op.order.unwrap_or(0), fence: op.fence }
}
