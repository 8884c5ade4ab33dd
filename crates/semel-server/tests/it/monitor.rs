//! The laws of the monitor, for services other than webhooks.

use std::time::Duration;

use semel::{
    Backoff, Claim, Fingerprint, Key, Labels, Ledger, OnLost, Options, Outcome, Policy, Ran, Scope, Unfinished, Work,
};
use semel_server::{
    monitor::{Looked, Report, Rules, Status, Subject},
    view::Telling,
};
use semel_store::Database;
use serde_json::json;

use crate::{
    desk::{Desk, execute},
    place::{Place, on_both_databases},
    proposals::Api,
    support::{SOON, eventually},
};

on_both_databases! {
    requests_to_the_proposals_are_counted_by_method_and_path
    deliveries_of_any_service_have_rates_times_and_health
    delayed_work_is_not_reported_late_before_its_time
    an_operation_without_attempts_left_waits_for_a_person
}

fn report(desk: &Desk, subject: &Subject) -> Report {
    let looked = desk.block(Looked::at(&desk.database, subject, 7)).unwrap();
    looked.report(&Rules::plain(Telling { noun: ("delivery", "deliveries"), ..Telling::PLAIN }))
}

fn requests_to_the_proposals_are_counted_by_method_and_path(place: &Place) {
    let api = Api::start(place);
    for (key, email) in [("a", "a@example.com"), ("b", "b@example.com"), ("a", "a@example.com")] {
        let body = json!({ "nome": "Ana", "email": email }).to_string();
        assert!(api.post("/clientes", Some(key), &body).status < 300);
    }
    let desk = Desk::at(place);
    let told = || report(&desk, &Subject::service("default", "proposals"));
    eventually(SOON, "the repeat is counted", || told().duplicates_suppressed == 1);
    let told = told();
    assert_eq!((told.totals.total, told.totals.completed), (2, 2), "{told:?}");
    assert_eq!((told.rates.success, told.times.count), (Some(1.0), 2), "{told:?}");
    assert_eq!((told.health.status, told.by_day.len()), (Status::Ok, 1), "{told:?}");
    assert_eq!(told.by_label1[0].name, "POST", "{told:?}");
    assert!(told.times.p50 <= told.times.p95 && told.times.p95 <= told.times.p99, "{told:?}");
}

fn scope() -> Scope {
    Scope::parse("post/parcel").unwrap()
}

fn work(key: &str, label: &str) -> Work {
    let labels = Labels::default().with(1, label).unwrap();
    Work::new(scope(), Key::new(key).unwrap(), Fingerprint::of_bytes(key.as_bytes())).labels(labels)
}

fn run(desk: &Desk, ledger: &Ledger<Database>, work: Work, end: Result<&'static str, Unfinished>) {
    let end = end.map(Outcome::kept);
    let ran = desk.block(ledger.run(work, move |_| std::future::ready(end.clone()))).unwrap();
    assert!(matches!(ran, Claim::Acquired(Ran::Completed(_) | Ran::Failed(_) | Ran::Doubted(_))), "{ran:?}");
}

fn deliveries_of_any_service_have_rates_times_and_health(place: &Place) {
    let desk = Desk::at(place);
    let ledger = Ledger::new(desk.database.clone(), Options::default()).unwrap();
    let backoff = Backoff { first: Duration::from_secs(3600), cap: Duration::from_secs(3600) };
    let policy = Policy { on_lost: OnLost::Hold, backoff, ..Policy::default() };
    for key in ["a", "b", "c", "d", "e", "f"] {
        run(&desk, &ledger, work(key, "air").policy(policy.clone()), Ok("done"));
    }
    for key in ["g", "h"] {
        run(&desk, &ledger, work(key, "sea").policy(policy.clone()), Err(Unfinished::failed("the sea is rough")));
    }
    run(&desk, &ledger, work("i", "sea").policy(policy.clone()), Err(Unfinished::Doubted("no answer".into())));
    run(&desk, &ledger, work("j", "sea").policy(policy), Err(Unfinished::failed_for_good("no such port")));
    let other = Work::new(Scope::parse("post/letter").unwrap(), Key::new("a").unwrap(), Fingerprint::of_bytes(b"a"));
    run(&desk, &ledger, other, Ok("done"));

    let told = report(&desk, &Subject::scope(&scope()));
    let stand = serde_json::to_value(told.totals).unwrap();
    let expected = json!({
        "total": 10, "processing": 0, "completed": 6, "failed": 3, "timedOut": 0, "inDoubt": 1, "pending": 0,
    });
    assert_eq!(stand, expected);
    assert_eq!((told.rates.success, told.rates.failure, told.rates.timeout), (Some(0.6), Some(0.3), Some(0.1)));
    let by: Vec<_> = told.by_label1.iter().map(|line| (line.name.as_str(), line.stand.total)).collect();
    assert_eq!(by, [("air", 6), ("sea", 4)]);
    assert_eq!((told.times.count, told.retries.total), (6, 0));
    let reasons = told.health.reasons.join("; ");
    assert_eq!(told.health.status, Status::Degraded, "{reasons}");
    for reason in [
        "4 of 10 runs in this hour and the last failed or were lost",
        "1 delivery is parked until a person decides",
        "1 delivery is in doubt: a person must decide",
    ] {
        assert!(reasons.contains(reason), "{reasons}");
    }
    assert!(!reasons.contains("not taken effect"), "half a minute is not over: {reasons}");
    execute(place, "UPDATE semel_operations SET created_at = created_at - 60000000 WHERE key IN ('g', 'h')");
    let reasons = report(&desk, &Subject::scope(&scope())).health.reasons.join("; ");
    assert!(reasons.contains("2 deliveries have not taken effect for up to 1m"), "{reasons}");
    assert!(reasons.contains("the last error: the sea is rough. They run again by themselves"), "{reasons}");

    let filter =
        semel::look::Filter { labels: Labels::default().with(1, "air").unwrap(), ..Subject::scope(&scope()).filter };
    let air = report(&desk, &Subject { filter, kinds: vec!["parcel".to_owned()] });
    assert_eq!((air.totals.total, air.health.status), (6, Status::Ok), "{air:?}");
    let service = report(&desk, &Subject::service("default", "post"));
    assert_eq!(service.totals.total, 11);
    assert_eq!(report(&desk, &Subject::service("other", "post")).totals.total, 0, "another tenant's are not counted");
}

fn delayed_work_is_not_reported_late_before_its_time(place: &Place) {
    let desk = Desk::at(place);
    let ledger = Ledger::new(desk.database.clone(), Options::default()).unwrap();
    desk.block(ledger.enqueue(work("later", "air").delay(Duration::from_secs(3600)))).unwrap();
    let day = 24 * 3_600_000_000_i64;
    execute(place, &format!("UPDATE semel_operations SET created_at = created_at - {day}"));
    let told = report(&desk, &Subject::scope(&scope()));
    assert_eq!((told.totals.pending, told.health.status), (1, Status::Ok), "{told:?}");
    execute(place, &format!("UPDATE semel_operations SET not_before = not_before - {day}"));
    let reasons = report(&desk, &Subject::scope(&scope())).health.reasons;
    assert_eq!(reasons, ["a delivery has waited for 1380 minutes to take effect: does a worker run?"]);
}

/// The policy is that of each claim, as a worker's is: the rows do not have it.
fn an_operation_without_attempts_left_waits_for_a_person(place: &Place) {
    let desk = Desk::at(place);
    let ledger = Ledger::new(desk.database.clone(), Options::default()).unwrap();
    let once = Policy { max_attempts: Some(1), lease: Duration::from_secs(1), max_crashes: 1, ..Policy::default() };
    run(&desk, &ledger, work("failed", "sea").policy(once.clone()), Err(Unfinished::failed("the sea is rough")));
    desk.block(async {
        // Its node is killed.
        std::mem::forget(ledger.claim(work("lost", "sea").policy(once)).await.unwrap());
    });
    execute(place, "UPDATE semel_operations SET created_at = created_at - 3600000000");
    eventually(SOON, "the sweep ends the lease", || {
        place.say(["sweep"]);
        report(&desk, &Subject::scope(&scope())).totals.timed_out == 1
    });
    let told = report(&desk, &Subject::scope(&scope()));
    let reasons = told.health.reasons.join("; ");
    assert_eq!(told.retries.at_limit, 1, "{reasons}");
    assert!(reasons.contains("1 delivery has failed as often as allowed"), "{reasons}");
    assert!(reasons.contains("1 delivery is parked until a person decides"), "{reasons}");
    assert!(!reasons.contains("does a worker run") && !reasons.contains("by themselves"), "{reasons}");
}
