//! Runs: claim, renew, work and settle in one call.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU32, Ordering},
    },
    time::Duration,
};

use semel::{
    Backoff, Claim, Context, Error, Handed, Lease, OnLost, OnMismatch, Outcome, Policy, Ran, State, Unfinished,
    journal::Event, prelude::*,
};
use semel_store::Database;
use tokio::sync::{Notify, mpsc};

use super::tools::*;
use crate::{Lab, work, work_with};

/// The end of a run that must have been this caller's.
fn ran(claim: semel::Result<Claim<Ran>>) -> Ran {
    match claim.unwrap() {
        Claim::Acquired(ran) => ran,
        other => panic!("should have run, and is {}", other.word()),
    }
}

/// Sets a flag when it is dropped: distinguishes a cancelled handler from a waiting one.
struct OnDrop(Arc<AtomicBool>);

impl Drop for OnDrop {
    fn drop(&mut self) {
        self.0.store(true, Ordering::SeqCst);
    }
}

/// A run completes with its handler's outcome, and later callers get that outcome without a run.
pub async fn a_run_completes_once(lab: Lab) {
    let ledger = lab.ledger().await;
    let runs = Arc::new(AtomicU32::new(0));
    for round in 0..3 {
        let count = runs.clone();
        let claim = ledger.run(work("k", Policy::default()).payload("in"), move |ctx| {
            let count = count.clone();
            async move {
                count.fetch_add(1, Ordering::SeqCst);
                assert!(!ctx.is_lost());
                assert_eq!(ctx.operation().payload.as_deref(), Some(&b"in"[..]));
                Ok(done(&ctx.derived_key("step")))
            }
        });
        match soon(claim).await.unwrap() {
            Claim::Acquired(Ran::Completed(_)) if round == 0 => {}
            Claim::Replay(replay) if round > 0 => assert!(replay.outcome.kept && !replay.outcome.body.is_empty()),
            other => panic!("round {round}: {}", other.word()),
        }
    }
    assert_eq!(runs.load(Ordering::SeqCst), 1);
}

/// Every end of a handler is settled accordingly, under rerun and under hold.
pub async fn every_end_of_a_handler_is_settled(lab: Lab) {
    let ledger = lab.ledger().await;
    for on_lost in [OnLost::Rerun, OnLost::Hold] {
        let policy = Policy { on_lost, ..Policy::default() };
        let run = async |text: &'static str| {
            let name = format!("{text} {on_lost:?}");
            let handled = ledger.run(work(&name, policy.clone()), move |_| async move {
                Err(match text {
                    "fails" => Unfinished::failed("no luck"),
                    "never" => Unfinished::failed_for_good("no way"),
                    "not yet" => Unfinished::released(secs(9)),
                    "unknown" => Unfinished::Doubted("cut off".into()),
                    _ => panic!("oh no"),
                })
            });
            (ran(soon(handled).await), row(&ledger, &name).await)
        };
        let (said, op) = run("fails").await;
        assert!(matches!(said, Ran::Failed(failure) if failure.error == "no luck"));
        assert_eq!((op.state, op.failures, op.parked), (State::Failed, 1, false));
        let (said, op) = run("never").await;
        assert!(matches!(said, Ran::Failed(_)));
        assert_eq!((op.state, op.parked), (State::Failed, true));
        let (said, op) = run("not yet").await;
        assert_eq!((said, op.state, op.failures), (Ran::Released, State::Pending, 0));
        assert_eq!(op.not_before, Some(Lab::START + secs(9)));
        let (said, op) = run("unknown").await;
        assert_eq!((said, op.state), (Ran::Doubted("cut off".into()), State::InDoubt));
        let (said, op) = run("panics").await;
        // The state of a panicked handler is unknown: that is a doubt if a run must not be repeated.
        assert_eq!(op.state, if on_lost == OnLost::Hold { State::InDoubt } else { State::Failed });
        assert!(format!("{said:?}").contains("panicked: oh no"), "{said:?}");
        assert!(op.error.unwrap().contains("oh no"));
    }
}

async fn panics(_: Context<Database>) -> (Result<Outcome, Unfinished>, ()) {
    panic!("oh no")
}

/// A handler hands its caller a value beside the outcome, if it returns and its result was stored.
pub async fn a_value_is_handed_over_if_its_result_is_stored(lab: Lab) {
    let (a, b) = (lab.ledger().await, lab.ledger().await);
    let policy = Policy { backoff: Backoff::NONE, ..Policy::default() };
    let run = async |lease: Lease<Database>, said: Result<Outcome, Unfinished>| {
        soon(lease.run_handing(move |_| std::future::ready((said.clone(), "beside")))).await.unwrap()
    };
    let lease = async |name: &str| acquire(&a, work(name, policy.clone())).await;
    let completed = run(lease("completes").await, Ok(done("stored"))).await;
    assert_eq!(completed, (Ran::Completed(done("stored")), Handed::Stored("beside")));
    for said in [Unfinished::failed("no"), Unfinished::released(secs(9)), Unfinished::Doubted("?".into())] {
        let (_, handed) = run(lease(&format!("{said:?}")).await, Err(said)).await;
        assert_eq!(handed, Handed::Stored("beside"));
    }
    let panics = lease("panics").await.run_handing(panics);
    let (said, handed) = soon(panics).await.unwrap();
    assert!(matches!(said, Ran::Failed(_)) && handed == Handed::Nothing, "{said:?} {handed:?}");

    let late = lease("late").await;
    lab.pass(policy.lease);
    let owner = acquire(&b, work("late", policy.clone())).await;
    assert_eq!(run(late, Ok(done("late"))).await, (Ran::LeaseLost, Handed::NotStored));
    assert_eq!(owner.complete(done("the other's")).await.unwrap(), SETTLED);
}

/// The work continues if its caller goes away, and its outcome is stored.
pub async fn a_caller_that_goes_away_does_not_stop_the_run(lab: Lab) {
    let ledger = lab.ledger().await;
    let (begun, go) = (Arc::new(Notify::new()), Arc::new(Notify::new()));
    let caller = {
        let (ledger, begun, go) = (ledger.clone(), begun.clone(), go.clone());
        tokio::spawn(async move {
            let handler = move |_| {
                let (begun, go) = (begun.clone(), go.clone());
                async move {
                    begun.notify_one();
                    go.notified().await;
                    Ok(done("all the same"))
                }
            };
            ledger.run(work("k", Policy::default()), handler).await
        })
    };
    soon(begun.notified()).await;
    caller.abort();
    assert!(caller.await.unwrap_err().is_cancelled());
    go.notify_one();
    let Claim::Replay(replay) = soon(ledger.claim_or_wait(work("k", Policy::default()), secs(10))).await.unwrap()
    else {
        panic!()
    };
    assert_eq!(replay.outcome, done("all the same"));
}

/// A run whose lease was lost is cancelled and reports it; it does not decide about the operation any more.
pub async fn a_lost_lease_cancels_the_run(lab: Lab) {
    let (a, b) = (lab.ledger().await, lab.ledger().await);
    let policy = Policy { lease: secs(2), ..Policy::default() };
    let (begun, cancelled) = (Arc::new(Notify::new()), Arc::new(AtomicBool::new(false)));
    let run = {
        let (begun, cancelled, policy) = (begun.clone(), cancelled.clone(), policy.clone());
        let handler = move |_| {
            let (begun, cancelled) = (begun.clone(), OnDrop(cancelled.clone()));
            async move {
                let _cancelled = cancelled;
                begun.notify_one();
                std::future::pending::<Result<Outcome, Unfinished>>().await
            }
        };
        let a = a.clone();
        tokio::spawn(async move { a.run(work("k", policy), handler).await })
    };
    soon(begun.notified()).await;
    // The database's clock jumps, as if this node had been asleep.
    lab.pass(policy.lease);
    let owner = acquire(&b, work("k", policy)).await;
    assert_eq!(ran(soon(run).await.unwrap()), Ran::LeaseLost);
    eventually(async || cancelled.load(Ordering::SeqCst)).await;
    assert_eq!(owner.complete(done("the other's")).await.unwrap(), SETTLED);
    // First the run is signalled, then the journal is written.
    let id = row(&b, "k").await.id;
    eventually(async || story(&b, id).await == [Event::TimedOut, Event::TakenOver, Event::Refused]).await;
}

/// A stuck run ends at its `max_run`, although it is renewed.
pub async fn a_stuck_run_ends_with_its_longest_run(lab: Lab) {
    let lab = lab.with_real_clock();
    let ledger = lab.ledger().await;
    let policy = Policy { lease: secs(3), max_run: secs(5), ..Policy::default() };
    let start = std::time::Instant::now();
    let run = ledger.run(work("k", policy), |_| std::future::pending::<Result<Outcome, Unfinished>>());
    assert_eq!(ran(soon(run).await), Ran::LeaseLost);
    assert!(start.elapsed() > secs(3), "it was renewed at least once");
    eventually(async || ledger.sweep().await.unwrap().lapsed == 1).await;
    assert_eq!(row(&ledger, "k").await.state, State::TimedOut);
}

/// A handler that blocks every thread of its runtime for longer than its lease keeps the lease.
pub async fn a_handler_that_blocks_its_runtime_is_still_renewed(lab: Lab) {
    let lab = lab.with_real_clock();
    let other = lab.ledger().await;
    let policy = Policy { lease: secs(3), ..Policy::default() };
    let (url, settings, blocked) = (lab.url.clone(), lab.settings(), policy.clone());
    let owner = std::thread::spawn(move || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let store = semel_store::Database::open(&url, settings).await.unwrap();
            let ledger = semel::Ledger::new(store, semel::Options::default()).unwrap();
            let handler = |_| async {
                std::thread::sleep(secs(5));
                Ok(done("after all"))
            };
            ran(ledger.run(work("k", blocked), handler).await)
        })
    });
    eventually(async || find(&other, "k").await.is_some()).await;
    let claim = soon(other.claim_or_wait(work("k", policy), secs(15))).await.unwrap();
    assert!(matches!(claim, Claim::Replay(_)), "the other node got {}", claim.word());
    assert_eq!(owner.join().unwrap(), Ran::Completed(done("after all")));
}

/// A ledger that stops accepts nothing new, waits for runs that end by themselves, and ends the rest: released under
/// rerun, in doubt under hold.
pub async fn a_stop_ends_runs_and_refuses_new_ones(lab: Lab) {
    let (ledger, other) = (lab.ledger().await, lab.ledger().await);
    let (begun, mut started) = mpsc::channel(3);
    let go = Arc::new(Notify::new());
    let mut runs = tokio::task::JoinSet::new();
    for (text, on_lost) in [("rerun", OnLost::Rerun), ("hold", OnLost::Hold), ("quick", OnLost::Hold)] {
        let (ledger, begun, go) = (ledger.clone(), begun.clone(), go.clone());
        runs.spawn(async move {
            let handler = move |_| {
                let (begun, go) = (begun.clone(), go.clone());
                async move {
                    begun.send(()).await.unwrap();
                    match text {
                        "quick" => go.notified().await,
                        _ => std::future::pending().await,
                    }
                    Ok(done("in time"))
                }
            };
            (text, ran(ledger.run(work(text, Policy { on_lost, ..Policy::default() }), handler).await))
        });
    }
    for _ in 0..3 {
        soon(started.recv()).await.unwrap();
    }
    let mut stopping = Box::pin(ledger.stop(secs(1)));
    tokio::select! {
        biased;
        () = &mut stopping => panic!("it did not wait"),
        () = std::future::ready(()) => {}
    }
    // Nothing is written between the beginning of the stop and the end of the quick run: a slow disk costs it no time.
    assert!(matches!(ledger.claim(work("new", Policy::default())).await, Err(Error::Stopping)));
    go.notify_one();
    soon(stopping).await;
    for (text, ran) in soon(runs.join_all()).await {
        match text {
            "rerun" => assert_eq!(ran, Ran::Released),
            "quick" => assert_eq!(ran, Ran::Completed(done("in time"))),
            _ => assert!(matches!(ran, Ran::Doubted(_))),
        }
    }
    assert_eq!(find(&other, "rerun").await, None, "a stop costs no attempt");
    assert_eq!(row(&other, "hold").await.state, State::InDoubt);
    assert_eq!(row(&other, "quick").await.state, State::Completed);
    let refused = ledger.run(work("new", Policy::default()), |_| async { Ok(done("")) }).await;
    assert!(matches!(refused, Err(Error::Stopping)));
}

/// The stop of a ledger waits for a run whose claim is still in flight, and releases it.
pub async fn a_stop_does_not_miss_a_run_that_is_about_to_begin(lab: Lab) {
    for waits in [false, true] {
        misses_no_run(&lab, waits).await;
    }
}

async fn misses_no_run(lab: &Lab, waits: bool) {
    let (ledger, other) = (lab.ledger().await, lab.ledger().await);
    // Another transaction is about to commit the same key, so the claim has to wait for that.
    let tx = other.store().begin(secs(5)).await.unwrap();
    assert_eq!(other.claim_inline(&tx, work("k", Policy::default())).await.unwrap().word(), "acquired");
    let run = tokio::spawn({
        let ledger = ledger.clone();
        async move {
            let (work, handler) = (work("k", Policy::default()), |_| std::future::pending());
            match waits {
                true => ledger.run_or_wait(work, secs(1), handler).await,
                false => ledger.run(work, handler).await,
            }
        }
    });
    tokio::time::sleep(Duration::from_millis(200)).await;
    assert!(!run.is_finished());
    let mut stopping = Box::pin(ledger.stop(Duration::from_millis(10)));
    tokio::select! {
        biased;
        () = &mut stopping => panic!("it did not wait"),
        () = std::future::ready(()) => {}
    }
    other.store().roll_back(&tx).await;
    soon(stopping).await;
    assert_eq!(find(&other, "k").await, None, "after the stop, nothing runs");
    assert_eq!(ran(soon(run).await.unwrap()), Ran::Released);
}

/// Newer data that arrives during a run runs after it, in the background, and the caller of the first run does not wait
/// for that.
pub async fn newer_data_is_run_in_the_background(lab: Lab) {
    let (ledger, other) = (lab.ledger().await, lab.ledger().await);
    let policy = Policy { on_mismatch: OnMismatch::SupersedeIfNewer, backoff: Backoff::NONE, ..Policy::default() };
    let data = |n: i64| work_with("k", &format!("v{n}"), policy.clone()).order(n).payload(format!("v{n}"));
    let (begun, mut started) = mpsc::channel::<String>(4);
    let go = Arc::new(Notify::new());
    let first = tokio::spawn({
        let (ledger, work, go) = (ledger.clone(), data(1), go.clone());
        async move {
            let handler = move |ctx: semel::Context<semel_store::Database>| {
                let (begun, go) = (begun.clone(), go.clone());
                let payload = String::from_utf8(ctx.operation().payload.clone().unwrap().to_vec()).unwrap();
                async move {
                    begun.send(payload.clone()).await.unwrap();
                    go.notified().await;
                    Ok(done(&payload))
                }
            };
            ran(ledger.run(work, handler).await)
        }
    });
    assert_eq!(soon(started.recv()).await.as_deref(), Some("v1"));
    for n in [2, 3] {
        let Claim::InFlight(there) = other.claim(data(n)).await.unwrap() else { panic!() };
        assert!(there.kept);
    }
    go.notify_one();
    assert_eq!(
        soon(first).await.unwrap(),
        Ran::Completed(done("v1")),
        "its own outcome, before the newer data has run"
    );
    assert_eq!(soon(started.recv()).await.as_deref(), Some("v3"), "2 was overtaken while it waited");
    go.notify_one();
    let Claim::Replay(replay) = soon(other.claim_or_wait(data(3), secs(10))).await.unwrap() else { panic!() };
    assert_eq!(replay.outcome, done("v3"));
    assert_eq!(ask(&other, data(1)).await, "mismatch");
}
