//! Withdraws claims whose answers were lost, in the background.
//!
//! A batch of claims can be committed and its answer lost. If the store cannot be asked again in time, the callers get
//! an error: nothing was claimed. A claim that was made nevertheless would not be run: under `hold` or `probe` it would
//! be in doubt when its lease expires, and wait for a person. So the tokens of such claims are looked up until their
//! leases would have expired, and the claims found are withdrawn. Nothing is ever claimed here.

use std::{collections::HashMap, sync::Arc, time::Duration};

use parking_lot::Mutex;
use tokio::sync::Notify;

use crate::{
    Error, Fence, Result, Token, Uptime,
    machine::{Answer, Request, Write},
    store::{LeaseWrite, Store},
};

/// The delay before the first look-up, and before the others: an unavailable store is most likely back soon.
const FIRST: Duration = Duration::from_millis(100);
const LONGEST: Duration = Duration::from_secs(2);

/// How long the server may still execute a statement after its client stopped waiting for the answer.
const STRAGGLING: Duration = Duration::from_secs(15);

/// The most tokens per statement.
const ROUND: usize = 1000;

/// The most claims per commit. All data stored with them is loaded, up to 16 MiB each.
const AT_ONCE: usize = 16;

/// How many are remembered: about a megabyte. Further claims are left to lease expiry.
const MOST: usize = 16_384;

#[derive(Default)]
pub(crate) struct Withdrawals {
    /// By token: until when it is looked up.
    tokens: Mutex<HashMap<Token, Uptime>>,
    arrived: Notify,
}

impl Withdrawals {
    /// Looks for a claim from now on. Its caller got, or will get, an error, and does not send it again.
    pub(crate) fn add(&self, request: &Request) {
        self.add_token(request.token, request.policy.lease);
    }

    /// The same by its token, and the longest lease that it can have.
    pub(crate) fn add_token(&self, token: Token, lease: Duration) {
        let until = Uptime::now() + lease + STRAGGLING;
        let mut tokens = self.tokens.lock();
        if tokens.len() < MOST {
            tokens.insert(token, until);
            drop(tokens);
            self.arrived.notify_one();
        } else {
            tracing::warn!("too many claims with lost answers; one is left to lease expiry, if it was made");
        }
    }

    /// Looks them up periodically. Never ends.
    pub(crate) async fn work<S: Store>(self: Arc<Self>, store: S) {
        let mut pause = FIRST;
        loop {
            if self.tokens.lock().is_empty() {
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

    /// Looks all of them up once. A token is looked up again even after it was found: a delayed statement may make the
    /// same claim once more. It is dropped when a look-up after its time has found nothing to withdraw, or a claim that
    /// the store refuses to withdraw: its lease has expired by then.
    pub(crate) async fn round<S: Store>(&self, store: &S) -> Result<()> {
        let tokens: Vec<Token> = self.tokens.lock().keys().copied().collect();
        let mut trouble = None;
        for tokens in tokens.chunks(ROUND) {
            let over: Vec<Token> = {
                let all = self.tokens.lock();
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
            let mut all = self.tokens.lock();
            for token in over.iter().filter(|token| held.iter().all(|(found, ..)| found != *token)) {
                all.remove(token);
            }
        }
        trouble.map_or(Ok(()), Err)
    }
}

/// A claim that was made: its token, operation and fence.
type Made = (Token, i64, Fence);

/// Withdraws claims, several per commit. If that fails, each is withdrawn alone, so that an unreadable or refused one
/// delays no other. Returns the refused ones; the first error goes to `trouble`.
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
        // If the writer is busy or the store unavailable, no claim is at fault, and no other can be withdrawn.
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

/// Withdraws claims in one commit; returns how many. Those with locked rows have to wait.
async fn undo<S: Store>(store: &S, held: &[Made]) -> Result<usize> {
    let write = |(_, id, fence): &Made| LeaseWrite { id: *id, fence: *fence, write: Write::Withdraw };
    let answers = store.write(held.iter().map(write).collect()).await?;
    Ok(answers.iter().filter(|applied| applied.answer != Answer::Busy).count())
}
