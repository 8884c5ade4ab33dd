//! PostgreSQL: an application without Semel's library publishes its events by SQL, in the transaction of its rows.

use serde_json::Value;

use crate::{
    desk::execute,
    notifications::Api,
    place::Place,
    support::{SOON, eventually},
};

/// The trigger publishes an event for each reservation: to the queue of a kind, in the form of docs/notifications.md.
const TRIGGER: &str = "
    CREATE TABLE reservations (id BIGINT PRIMARY KEY, restaurant BIGINT NOT NULL, guests INTEGER NOT NULL);
    CREATE FUNCTION tell_reservation() RETURNS TRIGGER LANGUAGE plpgsql AS $$
    BEGIN
        PERFORM semel_publish('notification.restaurant', jsonb_build_object(
            'event_id', 'reservation-' || NEW.id, 'event_type', 'RESERVATION_REQUESTED', 'aggregate_type', 'RESTAURANT',
            'recipientType', 'BROADCAST', 'restaurant_id', NEW.restaurant,
            'payload', jsonb_build_object('guests', NEW.guests))::text);
        RETURN NULL;
    END $$;
    CREATE TRIGGER tell_reservation AFTER INSERT OR UPDATE ON reservations
        FOR EACH ROW EXECUTE FUNCTION tell_reservation()";

#[test]
fn a_trigger_of_an_application_notifies_each_recipient_once() {
    let place = Place::postgres();
    let api = Api::start(&place);
    api.recipient("restaurant", "10", "5", &["PUSH", "IN_APP"]);
    api.recipient("restaurant", "15", "5", &["EMAIL"]);
    execute(&place, TRIGGER);
    execute(&place, "BEGIN; INSERT INTO reservations VALUES (1, 5, 4); ROLLBACK");
    // The second change publishes the same event again.
    execute(&place, "BEGIN; INSERT INTO reservations VALUES (2, 5, 3); UPDATE reservations SET guests = 3; COMMIT");
    execute(&place, "INSERT INTO reservations VALUES (3, 5, 2)");
    let told = |id: &str| api.notifications(&format!("eventId={id}"));
    eventually(SOON, "the recipients are notified", || told("reservation-3").len() == 3);
    eventually(SOON, "all messages are handled", || {
        let outbox = api.get("/outbox").json();
        outbox["items"].as_array().is_some_and(Vec::is_empty)
    });
    assert_eq!(told("reservation-2").len(), 3);
    assert_eq!(told("reservation-1"), Vec::<Value>::new(), "it was rolled back");
    assert_eq!(api.notifications("").len(), 6, "each once");
}
