//! Claiming due operations in batches, and cancelling.

use std::{sync::Arc, time::Duration};

use super::{Ledger, bounded, outside_transactions};
use crate::{
    Error, Lease, Result, Token, Uptime, crash_point,
    machine::Answer,
    store::{Applied, Decision, DueWake, Store, Take, Want},
};

impl<S: Store> Ledger<S> {
    /// Claims due operations, as many as wanted: the index of the want, and the lease. Two nodes that claim at the same
    /// time get different ones. If the answer is lost, the claims are found by their token and released.
    ///
    /// # Errors
    /// A policy that is not valid, or errors of the store; nothing is claimed then, or it is released.
    pub async fn take(&self, wants: Vec<Want>) -> Result<Vec<(usize, Lease<S>)>> {
        self.take_under(wants, None, None).await
    }

    /// As [`take`](Self::take), at most so many of all wants together. A caller with a [kept](Token::kept) token sends the
    /// request again if its answer is lost: nothing is released then, and
    /// [`Look::taken_under`](crate::store::Look::taken_under) has the leases.
    ///
    /// # Errors
    /// As [`take`](Self::take).
    pub async fn take_up_to(
        &self,
        most: u32,
        wants: Vec<Want>,
        token: Option<Token>,
    ) -> Result<Vec<(usize, Lease<S>)>> {
        self.take_under(wants, Some(most), token).await
    }

    async fn take_under(
        &self,
        wants: Vec<Want>,
        most: Option<u32>,
        kept: Option<Token>,
    ) -> Result<Vec<(usize, Lease<S>)>> {
        outside_transactions()?;
        if self.is_stopping() {
            return Err(Error::Stopping);
        }
        wants.iter().try_for_each(|want| want.policy.check())?;
        let longest = wants.iter().map(|want| want.policy.lease).max().unwrap_or_default();
        let policies: Vec<_> = wants.iter().map(|want| want.policy.clone()).collect();
        let token = kept.map_or_else(Token::random, Ok)?;
        let take = Arc::new(Take { wants, most, owner: self.inner.options.owner.clone(), token });
        let (store, sent) = (self.inner.store.clone(), Uptime::now());
        crash_point!("take.before");
        // If this is dropped before the answer, operations may have been claimed.
        let mut lost = Lost { ledger: self, token, longest, open: kept.is_none() };
        let taken = self.on_engine(async move { store.take_due(take).await }).await;
        lost.open = taken.is_err() && kept.is_none();
        crash_point!("take.after");
        let mut leases = Vec::new();
        for (want, applied) in taken? {
            let operation = applied.operation.ok_or(Error::Contradiction("work was taken without its operation"))?;
            let policy = policies.get(want).ok_or(Error::Contradiction("an unknown want was answered"))?;
            leases.push((want, self.lease(Arc::new(operation), policy, sent)));
        }
        Ok(leases)
    }

    /// Gives starts back to the rate of a kind: [`Operations::give_back_starts`](crate::store::Operations).
    pub(crate) async fn give_back_starts(
        &self,
        service: &str,
        kind: &str,
        starts: u32,
        every: Duration,
    ) -> Result<bool> {
        let (store, service, kind) = (self.inner.store.clone(), service.to_owned(), kind.to_owned());
        self.on_engine(async move { store.give_back_starts(&service, &kind, starts, every).await }).await
    }

    /// Withdraws a pending operation: it becomes failed with the error `cancelled`, does not run again, and its key
    /// stays taken. A run is asked to stop: its handler is cancelled, at the latest at the next renewal of its lease;
    /// under rerun it ends failed, under hold or probe in doubt.
    ///
    /// # Errors
    /// Errors of the store.
    pub async fn cancel(&self, id: i64, actor: &str, reason: &str) -> Result<Applied> {
        let applied = self.decide(id, Decision::Cancel, actor, &bounded(reason.to_owned())).await?;
        if let (Answer::CancelAsked, Some(asked)) = (&applied.answer, &applied.operation) {
            self.inner.renewer.cancel(id, asked.fence);
        }
        Ok(applied)
    }

    /// Wakes when a commit of this process may have made an operation due.
    pub(crate) fn due_wake(&self) -> DueWake {
        self.inner.store.due_wake()
    }
}

/// A take whose answer is missing. Unless it is closed, its claims are released in the background.
struct Lost<'a, S: Store> {
    ledger: &'a Ledger<S>,
    token: Token,
    longest: Duration,
    open: bool,
}

impl<S: Store> Drop for Lost<'_, S> {
    fn drop(&mut self) {
        if self.open {
            self.ledger.inner.withdrawals.add_token(self.token, self.longest);
        }
    }
}
