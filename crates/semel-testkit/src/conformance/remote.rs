//! Leases that programs outside hold, and takes that are sent again.

use semel::{
    Claim, Enqueued, Error, Failure, Operation, Outcome, Policy, Renewed, Retry, Runner, State, Token, Work,
    machine::{Answer, Write},
    prelude::*,
    store::{Limits, Want},
};

use super::tools::*;
use crate::{Lab, scope, work};

fn policy() -> Policy {
    Policy { runner: Runner::Caller, ..Policy::default() }
}

fn want(most: u32) -> Want {
    let policy = Policy::default();
    Want { scope: scope(), most, since: None, policy, lease: None, limits: Limits::default() }
}

fn later(text: &str) -> Work {
    work(text, Policy::default()).payload(text.to_owned())
}

/// A claim by a program outside: its lease is not held by this process.
async fn claimed(node: &Node, work: Work) -> Operation {
    match soon(node.claim(work)).await.unwrap() {
        Claim::Acquired(lease) => lease.operation().clone(),
        other => panic!("{}", other.word()),
    }
}

async fn wrote(node: &Node, op: &Operation, write: Write) -> Answer {
    soon(node.write_as(op, op.fence, write)).await.unwrap().answer
}

/// A program names its fence at any node; a write is recognised by it, and another one is refused.
pub async fn a_lease_is_renewed_and_settled_at_any_node_by_its_fence(lab: Lab) {
    let (a, b) = (lab.ledger_of("a").await, lab.ledger_of("b").await);
    let op = claimed(&a, work("k", policy())).await;
    lab.pass(secs(20));
    let deadline = a.store().now().await.unwrap() + Policy::default().lease;
    assert_eq!(soon(b.renew_as(op.id, op.fence)).await.unwrap(), Renewed::Until { deadline, cancelled: false });
    let done = Write::Complete(Outcome::kept("yes"));
    for node in [&b, &a] {
        assert_eq!(wrote(node, &op, done.clone()).await, Answer::Settled { successor: false });
        assert_eq!(wrote(node, &op, Write::Complete(Outcome::kept("no"))).await, Answer::Lost);
    }
    assert_eq!(soon(b.renew_as(op.id, op.fence)).await.unwrap(), Renewed::LeaseLost);
    assert_eq!(row(&a, "k").await.outcome, Some(Outcome::kept("yes")));
}

/// Its policy is stored with it, on the hot path, too; no worker is told of it or gets it.
pub async fn an_operation_that_is_left_to_callers_is_never_taken(lab: Lab) {
    let node = lab.ledger_of("a").await;
    let op = claimed(&node, work("k", policy())).await;
    assert_eq!(op.terms, Some(policy()));
    assert_eq!(row(&node, "k").await, op);
    let failed = Write::Fail(Failure { error: "no luck".into(), retry: Retry::After(secs(0)) });
    assert_eq!(wrote(&node, &op, failed).await, Answer::Settled { successor: false });
    assert!(soon(node.take(vec![want(9)])).await.unwrap().is_empty());
    assert!(node.due_kinds(scope().service(), ("", "")).await.unwrap().iter().all(|due| due.kind != scope().kind()));
    assert!(matches!(node.enqueue(work("k", policy())).await, Err(Error::Invalid(_))), "no worker would run it");
    assert_eq!(claimed(&node, work("k", policy())).await.attempt(), 2);
}

/// An enqueue of what a caller has left makes it work for a worker, with its payload and its terms.
pub async fn an_enqueue_takes_over_what_a_caller_has_left(lab: Lab) {
    let node = lab.ledger_of("a").await;
    let op = claimed(&node, work("k", policy())).await;
    assert_eq!(soon(node.enqueue(later("k"))).await.unwrap().word(), "in_flight");
    let failed = Write::Fail(Failure { error: "no luck".into(), retry: Retry::After(secs(10)) });
    assert_eq!(wrote(&node, &op, failed).await, Answer::Settled { successor: false });
    assert_eq!(soon(node.enqueue(later("k"))).await.unwrap().word(), "enqueued");
    assert_eq!(soon(node.enqueue(later("k"))).await.unwrap().word(), "not_yet", "a worker runs it after its backoff");
    assert!(soon(node.take(vec![want(9)])).await.unwrap().is_empty());
    lab.pass(secs(10));
    let taken = soon(node.take(vec![want(9)])).await.unwrap();
    let taken = taken[0].1.operation();
    assert_eq!((taken.attempt(), taken.payload.as_deref()), (2, Some(&b"k"[..])));
}

/// A fence that never had a lease settles nothing: that of an operation that was only enqueued, say.
pub async fn an_enqueued_operation_is_not_settled_before_it_is_taken(lab: Lab) {
    let node = lab.ledger_of("a").await;
    soon(node.enqueue(later("k"))).await.unwrap();
    let op = row(&node, "k").await;
    let ends = [
        Write::Complete(Outcome::kept("yes")),
        Write::Fail(Failure { error: "no luck".into(), retry: Retry::Backoff }),
        Write::Release { delay: secs(0), why: None },
        Write::Doubt { reason: "who knows".into() },
    ];
    for write in ends {
        assert_eq!(wrote(&node, &op, write.clone()).await, Answer::Lost, "{write:?}");
    }
    assert_eq!(row(&node, "k").await, op);
}

/// Of completions of one lease at the same time one is stored, and only its content is told that it was.
pub async fn of_different_completions_of_one_lease_one_is_stored(lab: Lab) {
    let node = lab.ledger_of("a").await;
    for round in 0..20 {
        let name = format!("k{round}");
        let op = claimed(&node, work(&name, policy())).await;
        let outcomes: Vec<_> = (0..8).map(|n| Outcome::kept(format!("{n}"))).collect();
        let mut writes = tokio::task::JoinSet::new();
        for outcome in outcomes.clone() {
            let (node, op) = (node.clone(), op.clone());
            writes.spawn(async move { (wrote(&node, &op, Write::Complete(outcome.clone())).await, outcome) });
        }
        let told = writes.join_all().await.into_iter().filter(|(answer, _)| *answer != Answer::Lost);
        let told: Vec<_> = told.map(|(_, outcome)| Some(outcome)).collect();
        assert_eq!(told, [row(&node, &name).await.outcome]);
    }
}

/// A claim that its caller sends again is not withdrawn: the same token gets the same lease while it lives.
pub async fn a_claim_under_a_callers_token_gets_its_lease_again(lab: Lab) {
    let (a, b) = (lab.ledger_of("a").await, lab.ledger_of("b").await);
    let token = Token::named(&["acme", "1"]);
    let first = claimed(&a, work("k", policy()).token(token)).await;
    lab.pass(secs(10));
    assert_eq!(claimed(&b, work("k", policy()).token(token)).await, first);
    assert!(matches!(soon(b.claim(work("k", policy()))).await.unwrap(), Claim::InFlight(_)));
    lab.pass(secs(20));
    assert!(claimed(&b, work("k", policy()).token(token)).await.fence > first.fence, "its lease has expired");
}

/// A take under a kept token can be looked up at any node, as long as its leases live.
pub async fn a_take_that_is_sent_again_finds_its_leases(lab: Lab) {
    let (a, b) = (lab.ledger_of("a").await, lab.ledger_of("b").await);
    for name in ["1", "2", "3"] {
        assert!(matches!(soon(a.enqueue(later(name))).await.unwrap(), Enqueued::New(_)));
    }
    let (token, other) = (Token::kept(&["acme", "1"]), Token::kept(&["acme", "2"]));
    assert!(a.store().taken_under(token).await.unwrap().is_empty());
    let taken = soon(a.take_up_to(2, vec![want(9)], Some(token))).await.unwrap();
    let leases: Vec<_> = taken.iter().map(|(_, lease)| (lease.operation().id, lease.fence())).collect();
    assert_eq!(leases.len(), 2, "no more than asked for of all wants");
    assert_eq!(soon(b.take_up_to(9, vec![want(9)], Some(other))).await.unwrap().len(), 1);
    assert_eq!(b.store().taken_under(token).await.unwrap(), leases);
    let done = Write::Complete(Outcome::not_kept(""));
    assert_eq!(wrote(&b, taken[0].1.operation(), done).await, Answer::Settled { successor: false });
    assert_eq!(b.store().taken_under(token).await.unwrap(), leases[1..]);
    lab.pass(Policy::default().lease);
    assert!(b.store().taken_under(token).await.unwrap().is_empty(), "they have expired");
}

/// The take's lease counts for this run, also for work that was enqueued with a policy.
pub async fn a_take_may_ask_for_another_lease_than_the_enqueue(lab: Lab) {
    let node = lab.ledger_of("a").await;
    soon(node.enqueue(later("k"))).await.unwrap();
    let long = Want { lease: Some(secs(3600)), ..want(1) };
    let taken = soon(node.take(vec![long])).await.unwrap();
    let op = taken[0].1.operation();
    assert_eq!(op.state, State::Processing);
    assert_eq!(op.lease.as_ref().unwrap().deadline, node.store().now().await.unwrap() + secs(3600));
    assert_eq!(row(&node, "k").await, *op);
}
