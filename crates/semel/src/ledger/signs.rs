//! Signs of life: each node stores every few seconds that it is alive, and what it does.

use std::{sync::Arc, time::Duration};

use tokio::sync::{Mutex, watch};

use super::{Ledger, PATIENCE};
use crate::{
    Timestamp,
    fleet::{Fleet, Sign},
};

/// The interval.
const EVERY: Duration = Duration::from_secs(10);

impl<S: Fleet> Ledger<S> {
    /// Stores a sign of life every ten seconds, until `stop` turns true or its sender is dropped; then removes it. A
    /// [`Worker`](crate::Worker) does this itself.
    pub async fn show_life(&self, sign: Sign, mut stop: watch::Receiver<bool>) {
        self.show_life_while(sign, async move { drop(stop.wait_for(|stop| *stop).await) }).await;
    }

    /// Stores signs of life while a future runs.
    pub(crate) async fn show_life_while(&self, sign: Sign, work: impl Future<Output = ()>) {
        let mut signs = Signs { ledger: self, sign, failing: false, stored: Arc::default() };
        tokio::select! {
            () = work => {}
            () = signs.go_on() => {}
        }
        signs.end().await;
    }
}

struct Signs<'a, S: Fleet> {
    ledger: &'a Ledger<S>,
    sign: Sign,
    /// Whether the last one could not be stored. It is logged once.
    failing: bool,
    /// Held while a sign is stored or removed.
    stored: Arc<Mutex<Stored>>,
}

#[derive(Default)]
struct Stored {
    /// The answer to the first sign: the start of this process. Set by the task that has stored it: its caller may be
    /// gone by then.
    since: Option<Timestamp>,
    /// Whether the sign was removed: one still in flight is not stored afterwards.
    over: bool,
}

impl<S: Fleet> Signs<'_, S> {
    async fn go_on(&mut self) {
        loop {
            let (store, owner, sign) = (self.ledger.store().clone(), self.ledger.owner().to_owned(), self.sign.clone());
            let stored = self.stored.clone();
            let left = self.ledger.on_engine(async move {
                let mut stored = stored.lock().await;
                if !stored.over {
                    stored.since = Some(store.leave_sign(&owner, &sign, stored.since).await?);
                }
                Ok(())
            });
            match left.await {
                Ok(()) => {
                    if std::mem::take(&mut self.failing) {
                        tracing::info!("this node's sign of life is stored again");
                    }
                }
                Err(error) if !std::mem::replace(&mut self.failing, true) => {
                    tracing::warn!(%error, "this node's sign of life could not be stored; trying again every 10 s");
                }
                Err(_) => {}
            }
            tokio::time::sleep(EVERY).await;
        }
    }

    /// Removes the sign. If that fails, the sweep removes it.
    async fn end(self) {
        let (store, owner, stored) = (self.ledger.store().clone(), self.ledger.owner().to_owned(), self.stored);
        let removed = self.ledger.on_engine(async move {
            let mut stored = stored.lock().await;
            stored.over = true;
            match stored.since {
                Some(since) => store.remove_sign(&owner, since).await,
                None => Ok(()),
            }
        });
        if !matches!(tokio::time::timeout(PATIENCE, removed).await, Ok(Ok(()))) {
            tracing::debug!("this node's sign of life could not be removed; the sweep deletes it");
        }
    }
}
