//! Inline mode: the claim is made in the transaction of its effect.

use std::time::Duration;

use semel::{
    Backoff, Claim, Failure, Fingerprint, Ledger, Options, Outcome, Policy, Retry, Scope, State, Work,
    messaging::{Inbox, InboxKey, Once, Unsettled},
    prelude::*,
    store::Commit,
};
use semel_store::{Database, Settings, Tx, on};

use super::tools::*;
use crate::{Lab, work, work_with};

async fn begin(node: &Node) -> Tx {
    soon(node.store().begin(secs(5))).await.unwrap()
}

async fn commit(node: &Node, tx: &Tx) {
    assert!(matches!(soon(node.store().commit(tx)).await, Commit::Done));
}

/// Claims and, if acquired, makes the effect; returns the answer's word.
async fn once(node: &Node, tx: &Tx, work: Work, name: &str) -> &'static str {
    let claim = soon(node.claim_inline(tx, work)).await.unwrap();
    if let Claim::Acquired(()) = claim {
        effect(tx, name).await.unwrap();
    }
    claim.word()
}

/// The first claim makes the effect; a duplicate does not, nor another payload under the same key; a rolled-back claim
/// leaves nothing.
pub async fn an_inline_effect_is_made_once(lab: Lab) {
    make_effects(&lab).await;
    let ledger = lab.ledger().await;
    let tx = begin(&ledger).await;
    assert_eq!(once(&ledger, &tx, work("k", Policy::default()), "rolled back").await, "acquired");
    ledger.store().roll_back(&tx).await;
    assert_eq!((find(&ledger, "k").await, effects(&lab).await), (None, Vec::new()));
    for (payload, word) in [("one", "acquired"), ("one", "replay"), ("two", "mismatch")] {
        let tx = begin(&ledger).await;
        assert_eq!(once(&ledger, &tx, work_with("k", payload, Policy::default()), payload).await, word);
        commit(&ledger, &tx).await;
    }
    assert_eq!(effects(&lab).await, ["one"]);
    let op = row(&ledger, "k").await;
    assert_eq!((op.state, op.lease, op.outcome.unwrap().kept), (State::Completed, None, false));
    assert_eq!(counted(&ledger, State::Completed).await, 1);
    assert_eq!(lab.number("SELECT count(*) FROM semel_leases").await, 0);
}

/// Of two transactions with the same key the second waits for the first: then it finds the effect, or makes it if the
/// first was rolled back.
pub async fn the_second_transaction_waits_for_the_first(lab: Lab) {
    make_effects(&lab).await;
    let (a, b) = (lab.ledger().await, lab.ledger().await);
    for commits in [true, false] {
        let text = format!("{commits}");
        let first = begin(&a).await;
        assert_eq!(once(&a, &first, work(&text, Policy::default()), "first").await, "acquired");
        let second = tokio::spawn({
            let (b, text) = (b.clone(), text.clone());
            async move {
                let tx = begin(&b).await;
                let word = once(&b, &tx, work(&text, Policy::default()), "second").await;
                commit(&b, &tx).await;
                word
            }
        });
        // It cannot end before the first has ended; if it did, it would do so now.
        tokio::time::sleep(Duration::from_millis(50)).await;
        assert!(!second.is_finished());
        if commits {
            commit(&a, &first).await;
        } else {
            a.store().roll_back(&first).await;
        }
        assert_eq!(soon(second).await.unwrap(), if commits { "replay" } else { "acquired" });
    }
    assert_eq!(effects(&lab).await, ["first", "second"]);
}

/// Many transactions with one key: one effect.
pub async fn an_inline_crowd_makes_one_effect(lab: Lab) {
    make_effects(&lab).await;
    let nodes = [lab.ledger().await, lab.ledger().await];
    for round in 0..3 {
        let mut crowd = tokio::task::JoinSet::new();
        for n in 0..12 {
            let (node, text) = (nodes[n % 2].clone(), format!("k{round}"));
            crowd.spawn(async move {
                let tx = begin(&node).await;
                let word = once(&node, &tx, work(&text, Policy::default()), &text).await;
                commit(&node, &tx).await;
                word
            });
        }
        let words = soon(crowd.join_all()).await;
        assert_eq!(words.iter().filter(|word| **word == "acquired").count(), 1);
        assert_eq!(words.iter().filter(|word| **word == "replay").count(), 11);
    }
    assert_eq!(effects(&lab).await, ["k0", "k1", "k2"]);
}

/// Several claims in one call are answered as each alone would be.
pub async fn inline_claims_in_one_go_are_answered_one_by_one(lab: Lab) {
    make_effects(&lab).await;
    let ledger = lab.ledger().await;
    let claims = async |works: Vec<Work>| {
        let tx = begin(&ledger).await;
        let claims = soon(ledger.claim_all_inline(&tx, works)).await.unwrap();
        commit(&ledger, &tx).await;
        claims.iter().map(Claim::word).collect::<Vec<_>>()
    };
    let of = |keys: &[&str]| keys.iter().map(|key| work(key, Policy::default())).collect::<Vec<_>>();
    assert_eq!(claims(of(&["b", "d"])).await, ["acquired", "acquired"]);
    let mut works = of(&["c", "b", "a", "d"]);
    works[3] = work_with("d", "other", Policy::default());
    assert_eq!(claims(works).await, ["acquired", "replay", "acquired", "mismatch"]);
    assert_eq!(claims(Vec::new()).await, Vec::<&str>::new());
    assert_eq!(counted(&ledger, State::Completed).await, 4);
}

/// The inbox lets a message through once per consumer, and distinguishes a duplicate from another message with the same
/// key.
pub async fn an_inbox_lets_a_message_through_once(lab: Lab) {
    make_effects(&lab).await;
    let ledger = lab.ledger().await;
    let inbox = Inbox::new(ledger.clone());
    let key = |body: &str| InboxKey {
        tenant: "acme".into(),
        key: "m1".into(),
        fingerprint: Fingerprint::of_bytes(body.as_bytes()),
    };
    for (consumer, body, commits, first) in [
        ("billing", "one", false, true),
        ("billing", "one", true, true),
        ("billing", "one", true, false),
        ("shipping", "one", true, true),
    ] {
        let tx = begin(&ledger).await;
        let once = soon(inbox.once(&tx, consumer, &key(body))).await.unwrap();
        assert_eq!(matches!(once, Once::First(_)), first, "{consumer}");
        assert_eq!(once == Once::Done, !first, "{consumer}");
        if commits {
            commit(&ledger, &tx).await;
        } else {
            ledger.store().roll_back(&tx).await;
        }
    }
    let tx = begin(&ledger).await;
    let other = soon(inbox.once(&tx, "billing", &key("two"))).await.unwrap();
    assert_eq!(other, Once::Conflict(key("one").fingerprint));
    commit(&ledger, &tx).await;
}

/// A key that another program runs under a lease has not taken effect: a consumer that acknowledged its message would
/// lose it. The inbox has separate answers for these states, and lets the message through once that run is over.
pub async fn an_inbox_distinguishes_effects_from_unsettled_operations(lab: Lab) {
    let ledger = lab.ledger().await;
    let inbox = Inbox::new(ledger.clone());
    let fingerprint = Fingerprint::of_bytes(b"one");
    let ask = async |name: &str| {
        let tx = begin(&ledger).await;
        let key = InboxKey { tenant: "acme".into(), key: name.into(), fingerprint };
        let once = soon(inbox.once(&tx, "billing", &key)).await.unwrap();
        ledger.store().roll_back(&tx).await;
        once
    };
    let claim = async |name: &str| {
        let scope = Scope::new("acme", "inbox", "billing").unwrap();
        let policy = Policy { lease: secs(30), backoff: Backoff::NONE, ..Policy::default() };
        acquire(&ledger, Work::new(scope, crate::key(name), fingerprint).policy(policy)).await
    };
    let running = claim("running").await;
    assert_eq!(ask("running").await, Once::NotSettled(Unsettled::InFlight(secs(30))));
    assert_eq!(running.release(Duration::ZERO).await.unwrap(), SETTLED);
    assert!(matches!(ask("running").await, Once::First(_)), "nothing was begun");

    let later = Failure { error: "no".into(), retry: Retry::After(secs(7)) };
    assert_eq!(claim("backing off").await.fail(later).await.unwrap(), SETTLED);
    assert_eq!(ask("backing off").await, Once::NotSettled(Unsettled::NotYet(secs(7))));
    lab.pass(secs(7));
    assert!(matches!(ask("backing off").await, Once::First(_)));

    assert_eq!(claim("doubtful").await.doubt("who knows").await.unwrap(), SETTLED);
    assert_eq!(ask("doubtful").await, Once::NotSettled(Unsettled::InDoubt));

    assert_eq!(
        claim("hopeless").await.fail(Failure { error: "no".into(), retry: Retry::Never }).await.unwrap(),
        SETTLED
    );
    assert_eq!(ask("hopeless").await, Once::NotSettled(Unsettled::Exhausted));

    assert_eq!(claim("done").await.complete(Outcome::kept("")).await.unwrap(), SETTLED);
    assert_eq!(ask("done").await, Once::Done);
}

/// An inbox forgets a message after its retention, and with none never.
pub async fn an_inbox_remembers_a_message_for_its_retention(lab: Lab) {
    let ledger = lab.ledger().await;
    let day = secs(24 * 3600);
    let once = async |inbox: &Inbox<Database>, name: &str| {
        let tx = begin(&ledger).await;
        let key = InboxKey { tenant: "acme".into(), key: name.into(), fingerprint: Fingerprint::of_bytes(b"one") };
        let once = soon(inbox.once(&tx, "billing", &key)).await.unwrap();
        commit(&ledger, &tx).await;
        matches!(once, Once::First(_))
    };
    let inbox = || Inbox::new(ledger.clone());
    let inboxes =
        [(inbox(), Some(30 * day)), (inbox().retention(Some(day)), Some(day)), (inbox().retention(None), None)];
    for (n, (inbox, kept)) in inboxes.into_iter().enumerate() {
        let name = n.to_string();
        assert!(once(&inbox, &name).await, "{kept:?}");
        lab.pass(kept.unwrap_or(1000 * day) - TICK);
        assert!(!once(&inbox, &name).await, "{kept:?}: it is remembered");
        lab.pass(TICK);
        assert_eq!(once(&inbox, &name).await, kept.is_some(), "{kept:?}");
    }
}

/// Many transactions with the same keys in different orders: one effect per key, and no deadlock.
pub async fn inline_crowds_share_their_keys(lab: Lab) {
    make_effects(&lab).await;
    let nodes = [lab.ledger().await, lab.ledger().await];
    // Every other key exists already: a transaction that waits for a new key must not hold an existing one that another
    // wants.
    let tx = begin(&nodes[0]).await;
    let known: Vec<_> = (0..20).step_by(2).map(|key| format!("k{key}")).collect();
    let works = known.iter().map(|key| work(key, Policy::default())).collect();
    assert_eq!(soon(nodes[0].claim_all_inline(&tx, works)).await.unwrap().len(), 10);
    for key in &known {
        effect(&tx, key).await.unwrap();
    }
    commit(&nodes[0], &tx).await;
    let mut crowd = tokio::task::JoinSet::new();
    for n in 0..8 {
        let node = nodes[n % 2].clone();
        crowd.spawn(async move {
            let mut keys: Vec<_> = (0..20).map(|key| format!("k{key}")).collect();
            keys.rotate_left(n * 2);
            let tx = begin(&node).await;
            let works = keys.iter().map(|key| work(key, Policy::default())).collect();
            let claims = soon(node.claim_all_inline(&tx, works)).await.unwrap();
            for (key, claim) in keys.iter().zip(&claims) {
                if let Claim::Acquired(_) = claim {
                    effect(&tx, key).await.unwrap();
                }
            }
            commit(&node, &tx).await;
        });
    }
    soon(crowd.join_all()).await;
    let mut all: Vec<_> = (0..20).map(|key| format!("k{key}")).collect();
    all.sort();
    assert_eq!(effects(&lab).await, all);
}

/// An inline claim of an existing row makes the effect if it is expired, failed or timed out, and not if it is running.
pub async fn an_inline_claim_respects_the_existing_row(lab: Lab) {
    make_effects(&lab).await;
    let (a, b) = (lab.ledger().await, lab.ledger().await);
    let policy = Policy { retention: Some(secs(60)), backoff: Backoff::NONE, ..Policy::default() };
    let expired = acquire(&a, work("expired", policy.clone())).await;
    let id = expired.operation().id;
    assert_eq!(expired.complete(done("")).await.unwrap(), SETTLED);
    lab.pass(secs(60));
    drop(acquire(&a, work("timed out", policy.clone())).await);
    lab.pass(policy.lease);
    assert_eq!(acquire(&a, work("failed", policy.clone())).await.fail(failure("no")).await.unwrap(), SETTLED);
    let _live = acquire(&a, work("in flight", policy.clone())).await;
    for text in ["expired", "timed out", "failed", "in flight"] {
        let tx = begin(&b).await;
        let word = once(&b, &tx, work(text, policy.clone()), text).await;
        commit(&b, &tx).await;
        assert_eq!(word, if text == "in flight" { "in_flight" } else { "acquired" }, "{text}");
    }
    assert_eq!(effects(&lab).await, ["expired", "failed", "timed out"]);
    assert_ne!(row(&a, "expired").await.id, id);
    assert_eq!(counted(&a, State::Completed).await, 3);
}

/// A transaction that is never ended is rolled back at its time limit, and its handle is unusable.
pub async fn a_forgotten_transaction_ends_by_itself(lab: Lab) {
    make_effects(&lab).await;
    let ledger = lab.ledger().await;
    let tx = ledger.store().begin(Duration::from_millis(100)).await.unwrap();
    assert_eq!(once(&ledger, &tx, work("k", Policy::default()), "k").await, "acquired");
    eventually(async || tx.connection().await.is_err()).await;
    assert!(matches!(ledger.store().commit(&tx).await, Commit::Refused(_)));
    assert_eq!((find(&ledger, "k").await, effects(&lab).await), (None, Vec::new()));
    let tx = begin(&ledger).await;
    assert_eq!(once(&ledger, &tx, work("k", Policy::default()), "k").await, "acquired");
    commit(&ledger, &tx).await;
    assert_eq!(effects(&lab).await, ["k"]);
}

/// A statement fails, and the caller ignores it and commits: the answer is what happened.
pub async fn a_commit_reports_whether_anything_was_committed(lab: Lab) {
    make_effects(&lab).await;
    let ledger = lab.ledger().await;
    let tx = begin(&ledger).await;
    assert_eq!(once(&ledger, &tx, work("k", Policy::default()), "k").await, "acquired");
    let mut held = tx.connection().await.unwrap();
    assert!(on!(held.get().unwrap(), c => sqlx::query("INSERT INTO nowhere VALUES (1)").execute(c).await.is_err()));
    drop(held);
    match ledger.store().commit(&tx).await {
        // SQLite undoes the failed statement only.
        Commit::Done => assert_eq!((row(&ledger, "k").await.state, effects(&lab).await.len()), (State::Completed, 1)),
        // PostgreSQL undoes the transaction.
        Commit::Refused(_) => assert_eq!((find(&ledger, "k").await, effects(&lab).await.len()), (None, 0)),
        Commit::Unknown(why) | Commit::Unavailable(why) => panic!("{why}"),
    }
}

/// A dropped transaction is rolled back, also without a runtime.
pub async fn a_dropped_transaction_is_rolled_back(lab: Lab) {
    make_effects(&lab).await;
    let ledger = lab.ledger().await;
    for elsewhere in [false, true] {
        let tx = begin(&ledger).await;
        assert_eq!(once(&ledger, &tx, work("k", Policy::default()), "never").await, "acquired");
        match elsewhere {
            false => drop(tx),
            true => std::thread::spawn(move || drop(tx)).join().unwrap(),
        }
        let tx = begin(&ledger).await;
        effect(&tx, "acknowledged").await.unwrap();
        commit(&ledger, &tx).await;
    }
    assert_eq!(effects(&lab).await, ["acknowledged"; 2]);
    assert_eq!(find(&ledger, "k").await, None);
}

/// Futures that are dropped at any moment of a transaction leave nothing open: later acknowledged writes are durable.
/// (With sqlx's own pool, 25 of 300 were not.)
pub async fn acknowledged_writes_after_dropped_transactions_are_durable(lab: Lab) {
    make_effects(&lab).await;
    // Few connections: the next transaction gets the one that was left behind.
    let settings = Settings { caller_connections: 2, ..lab.settings() };
    let store = Database::open(&lab.url, settings).await.unwrap();
    let ledger = Ledger::new(store, Options::default()).unwrap();
    let mut dropped = 0;
    for n in 0..60_u64 {
        let delay = Duration::from_micros(n * 7919 % 2000);
        let name = format!("never {n}");
        let half_way = dropped_after(delay, async {
            let tx = ledger.store().begin(secs(5)).await.unwrap();
            once(&ledger, &tx, work(&name, Policy::default()), &name).await;
            std::future::pending::<()>().await;
        });
        dropped += u32::from(half_way.await.is_none());
        for m in 0..5 {
            let tx = soon(ledger.store().begin(secs(5))).await.unwrap();
            effect(&tx, &format!("acknowledged {n}.{m}")).await.unwrap();
            commit(&ledger, &tx).await;
        }
    }
    assert_eq!(dropped, 60);
    let there = effects(&lab).await;
    assert_eq!(there.len(), 300, "of 300 acknowledged effects");
    assert!(there.iter().all(|name| name.starts_with("acknowledged")));
    assert_eq!(lab.number("SELECT count(*) FROM semel_operations").await, 0);
}
