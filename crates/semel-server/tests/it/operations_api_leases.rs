//! The laws of leases over the HTTP API of operations: renewal, settles that are sent again, zombies, release.

use std::{thread, time::Duration};

use serde_json::{Value, json};

use crate::{
    operations_api::{Api, Held, between, id, micros, pay, refused, with, wrong_fields},
    place::{Place, on_both_databases},
    support::{SOON, eventually},
};

on_both_databases! {
    a_renewal_moves_the_end_of_the_lease
    a_renewed_lease_outlives_its_first_end
    an_expired_lease_is_not_renewed
    a_zombie_is_refused_on_every_call_after_a_takeover
    a_zombie_is_refused_on_every_call_after_its_run_is_in_doubt
    a_zombie_is_refused_on_every_call_after_a_person_decided
    a_call_under_a_fence_that_was_never_granted_is_refused
    a_settle_sent_again_with_its_content_succeeds
    a_settle_sent_again_with_other_content_is_refused
    a_failure_sent_again_with_another_verdict_on_retries_is_refused
    a_released_first_run_leaves_no_record
    a_released_later_run_keeps_the_record_and_counts_no_retry
    a_released_enqueued_operation_is_kept_and_handed_out_again
    a_call_of_a_holder_names_its_wrong_fields
    an_unknown_operation_is_not_found
    an_error_may_have_lines
}

/// Work under a lease of a second that any run may repeat.
fn rerun(input: u32) -> Value {
    with(&pay(input), json!({ "onLost": "rerun", "leaseSeconds": 1 }))
}

/// Every call of a lease's holder.
pub(crate) fn calls() -> [(&'static str, Value); 5] {
    [
        ("renew", json!({})),
        ("complete", json!({ "resultData": 7 })),
        ("fail", json!({ "errorMessage": "late" })),
        ("doubt", json!({ "reason": "late" })),
        ("release", json!({})),
    ]
}

/// Every call is refused, and changes nothing.
pub(crate) fn is_a_zombie(api: &Api, held: &Held) {
    let before = api.shown(held.id);
    for (call, body) in calls() {
        let answer = api.call(held, call, body);
        refused(&answer, 409, "lease-lost");
        assert_eq!(answer.json()["operation"]["fence"], before["fence"], "{call}");
    }
    let after = api.shown(held.id);
    for name in
        ["status", "fence", "updatedAt", "retryCount", "errorMessage", "resultData", "leaseExpiresAt", "expiresAt"]
    {
        assert_eq!(after[name], before[name], "{name}");
    }
}

fn a_renewal_moves_the_end_of_the_lease(place: &Place) {
    let api = Api::start(place);
    let held = api.claim(&with(&pay(1), json!({ "leaseSeconds": 30 })));
    let renewed = api.does(&held, "renew", json!({}));
    assert_eq!(renewed["cancelRequested"], false);
    assert_eq!(renewed["lease"]["fence"], held.fence);
    let until = &renewed["lease"]["leaseExpiresAt"];
    assert!(micros(until) > micros(&held.until), "{until}");
    assert_eq!(&api.shown(held.id)["leaseExpiresAt"], until);
    api.complete(&held, json!(1));
    refused(&api.call(&held, "renew", json!({})), 409, "lease-lost");
}

fn a_renewed_lease_outlives_its_first_end(place: &Place) {
    let api = Api::start(place);
    let held = api.claim(&with(&pay(1), json!({ "leaseSeconds": 2 })));
    let mut until = held.until.clone();
    eventually(SOON, "the first end has passed", || {
        thread::sleep(Duration::from_millis(200));
        until = api.does(&held, "renew", json!({}))["lease"]["leaseExpiresAt"].clone();
        between(&held.until, &until) > 2.0
    });
    assert_eq!(api.shown(held.id)["leaseExpired"], false);
    refused(&api.post("", &pay(1)), 409, "in-flight");
}

fn an_expired_lease_is_not_renewed(place: &Place) {
    let api = Api::start(place);
    let lost = api.loses(&pay(1));
    refused(&api.call(&lost, "renew", json!({})), 409, "lease-lost");
}

fn a_zombie_is_refused_on_every_call_after_a_takeover(place: &Place) {
    let (api, other) = (Api::start(place), Api::start(place));
    let lost = api.loses(&rerun(1));
    let owner = other.claim(&pay(1));
    is_a_zombie(&api, &lost);
    other.does(&owner, "renew", json!({}));
    let done = other.complete(&owner, json!("of the owner"));
    is_a_zombie(&api, &lost);
    assert_eq!(api.shown(lost.id), done);
}

fn a_zombie_is_refused_on_every_call_after_its_run_is_in_doubt(place: &Place) {
    let api = Api::start(place);
    let lost = api.loses(&pay(1));
    refused(&api.post("", &pay(1)), 409, "in-doubt");
    is_a_zombie(&api, &lost);
}

fn a_zombie_is_refused_on_every_call_after_a_person_decided(place: &Place) {
    let api = Api::start(place);
    for (input, verdict) in [(1, "retry"), (2, "resolve")] {
        let lost = api.loses(&pay(input));
        let body = if verdict == "retry" { json!({ "reason": "r" }) } else { json!({ "as": "failed", "reason": "r" }) };
        assert_eq!(api.post(&format!("/{}/{verdict}", lost.id), &body).status, 200);
        is_a_zombie(&api, &lost);
    }
}

fn a_call_under_a_fence_that_was_never_granted_is_refused(place: &Place) {
    let api = Api::start(place);
    let held = api.claim(&pay(1));
    for fence in [held.fence + 1, held.fence - 1, 0, -1, i64::MAX] {
        is_a_zombie(&api, &Held { fence, ..held.clone() });
    }
    api.complete(&held, json!(1));
}

/// Each way to settle, and the same with other content.
fn settles() -> [(&'static str, Value, Vec<Value>); 4] {
    [
        ("complete", json!({ "resultData": { "n": 1 } }), vec![json!({ "resultData": { "n": 2 } }), json!({})]),
        ("fail", json!({ "errorMessage": "a" }), vec![json!({ "errorMessage": "b" })]),
        ("doubt", json!({ "reason": "a" }), vec![json!({ "reason": "b" })]),
        ("release", json!({}), vec![]),
    ]
}

fn a_settle_sent_again_with_its_content_succeeds(place: &Place) {
    let (api, other) = (Api::start(place), Api::start(place));
    for (n, (call, body, _)) in settles().into_iter().enumerate() {
        // The second run: a release of the first leaves nothing to be shown.
        api.fail(&api.claim(&pay(n)), "first");
        let held = api.claim(&pay(n));
        let settled = api.does(&held, call, body.clone());
        for node in [&api, &other, &api] {
            let again = node.does(&held, call, body.clone());
            for name in ["status", "fence", "resultData", "errorMessage", "retryCount", "updatedAt", "expiresAt"] {
                assert_eq!(again[name], settled[name], "{call}: {name}");
            }
        }
    }
}

fn a_settle_sent_again_with_other_content_is_refused(place: &Place) {
    let api = Api::start(place);
    for (n, (call, body, others)) in settles().into_iter().enumerate() {
        api.fail(&api.claim(&pay(n)), "first");
        let held = api.claim(&pay(n));
        let settled = api.does(&held, call, body);
        for other in others {
            refused(&api.call(&held, call, other), 409, "lease-lost");
        }
        for (another, body) in calls().into_iter().filter(|(another, _)| *another != call) {
            refused(&api.call(&held, another, body), 409, "lease-lost");
        }
        assert_eq!(api.shown(held.id)["status"], settled["status"]);
    }
}

fn a_failure_sent_again_with_another_verdict_on_retries_is_refused(place: &Place) {
    let api = Api::start(place);
    for retryable in [true, false] {
        let held = api.claim(&pay(retryable));
        let failed = |retryable: bool| json!({ "errorMessage": "a", "retryable": retryable });
        let settled = api.does(&held, "fail", failed(retryable));
        assert_eq!(api.does(&held, "fail", failed(retryable)), settled);
        refused(&api.call(&held, "fail", failed(!retryable)), 409, "lease-lost");
        assert_eq!(api.shown(held.id)["canRetry"], retryable);
    }
}

fn a_released_first_run_leaves_no_record(place: &Place) {
    let (api, other) = (Api::start(place), Api::start(place));
    let work = |input: u32| with(&pay(input), json!({ "idempotencyKey": "k" }));
    let held = api.claim(&work(1));
    for node in [&api, &api, &other] {
        assert_eq!(node.does(&held, "release", json!({})), json!({ "released": true }));
    }
    refused(&api.get(&format!("/{}", held.id)), 404, "not-found");
    assert_eq!(api.get("?key=k").json()["items"], json!([]));
    let next = api.claim(&work(2));
    assert!(next.id != held.id, "the key is free, also for another payload");
    assert_eq!(next.operation["retryCount"], 0);
}

fn a_released_later_run_keeps_the_record_and_counts_no_retry(place: &Place) {
    let api = Api::start(place);
    api.fail(&api.claim(&pay(1)), "once");
    let second = api.claim(&pay(1));
    let released = api.does(&second, "release", json!({}));
    assert_eq!((&released["status"], &released["waiting"]), (&json!("PENDING"), &json!(true)));
    let third = api.claim(&pay(1));
    assert_eq!((third.id, &third.operation["retryCount"]), (second.id, &json!(1)));
    refused(&api.call(&second, "release", json!({})), 409, "lease-lost");
    api.complete(&third, json!(1));
}

fn a_released_enqueued_operation_is_kept_and_handed_out_again(place: &Place) {
    let api = Api::start(place);
    let enqueued = api.enqueue(&pay(json!({ "n": 1 })));
    let next = json!({ "operationNames": ["pay"] });
    let first = api.next(&next).remove(0);
    let released = api.does(&first, "release", json!({}));
    assert_eq!((id(&released), &released["waiting"]), (id(&enqueued), &json!(true)));
    let second = api.next(&next).remove(0);
    assert_eq!((second.id, &second.operation["retryCount"]), (first.id, &json!(0)));
    assert_eq!(second.operation["input"], json!({ "n": 1 }));
    assert!(second.fence > first.fence);
}

fn a_call_of_a_holder_names_its_wrong_fields(place: &Place) {
    let api = Api::start(place);
    let held = api.claim(&pay(1));
    let wrong = |call: &str, body: Value| {
        let mut fields = wrong_fields(&api.post(&format!("/{}/{call}", held.id), &body));
        fields.sort();
        fields
    };
    for (call, body) in calls() {
        assert_eq!(wrong(call, with(&body, json!({ "fenc": 1 }))), ["fenc", "fence"], "{call}");
        for fence in [json!("1"), json!(1.0), json!(null)] {
            assert_eq!(wrong(call, with(&body, json!({ "fence": fence }))), ["fence"], "{call}");
        }
    }
    assert_eq!(wrong("fail", json!({ "retryable": "no" })), ["errorMessage", "fence", "retryable"]);
    assert_eq!(wrong("fail", json!({ "fence": 1, "errorMessage": " " })), ["errorMessage"]);
    assert_eq!(wrong("doubt", json!({ "fence": 1 })), ["reason"]);
    api.complete(&held, json!(1));
}

fn an_unknown_operation_is_not_found(place: &Place) {
    let api = Api::start(place);
    for id in ["4711", "x", "-1", "0", "1e3", "99999999999999999999"] {
        refused(&api.get(&format!("/{id}")), 404, "not-found");
        for (call, body) in calls() {
            refused(&api.post(&format!("/{id}/{call}"), &with(&body, json!({ "fence": 4712 }))), 404, "not-found");
        }
    }
}

fn an_error_may_have_lines(place: &Place) {
    let api = Api::start(place);
    let failed = api.fail(&api.claim(&pay(1)), "Traceback:\n\tline 1\u{0}\u{1b}[31m");
    assert_eq!(failed["errorMessage"], "Traceback:\n\tline 1  [31m");
}
