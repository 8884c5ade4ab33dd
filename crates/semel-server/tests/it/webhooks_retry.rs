//! The laws of running an event again by hand.

use std::thread;

use semel::State;
use serde_json::{Value, json};

use crate::{
    desk::{post, shown},
    endpoint::{Does, Endpoint},
    hooks::{becomes, deliver, event, forward, start, start_as, status},
    place::{Place, on_both_databases},
    proposals::rows,
};

on_both_databases! {
    a_person_can_have_an_event_run_again
    a_running_or_completed_event_is_not_run_again
}

/// The audit: actor, action and reason.
fn audited(place: &Place) -> Vec<String> {
    rows(place, "SELECT actor || ' ' || action || ': ' || reason FROM semel_audit ORDER BY id")
}

fn a_person_can_have_an_event_run_again(place: &Place) {
    let endpoint = Endpoint::that([Does::Answers(500), Does::Answers(500), Does::Answers(500)]);
    let url = forward(&endpoint.url());
    let variables = [("SEMEL_WEBHOOKS_STRIPE_HANDLERS", url.as_str()), ("SEMEL_WEBHOOKS_STRIPE_BACKOFF", "5m")];
    let server = start_as(place, "api,worker", &variables);
    let paid = event("evt_1", 1_700_000_000, "a");
    for _ in 0..3 {
        assert_eq!(deliver(&server, &paid).status, 500);
    }
    assert_eq!(status(&deliver(&server, &paid)), "max_retries");
    assert_eq!(shown(&server, "/webhooks/stripe/monitor")["retries"]["at_limit"], 1);
    let retry = |body: &str| post(&server, "/webhooks/stripe/events/evt_1/retry", body);
    for body in ["{}", r#"{"reason":" "}"#, r#"{"reason":"x","force":true}"#] {
        let answer = retry(body);
        assert_eq!((answer.status, answer.problem().as_str()), (422, "invalid-fields"), "{body}");
    }
    assert_eq!(retry("{").problem(), "invalid-json");
    assert_eq!(post(&server, "/webhooks/stripe/events/evt_2/retry", r#"{"reason":"x"}"#).problem(), "not-found");
    assert_eq!(endpoint.calls().len(), 3, "nothing of this runs anything");

    let answer = retry(r#"{"reason":"the shop is open again"}"#);
    assert_eq!((answer.status, answer.json()), (202, json!({ "event_id": "evt_1", "processing_status": "pending" })));
    becomes(place, "evt_1", State::Completed);
    let told = shown(&server, "/webhooks/stripe/events/evt_1");
    assert_eq!((&told["retry_count"], &told["processing_result"]["status"]), (&json!(0), &json!(202)));
    let ends: Vec<_> = told["attempts"].as_array().unwrap().iter().map(|it| it["end"].clone()).collect();
    assert_eq!(ends, ["failed", "failed", "failed", "completed"]);
    let decision = &told["decisions"][0];
    assert_eq!((&decision["by"], decision["at"].is_string()), (&json!("local"), true));
    assert_eq!(decision["what"], "it may run again: the shop is open again");
    assert_eq!(audited(place), ["local operations.retry: the shop is open again"]);
    let stood = |sql| -> Value { serde_json::from_str(&rows(place, sql)[0]).unwrap() };
    let (before, after) = (stood("SELECT before FROM semel_audit"), stood("SELECT after FROM semel_audit"));
    for (told, state, failures) in [(before, "failed", 3), (after, "pending", 0)] {
        assert_eq!((&told["key"], &told["scope"]), (&json!("evt_1"), &json!("default/webhooks/stripe")));
        assert_eq!((&told["state"], &told["failures"]), (&json!(state), &json!(failures)));
    }
    assert!(endpoint.keys().iter().all(|key| *key == endpoint.keys()[0]), "under the same key as ever");
    assert_eq!(shown(&server, "/webhooks/stripe/monitor")["retries"]["at_limit"], 0);
    assert_eq!(retry(r#"{"reason":"once more"}"#).problem(), "event-completed");
    assert_eq!(audited(place).len(), 1, "what was not done was not decided");
}

fn a_running_or_completed_event_is_not_run_again(place: &Place) {
    let endpoint = Endpoint::that([Does::Waits]);
    let server = start(place, &[("SEMEL_WEBHOOKS_STRIPE_HANDLERS", &forward(&endpoint.url()))]);
    let retry = || post(&server, "/webhooks/stripe/events/evt_1/retry", r#"{"reason":"it takes so long"}"#);
    thread::scope(|scope| {
        let first = scope.spawn(|| status(&deliver(&server, &event("evt_1", 1_700_000_000, "a"))));
        endpoint.is_called(1);
        let answer = retry();
        assert_eq!((answer.status, answer.problem().as_str()), (409, "event-running"));
        endpoint.let_go();
        assert_eq!(first.join().unwrap(), "processed");
    });
    let answer = retry();
    assert_eq!((answer.status, answer.problem().as_str()), (409, "event-completed"));
    assert_eq!(endpoint.calls().len(), 1);
    let told = shown(&server, "/webhooks/stripe/events/evt_1");
    assert_eq!(told["decisions"], json!([]), "what was not done was not decided");
    assert_eq!(audited(place), [""; 0]);
}
