//! Atomic mode: the effect and its completion commit together.

use std::{sync::Arc, time::Duration};

use tokio::sync::watch;

use crate::{
    Claim, Error, Lease, Ledger, Operation, Outcome, Result, State, Uptime, Work, crash_point,
    lease::Settled,
    ledger::IN_TRANSACTION,
    log,
    machine::{Answer, Failure, Retry, Write, is_bare},
    messaging::Origin,
    renewer::Renewal,
    run::{Attended, Context, End, Handed, Ran, RanOne, Unfinished, in_own_task},
    store::{Commit, Ended, LeaseWrite, Store},
};

/// The shortest delay after a transient commit failure: a deadlock is over by then, and an unavailable server is not
/// polled without a pause.
const A_MOMENT: Duration = Duration::from_secs(1);

/// The longest delay.
const A_MINUTE: Duration = Duration::from_secs(60);

/// How the transaction part of a run ended.
enum Effect<V> {
    /// With the run: it is durable, or its lease was lost and it did not happen.
    Over(RanOne<V>),
    /// Nothing was committed: the write for the ledger, and the value for the caller.
    RolledBack(Write, Handed<V>),
}

/// How a commit ended.
enum Fate {
    /// It is durable; newer data may wait.
    Committed { successor: bool },
    /// Nothing was committed; this write settles the run.
    RolledBack(Write),
    /// The lease was lost; nothing was committed.
    Lost,
}

impl<S: Store> Ledger<S> {
    /// Claims and, if the lease is acquired, runs `handler` inside one transaction that also stores the outcome:
    /// business rows and completion commit together, or not at all. The last statement of the transaction names
    /// the fence, so the effect of a run whose lease was lost never happens.
    ///
    /// The handler may use only its transaction; the ledger refuses calls from inside. It has the time of the lease,
    /// and on SQLite five seconds, because there it holds the only writer.
    ///
    /// After a transient commit failure (a deadlock, a full disk, a lost connection) nothing has happened: the run is
    /// released for a while, and no attempt is counted. A commit that the database refuses, because of a constraint,
    /// say, is a failure.
    ///
    /// # Errors
    /// As [`Ledger::claim`]; [`Error::OutcomeUnknown`] if the connection was lost during the commit and the
    /// result could not be read back.
    pub async fn run_atomic<F, Fut>(&self, work: Work, handler: F) -> Result<Claim<Ran>>
    where
        F: Fn(Context<S>, S::Tx) -> Fut + Send + Sync + 'static,
        Fut: Future<Output = Result<Outcome, Unfinished>> + Send + 'static,
    {
        let ledger = self.clone();
        self.claim_and_run(async move { ledger.claim(work).await }, |lease| lease.run_atomic_all(handler)).await
    }

    /// As [`Ledger::run_atomic`], but waits up to `up_to` first while another run holds the lease.
    ///
    /// # Errors
    /// As [`Ledger::run_atomic`].
    pub async fn run_atomic_or_wait<F, Fut>(&self, work: Work, up_to: Duration, handler: F) -> Result<Claim<Ran>>
    where
        F: Fn(Context<S>, S::Tx) -> Fut + Send + Sync + 'static,
        Fut: Future<Output = Result<Outcome, Unfinished>> + Send + 'static,
    {
        let ledger = self.clone();
        let claim = async move { ledger.claim_or_wait(work, up_to).await };
        self.claim_and_run(claim, |lease| lease.run_atomic_all(handler)).await
    }

    /// Runs `work` in a transaction without a key: its `Ok` commits, its `Err` rolls back; either is returned
    /// afterwards. Like a run, it continues if its caller goes away, has the time limit of a transaction, and delays
    /// the stop of the ledger.
    ///
    /// # Errors
    /// The error of `work`. Of the store: [`Error::Unavailable`] if the transaction could not begin, or its commit
    /// failed for a transient reason; [`Error::Refused`] if the database refused it; [`Error::OutcomeUnknown`] if the
    /// connection was lost during the commit.
    pub async fn transact<F, Fut, T, E>(&self, work: F) -> Result<T, E>
    where
        F: FnOnce(S::Tx) -> Fut + Send + 'static,
        Fut: Future<Output = Result<T, E>> + Send,
        T: Send + 'static,
        E: From<Error> + Send + 'static,
    {
        if self.is_stopping() {
            return Err(Error::Stopping.into());
        }
        let (ledger, counted) = (self.clone(), self.enter());
        let done = in_own_task(async move {
            let _counted = counted;
            let store = ledger.store();
            let limit = store.longest_transaction();
            let tx = store.begin(limit).await?;
            let work = IN_TRANSACTION.scope((), work(tx.clone()));
            match tokio::time::timeout(limit, work).await {
                Ok(Ok(done)) => match store.commit(&tx).await {
                    Commit::Done => Ok(Ok(done)),
                    Commit::Refused(why) => Err(Error::Refused(why)),
                    Commit::Unavailable(why) => Err(Error::Unavailable(why)),
                    Commit::Unknown(why) => Err(Error::OutcomeUnknown(why)),
                },
                Ok(Err(undone)) => {
                    store.roll_back(&tx).await;
                    Ok(Err(undone))
                }
                Err(_) => {
                    store.roll_back(&tx).await;
                    Err(Error::Refused(format!("the transaction was open for more than {limit:?}")))
                }
            }
        });
        done.await?
    }

    /// Inline mode: claims inside the transaction of the effect, with one commit for both. For
    /// short work in the database only. The answer acquired means: make the effect, then
    /// commit; another caller of the same key waits for that commit, and takes over if it is
    /// rolled back.
    ///
    /// # Errors
    /// As [`Ledger::claim`]. Roll back the transaction then.
    pub async fn claim_inline(&self, tx: &S::Tx, work: Work) -> Result<Claim<()>> {
        let request = Arc::new(work.into_request(self.owner())?);
        let applied = self.store().claim_in(tx, request.clone()).await?;
        let claim = Claim::from_applied(applied)?;
        self.note(&claim, &request);
        Ok(claim.map(|_| ()))
    }

    /// Several claims as in [`Ledger::claim_inline`], in one statement. Their scopes and keys must differ. An acquired
    /// claim has its id and fence, for messages that are put in the same transaction.
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
    /// Runs `handler` inside one transaction under this lease, as [`Ledger::run_atomic`] does.
    ///
    /// # Errors
    /// As [`Ledger::run_atomic`].
    pub async fn run_atomic<F, Fut>(self, handler: F) -> Result<Ran>
    where
        F: Fn(Context<S>, S::Tx) -> Fut + Send + Sync + 'static,
        Fut: Future<Output = Result<Outcome, Unfinished>> + Send + 'static,
    {
        Ok(self.counted(|lease| lease.run_atomic_all(handler)).await?.0)
    }

    /// As [`Lease::run_atomic`], with a handler that hands a value to this caller, as in [`Lease::run_handing`]: the
    /// value is handed over only if the effect was committed.
    ///
    /// # Errors
    /// As [`Ledger::run_atomic`].
    pub async fn run_atomic_handing<F, Fut, V>(self, handler: F) -> Result<(Ran, Handed<V>)>
    where
        F: Fn(Context<S>, S::Tx) -> Fut + Send + Sync + 'static,
        Fut: Future<Output = (Result<Outcome, Unfinished>, V)> + Send + 'static,
        V: Send + 'static,
    {
        self.counted(|lease| lease.run_atomic_all(handler)).await
    }

    async fn run_atomic_all<F, Fut>(self, handler: F) -> Result<(Ran, Handed<<Fut::Output as End>::Value>)>
    where
        F: Fn(Context<S>, S::Tx) -> Fut + Send + Sync + 'static,
        Fut: Future<Output: End> + Send + 'static,
    {
        let handler = Arc::new(handler);
        self.run_each(move |lease| lease.run_atomic_one(handler.clone())).await
    }

    async fn run_atomic_one<F, Fut>(self, handler: Arc<F>) -> Result<RanOne<<Fut::Output as End>::Value>>
    where
        F: Fn(Context<S>, S::Tx) -> Fut + Send + Sync + 'static,
        Fut: Future<Output: End> + Send + 'static,
    {
        let (_counted, halt) = self.ledger().enter();
        let renewal = self.keep();
        let (write, handed) = match self.effect(&renewal, halt, handler).await? {
            Effect::Over(ran) => return Ok(ran),
            Effect::RolledBack(write, handed) => (write, handed),
        };
        let ran = Ran::by(&write);
        Ok(match self.settle(write).await? {
            Settled::Yes { successor } => RanOne { ran, handed, successor },
            Settled::LeaseLost => RanOne::LOST,
        })
    }

    async fn effect<F, Fut>(
        &self,
        renewal: &Renewal,
        halt: watch::Receiver<bool>,
        handler: Arc<F>,
    ) -> Result<Effect<<Fut::Output as End>::Value>>
    where
        F: Fn(Context<S>, S::Tx) -> Fut + Send + Sync + 'static,
        Fut: Future<Output: End> + Send + 'static,
    {
        let store = self.ledger().store();
        let limit = store.longest_transaction().min(self.term());
        let Ok(tx) = store.begin(limit).await else {
            // Nothing has begun; the caller may try again.
            return Ok(Effect::RolledBack(Write::Release { delay: Duration::ZERO, why: None }, Handed::Nothing));
        };
        crash_point!("atomic.begun");
        let until = Uptime::now() + limit;
        let (context, used) = (self.context(renewal), tx.clone());
        let work = IN_TRANSACTION.scope((), async move { handler(context, used).await.parts() });
        let work = tokio::time::timeout(limit, self.noting_return(work));
        // A transaction that was not committed had no effect: nothing is in doubt.
        let ended = match self.attend(renewal, halt, false, work).await {
            Attended::Ended(Ok((Ok(outcome), value))) => {
                return Ok(match self.commit(&tx, &outcome, until).await? {
                    Fate::Committed { successor } => {
                        self.ledger().wake(self.operation().id);
                        let (ran, handed) = (Ran::Completed(outcome), Handed::Stored(value));
                        Effect::Over(RanOne { ran, handed, successor })
                    }
                    Fate::RolledBack(write) => Effect::RolledBack(write, Handed::NotStored),
                    Fate::Lost => Effect::Over(RanOne::LOST),
                });
            }
            other => other,
        };
        store.roll_back(&tx).await;
        Ok(match ended {
            Attended::Ended(Ok((Err(Unfinished::Doubted(reason)), _))) => {
                Effect::RolledBack(rolled_back(&reason), Handed::NotStored)
            }
            Attended::Ended(Ok((said, value))) => Effect::RolledBack(self.write_for(said), Handed::Stored(value)),
            Attended::Ended(Err(_)) => {
                let error = format!("the transaction was open for more than {limit:?}");
                Effect::RolledBack(Write::Fail(Failure { error, retry: Retry::Backoff }), Handed::Nothing)
            }
            Attended::CutOff(write) => Effect::RolledBack(write, Handed::Nothing),
            Attended::Lost => Effect::Over(RanOne::LOST),
        })
    }

    /// The fenced completion, and the commit, of a transaction that may be open `until` then.
    async fn commit(&self, tx: &S::Tx, outcome: &Outcome, until: Uptime) -> Result<Fate> {
        crash_point!("atomic.before_complete");
        let late = until.has_passed();
        let (sent, stored) = (Uptime::now(), outcome.clone().to_store());
        let ended = self.ledger().store().complete_and_commit(tx, self.operation(), stored.clone()).await;
        crash_point!("atomic.after_commit");
        match ended {
            Ended::Committed(applied) => {
                let successor = applied.answer == Answer::Settled { successor: true };
                self.ledger().completed(self.operation(), &stored, &applied, sent);
                Ok(Fate::Committed { successor })
            }
            Ended::Lost => {
                log::lost(self.operation(), "nothing of it was committed");
                tell_refusal(self.ledger(), self.operation()).await;
                Ok(Fate::Lost)
            }
            Ended::Refused(why) => Ok(Fate::RolledBack(rolled_back(&why))),
            Ended::Unavailable(why) => Ok(Fate::RolledBack(self.transient_failure(late, &why))),
            Ended::Unknown { why, successor } => self.read_back(successor, late, &why).await,
        }
    }

    /// A transient commit failure: nothing has happened, so the run is released, and no attempt is counted. A run that
    /// exceeded its time caused the failure itself: the server ends transactions that are open for too
    /// long.
    fn transient_failure(&self, late: bool, why: &str) -> Write {
        if late {
            return rolled_back(why);
        }
        log::not_committed(self.operation(), why);
        Write::Release { delay: patience(self.operation()), why: None }
    }

    /// The connection was lost during the commit. Asks the store until the lease ends; never guesses.
    async fn read_back(&self, successor: bool, late: bool, why: &str) -> Result<Fate> {
        let until = Uptime::now() + self.term();
        loop {
            match self.ledger().store().read_back(self.operation().id).await {
                Ok(Some(op)) if op.fence == self.fence() && op.state != State::Processing => {
                    return Ok(Fate::Committed { successor });
                }
                Ok(Some(op)) if op.fence == self.fence() => {
                    return Ok(Fate::RolledBack(self.transient_failure(late, why)));
                }
                // The operation has changed since: before the commit, or because of it.
                Ok(_) => return Err(Error::OutcomeUnknown(why.to_owned())),
                Err(_) if !until.has_passed() => tokio::time::sleep(Duration::from_millis(50)).await,
                Err(_) => return Err(Error::OutcomeUnknown(why.to_owned())),
            }
        }
    }
}

/// The delay of a run whose commit failed for a transient reason. A first run without stored data frees its key at
/// once: only its caller can bring it again. Otherwise the delay is half the time for which the operation has been tried,
/// so that an endless failure is retried ever more rarely, but at most a minute: the operation may be old and the failure
/// new.
pub(crate) fn patience(op: &Operation) -> Duration {
    match &op.lease {
        _ if is_bare(op) => Duration::ZERO,
        Some(lease) if op.payload.is_some() => {
            let longest = lease.terms.backoff.cap.min(A_MINUTE).max(A_MOMENT);
            (op.tried_for() / 2).clamp(A_MOMENT, longest)
        }
        _ => A_MOMENT,
    }
}

/// The failure of a run whose transaction was rolled back.
pub(crate) fn not_committed(why: &str) -> Failure {
    let error = format!("the transaction was not committed: {why}");
    Failure { error, retry: Retry::Backoff }
}

fn rolled_back(why: &str) -> Write {
    Write::Fail(not_committed(why))
}

/// The journal note of the refused write was rolled back with the effect. A second write under the lost lease, which is
/// refused too, stores the note. (It is a failure, which would be harmless even under a valid fence.)
pub(crate) async fn tell_refusal<S: Store>(ledger: &Ledger<S>, op: &Operation) {
    let write = rolled_back("the lease was lost before the commit");
    if let Err(error) = ledger.write(LeaseWrite { id: op.id, fence: op.fence, write }).await {
        tracing::debug!(%error, "a refused write could not be noted in the journal");
    }
}
