//! The laws of enqueued operations over the HTTP API, and of what is handed out of them.

use std::{thread, time::Duration};

use serde_json::{Value, json};

use crate::{
    operations_api::{Api, Held, between, id, in_seconds, micros, pay, refused, with, wrong_fields},
    operations_api_tokens::TOKENS,
    place::{Place, on_both_databases},
    support::{SOON, eventually},
};

on_both_databases! {
    an_enqueued_operation_waits_and_is_known_by_its_key
    an_enqueued_operation_is_handed_out_once_with_its_input
    an_enqueued_operation_can_be_claimed_by_its_key
    an_operation_that_was_claimed_by_key_is_never_handed_out
    a_failed_operation_is_handed_out_again_until_it_is_exhausted
    an_operation_that_lost_its_worker_is_handed_out_again_under_rerun_and_not_under_hold
    urgent_operations_are_handed_out_first
    an_operation_is_not_handed_out_before_its_time
    no_more_are_handed_out_than_asked_for
    several_names_are_asked_for_at_once_and_none_starves
    the_request_may_choose_the_length_of_the_leases
    a_request_repeated_with_its_token_gets_the_same_leases
    a_token_hands_out_only_leases_that_live
    every_wrong_field_of_a_request_for_work_is_named_at_once
    many_requests_at_once_share_the_operations
}

/// A request for one operation `pay`.
fn one() -> Value {
    json!({ "operationNames": ["pay"] })
}

fn many() -> Value {
    json!({ "operationNames": ["pay"], "max": 100 })
}

fn ids(held: &[Held]) -> Vec<i64> {
    held.iter().map(|held| held.id).collect()
}

fn an_enqueued_operation_waits_and_is_known_by_its_key(place: &Place) {
    let api = Api::start(place);
    let later = with(&pay(json!({ "n": 1 })), json!({ "later": true }));
    let enqueued = api.enqueue(&later);
    let expected = json!({
        "status": "PENDING", "waiting": true, "input": { "n": 1 }, "retryCount": 0, "maxRetries": 3, "canRetry": true,
        "attempts": [], "leaseExpiresAt": null, "priority": 0, "notBefore": null,
    });
    for (name, value) in expected.as_object().unwrap() {
        assert_eq!(&enqueued[name], value, "{name}");
    }
    assert_eq!(api.shown(id(&enqueued)), enqueued);
    let again = api.post("", &later);
    assert_eq!((again.status, &again.json()["claim"]), (202, &json!("waiting")), "{}", again.body);
    assert_eq!(again.json()["operation"], enqueued);
    let held = api.next(&one()).remove(0);
    let running = api.post("", &later);
    refused(&running, 409, "in-flight");
    assert!(running.header("retry-after").is_some());
    api.complete(&held, json!("paid"));
    let replay = api.post("", &later);
    assert_eq!((replay.status, &replay.json()["claim"]), (200, &json!("replay")), "{}", replay.body);
    assert_eq!(replay.json()["operation"], api.shown(held.id));
}

fn an_enqueued_operation_is_handed_out_once_with_its_input(place: &Place) {
    let api = Api::start(place);
    let enqueued = api.enqueue(&pay(json!({ "n": [1, "\u{e9}"] })));
    let held = api.next(&one());
    assert_eq!(ids(&held), [id(&enqueued)]);
    assert_eq!(held[0].operation["input"], json!({ "n": [1, "\u{e9}"] }));
    assert_eq!((&held[0].operation["waiting"], &held[0].operation["retryCount"]), (&json!(false), &json!(0)));
    assert_eq!(between(&held[0].operation["updatedAt"], &held[0].until), 60.0);
    assert!(api.next(&many()).is_empty());
    let done = api.complete(&held[0], json!("paid"));
    assert_eq!((&done["status"], &done["resultData"]), (&json!("SUCCESS"), &json!("paid")));
    assert_eq!(api.shown(held[0].id)["attempts"].as_array().unwrap().len(), 1);
}

fn an_enqueued_operation_can_be_claimed_by_its_key(place: &Place) {
    let api = Api::start(place);
    let enqueued = api.enqueue(&pay(1));
    let held = api.claim(&pay(1));
    assert_eq!((held.id, &held.operation["retryCount"]), (id(&enqueued), &json!(0)));
    assert!(api.next(&many()).is_empty());
    api.fail(&held, "once");
    assert_eq!(ids(&api.next(&many())), [held.id], "it was enqueued, so its retries are handed out");
}

fn an_operation_that_was_claimed_by_key_is_never_handed_out(place: &Place) {
    let api = Api::start_as(place, "api,sweeper", &[("SEMEL_SWEEP_EVERY", "100ms")]);
    let failed = api.claim(&pay("fails"));
    api.fail(&failed, "once");
    api.fail(&api.claim(&pay("is released")), "once");
    api.does(&api.claim(&pay("is released")), "release", json!({}));
    let retried = api.claim(&with(&pay("is retried by a person"), json!({ "maxRetries": 0 })));
    api.fail(&retried, "once");
    assert_eq!(api.post(&format!("/{}/retry", retried.id), &json!({ "reason": "r" })).status, 200);
    let lost = api.claim(&with(&pay("is lost"), json!({ "leaseSeconds": 1, "onLost": "rerun" })));
    eventually(SOON, "the sweep has ended the lease", || {
        let shown = api.shown(lost.id);
        shown["leaseExpiresAt"].is_null() && shown["status"] == "PENDING"
    });
    assert!(api.next(&many()).is_empty());
    for input in ["fails", "is released", "is retried by a person", "is lost"] {
        api.complete(&api.claim(&pay(input)), json!(1));
    }
}

fn a_failed_operation_is_handed_out_again_until_it_is_exhausted(place: &Place) {
    let api = Api::start(place);
    let enqueued = api.enqueue(&with(&pay(1), json!({ "maxRetries": 2 })));
    let mut last = 0;
    for run in 0..=2 {
        let held = api.next(&one()).remove(0);
        assert_eq!((held.id, &held.operation["retryCount"]), (id(&enqueued), &json!(run)));
        assert!(held.fence > last);
        last = held.fence;
        api.fail(&held, "again");
    }
    assert_eq!(api.shown(id(&enqueued))["status"], "FAILED");
    assert!(api.next(&many()).is_empty());
    refused(&api.post("", &with(&pay(1), json!({ "later": true }))), 409, "attempts-exhausted");
    let hopeless = id(&api.enqueue(&pay(2)));
    let held = api.next(&one()).remove(0);
    api.does(&held, "fail", json!({ "errorMessage": "no", "retryable": false }));
    assert_eq!(api.shown(hopeless)["status"], "FAILED");
    assert!(api.next(&many()).is_empty());
}

fn an_operation_that_lost_its_worker_is_handed_out_again_under_rerun_and_not_under_hold(place: &Place) {
    let api = Api::start_as(place, "api,sweeper", &[("SEMEL_SWEEP_EVERY", "100ms")]);
    let rerun = id(&api.enqueue(&with(&pay(1), json!({ "onLost": "rerun" }))));
    let hold = id(&api.enqueue(&pay(2)));
    let lost = api.next(&with(&many(), json!({ "leaseSeconds": 1 })));
    assert_eq!(lost.len(), 2);
    let mut again = Vec::new();
    eventually(SOON, "it is handed out again", || {
        again.extend(api.next(&many()));
        !again.is_empty()
    });
    assert_eq!((again[0].id, again[0].operation["attempts"].as_array().unwrap().len()), (rerun, 2));
    let before = lost.iter().find(|held| held.id == rerun).unwrap();
    assert!(again[0].fence > before.fence);
    refused(&api.call(before, "complete", json!({})), 409, "lease-lost");
    eventually(SOON, "the other is in doubt", || api.shown(hold)["inDoubt"] == true);
    assert!(api.next(&many()).is_empty());
    refused(&api.post("", &with(&pay(2), json!({ "later": true }))), 409, "in-doubt");
}

fn urgent_operations_are_handed_out_first(place: &Place) {
    let api = Api::start(place);
    for priority in [0, -2, 2, 1, -1] {
        api.enqueue(&with(&pay(priority), json!({ "priority": priority })));
    }
    let order: Vec<_> = (0..5).map(|_| api.next(&one())[0].operation["priority"].clone()).collect();
    assert_eq!(order, [2, 1, 0, -1, -2]);
}

fn an_operation_is_not_handed_out_before_its_time(place: &Place) {
    let api = Api::start(place);
    let (soon, tomorrow) = (json!(in_seconds(1)), json!(in_seconds(86_400)));
    let first = api.enqueue(&with(&pay(1), json!({ "notBefore": soon })));
    assert_eq!(first["notBefore"], soon);
    let past = api.enqueue(&with(&pay(2), json!({ "notBefore": in_seconds(-86_400) })));
    let far = id(&api.enqueue(&with(&pay(3), json!({ "notBefore": tomorrow }))));
    let mut order = Vec::new();
    eventually(SOON, "both are handed out", || {
        order.extend(api.next(&one()));
        order.len() == 2
    });
    assert_eq!(ids(&order), [id(&past), id(&first)]);
    assert!(micros(&order[1].operation["updatedAt"]) >= micros(&soon));
    let claim = api.post("", &pay(3));
    refused(&claim, 409, "backing-off");
    assert!(claim.header("retry-after").is_some());
    assert_eq!((&api.shown(far)["waiting"], &api.shown(far)["notBefore"]), (&json!(true), &tomorrow));
}

fn no_more_are_handed_out_than_asked_for(place: &Place) {
    let api = Api::start(place);
    for n in 0..7 {
        api.enqueue(&with(&pay(n), json!({ "operationName": if n % 2 == 0 { "pay" } else { "ship" } })));
    }
    let both = |max: u32| api.next(&json!({ "operationNames": ["pay", "ship"], "max": max })).len();
    assert_eq!((api.next(&one()).len(), both(3), both(2), both(100), both(100)), (1, 3, 2, 1, 0));
}

fn several_names_are_asked_for_at_once_and_none_starves(place: &Place) {
    let api = Api::start(place);
    for n in 0..10 {
        for name in ["a", "b", "c"] {
            api.enqueue(&with(&pay(n), json!({ "operationName": name })));
        }
    }
    for names in [json!(["a", "b"]), json!(["a", "b", "b", "unknown"])] {
        let mut seen = std::collections::BTreeSet::new();
        for _ in 0..3 {
            let held = api.next(&json!({ "operationNames": names, "max": 2 }));
            assert_eq!(held.len(), 2, "the first name alone has enough");
            seen.extend(held.iter().map(|held| held.operation["operationName"].as_str().unwrap().to_owned()));
        }
        assert_eq!(seen.into_iter().collect::<Vec<_>>(), ["a", "b"], "each has its turn, and no other is handed out");
    }
}

fn the_request_may_choose_the_length_of_the_leases(place: &Place) {
    let api = Api::start(place);
    let lasts = |held: &Held| between(&held.operation["updatedAt"], &held.until);
    api.enqueue(&with(&pay(1), json!({ "leaseSeconds": 100 })));
    api.enqueue(&with(&pay(2), json!({ "leaseSeconds": 100 })));
    assert_eq!(lasts(&api.next(&one())[0]), 100.0);
    assert_eq!(lasts(&api.next(&with(&one(), json!({ "leaseSeconds": 7200 })))[0]), 7200.0);
}

fn a_request_repeated_with_its_token_gets_the_same_leases(place: &Place) {
    let (api, other) = (Api::start(place), Api::start(place));
    for n in 0..5 {
        api.enqueue(&pay(n));
    }
    let with_token = |token: &str| with(&one(), json!({ "max": 3, "claimToken": token }));
    let first = api.next(&with_token(TOKENS[0]));
    assert_eq!(first.len(), 3);
    for node in [&api, &other] {
        assert_eq!(node.next(&with_token(TOKENS[0])), first);
    }
    let rest = other.next(&with_token(TOKENS[1]));
    assert_eq!(rest.len(), 2);
    assert!(rest.iter().all(|held| !ids(&first).contains(&held.id)));
    assert_eq!(other.next(&with_token(TOKENS[0])), first);
}

fn a_token_hands_out_only_leases_that_live(place: &Place) {
    let api = Api::start(place);
    for n in 0..3 {
        api.enqueue(&pay(n));
    }
    let request = with(&one(), json!({ "max": 2, "leaseSeconds": 1, "claimToken": TOKENS[0] }));
    let first = api.next(&request);
    api.complete(&first[0], json!(1));
    assert_eq!(api.next(&request), first[1..], "what is settled is not handed out again");
    api.expires(&first[1]);
    let then = api.next(&request);
    assert_eq!(then.len(), 1);
    assert!(!ids(&first).contains(&then[0].id), "nor is a lease that has expired");
    let other = api.next(&json!({ "operationNames": ["ship"], "claimToken": TOKENS[0] }));
    assert!(other.is_empty(), "nor one of another name");
}

fn every_wrong_field_of_a_request_for_work_is_named_at_once(place: &Place) {
    let api = Api::start(place);
    let wrong = json!({
        "operationNames": [], "max": 0, "leaseSeconds": 0, "wait": 31, "claimToken": 7, "scope": "a/b", "limit": 1,
    });
    let mut told = wrong_fields(&api.post("/next", &wrong));
    told.sort();
    let mut names: Vec<_> = wrong.as_object().unwrap().keys().cloned().collect();
    names.sort();
    assert_eq!(told, names);
    for names in [json!("pay"), json!([7]), json!([""]), json!(["x".repeat(101)]), json!(vec!["x"; 101]), json!(null)] {
        assert_eq!(wrong_fields(&api.post("/next", &json!({ "operationNames": names }))), ["operationNames"]);
    }
    assert_eq!(wrong_fields(&api.post("/next", &json!({}))), ["operationNames"]);
    for (name, value) in [("max", json!(101)), ("wait", json!(-1)), ("leaseSeconds", json!(86_401))] {
        assert_eq!(wrong_fields(&api.post("/next", &with(&one(), json!({ name: value })))), [name]);
    }
    let widest = json!({ "operationNames": vec!["x".repeat(100); 100], "max": 100, "leaseSeconds": 86_400, "wait": 0 });
    assert!(api.next(&widest).is_empty());
}

fn many_requests_at_once_share_the_operations(place: &Place) {
    const ALL: usize = 24;
    let (api, other) = (Api::start(place), Api::start(place));
    for n in 0..ALL {
        api.enqueue(&pay(n));
    }
    let mut all = thread::scope(|scope| {
        let asks = [&api, &other, &api, &other].map(|node| {
            scope.spawn(move || {
                let mut mine = Vec::new();
                loop {
                    let held = node.next(&with(&one(), json!({ "max": 2 })));
                    for held in &held {
                        node.complete(held, json!(1));
                    }
                    mine.extend(ids(&held));
                    if held.is_empty() && node.get("?status=PENDING").json()["items"] == json!([]) {
                        return mine;
                    }
                    thread::sleep(Duration::from_millis(5));
                }
            })
        });
        asks.map(|asked| asked.join().unwrap()).concat()
    });
    all.sort_unstable();
    all.dedup();
    assert_eq!(all.len(), ALL);
    assert_eq!(api.get("?status=SUCCESS").json()["items"].as_array().unwrap().len(), ALL);
}
