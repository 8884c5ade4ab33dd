//! Counters: operations per state, answers, and durations of runs.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

use semel::{
    Backoff, Labels, OnLost, OnMismatch, Policy, State, Verdict,
    look::{
        Count, Counted, DayTally, Durations, Filter, Group, Page, Tallied, Tally, TallyBy, TallyFilter, answered,
        appeared, bucket, in_state, runs,
    },
    prelude::*,
    store::Decision,
};

use super::tools::*;
use crate::{Lab, scope, work, work_with};

/// A history through every state and back, over several keys and labels.
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

/// The counts according to the rows.
async fn states(node: &Node) -> BTreeMap<State, i64> {
    let mut states: BTreeMap<_, _> = State::ALL.into_iter().map(|state| (state, 0)).collect();
    let page = Page { after: None, limit: 500 };
    for op in node.store().list(&Filter::scope(&scope()), page).await.unwrap().items {
        *states.entry(op.state).or_default() += 1;
    }
    states
}

/// A run whose lease expired is counted as timed out once, whether the sweep or a claim finds it.
pub async fn a_run_that_is_taken_over_is_counted_as_timed_out(lab: Lab) {
    let ledger = lab.ledger().await;
    let policy = Policy { backoff: Backoff::NONE, ..Policy::default() };
    for (n, sweeps) in [false, true].into_iter().enumerate() {
        let text = format!("k{n}");
        drop(acquire(&ledger, work(&text, policy.clone())).await);
        lab.pass(policy.lease);
        if sweeps {
            ledger.sweep().await.unwrap();
        }
        let lease = acquire(&ledger, work(&text, policy.clone())).await;
        assert_eq!(lease.complete(done("")).await.unwrap(), SETTLED);
        let counts = ledger.store().counts(scope().tenant(), 0).await.unwrap();
        let ended = [State::TimedOut, State::Completed].map(|ended| runs(&counts, ended));
        assert_eq!(ended, [n as i64 + 1; 2], "sweeps: {sweeps}");
    }
}

/// A run that ended while newer data waited is counted by its own end, with its duration, although the operation was
/// pending at once.
pub async fn a_run_that_ended_while_newer_data_waited_is_counted_by_its_end(lab: Lab) {
    let ledger = lab.ledger().await;
    let policy = Policy { on_mismatch: OnMismatch::SupersedeIfNewer, backoff: Backoff::NONE, ..Policy::default() };
    let data = |n: usize, v: i64| work_with(&format!("k{n}"), &format!("v{v}"), policy.clone()).order(v);
    for n in 0..3 {
        let lease = acquire(&ledger, data(n, 1)).await;
        assert_eq!(ask(&ledger, data(n, 2)).await, "in_flight");
        lab.pass(secs(2));
        match n {
            0 => assert_eq!(lease.complete(done("")).await.unwrap(), semel::Settled::Yes { successor: true }),
            1 => assert_eq!(lease.fail(failure("no")).await.unwrap(), semel::Settled::Yes { successor: true }),
            _ => {
                drop(lease);
                lab.pass(policy.lease);
                ledger.sweep().await.unwrap();
            }
        }
    }
    let counts = ledger.store().counts(scope().tenant(), 0).await.unwrap();
    let ended = [State::Completed, State::Failed, State::TimedOut, State::Pending];
    assert_eq!(ended.map(|ended| runs(&counts, ended)), [1, 1, 1, 0]);
    let took = Durations::of(&counts, Some(State::Completed)).mean().unwrap();
    assert!(took >= Duration::from_millis(1800) && took < secs(3), "{took:?}");
    assert_eq!((in_state(&counts, State::Pending), in_state(&counts, State::Completed)), (3, 0));
}

/// The counters have the exact number of operations in each state, folded or not; folding changes no total.
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

    // Nothing has expired since: the sweep only folds.
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

/// Folding adds up equal lines and loses none; hours are kept separate and can be selected.
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

/// Claims without the lease are counted by their answer.
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

/// The histogram has the durations of runs, in the same bucket on every database: also at the edges of buckets, where
/// rounding would show.
pub async fn the_histogram_has_the_durations(lab: Lab) {
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
    let mut got = BTreeMap::new();
    for count in ledger.store().counts("acme", 0).await.unwrap() {
        if let Counted::Change { to, bucket, .. } = count.what
            && to == "completed"
        {
            *got.entry(bucket).or_insert(0) += count.n;
        }
    }
    assert_eq!(got, expected);
}

/// The counters that a filter selects, summed by the test.
fn added_up(counts: &[Count], filter: &TallyFilter) -> Vec<Tally> {
    let fits = |count: &&Count| {
        let Group { tenant, service, kind, label1, label2 } = &count.group;
        let is = |asked: &Option<String>, text: &String| asked.as_ref().is_none_or(|asked| asked == text);
        *tenant == filter.tenant
            && *service == filter.service
            && (filter.kinds.is_empty() || filter.kinds.contains(kind))
            && is(&filter.label1, label1)
            && is(&filter.label2, label2)
            && count.hour >= filter.since_hour
            && filter.until_hour.is_none_or(|until| count.hour < until)
    };
    let mut sums: BTreeMap<Tally, i64> = BTreeMap::new();
    for count in counts.iter().filter(fits) {
        let got = |of: &[TallyBy], text: &String| if of.contains(&filter.by) { text.clone() } else { String::new() };
        let (all, Group { kind, label1, label2, .. }) = (TallyBy::All, &count.group);
        let mut what = count.what.clone();
        if let Counted::Change { bucket, .. } = &mut what
            && ![all, TallyBy::Duration].contains(&filter.by)
        {
            *bucket = 0;
        }
        let (kind, label1) = (got(&[all], kind), got(&[all, TallyBy::Label1], label1));
        let label2 = got(&[all, TallyBy::Label2], label2);
        *sums.entry(Tally { kind, label1, label2, what, n: 0 }).or_default() += count.n;
    }
    sums.into_iter().map(|(tally, n)| Tally { n, ..tally }).collect()
}

fn whole<T: Ord>(tallied: Tallied<T>) -> Vec<T> {
    assert!(!tallied.cut && tallied.lines.is_sorted());
    tallied.lines
}

/// For every filter, a tally equals the sum of the counters: before, during and after folding; and it has the number of
/// new operations, the ends of runs and their durations.
pub async fn a_tally_is_the_sum_of_its_counters(lab: Lab) {
    let (a, b) = (lab.ledger().await, lab.ledger().await);
    mixed_history(&lab, [&a, &b]).await;
    lab.pass(secs(3600));
    for (kind, label2) in [("transfer", "x"), ("transfer.x", "x"), ("trans_er", "y"), ("Transfer.x", "y")] {
        let scope = semel::Scope::new("acme", "bank", kind).unwrap();
        let labels = Labels::default().with(1, "red").unwrap().with(2, label2).unwrap();
        let work = || {
            semel::Work::new(scope.clone(), crate::key("k"), semel::Fingerprint::of_bytes(b"")).labels(labels.clone())
        };
        assert_eq!(acquire(&a, work()).await.complete(done("")).await.unwrap(), SETTLED);
        assert_eq!(ask(&a, work()).await, "replay");
    }
    a.flush().await;
    let hour = Lab::START.hour();
    let text = |text: &str| Some(text.to_owned());
    let all = TallyFilter { tenant: "acme".into(), service: "bank".into(), ..TallyFilter::default() };
    let filters = [
        all.clone(),
        TallyFilter { kinds: vec!["transfer".into()], ..all.clone() },
        TallyFilter { kinds: vec!["transfer.x".into(), "nothing".into()], ..all.clone() },
        TallyFilter { kinds: vec!["transfer".into(), "trans_er".into()], label1: text("red"), ..all.clone() },
        TallyFilter { label2: text("x"), ..all.clone() },
        TallyFilter { label2: text(""), label1: text("blue"), ..all.clone() },
        TallyFilter { since_hour: hour + 1, ..all.clone() },
        TallyFilter { until_hour: Some(hour + 1), ..all.clone() },
        TallyFilter { since_hour: hour, until_hour: Some(hour), ..all.clone() },
        TallyFilter { service: "post".into(), ..all.clone() },
        TallyFilter { tenant: "other".into(), ..all.clone() },
        TallyFilter { by: TallyBy::Label1, ..all.clone() },
        TallyFilter { by: TallyBy::Label2, label1: text("red"), ..all.clone() },
        TallyFilter { by: TallyBy::Duration, kinds: vec!["transfer".into()], ..all.clone() },
    ];
    let mut folded = 0;
    loop {
        let counts = a.store().counts("acme", 0).await.unwrap();
        for filter in &filters {
            let expected = added_up(&counts, filter);
            assert_eq!(whole(a.store().tally(filter).await.unwrap()), expected, "after {folded}: {filter:?}");
        }
        let swept = b.store().sweep(7).await.unwrap();
        folded += swept.folded;
        if swept.folded == 0 {
            break;
        }
    }
    assert!(folded > 20, "{folded}");
    let empty: Vec<usize> = [8, 9, 10].to_vec();
    for (n, filter) in filters.iter().enumerate() {
        assert_eq!(a.store().tally(filter).await.unwrap().lines.is_empty(), empty.contains(&n), "{filter:?}");
    }
    let lines = a.store().tally(&all).await.unwrap().lines;
    assert_eq!(appeared(&lines), 28);
    assert_eq!(answered(&lines, "replay"), 4);
    let ended = runs(&lines, State::Completed) + runs(&lines, State::Failed) + runs(&lines, State::TimedOut);
    assert!(ended > 10 && Durations::of(&lines, None).count() > ended);
    assert_eq!(Durations::of(&lines, Some(State::TimedOut)).count(), runs(&lines, State::TimedOut));
    let counts = a.store().counts("acme", 0).await.unwrap();
    for state in State::ALL {
        assert_eq!(in_state(&lines, state), in_state(&counts, state), "{state}");
    }
}

/// The days of a tally begin at midnight UTC, and each is the sum of its hours.
pub async fn a_tally_of_days_is_the_sum_of_its_hours(lab: Lab) {
    let ledger = lab.ledger().await;
    for n in 0..80 {
        let lease = acquire(&ledger, work(&format!("k{n}"), Policy::default())).await;
        let settled = if n % 3 == 0 { lease.fail(failure("no")).await } else { lease.complete(done("")).await };
        assert_eq!(settled.unwrap(), SETTLED);
        lab.pass(secs(3600));
        if n == 40 {
            ledger.sweep().await.unwrap();
        }
    }
    let filter = TallyFilter { tenant: "acme".into(), service: "bank".into(), ..TallyFilter::default() };
    let mut sums: BTreeMap<(i64, &str), i64> = BTreeMap::new();
    let counts = ledger.store().counts("acme", 0).await.unwrap();
    for count in &counts {
        if let Counted::Change { to, .. } = &count.what {
            *sums.entry((count.hour.div_euclid(24), to)).or_default() += count.n;
        }
    }
    assert!(sums.keys().map(|(day, _)| day).collect::<BTreeSet<_>>().len() == 4, "{sums:?}");
    let days = whole(ledger.store().tally_days(&filter).await.unwrap());
    let mut got: BTreeMap<(i64, &str), i64> = BTreeMap::new();
    for DayTally { day, what, n } in &days {
        let Counted::Change { to, bucket: 0, .. } = what else { panic!("{what:?}") };
        *got.entry((*day, to)).or_default() += n;
    }
    assert_eq!(got, sums);
    let first = Lab::START.hour().div_euclid(24);
    let of_day = TallyFilter { since_hour: (first + 1) * 24, until_hour: Some((first + 2) * 24), ..filter };
    let day = ledger.store().tally_days(&of_day).await.unwrap().lines;
    assert!(day.iter().all(|line| line.day == first + 1));
    assert_eq!(appeared(&day), 24);
}

/// A tally is bounded for any number of label values, and shows that it is incomplete: it has the largest sums, always
/// the same ones. A tally without that dimension is complete.
pub async fn a_tally_is_bounded_and_marked_as_cut(lab: Lab) {
    let ledger = lab.ledger().await;
    let most = Tallied::<Tally>::MOST;
    let add = async |from: u32, to: u32| {
        let sql = format!(
            "INSERT INTO semel_counters (tenant, service, kind, label1, label2, hour, from_state, to_state, answer, bucket, n)
             WITH RECURSIVE counted(i) AS (SELECT {from} UNION ALL SELECT i + 1 FROM counted WHERE i < {to})
             SELECT 'acme', 's', 'k', CAST(i AS TEXT), '', i, '', 'processing', '', 0, CASE i WHEN 7 THEN 1 ELSE 2 END FROM counted"
        );
        lab.execute(&sql).await.unwrap();
    };
    let filter = TallyFilter { tenant: "acme".into(), service: "s".into(), ..TallyFilter::default() };
    add(1, most).await;
    let tallied = ledger.store().tally(&filter).await.unwrap();
    assert_eq!((tallied.lines.len(), tallied.cut), (most as usize, false));
    add(most + 1, most + 1).await;
    let tallied = ledger.store().tally(&filter).await.unwrap();
    assert_eq!((tallied.lines.len(), tallied.cut), (most as usize, true));
    assert!(!tallied.lines.iter().any(|line| line.label1 == "7"), "the smallest is left out");
    let all = 2 * i64::from(most) + 1;
    let days = ledger.store().tally_days(&filter).await.unwrap();
    assert_eq!((days.cut, appeared(&days.lines)), (false, all));
    for by in [TallyBy::Label2, TallyBy::Duration] {
        let tallied = ledger.store().tally(&TallyFilter { by, ..filter.clone() }).await.unwrap();
        assert_eq!((tallied.lines.len(), tallied.cut, appeared(&tallied.lines)), (1, false, all), "{by:?}");
    }
}

/// A tally of a year's days is complete, with every kind of event on each of them.
pub async fn a_tally_of_a_year_of_days_is_whole(lab: Lab) {
    let ledger = lab.ledger().await;
    let states: Vec<_> = State::ALL.iter().map(|state| format!("SELECT '{state}' AS state")).collect();
    let states = format!("(SELECT '' AS state UNION ALL {})", states.join(" UNION ALL "));
    let numbers = |most: u32| {
        format!(
            "(WITH RECURSIVE counted(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM counted WHERE i < {most})
              SELECT i FROM counted)"
        )
    };
    let add = async |what: &str, rows: &str| {
        let sql = format!(
            "INSERT INTO semel_counters (tenant, service, kind, label1, label2, hour, from_state, to_state, answer, bucket, n)
             SELECT 'acme', 's', 'k', '', '', d.i * 24, {what}, 0, 1 FROM {} AS d, {rows}",
            numbers(367)
        );
        lab.execute(&sql).await.unwrap();
    };
    add("f.state, t.state, ''", &format!("{states} AS f, {states} AS t WHERE f.state <> t.state")).await;
    add("'', '', CAST(a.i AS TEXT)", &format!("{} AS a", numbers(24))).await;
    let filter = TallyFilter { tenant: "acme".into(), service: "s".into(), ..TallyFilter::default() };
    let days = ledger.store().tally_days(&filter).await.unwrap();
    assert_eq!((days.lines.len(), days.cut), (367 * (42 + 24), false));
}
