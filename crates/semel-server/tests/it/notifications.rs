//! The laws of `/events` and `/recipients`, and what the tests of the notifications service share. The other files of
//! this name have the rest.

use std::{
    collections::BTreeSet,
    net::TcpStream,
    sync::{Arc, Barrier},
    thread,
};

use serde_json::{Value, json};

use crate::{
    desk::execute,
    place::{Place, on_both_databases},
    proposals::rows,
    support::{Answer, SOON, Server, eventually, send},
    wire::Wire,
};

on_both_databases! {
    an_event_is_accepted_once
    another_body_under_an_event_id_is_refused_and_nothing_is_stored
    a_thousand_events_are_accepted_or_none
    a_malformed_event_is_refused_with_every_wrong_field
    an_event_without_recipients_is_refused
    of_many_requests_with_one_event_one_creates_it
    recipients_are_put_shown_listed_and_deleted
    an_equal_change_of_the_directory_makes_no_new_revision
    a_change_of_the_directory_is_audited_in_its_commit
    an_id_with_a_nul_or_invalid_utf8_is_not_found
    a_published_event_stays_published_after_its_receipt_is_deleted
}

/// A server on a place's database, and requests to it.
pub(crate) struct Api {
    pub(crate) server: Server,
}

impl Api {
    pub(crate) fn start(place: &Place) -> Self {
        Self::start_with(place, &[])
    }

    pub(crate) fn start_with(place: &Place, variables: &[(&str, &str)]) -> Self {
        let mut command = place.semel(["serve", "--listen", "127.0.0.1:0"]);
        Self { server: Server::start_with(command.envs(variables.iter().copied())) }
    }

    pub(crate) fn ask(&self, method: &str, path: &str, body: &str) -> Answer {
        let mut connection = TcpStream::connect(self.server.address).unwrap();
        send(&mut connection, method, path, &[("host", "localhost")], body.as_bytes());
        Answer::read(connection)
    }

    pub(crate) fn get(&self, path: &str) -> Answer {
        self.ask("GET", path, "")
    }

    pub(crate) fn post(&self, path: &str, body: &Value) -> Answer {
        self.ask("POST", path, &body.to_string())
    }

    /// Puts a recipient into the directory.
    pub(crate) fn recipient(&self, kind: &str, user: &str, group: &str, channels: &[&str]) {
        let body = json!({ "groupId": group, "channels": channels });
        let put = self.ask("PUT", &format!("/recipients/{kind}/{user}"), &body.to_string());
        assert_eq!(put.status, 200, "{}", put.body);
    }

    /// Sends an event that must be new.
    pub(crate) fn event(&self, event: &Value) {
        let answer = self.post("/events", event);
        assert_eq!((answer.status, &answer.json()["created"]), (202, &json!(true)), "{}", answer.body);
    }

    /// An event and its progress.
    pub(crate) fn show(&self, id: &str) -> Value {
        let answer = self.get(&format!("/events/{id}"));
        assert_eq!(answer.status, 200, "{}", answer.body);
        answer.json()
    }

    /// Waits until an event has reached every kind of recipient.
    pub(crate) fn until_heard(&self, id: &str) -> Value {
        let mut shown = Value::Null;
        // A message of a dead process is redelivered after a minute.
        eventually(4 * SOON, "everybody has heard of the event", || {
            shown = self.show(id);
            let heard = |kind: &Value| kind["listenerDone"] == true;
            shown["kinds"].as_array().unwrap().iter().all(heard) && shown["outbox"]["status"] == "PROCESSED"
        });
        shown
    }

    /// All notifications of a list, page by page; never one twice.
    pub(crate) fn notifications(&self, query: &str) -> Vec<Value> {
        let mut all = Vec::new();
        let mut cursor = String::new();
        loop {
            let page = self.get(&format!("/notifications?{query}&limit=500{cursor}"));
            assert_eq!(page.status, 200, "{}", page.body);
            let page = page.json();
            all.extend(page["items"].as_array().unwrap().iter().cloned());
            match page["next"].as_str() {
                Some(next) => cursor = format!("&cursor={next}"),
                None => break,
            }
        }
        let ids: Vec<_> = all.iter().map(|one| one["id"].as_i64().unwrap()).collect();
        assert!(ids.is_sorted_by(|a, b| a > b), "newest first, none twice");
        all
    }

    /// Who was notified of an event and how: `kind/user/channel`.
    pub(crate) fn notified(&self, id: &str) -> BTreeSet<String> {
        let all = self.notifications(&format!("eventId={id}"));
        let named = |one: &Value| {
            let word = |name: &str| one[name].as_str().unwrap().to_owned();
            format!("{}/{}/{}", word("kind"), word("userId"), word("notificationType"))
        };
        let set: BTreeSet<_> = all.iter().map(named).collect();
        assert_eq!(set.len(), all.len(), "none twice");
        set
    }
}

/// An event of a restaurant.
pub(crate) fn of_restaurant(id: &str, restaurant: u64) -> Value {
    json!({ "eventId": id, "aggregateType": "RESTAURANT", "aggregateId": restaurant,
            "eventType": "RESERVATION_REQUESTED", "payload": { "table": 4 } })
}

/// A server that accepts events and does nothing else with them.
fn accepting(place: &Place) -> Api {
    Api::start_with(place, &[("SEMEL_ROLES", "api")])
}

fn errors(answer: &Answer) -> Vec<String> {
    answer.json()["errors"].as_array().unwrap().iter().map(|e| e["field"].as_str().unwrap().to_owned()).collect()
}

fn stored(place: &Place) -> Vec<String> {
    rows(place, "SELECT event_id FROM notification_events ORDER BY event_id")
}

fn an_event_is_accepted_once(place: &Place) {
    let api = accepting(place);
    let first = api.post("/events", &of_restaurant("evt-001", 5));
    assert_eq!((first.status, first.json()), (202, json!({ "eventId": "evt-001", "created": true })));
    let again = r#" {"payload":{ "table":4 }, "eventType":"RESERVATION_REQUESTED", "aggregateId":5,
                     "aggregateType":"RESTAURANT", "eventId":"evt-001"} "#;
    let again = api.ask("POST", "/events", again);
    assert_eq!((again.status, again.json()), (202, json!({ "eventId": "evt-001", "created": false })));
    assert_eq!(rows(place, "SELECT CAST(COUNT(*) AS TEXT) FROM semel_outbox"), ["1"]);

    let shown = api.show("evt-001");
    assert_eq!(shown["aggregateId"], 5);
    assert_eq!(shown["payload"], json!({ "table": 4 }));
    assert_eq!(shown["outbox"], json!({ "status": "PENDING" }));
    assert_eq!(shown["processedEvent"], json!({ "status": "PROCESSING", "processedAt": null }));
    let kind = json!({ "kind": "restaurant", "published": false, "publishedAt": null, "listenerDone": false, "notifications": 0 });
    assert_eq!(shown["kinds"], json!([kind]));
    assert_eq!(api.get("/events/evt-002").problem(), "not-found");

    // An id may contain anything except control characters.
    let odd = "a/b c%25?é";
    api.event(&of_restaurant(odd, 5));
    assert_eq!(api.show("a%2Fb%20c%2525%3F%C3%A9")["eventId"], odd);
    drop(api);
    let api = accepting(place);
    assert_eq!(api.post("/events", &of_restaurant("evt-001", 5)).json()["created"], false, "after a restart too");
}

fn another_body_under_an_event_id_is_refused_and_nothing_is_stored(place: &Place) {
    let api = accepting(place);
    api.event(&of_restaurant("e1", 5));
    let other = api.post("/events", &of_restaurant("e1", 6));
    assert_eq!((other.status, other.problem().as_str()), (422, "event-mismatch"));
    assert_eq!(errors(&other), ["eventId"]);
    let list = json!([of_restaurant("e0", 5), of_restaurant("e1", 5), of_restaurant("e1", 5), of_restaurant("e2", 5)]);
    let mut wrong = list.clone();
    wrong[1]["payload"] = json!({});
    wrong[2]["payload"] = json!({});
    let refused = api.post("/events", &wrong);
    assert_eq!(
        (refused.problem().as_str(), errors(&refused)),
        ("event-mismatch", vec!["[1].eventId".to_owned(), "[2].eventId".to_owned()])
    );
    assert_eq!(stored(place), ["e1"]);
    assert_eq!(rows(place, "SELECT CAST(COUNT(*) AS TEXT) FROM semel_outbox"), ["1"]);
    let created: Vec<_> =
        api.post("/events", &list).json().as_array().unwrap().iter().map(|one| one["created"].clone()).collect();
    assert_eq!(created, [json!(true), json!(false), json!(false), json!(true)], "their ids were still free");
    assert_eq!(stored(place), ["e0", "e1", "e2"]);
}

fn a_thousand_events_are_accepted_or_none(place: &Place) {
    let api = accepting(place);
    let list = |count: usize| (0..count).map(|n| of_restaurant(&format!("e{n:04}"), 5)).collect::<Vec<_>>();
    let mut wrong = list(1000);
    wrong[3].as_object_mut().unwrap().remove("eventType");
    wrong[999]["aggregateType"] = json!("QUUX");
    let refused = api.post("/events", &json!(wrong));
    assert_eq!(
        (refused.problem().as_str(), errors(&refused)),
        ("invalid-fields", vec!["[3].eventType".to_owned(), "[999].aggregateType".to_owned()])
    );
    assert_eq!(api.post("/events", &json!(list(1001))).status, 422);
    assert_eq!(api.post("/events", &json!([])).status, 422);
    assert!(stored(place).is_empty());

    // Twice in one list is an ordinary repeat.
    let mut twice = list(999);
    twice.push(of_restaurant("e0000", 5));
    let made = api.post("/events", &json!(twice)).json();
    let made: Vec<_> = made.as_array().unwrap().iter().map(|one| one["created"] == true).collect();
    assert_eq!((made.len(), made.iter().filter(|new| **new).count(), made[999]), (1000, 999, false));
    let again = api.post("/events", &json!(list(1000))).json();
    let new: Vec<_> = again.as_array().unwrap().iter().filter(|one| one["created"] == true).collect();
    assert_eq!(new, [&json!({ "eventId": "e0999", "created": true })]);
    assert_eq!(stored(place).len(), 1000);
    assert_eq!(rows(place, "SELECT CAST(COUNT(*) AS TEXT) FROM semel_outbox"), ["1000"]);
}

fn a_malformed_event_is_refused_with_every_wrong_field(place: &Place) {
    let api = accepting(place);
    for body in ["", "{", "nothing", "[{}", "7", "\"x\"", "null"] {
        let refused = api.ask("POST", "/events", body);
        assert_eq!((refused.status, refused.problem().as_str()), (400, "invalid-json"), "{body}");
    }
    let mut wrong = of_restaurant(&"x".repeat(256), 5);
    wrong["aggregateId"] = json!(1.5);
    wrong["eventType"] = json!("");
    wrong["payload"] = json!([]);
    wrong["recipients"] = json!([{ "kind": "boss" }]);
    wrong["restaurantId"] = json!(5);
    let refused = api.post("/events", &wrong);
    assert_eq!((refused.status, refused.problem().as_str()), (422, "invalid-fields"));
    let expected = [
        "eventId",
        "aggregateId",
        "eventType",
        "payload",
        "restaurantId",
        "recipients[0].kind",
        "recipients[0].userId",
    ];
    assert_eq!(errors(&refused), expected);
    let long = api.ask("POST", "/events", &format!("[{}]", " ".repeat(9 << 20)));
    assert_eq!((long.status, long.problem().as_str()), (413, "body-too-large"));
    assert!(stored(place).is_empty());
    assert_eq!(rows(place, "SELECT CAST(COUNT(*) AS TEXT) FROM semel_outbox"), ["0"]);
}

fn an_event_without_recipients_is_refused(place: &Place) {
    let rules = "RESTAURANT=restaurant; ORDER/ORDER_*=restaurant,customer";
    let api = Api::start_with(place, &[("SEMEL_ROLES", "api"), ("SEMEL_NOTIFICATIONS_ROUTES", rules)]);
    let order = |event_type: &str, payload: Value| json!({ "eventId": "e", "aggregateType": "ORDER", "eventType": event_type, "payload": payload });
    let refused = |event: Value| errors(&api.post("/events", &event));
    assert_eq!(refused(order("REFUND", json!({}))), ["eventType"]);
    assert_eq!(refused(order("ORDER_MADE", json!({ "restaurant_id": 5 }))), ["aggregateId"], "which customer?");
    assert_eq!(refused(order("ORDER_MADE", json!({ "restaurant_id": 5, "customer_id": {} }))), ["payload.customer_id"]);
    assert_eq!(
        refused(json!({ "eventId": "e", "aggregateType": "AGENCY", "eventType": "X", "payload": {} })),
        ["aggregateType"]
    );
    assert!(stored(place).is_empty());
    api.event(&order("ORDER_MADE", json!({ "restaurant_id": 5, "customer_id": "c" })));
    let kinds: Vec<_> = api.show("e")["kinds"].as_array().unwrap().iter().map(|kind| kind["kind"].clone()).collect();
    assert_eq!(kinds, [json!("restaurant"), json!("customer")]);
}

fn of_many_requests_with_one_event_one_creates_it(place: &Place) {
    // Two nodes, with lists that overlap.
    let nodes = [Arc::new(accepting(place)), Arc::new(accepting(place))];
    let barrier = Arc::new(Barrier::new(16));
    let sent: Vec<_> = (0..16)
        .map(|n| {
            let (api, barrier) = (nodes[n % 2].clone(), barrier.clone());
            thread::spawn(move || {
                let mut list: Vec<_> = (0..20).map(|k| of_restaurant(&format!("e{}", (k + n) % 20), 5)).collect();
                // Some have another body for the same id.
                if n >= 12 {
                    list[0] = of_restaurant("disputed", n as u64);
                }
                barrier.wait();
                api.post("/events", &json!(list))
            })
        })
        .collect();
    let answers: Vec<_> = sent.into_iter().map(|thread| thread.join().unwrap()).collect();
    let accepted: Vec<_> = answers.iter().filter(|answer| answer.status == 202).collect();
    assert_eq!(accepted.len(), 13, "all who agree, and one of those who do not");
    assert!(answers.iter().filter(|answer| answer.status != 202).all(|answer| answer.problem() == "event-mismatch"));
    let mut made: Vec<_> = accepted
        .iter()
        .flat_map(|answer| answer.json().as_array().unwrap().clone())
        .filter(|one| one["created"] == true)
        .map(|one| one["eventId"].as_str().unwrap().to_owned())
        .collect();
    made.sort();
    assert_eq!(made, stored(place), "each was made by one of them");
    assert_eq!(made.len(), 21);
    assert_eq!(rows(place, "SELECT CAST(COUNT(*) AS TEXT) FROM semel_outbox"), ["21"]);
}

#[test]
fn during_a_database_outage_no_event_is_accepted() {
    let place = Place::postgres();
    let mut wire = Wire::to_postgres();
    let url = wire.url(&place.url);
    let mut command = place.semel(["serve", "--listen", "127.0.0.1:0", "--database-url", &url]);
    let api = Api { server: Server::start_with(&mut command) };
    wire.cut();
    let refused = api.post("/events", &of_restaurant("e", 5));
    assert_eq!((refused.status, refused.problem().as_str()), (503, "store-unavailable"), "{}", refused.body);
    assert!(refused.header("retry-after").is_some());
    wire.mend();
    eventually(SOON, "events are accepted again", || api.post("/events", &of_restaurant("e", 5)).status == 202);
}

fn recipients_are_put_shown_listed_and_deleted(place: &Place) {
    let api = accepting(place);
    let put = |path: &str, body: Value| api.ask("PUT", path, &body.to_string());
    let body = json!({ "groupId": 5, "channels": ["EMAIL", "PUSH"], "addresses": { "EMAIL": "ana@example.com" } });
    let made = put("/recipients/restaurant/10", body);
    assert_eq!(made.status, 200, "{}", made.body);
    let mut expected = json!({ "kind": "restaurant", "userId": "10", "groupId": "5", "channels": ["PUSH", "EMAIL"],
        "addresses": { "EMAIL": "ana@example.com" } });
    expected["createdAt"] = made.json()["createdAt"].clone();
    assert_eq!(made.json(), expected);
    assert_eq!(api.get("/recipients/restaurant/10").json(), expected);
    assert_eq!(api.get("/recipients/customer/10").problem(), "not-found");

    let changed = put("/recipients/restaurant/10", json!({ "groupId": "6", "channels": ["SMS"] })).json();
    assert_eq!(
        (&changed["groupId"], &changed["channels"], &changed["addresses"]),
        (&json!("6"), &json!(["SMS"]), &json!({}))
    );
    assert_eq!(changed["createdAt"], expected["createdAt"]);
    for (wrong, fields) in [
        (json!({}), vec!["groupId", "channels"]),
        (json!({ "groupId": "6", "channels": [] }), vec!["channels"]),
        (json!({ "groupId": "6", "channels": ["PUSH", "PUSH"] }), vec!["channels"]),
        (json!({ "groupId": "6", "channels": ["FAX"], "color": 1 }), vec!["channels", "color"]),
        (
            json!({ "groupId": "", "channels": ["PUSH"], "addresses": { "SMS": "+1" } }),
            vec!["groupId", "addresses.SMS"],
        ),
    ] {
        let refused = put("/recipients/restaurant/10", wrong);
        assert_eq!(
            (refused.problem().as_str(), errors(&refused)),
            ("invalid-fields", fields.into_iter().map(str::to_owned).collect())
        );
    }
    assert_eq!(put("/recipients/boss/10", json!({ "groupId": "6", "channels": ["SMS"] })).status, 404);
    assert_eq!(api.get("/recipients/restaurant/10").json(), changed);

    for user in ["a", "b", "c"] {
        api.recipient("agency", user, if user == "b" { "2" } else { "1" }, &["IN_APP"]);
    }
    let page = api.get("/recipients/agency?limit=2").json();
    assert_eq!((&page["items"][0]["userId"], &page["items"][1]["userId"]), (&json!("a"), &json!("b")));
    let rest = api.get(&format!("/recipients/agency?limit=2&cursor={}", page["next"].as_str().unwrap())).json();
    assert_eq!((&rest["items"][0]["userId"], &rest["next"]), (&json!("c"), &Value::Null));
    let group = api.get("/recipients/agency?groupId=1").json();
    assert_eq!(group["items"].as_array().unwrap().len(), 2);
    assert_eq!(api.get("/recipients/agency?group=1").problem(), "invalid-query");

    assert_eq!(api.ask("DELETE", "/recipients/agency/a", "").status, 204);
    assert_eq!(api.ask("DELETE", "/recipients/agency/a", "").status, 404);
    assert_eq!(api.get("/recipients/agency/a").status, 404);
    assert_eq!(api.get("/recipients/agency").json()["items"].as_array().unwrap().len(), 2);
    api.recipient("agency", "a", "3", &["PUSH"]);
    assert_eq!(api.get("/recipients/agency/a").json()["groupId"], "3");
}

fn an_equal_change_of_the_directory_makes_no_new_revision(place: &Place) {
    let api = accepting(place);
    for _ in 0..3 {
        api.recipient("admin", "1", "ops", &["PUSH", "SMS"]);
    }
    assert_eq!(rows(place, "SELECT CAST(revision AS TEXT) FROM notification_directories"), ["1"]);
    assert_eq!(rows(place, "SELECT CAST(COUNT(*) AS TEXT) FROM notification_recipients"), ["1"]);
}

fn a_change_of_the_directory_is_audited_in_its_commit(place: &Place) {
    let api = accepting(place);
    let body = json!({ "groupId": "ops", "channels": ["EMAIL"], "addresses": { "EMAIL": "ana@example.com" } });
    for _ in 0..2 {
        assert_eq!(api.ask("PUT", "/recipients/admin/1", &body.to_string()).status, 200);
    }
    // Neither is stored without the other.
    execute(place, "ALTER TABLE semel_audit RENAME TO audit_away");
    let refused = api.ask("PUT", "/recipients/admin/1", r#"{"groupId":"dev","channels":["PUSH"]}"#).status;
    assert!(refused >= 500, "{refused}");
    assert!(api.ask("DELETE", "/recipients/admin/1", "").status >= 500);
    execute(place, "ALTER TABLE audit_away RENAME TO semel_audit");
    assert_eq!(api.get("/recipients/admin/1").json()["groupId"], "ops");
    api.recipient("admin", "1", "dev", &["PUSH", "SMS"]);
    for status in [204, 404] {
        assert_eq!(api.ask("DELETE", "/recipients/admin/1", "").status, status);
    }
    let did = "SELECT tenant || ' ' || actor || ' ' || action || ' ' || subject FROM semel_audit ORDER BY id";
    let [put, deleted] = ["put", "delete"].map(|did| format!("default local recipients.{did} admin/1"));
    assert_eq!(rows(place, did), [put.clone(), put, deleted], "a repeat is not audited");
    let stood = |sql| rows(place, sql).iter().map(|text| serde_json::from_str(text).unwrap()).collect::<Vec<Value>>();
    let first = json!({ "groupId": "ops", "channels": ["EMAIL"] });
    let second = json!({ "groupId": "dev", "channels": ["PUSH", "SMS"] });
    let before = stood("SELECT coalesce(before, 'null') FROM semel_audit ORDER BY id");
    let after = stood("SELECT coalesce(after, 'null') FROM semel_audit ORDER BY id");
    assert_eq!(before, [Value::Null, first.clone(), second.clone()]);
    assert_eq!(after, [first, second, Value::Null], "without addresses");
}

/// If another program reads the queue, only the receipt tells when the message was published, and it expires after a
/// week.
fn a_published_event_stays_published_after_its_receipt_is_deleted(place: &Place) {
    let api = Api::start_with(place, &[("SEMEL_ROLES", "api,relay")]);
    api.event(&of_restaurant("evt-001", 5));
    let status = || api.show("evt-001")["processedEvent"]["status"].clone();
    eventually(SOON, "it is published", || status() == "SUCCESS");
    assert!(api.show("evt-001")["processedEvent"]["processedAt"].is_string());
    execute(place, "DELETE FROM semel_receipts");
    let shown = api.show("evt-001");
    assert_eq!(
        (&shown["outbox"]["status"], &shown["processedEvent"]["status"]),
        (&json!("PROCESSED"), &json!("SUCCESS"))
    );
    assert_eq!(shown["kinds"][0]["published"], true);
}

/// PostgreSQL accepts no NUL in a text, and no invalid UTF-8.
fn an_id_with_a_nul_or_invalid_utf8_is_not_found(place: &Place) {
    let api = accepting(place);
    for path in ["/events/a%00", "/events/%FF", "/dead-letters/%FF", "/jobs/%FF", "/recipients/admin/%00"] {
        let missing = api.get(path);
        assert_eq!((missing.status, missing.problem().as_str()), (404, "not-found"), "{path}");
    }
    for path in ["/notifications/%FF/read", "/outbox/%FF/redrive", "/dead-letters/%FF/redrive"] {
        let missing = api.post(path, &json!({}));
        assert_eq!((missing.status, missing.problem().as_str()), (404, "not-found"), "{path}");
    }
    for path in [
        "/notifications?userId=%00",
        "/notifications?eventId=a%00",
        "/recipients/admin?groupId=%00",
        "/dead-letters?consumer=%00",
        "/notifications/stream?kind=admin&userId=%00",
    ] {
        let refused = api.get(path);
        assert_eq!((refused.status, refused.problem().as_str()), (400, "invalid-query"), "{path}");
    }
}
