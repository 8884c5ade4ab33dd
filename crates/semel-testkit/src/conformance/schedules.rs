//! Schedules: one node enqueues each run, once, with its mark.

use std::time::Duration;

use semel::{
    Backoff, Context, Kind, Missed, Outcome, Policy, Schedule, Scope, State, Timestamp, Timetable, Worker,
    chrono_tz::Europe,
    fleet::Mark,
    look::{Filter, Page},
    prelude::*,
};
use semel_store::Database;
use tokio::sync::watch;

use super::tools::*;
use crate::{Lab, key};

fn reports() -> Scope {
    Scope::new("acme", "bank", "report").unwrap()
}

/// Every hour. The lab begins at 12:26:40.
fn hourly() -> Schedule {
    Schedule::every("hourly", secs(3600), reports()).unwrap()
}

fn table(node: &Node, schedule: Schedule) -> Timetable<Database> {
    Timetable::new(node, vec![schedule])
}

/// The keys of the runs, oldest first.
async fn runs(node: &Node) -> Vec<String> {
    let listing = node.store().list(&Filter::scope(&reports()), Page { after: None, limit: 500 }).await.unwrap();
    listing.items.iter().rev().map(|op| op.key.as_str().to_owned()).collect()
}

async fn mark(node: &Node, schedule: &Schedule) -> Mark {
    node.store().marks(std::slice::from_ref(schedule)).await.unwrap().0.remove(0)
}

/// A new schedule starts now: no earlier run is enqueued, and later ones are enqueued when they are due, under their
/// times.
pub async fn a_new_schedule_starts_now(lab: Lab) {
    let ledger = lab.ledger().await;
    let schedule = hourly().payload("all accounts");
    let mut table = table(&ledger, schedule.clone());
    let wait = table.round().await.unwrap();
    assert_eq!(runs(&ledger).await, [""; 0]);
    assert!(wait <= secs(60), "it sleeps for a minute at most, by the database's clock: {wait:?}");
    lab.pass(secs(1000));
    table.round().await.unwrap();
    assert_eq!(runs(&ledger).await, [""; 0], "12:43:20");
    lab.pass(secs(1000));
    table.round().await.unwrap();
    table.round().await.unwrap();
    assert_eq!(runs(&ledger).await, ["hourly@2020-09-13T13:00:00Z"]);
    let run = ledger.store().by_key(&reports(), &key("hourly@2020-09-13T13:00:00Z")).await.unwrap().unwrap();
    assert_eq!((run.state, run.payload.as_deref()), (State::Pending, Some(&b"all accounts"[..])));
    assert_eq!(Schedule::due(&run).map(|due| due.to_string()).as_deref(), Some("2020-09-13T13:00:00.000000Z"));
    let mark = mark(&ledger, &schedule).await;
    assert_eq!((mark.since, mark.at, mark.last), (Lab::START, mark.last.unwrap(), Schedule::due(&run)));
    assert_eq!(mark.next.map(|due| due.to_string()).as_deref(), Some("2020-09-13T14:00:00.000000Z"));
}

/// A cron expression uses its time zone, and its marks the database's clock.
pub async fn a_cron_expression_uses_its_time_zone(lab: Lab) {
    let ledger = lab.ledger().await;
    // The clocks of Rome go back on 2020-10-25: 02:30 occurs twice, and runs once.
    lab.clock.set(Timestamp::from_micros(1_603_497_600_000_000));
    let schedule = Schedule::cron("nightly", "30 2 * * *", Europe::Rome, reports()).unwrap();
    let mut table = table(&ledger, schedule);
    for _ in 0..(3 * 24 * 2) {
        table.round().await.unwrap();
        lab.pass(secs(1800));
    }
    let due = ["nightly@2020-10-24T00:30:00Z", "nightly@2020-10-25T00:30:00Z", "nightly@2020-10-26T01:30:00Z"];
    assert_eq!(runs(&ledger).await, due);
}

/// Of many nodes that find a run due at the same time, one enqueues it.
pub async fn many_nodes_enqueue_a_run_once(lab: Lab) {
    const NODES: usize = 4;
    let mut nodes = Vec::new();
    for n in 0..NODES {
        let node = lab.ledger_of(&format!("node {n}")).await;
        let mut table = table(&node, hourly().missed(Missed::All(100)));
        table.round().await.unwrap();
        nodes.push((node, table));
    }
    for _ in 0..5 {
        lab.pass(secs(3600));
        let rounds = nodes.iter_mut().map(|(_, table)| table.round());
        let mut rounds: Vec<_> = rounds.map(Box::pin).collect();
        soon(std::future::poll_fn(|cx| {
            rounds.retain_mut(|round| round.as_mut().poll(cx).map(Result::unwrap).is_pending());
            if rounds.is_empty() { std::task::Poll::Ready(()) } else { std::task::Poll::Pending }
        }))
        .await;
    }
    let runs = runs(&nodes[0].0).await;
    assert_eq!(runs.len(), 5, "{runs:?}");
}

/// The mark decides what was missed. Runs whose operations have expired are not enqueued again, and after an outage the
/// schedule's `Missed` applies.
pub async fn the_mark_decides_which_runs_were_missed(lab: Lab) {
    let ledger = lab.ledger().await;
    let policy = Policy { retention: Some(secs(1)), ..Policy::default() };
    let every = |missed| hourly().missed(missed).policy(policy.clone());
    table(&ledger, every(Missed::Latest)).round().await.unwrap();
    lab.pass(secs(3600));
    table(&ledger, every(Missed::Latest)).round().await.unwrap();
    assert_eq!(runs(&ledger).await.len(), 1);
    let id = ledger.store().by_key(&reports(), &key("hourly@2020-09-13T13:00:00Z")).await.unwrap().unwrap().id;
    ledger.cancel(id, "ann", "not needed").await.unwrap();
    lab.pass(secs(60));
    ledger.sweep().await.unwrap();
    assert_eq!(runs(&ledger).await, [""; 0], "it has expired");
    table(&ledger, every(Missed::All(100))).round().await.unwrap();
    assert_eq!(runs(&ledger).await, [""; 0], "and is not made again");

    lab.pass(secs(5 * 3600));
    table(&ledger, every(Missed::Latest)).round().await.unwrap();
    assert_eq!(runs(&ledger).await, ["hourly@2020-09-13T18:00:00Z"], "the latest");
    lab.pass(secs(2 * 3600));
    table(&ledger, every(Missed::None)).round().await.unwrap();
    assert_eq!(runs(&ledger).await.len(), 1, "none");
    lab.pass(secs(4 * 3600));
    table(&ledger, every(Missed::All(3))).round().await.unwrap();
    assert_eq!(runs(&ledger).await.len(), 4, "all, as many as were said");
}

/// The run and its mark are one commit, and a mark moves only from the value that was read.
pub async fn a_run_commits_with_its_mark(lab: Lab) {
    let ledger = lab.ledger().await;
    let store = ledger.store();
    table(&ledger, hourly()).round().await.unwrap();
    let old = mark(&ledger, &hourly()).await;
    let new = Mark { at: old.next.unwrap(), last: old.next, next: hourly().next(old.next.unwrap()), ..old.clone() };

    let tx = store.begin(secs(5)).await.unwrap();
    assert!(store.move_mark(&tx, Some(&old), &new).await.unwrap());
    store.roll_back(&tx).await;
    assert_eq!(mark(&ledger, &hourly()).await, old);

    for (from, to, moved) in [(&old, &new, true), (&old, &new, false), (&new, &old, false)] {
        let tx = store.begin(secs(5)).await.unwrap();
        assert_eq!(store.move_mark(&tx, Some(from), to).await.unwrap(), moved, "{from:?} to {to:?}");
        store.commit(&tx).await;
    }
    let tx = store.begin(secs(5)).await.unwrap();
    assert!(!store.move_mark(&tx, None, &old).await.unwrap(), "it is there");
    store.roll_back(&tx).await;
    assert_eq!(mark(&ledger, &hourly()).await, new);
}

/// A node that freezes while it enqueues a run blocks no other node. (SQLite has one writer, for which all wait.)
pub async fn a_mark_that_another_node_has_locked_is_skipped(lab: Lab) {
    if lab.kind() == crate::Kind::Sqlite {
        return;
    }
    let (a, b) = (lab.ledger_of("a").await, lab.ledger_of("b").await);
    let other = Schedule::every("other", secs(3600), reports()).unwrap();
    let mut table = Timetable::new(&b, vec![hourly(), other]);
    table.round().await.unwrap();
    lab.pass(secs(3600));
    let old = mark(&a, &hourly()).await;
    let new = Mark { at: old.next.unwrap(), next: None, ..old.clone() };
    let tx = a.store().begin(secs(5)).await.unwrap();
    assert!(a.store().move_mark(&tx, Some(&old), &new).await.unwrap());
    let wait = tokio::time::timeout(secs(2), table.round()).await.expect("it waited").unwrap();
    assert!(wait <= secs(1), "it looks again soon");
    assert_eq!(runs(&b).await, ["other@2020-09-13T13:00:00Z"]);
    a.store().roll_back(&tx).await;
    table.round().await.unwrap();
    assert_eq!(runs(&b).await.len(), 2);
}

/// A new version that finds the mark locked at its start takes the schedule over when the mark is free.
pub async fn a_changed_schedule_takes_over_a_mark_that_was_locked(lab: Lab) {
    if lab.kind() == crate::Kind::Sqlite {
        return;
    }
    let (a, b) = (lab.ledger_of("a").await, lab.ledger_of("b").await);
    table(&a, hourly()).round().await.unwrap();
    let changed = Schedule::every("hourly", secs(1800), reports()).unwrap();
    let mut new = table(&b, changed.clone());
    let old = mark(&a, &hourly()).await;
    let tx = a.store().begin(secs(5)).await.unwrap();
    assert!(a.store().move_mark(&tx, Some(&old), &old).await.unwrap());
    new.round().await.unwrap();
    a.store().roll_back(&tx).await;
    new.round().await.unwrap();
    assert_eq!(mark(&a, &changed).await.spec, changed.spec());
}

/// A changed schedule applies from now on. While two versions of a program run side by side, the one that started last
/// decides; if it is gone, the other continues.
pub async fn a_changed_schedule_counts_from_now(lab: Lab) {
    let (a, b) = (lab.ledger_of("a").await, lab.ledger_of("b").await);
    let changed = Schedule::every("hourly", secs(1800), reports()).unwrap();
    let mut old = table(&a, hourly());
    old.round().await.unwrap();
    lab.pass(secs(3 * 3600));
    let mut new = table(&b, changed.clone());
    new.round().await.unwrap();
    assert_eq!(runs(&b).await, [""; 0], "nothing is made up for");
    old.round().await.unwrap();
    assert_eq!(mark(&a, &changed).await.spec, changed.spec(), "the older node stands back");
    lab.pass(secs(1800));
    new.round().await.unwrap();
    assert_eq!(runs(&b).await, ["hourly@2020-09-13T15:30:00Z"]);
    // The newer one is gone.
    lab.pass(secs(3600));
    watch(&lab, &mut old).await;
    assert_eq!(mark(&a, &changed).await.spec, hourly().spec());
    assert_eq!(runs(&b).await.last().unwrap(), "hourly@2020-09-13T16:00:00Z", "the run that it did not enqueue");
    lab.pass(secs(3600));
    old.round().await.unwrap();
    assert_eq!(runs(&b).await.last().unwrap(), "hourly@2020-09-13T17:00:00Z");
}

/// Rounds of a node that stands back, for somewhat more than a minute.
async fn watch(lab: &Lab, node: &mut Timetable<Database>) {
    for _ in 0..8 {
        node.round().await.unwrap();
        lab.pass(secs(10));
    }
}

/// Two versions of a schedule run side by side. After an outage, and after a pause, the newer one goes on, though the
/// older one looks first and finds it overdue; and the run that was missed is made up for.
pub async fn the_newer_of_two_schedules_survives_an_outage_and_a_pause(lab: Lab) {
    let (a, b) = (lab.ledger_of("a").await, lab.ledger_of("b").await);
    let changed = Schedule::every("hourly", secs(1800), reports()).unwrap();
    let (mut old, mut new) = (table(&a, hourly()), table(&b, changed.clone()));
    old.round().await.unwrap();
    new.round().await.unwrap();
    let mut expected = Vec::new();
    for (away, run) in [("outage", "2020-09-13T15:00:00Z"), ("pause", "2020-09-13T17:30:00Z")] {
        if away == "pause" {
            a.store().pause_kind("bank", "report", "ann", "the printer is broken").await.unwrap();
        }
        // For hours no node looks, or nodes look and may not enqueue.
        lab.pass(secs(9270));
        if away == "pause" {
            watch(&lab, &mut old).await;
            assert!(b.store().resume_kind("bank", "report", "ann", "it prints").await.unwrap());
        }
        for _ in 0..3 {
            old.round().await.unwrap();
            lab.pass(secs(10));
        }
        assert_eq!(mark(&a, &changed).await.spec, changed.spec(), "the older node stands back after the {away}");
        new.round().await.unwrap();
        expected.push(format!("hourly@{run}"));
        assert_eq!(runs(&b).await, expected, "after the {away}");
        old.round().await.unwrap();
        assert_eq!(mark(&a, &changed).await.spec, changed.spec());
    }
}

/// While its kind is paused, a schedule enqueues nothing; afterwards the latest missed run is enqueued.
pub async fn a_paused_kind_gets_no_runs(lab: Lab) {
    let ledger = lab.ledger().await;
    let mut table = table(&ledger, hourly());
    table.round().await.unwrap();
    ledger.store().pause_kind("bank", "report", "ann", "the printer is broken").await.unwrap();
    for _ in 0..5 {
        lab.pass(secs(3600));
        table.round().await.unwrap();
    }
    assert_eq!(runs(&ledger).await, [""; 0]);
    assert!(mark(&ledger, &hourly()).await.paused);
    assert!(ledger.store().resume_kind("bank", "report", "ann", "it prints").await.unwrap());
    assert!(!ledger.store().resume_kind("bank", "report", "ann", "it prints").await.unwrap(), "it was not paused");
    table.round().await.unwrap();
    assert_eq!(runs(&ledger).await, ["hourly@2020-09-13T17:00:00Z"]);
}

/// A schedule whose run cannot be enqueued delays no other.
pub async fn a_schedule_that_fails_harms_no_other(lab: Lab) {
    let ledger = lab.ledger().await;
    let large = Schedule::every("large", secs(3600), reports()).unwrap().payload(vec![0; semel::Work::MAX_PAYLOAD + 1]);
    let mut table = Timetable::new(&ledger, vec![large.clone(), hourly()]);
    table.round().await.unwrap();
    let before = mark(&ledger, &large).await;
    lab.pass(secs(3600));
    table.round().await.unwrap();
    assert_eq!(runs(&ledger).await, ["hourly@2020-09-13T13:00:00Z"]);
    assert_eq!(mark(&ledger, &large).await, before, "its mark stays: the run is still owed");
}

/// Equal names in two scopes are two schedules, and all of them are listed.
pub async fn schedules_can_be_listed(lab: Lab) {
    let ledger = lab.ledger().await;
    let elsewhere = Scope::new("other", "bank", "report").unwrap();
    let other = Schedule::every("hourly", secs(1800), elsewhere.clone()).unwrap();
    Timetable::new(&ledger, vec![hourly(), other]).round().await.unwrap();
    let (marks, now) = ledger.store().schedules().await.unwrap();
    let seen: Vec<_> = marks.iter().map(|mark| (&mark.scope, mark.spec.as_str(), mark.last)).collect();
    assert_eq!(seen, [(&reports(), "every 3600s", None), (&elsewhere, "every 1800s", None)]);
    assert_eq!(now, Lab::START);
    assert!(marks[0].last_key().is_none());
}

/// Workers of two nodes run a schedule: every run once, and soon after it is due.
pub async fn two_workers_run_a_schedule_once(lab: Lab) {
    let lab = lab.with_real_clock();
    let (a, b) = (lab.ledger_of("a").await, lab.ledger_of("b").await);
    let (stop, stops) = watch::channel(false);
    let (done, mut runs) = tokio::sync::mpsc::unbounded_channel();
    let hired = [&a, &b].map(|node| {
        let done = done.clone();
        let kind = Kind::leased("bank", "report", move |context: Context<Database>| {
            let run = context.operation().clone();
            let _ = done.send((run.key.as_str().to_owned(), run.claimed_at.since(Schedule::due(&run).unwrap())));
            async { Ok(Outcome::kept("")) }
        });
        let policy = Policy { backoff: Backoff::NONE, ..Policy::default() };
        let schedule = Schedule::every("often", secs(1), reports()).unwrap().missed(Missed::All(100));
        tokio::spawn(Worker::new(node).on(kind.policy(policy)).every(schedule).run(stops.clone()))
    });
    let mut seen = Vec::new();
    while seen.len() < 4 {
        seen.push(soon(runs.recv()).await.unwrap());
    }
    stop.send_replace(true);
    for hired in hired {
        soon(hired).await.unwrap();
    }
    while let Ok(one) = runs.try_recv() {
        seen.push(one);
    }
    let mut keys: Vec<_> = seen.iter().map(|(key, _)| key).collect();
    keys.sort();
    keys.dedup();
    assert_eq!(keys.len(), seen.len(), "one ran twice: {seen:?}");
    let soonest = seen.iter().map(|(_, late)| *late).min().unwrap();
    assert!(soonest < Duration::from_millis(900), "none waited for the next look of a worker: {seen:?}");
}
