//! Counters: how many are in each state, what was answered, and how long runs took.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

use semel::{
    Backoff, Labels, OnLost, OnMismatch, Policy, State, Store as _, Verdict,
    look::{Count, Counted, Filter, Group, Page, bucket, in_state},
    store::Decision,
};

use super::tools::*;
use crate::{Lab, scope, work, work_with};

/// A life that goes through every state and back, over several keys and labels.
async fn mixed_history(lab: &Lab, nodes: [&Node; 2]) {
    let policy = Policy {
        backoff: Backoff::NONE,
        on_mismatch: OnMismatch::SupersedeIfNewer,
        retention: Some(secs(500)),
        ..Policy::default()
    };
    for n in 0..24_usize {
        let node = nodes[n % 2];
        let text = format!("k{n}");
        let labels = Labels::default().with(1, ["red", "blue"][n % 2]).unwrap();
        let on_lost = if n % 3 == 0 { OnLost::Hold } else { OnLost::Rerun };
        let work = |v: i64| {
            let policy = Policy { on_lost, ..policy.clone() };
            work_with(&text, &format!("v{v}"), policy).order(v).labels(labels.clone())
        };
        let lease = acquire(node, work(1)).await;
        let id = lease.operation().id;
        match n % 8 {
            0 => assert_eq!(lease.complete(done("")).await.unwrap(), SETTLED),
            1 => assert_eq!(lease.fail(failure("no")).await.unwrap(), SETTLED),
            2 => assert_eq!(lease.release(Duration::ZERO).await.unwrap(), SETTLED),
            3 => assert_eq!(lease.release(secs(1)).await.unwrap(), SETTLED),
            4 => assert_eq!(lease.doubt("?").await.unwrap(), SETTLED),
            5 => {
                assert_eq!(ask(nodes[0], work(2)).await, "in_flight");
                assert_eq!(lease.complete(done("")).await.unwrap(), semel::Settled::Yes { successor: true });
                drop(acquire(nodes[1], work(2)).await);
            }
            6 => drop(lease),
            _ => {
                lab.pass(policy.lease);
                drop(nodes[0].claim(work(1)).await.unwrap());
            }
        }
        if n % 16 == 4 {
            decide(node, id, Decision::Resolve { verdict: Verdict::Retry, expected: None }).await;
        }
        lab.pass(secs(7));
        if n % 6 == 0 {
            nodes[1].sweep().await.unwrap();
        }
    }
}

/// What a look at every row says.
async fn states(node: &Node) -> BTreeMap<State, i64> {
    let mut states: BTreeMap<_, _> = State::ALL.into_iter().map(|state| (state, 0)).collect();
    let page = Page { after: None, limit: 500 };
    for op in node.store().list(&Filter::scope(&scope()), page).await.unwrap().items {
        *states.entry(op.state).or_default() += 1;
    }
    states
}

/// The counters say how many operations are in each state, exactly, folded or not; folding changes
/// no total.
pub async fn state_counts_are_exact_before_and_after_folding(lab: Lab) {
    let (a, b) = (lab.ledger().await, lab.ledger().await);
    mixed_history(&lab, [&a, &b]).await;
    let counts = async || a.store().counts("acme", 0).await.unwrap();
    let by_state = |counts: &[Count]| -> BTreeMap<State, i64> {
        State::ALL.into_iter().map(|state| (state, in_state(counts, state))).collect()
    };
    let before = counts().await;
    let rows = states(&a).await;
    assert!(rows.values().filter(|n| **n > 0).count() >= 5, "{rows:?}");
    assert_eq!(by_state(&before), rows);
    let (first, rest) = before.split_first().unwrap();
    assert!(rest.iter().any(|count| count.group != first.group), "labels are counted apart");

    // Nothing has lapsed or expired since: the sweep only folds.
    let mut folded = 0;
    loop {
        let swept = b.store().sweep(5).await.unwrap();
        folded += swept.folded;
        assert_eq!(by_state(&counts().await), states(&a).await, "after {folded}");
        if !swept.more {
            break;
        }
    }
    assert!(folded > 0);
    assert_eq!(lab.number("SELECT count(*) FROM semel_deltas").await, 0);
    lab.pass(secs(10_000));
    b.sweep().await.unwrap();
    assert_eq!(by_state(&counts().await), states(&a).await, "after expiry");
}

/// Folding adds up equal lines and loses none; hours are kept apart and can be asked for.
pub async fn folding_changes_no_total(lab: Lab) {
    let ledger = lab.ledger().await;
    let hour = Lab::START.hour();
    for n in 0..30 {
        let lease = acquire(&ledger, work(&format!("k{n}"), Policy::default())).await;
        assert_eq!(lease.complete(done("")).await.unwrap(), SETTLED);
        lab.pass(secs(300));
    }
    let before = ledger.store().counts("acme", 0).await.unwrap();
    assert!(ledger.sweep().await.unwrap().folded >= 60);
    assert_eq!(ledger.store().counts("acme", 0).await.unwrap(), before);
    let since = |from: i64| before.iter().filter(|count| count.hour >= from).cloned().collect::<Vec<_>>();
    for from in [hour, hour + 1, hour + 2, hour + 3] {
        assert_eq!(ledger.store().counts("acme", from).await.unwrap(), since(from));
    }
    assert!(before.iter().any(|count| count.hour == hour) && before.iter().any(|count| count.hour == hour + 2));
    assert_eq!(ledger.store().counts("other", 0).await.unwrap(), []);
}

/// Claims that did not get the lease are counted by their answer.
pub async fn answers_are_counted(lab: Lab) {
    let (a, b) = (lab.ledger().await, lab.ledger().await);
    let labels = || Labels::default().with(1, "red").unwrap();
    let _held = acquire(&a, work("k", Policy::default()).labels(labels())).await;
    for _ in 0..3 {
        assert_eq!(ask(&a, work("k", Policy::default())).await, "in_flight");
        assert_eq!(ask(&b, work("k", Policy::default())).await, "in_flight");
    }
    assert_eq!(ask(&b, work_with("k", "other", Policy::default())).await, "mismatch");
    a.flush().await;
    b.flush().await;
    let mut answers = BTreeMap::new();
    for count in a.store().counts("acme", 0).await.unwrap() {
        if let Counted::Answer(word) = count.what {
            assert_eq!(count.group, Group::new(&scope(), &labels()));
            assert_eq!(count.hour, Lab::START.hour());
            *answers.entry(word).or_insert(0) += count.n;
        }
    }
    assert_eq!(answers.into_iter().collect::<Vec<_>>(), [("in_flight".to_owned(), 6), ("mismatch".to_owned(), 1)]);
}

/// How long runs took is told by the histogram, to the same bucket on every database: also at the
/// edges of buckets, where rounding would show.
pub async fn durations_are_told_by_the_histogram(lab: Lab) {
    let ledger = lab.ledger().await;
    let lasts = Policy { lease: secs(20_000), max_run: secs(20_000), ..Policy::default() };
    let edges = (0..=32).map(|power| 1_u64 << power).flat_map(|edge| [edge - 1, edge, edge + 1]);
    let mut expected = BTreeMap::new();
    for micros in edges.chain([1_000_000, 7_200_000_000]).collect::<BTreeSet<_>>() {
        let took = Duration::from_micros(micros);
        let lease = acquire(&ledger, work(&format!("k{micros}"), lasts.clone())).await;
        lab.pass(took);
        assert_eq!(lease.complete(done("")).await.unwrap(), SETTLED);
        *expected.entry(bucket(took)).or_insert(0) += 1;
    }
    let mut told = BTreeMap::new();
    for count in ledger.store().counts("acme", 0).await.unwrap() {
        if let Counted::Change { to, bucket, .. } = count.what
            && to == "completed"
        {
            *told.entry(bucket).or_insert(0) += count.n;
        }
    }
    assert_eq!(told, expected);
}
