//! The laws of keys and fields of claims over the HTTP API of operations.

use semel::{Fingerprint, Key, Ledger, Options, Scope, Work};
use serde_json::{Value, json};

use crate::{
    desk::Desk,
    fleet::ask,
    operations_api::{Api, id, pay, refused, with, wrong_fields},
    operations_api_tokens::TOKENS,
    place::{Place, on_both_databases},
    proposals::rows,
};

on_both_databases! {
    the_key_joins_the_four_parts_and_an_omitted_one_is_empty
    inputs_with_one_canonical_form_are_one_operation
    the_hash_of_an_input_stands_for_it
    parts_that_join_to_one_key_are_a_mismatch_and_never_a_replay
    a_long_key_keeps_its_head_and_ends_with_a_hash
    an_explicit_key_is_used_as_given
    a_key_is_found_with_all_names_it_is_used_under
    a_claim_without_anything_that_names_it_is_refused
    every_wrong_field_of_a_claim_is_named_at_once
    fields_of_the_greatest_length_are_accepted_and_longer_ones_refused_by_name
    a_number_that_loses_digits_as_a_double_is_refused
    a_body_over_a_mebibyte_is_refused
    semels_own_services_are_no_scopes
    operations_of_other_programs_are_reached_by_their_scope
}

/// The key of a new claim.
fn key_of(api: &Api, work: &Value) -> String {
    api.claim(work).operation["idempotencyKey"].as_str().unwrap().to_owned()
}

/// A work that is named by its inputs.
fn parts(process: &str, activity: &str, name: &str, input: Value) -> Value {
    json!({ "processInstanceId": process, "activityId": activity, "operationName": name, "input": input })
}

fn the_key_joins_the_four_parts_and_an_omitted_one_is_empty(place: &Place) {
    let api = Api::start(place);
    let hash = semel::sha256_hex(br#"{"a":[1,2.5],"b":"x"}"#);
    let input = json!({ "b": "x", "a": [1.0, 2.5] });
    assert_eq!(key_of(&api, &parts("proc-1", "Task_A", "pay", input.clone())), format!("proc-1_Task_A_pay_{hash}"));
    assert_eq!(key_of(&api, &json!({ "operationName": "pay", "input": input })), format!("__pay_{hash}"));
    let named = json!({ "operationName": "pay", "activityId": "A", "inputHash": "4f7c" });
    assert_eq!(key_of(&api, &named), "_A_pay_4f7c");
}

fn inputs_with_one_canonical_form_are_one_operation(place: &Place) {
    let api = Api::start(place);
    let first = api.claim(&pay(json!({ "amount": 10, "to": "\u{e9}" })));
    let text = r#"{"input" : {"to":"\u00e9",  "amount":1.0e1}, "operationName":"pay"}"#;
    let again = ask(api.server.address, "POST", "/v1/operations", text).unwrap();
    refused(&again, 409, "in-flight");
    assert_eq!(id(&again.json()["operation"]), first.id);
}

fn the_hash_of_an_input_stands_for_it(place: &Place) {
    let api = Api::start(place);
    let hash = semel::sha256_hex(b"[1]");
    let held = api.claim(&json!({ "operationName": "pay", "inputHash": hash }));
    api.complete(&held, json!("done"));
    for same in [pay(json!([1])), with(&pay(json!([1])), json!({ "inputHash": hash }))] {
        let again = api.post("", &same);
        assert_eq!((again.status, id(&again.json()["operation"])), (200, held.id), "{}", again.body);
    }
    let differs = api.post("", &with(&pay(json!([2])), json!({ "inputHash": hash })));
    assert_eq!(wrong_fields(&differs), ["inputHash"]);
}

fn parts_that_join_to_one_key_are_a_mismatch_and_never_a_replay(place: &Place) {
    let api = Api::start(place);
    let held = api.claim(&parts("a_b", "c", "pay", json!(1)));
    let other = parts("a", "b_c", "pay", json!(1));
    refused(&api.post("", &other), 422, "payload-mismatch");
    api.complete(&held, json!("of the first"));
    refused(&api.post("", &other), 422, "payload-mismatch");
    assert_eq!(api.post("", &parts("a_b", "c", "pay", json!(1))).status, 200);
}

fn a_long_key_keeps_its_head_and_ends_with_a_hash(place: &Place) {
    let api = Api::start(place);
    // Two bytes each: the 190th byte is within a character.
    let activity = format!("a{}", "\u{e9}".repeat(120));
    let work = |input: u32| parts("p", &activity, "pay", json!(input));
    let whole = format!("p_{activity}_pay_{}", semel::sha256_hex(b"1"));
    let head = &whole[..189];
    assert_eq!(key_of(&api, &work(1)), format!("{head}~{}", semel::sha256_hex(whole.as_bytes())));
    refused(&api.post("", &work(1)), 409, "in-flight");
    let other = key_of(&api, &work(2));
    assert!(other.starts_with(&format!("{head}~")) && other.len() <= 255, "{other}");
    let ascii = key_of(&api, &parts("p", &"x".repeat(255), "pay", json!(1)));
    assert_eq!((ascii.len(), &ascii[..191]), (255, format!("p_{}~", "x".repeat(188)).as_str()));
}

fn an_explicit_key_is_used_as_given(place: &Place) {
    let api = Api::start(place);
    let work = json!({ "operationName": "pay", "idempotencyKey": "order 4711/\u{e9}" });
    let held = api.claim(&work);
    assert_eq!(held.operation["idempotencyKey"], "order 4711/\u{e9}");
    refused(&api.post("", &work), 409, "in-flight");
    refused(&api.post("", &with(&work, json!({ "processInstanceId": "p" }))), 422, "payload-mismatch");
}

fn a_key_is_found_with_all_names_it_is_used_under(place: &Place) {
    let api = Api::start(place);
    let work = |name: &str| json!({ "operationName": name, "idempotencyKey": "a/b c", "inputHash": "h" });
    let ids = ["pay", "ship"].map(|name| api.claim(&work(name)).id);
    api.complete(&api.claim(&with(&work("pay"), json!({ "scope": "shop" }))), json!("elsewhere"));
    let enqueued = json!({ "operationName": "bill", "idempotencyKey": "a/b c", "input": { "n": 7 } });
    let enqueued = id(&api.enqueue(&enqueued));
    let found = |query: &str| {
        let page = api.get(&format!("?key=a%2Fb%20c{query}")).json();
        assert_eq!(page["next"], Value::Null);
        page["items"].as_array().unwrap().clone()
    };
    let all = found("");
    assert_eq!(all.iter().map(id).collect::<Vec<_>>(), [enqueued, ids[1], ids[0]]);
    assert_eq!(all[0]["input"], json!({ "n": 7 }), "what is found by its key is shown whole");
    assert_eq!(found("&operationName=ship").iter().map(id).collect::<Vec<_>>(), [ids[1]]);
    assert_eq!(found("&scope=shop")[0]["resultData"], "elsewhere");
    assert_eq!(found("&status=SUCCESS"), [Value::Null; 0]);
    assert_eq!(found("&scope=unknown"), [Value::Null; 0]);
}

fn a_claim_without_anything_that_names_it_is_refused(place: &Place) {
    let api = Api::start(place);
    let bare = json!({ "operationName": "pay", "processInstanceId": "p", "activityId": "a" });
    assert_eq!(wrong_fields(&api.post("", &bare)), ["input"]);
    refused(&api.post("", &Value::Null), 400, "invalid-json");
    refused(&api.post("", &json!([])), 400, "invalid-json");
}

fn every_wrong_field_of_a_claim_is_named_at_once(place: &Place) {
    let api = Api::start(place);
    let wrong = json!({
        "operationName": 7, "processInstanceId": "", "activityId": ["a"], "inputHash": "", "idempotencyKey": "",
        "claimToken": "x", "scope": "a/b", "leaseSeconds": 0, "ttlSeconds": 0, "maxRetries": -1, "onLost": "probe",
        "priority": 3, "notBefore": "tomorrow", "activity": "misspelled",
    });
    let mut told = wrong_fields(&api.post("", &wrong));
    told.sort();
    let mut names: Vec<_> = wrong.as_object().unwrap().keys().cloned().collect();
    names.sort();
    told.dedup();
    assert_eq!(told, names);
    let bounds = [
        ("leaseSeconds", json!(86_401)),
        ("leaseSeconds", json!(1.5)),
        ("leaseSeconds", json!("60")),
        ("ttlSeconds", json!(10_i64.pow(10))),
        ("maxRetries", json!(1001)),
        ("onLost", json!("HOLD")),
        ("later", json!("yes")),
        ("notBefore", json!("2026-01-31T12:00:00Z")),
        ("priority", json!(1)),
    ];
    for (name, value) in bounds {
        assert_eq!(wrong_fields(&api.post("", &with(&pay(1), json!({ name: value })))), [name]);
    }
    let with_token = json!({ "later": true, "claimToken": TOKENS[0] });
    assert_eq!(wrong_fields(&api.post("", &with(&pay(1), with_token))), ["claimToken"]);
    assert_eq!(api.get("").json()["items"], json!([]), "nothing was claimed");
}

fn fields_of_the_greatest_length_are_accepted_and_longer_ones_refused_by_name(place: &Place) {
    let api = Api::start(place);
    let lengths = [
        ("processInstanceId", 64),
        ("activityId", 255),
        ("operationName", 100),
        ("inputHash", 128),
        ("idempotencyKey", 255),
        ("scope", 64),
    ];
    let longest = |more: usize| -> Value {
        lengths.iter().map(|(name, most)| ((*name).to_owned(), json!("x".repeat(most + more)))).collect()
    };
    let held = api.claim(&longest(0));
    for (name, most) in lengths.iter().filter(|(name, _)| *name != "inputHash") {
        assert_eq!(held.operation[name], "x".repeat(*most), "{name}");
    }
    let refused = api.post("", &longest(1));
    let mut told = wrong_fields(&refused);
    told.sort();
    let mut names = lengths.map(|(name, _)| name);
    names.sort_unstable();
    assert_eq!(told, names, "{}", refused.body);
    let bounds = json!({ "leaseSeconds": 86_400, "ttlSeconds": 315_360_000, "maxRetries": 1000 });
    api.claim(&with(&pay(1), bounds));
    api.enqueue(&with(&pay(2), json!({ "priority": -2 })));
    api.enqueue(&with(&pay(3), json!({ "priority": 2 })));
}

fn a_number_that_loses_digits_as_a_double_is_refused(place: &Place) {
    let api = Api::start(place);
    for number in [9_007_199_254_740_993_i64, -9_007_199_254_740_993, i64::MAX] {
        assert_eq!(wrong_fields(&api.post("", &pay(json!({ "n": [number] })))), ["input"]);
        api.claim(&pay(number.to_string()));
    }
    api.claim(&pay(9_007_199_254_740_992_i64));
}

fn a_body_over_a_mebibyte_is_refused(place: &Place) {
    let api = Api::start(place);
    refused(&api.post("", &pay("x".repeat(1 << 20))), 413, "body-too-large");
    let held = api.claim(&pay("x".repeat((1 << 20) - 1000)));
    refused(&api.call(&held, "complete", json!({ "resultData": "x".repeat(1 << 20) })), 413, "body-too-large");
    let result = json!("x".repeat((1 << 20) - 1000));
    assert_eq!(api.complete(&held, result.clone())["resultData"], result);
}

fn semels_own_services_are_no_scopes(place: &Place) {
    let api = Api::start(place);
    for own in [
        "proposals",
        "messages",
        "notifications",
        "webhooks",
        "mailings",
        "jobs",
        "background-jobs",
        "gateway",
        "cli",
        "http",
        "inbox",
    ] {
        for body in [pay(1), with(&pay(1), json!({ "later": true }))] {
            assert_eq!(wrong_fields(&api.post("", &with(&body, json!({ "scope": own })))), ["scope"], "{own}");
        }
        let next = json!({ "operationNames": ["stripe"], "scope": own });
        assert_eq!(wrong_fields(&api.post("/next", &next)), ["scope"], "{own}");
        refused(&api.get(&format!("?scope={own}")), 400, "invalid-query");
    }
    api.claim(&with(&pay(1), json!({ "scope": "operations" })));
    refused(&api.post("", &pay(1)), 409, "in-flight");
}

/// By a Rust program, and on PostgreSQL by SQL.
fn operations_of_other_programs_are_reached_by_their_scope(place: &Place) {
    let api = Api::start(place);
    let desk = Desk::at(place);
    let ledger = Ledger::new(desk.database.clone(), Options::default()).unwrap();
    let body = r#"{"to":"ann"}"#;
    let scope = Scope::new("default", "shop", "mail").unwrap();
    let work = Work::new(scope, Key::new("order-1").unwrap(), Fingerprint::of_bytes(body.as_bytes())).payload(body);
    desk.block(ledger.enqueue(work)).unwrap();
    let mut keys = vec!["order-1"];
    if place.url.starts_with("postgres") {
        let sql = r#"SELECT answer FROM semel_enqueue('shop', 'mail', 'order-2', '{"to":"ann"}')"#;
        assert_eq!(rows(place, sql), ["enqueued"]);
        keys.push("order-2");
    }
    assert!(api.next(&json!({ "operationNames": ["mail"], "max": 9 })).is_empty(), "they are in another scope");
    let found = api.next(&json!({ "operationNames": ["mail"], "scope": "shop", "max": 9 }));
    assert_eq!(found.iter().map(|held| held.operation["idempotencyKey"].clone()).collect::<Vec<_>>(), keys);
    for held in &found {
        assert_eq!((&held.operation["input"], &held.operation["scope"]), (&json!({ "to": "ann" }), &json!("shop")));
        assert_eq!(api.complete(held, json!("sent"))["status"], "SUCCESS");
    }
    assert_eq!(api.get("?scope=shop").json()["items"].as_array().unwrap().len(), keys.len());
}
