//! The laws of reading events.

use std::thread;

use semel::State;
use serde_json::{Value, json};

use crate::{
    desk::{execute, listed, post, shown},
    endpoint::{Does, Endpoint},
    hooks::{becomes, counted, deliver, deliver_to, event, forward, start, start_as, status, stored},
    place::{Place, on_both_databases},
    support::{SOON, Server, eventually},
};

on_both_databases! {
    an_event_is_shown_with_every_column_of_the_source
    every_attempt_is_shown
    waiting_newer_data_is_shown
    events_are_found_by_their_columns
    a_wrong_filter_is_refused
    an_archived_event_can_be_looked_up
    each_function_has_its_own_event_where_it_is_so_configured
    the_openapi_document_names_every_member
    an_unreadable_event_is_listed_with_all_others
}

/// The columns of the source document.
const COLUMNS: [&str; 13] = [
    "event_id",
    "event_type",
    "webhook_function",
    "processed_at",
    "event_created",
    "data_fingerprint",
    "processing_result",
    "event_data",
    "processing_status",
    "processing_started_at",
    "processing_completed_at",
    "retry_count",
    "last_error",
];

fn an_event_is_shown_with_every_column_of_the_source(place: &Place) {
    let server = start(place, &[]);
    let mut paid = event("evt_1", 1_700_000_000, "a");
    paid["data"]["object"]["amount"] = json!(9_007_199_254_740_993_i64);
    assert_eq!(status(&deliver_to(&server, "/webhooks/stripe/connect", &paid)), "processed");
    for _ in 0..12 {
        assert_eq!(status(&deliver(&server, &paid)), "skipped");
    }
    assert_eq!(status(&deliver(&server, &event("evt_1", 1_600_000_000, "older"))), "skipped");
    eventually(SOON, "the duplicates are written", || counted(place, "replay") == 12);
    eventually(SOON, "the conflict is written", || counted(place, "mismatch") == 1);

    let told = shown(&server, "/webhooks/stripe/events/evt_1");
    for column in COLUMNS {
        assert!(told.get(column).is_some(), "{column}");
    }
    let stored = stored(place, "stripe", "evt_1").unwrap();
    assert_eq!((&told["event_id"], &told["event_type"]), (&json!("evt_1"), &json!("invoice.paid")));
    assert_eq!((&told["webhook_function"], &told["processing_status"]), (&json!("connect"), &json!("completed")));
    assert_eq!(told["event_created"], "2023-11-14T22:13:20.000000Z");
    assert_eq!(told["data_fingerprint"], stored.fingerprint.to_hex());
    assert_eq!(told["processed_at"], stored.created_at.to_string());
    assert_eq!(told["processing_started_at"], stored.claimed_at.to_string());
    assert_eq!(told["processing_completed_at"], stored.settled_at.unwrap().to_string());
    assert_eq!(told["event_data"], paid, "number for number");
    assert_eq!(told["processing_result"]["topic"], "webhook.stripe.invoice.paid");
    assert_eq!((&told["retry_count"], &told["crashes"]), (&json!(0), &json!(0)));
    for null in ["last_error", "next_attempt_at", "newer"] {
        assert_eq!(told[null], Value::Null, "{null}");
    }
    assert_eq!((&told["parked"], &told["archived"]), (&json!(false), &json!(false)));
    let attempts = told["attempts"].as_array().unwrap();
    assert_eq!((attempts.len(), &attempts[0]["end"]), (1, &json!("completed")));

    let duplicates = &told["duplicates"];
    assert_eq!(duplicates["count"], 12);
    let ends = ["first", "last"].map(|end| duplicates[end].as_array().unwrap().len());
    assert_eq!((ends, &duplicates["first"][0]["answer"]), ([10, 2], &json!("replay")));
    let conflict = &told["conflicts"][0];
    assert_eq!((&conflict["deed"], &conflict["count"]), (&json!("skipped"), &json!(1)));
    assert_eq!(conflict["stored_fingerprint"], told["data_fingerprint"]);
    assert_eq!(conflict["came_created"], "2020-09-13T12:26:40.000000Z");

    for path in ["/webhooks/stripe/events/evt_2", "/webhooks/stripe/events/evt_1%00", "/webhooks/stripe2/events/evt_1"]
    {
        let answer = server.get(path);
        assert_eq!((answer.status, answer.problem().as_str()), (404, "not-found"), "{path}");
    }
    // The function is a label here, and may be given.
    assert_eq!(server.get("/webhooks/stripe/events/evt_1?function=connect").status, 200);
    assert_eq!(server.get("/webhooks/stripe/events/evt_1?function=stripe").status, 404);
    assert_eq!(server.get("/webhooks/stripe/events/evt_1?functoin=connect").problem(), "invalid-query");
}

fn every_attempt_is_shown(place: &Place) {
    let endpoint = Endpoint::that([Does::Answers(500), Does::Answers(429), Does::Cuts]);
    let server = start(place, &[("SEMEL_WEBHOOKS_STRIPE_HANDLERS", &forward(&endpoint.url()))]);
    let paid = event("evt_1", 1_700_000_000, "a");
    assert_eq!(deliver(&server, &paid).status, 500);
    assert_eq!(status(&deliver(&server, &paid)), "accepted");
    let told = shown(&server, "/webhooks/stripe/events/evt_1");
    assert_eq!((&told["processing_status"], &told["retry_count"]), (&json!("pending"), &json!(1)));
    assert!(told["next_attempt_at"].is_string(), "{told}");
    assert_eq!(deliver(&server, &paid).status, 500);
    let told = shown(&server, "/webhooks/stripe/events/evt_1");
    assert_eq!((&told["processing_status"], &told["retry_count"]), (&json!("failed"), &json!(2)));
    assert_eq!(status(&deliver(&server, &paid)), "processed");

    let told = shown(&server, "/webhooks/stripe/events/evt_1");
    let attempts = told["attempts"].as_array().unwrap();
    let ends: Vec<_> = attempts.iter().map(|it| it["end"].as_str().unwrap()).collect();
    assert_eq!(ends, ["failed", "released", "failed", "completed"]);
    assert!(attempts[0]["error"].as_str().unwrap().contains("500"), "{attempts:?}");
    assert_eq!(attempts[1]["error"], "the endpoint answered 429 Too Many Requests", "why it was released");
    assert_eq!(attempts[3]["error"], Value::Null);
    assert!(attempts.iter().all(|it| it["started_at"].as_str() <= it["ended_at"].as_str() && it["node"].is_string()));
    assert_eq!(told["processing_result"], json!({ "result": "forwarded", "status": 202 }));
}

fn waiting_newer_data_is_shown(place: &Place) {
    let endpoint = Endpoint::that([Does::Waits]);
    let server = start(place, &[("SEMEL_WEBHOOKS_STRIPE_HANDLERS", &forward(&endpoint.url()))]);
    thread::scope(|scope| {
        let first = scope.spawn(|| status(&deliver(&server, &event("evt_1", 100, "older"))));
        endpoint.is_called(1);
        assert_eq!(status(&deliver(&server, &event("evt_1", 200, "newer"))), "accepted");
        let told = shown(&server, "/webhooks/stripe/events/evt_1");
        assert_eq!((&told["processing_status"], &told["attempts"][0]["end"]), (&json!("processing"), &Value::Null));
        assert_eq!(told["newer"]["event_created"], "1970-01-01T00:03:20.000000Z");
        assert_eq!(told["newer"]["data_fingerprint"], told["conflicts"][0]["came_fingerprint"]);
        endpoint.let_go();
        assert_eq!(first.join().unwrap(), "processed");
    });
    becomes(place, "evt_1", State::Completed);
    eventually(SOON, "the newer is processed", || endpoint.calls().len() == 2);
    becomes(place, "evt_1", State::Completed);
    let told = shown(&server, "/webhooks/stripe/events/evt_1");
    assert_eq!((&told["newer"], &told["event_data"]["created"]), (&Value::Null, &json!(200)));
    let ends: Vec<_> = told["attempts"].as_array().unwrap().iter().map(|it| it["end"].clone()).collect();
    assert_eq!(ends, [json!("superseded"), json!("completed")]);
}

fn events_are_found_by_their_columns(place: &Place) {
    let endpoint = Endpoint::that([Does::Answers(500)]);
    let rules = format!("invoice.*={}", endpoint.url());
    let server = start(place, &[("SEMEL_WEBHOOKS_STRIPE_HANDLERS", &rules)]);
    let customer = |id: &str| {
        let mut customer = event(id, 1_700_000_000, "a");
        customer["type"] = json!("customer.created");
        customer
    };
    assert_eq!(deliver(&server, &event("evt_1", 1, "a")).status, 500);
    assert_eq!(status(&deliver_to(&server, "/webhooks/stripe/connect", &event("evt_2", 1, "a"))), "processed");
    let between = stored(place, "stripe", "evt_2").unwrap().settled_at.unwrap();
    for id in ["cus_1", "cus_2", "cus_3"] {
        assert_eq!(status(&deliver(&server, &customer(id))), "processed");
    }
    let found =
        |query: &str| -> Vec<Value> { listed(&server, &format!("/webhooks/stripe/events?{query}"), "event_id") };
    let all = ["cus_3", "cus_2", "cus_1", "evt_2", "evt_1"];
    assert_eq!(found(""), all, "the newest first");
    for limit in 1..=5 {
        assert_eq!(found(&format!("limit={limit}")), all, "by pages of {limit}");
    }
    assert_eq!(found("status=failed"), ["evt_1"]);
    assert_eq!(found("status=completed"), ["cus_3", "cus_2", "cus_1", "evt_2"]);
    for none in ["pending", "processing", "timeout"] {
        assert!(found(&format!("status={none}")).is_empty(), "{none}");
    }
    assert_eq!(found("type=customer.created&limit=2"), ["cus_3", "cus_2", "cus_1"]);
    assert_eq!(found("type=customer.created&function=connect"), [""; 0]);
    assert_eq!(found("function=connect"), ["evt_2"]);
    assert_eq!(found(&format!("since={between}")), ["cus_3", "cus_2", "cus_1"]);
    assert_eq!(found(&format!("since={between}&type=invoice.paid")), [""; 0]);
    assert_eq!(found("since=2999-01-01T00:00:00Z"), [""; 0]);
    assert_eq!(found("archived=false").len(), 5);
    assert_eq!(found("archived=true"), [""; 0]);
    assert_eq!(found("status=&type=&function=&since=&archived="), all, "an empty parameter is none");
    let page = shown(&server, "/webhooks/stripe/events?limit=1");
    assert!(page["items"][0].get("event_data").is_none(), "what may be long is left out");
}

fn a_wrong_filter_is_refused(place: &Place) {
    let server = start(place, &[]);
    for query in [
        "status=done",
        "status=timed_out",
        "since=yesterday",
        "archived=yes",
        "limit=0",
        "limit=501",
        "cursor=x",
        "event_type=invoice.paid",
        "type=a%00",
        "type=a%07",
    ] {
        let answer = server.get(&format!("/webhooks/stripe/events?{query}"));
        assert_eq!((answer.status, answer.problem().as_str()), (400, "invalid-query"), "{query}");
    }
}

fn an_archived_event_can_be_looked_up(place: &Place) {
    let server = start_as(place, "api,sweeper", &[]);
    for id in ["evt_1", "evt_2"] {
        assert_eq!(status(&deliver(&server, &event(id, 1_700_000_000, "a"))), "processed");
    }
    execute(place, "UPDATE semel_operations SET archive_at = 1, look_at = 1 WHERE key = 'evt_1'");
    eventually(SOON, "it is archived", || stored(place, "stripe", "evt_1").unwrap().archived);
    let told = shown(&server, "/webhooks/stripe/events/evt_1");
    assert_eq!((&told["archived"], &told["processing_status"]), (&json!(true), &json!("completed")));
    assert_eq!(told["event_data"]["id"], "evt_1");
    assert_eq!(told["processing_result"]["result"], "waiting", "no relay runs");
    assert_eq!(told["attempts"][0]["end"], "completed");
    assert_eq!(listed(&server, "/webhooks/stripe/events?archived=true", "event_id"), ["evt_1"]);
    assert_eq!(listed(&server, "/webhooks/stripe/events?archived=false", "event_id"), ["evt_2"]);
    assert_eq!(shown(&server, "/webhooks/stripe/monitor")["totals"]["completed"], 2, "it is counted all the same");
}

fn each_function_has_its_own_event_where_it_is_so_configured(place: &Place) {
    let endpoint = Endpoint::that([Does::Answers(202), Does::Answers(500)]);
    let url = forward(&endpoint.url());
    let variables = [
        ("SEMEL_WEBHOOKS_STRIPE_DEDUP_PER_FUNCTION", "true"),
        ("SEMEL_WEBHOOKS_STRIPE_FUNCTIONS", "one,two,three"),
        ("SEMEL_WEBHOOKS_STRIPE_HANDLERS", url.as_str()),
    ];
    let server = start(place, &variables);
    let paid = event("evt_1", 1_700_000_000, "a");
    assert_eq!(status(&deliver_to(&server, "/webhooks/stripe/one", &paid)), "processed");
    let told = shown(&server, "/webhooks/stripe/events/evt_1");
    assert_eq!(told["webhook_function"], "one", "where there is one, it need not be named");
    assert_eq!(deliver_to(&server, "/webhooks/stripe/two", &paid).status, 500);
    let answer = server.get("/webhooks/stripe/events/evt_1");
    assert_eq!((answer.status, answer.problem().as_str()), (400, "invalid-query"));
    assert_eq!(answer.json()["functions"], json!(["one", "two"]));
    for (function, stands) in [("one", "completed"), ("two", "failed")] {
        let told = shown(&server, &format!("/webhooks/stripe/events/evt_1?function={function}"));
        assert_eq!((&told["webhook_function"], &told["processing_status"]), (&json!(function), &json!(stands)));
    }
    assert_eq!(server.get("/webhooks/stripe/events/evt_1?function=three").status, 404);
    // However long ago, and whatever else was counted.
    execute(place, "DELETE FROM semel_deltas");
    execute(place, "DELETE FROM semel_counters");
    assert_eq!(server.get("/webhooks/stripe/events/evt_1").json()["functions"], json!(["one", "two"]));
    assert_eq!(server.get("/webhooks/stripe/events/evt_1?function=a/b").problem(), "invalid-query");
    assert_eq!(listed(&server, "/webhooks/stripe/events", "webhook_function"), ["two", "one"]);
    assert_eq!(listed(&server, "/webhooks/stripe/events?function=one", "webhook_function"), ["one"]);
    let retry = |function: &str| {
        post(&server, &format!("/webhooks/stripe/events/evt_1/retry{function}"), r#"{"reason":"mended"}"#)
    };
    assert_eq!(retry("").problem(), "invalid-query");
    assert_eq!((retry("?function=one").status, retry("?function=two").status), (409, 202));
}

/// The members of an answer, and those that the document says it has.
fn assert_documented(server: &Server, answer: &Value, schemas: &[&str]) {
    let document = shown(server, "/openapi.json");
    let mut named: Vec<String> = Vec::new();
    for schema in schemas {
        let schema = &document["components"]["schemas"][schema];
        let own = if schema["required"].is_array() { schema } else { &schema["allOf"][1] };
        for name in own["required"].as_array().unwrap() {
            assert!(own["properties"].get(name.as_str().unwrap()).is_some(), "{name} has no description");
            named.push(name.as_str().unwrap().to_owned());
        }
    }
    named.sort_unstable();
    let mut there: Vec<_> = answer.as_object().unwrap().keys().cloned().collect();
    there.sort_unstable();
    assert_eq!(there, named, "{schemas:?}");
}

fn the_openapi_document_names_every_member(place: &Place) {
    let server = start(place, &[]);
    assert_eq!(status(&deliver(&server, &event("evt_1", 1_700_000_000, "a"))), "processed");
    assert_eq!(status(&deliver(&server, &event("evt_1", 1_700_000_000, "b"))), "skipped");
    let page = shown(&server, "/webhooks/stripe/events");
    assert_documented(&server, &page["items"][0], &["WebhookEvent"]);
    let record = shown(&server, "/webhooks/stripe/events/evt_1");
    assert_documented(&server, &record, &["WebhookEvent", "WebhookRecord"]);
    assert_documented(&server, &record["conflicts"][0], &["WebhookConflict"]);
    let told = shown(&server, "/webhooks/stripe/monitor");
    assert_documented(&server, &told, &["WebhookMonitor"]);
    assert_documented(&server, &told["totals"], &["WebhookStand"]);
    assert_documented(&server, &told["conflicts"]["items"][0], &["WebhookConflict"]);
}

/// It is listed in its place, with what is known of it.
fn an_unreadable_event_is_listed_with_all_others(place: &Place) {
    let server = start(place, &[]);
    for id in ["evt_1", "evt_2", "evt_3"] {
        assert_eq!(status(&deliver(&server, &event(id, 1_700_000_000, id))), "processed");
    }
    execute(place, "UPDATE semel_operations SET fingerprint = substr(fingerprint, 1, 1) WHERE key = 'evt_2'");
    let page = shown(&server, "/webhooks/stripe/events");
    let items = page["items"].as_array().unwrap();
    let told: Vec<_> =
        items.iter().map(|item| (item["event_id"].as_str().unwrap(), item["last_error"].clone())).collect();
    let why = json!("unreadable: a stored row cannot be read: a fingerprint");
    assert_eq!(told, [("evt_3", Value::Null), ("evt_2", why), ("evt_1", Value::Null)]);
    assert_eq!(items[1]["processing_status"], "completed");
    assert!(shown(&server, "/webhooks/stripe/monitor")["health"]["status"].is_string());
    let alone = server.get("/webhooks/stripe/events/evt_2");
    assert_eq!((alone.status, alone.problem().as_str()), (500, "row-unreadable"));
    assert_eq!(alone.json()["id"], "evt_2");
    assert!(alone.body.contains("semel operations show evt_2"), "{}", alone.body);
}
