//! Changing operations: what the ledger needs of a database.

use std::{sync::Arc, time::Duration};

use super::{Commit, DueWake, Take, TimeSource, Transactions};
use crate::{
    Fence, Operation, Outcome, Result, Timestamp, Token, crash_point,
    journal::{Repeat, Repeats, Sighting},
    look::Group,
    machine::{Answer, Request, Verdict, Write},
};

/// The database calls of the engine. Every batch is answered in the order of its items, after it is durable. An
/// `Err` concerns the whole batch; a single item that could not be decided is answered [`Answer::Busy`].
pub trait Operations: TimeSource + Transactions {
    /// Claims, in their own commit. Sending a batch again is harmless: a claim is recognised by its token.
    fn claim(&self, batch: Vec<Arc<Request>>) -> impl Future<Output = Result<Vec<Applied>>> + Send;

    /// Writes under leases, except renewals. Sending a batch again is harmless: a write is recognised by its fence. A
    /// write whose row stays locked by another transaction is answered [`Answer::Busy`]; the others of the batch are
    /// made.
    fn write(&self, batch: Vec<LeaseWrite>) -> impl Future<Output = Result<Vec<Applied>>> + Send;

    /// Whether there is one writer. If so, claims and writes should share commits through [`flush`](Self::flush).
    fn one_writer(&self) -> bool {
        false
    }

    /// Claims and writes in one commit. Called only on a store with [one writer](Self::one_writer): two commits could
    /// end differently, and the answers of the first would be lost with the second.
    fn flush(
        &self,
        _claims: Vec<Arc<Request>>,
        _writes: Vec<LeaseWrite>,
    ) -> impl Future<Output = Result<(Vec<Applied>, Vec<Applied>)>> + Send {
        async { Err(two_commits()) }
    }

    /// Whether to retry for a while after a batch failed with this error. A store that has waited itself, or for which
    /// waiting does not help, returns false, and callers get the error at once.
    fn is_worth_asking_again(&self, error: &crate::Error) -> bool {
        error.is_transient()
    }

    /// The answer to a claim that would change nothing, read without waiting for the writer: a known key is answered at
    /// once, also while a caller's transaction is open.
    fn glimpse(&self, _request: &Arc<Request>) -> impl Future<Output = Result<Option<Applied>>> + Send {
        async { Ok(None) }
    }

    /// The leases held by claims with these tokens: token, operation and fence. It claims nothing. A node uses it to
    /// find the claims whose answers were lost.
    fn held_by(&self, tokens: Vec<Token>) -> impl Future<Output = Result<Vec<(Token, i64, Fence)>>> + Send;

    /// Renews the leases of a node in one statement. A lease whose row is locked is answered [`Answer::Busy`] at once,
    /// and delays no other.
    fn renew(&self, batch: Vec<(i64, Fence)>) -> impl Future<Output = Result<Vec<Answer>>> + Send;

    /// Writes journal notes about unusual renewals, for stores that did not do so with the renewal: the runs get their
    /// answers first.
    fn tell_renewals(&self) -> impl Future<Output = Result<()>> + Send {
        async { Ok(()) }
    }

    /// Applies a decision of a person or a probe. A person's decision is audited in the same commit.
    fn decide(
        &self,
        id: i64,
        decision: Decision,
        actor: &str,
        reason: &str,
    ) -> impl Future<Output = Result<Applied>> + Send;

    /// A write under a lease, inside a transaction: the completion that commits with its effect, or a checkpoint that
    /// commits with the rows of its step. A write with an old fence is answered [`Answer::Lost`]: roll back then.
    fn write_in(&self, tx: &Self::Tx, write: LeaseWrite) -> impl Future<Output = Result<Applied>> + Send;

    /// A claim inside the transaction of its effect (inline mode).
    fn claim_in(&self, tx: &Self::Tx, request: Arc<Request>) -> impl Future<Output = Result<Applied>> + Send;

    /// Claims of different keys inside one transaction, answered in order.
    fn claim_all_in(
        &self,
        tx: &Self::Tx,
        requests: Vec<Arc<Request>>,
    ) -> impl Future<Output = Result<Vec<Applied>>> + Send {
        async move {
            let mut answers = Vec::with_capacity(requests.len());
            for request in requests {
                answers.push(self.claim_in(tx, request).await?);
            }
            Ok(answers)
        }
    }

    /// The fenced completion and the commit, in one round trip if possible. The handle and its clones are unusable
    /// afterwards.
    fn complete_and_commit(
        &self,
        tx: &Self::Tx,
        held: &Operation,
        outcome: Outcome,
    ) -> impl Future<Output = Ended> + Send {
        complete_then_commit(self, tx, held, outcome)
    }

    /// Reads an operation after every transaction that has locked it has ended. This shows the result of a commit whose
    /// answer was lost.
    fn read_back(&self, id: i64) -> impl Future<Output = Result<Option<Operation>>> + Send;

    /// Adds repeats and answers to the journal and the counters. Returns the repeats whose operations are locked by
    /// another transaction; the caller adds them next time. Repeats of deleted operations are dropped.
    fn note_repeats(
        &self,
        repeats: Vec<SeenAgain>,
        answers: Vec<AnswerCount>,
    ) -> impl Future<Output = Result<Vec<SeenAgain>>> + Send;

    /// Claims due operations, as many as a worker has free seats for; returns the index of the want and what was
    /// acquired. Ordered by priority, then by due time, except for the `oldest` of a want. Locked rows and paused kinds
    /// are skipped. An unreadable operation, or one that the database refuses to change, is [set
    /// aside](crate::look::SetAside); one that is out of attempts by the want's policy is no longer due. Takes at most
    /// [`Take::BYTES`] of stored data, which the first operation may exceed.
    fn take_due(&self, take: Arc<Take>) -> impl Future<Output = Result<Vec<(usize, Applied)>>> + Send;

    /// Gives starts of a kind back to its rate, because their operations were released without a run. False if another
    /// node has locked the limits of the kind: nothing was given back then.
    fn give_back_starts(
        &self,
        _service: &str,
        _kind: &str,
        _starts: u32,
        _every: Duration,
    ) -> impl Future<Output = Result<bool>> + Send {
        async { Ok(true) }
    }

    /// Wakes when a commit of this process may have made an operation due.
    fn due_wake(&self) -> DueWake {
        DueWake::default()
    }
}

/// A write by the holder of a lease.
#[derive(Clone, Debug)]
pub struct LeaseWrite {
    /// The operation.
    pub id: i64,
    /// The lease's fence.
    pub fence: Fence,
    /// The write.
    pub write: Write,
}

/// The result of an event.
#[derive(Clone, Debug)]
pub struct Applied {
    /// The answer.
    pub answer: Answer,
    /// The operation after it, if the answer includes one.
    pub operation: Option<Operation>,
    /// The database's time of the decision.
    pub now: Timestamp,
}

impl Applied {
    /// Nothing was decided, and the event can be sent again: see [`Answer::Busy`]. With the row and the time of
    /// reading, if it was read.
    #[must_use]
    pub fn busy(read: Option<(Operation, Timestamp)>) -> Self {
        let (operation, now) = read.map_or((None, Timestamp::from_micros(0)), |(row, now)| (Some(row), now));
        Self { answer: Answer::Busy, operation, now }
    }

    /// The result, unless it is busy.
    ///
    /// # Errors
    /// [`Error::Unavailable`](crate::Error::Unavailable) if nothing was decided.
    pub fn decided(self) -> Result<Self> {
        match self.answer {
            Answer::Busy => Err(crate::Error::Unavailable("another transaction holds the row; ask again".into())),
            _ => Ok(self),
        }
    }
}

/// A person's or a probe's action.
#[derive(Clone, Debug)]
pub enum Decision {
    /// A verdict: how it ended, or that it should run again.
    Resolve {
        /// The verdict.
        verdict: Verdict,
        /// Only if the operation still has this fence.
        expected: Option<Fence>,
    },
    /// A verdict of a probe: as [`Decision::Resolve`], but not audited, because no person acted.
    Found {
        /// The verdict.
        verdict: Verdict,
        /// Only if the operation still has this fence.
        expected: Option<Fence>,
    },
    /// Withdraw a pending operation, or ask a run to stop.
    Cancel,
    /// Delete the operation and free its key.
    Purge,
}

/// Repeated claims of one operation since the last flush.
#[derive(Clone, Debug)]
pub struct SeenAgain {
    /// The operation.
    pub id: i64,
    /// Duplicate or conflict.
    pub repeat: Repeat,
    /// The number, with the first and last.
    pub repeats: Repeats,
}

impl SeenAgain {
    /// Adds one.
    #[must_use]
    pub fn once(id: i64, repeat: Repeat, sighting: Sighting) -> Self {
        let mut repeats = Repeats::default();
        repeats.add(sighting);
        Self { id, repeat, repeats }
    }
}

/// Claims that did not get the lease since the last flush, by answer.
#[derive(Clone, Debug)]
pub struct AnswerCount {
    /// The group.
    pub group: Group,
    /// The answer's word.
    pub answer: &'static str,
    /// How many.
    pub n: i64,
}

/// The result of a commit that completes an operation.
#[derive(Clone, Debug)]
pub enum Ended {
    /// The effect and the completion are durable.
    Committed(Box<Applied>),
    /// The lease was lost; nothing was committed.
    Lost,
    /// The database refused the writes; nothing was committed.
    Refused(String),
    /// A transient failure of the database; nothing was committed.
    Unavailable(String),
    /// The connection was lost during the commit: it may or may not be durable.
    Unknown {
        /// The last error.
        why: String,
        /// Whether newer data waits, if it is durable.
        successor: bool,
    },
}

/// Completes an operation in a transaction, then commits: for stores that cannot do both in one round trip, and if
/// newer data may wait.
pub async fn complete_then_commit<S: Operations>(store: &S, tx: &S::Tx, held: &Operation, outcome: Outcome) -> Ended {
    let write = LeaseWrite { id: held.id, fence: held.fence, write: Write::Complete(outcome) };
    let (applied, successor) = match store.write_in(tx, write).await {
        Ok(applied @ Applied { answer: Answer::Settled { successor }, .. }) => (applied, successor),
        Ok(_) => {
            store.roll_back(tx).await;
            return Ended::Lost;
        }
        Err(error) => {
            store.roll_back(tx).await;
            return match error.is_transient() {
                true => Ended::Unavailable(error.to_string()),
                false => Ended::Refused(error.to_string()),
            };
        }
    };
    crash_point!("atomic.before_commit");
    match store.commit(tx).await {
        Commit::Done => Ended::Committed(Box::new(applied)),
        Commit::Refused(why) => Ended::Refused(why),
        Commit::Unavailable(why) => Ended::Unavailable(why),
        Commit::Unknown(why) => Ended::Unknown { why, successor },
    }
}

/// The error of a store with several writers for claims and writes that should share a commit.
#[must_use]
pub fn two_commits() -> crate::Error {
    crate::Error::Invalid("claims and writes share a commit only where there is one writer".into())
}
