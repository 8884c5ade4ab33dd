//! Claims: which caller executes.

use std::{sync::Arc, time::Duration};

use semel::{
    Claim, Error, Fingerprint, Labels, OnLost, Outcome, Policy, Retry, Scope, State, Work,
    look::{Filter, Page},
    machine::Answer,
    prelude::*,
};

use super::tools::*;
use crate::{Lab, key, request, scope, work, work_with};

/// The first claim of a key gets the lease, and later claims get its outcome.
pub async fn a_first_claim_acquires_and_the_next_is_replayed(lab: Lab) {
    let ledger = lab.ledger().await;
    let outcomes = [done("done"), done(""), Outcome::not_kept("see elsewhere"), Outcome::kept(vec![0, 255, 10])];
    for (n, outcome) in outcomes.into_iter().enumerate() {
        let text = format!("k{n}");
        let lease = acquire(&ledger, work(&text, Policy::default())).await;
        assert_eq!(lease.complete(outcome.clone()).await.unwrap(), SETTLED);
        for node in [&ledger, &lab.ledger().await] {
            let Claim::Replay(replay) = node.claim(work(&text, Policy::default())).await.unwrap() else { panic!() };
            assert_eq!((replay.outcome, replay.mismatch), (outcome.clone(), false));
        }
    }
}

/// While an operation runs, another claim is in flight, with the remaining time of the lease.
pub async fn a_second_claim_is_in_flight(lab: Lab) {
    let (a, b) = (lab.ledger().await, lab.ledger().await);
    let lease = acquire(&a, work("k", Policy::default())).await;
    lab.pass(secs(10));
    let Claim::InFlight(there) = b.claim(work("k", Policy::default())).await.unwrap() else { panic!() };
    assert_eq!((there.retry_after, there.kept), (secs(20), false));
    assert_eq!(there.operation.fence, lease.fence());
}

/// Each of the seven answers, each given by another node than the owner.
pub async fn each_of_the_seven_answers_is_given(lab: Lab) {
    let (a, b) = (lab.ledger().await, lab.ledger().await);
    let policy = Policy { max_attempts: Some(1), ..Policy::default() };
    for text in ["replay", "in_flight", "mismatch", "exhausted", "in_doubt"] {
        let lease = acquire(&a, work(text, policy.clone())).await;
        match text {
            "replay" => assert_eq!(lease.complete(done("")).await.unwrap(), SETTLED),
            "exhausted" => assert_eq!(lease.fail(failure("no")).await.unwrap(), SETTLED),
            "in_doubt" => assert_eq!(lease.doubt("who knows").await.unwrap(), SETTLED),
            _ => drop(lease),
        }
    }
    for text in ["replay", "in_flight", "exhausted", "in_doubt"] {
        assert_eq!(ask(&b, work(text, policy.clone())).await, text);
    }
    assert_eq!(ask(&b, work_with("mismatch", "other", policy)).await, "mismatch");
    let lease = acquire(&a, work("not_yet", Policy::default())).await;
    let failed = semel::Failure { error: "busy".into(), retry: Retry::After(secs(7)) };
    assert_eq!(lease.fail(failed).await.unwrap(), SETTLED);
    lab.pass(secs(3));
    let Claim::NotYet(wait) = b.claim(work("not_yet", Policy::default())).await.unwrap() else { panic!() };
    assert_eq!((wait.retry_after, wait.until), (secs(4), Lab::START + secs(7)));
    assert_eq!(wait.operation.error.as_deref(), Some("busy"));
    lab.pass(secs(4));
    assert_eq!(ask(&b, work("not_yet", Policy::default())).await, "acquired");
}

/// Equal keys in two scopes are different operations, with any border between the parts.
pub async fn equal_keys_in_two_scopes_are_independent(lab: Lab) {
    let ledger = lab.ledger().await;
    let parts = [
        ("a", "b", "c"),
        ("A", "b", "c"),
        ("ab", "c", "c"),
        ("a", "bc", "c"),
        ("b", "a", "c"),
        ("a", "b", "cc"),
        ("a", "b", "c/c"),
        ("a:b", "c", "c"),
        ("a", "b:c", "c"),
        ("a ", "b", "c"),
        ("a", " b", "c"),
        ("a%", "b", "c"),
        ("é", "b", "c"),
        ("e\u{301}", "b", "c"),
    ];
    let scopes: Vec<_> = parts.iter().map(|(t, s, k)| Scope::new(t, s, k).unwrap()).collect();
    let of = |scope: &Scope| Work::new(scope.clone(), key("k"), Fingerprint::of_bytes(scope.to_string().as_bytes()));
    for scope in &scopes {
        let lease = acquire(&ledger, of(scope)).await;
        assert_eq!(lease.complete(done(&scope.to_string())).await.unwrap(), SETTLED);
    }
    for scope in &scopes {
        let Claim::Replay(replay) = ledger.claim(of(scope)).await.unwrap() else { panic!("{scope}") };
        assert_eq!(replay.outcome, done(&scope.to_string()));
        let found = ledger.store().by_key(scope, &key("k")).await.unwrap().unwrap();
        assert_eq!((&found.scope, found.id), (scope, replay.operation.id));
        let others = ledger.store().by_id("nobody", found.id).await.unwrap();
        assert!(others.is_none(), "another tenant must not see it");
    }
}

/// Keys are compared by their bytes: not by case, appearance, or a database's collation.
pub async fn keys_are_compared_byte_by_byte(lab: Lab) {
    let ledger = lab.ledger().await;
    let long = "k".repeat(255);
    let texts = [
        "k",
        "K",
        "k ",
        " k",
        "é",
        "e\u{301}",
        "ß",
        "ss",
        "1",
        "01",
        "1.0",
        "1e0",
        "null",
        "true",
        "NaN",
        "[]",
        r#"{"a":1}"#,
        "%",
        "_",
        "'",
        "\"",
        "\\",
        "\\x00",
        "$1",
        "-- x",
        "ı",
        "i",
        "🎉",
        &long,
        &long[..254],
    ];
    let claims: Vec<_> = texts.iter().map(|text| Arc::new(request(text, b"", Policy::default()))).collect();
    let applied = ledger.store().claim(claims).await.unwrap();
    assert!(applied.iter().all(|applied| applied.answer == Answer::Acquired));
    for (text, applied) in texts.iter().zip(applied) {
        let again =
            ledger.store().claim(vec![Arc::new(request(text, b"", Policy::default()))]).await.unwrap().remove(0);
        assert!(matches!(again.answer, Answer::InFlight { .. }), "{text:?}");
        let (made, found) = (applied.operation.unwrap(), again.operation.unwrap());
        assert_eq!((found.id, found.key.as_str()), (made.id, *text));
    }
}

/// A claim whose answer was lost is recognised when it is sent again; a claim of another caller is not.
pub async fn a_claim_whose_answer_was_lost_is_recognised(lab: Lab) {
    let store = lab.open().await;
    // A first claim, and one that takes over: two ways to get a lease.
    for round in 0..2 {
        let mine = Arc::new(request("k", b"", Policy::default()));
        let first = store.claim(vec![mine.clone()]).await.unwrap().remove(0);
        assert_eq!(first.answer, Answer::Acquired);
        let others = lab.open().await.claim(vec![mine.clone(), mine.clone()]).await.unwrap();
        for again in others {
            assert_eq!(
                (again.answer, again.operation.as_ref()),
                (Answer::Acquired, first.operation.as_ref()),
                "round {round}"
            );
        }
        let other = store.claim(vec![Arc::new(request("k", b"", Policy::default()))]).await.unwrap().remove(0);
        assert!(matches!(other.answer, Answer::InFlight { .. }));
        lab.pass(Policy::default().lease);
    }
}

/// Another payload under the same key is a mismatch in every state of the operation.
pub async fn another_payload_is_a_mismatch_in_every_state(lab: Lab) {
    let (a, b) = (lab.ledger().await, lab.ledger().await);
    let hold = Policy { on_lost: OnLost::Hold, max_attempts: Some(1), ..Policy::default() };
    let states = ["processing", "completed", "failed", "in_doubt", "pending"];
    for text in states {
        let lease = acquire(&a, work(text, hold.clone()).payload(text)).await;
        match text {
            "completed" => assert_eq!(lease.complete(done("")).await.unwrap(), SETTLED),
            "failed" => assert_eq!(lease.fail(failure("no")).await.unwrap(), SETTLED),
            "in_doubt" => assert_eq!(lease.doubt("who knows").await.unwrap(), SETTLED),
            "pending" => assert_eq!(lease.release(Duration::ZERO).await.unwrap(), SETTLED),
            _ => drop(lease),
        }
    }
    for text in states {
        let before = row(&a, text).await;
        assert_eq!(before.state.as_str(), text);
        let Claim::Mismatch(got) = b.claim(work_with(text, "other", hold.clone())).await.unwrap() else {
            panic!("{text}")
        };
        assert_eq!(*got, before);
        assert_eq!(row(&a, text).await, before, "a mismatch changes nothing");
    }
    // Its expired lease is ended nevertheless, and the mismatch does not get it.
    lab.pass(hold.lease);
    assert_eq!(ask(&b, work_with("processing", "other", hold)).await, "mismatch");
    assert_eq!(row(&a, "processing").await.state, State::InDoubt);
}

/// Past its retention, counted from its settle, an operation counts as absent, swept or not.
pub async fn an_expired_operation_counts_as_absent(lab: Lab) {
    let ledger = lab.ledger().await;
    let policy = Policy { retention: Some(secs(60)), ..Policy::default() };
    let lease = acquire(&ledger, work("k", policy.clone())).await;
    let first = lease.operation().id;
    lab.pass(secs(20));
    assert_eq!(lease.complete(done("first")).await.unwrap(), SETTLED);
    lab.pass(secs(60) - TICK);
    assert_eq!(ask(&ledger, work("k", policy.clone())).await, "replay");
    lab.pass(TICK);
    // Also for another payload: there is nothing left to mismatch with.
    let lease = acquire(&ledger, work_with("k", "other", policy)).await;
    assert_ne!(lease.operation().id, first);
    assert_eq!(lease.operation().attempt(), 1);
    assert_eq!(ledger.store().by_id("acme", first).await.unwrap(), None);
    assert_eq!((counted(&ledger, State::Completed).await, counted(&ledger, State::Processing).await), (0, 1));
}

/// Invalid work is refused before anything is claimed.
pub async fn invalid_work_is_refused_before_anything_is_claimed(lab: Lab) {
    let ledger = lab.ledger().await;
    let good = Policy::default();
    let label = |text: &str| Labels([None, Some(text.to_owned()), None, None]);
    let wrong = [
        work("lease", Policy { lease: Duration::from_millis(99), ..good.clone() }),
        work("run", Policy { max_run: good.lease - TICK, ..good.clone() }),
        work("attempts", Policy { max_attempts: Some(0), ..good.clone() }),
        work("crashes", Policy { max_crashes: 0, ..good.clone() }),
        work("ages", Policy { retention: Some(Duration::MAX), ..good.clone() }),
        work("for ever", Policy { max_run: Duration::MAX, ..good.clone() }),
        work("large", good.clone()).payload(vec![0; Work::MAX_PAYLOAD + 1]),
        work("empty label", good.clone()).labels(label("")),
        work("long label", good.clone()).labels(label(&"x".repeat(256))),
        work("bad label", good.clone()).labels(label("a\0b")),
    ];
    for work in wrong {
        let refused = ledger.claim(work.clone()).await;
        assert!(matches!(refused, Err(Error::Invalid(_))), "{work:?}");
        let refused = ledger.run(work.clone(), |_| async { panic!("it ran") }).await;
        assert!(matches!(refused, Err(Error::Invalid(_))), "{work:?}");
    }
    assert_eq!(ledger.store().list(&Filter::scope(&scope()), Page::default()).await.unwrap().items, []);
    assert_eq!(ledger.store().counts("acme", 0).await.unwrap(), []);
    // The largest and longest allowed values are accepted.
    let most = Policy { retention: Some(Policy::LONGEST), max_run: Policy::LONGEST, lease: Policy::LONGEST, ..good };
    let lease =
        acquire(&ledger, work("most", most).payload(vec![7; Work::MAX_PAYLOAD]).labels(label(&"x".repeat(255)))).await;
    assert_eq!(lease.complete(done("")).await.unwrap(), SETTLED);
    let found = row(&ledger, "most").await;
    assert_eq!(
        (found.payload.unwrap().len(), found.expires_at),
        (Work::MAX_PAYLOAD, Some(Lab::START + Policy::LONGEST))
    );
}

/// A claim whose caller goes away, at any moment, leaves no key blocked: the clock does not move, so only a release
/// can free it.
pub async fn a_claim_that_is_dropped_frees_its_key(lab: Lab) {
    let ledger = lab.ledger().await;
    let mut dropped = 0;
    for round in 0..80 {
        let text = format!("k{round}");
        let delay = Duration::from_micros(round * 40);
        match dropped_after(delay, ledger.claim(work(&text, Policy::default()))).await {
            Some(claim) => drop(claim.unwrap().acquired::<()>().ok().unwrap().complete(done("")).await.unwrap()),
            None => {
                dropped += 1;
                let claim = soon(ledger.claim_or_wait(work(&text, Policy::default()), secs(10))).await;
                assert_eq!(claim.unwrap().word(), "acquired", "dropped after {delay:?}");
            }
        }
    }
    assert!(dropped > 0, "none was dropped half-way; the delays should be shorter");
}
