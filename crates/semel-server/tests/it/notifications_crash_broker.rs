//! RabbitMQ fails and returns while events arrive.

use std::{
    sync::atomic::{AtomicBool, Ordering},
    thread,
    time::Duration,
};

use semel_testkit::faults::{Flow, Rabbit, Wire};

use crate::{
    fleet::{ALL, Fleet, ask, events},
    place::Place,
    support::Server,
};

/// Whether a server is ready, and whether it reports a problem.
fn ready(server: &Server) -> (u16, bool) {
    let answer = ask(server.address, "GET", "/readyz", "").unwrap();
    (answer.status, !answer.json()["degraded"].as_array().unwrap().is_empty())
}

/// Events before, during and after an outage of RabbitMQ; all are accepted.
fn away_and_back(fleet: &mut Fleet, away: impl Fn(), back: impl Fn() + Sync) {
    let servers = [fleet.start(ALL, &[]), fleet.start(ALL, &[])];
    fleet.invite(&servers[0]);
    let stop = AtomicBool::new(false);
    thread::scope(|scope| {
        let sender = scope.spawn(|| {
            let mut round = 0;
            while !stop.load(Ordering::SeqCst) {
                let events = events(&format!("r{round}"), 5);
                assert!(fleet.try_send(servers[round % 2].address, &events), "events are accepted all the time");
                round += 1;
                thread::sleep(Duration::from_millis(50));
            }
        });
        fleet.until("traffic flows", |fleet| fleet.count("notification_fanouts WHERE done_at IS NOT NULL") > 20);
        away();
        fleet.until("it is noticed", |_| servers.iter().all(|server| ready(server) == (200, true)));
        let waiting = fleet.count("semel_outbox");
        fleet.until("the outbox grows", |fleet| fleet.count("semel_outbox") > waiting + 10);
        assert_eq!(ready(&servers[0]), (200, true), "ready all the same");
        back();
        fleet.until("it is noticed, too", |_| servers.iter().all(|server| ready(server) == (200, false)));
        stop.store(true, Ordering::SeqCst);
        sender.join().unwrap();
    });
    fleet.all_is_well(servers.into());
}

fn on_a_wire(fleet: &mut Fleet, flow: Flow) {
    let url = fleet.rabbitmq.clone().unwrap();
    let wire = fleet.runtime.block_on(Wire::to(&url));
    // With a heartbeat that soon detects a dead connection.
    fleet.broker = format!("{}?heartbeat=1", wire.url(&url));
    away_and_back(
        fleet,
        || wire.set(flow),
        || {
            // Pending confirms must never arrive.
            wire.cut();
            wire.set(Flow::Open);
        },
    );
}

#[test]
fn a_connection_that_is_cut_and_mended_loses_nothing_on_postgres() {
    on_a_wire(&mut Fleet::postgres_rabbitmq(), Flow::Away);
}

#[test]
fn a_connection_that_is_cut_and_mended_loses_nothing_on_sqlite() {
    on_a_wire(&mut Fleet::sqlite_rabbitmq(), Flow::Away);
}

/// A published message arrives, but its confirm is lost: it is published again, and found in the inbox.
#[test]
fn lost_confirms_neither_lose_nor_duplicate_messages() {
    on_a_wire(&mut Fleet::postgres_rabbitmq(), Flow::Deaf);
}

/// A node of the test is killed, and returns with the data on its disk.
#[test]
fn a_rabbitmq_that_is_killed_and_started_again_loses_nothing() {
    let rabbit = Rabbit::start();
    let mut fleet = Fleet::with(Place::postgres(), Some(rabbit.url().to_owned()));
    away_and_back(&mut fleet, || rabbit.kill(), || rabbit.start_again());
}

/// It is stopped in order while messages are in flight.
#[test]
fn a_rabbitmq_that_is_stopped_and_started_loses_nothing() {
    let rabbit = Rabbit::start();
    let mut fleet = Fleet::with(Place::sqlite(), Some(rabbit.url().to_owned()));
    away_and_back(&mut fleet, || drop(rabbit.ctl(&["stop_app"])), || drop(rabbit.ctl(&["start_app"])));
}

/// The connections are cut again and again.
#[test]
fn connections_that_are_cut_at_any_moment_lose_nothing() {
    let mut fleet = Fleet::postgres_rabbitmq();
    let url = fleet.rabbitmq.clone().unwrap();
    let wire = fleet.runtime.block_on(Wire::to(&url));
    fleet.broker = wire.url(&url);
    let server = fleet.start(ALL, &[]);
    fleet.invite(&server);
    for some in events("e", 300).chunks(20) {
        fleet.send(server.address, some);
        thread::sleep(Duration::from_millis(fastrand::u64(0..200)));
        wire.cut();
    }
    fleet.all_is_well(vec![server]);
}
