//! What failed or may have killed its process, each alone.

use std::{
    sync::{Arc, PoisonError},
    time::Duration,
};

use tokio::{
    sync::{Semaphore, SemaphorePermit},
    task::JoinSet,
};

use super::{
    Handler, Refusal, Shared,
    attempt::{Item, Undone},
    fresh::BENEFITS_OF_THE_DOUBT,
    letters::{conflict, named, tidy},
    trouble::Trouble,
};
use crate::{
    Error, Result, Uptime, crash_point,
    messaging::{
        MessageStore, Retry, RetryRow,
        pause::{Pause, Stop},
    },
};

/// How often to look without being woken.
const POLL: Duration = Duration::from_secs(1);

/// The first retry of each consumer of a process: one after the other. If one of them kills the process, none of the
/// others was begun, and none is counted as having done so.
static FIRST: Semaphore = Semaphore::const_new(1);

/// How long to wait for one's turn at the first: another consumer's handler may take long.
const TURN: Duration = Duration::from_secs(1);

/// Every retry of a process that is counted has one of these; one that was cut off before has all of them. So it runs
/// alone: if it is what kills the process, nobody else is counted with it, again and again, until they count as killers.
static LIVES: Semaphore = Semaphore::const_new(ALL as usize);
const ALL: u32 = 1 << 16;

/// Runs the retries of a consumer until it is time to stop; up to `most` at once.
///
/// What is taken is begun at once, since it is counted. After a start there is one, then two, and so on for as long as
/// the process lives: a message that kills it should take few others down with it, and none of them twice.
pub(super) async fn work<S: MessageStore, H: Handler<S>>(shared: Arc<Shared<S, H>>, most: usize, mut stop: Stop) {
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

/// A run ended, and we are still there.
fn survived(ended: Result<(), tokio::task::JoinError>, width: usize, most: usize) -> usize {
    if let Err(error) = ended {
        tracing::error!(%error, "a retry ended early");
    }
    (width * 2).min(most)
}

/// Begins one that is due; how long to wait if there was none.
async fn next<S: MessageStore, H: Handler<S>>(
    shared: &Arc<Shared<S, H>>,
    first: bool,
    runs: &mut JoinSet<()>,
    stop: &mut Stop,
) -> Result<Option<Duration>> {
    shared.settle().await?;
    // Looking is cheaper than taking, and there is nothing most of the time.
    let Some(due) = shared.store().next_retry(&shared.name).await? else { return Ok(Some(POLL)) };
    let wait = due.since(shared.store().now().await?);
    if !wait.is_zero() {
        return Ok(Some(wait.min(POLL)));
    }
    let turn: Option<SemaphorePermit<'static>> = match first {
        true => tokio::time::timeout(TURN, FIRST.acquire()).await.ok().and_then(Result::ok),
        false => None,
    };
    // Before it is taken, and so counted.
    let Ok(Ok(life)) = tokio::time::timeout(TURN, LIVES.acquire()).await else { return Ok(Some(Duration::ZERO)) };
    // From here to the beginning of its transaction. That has the row locked, so that no other consumer takes it,
    // however long the run is; and if this process dies, its locks go with it.
    let lease = shared.options.retry_lease;
    let deadline = Uptime::now() + lease;
    let Some(row) = shared.store().take_retries(&shared.name, 1, lease).await?.pop() else {
        shared.store_is_back();
        // Somebody else has it.
        return Ok(Some(POLL));
    };
    shared.store_is_back();
    crash_point!("consumer.retry_taken");
    if crashes(&row) > 0 {
        drop(life);
        let alone = tokio::select! {
            () = stop.come() => None,
            // In time to run before the lease ends. If somebody else's handler never does, another process may have it.
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

/// How many runs of it were begun before this one, and neither failed nor ended.
fn crashes(row: &RetryRow) -> u32 {
    row.starts.saturating_sub(row.failures).saturating_sub(1)
}

impl<S: MessageStore, H: Handler<S>> Shared<S, H> {
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
        let (mut unknown, mut trouble) = (false, Trouble::default());
        loop {
            match self.attempt(&items, Some(&row)).await {
                Ok(_) => return self.committed(&item.message),
                Err(Undone::Lost) => {
                    // By the commit whose fate was unknown, if there was one.
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
                    if self.is_its_own(&mut trouble, item, &error).await {
                        let (why, retry) = self.after(Refusal::retry(&error), nth, row.id);
                        match self.say_failed(&row, &why, retry).await {
                            Ok(()) => return,
                            // It was the store after all.
                            Err(error) => {
                                trouble = Trouble::default();
                                self.store_is_away(&error);
                            }
                        }
                    }
                    // Past the deadline another consumer may have it, and it comes back by itself. That the store was
                    // away says nothing about the message, unless it is the message that takes it down. One that is in
                    // trouble by itself is tried on: its next transaction finds out whether it is still ours.
                    if deadline.has_passed() && !trouble.is_suspected() {
                        if item.entered() <= BENEFITS_OF_THE_DOUBT {
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

    /// Gives back a retry that did not really happen, so that nobody takes it for one that killed its process; later, if
    /// the store is away. Whoever has it by then has another token, and keeps it.
    async fn not_begun(&self, row: &RetryRow) {
        match self.store().retry_not_begun(row.id, row.token).await {
            Ok(_) => self.retry.notify_one(),
            Err(error) if error.is_transient() => {
                self.owed.lock().unwrap_or_else(PoisonError::into_inner).push((row.id, row.token));
            }
            Err(error) => tracing::error!(%error, consumer = self.name, "a retry could not be given back"),
        }
    }

    /// Gives back what could not be given back before.
    async fn settle(&self) -> Result<()> {
        loop {
            let Some((id, token)) = self.owed.lock().unwrap_or_else(PoisonError::into_inner).last().copied() else {
                return Ok(());
            };
            match self.store().retry_not_begun(id, token).await {
                Err(error) if error.is_transient() => return Err(error),
                Err(error) => tracing::error!(%error, consumer = self.name, "a retry could not be given back"),
                Ok(_) => {}
            }
            // By name: a run may have ended meanwhile, and owe another.
            self.owed.lock().unwrap_or_else(PoisonError::into_inner).retain(|owed| *owed != (id, token));
        }
    }

    /// Writes down that a retry failed; not for ever, for it comes back by itself.
    async fn failed(&self, row: &RetryRow, why: &str, retry: Retry) {
        let until = Uptime::now() + self.options.retry_lease;
        let mut pause = Duration::from_millis(50);
        while let Err(error) = self.say_failed(row, why, retry).await {
            if !error.is_transient() || until.has_passed() {
                let (consumer, message_id) = (&*self.name, named(&row.message));
                return tracing::error!(%error, consumer, message_id, "the failure of a retry was not kept");
            }
            self.store_is_away(&error);
            tokio::time::sleep(pause.min(until.remaining())).await;
            pause = (pause * 2).min(Duration::from_secs(1));
        }
    }

    /// Writes down that a retry failed, once.
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
