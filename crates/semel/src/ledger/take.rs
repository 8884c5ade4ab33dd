//! Taking work that is due, and cancelling it.

use std::sync::Arc;

use super::{Ledger, bounded, outside_transactions};
use crate::{
    Error, Lease, Result, Token, Uptime, crash_point,
    machine::Answer,
    messaging::Wake,
    store::{Applied, Decision, Store, Take, Want},
};

impl<S: Store> Ledger<S> {
    /// Claims what is due, for as many as there are free hands: the number of the want, and the lease. Two nodes that ask
    /// at the same time get different ones. An answer that is lost costs nothing: what was claimed is found by its token
    /// and put back.
    ///
    /// # Errors
    /// What a store can break with; nothing is claimed then, or it is put back.
    pub async fn take(&self, wants: Vec<Want>) -> Result<Vec<(usize, Lease<S>)>> {
        outside_transactions()?;
        if self.is_stopping() {
            return Err(Error::Stopping);
        }
        let longest = wants.iter().map(|want| want.policy.lease).max().unwrap_or_default();
        let policies: Vec<_> = wants.iter().map(|want| want.policy.clone()).collect();
        let token = Token::random()?;
        let take = Arc::new(Take { wants, owner: self.inner.options.owner.clone(), token });
        let (store, sent) = (self.inner.store.clone(), Uptime::now());
        crash_point!("take.before");
        // Dropped before it is answered, it may have claimed all the same.
        let mut lost = Lost { ledger: self, token, longest, open: true };
        let taken = self.on_engine(async move { store.take_due(take).await }).await;
        lost.open = taken.as_ref().is_err_and(Error::is_transient);
        crash_point!("take.after");
        let mut leases = Vec::new();
        for (want, applied) in taken? {
            let operation = applied.operation.ok_or(Error::Contradiction("work was taken without its operation"))?;
            let policy = policies.get(want).ok_or(Error::Contradiction("the number of a want"))?;
            leases.push((want, self.lease(Arc::new(operation), policy, sent)));
        }
        Ok(leases)
    }

    /// Withdraws an operation that waits: it ends as failed, with the error `cancelled`, runs no more, and its key stays
    /// taken. One that runs is asked to stop: its handler is cancelled, at the latest when its lease is renewed next; it
    /// ends as failed where it may run again, and in doubt where that is not known.
    ///
    /// # Errors
    /// What a store can break with.
    pub async fn cancel(&self, id: i64, actor: &str, reason: &str) -> Result<Applied> {
        let applied = self.decide(id, Decision::Cancel, actor, &bounded(reason.to_owned())).await?;
        if applied.answer == Answer::CancelAsked {
            self.inner.renewer.cancel(id);
        }
        Ok(applied)
    }

    /// Is woken when something may have become due by a commit of this process.
    pub fn due_wake(&self) -> Wake {
        self.inner.store.due_wake()
    }
}

/// Work that may have been taken without anybody being told. Unless it is closed, it is put back in the background.
struct Lost<'a, S: Store> {
    ledger: &'a Ledger<S>,
    token: Token,
    longest: std::time::Duration,
    open: bool,
}

impl<S: Store> Drop for Lost<'_, S> {
    fn drop(&mut self) {
        if self.open {
            self.ledger.inner.withdrawals.add_token(self.token, self.longest);
        }
    }
}
