//! Many servers at once, killed and stopped at any moment.

use std::{
    net::SocketAddr,
    os::unix::process::ExitStatusExt as _,
    sync::atomic::{AtomicBool, Ordering},
    thread,
    time::{Duration, Instant},
};

use rustix::process::Signal;
use semel_testkit::faults::torture;

use crate::{
    fleet::{ALL, Fleet, events, on_every_fleet, stop},
    support::Server,
};

on_every_fleet! {
    two_relays_and_four_listeners_are_killed_at_any_moment
    a_graceful_stop_loses_nothing
    each_role_can_be_stopped_by_itself
}

/// Sends events until none is left, some in each request, each as often as it takes.
fn send_all(fleet: &Fleet, address: SocketAddr, events: &[(String, u64)], pause: Duration) {
    for some in events.chunks(10) {
        fleet.send(address, some);
        thread::sleep(pause);
    }
}

fn two_relays_and_four_listeners_are_killed_at_any_moment(fleet: &mut Fleet) {
    let (n, time) = if torture() { (5_000, Duration::from_secs(120)) } else { (300, Duration::from_secs(4)) };
    let seed = fastrand::u64(..);
    println!("the seed is {seed}");
    let mut random = fastrand::Rng::with_seed(seed);
    let api = fleet.start("api", &[]);
    fleet.invite(&api);
    let roles = ["relay", "relay", "worker", "worker", "worker", "worker"];
    let few = [("SEMEL_MESSAGES_PREFETCH", "20")];
    let mut servers: Vec<Server> = roles.iter().map(|role| fleet.start(role, &few)).collect();
    let events = events("e", n);
    let (begun, sent) = (Instant::now(), AtomicBool::new(false));
    let mut killed = 0;
    thread::scope(|scope| {
        scope.spawn(|| {
            send_all(fleet, api.address, &events, time * 10 / u32::try_from(n).unwrap());
            sent.store(true, Ordering::SeqCst);
        });
        while begun.elapsed() < time || !sent.load(Ordering::SeqCst) {
            thread::sleep(Duration::from_millis(random.u64(0..300)));
            let which = random.usize(..servers.len());
            servers[which].process.signal(Signal::KILL);
            let status = servers[which].process.end();
            assert_eq!(status.signal(), Some(Signal::KILL.as_raw()), "it had ended before: {status}");
            servers[which] = fleet.start(roles[which], &few);
            killed += 1;
        }
    });
    assert!(killed > 3, "{killed} servers were killed");
    fleet.all_is_well(std::iter::once(api).chain(servers).collect());
}

/// In the middle of traffic, several times: it stops by itself, and the next server continues.
fn a_graceful_stop_loses_nothing(fleet: &mut Fleet) {
    let api = fleet.start("api", &[]);
    fleet.invite(&api);
    let (events, sent) = (events("e", 200), AtomicBool::new(false));
    let mut stops = 0;
    thread::scope(|scope| {
        scope.spawn(|| {
            send_all(fleet, api.address, &events, Duration::from_millis(100));
            sent.store(true, Ordering::SeqCst);
        });
        while !sent.load(Ordering::SeqCst) {
            let server = fleet.start(ALL, &[]);
            let before = fleet.count("notification_fanouts");
            fleet.until("it has done something", |fleet| {
                fleet.count("notification_fanouts") > before || sent.load(Ordering::SeqCst)
            });
            stop(server);
            stops += 1;
        }
    });
    assert!(stops > 1, "it was stopped in the middle");
    // Released messages are available to the next server at once: no lease has to expire first.
    let begun = Instant::now();
    let server = fleet.start(ALL, &LONG_LEASES);
    fleet.all_is_well(vec![server, api]);
    assert!(begun.elapsed() < Duration::from_secs(20), "{:?}", begun.elapsed());
}

/// If a stop leaves leases behind, these make it visible.
const LONG_LEASES: [(&str, &str); 3] =
    [("SEMEL_MESSAGES_RELAY_LEASE", "1m"), ("SEMEL_MESSAGES_VISIBILITY", "1m"), ("SEMEL_MESSAGES_RETRY_LEASE", "1m")];

/// With such long leases, nothing would arrive in time if a stop left a lease behind.
fn each_role_can_be_stopped_by_itself(fleet: &mut Fleet) {
    let mut servers: Vec<Option<Server>> =
        ["api", "relay", "worker"].map(|role| Some(fleet.start(role, &LONG_LEASES))).into();
    let first = servers[0].take().unwrap();
    fleet.invite(&first);
    servers[0] = Some(first);
    for round in 0..3 {
        for (which, role) in ["api", "relay", "worker"].into_iter().enumerate() {
            let events = events(&format!("{role}-{round}"), 20);
            fleet.send(servers[0].as_ref().unwrap().address, &events);
            stop(servers[which].take().unwrap());
            servers[which] = Some(fleet.start(role, &LONG_LEASES));
        }
    }
    fleet.all_is_well(servers.into_iter().flatten().collect());
}
