//! A step of a long run: its rows and its checkpoint commit together.

use std::future::Future;

use bytes::Bytes;

use crate::{
    Uptime,
    atomic::{not_committed, patience, tell_refusal},
    crash_point,
    lease::check_checkpoint,
    ledger::IN_TRANSACTION,
    log,
    machine::{Answer, Write},
    run::{Context, Unfinished},
    store::{Applied, Commit, LeaseWrite, Store},
};

impl<S: Store> Context<S> {
    /// Runs one step of a long run in its own transaction. `work` writes its rows there, and returns the checkpoint for
    /// the next attempt and a value for the caller. The checkpoint is the last statement before the commit, names the
    /// fence, and counts as [progress](Self::progress): so rows and checkpoint commit together, and a step under a lost
    /// lease has no effect.
    ///
    /// As in [atomic mode](crate::Ledger::run_atomic), `work` may use only its transaction, and has the time of the
    /// lease, on SQLite five seconds.
    ///
    /// # Errors
    /// The handler should return it, by `?`. The error of `work`, rolled back. A failure if the database refuses the
    /// rows or the transaction took too long. [`Unfinished::Released`] after a transient commit failure or an unknown
    /// result: the next attempt continues from the stored checkpoint. Under hold or probe, an unknown result is
    /// [`Unfinished::Doubted`].
    pub async fn step<F, Fut, D, T>(&self, work: F) -> Result<T, Unfinished>
    where
        F: FnOnce(S::Tx) -> Fut + Send,
        Fut: Future<Output = Result<(D, T), Unfinished>> + Send,
        D: Into<Bytes>,
    {
        self.step_as(Write::Progress, work).await
    }

    /// The same for a step that does not bring the run further: it does not count as progress, so a run that crashes
    /// after it again and again is parked in the end.
    ///
    /// # Errors
    /// As in [`step`](Self::step).
    pub async fn step_without_progress<F, Fut, D, T>(&self, work: F) -> Result<T, Unfinished>
    where
        F: FnOnce(S::Tx) -> Fut + Send,
        Fut: Future<Output = Result<(D, T), Unfinished>> + Send,
        D: Into<Bytes>,
    {
        self.step_as(Write::Checkpoint, work).await
    }

    async fn step_as<F, Fut, D, T>(&self, write: fn(Bytes) -> Write, work: F) -> Result<T, Unfinished>
    where
        F: FnOnce(S::Tx) -> Fut + Send,
        Fut: Future<Output = Result<(D, T), Unfinished>> + Send,
        D: Into<Bytes>,
    {
        let store = self.ledger.store();
        let term = self.operation.lease.as_ref().map_or(std::time::Duration::ZERO, |lease| lease.terms.lease);
        let limit = store.longest_transaction().min(term);
        let tx = store.begin(limit).await.map_err(|error| self.transient_failure(&error.to_string()))?;
        crash_point!("step.begun");
        let until = Uptime::now() + limit;
        let done = tokio::time::timeout(limit, IN_TRANSACTION.scope((), work(tx.clone()))).await;
        let done = done.unwrap_or_else(|_| {
            Err(Unfinished::failed(format!("the transaction of a step was open for more than {limit:?}")))
        });
        match done {
            Ok((data, value)) => self.commit(&tx, (write, data.into()), until).await.map(|()| value),
            Err(undone) => {
                store.roll_back(&tx).await;
                Err(undone)
            }
        }
    }

    /// The fenced checkpoint and the commit of a transaction that may be open `until` then.
    async fn commit(
        &self,
        tx: &S::Tx,
        (write, data): (fn(Bytes) -> Write, Bytes),
        until: Uptime,
    ) -> Result<(), Unfinished> {
        let (store, op) = (self.ledger.store(), &*self.operation);
        let written = async {
            check_checkpoint::<S>(&data)?;
            store.write_in(tx, LeaseWrite { id: op.id, fence: op.fence, write: write(data) }).await
        };
        match written.await {
            Ok(Applied { answer: Answer::Written, .. }) => {}
            Ok(_) => {
                store.roll_back(tx).await;
                log::lost(op, "nothing of its step was committed");
                tell_refusal(&self.ledger, op).await;
                // The settle of this run is refused, too.
                return Err(Unfinished::failed("the lease was lost before the step was committed"));
            }
            Err(error) => {
                store.roll_back(tx).await;
                return Err(match error.is_transient() {
                    true => self.transient_failure(&error.to_string()),
                    false => Unfinished::Failed(not_committed(&error.to_string())),
                });
            }
        }
        crash_point!("step.before_commit");
        let late = until.has_passed();
        let ended = store.commit(tx).await;
        crash_point!("step.after_commit");
        match ended {
            Commit::Done => Ok(()),
            Commit::Unavailable(why) if !late => Err(self.transient_failure(&why)),
            Commit::Refused(why) | Commit::Unavailable(why) => Err(Unfinished::Failed(not_committed(&why))),
            Commit::Unknown(why) => Err(self.unknown(why)),
        }
    }

    /// A transient commit failure: nothing of the step was committed, and no attempt is counted.
    fn transient_failure(&self, why: &str) -> Unfinished {
        log::not_committed(&self.operation, why);
        Unfinished::released(patience(&self.operation))
    }

    /// The connection was lost during the commit. The run ends, and the next one reads the stored checkpoint. The
    /// settle waits for the row, which the transaction of the step has locked as long as it may still commit.
    fn unknown(&self, why: String) -> Unfinished {
        match self.operation.lease.as_ref().is_some_and(|lease| lease.terms.on_lost.doubts()) {
            true => Unfinished::Doubted(format!("the commit of a step was not answered: {why}")),
            false => self.transient_failure(&why),
        }
    }
}
