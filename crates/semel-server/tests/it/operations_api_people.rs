//! The laws of what people decide over the HTTP API of operations, and of operations that belong to other services.

use serde_json::{Value, json};

use crate::{
    hooks::{deliver, event, start, status},
    operations_api::{Api, between, id, pay, refused, try_ask, with, wrong_fields},
    place::{Place, on_both_databases},
    proposals::{call, rows},
    support::Answer,
};

on_both_databases! {
    an_exhausted_operation_runs_again_after_a_retry
    an_operation_in_doubt_is_resolved_as_completed_with_a_result
    an_operation_in_doubt_is_resolved_as_failed
    an_operation_in_doubt_runs_again_after_a_retry
    a_verdict_keeps_the_ttl
    a_waiting_operation_that_is_cancelled_is_never_handed_out
    a_running_operation_that_is_cancelled_is_told_at_its_renewal
    a_run_that_took_effect_although_it_was_cancelled_is_completed
    a_deleted_operation_frees_its_key
    a_reason_may_be_in_the_query_of_a_deletion
    nothing_is_decided_about_a_live_lease
    an_expired_lease_stops_no_decision
    a_completed_operation_is_not_decided_again
    an_operation_in_doubt_is_not_cancelled
    a_decision_needs_a_reason
    decisions_are_audited_with_actor_and_reason
    operations_of_other_services_are_not_found
}

/// Decides about an operation.
fn decides(api: &Api, id: i64, decision: &str, body: Value) -> Answer {
    api.post(&format!("/{id}/{decision}"), &with(&body, json!({ "reason": "it is known" })))
}

/// Decides about an operation, and must be allowed to.
fn decided(api: &Api, id: i64, decision: &str, body: Value) -> Value {
    let answer = decides(api, id, decision, body);
    assert_eq!(answer.status, 200, "{}", answer.body);
    assert_eq!(api.shown(id), answer.json());
    answer.json()
}

/// An operation whose run is in doubt.
fn in_doubt(api: &Api, work: &Value) -> i64 {
    id(&api.does(&api.claim(work), "doubt", json!({ "reason": "no answer" })))
}

fn delete(api: &Api, id: i64, reason: &str) -> Answer {
    api.ask("DELETE", &format!("/{id}"), &json!({ "reason": reason }))
}

fn an_exhausted_operation_runs_again_after_a_retry(place: &Place) {
    let api = Api::start(place);
    let work = with(&pay(1), json!({ "maxRetries": 0 }));
    let held = api.claim(&work);
    api.fail(&held, "once");
    let retried = decided(&api, held.id, "retry", json!({}));
    assert_eq!(
        (&retried["status"], &retried["waiting"], &retried["retryCount"]),
        (&json!("PENDING"), &json!(true), &json!(0))
    );
    let again = api.claim(&work);
    assert!(again.id == held.id && again.fence > held.fence);
    assert_eq!(again.operation["retryCount"], 0);
    api.complete(&again, json!(1));
    // An enqueued one is handed out again.
    let enqueued = id(&api.enqueue(&with(&pay(2), json!({ "maxRetries": 0 }))));
    let next = json!({ "operationNames": ["pay"] });
    api.fail(&api.next(&next)[0], "once");
    assert!(api.next(&next).is_empty());
    decided(&api, enqueued, "retry", json!({}));
    assert_eq!(api.next(&next)[0].id, enqueued);
}

fn an_operation_in_doubt_is_resolved_as_completed_with_a_result(place: &Place) {
    let api = Api::start(place);
    let id = in_doubt(&api, &pay(1));
    let resolved = decided(&api, id, "resolve", json!({ "as": "completed", "resultData": { "claimId": 7 } }));
    assert_eq!((&resolved["status"], &resolved["inDoubt"]), (&json!("SUCCESS"), &json!(false)));
    assert_eq!((&resolved["resultData"], &resolved["errorMessage"]), (&json!({ "claimId": 7 }), &Value::Null));
    let replay = api.post("", &pay(1));
    assert_eq!((replay.status, &replay.json()["operation"]), (200, &resolved), "{}", replay.body);
}

fn an_operation_in_doubt_is_resolved_as_failed(place: &Place) {
    let api = Api::start(place);
    let id = in_doubt(&api, &pay(1));
    let both = decides(&api, id, "resolve", json!({ "as": "failed", "resultData": 1 }));
    assert_eq!(wrong_fields(&both), ["resultData"]);
    let resolved = decided(&api, id, "resolve", json!({ "as": "failed" }));
    assert_eq!((&resolved["status"], &resolved["errorMessage"]), (&json!("FAILED"), &json!("it is known")));
    refused(&api.post("", &pay(1)), 409, "attempts-exhausted");
    // A person may change this decision.
    assert_eq!(decided(&api, id, "resolve", json!({ "as": "completed" }))["status"], "SUCCESS");
}

fn an_operation_in_doubt_runs_again_after_a_retry(place: &Place) {
    let api = Api::start(place);
    let id = in_doubt(&api, &pay(1));
    refused(&api.post("", &pay(1)), 409, "in-doubt");
    assert_eq!(decided(&api, id, "retry", json!({}))["inDoubt"], false);
    assert_eq!(api.claim(&pay(1)).id, id);
}

fn a_verdict_keeps_the_ttl(place: &Place) {
    let api = Api::start(place);
    let work = |input: &str| with(&pay(input), json!({ "ttlSeconds": 1000, "maxRetries": 0, "leaseSeconds": 1 }));
    let keeps = |operation: &Value| {
        assert_eq!(between(&operation["updatedAt"], &operation["expiresAt"]), 1000.0, "{operation}");
    };
    for (n, verdict) in ["completed", "failed"].into_iter().enumerate() {
        keeps(&decided(&api, in_doubt(&api, &work(&format!("doubted {n}"))), "resolve", json!({ "as": verdict })));
        let lost = api.loses(&work(&format!("lost {n}")));
        keeps(&decided(&api, lost.id, "resolve", json!({ "as": verdict })));
        let held = api.claim(&work(&format!("failed {n}")));
        api.fail(&held, "for good");
        keeps(&decided(&api, held.id, "resolve", json!({ "as": verdict })));
    }
    keeps(&decided(&api, id(&api.enqueue(&work("waits"))), "cancel", json!({})));
    let retried = decided(&api, in_doubt(&api, &work("retried")), "retry", json!({}));
    assert_eq!(between(&retried["createdAt"], &retried["expiresAt"]), 1000.0);
    keeps(&api.complete(&api.claim(&work("retried")), json!(1)));
}

fn a_waiting_operation_that_is_cancelled_is_never_handed_out(place: &Place) {
    let api = Api::start(place);
    let id = id(&api.enqueue(&pay(1)));
    let cancelled = decided(&api, id, "cancel", json!({}));
    assert_eq!((&cancelled["status"], &cancelled["errorMessage"]), (&json!("FAILED"), &json!("cancelled")));
    assert!(api.next(&json!({ "operationNames": ["pay"] })).is_empty());
    refused(&api.post("", &pay(1)), 409, "attempts-exhausted");
    assert_eq!(decides(&api, id, "cancel", json!({})).status, 200, "twice is once");
}

fn a_running_operation_that_is_cancelled_is_told_at_its_renewal(place: &Place) {
    let (api, other) = (Api::start(place), Api::start(place));
    for (input, call, body) in [(1, "fail", json!({ "errorMessage": "stopped" })), (2, "release", json!({}))] {
        let held = api.claim(&pay(input));
        let asked = decides(&other, held.id, "cancel", json!({}));
        assert_eq!((asked.status, &asked.json()["status"]), (202, &json!("PENDING")), "{}", asked.body);
        assert_eq!(api.does(&held, "renew", json!({}))["cancelRequested"], true);
        let stopped = api.does(&held, call, body);
        assert_eq!((&stopped["status"], &stopped["errorMessage"]), (&json!("FAILED"), &json!("cancelled")));
        refused(&api.post("", &pay(input)), 409, "attempts-exhausted");
    }
}

fn a_run_that_took_effect_although_it_was_cancelled_is_completed(place: &Place) {
    let api = Api::start(place);
    let held = api.claim(&pay(1));
    assert_eq!(decides(&api, held.id, "cancel", json!({})).status, 202);
    assert_eq!(api.complete(&held, json!("paid"))["status"], "SUCCESS");
}

fn a_deleted_operation_frees_its_key(place: &Place) {
    let api = Api::start(place);
    let work = |input: u32| with(&pay(input), json!({ "idempotencyKey": "k" }));
    let mut ids = vec![in_doubt(&api, &work(1))];
    for round in 2..5 {
        let last = *ids.last().unwrap();
        let deleted = delete(&api, last, "a slip");
        assert_eq!((deleted.status, deleted.json()), (200, json!({ "deleted": true })));
        refused(&delete(&api, last, "a slip"), 404, "not-found");
        refused(&api.get(&format!("/{last}")), 404, "not-found");
        let held = api.claim(&work(round));
        assert!(!ids.contains(&held.id));
        ids.push(held.id);
        match round {
            2 => api.complete(&held, json!(1)),
            _ => api.fail(&held, "once"),
        };
    }
}

fn a_reason_may_be_in_the_query_of_a_deletion(place: &Place) {
    let api = Api::start(place);
    let id = in_doubt(&api, &pay(1));
    let deleted = api.ask("DELETE", &format!("/{id}?reason=a%20slip"), &Value::Null);
    assert_eq!((deleted.status, deleted.json()), (200, json!({ "deleted": true })), "{}", deleted.body);
    assert_eq!(rows(place, "SELECT reason FROM semel_audit"), ["a slip"]);
}

fn nothing_is_decided_about_a_live_lease(place: &Place) {
    let api = Api::start(place);
    let held = api.claim(&pay(1));
    for (decision, body) in
        [("retry", json!({})), ("resolve", json!({ "as": "completed" })), ("resolve", json!({ "as": "failed" }))]
    {
        let answer = decides(&api, held.id, decision, body);
        refused(&answer, 409, "operation-running");
        assert_eq!(answer.json()["retryable"], true);
    }
    refused(&delete(&api, held.id, "r"), 409, "operation-running");
    assert_eq!(api.complete(&held, json!(1))["status"], "SUCCESS");
}

fn an_expired_lease_stops_no_decision(place: &Place) {
    let api = Api::start(place);
    for (input, decision, body) in
        [(1, "retry", json!({})), (2, "resolve", json!({ "as": "completed", "resultData": 7 }))]
    {
        let lost = api.loses(&pay(input));
        let fence = decided(&api, lost.id, decision, body)["fence"].as_i64().unwrap();
        assert!(fence > lost.fence);
        refused(&api.call(&lost, "complete", json!({ "resultData": "late" })), 409, "lease-lost");
    }
    let lost = api.loses(&pay(3));
    assert_eq!(delete(&api, lost.id, "r").status, 200);
    for (call, body) in [("complete", json!({})), ("renew", json!({})), ("fail", json!({ "errorMessage": "late" }))] {
        let answer = api.call(&lost, call, body);
        assert!([404, 409].contains(&answer.status), "{}", answer.body);
    }
    refused(&api.get(&format!("/{}", lost.id)), 404, "not-found");
}

fn a_completed_operation_is_not_decided_again(place: &Place) {
    let api = Api::start(place);
    let held = api.claim(&pay(1));
    let done = api.complete(&held, json!("paid"));
    for (decision, body) in [
        ("retry", json!({})),
        ("cancel", json!({})),
        ("resolve", json!({ "as": "completed" })),
        ("resolve", json!({ "as": "failed" })),
    ] {
        refused(&decides(&api, held.id, decision, body), 409, "operation-completed");
    }
    assert_eq!(api.shown(held.id), done);
}

fn an_operation_in_doubt_is_not_cancelled(place: &Place) {
    let api = Api::start(place);
    let id = in_doubt(&api, &pay(1));
    refused(&decides(&api, id, "cancel", json!({})), 409, "in-doubt");
    assert_eq!(api.shown(id)["inDoubt"], true);
    let lost = api.loses(&pay(2)).id;
    refused(&decides(&api, lost, "cancel", json!({})), 409, "in-doubt");
}

fn a_decision_needs_a_reason(place: &Place) {
    let api = Api::start(place);
    let id = in_doubt(&api, &pay(1));
    for (method, path, body) in [
        ("POST", "/retry", json!({})),
        ("POST", "/cancel", json!({})),
        ("POST", "/resolve", json!({ "as": "failed" })),
        ("DELETE", "", json!({})),
    ] {
        for reason in [json!({}), json!({ "reason": " " }), json!({ "reason": null }), json!({ "reason": 7 })] {
            let answer = api.ask(method, &format!("/{id}{path}"), &with(&body, reason));
            assert_eq!(wrong_fields(&answer), ["reason"], "{method} {path}");
        }
        let mistaken = json!({ "reason": "r", "as": "retry", "why": 1 });
        assert!(wrong_fields(&api.ask(method, &format!("/{id}{path}"), &mistaken)).contains(&"why".to_owned()));
    }
    assert_eq!(wrong_fields(&api.post(&format!("/{id}/resolve"), &json!({}))), ["as", "reason"]);
    assert_eq!(wrong_fields(&decides(&api, id, "resolve", json!({ "as": "SUCCESS" }))), ["as"]);
    assert_eq!(api.shown(id)["inDoubt"], true);
}

fn decisions_are_audited_with_actor_and_reason(place: &Place) {
    let api = Api::start(place);
    let id = in_doubt(&api, &pay(1));
    let with_reason = |reason: &str| json!({ "reason": reason });
    let decide = |path: &str, body: Value| assert!(api.post(&format!("/{id}/{path}"), &body).status < 300);
    decide("retry", with_reason("mended"));
    decide("cancel", with_reason("no need"));
    decide("resolve", with(&with_reason("seen there"), json!({ "as": "completed" })));
    refused(&decides(&api, id, "retry", json!({})), 409, "operation-completed");
    assert_eq!(delete(&api, id, "a slip").status, 200);
    let told = rows(place, "SELECT actor || ' ' || action || ': ' || reason FROM semel_audit ORDER BY id");
    let decisions = ["retry: mended", "cancel: no need", "complete: seen there", "purge: a slip"];
    assert_eq!(told, decisions.map(|decision| format!("local operations.{decision}")));
    let subjects = rows(place, "SELECT DISTINCT subject FROM semel_audit");
    assert_eq!(subjects, [id.to_string()]);
}

/// A fence is not a secret, and the other services have rules of their own.
fn operations_of_other_services_are_not_found(place: &Place) {
    let server = start(place, &[]);
    assert_eq!(status(&deliver(&server, &event("evt_1", 1_700_000_000, "a"))), "processed");
    let client = r#"{"nome":"Ana","email":"ana@example.com"}"#;
    assert_eq!(call(server.address, "POST", "/clientes", Some("k"), client).unwrap().status, 201);
    let before = place.json(["operations", "list", "--json"])["items"].clone();
    let services: Vec<_> = before.as_array().unwrap().iter().map(|op| op["service"].as_str().unwrap()).collect();
    assert_eq!(services, ["proposals", "webhooks"]);
    for op in before.as_array().unwrap() {
        let (id, fence) = (&op["id"], json!({ "fence": op["fence"] }));
        let reason = json!({ "reason": "r" });
        for (method, path, body) in [
            ("GET", "", Value::Null),
            ("DELETE", "", reason.clone()),
            ("POST", "/renew", fence.clone()),
            ("POST", "/complete", fence.clone()),
            ("POST", "/fail", with(&fence, json!({ "errorMessage": "e" }))),
            ("POST", "/doubt", with(&fence, reason.clone())),
            ("POST", "/release", fence.clone()),
            ("POST", "/retry", reason.clone()),
            ("POST", "/cancel", reason.clone()),
            ("POST", "/resolve", with(&reason, json!({ "as": "completed" }))),
        ] {
            let answer = try_ask(server.address, method, &format!("/{id}{path}"), &body).unwrap();
            assert_eq!(
                (answer.status, answer.json()["type"].clone()),
                (404, json!("/problems/not-found")),
                "{method} {path}"
            );
        }
    }
    assert_eq!(place.json(["operations", "list", "--json"])["items"], before);
    let listed = try_ask(server.address, "GET", "?key=evt_1", &Value::Null).unwrap();
    assert_eq!(listed.json()["items"], json!([]));
}
