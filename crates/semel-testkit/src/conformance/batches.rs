//! Group commit: many calls in one statement, each answered as if it had been sent alone.

use std::{collections::HashSet, sync::Arc};

use semel::{
    Backoff, Error, Fence, Ledger, Options, Policy, State,
    lane::{Limits, lane},
    machine::{Answer, Request, Write},
    prelude::*,
    store::{Applied, LeaseWrite},
};
use semel_store::Database;

use super::tools::*;
use crate::{Kind, Lab, request, work};

fn ask_for(text: &str) -> Arc<Request> {
    Arc::new(request(text, text.as_bytes(), Policy::default()))
}

async fn claim_one(store: &Database, text: &str) -> Applied {
    store.claim(vec![ask_for(text)]).await.unwrap().remove(0)
}

fn complete(id: i64, fence: Fence, text: &str) -> LeaseWrite {
    LeaseWrite { id, fence, write: Write::Complete(done(text)) }
}

/// A batch that has the same key many times gives the lease once.
pub async fn one_key_many_times_in_a_batch_is_acquired_once(lab: Lab) {
    let store = lab.open().await;
    let applied = store.claim((0..100).map(|_| ask_for("k")).collect()).await.unwrap();
    assert_eq!(applied[0].answer, Answer::Acquired);
    assert!(applied[1..].iter().all(|applied| matches!(applied.answer, Answer::InFlight { .. })));
    let ids: HashSet<_> = applied.iter().map(|applied| applied.operation.as_ref().unwrap().id).collect();
    assert_eq!(ids.len(), 1);
    // As above, if the key exists and can be taken over.
    lab.pass(Policy::default().lease);
    let applied = store.claim((0..100).map(|_| ask_for("k")).collect()).await.unwrap();
    let acquired = applied.iter().filter(|applied| applied.answer == Answer::Acquired).count();
    assert_eq!(acquired, 1);
}

/// Five hundred claims of all sorts, in any order, are answered in their order.
pub async fn a_mixed_batch_is_answered_in_its_order(lab: Lab) {
    let ledger = lab.ledger().await;
    let store = ledger.store();
    let sorts = ["new", "replay", "in flight", "mismatch", "failed"];
    let names: Vec<_> = (0..500).map(|n| format!("{} {:03}", sorts[n % 5], n * 7919 % 500)).collect();
    let old: Vec<_> = names.iter().filter(|name| !name.starts_with("new")).collect();
    let made = store.claim(old.iter().map(|name| ask_for(name)).collect()).await.unwrap();
    let mut writes = Vec::new();
    for (name, applied) in old.iter().zip(made) {
        let op = applied.operation.unwrap();
        let write = match &name[..4] {
            "in f" => continue,
            "fail" => Write::Fail(failure(name)),
            _ => Write::Complete(done(name)),
        };
        writes.push(LeaseWrite { id: op.id, fence: op.fence, write });
    }
    store.write(writes).await.unwrap();
    lab.pass(secs(2));
    let asked = names.iter().map(|name| match name.starts_with("mismatch") {
        true => Arc::new(request(name, b"other", Policy::default())),
        false => ask_for(name),
    });
    let applied = store.claim(asked.collect()).await.unwrap();
    for (name, applied) in names.iter().zip(applied) {
        let op = applied.operation.as_ref().unwrap();
        assert_eq!(op.key.as_str(), name);
        match &name[..4] {
            "new " => assert_eq!((applied.answer, op.attempt()), (Answer::Acquired, 1)),
            "fail" => assert_eq!((applied.answer, op.attempt()), (Answer::Acquired, 2)),
            "in f" => assert!(matches!(applied.answer, Answer::InFlight { .. })),
            "mism" => assert_eq!(applied.answer, Answer::Mismatch),
            _ => assert_eq!((applied.answer, &op.outcome), (Answer::Replay { mismatch: false }, &Some(done(name)))),
        }
    }
}

/// Claims and writes of one flush are answered in their order; a write of a former owner is refused, and an operation
/// can be completed and its key claimed in the same flush.
pub async fn claims_and_writes_share_a_flush(lab: Lab) {
    let ledger = lab.ledger().await;
    let store = ledger.store();
    let made = store.claim((0..20).map(|n| ask_for(&format!("old {n:02}"))).collect()).await.unwrap();
    let mut ops: Vec<_> = made.into_iter().map(|applied| applied.operation.unwrap()).collect();
    // One of them is taken over.
    lab.pass(Policy::default().lease - TICK);
    store.renew(ops[1..].iter().map(|op| (op.id, op.fence)).collect()).await.unwrap();
    lab.pass(TICK);
    let zombie = ops[0].clone();
    ops[0] = claim_one(store, "old 00").await.operation.unwrap();
    let asked = (0..40).map(|n| ask_for(&format!("{} {:02}", if n % 2 == 0 { "new" } else { "old" }, n / 2)));
    let mut writes: Vec<_> = ops.iter().map(|op| complete(op.id, op.fence, op.key.as_str())).collect();
    writes.insert(7, complete(zombie.id, zombie.fence, "late"));
    let (claimed, written) = flush(store, asked.collect(), writes).await.unwrap();
    for (n, applied) in claimed.iter().enumerate() {
        let op = applied.operation.as_ref().unwrap();
        assert_eq!(op.key.as_str(), format!("{} {:02}", if n % 2 == 0 { "new" } else { "old" }, n / 2));
        match n % 2 {
            0 => assert_eq!(applied.answer, Answer::Acquired),
            // Whichever of the two goes first.
            _ => assert!(matches!(applied.answer, Answer::InFlight { .. } | Answer::Replay { mismatch: false })),
        }
    }
    for (n, applied) in written.iter().enumerate() {
        let expected = if n == 7 { Answer::Lost } else { Answer::Settled { successor: false } };
        assert_eq!(applied.answer, expected, "write {n}");
    }
    for op in &ops {
        assert_eq!(row(&ledger, op.key.as_str()).await.outcome, Some(done(op.key.as_str())));
    }
    assert_eq!(counted(&ledger, State::Completed).await, 20);
    assert_eq!(counted(&ledger, State::Processing).await, 20);
}

/// Claims and writes as the lanes send them: together if there is one writer, otherwise separately.
async fn flush(
    store: &Database,
    claims: Vec<Arc<Request>>,
    writes: Vec<LeaseWrite>,
) -> semel::Result<(Vec<Applied>, Vec<Applied>)> {
    if store.one_writer() {
        return store.flush(claims, writes).await;
    }
    Ok((store.claim(claims).await?, store.write(writes).await?))
}

/// A ledger under load does both at once, and a refused item affects no other.
pub async fn a_poison_claim_fails_no_settle(lab: Lab) {
    let store = lab.open().await;
    let made = store.claim((0..20).map(|n| ask_for(&format!("old {n:02}"))).collect()).await.unwrap();
    let writes = made.iter().map(|applied| applied.operation.as_ref().unwrap());
    let writes: Vec<_> = writes.map(|op| complete(op.id, op.fence, "done")).collect();
    let mut poison = request("poison", b"", Policy::default());
    poison.policy.max_run = poison.policy.lease - TICK;
    let asked = vec![ask_for("fine"), Arc::new(poison)];
    let refused = flush(&store, asked, writes.clone()).await;
    assert!(matches!(refused, Err(Error::Refused(_))), "{refused:?}");
    // Sent again without it, as a lane that halves its batch does.
    let (claimed, written) = flush(&store, vec![ask_for("fine")], writes).await.unwrap();
    assert!(matches!(claimed[0].answer, Answer::Acquired | Answer::InFlight { .. }));
    assert!(written.iter().all(|applied| applied.answer == Answer::Settled { successor: false }));
    assert_eq!(lab.number("SELECT count(*) FROM semel_operations").await, 21);
}

/// An item that the database refuses fails alone; the others of its batch succeed.
pub async fn a_poison_item_fails_alone(lab: Lab) {
    let store = lab.open().await;
    let (claims, serve) = lane(Limits::default(), {
        let store = store.clone();
        move |batch: Vec<Arc<Request>>| {
            let store = store.clone();
            async move { store.claim(batch).await }
        }
    });
    // Not served yet: what is sent now goes in one batch.
    let mut sent = Vec::new();
    for n in 0..40 {
        let mut asked = request(&format!("k{n}"), b"", Policy::default());
        match n {
            13 => asked.policy.max_run = asked.policy.lease - TICK,
            30 if lab.kind() == Kind::Postgres => asked.owner = "a\0b".into(),
            _ => {}
        }
        sent.push((n, claims.send(Arc::new(asked), 1).await.unwrap()));
    }
    let server = tokio::spawn(serve);
    for (n, answer) in sent {
        match soon(answer).await.unwrap() {
            Ok(applied) => assert_eq!(applied.answer, Answer::Acquired, "item {n}"),
            Err(error) => {
                assert!(matches!(error, Error::Refused(_)), "item {n}: {error}");
                assert!(n == 13 || n == 30, "item {n} was fine: {error}");
            }
        }
    }
    server.abort();
    let refused = if lab.kind() == Kind::Postgres { 2 } else { 1 };
    assert_eq!(lab.number("SELECT count(*) FROM semel_operations").await, 40 - refused);
    assert_eq!(lab.number("SELECT count(*) FROM semel_leases").await, 40 - refused);
}

/// A batch whose answer was lost can be sent again: it gets the same answers, and nothing is done or counted twice.
pub async fn a_batch_sent_again_changes_nothing(lab: Lab) {
    let ledger = lab.ledger().await;
    let store = ledger.store();
    let asked: Vec<_> = (0..20).map(|n| ask_for(&format!("k{n}"))).collect();
    let first = store.claim(asked.clone()).await.unwrap();
    let again = store.claim(asked).await.unwrap();
    let ops = |all: &[Applied]| all.iter().map(|applied| applied.operation.clone().unwrap()).collect::<Vec<_>>();
    assert_eq!(ops(&first), ops(&again));
    assert_eq!(counted(&ledger, State::Processing).await, 20);
    let writes: Vec<_> = ops(&first).iter().map(|op| complete(op.id, op.fence, "once")).collect();
    for _ in 0..2 {
        // The batch itself may contain a write twice.
        let twice: Vec<_> = writes.iter().chain(&writes[..5]).cloned().collect();
        let applied = store.write(twice).await.unwrap();
        assert!(applied.iter().all(|applied| applied.answer == Answer::Settled { successor: false }));
    }
    assert_eq!(counted(&ledger, State::Processing).await, 0);
    assert_eq!(counted(&ledger, State::Completed).await, 20);
}

/// The former and the present owner may be in one process, and so in one batch, in either order: each is answered by
/// its own fence.
pub async fn a_zombie_in_the_owners_batch_is_refused(lab: Lab) {
    let ledger = lab.ledger().await;
    let store = ledger.store();
    for zombie_first in [true, false] {
        let text = format!("k{zombie_first}");
        let old = claim_one(store, &text).await.operation.unwrap();
        lab.pass(Policy::default().lease);
        let new = claim_one(store, &text).await.operation.unwrap();
        assert_eq!(old.id, new.id);

        let mut renewals = vec![(old.id, old.fence), (new.id, new.fence)];
        let mut writes = vec![complete(old.id, old.fence, "zombie"), complete(new.id, new.fence, "owner")];
        if !zombie_first {
            renewals.reverse();
            writes.reverse();
        }
        let (zombie, owner) = if zombie_first { (0, 1) } else { (1, 0) };
        lab.pass(secs(1));
        assert_eq!(store.renew(vec![(old.id, old.fence)]).await.unwrap(), [Answer::Lost]);
        assert_eq!(row(&ledger, &text).await, new, "a zombie's renewal is not the owner's");
        let renewed = store.renew(renewals).await.unwrap();
        assert_eq!(renewed[zombie], Answer::Lost, "zombie first: {zombie_first}");
        assert!(matches!(renewed[owner], Answer::Renewed { .. }));
        let applied = store.write(writes).await.unwrap();
        assert_eq!(applied[zombie].answer, Answer::Lost, "zombie first: {zombie_first}");
        assert_eq!(applied[owner].answer, Answer::Settled { successor: false });
        assert_eq!(row(&ledger, &text).await.outcome, Some(done("owner")));
    }
}

/// Two nodes that send the same keys in opposite orders both succeed: each key is acquired once, and each write is
/// answered. A separate test, on a PostgreSQL that detects deadlocks sooner, checks that there are none.
pub async fn crossing_batches_both_succeed(lab: Lab) {
    let (a, b) = (lab.open().await, lab.open().await);
    for round in 0..4 {
        let names: Vec<_> = (0..300).map(|n| format!("{round}/{}", n * 7919 % 300)).collect();
        let there = names.iter().map(|name| ask_for(name)).collect();
        let back = names.iter().rev().map(|name| ask_for(name)).collect();
        let claim = async |store: &Database, requests| until_free(requests, |batch| store.claim(batch)).await;
        let (one, two) = soon(async { tokio::join!(claim(&a, there), claim(&b, back)) }).await;
        let acquired = one.into_iter().chain(two).filter(|applied| applied.answer == Answer::Acquired);
        let ops: Vec<_> = acquired.map(|applied| applied.operation.unwrap()).collect();
        assert_eq!(ops.len(), names.len());
        // Failures take the general path, completions the hot one.
        let (fails, completes) = ops.split_at(100);
        let fail = |op: &semel::Operation| LeaseWrite { id: op.id, fence: op.fence, write: Write::Fail(failure("no")) };
        let writes = fails.iter().map(fail).chain(completes.iter().map(|op| complete(op.id, op.fence, "yes")));
        let there: Vec<_> = writes.collect();
        let back = there.iter().rev().cloned().collect();
        let write = async |store: &Database, writes| until_free(writes, |batch| store.write(batch)).await;
        let (one, two) = soon(async { tokio::join!(write(&a, there), write(&b, back)) }).await;
        assert!(one.iter().chain(&two).all(|applied| applied.answer == Answer::Settled { successor: false }));
    }
}

/// Sends a batch, and sends items again whose row was locked, as a lane does: a commit on a slow disk locks rows for
/// longer than a batch waits.
pub async fn until_free<T: Clone, F: Future<Output = semel::Result<Vec<Applied>>>>(
    items: Vec<T>,
    send: impl Fn(Vec<T>) -> F,
) -> Vec<Applied> {
    let mut answers = Vec::new();
    let mut left = items;
    while !left.is_empty() {
        let applied = send(left.clone()).await.unwrap();
        let (busy, answered): (Vec<_>, Vec<_>) =
            left.into_iter().zip(applied).partition(|(_, applied)| applied.answer == Answer::Busy);
        answers.extend(answered.into_iter().map(|(_, applied)| applied));
        left = busy.into_iter().map(|(item, _)| item).collect();
    }
    answers
}

/// Without group commit each call has its own commit, and the same answers.
pub async fn without_group_commit_the_answers_are_the_same(lab: Lab) {
    let options = Options { group_commit: false, ..Options::default() };
    let ledger = Ledger::new(lab.open().await, options).unwrap();
    let lease = acquire(&ledger, work("k", Policy::default())).await;
    assert_eq!(ask(&ledger, work("k", Policy::default())).await, "in_flight");
    assert_eq!(lease.checkpoint("half-way").await.unwrap(), semel::Held::Yes);
    lab.pass(Policy::default().lease);
    let owner = acquire(&ledger, work("k", Policy::default())).await;
    assert!(!write_nth(lease, 0).await);
    assert_eq!(owner.complete(done("")).await.unwrap(), SETTLED);
    assert_eq!(ask(&ledger, work("k", Policy::default())).await, "replay");
}

/// In every state in which a key can be claimed, one of many claims on two nodes gets it.
pub async fn a_crowd_takes_over_once(lab: Lab) {
    let nodes = [lab.ledger().await, lab.ledger().await];
    let policy = Policy { retention: Some(secs(60)), backoff: Backoff::NONE, ..Policy::default() };
    let states = ["expired", "lapsed", "failed", "pending"];
    for state in states {
        let lease = acquire(&nodes[0], work(state, policy.clone()).payload("data")).await;
        match state {
            "expired" => assert_eq!(lease.complete(done("")).await.unwrap(), SETTLED),
            "lapsed" => {}
            "failed" => {
                lab.pass(secs(60));
                assert_eq!(lease.fail(failure("no")).await.unwrap(), SETTLED);
            }
            _ => assert_eq!(lease.release(std::time::Duration::ZERO).await.unwrap(), SETTLED),
        }
    }
    for state in states {
        let mut crowd = tokio::task::JoinSet::new();
        for n in 0..24 {
            let (node, work) = (nodes[n % 2].clone(), work(state, policy.clone()));
            crowd.spawn(async move { node.claim(work).await.unwrap().word() });
        }
        let answers = soon(crowd.join_all()).await;
        assert_eq!(answers.iter().filter(|word| **word == "acquired").count(), 1, "{state}");
        assert_eq!(answers.iter().filter(|word| **word == "in_flight").count(), 23, "{state}");
    }
    assert_eq!(counted(&nodes[0], State::Processing).await, 4);
}

/// Many tasks on two nodes, few keys: one lease per key.
pub async fn a_crowd_on_two_nodes_gets_one_lease_per_key(lab: Lab) {
    let nodes = [lab.ledger().await, lab.ledger().await];
    let mut crowd = tokio::task::JoinSet::new();
    for n in 0..256 {
        let node = nodes[n % 2].clone();
        crowd.spawn(async move { node.claim(work(&format!("k{}", n % 32), Policy::default())).await.unwrap().word() });
    }
    let answers = soon(crowd.join_all()).await;
    assert_eq!(answers.iter().filter(|word| **word == "acquired").count(), 32);
    assert_eq!(answers.iter().filter(|word| **word == "in_flight").count(), 256 - 32);
}
