//! Work for later: stored now, and run by a worker.

use std::sync::Arc;

use super::{Ledger, outside_transactions};
use crate::{
    Error, Result,
    claim::{Enqueued, Work, weight},
    crash_point,
    machine::Request,
    store::{Applied, Store},
};

/// The most operations, and their approximate bytes, of one statement.
const AT_ONCE: (usize, usize) = (5000, 8 << 20);

impl<S: Store> Ledger<S> {
    /// Stores work that a worker will run. It goes through the lane, as claims do, and shares a commit with what is
    /// enqueued at the same time. An existing key is answered with its state.
    ///
    /// # Errors
    /// As [`Ledger::claim`].
    pub async fn enqueue(&self, work: Work) -> Result<Enqueued> {
        let request = self.later(work)?;
        crash_point!("enqueue.before");
        let applied = self.send_until_decided(&request).await?;
        crash_point!("enqueue.after");
        self.enqueued(applied, &request)
    }

    /// Stores many at once: one statement per few thousand, answered in order. If one cannot be stored, those before it
    /// are stored; enqueueing all of them again is harmless.
    ///
    /// # Errors
    /// As [`Ledger::enqueue`].
    pub async fn enqueue_all(&self, works: Vec<Work>) -> Result<Vec<Enqueued>> {
        let requests = works.into_iter().map(|work| self.later(work)).collect::<Result<Vec<_>>>()?;
        let mut answers = Vec::with_capacity(requests.len());
        for part in parts(&requests) {
            let (store, part) = (self.inner.store.clone(), part.to_vec());
            let asked = part.clone();
            let claims = async move { super::patiently(&store, || store.claim(asked.clone())).await };
            for (applied, request) in self.on_engine(claims).await?.into_iter().zip(&part) {
                // A row that another transaction holds is retried alone.
                let applied = match applied.decided() {
                    Ok(applied) => applied,
                    Err(_) => self.send_until_decided(request).await?,
                };
                answers.push(self.enqueued(applied, request)?);
            }
        }
        Ok(answers)
    }

    /// Stores work in the caller's transaction: it commits with the caller's rows. The keys must differ.
    ///
    /// # Errors
    /// [`Error::Invalid`] if two works have one key; errors of the store. Roll back then.
    pub async fn enqueue_in(&self, tx: &S::Tx, works: Vec<Work>) -> Result<Vec<Enqueued>> {
        let owner = &self.inner.options.owner;
        let requests =
            works.into_iter().map(|work| work.into_enqueue(owner).map(Arc::new)).collect::<Result<Vec<_>>>()?;
        let mut keys: Vec<_> = requests.iter().map(|request| (&request.scope, &request.key)).collect();
        keys.sort_unstable();
        if keys.windows(2).any(|pair| pair[0] == pair[1]) {
            return Err(Error::Invalid("two works of one transaction have the same key".into()));
        }
        let mut answers = Vec::with_capacity(requests.len());
        for part in parts(&requests) {
            for applied in self.inner.store.claim_all_in(tx, part.to_vec()).await? {
                answers.push(Enqueued::from_applied(applied)?);
            }
        }
        Ok(answers)
    }

    fn later(&self, work: Work) -> Result<Arc<Request>> {
        outside_transactions()?;
        if self.is_stopping() {
            return Err(Error::Stopping);
        }
        work.into_enqueue(&self.inner.options.owner).map(Arc::new)
    }

    fn enqueued(&self, applied: Applied, request: &Request) -> Result<Enqueued> {
        let enqueued = Enqueued::from_applied(applied)?;
        if !matches!(enqueued, Enqueued::New(_)) {
            self.note_as(enqueued.word(), enqueued.operation(), request);
        }
        Ok(enqueued)
    }
}

/// Splits requests into parts for one statement each.
fn parts(requests: &[Arc<Request>]) -> impl Iterator<Item = &[Arc<Request>]> {
    let (most, most_bytes) = AT_ONCE;
    let mut rest = requests;
    std::iter::from_fn(move || {
        let mut bytes = 0;
        let mut fits = |request: &Arc<Request>| {
            bytes += weight(request);
            bytes <= most_bytes
        };
        let n = rest.iter().take(most).take_while(|request| fits(request)).count();
        // A larger one goes alone.
        let (part, left) = rest.split_at(n.max(1).min(rest.len()));
        rest = left;
        (!part.is_empty()).then_some(part)
    })
}
