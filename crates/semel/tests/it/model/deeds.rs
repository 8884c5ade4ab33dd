//! The actions in the world, and its store: nothing but `machine::step`.

use std::time::Duration;

use semel::{
    Backoff, Fence, Fingerprint, Key, Labels, OnMismatch, Operation, Outcome, Policy, Scope, State, Timestamp, Token,
    Verdict,
    machine::{Answer, Event, Next, Request, Step, Write, step},
};

use super::world::{Effect, Flaw, Mind, Moment, Worker, World};

/// The lease and the longest run, in ticks: the last renewal is cut short.
const LEASE: u8 = 2;
const MAX_RUN: u8 = 3;

impl World {
    pub(super) fn claim(&self, moment: &mut Moment, n: usize, heard: bool) {
        let Worker { brings, mind, .. } = moment.workers[n];
        // A new token is the number of a new fence: unique like a random one, and the same for any worker.
        let (token, sent) = match mind {
            Mind::Asked { token, sent } => (token, sent),
            _ => (u8::try_from(moment.fence + 1).expect("few fences are enough"), moment.now),
        };
        let before = moment.row.clone();
        let answer = self.ask(moment, brings, token);
        if before != moment.row {
            moment.fence = moment.fence.max(i64::from(token));
            moment.workers[n].echo = self.echoes.then_some((brings, token));
        }
        moment.workers[n].mind = match (answer, &moment.row) {
            _ if !heard && before == moment.row => return,
            _ if !heard => Mind::Asked { token, sent },
            (Answer::Acquired, Some(op)) => {
                let effect = effect_of(op, moment.life);
                Mind::Holds { effect, until: sent + LEASE, end: sent + MAX_RUN, done: false }
            }
            (Answer::Replay { .. } | Answer::Mismatch | Answer::Exhausted, _) => Mind::Content,
            (Answer::InDoubt { .. }, _) if !self.prober => Mind::Content,
            // In flight, backing off, or being probed: claims again.
            _ => Mind::Idle,
        };
    }

    /// The last claim arrives again, and its answer is dropped.
    pub(super) fn echo(&self, moment: &mut Moment, n: usize) {
        if let Some((payload, token)) = moment.workers[n].echo {
            self.ask(moment, payload, token);
        }
    }

    fn ask(&self, moment: &mut Moment, payload: i64, token: u8) -> Answer {
        let fence = self.new_fence(moment);
        self.apply(moment, &Event::Claim { request: &self.request(payload, token), fence })
    }

    pub(super) fn work(&self, moment: &mut Moment, n: usize) {
        if let Mind::Holds { effect, until, end, done: false } = moment.workers[n].mind {
            let minds_its_clock = self.prober && self.flaw != Some(Flaw::LateWork);
            moment.workers[n].mind = if minds_its_clock && until <= moment.now {
                Mind::Idle
            } else {
                moment.effects.push(effect);
                Mind::Holds { effect, until, end, done: true }
            };
        }
    }

    pub(super) fn complete(&self, moment: &mut Moment, n: usize, heard: bool) {
        let Mind::Holds { effect, .. } = moment.workers[n].mind else { return };
        let answer = self.write(moment, effect, Write::Complete(outcome_of(effect)));
        if self.atomic && matches!(answer, Answer::Settled { .. }) {
            moment.effects.push(effect);
        }
        moment.workers[n].mind = match (heard, self.atomic) {
            (true, _) => go_on(moment, n, &answer),
            // Repeating the completion is harmless; repeating the transaction is not.
            (false, true) if self.flaw != Some(Flaw::NoReadBack) => Mind::Unsure { effect },
            (false, _) => return,
        };
    }

    pub(super) fn settle(&self, moment: &mut Moment, n: usize, write: Write) {
        let Mind::Holds { effect, .. } = moment.workers[n].mind else { return };
        let answer = self.write(moment, effect, write);
        moment.workers[n].mind = go_on(moment, n, &answer);
    }

    pub(super) fn renew(&self, moment: &mut Moment, n: usize) {
        let Mind::Holds { effect, end, done, .. } = moment.workers[n].mind else { return };
        if let Answer::Renewed { .. } = self.write(moment, effect, Write::Renew) {
            let until = match self.flaw {
                Some(Flaw::EndlessRenewals) => moment.now + LEASE,
                _ => end.min(moment.now + LEASE),
            };
            moment.workers[n].mind = Mind::Holds { effect, until, end, done };
        }
    }

    /// A commit whose answer was lost is read back, never guessed.
    pub(super) fn read_back(&self, moment: &mut Moment, n: usize) {
        let Mind::Unsure { effect } = moment.workers[n].mind else { return };
        let running = |op: &&Operation| op.fence == effect.fence && op.state == State::Processing;
        moment.workers[n].mind = match moment.row.as_ref().filter(running) {
            Some(_) => Mind::Holds { effect, until: moment.now, end: moment.now, done: false },
            None => Mind::Idle,
        };
    }

    /// A probe finds out whether it took effect.
    pub(super) fn probe(&self, moment: &mut Moment) {
        let Some(op) = moment.row.as_ref().filter(|op| op.state == State::InDoubt) else { return };
        let in_doubt = effect_of(op, moment.life);
        let same = |effect: &&Effect| (effect.life, effect.payload) == (in_doubt.life, in_doubt.payload);
        let verdict = match moment.effects.iter().find(same) {
            Some(effect) => Verdict::Completed(outcome_of(*effect)),
            None => Verdict::Retry,
        };
        let (fence, expected) = (self.new_fence(moment), Some(op.fence));
        let (actor, reason) = ("probe".to_owned(), String::new());
        self.apply(moment, &Event::Resolve { fence, expected, verdict, actor, reason });
    }

    /// A write names a row by its id, so a purged row gets none.
    fn write(&self, moment: &mut Moment, effect: Effect, write: Write) -> Answer {
        match &moment.row {
            Some(op) if op.id == effect.id => self.apply(moment, &Event::Write { fence: effect.fence, write }),
            _ => Answer::Lost,
        }
    }

    pub(super) fn new_fence(&self, moment: &Moment) -> Fence {
        match self.flaw {
            Some(Flaw::FencesOfTheRow) => Fence(moment.row.as_ref().map_or(0, |op| op.fence.0) + 1),
            _ => Fence(moment.fence + 1),
        }
    }

    /// The store, and an observer that checks its promises.
    pub(super) fn apply(&self, moment: &mut Moment, event: &Event<'_>) -> Answer {
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
        let Some(old) = before.filter(|_| changed) else { return answer };
        if matches!(event, Event::Write { fence, .. } if *fence != old.fence) {
            moment.broken = Some("a write under an old fence changed the row");
        }
        let same_data = |new: &&Operation| old.id == new.id && old.fingerprint == new.fingerprint;
        if let Some(new) = moment.row.as_ref().filter(same_data)
            && old.state == State::Completed
            && old.outcome != new.outcome
        {
            moment.broken = Some("an outcome that was given has changed");
        }
        let completes = match event {
            Event::Write { write, .. } => matches!(write, Write::Complete(_)),
            Event::Resolve { verdict, .. } => matches!(verdict, Verdict::Completed(_)),
            _ => false,
        };
        if completes {
            moment.completions.push(effect_of(&old, moment.life));
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
                max_run: tick * u32::from(MAX_RUN),
                retention: None,
                tombstone: None,
                max_attempts: Some(2),
                max_crashes: 3,
                backoff: Backoff { first: tick, cap: tick },
                on_mismatch: OnMismatch::SupersedeIfNewer,
                on_lost: self.on_lost,
                pinned: false,
                runner: semel::Runner::Worker,
            },
            at_once: false,
            later: None,
            lease: None,
            token: Token([token; 16]),
            sent_again: false,
            owner: "worker".into(),
        }
    }
}

/// After a settle: a worker with newer data waiting continues with it, as a run does.
fn go_on(moment: &mut Moment, n: usize, answer: &Answer) -> Mind {
    if let (Answer::Settled { successor: true }, Some(op)) = (answer, &moment.row) {
        moment.workers[n].brings = op.order.unwrap_or(0);
    }
    Mind::Idle
}

fn effect_of(op: &Operation, life: u8) -> Effect {
    Effect { life, id: op.id, payload: op.order.unwrap_or(0), fence: op.fence }
}

fn outcome_of(effect: Effect) -> Outcome {
    Outcome::kept(effect.fence.to_string())
}
