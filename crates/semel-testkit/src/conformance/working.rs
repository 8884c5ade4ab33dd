//! The worker: enqueued operations are run once, by a worker with a free seat.

use std::{
    collections::BTreeMap,
    sync::{
        Arc, Mutex,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use semel::{
    Backoff, Context, Fingerprint, Kind, OnLost, OnMismatch, Outcome, Policy, Priority, Scope, Settled, State,
    Unfinished, Work, Worker, prelude::*, store::Want,
};
use semel_store::{Database, Tx};
use tokio::{
    sync::{Semaphore, watch},
    task::JoinHandle,
};

use super::tools::*;
use crate::{Lab, faults, key};

fn policy() -> Policy {
    Policy { backoff: Backoff::NONE, max_attempts: Some(3), ..Policy::default() }
}

fn of(tenant: &str, kind: &str) -> Scope {
    Scope::new(tenant, "works", kind).unwrap()
}

fn job(scope: Scope, name: &str) -> Work {
    Work::new(scope, key(name), Fingerprint::of_bytes(name.as_bytes())).payload(name.to_owned())
}

/// A worker that runs in a task of its own.
struct Hired {
    stop: watch::Sender<bool>,
    task: JoinHandle<()>,
}

fn hire(worker: Worker<Database>) -> Hired {
    let (stop, stops) = watch::channel(false);
    Hired { stop, task: tokio::spawn(worker.run(stops)) }
}

impl Hired {
    async fn stop(self) {
        self.stop.send_replace(true);
        soon(self.task).await.unwrap();
    }
}

/// The runs: by key, how often.
type Ran = Arc<Mutex<BTreeMap<String, usize>>>;

fn note(ran: &Ran, context: &Context<Database>) -> String {
    let name = context.operation().key.as_str().to_owned();
    *ran.lock().unwrap().entry(name.clone()).or_default() += 1;
    name
}

async fn is_over(node: &Node, kind: &str, names: impl Iterator<Item = String>) -> bool {
    let scope = of("acme", kind);
    for name in names {
        let there = node.store().by_key(&scope, &key(&name)).await.unwrap();
        if there.is_none_or(|op| op.state != State::Completed) {
            return false;
        }
    }
    true
}

/// Leased and atomic work is run once each, with its payload; operations of an unknown kind are skipped.
pub async fn a_worker_runs_enqueued_operations(lab: Lab) {
    let lab = lab.with_real_clock();
    let ledger = lab.ledger().await;
    faults::make_effect_table(ledger.store()).await;
    let ran = Ran::default();
    let seen = ran.clone();
    let leased = Kind::leased("works", "leased", move |context: Context<Database>| {
        let name = note(&seen, &context);
        async move {
            assert_eq!(context.operation().payload.as_deref(), Some(name.as_bytes()));
            Ok(Outcome::kept(name))
        }
    });
    let atomic = Kind::atomic("works", "atomic", |context: Context<Database>, tx: Tx| async move {
        let name = context.operation().key.as_str().to_owned();
        faults::take_in(&tx, &name, context.fence()).await.map_err(Unfinished::failed)?;
        Ok(Outcome::kept(name))
    });
    let hired = hire(Worker::new(&ledger).on(leased.policy(policy())).on(atomic.policy(policy()).at_once(3)));
    for kind in ["leased", "atomic", "unknown"] {
        let works = (0..20).map(|n| job(of("acme", kind), &format!("{kind} {n}"))).collect();
        ledger.enqueue_all(works).await.unwrap();
    }
    for kind in ["leased", "atomic"] {
        eventually(|| is_over(&ledger, kind, (0..20).map(move |n| format!("{kind} {n}")))).await;
    }
    hired.stop().await;
    assert!(ran.lock().unwrap().len() == 20 && ran.lock().unwrap().values().all(|n| *n == 1));
    let effects = faults::effect_rows(ledger.store()).await;
    assert!(effects.len() == 20 && effects.values().all(|n| *n == 1), "{effects:?}");
    let strange = ledger.store().by_key(&of("acme", "unknown"), &key("unknown 3")).await.unwrap().unwrap();
    assert_eq!((strange.state, strange.was_claimed()), (State::Pending, false));
}

/// Two nodes share a queue: each operation runs once, and neither is idle while there is work.
pub async fn two_workers_share_a_queue(lab: Lab) {
    const ALL: usize = 600;
    let lab = lab.with_real_clock();
    let (a, b) = (lab.ledger_of("a").await, lab.ledger_of("b").await);
    let works = (0..ALL).map(|n| job(of("acme", "shared"), &n.to_string())).collect();
    a.enqueue_all(works).await.unwrap();
    let counts = [(); 2].map(|()| Arc::<AtomicUsize>::default());
    let ran = Ran::default();
    let hired = [&a, &b].into_iter().zip(&counts).map(|(node, count)| {
        let (ran, count) = (ran.clone(), count.clone());
        let kind = Kind::leased("works", "shared", move |context: Context<Database>| {
            note(&ran, &context);
            count.fetch_add(1, Ordering::SeqCst);
            async {
                tokio::time::sleep(Duration::from_millis(5)).await;
                Ok(Outcome::kept(""))
            }
        });
        hire(Worker::new(node).on(kind.policy(policy()).at_once(8)))
    });
    let hired: Vec<_> = hired.collect();
    eventually(|| async { ran.lock().unwrap().len() == ALL }).await;
    eventually(|| is_over(&a, "shared", (0..ALL).map(|n| n.to_string()))).await;
    for hired in hired {
        hired.stop().await;
    }
    assert!(ran.lock().unwrap().values().all(|n| *n == 1), "one ran twice");
    let [a, b] = counts.map(|count| count.load(Ordering::SeqCst));
    assert!(a >= ALL / 10 && b >= ALL / 10, "one was idle: {a} and {b}");
}

/// A commit of its own process wakes a sleeping worker, through the lane or in a caller's transaction.
pub async fn a_commit_wakes_the_worker(lab: Lab) {
    let lab = lab.with_real_clock();
    let ledger = lab.ledger().await;
    let (done, mut runs) = tokio::sync::mpsc::unbounded_channel();
    let kind = Kind::leased("works", "quick", move |_: Context<Database>| {
        let _ = done.send(());
        async { Ok(Outcome::kept("")) }
    });
    // Its polling interval is too long to find it in time.
    let hired = hire(Worker::new(&ledger).on(kind.policy(policy())).poll(secs(3600)));
    for n in 0..10 {
        let work = job(of("acme", "quick"), &n.to_string());
        match n % 2 {
            0 => assert_eq!(ledger.enqueue(work).await.unwrap().word(), "enqueued"),
            _ => {
                let tx = ledger.store().begin(secs(5)).await.unwrap();
                ledger.enqueue_in(&tx, vec![work]).await.unwrap();
                ledger.store().commit(&tx).await;
            }
        }
        soon(runs.recv()).await.unwrap();
        // Long enough for the worker to be asleep again.
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    hired.stop().await;
}

/// A tenant with a long backlog does not delay another's single operation.
pub async fn a_tenant_with_a_long_backlog_blocks_no_other(lab: Lab) {
    let lab = lab.with_real_clock();
    let ledger = lab.ledger().await;
    let works = (0..200).map(|n| job(of("big", "fair"), &n.to_string())).collect();
    ledger.enqueue_all(works).await.unwrap();
    let (order, gate) = (Arc::<Mutex<Vec<String>>>::default(), Arc::new(Semaphore::new(0)));
    let (seen, gated) = (order.clone(), gate.clone());
    let kind = Kind::leased("works", "fair", move |context: Context<Database>| {
        let (seen, gated) = (seen.clone(), gated.clone());
        async move {
            gated.acquire().await.map_err(|_| Unfinished::failed("closed"))?.forget();
            seen.lock().unwrap().push(context.operation().scope.tenant().to_owned());
            Ok(Outcome::kept(""))
        }
    });
    let hired = hire(Worker::new(&ledger).on(kind.taking(|kind, _| kind == "fair").policy(policy()).at_once(2)));
    gate.add_permits(10);
    eventually(|| async { order.lock().unwrap().len() >= 10 }).await;
    ledger.enqueue(job(of("small", "fair"), "one")).await.unwrap();
    gate.add_permits(20);
    eventually(|| async { order.lock().unwrap().len() >= 30 }).await;
    let place = order.lock().unwrap().iter().position(|tenant| tenant == "small").expect("it had no turn");
    assert!(place < 20, "it came after {place} of the others");
    hired.stop().await;
}

/// A stop ends within its grace: operations still running then are released under rerun, and in doubt under hold.
pub async fn a_stop_releases_runs_that_exceed_its_grace(lab: Lab) {
    let lab = lab.with_real_clock();
    let ledger = lab.ledger().await;
    let (begun, mut begins) = tokio::sync::mpsc::unbounded_channel();
    let mut worker = Worker::new(&ledger).grace(Duration::from_millis(50));
    for on_lost in [OnLost::Rerun, OnLost::Hold] {
        let begun = begun.clone();
        let kind = Kind::leased("works", &format!("{on_lost:?}"), move |_: Context<Database>| {
            let _ = begun.send(());
            std::future::pending::<Result<Outcome, Unfinished>>()
        });
        worker = worker.on(kind.policy(Policy { on_lost, ..policy() }));
        ledger.enqueue(job(of("acme", &format!("{on_lost:?}")), "k")).await.unwrap();
    }
    let hired = hire(worker);
    for _ in 0..2 {
        soon(begins.recv()).await.unwrap();
    }
    hired.stop().await;
    for (kind, state) in [("Rerun", State::Pending), ("Hold", State::InDoubt)] {
        let there = ledger.store().by_key(&of("acme", kind), &key("k")).await.unwrap().unwrap();
        assert_eq!((there.state, there.failures), (state, 0), "{kind}");
    }
}

/// An unreachable target is paused, its operations count no attempt, and those of other targets go on.
pub async fn an_unreachable_target_counts_no_attempt(lab: Lab) {
    let lab = lab.with_real_clock();
    let ledger = lab.ledger().await;
    let (calls, there) = (Arc::<AtomicUsize>::default(), Arc::new(std::sync::atomic::AtomicBool::new(false)));
    let (called, is_there) = (calls.clone(), there.clone());
    let kind = Kind::leased("works", "calls", move |context: Context<Database>| {
        let (called, is_there) = (called.clone(), is_there.clone());
        async move {
            let away = context.operation().key.as_str().starts_with("away");
            if away && !is_there.load(Ordering::SeqCst) {
                called.fetch_add(1, Ordering::SeqCst);
                return Err(Unfinished::Away { target: "there".into(), after: Duration::ZERO, why: "no route".into() });
            }
            Ok(Outcome::kept(""))
        }
    });
    let target = |op: &semel::Operation| op.key.as_str().starts_with("away").then(|| "there".to_owned());
    let hired = hire(Worker::new(&ledger).on(kind.policy(policy()).target(target).at_once(4)));
    let works = (0..20).flat_map(|n| [format!("away {n}"), format!("here {n}")]);
    ledger.enqueue_all(works.map(|name| job(of("acme", "calls"), &name)).collect()).await.unwrap();
    eventually(|| is_over(&ledger, "calls", (0..20).map(|n| format!("here {n}")))).await;
    let called = calls.load(Ordering::SeqCst);
    assert!((1..20).contains(&called), "the target was asked {called} times for twenty operations");
    there.store(true, Ordering::SeqCst);
    eventually(|| is_over(&ledger, "calls", (0..20).map(|n| format!("away {n}")))).await;
    let op = ledger.store().by_key(&of("acme", "calls"), &key("away 7")).await.unwrap().unwrap();
    assert_eq!((op.failures, op.crashes), (0, 0));
    hired.stop().await;
}

/// A run that was cancelled or that panicked says nothing about its target: the others go on waiting, and one at a time
/// probes it.
pub async fn a_run_that_panics_does_not_make_its_target_reachable(lab: Lab) {
    const PROBES: usize = 3;
    let lab = lab.with_real_clock();
    let ledger = lab.ledger().await;
    let (running, most) = (Arc::<AtomicUsize>::default(), Arc::<AtomicUsize>::default());
    let (run, seen) = (running.clone(), most.clone());
    let kind = Kind::leased("works", "panics", move |context: Context<Database>| {
        let (run, seen) = (run.clone(), seen.clone());
        async move {
            if context.operation().key.as_str() == "away" {
                return Err(Unfinished::Away { target: "there".into(), after: secs(60), why: "no route".into() });
            }
            seen.fetch_max(run.fetch_add(1, Ordering::SeqCst) + 1, Ordering::SeqCst);
            tokio::time::sleep(Duration::from_millis(50)).await;
            run.fetch_sub(1, Ordering::SeqCst);
            panic!("on purpose")
        }
    });
    let kind = kind.policy(Policy { max_attempts: Some(1), ..policy() }).target(|_| Some("there".to_owned()));
    let hired = hire(Worker::new(&ledger).on(kind));
    let there = async |name: &str| ledger.store().by_key(&of("acme", "panics"), &key(name)).await.unwrap().unwrap();
    ledger.enqueue(job(of("acme", "panics"), "away")).await.unwrap();
    eventually(|| async { there("away").await.error.is_some() }).await;
    let probes = (0..PROBES).map(|n| job(of("acme", "panics"), &n.to_string())).collect();
    ledger.enqueue_all(probes).await.unwrap();
    for n in 0..PROBES {
        eventually(|| async { there(&n.to_string()).await.state == State::Failed }).await;
    }
    assert_eq!(most.load(Ordering::SeqCst), 1, "the target counted as reachable");
    hired.stop().await;
}

/// Operations of an unreachable target are released without a run, and use up no starts of the fleet's rate.
pub async fn an_unreachable_target_uses_up_no_starts_of_a_rate(lab: Lab) {
    let lab = lab.with_real_clock();
    let ledger = lab.ledger().await;
    // With ten starts a second, they would take forty seconds.
    let dead = (0..400).map(|n| job(of("acme", "rated"), &format!("away {n}"))).collect();
    ledger.enqueue_all(dead).await.unwrap();
    ledger.enqueue(job(of("acme", "rated"), "here")).await.unwrap();
    let away = |op: &semel::Operation| op.key.as_str().starts_with("away").then(|| "there".to_owned());
    let calls = Arc::<AtomicUsize>::default();
    let called = calls.clone();
    let kind = Kind::leased("works", "rated", move |context: Context<Database>| {
        called.fetch_add(1, Ordering::SeqCst);
        std::future::ready(match away(context.operation()) {
            Some(target) => Err(Unfinished::Away { target, after: Duration::ZERO, why: "no route".into() }),
            None => Ok(Outcome::kept("")),
        })
    });
    let hired = hire(Worker::new(&ledger).on(kind.policy(policy()).target(away).rate(10, secs(1))));
    let begun = std::time::Instant::now();
    eventually(|| is_over(&ledger, "rated", std::iter::once("here".to_owned()))).await;
    hired.stop().await;
    // What was given back are starts that were not used: the rate holds.
    let allowed = 11 + 10 * usize::try_from(begun.elapsed().as_secs() + 1).unwrap();
    assert!(calls.load(Ordering::SeqCst) <= allowed, "{calls:?} have started within {:?}", begun.elapsed());
}

/// An operation that was enqueued for another day waits as briefly as a new one when its target is unreachable.
pub async fn the_delay_of_an_enqueue_does_not_prolong_the_wait_for_a_target(lab: Lab) {
    let ledger = lab.ledger().await;
    let day = secs(24 * 3600);
    ledger.enqueue(job(of("acme", "later"), "k").delay(day)).await.unwrap();
    lab.pass(day);
    let kind = Kind::leased("works", "later", |_: Context<Database>| {
        std::future::ready(Err(Unfinished::Away { target: "there".into(), after: Duration::ZERO, why: "no".into() }))
    });
    let hired = hire(Worker::new(&ledger).on(kind.policy(Policy::default())));
    let there = async || ledger.store().by_key(&of("acme", "later"), &key("k")).await.unwrap().unwrap();
    eventually(|| async { there().await.error.is_some() }).await;
    hired.stop().await;
    let wait = there().await.not_before.unwrap().since(Lab::START + day);
    assert!(wait <= secs(1), "it waits for {wait:?}");
}

/// A worker finds what another node has enqueued by polling: an idle one within a second, a busy one within a tenth.
pub async fn work_of_another_node_starts_soon(lab: Lab) {
    let lab = lab.with_real_clock();
    let (here, there) = (lab.ledger_of("here").await, lab.ledger_of("there").await);
    let (begun, mut runs) = tokio::sync::mpsc::unbounded_channel();
    let kind = Kind::leased("works", "remote", move |_: Context<Database>| {
        let _ = begun.send(());
        std::future::ready(Ok(Outcome::kept("")))
    });
    let hired = hire(Worker::new(&here).on(kind.policy(policy())));
    let mut waits = Vec::new();
    for n in 0..10 {
        there.enqueue(job(of("acme", "remote"), &n.to_string())).await.unwrap();
        let enqueued = std::time::Instant::now();
        soon(runs.recv()).await.unwrap();
        waits.push(enqueued.elapsed());
    }
    hired.stop().await;
    assert!(waits[0] < secs(4), "{waits:?}");
    // The shortest: the others may meet a busy machine. Each waits for a poll that begins after the one before has run.
    let shortest = waits[1..].iter().min().unwrap();
    assert!(*shortest < Duration::from_millis(400), "{waits:?}");
}

/// A commit wakes the worker for its own kind and tenant, however many others wait for a later time.
pub async fn a_commit_wakes_the_worker_among_many_tenants(lab: Lab) {
    let lab = lab.with_real_clock();
    let ledger = lab.ledger().await;
    // More than a look reads.
    wait_for_later(&lab, 12_000).await;
    let (begun, mut runs) = tokio::sync::mpsc::unbounded_channel();
    let kind = Kind::leased("works", "one", move |context: Context<Database>| {
        let _ = begun.send(context.operation().scope.tenant().to_owned());
        std::future::ready(Ok(Outcome::kept("")))
    });
    let kind = kind.taking(|kind, _| kind == "one").policy(policy());
    // Its polling interval is too long to find anything in time.
    let hired = hire(Worker::new(&ledger).on(kind).poll(secs(3600)));
    for tenant in ["a", "t05000x", "z"] {
        ledger.enqueue(job(of(tenant, "one"), "k")).await.unwrap();
        assert_eq!(soon(runs.recv()).await.unwrap(), tenant);
    }
    hired.stop().await;
}

/// One operation of each of so many tenants waits for another day. By SQL, because it is faster.
async fn wait_for_later(lab: &Lab, tenants: usize) {
    let (numbers, name) = match lab.kind() {
        crate::Kind::Sqlite => (
            format!("WITH RECURSIVE i(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM i WHERE i < {tenants}) SELECT"),
            "printf('t%05d', i)",
        ),
        crate::Kind::Postgres => (
            format!("WITH i AS (SELECT i FROM generate_series(1, {tenants}) AS i) SELECT"),
            "'t' || lpad(i::text, 5, '0')",
        ),
    };
    let fill = format!(
        "INSERT INTO semel_backlog (operation, tenant, service, kind, state, due)
         {numbers} -i, {name}, 'works', 'one', 'pending', 9000000000000000 FROM i"
    );
    assert_eq!(lab.execute(&fill).await.unwrap(), tenants as u64);
}

/// A row that appears before all others of its queue, as after a long transaction or a clock that was set back, is found
/// within about a second.
pub async fn a_row_that_is_due_before_all_others_is_found(lab: Lab) {
    let lab = lab.with_real_clock();
    let ledger = lab.ledger().await;
    let scope = of("acme", "late");
    for name in ["first", "second"] {
        ledger.enqueue(job(scope.clone(), name)).await.unwrap();
    }
    let id = ledger.store().by_key(&scope, &key("second")).await.unwrap().unwrap().id;
    let first_due = async || ledger.due_kinds("works", ("", "")).await.unwrap()[0].next;
    let before = first_due().await;
    // Long enough for a look to begin after the first ones.
    tokio::time::sleep(secs(1)).await;
    assert_eq!(first_due().await, before);
    let earlier = format!("UPDATE semel_backlog SET due = due - 3600000000 WHERE operation = {id}");
    assert_eq!(lab.execute(&earlier).await.unwrap(), 1);
    eventually(|| async { first_due().await < before }).await;
    eventually(|| async {
        let want =
            Want { scope: scope.clone(), most: 1, since: None, policy: policy(), lease: None, limits: <_>::default() };
        let mut taken = ledger.take(vec![want]).await.unwrap();
        let (_, lease) = taken.pop().unwrap();
        let found = lease.operation().id == id;
        assert_eq!(lease.release(Duration::ZERO).await.unwrap(), Settled::Yes { successor: false });
        found
    })
    .await;
}

/// Operations that are put off, because their target is paused, leave no note of it.
pub async fn operations_of_a_paused_target_are_put_off_without_a_note(lab: Lab) {
    const ALL: usize = 100;
    let lab = lab.with_real_clock();
    let ledger = lab.ledger().await;
    let calls = Arc::<AtomicUsize>::default();
    let called = calls.clone();
    let kind = Kind::leased("works", "away", move |_: Context<Database>| {
        called.fetch_add(1, Ordering::SeqCst);
        std::future::ready(Err(Unfinished::Away { target: "there".into(), after: Duration::ZERO, why: "no".into() }))
    });
    ledger.enqueue_all((0..ALL).map(|n| job(of("acme", "away"), &n.to_string())).collect()).await.unwrap();
    let hired = hire(Worker::new(&ledger).on(kind.policy(policy()).target(|_| Some("there".to_owned())).at_once(4)));
    eventually(|| async {
        lab.number("SELECT count(*) FROM semel_operations WHERE not_before IS NOT NULL").await == 100
    })
    .await;
    // Before the stop, which releases what has not begun.
    let notes = lab.number("SELECT count(*) FROM semel_journal WHERE event = 'released'").await;
    let calls = calls.load(Ordering::SeqCst);
    hired.stop().await;
    assert!((1..=calls).contains(&usize::try_from(notes).unwrap()), "{notes} notes of {calls} runs");
    assert!(calls < ALL / 2, "{calls} of them ran");
}

/// A stop ends the worker within its grace, although the database does not answer.
pub async fn a_stop_does_not_wait_for_the_database(lab: Lab) {
    let lab = lab.with_real_clock();
    let (ledger, other) = (lab.ledger_of("here").await, lab.ledger_of("there").await);
    ledger.enqueue(job(of("acme", "blocked"), "k")).await.unwrap();
    let (asked, mut asks) = tokio::sync::mpsc::unbounded_channel();
    let kind = noting("blocked", &Order::default()).policy_by(move |_| {
        let _ = asked.send(());
        policy()
    });
    // No take gets through: on SQLite there is one writer, on PostgreSQL the table is locked.
    let held = other.store().begin(secs(60)).await.unwrap();
    let mut conn = held.connection().await.unwrap();
    match conn.get().unwrap() {
        semel_store::Conn::Postgres(conn) => {
            sqlx::raw_sql("LOCK TABLE semel_operations IN ACCESS EXCLUSIVE MODE").execute(conn).await.unwrap();
        }
        semel_store::Conn::Sqlite(conn) => {
            sqlx::raw_sql("DELETE FROM semel_paused").execute(conn).await.unwrap();
        }
    }
    let hired = hire(Worker::new(&ledger).on(kind).grace(Duration::from_millis(200)));
    soon(asks.recv()).await.unwrap();
    let begun = std::time::Instant::now();
    hired.stop().await;
    assert!(begun.elapsed() < secs(8), "the stop took {:?}", begun.elapsed());
    drop(conn);
    other.store().commit(&held).await;
    eventually(|| async {
        let there = ledger.store().by_key(&of("acme", "blocked"), &key("k")).await.unwrap().unwrap();
        (there.state, there.failures, there.crashes) == (State::Pending, 0, 0)
    })
    .await;
}

/// A take that meets a row which the database refuses returns once that one is set aside: it does not go on one by one
/// while the leases of the first expire. The next take gets the rest.
pub async fn a_take_returns_once_the_refused_row_is_set_aside(lab: Lab) {
    let lab = lab.with_real_clock();
    let ledger = lab.ledger().await;
    let kinds = ["one", "two", "three"];
    for kind in kinds {
        for name in ["a", "b", if kind == "two" { "refused" } else { "c" }, "d"] {
            ledger.enqueue(job(of("acme", kind), name)).await.unwrap();
        }
    }
    refuse(&lab).await;
    let take = async || {
        let want = |kind| Want {
            scope: of("acme", kind),
            most: 4,
            since: None,
            policy: policy(),
            lease: None,
            limits: <_>::default(),
        };
        let taken = ledger.take(kinds.map(want).into()).await.unwrap();
        taken.iter().map(|(n, lease)| (*n, lease.operation().key.as_str().to_owned())).collect::<Vec<_>>()
    };
    let names = |of: &[(usize, &str)]| of.iter().map(|(n, name)| (*n, (*name).to_owned())).collect::<Vec<_>>();
    assert_eq!(take().await, names(&[(0, "a"), (0, "b"), (0, "c"), (0, "d"), (1, "a"), (1, "b")]));
    assert_eq!(take().await, names(&[(1, "d"), (2, "a"), (2, "b"), (2, "c"), (2, "d")]));
}

/// Makes the database refuse to change operations with this key.
async fn refuse(lab: &Lab) {
    let refuse = match lab.kind() {
        crate::Kind::Sqlite => vec![
            "CREATE TRIGGER refuse BEFORE UPDATE ON semel_operations WHEN NEW.key = 'refused'
             BEGIN SELECT RAISE(ABORT, 'not this one'); END",
        ],
        crate::Kind::Postgres => vec![
            "CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS
             $$ BEGIN RAISE EXCEPTION 'not this one'; END $$",
            "CREATE TRIGGER refuse BEFORE UPDATE ON semel_operations FOR EACH ROW WHEN (NEW.key = 'refused')
             EXECUTE FUNCTION refuse()",
        ],
    };
    for text in refuse {
        lab.execute(text).await.unwrap();
    }
}

/// A kind whose policy is not valid is not taken, and a span that panics ends one run: other work goes on.
pub async fn mistakes_in_one_kind_stop_no_other(lab: Lab) {
    let lab = lab.with_real_clock();
    let ledger = lab.ledger().await;
    for kind in ["never", "panics", "probes", "sound"] {
        let work = job(of("acme", kind), "k").policy_of_worker(policy());
        ledger.enqueue(work).await.unwrap();
    }
    let handler = |_: Context<Database>| async { Ok(Outcome::kept("")) };
    let never = Kind::leased("works", "never", handler).policy(Policy { max_attempts: Some(0), ..policy() });
    let panics = Kind::leased("works", "panics", handler).policy(policy()).span(|_| panic!("on purpose"));
    // A worker has no probe: its operations would be in doubt for ever.
    let probes = Kind::leased("works", "probes", handler).policy(Policy { on_lost: OnLost::Probe, ..policy() });
    let sound = Kind::leased("works", "sound", handler).policy(policy());
    let hired = hire(Worker::new(&ledger).on(never).on(panics).on(probes).on(sound));
    eventually(|| is_over(&ledger, "sound", std::iter::once("k".to_owned()))).await;
    // The worker is still there.
    ledger.enqueue(job(of("acme", "sound"), "another")).await.unwrap();
    eventually(|| is_over(&ledger, "sound", std::iter::once("another".to_owned()))).await;
    for kind in ["never", "probes"] {
        let untouched = ledger.store().by_key(&of("acme", kind), &key("k")).await.unwrap().unwrap();
        assert_eq!((untouched.state, untouched.parked), (State::Pending, false), "{kind}");
        let due = ledger.store().due_kinds("works", ("", "")).await.unwrap();
        assert!(due.iter().any(|due| due.kind == kind), "{kind} stays due");
    }
    hired.stop().await;
}

/// A worker ends expired leases by itself: the work of a killed node does not wait for the next sweep.
pub async fn work_of_a_lost_node_goes_on_without_a_sweep(lab: Lab) {
    let lab = lab.with_real_clock();
    let ledger = lab.ledger().await;
    let short = Policy { lease: secs(1), ..policy() };
    let lost = ledger.claim(job(of("acme", "lost"), "k").policy(short.clone())).await.unwrap();
    assert!(matches!(lost, semel::Claim::Acquired(_)));
    // Nothing renews a claimed lease that is not being run.
    drop(lost);
    let handler = |_: Context<Database>| async { Ok(Outcome::kept("")) };
    let hired = hire(Worker::new(&ledger).on(Kind::leased("works", "lost", handler).policy(short)));
    eventually(|| is_over(&ledger, "lost", std::iter::once("k".to_owned()))).await;
    hired.stop().await;
}

/// Newer data for a running operation is the worker's next work: it runs after the older, within the same seats.
pub async fn newer_data_is_the_workers_next_work(lab: Lab) {
    let lab = lab.with_real_clock();
    let ledger = lab.ledger().await;
    let (begun, mut begins) = tokio::sync::mpsc::unbounded_channel();
    let (gate, running) = (Arc::new(Semaphore::new(0)), Arc::<AtomicUsize>::default());
    let gated = gate.clone();
    let kind = Kind::leased("works", "versions", move |context: Context<Database>| {
        let (begun, gated, running) = (begun.clone(), gated.clone(), running.clone());
        async move {
            assert_eq!(running.fetch_add(1, Ordering::SeqCst), 0, "more run than there are seats");
            let _ = begun.send(String::from_utf8(context.operation().payload.clone().unwrap().to_vec()).unwrap());
            gated.acquire().await.map_err(|_| Unfinished::failed("closed"))?.forget();
            running.fetch_sub(1, Ordering::SeqCst);
            Ok(Outcome::kept(""))
        }
    });
    let policy = Policy { on_mismatch: OnMismatch::SupersedeIfNewer, ..policy() };
    let version = |name: &str, text: &'static str, n: i64| {
        let work = Work::new(of("acme", "versions"), key(name), Fingerprint::of_bytes(text.as_bytes()));
        work.payload(text).order(n).policy(policy.clone())
    };
    ledger.enqueue(version("k", "older", 1)).await.unwrap();
    let hired = hire(Worker::new(&ledger).on(kind.policy(policy.clone()).at_once(1)));
    assert_eq!(soon(begins.recv()).await.unwrap(), "older");
    assert_eq!(ledger.enqueue(version("k", "newer", 2)).await.unwrap().word(), "in_flight");
    ledger.enqueue(version("other", "other", 1)).await.unwrap();
    gate.add_permits(3);
    let mut next = [soon(begins.recv()).await.unwrap(), soon(begins.recv()).await.unwrap()];
    next.sort();
    assert_eq!(next, ["newer", "other"]);
    eventually(|| is_over(&ledger, "versions", ["k", "other"].map(str::to_owned).into_iter())).await;
    hired.stop().await;
}

/// Each kind with work has its turn: those that do not fit one transaction follow in the next.
pub async fn kinds_beyond_one_transaction_are_taken_in_the_next(lab: Lab) {
    const KINDS: usize = 150;
    let lab = lab.with_real_clock();
    let ledger = lab.ledger().await;
    let names: Vec<_> = (0..KINDS).map(|n| format!("many {n:03}")).collect();
    ledger.enqueue_all(names.iter().map(|name| job(of("acme", name), "k")).collect()).await.unwrap();
    let ran = Ran::default();
    let seen = ran.clone();
    let kind = Kind::leased("works", "", move |context: Context<Database>| {
        let kind = context.operation().scope.kind().to_owned();
        *seen.lock().unwrap().entry(kind).or_default() += 1;
        std::future::ready(Ok(Outcome::kept("")))
    });
    let all = kind.taking(|kind, _| kind.starts_with("many ")).policy(policy()).at_once(2 * KINDS);
    let hired = hire(Worker::new(&ledger).on(all));
    for name in &names {
        eventually(|| is_over(&ledger, name, std::iter::once("k".to_owned()))).await;
    }
    hired.stop().await;
    assert_eq!(*ran.lock().unwrap(), names.into_iter().map(|name| (name, 1)).collect());
}

/// A row that the database refuses to change is set aside, and delays no other.
pub async fn an_operation_that_cannot_be_claimed_blocks_no_other(lab: Lab) {
    let lab = lab.with_real_clock();
    let ledger = lab.ledger().await;
    let names = ["a", "b", "refused", "c", "d"];
    ledger.enqueue_all(names.map(|name| job(of("acme", "some"), name)).into()).await.unwrap();
    refuse(&lab).await;
    let kind = Kind::leased("works", "some", |_: Context<Database>| std::future::ready(Ok(Outcome::kept(""))));
    let hired = hire(Worker::new(&ledger).on(kind.policy(policy())));
    eventually(|| is_over(&ledger, "some", ["a", "b", "c", "d"].map(str::to_owned).into_iter())).await;
    eventually(|| async { lab.number("SELECT count(*) FROM semel_set_aside").await == 1 }).await;
    let mended = match lab.kind() {
        crate::Kind::Sqlite => "DROP TRIGGER refuse",
        crate::Kind::Postgres => "DROP TRIGGER refuse ON semel_operations",
    };
    lab.execute(mended).await.unwrap();
    assert_eq!(ledger.store().try_set_aside_again().await.unwrap(), 1);
    ledger.sweep().await.unwrap();
    eventually(|| is_over(&ledger, "some", std::iter::once("refused".to_owned()))).await;
    hired.stop().await;
}

/// The worker retries a failed operation as often as its policy allows.
pub async fn a_worker_retries_as_often_as_the_policy_allows(lab: Lab) {
    let lab = lab.with_real_clock();
    let ledger = lab.ledger().await;
    let ran = Ran::default();
    let seen = ran.clone();
    let kind = Kind::leased("works", "fails", move |context: Context<Database>| {
        let name = note(&seen, &context);
        async move {
            match (name.as_str(), context.operation().attempt()) {
                ("second time", 2) => Ok(Outcome::kept("")),
                _ => Err(Unfinished::failed("not now")),
            }
        }
    });
    let hired = hire(Worker::new(&ledger).on(kind.policy(policy())));
    for name in ["second time", "never"] {
        ledger.enqueue(job(of("acme", "fails"), name)).await.unwrap();
    }
    eventually(|| is_over(&ledger, "fails", std::iter::once("second time".to_owned()))).await;
    eventually(|| async { ran.lock().unwrap().get("never") == Some(&3) }).await;
    eventually(|| async { ledger.due_kinds("works", ("", "")).await.unwrap().is_empty() }).await;
    hired.stop().await;
    assert_eq!(ran.lock().unwrap()["never"], 3);
}

/// A paused kind is polled a few times and then about once a second, however long its operations are due; after the
/// resume it runs. The policy of a kind is looked up with every take.
pub async fn a_paused_kind_is_rarely_polled(lab: Lab) {
    let lab = lab.with_real_clock();
    let ledger = lab.ledger().await;
    ledger.store().pause_kind("works", "paused", "ann", "not now").await.unwrap();
    ledger.enqueue(job(of("acme", "paused"), "k")).await.unwrap();
    let asks = Arc::<AtomicUsize>::default();
    let asked = asks.clone();
    let kind = Kind::leased("works", "paused", |_: Context<Database>| async { Ok(Outcome::kept("")) });
    let hired = hire(Worker::new(&ledger).on(kind.policy_by(move |_| {
        asked.fetch_add(1, Ordering::SeqCst);
        policy()
    })));
    eventually(|| async { asks.load(Ordering::SeqCst) > 0 }).await;
    // 10, 20, 40 … 640 ms, and then every second.
    tokio::time::sleep(secs(4)).await;
    let asks = asks.load(Ordering::SeqCst);
    assert!(asks <= 12, "it was asked for {asks} times in four seconds");
    assert!(ledger.store().resume_kind("works", "paused", "ann", "go on").await.unwrap());
    eventually(|| is_over(&ledger, "paused", std::iter::once("k".to_owned()))).await;
    hired.stop().await;
}

/// A kind that notes the tenant and key of its runs, in order.
fn noting(kind: &str, order: &Order) -> Kind<Database> {
    let order = order.clone();
    Kind::leased("works", kind, move |context: Context<Database>| {
        let (tenant, key) =
            (context.operation().scope.tenant().to_owned(), context.operation().key.as_str().to_owned());
        order.lock().unwrap().push((tenant, key));
        std::future::ready(Ok(Outcome::kept("")))
    })
    .policy(policy())
}

/// The tenants and keys of runs, in order.
type Order = Arc<Mutex<Vec<(String, String)>>>;

/// A limit of the fleet is shared among tenants: one with a long backlog does not use it up.
pub async fn tenants_share_the_limit_of_a_fleet(lab: Lab) {
    let lab = lab.with_real_clock();
    let ledger = lab.ledger().await;
    for tenant in ["a", "b", "c"] {
        let works = (0..20).map(|n| job(of(tenant, "limited"), &n.to_string())).collect();
        ledger.enqueue_all(works).await.unwrap();
    }
    let order = Order::default();
    let hired = hire(Worker::new(&ledger).on(noting("limited", &order).at_once_in_all(1)));
    eventually(|| async { order.lock().unwrap().len() >= 9 }).await;
    hired.stop().await;
    for tenant in ["a", "b", "c"] {
        let runs = order.lock().unwrap()[..9].iter().filter(|(of, _)| of == tenant).count();
        assert_eq!(runs, 3, "{tenant}: {:?}", order.lock().unwrap());
    }
}

/// The starts of a kind with a rate are spread over time.
pub async fn a_rate_spreads_the_starts(lab: Lab) {
    let lab = lab.with_real_clock();
    let ledger = lab.ledger().await;
    let works = (0..30).map(|n| job(of("acme", "slow"), &n.to_string())).collect();
    ledger.enqueue_all(works).await.unwrap();
    let (order, begun) = (Order::default(), std::time::Instant::now());
    let hired = hire(Worker::new(&ledger).on(noting("slow", &order).rate(20, secs(2))));
    eventually(|| async { order.lock().unwrap().len() >= 30 }).await;
    hired.stop().await;
    // Ten a second, and those of one second at once in the beginning.
    assert!(begun.elapsed() >= Duration::from_millis(1800), "thirty have started within {:?}", begun.elapsed());
}

/// Low priorities of every tenant have their turn, although higher ones are due.
pub async fn low_priorities_of_each_tenant_have_their_turn(lab: Lab) {
    let lab = lab.with_real_clock();
    let ledger = lab.ledger().await;
    for tenant in ["a", "b"] {
        let low = job(of(tenant, "ranked"), "low").priority(Priority::new(-2).unwrap());
        ledger.enqueue(low).await.unwrap();
        let high = |n: usize| job(of(tenant, "ranked"), &n.to_string()).priority(Priority::new(2).unwrap());
        ledger.enqueue_all((0..40).map(high).collect()).await.unwrap();
    }
    let order = Order::default();
    let hired = hire(Worker::new(&ledger).on(noting("ranked", &order).at_once(1)));
    eventually(|| async { order.lock().unwrap().len() >= 60 }).await;
    hired.stop().await;
    for tenant in ["a", "b"] {
        let order = order.lock().unwrap();
        let mut own = order.iter().filter(|(of, _)| of == tenant).map(|(_, key)| key.as_str());
        let place = own.position(|key| key == "low");
        assert_eq!(place, Some(9), "{tenant}: every tenth is the longest due one");
    }
}

/// A stop during a take: what was taken has not begun, and is handed back without counting an attempt.
pub async fn a_stop_during_a_take_hands_back_its_operations(lab: Lab) {
    let lab = lab.with_real_clock();
    let ledger = lab.ledger().await;
    let works = (0..5).map(|n| job(of("acme", "unbegun"), &n.to_string())).collect();
    ledger.enqueue_all(works).await.unwrap();
    let (order, (stop, stops)) = (Order::default(), watch::channel(false));
    // The policy is looked up just before the take.
    let kind = noting("unbegun", &order).policy_by(move |_| {
        stop.send_replace(true);
        Policy { on_lost: OnLost::Hold, ..policy() }
    });
    soon(Worker::new(&ledger).on(kind).run(stops)).await;
    assert!(order.lock().unwrap().is_empty(), "they were begun after the stop");
    for n in 0..5 {
        let there = ledger.store().by_key(&of("acme", "unbegun"), &key(&n.to_string())).await.unwrap().unwrap();
        assert_eq!((there.state, there.failures, there.crashes), (State::Pending, 0, 0));
    }
    assert!(!ledger.due_kinds("works", ("", "")).await.unwrap().is_empty(), "they are due");
}
