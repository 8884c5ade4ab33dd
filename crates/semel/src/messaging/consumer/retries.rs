//! Retries: messages that failed or may have killed their process, each alone.

use std::{sync::Arc, time::Duration};

use tokio::{
    sync::{Semaphore, SemaphorePermit},
    task::JoinSet,
};

use super::{
    Handler, Refusal, Shared,
    attempt::{Item, Undone},
    fault::Faults,
    fresh::MOST_STRIKES,
    letters::{conflict, named, tidy},
};
use crate::{
    Error, Result, Uptime, crash_point,
    messaging::{
        ConsumerStore, Retry, RetryRow,
        pause::{Pause, Stop},
    },
};

/// The polling interval, without a wake.
const POLL: Duration = Duration::from_secs(1);

/// Consumers of a process start their first retry one after the other. If one kills the process, the others have not
/// begun, so no crash is counted for them.
static FIRST: Semaphore = Semaphore::const_new(1);

/// How long to wait for the turn to start a first retry: another consumer's handler may take long.
const TURN: Duration = Duration::from_secs(1);

/// Each counted retry of a process holds one permit; a retry that was cut off before holds all of them, so it runs
/// alone. If it kills the process, no other retry is counted as a crash with it.
static LIVES: Semaphore = Semaphore::const_new(ALL as usize);
const ALL: u32 = 1 << 16;

/// Runs the retries of a consumer until it is stopped, up to `most` concurrently.
///
/// A taken retry begins at once, because its start is counted. After a start of the process the limit is one, then two,
/// and so on: a message that kills the process should take few others down with it, and none of them twice.
pub(super) async fn work<S: ConsumerStore, H: Handler<S>>(shared: Arc<Shared<S, H>>, most: usize, mut stop: Stop) {
    let wake = shared.store().retry_wake();
    let mut runs: JoinSet<()> = JoinSet::new();
    let (mut width, mut pause) = (1, Pause::new());
    loop {
        while let Some(ended) = runs.try_join_next() {
            width = survived(ended, width, most);
        }
        if stop.is_now() {
            break;
        }
        if runs.len() >= width {
            tokio::select! {
                () = stop.come() => break,
                Some(ended) = runs.join_next() => width = survived(ended, width, most),
            }
            continue;
        }
        match next(&shared, width == 1, &mut runs, &mut stop).await {
            Ok(Some(wait)) => {
                pause.reset();
                tokio::select! {
                    () = stop.come() => break,
                    () = wake.woken() => {}
                    () = shared.retry.notified() => {}
                    () = tokio::time::sleep(wait) => {}
                    Some(ended) = runs.join_next() => width = survived(ended, width, most),
                }
            }
            Ok(None) => pause.reset(),
            Err(error) => {
                shared.store_is_away(&error);
                pause.wait(&mut stop).await;
            }
        }
    }
    while runs.join_next().await.is_some() {}
}

/// A run ended, and the process is still alive.
fn survived(ended: Result<(), tokio::task::JoinError>, width: usize, most: usize) -> usize {
    if let Err(error) = ended {
        tracing::error!(%error, "a retry ended early");
    }
    (width * 2).min(most)
}

/// Begins one due retry; returns how long to wait if there was none.
async fn next<S: ConsumerStore, H: Handler<S>>(
    shared: &Arc<Shared<S, H>>,
    first: bool,
    runs: &mut JoinSet<()>,
    stop: &mut Stop,
) -> Result<Option<Duration>> {
    shared.settle().await?;
    // Reading is cheaper than taking, and most of the time nothing is due.
    let Some(due) = shared.store().next_retry(&shared.name).await? else { return Ok(Some(POLL)) };
    let wait = due.since(shared.store().now().await?);
    if !wait.is_zero() {
        return Ok(Some(wait.min(POLL)));
    }
    let turn: Option<SemaphorePermit<'static>> = match first {
        true => tokio::time::timeout(TURN, FIRST.acquire()).await.ok().and_then(Result::ok),
        false => None,
    };
    // Before the take, which counts the start.
    let Ok(Ok(life)) = tokio::time::timeout(TURN, LIVES.acquire()).await else { return Ok(Some(Duration::ZERO)) };
    // The lease has to last until the transaction begins. From then on the row is locked, however long the run is, and
    // the lock ends with the process.
    let lease = shared.options.lease;
    let deadline = Uptime::now() + lease;
    let Some(row) = shared.store().take_retries(&shared.name, 1, lease).await?.pop() else {
        shared.store_is_back();
        // Another consumer has it.
        return Ok(Some(POLL));
    };
    shared.store_is_back();
    crash_point!("consumer.retry_taken");
    if crashes(&row) > 0 {
        drop(life);
        let alone = tokio::select! {
            () = stop.come() => None,
            // Before the lease ends. If another handler never returns, another process may take this retry.
            alone = tokio::time::timeout(lease / 2, LIVES.acquire_many(ALL)) => alone.ok().and_then(Result::ok),
        };
        match alone {
            Some(_alone) => shared.retry(row, deadline).await,
            None => shared.not_begun(&row).await,
        }
        return Ok(None);
    }
    let shared = shared.clone();
    runs.spawn(async move {
        let _held = (turn, life);
        shared.retry(row, deadline).await;
    });
    Ok(None)
}

/// The number of earlier runs that neither failed nor completed.
fn crashes(row: &RetryRow) -> u32 {
    row.starts.saturating_sub(row.failures).saturating_sub(1)
}

impl<S: ConsumerStore, H: Handler<S>> Shared<S, H> {
    async fn retry(self: &Arc<Self>, row: RetryRow, deadline: Uptime) {
        let crashes = crashes(&row);
        if crashes >= self.options.max_crashes {
            let runs = if crashes == 1 { "run was" } else { "runs were" };
            let why = format!("{crashes} {runs} cut off, or killed their process");
            return self.failed(&row, &why, Retry::Dead).await;
        }
        let items = match self.identify(&row.message) {
            Ok(name) => Arc::new(vec![Item::new(row.message.clone(), name)]),
            Err(why) => return self.failed(&row, &why, Retry::Dead).await,
        };
        let item: &Item = &items[0];
        let nth = row.failures.saturating_add(1);
        let mut pause = Duration::from_millis(50);
        let (mut unknown, mut faults) = (false, Faults::default());
        loop {
            match self.attempt(&items, Some(&row)).await {
                Ok(_) => return self.committed(&item.message),
                Err(Undone::Lost) => {
                    // By the commit with the unknown result, if there was one.
                    if unknown {
                        self.committed(&item.message);
                    }
                    return;
                }
                Err(Undone::Conflict(first)) => {
                    let (why, dead) = conflict(first, item);
                    return self.failed(&row, &why, dead).await;
                }
                Err(Undone::Refused(refusal)) => {
                    let (why, retry) = self.after(refusal, nth, row.id);
                    return self.failed(&row, &why, retry).await;
                }
                Err(Undone::Store(Error::Stopping)) => return self.not_begun(&row).await,
                Err(Undone::Store(error)) => {
                    unknown |= matches!(error, Error::OutcomeUnknown(_));
                    if self.is_at_fault(&mut faults, item, &error).await {
                        let (why, retry) = self.after(Refusal::retry(&error), nth, row.id);
                        match self.say_failed(&row, &why, retry).await {
                            Ok(()) => return,
                            // The store was at fault, not the message.
                            Err(error) => {
                                faults = Faults::default();
                                self.store_is_away(&error);
                            }
                        }
                    }
                    // Past the deadline another consumer may take it. An unavailable store is not the message's fault,
                    // unless the message takes it down. A message at fault is tried again: its next transaction checks
                    // whether the lease is still held.
                    if deadline.has_passed() && !faults.is_suspected() {
                        if item.entered() <= MOST_STRIKES {
                            self.not_begun(&row).await;
                        }
                        return;
                    }
                    tokio::time::sleep(pause).await;
                    pause = (pause * 2).min(Duration::from_secs(1));
                }
            }
        }
    }

    /// Releases a retry that did not run, so that no crash is counted; later, if the store is unavailable. A consumer
    /// that has taken it by then has another token and keeps it.
    async fn not_begun(&self, row: &RetryRow) {
        match self.store().retry_not_begun(row.id, row.token).await {
            Ok(_) => self.retry.notify_one(),
            Err(error) if error.is_transient() => {
                self.owed.lock().push((row.id, row.token));
            }
            Err(error) => tracing::error!(%error, consumer = self.name, "a retry could not be released"),
        }
    }

    /// Releases the retries whose release could not be stored before.
    async fn settle(&self) -> Result<()> {
        loop {
            let Some((id, token)) = self.owed.lock().last().copied() else {
                return Ok(());
            };
            match self.store().retry_not_begun(id, token).await {
                Err(error) if error.is_transient() => return Err(error),
                Err(error) => tracing::error!(%error, consumer = self.name, "a retry could not be released"),
                Ok(_) => {}
            }
            // By row and token: a run may have ended meanwhile and added another one.
            self.owed.lock().retain(|owed| *owed != (id, token));
        }
    }

    /// Stores the failure of a retry. Gives up at the deadline: the lease expires, and the retry is due again.
    async fn failed(&self, row: &RetryRow, why: &str, retry: Retry) {
        let until = Uptime::now() + self.options.lease;
        let mut pause = Duration::from_millis(50);
        while let Err(error) = self.say_failed(row, why, retry).await {
            if !error.is_transient() || until.has_passed() {
                let (consumer, message_id) = (&*self.name, named(&row.message));
                return tracing::error!(%error, consumer, message_id, "the failure of a retry could not be stored");
            }
            self.store_is_away(&error);
            tokio::time::sleep(pause.min(until.remaining())).await;
            pause = (pause * 2).min(Duration::from_secs(1));
        }
    }

    /// Stores the failure of a retry; tries once.
    async fn say_failed(&self, row: &RetryRow, why: &str, retry: Retry) -> Result<()> {
        let why = tidy(why);
        let ours = self.store().retry_failed(row.id, row.token, &why, retry).await?;
        crash_point!("consumer.retry_failed");
        if matches!(retry, Retry::After(_)) {
            self.retry.notify_one();
        }
        if ours {
            self.tell(&row.message, row.failures.saturating_add(1), &why, retry, true);
        }
        Ok(())
    }
}
