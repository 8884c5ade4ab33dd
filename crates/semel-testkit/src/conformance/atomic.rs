//! Atomic mode: the effect and its completion commit together, or not at all.

use std::{
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use semel::{
    Backoff, Claim, Context, Error, Handed, Lease, OnLost, OnMismatch, Outcome, Policy, Ran, State, Unfinished,
    machine::{Answer, Write},
    prelude::*,
    store::{Commit, Ended, LeaseWrite},
};
use semel_store::{Database, Tx, on};
use tokio::sync::{Notify, mpsc};

use super::tools::*;
use crate::{Kind, Lab, work, work_with};

type Ctx = Context<Database>;

/// A completion under a lease.
fn completion(lease: &Lease<Database>, outcome: &str) -> LeaseWrite {
    LeaseWrite { id: lease.operation().id, fence: lease.fence(), write: Write::Complete(done(outcome)) }
}

/// The end of a run that must have been this caller's.
fn ran(claim: semel::Result<Claim<Ran>>) -> Ran {
    match claim.unwrap() {
        Claim::Acquired(ran) => ran,
        other => panic!("should have run, and is {}", other.word()),
    }
}

/// The effect is visible when the run reports completed, and is not made again.
pub async fn an_effect_commits_with_its_completion(lab: Lab) {
    make_effects(&lab).await;
    let ledger = lab.ledger().await;
    let handler = |ctx: Ctx, tx: Tx| async move {
        effect(&tx, ctx.operation().key.as_str()).await?;
        Ok(done("made"))
    };
    assert_eq!(ran(soon(ledger.run_atomic(work("k", Policy::default()), handler)).await), Ran::Completed(done("made")));
    assert_eq!(effects(&lab).await, ["k"]);
    let op = row(&ledger, "k").await;
    assert_eq!((op.state, op.outcome, op.lease), (State::Completed, Some(done("made")), None));
    let Claim::Replay(replay) = soon(ledger.run_atomic(work("k", Policy::default()), handler)).await.unwrap() else {
        panic!()
    };
    assert_eq!(replay.outcome, done("made"));
    assert_eq!(effects(&lab).await, ["k"]);
    assert_eq!(counted(&ledger, State::Completed).await, 1);
}

/// If a handler fails, its effect has not happened; so nothing is in doubt under any policy.
pub async fn an_effect_that_fails_is_rolled_back(lab: Lab) {
    make_effects(&lab).await;
    let ledger = lab.ledger().await;
    for on_lost in [OnLost::Rerun, OnLost::Hold] {
        for how in ["fails", "panics", "unknown", "not yet"] {
            let text = format!("{how} {on_lost:?}");
            let handler = move |ctx: Ctx, tx: Tx| async move {
                effect(&tx, ctx.operation().key.as_str()).await?;
                Err(match how {
                    "fails" => Unfinished::failed("no"),
                    "unknown" => Unfinished::Doubted("cut off".into()),
                    "not yet" => Unfinished::released(secs(5)),
                    _ => panic!("oh no"),
                })
            };
            let said =
                ran(soon(ledger.run_atomic(work(&text, Policy { on_lost, ..Policy::default() }), handler)).await);
            let op = row(&ledger, &text).await;
            match how {
                "not yet" => assert_eq!((said, op.state, op.failures), (Ran::Released, State::Pending, 0)),
                _ => {
                    assert!(matches!(said, Ran::Failed(_)), "{text}: {said:?}");
                    assert_eq!((op.state, op.failures), (State::Failed, 1), "{text}");
                }
            }
        }
    }
    assert_eq!(effects(&lab).await, [""; 0]);
}

/// A handler may decline for good: its outcome is stored and replayed, its writes are rolled back.
pub async fn a_declined_run_stores_its_outcome_without_its_effect(lab: Lab) {
    make_effects(&lab).await;
    let ledger = lab.ledger().await;
    let handler = |ctx: Ctx, tx: Tx| async move {
        effect(&tx, ctx.operation().key.as_str()).await?;
        Err(Unfinished::Declined(done("no, thank you")))
    };
    let declined = || Ran::Completed(done("no, thank you"));
    assert_eq!(ran(soon(ledger.run_atomic(work("k", Policy::default()), handler)).await), declined());
    assert_eq!(effects(&lab).await, [""; 0]);
    let again = soon(ledger.run_atomic(work("k", Policy::default()), handler)).await.unwrap();
    assert!(matches!(again, Claim::Replay(replay) if replay.outcome == done("no, thank you")));
    let plain = |_: Ctx| async { Err(Unfinished::Declined(done("no, thank you"))) };
    assert_eq!(ran(soon(ledger.run(work("plain", Policy::default()), plain)).await), declined());
}

/// Work without a key has its transaction, too.
pub async fn a_transaction_without_a_key_commits_or_does_not(lab: Lab) {
    make_effects(&lab).await;
    let ledger = lab.ledger().await;
    for name in ["kept", "undone"] {
        let got = ledger.transact(move |tx: Tx| async move {
            effect(&tx, name).await.unwrap();
            if name == "kept" { Ok(name) } else { Err(Error::Invalid(name.into())) }
        });
        match soon(got).await {
            Ok(got) => assert_eq!((got, name), ("kept", "kept")),
            Err(error) => assert!(matches!(error, Error::Invalid(why) if why == name && name == "undone")),
        }
    }
    assert_eq!(effects(&lab).await, ["kept"]);
    let inside = ledger.clone();
    let got = ledger.transact(move |_| async move { inside.claim(work("k", Policy::default())).await.map(drop) });
    assert!(matches!(soon(got).await, Err(Error::InsideTransaction)));
    ledger.stop(secs(1)).await;
    let late = ledger.transact(|_| async { Ok::<_, Error>(()) });
    assert!(matches!(soon(late).await, Err(Error::Stopping)));
}

/// While a transaction is open, claims of known keys are answered at once: also on SQLite, where it holds the only
/// writer.
pub async fn known_keys_are_answered_while_an_effect_is_made(lab: Lab) {
    make_effects(&lab).await;
    let ledger = lab.ledger().await;
    let done_before = acquire(&ledger, work("done", Policy::default())).await;
    assert!(matches!(done_before.complete(done("then")).await.unwrap(), semel::Settled::Yes { .. }));
    let (begun, mut is_begun) = mpsc::channel(1);
    let go_on = Arc::new(Notify::new());
    let (runs, gate) = (ledger.clone(), go_on.clone());
    let run = tokio::spawn(async move {
        let handler = move |_: Ctx, tx: Tx| {
            let (begun, gate) = (begun.clone(), gate.clone());
            async move {
                effect(&tx, "k").await?;
                begun.send(()).await.unwrap();
                gate.notified().await;
                Ok(done("now"))
            }
        };
        ran(runs.run_atomic(work("k", Policy::default()), handler).await)
    });
    is_begun.recv().await.unwrap();
    let at_once = Duration::from_millis(1500);
    let asked = |work| tokio::time::timeout(at_once, ledger.claim(work));
    assert!(matches!(asked(work("k", Policy::default())).await.unwrap().unwrap(), Claim::InFlight(_)));
    assert!(matches!(asked(work_with("k", "other", Policy::default())).await.unwrap().unwrap(), Claim::Mismatch(_)));
    let Claim::Replay(replay) = asked(work("done", Policy::default())).await.unwrap().unwrap() else { panic!() };
    assert_eq!(replay.outcome, done("then"));
    go_on.notify_one();
    assert_eq!(soon(run).await.unwrap(), Ran::Completed(done("now")));
    assert_eq!(ask(&ledger, work("new", Policy::default())).await, "acquired");
}

/// A caller that holds a lease can run the rest in atomic mode.
pub async fn a_lease_that_is_held_can_be_run(lab: Lab) {
    make_effects(&lab).await;
    let ledger = lab.ledger().await;
    let lease = acquire(&ledger, work("leased", Policy::default())).await;
    assert_eq!(soon(lease.run(|_| async { Ok(done("a")) })).await.unwrap(), Ran::Completed(done("a")));
    let lease = acquire(&ledger, work("atomic", Policy::default())).await;
    let handler = |_, tx: Tx| async move {
        effect(&tx, "atomic").await?;
        Ok(done("b"))
    };
    assert_eq!(soon(lease.run_atomic(handler)).await.unwrap(), Ran::Completed(done("b")));
    assert_eq!(effects(&lab).await, ["atomic"]);
    assert_eq!(row(&ledger, "leased").await.outcome, Some(done("a")));
}

/// A transaction that is open for too long is rolled back, and other work goes on.
pub async fn an_effect_that_takes_too_long_is_rolled_back(lab: Lab) {
    make_effects(&lab).await;
    let (a, b) = (lab.ledger().await, lab.ledger().await);
    // The limit is the lease, and at most the store's own.
    let policy = Policy { lease: Duration::from_millis(500), ..Policy::default() };
    let handler = |_, tx: Tx| async move {
        effect(&tx, "slow").await?;
        std::future::pending::<()>().await;
        Ok(done(""))
    };
    let said = ran(soon(a.run_atomic(work("k", policy), handler)).await);
    match &said {
        Ran::Failed(failure) => assert!(failure.error.contains("open for more than"), "{said:?}"),
        // On SQLite the transaction holds the writer, so that its own lease cannot be renewed.
        other => assert_eq!(*other, Ran::LeaseLost),
    }
    assert_eq!(effects(&lab).await, [""; 0]);
    assert_ne!(row(&b, "k").await.state, State::Completed);
    assert_eq!(ask(&b, work("next", Policy::default())).await, "acquired");
}

async fn panics(_: Ctx, _: Tx) -> (Result<Outcome, Unfinished>, ()) {
    panic!("oh no")
}

/// A handler's value is handed over with a commit, with a stored refusal, and with a failure; not if its handler was
/// cut off.
pub async fn a_value_is_handed_over_with_its_commit(lab: Lab) {
    make_effects(&lab).await;
    let ledger = lab.ledger().await;
    let run = async |name: &str, said: Result<Outcome, Unfinished>| {
        let lease = acquire(&ledger, work(name, Policy::default())).await;
        let run = lease.run_atomic_handing(move |_, tx| {
            let said = said.clone();
            async move {
                effect(&tx, "made").await.unwrap();
                (said, "beside")
            }
        });
        soon(run).await.unwrap()
    };
    assert_eq!(run("made", Ok(done(""))).await, (Ran::Completed(done("")), Handed::Stored("beside")));
    let declined = run("declined", Err(Unfinished::Declined(done("no")))).await;
    assert_eq!(declined, (Ran::Completed(done("no")), Handed::Stored("beside")));
    let (said, handed) = run("fails", Err(Unfinished::failed("no"))).await;
    assert!(matches!(said, Ran::Failed(_)) && handed == Handed::Stored("beside"), "{said:?} {handed:?}");
    // A rolled-back run is never in doubt, whatever the handler returns.
    let (said, handed) = run("doubts", Err(Unfinished::Doubted("?".into()))).await;
    assert!(matches!(said, Ran::Failed(_)) && handed == Handed::NotStored, "{said:?} {handed:?}");
    let panics = acquire(&ledger, work("panics", Policy::default())).await.run_atomic_handing(panics);
    let (said, handed) = soon(panics).await.unwrap();
    assert!(matches!(said, Ran::Failed(_)) && handed == Handed::Nothing, "{said:?} {handed:?}");
    assert_eq!(effects(&lab).await, ["made"]);
}

/// The effect of a run whose lease was lost before the commit does not happen: the last statement of its transaction
/// names the fence.
pub async fn an_effect_under_a_lost_lease_never_happens(lab: Lab) {
    make_effects(&lab).await;
    let (a, b) = (lab.ledger().await, lab.ledger().await);
    let zombie = acquire(&a, work("k", Policy::default())).await;
    lab.pass(Policy::default().lease);
    let owner = acquire(&b, work("k", Policy::default())).await;
    let tx = a.store().begin(secs(5)).await.unwrap();
    effect(&tx, "of the zombie").await.unwrap();
    let applied = a.store().write_in(&tx, completion(&zombie, "zombie")).await.unwrap();
    assert_eq!(applied.answer, Answer::Lost);
    a.store().roll_back(&tx).await;
    assert_eq!(effects(&lab).await, [""; 0]);
    for outcome in sizes() {
        let tx = a.store().begin(secs(5)).await.unwrap();
        effect(&tx, "of the zombie").await.unwrap();
        let ended = a.store().complete_and_commit(&tx, zombie.operation(), outcome).await;
        assert!(matches!(ended, Ended::Lost), "{ended:?}");
        assert_eq!(effects(&lab).await, [""; 0]);
    }

    let tx = b.store().begin(secs(5)).await.unwrap();
    effect(&tx, "of the owner").await.unwrap();
    let applied = b.store().write_in(&tx, completion(&owner, "owner")).await.unwrap();
    assert_eq!(applied.answer, Answer::Settled { successor: false });
    assert_eq!(effects(&lab).await, [""; 0], "it is not visible before the commit");
    assert!(matches!(b.store().commit(&tx).await, Commit::Done));
    assert_eq!(effects(&lab).await, ["of the owner"]);
    assert_eq!(row(&a, "k").await.outcome, Some(done("owner")));
}

/// Small outcomes are sent with the commit, large ones before it.
fn sizes() -> [Outcome; 2] {
    [done("small"), Outcome::kept("x".repeat(100_000))]
}

/// Newer data that arrives meanwhile does not undo the effect of the older, and runs after it; also if the claim of the
/// older did not allow newer data.
pub async fn an_effect_is_kept_when_newer_data_waits(lab: Lab) {
    make_effects(&lab).await;
    let (a, b) = (lab.ledger().await, lab.ledger().await);
    let newer = Policy { on_mismatch: OnMismatch::SupersedeIfNewer, ..Policy::default() };
    for (n, outcome) in sizes().into_iter().enumerate() {
        for (policy, name) in [(Policy::default(), "unexpected"), (newer.clone(), "expected")] {
            let name = format!("{name} {n}");
            let lease = acquire(&a, work_with(&name, "v1", policy).order(1).payload("v1")).await;
            let second = work_with(&name, "v2", newer.clone()).order(2).payload("v2");
            let Claim::InFlight(there) = b.claim(second).await.unwrap() else { panic!("{name}") };
            assert!(there.kept);
            let tx = a.store().begin(secs(5)).await.unwrap();
            effect(&tx, &name).await.unwrap();
            let ended = a.store().complete_and_commit(&tx, lease.operation(), outcome.clone()).await;
            let Ended::Committed(applied) = ended else { panic!("{name}: {ended:?}") };
            assert_eq!(applied.answer, Answer::Settled { successor: true }, "{name}");
            assert!(effects(&lab).await.contains(&name));
            let op = row(&b, &name).await;
            assert_eq!((op.state, op.payload.as_deref()), (State::Pending, Some(&b"v2"[..])), "{name}");
        }
    }
}

/// A takeover in the middle of a transaction: one of the two has the effect, and the other gets the correct answer.
/// (SQLite has one writer, so there the takeover waits, and finds it completed.)
pub async fn a_takeover_during_an_effect_leaves_one_effect(lab: Lab) {
    make_effects(&lab).await;
    let (a, b) = (lab.ledger().await, lab.ledger().await);
    let (begun, go) = (Arc::new(Notify::new()), Arc::new(Notify::new()));
    let slow = {
        let (begun, go) = (begun.clone(), go.clone());
        let handler = move |_, tx: Tx| {
            let (begun, go) = (begun.clone(), go.clone());
            async move {
                effect(&tx, "slow").await?;
                begun.notify_one();
                go.notified().await;
                Ok(done("slow"))
            }
        };
        tokio::spawn(async move { ran(a.run_atomic(work("k", Policy::default()), handler).await) })
    };
    soon(begun.notified()).await;
    lab.pass(Policy::default().lease);
    let quick = tokio::spawn({
        let b = b.clone();
        async move {
            let handler = |_, tx: Tx| async move {
                effect(&tx, "quick").await?;
                Ok(done("quick"))
            };
            b.run_atomic(work("k", Policy::default()), handler).await.unwrap()
        }
    });
    let (slow, quick) = if lab.kind() == Kind::Postgres {
        let quick = soon(quick).await.unwrap();
        go.notify_one();
        (soon(slow).await.unwrap(), quick)
    } else {
        go.notify_one();
        (soon(slow).await.unwrap(), soon(quick).await.unwrap())
    };
    match (slow, quick) {
        (Ran::LeaseLost, Claim::Acquired(Ran::Completed(_))) => assert_eq!(effects(&lab).await, ["quick"]),
        (Ran::Completed(_), Claim::Replay(replay)) => {
            assert_eq!(replay.outcome, done("slow"));
            assert_eq!(effects(&lab).await, ["slow"]);
        }
        (slow, quick) => panic!("{slow:?}, {}", quick.word()),
    }
}

/// If the winner rolls back, one of the waiting claims becomes the winner, and the rest get its outcome.
pub async fn when_the_winner_rolls_back_one_waiter_wins(lab: Lab) {
    make_effects(&lab).await;
    let nodes = [lab.ledger().await, lab.ledger().await];
    let policy = Policy { backoff: Backoff::NONE, ..Policy::default() };
    let (begun, mut started) = mpsc::channel(8);
    let (go, first) = (Arc::new(Notify::new()), Arc::new(AtomicBool::new(true)));
    let mut crowd = tokio::task::JoinSet::new();
    for n in 0..8 {
        let (node, begun, go, first, policy) =
            (nodes[n % 2].clone(), begun.clone(), go.clone(), first.clone(), policy.clone());
        let handler = move |_, tx: Tx| {
            let (begun, go, first) = (begun.clone(), go.clone(), first.clone());
            async move {
                effect(&tx, &format!("by {n}")).await?;
                if first.swap(false, Ordering::SeqCst) {
                    begun.send(()).await.unwrap();
                    go.notified().await;
                    return Err(Unfinished::failed("the winner rolls back"));
                }
                Ok(done(&format!("by {n}")))
            }
        };
        crowd.spawn(async move { node.run_atomic_or_wait(work("k", policy), secs(15), handler).await.unwrap() });
    }
    soon(started.recv()).await.unwrap();
    go.notify_one();
    let (mut outcomes, mut failed, mut completed) = (Vec::new(), 0, 0);
    for claim in soon(crowd.join_all()).await {
        match claim {
            Claim::Acquired(Ran::Failed(_)) => failed += 1,
            Claim::Acquired(Ran::Completed(outcome)) => {
                completed += 1;
                outcomes.push(outcome);
            }
            Claim::Replay(replay) => outcomes.push(replay.outcome),
            other => panic!("{other:?}"),
        }
    }
    assert_eq!((failed, completed, outcomes.len()), (1, 1, 7));
    let made = effects(&lab).await;
    assert_eq!(made.len(), 1);
    assert!(outcomes.iter().all(|outcome| *outcome == done(&made[0])));
}

/// While an effect is being made, another claim of its key is in flight, or waits (on SQLite, for the one writer); no
/// claim gets the outcome before the commit.
pub async fn a_loser_is_in_flight_or_waits_while_an_effect_is_made(lab: Lab) {
    make_effects(&lab).await;
    let (a, b) = (lab.ledger().await, lab.ledger().await);
    let (begun, go) = (Arc::new(Notify::new()), Arc::new(Notify::new()));
    let winner = {
        let (begun, go) = (begun.clone(), go.clone());
        let handler = move |_, tx: Tx| {
            let (begun, go) = (begun.clone(), go.clone());
            async move {
                effect(&tx, "k").await?;
                begun.notify_one();
                go.notified().await;
                Ok(done("made"))
            }
        };
        tokio::spawn(async move { ran(a.run_atomic(work("k", Policy::default()), handler).await) })
    };
    soon(begun.notified()).await;
    let ask = |work| {
        let b = b.clone();
        tokio::spawn(async move { b.claim(work).await.unwrap().word() })
    };
    let (same, other) = (ask(work("k", Policy::default())), ask(work_with("k", "other", Policy::default())));
    let expected = match lab.kind() {
        Kind::Postgres => {
            let got = (soon(same).await.unwrap(), soon(other).await.unwrap());
            go.notify_one();
            assert_eq!(got, ("in_flight", "mismatch"));
            soon(winner).await.unwrap()
        }
        Kind::Sqlite => {
            go.notify_one();
            let winner = soon(winner).await.unwrap();
            let got = (soon(same).await.unwrap(), soon(other).await.unwrap());
            assert!(matches!(got, ("in_flight" | "replay", "mismatch")), "{got:?}");
            winner
        }
    };
    assert_eq!(expected, Ran::Completed(done("made")));
    assert_eq!(effects(&lab).await, ["k"]);
}

/// A statement fails and the handler ignores it: the reported result is what happened.
pub async fn a_swallowed_error_is_not_reported_as_success(lab: Lab) {
    make_effects(&lab).await;
    let ledger = lab.ledger().await;
    let handler = |_, tx: Tx| async move {
        effect(&tx, "k").await?;
        let mut held = tx.connection().await.unwrap();
        let failed =
            on!(held.get().unwrap(), c => sqlx::query("INSERT INTO nowhere VALUES (1)").execute(c).await.is_err());
        assert!(failed);
        Ok(done("made"))
    };
    let said = ran(soon(ledger.run_atomic(work("k", Policy::default()), handler)).await);
    let op = row(&ledger, "k").await;
    match said {
        // SQLite undoes the failed statement only.
        Ran::Completed(_) => assert_eq!((op.state, effects(&lab).await), (State::Completed, vec!["k".to_owned()])),
        // PostgreSQL undoes the transaction.
        Ran::Failed(_) => assert_eq!((op.state, effects(&lab).await), (State::Failed, Vec::new())),
        other => panic!("{other:?}"),
    }
}

/// Inside its transaction a handler cannot call the ledger: on SQLite it would wait for itself. After the run its
/// transaction is over.
pub async fn a_handler_can_use_its_transaction_only(lab: Lab) {
    make_effects(&lab).await;
    let ledger = lab.ledger().await;
    let (inner, leaked) = (ledger.clone(), Arc::new(Mutex::new(None::<Tx>)));
    let keep = leaked.clone();
    let handler = move |ctx: Ctx, tx: Tx| {
        *keep.lock().unwrap() = Some(tx.clone());
        let ledger = inner.clone();
        async move {
            let other = || work("other", Policy::default());
            let refused = |what: &str, error: Option<Error>| {
                assert!(matches!(error, Some(Error::InsideTransaction)), "{what}: {error:?}")
            };
            refused("claim", ledger.claim(other()).await.err());
            refused("claim_or_wait", ledger.claim_or_wait(other(), secs(1)).await.err());
            refused("checkpoint", ctx.checkpoint("half-way").await.err());
            refused("sweep", ledger.sweep().await.err());
            refused("decide", ledger.decide(1, semel::store::Decision::Purge, "", "").await.err());
            effect(&tx, "k").await?;
            Ok(done(""))
        }
    };
    assert_eq!(ran(soon(ledger.run_atomic(work("k", Policy::default()), handler)).await), Ran::Completed(done("")));
    assert_eq!(find(&ledger, "other").await, None);
    let leaked = leaked.lock().unwrap().take().unwrap();
    assert!(leaked.connection().await.is_err(), "the transaction has outlived its run");
    assert_eq!(effects(&lab).await, ["k"]);
}

/// A stop in the middle of an effect rolls it back, and counts no attempt.
pub async fn a_stop_rolls_an_effect_back_without_counting_an_attempt(lab: Lab) {
    make_effects(&lab).await;
    let other = lab.ledger().await;
    for on_lost in [OnLost::Rerun, OnLost::Hold] {
        let ledger = lab.ledger().await;
        let text = format!("{on_lost:?}");
        let begun = Arc::new(Notify::new());
        let run = {
            let (ledger, begun) = (ledger.clone(), begun.clone());
            let work = work(&text, Policy { on_lost, ..Policy::default() }).payload("kept");
            let handler = move |_, tx: Tx| {
                let begun = begun.clone();
                async move {
                    effect(&tx, "k").await?;
                    begun.notify_one();
                    std::future::pending::<()>().await;
                    Ok(done(""))
                }
            };
            tokio::spawn(async move { ran(ledger.run_atomic(work, handler).await) })
        };
        soon(begun.notified()).await;
        soon(ledger.stop(Duration::ZERO)).await;
        assert_eq!(soon(run).await.unwrap(), Ran::Released, "{on_lost:?}");
        let op = row(&other, &text).await;
        assert_eq!((op.state, op.failures, op.crashes), (State::Pending, 0, 0), "{on_lost:?}");
    }
    assert_eq!(effects(&lab).await, [""; 0]);
}
