//! Waiting for another caller's run.

use std::time::Duration;

use semel::{Backoff, Claim, Lease, Ledger, Operation, Options, Policy, Settled, State, prelude::*};
use semel_store::{Database, Settings};
use tokio::sync::oneshot;

use super::tools::*;
use crate::{Lab, work, work_with};

/// Waits for a run on `node`, and signals when it has found one. Its own time limit is long after the test.
fn wait_for(node: &Node, text: &str) -> (tokio::task::JoinHandle<Claim<Lease<Database>>>, oneshot::Receiver<()>) {
    let (sees, seen) = oneshot::channel();
    let (node, work) = (node.clone(), work(text, Policy::default()));
    let worth = move |_: &Operation| sees.send(()).is_ok();
    (tokio::spawn(async move { node.claim_or_wait_if(work, secs(600), worth).await.unwrap() }), seen)
}

/// Every end of a run of `owner` wakes the waiters on `waiter`.
async fn every_end_wakes_the_waiter(owner: &Node, waiter: &Node) {
    for round in 0..5 {
        let text = format!("k {round}");
        let lease = acquire(owner, work(&text, Policy::default())).await;
        let (waiting, seen) = wait_for(waiter, &text);
        soon(seen).await.unwrap();
        // With and without time to register: an end in between must not be missed.
        tokio::time::sleep(Duration::from_millis(40 * round)).await;
        assert!(!waiting.is_finished());
        assert_eq!(lease.complete(done(&text)).await.unwrap(), SETTLED);
        let claim = soon(waiting).await.unwrap();
        assert!(matches!(claim, Claim::Replay(replay) if replay.outcome == done(&text)), "{text}");
    }
}

/// In the same process the settle wakes the waiter: the read of the database, which other nodes need, is blocked here.
pub async fn a_waiter_in_the_same_process_is_woken_at_once(lab: Lab) {
    let settings = Settings { caller_connections: 1, ..lab.settings() };
    let node = Ledger::new(Database::open(&lab.url, settings).await.unwrap(), Options::default()).unwrap();
    // A reader that is slow to open, on a busy machine, is there in the next round.
    let mut readers = Vec::new();
    loop {
        while let Ok(Ok(reader)) = tokio::time::timeout(secs(1), node.store().reader()).await {
            readers.push(reader);
        }
        if tokio::time::timeout(secs(1), node.store().glance(vec![1])).await.is_err() {
            break;
        }
        assert!(readers.len() < 100, "there is no end to readers");
    }
    every_end_wakes_the_waiter(&node, &node).await;
    drop(readers);
}

/// On another node the next poll wakes the waiter.
pub async fn a_waiter_on_another_node_is_woken_soon(lab: Lab) {
    let (a, b) = (lab.ledger().await, lab.ledger().await);
    every_end_wakes_the_waiter(&a, &b).await;
}

/// Waiting costs no connection: with a single one for callers, 64 wait and others go on.
pub async fn waiters_hold_no_connection(lab: Lab) {
    let settings = Settings { caller_connections: 1, ..lab.settings() };
    let store = Database::open(&lab.url, settings).await.unwrap();
    let node = Ledger::new(store, Options::default()).unwrap();
    let owner = lab.ledger().await;
    let lease = acquire(&owner, work("k", Policy::default())).await;
    let mut waiters = tokio::task::JoinSet::new();
    for _ in 0..64 {
        let node = node.clone();
        waiters.spawn(async move { node.claim_or_wait(work("k", Policy::default()), secs(600)).await.unwrap().word() });
    }
    for n in 0..20 {
        let text = format!("other {n}");
        let other = soon(node.claim(work(&text, Policy::default()))).await.unwrap();
        assert_eq!(other.word(), "acquired");
        let looking = soon(node.store().by_id("acme", lease.operation().id)).await.unwrap();
        assert_eq!(looking.unwrap().state, State::Processing);
        let tx = soon(node.store().begin(secs(5))).await.unwrap();
        node.store().roll_back(&tx).await;
    }
    assert!(waiters.try_join_next().is_none(), "they wait");
    assert_eq!(lease.complete(done("")).await.unwrap(), SETTLED);
    let words = soon(waiters.join_all()).await;
    assert_eq!(words, ["replay"; 64]);
}

/// A waiter whose time is up is answered in flight, and has not changed the row.
pub async fn a_waiter_that_gives_up_touches_nothing(lab: Lab) {
    let (a, b) = (lab.ledger().await, lab.ledger().await);
    let lease = acquire(&a, work("k", Policy::default())).await;
    let before = row(&a, "k").await;
    for node in [&a, &b] {
        let claim = soon(node.claim_or_wait(work("k", Policy::default()), Duration::from_millis(80))).await.unwrap();
        assert_eq!(claim.word(), "in_flight");
        // One that goes away while it waits does not change it either.
        let waiting = node.claim_or_wait(work("k", Policy::default()), secs(15));
        assert!(tokio::time::timeout(Duration::from_millis(80), waiting).await.is_err());
    }
    assert_eq!(row(&a, "k").await, before);
    assert_eq!(story(&a, before.id).await, []);
    assert_eq!(lease.complete(done("")).await.unwrap(), SETTLED);
}

/// Lets many callers on two nodes wait for one owner, then ends its run by `end`. One of them must get the lease, and
/// when it completes, all others must get its outcome.
async fn one_is_promoted(lab: &Lab, text: &str, policy: Policy, end: impl AsyncFnOnce(semel::Lease<Database>)) {
    let nodes = [lab.ledger().await, lab.ledger().await];
    let lease = acquire(&nodes[0], work(text, policy.clone())).await;
    let mut waiters = tokio::task::JoinSet::new();
    for n in 0..16 {
        let (node, text, policy) = (nodes[n % 2].clone(), text.to_owned(), policy.clone());
        waiters.spawn(async move {
            match node.claim_or_wait(work(&text, policy), secs(600)).await.unwrap() {
                Claim::Acquired(lease) => {
                    assert_ne!(lease.complete(done(&format!("by {n}"))).await.unwrap(), Settled::LeaseLost);
                    "promoted".to_owned()
                }
                Claim::Replay(replay) => String::from_utf8(replay.outcome.body.to_vec()).unwrap(),
                other => panic!("{text}: {}", other.word()),
            }
        });
    }
    tokio::time::sleep(Duration::from_millis(120)).await;
    assert!(waiters.try_join_next().is_none(), "they wait");
    end(lease).await;
    let answers = soon(waiters.join_all()).await;
    let outcome = String::from_utf8(row(&nodes[0], text).await.outcome.unwrap().body.to_vec()).unwrap();
    assert_eq!(answers.iter().filter(|answer| *answer == "promoted").count(), 1, "{text}");
    assert_eq!(answers.iter().filter(|answer| **answer == outcome).count(), 15, "{text}");
}

/// If the owner fails or releases, exactly one waiter gets the lease.
pub async fn when_the_owner_gives_up_one_waiter_is_promoted(lab: Lab) {
    let policy = Policy { backoff: Backoff::NONE, ..Policy::default() };
    one_is_promoted(&lab, "fails", policy.clone(), async |lease| {
        assert_eq!(lease.fail(failure("no")).await.unwrap(), SETTLED);
    })
    .await;
    one_is_promoted(&lab, "releases", policy, async |lease| {
        assert_eq!(lease.release(Duration::ZERO).await.unwrap(), SETTLED);
    })
    .await;
}

/// If the owner's lease expires, a waiter takes over.
pub async fn when_the_lease_expires_a_waiter_takes_over(lab: Lab) {
    one_is_promoted(&lab, "lapses", Policy::default(), async |lease| {
        drop(lease);
        lab.pass(Policy::default().lease);
    })
    .await;
}

/// A caller that may wait decides whether the operation in flight is worth it, and is not asked otherwise.
pub async fn a_caller_decides_which_operations_it_waits_for(lab: Lab) {
    let ledger = lab.ledger().await;
    let lease = acquire(&ledger, work("k", Policy::default())).await;
    let (id, again) = (lease.operation().id, || work("k", Policy::default()));
    let refused = soon(ledger.claim_or_wait_if(again(), secs(600), |there| there.id != id)).await.unwrap();
    assert_eq!(refused.word(), "in_flight");
    let impatient = ledger.claim_or_wait_if(again(), Duration::ZERO, |_| panic!("there is no time to wait"));
    assert_eq!(soon(impatient).await.unwrap().word(), "in_flight");
    assert_eq!(lease.complete(done("made")).await.unwrap(), SETTLED);
    let over = ledger.claim_or_wait_if(again(), secs(600), |_| panic!("nothing is in flight"));
    assert_eq!(soon(over).await.unwrap().word(), "replay");
}

/// Only an operation in flight is waited for: every other answer comes at once.
pub async fn only_an_operation_in_flight_is_waited_for(lab: Lab) {
    let ledger = lab.ledger().await;
    let _running = acquire(&ledger, work("running", Policy::default())).await;
    assert_eq!(acquire(&ledger, work("failed", Policy::default())).await.fail(failure("no")).await.unwrap(), SETTLED);
    assert_eq!(acquire(&ledger, work("doubted", Policy::default())).await.doubt("?").await.unwrap(), SETTLED);
    let cases = [
        (work_with("running", "other", Policy::default()), "mismatch"),
        (work("failed", Policy::default()), "not_yet"),
        (work("doubted", Policy::default()), "in_doubt"),
        (work("new", Policy::default()), "acquired"),
    ];
    for (work, word) in cases {
        assert_eq!(soon(ledger.claim_or_wait(work, secs(600))).await.unwrap().word(), word);
    }
    // A waiter is woken when its operation reaches one of these states.
    let lease = acquire(&ledger, work("turns", Policy::default())).await;
    let waiting = tokio::spawn({
        let ledger = ledger.clone();
        async move { ledger.claim_or_wait(work("turns", Policy::default()), secs(600)).await.unwrap().word() }
    });
    tokio::time::sleep(Duration::from_millis(50)).await;
    assert_eq!(lease.doubt("cut off").await.unwrap(), SETTLED);
    assert_eq!(soon(waiting).await.unwrap(), "in_doubt");
}
