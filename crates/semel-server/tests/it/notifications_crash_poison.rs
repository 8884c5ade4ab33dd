//! Messages that no handler can process, and messages that kill their process: the others flow.

use serde_json::json;

use crate::{
    fleet::{Fleet, events, on_every_fleet},
    support::{SOON, eventually},
};

on_every_fleet! {
    a_malformed_message_is_a_dead_letter_and_the_others_flow
    a_message_that_kills_its_process_is_a_dead_letter_and_the_others_flow
}

fn a_malformed_message_is_a_dead_letter_and_the_others_flow(fleet: &mut Fleet) {
    let api = fleet.start("api,relay", &[]);
    fleet.invite(&api);
    fleet.send(api.address, &events("before", 8));
    fleet.until("all are published", |fleet| fleet.count("semel_outbox") == 0 && fleet.queued() == 8);
    let unknown = json!({ "event_id": "x", "event_type": "X", "aggregate_type": "SPACESHIP",
        "recipientType": "BROADCAST", "restaurant_id": 1, "payload": {} });
    let no_recipient = json!({ "event_id": "y", "event_type": "X", "aggregate_type": "RESTAURANT",
        "recipientType": "BROADCAST", "payload": {} });
    let (unknown, no_recipient) = (unknown.to_string(), no_recipient.to_string());
    fleet.say(&[b"this is no JSON", b"", b"\xff\x00\xfe", unknown.as_bytes(), no_recipient.as_bytes()]);
    fleet.send(api.address, &events("after", 8));
    fleet.dead = 5;
    let worker = fleet.start("worker", &[]);
    fleet.all_is_well(vec![api, worker]);
    let reasons = fleet.reasons();
    let some = |text: &str| reasons.iter().filter(|reason| reason.contains(text)).count();
    assert_eq!(
        (some("no JSON"), some("unknown event type"), some("restaurant_id is missing")),
        (3, 1, 1),
        "{reasons:?}"
    );
}

/// The message with more than one chunk of recipients kills its process each time it runs.
fn a_message_that_kills_its_process_is_a_dead_letter_and_the_others_flow(fleet: &mut Fleet) {
    let settings = [("SEMEL_NOTIFICATIONS_CHUNK", "5"), ("SEMEL_MESSAGES_MAX_CRASHES", "3")];
    let api = fleet.start("api,relay", &settings);
    fleet.invite(&api);
    for i in 0..7 {
        fleet.invite_one(&api, 99, &format!("many{i}"), &["PUSH"]);
    }
    let (harmless, killer) = (events("e", 20), [("killer".to_owned(), 99)]);
    fleet.send(api.address, &harmless[..10]);
    fleet.send(api.address, &killer);
    fleet.send(api.address, &harmless[10..]);
    fleet.events.lock().unwrap().remove("killer");
    fleet.until("all are published", |fleet| fleet.count("semel_outbox") == 0 && fleet.queued() == 21);

    let mut deaths = 0;
    let worker = loop {
        let mut worker = fleet.start_dying("worker", "fanout.goes_on", &settings);
        let mut died = false;
        eventually(SOON, "the worker dies, or has kept the message", || {
            died = worker.process.0.try_wait().unwrap().is_some();
            died || fleet.count("semel_dead_letters") > 0
        });
        if !died {
            break worker;
        }
        fleet.died_at("fanout.goes_on", &mut worker);
        deaths += 1;
        assert!(deaths < 8, "it goes on killing");
    };
    // Once when it was delivered, and max_crashes times from the retries.
    assert_eq!(deaths, 4);
    fleet.dead = 1;
    // It was stored and published; it will never be fanned out.
    let events = fleet.texts("SELECT event_id FROM notification_events WHERE event_id = 'killer'");
    assert_eq!(events, ["killer"]);
    crate::desk::execute(&fleet.place, "DELETE FROM notification_events WHERE event_id = 'killer'");
    fleet.all_is_well(vec![api, worker]);
    assert!(fleet.reasons()[0].contains("killed their process"), "{:?}", fleet.reasons());
}
