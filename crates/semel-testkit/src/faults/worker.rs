//! The worker process's own side: a node with a ledger that takes orders.
#![expect(clippy::unwrap_used, reason = "a worker that cannot work ends, and its test fails")]

use std::{
    collections::HashMap,
    io::Write as _,
    path::Path,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use semel::{
    Backoff, Claim, Error, Failure, Held, Lease, Ledger, Options, Outcome, Policy, Ran, Retry, Settled, Unfinished,
    Uptime,
};
use semel_store::{Database, Settings};
use tokio::{sync::mpsc, task::JoinSet};

use super::{Bank, FOLLOWERS, Mode, Order, Report, WriteKind, bank::take_in, scenario};
use crate::work;

/// How long a racing task waits for another's outcome before it claims again.
const WAIT: Duration = Duration::from_secs(30);

/// A node that takes orders.
pub struct Worker {
    /// Its ledger.
    pub ledger: Ledger<Database>,
    /// Where its effects are made.
    pub bank: Arc<Bank>,
    leases: Mutex<HashMap<String, Lease<Database>>>,
    pub(super) stop: AtomicBool,
}

/// Runs `semel-worker URL EFFECTS`: takes orders from standard input until that ends.
///
/// # Panics
/// The database cannot be opened.
pub async fn serve(url: &str, effects: &Path) {
    let settings = Settings { projections: vec![FOLLOWERS], ..Settings::default() };
    let database = Database::open(url, settings).await.unwrap();
    let options = Options { owner: format!("worker:{}", std::process::id()), ..Options::default() };
    let worker = Arc::new(Worker {
        ledger: Ledger::new(database, options).unwrap(),
        bank: Arc::new(Bank::open(effects)),
        leases: Mutex::default(),
        stop: AtomicBool::new(false),
    });
    report(&Report::Ready);
    let mut given = read_orders();
    let mut orders = JoinSet::new();
    while let Some(order) = given.recv().await {
        match order {
            Order::Stop => {
                worker.stop.store(true, Ordering::SeqCst);
                orders.join_all().await;
                worker.ledger.stop(Duration::from_secs(1)).await;
                break;
            }
            order => {
                let worker = worker.clone();
                orders.spawn(async move {
                    worker.carry_out(order).await;
                    report(&Report::Done);
                });
            }
        }
    }
    // Exits at once: the test is gone.
    std::process::exit(0);
}

/// Orders, read by a separate thread: standard input blocks.
fn read_orders() -> mpsc::UnboundedReceiver<Order> {
    let (sender, receiver) = mpsc::unbounded_channel();
    std::thread::spawn(move || {
        for line in std::io::stdin().lines() {
            let order = serde_json::from_str(&line.unwrap()).unwrap();
            if sender.send(order).is_err() {
                break;
            }
        }
    });
    receiver
}

/// Sends a report to the test.
pub(crate) fn report(report: &Report) {
    let mut line = serde_json::to_string(report).unwrap();
    line.push('\n');
    // In one write. It is no error if the test is gone.
    let _ = std::io::stdout().lock().write_all(line.as_bytes());
}

/// Reports an error.
pub(crate) fn report_error(key: &str, error: &Error) {
    report(&Report::Broke { key: key.to_owned(), error: error.to_string(), transient: error.is_transient() });
}

/// A policy for tests: no backoff, and unlimited attempts.
#[must_use]
pub fn policy(lease: Duration) -> Policy {
    Policy { lease, backoff: Backoff::NONE, max_crashes: 1000, ..Policy::default() }
}

impl Worker {
    async fn carry_out(self: &Arc<Self>, order: Order) {
        match order {
            Order::Claim { key, terms } => self.claim(key, &terms).await,
            Order::Write { key, write } => self.write(&key, write).await,
            Order::Run { key, terms, mode, work } => {
                let work = Duration::from_millis(work);
                self.run(&key, Policy::from_terms(&terms).unwrap(), mode, work).await;
            }
            Order::Watch { key, terms } => self.watch(&key, Policy::from_terms(&terms).unwrap()).await,
            Order::Race { keys, from, tasks, terms, mode } => {
                let policy = Policy::from_terms(&terms).unwrap();
                let mut racing = JoinSet::new();
                for task in 0..tasks {
                    let (worker, key, policy) =
                        (self.clone(), keys[(from + task) % keys.len()].clone(), policy.clone());
                    racing.spawn(async move { worker.race(&key, policy, mode).await });
                }
                racing.join_all().await;
            }
            Order::Pump { prefix, tasks, terms, mode } => {
                let policy = Policy::from_terms(&terms).unwrap();
                let mut pumping = JoinSet::new();
                for task in 0..tasks {
                    let (worker, prefix, policy) = (self.clone(), format!("{prefix}-{task}"), policy.clone());
                    pumping.spawn(async move { worker.pump(&prefix, &policy, mode).await });
                }
                pumping.join_all().await;
            }
            Order::Enqueue { keys, mode, terms, with_rows } => {
                let policy = terms.map(|terms| Policy::from_terms(&terms).unwrap());
                if let Err(error) = self.enqueue(&keys, mode, policy.as_ref(), with_rows).await {
                    report_error(&keys[0], &error);
                }
            }
            Order::Work { at_once, terms } => self.work(at_once, &Policy::from_terms(&terms).unwrap()).await,
            Order::Scenario { rounds } => scenario::play(self, rounds).await,
            Order::Tick => scenario::tick(self).await,
            Order::Stop => {}
        }
    }

    /// Whether the test has asked it to stop.
    pub(crate) fn is_stopping(&self) -> bool {
        self.stop.load(Ordering::SeqCst)
    }

    async fn claim(&self, key: String, terms: &str) {
        match self.ledger.claim(work(&key, Policy::from_terms(terms).unwrap())).await {
            Ok(Claim::Acquired(lease)) => {
                let fence = lease.fence().0;
                report(&Report::Ended { key: key.clone(), how: "acquired".into(), fence, outcome: None });
                self.leases.lock().unwrap().insert(key, lease);
            }
            Ok(other) => report_claim(&key, &other.map(|_| Ran::Released)),
            Err(error) => report_error(&key, &error),
        }
    }

    async fn write(&self, key: &str, write: WriteKind) {
        let mut lease = self.leases.lock().unwrap().remove(key).unwrap();
        let failure = Failure { error: "no luck".into(), retry: Retry::Backoff };
        let held = |held: Held| held == Held::Yes;
        let settled = |settled: Settled| settled != Settled::LeaseLost;
        let done = match write {
            WriteKind::Renew => lease.renew().await.map(held),
            WriteKind::Checkpoint => lease.checkpoint("so far").await.map(held),
            WriteKind::Complete => lease.complete(Outcome::kept("by whom it was claimed")).await.map(settled),
            WriteKind::Fail => lease.fail(failure).await.map(settled),
            WriteKind::Release => lease.release(Duration::ZERO).await.map(settled),
            WriteKind::Doubt => lease.doubt("who knows").await.map(settled),
        };
        match done {
            Ok(held) => report(&Report::Wrote { key: key.to_owned(), write, held }),
            Err(error) => report_error(key, &error),
        }
    }

    /// One run. The handler reports that it has begun, works, and makes its effect.
    pub(crate) async fn run_once(
        &self,
        key: &str,
        policy: Policy,
        mode: Mode,
        long: Duration,
    ) -> semel::Result<Claim<Ran>> {
        let (bank, key, asked) = (self.bank.clone(), key.to_owned(), work(key, policy));
        match mode {
            Mode::Leased => {
                let handler = move |ctx: semel::Context<Database>| {
                    let (bank, key) = (bank.clone(), key.clone());
                    async move {
                        report(&Report::Begun { key: key.clone(), fence: ctx.fence().0 });
                        tokio::time::sleep(long).await;
                        bank.take(&key, ctx.fence(), &ctx.derived_key("effect"));
                        Ok(outcome(&key, ctx.fence().0))
                    }
                };
                self.ledger.run(asked, handler).await
            }
            Mode::Atomic => {
                let handler = move |ctx: semel::Context<Database>, tx| {
                    let key = key.clone();
                    async move {
                        report(&Report::Begun { key: key.clone(), fence: ctx.fence().0 });
                        tokio::time::sleep(long).await;
                        take_in(&tx, &key, ctx.fence()).await.map_err(Unfinished::failed)?;
                        Ok(outcome(&key, ctx.fence().0))
                    }
                };
                self.ledger.run_atomic(asked, handler).await
            }
        }
    }

    async fn run(&self, key: &str, policy: Policy, mode: Mode, long: Duration) {
        match self.run_once(key, policy, mode, long).await {
            Ok(claim) => report_claim(key, &claim),
            Err(error) => report_error(key, &error),
        }
    }

    /// Blocks its thread, like work that cannot be cancelled, and reports the first check after a pause of the whole
    /// process that is longer than the lease.
    async fn watch(&self, key: &str, policy: Policy) {
        let (name, lease) = (key.to_owned(), policy.lease);
        let handler = move |ctx: semel::Context<Database>| {
            let key = name.clone();
            async move {
                let mut deadline = Uptime::now() + lease;
                report(&Report::Begun { key: key.clone(), fence: ctx.fence().0 });
                while !deadline.has_passed() {
                    deadline = Uptime::now() + lease;
                    std::thread::sleep(Duration::from_millis(1));
                }
                report(&Report::Woke { key, lost: ctx.is_lost() });
                Err(Unfinished::failed("slept too long"))
            }
        };
        match self.ledger.run(work(key, policy), handler).await {
            Ok(claim) => report_claim(key, &claim),
            Err(error) => report_error(key, &error),
        }
    }

    /// Claims or waits, until there is an outcome, or a doubt. A lease that was lost on a busy machine is reported, and
    /// it continues. So it does while the store is unavailable.
    async fn race(&self, key: &str, policy: Policy, mode: Mode) {
        loop {
            let claim = match mode {
                Mode::Atomic => self.race_atomic(key, policy.clone()).await,
                Mode::Leased => self.race_leased(key, policy.clone()).await,
            };
            match claim {
                Ok(claim) => {
                    report_claim(key, &claim);
                    match claim {
                        Claim::Acquired(Ran::Completed(_)) | Claim::Replay(_) | Claim::InDoubt(_) => return,
                        _ => {}
                    }
                }
                Err(error) => {
                    report_error(key, &error);
                    if !error.is_transient() {
                        return;
                    }
                    tokio::time::sleep(Duration::from_millis(50)).await;
                }
            }
        }
    }

    async fn race_atomic(&self, key: &str, policy: Policy) -> semel::Result<Claim<Ran>> {
        let name = key.to_owned();
        let handler = move |ctx: semel::Context<Database>, tx| {
            let key = name.clone();
            async move {
                take_in(&tx, &key, ctx.fence()).await.map_err(Unfinished::failed)?;
                Ok(outcome(&key, ctx.fence().0))
            }
        };
        self.ledger.run_atomic_or_wait(work(key, policy), WAIT, handler).await
    }

    async fn race_leased(&self, key: &str, policy: Policy) -> semel::Result<Claim<Ran>> {
        let lease = match self.ledger.claim_or_wait(work(key, policy), WAIT).await?.acquired() {
            Ok(lease) => lease,
            Err(other) => return Ok(other),
        };
        self.bank.take(key, lease.fence(), &lease.derived_key("effect"));
        let made = outcome(key, lease.fence().0);
        Ok(Claim::Acquired(match lease.complete(made.clone()).await? {
            Settled::Yes { .. } => Ran::Completed(made),
            Settled::LeaseLost => Ran::LeaseLost,
        }))
    }

    /// One key after the other, each until it has an outcome, through all faults.
    async fn pump(&self, prefix: &str, policy: &Policy, mode: Mode) {
        let mut number = 0;
        while !self.stop.load(Ordering::SeqCst) {
            let key = format!("{prefix}-{number}");
            match self.run_once(&key, policy.clone(), mode, Duration::ZERO).await {
                Ok(claim) => {
                    report_claim(&key, &claim);
                    match claim {
                        // In doubt is an end, too: only a person resolves it.
                        Claim::Acquired(Ran::Completed(_)) | Claim::Replay(_) | Claim::InDoubt(_) => number += 1,
                        Claim::Acquired(_) => {}
                        _ => tokio::time::sleep(Duration::from_millis(50)).await,
                    }
                }
                Err(error) => report_error(&key, &error),
            }
        }
    }
}

/// The outcome of a run names its maker. That of a key named `large` is too large to be sent with a commit: in atomic
/// mode its completion is a separate statement.
pub(crate) fn outcome(key: &str, fence: i64) -> Outcome {
    let more = if key == "large" { ".".repeat(100_000) } else { String::new() };
    Outcome::kept(format!("{key} under {fence}{more}"))
}

/// Reports the end of a claim or a run.
pub(crate) fn report_claim(key: &str, claim: &Claim<Ran>) {
    let kept = |outcome: &Outcome| outcome.kept.then(|| String::from_utf8_lossy(&outcome.body).into_owned());
    let (how, outcome) = match claim {
        Claim::Acquired(Ran::Completed(outcome)) => ("completed", kept(outcome)),
        Claim::Acquired(Ran::Failed(_)) => ("failed", None),
        Claim::Acquired(Ran::Released) => ("released", None),
        Claim::Acquired(Ran::Doubted(_)) => ("doubted", None),
        Claim::Acquired(Ran::LeaseLost) => ("lease_lost", None),
        Claim::Replay(replay) => ("replay", kept(&replay.outcome)),
        other => (other.word(), None),
    };
    let fence = claim.operation().map_or(0, |op| op.fence.0);
    report(&Report::Ended { key: key.to_owned(), how: how.to_owned(), fence, outcome });
}
