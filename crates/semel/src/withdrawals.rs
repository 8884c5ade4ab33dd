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
    Error, Fence, Result, Token, Uptime,
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

/// How many claims are withdrawn in one commit. All that is stored with them is loaded for it, up to 16 MiB each.
const AT_ONCE: usize = 16;

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
        self.add_token(request.token, request.policy.lease);
    }

    /// The same by its token, and the longest lease that it can have got.
    pub(crate) fn add_token(&self, token: Token, lease: Duration) {
        let until = Uptime::now() + lease + STRAGGLING;
        let mut tokens = self.lock();
        if tokens.len() < MOST {
            tokens.insert(token, until);
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
    /// its way may make the same claim once more. It is given up when a look after its time has found nothing to undo, or
    /// nothing that the store would undo: the lease has ended by then.
    pub(crate) async fn round<S: Store>(&self, store: &S) -> Result<()> {
        let tokens: Vec<Token> = self.lock().keys().copied().collect();
        let mut trouble = None;
        for tokens in tokens.chunks(ROUND) {
            let over: Vec<Token> = {
                let all = self.lock();
                tokens.iter().filter(|token| all.get(token).is_some_and(|until| until.has_passed())).copied().collect()
            };
            let mut held = match store.held_by(tokens.to_vec()).await {
                Ok(held) => held,
                Err(error) => {
                    trouble.get_or_insert(error);
                    continue;
                }
            };
            let refused = withdraw(store, &held, &mut trouble).await;
            held.retain(|(found, ..)| !refused.contains(found));
            let mut all = self.lock();
            for token in over.iter().filter(|token| held.iter().all(|(found, ..)| found != *token)) {
                all.remove(token);
            }
        }
        trouble.map_or(Ok(()), Err)
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<Token, Uptime>> {
        self.tokens.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A claim that was made: its token, operation and fence.
type Made = (Token, i64, Fence);

/// Withdraws claims, a few in one commit. If that fails, each is withdrawn by itself: one that the store refuses to
/// write, or cannot read, keeps no other from its turn. Which were refused; the first error goes to `trouble`.
async fn withdraw<S: Store>(store: &S, held: &[Made], trouble: &mut Option<Error>) -> Vec<Token> {
    let (mut done, mut refused) = (0, Vec::new());
    for some in held.chunks(AT_ONCE) {
        let error = match undo(store, some).await {
            Ok(undone) => {
                done += undone;
                continue;
            }
            Err(error) => error,
        };
        // No claim is to blame for a writer that is busy, or for a store that is away; nor can any other be withdrawn.
        if error.is_transient() && (store.one_writer() || store.now().await.is_err()) {
            trouble.get_or_insert(error);
            break;
        }
        for one in some {
            match undo(store, std::slice::from_ref(one)).await {
                Ok(undone) => done += undone,
                Err(error) => {
                    if !error.is_transient() {
                        refused.push(one.0);
                    }
                    trouble.get_or_insert(error);
                }
            }
        }
    }
    if done > 0 {
        tracing::warn!(claims = done, "claims whose answers were lost have been withdrawn; nothing ran");
    }
    refused
}

/// Withdraws claims in one commit. How many: those whose rows are locked have to wait.
async fn undo<S: Store>(store: &S, held: &[Made]) -> Result<usize> {
    let write = |(_, id, fence): &Made| LeaseWrite { id: *id, fence: *fence, write: Write::Withdraw };
    let answers = store.write(held.iter().map(write).collect()).await?;
    Ok(answers.iter().filter(|applied| applied.answer != Answer::Busy).count())
}
