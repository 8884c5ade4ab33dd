//! Work and claim: a request to the ledger, and its seven answers.

use std::{convert::Infallible, sync::Arc, time::Duration};

use bytes::Bytes;

use crate::{
    Error, Fingerprint, Key, Labels, Operation, Outcome, Policy, Priority, Result, Scope, Timestamp, Token,
    machine::{Answer, Later, Request},
    store::Applied,
};

/// Something that should take effect once: its scope, key and fingerprint, and options.
#[derive(Clone, Debug)]
pub struct Work {
    scope: Scope,
    key: Key,
    fingerprint: Fingerprint,
    order: Option<i64>,
    payload: Option<Bytes>,
    labels: Labels,
    policy: Policy,
    at_once: bool,
    token: Option<Token>,
    later: Later,
}

impl Work {
    /// The largest payload that is stored with an operation.
    pub const MAX_PAYLOAD: usize = 8 << 20;

    /// Work under a key, with the default policy.
    #[must_use]
    pub fn new(scope: Scope, key: Key, fingerprint: Fingerprint) -> Self {
        let (labels, policy) = (Labels::default(), Policy::default());
        let later = Later::default();
        Self { scope, key, fingerprint, order: None, payload: None, labels, policy, at_once: false, token: None, later }
    }

    /// Its policy. For an enqueue it is stored until the operation settles; without one, the worker's policy applies.
    /// An enqueue under [`OnLost::Probe`](crate::OnLost::Probe) is refused: a worker has no probe.
    #[must_use]
    pub fn policy(self, policy: Policy) -> Self {
        Self { policy, later: Later { keeps_policy: true, ..self.later }, ..self }
    }

    /// The worker's policy, for an enqueue. It is not stored; only `on_mismatch` and the retention apply now.
    #[must_use]
    pub fn policy_of_worker(self, policy: Policy) -> Self {
        Self { policy, later: Later { keeps_policy: false, ..self.later }, ..self }
    }

    /// Not to be run before this time, by the database's clock. Only for an enqueue, like the next two.
    #[must_use]
    pub fn not_before(self, time: Timestamp) -> Self {
        Self { later: Later { not_before: Some(time), ..self.later }, ..self }
    }

    /// Not to be run before this delay after it is stored.
    #[must_use]
    pub fn delay(self, delay: Duration) -> Self {
        Self { later: Later { delay, ..self.later }, ..self }
    }

    /// Its priority among due operations.
    #[must_use]
    pub fn priority(self, priority: Priority) -> Self {
        Self { later: Later { priority, ..self.later }, ..self }
    }

    /// The order of the payload, for supersede-if-newer.
    #[must_use]
    pub fn order(self, order: i64) -> Self {
        Self { order: Some(order), ..self }
    }

    /// The input, to be stored with the operation: accepted data is then never lost. A successor needs it.
    #[must_use]
    pub fn payload(self, payload: impl Into<Bytes>) -> Self {
        Self { payload: Some(payload.into()), ..self }
    }

    /// Texts to find it by.
    #[must_use]
    pub fn labels(self, labels: Labels) -> Self {
        Self { labels, ..self }
    }

    /// Ignores the backoff, for callers that send the work again, such as a provider that redelivers. Exhausted, in
    /// doubt and completed operations are not affected.
    #[must_use]
    pub fn at_once(self) -> Self {
        Self { at_once: true, ..self }
    }

    /// The token of the claim, for callers that send it again if its answer is lost: while its lease lives, they get it
    /// again. Without one, a claim whose answer was lost is withdrawn. Each claim needs another random token.
    #[must_use]
    pub fn token(self, token: Token) -> Self {
        Self { token: Some(token), ..self }
    }

    /// The request of an enqueue.
    pub(crate) fn into_enqueue(self, owner: &str) -> Result<Request> {
        let later = self.later;
        if later.keeps_policy {
            self.policy.check_for_worker()?;
        }
        if later.delay > Policy::LONGEST {
            return Err(Error::Invalid("delay: is longer than 1000 years".into()));
        }
        Ok(Request { later: Some(later), ..self.into_request(owner)? })
    }

    /// The request of a claim; refuses invalid work before anything is claimed.
    pub(crate) fn into_request(self, owner: &str) -> Result<Request> {
        self.policy.check()?;
        self.labels.check()?;
        if self.payload.as_ref().is_some_and(|payload| payload.len() > Self::MAX_PAYLOAD) {
            return Err(Error::Invalid(format!("payload: is larger than {} bytes", Self::MAX_PAYLOAD)));
        }
        Ok(Request {
            scope: self.scope,
            key: self.key,
            fingerprint: self.fingerprint,
            order: self.order,
            payload: self.payload,
            labels: self.labels,
            policy: self.policy,
            at_once: self.at_once,
            later: None,
            lease: None,
            token: self.token.map_or_else(Token::random, Ok)?,
            sent_again: self.token.is_some(),
            owner: owner.to_owned(),
        })
    }
}

/// The answer to a claim: exactly one of seven. `A` is what the claimer acquires: a
/// [`Lease`](crate::Lease) from [`Ledger::claim`](crate::Ledger::claim), the end of the run from
/// [`Ledger::run`](crate::Ledger::run).
#[derive(Debug)]
#[must_use = "an unused claim leaves its lease to expire"]
pub enum Claim<A> {
    /// This caller executes.
    Acquired(A),
    /// It took effect before.
    Replay(Replay),
    /// Another caller holds the lease.
    InFlight(InFlight),
    /// It failed, and its backoff is not over.
    NotYet(NotYet),
    /// The key belongs to another payload.
    Mismatch(Arc<Operation>),
    /// No attempts are left, or it is parked; a person can have it run again.
    Exhausted(Arc<Operation>),
    /// It may or may not have taken effect; a probe or a person resolves it.
    InDoubt(Arc<Operation>),
}

/// It took effect before.
#[derive(Clone, Debug)]
pub struct Replay {
    /// The stored outcome, kept or not.
    pub outcome: Outcome,
    /// This claim had another payload (`on_mismatch = replay`).
    pub mismatch: bool,
    /// The operation.
    pub operation: Arc<Operation>,
}

/// Another caller holds the lease.
#[derive(Clone, Debug)]
pub struct InFlight {
    /// How long the present lease lasts unless renewed: a hint for the next try.
    pub retry_after: Duration,
    /// This claim brought newer data, which is stored as the successor.
    pub kept: bool,
    /// The operation.
    pub operation: Arc<Operation>,
}

/// It is backing off.
#[derive(Clone, Debug)]
pub struct NotYet {
    /// How long until it may be claimed.
    pub retry_after: Duration,
    /// The end of the backoff, by the database's clock.
    pub until: Timestamp,
    /// The operation.
    pub operation: Arc<Operation>,
}

impl<A> Claim<A> {
    /// The answer's word, in counters and logs.
    #[must_use]
    pub const fn word(&self) -> &'static str {
        match self {
            Self::Acquired(_) => "acquired",
            Self::Replay(_) => "replay",
            Self::InFlight(_) => "in_flight",
            Self::NotYet(_) => "not_yet",
            Self::Mismatch(_) => "mismatch",
            Self::Exhausted(_) => "exhausted",
            Self::InDoubt(_) => "in_doubt",
        }
    }

    /// The acquired value.
    ///
    /// # Errors
    /// The six other answers.
    pub fn acquired<B>(self) -> Result<A, Claim<B>> {
        Err(match self {
            Self::Acquired(acquired) => return Ok(acquired),
            Self::Replay(replay) => Claim::Replay(replay),
            Self::InFlight(in_flight) => Claim::InFlight(in_flight),
            Self::NotYet(not_yet) => Claim::NotYet(not_yet),
            Self::Mismatch(op) => Claim::Mismatch(op),
            Self::Exhausted(op) => Claim::Exhausted(op),
            Self::InDoubt(op) => Claim::InDoubt(op),
        })
    }

    /// The same answer with another acquired value.
    pub fn map<B>(self, then: impl FnOnce(A) -> B) -> Claim<B> {
        match self.acquired() {
            Ok(acquired) => Claim::Acquired(then(acquired)),
            Err(other) => other,
        }
    }

    /// The operation, unless it was acquired.
    #[must_use]
    pub fn operation(&self) -> Option<&Operation> {
        match self {
            Self::Acquired(_) => None,
            Self::Replay(Replay { operation, .. })
            | Self::InFlight(InFlight { operation, .. })
            | Self::NotYet(NotYet { operation, .. })
            | Self::Mismatch(operation)
            | Self::Exhausted(operation)
            | Self::InDoubt(operation) => Some(operation),
        }
    }
}

impl Claim<Arc<Operation>> {
    /// From the store's answer.
    pub(crate) fn from_applied(applied: Applied) -> Result<Self> {
        let applied = applied.decided()?;
        let operation = applied.operation.ok_or(Error::Contradiction("a claim was answered without its operation"))?;
        Self::from_answer(applied.answer, Arc::new(operation), applied.now)
    }

    /// From an answer about an operation, given at a time.
    pub(crate) fn from_answer(answer: Answer, operation: Arc<Operation>, now: Timestamp) -> Result<Self> {
        Ok(match answer {
            Answer::Acquired => Self::Acquired(operation),
            Answer::Replay { mismatch } => {
                let outcome = operation.outcome.clone().unwrap_or_else(|| Outcome::not_kept(""));
                Self::Replay(Replay { outcome, mismatch, operation })
            }
            Answer::InFlight { until, kept } => {
                Self::InFlight(InFlight { retry_after: until.since(now), kept, operation })
            }
            Answer::NotYet { until } => Self::NotYet(NotYet { retry_after: until.since(now), until, operation }),
            Answer::Mismatch => Self::Mismatch(operation),
            Answer::Exhausted => Self::Exhausted(operation),
            Answer::InDoubt { .. } => Self::InDoubt(operation),
            _ => return Err(Error::Contradiction("a claim got the answer of another event")),
        })
    }
}

/// The answer to an enqueue.
#[derive(Debug)]
pub enum Enqueued {
    /// It is stored, and a worker will run it. Newer data replaced older data, if there was some.
    New(Arc<Operation>),
    /// It was enqueued before and has not run yet.
    Waiting(Waiting),
    /// It has run, or runs: the answer that a claim would get. Never [`Claim::Acquired`].
    Known(Claim<Infallible>),
}

/// It is pending.
#[derive(Clone, Debug)]
pub struct Waiting {
    /// The time from which it may run, by the database's clock.
    pub from: Timestamp,
    /// The operation.
    pub operation: Arc<Operation>,
}

impl Enqueued {
    /// The answer's word, in counters and logs.
    #[must_use]
    pub const fn word(&self) -> &'static str {
        match self {
            Self::New(_) => "enqueued",
            Self::Waiting(_) => "waiting",
            Self::Known(claim) => claim.word(),
        }
    }

    /// The operation.
    #[must_use]
    pub fn operation(&self) -> &Operation {
        match self {
            Self::New(operation) | Self::Waiting(Waiting { operation, .. }) => operation,
            Self::Known(claim) => claim.known(),
        }
    }

    /// From the store's answer.
    pub(crate) fn from_applied(applied: Applied) -> Result<Self> {
        let applied = applied.decided()?;
        let operation =
            applied.operation.ok_or(Error::Contradiction("an enqueue was answered without its operation"))?;
        let operation = Arc::new(operation);
        Ok(match applied.answer {
            Answer::Enqueued => Self::New(operation),
            Answer::Waiting { from } => Self::Waiting(Waiting { from, operation }),
            answer => match Claim::from_answer(answer, operation, applied.now)?.acquired() {
                Err(known) => Self::Known(known),
                Ok(_) => return Err(Error::Contradiction("an enqueue got a lease")),
            },
        })
    }
}

impl Claim<Infallible> {
    /// The operation.
    fn known(&self) -> &Operation {
        match self {
            Self::Acquired(never) => match *never {},
            Self::Replay(Replay { operation, .. })
            | Self::InFlight(InFlight { operation, .. })
            | Self::NotYet(NotYet { operation, .. })
            | Self::Mismatch(operation)
            | Self::Exhausted(operation)
            | Self::InDoubt(operation) => operation,
        }
    }
}

/// The approximate size of a claim in a batch.
pub(crate) fn weight(request: &Arc<Request>) -> usize {
    512 + request.payload.as_ref().map_or(0, Bytes::len)
}
