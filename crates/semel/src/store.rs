//! The `Store` trait: what the engine asks of a database.
//!
//! A store keeps rows and moves them by the rules of [`machine`](crate::machine); it decides
//! nothing itself. The conformance suite in `semel-testkit` is its definition.

use std::{sync::Arc, time::Duration};

use crate::{
    Fence, Operation, Outcome, Policy, Result, Scope, State, Timestamp, Token, crash_point,
    journal::{Note, Repeat, Repeats, Sighting},
    look::{Count, DayTally, Due, DueKind, Filter, Group, Listing, Page, Tallied, Tally, TallyFilter},
    machine::{Answer, Request, Verdict, Write},
    messaging::Wake,
};

/// A write by the holder of a lease.
#[derive(Clone, Debug)]
pub struct LeaseWrite {
    /// The operation.
    pub id: i64,
    /// The lease's fence.
    pub fence: Fence,
    /// What is written.
    pub write: Write,
}

/// What became of an event.
#[derive(Clone, Debug)]
pub struct Applied {
    /// The answer.
    pub answer: Answer,
    /// The operation after it, where the answer tells of one.
    pub operation: Option<Operation>,
    /// The database's time at which it was decided.
    pub now: Timestamp,
}

impl Applied {
    /// Nothing was decided, and the same can be sent again: see [`Answer::Busy`]. With the row as it was read at a time,
    /// if it was.
    #[must_use]
    pub fn busy(read: Option<(Operation, Timestamp)>) -> Self {
        let (operation, now) = read.map_or((None, Timestamp::from_micros(0)), |(row, now)| (Some(row), now));
        Self { answer: Answer::Busy, operation, now }
    }

    /// What was decided.
    ///
    /// # Errors
    /// [`Error::Unavailable`](crate::Error::Unavailable) when nothing was.
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
    /// How it ended, or that it should run again.
    Resolve {
        /// What is decided.
        verdict: Verdict,
        /// Only if the operation still has this fence.
        expected: Option<Fence>,
    },
    /// What a probe found: as [`Decision::Resolve`], but no person's action, so it is not in the audit.
    Found {
        /// What is found.
        verdict: Verdict,
        /// Only if the operation still has this fence.
        expected: Option<Fence>,
    },
    /// Withdraw what waits, or ask a run to stop.
    Cancel,
    /// Free the key and forget the operation.
    Purge,
}

/// What a worker has free hands for, of one kind of work and tenant.
#[derive(Clone, Debug)]
pub struct Want {
    /// Whose operations, of which kind.
    pub scope: Scope,
    /// How many at most.
    pub most: u32,
    /// How many of these are to be the longest due of all, whatever their priority.
    pub oldest: u32,
    /// The rules for those that were enqueued without any.
    pub policy: Policy,
    /// What the fleet may do of this kind.
    pub limits: Limits,
}

/// What all nodes together may do of a kind of work.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Limits {
    /// How many may run at the same time.
    pub at_once: Option<u32>,
    /// How long between two starts: a rate.
    pub every: Option<Duration>,
}

impl Limits {
    /// Whether there is no limit.
    #[must_use]
    pub fn is_none(&self) -> bool {
        *self == Self::default()
    }
}

/// A look for work that claims what it finds.
#[derive(Clone, Debug)]
pub struct Take {
    /// What there are free hands for. No two are of the same scope.
    pub wants: Vec<Want>,
    /// Who asks, for the story.
    pub owner: String,
    /// The mark of all leases that it gets: by this they are found again if the answer is lost.
    pub token: Token,
}

/// What a waiter needs to know about the operation it waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Glance {
    /// The operation.
    pub id: i64,
    /// Where it is in its life.
    pub state: State,
    /// Its fence.
    pub fence: Fence,
    /// Whether it is running with a lease that has not lapsed.
    pub live: bool,
}

/// What one round of the sweep did.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Swept {
    /// Leases that had lapsed and were ended.
    pub lapsed: u64,
    /// Operations past their retention that were removed.
    pub expired: u64,
    /// Operations whose data went to the archive.
    pub archived: u64,
    /// Counter rows that were folded.
    pub folded: u64,
    /// Rows that could not be read or written, and were [set aside](crate::look::SetAside).
    pub set_aside: u64,
    /// Phases that failed. Each phase has its turn in every round, whatever became of the others.
    pub troubles: Vec<Trouble>,
    /// Whether a limit was reached, so that there may be more to do at once.
    pub more: bool,
}

/// A phase of the sweep that failed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Trouble {
    /// Which phase.
    pub phase: &'static str,
    /// What the store said.
    pub why: String,
}

impl std::ops::AddAssign for Swept {
    fn add_assign(&mut self, other: Self) {
        self.lapsed += other.lapsed;
        self.expired += other.expired;
        self.archived += other.archived;
        self.folded += other.folded;
        self.set_aside += other.set_aside;
        for trouble in other.troubles {
            if !self.troubles.contains(&trouble) {
                self.troubles.push(trouble);
            }
        }
        self.more = other.more;
    }
}

/// Repeated claims of one operation since the last flush.
#[derive(Clone, Debug)]
pub struct SeenAgain {
    /// The operation.
    pub id: i64,
    /// In which way it came again.
    pub repeat: Repeat,
    /// How often, with the ends.
    pub repeats: Repeats,
}

/// How many notes are told of an operation: the newest. What is put back for days has more.
pub const MOST_NOTES: usize = 1000;

/// The newest notes of an operation, oldest first, and in which ways its key came again.
pub type Story = (Vec<Note>, Vec<(Repeat, Repeats)>);

/// Claims that did not get the lease since the last flush, by answer.
#[derive(Clone, Debug)]
pub struct AnswerCount {
    /// By what.
    pub group: Group,
    /// The answer's word.
    pub answer: &'static str,
    /// How many.
    pub n: i64,
}

/// How a commit can end that did not say so.
#[derive(Clone, Debug)]
pub enum Commit {
    /// It is durable.
    Done,
    /// The connection was lost on the way: it may or may not be durable. Ask with
    /// [`Store::read_back`], never guess.
    Unknown(String),
    /// The database refused what is in it, and would do so again; nothing of it happened.
    Refused(String),
    /// The database could not, for trouble of its own (a deadlock, a full disk); nothing of it happened, and the same
    /// may succeed later.
    Unavailable(String),
}

/// How a transaction ended that was to complete its operation.
#[derive(Clone, Debug)]
pub enum Ended {
    /// The effect and the completion are durable.
    Committed(Box<Applied>),
    /// The lease was lost; nothing of it happened.
    Lost,
    /// The database refused what is in it; nothing of it happened.
    Refused(String),
    /// The database could not, for trouble of its own; nothing of it happened.
    Unavailable(String),
    /// The connection was lost on the way: it may or may not be durable.
    Unknown {
        /// What was heard last.
        why: String,
        /// Whether newer data waits, should it be durable.
        successor: bool,
    },
}

/// Completes an operation in a transaction, then commits that: for stores that cannot do both in one trip, and
/// whenever newer data may be waiting.
pub async fn complete_then_commit<S: Store>(store: &S, tx: &S::Tx, held: &Operation, outcome: Outcome) -> Ended {
    let (applied, successor) = match store.complete_in(tx, held.id, held.fence, outcome).await {
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

/// What the engine asks of a database. All batches are answered in the order of their items, and
/// only when they are durable. An `Err` is about the whole batch; an item that alone could not be decided about is
/// answered [`Answer::Busy`].
pub trait Store: Clone + Send + Sync + 'static {
    /// A transaction of a caller: a handle that can be shared with the code that works in it.
    type Tx: Clone + Send + Sync + 'static;

    /// Claims, in their own commit. Sending a batch again is harmless: a claim is known by its
    /// token.
    fn claim(&self, batch: Vec<Arc<Request>>) -> impl Future<Output = Result<Vec<Applied>>> + Send;

    /// Writes under leases, renewals excepted. Sending a batch again is harmless: a write is known
    /// by its fence. One whose row another transaction has locked for longer than a moment is answered
    /// [`Answer::Busy`]; the others of the batch are written.
    fn write(&self, batch: Vec<LeaseWrite>) -> impl Future<Output = Result<Vec<Applied>>> + Send;

    /// Whether there is one writer: then claims and writes gain by sharing commits, and come together
    /// in [`flush`](Self::flush).
    fn one_writer(&self) -> bool {
        false
    }

    /// Claims and writes together, in one commit. Only a store with [one writer](Self::one_writer) is asked so: two commits
    /// could end differently, and the answers of the first would be lost with the second.
    fn flush(
        &self,
        _claims: Vec<Arc<Request>>,
        _writes: Vec<LeaseWrite>,
    ) -> impl Future<Output = Result<(Vec<Applied>, Vec<Applied>)>> + Send {
        async { Err(two_commits()) }
    }

    /// Whether to ask again, for a while, after a batch failed so. A store that has waited itself, or that knows that
    /// waiting does not help, says no, and callers are told at once.
    fn is_worth_asking_again(&self, error: &crate::Error) -> bool {
        error.is_transient()
    }

    /// The answer to a claim that would change nothing, read without waiting for a writer, where claiming
    /// would have to: a known key is answered at once also while a caller's transaction is open.
    fn glimpse(&self, _request: &Arc<Request>) -> impl Future<Output = Result<Option<Applied>>> + Send {
        async { Ok(None) }
    }

    /// The leases that claims with these tokens hold: token, operation and fence. It claims nothing: this is how a node
    /// learns what became of claims whose answers were lost.
    fn held_by(&self, tokens: Vec<Token>) -> impl Future<Output = Result<Vec<(Token, i64, Fence)>>> + Send;

    /// Renews leases: one statement for all of a node. A lease whose row another transaction has locked is answered
    /// [`Answer::Busy`] at once, and keeps no other one waiting.
    fn renew(&self, batch: Vec<(i64, Fence)>) -> impl Future<Output = Result<Vec<Answer>>> + Send;

    /// Writes into the journal what was out of the ordinary about renewals, where a store has not done so with the
    /// renewal itself: runs hear of their leases first.
    fn tell_renewals(&self) -> impl Future<Output = Result<()>> + Send {
        async { Ok(()) }
    }

    /// Carries out a person's or a probe's decision. What a person decided is audited in the same commit.
    fn decide(
        &self,
        id: i64,
        decision: Decision,
        actor: &str,
        reason: &str,
    ) -> impl Future<Output = Result<Applied>> + Send;

    /// The longest that a transaction of a caller may be open, however long its lease.
    fn longest_transaction(&self) -> Duration;

    /// Opens a transaction that is rolled back by itself after `limit`.
    fn begin(&self, limit: Duration) -> impl Future<Output = Result<Self::Tx>> + Send;

    /// The fenced completion, inside a transaction.
    fn complete_in(
        &self,
        tx: &Self::Tx,
        id: i64,
        fence: Fence,
        outcome: Outcome,
    ) -> impl Future<Output = Result<Applied>> + Send;

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

    /// The fenced completion of an operation that is held, and the commit: in one trip where that can be done.
    /// After this the handle and its clones are dead.
    fn complete_and_commit(
        &self,
        tx: &Self::Tx,
        held: &Operation,
        outcome: Outcome,
    ) -> impl Future<Output = Ended> + Send {
        complete_then_commit(self, tx, held, outcome)
    }

    /// Commits. After this the handle and its clones are dead.
    fn commit(&self, tx: &Self::Tx) -> impl Future<Output = Commit> + Send;

    /// Rolls back. After this the handle and its clones are dead.
    fn roll_back(&self, tx: &Self::Tx) -> impl Future<Output = ()> + Send;

    /// Reads an operation after every transaction that is at it has ended: the way to learn what
    /// became of a commit whose answer was lost.
    fn read_back(&self, id: i64) -> impl Future<Output = Result<Option<Operation>>> + Send;

    /// One bounded round of the sweep: a turn for each of its phases. A row that cannot be read or written is set
    /// aside and the others go on; a phase that fails is told of in [`Swept::troubles`], and the others have their
    /// turn. An error means that no phase got anywhere.
    fn sweep(&self, limit: u32) -> impl Future<Output = Result<Swept>> + Send;

    /// Adds repeats and answers to the journal and the counters. Returns the repeats that could not be added, because
    /// another transaction has their operations locked: they are for the next time. What is about an operation that is
    /// gone is dropped.
    fn note_repeats(
        &self,
        repeats: Vec<SeenAgain>,
        answers: Vec<AnswerCount>,
    ) -> impl Future<Output = Result<Vec<SeenAgain>>> + Send;

    /// A glance at operations that are waited for.
    fn glance(&self, ids: Vec<i64>) -> impl Future<Output = Result<Vec<Glance>>> + Send;

    /// The database's time.
    fn now(&self) -> impl Future<Output = Result<Timestamp>> + Send;

    /// One operation by id, within a tenant; with its archived data where there is some.
    fn by_id(&self, tenant: &str, id: i64) -> impl Future<Output = Result<Option<Operation>>> + Send;

    /// One operation by key; with its archived data where there is some.
    fn by_key(&self, scope: &Scope, key: &crate::Key) -> impl Future<Output = Result<Option<Operation>>> + Send;

    /// What nobody runs and may be claimed now, of one scope, the longest due first: what [`due`](crate::machine::due)
    /// says of each, written with the change that made it so. At most `limit` of them, within the bounds of [`Due`].
    /// It is a look and no claim: others may see the same ones. One that cannot be read is [set
    /// aside](crate::look::SetAside) and left out.
    fn due(&self, scope: &Scope, limit: u32) -> impl Future<Output = Result<Due>> + Send;

    /// The kinds of a service of which something is due or will be, of each tenant, in the order of kind and tenant (by
    /// bytes), from the first one after `after`; at most [`DueKind::MOST`]. It costs by the number of kinds, however much there is of each. What has
    /// expired is still counted here until the sweep has been by.
    fn due_kinds(&self, service: &str, after: (&str, &str)) -> impl Future<Output = Result<Vec<DueKind>>> + Send;

    /// Claims what is due, for as many as a worker has free hands for: the number of the want, and what was acquired. By
    /// priority and then by how long it is due, but for the oldest that a want names; what another transaction holds is
    /// passed over. Kinds that are paused are left alone. One that cannot be read is [set aside](crate::look::SetAside),
    /// one that is out of attempts by the want's policy is no longer due. It takes no more than
    /// [`Due::BYTES`](crate::look::Due::BYTES) of stored data at once, but for the first.
    fn take_due(&self, take: Arc<Take>) -> impl Future<Output = Result<Vec<(usize, Applied)>>> + Send;

    /// Is woken when something may have become due by a commit of this process.
    fn due_wake(&self) -> Wake {
        Wake::default()
    }

    /// Takes an operation off what is due, if it still has this fence: a claim was told that it is exhausted, by a
    /// policy that allows less than the one it ran under.
    fn not_due(&self, id: i64, fence: Fence) -> impl Future<Output = Result<()>> + Send;

    /// A page of operations. It reads what runs, or what nobody runs and has not completed, where a state says so;
    /// else an index by label, the last one that is set, or by scope, from the newest on until the page is full. What
    /// has been archived lies at the old end of that, and a last page of what has not reads over all of it. One that
    /// cannot be read is listed as such.
    fn list(&self, filter: &Filter, page: Page) -> impl Future<Output = Result<Listing>> + Send;

    /// The notes of an operation, oldest first, and its repeats. Of more than [`MOST_NOTES`] it tells the newest.
    fn journal(&self, id: i64) -> impl Future<Output = Result<Story>> + Send;

    /// The counters of a tenant since an hour, folded and not yet folded.
    fn counts(&self, tenant: &str, since_hour: i64) -> impl Future<Output = Result<Vec<Count>>> + Send;

    /// The counters of a tenant added up over hours, by what was counted and what [`TallyBy`](crate::look::TallyBy) says;
    /// folded and not yet folded, in one snapshot. It reads the tenant's counters of these hours and what the sweep has yet to fold,
    /// and no operation: an hour of millions costs what an hour of one does.
    fn tally(&self, filter: &TallyFilter) -> impl Future<Output = Result<Tallied<Tally>>> + Send;

    /// As [`tally`](Self::tally), by day and what was counted.
    fn tally_days(&self, filter: &TallyFilter) -> impl Future<Output = Result<Tallied<DayTally>>> + Send;
}

impl SeenAgain {
    /// One more of them.
    #[must_use]
    pub fn once(id: i64, repeat: Repeat, sighting: Sighting) -> Self {
        let mut repeats = Repeats::default();
        repeats.add(sighting);
        Self { id, repeat, repeats }
    }
}

/// What a store with several writers says to claims and writes that should share a commit.
#[must_use]
pub fn two_commits() -> crate::Error {
    crate::Error::Invalid("claims and writes share a commit only where there is one writer".into())
}
