//! The lists of notifications and events: filters, pages, and one by its id.

use serde_json::{Value, json};

use crate::{
    desk::execute,
    notifications::{Api, of_restaurant},
    place::{Place, on_both_databases},
};

on_both_databases! {
    a_notification_shows_its_event_and_its_address
    notifications_are_found_by_status_type_user_and_time
    events_are_found_by_aggregate_type_and_time
    a_page_of_large_payloads_is_short_and_has_a_next_page
    an_unreadable_row_is_listed_with_all_others
    a_recipient_with_unreadable_addresses_is_listed_with_all_others
    a_payload_that_some_json_reader_refuses_is_not_accepted
}

/// Three events: two of restaurant 5, one of restaurant 6; users 1 and 2 are in 5, user 3 in 6.
fn filled(place: &Place) -> Api {
    let api = Api::start(place);
    for (user, group) in [("1", "5"), ("2", "5"), ("3", "6")] {
        let body = json!({ "groupId": group, "channels": ["PUSH", "EMAIL"],
                           "addresses": { "EMAIL": format!("{user}@example.com") } });
        assert_eq!(api.ask("PUT", &format!("/recipients/restaurant/{user}"), &body.to_string()).status, 200);
    }
    for (event, restaurant) in [("e0", 5), ("e1", 6), ("e2", 5)] {
        api.event(&of_restaurant(event, restaurant));
        api.until_heard(event);
    }
    api
}

fn events(all: &[Value]) -> Vec<&str> {
    all.iter().map(|one| one["eventId"].as_str().unwrap()).collect()
}

fn a_notification_shows_its_event_and_its_address(place: &Place) {
    let api = filled(place);
    let listed = api.notifications("userId=1&eventId=e0&notificationType=EMAIL");
    let [one] = &listed[..] else { panic!("{listed:?}") };
    assert_eq!((&one["eventType"], &one["address"]), (&json!("RESERVATION_REQUESTED"), &json!("1@example.com")));
    assert_eq!((&one["payload"], &one["status"]), (&json!({ "table": 4 }), &json!("PENDING")));
    let push = &api.notifications("userId=1&eventId=e0&notificationType=PUSH")[0];
    assert_eq!(push["address"], Value::Null, "it has no address for PUSH");
    let shown = api.get(&format!("/notifications/{}", one["id"]));
    assert_eq!((shown.status, &shown.json()), (200, one));
    for wrong in ["/notifications/999999", "/notifications/x", "/notifications/01"] {
        assert_eq!(api.get(wrong).problem(), "not-found", "{wrong}");
    }
}

fn notifications_are_found_by_status_type_user_and_time(place: &Place) {
    let api = filled(place);
    execute(place, "UPDATE notifications SET status = 'IN_DOUBT', error = 'no answer' WHERE event_id = 'e1'");
    execute(place, "UPDATE notifications SET status = 'SENT' WHERE event_id = 'e2' AND notification_type = 'PUSH'");
    let hour = 3_600_000_000_i64;
    execute(place, &format!("UPDATE notifications SET created_at = created_at - {hour} WHERE event_id = 'e0'"));

    assert_eq!(events(&api.notifications("status=IN_DOUBT")), ["e1", "e1"]);
    assert_eq!(events(&api.notifications("status=IN_DOUBT&notificationType=EMAIL&userId=3")), ["e1"]);
    assert_eq!(api.notifications("status=IN_DOUBT&userId=1").len(), 0);
    assert_eq!(events(&api.notifications("status=SENT")), ["e2", "e2"]);
    assert_eq!(api.notifications("status=PENDING").len(), 6);
    assert_eq!(api.notifications("status=FAILED").len(), 0);
    assert_eq!(api.notifications("notificationType=EMAIL").len(), 5);
    assert_eq!(api.notifications("notificationType=SMS").len(), 0);

    let newest = api.notifications("eventId=e2")[0]["createdAt"].as_str().unwrap().to_owned();
    let oldest = api.notifications("eventId=e0").last().unwrap()["createdAt"].as_str().unwrap().to_owned();
    assert_eq!(api.notifications(&format!("since={oldest}")).len(), 10);
    assert_eq!(events(&api.notifications(&format!("since={newest}"))).first(), Some(&"e2"));
    assert_eq!(api.notifications(&format!("until={oldest}")).len(), 0);
    let early = api.notifications(&format!("until={newest}&since={oldest}&userId=2"));
    assert!(events(&early).contains(&"e0"), "{early:?}");
    let first = api.get(&format!("/notifications?since={oldest}&limit=4")).json();
    let rest = api.get(&format!("/notifications?since={oldest}&cursor={}", first["next"].as_str().unwrap())).json();
    assert_eq!(first["items"].as_array().unwrap().len() + rest["items"].as_array().unwrap().len(), 10);

    let wrong = api.get("/notifications?status=LOST&notificationType=FAX&since=noon&until=");
    assert_eq!((wrong.status, wrong.problem().as_str()), (400, "invalid-query"));
    for text in ["status must be one of PENDING, SENT", "notificationType must be one of PUSH", "since must be a time"]
    {
        assert!(wrong.body.contains(text), "{text}: {}", wrong.body);
    }
}

fn events_are_found_by_aggregate_type_and_time(place: &Place) {
    let api = filled(place);
    let listed = |query: &str| {
        let page = api.get(&format!("/events?{query}"));
        assert_eq!(page.status, 200, "{}", page.body);
        page.json()["items"].as_array().unwrap().clone()
    };
    let all = listed("");
    assert_eq!(events(&all), ["e2", "e1", "e0"]);
    assert_eq!((&all[0]["aggregateId"], &all[0]["payload"]), (&json!(5), &json!({ "table": 4 })));
    assert_eq!(events(&listed("aggregateType=RESTAURANT&aggregateId=5")), ["e2", "e0"]);
    assert_eq!(events(&listed("eventType=RESERVATION_REQUESTED&limit=1")), ["e2"]);
    assert_eq!(listed("eventType=OTHER").len(), 0);
    let middle = all[1]["createdAt"].as_str().unwrap();
    assert_eq!(events(&listed(&format!("since={middle}"))), ["e2", "e1"]);
    assert_eq!(events(&listed(&format!("until={middle}"))), ["e0"]);
    let first = api.get("/events?limit=2").json();
    let rest = api.get(&format!("/events?limit=2&cursor={}", first["next"].as_str().unwrap())).json();
    assert_eq!((events(rest["items"].as_array().unwrap()), &rest["next"]), (vec!["e0"], &Value::Null));

    let alone = api.get("/events?aggregateId=5");
    assert_eq!(alone.problem(), "invalid-query");
    assert!(alone.body.contains("aggregateId needs aggregateType"), "{}", alone.body);
}

fn a_page_of_large_payloads_is_short_and_has_a_next_page(place: &Place) {
    let api = Api::start(place);
    api.recipient("restaurant", "1", "5", &["PUSH"]);
    let most = 20;
    for n in 0..most {
        let mut event = of_restaurant(&format!("e{n}"), 5);
        event["payload"] = json!({ "text": "x".repeat(250 << 10) });
        api.event(&event);
    }
    (0..most).for_each(|n| drop(api.until_heard(&format!("e{n}"))));
    for path in ["/notifications", "/events"] {
        let page = api.get(&format!("{path}?limit=500")).json();
        let items = page["items"].as_array().unwrap().len();
        assert!((1..most).contains(&items), "{path}: {items} of {most} on one page");
        assert!(page["next"].is_string(), "{path}");
    }
    assert_eq!(api.notifications("").len(), most);
}

fn an_unreadable_row_is_listed_with_all_others(place: &Place) {
    let api = filled(place);
    // A version of the stored form that this program does not know.
    let (bytes, hex) = if place.url.starts_with("sqlite:") { ("x'", "'") } else { ("'\\x", "'::bytea") };
    execute(place, &format!("UPDATE notification_fanouts SET payload = {bytes}ff00{hex} WHERE event_id = 'e1'"));
    execute(place, &format!("UPDATE notification_events SET payload = {bytes}ff00{hex} WHERE event_id = 'e1'"));
    let all = api.notifications("");
    assert_eq!(all.len(), 10);
    for one in &all {
        let damaged = one["eventId"] == "e1";
        assert_eq!(one["payload"].is_null(), damaged, "{one}");
        assert_eq!(one["error"].as_str().is_some_and(|error| error.starts_with("unreadable: ")), damaged, "{one}");
    }
    let listed = api.get("/events").json();
    assert_eq!(events(listed["items"].as_array().unwrap()), ["e2", "e1", "e0"]);
    let alone = api.get("/events/e1");
    assert_eq!((alone.status, alone.problem().as_str()), (500, "row-unreadable"));
    assert_eq!(alone.json()["id"], "e1");
}

fn a_recipient_with_unreadable_addresses_is_listed_with_all_others(place: &Place) {
    let api = filled(place);
    let (bytes, hex) = if place.url.starts_with("sqlite:") { ("x'", "'") } else { ("'\\x", "'::bytea") };
    execute(place, &format!("UPDATE notification_recipients SET addresses = {bytes}ff00{hex} WHERE user_id = '1'"));
    if place.url.starts_with("sqlite:") {
        // Not even of the column's type.
        execute(place, "UPDATE notification_recipients SET addresses = 7 WHERE user_id = '2'");
    }
    let listed = api.get("/recipients/restaurant?groupId=5").json();
    let items = listed["items"].as_array().unwrap();
    assert_eq!(items.len(), 2);
    assert!(items[0]["error"].as_str().unwrap().starts_with("unreadable: "), "{}", items[0]);
    assert_eq!((&items[0]["userId"], &items[0]["addresses"]), (&json!("1"), &json!({})));
    let alone = api.get("/recipients/restaurant/1");
    assert_eq!((alone.problem().as_str(), &alone.json()["id"]), ("row-unreadable", &json!("1")));
    // Putting it again repairs it.
    let body = json!({ "groupId": "5", "channels": ["PUSH"] }).to_string();
    assert_eq!(api.ask("PUT", "/recipients/restaurant/1", &body).status, 200);
    assert_eq!(api.get("/recipients/restaurant/1").status, 200);
}

fn a_payload_that_some_json_reader_refuses_is_not_accepted(place: &Place) {
    let api = Api::start(place);
    api.recipient("restaurant", "1", "5", &["PUSH"]);
    let with = |id: &str, payload: &str| {
        let event = of_restaurant(id, 5).to_string();
        event.replace(r#""payload":{"table":4}"#, &format!(r#""payload":{payload}"#))
    };
    let nested = |levels: usize| format!(r#"{}{{}}{}"#, r#"{"a":"#.repeat(levels - 1), "}".repeat(levels - 1));
    for (payload, told) in [
        (nested(100_000 / 6), "more than 64 levels of nesting"),
        (nested(65), "more than 64 levels of nesting"),
        (r#"{"total":{"cents":1e999999}}"#.to_owned(), "payload has at total.cents a number beyond the range"),
        (r#"{"name":"\ud800"}"#.to_owned(), "payload has at name half of a surrogate pair"),
    ] {
        for body in [with("bad", &payload), format!("[{},{}]", of_restaurant("good", 5), with("bad", &payload))] {
            let refused = api.ask("POST", "/events", &body);
            assert_eq!((refused.status, refused.problem().as_str()), (422, "invalid-fields"), "{}", refused.body);
            assert!(refused.body.contains(told), "{}", refused.body);
        }
    }
    assert_eq!(api.ask("POST", "/events", &with("deep", &nested(64))).status, 202);
    api.until_heard("deep");
    // A reader that gives up at 128 levels reads the pages.
    for path in ["/events", "/notifications", "/events/deep"] {
        assert!(api.get(path).json().is_object(), "{path}");
    }
    assert_eq!(events(api.get("/events").json()["items"].as_array().unwrap()), ["deep"]);
}
