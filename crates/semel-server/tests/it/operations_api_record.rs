//! The laws of the record: what the HTTP API shows of an operation.

use serde_json::{Value, json};

use crate::{
    operations_api::{Api, between, id, in_seconds, micros, pay, refused, with},
    place::{Place, on_both_databases},
};

on_both_databases! {
    a_claim_gets_a_lease_and_the_whole_record
    any_json_can_be_a_result
    each_state_has_its_flags
    each_transition_moves_the_time_of_the_update
    the_runs_are_shown_with_their_ends
}

fn a_claim_gets_a_lease_and_the_whole_record(place: &Place) {
    let api = Api::start(place);
    let work = json!({
        "operationName": "submit_claim", "processInstanceId": "a3f2e1d4", "activityId": "Task_SubmitClaim",
        "idempotencyKey": "proc-123",
    });
    let held = api.claim(&work);
    let shown = api.shown(held.id);
    assert_eq!(shown, held.operation);
    let expected = json!({
        "id": held.id, "idempotencyKey": "proc-123", "scope": "operations", "processInstanceId": "a3f2e1d4",
        "activityId": "Task_SubmitClaim", "operationName": "submit_claim", "status": "PENDING", "resultData": null,
        "errorMessage": null, "retryCount": 0, "maxRetries": 3, "fence": held.fence, "canRetry": true,
        "isExpired": false, "inDoubt": false, "leaseExpired": false, "backingOff": false, "waiting": false,
        "priority": 0, "notBefore": null, "leaseExpiresAt": held.until,
    });
    for (name, value) in expected.as_object().unwrap() {
        assert_eq!(&shown[name], value, "{name}");
    }
    assert_eq!(shown["createdAt"], shown["updatedAt"]);
    assert_eq!(between(&shown["createdAt"], &shown["expiresAt"]), 24.0 * 3600.0);
    assert_eq!(between(&shown["createdAt"], &held.until), 60.0);
    let runs = shown["attempts"].as_array().unwrap();
    assert_eq!((runs.len(), &runs[0]["startedAt"], &runs[0]["endedAt"]), (1, &shown["createdAt"], &Value::Null));
}

fn any_json_can_be_a_result(place: &Place) {
    let api = Api::start(place);
    for (n, result) in
        [json!(null), json!("a\n\u{1F600}"), json!(false), json!([]), json!([{ "a": [1, {}] }]), json!(0.5)]
            .into_iter()
            .enumerate()
    {
        assert_eq!(api.complete(&api.claim(&pay(n)), result.clone())["resultData"], result);
        assert_eq!(api.post("", &pay(n)).json()["operation"]["resultData"], result);
    }
    let held = api.claim(&pay("nothing"));
    assert_eq!(api.does(&held, "complete", json!({}))["resultData"], Value::Null);
}

/// The flags of an operation that is pending.
fn flags(operation: &Value) -> Vec<&str> {
    assert_eq!((&operation["status"], &operation["isExpired"]), (&json!("PENDING"), &json!(false)), "{operation}");
    let all = ["waiting", "backingOff", "leaseExpired", "inDoubt"];
    all.into_iter().filter(|name| operation[name].as_bool().unwrap()).collect()
}

fn each_state_has_its_flags(place: &Place) {
    let backoff = [("SEMEL_OPERATIONS_BACKOFF", "10m"), ("SEMEL_OPERATIONS_BACKOFF_CAP", "10m")];
    let api = Api::start_as(place, "api", &backoff);
    assert_eq!(flags(&api.enqueue(&pay("waits"))), ["waiting"]);
    assert_eq!(flags(&api.enqueue(&with(&pay("tomorrow"), json!({ "notBefore": in_seconds(86_400) })))), ["waiting"]);
    let running = api.claim(&pay("runs"));
    assert_eq!(flags(&api.shown(running.id)), [""; 0]);
    assert_eq!(flags(&api.fail(&running, "once")), ["backingOff"]);
    let lost = api.loses(&pay("lost"));
    assert_eq!(flags(&api.shown(lost.id)), ["leaseExpired"]);
    refused(&api.post("", &pay("lost")), 409, "in-doubt");
    assert_eq!(flags(&api.shown(lost.id)), ["inDoubt"]);
    for settled in [api.complete(&api.claim(&pay("done")), json!(1)), failed_for_good(&api)] {
        let set = ["waiting", "backingOff", "leaseExpired", "inDoubt", "canRetry", "isExpired"];
        assert!(set.into_iter().all(|name| settled[name] == false), "{settled}");
    }
}

/// An operation that failed and has no retries.
fn failed_for_good(api: &Api) -> Value {
    api.fail(&api.claim(&with(&pay("broken"), json!({ "maxRetries": 0 }))), "broken")
}

/// Completion also clears the error of the run before.
fn each_transition_moves_the_time_of_the_update(place: &Place) {
    let api = Api::start(place);
    let mut last = 0;
    let mut moved = |operation: &Value| {
        let updated = micros(&operation["updatedAt"]);
        assert!(updated > last, "{operation}");
        assert_eq!(api.shown(id(operation))["updatedAt"], operation["updatedAt"]);
        last = updated;
    };
    let enqueued = api.enqueue(&pay(1));
    moved(&enqueued);
    let first = api.claim(&pay(1));
    moved(&first.operation);
    moved(&api.fail(&first, "once"));
    let second = api.claim(&pay(1));
    moved(&second.operation);
    moved(&api.does(&second, "release", json!({})));
    let third = api.claim(&pay(1));
    moved(&third.operation);
    assert_eq!((&third.operation["retryCount"], &third.operation["errorMessage"]), (&json!(1), &json!("once")));
    let completed = api.complete(&third, json!(1));
    moved(&completed);
    assert_eq!((&completed["errorMessage"], &completed["retryCount"]), (&Value::Null, &json!(1)));
    assert_eq!(completed["createdAt"], enqueued["createdAt"]);
}

fn the_runs_are_shown_with_their_ends(place: &Place) {
    let api = Api::start(place);
    let work = with(&pay(1), json!({ "onLost": "rerun", "leaseSeconds": 1 }));
    let first = api.claim(&work);
    let failed = api.fail(&first, "the portal is down");
    let lost = api.loses(&work);
    let last = api.claim(&work);
    let runs = api.complete(&last, json!(1))["attempts"].clone();
    let ends: Vec<_> = runs.as_array().unwrap().iter().map(|run| run["end"].clone()).collect();
    assert_eq!(ends, ["failed", "timedOut", "completed"], "{runs}");
    assert_eq!((&runs[0]["error"], &runs[0]["endedAt"]), (&json!("the portal is down"), &failed["updatedAt"]));
    assert_eq!(runs[0]["startedAt"], first.operation["createdAt"]);
    assert_eq!(runs[1]["startedAt"], lost.operation["updatedAt"]);
    assert_eq!(runs[2]["startedAt"], last.operation["updatedAt"]);
    assert!(runs.as_array().unwrap().iter().all(|run| run["owner"].is_string()), "{runs}");
}
