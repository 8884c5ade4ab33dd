//! Lost leases: rerun, hold and probe; crash loops; decisions of a person.

use std::sync::{
    Arc,
    atomic::{AtomicU32, Ordering},
};

use semel::{
    Backoff, Claim, Finding, Ledger, OnLost, Outcome, Policy, Ran, State, Verdict,
    journal::Event,
    machine::{Answer, NotNow},
    prelude::*,
    store::Decision,
};
use semel_store::Database;
use tokio::sync::Barrier;

use super::tools::*;
use crate::{Lab, work};

fn policy(on_lost: OnLost) -> Policy {
    Policy { on_lost, backoff: Backoff::NONE, ..Policy::default() }
}

fn resolve(verdict: Verdict) -> Decision {
    Decision::Resolve { verdict, expected: None }
}

/// Loses the lease of a new operation.
async fn lose(lab: &Lab, node: &Node, text: &str, on_lost: OnLost) -> i64 {
    let lease = acquire(node, work(text, policy(on_lost))).await;
    lab.pass(policy(on_lost).lease);
    lease.operation().id
}

/// Under rerun the next claim takes over at once, and the journal has it.
pub async fn a_lost_lease_is_taken_over_under_rerun(lab: Lab) {
    let (a, b) = (lab.ledger_of("a").await, lab.ledger_of("b").await);
    let id = lose(&lab, &a, "k", OnLost::Rerun).await;
    let lease = acquire(&b, work("k", Policy::default())).await;
    let op = lease.operation();
    assert_eq!((op.id, op.attempt(), op.crashes, op.failures, op.owner.as_str()), (id, 2, 1, 0, "b"));
    let got = notes(&a, id).await;
    assert_eq!(got.iter().map(|note| note.event).collect::<Vec<_>>(), [Event::TimedOut, Event::TakenOver]);
    assert!(got[0].detail.contains("the lease of a"), "{}", got[0].detail);
    assert_eq!(got[1].actor, "b");
}

/// Under hold and probe an operation with a lost lease is in doubt for every claim, under any policy, and for ever:
/// the terms are those of the claim that got the lease.
pub async fn a_lost_lease_is_in_doubt_under_hold_and_probe(lab: Lab) {
    let ledger = lab.ledger().await;
    for on_lost in [OnLost::Hold, OnLost::Probe] {
        let text = format!("{on_lost:?}");
        let id = lose(&lab, &ledger, &text, on_lost).await;
        for _ in 0..3 {
            assert_eq!(ask(&ledger, work(&text, policy(OnLost::Rerun))).await, "in_doubt");
            lab.pass(secs(10 * 365 * 24 * 3600));
            ledger.sweep().await.unwrap();
        }
        let op = row(&ledger, &text).await;
        assert_eq!((op.id, op.state, op.expires_at), (id, State::InDoubt, None));
        assert_eq!(story(&ledger, id).await, [Event::Doubted]);
    }
}

/// Runs with a probe that finds this; returns the answer, and how often the handler ran.
async fn probed(node: &Ledger<Database>, text: &str, finding: Finding) -> (Claim<Ran>, u32) {
    let runs = Arc::new(AtomicU32::new(0));
    let count = runs.clone();
    let handler = move |_| {
        count.fetch_add(1, Ordering::SeqCst);
        async { Ok(done("run again")) }
    };
    let probe = move |_| std::future::ready(finding.clone());
    let claim = soon(node.run_with_probe(work(text, policy(OnLost::Probe)), handler, probe)).await.unwrap();
    (claim, runs.load(Ordering::SeqCst))
}

/// A probe that finds the effect stores its outcome; one that finds none lets it run; one that cannot decide leaves it
/// in doubt.
pub async fn the_finding_of_a_probe_resolves_a_doubt(lab: Lab) {
    let ledger = lab.ledger().await;
    for text in ["found", "none", "unknown"] {
        lose(&lab, &ledger, text, OnLost::Probe).await;
    }
    let (claim, runs) = probed(&ledger, "found", Finding::TookEffect(done("it was"))).await;
    assert!(matches!(claim, Claim::Replay(replay) if replay.outcome == done("it was")));
    assert_eq!(runs, 0);
    let (claim, runs) = probed(&ledger, "none", Finding::DidNot).await;
    assert!(matches!(claim, Claim::Acquired(Ran::Completed(outcome)) if outcome == done("run again")));
    assert_eq!(runs, 1);
    let (claim, runs) = probed(&ledger, "unknown", Finding::Unknown).await;
    assert_eq!((claim.word(), runs), ("in_doubt", 0));
    // Without a doubt, the probe is not called.
    let handler = |_| async { Ok(done("first")) };
    let claim =
        ledger.run_with_probe(work("new", policy(OnLost::Probe)), handler, |_| async { panic!("it was asked") });
    assert_eq!(soon(claim).await.unwrap().word(), "acquired");
    let got = notes(&ledger, row(&ledger, "found").await.id).await.pop().unwrap();
    assert_eq!((got.event, got.actor.as_str()), (Event::Resolved, "probe"));
}

/// Of two concurrent probes one decides, and both callers get that result.
pub async fn of_two_concurrent_probes_one_decides(lab: Lab) {
    let nodes = [lab.ledger().await, lab.ledger().await];
    for round in 0..5 {
        let text = format!("k{round}");
        let id = lose(&lab, &nodes[0], &text, OnLost::Probe).await;
        let both = Arc::new(Barrier::new(2));
        let mut probes = tokio::task::JoinSet::new();
        for (n, node) in nodes.iter().enumerate() {
            let (node, both, work) = (node.clone(), both.clone(), work(&text, policy(OnLost::Probe)));
            probes.spawn(async move {
                let probe = move |_| {
                    let both = both.clone();
                    async move {
                        both.wait().await;
                        Finding::TookEffect(Outcome::kept(format!("found by {n}")))
                    }
                };
                node.run_with_probe(work, |_| async { panic!("it ran") }, probe).await.unwrap()
            });
        }
        let stored = |op: semel::Operation| op.outcome.unwrap();
        let answers = soon(probes.join_all()).await;
        let outcome = stored(row(&nodes[0], &text).await);
        for claim in answers {
            assert!(matches!(&claim, Claim::Replay(replay) if replay.outcome == outcome), "{}", claim.word());
        }
        let resolved = story(&nodes[0], id).await.into_iter().filter(|event| *event == Event::Resolved);
        assert_eq!(resolved.count(), 1);
    }
}

/// The finding of a probe about one run does not apply to a later run.
pub async fn a_finding_about_an_older_run_is_dropped(lab: Lab) {
    let ledger = lab.ledger().await;
    for state in [State::Processing, State::InDoubt] {
        let text = state.as_str();
        let id = lose(&lab, &ledger, text, OnLost::Probe).await;
        let other = ledger.clone();
        let probe = move |_| {
            let ledger = other.clone();
            async move {
                // While the probe runs, a person lets the operation run again, and it does; or that run is lost, too.
                assert_eq!(decide(&ledger, id, resolve(Verdict::Retry)).await.answer, Answer::Resolved);
                let lease = acquire(&ledger, work(text, policy(OnLost::Probe))).await;
                if state == State::InDoubt {
                    assert_eq!(lease.doubt("once more").await.unwrap(), SETTLED);
                }
                Finding::TookEffect(done("of the older run"))
            }
        };
        let claim = ledger.run_with_probe(work(text, policy(OnLost::Probe)), |_| async { panic!("it ran") }, probe);
        let word = if state == State::InDoubt { "in_doubt" } else { "in_flight" };
        assert_eq!(soon(claim).await.unwrap().word(), word);
        assert_eq!(row(&ledger, text).await.state, state);
    }
}

/// An operation that kills its process again and again backs off, then is parked, until a person lets it run again.
pub async fn a_crash_loop_is_slowed_down_and_parked(lab: Lab) {
    let ledger = lab.ledger().await;
    let backoff = Backoff { first: secs(10), cap: secs(1000) };
    let policy = Policy { max_crashes: 3, backoff, max_attempts: Some(1), ..Policy::default() };
    let mut id = 0;
    for crash in 0..3_u32 {
        let lease = acquire(&ledger, work("k", policy.clone())).await;
        id = lease.operation().id;
        assert_eq!((lease.operation().crashes, lease.operation().attempt()), (crash, crash + 1));
        lab.pass(policy.lease);
        ledger.sweep().await.unwrap();
        let op = row(&ledger, "k").await;
        assert_eq!((op.state, op.crashes, op.failures), (State::TimedOut, crash + 1, 0));
        if crash == 1 {
            assert_eq!(ask(&ledger, work("k", policy.clone())).await, "not_yet");
        }
        lab.pass(secs(20));
    }
    assert!(row(&ledger, "k").await.parked);
    for _ in 0..2 {
        assert_eq!(ask(&ledger, work("k", policy.clone())).await, "exhausted");
        lab.pass(secs(3600));
    }
    assert_eq!(decide(&ledger, id, resolve(Verdict::Retry)).await.answer, Answer::Resolved);
    assert_eq!(acquire(&ledger, work("k", policy)).await.operation().attempt(), 1, "its counts start again");
}

/// A person can resolve an operation that is in doubt, failed or timed out: completed, failed, or retry.
pub async fn a_person_resolves_operations_that_do_not_run(lab: Lab) {
    let ledger = lab.ledger().await;
    let lost = [("held", OnLost::Hold), ("timed out", OnLost::Rerun)];
    let verdicts = [("yes", Verdict::Completed(done("by hand"))), ("no", Verdict::Failed), ("again", Verdict::Retry)];
    for (how, on_lost) in lost {
        for (said, verdict) in verdicts.clone() {
            let text = format!("{how} {said}");
            let id = lose(&lab, &ledger, &text, on_lost).await;
            let applied = decide(&ledger, id, resolve(verdict)).await;
            assert_eq!(applied.answer, Answer::Resolved);
            let got = notes(&ledger, id).await.pop().unwrap();
            assert_eq!((got.event, got.actor.as_str()), (Event::Resolved, "ann"));
            assert!(got.detail.ends_with(": because"), "{}", got.detail);
            let word = match said {
                "yes" => "replay",
                "no" => "exhausted",
                _ => "acquired",
            };
            assert_eq!(ask(&ledger, work(&text, policy(on_lost))).await, word, "{text}");
            if said == "again" {
                continue;
            }
            // An operation that was in doubt is kept until a person purges it. The others have their retention, from
            // the decision on.
            lab.pass(Policy::default().retention.unwrap() * 100);
            ledger.sweep().await.unwrap();
            let word = if on_lost.doubts() { word } else { "acquired" };
            assert_eq!(ask(&ledger, work(&text, policy(on_lost))).await, word, "{text}, later");
        }
    }
    assert_eq!(row(&ledger, "held yes").await.outcome, Some(done("by hand")));
}

/// A decision that does not fit the state is refused with the reason: a live lease and a completed operation are not
/// decided.
pub async fn a_decision_that_does_not_fit_is_not_carried_out(lab: Lab) {
    let ledger = lab.ledger().await;
    let completed = acquire(&ledger, work("completed", Policy::default())).await;
    let completed_id = completed.operation().id;
    assert_eq!(completed.complete(done("")).await.unwrap(), SETTLED);
    let running = acquire(&ledger, work("running", Policy::default())).await;
    let running_id = running.operation().id;
    let before = [row(&ledger, "completed").await, row(&ledger, "running").await];
    for verdict in [Verdict::Completed(done("no")), Verdict::Failed, Verdict::Retry] {
        for (id, why) in [(completed_id, NotNow::Completed), (running_id, NotNow::Running), (-1, NotNow::Absent)] {
            assert_eq!(decide(&ledger, id, resolve(verdict.clone())).await.answer, Answer::NotNow(why));
        }
    }
    assert_eq!(decide(&ledger, running_id, Decision::Purge).await.answer, Answer::NotNow(NotNow::Running));
    assert_eq!(decide(&ledger, -1, Decision::Purge).await.answer, Answer::NotNow(NotNow::Absent));
    assert_eq!([row(&ledger, "completed").await, row(&ledger, "running").await], before);
    let doubted = lose(&lab, &ledger, "doubted", OnLost::Hold).await;
    let expected = Some(ledger.store().by_id("acme", doubted).await.unwrap().unwrap().fence);
    assert_eq!(ask(&ledger, work("doubted", policy(OnLost::Hold))).await, "in_doubt");
    let moved_on = decide(&ledger, doubted, Decision::Resolve { verdict: Verdict::Failed, expected }).await;
    assert_eq!(moved_on.answer, Answer::NotNow(NotNow::MovedOn), "the lease expiry gave it another fence");
    // A purge is allowed except under a live lease.
    assert_eq!(decide(&ledger, completed_id, Decision::Purge).await.answer, Answer::Purged);
    assert_eq!(ask(&ledger, work("completed", Policy::default())).await, "acquired");
}

/// The audit has a person's decisions, with the state before and after, also of purged operations. It has no refused
/// decision, and no finding of a probe.
pub async fn a_persons_decision_is_audited(lab: Lab) {
    let ledger = lab.ledger().await;
    for (text, decision) in [
        ("yes", resolve(Verdict::Completed(done("secret")))),
        ("no", resolve(Verdict::Failed)),
        ("again", resolve(Verdict::Retry)),
        ("gone", Decision::Purge),
    ] {
        let id = lose(&lab, &ledger, text, OnLost::Hold).await;
        soon(ledger.decide(id, decision.clone(), "ann\n", "because \0 é")).await.unwrap();
        if ["yes", "gone"].contains(&text) {
            assert!(matches!(decide(&ledger, id, decision).await.answer, Answer::NotNow(_)), "{text}");
        }
    }
    let found = Decision::Found { verdict: Verdict::Retry, expected: None };
    let id = lose(&lab, &ledger, "probed", OnLost::Hold).await;
    assert_eq!(decide(&ledger, id, found).await.answer, Answer::Resolved);

    let got = "SELECT tenant || ' ' || actor || ' ' || action || ' ' || reason FROM semel_audit ORDER BY id";
    let actions = ["complete", "fail", "retry", "purge"];
    assert_eq!(lab.texts(got).await, actions.map(|did| format!("acme ann  operations.{did} because \u{fffd} é")));
    let before = lab.texts("SELECT before FROM semel_audit ORDER BY id").await;
    for (before, text) in before.iter().zip(["yes", "no", "again", "gone"]) {
        assert!(before.contains(&format!("\"key\":\"{text}\"")) && before.contains("\"processing\""), "{before}");
    }
    let after = lab.texts("SELECT coalesce(after, 'nothing') FROM semel_audit ORDER BY id").await;
    for (after, state) in after.iter().zip(["completed", "failed", "pending", "nothing"]) {
        assert!(after.contains(state) && !after.contains("secret"), "{after}");
    }
    let when =
        "SELECT count(*) FROM semel_audit AS a JOIN semel_journal AS j ON j.at = a.at WHERE j.event = 'resolved'";
    assert_eq!(lab.number(when).await, 3, "at the moment of the note");
}
