//! The laws of the fan-out: one notification per recipient and channel, none missing and none twice.

use std::collections::BTreeSet;

use rustix::process::Signal;
use semel::{
    messaging::{Message, Topic},
    prelude::*,
    store::Commit,
};
use semel_store::{Database, Settings};
use serde_json::{Value, json};
use sqlx::{ConnectOptions as _, Executor as _, postgres::PgConnectOptions, sqlite::SqliteConnectOptions};

use crate::{
    notifications::{Api, of_restaurant},
    place::{Place, on_both_databases},
    support::{SOON, eventually},
};

on_both_databases! {
    the_source_document_works
    an_existing_notification_is_skipped
    equal_user_ids_of_two_kinds_are_two_users
    an_event_without_recipients_completes_with_none
    only_named_recipients_are_notified
    an_event_without_a_group_notifies_all_administrators
    a_chunked_fan_out_keeps_the_recipients_of_its_start
    named_recipients_are_notified_in_chunks
    a_message_of_another_program_is_deduplicated_by_its_event_id
    a_malformed_message_is_a_dead_letter
    a_fan_out_that_cannot_continue_is_a_dead_letter_at_once
    notifications_are_listed_and_read
}

fn set(names: &[&str]) -> BTreeSet<String> {
    names.iter().map(|name| (*name).to_owned()).collect()
}

/// Runs a statement that the service would not.
fn execute(place: &Place, sql: &'static str) {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        match place.url.strip_prefix("sqlite:") {
            Some(path) => {
                SqliteConnectOptions::new().filename(path).connect().await.unwrap().execute(sql).await.unwrap();
            }
            None => {
                place.url.parse::<PgConnectOptions>().unwrap().connect().await.unwrap().execute(sql).await.unwrap();
            }
        }
    });
}

/// Puts messages on a queue, as another program would; returns their ids.
pub(crate) fn say(place: &Place, queue: &str, bodies: &[&str]) -> Vec<String> {
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let database = Database::open(&place.url, Settings::default()).await.unwrap();
        let tx = database.begin(SOON).await.unwrap();
        let topic = Topic::new(queue).unwrap();
        let message = |body: &&str| Message::new("default", topic.clone(), "", body.to_string());
        let messages: Vec<_> = bodies.iter().map(message).collect();
        let ids = messages.iter().map(|message| message.id.to_string()).collect();
        database.put(&tx, messages).await.unwrap();
        assert!(matches!(database.commit(&tx).await, Commit::Done));
        ids
    })
}

fn the_source_document_works(place: &Place) {
    let api = Api::start(place);
    api.recipient("restaurant", "10", "5", &["PUSH", "EMAIL"]);
    api.recipient("restaurant", "15", "5", &["PUSH"]);
    api.recipient("restaurant", "20", "6", &["PUSH"]);
    api.event(&of_restaurant("evt-001", 5));
    let shown = api.until_heard("evt-001");
    assert_eq!(shown["processedEvent"]["status"], "SUCCESS");
    assert!(shown["processedEvent"]["processedAt"].is_string());
    let kind = &shown["kinds"][0];
    assert_eq!((&kind["published"], &kind["notifications"]), (&json!(true), &json!(3)));
    let expected = set(&["restaurant/10/PUSH", "restaurant/10/EMAIL", "restaurant/15/PUSH"]);
    assert_eq!(api.notified("evt-001"), expected);
    assert!(api.notifications("").iter().all(|one| one["status"] == "PENDING" && one["readAt"].is_null()));

    // A later recipient gets no earlier event; the same event again changes nothing.
    api.recipient("restaurant", "16", "5", &["PUSH"]);
    assert_eq!(api.post("/events", &of_restaurant("evt-001", 5)).json()["created"], false);
    api.event(&of_restaurant("evt-002", 5));
    assert_eq!(api.until_heard("evt-002")["kinds"][0]["notifications"], 4);
    assert_eq!(api.notified("evt-001"), expected);
}

fn an_existing_notification_is_skipped(place: &Place) {
    let api = Api::start(place);
    let users: Vec<_> = (10..20).map(|user| user.to_string()).collect();
    for user in &users {
        api.recipient("restaurant", user, "5", &["PUSH"]);
    }
    execute(
        place,
        "INSERT INTO notifications (tenant, event_id, kind, user_id, notification_type)
         VALUES ('default', 'evt-001', 'restaurant', '15', 'PUSH')",
    );
    let before = api.notifications("");
    api.event(&of_restaurant("evt-001", 5));
    assert_eq!(api.until_heard("evt-001")["kinds"][0]["notifications"], 10);
    let expected: BTreeSet<_> = users.iter().map(|user| format!("restaurant/{user}/PUSH")).collect();
    assert_eq!(api.notified("evt-001"), expected);
    // Only now the event's data is known; the notification itself is unchanged.
    let (after, members) = (api.notifications("userId=15"), ["id", "createdAt", "readAt", "status", "attempt"]);
    assert_eq!((before.len(), after.len()), (1, 1));
    assert_eq!(members.map(|member| &after[0][member]), members.map(|member| &before[0][member]));
}

fn equal_user_ids_of_two_kinds_are_two_users(place: &Place) {
    let rules = "RESTAURANT=restaurant,customer,admin";
    let api = Api::start_with(place, &[("SEMEL_NOTIFICATIONS_ROUTES", rules)]);
    for kind in ["restaurant", "admin", "agency"] {
        api.recipient(kind, "7", "5", &["PUSH", "SMS"]);
    }
    api.recipient("customer", "7", "9", &["EMAIL"]);
    let mut event = of_restaurant("e", 5);
    event["payload"] = json!({ "customer_id": "9" });
    api.event(&event);
    let shown = api.until_heard("e");
    assert_eq!(shown["kinds"].as_array().unwrap().len(), 3);
    let expected = set(&["restaurant/7/PUSH", "restaurant/7/SMS", "admin/7/PUSH", "admin/7/SMS", "customer/7/EMAIL"]);
    assert_eq!(api.notified("e"), expected);
    assert_eq!(api.notifications("userId=7").len(), 5);
    assert_eq!(api.notifications("userId=7&kind=admin").len(), 2);
}

fn an_event_without_recipients_completes_with_none(place: &Place) {
    let api = Api::start(place);
    api.event(&of_restaurant("e", 404));
    let shown = api.until_heard("e");
    assert_eq!(
        (&shown["kinds"][0]["notifications"], &shown["processedEvent"]["status"]),
        (&json!(0), &json!("SUCCESS"))
    );
    assert!(api.notified("e").is_empty());
}

fn only_named_recipients_are_notified(place: &Place) {
    let api = Api::start_with(place, &[("SEMEL_NOTIFICATIONS_ROUTES", "RESTAURANT=restaurant,customer")]);
    for user in ["1", "2", "3"] {
        api.recipient("restaurant", user, "5", &["PUSH"]);
        api.recipient("customer", user, "5", &["PUSH"]);
    }
    let mut event = of_restaurant("e", 5);
    let named = |kind: &str, user: Value| json!({ "kind": kind, "userId": user });
    event["recipients"] = json!([
        named("restaurant", json!(1)),
        named("restaurant", json!("2")),
        named("restaurant", json!("nobody")),
        named("restaurant", json!(1))
    ]);
    // With recipients, no group is needed.
    event.as_object_mut().unwrap().remove("aggregateId");
    api.event(&event);
    let shown = api.until_heard("e");
    assert_eq!(shown["kinds"].as_array().unwrap().len(), 1, "no customer is named");
    assert_eq!(api.notified("e"), set(&["restaurant/1/PUSH", "restaurant/2/PUSH"]));
    event["eventId"] = json!("f");
    event["recipients"] = json!([named("agency", json!(1))]);
    assert_eq!(api.post("/events", &event).status, 422, "agencies do not hear of restaurants");
}

fn an_event_without_a_group_notifies_all_administrators(place: &Place) {
    let api = Api::start(place);
    api.recipient("admin", "1", "ops", &["PUSH"]);
    api.recipient("admin", "2", "sales", &["PUSH"]);
    let event = |id: &str| json!({ "eventId": id, "aggregateType": "ADMIN", "eventType": "ALERT", "payload": {} });
    api.event(&event("all"));
    let mut ops = event("ops");
    ops["payload"] = json!({ "admin_id": "ops" });
    api.event(&ops);
    api.until_heard("all");
    api.until_heard("ops");
    assert_eq!(api.notified("all"), set(&["admin/1/PUSH", "admin/2/PUSH"]));
    assert_eq!(api.notified("ops"), set(&["admin/1/PUSH"]));
}

/// Fills the directory with so many users of restaurant 5.
fn fill(place: &Place, count: usize) -> BTreeSet<String> {
    let users: Vec<_> = (0..count).map(|n| format!("u{n:05}")).collect();
    let rows: Vec<_> = users
        .iter()
        .map(|user| {
            format!(
                "('default', 'restaurant', '{user}', '5', 'PUSH EMAIL', {}, 1)",
                match place.url.starts_with("sqlite:") {
                    true => "x'01007b7d'",
                    false => "'\\x01007b7d'",
                }
            )
        })
        .collect();
    let insert = format!(
        "INSERT INTO notification_directories (tenant, revision) VALUES ('default', 1);
         INSERT INTO notification_recipients (tenant, kind, user_id, group_id, channels, addresses, since) VALUES {}",
        rows.join(", ")
    );
    execute(place, insert.leak());
    users.iter().flat_map(|user| ["PUSH", "EMAIL"].map(|channel| format!("restaurant/{user}/{channel}"))).collect()
}

fn a_chunked_fan_out_keeps_the_recipients_of_its_start(place: &Place) {
    let api = Api::start_with(place, &[("SEMEL_ROLES", "api")]);
    let expected = fill(place, 2_500);
    api.event(&of_restaurant("e", 5));
    let worker = [("SEMEL_ROLES", "relay,worker"), ("SEMEL_NOTIFICATIONS_CHUNK", "20")];
    let mut first = Api::start_with(place, &worker);
    let made = || api.show("e")["kinds"][0]["notifications"].as_i64().unwrap();
    eventually(SOON, "the fan-out has begun", || made() >= 100);
    first.server.process.signal(Signal::TERM);
    assert!(first.server.process.end().success());
    let so_far = made();
    assert!(so_far < 5_000, "it was cut off in the middle: {so_far}");

    // Meanwhile some users leave, some join, some move, and some change channels.
    assert_eq!(api.ask("DELETE", "/recipients/restaurant/u02499", "").status, 204);
    api.recipient("restaurant", "u02498", "6", &["PUSH"]);
    api.recipient("restaurant", "u02497", "5", &["SMS"]);
    api.recipient("restaurant", "u99999", "5", &["PUSH"]);
    let _second = Api::start_with(place, &worker);
    assert_eq!(api.until_heard("e")["kinds"][0]["notifications"], 5_000);
    assert_eq!(api.notified("e"), expected);

    api.event(&of_restaurant("f", 5));
    assert_eq!(api.until_heard("f")["kinds"][0]["notifications"], 2 * 2_497 + 1 + 1);
}

fn named_recipients_are_notified_in_chunks(place: &Place) {
    let api = Api::start_with(place, &[("SEMEL_NOTIFICATIONS_CHUNK", "7")]);
    fill(place, 100);
    let mut event = of_restaurant("e", 5);
    let named: Vec<_> = (0..50).map(|n| json!({ "kind": "restaurant", "userId": format!("u{:05}", 2 * n) })).collect();
    event["recipients"] = json!(named);
    api.event(&event);
    assert_eq!(api.until_heard("e")["kinds"][0]["notifications"], 100);
    let expected: BTreeSet<_> =
        (0..50).flat_map(|n| ["PUSH", "EMAIL"].map(|channel| format!("restaurant/u{:05}/{channel}", 2 * n))).collect();
    assert_eq!(api.notified("e"), expected);
}

fn a_message_of_another_program_is_deduplicated_by_its_event_id(place: &Place) {
    let api = Api::start(place);
    api.recipient("agency", "1", "a", &["SMS"]);
    let body = r#"{"event_id":"x1","event_type":"T","aggregate_type":"AGENCY","recipientType":"BROADCAST","agency_id":"a","payload":{}}"#;
    let turned = r#"{"payload":{}, "agency_id":"a","recipientType":"BROADCAST","aggregate_type":"AGENCY","event_type":"T","event_id":"x1"}"#;
    // With three message ids.
    say(place, "notification.agency", &[body, turned, body]);
    eventually(SOON, "it was heard", || api.notified("x1") == set(&["agency/1/SMS"]));
    say(place, "notification.agency", &[body]);
    api.event(
        &json!({ "eventId": "last", "aggregateType": "AGENCY", "aggregateId": "a", "eventType": "T", "payload": {} }),
    );
    api.until_heard("last");
    assert_eq!(api.notifications("").len(), 2, "once each");

    // Another message with the same event_id is neither processed nor dropped.
    let other = body.replace("\"payload\":{}", "\"payload\":{\"a\":1}");
    say(place, "notification.agency", &[&other]);
    eventually(SOON, "it is a dead letter", || {
        let letters = api.get("/dead-letters?consumer=notification.agency").json();
        letters["items"].as_array().unwrap().iter().any(|one| one["reason"].as_str().unwrap().contains("conflict"))
    });
    assert_eq!(api.notifications("").len(), 2);
}

fn a_malformed_message_is_a_dead_letter(place: &Place) {
    let api = Api::start(place);
    api.recipient("customer", "1", "c", &["PUSH"]);
    let unknown = r#"{"event_id":"x","event_type":"T","aggregate_type":"QUUX","recipientType":"BROADCAST","customer_id":1,"payload":{}}"#;
    let other =
        r#"{"event_id":"y","event_type":"T","aggregate_type":"ADMIN","recipientType":"BROADCAST","payload":{}}"#;
    say(place, "notification.customer", &["{", unknown, other]);
    api.event(
        &json!({ "eventId": "good", "aggregateType": "CUSTOMER", "aggregateId": "c", "eventType": "T", "payload": {} }),
    );
    api.until_heard("good");
    assert_eq!(api.notifications("").len(), 1, "the queue goes on");
    let mut reasons = Vec::new();
    eventually(SOON, "they are dead letters", || {
        let letters = api.get("/dead-letters?consumer=notification.customer").json();
        reasons =
            letters["items"].as_array().unwrap().iter().map(|one| one["reason"].as_str().unwrap().to_owned()).collect();
        reasons.len() == 3
    });
    reasons.sort();
    assert!(reasons[0].starts_with("the message is malformed: no JSON"), "{reasons:?}");
    assert!(reasons[1].starts_with("unknown event type"), "{reasons:?}");
    assert!(reasons[2].starts_with("wrong queue"), "{reasons:?}");
}

/// The message of the next chunk contains a cursor, which makes it longer: here, too long.
fn a_fan_out_that_cannot_continue_is_a_dead_letter_at_once(place: &Place) {
    let api = Api::start_with(place, &[("SEMEL_NOTIFICATIONS_CHUNK", "1")]);
    fill(place, 2);
    let body = |filler: usize| {
        let named = json!([{ "kind": "restaurant", "userId": "u00000" }, { "kind": "restaurant", "userId": "u00001" },
            { "kind": "admin", "userId": "x".repeat(filler) }]);
        json!({ "event_id": "e", "event_type": "T", "aggregate_type": "RESTAURANT", "recipientType": "USER",
            "payload": {}, "recipients": named })
        .to_string()
    };
    say(place, "notification.restaurant", &[&body((1 << 20) - body(0).len())]);
    eventually(SOON, "it is a dead letter", || {
        let letters = api.get("/dead-letters").json();
        letters["items"].as_array().unwrap().iter().any(|one| one["failures"] == 1 && one["key"] == "e")
    });
    assert_eq!(api.notifications("").len(), 0, "nothing of it has happened");
}

fn notifications_are_listed_and_read(place: &Place) {
    let api = Api::start(place);
    api.recipient("restaurant", "1", "5", &["PUSH"]);
    api.recipient("restaurant", "2", "5", &["PUSH"]);
    for n in 0..3 {
        api.event(&of_restaurant(&format!("e{n}"), 5));
        api.until_heard(&format!("e{n}"));
    }
    let mine = api.notifications("kind=restaurant&userId=1");
    let events: Vec<_> = mine.iter().map(|one| one["eventId"].as_str().unwrap()).collect();
    assert_eq!(events, ["e2", "e1", "e0"]);
    let page = api.get("/notifications?kind=restaurant&userId=1&limit=2").json();
    assert_eq!(page["items"].as_array().unwrap()[..], mine[..2]);
    let rest =
        api.get(&format!("/notifications?kind=restaurant&userId=1&cursor={}", page["next"].as_str().unwrap())).json();
    assert_eq!((rest["items"].as_array().unwrap(), &rest["next"]), (&mine[2..].to_vec(), &Value::Null));

    let path = format!("/notifications/{}/read", mine[1]["id"]);
    let read = api.ask("POST", &path, "");
    assert_eq!((read.status, read.json()["readAt"].is_string()), (200, true), "{}", read.body);
    assert_eq!(api.ask("POST", &path, "").json(), read.json(), "the first time counts");
    assert_eq!(api.notifications("userId=1&unread=true").len(), 2);
    assert_eq!(api.notifications("userId=1&unread=false"), [read.json()]);
    assert_eq!(api.notifications("unread=true").len(), 5);
    assert_eq!(api.notifications("eventId=e1&userId=2").len(), 1);
    for wrong in ["/notifications/999/read", "/notifications/x/read", "/notifications/01/read"] {
        assert_eq!(api.ask("POST", wrong, "").problem(), "not-found", "{wrong}");
    }
    for wrong in ["kind=boss", "unread=1", "user=1", "cursor=x", "limit=501"] {
        assert_eq!(api.get(&format!("/notifications?{wrong}")).problem(), "invalid-query", "{wrong}");
    }
}
