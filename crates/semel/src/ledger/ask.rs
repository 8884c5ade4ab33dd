//! Sends claims: answered from memory, through the lane, and again while another holds the lease.

use std::{future::Future, sync::Arc, time::Duration};

use tokio::sync::oneshot;

use super::{Ledger, PATIENCE, patiently, stored_bytes};
use crate::{
    Error, Lease, Operation, Policy, Result, Token, Uptime,
    claim::{Claim, Work, weight},
    crash_point,
    lanes::Call,
    machine::{Answer, Request, Write, while_busy},
    renewer::OwnDeadline,
    store::{Applied, LeaseWrite, Store},
};

/// How long a claim is sent again while another transaction holds its row, before a claim with the stored payload is
/// answered in flight: longer than a commit takes, and most rounds of a sweep.
const HELD: Duration = Duration::from_millis(300);

/// How long a claim waits for its lane before it is tried without the writer: longer than a flush and some
/// transactions, too short for a person to notice.
const PATIENT: Duration = Duration::from_millis(50);

impl<S: Store> Ledger<S> {
    /// Claims: asks for the right to execute.
    ///
    /// # Errors
    /// [`Error::Invalid`] if the work is invalid, and errors of the store. Nothing was claimed then: a claim whose
    /// answer was lost is withdrawn in the background.
    pub async fn claim(&self, work: Work) -> Result<Claim<Lease<S>>> {
        let request = self.request(work)?;
        let claim = self.ask(&request).await?;
        self.note(&claim, &request);
        Ok(claim)
    }

    /// Claims again for a caller whose claim was just answered, with another policy. The first answer was counted as a
    /// repeat; this one is not.
    ///
    /// # Errors
    /// As [`Ledger::claim`].
    pub async fn claim_again(&self, work: Work) -> Result<Claim<Lease<S>>> {
        let request = self.request(work)?;
        self.ask(&request).await
    }

    /// Claims and, while another holds the lease, waits up to `up_to` for its end: the answer is then the outcome,
    /// or the lease if that run did not complete.
    ///
    /// # Errors
    /// As [`Ledger::claim`].
    pub async fn claim_or_wait(&self, work: Work, up_to: Duration) -> Result<Claim<Lease<S>>> {
        self.claim_or_wait_if(work, up_to, |_| true).await
    }

    /// As [`Ledger::claim_or_wait`], but waits only if `worth` returns true for the operation in flight.
    ///
    /// # Errors
    /// As [`Ledger::claim`].
    pub async fn claim_or_wait_if(
        &self,
        work: Work,
        up_to: Duration,
        worth: impl FnOnce(&Operation) -> bool,
    ) -> Result<Claim<Lease<S>>> {
        self.claim_or_refuse(work, up_to, worth, |_| None).await
    }

    /// As [`Ledger::claim_or_wait_if`], for a caller with its own rules about who may have the answer: if `refusal`
    /// returns a word for the operation, the claim is counted and journalled under that word instead of the ledger's.
    /// The caller then refuses the request, and releases a lease.
    ///
    /// # Errors
    /// As [`Ledger::claim`].
    pub async fn claim_or_refuse(
        &self,
        work: Work,
        up_to: Duration,
        worth: impl FnOnce(&Operation) -> bool,
        refusal: impl FnOnce(&Operation) -> Option<&'static str>,
    ) -> Result<Claim<Lease<S>>> {
        let request = self.request(work)?;
        let mut claim = self.ask(&request).await?;
        if let Claim::InFlight(there) = &claim
            && !up_to.is_zero()
            && worth(&there.operation)
        {
            claim = Box::pin(self.wait(&request, claim, Uptime::now() + up_to)).await?;
        }
        let found = match &claim {
            Claim::Acquired(lease) => Some(lease.operation()),
            other => other.operation(),
        };
        match found.and_then(|found| Some((found, refusal(found)?))) {
            Some((found, word)) => self.note_as(word, found, &request),
            None => self.note(&claim, &request),
        }
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
            // Subscribes before the last check, so that a settle in between is not missed.
            woken.as_mut().enable();
            claim = self.ask(&anew(request)?).await?;
            match &claim {
                Claim::InFlight(there) if there.operation.fence == fence => {}
                _ => continue,
            }
            // A timeout is no error: the answer stays in flight. A stopping ledger takes nothing over, and does not
            // wait for waiters.
            tokio::select! {
                _ = tokio::time::timeout(until.remaining(), woken) => {}
                _ = stopping.wait_for(|stopping| *stopping) => return Ok(claim),
            }
            claim = self.ask(&anew(request)?).await?;
        }
    }

    /// Answers a claim from memory, or sends it.
    pub(super) async fn ask(&self, request: &Arc<Request>) -> Result<Claim<Lease<S>>> {
        // The node's clock starts before the claim is sent, so that its lease and its cache end before the database's.
        let sent = Uptime::now();
        match self.inner.replays.recall(request, sent) {
            Some(claim) => Ok(claim?.map(|operation| self.lease(operation, &request.policy, sent))),
            // Boxed, so that its large future is not moved with every claim.
            None => Box::pin(self.send(request, sent)).await,
        }
    }

    pub(super) fn lease(&self, operation: Arc<Operation>, policy: &Policy, sent: Uptime) -> Lease<S> {
        // The policy of the enqueue applies, if there was one.
        let terms = operation.lease.as_ref().map_or(policy, |lease| &lease.terms);
        let deadline = OwnDeadline::of_claim(sent, terms);
        Lease::new(self.clone(), operation, deadline)
    }

    /// Sends a claim through its lane.
    async fn send(&self, request: &Arc<Request>, sent: Uptime) -> Result<Claim<Lease<S>>> {
        crash_point!("claim.before");
        let applied = self.send_until_decided(request).await?;
        crash_point!("claim.after");
        let now = applied.now;
        let claim = Claim::from_applied(applied)?;
        // A claim without `pinned` is not answered from memory.
        if let (Claim::Replay(replay), true) = (&claim, request.policy.pinned) {
            self.inner.replays.remember(&replay.operation, sent, now);
        }
        Ok(claim.map(|operation| self.lease(operation, &request.policy, sent)))
    }

    /// Sends a claim, and again while another transaction holds its row.
    pub(super) async fn send_until_decided(&self, request: &Arc<Request>) -> Result<Applied> {
        let mut doubt = Doubt { ledger: self, request, open: false };
        let (held, until) = (Uptime::now() + HELD, Uptime::now() + PATIENCE);
        let mut pause = Duration::from_millis(5);
        loop {
            let sent = self.send_once(request).await;
            doubt.open |= sent.as_ref().is_err_and(Error::is_transient);
            let applied = sent?;
            if applied.answer != Answer::Busy {
                doubt.open = false;
                return Ok(applied);
            }
            // Busy may also mean that the claim was made and its answer lost, in the middle of a batch.
            doubt.open = true;
            self.inner.aside.note(request);
            let answer = applied.operation.as_ref().map(|row| while_busy(row, request, applied.now));
            match answer {
                Some(answer @ Answer::InFlight { .. }) if held.has_passed() => {
                    return Ok(Applied { answer, ..applied });
                }
                _ if until.has_passed() => return applied.decided(),
                _ => tokio::time::sleep(pause).await,
            }
            pause = (2 * pause).min(Duration::from_millis(100));
        }
    }

    async fn send_once(&self, request: &Arc<Request>) -> Result<Applied> {
        let (lanes, store) = (&self.inner.lanes, &self.inner.store);
        if self.inner.options.group_commit {
            let lane = if self.inner.aside.has(request) { &lanes.aside } else { &lanes.claims };
            let answer = lane.send(Call::Claim(request.clone()), weight(request)).await?;
            let asked = Asked { ledger: self, request, answer: Some(answer) };
            return self.or_glimpse(asked.answer(), request).await;
        }
        if let Ok(Some(applied)) = store.glimpse(request).await {
            return Ok(applied);
        }
        let (store, request) = (store.clone(), request.clone());
        Ok(self
            .on_engine(async move { patiently(&store, || store.claim(vec![request.clone()])).await })
            .await?
            .remove(0))
    }

    /// Waits for a lane's answer. With one writer, another transaction may delay it; a claim that changes nothing is
    /// then answered without the writer. Most transactions end before that.
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
            // Acquired means that the lane has made this very claim meanwhile: the lease is in its answer.
            Ok(Some(applied)) if applied.answer != Answer::Acquired => Ok(applied),
            _ => answer.await,
        }
    }
}

/// The same claim with a new token. The earlier claim may have been made, and is then withdrawn in the background:
/// under the same token that would take the lease away from its holder.
fn anew(request: &Request) -> Result<Arc<Request>> {
    Ok(Arc::new(Request { token: Token::random()?, ..request.clone() }))
}

/// A claim that may have been made without an answer. Unless it is closed, it is withdrawn in the background.
struct Doubt<'a, S: Store> {
    ledger: &'a Ledger<S>,
    request: &'a Request,
    open: bool,
}

impl<S: Store> Drop for Doubt<'_, S> {
    fn drop(&mut self) {
        if self.open && !self.request.sent_again {
            self.ledger.inner.withdrawals.add(self.request);
        }
    }
}

/// A claim under way. If its caller goes away, its lease is released, because the work will not begin.
struct Asked<'a, S: Store> {
    ledger: &'a Ledger<S>,
    request: &'a Arc<Request>,
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
        let Some(answer) = self.answer.take().filter(|_| !self.request.sent_again) else { return };
        let (ledger, request) = (self.ledger.clone(), self.request.clone());
        self.ledger.inner.engine.spawn(async move {
            let done = match answer.await {
                Ok(Ok(Applied { answer: Answer::Acquired, operation: Some(op), .. })) => {
                    let write = Write::Release { delay: Duration::ZERO, why: None };
                    let write = LeaseWrite { id: op.id, fence: op.fence, write };
                    let released = ledger.write_of(write, stored_bytes(&op)).await;
                    ledger.wake(op.id);
                    released.is_ok()
                }
                Ok(Ok(applied)) => applied.answer != Answer::Busy,
                Ok(Err(error)) => !error.is_transient(),
                Err(_) => true,
            };
            drop(Doubt { ledger: &ledger, request: &request, open: !done });
        });
    }
}
