//! The test driver: one row, a clock and a counter of fences.

use std::time::Duration;

use super::{super::*, invariants};
use crate::{Backoff, OnLost, OnMismatch};

pub(super) const LEASE: Duration = Duration::from_secs(10);
pub(super) const MAX_RUN: Duration = Duration::from_secs(25);
pub(super) const RETENTION: Duration = Duration::from_secs(1000);
pub(super) const TICK: Duration = Duration::from_micros(1);

/// The default policy: exhausted after two failures or two crashes.
pub(super) fn policy() -> Policy {
    Policy {
        lease: LEASE,
        max_run: MAX_RUN,
        retention: Some(RETENTION),
        tombstone: None,
        max_attempts: Some(2),
        max_crashes: 2,
        backoff: Backoff { first: Duration::from_secs(4), cap: Duration::from_secs(8) },
        on_mismatch: OnMismatch::Reject,
        on_lost: OnLost::Rerun,
        pinned: false,
        runner: crate::Runner::Worker,
    }
}

/// A claim for a payload that is not stored.
pub(super) fn ask(payload: &str) -> Request {
    Request {
        scope: Scope::new("acme", "tests", "law").unwrap(),
        key: Key::new("k").unwrap(),
        fingerprint: Fingerprint::of_bytes(payload.as_bytes()),
        order: None,
        payload: None,
        labels: Labels::default(),
        policy: policy(),
        at_once: false,
        later: None,
        lease: None,
        sent_again: false,
        token: Token([0; 16]),
        owner: "worker".into(),
    }
}

pub(super) fn ask_under(payload: &str, on_lost: OnLost) -> Request {
    Request { policy: Policy { on_lost, ..policy() }, ..ask(payload) }
}

/// A claim for a payload with an order, which replaces older ones.
pub(super) fn ask_newer(payload: &str, order: i64) -> Request {
    let policy = Policy { on_mismatch: OnMismatch::SupersedeIfNewer, ..policy() };
    Request { order: Some(order), policy, ..ask(payload) }
}

pub(super) fn complete(body: &'static str) -> Write {
    Write::Complete(Outcome::kept(body))
}

pub(super) fn fail(retry: Retry) -> Write {
    Write::Fail(Failure { error: "it broke".into(), retry })
}

pub(super) fn release() -> Write {
    Write::Release { delay: Duration::ZERO, why: None }
}

pub(super) fn doubt() -> Write {
    Write::Doubt { reason: "who knows".into() }
}

/// One of each.
pub(super) fn writes() -> [Write; 8] {
    let (checkpoint, progress) = (Write::Checkpoint("so far".into()), Write::Progress("so far".into()));
    [complete("done"), fail(Retry::Backoff), release(), Write::Withdraw, doubt(), checkpoint, progress, Write::Renew]
}

/// Those that end a lease.
pub(super) fn settles() -> [Write; 5] {
    [complete("done"), fail(Retry::Backoff), release(), Write::Withdraw, doubt()]
}

/// An event that owns its data.
#[derive(Clone, Debug)]
pub(super) enum Happening {
    Claim(Request),
    Inline(Request),
    Write(Fence, Write),
    Lapse,
    Tend,
    Resolve(Option<Fence>, Verdict),
    Cancel,
    Purge,
}

impl Happening {
    pub(super) fn step(&self, row: Option<&Operation>, fence: Fence, now: Timestamp) -> Step {
        let (actor, reason) = ("ann".to_owned(), "she knows".to_owned());
        let event = match self.clone() {
            Self::Claim(ref request) => return step(row, &Event::Claim { request, fence }, now),
            Self::Inline(ref request) => return step(row, &Event::ClaimInline { request, fence }, now),
            Self::Write(fence, write) => Event::Write { fence, write },
            Self::Lapse => Event::Lapse { fence },
            Self::Tend => Event::Tend,
            Self::Resolve(expected, verdict) => Event::Resolve { fence, expected, verdict, actor, reason },
            Self::Cancel => Event::Cancel { fence, actor, reason },
            Self::Purge => Event::Purge { actor, reason },
        };
        step(row, &event, now)
    }
}

/// One operation, step by step. Every step is checked against the invariants.
#[derive(Clone, Debug)]
pub(super) struct Life {
    pub(super) row: Option<Operation>,
    pub(super) now: Timestamp,
    /// The last fence that was given out.
    pub(super) fence: i64,
    /// The token of the last claim.
    pub(super) token: u8,
}

impl Life {
    pub(super) fn new() -> Self {
        Self { row: None, now: Timestamp::from_micros(1_000_000_000), fence: 0, token: 0 }
    }

    pub(super) fn row(&self) -> &Operation {
        self.row.as_ref().expect("there should be a row")
    }

    pub(super) fn state(&self) -> Option<State> {
        self.row.as_ref().map(|op| op.state)
    }

    pub(super) fn happens(&mut self, what: &Happening) -> Step {
        self.fence += 1;
        let (before, fence) = (self.row.take(), Fence(self.fence));
        let step = what.step(before.as_ref(), fence, self.now);
        invariants::step(before.as_ref(), what, fence, self.now, &step);
        self.row = match step.next.clone() {
            Next::Same => before,
            Next::Put(op) | Next::Anew(op) => Some(*op),
            Next::Gone => None,
        };
        step
    }

    fn answer(&mut self, what: &Happening) -> Answer {
        self.happens(what).answer
    }

    /// A new claim with a new token.
    pub(super) fn claim(&mut self, request: &Request) -> Answer {
        self.token += 1;
        self.claim_again(request)
    }

    /// The last claim once more, because its answer was lost.
    pub(super) fn claim_again(&mut self, request: &Request) -> Answer {
        let token = Token([self.token; 16]);
        self.answer(&Happening::Claim(Request { token, ..request.clone() }))
    }

    pub(super) fn claim_inline(&mut self, request: &Request) -> Answer {
        self.token += 1;
        let token = Token([self.token; 16]);
        self.answer(&Happening::Inline(Request { token, ..request.clone() }))
    }

    /// A claim that gets the lease.
    pub(super) fn acquire(&mut self, request: &Request) -> Fence {
        assert_eq!(self.claim(request), Answer::Acquired);
        self.row().fence
    }

    pub(super) fn write(&mut self, fence: Fence, write: Write) -> Answer {
        self.answer(&Happening::Write(fence, write))
    }

    /// A run that completes.
    pub(super) fn settle(&mut self, fence: Fence, write: Write) {
        let answer = self.write(fence, write);
        assert!(matches!(answer, Answer::Settled { .. }), "{answer:?}");
    }

    /// The lease expires, and the sweep ends it.
    pub(super) fn crash(&mut self) {
        self.now = self.row().lease.as_ref().expect("it should be running").deadline;
        assert_eq!(self.lapse(), Answer::Lapsed);
    }

    pub(super) fn lapse(&mut self) -> Answer {
        self.answer(&Happening::Lapse)
    }

    pub(super) fn tend(&mut self) -> Answer {
        self.answer(&Happening::Tend)
    }

    pub(super) fn resolve(&mut self, verdict: Verdict) -> Answer {
        self.answer(&Happening::Resolve(None, verdict))
    }

    pub(super) fn cancel(&mut self) -> Answer {
        self.answer(&Happening::Cancel)
    }

    pub(super) fn purge(&mut self) -> Answer {
        self.answer(&Happening::Purge)
    }

    pub(super) fn pass(&mut self, time: Duration) {
        self.now = self.now + time;
    }
}
