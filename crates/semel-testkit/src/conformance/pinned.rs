//! Pinned operations: once completed they do not change, so a node may replay them from memory.

use std::time::Duration;

use semel::{
    Claim, Ledger, OnLost, OnMismatch, Options, Outcome, Policy, Ran, Verdict,
    journal::Repeat,
    machine::{Answer, NotNow},
    prelude::*,
    store::Decision,
};

use super::tools::*;
use crate::{Lab, work, work_with};

fn policy() -> Policy {
    Policy { pinned: true, ..Policy::default() }
}

async fn complete(node: &Node, text: &str, policy: Policy) -> i64 {
    let lease = acquire(node, work(text, policy)).await;
    let id = lease.operation().id;
    assert_eq!(lease.complete(done("done")).await.unwrap(), SETTLED);
    id
}

/// Renames the table, so that statements on it fail; or renames it back.
async fn take_table(lab: &Lab, away: bool) {
    let (from, to) = if away { ("semel_operations", "taken") } else { ("taken", "semel_operations") };
    lab.execute(&format!("ALTER TABLE {from} RENAME TO {to}")).await.unwrap();
}

/// No purge, verdict or newer data changes a pinned and completed operation, on any node; after its retention its key
/// is free.
pub async fn a_pinned_operation_does_not_change_until_its_retention_ends(lab: Lab) {
    let (a, b) = (lab.ledger().await, lab.ledger().await);
    let lease = acquire(&a, work("k", policy()).order(1)).await;
    let id = lease.operation().id;
    assert_eq!(lease.complete(done("done")).await.unwrap(), SETTLED);
    let before = row(&a, "k").await;
    assert!(before.pinned);
    let verdicts = [Verdict::Retry, Verdict::Failed, Verdict::Completed(Outcome::kept("no, this"))];
    let resolve = |verdict| Decision::Resolve { verdict, expected: None };
    for decision in verdicts.map(resolve).into_iter().chain([Decision::Purge]) {
        assert_eq!(decide(&b, id, decision).await.answer, Answer::NotNow(NotNow::Pinned));
    }
    let newer = Policy { on_mismatch: OnMismatch::SupersedeIfNewer, ..Policy::default() };
    assert_eq!(ask(&b, work_with("k", "newer", newer).order(2)).await, "mismatch");
    assert_eq!(row(&b, "k").await, before);
    lab.pass(Policy::default().retention.unwrap());
    assert_eq!(decide(&b, id, Decision::Purge).await.answer, Answer::Purged);
    assert_eq!(ask(&b, work("k", policy())).await, "acquired");
}

/// A pinned operation that has not completed is decided like any other, and a person's verdict can be revised.
pub async fn only_a_completion_is_pinned(lab: Lab) {
    let ledger = lab.ledger().await;
    let lease = acquire(&ledger, work("failed", policy())).await;
    let id = lease.operation().id;
    assert_eq!(lease.fail(failure("no")).await.unwrap(), SETTLED);
    assert_eq!(decide(&ledger, id, Decision::Purge).await.answer, Answer::Purged);
    let lease = acquire(&ledger, work("doubted", Policy { on_lost: OnLost::Hold, ..policy() })).await;
    let id = lease.operation().id;
    assert_eq!(lease.doubt("who knows").await.unwrap(), SETTLED);
    let verdict = Verdict::Completed(done("by hand"));
    let resolved = decide(&ledger, id, Decision::Resolve { verdict, expected: None }).await;
    assert_eq!(resolved.answer, Answer::Resolved);
    for _ in 0..2 {
        assert_eq!(ask(&ledger, work("doubted", policy())).await, "replay");
    }
    assert_eq!(decide(&lab.ledger().await, id, Decision::Purge).await.answer, Answer::Purged);
    assert_eq!(ask(&ledger, work("doubted", policy())).await, "acquired");
}

/// The policy of the last claim applies.
pub async fn the_policy_of_the_last_claim_decides_whether_it_is_pinned(lab: Lab) {
    let ledger = lab.ledger().await;
    for last in [true, false] {
        let text = format!("last: {last}");
        let lease = acquire(&ledger, work(&text, Policy { pinned: !last, ..Policy::default() })).await;
        assert_eq!(lease.release(secs(1)).await.unwrap(), SETTLED);
        lab.pass(secs(1));
        let id = complete(&ledger, &text, Policy { pinned: last, ..Policy::default() }).await;
        assert_eq!(row(&ledger, &text).await.pinned, last);
        let purge = if last { Answer::NotNow(NotNow::Pinned) } else { Answer::Purged };
        assert_eq!(decide(&ledger, id, Decision::Purge).await.answer, purge);
    }
}

/// A node that has replayed it once needs no database to do so again, and counts the replay.
pub async fn a_pinned_outcome_is_replayed_without_the_database(lab: Lab) {
    let (a, b) = (lab.ledger().await, lab.ledger().await);
    let id = complete(&b, "k", policy()).await;
    let Claim::Replay(first) = a.claim(work("k", policy())).await.unwrap() else { panic!() };
    take_table(&lab, true).await;
    for _ in 0..3 {
        let Claim::Replay(again) = soon(a.claim(work("k", policy()))).await.unwrap() else { panic!() };
        assert_eq!((again.outcome, again.mismatch), (done("done"), false));
        assert_eq!(again.operation, first.operation);
    }
    let waited = soon(a.claim_or_wait(work("k", policy()), secs(1))).await.unwrap();
    assert_eq!(waited.word(), "replay");
    take_table(&lab, false).await;
    a.flush().await;
    let (_, repeats) = a.store().journal(id).await.unwrap();
    let counts: Vec<_> = repeats.iter().map(|(repeat, repeats)| (*repeat, repeats.count)).collect();
    assert_eq!(counts, [(Repeat::Duplicate, 5)]);
}

/// The node that completed it needs no database for its first replay, and caches the row as stored, however it was
/// completed.
pub async fn the_node_that_completed_it_replays_it_without_the_database(lab: Lab) {
    let ledger = lab.ledger().await;
    complete(&ledger, "leased", policy()).await;
    let ran = ledger.run_atomic(work("atomic", policy()), |_, _| async { Ok(done("done")) }).await.unwrap();
    assert!(matches!(ran, Claim::Acquired(Ran::Completed(_))));
    let rows = [row(&ledger, "leased").await, row(&ledger, "atomic").await];
    take_table(&lab, true).await;
    for stored in rows {
        let Claim::Replay(replay) = soon(ledger.claim(work(stored.key.as_str(), policy()))).await.unwrap() else {
            panic!()
        };
        assert_eq!(*replay.operation, stored);
    }
    take_table(&lab, false).await;
}

/// Another payload gets from memory the answer that it would get from the row, by its own policy.
pub async fn another_payload_is_refused_without_the_database(lab: Lab) {
    let ledger = lab.ledger().await;
    complete(&ledger, "k", policy()).await;
    assert_eq!(ask(&ledger, work("k", policy())).await, "replay");
    take_table(&lab, true).await;
    assert_eq!(ask(&ledger, work_with("k", "other", policy())).await, "mismatch");
    let lenient = Policy { on_mismatch: OnMismatch::Replay, ..policy() };
    let Claim::Replay(replay) = soon(ledger.claim(work_with("k", "other", lenient))).await.unwrap() else { panic!() };
    assert!(replay.mismatch);
    take_table(&lab, false).await;
}

/// A key that can be freed is always read from the database, under any policy of the claim.
pub async fn an_unpinned_operation_is_never_replayed_from_memory(lab: Lab) {
    let (a, b) = (lab.ledger().await, lab.ledger().await);
    for (text, asking) in [("plain", Policy::default()), ("asked for as pinned", policy())] {
        let id = complete(&a, text, Policy::default()).await;
        for node in [&a, &b] {
            assert_eq!(ask(node, work(text, asking.clone())).await, "replay");
        }
        assert_eq!(decide(&b, id, Decision::Purge).await.answer, Answer::Purged);
        assert_eq!(ask(&a, work(text, asking.clone())).await, "acquired", "{text}");
    }
    // A claim without `pinned` is not answered from memory.
    complete(&a, "pinned", policy()).await;
    assert_eq!(ask(&a, work("pinned", policy())).await, "replay");
    lab.execute("DELETE FROM semel_operations").await.unwrap();
    assert_eq!(ask(&a, work("pinned", Policy::default())).await, "acquired");
}

/// The cache ends before the retention does, and before the data is archived. It uses the node's own clock, which no
/// test can move.
pub async fn a_pinned_outcome_is_forgotten_with_its_retention(lab: Lab) {
    let ledger = lab.ledger().await;
    let short = Duration::from_millis(300);
    let expiring = Policy { retention: Some(short), ..policy() };
    let archived = Policy { tombstone: Some(short), ..policy() };
    for (text, policy) in [("expiring", &expiring), ("archived", &archived)] {
        complete(&ledger, text, policy.clone()).await;
        assert_eq!(ask(&ledger, work(text, policy.clone())).await, "replay");
    }
    lab.pass(short);
    ledger.sweep().await.unwrap();
    tokio::time::sleep(short).await;
    assert_eq!(ask(&ledger, work("expiring", expiring)).await, "acquired");
    for _ in 0..2 {
        let Claim::Replay(replay) = ledger.claim(work("archived", archived.clone())).await.unwrap() else { panic!() };
        assert!(!replay.outcome.kept);
    }
}

/// Without a cache, nothing is remembered.
pub async fn a_ledger_without_memory_asks_each_time(lab: Lab) {
    let options = Options { replay_cache_bytes: 0, ..Options::default() };
    let ledger = Ledger::new(lab.open().await, options).unwrap();
    complete(&ledger, "k", policy()).await;
    assert_eq!(ask(&ledger, work("k", policy())).await, "replay");
    lab.execute("DELETE FROM semel_operations").await.unwrap();
    assert_eq!(ask(&ledger, work("k", policy())).await, "acquired");
}
