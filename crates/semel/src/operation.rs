//! Operation: one row of the ledger, something that must take effect once.

use std::{fmt, str::FromStr};

use bytes::Bytes;

use crate::{Error, Fingerprint, Key, Policy, Scope, time::Timestamp};

/// A number from one database-wide counter that never goes back. New with every claim; every
/// later write of a lease names it, and a write that names an old one is refused.
///
/// It does not come from the row: a row may be purged and made again under the same key, and a
/// zombie of the first one must not match the second.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Fence(pub i64);

impl fmt::Display for Fence {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// A random number that a claim carries, so that one whose answer was lost is recognised as its
/// own when it is sent again.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Token(pub [u8; 16]);

impl Token {
    /// A new random token.
    ///
    /// # Errors
    /// [`Error::Unavailable`] when the system gives no randomness.
    pub fn random() -> Result<Self, Error> {
        DRAWN.with_borrow_mut(|drawn| {
            if drawn.is_empty() {
                let mut bytes = [0; 16 * AT_ONCE];
                getrandom::fill(&mut bytes).map_err(|e| Error::Unavailable(format!("no randomness: {e}")))?;
                drawn.extend(bytes.as_chunks().0);
            }
            drawn.pop().map(Self).ok_or(Error::Contradiction("no token was drawn"))
        })
    }
}

/// How many tokens are drawn at once: asking the system for each would be a tenth of what a replay from memory costs.
const AT_ONCE: usize = 64;

thread_local! {
    /// Tokens that nobody has got yet.
    static DRAWN: std::cell::RefCell<Vec<[u8; 16]>> = const { std::cell::RefCell::new(Vec::new()) };
}

/// Where an operation is in its life. The rules are in [`machine`](crate::machine).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum State {
    /// Known and waiting to be run: enqueued, released, put back by a person, or newer data whose
    /// predecessor has settled.
    Pending,
    /// Somebody holds the lease.
    Processing,
    /// It has taken effect; the outcome is kept (or known not to be).
    Completed,
    /// The last run failed.
    Failed,
    /// The last lease ended without a word and the policy lets it run again.
    TimedOut,
    /// It may or may not have taken effect. Never ends by itself.
    InDoubt,
}

impl State {
    /// Every state, in the order of the story.
    pub const ALL: [Self; 6] =
        [Self::Pending, Self::Processing, Self::Completed, Self::Failed, Self::TimedOut, Self::InDoubt];

    /// The word for it, in SQL, JSON, metrics and logs.
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

/// What is stored at completion and handed back on every replay.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Outcome {
    /// Whether `body` is the whole outcome. When not (it was too large, or has been archived),
    /// `body` may still hold a short note, such as where the result can be found.
    pub kept: bool,
    /// The outcome's bytes. Empty bytes that were kept are an outcome like any other.
    pub body: Bytes,
}

impl Outcome {
    /// An outcome to be replayed as it is.
    #[must_use]
    pub fn kept(body: impl Into<Bytes>) -> Self {
        Self { kept: true, body: body.into() }
    }

    /// The largest outcome that is kept.
    pub const MAX_BYTES: usize = 8 << 20;

    /// The outcome as it is stored: one that is too large is not kept, which is no reason to fail
    /// what took effect.
    #[must_use]
    pub(crate) fn to_store(&self) -> Self {
        match self.body.len() {
            0..=Self::MAX_BYTES => self.clone(),
            _ => Self::not_kept("the outcome was too large to be kept"),
        }
    }

    /// The fact that it took effect, without the outcome, and a note.
    #[must_use]
    pub fn not_kept(note: impl Into<Bytes>) -> Self {
        Self { kept: false, body: note.into() }
    }
}

/// Up to four small text fields to find operations by.
///
/// The first two are also dimensions of the counters: put few-valued things there (an event
/// type, a function), and many-valued ones (a process instance, a customer) in the last two.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct Labels(pub [Option<String>; 4]);

impl Labels {
    /// The longest label, in bytes: an index entry must stay small.
    pub const MAX_BYTES: usize = 128;

    /// Sets the label in slot 1 to 4.
    ///
    /// # Errors
    /// [`Error::Invalid`] when there is no such slot or the text is not allowed.
    pub fn with(mut self, slot: usize, text: &str) -> Result<Self, Error> {
        let place = slot
            .checked_sub(1)
            .and_then(|i| self.0.get_mut(i))
            .ok_or_else(|| Error::Invalid(format!("label {slot}: the slots are 1 to 4")))?;
        *place = Some(text.to_owned());
        self.check()?;
        Ok(self)
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

/// Which of several operations that are due runs first: the higher one. From -2 to 2.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Priority(i8);

impl Priority {
    /// All of them, the highest first: the order in which a worker looks for what is due.
    pub const ALL: [Self; 5] = [Self(2), Self(1), Self(0), Self(-1), Self(-2)];

    /// A priority by its number.
    ///
    /// # Errors
    /// [`Error::Invalid`] when there is no such priority.
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

/// The live right to execute an operation, as the row holds it.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct LeaseRow {
    /// The claim that got it.
    pub token: Token,
    /// When it ends unless renewed.
    pub deadline: Timestamp,
    /// When it ends however often it is renewed.
    pub run_until: Timestamp,
    /// The policy of the claim that got it.
    pub terms: Policy,
    /// Whether somebody has asked for the run to be cancelled.
    pub cancelled: bool,
}

/// Newer data that arrived while the older ran; it runs when that one settles.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Successor {
    /// The newer data's fingerprint.
    pub fingerprint: Fingerprint,
    /// The newer data's order.
    pub order: i64,
    /// The newer data, if the claim brought it.
    pub payload: Option<Bytes>,
}

/// One row of the ledger.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Operation {
    /// An opaque number, never used twice (it is the fence of the first claim).
    pub id: i64,
    /// Whose operation, of which kind.
    pub scope: Scope,
    /// The caller's name for it.
    pub key: Key,
    /// What to find it by.
    pub labels: Labels,
    /// Tells a retry from a reuse of the key.
    pub fingerprint: Fingerprint,
    /// The payload's place in time, for supersede-if-newer.
    pub order: Option<i64>,
    /// The input, if the claim brought it.
    pub payload: Option<Bytes>,
    /// Where it is in its life.
    pub state: State,
    /// The fence of the last claim or of the last change made over its head.
    pub fence: Fence,
    /// Runs that ended in failure.
    pub failures: u32,
    /// Leases that ended without a word.
    pub crashes: u32,
    /// Whether it runs again only when a person says so.
    pub parked: bool,
    /// Whether it stays as it is once it has completed, by the policy of the last claim.
    pub pinned: bool,
    /// Its place among what is due.
    pub priority: Priority,
    /// The policy that it was enqueued with, if it was: every run goes by this one.
    pub terms: Option<Policy>,
    /// Who claimed it last; empty if nobody has claimed the data that is stored now.
    pub owner: String,
    /// When it was first claimed, or enqueued.
    pub created_at: Timestamp,
    /// When it was last claimed; [`Timestamp::NEVER`] if it was only enqueued so far.
    pub claimed_at: Timestamp,
    /// When it reached the settled state it is in.
    pub settled_at: Option<Timestamp>,
    /// The end of its backoff.
    pub not_before: Option<Timestamp>,
    /// The end of its retention.
    pub expires_at: Option<Timestamp>,
    /// When its data goes to the archive.
    pub archive_at: Option<Timestamp>,
    /// Whether its data has gone to the archive: what is left is the tombstone.
    pub archived: bool,
    /// When the sweep should next look at it. Written at claim, so that settling touches no index.
    pub look_at: Option<Timestamp>,
    /// What is replayed.
    pub outcome: Option<Outcome>,
    /// What the last failed run said, or why it is in doubt.
    pub error: Option<String>,
    /// Small data that a run leaves for the next attempt.
    pub checkpoint: Option<Bytes>,
    /// The live lease; there is one exactly while the state is processing.
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

    /// What stands for the key in a log line, where the key itself must not be.
    #[must_use]
    pub fn short_hash(&self) -> String {
        crate::short_hash(self.scope.tenant(), self.scope.service(), self.scope.kind(), self.key.as_str())
    }

    /// Whether nobody can change it or free its key any more before its retention ends.
    #[must_use]
    pub fn is_final(&self, now: Timestamp) -> bool {
        self.pinned && self.state == State::Completed && !self.has_expired(now)
    }

    /// Whether any worker has claimed it yet.
    #[must_use]
    pub fn was_claimed(&self) -> bool {
        self.claimed_at != Timestamp::NEVER
    }

    /// Whether its retention is over, so that it counts as absent.
    #[must_use]
    pub fn has_expired(&self, now: Timestamp) -> bool {
        self.expires_at.is_some_and(|end| end <= now)
    }
}
