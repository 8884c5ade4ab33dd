//! How a claim is asked: from memory, through its lane, and again while somebody else is at it.

use std::{future::Future, sync::Arc, time::Duration};

use tokio::sync::oneshot;

use super::{Ledger, patiently};
use crate::{
    Error, Lease, Operation, Result, Uptime,
    claim::{Claim, Work, weight},
    crash_point,
    lanes::Call,
    machine::{Answer, Request, Write},
    renewer::OwnDeadline,
    store::{Applied, LeaseWrite, Store},
};

/// How long a claim waits for its lane before it looks whether it can be answered without the writer: longer than a
/// flush and some transactions take, too short for a person to notice.
const PATIENT: Duration = Duration::from_millis(50);

impl<S: Store> Ledger<S> {
    /// Asks to be the one who executes.
    ///
    /// # Errors
    /// [`Error::Invalid`] when the work fits no rule, and what a store can break with. Nothing was
    /// claimed then, but for [`Error::OutcomeUnknown`]: that claim, if it was made, lapses.
    pub async fn claim(&self, work: Work) -> Result<Claim<Lease<S>>> {
        let request = self.request(work)?;
        let claim = self.ask(&request).await?;
        self.note(&claim, &request);
        Ok(claim)
    }

    /// Claims once more for a caller whose claim was answered just now, by other rules. That answer was counted; this
    /// one is not, because nobody has brought the key again.
    ///
    /// # Errors
    /// As [`Ledger::claim`].
    pub async fn claim_again(&self, work: Work) -> Result<Claim<Lease<S>>> {
        let request = self.request(work)?;
        self.ask(&request).await
    }

    /// Asks to be the one who executes and, while somebody else is at it, waits up to `up_to` for
    /// that to end: the answer is then the outcome, or the lease if that run did not complete.
    ///
    /// # Errors
    /// As [`Ledger::claim`].
    pub async fn claim_or_wait(&self, work: Work, up_to: Duration) -> Result<Claim<Lease<S>>> {
        self.claim_or_wait_if(work, up_to, |_| true).await
    }

    /// As [`Ledger::claim_or_wait`], but waits only if `worth` says so of what is in flight.
    ///
    /// # Errors
    /// As [`Ledger::claim`].
    pub async fn claim_or_wait_if(
        &self,
        work: Work,
        up_to: Duration,
        worth: impl FnOnce(&Operation) -> bool,
    ) -> Result<Claim<Lease<S>>> {
        let request = self.request(work)?;
        let mut claim = self.ask(&request).await?;
        if let Claim::InFlight(there) = &claim
            && !up_to.is_zero()
            && worth(&there.operation)
        {
            claim = Box::pin(self.wait(&request, claim, Uptime::now() + up_to)).await?;
        }
        self.note(&claim, &request);
        Ok(claim)
    }

    async fn wait(&self, request: &Arc<Request>, mut claim: Claim<Lease<S>>, until: Uptime) -> Result<Claim<Lease<S>>> {
        let mut stopping = self.inner.stopping.subscribe();
        loop {
            let (id, fence) = match &claim {
                Claim::InFlight(there) if !until.has_passed() => (there.operation.id, there.operation.fence),
                _ => return Ok(claim),
            };
            let place = self.inner.waiters.join(id, fence);
            let woken = place.woken();
            tokio::pin!(woken);
            // Listening comes before the last look: a settle in between is not missed.
            woken.as_mut().enable();
            claim = self.ask(request).await?;
            match &claim {
                Claim::InFlight(there) if there.operation.fence == fence => {}
                _ => continue,
            }
            // Running out of time is no error: the answer stays in flight. A ledger that stops takes
            // nothing over any more, and should not have to wait for those who wait.
            tokio::select! {
                _ = tokio::time::timeout(until.remaining(), woken) => {}
                _ = stopping.wait_for(|stopping| *stopping) => return Ok(claim),
            }
            claim = self.ask(request).await?;
        }
    }

    /// Answers a claim from memory, or sends it.
    pub(super) async fn ask(&self, request: &Arc<Request>) -> Result<Claim<Lease<S>>> {
        // Our own clock starts before the claim is sent, so what we count with it ends before the
        // database's: a lease, and what we remember.
        let sent = Uptime::now();
        match self.inner.replays.recall(request, sent) {
            Some(claim) => Ok(claim?.map(|operation| self.lease(operation, request, sent))),
            // In a box: the room that it needs is moved about with every claim otherwise.
            None => Box::pin(self.send(request, sent)).await,
        }
    }

    fn lease(&self, operation: Arc<Operation>, request: &Request, sent: Uptime) -> Lease<S> {
        Lease::new(self.clone(), operation, OwnDeadline::of_claim(sent, &request.policy))
    }

    /// Sends a claim through its lane.
    async fn send(&self, request: &Arc<Request>, sent: Uptime) -> Result<Claim<Lease<S>>> {
        crash_point!("claim.before");
        let applied = if self.inner.options.group_commit {
            let answer = self.inner.lanes.claims.send(Call::Claim(request.clone()), weight(request)).await?;
            self.or_glimpse(Asked { ledger: self, answer: Some(answer) }.answer(), request).await?
        } else if let Ok(Some(applied)) = self.inner.store.glimpse(request).await {
            applied
        } else {
            let (store, request) = (self.inner.store.clone(), request.clone());
            self.on_engine(async move { patiently(|| store.claim(vec![request.clone()])).await }).await?.remove(0)
        };
        crash_point!("claim.after");
        let now = applied.now;
        let claim = Claim::from_applied(applied)?;
        // Who asks without pinning is not answered from memory either.
        if let (Claim::Replay(replay), true) = (&claim, request.policy.pinned) {
            self.inner.replays.remember(&replay.operation, sent, now);
        }
        Ok(claim.map(|operation| self.lease(operation, request, sent)))
    }

    /// Waits for a lane's answer. Where there is one writer, somebody's transaction may keep it waiting; a claim that
    /// would change nothing is then answered without it. Most transactions are over before that is worth a look.
    async fn or_glimpse(
        &self,
        answer: impl Future<Output = Result<Applied>>,
        request: &Arc<Request>,
    ) -> Result<Applied> {
        if !self.inner.store.one_writer() {
            return answer.await;
        }
        let mut answer = std::pin::pin!(answer);
        if let Ok(answer) = tokio::time::timeout(PATIENT, &mut answer).await {
            return answer;
        }
        let glimpsed = tokio::select! {
            biased;
            answer = &mut answer => return answer,
            glimpsed = self.inner.store.glimpse(request) => glimpsed,
        };
        match glimpsed {
            // One that says acquired has seen this very claim, which the lane has made meanwhile: the lease is in its
            // answer.
            Ok(Some(applied)) if applied.answer != Answer::Acquired => Ok(applied),
            _ => answer.await,
        }
    }
}

/// A claim that is on its way. If its caller goes away, a lease that it gets is put back: nobody
/// will begin the work.
struct Asked<'a, S: Store> {
    ledger: &'a Ledger<S>,
    answer: Option<oneshot::Receiver<Result<Applied>>>,
}

impl<S: Store> Asked<'_, S> {
    async fn answer(mut self) -> Result<Applied> {
        let Some(answer) = self.answer.as_mut() else { return Err(Error::Stopping) };
        let applied = answer.await.map_err(|_| Error::Stopping)?;
        self.answer = None;
        applied
    }
}

impl<S: Store> Drop for Asked<'_, S> {
    fn drop(&mut self) {
        let Some(answer) = self.answer.take() else { return };
        let ledger = self.ledger.clone();
        self.ledger.inner.engine.spawn(async move {
            if let Ok(Ok(Applied { answer: Answer::Acquired, operation: Some(op), .. })) = answer.await {
                let write = Write::Release { delay: Duration::ZERO, why: None };
                // If this fails too, the lease lapses.
                let _ = ledger.write(LeaseWrite { id: op.id, fence: op.fence, write }).await;
                ledger.wake(op.id);
            }
        });
    }
}
