//! The laws of `/outbox`.

use std::time::Duration;

use semel::{
    messaging::{Mark, MarkRow, Message, Topic},
    prelude::*,
};
use serde_json::{Value, json};

use crate::{
    desk::{Desk, execute, listed, post, serve, shown},
    place::{Place, on_both_databases},
    proposals::rows,
    support::{SOON, Server, eventually},
};

on_both_databases! {
    waiting_messages_are_listed_oldest_first_by_state_and_topic
    a_message_that_cannot_be_read_is_listed_as_such
    readiness_reports_messages_that_this_node_postpones
    the_summary_has_counts_by_state_and_the_oldest_age
    a_parked_message_can_be_redriven
    a_parked_message_can_be_skipped_only_with_a_reason
    a_message_that_is_not_held_is_neither_redriven_nor_skipped
}

fn message(topic: &str) -> Message {
    Message::new("default", Topic::new(topic).unwrap(), "note", "{}")
}

fn keyed(topic: &str) -> Message {
    Message { ordering_key: Some("k".to_owned()), ..message(topic) }
}

/// Parks everything that is ready, as a relay would.
fn park(desk: &Desk) {
    desk.block(async {
        let taken = desk.database.take(100, Duration::from_secs(30)).await.unwrap();
        let mark = |row: semel::messaging::Lent| MarkRow {
            id: row.id,
            token: taken.token,
            mark: Mark::Park { error: "the broker refused it".to_owned() },
        };
        let marks = taken.rows.clone().into_iter().map(mark).collect();
        desk.database.mark(marks).await.unwrap();
    });
}

fn states(server: &Server) -> Vec<Value> {
    listed(server, "/outbox?limit=2", "state")
}

/// No relay runs here, so that nothing changes.
const ROLES: &str = "api";

fn waiting_messages_are_listed_oldest_first_by_state_and_topic(place: &Place) {
    let (desk, server) = (Desk::at(place), serve(place, ROLES, &[]));
    desk.put(message("a"));
    let now = desk.block(desk.database.now()).unwrap();
    desk.put(Message { not_before: Some(now + Duration::from_secs(3600)), ..message("b") });
    desk.put(keyed("a"));
    desk.put(keyed("b"));
    desk.put(Message { tenant: "another".to_owned(), ..message("a") });

    assert_eq!(states(&server), ["ready", "waiting", "ready", "blocked"]);
    assert_eq!(listed(&server, "/outbox?topic=b", "state"), ["waiting", "blocked"]);
    assert_eq!(listed(&server, "/outbox?state=ready&topic=a", "orderingKey"), [Value::Null, json!("k")]);
    let blocked = &shown(&server, "/outbox?state=blocked")["items"][0];
    let expected = json!({
        "messageId": blocked["messageId"], "state": "blocked", "topic": "b", "kind": "note", "orderingKey": "k",
        "number": 2, "putAt": blocked["putAt"], "dueAt": null, "failures": 0, "error": null,
    });
    assert_eq!(*blocked, expected);
    assert!(shown(&server, "/outbox?state=waiting")["items"][0]["dueAt"].is_string());
    for query in ["state=sent", "topic=", "topic=a%20b", "stat=ready", "cursor=-1"] {
        assert_eq!(server.get(&format!("/outbox?{query}")).problem(), "invalid-query", "{query}");
    }
}

fn a_message_that_cannot_be_read_is_listed_as_such(place: &Place) {
    let (desk, server) = (Desk::at(place), serve(place, ROLES, &[]));
    for topic in ["a", "b", "c"] {
        desk.put(message(topic));
    }
    execute(place, "UPDATE semel_outbox SET body = substr(body, 1, 1) WHERE topic = 'b'");
    assert_eq!(listed(&server, "/outbox?limit=2", "topic"), ["a", "b", "c"]);
    let page = shown(&server, "/outbox");
    let expected = json!({
        "messageId": page["items"][1]["messageId"], "state": "ready", "topic": "b", "kind": "note",
        "orderingKey": null, "number": null, "putAt": page["items"][1]["putAt"], "dueAt": null, "failures": 0,
        "error": "unreadable: a stored row cannot be read: a payload whose first bytes are damaged",
    });
    assert_eq!(page["items"][1], expected);
    assert!(page["items"][1]["messageId"].is_string());
}

/// A node of an older version reports that it meets messages of a newer one; it parks none of them.
fn readiness_reports_messages_that_this_node_postpones(place: &Place) {
    let desk = Desk::at(place);
    for _ in 0..2 {
        desk.put(message("a"));
    }
    // Without its first two bytes it has no known version.
    execute(place, "UPDATE semel_outbox SET body = substr(body, 3)");
    let server = serve(place, "api,relay", &[]);
    let degraded = || server.get("/readyz").json()["degraded"].clone();
    let expected = json!(["2 messages are postponed, because this node cannot read them: see its log"]);
    eventually(SOON, "the node says what it has put off", || degraded() == expected);
    assert_eq!(states(&server), ["waiting", "waiting"]);
}

fn the_summary_has_counts_by_state_and_the_oldest_age(place: &Place) {
    let (desk, server) = (Desk::at(place), serve(place, ROLES, &[]));
    let none = json!({ "ready": 0, "waiting": 0, "blocked": 0, "unroutable": 0, "parked": 0 });
    let empty = shown(&server, "/outbox/summary");
    assert_eq!(
        (&empty["counts"], &empty["oldestReadyAt"], &empty["oldestReadyAgeSeconds"]),
        (&none, &json!(null), &json!(null))
    );
    desk.put(message("a"));
    park(&desk);
    desk.put(keyed("a"));
    desk.put(keyed("a"));
    let full = shown(&server, "/outbox/summary");
    assert_eq!(full["counts"], json!({ "ready": 1, "waiting": 0, "blocked": 1, "unroutable": 0, "parked": 1 }));
    assert!(full["oldestReadyAt"].is_string() && full["oldestReadyAgeSeconds"].as_f64().unwrap() >= 0.0, "{full}");
}

fn a_parked_message_can_be_redriven(place: &Place) {
    let (desk, server) = (Desk::at(place), serve(place, ROLES, &[]));
    desk.put(keyed("a"));
    park(&desk);
    desk.put(keyed("a"));
    assert_eq!(states(&server), ["parked", "blocked"]);
    let parked = &shown(&server, "/outbox?state=parked")["items"][0];
    assert_eq!(parked["error"], "the broker refused it");
    let path = format!("/outbox/{}/redrive", parked["messageId"].as_str().unwrap());
    assert_eq!(post(&server, &path, "").status, 204);
    assert_eq!(states(&server), ["ready", "blocked"], "the one behind it still waits for it");
    assert_eq!(rows(place, "SELECT actor FROM semel_audit"), ["local"]);
    assert_eq!(post(&server, &path, "").problem(), "not-held");
}

fn a_parked_message_can_be_skipped_only_with_a_reason(place: &Place) {
    let (desk, server) = (Desk::at(place), serve(place, ROLES, &[]));
    desk.put(keyed("a"));
    park(&desk);
    desk.put(keyed("a"));
    let parked = listed(&server, "/outbox?state=parked", "messageId")[0].as_str().unwrap().to_owned();
    let path = format!("/outbox/{parked}/skip");
    for body in ["{}", r#"{"reason":""}"#] {
        assert_eq!(post(&server, &path, body).problem(), "invalid-fields", "{body}");
    }
    assert_eq!(states(&server), ["parked", "blocked"]);
    assert_eq!(post(&server, &path, r#"{"reason":"too large"}"#).status, 204);
    assert_eq!(states(&server), ["ready"], "the one behind it may go");
    assert_eq!(rows(place, "SELECT actor || ': ' || reason FROM semel_audit"), ["local: too large"]);
}

fn a_message_that_is_not_held_is_neither_redriven_nor_skipped(place: &Place) {
    let (desk, server) = (Desk::at(place), serve(place, ROLES, &[]));
    desk.put(message("a"));
    desk.put(Message { tenant: "another".to_owned(), ..message("a") });
    let ready = listed(&server, "/outbox", "messageId")[0].as_str().unwrap().to_owned();
    park(&desk);
    let foreign = rows(place, "SELECT message_id FROM semel_outbox WHERE tenant = 'another'").remove(0);
    desk.put(message("b"));
    let fresh = listed(&server, "/outbox?topic=b", "messageId")[0].as_str().unwrap().to_owned();
    for id in [foreign.as_str(), fresh.as_str(), "019a0000-0000-7000-8000-000000000000"] {
        for action in ["redrive", "skip"] {
            let answer = post(&server, &format!("/outbox/{id}/{action}"), r#"{"reason":"x"}"#);
            assert_eq!((answer.status, answer.problem().as_str()), (409, "not-held"), "{action} {id}");
        }
    }
    assert_eq!(post(&server, "/outbox/7/skip", r#"{"reason":"x"}"#).status, 404);
    assert_eq!(rows(place, "SELECT CAST(count(*) AS TEXT) FROM semel_outbox"), ["3"]);
    assert_eq!(listed(&server, "/outbox?state=parked", "messageId"), [json!(ready)]);
}
