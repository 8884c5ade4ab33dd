//! The laws of events that wait until a program asks for them.

use semel::State;
use serde_json::{Value, json};

use crate::{
    desk::{post, shown},
    hooks::{becomes, conflicts, deliver, event, outbox, start_as, status, stored},
    place::{Place, on_both_databases},
    support::{SOON, Server, eventually},
};

on_both_databases! {
    an_event_waits_for_a_program_whose_complete_takes_effect_once
    a_failed_event_is_handed_out_again_until_its_attempts_end
    newer_data_replaces_an_event_that_waits
    without_its_rule_a_waiting_event_runs_through_the_present_rules
    an_event_stored_under_another_rule_is_handed_over
    the_monitor_says_how_many_wait_and_who_asked_last
}

const NAME: &str = "webhook.stripe.invoice.paid";

const PULL: (&str, &str) = ("SEMEL_WEBHOOKS_STRIPE_HANDLERS", "invoice.*=pull; *=outbox");

fn serve(place: &Place, rule: (&str, &str)) -> Server {
    start_as(place, "api,worker", &[rule, ("SEMEL_WEBHOOKS_STRIPE_BACKOFF", "1s")])
}

/// The operations that a program is handed out.
fn next(server: &Server, wait: u32) -> Vec<Value> {
    let body = json!({ "operationNames": [NAME], "max": 10, "wait": wait }).to_string();
    let answer = post(server, "/v1/operations/next", &body);
    assert_eq!(answer.status, 200, "{}", answer.body);
    answer.json()["operations"].as_array().unwrap().clone()
}

/// A call of the holder of a lease.
fn call(server: &Server, handed: &Value, what: &str, mut body: Value) -> (u16, Value) {
    body["fence"] = handed["lease"]["fence"].clone();
    let answer = post(server, &format!("/v1/operations/{}/{what}", handed["operation"]["id"]), &body.to_string());
    (answer.status, answer.json())
}

fn an_event_waits_for_a_program_whose_complete_takes_effect_once(place: &Place) {
    let server = serve(place, PULL);
    let paid = event("evt_1", 1_700_000_000, "a");
    assert_eq!(status(&deliver(&server, &paid)), "accepted");
    assert_eq!(status(&deliver(&server, &paid)), "accepted", "it waits");
    let handed = next(&server, 0);
    assert_eq!(handed.len(), 1);
    let operation = &handed[0]["operation"];
    assert_eq!((&operation["operationName"], &operation["idempotencyKey"]), (&json!(NAME), &json!("evt_1")));
    assert_eq!((&operation["input"], &operation["scope"]), (&paid, &json!("operations")));
    assert_eq!(status(&deliver(&server, &paid)), "rejected", "it runs");
    assert!(next(&server, 0).is_empty());
    let done = || call(&server, &handed[0], "complete", json!({ "resultData": { "booked": 7 } }));
    for _ in 0..2 {
        let (code, shown) = done();
        assert_eq!((code, &shown["status"], &shown["resultData"]), (200, &json!("SUCCESS"), &json!({ "booked": 7 })));
    }
    assert_eq!(status(&deliver(&server, &paid)), "skipped");
    let told = shown(&server, "/webhooks/stripe/events/evt_1");
    assert_eq!(told["processing_status"], "completed");
    assert_eq!(
        (&told["processing_result"]["result"], &told["processing_result"]["value"]),
        (&json!("pulled"), &json!({ "booked": 7 }))
    );
    let of_result = shown(&server, "/webhooks/stripe/events?result=pulled");
    assert_eq!(of_result["items"].as_array().unwrap().len(), 1);
    // Other types have their own rules.
    let other = json!({ "id": "evt_2", "object": "event", "type": "charge.paid", "created": 1, "livemode": false,
        "data": { "object": { "id": "ch_1" } } });
    assert_eq!(status(&deliver(&server, &other)), "processed");
    assert_eq!(outbox(place), ["webhook.stripe.charge.paid"]);
}

fn a_failed_event_is_handed_out_again_until_its_attempts_end(place: &Place) {
    let server = start_as(
        place,
        "api,worker",
        &[PULL, ("SEMEL_WEBHOOKS_STRIPE_BACKOFF", "100ms"), ("SEMEL_WEBHOOKS_STRIPE_MAX_ATTEMPTS", "2")],
    );
    let paid = event("evt_1", 1_700_000_000, "a");
    assert_eq!(status(&deliver(&server, &paid)), "accepted");
    for attempt in 0..2 {
        let handed = next(&server, 10);
        assert_eq!((handed.len(), &handed[0]["operation"]["retryCount"]), (1, &json!(attempt)));
        let (code, told) = call(&server, &handed[0], "fail", json!({ "errorMessage": "the bank is closed" }));
        assert_eq!((code, &told["errorMessage"]), (200, &json!("the bank is closed")));
    }
    assert!(next(&server, 1).is_empty());
    assert_eq!(status(&deliver(&server, &paid)), "max_retries");
    let told = shown(&server, "/webhooks/stripe/events/evt_1");
    assert_eq!((&told["processing_status"], &told["last_error"]), (&json!("failed"), &json!("the bank is closed")));
    let answer = post(&server, "/webhooks/stripe/events/evt_1/retry", r#"{"reason":"it is open again"}"#);
    assert_eq!(answer.status, 202);
    assert_eq!(next(&server, 10).len(), 1, "a person leaves it to the programs, too");
}

fn newer_data_replaces_an_event_that_waits(place: &Place) {
    let server = serve(place, PULL);
    assert_eq!(status(&deliver(&server, &event("evt_1", 200, "first"))), "accepted");
    assert_eq!(status(&deliver(&server, &event("evt_1", 100, "older"))), "skipped");
    let newer = event("evt_1", 300, "newer");
    assert_eq!(status(&deliver(&server, &newer)), "accepted");
    assert_eq!(conflicts(place), ["evt_1 skipped 1 100 200", "evt_1 taken 1 300 200"]);
    let handed = next(&server, 10);
    assert_eq!((handed.len(), &handed[0]["operation"]["input"]), (1, &newer));
}

fn without_its_rule_a_waiting_event_runs_through_the_present_rules(place: &Place) {
    let server = serve(place, PULL);
    assert_eq!(status(&deliver(&server, &event("evt_1", 200, "a"))), "accepted");
    drop(server);
    let server = serve(place, (PULL.0, "*=outbox"));
    becomes(place, "evt_1", State::Completed);
    assert_eq!(outbox(place), [NAME]);
    assert_eq!(status(&deliver(&server, &event("evt_1", 200, "a"))), "skipped");
}

fn an_event_stored_under_another_rule_is_handed_over(place: &Place) {
    let server = serve(place, (PULL.0, "*=store"));
    let paid = event("evt_1", 200, "a");
    assert_eq!(status(&deliver(&server, &paid)), "processed");
    drop(server);
    let server = serve(place, PULL);
    assert_eq!(status(&deliver(&server, &paid)), "skipped", "it took effect once: it was stored");
    let answer = post(&server, "/webhooks/stripe/events/evt_1/retry", r#"{"reason":"now there is a program"}"#);
    assert_eq!(answer.status, 202, "{}", answer.body);
    let handed = next(&server, 10);
    assert_eq!((handed.len(), &handed[0]["operation"]["input"]), (1, &paid));
    assert_eq!(call(&server, &handed[0], "complete", json!({})).0, 200);
    assert_eq!(stored(place, "stripe", "evt_1").unwrap().state, State::Completed);
}

fn the_monitor_says_how_many_wait_and_who_asked_last(place: &Place) {
    let server = serve(place, PULL);
    let pulled = || shown(&server, "/webhooks/stripe/monitor")["pulled"].clone();
    assert_eq!((&pulled()["waiting"], &pulled()["last_asked_at"]), (&json!(0), &Value::Null));
    for n in 0..3 {
        assert_eq!(status(&deliver(&server, &event(&format!("evt_{n}"), 200, "a"))), "accepted");
    }
    assert_eq!((&pulled()["waiting"], &pulled()["last_asked_at"]), (&json!(3), &Value::Null));
    let asked = post(&server, "/v1/operations/next", &json!({ "operationNames": [NAME] }).to_string());
    assert_eq!(asked.json()["operations"].as_array().unwrap().len(), 1);
    eventually(SOON, "the monitor knows of the request", || pulled()["last_asked_at"].is_string());
    let of = &pulled()["by_event_type"][0];
    assert_eq!((&of["event_type"], &of["operation_name"]), (&json!("invoice.paid"), &json!(NAME)));
    assert_eq!((&of["waiting"], &of["due"]), (&json!(2), &json!(2)));
    // Without such a rule, the monitor says nothing of it.
    assert!(shown(&server, "/webhooks/stripe/monitor?event_type=invoice.paid")["pulled"].is_null());
}
