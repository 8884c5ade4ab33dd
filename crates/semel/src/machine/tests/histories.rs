//! Random histories: whatever the order of events, an operation takes effect once.

use std::{collections::HashMap, time::Duration};

use proptest::{collection::vec, prelude::*, sample::select};

use super::{
    super::*,
    life::{Happening, LEASE, Life, RETENTION, TICK, ask, policy},
};
use crate::{OnLost, OnMismatch};

/// One event of a history, before its context is known.
#[derive(Clone, Debug)]
enum Turn {
    /// `again` sends the last token once more.
    Claim {
        payload: &'static str,
        order: Option<i64>,
        on_lost: OnLost,
        pinned: bool,
        again: bool,
        inline: bool,
        at_once: bool,
    },
    /// Under the fence of an earlier claim, the last one first, or under a future one.
    Write {
        back: usize,
        write: Write,
    },
    Resolve {
        expected: bool,
        verdict: Verdict,
    },
    Purge,
    Sweep,
    Wait(Duration),
    /// Moves the clock to one of the times in the row, or just before it.
    WaitFor {
        which: usize,
        just_before: bool,
    },
}

fn one_of<T: Clone + std::fmt::Debug + 'static>(values: &[T]) -> impl Strategy<Value = T> + use<T> {
    select(values.to_vec())
}

fn writes() -> impl Strategy<Value = Write> {
    let retries = [Retry::Backoff, Retry::After(LEASE), Retry::Never];
    let delays = [Duration::ZERO, LEASE];
    prop_oneof![
        // Every completion has its own outcome, assigned when it is made.
        4 => Just(Write::Complete(Outcome::kept(""))),
        2 => one_of(&retries).prop_map(|retry| Write::Fail(Failure { error: "it broke".into(), retry })),
        2 => one_of(&delays).prop_map(|delay| Write::Release { delay, why: None }),
        1 => Just(Write::Withdraw),
        1 => Just(Write::Doubt { reason: "who knows".into() }),
        1 => Just(Write::Checkpoint("so far".into())),
        2 => Just(Write::Renew),
    ]
}

fn turns() -> impl Strategy<Value = Turn> {
    let on_lost = one_of(&[OnLost::Rerun, OnLost::Hold, OnLost::Probe]);
    // The order belongs to the payload, like the creation time of an event.
    let payloads = [("a", Some(1)), ("b", Some(2)), ("c", Some(2)), ("d", Some(3)), ("e", None)];
    let rare = prop::bool::weighted(0.1);
    let claims =
        (one_of(&payloads), on_lost, any::<bool>(), prop::bool::weighted(0.2), rare, prop::bool::weighted(0.2));
    let verdicts = [Verdict::Completed(Outcome::kept("")), Verdict::Failed, Verdict::Retry];
    let waits = [TICK, Duration::from_secs(4), LEASE, RETENTION, RETENTION * 100];
    prop_oneof![
        8 => claims.prop_map(|((payload, order), on_lost, pinned, again, inline, at_once)| {
            Turn::Claim { payload, order, on_lost, pinned, again, inline, at_once }
        }),
        8 => (prop_oneof![4 => Just(0_usize), 1 => 0_usize..5], writes())
            .prop_map(|(back, write)| Turn::Write { back, write }),
        1 => (any::<bool>(), one_of(&verdicts))
            .prop_map(|(expected, verdict)| Turn::Resolve { expected, verdict }),
        1 => prop::bool::weighted(0.3).prop_map(|purge| if purge { Turn::Purge } else { Turn::Sweep }),
        2 => Just(Turn::Sweep),
        1 => one_of(&waits).prop_map(Turn::Wait),
        3 => (0_usize..6, any::<bool>())
            .prop_map(|(which, just_before)| Turn::WaitFor { which, just_before }),
    ]
}

/// A payload that took effect, and its promised outcome.
#[derive(Clone, Debug)]
struct Effect {
    id: i64,
    fingerprint: Fingerprint,
    order: Option<i64>,
    outcome: Option<Outcome>,
    expires_at: Option<Timestamp>,
}

#[derive(Debug)]
struct History {
    life: Life,
    mismatch: OnMismatch,
    turn: u32,
    /// The fences of all claims.
    held: Vec<Fence>,
    /// How often a write under a fence ended a lease.
    settled: HashMap<Fence, u32>,
    /// How often each operation took effect with each payload.
    effects: HashMap<(i64, Fingerprint), u32>,
    /// The last of them, while it must be replayed.
    promised: Option<Effect>,
}

impl History {
    fn new(mismatch: OnMismatch) -> Self {
        let life = Life::new();
        let (held, settled, effects) = (Vec::new(), HashMap::new(), HashMap::new());
        Self { life, mismatch, turn: 0, held, settled, effects, promised: None }
    }

    fn take(&mut self, turn: &Turn) {
        self.turn += 1;
        // A new outcome each time, so that a change would show.
        let outcome = Outcome::kept(self.turn.to_string());
        match turn.clone() {
            Turn::Claim { payload, order, on_lost, pinned, again, inline, at_once } => {
                self.life.token += u8::from(!again);
                let token = Token([self.life.token; 16]);
                let policy = Policy {
                    on_lost,
                    on_mismatch: self.mismatch,
                    pinned: pinned && self.mismatch != OnMismatch::SupersedeIfNewer,
                    tombstone: (order == Some(2)).then_some(RETENTION / 2),
                    ..policy()
                };
                let request = Request { order, token, policy, at_once, ..ask(payload) };
                self.happens(&if inline { Happening::Inline(request) } else { Happening::Claim(request) });
            }
            Turn::Write { back, write } => {
                let write = match write {
                    Write::Complete(_) => Write::Complete(outcome),
                    other => other,
                };
                let to_come = Fence(self.life.fence + 100);
                let fence = self.held.iter().rev().nth(back).copied().unwrap_or(to_come);
                self.happens(&Happening::Write(fence, write));
            }
            Turn::Resolve { expected, verdict } => {
                let verdict = match verdict {
                    Verdict::Completed(_) => Verdict::Completed(outcome),
                    other => other,
                };
                let expected = self.held.last().copied().filter(|_| expected);
                self.happens(&Happening::Resolve(expected, verdict));
            }
            Turn::Purge => self.happens(&Happening::Purge),
            Turn::Sweep => {
                self.happens(&Happening::Lapse);
                self.happens(&Happening::Tend);
            }
            Turn::Wait(time) => self.life.pass(time),
            Turn::WaitFor { which, just_before } => self.wait_for(which, just_before),
        }
    }

    fn wait_for(&mut self, which: usize, just_before: bool) {
        let Some(op) = &self.life.row else { return };
        let lease = op.lease.as_ref();
        let times = [
            lease.map(|lease| lease.deadline),
            lease.map(|lease| lease.run_until),
            op.not_before,
            op.expires_at,
            op.archive_at,
            op.look_at,
        ];
        if let Some(time) = times[which] {
            let time = Timestamp::from_micros(time.as_micros() - i64::from(just_before));
            self.life.now = self.life.now.max(time);
        }
    }

    /// The driver checks the invariants; the following checks need the history.
    fn happens(&mut self, what: &Happening) {
        let before = self.life.row.clone();
        let step = self.life.happens(what);
        let changed = step.next != Next::Same;
        let after = self.life.row.clone();
        if let (Happening::Claim(_), Answer::Acquired, Some(op)) = (what, &step.answer, &after) {
            assert_eq!(changed, !self.held.contains(&op.fence), "a new lease has a new fence");
            self.held.push(op.fence);
        }
        if let (Happening::Write(fence, _), Answer::Settled { .. }, true) = (what, &step.answer, changed) {
            let times = self.settled.entry(*fence).or_default();
            *times += 1;
            assert_eq!(*times, 1, "a fence ends one lease once: {what:?}");
        }
        self.keeps_its_promise(before.as_ref(), what);
        if let Some(effect) = took_effect(before.as_ref(), what, &step, after.as_ref()) {
            let times = self.effects.entry((effect.id, effect.fingerprint)).or_default();
            *times += 1;
            assert_eq!(*times, 1, "took effect twice: {what:?} on {before:?}");
            // With newer data waiting, no caller gets this outcome.
            self.promised = after.filter(|op| op.state == State::Completed).map(|_| effect);
        }
    }

    /// A given outcome stays, until newer data, expiry or a purge ends it.
    fn keeps_its_promise(&mut self, before: Option<&Operation>, what: &Happening) {
        let Some(promised) = &self.promised else { return };
        let (now, after) = (self.life.now, self.life.row.as_ref());
        let still = after.filter(|op| op.id == promised.id && op.fingerprint == promised.fingerprint);
        match still {
            Some(op) => {
                assert_eq!(op.state, State::Completed, "{what:?} undid {promised:?}");
                assert!(op.archived || op.outcome == promised.outcome, "{what:?} changed {promised:?} to {op:?}");
            }
            None => {
                let purged = matches!(what, Happening::Purge) && after.is_none();
                let expired = promised.expires_at.is_some_and(|end| end <= now);
                let newer = after.is_some_and(|op| op.id == promised.id && op.order > promised.order);
                assert!(purged || expired || newer, "{what:?} on {before:?} forgot {promised:?}");
                self.promised = None;
            }
        }
    }
}

/// The payload that took effect in a step: by a completion (also one with newer data waiting), an inline claim, or a
/// verdict.
fn took_effect(before: Option<&Operation>, what: &Happening, step: &Step, after: Option<&Operation>) -> Option<Effect> {
    let effect = |op: &Operation, outcome: &Outcome| Effect {
        id: op.id,
        fingerprint: op.fingerprint,
        order: op.order,
        outcome: Some(outcome.clone()),
        expires_at: after.and_then(|op| op.expires_at),
    };
    match (what, &step.answer, before, after) {
        _ if step.next == Next::Same => None,
        (Happening::Inline(_), Answer::Acquired, _, Some(op)) => op.outcome.as_ref().map(|given| effect(op, given)),
        (Happening::Write(_, Write::Complete(given)), Answer::Settled { .. }, Some(op), _)
        | (Happening::Resolve(_, Verdict::Completed(given)), Answer::Resolved, Some(op), _) => Some(effect(op, given)),
        _ => None,
    }
}

proptest! {
    #[test]
    fn prop_every_history_takes_effect_once_and_keeps_its_outcome(
        mismatch in one_of(&[OnMismatch::Reject, OnMismatch::Replay, OnMismatch::SupersedeIfNewer]),
        turns in vec(turns(), 1..80),
    ) {
        let mut history = History::new(mismatch);
        for turn in &turns {
            history.take(turn);
        }
    }
}
