//! The laws of the TTL over the HTTP API of operations.

use serde_json::{Value, json};

use crate::{
    operations_api::{Api, between, id, int, pay, refused, with},
    operations_api_leases::calls,
    place::{Place, on_both_databases},
    proposals::rows,
    support::{SOON, eventually},
};

on_both_databases! {
    the_end_of_the_ttl_counts_from_the_settle
    a_settled_record_is_absent_after_its_ttl_without_a_sweep
    a_record_that_is_not_settled_outlives_its_ttl
    a_failed_record_with_retries_left_outlives_its_ttl
    the_sweep_deletes_expired_records
}

fn the_end_of_the_ttl_counts_from_the_settle(place: &Place) {
    let api = Api::start(place);
    let work = |input: &str| with(&pay(input), json!({ "ttlSeconds": 1000, "maxRetries": 1 }));
    let pends = |operation: &Value| {
        assert_eq!(between(&operation["createdAt"], &operation["expiresAt"]), 1000.0, "{operation}");
    };
    let settled = |operation: &Value| {
        assert_eq!(between(&operation["updatedAt"], &operation["expiresAt"]), 1000.0, "{operation}");
        assert_eq!(api.shown(id(operation))["expiresAt"], operation["expiresAt"]);
    };
    let held = api.claim(&work("done"));
    pends(&held.operation);
    settled(&api.complete(&held, json!(1)));
    let held = api.claim(&work("fails"));
    pends(&api.fail(&held, "once"));
    let held = api.claim(&work("fails"));
    pends(&held.operation);
    settled(&api.fail(&held, "twice"));
    let held = api.claim(&work("in doubt"));
    pends(&api.does(&held, "doubt", json!({ "reason": "r" })));
    pends(&api.enqueue(&work("later")));
    let held = api.next(&json!({ "operationNames": ["pay"] })).remove(0);
    pends(&held.operation);
    settled(&api.complete(&held, json!(1)));
}

fn a_settled_record_is_absent_after_its_ttl_without_a_sweep(place: &Place) {
    let api = Api::start(place);
    let work =
        |key: &str, input: u32| with(&pay(input), json!({ "idempotencyKey": key, "ttlSeconds": 1, "maxRetries": 0 }));
    let done = api.claim(&work("done", 1));
    api.complete(&done, json!(1));
    let failed = api.claim(&work("failed", 1));
    api.fail(&failed, "for good");
    for held in [&done, &failed] {
        let path = format!("/{}", held.id);
        eventually(SOON, "it is absent", || api.get(&path).status == 404);
        for (route, body) in [
            ("retry", json!({ "reason": "r" })),
            ("cancel", json!({ "reason": "r" })),
            ("resolve", json!({ "as": "failed", "reason": "r" })),
        ] {
            refused(&api.post(&format!("{path}/{route}"), &body), 404, "not-found");
        }
        for (call, body) in calls() {
            refused(&api.call(held, call, body), 404, "not-found");
        }
    }
    assert_eq!(api.get("").json()["items"], json!([]));
    assert_eq!(api.get("?key=done").json()["items"], json!([]));
    assert_eq!(rows(place, "SELECT state FROM semel_operations WHERE service = 'operations'").len(), 2);
    for (key, held) in [("done", done), ("failed", failed)] {
        let anew = api.claim(&work(key, 2));
        assert!(anew.id != held.id && anew.operation["retryCount"] == 0, "the key is free");
    }
}

/// Work that a program has asked for is not forgotten because it waits.
fn a_record_that_is_not_settled_outlives_its_ttl(place: &Place) {
    let api = Api::start_as(place, "api,sweeper", &[("SEMEL_SWEEP_EVERY", "100ms")]);
    let work = |input: &str| with(&pay(input), json!({ "ttlSeconds": 1 }));
    let running = api.claim(&work("runs"));
    let doubted = api.claim(&work("in doubt"));
    api.does(&doubted, "doubt", json!({ "reason": "r" }));
    let waiting = id(&api.enqueue(&work("waits")));
    let released = api.claim(&work("fails, and is released"));
    api.fail(&released, "once");
    api.does(&api.claim(&work("fails, and is released")), "release", json!({}));
    the_ttl_is_over(&api);
    for id in [running.id, doubted.id, waiting, released.id] {
        is_kept(&api, id);
    }
    api.complete(&running, json!(1));
}

/// Waits until what settled before this would have expired.
fn the_ttl_is_over(api: &Api) {
    let last = api.claim(&with(&pay("settles last"), json!({ "ttlSeconds": 1 })));
    api.complete(&last, json!(1));
    eventually(SOON, "the ttl is over", || api.get(&format!("/{}", last.id)).status == 404);
}

fn is_kept(api: &Api, id: i64) {
    let shown = api.shown(id);
    assert_eq!((&shown["status"], &shown["isExpired"]), (&json!("PENDING"), &json!(false)), "{shown}");
}

/// Its retries are not forgotten because no worker asks for a while.
fn a_failed_record_with_retries_left_outlives_its_ttl(place: &Place) {
    let api = Api::start_as(place, "api,sweeper", &[("SEMEL_SWEEP_EVERY", "100ms")]);
    let work = |input: &str| with(&pay(input), json!({ "ttlSeconds": 1, "onLost": "rerun" }));
    let failed = api.claim(&work("fails"));
    api.fail(&failed, "once");
    let pulled = id(&api.enqueue(&work("is pulled, and fails")));
    api.fail(&api.next(&json!({ "operationNames": ["pay"] }))[0], "once");
    let lost = api.claim(&with(&work("is lost"), json!({ "leaseSeconds": 1 })));
    eventually(SOON, "the lease is lost", || api.shown(lost.id)["leaseExpiresAt"].is_null());
    the_ttl_is_over(&api);
    for id in [failed.id, pulled, lost.id] {
        is_kept(&api, id);
    }
    assert_eq!(int(&api.claim(&work("fails")).operation["retryCount"]), 1);
}

fn the_sweep_deletes_expired_records(place: &Place) {
    let api = Api::start_as(place, "api,sweeper", &[("SEMEL_SWEEP_EVERY", "100ms")]);
    let held = api.claim(&with(&pay(1), json!({ "ttlSeconds": 1 })));
    api.complete(&held, json!(1));
    eventually(SOON, "it is deleted", || {
        rows(place, "SELECT state FROM semel_operations WHERE service = 'operations'").is_empty()
    });
    refused(&api.get(&format!("/{}", held.id)), 404, "not-found");
    refused(&api.call(&held, "complete", json!({ "resultData": 1 })), 404, "not-found");
}
