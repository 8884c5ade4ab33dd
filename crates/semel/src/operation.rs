//! Operation: one row of the ledger, something that must take effect once.

use std::{borrow::Cow, fmt, str::FromStr, time::Duration};

use bytes::Bytes;
use serde::{Deserialize, Serialize};

use crate::{Error, Fingerprint, Key, Policy, Runner, Scope, machine, time::Timestamp};

/// A number from one database-wide counter that only grows, new with every claim. Every write under a
/// lease names it, and a write with an old fence is refused.
///
/// It does not come from the row: a row may be purged and created again under the same key, and a stale
/// worker of the first must not match the second.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Fence(pub i64);

impl Fence {
    /// The bits of the counter; those of the [epoch](Self::epoch) are above.
    pub const COUNTER_BITS: u32 = 43;

    /// The epoch. On PostgreSQL it is raised when the database is found on another server, or on another timeline: after
    /// a failover, or after a backup was restored with its log. On SQLite it is always zero.
    #[must_use]
    pub const fn epoch(self) -> i64 {
        self.0 >> Self::COUNTER_BITS
    }
}

impl fmt::Display for Fence {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// A random number of one claim. A claim whose answer was lost is sent again and recognised by its token.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Token(pub [u8; 16]);

impl Token {
    /// A new random token.
    ///
    /// # Errors
    /// [`Error::Unavailable`] if the system has no random numbers.
    pub fn random() -> Result<Self, Error> {
        DRAWN.with_borrow_mut(|drawn| {
            if drawn.is_empty() {
                let mut bytes = [0; 16 * AT_ONCE];
                getrandom::fill(&mut bytes).map_err(|e| Error::Unavailable(format!("no randomness: {e}")))?;
                drawn.extend(bytes.as_chunks().0);
            }
            let drawn = drawn.pop().map(|mut token| {
                token[0] &= !KEPT;
                Self(token)
            });
            drawn.ok_or(Error::Contradiction("no token was generated"))
        })
    }
}

/// The bit of tokens that their claimers keep. Databases have an index of these alone, so other claims do not pay for it.
const KEPT: u8 = 0x80;

/// How many tokens are drawn at once: one system call per token would be a tenth of the cost of a replay from memory.
const AT_ONCE: usize = 64;

impl Token {
    /// The token of a claim that is sent again under this name: other names, other tokens.
    #[must_use]
    pub fn named(name: &[&str]) -> Self {
        let mut token = crate::fingerprint::digest_of("semel named token 1", name);
        token[0] &= !KEPT;
        Self(token)
    }

    /// The token that a caller keeps under this name, to send its take again. It differs from all other tokens in its first bit.
    #[must_use]
    pub fn kept(name: &[&str]) -> Self {
        let mut token = crate::fingerprint::digest_of("semel kept token 1", name);
        token[0] |= KEPT;
        Self(token)
    }
}

thread_local! {
    /// Drawn, unused tokens.
    static DRAWN: std::cell::RefCell<Vec<[u8; 16]>> = const { std::cell::RefCell::new(Vec::new()) };
}

/// The state of an operation. The rules are in [`machine`](crate::machine).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum State {
    /// Stored and waiting to run: enqueued, released, resolved as retry by a person, or newer data whose
    /// predecessor has settled.
    Pending,
    /// Leased.
    Processing,
    /// It has taken effect; the outcome is kept, or was too large.
    Completed,
    /// The last run failed.
    Failed,
    /// The last lease expired, and the policy lets it run again.
    TimedOut,
    /// It may or may not have taken effect. Only a probe or a person ends this.
    InDoubt,
}

impl State {
    /// Every state, in the order of its life.
    pub const ALL: [Self; 6] =
        [Self::Pending, Self::Processing, Self::Completed, Self::Failed, Self::TimedOut, Self::InDoubt];

    /// Its word in SQL, JSON, metrics and logs.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Pending => "pending",
            Self::Processing => "processing",
            Self::Completed => "completed",
            Self::Failed => "failed",
            Self::TimedOut => "timed_out",
            Self::InDoubt => "in_doubt",
        }
    }
}

impl fmt::Display for State {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

impl FromStr for State {
    type Err = Error;
    fn from_str(text: &str) -> Result<Self, Error> {
        Self::ALL.into_iter().find(|state| state.as_str() == text).ok_or_else(|| {
            let known: Vec<_> = Self::ALL.iter().map(|state| state.as_str()).collect();
            Error::Invalid(format!("no state is called {text:?}; the states are {}", known.join(", ")))
        })
    }
}

/// The result that is stored at completion and returned by every replay.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Outcome {
    /// Whether `body` is the whole outcome. If not (it was too large, or is archived), `body` may have a
    /// short note, such as the location of the result.
    pub kept: bool,
    /// The outcome's bytes. They may be empty.
    pub body: Bytes,
}

impl Outcome {
    /// An outcome to be replayed.
    #[must_use]
    pub fn kept(body: impl Into<Bytes>) -> Self {
        Self { kept: true, body: body.into() }
    }

    /// The largest outcome that is kept.
    pub const MAX_BYTES: usize = 8 << 20;

    /// The stored form: an outcome that is too large is not kept, but the operation still completes.
    #[must_use]
    pub(crate) fn to_store(&self) -> Self {
        match self.body.len() {
            0..=Self::MAX_BYTES => self.clone(),
            _ => Self::not_kept("the outcome was too large to be kept"),
        }
    }

    /// A completion without the outcome, with a note.
    #[must_use]
    pub fn not_kept(note: impl Into<Bytes>) -> Self {
        Self { kept: false, body: note.into() }
    }
}

/// Up to four small texts to find operations by.
///
/// The first two are also dimensions of the counters: use them for texts with few values (an event type,
/// a function), and the last two for texts with many (a process instance, a customer).
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct Labels(pub [Option<String>; 4]);

impl Labels {
    /// The longest label, in bytes: an index entry must stay small.
    pub const MAX_BYTES: usize = 255;

    /// Sets the label in slot 1 to 4.
    ///
    /// # Errors
    /// [`Error::Invalid`] if there is no such slot or the text is not allowed.
    pub fn with(mut self, slot: usize, text: &str) -> Result<Self, Error> {
        let place = slot
            .checked_sub(1)
            .and_then(|i| self.0.get_mut(i))
            .ok_or_else(|| Error::Invalid(format!("label {slot}: the slots are 1 to 4")))?;
        *place = Some(text.to_owned());
        self.check()?;
        Ok(self)
    }

    /// The kind under which an operation with these labels is due.
    #[must_use]
    pub fn listed_kind<'a>(&self, kind: &'a str, runner: Runner) -> Cow<'a, str> {
        match (runner, &self.0[0]) {
            (Runner::ByLabel, Some(label)) => Cow::Owned(format!("{kind}:{label}")),
            _ => Cow::Borrowed(kind),
        }
    }

    /// Refuses text that is not allowed.
    pub(crate) fn check(&self) -> Result<(), Error> {
        let wrong = |text: &str| text.is_empty() || text.len() > Self::MAX_BYTES || text.chars().any(char::is_control);
        match self.0.iter().position(|label| label.as_deref().is_some_and(wrong)) {
            None => Ok(()),
            Some(place) => Err(Error::Invalid(format!(
                "label {}: must be 1 to {} bytes without control characters",
                place + 1,
                Self::MAX_BYTES
            ))),
        }
    }
}

/// The order of due operations: higher first. From -2 to 2.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Priority(i8);

impl Priority {
    /// All priorities, the highest first: the order in which a worker claims.
    pub const ALL: [Self; 5] = [Self(2), Self(1), Self(0), Self(-1), Self(-2)];

    /// A priority by its number.
    ///
    /// # Errors
    /// [`Error::Invalid`] if there is no such priority.
    pub fn new(number: i64) -> Result<Self, Error> {
        let known = Self::ALL.into_iter().find(|priority| i64::from(priority.0) == number);
        known.ok_or_else(|| Error::Invalid(format!("priority: is {number}, must be -2 to 2")))
    }

    /// Its number.
    #[must_use]
    pub const fn get(self) -> i8 {
        self.0
    }
}

/// A live lease, as it is stored.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct LeaseRow {
    /// The token of its claim.
    pub token: Token,
    /// When it expires unless renewed.
    pub deadline: Timestamp,
    /// When it expires at the latest, with any number of renewals.
    pub run_until: Timestamp,
    /// The policy of its claim.
    pub terms: Policy,
    /// Whether a cancellation of the run was requested.
    pub cancelled: bool,
}

/// Newer data that arrived while the older ran or was in doubt. It runs after that is settled or resolved.
///
/// Its time, priority and policy are those of its enqueue. A claim brings none: it has the priority and the policy of
/// the data that it replaces.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Successor {
    /// The newer data's fingerprint.
    pub fingerprint: Fingerprint,
    /// The newer data's order.
    pub order: i64,
    /// The newer data, if the claim brought it.
    pub payload: Option<Bytes>,
    /// It is not to be run before this time.
    pub not_before: Option<Timestamp>,
    /// Its priority among due operations.
    pub priority: Priority,
    /// The policy of its enqueue, if it had one.
    pub terms: Option<Policy>,
}

/// The time, priority and policy of newer data as they are stored, with the order of the data that they belong to.
#[derive(Serialize, Deserialize)]
struct Terms(i64, Option<i64>, i64, Option<String>);

impl Successor {
    /// The stored form of its time, priority and policy.
    #[must_use]
    pub fn to_terms(&self) -> String {
        let not_before = self.not_before.map(Timestamp::as_micros);
        let policy = self.terms.as_ref().map(Policy::to_terms);
        serde_json::to_string(&Terms(self.order, not_before, self.priority.get().into(), policy)).unwrap_or_default()
    }

    /// With what [`Successor::to_terms`] wrote. A node of an earlier version replaces the data without its terms: those
    /// of another order are ignored.
    ///
    /// # Errors
    /// [`Error::Corrupt`] when the text is not of that form.
    pub fn with_terms(self, text: &str) -> Result<Self, Error> {
        const WRONG: Error = Error::Corrupt("the terms of newer data");
        let Terms(order, not_before, priority, policy) = serde_json::from_str(text).map_err(|_| WRONG)?;
        if order != self.order {
            return Ok(self);
        }
        Ok(Self {
            not_before: not_before.map(Timestamp::from_micros),
            priority: Priority::new(priority).map_err(|_| WRONG)?,
            terms: policy.as_deref().map(Policy::from_terms).transpose()?,
            ..self
        })
    }
}

/// One row of the ledger.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Operation {
    /// An opaque number, never used twice (it is the fence of the first claim).
    pub id: i64,
    /// The scope.
    pub scope: Scope,
    /// The caller's name for it.
    pub key: Key,
    /// Texts to find it by.
    pub labels: Labels,
    /// The hash of the payload: distinguishes a retry from a reuse of the key.
    pub fingerprint: Fingerprint,
    /// The order of the payload, for supersede-if-newer.
    pub order: Option<i64>,
    /// The input, if the claim brought it.
    pub payload: Option<Bytes>,
    /// The state.
    pub state: State,
    /// The fence of the last claim, or of the event that ended its lease.
    pub fence: Fence,
    /// Runs that ended in failure.
    pub failures: u32,
    /// Leases that expired.
    pub crashes: u32,
    /// Whether it runs again only after a person said so.
    pub parked: bool,
    /// Whether it waits and no worker tries it: it is parked, out of attempts by the policy of its last run, or left to
    /// [callers](Runner::Caller). A claim under a policy with more attempts still acquires it.
    pub never_due: bool,
    /// Whether it is final once completed, by the policy of the last claim.
    pub pinned: bool,
    /// Its priority among due operations.
    pub priority: Priority,
    /// The policy of its enqueue, if it had one: it applies to every run.
    pub terms: Option<Policy>,
    /// The last claimer; empty if the stored data was not claimed yet.
    pub owner: String,
    /// When it was first claimed or enqueued.
    pub created_at: Timestamp,
    /// When it was last claimed; 1970 if [never](Self::was_claimed).
    pub claimed_at: Timestamp,
    /// Since when its present data is tried: its first claim, or a person's decision to run it again. `None` if it was
    /// claimed when it was created, or never.
    pub tried_since: Option<Timestamp>,
    /// When it reached its settled state.
    pub settled_at: Option<Timestamp>,
    /// The end of its backoff or delay.
    pub not_before: Option<Timestamp>,
    /// The end of its retention.
    pub expires_at: Option<Timestamp>,
    /// When its data is archived.
    pub archive_at: Option<Timestamp>,
    /// Whether its data is archived: the row is a tombstone.
    pub archived: bool,
    /// When the sweep should next look at it. Written at claim, so that a settle touches no index.
    pub look_at: Option<Timestamp>,
    /// The outcome, for replays.
    pub outcome: Option<Outcome>,
    /// The error of the last failed run, or the reason of a doubt or release.
    pub error: Option<String>,
    /// Small data of a run for the next attempt.
    pub checkpoint: Option<Bytes>,
    /// The live lease; present exactly in the state processing.
    pub lease: Option<LeaseRow>,
    /// Newer data that waits for this one to settle.
    pub successor: Option<Successor>,
}

impl Operation {
    /// The number of the present or last run, from 1.
    #[must_use]
    pub fn attempt(&self) -> u32 {
        let ended = self.failures + self.crashes;
        match self.state {
            State::Failed | State::TimedOut | State::InDoubt => ended,
            State::Pending | State::Processing | State::Completed => ended + 1,
        }
    }

    /// Whether only callers that claim its key run it: no worker takes it.
    #[must_use]
    pub fn is_left_to_callers(&self) -> bool {
        self.terms.as_ref().is_some_and(|terms| terms.runner == Runner::Caller)
    }

    /// The kind under which it is due: its own, or with its first label.
    #[must_use]
    pub fn listed_kind(&self) -> Cow<'_, str> {
        let runner = self.terms.as_ref().map_or(Runner::Worker, |terms| terms.runner);
        self.labels.listed_kind(self.scope.kind(), runner)
    }

    /// Whether it waits, and only a person can have it run again: it is parked, or out of attempts by the policy of its
    /// last run.
    #[must_use]
    pub fn is_given_up(&self) -> bool {
        let exhausted = match &self.terms {
            Some(terms) if terms.runner == Runner::Caller => machine::is_exhausted(self, terms),
            _ => self.never_due,
        };
        matches!(self.state, State::Pending | State::Failed | State::TimedOut) && (self.parked || exhausted)
    }

    /// The short hash of the key, for log lines, which must not contain the key.
    #[must_use]
    pub fn short_hash(&self) -> String {
        crate::short_hash(self.scope.tenant(), self.scope.service(), self.scope.kind(), self.key.as_str())
    }

    /// Whether it is pinned and completed: nothing can change it or free its key before its retention ends.
    #[must_use]
    pub(crate) fn is_final(&self, now: Timestamp) -> bool {
        self.pinned && self.state == State::Completed && !self.has_expired(now)
    }

    /// Whether it was ever claimed.
    #[must_use]
    pub fn was_claimed(&self) -> bool {
        self.claimed_at != Timestamp::NEVER
    }

    /// How long it had been tried at its last claim. A delay, or a wait for a seat, before its first run does not count.
    #[must_use]
    pub fn tried_for(&self) -> Duration {
        self.claimed_at.since(self.tried_since.unwrap_or(self.created_at))
    }

    /// Whether its retention has ended, so that it counts as absent.
    #[must_use]
    pub fn has_expired(&self, now: Timestamp) -> bool {
        self.expires_at.is_some_and(|end| end <= now)
    }
}
