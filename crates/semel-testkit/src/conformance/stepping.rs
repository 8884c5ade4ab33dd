//! Long runs in steps: the rows of a step and the checkpoint commit together, or not at all.

use std::{
    sync::{
        Arc, Mutex,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use semel::{
    Backoff, Claim, Context, Fingerprint, Kind, OnLost, Outcome, Policy, Ran, Scope, State, Unfinished, Work, Worker,
    machine::{Answer, Failure, Write},
    prelude::*,
    store::LeaseWrite,
};
use semel_store::{Database, Tx};
use tokio::sync::watch;

use super::tools::*;
use crate::{Lab, key, work};

type Ctx = Context<Database>;

fn policy() -> Policy {
    Policy { backoff: Backoff::NONE, max_attempts: Some(3), ..Policy::default() }
}

/// One step that writes a row and a checkpoint of the same name.
async fn take(context: &Ctx, name: &str) -> Result<(), Unfinished> {
    let name = name.to_owned();
    context
        .step(|tx: Tx| async move {
            effect(&tx, &name).await?;
            Ok((name, ()))
        })
        .await
}

fn ran(claim: semel::Result<Claim<Ran>>) -> Ran {
    match claim.unwrap() {
        Claim::Acquired(ran) => ran,
        other => panic!("should have run, and is {}", other.word()),
    }
}

/// The checkpoint under a key.
async fn checkpoint(node: &Node, name: &str) -> Option<String> {
    row(node, name).await.checkpoint.map(|data| String::from_utf8(data.to_vec()).unwrap())
}

/// After each step its rows and its checkpoint are stored, and the next attempt begins with the last one.
pub async fn a_step_commits_its_rows_with_its_checkpoint(lab: Lab) {
    make_effects(&lab).await;
    let ledger = lab.ledger().await;
    let handler = |context: Ctx| async move {
        match context.operation().checkpoint.as_deref() {
            None => {
                take(&context, "a").await?;
                let two = context.step(|tx: Tx| async move {
                    effect(&tx, "b").await?;
                    Ok(("b", 2))
                });
                assert_eq!(two.await?, 2, "the caller gets what its work returned");
                Err(Unfinished::failed("half-way"))
            }
            Some(b"b") => {
                take(&context, "c").await?;
                Ok(done("all"))
            }
            other => Err(Unfinished::failed_for_good(format!("{other:?}"))),
        }
    };
    let run = || ledger.run(work("k", policy()), handler);
    assert!(matches!(ran(soon(run()).await), Ran::Failed(_)));
    assert_eq!((effects(&lab).await, checkpoint(&ledger, "k").await), (vec!["a".into(), "b".into()], Some("b".into())));
    assert_eq!(ran(soon(run()).await), Ran::Completed(done("all")));
    assert_eq!(effects(&lab).await, ["a", "b", "c"]);
}

/// A step that fails, is refused by the database, has too large a checkpoint or panics leaves neither rows nor
/// checkpoint, and the previous checkpoint stays.
pub async fn a_step_that_does_not_end_well_is_rolled_back(lab: Lab) {
    make_effects(&lab).await;
    lab.execute("CREATE UNIQUE INDEX one_of_each ON effects (name)").await.unwrap();
    let ledger = lab.ledger().await;
    let handler = |context: Ctx| async move {
        let how = context.operation().key.as_str().to_owned();
        take(&context, &format!("{how} 1")).await?;
        let second = context.step(|tx: Tx| async move {
            effect(&tx, &format!("{how} 2")).await?;
            match how.as_str() {
                "fails" => Err(Unfinished::failed("no luck")),
                "panics" => panic!("on purpose"),
                "too large" => Ok((vec![b'x'; 1 << 20], ())),
                _ => {
                    // The value of the statement is not returned.
                    let _ = effect(&tx, &format!("{how} 1")).await;
                    Ok((b"2".to_vec(), ()))
                }
            }
        });
        second.await?;
        Ok(done("all"))
    };
    let mut rows = Vec::new();
    for how in ["fails", "panics", "too large"] {
        let ended = ran(soon(ledger.run(work(how, policy()), handler)).await);
        assert!(matches!(ended, Ran::Failed(_)), "{how}: {ended:?}");
        rows.push(format!("{how} 1"));
        assert_eq!(
            (effects(&lab).await, checkpoint(&ledger, how).await),
            (rows.clone(), rows.last().cloned()),
            "{how}"
        );
    }
    // SQLite goes on after a statement that failed; PostgreSQL ends the transaction.
    let ended = ran(soon(ledger.run(work("z refused", policy()), handler)).await);
    match lab.kind() {
        crate::Kind::Postgres => {
            assert!(matches!(ended, Ran::Failed(Failure { .. })), "{ended:?}");
            assert_eq!(checkpoint(&ledger, "z refused").await.as_deref(), Some("z refused 1"));
        }
        crate::Kind::Sqlite => assert_eq!(ended, Ran::Completed(done("all"))),
    }
}

/// A step under a lost lease has no effect: its last statement names the fence.
pub async fn a_step_under_a_lost_lease_never_happens(lab: Lab) {
    make_effects(&lab).await;
    let (a, b) = (lab.ledger().await, lab.ledger().await);
    let zombie = acquire(&a, work("k", policy())).await;
    lab.pass(policy().lease);
    let owner = acquire(&b, work("k", policy())).await;
    let tx = a.store().begin(secs(5)).await.unwrap();
    effect(&tx, "of the zombie").await.unwrap();
    let progress = |id, fence, data: &'static str| LeaseWrite { id, fence, write: Write::Progress(data.into()) };
    let late = progress(zombie.operation().id, zombie.fence(), "of the zombie");
    assert_eq!(a.store().write_in(&tx, late).await.unwrap().answer, Answer::Lost);
    a.store().roll_back(&tx).await;
    let tx = b.store().begin(secs(5)).await.unwrap();
    effect(&tx, "of the owner").await.unwrap();
    let in_time = progress(owner.operation().id, owner.fence(), "of the owner");
    assert_eq!(b.store().write_in(&tx, in_time).await.unwrap().answer, Answer::Written);
    assert_eq!(checkpoint(&a, "k").await, None, "it is not visible before the commit");
    b.store().commit(&tx).await;
    assert_eq!(
        (effects(&lab).await, checkpoint(&a, "k").await),
        (vec!["of the owner".into()], Some("of the owner".into()))
    );
}

/// The same for a handler that was not signalled: another run takes over while its step is open.
pub async fn a_takeover_during_a_step_rolls_it_back(lab: Lab) {
    make_effects(&lab).await;
    let (a, b) = (lab.ledger().await, lab.ledger().await);
    let (began, mut begins) = tokio::sync::mpsc::unbounded_channel();
    let (go, goes) = watch::channel(false);
    let handler = move |context: Ctx| {
        let (began, mut goes) = (began.clone(), goes.clone());
        async move {
            // Before its transaction: on SQLite that would block the new owner.
            let _ = began.send(());
            let _ = goes.wait_for(|go| *go).await;
            let stepped = context.step(|tx: Tx| async move {
                effect(&tx, "of the zombie").await?;
                Ok(("zombie", ()))
            });
            assert!(stepped.await.is_err(), "the step of a lost lease must not be taken for done");
            Ok(done("zombie"))
        }
    };
    let run = tokio::spawn({
        let a = a.clone();
        async move { ran(a.run(work("k", policy()), handler).await) }
    });
    soon(begins.recv()).await.unwrap();
    // The lab's clock stands still, so its own clock does not signal it.
    lab.pass(policy().lease);
    let owner = acquire(&b, work("k", policy())).await;
    go.send_replace(true);
    assert_eq!(soon(run).await.unwrap(), Ran::LeaseLost);
    assert_eq!(effects(&lab).await, [""; 0]);
    assert_eq!(owner.complete(done("owner")).await.unwrap(), SETTLED);
}

/// A run that is lost again and again, and makes a step each time, is not parked.
pub async fn a_step_forgives_crashes(lab: Lab) {
    make_effects(&lab).await;
    let ledger = lab.ledger().await;
    let policy = Policy { max_crashes: 2, ..policy() };
    for n in 0..5 {
        let (stepped, mut steps) = tokio::sync::mpsc::unbounded_channel();
        let handler = move |context: Ctx| {
            let stepped = stepped.clone();
            async move {
                take(&context, &n.to_string()).await?;
                let _ = stepped.send(());
                std::future::pending::<Result<Outcome, Unfinished>>().await
            }
        };
        let (node, work) = (ledger.clone(), work("k", policy.clone()));
        let run = tokio::spawn(async move { node.run(work, handler).await.map(drop) });
        soon(steps.recv()).await.unwrap();
        run.abort();
        lab.pass(policy.lease);
        ledger.sweep().await.unwrap();
    }
    let there = row(&ledger, "k").await;
    assert_eq!((there.state, there.crashes, there.parked), (State::TimedOut, 1, false));
    assert_eq!(effects(&lab).await, ["0", "1", "2", "3", "4"]);
}

/// The ledger refuses calls from the work of a step: on SQLite they would wait for their own transaction.
pub async fn a_step_can_use_its_transaction_only(lab: Lab) {
    make_effects(&lab).await;
    let ledger = lab.ledger().await;
    let handler = |context: Ctx| async move {
        let inner = context.clone();
        let stepped = context.step(|_: Tx| async move {
            let asked = inner.progress("x").await;
            Ok(("y", matches!(asked, Err(semel::Error::InsideTransaction))))
        });
        assert!(stepped.await?, "it was not refused");
        Ok(done(""))
    };
    assert_eq!(ran(soon(ledger.run(work("k", policy()), handler)).await), Ran::Completed(done("")));
}

fn queue() -> Scope {
    Scope::new("acme", "works", "long").unwrap()
}

fn job(name: &str) -> Work {
    Work::new(queue(), key(name), Fingerprint::of_bytes(name.as_bytes())).payload(name.to_owned())
}

/// A run whose turn is over is released behind the other due operations, without counting an attempt, and continues
/// from its checkpoint.
pub async fn a_run_whose_turn_is_over_lets_others_go_first(lab: Lab) {
    let lab = lab.with_real_clock();
    make_effects(&lab).await;
    let ledger = lab.ledger().await;
    let order = Arc::<Mutex<Vec<String>>>::default();
    let seen = order.clone();
    let kind = Kind::leased("works", "long", move |context: Ctx| {
        let seen = seen.clone();
        async move {
            let name = context.operation().key.as_str().to_owned();
            let before = context.operation().checkpoint.as_ref().map_or(0, |data| data.len());
            for n in before + 1..=2 {
                if context.turn_is_over() {
                    return Err(Unfinished::TurnOver);
                }
                seen.lock().unwrap().push(name.clone());
                take(&context, &"x".repeat(n)).await?;
                // As long as a turn is.
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
            Ok(Outcome::kept(""))
        }
    });
    for name in ["a", "b"] {
        ledger.enqueue(job(name)).await.unwrap();
    }
    let kind = kind.policy(policy()).at_once(1).turn(Duration::from_millis(40));
    let (stop, stops) = watch::channel(false);
    let hired = tokio::spawn(Worker::new(&ledger).on(kind).run(stops));
    let is_over = async |name: &str| {
        ledger.store().by_key(&queue(), &key(name)).await.unwrap().is_some_and(|op| op.state == State::Completed)
    };
    eventually(|| async { is_over("a").await && is_over("b").await }).await;
    stop.send_replace(true);
    soon(hired).await.unwrap();
    assert_eq!(*order.lock().unwrap(), ["a", "b", "a", "b"]);
    for name in ["a", "b"] {
        let there = ledger.store().by_key(&queue(), &key(name)).await.unwrap().unwrap();
        assert_eq!((there.failures, there.crashes), (0, 0), "{name}");
    }
}

/// A worker that stops ends a run after its present step, without waiting for the end of the grace.
pub async fn a_stop_ends_a_run_after_its_step(lab: Lab) {
    let lab = lab.with_real_clock();
    make_effects(&lab).await;
    let ledger = lab.ledger().await;
    let steps = Arc::<AtomicUsize>::default();
    let taken = steps.clone();
    let kind = Kind::leased("works", "long", move |context: Ctx| {
        let taken = taken.clone();
        async move {
            while !context.turn_is_over() {
                let n = taken.fetch_add(1, Ordering::SeqCst) + 1;
                take(&context, &n.to_string()).await?;
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
            Err::<Outcome, _>(Unfinished::TurnOver)
        }
    });
    ledger.enqueue(job("k")).await.unwrap();
    let kind = kind.policy(Policy { on_lost: OnLost::Hold, ..policy() });
    let (stop, stops) = watch::channel(false);
    let hired = tokio::spawn(Worker::new(&ledger).on(kind).grace(secs(3600)).run(stops));
    eventually(|| async { steps.load(Ordering::SeqCst) >= 3 }).await;
    stop.send_replace(true);
    soon(hired).await.unwrap();
    let there = ledger.store().by_key(&queue(), &key("k")).await.unwrap().unwrap();
    let all = steps.load(Ordering::SeqCst);
    assert_eq!((there.state, there.failures), (State::Pending, 0));
    assert_eq!(there.checkpoint.as_deref(), Some(all.to_string().as_bytes()));
    assert_eq!(effects(&lab).await.len(), all);
}
