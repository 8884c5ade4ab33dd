//! Claims whose answers were lost, undone in the background.
//!
//! A batch of claims can be committed and its answer lost on the way. When the store cannot be asked again in time, the
//! callers are told that nothing was claimed. What was claimed all the same would be run by no one: under `hold` or
//! `probe` it would be in doubt when its lease lapses, and wait for a person. So the tokens of such claims are looked
//! up until their leases would have ended, and what they hold is withdrawn. Nothing is ever claimed here.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use tokio::sync::Notify;

use crate::{
    Result, Token, Uptime,
    machine::{Answer, Request, Write},
    store::{LeaseWrite, Store},
};

/// The pause before the first look, and before the others: a store that was away is most likely back soon.
const FIRST: Duration = Duration::from_millis(100);
const LONGEST: Duration = Duration::from_secs(2);

/// For how long after its last answer was awaited a statement may still be carried out by the server.
const STRAGGLING: Duration = Duration::from_secs(15);

/// How many tokens are looked up in one statement.
const ROUND: usize = 1000;

/// How many are remembered: about a megabyte. Beyond that, claims that were made lapse.
const MOST: usize = 16_384;

#[derive(Default)]
pub(crate) struct Withdrawals {
    /// By token, until when it is looked for.
    tokens: Mutex<HashMap<Token, Uptime>>,
    arrived: Notify,
}

impl Withdrawals {
    /// Looks for a claim from now on. Its caller has been told, or will be, that nothing was claimed, and sends it no
    /// more.
    pub(crate) fn add(&self, request: &Request) {
        let until = Uptime::now() + request.policy.lease + STRAGGLING;
        let mut tokens = self.lock();
        if tokens.len() < MOST {
            tokens.insert(request.token, until);
            drop(tokens);
            self.arrived.notify_one();
        } else {
            tracing::warn!("too many claims with lost answers: one is left to lapse, if it was made");
        }
    }

    /// Looks for what there is, every so often. Never ends.
    pub(crate) async fn work<S: Store>(self: Arc<Self>, store: S) {
        let mut pause = FIRST;
        loop {
            if self.lock().is_empty() {
                self.arrived.notified().await;
                pause = FIRST;
            }
            tokio::select! {
                () = tokio::time::sleep(pause) => pause = (2 * pause).min(LONGEST),
                () = self.arrived.notified() => {
                    pause = FIRST;
                    tokio::time::sleep(pause).await;
                }
            }
            if let Err(error) = self.round(&store).await {
                tracing::debug!(%error, "claims with lost answers cannot be looked up; the next round tries again");
            }
        }
    }

    /// Looks for all of them once. A token is looked for again also when it was found: a statement that was held up on
    /// its way may make the same claim once more. It is given up when a look after its time has found nothing to undo.
    pub(crate) async fn round<S: Store>(&self, store: &S) -> Result<()> {
        let tokens: Vec<Token> = self.lock().keys().copied().collect();
        for tokens in tokens.chunks(ROUND) {
            let over: Vec<Token> = {
                let all = self.lock();
                tokens.iter().filter(|token| all.get(token).is_some_and(|until| until.has_passed())).copied().collect()
            };
            let held = store.held_by(tokens.to_vec()).await?;
            if !held.is_empty() {
                let write = |(_, id, fence): &_| LeaseWrite { id: *id, fence: *fence, write: Write::Withdraw };
                let answers = store.write(held.iter().map(write).collect()).await?;
                let done = answers.iter().filter(|applied| applied.answer != Answer::Busy).count();
                tracing::warn!(claims = done, "claims whose answers were lost have been withdrawn; nothing ran");
            }
            let mut all = self.lock();
            for token in over.iter().filter(|token| held.iter().all(|(found, ..)| found != *token)) {
                all.remove(token);
            }
        }
        Ok(())
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<Token, Uptime>> {
        self.tokens.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
