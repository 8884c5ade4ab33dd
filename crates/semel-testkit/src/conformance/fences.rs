//! Fences: every write under a lost lease is refused.

use std::time::Duration;

use semel::{
    Backoff, Fence, OnLost, Policy, Settled, State,
    journal::Event,
    machine::{Answer, Write},
    prelude::*,
    store::{Decision, LeaseWrite},
};

use super::tools::*;
use crate::{Lab, work, work_with};

/// After a takeover, each of the six writes of the former owner is refused, changes nothing, and is noted under its old
/// fence.
pub async fn every_write_of_a_zombie_is_refused(lab: Lab) {
    let (a, b) = (lab.ledger_of("a").await, lab.ledger_of("b").await);
    for nth in 0..WRITES {
        let text = format!("k{nth}");
        let zombie = acquire(&a, work(&text, Policy::default())).await;
        let (id, old) = (zombie.operation().id, zombie.fence());
        lab.pass(Policy::default().lease);
        let owner = acquire(&b, work(&text, Policy::default())).await;
        assert!(owner.fence() > old);
        // A renewal of the owner's lease would show.
        lab.pass(secs(1));
        let before = row(&a, &text).await;
        assert!(!write_nth(zombie, nth).await, "write {nth} was accepted");
        assert_eq!(row(&a, &text).await, before, "write {nth} changed the row");
        let refused = notes(&a, id).await.pop().unwrap();
        assert_eq!((refused.event, refused.fence), (Event::Refused, old), "write {nth} was not noted");
        assert_eq!(owner.complete(done("the owner's")).await.unwrap(), SETTLED);
        assert_eq!(row(&a, &text).await.outcome, Some(done("the owner's")));
    }
}

/// The same without a takeover, after the sweep has ended the lease.
pub async fn every_write_after_the_sweep_is_refused(lab: Lab) {
    let (a, b) = (lab.ledger().await, lab.ledger().await);
    for (on_lost, state) in [(OnLost::Rerun, State::TimedOut), (OnLost::Hold, State::InDoubt)] {
        for nth in 0..WRITES {
            let text = format!("{state} {nth}");
            let zombie = acquire(&a, work(&text, Policy { on_lost, ..Policy::default() })).await;
            lab.pass(Policy::default().lease);
            assert_eq!(b.sweep().await.unwrap().lapsed, 1);
            let before = row(&a, &text).await;
            assert_eq!(before.state, state);
            assert!(!write_nth(zombie, nth).await, "write {nth} was accepted in {state}");
            assert_eq!(row(&a, &text).await, before);
            assert_eq!(story(&a, before.id).await.pop(), Some(Event::Refused));
        }
    }
}

/// A key can be purged, expire, or be released, and be claimed again. A former owner of the old row never matches the
/// new row.
pub async fn a_zombie_never_matches_a_new_row_of_its_key(lab: Lab) {
    let (a, b) = (lab.ledger().await, lab.ledger().await);
    let policy = Policy { retention: Some(secs(60)), ..Policy::default() };
    for how in ["purge", "expiry", "release"] {
        for nth in 0..WRITES {
            let text = format!("{how} {nth}");
            let zombie = acquire(&a, work(&text, policy.clone())).await;
            let (id, old) = (zombie.operation().id, zombie.fence());
            lab.pass(policy.lease);
            match how {
                "purge" => assert_eq!(decide(&b, id, Decision::Purge).await.answer, Answer::Purged),
                "expiry" => {
                    b.sweep().await.unwrap();
                    lab.pass(secs(60));
                }
                _ => {
                    let write =
                        LeaseWrite { id, fence: old, write: Write::Release { delay: Duration::ZERO, why: None } };
                    let released = b.store().write(vec![write]).await.unwrap().remove(0);
                    assert_eq!(released.answer, Answer::Settled { successor: false });
                }
            }
            let owner = acquire(&b, work_with(&text, "other", policy.clone())).await;
            assert_ne!(owner.operation().id, id, "ids are never used twice");
            assert!(owner.fence() > old, "fences never go back");
            lab.pass(secs(1));
            let before = row(&a, &text).await;
            // A release that finds no row counts as made before; any other write is lost.
            assert_eq!(write_nth(zombie, nth).await, nth == 2, "{how}, write {nth}");
            assert_eq!(row(&a, &text).await, before, "{how}, write {nth} reached the new row");
            assert_eq!(owner.complete(done("the owner's")).await.unwrap(), SETTLED);
        }
    }
}

/// A settle whose answer was lost can be sent again, and gets the same answer; another settle under the same fence is
/// refused.
pub async fn a_settle_sent_again_is_answered_as_before(lab: Lab) {
    let ledger = lab.ledger().await;
    let settles = [
        Write::Complete(done("done")),
        Write::Fail(failure("no")),
        Write::Release { delay: secs(1), why: None },
        Write::Doubt { reason: "who knows".into() },
    ];
    for (nth, write) in settles.iter().enumerate() {
        let text = format!("k{nth}");
        let lease = acquire(&ledger, work(&text, Policy::default())).await;
        let (id, fence) = (lease.operation().id, lease.fence());
        let send = async |write: &Write| {
            let write = LeaseWrite { id, fence, write: write.clone() };
            ledger.store().write(vec![write]).await.unwrap().remove(0).answer
        };
        assert_eq!(send(write).await, Answer::Settled { successor: false });
        let (settled, got) = (row(&ledger, &text).await, notes(&ledger, id).await);
        lab.pass(secs(5));
        assert_eq!(send(write).await, Answer::Settled { successor: false }, "{write:?}");
        for (other, another) in settles.iter().enumerate().filter(|(other, _)| *other != nth) {
            assert_eq!(send(another).await, Answer::Lost, "settle {other} after {nth}");
        }
        assert_eq!(row(&ledger, &text).await, settled, "{write:?}");
        assert_eq!(notes(&ledger, id).await, got, "{write:?}");
    }
    for state in [State::Completed, State::Failed, State::Pending, State::InDoubt] {
        assert_eq!(counted(&ledger, state).await, 1, "{state}");
    }
}

/// The fences of an operation's owners only grow: a target that refuses older fences would
/// otherwise refuse the present owner.
pub async fn the_fences_of_an_operation_only_grow(lab: Lab) {
    let policy = Policy { backoff: Backoff::NONE, ..Policy::default() };
    let nodes = [lab.ledger().await, lab.ledger().await];
    let mut crowd = tokio::task::JoinSet::new();
    for n in 0..8 {
        let (node, policy) = (nodes[n % 2].clone(), policy.clone());
        crowd.spawn(async move {
            for _ in 0..5 {
                let claim = node.claim_or_wait(work("k", policy.clone()), secs(15)).await.unwrap();
                let lease = claim.acquired::<()>().expect("each has its turn");
                assert_ne!(lease.fail(failure("again")).await.unwrap(), Settled::LeaseLost);
            }
        });
    }
    soon(crowd.join_all()).await;
    let op = row(&nodes[0], "k").await;
    let notes = notes(&nodes[0], op.id).await;
    let runs: Vec<Fence> = notes.iter().filter(|note| note.event == Event::Failed).map(|note| note.fence).collect();
    assert_eq!((runs.len(), op.failures), (40, 40));
    assert!(runs.is_sorted_by(|a, b| a < b), "{runs:?}");
}
