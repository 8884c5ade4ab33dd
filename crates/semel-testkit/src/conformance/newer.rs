//! Supersede-if-newer: of several versions under one key, the newest wins.

use std::time::Duration;

use semel::{
    Backoff, Claim, OnLost, OnMismatch, Policy, Settled, State, Verdict, Work,
    journal::Event,
    machine::{Answer, Write},
    prelude::*,
    store::{Decision, LeaseWrite},
};

use super::tools::*;
use crate::{Lab, work_with};

fn policy() -> Policy {
    Policy { on_mismatch: OnMismatch::SupersedeIfNewer, backoff: Backoff::NONE, ..Policy::default() }
}

/// Version `n` of the data under a key, with its own payload and order.
fn version(text: &str, n: i64) -> Work {
    work_with(text, &format!("v{n}"), policy()).order(n).payload(format!("v{n}"))
}

/// The same payload text without an order.
fn unordered(text: &str, payload: &str) -> Work {
    work_with(text, payload, policy()).payload(payload.to_owned())
}

async fn payload(node: &Node, text: &str) -> String {
    String::from_utf8(row(node, text).await.payload.unwrap().to_vec()).unwrap()
}

const SUPERSEDED: Settled = Settled::Yes { successor: true };

/// Newer data runs at once if the older has completed, failed, or has no attempts left, like a new operation; equal,
/// older and unordered data is a mismatch.
pub async fn only_newer_data_supersedes(lab: Lab) {
    let ledger = lab.ledger().await;
    for text in ["completed", "failed", "exhausted"] {
        let lease = acquire(&ledger, version(text, 5)).await;
        match text {
            "completed" => assert_eq!(lease.complete(done("v5")).await.unwrap(), SETTLED),
            "failed" => assert_eq!(lease.fail(failure("no")).await.unwrap(), SETTLED),
            _ => {
                let failure = semel::Failure { error: "no way".into(), retry: semel::Retry::Never };
                assert_eq!(lease.fail(failure).await.unwrap(), SETTLED);
            }
        }
        let before = row(&ledger, text).await;
        for refused in [version(text, 4), work_with(text, "other", policy()).order(5), unordered(text, "v9")] {
            assert_eq!(ask(&ledger, refused).await, "mismatch", "{text}");
        }
        assert_eq!(row(&ledger, text).await, before);
        let lease = acquire(&ledger, version(text, 6)).await;
        let op = lease.operation();
        assert_eq!((op.id, op.attempt(), op.order, op.payload.as_deref()), (before.id, 1, Some(6), Some(&b"v6"[..])));
        assert_eq!(lease.complete(done("v6")).await.unwrap(), SETTLED);
        assert_eq!(ask(&ledger, version(text, 5)).await, "mismatch");
        assert_eq!(ask(&ledger, version(text, 6)).await, "replay");
    }
    // The same payload is the same data, whatever its order; and data without an order cannot be superseded.
    assert_eq!(ask(&ledger, work_with("completed", "v6", policy()).order(99)).await, "replay");
    assert_eq!(acquire(&ledger, unordered("none", "v0")).await.complete(done("")).await.unwrap(), SETTLED);
    assert_eq!(ask(&ledger, version("none", 7)).await, "mismatch");
}

/// Newer data that arrives while the older runs is stored, and only still newer data replaces it.
pub async fn newer_data_waits_for_the_run_and_only_newer_replaces_it(lab: Lab) {
    let (a, b) = (lab.ledger().await, lab.ledger().await);
    let lease = acquire(&a, version("k", 5)).await;
    let kept = async |n: i64| match b.claim(version("k", n)).await.unwrap() {
        Claim::InFlight(there) => there.kept,
        Claim::Mismatch(_) => false,
        other => panic!("{n}: {}", other.word()),
    };
    assert!(!kept(4).await && !kept(5).await, "the running data itself does not wait");
    assert!(kept(6).await, "newer than what runs");
    assert!(kept(6).await, "the very data that waits");
    assert!(kept(8).await, "newer than what waits");
    assert!(!kept(6).await && !kept(7).await, "older than what waits");
    assert!(kept(8).await);
    assert_eq!(payload(&b, "k").await, "v5", "the running data is untouched");
    assert_eq!(lease.complete(done("v5")).await.unwrap(), SUPERSEDED);
    let waiting = row(&b, "k").await;
    assert_eq!((waiting.state, waiting.order, waiting.outcome), (State::Pending, Some(8), None));
    assert_eq!(payload(&b, "k").await, "v8");
    assert_eq!(ask(&b, version("k", 5)).await, "mismatch");
    // A claim with that data, or with newer data, runs.
    let lease = acquire(&b, version("k", 8)).await;
    assert_eq!(lease.complete(done("v8")).await.unwrap(), SETTLED);
    assert_eq!(story(&a, waiting.id).await, [Event::Superseded, Event::TakenOver]);
    let got = notes(&a, waiting.id).await.remove(0).detail;
    for named in [5, 8].map(|n: i64| semel::Fingerprint::of_bytes(format!("v{n}").as_bytes()).to_hex()) {
        assert!(got.contains(&named), "whole fingerprints of both: {got}");
    }
    assert!(got.contains("order 8 takes over from order 5"), "{got}");
    assert_eq!(counted(&a, State::Completed).await, 1);
}

/// The newer data runs after every end of the older run: after a failure without its backoff, after a release, after
/// lease expiry, and after the sweep.
pub async fn newer_data_runs_after_every_end_of_the_older_run(lab: Lab) {
    let (a, b) = (lab.ledger().await, lab.ledger().await);
    for how in ["fail", "release", "lapse", "sweep"] {
        let lease = acquire(&a, version(how, 1)).await;
        assert_eq!(ask(&b, version(how, 2)).await, "in_flight");
        match how {
            "fail" => {
                let failure = semel::Failure { error: "no".into(), retry: semel::Retry::After(secs(1000)) };
                assert_eq!(lease.fail(failure).await.unwrap(), SUPERSEDED);
            }
            "release" => assert_eq!(lease.release(secs(1000)).await.unwrap(), SUPERSEDED),
            _ => lab.pass(policy().lease),
        }
        if how == "sweep" {
            assert_eq!(b.sweep().await.unwrap().lapsed, 1);
            assert_eq!(row(&b, how).await.state, State::Pending);
        }
        let lease = acquire(&b, version(how, 2)).await;
        assert_eq!((lease.operation().attempt(), lease.operation().order), (1, Some(2)), "{how}");
        assert_eq!(lease.complete(done("v2")).await.unwrap(), SETTLED, "{how}");
        assert_eq!(row(&b, how).await.successor, None);
    }
}

/// While the older is in doubt, newer data waits until that is resolved: the older may have taken effect.
pub async fn newer_data_waits_while_the_older_is_in_doubt(lab: Lab) {
    let ledger = lab.ledger().await;
    for (text, verdict) in
        [("completed", Verdict::Completed(done("v1"))), ("failed", Verdict::Failed), ("retry", Verdict::Retry)]
    {
        assert_eq!(acquire(&ledger, version(text, 1)).await.doubt("cut off").await.unwrap(), SETTLED);
        let Claim::InDoubt(op) = ledger.claim(version(text, 2)).await.unwrap() else { panic!() };
        assert_eq!(op.successor.as_ref().unwrap().order, 2);
        assert_eq!(ask(&ledger, version(text, 1)).await, "in_doubt");
        assert_eq!(ask(&ledger, version(text, 0)).await, "mismatch");
        let resolve = Decision::Resolve { verdict, expected: None };
        assert_eq!(decide(&ledger, op.id, resolve).await.answer, Answer::Resolved);
        assert_eq!(payload(&ledger, text).await, "v2");
        assert_eq!(acquire(&ledger, version(text, 2)).await.complete(done("v2")).await.unwrap(), SETTLED);
    }
    // A lease lost under hold behaves in the same way.
    let held = |n: i64| version("held", n).policy(Policy { on_lost: OnLost::Hold, ..policy() });
    drop(acquire(&ledger, held(1)).await);
    lab.pass(policy().lease);
    assert_eq!(ask(&ledger, held(2)).await, "in_doubt");
    assert_eq!(row(&ledger, "held").await.successor.unwrap().order, 2);
}

/// A former owner of the older data does not change the newer; and its settle, sent twice, gets the same answer twice.
pub async fn a_late_owner_of_older_data_does_not_touch_the_newer(lab: Lab) {
    let (a, b) = (lab.ledger().await, lab.ledger().await);
    for nth in 0..WRITES {
        let text = format!("k{nth}");
        let zombie = acquire(&a, version(&text, 1)).await;
        assert_eq!(ask(&b, version(&text, 2)).await, "in_flight");
        lab.pass(policy().lease);
        let owner = acquire(&b, version(&text, 2)).await;
        lab.pass(secs(1));
        let before = row(&b, &text).await;
        assert!(!write_nth(zombie, nth).await, "write {nth}");
        assert_eq!(row(&b, &text).await, before);
        assert_eq!(owner.complete(done("v2")).await.unwrap(), SETTLED);
    }
    for write in
        [Write::Complete(done("v1")), Write::Fail(failure("no")), Write::Release { delay: Duration::ZERO, why: None }]
    {
        let text = format!("{write:?}");
        let lease = acquire(&a, version(&text, 1)).await;
        assert_eq!(ask(&b, version(&text, 2)).await, "in_flight");
        let write = LeaseWrite { id: lease.operation().id, fence: lease.fence(), write };
        for _ in 0..2 {
            let answer = a.store().write(vec![write.clone()]).await.unwrap().remove(0).answer;
            assert_eq!(answer, Answer::Settled { successor: true }, "{text}");
        }
        assert_eq!(row(&b, &text).await.order, Some(2));
    }
}

/// Under replay, another payload gets the outcome of the first one, marked as a mismatch; if nothing took effect yet,
/// it runs like the first.
pub async fn another_payload_is_replayed_under_on_mismatch_replay(lab: Lab) {
    let ledger = lab.ledger().await;
    let policy = Policy { on_mismatch: OnMismatch::Replay, backoff: Backoff::NONE, ..Policy::default() };
    let lease = acquire(&ledger, work_with("k", "one", policy.clone()).payload("one")).await;
    assert_eq!(ask(&ledger, work_with("k", "two", policy.clone())).await, "in_flight");
    assert_eq!(lease.fail(failure("no")).await.unwrap(), SETTLED);
    let lease = acquire(&ledger, work_with("k", "two", policy.clone()).payload("two")).await;
    assert_eq!(lease.operation().payload.as_deref(), Some(&b"two"[..]));
    assert_eq!(lease.complete(done("of two")).await.unwrap(), SETTLED);
    for (payload, mismatch) in [("two", false), ("one", true), ("three", true)] {
        let Claim::Replay(replay) = ledger.claim(work_with("k", payload, policy.clone())).await.unwrap() else {
            panic!()
        };
        assert_eq!((replay.outcome, replay.mismatch), (done("of two"), mismatch), "{payload}");
    }
}
