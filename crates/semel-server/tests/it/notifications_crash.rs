//! A server that dies at a point, is restarted, and gets the same requests again: in the end every notification exists,
//! and none twice. The other files of this name have the rest.

use std::{thread, time::Duration};

use crate::{
    desk::execute,
    fleet::{ALL, Fleet, events},
};

/// Where a server dies, and on which occasion.
const POINTS: [&str; 13] = [
    "events.stored",
    "relay.taken",
    "relay.published",
    "relay.marked",
    "consumer.begun",
    "consumer.before_commit",
    "consumer.after_commit",
    "consumer.after_commit:3",
    "consumer.acked",
    "fanout.inserted",
    "fanout.inserted:7",
    "fanout.chunk:5",
    "in_app.given",
];

/// How many servers die in parallel: they mostly wait for leases to expire.
const BESIDE: usize = 4;

fn at_each(points: &[&str], fleet: fn() -> Fleet, dies: fn(&mut Fleet, &str)) {
    for points in points.chunks(BESIDE) {
        thread::scope(|scope| {
            for point in points {
                let run = move || dies(&mut fleet(), point);
                thread::Builder::new().name((*point).to_owned()).spawn_scoped(scope, run).unwrap();
            }
        });
    }
}

/// A dozen events; the server dies on their way.
fn a_server_dies(fleet: &mut Fleet, point: &str) {
    let mut server = fleet.start_dying(ALL, point, &[]);
    fleet.invite(&server);
    let mut sent = events("e", 12);
    for some in sent.chunks(5) {
        fleet.try_send(server.address, some);
    }
    // Messages that come together share a commit: on a busy machine, a point may be reached only if more follow.
    for n in 0..200 {
        let more = events(&format!("more-{n}"), 1);
        sent.extend(more.clone());
        if !fleet.try_send(server.address, &more) {
            break;
        }
        thread::sleep(Duration::from_millis(50));
    }
    fleet.died_at(point, &mut server);
    let server = fleet.start(ALL, &[]);
    fleet.send(server.address, &sent);
    fleet.all_is_well(vec![server]);
}

/// A fan-out of several chunks; the server dies in the first of them, in the middle, and in the last.
fn a_server_dies_in_a_fan_out(fleet: &mut Fleet, point: &str) {
    let chunks = [("SEMEL_NOTIFICATIONS_CHUNK", "2")];
    let mut server = fleet.start_dying(ALL, point, &chunks);
    for i in 0..9 {
        fleet.invite_one(&server, 1, &format!("user{i}"), &["PUSH", "SMS"]);
    }
    let event = [("large".to_owned(), 1)];
    fleet.try_send(server.address, &event);
    fleet.died_at(point, &mut server);
    let server = fleet.start(ALL, &chunks);
    fleet.send(server.address, &event);
    fleet.all_is_well(vec![server]);
}

/// A handler that fails until a table is repaired; meanwhile the server dies where failures are stored.
fn a_server_dies_among_failures(fleet: &mut Fleet, point: &str) {
    let mut server = fleet.start_dying(ALL, point, &[]);
    fleet.invite(&server);
    execute(&fleet.place, "ALTER TABLE notifications RENAME TO notifications_away");
    let events = events("e", 3);
    fleet.try_send(server.address, &events);
    fleet.died_at(point, &mut server);
    execute(&fleet.place, "ALTER TABLE notifications_away RENAME TO notifications");
    let server = fleet.start(ALL, &[]);
    fleet.send(server.address, &events);
    fleet.all_is_well(vec![server]);
}

const CHUNKS: [&str; 6] = [
    "fanout.chunk:1",
    "fanout.chunk:3",
    "fanout.chunk:5",
    "fanout.inserted:4",
    "fanout.goes_on:2",
    "consumer.after_commit:2",
];
const FAILURES: [&str; 3] = ["consumer.letter_put", "consumer.retry_taken", "consumer.retry_failed"];

macro_rules! with {
    ($($fleet:ident)+) => {
        $(mod $fleet {
            use super::*;

            #[test]
            fn a_server_dies_at_every_point() {
                at_each(&POINTS, Fleet::$fleet, a_server_dies);
            }

            #[test]
            fn a_server_dies_in_every_part_of_a_fan_out() {
                at_each(&CHUNKS, Fleet::$fleet, a_server_dies_in_a_fan_out);
            }

            #[test]
            fn a_server_dies_where_failures_are_kept() {
                at_each(&FAILURES, Fleet::$fleet, a_server_dies_among_failures);
            }
        })+
    };
}
with!(sqlite postgres postgres_rabbitmq);

/// The one of the four pairs that the others leave out.
#[test]
fn a_server_dies_with_sqlite_and_rabbitmq() {
    let points = ["relay.published", "consumer.before_commit", "consumer.after_commit", "fanout.inserted:3"];
    at_each(&points, Fleet::sqlite_rabbitmq, a_server_dies);
}

/// Every crash point of messages has a server here that dies at it. Those of jobs, deliveries, webhooks, streams,
/// mailings and embedded queues have their own tests.
#[test]
fn every_point_is_covered_by_a_test() {
    let died = [&POINTS[..], &CHUNKS, &FAILURES].concat();
    let named: Vec<&str> = died.iter().map(|point| point.split(':').next().unwrap()).collect();
    let others = ["job.", "deliver.", "deliveries.", "webhooks.", "streams.", "queue.", "mailing."];
    let elsewhere = |point: &&&str| !others.iter().any(|other| point.starts_with(other));
    let all = semel::crash::MESSAGING_POINTS.iter().chain(semel::crash::SERVER_POINTS).filter(elsewhere);
    let missing: Vec<_> = all.filter(|point| !named.contains(*point)).collect();
    assert!(missing.is_empty(), "{missing:?}");
}

/// The other tests rely on this: the count notices a missing notification, a surplus one, and a fan-out that ran twice,
/// whose rows cannot exist twice.
#[test]
fn the_count_notices_every_kind_of_difference() {
    let mut fleet = Fleet::sqlite();
    let server = fleet.start(ALL, &[]);
    fleet.invite(&server);
    fleet.send(server.address, &events("e", 4));
    fleet.all_is_well(vec![server]);
    for (change, back) in [
        (
            "UPDATE notifications SET user_id = user_id || 'x' WHERE id = 3",
            "UPDATE notifications SET user_id = rtrim(user_id, 'x') WHERE id = 3",
        ),
        (
            "INSERT INTO notifications (tenant, event_id, kind, user_id, notification_type)
             VALUES ('default', 'e-0', 'restaurant', 'dan', 'PUSH')",
            "DELETE FROM notifications WHERE user_id = 'dan'",
        ),
        (
            "UPDATE notification_fanouts SET notifications = 2 * notifications WHERE event_id = 'e-1'",
            "UPDATE notification_fanouts SET notifications = notifications / 2 WHERE event_id = 'e-1'",
        ),
        ("UPDATE notification_fanouts SET done_at = NULL", "UPDATE notification_fanouts SET done_at = 1"),
        // A queue that is not ours.
        ("INSERT INTO semel_queues (name) VALUES ('x')", "DELETE FROM semel_queues WHERE name = 'x'"),
    ] {
        execute(&fleet.place, change);
        let noticed = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| fleet.counts())).is_err();
        assert_eq!(noticed, !change.contains("semel_queues"), "{change}");
        execute(&fleet.place, back);
    }
}
