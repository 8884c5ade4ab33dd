//! The laws of the monitor's verdict.

use serde_json::json;

use crate::{
    desk::{execute, post, shown},
    endpoint::{Does, Endpoint},
    hooks::{deliver, event, forward, start, start_as},
    place::{Place, on_both_databases},
    webhooks_monitor::STRIPE,
};

on_both_databases! {
    most_runs_failing_is_down
    an_event_waits_since_its_data_came
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

fn an_event_waits_since_its_data_came(place: &Place) {
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
