//! Atomic mode: the effect and its completion commit together.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use tokio::sync::watch;

use crate::{
    Claim, Error, Lease, Ledger, Outcome, Result, State, Uptime, Work, crash_point,
    lease::Settled,
    ledger::IN_TRANSACTION,
    log,
    machine::{Answer, Failure, Write, is_bare},
    messaging::Origin,
    renewer::Renewal,
    run::{Context, Ran, RanOne, Unfinished, in_own_task, run_successors},
    store::{Commit, Ended, LeaseWrite, Store},
};

/// How long a run waits, at least, that the store could not commit: by then a deadlock is over, and a server that is
/// away is not asked without a pause.
const A_MOMENT: Duration = Duration::from_secs(1);

/// And how long at most.
const A_MINUTE: Duration = Duration::from_secs(60);

/// How the transaction part of a run ended.
enum Effect {
    /// It is durable.
    Committed {
        outcome: Outcome,
        /// Newer data waits.
        successor: bool,
    },
    /// It did not happen, and this is what the ledger should be told.
    RolledBack(Write),
    /// The lease was lost; it did not happen.
    Lost,
}

impl<S: Store> Ledger<S> {
    /// Claims, and if this caller is the one, runs `handler` inside one transaction that also
    /// stores the outcome: business rows and completion become durable together, or not at all.
    /// The last statement of the transaction names the fence, so the effect of a run whose lease
    /// was lost never happens.
    ///
    /// The handler may use only the transaction it is given; a ledger refuses calls from inside.
    /// It has as long as the lease, and on SQLite five seconds: there it holds the only writer.
    ///
    /// What the store cannot commit for trouble of its own (a deadlock, a full disk, a lost connection) has not
    /// happened and is put back for a while, at no cost of an attempt. What it refuses, as a row that breaks a
    /// constraint, is a failure.
    ///
    /// # Errors
    /// As [`Ledger::claim`]; [`Error::OutcomeUnknown`] when the connection was lost during the
    /// commit and the store could not be asked what became of it.
    pub async fn run_atomic<F, Fut>(&self, work: Work, handler: F) -> Result<Claim<Ran>>
    where
        F: Fn(Context<S>, S::Tx) -> Fut + Send + Sync + 'static,
        Fut: Future<Output = Result<Outcome, Unfinished>> + Send + 'static,
    {
        let ledger = self.clone();
        in_own_task(async move {
            // Counted from before the claim: a ledger that stops must not miss a run about to begin.
            let _counted = ledger.enter();
            match ledger.claim(work).await?.acquired() {
                Ok(lease) => Ok(Claim::Acquired(lease.run_atomic_all(Arc::new(handler)).await?)),
                Err(other) => Ok(other),
            }
        })
        .await
    }

    /// As [`Ledger::run_atomic`], but while somebody else is at it, waits up to `up_to` first.
    ///
    /// # Errors
    /// As [`Ledger::run_atomic`].
    pub async fn run_atomic_or_wait<F, Fut>(&self, work: Work, up_to: Duration, handler: F) -> Result<Claim<Ran>>
    where
        F: Fn(Context<S>, S::Tx) -> Fut + Send + Sync + 'static,
        Fut: Future<Output = Result<Outcome, Unfinished>> + Send + 'static,
    {
        let ledger = self.clone();
        in_own_task(async move {
            // Counted from before the claim: a ledger that stops must not miss a run about to begin.
            let _counted = ledger.enter();
            match ledger.claim_or_wait(work, up_to).await?.acquired() {
                Ok(lease) => Ok(Claim::Acquired(lease.run_atomic_all(Arc::new(handler)).await?)),
                Err(other) => Ok(other),
            }
        })
        .await
    }

    /// Runs `handler` in a transaction without any key: its `Ok` commits, its `Err` rolls back, and
    /// either is handed back once that is so. Like a run, it goes on when its caller goes away, has as
    /// long as a transaction may take, and is waited for when the ledger stops.
    ///
    /// # Errors
    /// [`Error::Unavailable`] when there is no transaction to be had, or none could be committed for trouble of the
    /// store's own; [`Error::Refused`] when what is in it was refused; [`Error::OutcomeUnknown`] when the connection
    /// was lost during the commit.
    pub async fn transact<F, Fut, T>(&self, handler: F) -> Result<T>
    where
        F: FnOnce(S::Tx) -> Fut + Send + 'static,
        Fut: Future<Output = Result<T, T>> + Send,
        T: Send + 'static,
    {
        if self.is_stopping() {
            return Err(Error::Stopping);
        }
        let (ledger, counted) = (self.clone(), self.enter());
        in_own_task(async move {
            let _counted = counted;
            let store = ledger.store();
            let limit = store.longest_transaction();
            let tx = store.begin(limit).await?;
            let work = IN_TRANSACTION.scope((), handler(tx.clone()));
            match tokio::time::timeout(limit, work).await {
                Ok(Ok(done)) => match store.commit(&tx).await {
                    Commit::Done => Ok(done),
                    Commit::Refused(why) => Err(Error::Refused(why)),
                    Commit::Unavailable(why) => Err(Error::Unavailable(why)),
                    Commit::Unknown(why) => Err(Error::OutcomeUnknown(why)),
                },
                Ok(Err(undone)) => {
                    store.roll_back(&tx).await;
                    Ok(undone)
                }
                Err(_) => {
                    store.roll_back(&tx).await;
                    Err(Error::Refused(format!("the transaction was open for more than {limit:?}")))
                }
            }
        })
        .await
    }

    /// Inline mode: claims inside the transaction of the effect, with one commit for both. For
    /// short work in the database only. The answer acquired means: go on with the effect, then
    /// commit; whoever else brings the same key waits for that commit, and takes over if it is
    /// rolled back.
    ///
    /// # Errors
    /// As [`Ledger::claim`]. The transaction should be rolled back then.
    pub async fn claim_inline(&self, tx: &S::Tx, work: Work) -> Result<Claim<()>> {
        let request = Arc::new(work.into_request(self.owner())?);
        let applied = self.store().claim_in(tx, request.clone()).await?;
        let claim = Claim::from_applied(applied)?;
        self.note(&claim, &request);
        Ok(claim.map(|_| ()))
    }

    /// Several claims as [`Ledger::claim_inline`] makes one, in one go. No two of them may have the same scope and key.
    /// What is acquired is told with its id and fence, for the messages that are put in the same transaction.
    ///
    /// # Errors
    /// As [`Ledger::claim_inline`].
    pub async fn claim_all_inline(&self, tx: &S::Tx, works: Vec<Work>) -> Result<Vec<Claim<Origin>>> {
        let requests = works.into_iter().map(|work| Ok(Arc::new(work.into_request(self.owner())?)));
        let requests = requests.collect::<Result<Vec<_>>>()?;
        let applied = self.store().claim_all_in(tx, requests.clone()).await?;
        let claims = applied.into_iter().zip(&requests).map(|(applied, request)| {
            let claim = Claim::from_applied(applied)?;
            self.note(&claim, request);
            Ok(claim.map(|op| Origin { operation: op.id, fence: op.fence }))
        });
        claims.collect()
    }
}

impl<S: Store> Lease<S> {
    /// Runs `handler` inside one transaction under this lease, as [`Ledger::run_atomic`] does under the
    /// one that it claims.
    ///
    /// # Errors
    /// As [`Ledger::run_atomic`].
    pub async fn run_atomic<F, Fut>(self, handler: F) -> Result<Ran>
    where
        F: Fn(Context<S>, S::Tx) -> Fut + Send + Sync + 'static,
        Fut: Future<Output = Result<Outcome, Unfinished>> + Send + 'static,
    {
        let counted = self.ledger().enter();
        in_own_task(async move {
            let _counted = counted;
            self.run_atomic_all(Arc::new(handler)).await
        })
        .await
    }

    async fn run_atomic_all<F, Fut>(self, handler: Arc<F>) -> Result<Ran>
    where
        F: Fn(Context<S>, S::Tx) -> Fut + Send + Sync + 'static,
        Fut: Future<Output = Result<Outcome, Unfinished>> + Send + 'static,
    {
        let (ledger, operation) = (self.ledger().clone(), self.operation().clone());
        let (ran, successor) = self.run_atomic_one(handler.clone()).await?;
        if successor {
            run_successors(ledger, operation, move |lease| lease.run_atomic_one(handler.clone()));
        }
        Ok(ran)
    }

    async fn run_atomic_one<F, Fut>(self, handler: Arc<F>) -> Result<RanOne>
    where
        F: Fn(Context<S>, S::Tx) -> Fut + Send + Sync + 'static,
        Fut: Future<Output = Result<Outcome, Unfinished>> + Send + 'static,
    {
        let (_counted, halt) = self.ledger().enter();
        let renewal = self.keep();
        match self.effect(&renewal, halt, handler).await? {
            Effect::Committed { outcome, successor } => {
                self.ledger().wake(self.operation().id);
                Ok((Ran::Completed(outcome), successor))
            }
            Effect::Lost => Ok((Ran::LeaseLost, false)),
            Effect::RolledBack(write) => {
                let ran = match &write {
                    Write::Complete(outcome) => Ran::Completed(outcome.clone()),
                    Write::Fail(failure) => Ran::Failed(failure.clone()),
                    Write::Doubt { reason } => Ran::Doubted(reason.clone()),
                    _ => Ran::Released,
                };
                match self.settle(write).await? {
                    Settled::Yes { successor } => Ok((ran, successor)),
                    Settled::LeaseLost => Ok((Ran::LeaseLost, false)),
                }
            }
        }
    }

    async fn effect<F, Fut>(&self, renewal: &Renewal, halt: watch::Receiver<bool>, handler: Arc<F>) -> Result<Effect>
    where
        F: Fn(Context<S>, S::Tx) -> Fut + Send + Sync + 'static,
        Fut: Future<Output = Result<Outcome, Unfinished>> + Send + 'static,
    {
        let store = self.ledger().store();
        let limit = store.longest_transaction().min(self.term());
        let Ok(tx) = store.begin(limit).await else {
            // Nothing has begun; the caller may come again.
            return Ok(Effect::RolledBack(Write::Release { delay: Duration::ZERO, why: None }));
        };
        crash_point!("atomic.begun");
        let until = Uptime::now() + limit;
        let (context, used) = (self.context(renewal), tx.clone());
        let declined = Arc::new(AtomicBool::new(false));
        let declines = declined.clone();
        let work = async move {
            let work = IN_TRANSACTION.scope((), async move { handler(context, used).await });
            let done = tokio::time::timeout(limit, work).await.unwrap_or_else(|_| {
                Err(Unfinished::failed(format!("the transaction was open for more than {limit:?}")))
            });
            declines.store(matches!(done, Err(Unfinished::Declined(_))), Ordering::Relaxed);
            done
        };
        // What a transaction began and did not commit has not begun: nothing is in doubt.
        match self.attend(renewal, halt, false, work).await {
            Some(Write::Complete(outcome)) if !declined.load(Ordering::Relaxed) => {
                self.commit(&tx, outcome, until).await
            }
            other => {
                store.roll_back(&tx).await;
                Ok(other.map_or(Effect::Lost, |write| Effect::RolledBack(undoubted(write))))
            }
        }
    }

    /// The fenced completion, and the commit, of a transaction that may be open `until` then.
    async fn commit(&self, tx: &S::Tx, outcome: Outcome, until: Uptime) -> Result<Effect> {
        crash_point!("atomic.before_complete");
        let late = until.has_passed();
        let (sent, stored) = (Uptime::now(), outcome.to_store());
        let ended = self.ledger().store().complete_and_commit(tx, self.operation(), stored.clone()).await;
        crash_point!("atomic.after_commit");
        match ended {
            Ended::Committed(applied) => {
                let successor = applied.answer == Answer::Settled { successor: true };
                self.ledger().completed(self.operation(), &stored, &applied, sent);
                Ok(Effect::Committed { outcome, successor })
            }
            Ended::Lost => {
                log::lost(self.operation(), "nothing of it was committed");
                self.tell_refusal().await;
                Ok(Effect::Lost)
            }
            Ended::Refused(why) => Ok(Effect::RolledBack(rolled_back(&why))),
            Ended::Unavailable(why) => Ok(Effect::RolledBack(self.in_trouble(late, &why))),
            Ended::Unknown { why, successor } => self.read_back(outcome, successor, late, &why).await,
        }
    }

    /// The store could not commit, for trouble of its own, and nothing has happened: it is put back, at no cost of an
    /// attempt. A first run of which nothing is stored leaves its key free at once; without data nobody but its caller
    /// brings it again, and soon. What is stored waits for half its age, so that trouble without end is met ever more
    /// seldom, but never longer than a minute: it may be old, and the trouble new. A run that was late made its trouble
    /// itself: the server ends transactions that are held open for too long.
    fn in_trouble(&self, late: bool, why: &str) -> Write {
        if late {
            return rolled_back(why);
        }
        let op = self.operation();
        log::not_committed(op, why);
        let delay = match &op.lease {
            _ if is_bare(op) => Duration::ZERO,
            Some(lease) if op.payload.is_some() => {
                let longest = lease.terms.backoff.cap.min(A_MINUTE).max(A_MOMENT);
                (op.claimed_at.since(op.created_at) / 2).clamp(A_MOMENT, longest)
            }
            _ => A_MOMENT,
        };
        Write::Release { delay, why: None }
    }

    /// The note of the refusal was rolled back with the effect, but it is part of the story: a
    /// write that is refused too puts it there. (It is a failure, so that it could do no harm even
    /// if the fence were still good, which it never is again.)
    async fn tell_refusal(&self) {
        let write = rolled_back("the lease was lost before the commit");
        let told = LeaseWrite { id: self.operation().id, fence: self.fence(), write };
        if let Err(error) = self.ledger().write(told).await {
            tracing::debug!(%error, "a refusal could not be noted");
        }
    }

    /// The connection was lost during the commit. Never guess: ask, until the lease ends.
    async fn read_back(&self, outcome: Outcome, successor: bool, late: bool, why: &str) -> Result<Effect> {
        let until = Uptime::now() + self.term();
        loop {
            match self.ledger().store().read_back(self.operation().id).await {
                Ok(Some(op)) if op.fence == self.fence() && op.state != State::Processing => {
                    return Ok(Effect::Committed { outcome, successor });
                }
                Ok(Some(op)) if op.fence == self.fence() => return Ok(Effect::RolledBack(self.in_trouble(late, why))),
                // It has moved on since: before the commit, or because of it.
                Ok(_) => return Err(Error::OutcomeUnknown(why.to_owned())),
                Err(_) if !until.has_passed() => tokio::time::sleep(Duration::from_millis(50)).await,
                Err(_) => return Err(Error::OutcomeUnknown(why.to_owned())),
            }
        }
    }
}

fn rolled_back(why: &str) -> Write {
    let error = format!("the transaction was not committed: {why}");
    Write::Fail(Failure { error, retry: crate::machine::Retry::Backoff })
}

/// A handler that panicked inside a transaction has changed nothing, whatever the policy fears.
fn undoubted(write: Write) -> Write {
    match write {
        Write::Doubt { reason } => rolled_back(&reason),
        other => other,
    }
}
