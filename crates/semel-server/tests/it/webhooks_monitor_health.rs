//! The laws of the monitor's verdict.

use std::thread;

use semel::State;
use serde_json::{Value, json};

use crate::{
    desk::{execute, post, shown},
    endpoint::{Does, Endpoint},
    hooks::{becomes, conflicts, deliver, event, forward, start, start_as, status},
    place::{Place, on_both_databases},
    support::Server,
    webhooks_monitor::STRIPE,
};

on_both_databases! {
    most_runs_failing_is_down
    a_cancelled_event_is_not_reported
    the_waiting_time_of_an_event_restarts_with_newer_data_and_a_retry
    settled_conflicts_are_not_reported
    two_versions_of_the_same_age_are_reported
    open_conflicts_are_reported_among_many_settled_ones
}

fn most_runs_failing_is_down(place: &Place) {
    let endpoint = Endpoint::that([Does::Answers(500); 10]);
    let server = start(place, &[("SEMEL_WEBHOOKS_STRIPE_HANDLERS", &forward(&endpoint.url()))]);
    for n in 0..9 {
        assert_eq!(deliver(&server, &event(&format!("evt_{n}"), 1_700_000_000, "a")).status, 500);
    }
    assert_eq!(shown(&server, STRIPE)["health"]["status"], "ok", "nine runs say nothing");
    assert_eq!(deliver(&server, &event("evt_9", 1_700_000_000, "a")).status, 500);
    let told = shown(&server, STRIPE);
    assert_eq!(told["health"]["status"], "down");
    assert_eq!(told["health"]["reasons"], json!(["10 of 10 runs in this hour and the last failed or were lost"]));
    assert_eq!((&told["totals"]["failed"], &told["rates"]["failure_rate"]), (&json!(10), &json!(1.0)));
}

fn a_cancelled_event_is_not_reported(place: &Place) {
    let endpoint = Endpoint::that([Does::Answers(500); 2]);
    let url = forward(&endpoint.url());
    let variables = [("SEMEL_WEBHOOKS_STRIPE_HANDLERS", url.as_str()), ("SEMEL_WEBHOOKS_STRIPE_BACKOFF", "10m")];
    let server = start_as(place, "api", &variables);
    for id in ["cancelled", "failed"] {
        assert_eq!(deliver(&server, &event(id, 100, "a")).status, 500);
    }
    let scope = ["--scope", "webhooks/stripe", "--reason", "not needed"];
    place.say([&["work", "cancel", "cancelled"], &scope[..]].concat());
    assert_eq!(shown(&server, STRIPE)["health"]["reasons"], json!([]), "a person has decided");
    place.say([&["operations", "resolve", "failed", "--as", "failed"], &scope[..]].concat());
    let reasons = shown(&server, STRIPE)["health"]["reasons"].clone();
    assert_eq!(reasons, json!(["1 event is parked until a person decides"]));
}

fn the_waiting_time_of_an_event_restarts_with_newer_data_and_a_retry(place: &Place) {
    let endpoint = Endpoint::that([Does::Answers(500); 3]);
    let url = forward(&endpoint.url());
    let variables = [("SEMEL_WEBHOOKS_STRIPE_HANDLERS", url.as_str()), ("SEMEL_WEBHOOKS_STRIPE_BACKOFF", "10m")];
    let server = start_as(place, "api", &variables);
    let reasons = || shown(&server, STRIPE)["health"]["reasons"].to_string();
    let an_hour_ago = |table: &str, column: &str| {
        execute(place, &format!("UPDATE {table} SET {column} = {column} - 3600000000"));
    };
    assert_eq!(deliver(&server, &event("evt_1", 100, "a")).status, 500);
    assert!(!reasons().contains("has waited"), "{}", reasons());
    an_hour_ago("semel_operations", "created_at");
    assert!(reasons().contains("has waited for 60 minutes"), "{}", reasons());
    assert_eq!(deliver(&server, &event("evt_1", 200, "newer")).status, 500);
    assert!(!reasons().contains("has waited"), "this data came just now: {}", reasons());
    an_hour_ago("semel_journal", "at");
    assert!(reasons().contains("has waited for 60 minutes"), "{}", reasons());
    let answer = post(&server, "/webhooks/stripe/events/evt_1/retry", r#"{"reason":"mended"}"#);
    assert_eq!(answer.status, 202);
    assert!(!reasons().contains("has waited"), "a person has just spoken: {}", reasons());
}

fn health(server: &Server) -> Value {
    shown(server, STRIPE)["health"].clone()
}

fn well() -> Value {
    json!({ "status": "ok", "reasons": [] })
}

/// The same again, newer and older data, all while the first is being processed; and an old version again.
fn settled_conflicts_are_not_reported(place: &Place) {
    let endpoint = Endpoint::that([Does::Waits]);
    let server = start(place, &[("SEMEL_WEBHOOKS_STRIPE_HANDLERS", &forward(&endpoint.url()))]);
    let send = |created: i64| status(&deliver(&server, &event("evt_1", created, &created.to_string())));
    thread::scope(|scope| {
        let first = scope.spawn(|| send(200));
        endpoint.is_called(1);
        for (created, said) in [(200, "rejected"), (400, "accepted"), (300, "skipped"), (100, "skipped")] {
            assert_eq!(send(created), said, "{created}");
        }
        endpoint.let_go();
        assert_eq!(first.join().unwrap(), "processed");
    });
    endpoint.is_called(2);
    becomes(place, "evt_1", State::Completed);
    assert_eq!(health(&server), well());
    assert_eq!((send(500), send(400), send(200)), ("processed".into(), "skipped".into(), "skipped".into()));
    assert_eq!(conflicts(place).len(), 5, "each is recorded: {:?}", conflicts(place));
    assert_eq!(health(&server), well());
}

fn two_versions_of_the_same_age_are_reported(place: &Place) {
    let server = start(place, &[]);
    assert_eq!(status(&deliver(&server, &event("evt_1", 100, "one"))), "processed");
    assert_eq!(status(&deliver(&server, &event("evt_1", 100, "two"))), "skipped");
    let told = "other data, no newer and no older, came under the id of a known event in the last 24 hours";
    assert_eq!(health(&server), json!({ "status": "degraded", "reasons": [told] }));
    // Both are out of date.
    assert_eq!(status(&deliver(&server, &event("evt_1", 200, "three"))), "processed");
    assert_eq!(health(&server), well());
    // So are those without a delivery for a day.
    assert_eq!(status(&deliver(&server, &event("evt_1", 200, "four"))), "skipped");
    assert_eq!(health(&server)["status"], "degraded");
    execute(place, "UPDATE semel_webhook_conflicts SET last_at = last_at - 86400000000");
    assert_eq!(health(&server), well());
}

fn open_conflicts_are_reported_among_many_settled_ones(place: &Place) {
    let server = start(place, &[]);
    for note in ["one", "two"] {
        assert_eq!(deliver(&server, &event("evt_1", 100, note)).status, 200);
    }
    let came_right = |from: u32, to: u32| {
        execute(
            place,
            &format!(
                "INSERT INTO semel_webhook_conflicts
                    (tenant, source, kind, event_id, event_type, webhook_function, came_fingerprint, stored_fingerprint,
                     came_created, stored_created, deed, count, first_at, last_at)
                 WITH RECURSIVE counted(i) AS (SELECT {from} UNION ALL SELECT i + 1 FROM counted WHERE i < {to})
                 SELECT tenant, source, kind, event_id || '.' || i, event_type, webhook_function, came_fingerprint,
                     stored_fingerprint, 200, 100, 'taken', count, first_at, last_at + i
                 FROM semel_webhook_conflicts, counted WHERE event_id = 'evt_1'"
            ),
        );
    };
    came_right(1, 499);
    assert!(health(&server)["reasons"][0].as_str().unwrap().starts_with("other data, no newer"), "{}", health(&server));
    assert_eq!(shown(&server, STRIPE)["conflicts"]["items"].as_array().unwrap().len(), 50);
    came_right(500, 500);
    let reason =
        "other data came under the ids of known events more often than this monitor reads in the last 24 hours";
    assert_eq!(health(&server), json!({ "status": "degraded", "reasons": [reason] }));
}
