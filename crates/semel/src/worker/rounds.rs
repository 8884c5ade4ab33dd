//! The rounds of a running worker: it looks for due operations, claims as many as it has free seats, and runs them.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
    time::{Duration, Instant},
};

use tokio::{
    sync::{Notify, OwnedSemaphorePermit, watch},
    task::JoinSet,
};
use tracing::Instrument as _;

use super::{
    IDLE, Kind, end_of, is_over,
    shares::{Pair, Shares},
};
use crate::{
    Error, Lease, Ledger, Result, Scope, Uptime,
    look::DueKind,
    store::{DueWake, Store, Want},
};

/// How long after its last work a worker counts as busy.
const A_WHILE: Duration = Duration::from_secs(10);

/// The wait when due operations could not be taken, because another node has locked them. It doubles up to the polling
/// interval: the kind may also be paused, or at the limit of the fleet.
const HELD: Duration = Duration::from_millis(10);

/// How long the result of a look is used without another look, while each take gets as much as it asks for.
const FRESH: Duration = Duration::from_millis(50);

/// How long a worker with many runs waits for more of them to end before it takes again: completions share a commit, so
/// runs end together, and a batch costs about as much as a single operation.
const GATHER: Duration = Duration::from_millis(1);

/// It waits if at least this many runs have not ended.
const MANY: usize = 8;

/// The most kinds and tenants per take.
const MOST_WANTS: usize = 64;

/// The most operations of a kind per take: keeps its transaction short.
const MOST_AT_ONCE: usize = 2000;

/// The most pages of kinds and tenants that a look reads to find something that is due.
const MOST_PAGES: usize = 10;

/// The most kinds and tenants of a kind of work that are known as due between two looks.
const MOST_TOLD: usize = 10_000;

/// A worker looks for at most a fifth of its time: with ten thousand tenants, a look takes 0.2 s.
const REST: u32 = 4;

/// Kinds and tenants whose next operation is due within this time are remembered: they need no other look.
const SOON: Duration = Duration::from_secs(5);

/// How long runs that are cut off at the stop have to be settled.
const LAST_SETTLES: Duration = Duration::from_secs(3);

/// The most kinds and tenants without a handler that are logged.
const MOST_STRANGE: usize = 100;

/// The state of a running worker.
pub(super) struct Rounds<S: Store> {
    ledger: Ledger<S>,
    kinds: Vec<Arc<Kind<S>>>,
    wake: DueWake,
    runs: JoinSet<()>,
    /// Places in the queue for a seat, one per kind that had due operations and no free seat. Callers that share the
    /// seats wait in the same queue, so due operations get their turn.
    line: JoinSet<(usize, Option<OwnedSemaphorePermit>)>,
    /// The kinds that have a place in it.
    in_line: Vec<bool>,
    /// Notified by each run that ends.
    free: Arc<Notify>,
    /// By kind: kinds and tenants with due operations. One whose take got less than it asked for is removed.
    due: BTreeMap<usize, BTreeMap<Pair, Known>>,
    /// When the next operations are due.
    soon: BTreeMap<Uptime, Vec<(usize, Pair)>>,
    /// Until when the last look is used.
    fresh: Uptime,
    /// Whether another look is needed at once.
    stale: bool,
    /// When the next look may begin.
    rested: Uptime,
    shares: Shares,
    /// How many takes there were. Each begins with another kind: a take is bounded in bytes, and its first kind could
    /// use them all.
    takes: usize,
    /// Services, kinds and tenants without a handler that were logged.
    strange: BTreeSet<(String, String, String)>,
    /// Kinds without a valid policy that were logged.
    wrong: BTreeSet<usize>,
    /// By service: the kind and tenant after which the next look begins, if one look does not return all.
    looks: BTreeMap<String, (String, String)>,
    stop: watch::Receiver<bool>,
    /// Tells runs to end, when their time after the stop is over.
    leave: watch::Sender<bool>,
    /// The time of the last work.
    last: Option<Uptime>,
    polls: (Duration, Duration),
    /// The last wait for operations that could not be taken.
    held: Duration,
}

/// How a kind and tenant became known as due.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Known {
    /// The last look has found it.
    Looked,
    /// A commit of this process, or its time, has told: it stays until a take gets less than it asks for.
    Told,
}

/// A want, with its seats.
struct Asked {
    kind: usize,
    want: Want,
    seats: Vec<OwnedSemaphorePermit>,
}

impl<S: Store> Rounds<S> {
    pub(super) fn new(
        ledger: Ledger<S>,
        kinds: Vec<Arc<Kind<S>>>,
        polls: (Duration, Duration),
        stop: watch::Receiver<bool>,
    ) -> Self {
        Self {
            wake: ledger.due_wake(),
            ledger,
            runs: JoinSet::new(),
            line: JoinSet::new(),
            in_line: vec![false; kinds.len()],
            free: Arc::default(),
            due: BTreeMap::new(),
            soon: BTreeMap::new(),
            fresh: Uptime::now(),
            stale: true,
            rested: Uptime::now(),
            shares: Shares::default(),
            takes: 0,
            strange: BTreeSet::new(),
            wrong: BTreeSet::new(),
            looks: services(&kinds),
            kinds,
            stop,
            leave: watch::Sender::new(false),
            last: None,
            polls,
            held: Duration::ZERO,
        }
    }

    /// Works until the stop; runs have `grace` to end.
    pub(super) async fn run(mut self, grace: Duration) {
        let (mut stop, mut came, mut is_late) = (self.stop.clone(), None, false);
        let over = end_of(self.stop.clone(), grace);
        tokio::pin!(over);
        while !is_over(&stop) {
            while self.runs.try_join_next().is_some() {}
            let round = tokio::select! {
                round = self.round(came.take()) => round,
                // The database does not answer. If it has claimed something, that is released in the background.
                () = &mut over => {
                    is_late = true;
                    break;
                }
            };
            let wait = match round {
                Ok(wait) => wait,
                Err(Error::Stopping) => break,
                Err(error) => {
                    tracing::warn!(%error, "due operations could not be claimed; trying again");
                    IDLE
                }
            };
            tokio::select! {
                () = self.wake.woken() => {}
                () = ended(&self.free, self.runs.len()) => {}
                () = tokio::time::sleep(wait) => self.stale |= !wait.is_zero(),
                Some(Ok((kind, seat))) = self.line.join_next() => {
                    self.in_line[kind] = false;
                    came = seat.map(|seat| (kind, seat));
                }
                _ = stop.wait_for(|stop| *stop) => {}
            }
        }
        drop(came);
        self.line.shutdown().await;
        if !is_late {
            tokio::select! {
                () = async { while self.runs.join_next().await.is_some() {} } => {}
                () = &mut over => {}
            }
        }
        if !self.runs.is_empty() {
            self.leave.send_replace(true);
            let settled = async { while self.runs.join_next().await.is_some() {} };
            if tokio::time::timeout(LAST_SETTLES, settled).await.is_err() {
                tracing::warn!(
                    runs = self.runs.len(),
                    "runs could not be settled before the stop; their leases expire"
                );
            }
        }
    }

    /// Starts due operations, of each kind as many as it has seats for; `came` is a seat that was waited for. Returns
    /// how long to wait for the next round.
    async fn round(&mut self, came: Option<(usize, OwnedSemaphorePermit)>) -> Result<Duration> {
        self.give_back_starts().await;
        self.hear();
        self.stale |= self.due.is_empty() || self.fresh.has_passed();
        if self.stale && self.rested.has_passed() {
            self.look_at_all().await?;
            self.hear();
        }
        let (mut asked, wait) = (Vec::new(), self.wait());
        let mut came = came;
        let mut kinds: Vec<_> = self.due.keys().copied().collect();
        let first = self.takes.checked_rem(kinds.len()).unwrap_or(0);
        kinds.rotate_left(first);
        for kind in kinds {
            let seat = came.take_if(|(of, _)| *of == kind).map(|(_, seat)| seat);
            self.ask_for(kind, seat, &mut asked)?;
        }
        if asked.is_empty() {
            return Ok(wait);
        }
        let took = self.take_all(&mut asked).await?;
        self.takes = self.takes.wrapping_add(1);
        if !took {
            self.held = (2 * self.held).clamp(HELD, self.pause().max(HELD));
            return Ok(wait.min(self.held));
        }
        self.held = Duration::ZERO;
        self.last = Some(Uptime::now());
        // There may be more: kinds with a free seat look again at once.
        Ok(Duration::ZERO)
    }

    /// Gives back the starts of rates whose operations were released without a run: those of an unreachable target would
    /// use up the starts of the others.
    async fn give_back_starts(&self) {
        for kind in &self.kinds {
            let Some(every) = kind.limits.every else { continue };
            for (name, starts) in kind.take_unused() {
                match self.ledger.give_back_starts(&kind.service, &name, starts, every).await {
                    Ok(true) => {}
                    Ok(false) => kind.count_unused(&name, starts),
                    // Perhaps they were given back. Giving them back twice would exceed the rate.
                    Err(error) => tracing::debug!(%error, "unused starts could not be given back"),
                }
            }
        }
    }

    /// Takes the wants and starts the runs. Whether there were any.
    async fn take_all(&mut self, asked: &mut [Asked]) -> Result<bool> {
        // By kind of work: the last want that got an operation, or the last of all if none did.
        let mut last: BTreeMap<usize, Scope> =
            asked.iter().map(|asked| (asked.kind, asked.want.scope.clone())).collect();
        let mut took = Ok(false);
        for asked in asked.chunks_mut(MOST_WANTS) {
            let taken = match self.take(asked).await {
                Ok(taken) => taken,
                Err(error) => {
                    took = Err(error);
                    break;
                }
            };
            for (asked, taken) in asked.iter().zip(taken).filter(|(_, taken)| *taken > 0) {
                self.shares.count(&asked.want.scope, taken);
                last.insert(asked.kind, asked.want.scope.clone());
                took = Ok(true);
            }
            if is_over(&self.stop) {
                break;
            }
        }
        // Also after an error: otherwise the same tenants would be first in each retry.
        last.iter().for_each(|(kind, scope)| self.shares.end_at(*kind, scope));
        took
    }

    /// Takes the wants in one transaction and starts the runs. Returns how many of each want.
    async fn take(&mut self, asked: &mut [Asked]) -> Result<Vec<usize>> {
        let mut counts = vec![0; asked.len()];
        let taken = self.ledger.take(asked.iter().map(|asked| asked.want.clone()).collect()).await?;
        // If the stop came during the take, nothing of it begins: under hold, a run that exceeds the grace is in doubt.
        let stopping = is_over(&self.stop);
        for (n, lease) in taken {
            let Some(asked) = asked.get_mut(n) else { continue };
            if let Some(seat) = asked.seats.pop() {
                counts[n] += 1;
                match stopping {
                    true => self.hand_back(lease, seat),
                    false => self.begin(asked.kind, lease, seat),
                }
            }
        }
        asked.iter().filter(|asked| !asked.seats.is_empty()).for_each(|asked| self.has_no_more(asked));
        Ok(counts)
    }

    /// Notes what is due without a look: what commits of this process have told, and what was known to be due by now.
    fn hear(&mut self) {
        let news = self.wake.hear();
        self.stale |= news.others;
        for scope in &news.scopes {
            // Of another worker.
            if !self.looks.contains_key(scope.service()) {
                continue;
            }
            if let Some(kind) = self.kind_of(scope.service(), scope.kind(), scope.tenant()) {
                self.is_told(kind, (scope.kind().to_owned(), scope.tenant().to_owned()));
            }
        }
        while let Some(next) = self.soon.first_entry().filter(|next| next.key().has_passed()) {
            for (kind, pair) in next.remove() {
                self.is_told(kind, pair);
            }
        }
    }

    fn is_told(&mut self, kind: usize, pair: Pair) {
        let due = self.due.entry(kind).or_default();
        if due.len() < MOST_TOLD || due.contains_key(&pair) {
            due.insert(pair, Known::Told);
        } else {
            self.stale = true;
        }
    }

    /// How long to wait without a wake.
    fn wait(&self) -> Duration {
        let next = self.soon.first_key_value().map_or(Duration::MAX, |(next, _)| next.remaining());
        let look = if self.stale { self.rested.remaining() } else { Duration::MAX };
        self.pause().min(next).min(look).max(Duration::from_millis(1))
    }

    /// Looks for due operations of all services.
    async fn look_at_all(&mut self) -> Result<()> {
        let begun = Instant::now();
        let looked = self.look_at_pages().await;
        self.stale = false;
        self.fresh = Uptime::now() + FRESH;
        self.rested = Uptime::now() + begun.elapsed() * REST;
        looked
    }

    async fn look_at_pages(&mut self) -> Result<()> {
        self.due.values_mut().for_each(|due| due.retain(|_, known| *known == Known::Told));
        self.due.retain(|_, due| !due.is_empty());
        if self.looks.values().all(|(kind, _)| kind.is_empty()) {
            self.soon.clear();
        }
        for service in self.looks.keys().cloned().collect::<Vec<_>>() {
            // Where much waits for a later time, the first page may have nothing that is due.
            for _ in 0..MOST_PAGES {
                let due = self.look(&service).await?;
                let (mut found, now) = (false, Uptime::now());
                for due in due {
                    let Some(kind) = self.kind_of(&service, &due.kind, &due.tenant) else { continue };
                    let pair = (due.kind, due.tenant);
                    if due.wait.is_zero() {
                        // Kinds without a free seat are no reason to look no further.
                        found |= self.kinds[kind].seats.available_permits() > 0;
                        self.due.entry(kind).or_default().entry(pair).or_insert(Known::Looked);
                    } else if due.wait < SOON {
                        self.soon.entry(now + due.wait).or_default().push((kind, pair));
                    }
                }
                if found || self.looks.get(&service).is_none_or(|(kind, _)| kind.is_empty()) {
                    break;
                }
            }
        }
        Ok(())
    }

    /// Less was taken than was asked for.
    fn has_no_more(&mut self, Asked { kind, want, .. }: &Asked) {
        let Some(due) = self.due.get_mut(kind) else { return };
        due.remove(&(want.scope.kind().to_owned(), want.scope.tenant().to_owned()));
        if due.is_empty() {
            self.due.remove(kind);
        }
    }

    /// The polling interval.
    fn pause(&self) -> Duration {
        let busy = self.last.is_some_and(|last| !(last + A_WHILE).has_passed());
        if busy { self.polls.0 } else { self.polls.1 }
    }

    /// Due and future operations of a service.
    async fn look(&mut self, service: &str) -> Result<Vec<DueKind>> {
        let (kind, tenant) = self.looks.get(service).cloned().unwrap_or_default();
        let due = self.ledger.due_kinds(service, (&kind, &tenant)).await?;
        let cut = due.len() >= DueKind::MOST as usize;
        let last = due.last().filter(|_| cut).map(|last| (last.kind.clone(), last.tenant.clone()));
        self.looks.insert(service.to_owned(), last.unwrap_or_default());
        Ok(due)
    }

    /// The kind that runs this work. Work without a handler here is left to other nodes, and logged once: no node may
    /// have a handler.
    fn kind_of(&mut self, service: &str, kind: &str, tenant: &str) -> Option<usize> {
        let takes = |of: &Arc<Kind<S>>| of.service == service && of.takes(kind, tenant);
        match self.kinds.iter().position(takes) {
            Some(n) => self.kinds[n].is_work.then_some(n),
            None => {
                self.tell_strange(service, kind, tenant);
                None
            }
        }
    }

    /// Logs work without a handler, the first time it is seen.
    fn tell_strange(&mut self, service: &str, kind: &str, tenant: &str) {
        let strange = (service.to_owned(), kind.to_owned(), tenant.to_owned());
        if self.strange.len() < MOST_STRANGE && self.strange.insert(strange) {
            tracing::warn!(service, kind, tenant, "work waits that this node has no handler for");
        }
    }

    /// Wants as many of a kind as there are seats, shared among its tenants; waits for a seat if there is none.
    fn ask_for(&mut self, n: usize, came: Option<OwnedSemaphorePermit>, asked: &mut Vec<Asked>) -> Result<()> {
        let kind = self.kinds[n].clone();
        let mut seats: Vec<_> = came.into_iter().collect();
        while seats.len() < MOST_AT_ONCE
            && let Ok(seat) = kind.seats.clone().try_acquire_owned()
        {
            seats.push(seat);
        }
        if seats.is_empty() {
            if !std::mem::replace(&mut self.in_line[n], true) {
                let seats = kind.seats.clone();
                self.line.spawn(async move { (n, seats.acquire_owned().await.ok()) });
            }
            return Ok(());
        }
        let Some(due) = self.due.get(&n) else { return Ok(()) };
        for ((of, tenant), share) in self.shares.of(n, due, seats.len()) {
            let scope = Scope::new(&tenant, &kind.service, &of)?;
            let policy = kind.policy_of(&scope);
            if let Err(error) = policy.check_for_worker() {
                self.log_wrong_policy(n, &scope, &error);
                continue;
            }
            let (most, since) = (u32::try_from(share).unwrap_or(u32::MAX), Some(self.shares.since(&scope)));
            let want = Want { policy, scope, most, since, lease: None, limits: kind.limits };
            let seats = seats.split_off(seats.len() - share);
            asked.push(Asked { kind: n, want, seats });
        }
        Ok(())
    }

    /// Logs once that the operations of a kind cannot be taken under its policy.
    fn log_wrong_policy(&mut self, n: usize, scope: &Scope, error: &Error) {
        if self.wrong.insert(n) {
            let (service, kind) = (scope.service(), scope.kind());
            tracing::error!(service, kind, %error, "the policy of a kind is not valid; its work is not taken");
        }
    }

    /// Starts one run in its own task.
    fn begin(&mut self, n: usize, lease: Lease<S>, seat: OwnedSemaphorePermit) {
        let kind = self.kinds[n].clone();
        let turn = kind.begin_turn(self.stop.clone(), self.leave.subscribe());
        let lease = lease.in_turn(turn);
        let freed = (seat, Freed(self.free.clone()));
        self.runs.spawn(async move {
            let _freed = freed;
            // In the task: a span of a user's that panics ends its own run only.
            let span = (kind.span)(lease.operation());
            kind.run(lease).instrument(span).await;
        });
    }

    /// Releases an operation that has not begun: no attempt is counted.
    fn hand_back(&mut self, lease: Lease<S>, seat: OwnedSemaphorePermit) {
        self.runs.spawn(async move {
            let _seat = seat;
            if let Err(error) = lease.release(Duration::ZERO).await {
                tracing::warn!(%error, "an operation could not be released before the stop; its lease expires");
            }
        });
    }
}

/// Waits until a run has ended, and a moment longer if many others may end, too. An enqueue ends the wait.
async fn ended(free: &Notify, running: usize) {
    free.notified().await;
    if running > MANY {
        tokio::time::sleep(GATHER).await;
    }
}

/// The services of all kinds, each with the position of its next look.
fn services<S: Store>(kinds: &[Arc<Kind<S>>]) -> BTreeMap<String, (String, String)> {
    kinds.iter().map(|kind| (kind.service.clone(), <_>::default())).collect()
}

/// Notifies when it is dropped, however the run ends.
struct Freed(Arc<Notify>);

impl Drop for Freed {
    fn drop(&mut self) {
        self.0.notify_one();
    }
}
