//! The sweep: orphans, expiry, the archive.

use std::time::Duration;

use semel::{
    Claim, OnLost, Outcome, Policy, Settled, State,
    journal::Event,
    look::{Filter, Page},
    prelude::*,
    store::Swept,
};

use super::tools::*;
use crate::{Lab, scope, work};

/// An expired lease is ended by the terms of its claim, whichever node sweeps; a live, renewed or new lease is never
/// touched.
pub async fn expired_leases_end_by_the_terms_of_their_claims(lab: Lab) {
    let (a, b) = (lab.ledger().await, lab.ledger().await);
    let cases = [("rerun", OnLost::Rerun), ("hold", OnLost::Hold), ("probe", OnLost::Probe)];
    for (text, on_lost) in cases {
        drop(acquire(&a, work(text, Policy { on_lost, ..Policy::default() })).await);
    }
    let mut renewed = acquire(&a, work("renewed", Policy::default())).await;
    lab.pass(Policy::default().lease - TICK);
    assert_eq!(renewed.renew().await.unwrap(), semel::Held::Yes);
    let live = acquire(&a, work("just begun", Policy::default())).await;
    assert_eq!(b.sweep().await.unwrap().lapsed, 0, "no lease has expired yet");
    lab.pass(TICK);
    assert_eq!(b.sweep().await.unwrap().lapsed, 3);
    for (text, on_lost) in cases {
        let op = row(&a, text).await;
        assert_eq!(op.state, if on_lost.doubts() { State::InDoubt } else { State::TimedOut }, "{text}");
        assert_eq!((op.crashes, op.lease, op.settled_at), (1, None, Some(Lab::START + Policy::default().lease)));
    }
    assert_eq!(b.sweep().await.unwrap().lapsed, 0, "once is enough");
    assert_eq!(live.complete(done("")).await.unwrap(), SETTLED);
    assert_eq!(renewed.complete(done("")).await.unwrap(), SETTLED);
}

/// An operation that is processing without a lease (damaged, or restored without it) is found and put in doubt under
/// any terms: they were in the lease. A person decides; operations with a lease go on.
pub async fn an_operation_whose_lease_is_missing_ends_in_doubt(lab: Lab) {
    let ledger = lab.ledger().await;
    let kept = acquire(&ledger, work("kept", Policy::default())).await;
    let lost = acquire(&ledger, work("lost", Policy::default())).await;
    // It was checked once while it was intact: the check repeats.
    assert_eq!(ledger.sweep().await.unwrap().lapsed, 0);
    let id = row(&ledger, "lost").await.id;
    lab.execute(&format!("DELETE FROM semel_leases WHERE operation = {id}")).await.unwrap();
    assert_eq!(ledger.sweep().await.unwrap().lapsed, 1);
    let op = row(&ledger, "lost").await;
    assert_eq!((op.state, op.crashes), (State::InDoubt, 1));
    assert!(op.fence > lost.fence() && op.error.unwrap().contains("is missing"));
    assert_eq!(counted(&ledger, State::InDoubt).await, 1);
    assert_eq!(ask(&ledger, work("lost", Policy::default())).await, "in_doubt");
    assert_eq!(story(&ledger, id).await, [Event::Doubted]);
    assert_eq!(ledger.sweep().await.unwrap().lapsed, 0, "once is enough");
    assert_eq!(lost.complete(done("")).await.unwrap(), Settled::LeaseLost);
    let retry = semel::store::Decision::Resolve { verdict: semel::Verdict::Retry, expected: None };
    decide(&ledger, id, retry).await;
    drop(acquire(&ledger, work("lost", Policy::default())).await);
    assert_eq!(kept.complete(done("")).await.unwrap(), SETTLED);
}

/// An expired operation is deleted with all its rows; one that is in doubt, pending or running never is.
pub async fn expiry_removes_everything_of_an_operation(lab: Lab) {
    let ledger = lab.ledger().await;
    let policy = Policy { retention: Some(secs(60)), tombstone: Some(secs(50)), ..Policy::default() };
    for text in ["failed", "completed", "pending", "doubted"] {
        let lease = acquire(&ledger, work(text, policy.clone()).payload(text)).await;
        assert_eq!(ask(&ledger, work(text, policy.clone())).await, "in_flight");
        match text {
            "failed" => assert_eq!(lease.fail(failure("no")).await.unwrap(), SETTLED),
            "completed" => assert_eq!(lease.complete(done("")).await.unwrap(), SETTLED),
            "pending" => assert_eq!(lease.release(Duration::ZERO).await.unwrap(), SETTLED),
            _ => assert_eq!(lease.doubt("?").await.unwrap(), SETTLED),
        }
    }
    ledger.flush().await;
    let tables = ["operations", "backlog", "journal", "repeats", "archive", "leases", "successors"];
    let count = async || {
        let mut counts = Vec::new();
        for table in tables {
            counts.push(lab.number(&format!("SELECT count(*) FROM semel_{table}")).await);
        }
        counts
    };
    lab.pass(secs(50));
    assert_eq!(ledger.sweep().await.unwrap().archived, 1);
    assert_eq!(count().await, [4, 3, 4, 4, 1, 0, 0], "before");
    lab.pass(secs(10) - TICK);
    assert_eq!(ledger.sweep().await.unwrap().expired, 0);
    lab.pass(TICK);
    assert_eq!(ledger.sweep().await.unwrap().expired, 2);
    assert_eq!(count().await, [2, 2, 2, 2, 0, 0, 0], "the failed and the completed one are gone, the others whole");
    lab.pass(secs(10 * 365 * 24 * 3600));
    ledger.sweep().await.unwrap();
    assert_eq!(
        (row(&ledger, "pending").await.state, row(&ledger, "doubted").await.state),
        (State::Pending, State::InDoubt)
    );
    assert_eq!(counted(&ledger, State::Completed).await + counted(&ledger, State::Failed).await, 0);
}

/// Archiving moves the data and keeps the key taken: a replay says that the outcome is not kept, and a look-up of the
/// operation returns its data.
pub async fn an_archived_operation_keeps_its_key_taken(lab: Lab) {
    let ledger = lab.ledger().await;
    let policy = Policy { retention: None, tombstone: Some(secs(90)), ..Policy::default() };
    let lease = acquire(&ledger, work("k", policy.clone()).payload("data")).await;
    let id = lease.operation().id;
    assert_eq!(lease.complete(done("outcome")).await.unwrap(), SETTLED);
    lab.pass(secs(90) - TICK);
    assert_eq!(ledger.sweep().await.unwrap().archived, 0);
    lab.pass(TICK);
    assert_eq!(ledger.sweep().await.unwrap().archived, 1);
    assert_eq!(ledger.sweep().await.unwrap().archived, 0, "once");
    for _ in 0..2 {
        let Claim::Replay(replay) = ledger.claim(work("k", policy.clone())).await.unwrap() else { panic!() };
        assert_eq!((replay.outcome, replay.operation.id), (Outcome::not_kept(""), id));
        lab.pass(secs(100 * 365 * 24 * 3600));
        ledger.sweep().await.unwrap();
    }
    let by_id = ledger.store().by_id("acme", id).await.unwrap().unwrap();
    assert_eq!(by_id, row(&ledger, "k").await);
    assert_eq!(
        (by_id.archived, by_id.outcome, by_id.payload.as_deref()),
        (true, Some(done("outcome")), Some(&b"data"[..]))
    );
    assert_eq!(story(&ledger, id).await, [Event::Archived]);
    assert_eq!(counted(&ledger, State::Completed).await, 1, "it has still completed");
    // A purge frees it.
    decide(&ledger, id, semel::store::Decision::Purge).await;
    assert_eq!(lab.number("SELECT count(*) FROM semel_archive").await, 0);
    assert_eq!(ask(&ledger, work("k", policy)).await, "acquired");
}

/// A round does no more than requested, and says whether there is more.
pub async fn a_round_is_bounded(lab: Lab) {
    let ledger = lab.ledger().await;
    for n in 0..25 {
        drop(acquire(&ledger, work(&format!("k{n:02}"), Policy::default())).await);
    }
    lab.pass(Policy::default().lease);
    let mut total = Swept::default();
    let mut rounds = 0;
    loop {
        let swept = ledger.store().sweep(10).await.unwrap();
        assert!(swept.lapsed <= 10 && swept.folded <= 10 && swept.expired <= 10, "{swept:?}");
        let more = swept.more;
        total += swept;
        rounds += 1;
        if !more {
            break;
        }
    }
    assert_eq!((total.lapsed, rounds), (25, 3));
    assert_eq!(total.folded, 28, "25 claims, and the lease expiries of three rounds");
    assert_eq!(ledger.store().sweep(10).await.unwrap(), Swept::default());
}

/// Accumulated counts are folded in bounded rounds, also if the database has planned the statement when the table was
/// empty.
pub async fn counts_that_piled_up_are_folded(lab: Lab) {
    let ledger = lab.ledger().await;
    lab.execute("ANALYZE semel_deltas").await.unwrap();
    for _ in 0..3 {
        ledger.sweep().await.unwrap();
    }
    let sql = "INSERT INTO semel_deltas (tenant, service, kind, label1, label2, hour, from_state, to_state, answer, bucket, n)
        WITH RECURSIVE counted(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM counted WHERE i < 20000)
        SELECT 'default', 's', 'k', '', '', 1, '', 'processing', '', 0, 1 FROM counted";
    lab.execute(sql).await.unwrap();
    let mut rounds = 0;
    while lab.number("SELECT count(*) FROM semel_deltas").await > 0 {
        let before = lab.number("SELECT count(*) FROM semel_deltas").await;
        let swept = ledger.store().sweep(1000).await.unwrap();
        assert_eq!(swept.folded, 1000.min(before as u64), "no more than were asked for");
        rounds += 1;
    }
    assert_eq!(rounds, 20);
    assert_eq!(lab.number("SELECT CAST(sum(n) AS BIGINT) FROM semel_counters").await, 20_000);
}

/// Eight nodes that sweep at once do each thing once, and do not disturb one another.
pub async fn many_sweepers_do_each_thing_once(lab: Lab) {
    let ledger = lab.ledger().await;
    let store = ledger.store();
    let expiring = Policy { retention: Some(secs(60)), ..Policy::default() };
    let archived = Policy { tombstone: Some(secs(60)), retention: None, ..Policy::default() };
    let mut writes = Vec::new();
    for (sort, policy) in [("expiring", expiring), ("archived", archived), ("orphan", Policy::default())] {
        let asked = (0..100).map(|n| crate::request(&format!("{sort} {n}"), b"", policy.clone()).into()).collect();
        for applied in store.claim(asked).await.unwrap() {
            let op = applied.operation.unwrap();
            if sort != "orphan" {
                let write = semel::machine::Write::Complete(done(""));
                writes.push(semel::store::LeaseWrite { id: op.id, fence: op.fence, write });
            }
        }
    }
    store.write(writes).await.unwrap();
    lab.pass(secs(60));
    let mut sweepers = tokio::task::JoinSet::new();
    for _ in 0..8 {
        let store = lab.open().await;
        sweepers.spawn(async move {
            let mut total = Swept::default();
            for _ in 0..8 {
                total += store.sweep(40).await.unwrap();
            }
            total
        });
    }
    let mut total = Swept::default();
    for swept in soon(sweepers.join_all()).await {
        total += swept;
    }
    // Rows that one node had locked may have been skipped by all: the next round handles them.
    total += ledger.sweep().await.unwrap();
    assert_eq!((total.lapsed, total.expired, total.archived), (100, 100, 100));
    assert_eq!(lab.number("SELECT count(*) FROM semel_deltas").await, 0);
    assert_eq!(lab.number("SELECT count(*) FROM semel_journal WHERE event = 'timed_out'").await, 100);
    assert_eq!(lab.number("SELECT count(*) FROM semel_archive").await, 100);
    assert_eq!((counted(&ledger, State::TimedOut).await, counted(&ledger, State::Completed).await), (100, 100));
    assert_eq!(counted(&ledger, State::Processing).await, 0);
}

/// A completion races the sweep of its expired lease: one of them wins, and both get the correct answer. Some come
/// before any sweep and some after it, so that each side wins; the others race.
pub async fn a_completion_and_the_sweep_agree_on_the_winner(lab: Lab) {
    let (a, b) = (lab.ledger().await, lab.ledger().await);
    let mut leases = Vec::new();
    for n in 0..60 {
        leases.push(acquire(&a, work(&format!("k{n:02}"), Policy::default())).await);
    }
    lab.pass(Policy::default().lease);
    let settle = async |lease: semel::Lease<semel_store::Database>| {
        let text = lease.operation().key.as_str().to_owned();
        (text, lease.complete(done("late")).await.unwrap())
    };
    let mut settled = Vec::new();
    for lease in leases.split_off(50) {
        settled.push(settle(lease).await);
    }
    assert!(settled.iter().all(|(_, settled)| *settled == SETTLED), "before any sweep");
    // By id, the oldest first.
    let mut lapsed = b.store().sweep(10).await.unwrap().lapsed;
    assert_eq!(lapsed, 10);
    let racing = leases.split_off(10);
    for lease in leases {
        settled.push(settle(lease).await);
    }
    assert!(settled[10..].iter().all(|(_, settled)| *settled == Settled::LeaseLost), "after the sweep");
    let mut late = tokio::task::JoinSet::new();
    for lease in racing {
        late.spawn(async move {
            let text = lease.operation().key.as_str().to_owned();
            (text, lease.complete(done("late")).await.unwrap())
        });
    }
    // Small rounds, so that both get their turns.
    for _ in 0..30 {
        lapsed += b.store().sweep(3).await.unwrap().lapsed;
    }
    settled.extend(soon(late.join_all()).await);
    let mut completed = 0;
    for (text, settled) in settled {
        let state = row(&a, &text).await.state;
        match settled {
            Settled::Yes { .. } => assert_eq!(state, State::Completed),
            Settled::LeaseLost => assert_eq!(state, State::TimedOut),
        }
        completed += u64::from(state == State::Completed);
    }
    assert_eq!(completed + lapsed, 60);
    assert!(completed >= 10 && lapsed >= 10);
    assert_eq!(counted(&a, State::Completed).await, i64::try_from(completed).unwrap());
    assert_eq!(lab.number("SELECT count(*) FROM semel_leases").await, 0);
}

/// A ledger with a sweep interval sweeps by itself, until it stops.
pub async fn a_ledger_sweeps_by_itself(lab: Lab) {
    let ledger = lab.ledger().await;
    drop(acquire(&ledger, work("k", Policy::default())).await);
    ledger.sweep_every(Duration::from_millis(10));
    lab.pass(Policy::default().lease);
    eventually(async || row(&ledger, "k").await.state == State::TimedOut).await;
    ledger.stop(Duration::ZERO).await;
    // A round that had begun may still run for a moment.
    tokio::time::sleep(Duration::from_millis(100)).await;
    let other = lab.ledger().await;
    drop(acquire(&other, work("later", Policy::default())).await);
    lab.pass(Policy::default().lease);
    // Ten times the interval.
    tokio::time::sleep(Duration::from_millis(100)).await;
    assert_eq!(row(&other, "later").await.state, State::Processing, "a ledger that has stopped sweeps no more");
    let listed = ledger.store().list(&Filter::scope(&scope()), Page::default()).await.unwrap();
    assert_eq!(listed.items.len(), 2);
}
