//! The worker: runs what was enqueued, what failed and has waited, what was put back, what was lost.
//!
//! A worker is told, kind by kind, who runs an operation and how many may run at the same time. It claims what is due in
//! batches, as many as it has free hands for, and settles each as any run. Any number of workers may share a database:
//! two of them never get the same operation.
//!
//! - [`Kind`]: one kind of work, its handler and its limits
//! - [`Worker`]: all of them, and the loop
//! - `shares`: who gets how many of the free hands
//! - `targets`: what is away, and pauses

mod kind;
mod shares;
mod targets;

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use tokio::{
    sync::{OwnedSemaphorePermit, watch},
    task::JoinSet,
};
use tracing::Instrument as _;

pub use self::kind::Kind;
use self::shares::Shares;
use crate::{
    Error, Lease, Ledger, Result, Scope, Uptime,
    look::DueKind,
    messaging::Wake,
    store::{Store, Want},
};

/// How often to look when there was work a moment ago: for what other nodes have enqueued.
const BUSY: Duration = Duration::from_millis(100);

/// How often to look when there was none.
const IDLE: Duration = Duration::from_secs(1);

/// How long after its last work a worker counts as busy.
const A_WHILE: Duration = Duration::from_secs(10);

/// How long to wait when what is due could not be had: another node holds it at the moment. Twice as long each time, up
/// to the pause between two looks: it may also be paused, or at the limit of the fleet.
const HELD: Duration = Duration::from_millis(10);

/// How long runs may go on after a stop, unless the worker is told otherwise.
const GRACE: Duration = Duration::from_secs(5);

/// How many kinds and tenants are asked for in one transaction.
const MOST_WANTS: usize = 64;

/// Runs work that is due.
#[must_use = "a worker works when it is run"]
pub struct Worker<S: Store> {
    ledger: Ledger<S>,
    kinds: Vec<Arc<Kind<S>>>,
    grace: Duration,
    /// How often to look when there was work a moment ago, and when there was none.
    polls: (Duration, Duration),
}

impl<S: Store> Worker<S> {
    /// A worker on a ledger, without any kind of work yet.
    pub fn new(ledger: &Ledger<S>) -> Self {
        Self { ledger: ledger.clone(), kinds: Vec::new(), grace: GRACE, polls: (BUSY, IDLE) }
    }

    /// Lets it run a kind of work. Where two of them take the same one, the first does.
    pub fn on(mut self, kind: Kind<S>) -> Self {
        self.kinds.push(Arc::new(kind));
        self
    }

    /// How long runs may go on after a stop. Those that have not ended by then are put back where they may run again, and
    /// are in doubt where that is not known.
    pub fn grace(self, grace: Duration) -> Self {
        Self { grace, ..self }
    }

    /// How often to look for what others have enqueued, at most. Commits of this process wake it at once.
    pub fn poll(self, every: Duration) -> Self {
        Self { polls: (every, every), ..self }
    }

    /// Works until `stop` turns true, or nobody is left to say so; ends when what it began has ended.
    pub async fn run(self, mut stop: watch::Receiver<bool>) {
        let (leave, leaves) = watch::channel(false);
        let mut hands = Hands {
            wake: self.ledger.due_wake(),
            ledger: self.ledger,
            runs: JoinSet::new(),
            line: JoinSet::new(),
            in_line: vec![false; self.kinds.len()],
            shares: Shares::default(),
            looks: services(&self.kinds),
            kinds: self.kinds,
            leaves,
            last: None,
            polls: self.polls,
            held: Duration::ZERO,
        };
        let mut came = None;
        while !is_over(&stop) {
            while hands.runs.try_join_next().is_some() {}
            let wait = match hands.round(came.take()).await {
                Ok(wait) => wait,
                Err(Error::Stopping) => break,
                Err(error) => {
                    tracing::warn!(%error, "what is due could not be taken; trying again");
                    IDLE
                }
            };
            tokio::select! {
                () = hands.wake.woken() => {}
                () = tokio::time::sleep(wait) => {}
                Some(Ok((kind, seat))) = hands.line.join_next() => {
                    hands.in_line[kind] = false;
                    came = seat.map(|seat| (kind, seat));
                }
                _ = stop.wait_for(|stop| *stop) => {}
            }
        }
        drop(came);
        hands.line.shutdown().await;
        let ended = async { while hands.runs.join_next().await.is_some() {} };
        if tokio::time::timeout(self.grace, ended).await.is_err() {
            leave.send_replace(true);
            while hands.runs.join_next().await.is_some() {}
        }
    }
}

/// Whether it is time to stop. A sender that is gone counts as a stop.
fn is_over(stop: &watch::Receiver<bool>) -> bool {
    *stop.borrow() || stop.has_changed().is_err()
}

/// The services of all kinds, each with where the next look at it begins.
fn services<S: Store>(kinds: &[Arc<Kind<S>>]) -> BTreeMap<String, (String, String)> {
    kinds.iter().map(|kind| (kind.service.clone(), <_>::default())).collect()
}

/// A worker at work.
struct Hands<S: Store> {
    ledger: Ledger<S>,
    kinds: Vec<Arc<Kind<S>>>,
    wake: Wake,
    runs: JoinSet<()>,
    /// Places in the line for a seat, one of each kind that had something due and no seat left. Seats may be shared with
    /// others, who stand in the same line: however many they are, what is due has its turn among them.
    line: JoinSet<(usize, Option<OwnedSemaphorePermit>)>,
    /// The kinds that have a place in it.
    in_line: Vec<bool>,
    shares: Shares,
    /// By service: the kind and tenant after which the next look begins. Where there are more than one look tells of, it
    /// goes on there.
    looks: BTreeMap<String, (String, String)>,
    leaves: watch::Receiver<bool>,
    /// When there was work.
    last: Option<Uptime>,
    polls: (Duration, Duration),
    /// The last wait for what could not be had.
    held: Duration,
}

/// Work that is wanted, with the seats for it.
struct Asked {
    kind: usize,
    want: Want,
    seats: Vec<OwnedSemaphorePermit>,
}

impl<S: Store> Hands<S> {
    /// Begins what is due, of each kind as much as it has seats for; `came` is a seat that was waited for. How long to wait
    /// for the next round.
    async fn round(&mut self, came: Option<(usize, OwnedSemaphorePermit)>) -> Result<Duration> {
        let (mut asked, mut wait) = (Vec::new(), self.pause());
        let mut came = came;
        for service in self.looks.keys().cloned().collect::<Vec<_>>() {
            let due = self.look(&service).await?;
            for (kind, due) in self.by_kind(&service, due) {
                let (now, later): (Vec<_>, Vec<_>) = due.into_iter().partition(|due| due.wait.is_zero());
                wait = later.iter().map(|due| due.wait).fold(wait, Duration::min);
                let seat = came.take_if(|(of, _)| *of == kind).map(|(_, seat)| seat);
                self.ask_for(kind, now, seat, &mut asked)?;
            }
        }
        asked.truncate(MOST_WANTS);
        if asked.is_empty() {
            return Ok(wait);
        }
        let wants = asked.iter().map(|asked| asked.want.clone()).collect();
        let taken = self.ledger.take(wants).await?;
        if taken.is_empty() {
            self.held = (2 * self.held).clamp(HELD, self.pause().max(HELD));
            return Ok(wait.min(self.held));
        }
        self.held = Duration::ZERO;
        self.last = Some(Uptime::now());
        for (n, lease) in taken {
            let Some(asked) = asked.get_mut(n) else { continue };
            if let Some(seat) = asked.seats.pop() {
                self.begin(asked.kind, lease, seat);
            }
        }
        // There may be more: those who still have a free seat, or get one, look again at once.
        Ok(Duration::ZERO)
    }

    /// How long to wait without being woken.
    fn pause(&self) -> Duration {
        let busy = self.last.is_some_and(|last| !(last + A_WHILE).has_passed());
        if busy { self.polls.0 } else { self.polls.1 }
    }

    /// What is due of a service, or will be.
    async fn look(&mut self, service: &str) -> Result<Vec<DueKind>> {
        let (kind, tenant) = self.looks.get(service).cloned().unwrap_or_default();
        let due = self.ledger.due_kinds(service, (&kind, &tenant)).await?;
        let cut = due.len() >= DueKind::MOST as usize;
        let last = due.last().filter(|_| cut).map(|last| (last.kind.clone(), last.tenant.clone()));
        self.looks.insert(service.to_owned(), last.unwrap_or_default());
        Ok(due)
    }

    /// What is due, by the kind of work that takes it. What this worker does not know is left to others.
    fn by_kind(&self, service: &str, due: Vec<DueKind>) -> BTreeMap<usize, Vec<DueKind>> {
        let mut by = BTreeMap::<usize, Vec<DueKind>>::new();
        for due in due {
            let takes = |kind: &Arc<Kind<S>>| kind.service == service && kind.takes(&due.kind, &due.tenant);
            if let Some(kind) = self.kinds.iter().position(takes) {
                by.entry(kind).or_default().push(due);
            }
        }
        by
    }

    /// Wants as many of a kind as there are seats, shared among its tenants; stands in line where there is none.
    fn ask_for(
        &mut self,
        n: usize,
        due: Vec<DueKind>,
        came: Option<OwnedSemaphorePermit>,
        asked: &mut Vec<Asked>,
    ) -> Result<()> {
        if due.is_empty() {
            return Ok(());
        }
        let kind = self.kinds[n].clone();
        let mut seats: Vec<_> = came.into_iter().collect();
        while let Ok(seat) = kind.seats.clone().try_acquire_owned() {
            seats.push(seat);
        }
        if seats.is_empty() {
            if !std::mem::replace(&mut self.in_line[n], true) {
                let seats = kind.seats.clone();
                self.line.spawn(async move { (n, seats.acquire_owned().await.ok()) });
            }
            return Ok(());
        }
        for (due, share) in self.shares.of(n, due, seats.len()) {
            let scope = Scope::new(&due.tenant, &kind.service, &due.kind)?;
            let (most, oldest) = self.shares.ages(n, share);
            let want = Want { policy: kind.policy_of(&scope), scope, most, oldest, limits: kind.limits };
            let seats = seats.split_off(seats.len() - share);
            asked.push(Asked { kind: n, want, seats });
        }
        Ok(())
    }

    /// Begins one run, in a task of its own.
    fn begin(&mut self, n: usize, lease: Lease<S>, seat: OwnedSemaphorePermit) {
        let (kind, wake) = (self.kinds[n].clone(), self.wake.clone());
        let lease = lease.leaving(self.leaves.clone());
        let span = (kind.span)(lease.operation());
        let run = async move {
            kind.run(lease).await;
            drop(seat);
            // A hand is free.
            wake.wake();
        };
        self.runs.spawn(run.instrument(span));
    }
}
