//! Leases: their duration, and the writes under one.

use std::time::Duration;

use semel::{
    Backoff, Claim, Error, Failure, Held, Lease, Outcome, Policy, Retry, Scope, Settled, State, Work, prelude::*,
};
use semel_store::Database;

use super::tools::*;
use crate::{Lab, key, work, work_with};

/// An error may have any length, and goes to the row and to the journal: it is cut.
pub async fn a_long_error_is_cut_and_marked_as_cut(lab: Lab) {
    let ledger = lab.ledger().await;
    let long = "ü💥".repeat(1 << 18);
    for name in ["fail", "doubt"] {
        let lease = acquire(&ledger, work(name, Policy::default())).await;
        let settled = match name {
            "fail" => lease.fail(failure(&long)).await,
            _ => lease.doubt(long.clone()).await,
        };
        assert_eq!(settled.unwrap(), SETTLED);
        let op = row(&ledger, name).await;
        for text in [op.error.unwrap(), notes(&ledger, op.id).await.pop().unwrap().detail] {
            assert!(text.len() <= semel::MAX_TEXT && text.starts_with("ü💥ü💥"), "{} bytes", text.len());
            assert!(text.ends_with(&format!("(cut, {} bytes in all)", long.len())), "{name}");
        }
    }
}

/// A lease is held up to its deadline, and not a tick longer.
pub async fn a_lease_expires_at_its_deadline(lab: Lab) {
    let (a, b) = (lab.ledger().await, lab.ledger().await);
    let mut lease = acquire(&a, work("k", Policy::default())).await;
    lab.pass(Policy::default().lease - TICK);
    assert_eq!(ask(&b, work("k", Policy::default())).await, "in_flight");
    assert_eq!(b.sweep().await.unwrap().lapsed, 0);
    assert_eq!(lease.renew().await.unwrap(), Held::Yes);
    lab.pass(Policy::default().lease);
    assert_eq!(lease.renew().await.unwrap(), Held::LeaseLost, "an expired lease cannot be renewed, taken over or not");
    assert_eq!(ask(&b, work("k", Policy::default())).await, "acquired");
}

/// A late completion counts if the operation was not taken over.
pub async fn a_late_settle_counts_without_a_takeover(lab: Lab) {
    let ledger = lab.ledger().await;
    for nth in [0, 1, 3] {
        let text = format!("k{nth}");
        let lease = acquire(&ledger, work(&text, Policy::default())).await;
        lab.pass(Policy::default().lease * 3);
        assert!(write_nth(lease, nth).await);
    }
    let states = ["completed", "failed", "in_doubt"];
    for (nth, state) in [0, 1, 3].into_iter().zip(states) {
        assert_eq!(row(&ledger, &format!("k{nth}")).await.state.as_str(), state);
    }
}

/// A renewal extends a lease by its term from now, up to the longest run.
pub async fn a_lease_can_be_renewed_up_to_the_longest_run(lab: Lab) {
    let ledger = lab.ledger().await;
    let policy = Policy { max_run: secs(70), ..Policy::default() };
    let mut lease = acquire(&ledger, work("k", policy)).await;
    let mut time = secs(0);
    for (at, ends) in [(20, 50), (40, 70), (60, 70), (69, 70)] {
        lab.pass(secs(at) - time);
        time = secs(at);
        assert_eq!(lease.renew().await.unwrap(), Held::Yes, "at {at} s");
        assert_eq!(row(&ledger, "k").await.lease.unwrap().deadline, Lab::START + secs(ends), "at {at} s");
    }
    lab.pass(secs(1));
    assert_eq!(lease.renew().await.unwrap(), Held::LeaseLost);
    assert_eq!(ask(&ledger, work("k", Policy::default())).await, "acquired");
}

/// A dropped lease expires: until then the key is in flight.
pub async fn a_dropped_lease_expires(lab: Lab) {
    let ledger = lab.ledger().await;
    drop(acquire(&ledger, work("k", Policy::default())).await);
    assert_eq!(ask(&ledger, work("k", Policy::default())).await, "in_flight");
    lab.pass(Policy::default().lease);
    assert_eq!(acquire(&ledger, work("k", Policy::default())).await.operation().attempt(), 2);
}

/// A first run that is released leaves no trace, so the key is free for any payload.
pub async fn a_released_first_run_leaves_no_trace(lab: Lab) {
    let ledger = lab.ledger().await;
    let lease = acquire(&ledger, work("k", Policy::default())).await;
    let id = lease.operation().id;
    assert_eq!(lease.release(Duration::ZERO).await.unwrap(), SETTLED);
    assert_eq!(find(&ledger, "k").await, None);
    assert_eq!(story(&ledger, id).await, []);
    for table in ["operations", "leases", "backlog"] {
        assert_eq!(lab.number(&format!("SELECT count(*) FROM semel_{table}")).await, 0, "{table}");
    }
    for state in State::ALL {
        assert_eq!(counted(&ledger, state).await, 0, "{state}");
    }
    assert_eq!(acquire(&ledger, work_with("k", "other", Policy::default())).await.operation().attempt(), 1);
}

/// A release does not lose accepted data: the payload of the claim stays, pending.
pub async fn a_release_keeps_the_payload_and_counts_no_attempt(lab: Lab) {
    let ledger = lab.ledger().await;
    let policy = Policy { max_attempts: Some(2), backoff: Backoff::NONE, ..Policy::default() };
    let accepted = work("k", policy.clone()).payload("data");
    assert_eq!(acquire(&ledger, accepted).await.release(Duration::ZERO).await.unwrap(), SETTLED);
    let waiting = row(&ledger, "k").await;
    assert_eq!((waiting.state, waiting.payload.as_deref()), (State::Pending, Some(&b"data"[..])));
    for _ in 0..3 {
        let lease = acquire(&ledger, work("k", policy.clone())).await;
        assert_eq!(lease.operation().payload.as_deref(), Some(&b"data"[..]));
        assert_eq!(lease.operation().attempt(), 1);
        assert_eq!(lease.release(secs(9)).await.unwrap(), SETTLED);
        assert_eq!(ask(&ledger, work("k", policy.clone())).await, "not_yet");
        lab.pass(secs(9));
    }
    // Neither do releases after a failure.
    assert_eq!(acquire(&ledger, work("k", policy.clone())).await.fail(failure("no")).await.unwrap(), SETTLED);
    assert_eq!(acquire(&ledger, work("k", policy.clone())).await.release(Duration::ZERO).await.unwrap(), SETTLED);
    assert_eq!(acquire(&ledger, work("k", policy)).await.operation().attempt(), 2);
}

/// A checkpoint is kept for the next attempt after any end of this one, and is removed by the completion.
pub async fn a_checkpoint_is_handed_to_the_next_attempt(lab: Lab) {
    let ledger = lab.ledger().await;
    let policy = Policy { backoff: Backoff::NONE, ..Policy::default() };
    let lease = acquire(&ledger, work("k", policy.clone())).await;
    assert_eq!(lease.operation().checkpoint, None);
    assert_eq!(lease.checkpoint("row 100").await.unwrap(), Held::Yes);
    assert_eq!(lease.checkpoint("row 200").await.unwrap(), Held::Yes);
    assert_eq!(lease.fail(failure("no")).await.unwrap(), SETTLED);
    let lease = acquire(&ledger, work("k", policy.clone())).await;
    assert_eq!(lease.operation().checkpoint.as_deref(), Some(&b"row 200"[..]));
    assert_eq!(lease.checkpoint(vec![0, 255]).await.unwrap(), Held::Yes);
    lab.pass(policy.lease);
    let lease = acquire(&lab.ledger().await, work("k", policy)).await;
    assert_eq!(lease.operation().checkpoint.as_deref(), Some(&[0, 255][..]), "a crash keeps it as well");
    let large = lease.checkpoint(vec![0; Lease::<Database>::MAX_CHECKPOINT + 1]).await;
    assert!(matches!(large, Err(Error::Invalid(_))));
    assert_eq!(lease.complete(done("")).await.unwrap(), SETTLED);
    assert_eq!(row(&ledger, "k").await.checkpoint, None);
}

/// The derived key of a call to another service is the same on every attempt, and different for every step, operation
/// and scope.
pub async fn derived_keys_are_the_same_on_every_attempt(lab: Lab) {
    let ledger = lab.ledger().await;
    let lease = acquire(&ledger, work("k", Policy::default())).await;
    let (charge, mail) = (lease.derived_key("charge"), lease.derived_key("mail"));
    drop(lease);
    lab.pass(Policy::default().lease);
    let again = acquire(&lab.ledger().await, work("k", Policy::default())).await;
    assert_eq!((again.derived_key("charge"), again.derived_key("mail")), (charge.clone(), mail.clone()));
    let other = acquire(&ledger, work("kc", Policy::default())).await;
    let scope = Scope::new("acme", "bank", "refund").unwrap();
    let elsewhere = Work::new(scope, key("k"), semel::Fingerprint::of_bytes(b""));
    let elsewhere = acquire(&ledger, elsewhere).await;
    let mut all =
        vec![charge, mail, other.derived_key("harge"), other.derived_key("charge"), elsewhere.derived_key("charge")];
    let count = all.len();
    all.sort();
    all.dedup();
    assert_eq!(all.len(), count, "two of them are equal");
}

/// A failure decides the retry: after the policy's backoff, after its own delay, or never.
pub async fn a_failure_decides_when_it_is_retried(lab: Lab) {
    let ledger = lab.ledger().await;
    let fail = async |text: &str, retry: Retry| {
        let lease = acquire(&ledger, work(text, Policy::default())).await;
        let failure = Failure { error: "it said \0 é".into(), retry };
        assert_eq!(lease.fail(failure).await.unwrap(), SETTLED);
        let failed = row(&ledger, text).await;
        assert_eq!((failed.state, failed.error.as_deref()), (State::Failed, Some("it said \0 é")));
        failed
    };
    let own = fail("own", Retry::After(secs(100))).await;
    assert_eq!((own.not_before, own.parked), (Some(Lab::START + secs(100)), false));
    let backoff = fail("backoff", Retry::Backoff).await;
    assert_eq!(backoff.not_before, Some(Lab::START + Backoff::default().after(1, backoff.id)));
    let never = fail("never", Retry::Never).await;
    assert_eq!((never.not_before, never.parked), (None, true));
    lab.pass(secs(99));
    let asked = async |text: &'static str| ask(&ledger, work(text, Policy::default())).await;
    assert_eq!(
        (asked("own").await, asked("never").await, asked("backoff").await),
        ("not_yet", "exhausted", "acquired")
    );
    lab.pass(secs(1));
    assert_eq!(asked("own").await, "acquired");
    assert_eq!(ledger.store().now().await.unwrap(), Lab::START + secs(100));
}

/// An outcome that is too large to be kept does not fail the operation.
pub async fn an_outcome_too_large_to_keep_still_completes(lab: Lab) {
    let ledger = lab.ledger().await;
    let Claim::Acquired(lease) = ledger.claim(work("large", Policy::default())).await.unwrap() else {
        panic!("the first claim acquires")
    };
    let large = Outcome::kept(vec![7; Outcome::MAX_BYTES + 1]);
    assert_eq!(lease.complete(large).await.unwrap(), Settled::Yes { successor: false });
    let Claim::Replay(replay) = ledger.claim(work("large", Policy::default())).await.unwrap() else {
        panic!("it took effect")
    };
    assert!(!replay.outcome.kept);
}
