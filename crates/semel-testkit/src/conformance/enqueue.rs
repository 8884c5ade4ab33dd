//! Work for later: enqueues, and the answers for existing keys.

use semel::{
    Backoff, Claim, Enqueued, Error, OnLost, OnMismatch, Outcome, Policy, Priority, Settled, State, Work,
    journal::Event,
    machine::Answer,
    prelude::*,
    store::{Commit, Decision, Limits, Want},
};

use super::tools::*;
use crate::{Lab, key, scope, work, work_with};

fn policy() -> Policy {
    Policy { backoff: Backoff { first: secs(10), cap: secs(40) }, max_attempts: Some(2), ..Policy::default() }
}

/// Work under the worker's policy.
fn plain(text: &str) -> Work {
    work(text, policy()).policy_of_worker(policy()).payload(text.to_owned())
}

async fn enqueue(node: &Node, work: Work) -> Enqueued {
    soon(node.enqueue(work)).await.unwrap()
}

fn want(most: u32) -> Want {
    Want { scope: scope(), most, since: None, policy: policy(), lease: None, limits: Limits::default() }
}

/// Takes up to this many; returns their leases.
async fn take(node: &Node, want: Want) -> Vec<semel::Lease<semel_store::Database>> {
    soon(node.take(vec![want])).await.unwrap().into_iter().map(|(_, lease)| lease).collect()
}

async fn taken(node: &Node, most: u32) -> Vec<String> {
    let leases = take(node, want(most)).await;
    leases.iter().map(|lease| lease.operation().key.as_str().to_owned()).collect()
}

/// An enqueued operation is pending with its payload, one worker runs it once, and its first run leaves no journal
/// note.
pub async fn an_enqueued_operation_is_pending_and_runs_once(lab: Lab) {
    let (a, b) = (lab.ledger_of("a").await, lab.ledger_of("b").await);
    let Enqueued::New(op) = enqueue(&a, plain("k")).await else { panic!() };
    assert_eq!((op.state, op.was_claimed(), op.owner.as_str()), (State::Pending, false, ""));
    assert_eq!(row(&a, "k").await, *op, "the answer is what is stored");
    assert_eq!(counted(&a, State::Pending).await, 1);
    let again = enqueue(&b, plain("k")).await;
    assert!(matches!(&again, Enqueued::Waiting(waiting) if waiting.from == Lab::START), "{again:?}");
    let mut leases = take(&b, want(10)).await;
    assert_eq!(take(&a, want(10)).await.len(), 0, "one of them gets it");
    let lease = leases.remove(0);
    assert_eq!(lease.operation().payload.as_deref(), Some(&b"k"[..]));
    assert_eq!((lease.operation().owner.as_str(), lease.operation().attempt()), ("b", 1));
    assert_eq!(*lease.operation(), row(&a, "k").await);
    assert_eq!(enqueue(&a, plain("k")).await.word(), "in_flight");
    assert_eq!(lease.complete(done("yes")).await.unwrap(), SETTLED);
    let Enqueued::Known(Claim::Replay(replay)) = enqueue(&a, plain("k")).await else { panic!() };
    assert_eq!(replay.outcome, done("yes"));
    assert_eq!(story(&a, op.id).await, [], "a first run is ordinary life");
    assert_eq!((counted(&a, State::Pending).await, counted(&a, State::Completed).await), (0, 1));
}

/// An enqueue in a caller's transaction is visible when that commits, and not if it is rolled back.
pub async fn an_enqueue_in_a_transaction_commits_with_it(lab: Lab) {
    let ledger = lab.ledger().await;
    for (text, commits) in [("committed", true), ("undone", false)] {
        let tx = ledger.store().begin(secs(5)).await.unwrap();
        let works = (0..300).map(|n| plain(&format!("{text} {n}"))).collect();
        let answers = ledger.enqueue_in(&tx, works).await.unwrap();
        assert!(answers.len() == 300 && answers.iter().all(|answer| answer.word() == "enqueued"));
        match commits {
            true => assert!(matches!(ledger.store().commit(&tx).await, Commit::Done)),
            false => ledger.store().roll_back(&tx).await,
        }
        let there = find(&ledger, &format!("{text} 7")).await;
        assert_eq!(there.map(|op| op.state), commits.then_some(State::Pending), "{text}");
    }
    assert_eq!(taken(&ledger, 500).await.len(), 300);
    let tx = ledger.store().begin(secs(5)).await.unwrap();
    let answers = ledger.enqueue_in(&tx, vec![plain("committed 1"), plain("new")]).await.unwrap();
    assert_eq!(answers.iter().map(Enqueued::word).collect::<Vec<_>>(), ["in_flight", "enqueued"]);
    let twice = ledger.enqueue_in(&tx, vec![plain("x"), plain("x")]).await;
    assert!(matches!(twice, Err(Error::Invalid(_))), "{twice:?}");
    ledger.store().roll_back(&tx).await;
}

/// Many enqueues at once are answered in order, with keys in any state.
pub async fn many_are_enqueued_at_once_and_answered_in_order(lab: Lab) {
    let ledger = lab.ledger().await;
    enqueue(&ledger, plain("3")).await;
    let works = |n: usize| (0..n).map(|n| plain(&n.to_string())).collect::<Vec<_>>();
    let answers = soon(ledger.enqueue_all(works(2000))).await.unwrap();
    for (n, answer) in answers.iter().enumerate() {
        assert_eq!(answer.word(), if n == 3 { "waiting" } else { "enqueued" }, "{n}");
        assert_eq!(answer.operation().key.as_str(), n.to_string());
    }
    let again = soon(ledger.enqueue_all(works(2000))).await.unwrap();
    assert!(again.iter().all(|answer| answer.word() == "waiting"));
    assert_eq!(counted(&ledger, State::Pending).await, 2000);
    assert_eq!(taken(&ledger, 5000).await.len(), 2000);
}

/// It is not run before its time, to the tick, and every node knows that time.
pub async fn a_delayed_operation_waits_for_its_time(lab: Lab) {
    let ledger = lab.ledger().await;
    enqueue(&ledger, plain("delayed").delay(secs(10))).await;
    enqueue(&ledger, plain("timed").not_before(Lab::START + secs(20))).await;
    enqueue(&ledger, plain("past").not_before(semel::Timestamp::from_micros(5))).await;
    assert_eq!(row(&ledger, "past").await.not_before, None);
    assert_eq!(taken(&ledger, 9).await, ["past"]);
    let next = ledger.due_kinds("bank", ("", "")).await.unwrap();
    assert_eq!((next.len(), next[0].wait), (1, secs(10)));
    let Enqueued::Waiting(waiting) = enqueue(&ledger, plain("timed")).await else { panic!() };
    assert_eq!(waiting.from, Lab::START + secs(20));
    assert_eq!(ask(&ledger, plain("delayed")).await, "not_yet", "nor by a claim of its key");
    lab.pass(secs(10) - TICK);
    assert_eq!(taken(&ledger, 9).await, [""; 0]);
    lab.pass(TICK);
    assert_eq!(taken(&ledger, 9).await, ["delayed"]);
    lab.pass(secs(10));
    assert_eq!(taken(&ledger, 9).await, ["timed"]);
}

/// Higher priorities are taken first, the longest due first within each; every tenth is the longest due of all.
pub async fn higher_priorities_are_taken_first(lab: Lab) {
    let ledger = lab.ledger().await;
    for (n, priority) in [-2, 0, 2, 1, 0, 2, -1].into_iter().enumerate() {
        lab.pass(secs(1));
        let priority = Priority::new(priority).unwrap();
        enqueue(&ledger, plain(&format!("{n}")).priority(priority)).await;
        assert_eq!(row(&ledger, &n.to_string()).await.priority, priority);
    }
    let oldest = take(&ledger, Want { since: Some(8), ..want(2) }).await;
    let keys: Vec<_> = oldest.iter().map(|lease| lease.operation().key.as_str()).collect();
    assert_eq!(keys, ["0", "2"], "the oldest, and the first by priority");
    assert_eq!(taken(&ledger, 2).await, ["5", "3"]);
    assert_eq!(taken(&ledger, 9).await, ["1", "4", "6"]);
    assert!(Priority::new(3).is_err());
}

/// Another payload under the key of a pending operation is a mismatch; under supersede-if-newer, newer data replaces
/// it.
pub async fn newer_data_replaces_pending_data(lab: Lab) {
    let ledger = lab.ledger().await;
    let newer = |text: &str, order: i64| {
        let policy = Policy { on_mismatch: OnMismatch::SupersedeIfNewer, ..policy() };
        work_with("k", text, policy.clone()).policy_of_worker(policy).payload(text.to_owned()).order(order)
    };
    assert_eq!(enqueue(&ledger, newer("first", 1)).await.word(), "enqueued");
    assert_eq!(enqueue(&ledger, newer("older", 0)).await.word(), "mismatch");
    assert_eq!(enqueue(&ledger, newer("second", 2)).await.word(), "enqueued");
    assert_eq!(row(&ledger, "k").await.payload.as_deref(), Some(&b"second"[..]));
    let lease = take(&ledger, want(9)).await.remove(0);
    assert_eq!(lease.operation().payload.as_deref(), Some(&b"second"[..]));
    let Enqueued::Known(Claim::InFlight(there)) = enqueue(&ledger, newer("third", 3)).await else { panic!() };
    assert!(there.kept);
    assert_eq!(lease.complete(done("2")).await.unwrap(), Settled::Yes { successor: true });
    let lease = take(&ledger, want(9)).await.remove(0);
    assert_eq!(lease.operation().payload.as_deref(), Some(&b"third"[..]));
    assert_eq!(lease.complete(done("3")).await.unwrap(), SETTLED);
    assert_eq!(enqueue(&ledger, newer("fourth", 4).delay(secs(5))).await.word(), "enqueued", "also after it completed");
    assert_eq!(taken(&ledger, 9).await, [""; 0]);
    lab.pass(secs(5));
    assert_eq!(taken(&ledger, 9).await, ["k"]);
    let reject = work_with("k", "other", policy());
    assert_eq!(enqueue(&ledger, reject).await.word(), "mismatch");
    // It has its own time and priority, not those of the data it replaces.
    lab.pass(policy().lease);
    assert_eq!(ledger.sweep().await.unwrap().lapsed, 1);
    assert_eq!(enqueue(&ledger, newer("fifth", 5).delay(secs(5))).await.word(), "enqueued");
    assert_eq!(enqueue(&ledger, plain("before it")).await.word(), "enqueued");
    assert_eq!(taken(&ledger, 9).await, ["before it"]);
    lab.pass(secs(5));
    assert_eq!(taken(&ledger, 9).await, ["k"]);
}

/// Newer data that is enqueued while the older runs has the time, the priority and the policy of its own enqueue. Newer
/// data that an earlier version has stored, without them, has those of the older.
pub async fn newer_data_that_waits_for_a_run_keeps_the_terms_of_its_enqueue(lab: Lab) {
    let ledger = lab.ledger().await;
    let policy_of = |most| Policy { max_attempts: Some(most), on_mismatch: OnMismatch::SupersedeIfNewer, ..policy() };
    let (low, high) = (Priority::new(-1).unwrap(), Priority::new(2).unwrap());
    let newer = |key: &str, order: i64| work_with(key, &format!("{key} {order}"), policy_of(1)).order(order);
    for (n, key) in ["own", "of an earlier version", "half of an earlier version"].into_iter().enumerate() {
        let first = newer(key, 1).policy(policy_of(7)).priority(low);
        assert_eq!(enqueue(&ledger, first).await.word(), "enqueued");
        let lease = take(&ledger, want(9)).await.remove(0);
        let Enqueued::Known(Claim::InFlight(there)) =
            enqueue(&ledger, newer(key, 2).delay(secs(60)).priority(high)).await
        else {
            panic!("{key}")
        };
        assert!(there.kept);
        assert_eq!((there.operation.priority, &there.operation.terms), (low, &Some(policy_of(7))), "{key}");
        match n {
            0 => {}
            1 => drop(lab.execute("UPDATE semel_successors SET terms = NULL").await.unwrap()),
            // An earlier version replaces the data, and leaves the terms.
            _ => drop(lab.execute("UPDATE semel_successors SET payload_order = 3").await.unwrap()),
        }
        let from = row(&ledger, key).await.successor.unwrap().not_before;
        assert_eq!(from.is_some(), n == 0, "{key}");
        assert_eq!(lease.complete(done("1")).await.unwrap(), Settled::Yes { successor: true });
        let promoted = row(&ledger, key).await;
        let expected = if n == 0 { (high, Some(policy_of(1))) } else { (low, Some(policy_of(7))) };
        assert_eq!((promoted.priority, promoted.terms.clone()), expected, "{key}");
        assert_eq!(promoted.not_before, from, "{key}");
        if n == 0 {
            assert_eq!(taken(&ledger, 9).await, [""; 0], "not before its time");
            lab.pass(secs(60));
        }
        let lease = take(&ledger, want(9)).await.remove(0);
        assert_eq!(Some(lease.operation().lease.clone().unwrap().terms), expected.1, "{key}");
        assert_eq!(lease.complete(done("2")).await.unwrap(), SETTLED);
    }
    // Its priority counts in the queue, not that of the older data.
    assert_eq!(enqueue(&ledger, newer("urgent", 1).priority(low)).await.word(), "enqueued");
    let lease = take(&ledger, want(9)).await.remove(0);
    assert_eq!(enqueue(&ledger, newer("urgent", 2).priority(high)).await.word(), "in_flight");
    assert_eq!(enqueue(&ledger, plain("ordinary")).await.word(), "enqueued");
    assert_eq!(lease.complete(done("1")).await.unwrap(), Settled::Yes { successor: true });
    assert_eq!(taken(&ledger, 1).await, ["urgent"]);
    assert_eq!(taken(&ledger, 9).await, ["ordinary"]);
}

/// The policy of an enqueue applies to every run, not the worker's; without one, the worker's applies.
pub async fn the_policy_of_an_enqueue_is_kept_until_it_settles(lab: Lab) {
    let ledger = lab.ledger().await;
    let own = Policy { max_attempts: Some(1), lease: secs(7), on_lost: OnLost::Hold, ..policy() };
    enqueue(&ledger, work("own", own.clone())).await;
    enqueue(&ledger, plain("worker's")).await;
    for lease in take(&ledger, want(9)).await {
        let (text, terms) = (lease.operation().key.as_str().to_owned(), lease.operation().lease.clone().unwrap().terms);
        assert_eq!(terms, if text == "own" { own.clone() } else { policy() }, "{text}");
        assert_eq!(lease.fail(failure("no")).await.unwrap(), SETTLED);
    }
    lab.pass(secs(60));
    assert_eq!(taken(&ledger, 9).await, ["worker's"], "one attempt was all that the other had");
    assert_eq!(ask(&ledger, work("own", policy())).await, "exhausted", "also for a claim of its key");
}

/// A worker has no probe, so an enqueue under `probe` is refused. For a claim it is allowed.
pub async fn an_enqueue_under_probe_is_refused(lab: Lab) {
    let ledger = lab.ledger().await;
    let probe = Policy { on_lost: OnLost::Probe, ..policy() };
    let refused = ledger.enqueue(work("k", probe.clone())).await;
    assert!(matches!(&refused, Err(Error::Invalid(why)) if why.contains("probe")), "{refused:?}");
    assert!(find(&ledger, "k").await.is_none(), "nothing is stored");
    assert_eq!(ask(&ledger, work("k", probe)).await, "acquired");
}

/// An operation out of attempts by the worker's policy is not taken, and no longer due.
pub async fn an_operation_that_a_worker_finds_exhausted_is_no_longer_due(lab: Lab) {
    let ledger = lab.ledger().await;
    enqueue(&ledger, plain("k")).await;
    let lease = take(&ledger, want(1)).await.remove(0);
    assert_eq!(lease.fail(failure("no")).await.unwrap(), SETTLED);
    lab.pass(secs(60));
    let strict = Want { policy: Policy { max_attempts: Some(1), ..policy() }, ..want(1) };
    assert_eq!(take(&ledger, strict).await.len(), 0);
    assert_eq!(ledger.due_kinds("bank", ("", "")).await.unwrap(), [], "it would be found again for ever");
}

/// An enqueue without a policy does not know how often the worker tries. It is answered by what the worker has decided.
pub async fn an_enqueue_is_exhausted_when_the_worker_has_given_up(lab: Lab) {
    let ledger = lab.ledger().await;
    let bare = |text: &str| Work::new(scope(), key(text), semel::Fingerprint::of_bytes(text.as_bytes()));
    for text in ["failed", "found exhausted"] {
        assert_eq!(enqueue(&ledger, bare(text)).await.word(), "enqueued");
        let lease = take(&ledger, want(1)).await.remove(0);
        assert_eq!(lease.fail(failure("no")).await.unwrap(), SETTLED);
        assert_eq!(enqueue(&ledger, bare(text)).await.word(), "not_yet", "{text}: the worker tries it again");
        lab.pass(secs(60));
        let strict = Want { policy: Policy { max_attempts: Some(1), ..policy() }, ..want(1) };
        match text {
            "failed" => {
                let lease = take(&ledger, want(1)).await.remove(0);
                assert_eq!(lease.fail(failure("no")).await.unwrap(), SETTLED);
            }
            _ => assert_eq!(take(&ledger, strict).await.len(), 0),
        }
        assert!(row(&ledger, text).await.never_due, "{text}");
        assert_eq!(enqueue(&ledger, bare(text)).await.word(), "exhausted", "{text}");
        assert_eq!(enqueue(&ledger, work(text, Policy { max_attempts: None, ..policy() })).await.word(), "exhausted");
        let retry = Decision::Resolve { verdict: semel::Verdict::Retry, expected: None };
        let id = row(&ledger, text).await.id;
        assert_eq!(decide(&ledger, id, retry).await.answer, Answer::Resolved);
        assert_eq!(enqueue(&ledger, bare(text)).await.word(), "waiting", "{text}: until a person decides");
        let lease = take(&ledger, want(1)).await.remove(0);
        assert_eq!(lease.complete(done("")).await.unwrap(), SETTLED);
    }
}

/// A retry from the queue is a takeover, and noted as one.
pub async fn a_retry_from_the_queue_is_part_of_the_story(lab: Lab) {
    let ledger = lab.ledger().await;
    enqueue(&ledger, plain("k")).await;
    let lease = take(&ledger, want(1)).await.remove(0);
    assert_eq!(lease.fail(failure("no")).await.unwrap(), SETTLED);
    lab.pass(secs(60));
    let lease = take(&ledger, want(1)).await.remove(0);
    assert_eq!((lease.operation().attempt(), lease.operation().error.as_deref()), (2, Some("no")));
    let id = lease.operation().id;
    assert_eq!(lease.complete(done("")).await.unwrap(), SETTLED);
    assert_eq!(story(&ledger, id).await, [Event::Failed, Event::TakenOver]);
}

/// A pending operation can be cancelled: it becomes failed, its key stays taken, and it never runs.
pub async fn a_pending_operation_can_be_cancelled(lab: Lab) {
    let ledger = lab.ledger().await;
    let Enqueued::New(op) = enqueue(&ledger, plain("k")).await else { panic!() };
    let cancelled = ledger.cancel(op.id, "ann", "not needed").await.unwrap();
    assert_eq!(cancelled.answer, Answer::Cancelled);
    let there = row(&ledger, "k").await;
    assert_eq!((there.state, there.parked, there.error.as_deref()), (State::Failed, true, Some("cancelled")));
    assert_eq!(taken(&ledger, 9).await, [""; 0]);
    assert_eq!(enqueue(&ledger, plain("k")).await.word(), "exhausted", "the key stays taken");
    assert_eq!(ledger.cancel(op.id, "ann", "again").await.unwrap().answer, Answer::Cancelled, "twice is once");
    assert_eq!(lab.texts("SELECT action FROM semel_audit ORDER BY id").await[0], "operations.cancel");
    let retry = Decision::Resolve { verdict: semel::Verdict::Retry, expected: None };
    assert_eq!(decide(&ledger, op.id, retry).await.answer, Answer::Resolved, "a person can let it run");
    let lease = take(&ledger, want(9)).await.remove(0);
    assert_eq!(lease.complete(done("")).await.unwrap(), SETTLED);
    let late = ledger.cancel(op.id, "ann", "too late").await.unwrap();
    assert_eq!(late.answer, Answer::NotNow(semel::machine::NotNow::Completed));
}

/// A cancel withdraws newer data that waits, whether the older runs or its lease has expired. Newer data that comes
/// later is new work.
pub async fn a_cancel_withdraws_newer_data_that_waits(lab: Lab) {
    let node = lab.ledger().await;
    let policy = Policy { on_mismatch: OnMismatch::SupersedeIfNewer, ..policy() };
    let version = |key: &str, n: i64| work_with(key, &n.to_string(), policy.clone()).payload(n.to_string()).order(n);
    for end in ["failed", "released", "completed", "lost", "lost before the cancel"] {
        enqueue(&node, version(end, 1)).await;
        let lease = take(&node, want(1)).await.remove(0);
        let id = lease.operation().id;
        assert_eq!(enqueue(&node, version(end, 2)).await.word(), "in_flight", "{end}");
        if end == "lost before the cancel" {
            lab.pass(policy.lease);
        }
        let expected = if end == "lost before the cancel" { Answer::Cancelled } else { Answer::CancelAsked };
        assert_eq!(node.cancel(id, "ann", "enough").await.unwrap().answer, expected, "{end}");
        assert_eq!(row(&node, end).await.successor, None, "{end}");
        match end {
            "failed" => assert_eq!(lease.fail(failure("no")).await.unwrap(), SETTLED),
            "released" => assert_eq!(lease.release(secs(1)).await.unwrap(), SETTLED),
            "completed" => assert_eq!(lease.complete(done("ok")).await.unwrap(), SETTLED),
            _ => drop(lease),
        }
        if end == "lost" {
            lab.pass(policy.lease);
            node.sweep().await.unwrap();
        }
        let state = if end == "completed" { State::Completed } else { State::Failed };
        assert_eq!(row(&node, end).await.state, state, "{end}");
        lab.pass(secs(60));
        assert!(taken(&node, 9).await.is_empty(), "{end}");
        assert_eq!(enqueue(&node, version(end, 3)).await.word(), "enqueued", "{end}");
        let lease = take(&node, want(9)).await.remove(0);
        assert_eq!(lease.operation().order, Some(3), "{end}");
        assert_eq!(lease.complete(done("3")).await.unwrap(), SETTLED, "{end}");
    }
}

/// A run that is cancelled gets a signal, and the policy decides what that means.
pub async fn a_run_can_be_cancelled(lab: Lab) {
    let lab = lab.with_real_clock();
    let (a, b) = (lab.ledger_of("a").await, lab.ledger_of("b").await);
    for (on_lost, state) in [(OnLost::Rerun, State::Failed), (OnLost::Hold, State::InDoubt)] {
        for (node, canceller) in [(&a, &a), (&a, &b)] {
            let text = format!("{on_lost:?} {}", std::ptr::eq(node, canceller));
            // Short, because another node is signalled with the next renewal.
            let policy = Policy { on_lost, lease: secs(3), ..policy() };
            let (begun, begins) = tokio::sync::oneshot::channel();
            let begun = std::sync::Mutex::new(Some(begun));
            let (node, asked) = (node.clone(), work(&text, policy));
            let handler = move |context: semel::Context<semel_store::Database>| {
                let begun = begun.lock().unwrap().take();
                async move {
                    let _ = begun.unwrap().send(context.operation().id);
                    std::future::pending::<Result<Outcome, _>>().await
                }
            };
            let run = tokio::spawn(async move { node.run(asked, handler).await });
            let id = soon(begins).await.unwrap();
            assert_eq!(canceller.cancel(id, "ann", "enough").await.unwrap().answer, Answer::CancelAsked);
            assert_eq!(soon(run).await.unwrap().unwrap().word(), "acquired");
            let there = row(&a, &text).await;
            assert_eq!((there.state, there.parked), (state, state == State::Failed), "{text}");
            let doubt = canceller.cancel(id, "ann", "again").await.unwrap().answer;
            assert_eq!(doubt == Answer::Cancelled, state == State::Failed, "{doubt:?}");
        }
    }
}

/// A run may end before it gets the signal that it was cancelled. It does not run again, unless it took effect.
pub async fn a_cancelled_run_that_fails_or_is_released_does_not_run_again(lab: Lab) {
    let node = lab.ledger().await;
    for (on_lost, text) in [(OnLost::Rerun, "rerun"), (OnLost::Hold, "hold")] {
        for end in ["failed", "released", "completed"] {
            let name = format!("{text} {end}");
            enqueue(&node, work(&name, Policy { on_lost, ..policy() }).payload("x")).await;
            let lease = take(&node, want(1)).await.remove(0);
            let id = lease.operation().id;
            assert_eq!(node.cancel(id, "ann", "enough").await.unwrap().answer, Answer::CancelAsked);
            let settled = match end {
                "failed" => lease.fail(failure("no")).await,
                "released" => lease.release(secs(1)).await,
                _ => lease.complete(done("ok")).await,
            };
            assert_eq!(settled.unwrap(), SETTLED, "{name}");
            let there = row(&node, &name).await;
            let (state, error) = match end {
                "completed" => (State::Completed, None),
                _ => (State::Failed, Some("cancelled")),
            };
            assert_eq!((there.state, there.error.as_deref()), (state, error), "{name}");
            assert_eq!(there.parked, state == State::Failed, "{name}");
        }
    }
    lab.pass(secs(3600));
    assert!(taken(&node, 9).await.is_empty());
}

/// Neither a delay nor the wait in a queue counts as time in which an operation was tried. Newer data, and a person's
/// decision, begin anew.
pub async fn an_operation_is_tried_since_its_first_claim(lab: Lab) {
    let node = lab.ledger().await;
    // Without its own policy it is taken by another statement, on PostgreSQL.
    enqueue(&node, plain("plain").delay(secs(3600))).await;
    lab.pass(secs(7200));
    let lease = take(&node, want(1)).await.remove(0);
    assert_eq!((lease.operation().tried_for(), lease.operation()), (secs(0), &row(&node, "plain").await));
    assert_eq!(lease.complete(done("")).await.unwrap(), SETTLED);

    let policy = Policy { on_mismatch: OnMismatch::SupersedeIfNewer, ..policy() };
    let version = |n: i64| work_with("k", &n.to_string(), policy.clone()).payload("x").order(n);
    enqueue(&node, version(1).delay(secs(3600))).await;
    lab.pass(secs(7200));
    let tried = async || {
        let lease = take(&node, want(1)).await.remove(0);
        let tried = lease.operation().tried_for();
        assert_eq!(row(&node, "k").await.tried_for(), tried);
        assert_eq!(lease.release(secs(10)).await.unwrap(), SETTLED);
        lab.pass(secs(10));
        tried.as_secs()
    };
    assert_eq!((tried().await, tried().await, tried().await), (0, 10, 20));
    enqueue(&node, version(2)).await;
    assert_eq!((tried().await, tried().await), (0, 10));
    let id = row(&node, "k").await.id;
    let retry = Decision::Resolve { verdict: semel::machine::Verdict::Retry, expected: None };
    decide(&node, id, retry).await;
    assert_eq!((tried().await, tried().await), (0, 10));
    let lease = acquire(&node, work("direct", policy.clone()).payload("x")).await;
    assert_eq!((lease.operation().tried_since, lease.operation().tried_for()), (None, secs(0)));
    assert_eq!(lease.release(secs(10)).await.unwrap(), SETTLED);
    lab.pass(secs(30));
    let again = acquire(&node, work("direct", policy.clone()).payload("x")).await;
    assert_eq!(again.operation().tried_for(), secs(30));
}

/// A retry may be due after more time than a failed operation is kept: then it is kept beyond the retry.
pub async fn a_failed_operation_does_not_expire_before_its_retry(lab: Lab) {
    let node = lab.ledger().await;
    let policy = Policy { retention: Some(secs(60)), ..policy() };
    enqueue(&node, work("k", policy).payload("x")).await;
    let lease = take(&node, want(1)).await.remove(0);
    let later = semel::Failure { error: "no".into(), retry: semel::Retry::After(secs(3600)) };
    assert_eq!(lease.fail(later).await.unwrap(), SETTLED);
    lab.pass(secs(3600));
    let _ = node.sweep().await.unwrap();
    assert_eq!(taken(&node, 1).await, ["k"]);
}

/// A run that makes progress each time is not parked, even if its node dies twenty times.
pub async fn progress_forgives_crashes(lab: Lab) {
    let ledger = lab.ledger().await;
    let policy = Policy { max_crashes: 3, backoff: Backoff::NONE, ..policy() };
    let work = || work("k", policy.clone());
    for n in 0..20_u8 {
        let lease = acquire(&ledger, work()).await;
        assert_eq!(lease.operation().checkpoint.as_deref(), n.checked_sub(1).as_ref().map(std::slice::from_ref));
        let request = semel::store::LeaseWrite {
            id: lease.operation().id,
            fence: lease.fence(),
            write: semel::machine::Write::Progress(vec![n].into()),
        };
        ledger.store().write(vec![request]).await.unwrap();
        lab.pass(policy.lease);
        ledger.sweep().await.unwrap();
    }
    for _ in 0..2 {
        drop(acquire(&ledger, work()).await);
        lab.pass(policy.lease);
        ledger.sweep().await.unwrap();
    }
    assert_eq!(ask(&ledger, work()).await, "exhausted", "without progress it is");
}

/// A paused kind is not taken until it is resumed. A second pause changes nothing, and is told who paused it.
pub async fn a_paused_kind_is_not_taken(lab: Lab) {
    let ledger = lab.ledger().await;
    enqueue(&ledger, plain("k")).await;
    let pause = async |actor, reason| ledger.store().pause_kind("bank", "transfer", actor, reason).await.unwrap();
    assert_eq!(pause("ann", "the bank is closed").await, None);
    lab.pass(secs(10));
    let earlier = pause("bob", "who knows").await.unwrap();
    assert_eq!((earlier.at, &*earlier.actor, &*earlier.reason), (Lab::START, "ann", "the bank is closed"));
    assert_eq!(ledger.store().pause_of("bank", "transfer").await.unwrap(), Some(earlier));
    ledger.store().pause_kind("bank", "loans", "ann", "another kind").await.unwrap();
    assert_eq!(taken(&ledger, 9).await, [""; 0]);
    ledger.store().resume_kind("bank", "transfer", "ann", "it is open").await.unwrap();
    assert_eq!(taken(&ledger, 9).await, ["k"]);
    let audit = lab.texts("SELECT action || ' ' || subject FROM semel_audit ORDER BY id").await;
    assert_eq!(audit, ["work.pause bank/transfer", "work.pause bank/loans", "work.resume bank/transfer"]);
}

/// The nodes of a fleet share the limits of a kind.
pub async fn the_limits_of_a_kind_are_shared_by_the_fleet(lab: Lab) {
    let (a, b) = (lab.ledger_of("a").await, lab.ledger_of("b").await);
    for n in 0..30 {
        enqueue(&a, plain(&n.to_string())).await;
    }
    let few = || Want { limits: Limits { at_once: Some(3), every: None }, ..want(2) };
    // Two tenants in one take share them, too.
    let other = semel::Scope::new("other", scope().service(), scope().kind()).unwrap();
    let mine = Work::new(other.clone(), crate::key("0"), semel::Fingerprint::of_bytes(b"0")).payload("x");
    enqueue(&a, mine.policy_of_worker(policy())).await;
    let two = || Want { limits: Limits { at_once: Some(2), every: None }, ..want(2) };
    let leases = soon(a.take(vec![two(), Want { scope: other, ..two() }])).await.unwrap();
    assert_eq!(leases.len(), 2);
    for (_, lease) in leases {
        assert_eq!(lease.complete(done("")).await.unwrap(), SETTLED);
    }
    let mut held = take(&a, few()).await;
    held.extend(take(&b, few()).await);
    assert_eq!((held.len(), take(&a, few()).await.len()), (3, 0));
    assert_eq!(held.pop().unwrap().complete(done("")).await.unwrap(), SETTLED);
    assert_eq!(take(&b, few()).await.len(), 1);
    let slow = || Want { limits: Limits { at_once: None, every: Some(secs(10)) }, ..want(9) };
    assert_eq!((take(&a, slow()).await.len(), take(&b, slow()).await.len()), (1, 0));
    lab.pass(secs(10));
    assert_eq!((take(&b, slow()).await.len(), take(&a, slow()).await.len()), (1, 0));
    lab.pass(secs(100));
    assert_eq!(take(&a, slow()).await.len(), 1, "missed starts are not saved up");
    let fast = || Want { limits: Limits { at_once: None, every: Some(secs(1)) }, ..want(9) };
    assert_eq!(take(&a, fast()).await.len(), 1, "a raised rate applies at once, and so does a clock that was set back");
    assert_eq!(take(&b, fast()).await.len(), 0);
    // The limit allows one of nine: every tenth start is the longest due one, not each.
    lab.pass(secs(1));
    let urgent = plain("urgent").priority(Priority::new(2).unwrap());
    enqueue(&a, urgent).await;
    let next = take(&a, Want { since: Some(5), ..fast() }).await;
    assert_eq!(next[0].operation().key.as_str(), "urgent");
}
