//! One of two nodes is killed, with default leases: its work stands still for seconds, not for a minute.

use std::time::Duration;

use crate::{
    desk::execute,
    fleet::{ALL, Fleet},
    support::Server,
};

/// Everything continues within 12 s. The rest is for a busy machine; it was 30 s for the outbox and 61 s for the queue.
const GOES_ON: Duration = Duration::from_secs(22);

/// Events of one aggregate: they have one ordering key, and are delivered in order.
fn of_one_aggregate(name: &str, n: usize) -> Vec<(String, u64)> {
    (0..n).map(|i| (format!("{name}-{i}"), 1)).collect()
}

/// Two nodes and so many events; the first node is killed at a point while it holds leases. Returns the other one.
fn one_of_two_is_killed(fleet: &mut Fleet, point: &str, roles: &str, n: usize) -> Server {
    let mut dying = fleet.start_as_it_is(ALL, &[("SEMEL_CRASH", point)]);
    fleet.invite_one(&dying, 1, "ana", &["PUSH", "IN_APP"]);
    let other = fleet.start_as_it_is(roles, &[]);
    let events = of_one_aggregate("e", n);
    // To the node that dies, as long as it lives: its own relay and listener are woken first.
    for some in events.chunks(20) {
        if !fleet.try_send(dying.address, some) {
            fleet.send(other.address, some);
        }
    }
    fleet.died_at(point, &mut dying);
    fleet.send(other.address, &events);
    other
}

/// The longest time without a new notification.
fn standstill(fleet: &Fleet) -> Duration {
    let gaps = "SELECT created_at - lag(created_at) OVER (ORDER BY created_at) AS gap FROM notifications";
    let longest = fleet.texts(&format!("SELECT CAST(max(gap) AS TEXT) FROM ({gaps}) AS g"));
    Duration::from_micros(longest[0].parse().unwrap())
}

/// A relay leases the first message of an ordering key; nothing of this key can pass it. It is the only relay until it
/// is dead, or the other might take all of them.
fn a_killed_relay(fleet: &mut Fleet) {
    let other = one_of_two_is_killed(fleet, "relay.taken:20", "api,worker,sweeper", 320);
    let heir = fleet.start_as_it_is("relay", &[]);
    fleet.all_is_well(vec![other, heir]);
    let standstill = standstill(fleet);
    println!("nothing moved for {standstill:?}");
    assert!(standstill < GOES_ON, "nothing moved for {standstill:?}");
}

#[test]
fn a_killed_relay_blocks_its_ordering_key_for_seconds_with_the_embedded_queue() {
    a_killed_relay(&mut Fleet::postgres());
}

#[test]
fn a_killed_relay_blocks_its_ordering_key_for_seconds_with_rabbitmq() {
    a_killed_relay(&mut Fleet::postgres_rabbitmq());
}

/// The database's time, as notifications have it.
fn now(fleet: &Fleet) -> i64 {
    let now = "SELECT CAST(CAST(extract(epoch FROM clock_timestamp()) * 1000000 AS BIGINT) AS TEXT)";
    fleet.texts(now)[0].parse().unwrap()
}

/// Everything arrives, the last of it soon after a node was killed.
fn all_goes_on_since(fleet: &Fleet, killed: i64, servers: Vec<Server>) {
    fleet.all_is_well(servers);
    let last: i64 = fleet.texts("SELECT CAST(max(created_at) AS TEXT) FROM notifications")[0].parse().unwrap();
    let took = Duration::from_micros(u64::try_from(last - killed).unwrap_or(0));
    println!("the last notification was made after {took:?}");
    assert!(took < GOES_ON, "{took:?}");
}

/// A listener holds messages of the embedded queue; those behind them go on, they themselves wait. It is the only
/// listener until it is dead: all leased messages are its own.
#[test]
fn the_messages_of_a_killed_listener_come_again_within_seconds() {
    let fleet = &mut Fleet::postgres();
    let other = one_of_two_is_killed(fleet, "queue.taken:5", "api,relay,sweeper", 320);
    let killed = now(fleet);
    let held = fleet.count("semel_queue WHERE token <> 0");
    assert!(held > 0, "the killed listener held no message");
    let heir = fleet.start_as_it_is("worker", &[]);
    all_goes_on_since(fleet, killed, vec![other, heir]);
}

/// A node that is killed while it runs a retry has that one leased, and holds messages that have not failed yet.
fn a_killed_retry(fleet: &mut Fleet) {
    let mut dying = fleet.start_as_it_is(ALL, &[("SEMEL_CRASH", "consumer.retry_taken")]);
    fleet.invite_one(&dying, 1, "ana", &["PUSH", "IN_APP"]);
    // Every message fails until the table is repaired.
    execute(&fleet.place, "ALTER TABLE notifications RENAME TO notifications_away");
    let events = of_one_aggregate("e", 20);
    fleet.send(dying.address, &events);
    fleet.died_at("consumer.retry_taken", &mut dying);
    let killed = now(fleet);
    execute(&fleet.place, "ALTER TABLE notifications_away RENAME TO notifications");
    assert_eq!(fleet.count("semel_retries WHERE token <> 0"), 1, "the killed node held a retry");
    let heir = fleet.start_as_it_is(ALL, &[]);
    all_goes_on_since(fleet, killed, vec![heir]);
}

#[test]
fn the_retry_of_a_killed_node_runs_again_within_seconds_with_the_embedded_queue() {
    a_killed_retry(&mut Fleet::postgres());
}

#[test]
fn the_retry_of_a_killed_node_runs_again_within_seconds_with_rabbitmq() {
    a_killed_retry(&mut Fleet::postgres_rabbitmq());
}
