//! The journal: the durable history of an operation.

use semel::{
    Backoff, Claim, Held, OnMismatch, Policy, Verdict,
    journal::{Event, Repeat, Repeats},
    machine::Answer,
    prelude::*,
    store::{Decision, MOST_NOTES},
};

use super::tools::*;
use crate::{Lab, work, work_with};

/// An ordinary operation needs no note: the row has its history.
pub async fn an_ordinary_operation_needs_no_note(lab: Lab) {
    let ledger = lab.ledger().await;
    let mut lease = acquire(&ledger, work("k", Policy::default()).payload("data")).await;
    for _ in 0..5 {
        lab.pass(Policy::default().lease / 3);
        assert_eq!(lease.renew().await.unwrap(), Held::Yes);
        assert_eq!(lease.checkpoint("half-way").await.unwrap(), Held::Yes);
    }
    assert_eq!(lease.complete(done("")).await.unwrap(), SETTLED);
    assert_eq!(ask(&ledger, work("k", Policy::default())).await, "replay");
    ledger.sweep().await.unwrap();
    assert_eq!(lab.number("SELECT count(*) FROM semel_journal").await, 0);
}

/// Unusual events are noted in order, with time, actor and reason.
pub async fn unusual_events_are_noted_in_order(lab: Lab) {
    let (a, b) = (lab.ledger_of("node a").await, lab.ledger_of("node b").await);
    let policy = Policy { backoff: Backoff::NONE, tombstone: Some(secs(60)), ..Policy::default() };
    let lease = acquire(&a, work("k", policy.clone()).payload("data")).await;
    let id = lease.operation().id;
    assert_eq!(lease.fail(failure("no \0 luck é")).await.unwrap(), SETTLED);
    lab.pass(secs(1));
    assert_eq!(acquire(&b, work("k", policy.clone())).await.release(secs(1)).await.unwrap(), SETTLED);
    lab.pass(secs(1));
    let mut zombie = acquire(&a, work("k", policy.clone())).await;
    lab.pass(secs(20));
    assert_eq!(zombie.renew().await.unwrap(), Held::Yes);
    lab.pass(policy.lease);
    assert_eq!(b.sweep().await.unwrap().lapsed, 1);
    assert!(!write_nth(zombie, 0).await);
    assert_eq!(acquire(&b, work("k", policy.clone())).await.doubt("cut off").await.unwrap(), SETTLED);
    let retry = Decision::Resolve { verdict: Verdict::Retry, expected: None };
    assert_eq!(decide(&a, id, retry).await.answer, Answer::Resolved);
    assert_eq!(acquire(&b, work("k", policy.clone())).await.complete(done("")).await.unwrap(), SETTLED);
    lab.pass(secs(60));
    assert_eq!(a.sweep().await.unwrap().archived, 1);

    let got = notes(&b, id).await;
    let expected = [
        (Event::Failed, "node a", "no \0 luck é"),
        (Event::TakenOver, "node b", "attempt 2 after failed"),
        (Event::Released, "node b", "costs no attempt"),
        (Event::TakenOver, "node a", "attempt 2 after pending"),
        (Event::RenewedLate, "node a", "20"),
        (Event::TimedOut, "sweep", "the lease of node a"),
        (Event::Refused, "", "a completion came late"),
        (Event::TakenOver, "node b", "attempt 3 after timed_out"),
        (Event::Doubted, "node b", "cut off"),
        (Event::Resolved, "ann", "because"),
        (Event::TakenOver, "node b", "attempt 1 after pending"),
        (Event::Archived, "sweep", "the key stays taken"),
    ];
    assert_eq!(got.len(), expected.len(), "{got:#?}");
    for (note, (event, actor, detail)) in got.iter().zip(expected) {
        assert_eq!(note.event, event, "{got:#?}");
        assert_eq!(note.actor, actor, "{note:?}");
        assert!(note.detail.contains(detail), "{note:?}");
    }
    assert!(got.is_sorted_by_key(|note| note.at), "{got:#?}");
    assert_eq!(got[0].at, Lab::START);
}

/// A renewal is noted as late only if more than half of the lease has passed without one: a lease that the longest run
/// has cut short does not show when it was renewed.
pub async fn only_a_late_renewal_is_noted(lab: Lab) {
    let ledger = lab.ledger().await;
    let late = async |text: &str, max_run: u64, gaps: &[u64]| {
        let mut lease = acquire(&ledger, work(text, Policy { max_run: secs(max_run), ..Policy::default() })).await;
        for gap in gaps {
            lab.pass(secs(*gap));
            assert_eq!(lease.renew().await.unwrap(), Held::Yes, "{text}");
        }
        story(&ledger, lease.operation().id).await.len()
    };
    assert_eq!(late("in time", 1000, &[15, 15, 15, 15]).await, 0);
    assert_eq!(late("late", 1000, &[16, 10, 29]).await, 2);
    assert_eq!(late("cut short", 35, &[10, 5, 10, 9]).await, 0);
}

async fn repeats(node: &Node, text: &str) -> Vec<(Repeat, Repeats)> {
    node.store().journal(row(node, text).await.id).await.unwrap().1
}

/// Duplicates and conflicts are counted exactly and separately, with the first and the last ten of each, summed over
/// nodes.
pub async fn repeats_are_counted_exactly_with_both_ends(lab: Lab) {
    let (a, b) = (lab.ledger().await, lab.ledger().await);
    assert_eq!(acquire(&a, work("k", Policy::default())).await.complete(done("")).await.unwrap(), SETTLED);
    for n in 0..25 {
        assert_eq!(ask(&a, work("k", Policy::default())).await, "replay");
        if n % 5 == 0 {
            assert_eq!(ask(&a, work_with("k", &format!("conflict {n}"), Policy::default())).await, "mismatch");
        }
    }
    a.flush().await;
    let first = repeats(&a, "k").await;
    assert_eq!(
        first.iter().map(|(repeat, repeats)| (*repeat, repeats.count)).collect::<Vec<_>>(),
        [(Repeat::Duplicate, 25), (Repeat::Conflict, 5)]
    );
    for _ in 0..12 {
        assert_eq!(ask(&b, work("k", Policy::default())).await, "replay");
    }
    b.flush().await;
    let both = repeats(&a, "k").await;
    let duplicates = &both[0].1;
    assert_eq!((duplicates.count, duplicates.first.len(), duplicates.last.len()), (37, 10, 10));
    assert_eq!(duplicates.first, first[0].1.first, "the first ten stay");
    assert!(duplicates.last.iter().all(|seen| seen.at > duplicates.first[9].at && seen.answer == "replay"));
    let conflicts = &both[1].1;
    let prints: Vec<_> = conflicts.first.iter().map(|seen| seen.fingerprint.clone()).collect();
    let expected: Vec<_> =
        (0..5).map(|n| semel::Fingerprint::of_bytes(format!("conflict {}", n * 5).as_bytes()).to_hex()).collect();
    assert_eq!(prints, expected);
}

/// Two nodes that note repeats of the same operation at the same time lose none of them.
pub async fn repeats_of_two_nodes_add_up(lab: Lab) {
    let nodes = [lab.ledger().await, lab.ledger().await];
    let lease = acquire(&nodes[0], work("k", Policy::default())).await;
    for _ in 0..5 {
        let noting = nodes.clone().map(|node| {
            tokio::spawn(async move {
                for _ in 0..10 {
                    assert_eq!(ask(&node, work("k", Policy::default())).await, "in_flight");
                }
                node.flush().await;
            })
        });
        for noted in noting {
            soon(noted).await.unwrap();
        }
    }
    for node in &nodes {
        node.flush().await;
    }
    let seen = repeats(&nodes[0], "k").await;
    assert_eq!((seen.len(), seen[0].0, seen[0].1.count), (1, Repeat::Duplicate, 100));
    drop(lease);
}

/// After a flush everything is written, also what another flush had begun to write.
pub async fn a_flush_ends_after_the_one_before_it(lab: Lab) {
    let ledger = lab.ledger().await;
    assert_eq!(acquire(&ledger, work("k", Policy::default())).await.complete(done("")).await.unwrap(), SETTLED);
    assert_eq!(ask(&ledger, work("k", Policy::default())).await, "replay");
    // On SQLite an open transaction holds the only writer.
    let tx = soon(ledger.store().begin(secs(5))).await.unwrap();
    if let semel_store::Conn::Postgres(c) = tx.connection().await.unwrap().get().unwrap() {
        sqlx::raw_sql("LOCK TABLE semel_repeats, semel_deltas").execute(c).await.unwrap();
    }
    let before = tokio::spawn({
        let ledger = ledger.clone();
        async move { ledger.flush().await }
    });
    let moment = std::time::Duration::from_millis(200);
    tokio::time::sleep(moment).await;
    let early = tokio::time::timeout(moment, ledger.flush()).await.is_ok();
    assert!(!early && !before.is_finished(), "nothing of it can be written yet");
    ledger.store().roll_back(&tx).await;
    soon(ledger.flush()).await;
    assert_eq!(repeats(&ledger, "k").await[0].1.count, 1);
}

/// A claim that waits is one repeat, although it looks several times; a claim that gets the lease is none.
pub async fn a_waiting_claim_is_one_repeat(lab: Lab) {
    let ledger = lab.ledger().await;
    let lease = acquire(&ledger, work("k", Policy::default())).await;
    let (sees, seen) = tokio::sync::oneshot::channel();
    let waiting = tokio::spawn({
        let ledger = ledger.clone();
        // It has looked once when `worth` is called, and looks again after that.
        let worth = move |_: &semel::Operation| sees.send(()).is_ok();
        async move { ledger.claim_or_wait_if(work("k", Policy::default()), secs(600), worth).await.unwrap() }
    });
    soon(seen).await.expect("it waits");
    assert_eq!(lease.complete(done("")).await.unwrap(), SETTLED);
    assert!(matches!(soon(waiting).await.unwrap(), Claim::Replay(_)));
    ledger.flush().await;
    let seen = repeats(&ledger, "k").await;
    assert_eq!((seen.len(), seen[0].1.count, &*seen[0].1.first[0].answer), (1, 1, "replay"));
}

/// Of a long journal the newest notes are returned, oldest first; of a shorter one all.
pub async fn a_long_journal_returns_its_newest_notes(lab: Lab) {
    let ledger = lab.ledger().await;
    let id = acquire(&ledger, work("k", Policy::default())).await.operation().id;
    let add = async |from: usize, to: usize| {
        let sql = format!(
            "INSERT INTO semel_journal (operation, at, event, fence, actor, detail)
             WITH RECURSIVE counted(i) AS (SELECT {from} UNION ALL SELECT i + 1 FROM counted WHERE i < {to})
             SELECT {id}, i, 'released', {id}, 'node', {} FROM counted",
            if lab.kind() == crate::Kind::Postgres { "'\\x0100'::bytea" } else { "x'0100'" }
        );
        lab.execute(&sql).await.unwrap();
    };
    let got = async || {
        let got = notes(&ledger, id).await;
        assert!(got.is_sorted_by_key(|note| note.at));
        (got.len(), got[0].at.as_micros(), got[got.len() - 1].at.as_micros())
    };
    add(1, MOST_NOTES).await;
    let most = i64::try_from(MOST_NOTES).unwrap();
    assert_eq!(got().await, (MOST_NOTES, 1, most));
    add(MOST_NOTES + 1, MOST_NOTES + 5).await;
    assert_eq!(got().await, (MOST_NOTES, 6, most + 5));
}

/// An operation restarts with newer data and by a person's retry, not by a further attempt.
pub async fn the_time_of_the_last_restart_is_returned(lab: Lab) {
    let ledger = lab.ledger().await;
    let policy = Policy { backoff: Backoff::NONE, on_mismatch: OnMismatch::SupersedeIfNewer, ..Policy::default() };
    let lease = acquire(&ledger, work("k", policy.clone()).order(1)).await;
    let id = lease.operation().id;
    assert_eq!(lease.fail(failure("no")).await.unwrap(), SETTLED);
    lab.pass(secs(1));
    assert_eq!(acquire(&ledger, work("k", policy.clone()).order(1)).await.fail(failure("no")).await.unwrap(), SETTLED);
    let other = acquire(&ledger, work("other", policy.clone())).await.operation().id;
    let anew = async || ledger.store().begun_anew(&[id, other]).await.unwrap();
    assert!(anew().await.is_empty());
    lab.pass(secs(1));
    let newer = acquire(&ledger, work_with("k", "newer", policy.clone()).order(2)).await;
    let came = ledger.store().now().await.unwrap();
    assert_eq!(anew().await, [(id, came)].into());
    assert_eq!(newer.fail(failure("no")).await.unwrap(), SETTLED);
    lab.pass(secs(1));
    let retry = Decision::Resolve { verdict: Verdict::Retry, expected: None };
    assert_eq!(decide(&ledger, id, retry).await.answer, Answer::Resolved);
    let decided = ledger.store().now().await.unwrap();
    lab.pass(secs(1));
    assert_eq!(
        acquire(&ledger, work_with("k", "newer", policy).order(2)).await.fail(failure("no")).await.unwrap(),
        SETTLED
    );
    assert_eq!((anew().await, decided > came), ([(id, decided)].into(), true));
}
