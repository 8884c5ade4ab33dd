//! Ledger: the entry point of the crate.

mod ask;
mod enqueue;
mod remote;
mod signs;
mod take;

pub use remote::Renewed;

use std::{future::Future, sync::Arc, time::Duration};

use bytes::Bytes;
use tokio::sync::watch;

use crate::{
    Error, Fence, Operation, Outcome, Result, Uptime,
    aside::Aside,
    claim::{Claim, Work},
    crash_point,
    engine::Engine,
    lane::guarded,
    lanes::{Call, Lanes, flush},
    lease::Settled,
    log,
    look::DueKind,
    machine::{Answer, Request, Write},
    renewer::Renewer,
    repeats::Gatherer,
    replays::Replays,
    store::{Applied, Decision, LeaseWrite, Store, Swept, Trouble},
    text::bounded,
    waiters::Waiters,
    withdrawals::Withdrawals,
};

/// How long a lane retries an unavailable store before it answers its callers.
const PATIENCE: Duration = Duration::from_secs(3);

/// How many rows a phase of the sweep takes in a round: this keeps transactions short.
const ROUND: u32 = 1000;

tokio::task_local! {
    /// Set while a handler runs inside a transaction of the ledger.
    pub(crate) static IN_TRANSACTION: ();
}

/// Options of a ledger.
#[derive(Clone, Debug)]
pub struct Options {
    /// The name of this process, for the journal.
    pub owner: String,
    /// Whether claims and settles share commits. Off only for benchmarks.
    pub group_commit: bool,
    /// The memory for replays of pinned operations without the store, in bytes; 0 switches it off.
    pub replay_cache_bytes: u64,
}

impl Default for Options {
    fn default() -> Self {
        let host = rustix::system::uname().nodename().to_string_lossy().into_owned();
        let owner = format!("{host}:{}", std::process::id());
        Self { owner, group_commit: true, replay_cache_bytes: 64 << 20 }
    }
}

/// The ledger: claims, leases, runs, the sweep, listings. Cheap to clone.
pub struct Ledger<S: Store> {
    inner: Arc<Inner<S>>,
}

impl<S: Store> Clone for Ledger<S> {
    fn clone(&self) -> Self {
        Self { inner: self.inner.clone() }
    }
}

struct Inner<S: Store> {
    store: S,
    options: Options,
    lanes: Lanes,
    renewer: Arc<Renewer>,
    waiters: Arc<Waiters>,
    gatherer: Arc<Gatherer>,
    withdrawals: Arc<Withdrawals>,
    aside: Aside,
    replays: Replays,
    /// Turns true when nothing new is accepted.
    stopping: watch::Sender<bool>,
    /// Turns true when running work has to end.
    halt: watch::Sender<bool>,
    /// The number of runs: each holds a receiver.
    runs: watch::Sender<()>,
    engine: Engine,
}

impl<S: Store> Ledger<S> {
    /// Opens a ledger on a store.
    ///
    /// # Errors
    /// [`Error::Invalid`] if the owner is not a valid name; [`Error::Unavailable`] if the engine's threads
    /// cannot be started.
    pub fn new(store: S, options: Options) -> Result<Self> {
        // A row without an owner was not claimed yet.
        if options.owner.is_empty() || options.owner.len() > 255 || options.owner.chars().any(char::is_control) {
            return Err(Error::Invalid("owner: must be 1 to 255 bytes without control characters".into()));
        }
        let engine = Engine::start()?;
        let asked = store.clone();
        let flush = move |batch: Vec<Call>| {
            let store = asked.clone();
            guarded(async move { patiently(&store, || flush(&store, &batch)).await })
        };
        let lanes = Lanes::open(store.one_writer(), flush, |task| engine.keep("lane", task));
        let (renewer, waiters, gatherer) =
            (Arc::<Renewer>::default(), Arc::<Waiters>::default(), Arc::<Gatherer>::default());
        engine.keep("renewals", renewer.clone().work(store.clone()));
        engine.keep("waiters", waiters.clone().watch(store.clone()));
        engine.keep("repeats", gatherer.clone().work(store.clone()));
        let withdrawals = Arc::<Withdrawals>::default();
        engine.keep("withdrawals", withdrawals.clone().work(store.clone()));
        let inner = Inner {
            store,
            replays: Replays::new(options.replay_cache_bytes),
            options,
            lanes,
            renewer,
            waiters,
            gatherer,
            withdrawals,
            aside: Aside::default(),
            stopping: watch::Sender::new(false),
            halt: watch::Sender::new(false),
            runs: watch::Sender::new(()),
            engine,
        };
        Ok(Self { inner: Arc::new(inner) })
    }

    /// The store, for listings and transactions.
    #[must_use]
    pub fn store(&self) -> &S {
        &self.inner.store
    }

    /// Applies a decision of a person or a probe.
    ///
    /// # Errors
    /// Errors of the store.
    pub async fn decide(&self, id: i64, decision: Decision, actor: &str, reason: &str) -> Result<Applied> {
        outside_transactions()?;
        let (store, actor, reason) = (self.inner.store.clone(), actor.to_owned(), bounded(reason.to_owned()));
        let applied = self.on_engine(async move { store.decide(id, decision, &actor, &reason).await }).await?;
        self.inner.waiters.wake(id);
        Ok(applied)
    }

    /// The kinds and tenants of a service with operations that are due now or later, ordered by kind and tenant, after
    /// `after` (two empty texts come before all). A worker reads this, then [takes](Self::take) of the kinds that have
    /// free seats: so a kind with a long backlog, or without a handler, delays no other. The cost depends on the number
    /// of kinds; one call returns at most [`DueKind::MOST`].
    ///
    /// # Errors
    /// Errors of the store.
    pub async fn due_kinds(&self, service: &str, after: (&str, &str)) -> Result<Vec<DueKind>> {
        outside_transactions()?;
        let (store, service) = (self.inner.store.clone(), service.to_owned());
        let (kind, tenant) = (after.0.to_owned(), after.1.to_owned());
        self.on_engine(async move { store.due_kinds(&service, (&kind, &tenant)).await }).await
    }

    /// Sweeps until nothing is left to do: orphans, expiry, archive, folding of counters. Each round is bounded, and
    /// rounds of several nodes do not disturb one another. [`Swept::troubles`] has the phases that failed.
    ///
    /// # Errors
    /// Errors of the store, if every phase failed.
    pub async fn sweep(&self) -> Result<Swept> {
        outside_transactions()?;
        let mut total = Swept::default();
        loop {
            crash_point!("sweep.before");
            let store = self.inner.store.clone();
            total += self.on_engine(async move { store.sweep(ROUND).await }).await?;
            crash_point!("sweep.after");
            if !total.more || self.is_stopping() {
                return Ok(total);
            }
        }
    }

    /// Ends leases that have expired, a bounded number of them, so that workers can take their operations. Part of every
    /// [sweep](Self::sweep); a [worker](crate::Worker) does this every few seconds.
    ///
    /// # Errors
    /// Errors of the store.
    pub async fn end_expired_leases(&self) -> Result<Swept> {
        outside_transactions()?;
        let store = self.inner.store.clone();
        self.on_engine(async move { store.end_expired_leases(ROUND).await }).await
    }

    /// Sweeps at this interval, on the engine's threads, until the ledger stops.
    pub fn sweep_every(&self, pause: Duration) {
        let weak = Arc::downgrade(&self.inner);
        self.inner.engine.keep("sweep", async move {
            let mut logged = Vec::new();
            loop {
                // Nodes that started together should not sweep together.
                tokio::time::sleep(pause.mul_f64(0.9 + 0.2 * fastrand::f64())).await;
                let Some(inner) = weak.upgrade() else { return };
                let ledger = Ledger { inner };
                if ledger.is_stopping() {
                    return;
                }
                match ledger.sweep().await {
                    Ok(swept) => {
                        log_troubles(&mut logged, swept.troubles.clone());
                        if swept != Swept::default() {
                            tracing::debug!(?swept, "swept");
                        }
                    }
                    Err(error) => tracing::warn!(%error, "the sweep failed; the next round tries again"),
                }
            }
        });
    }

    /// Waits until a background task of this ledger has panicked, and returns its name: the sweep, the renewals … It is
    /// not restarted, so a program that needs it should end and be restarted: all its work is under leases.
    pub fn broken(&self) -> impl Future<Output = &'static str> + Send + use<S> {
        self.inner.engine.broken()
    }

    /// Stops: accepts nothing new, gives running work `grace` to end, then ends it (released if it may run
    /// again, else in doubt), and writes the counts and notes that are still in memory.
    pub async fn stop(&self, grace: Duration) {
        self.inner.stopping.send_replace(true);
        if tokio::time::timeout(grace, self.inner.runs.closed()).await.is_err() {
            self.inner.halt.send_replace(true);
            let _ = tokio::time::timeout(PATIENCE, self.inner.runs.closed()).await;
        }
        self.withdraw().await;
        self.flush().await;
    }

    /// Looks once more for claims whose answers were lost: after the stop this node cannot.
    async fn withdraw(&self) {
        let (withdrawals, store) = (self.inner.withdrawals.clone(), self.inner.store.clone());
        let round = self.on_engine(async move { withdrawals.round(&store).await });
        if !matches!(tokio::time::timeout(PATIENCE, round).await, Ok(Ok(()))) {
            tracing::warn!("claims with lost answers could not be looked up; their leases will expire");
        }
    }

    /// Writes the counts and notes that are still in memory. [`Ledger::stop`] does this too.
    pub async fn flush(&self) {
        let (gatherer, store) = (self.inner.gatherer.clone(), self.inner.store.clone());
        let flush = async move {
            gatherer.flush(&store).await;
            store.tell_renewals().await
        };
        if let Err(error) = self.on_engine(flush).await {
            tracing::warn!(%error, "the journal could not be written");
        }
    }

    /// Renews a lease at once.
    pub(crate) async fn renew(&self, id: i64, fence: Fence) -> Result<Answer> {
        outside_transactions()?;
        let store = self.inner.store.clone();
        let renewed = async move {
            let ask = || async {
                let answers = store.renew(vec![(id, fence)]).await?;
                let answer = answers.into_iter().next().ok_or(Error::Contradiction("a renewal got no answer"))?;
                if answer == Answer::Busy { Err(locked()) } else { Ok(answer) }
            };
            let answer = patiently(&store, ask).await?;
            // The answer does not depend on the note.
            if let Err(error) = store.tell_renewals().await {
                tracing::warn!(%error, "a renewal could not be noted in the journal");
            }
            Ok(answer)
        };
        self.on_engine(renewed).await
    }

    pub(crate) fn request(&self, work: Work) -> Result<Arc<Request>> {
        outside_transactions()?;
        if self.is_stopping() {
            return Err(Error::Stopping);
        }
        work.into_request(&self.inner.options.owner).map(Arc::new)
    }

    pub(crate) fn owner(&self) -> &str {
        &self.inner.options.owner
    }

    /// Completes when it is stopping.
    pub(crate) async fn stops(&self) {
        let mut stopping = self.inner.stopping.subscribe();
        // The sender lives as long as this ledger.
        let _ = stopping.wait_for(|stopping| *stopping).await;
    }

    pub(crate) fn is_stopping(&self) -> bool {
        *self.inner.stopping.borrow()
    }

    /// Receivers for a run: the run counts while the first lives, and must end when the second turns true.
    pub(crate) fn enter(&self) -> (watch::Receiver<()>, watch::Receiver<bool>) {
        (self.inner.runs.subscribe(), self.inner.halt.subscribe())
    }

    pub(crate) fn renewer(&self) -> &Arc<Renewer> {
        &self.inner.renewer
    }

    /// Sends a write under a lease through its lane. If its row stays locked, the error is unavailable.
    pub(crate) async fn write(&self, write: LeaseWrite) -> Result<Applied> {
        self.write_of(write, 0).await
    }

    /// The same; `stored` is the number of stored bytes, which most writes load and save.
    pub(crate) async fn write_of(&self, mut write: LeaseWrite, stored: usize) -> Result<Applied> {
        outside_transactions()?;
        write.write = write.write.bounded();
        if self.inner.options.group_commit {
            let bytes = write.write.weight(stored);
            self.inner.lanes.writes.call(Call::Write(write), bytes).await?.decided()
        } else {
            let store = self.inner.store.clone();
            self.on_engine(async move { patiently(&store, || store.write(vec![write.clone()])).await })
                .await?
                .remove(0)
                .decided()
        }
    }

    /// Settles a lease. An unavailable store is retried until `deadline`.
    pub(crate) async fn settle(&self, operation: &Operation, write: Write, deadline: Uptime) -> Result<Settled> {
        let write = match write {
            Write::Complete(outcome) => Write::Complete(outcome.to_store()),
            other => other,
        };
        let write = LeaseWrite { id: operation.id, fence: operation.fence, write };
        crash_point!("settle.before");
        let sent = Uptime::now();
        let applied = loop {
            match self.write_of(write.clone(), stored_bytes(operation)).await {
                Ok(applied) => break applied,
                Err(error) if error.is_transient() && !deadline.has_passed() => {
                    tokio::time::sleep(Duration::from_millis(100)).await;
                }
                Err(error) => {
                    log::not_stored(operation, &error);
                    return Err(if error.is_transient() { Error::OutcomeUnknown(error.to_string()) } else { error });
                }
            }
        };
        crash_point!("settle.after");
        if let Write::Complete(outcome) = &write.write {
            self.completed(operation, outcome, &applied, sent);
        }
        self.inner.waiters.wake(operation.id);
        match applied.answer {
            Answer::Settled { successor } => {
                log::settled(operation, &write.write);
                Ok(Settled::Yes { successor })
            }
            _ => {
                log::lost(operation, "the end of the run came late");
                Ok(Settled::LeaseLost)
            }
        }
    }

    /// Caches a completed operation for replays; `sent` is the time before the settle was sent.
    pub(crate) fn completed(&self, held: &Operation, outcome: &Outcome, applied: &Applied, sent: Uptime) {
        if applied.answer == (Answer::Settled { successor: false }) {
            self.inner.replays.remember_completed(held, outcome, applied, sent);
        }
    }

    pub(crate) fn wake(&self, id: i64) {
        self.inner.waiters.wake(id);
    }

    /// Counts a claim without the lease.
    pub(crate) fn note<A>(&self, claim: &Claim<A>, request: &Request) {
        if let Some(operation) = claim.operation() {
            self.note_as(claim.word(), operation, request);
        }
    }

    /// Counts a claim of `operation` with this answer.
    pub(crate) fn note_as(&self, word: &'static str, operation: &Operation, request: &Request) {
        self.inner.gatherer.note(operation, request, word, wall_clock());
    }

    /// Runs on the engine's threads. Connections belong to the threads that opened them, so those of the lanes
    /// must never be opened on a thread that a handler could block.
    async fn on_engine<T: Send + 'static>(&self, task: impl Future<Output = Result<T>> + Send + 'static) -> Result<T> {
        let Some(task) = self.inner.engine.spawn(task) else { return Err(Error::Stopping) };
        task.await.map_err(|e| Error::Unavailable(format!("an engine task ended: {e}")))?
    }
}

/// Refuses calls to the ledger from inside a handler's transaction: on SQLite that holds the only writer, and
/// the call would wait until the transaction times out.
fn outside_transactions() -> Result<()> {
    match IN_TRANSACTION.try_with(|()| ()) {
        Ok(()) => Err(Error::InsideTransaction),
        Err(_) => Ok(()),
    }
}

/// The number of bytes that are loaded and saved with an operation.
pub(crate) fn stored_bytes(op: &Operation) -> usize {
    let successor = op.successor.as_ref().and_then(|successor| successor.payload.as_ref());
    [op.payload.as_ref(), op.checkpoint.as_ref(), successor].into_iter().flatten().map(Bytes::len).sum()
}

/// The error for a row that another transaction has locked.
fn locked() -> Error {
    Error::Unavailable("another transaction holds the row; ask again".into())
}

/// Logs a failing phase of the sweep once, and again after a change: it would fail every few seconds.
fn log_troubles(logged: &mut Vec<Trouble>, troubles: Vec<Trouble>) {
    for Trouble { phase, why } in troubles.iter().filter(|trouble| !logged.contains(trouble)) {
        tracing::warn!(phase, why, "a phase of the sweep failed; the others continue, and every round retries it");
    }
    for Trouble { phase, why } in logged.iter().filter(|former| !troubles.iter().any(|now| now.phase == former.phase)) {
        tracing::info!(phase, after = why, "a phase of the sweep works again");
    }
    *logged = troubles;
}

/// The time of a repeat. It is never compared, so the node's clock is enough.
fn wall_clock() -> crate::Timestamp {
    let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
    crate::Timestamp::from_micros(crate::time::micros(since))
}

/// Retries an unavailable store for a while. This is harmless: claims are recognised by their token and writes
/// by their fence, so a call whose answer was lost gets the same answer again.
pub(crate) async fn patiently<S: Store, T, F, Fut>(store: &S, ask: F) -> Result<T>
where
    F: Fn() -> Fut,
    Fut: Future<Output = Result<T>>,
{
    let until = Uptime::now() + PATIENCE;
    let mut pause = Duration::from_millis(10);
    loop {
        match ask().await {
            Err(error) if store.is_worth_asking_again(&error) && !until.has_passed() => {
                tracing::debug!(%error, "asking the store again");
                tokio::time::sleep(pause).await;
                pause = (pause * 2).min(Duration::from_millis(500));
            }
            done => return done,
        }
    }
}
