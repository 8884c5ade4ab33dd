//! Messages that are delivered more than once, and rows that exist already.

use serde_json::json;

use crate::{
    desk::execute,
    fleet::{ALL, Fleet, events, on_every_fleet, stop},
    fleet_queues::QUEUE,
};

on_every_fleet! {
    a_message_delivered_three_times_takes_effect_once
    an_existing_row_is_skipped_and_the_rest_is_stored
    the_same_id_with_another_body_becomes_a_dead_letter
}

#[test]
fn a_message_delivered_three_times_takes_effect_once_with_sqlite_and_rabbitmq() {
    a_message_delivered_three_times_takes_effect_once(&mut Fleet::sqlite_rabbitmq());
}

/// Every message three times, each time with another id: the event's own id counts. Two listeners get them at the same
/// time.
fn a_message_delivered_three_times_takes_effect_once(fleet: &mut Fleet) {
    let api = fleet.start("api,relay", &[]);
    fleet.invite(&api);
    fleet.send(api.address, &events("e", 40));
    fleet.until("all are published", |fleet| fleet.count("semel_outbox") == 0 && fleet.queued() == 40);
    fleet.triple();
    // Few at once, so that both get some of each.
    let few = [("SEMEL_MESSAGES_PREFETCH", "5")];
    let workers = [fleet.start("worker", &few), fleet.start("worker", &few)];
    let servers = std::iter::once(api).chain(workers).collect();
    fleet.all_is_well(servers);
}

/// The source's fourth scenario: one of ten rows exists already.
fn an_existing_row_is_skipped_and_the_rest_is_stored(fleet: &mut Fleet) {
    let api = fleet.start("api", &[]);
    for i in 0..10 {
        fleet.invite_one(&api, 1, &format!("user{i}"), &["PUSH"]);
    }
    execute(
        &fleet.place,
        "INSERT INTO notifications (tenant, event_id, kind, user_id, notification_type, created_at)
         VALUES ('default', 'e-0', 'restaurant', 'user4', 'PUSH', 7)",
    );
    fleet.send(api.address, &[("e-0".to_owned(), 1)]);
    stop(api);
    // The first attempt is cut off after its inserts and before its commit.
    let mut dying = fleet.start_dying(ALL, "consumer.before_commit", &[]);
    fleet.died_at("consumer.before_commit", &mut dying);
    assert_eq!(fleet.count("notifications"), 1, "only what was there");
    let server = fleet.start(ALL, &[]);
    fleet.all_is_well(vec![server]);
    let old = fleet.texts("SELECT user_id FROM notifications WHERE created_at = 7");
    assert_eq!(old, ["user4"], "it is as it was");
}

/// It is neither dropped nor run: a person sees it.
fn the_same_id_with_another_body_becomes_a_dead_letter(fleet: &mut Fleet) {
    let server = fleet.start(ALL, &[]);
    fleet.invite(&server);
    fleet.send(server.address, &events("e", 4));
    fleet.until("they have arrived", |fleet| fleet.count("notification_fanouts WHERE done_at IS NOT NULL") == 4);
    let other = json!({ "event_id": "e-0", "event_type": "RESERVATION_REQUESTED", "aggregate_type": "RESTAURANT",
        "recipientType": "BROADCAST", "restaurant_id": 2, "payload": { "table": 5 } });
    fleet.say(&[other.to_string().as_bytes()]);
    fleet.dead = 1;
    fleet.all_is_well(vec![server]);
    assert!(fleet.reasons()[0].starts_with("conflict"), "{:?}", fleet.reasons());
    assert_eq!(fleet.texts("SELECT queue FROM semel_dead_letters"), [QUEUE]);
}
