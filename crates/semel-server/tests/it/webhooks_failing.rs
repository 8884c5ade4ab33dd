//! The laws of failing webhooks: they run again, by redelivery or by a worker, and not for ever.

use std::{thread, time::Duration};

use rustix::process::Signal;
use semel::{State, machine::Verdict, prelude::*, store::Decision};
use serde_json::json;

use crate::{
    desk::{Desk, execute},
    endpoint::{Does, Endpoint},
    hooks::{becomes, deliver, event, forward, start, start_as, status, stored},
    place::{Place, on_both_databases},
    support::{SOON, eventually},
};

on_both_databases! {
    an_event_that_failed_three_times_waits_for_a_person
    a_failed_event_runs_again_without_a_redelivery
    a_redelivery_does_not_wait_for_the_backoff
    a_busy_endpoint_counts_no_attempt
    an_unreachable_endpoint_counts_no_attempt
    a_busy_endpoint_is_left_alone_for_at_least_ten_seconds
    the_delay_of_an_unavailable_endpoint_grows_with_the_age_of_the_event
    newer_data_is_forwarded_under_its_own_key
    a_run_that_was_lost_times_out_and_runs_again_under_the_same_key
    an_event_whose_runs_are_lost_is_parked
    newer_data_of_another_type_is_run_by_its_own_rule
}

fn an_event_that_failed_three_times_waits_for_a_person(place: &Place) {
    let endpoint = Endpoint::that([Does::Answers(500), Does::Answers(404), Does::Cuts]);
    let url = forward(&endpoint.url());
    let server = start(place, &[("SEMEL_WEBHOOKS_STRIPE_HANDLERS", &url)]);
    let paid = event("evt_1", 1_700_000_000, "a");
    for attempt in 1..=3 {
        let failed = deliver(&server, &paid);
        assert_eq!((failed.status, failed.problem().as_str()), (500, "webhook-failed"), "{}", failed.body);
        assert_eq!(failed.json()["attempt"], attempt);
        let stored = stored(place, "stripe", "evt_1").unwrap();
        assert_eq!((stored.state, stored.failures), (State::Failed, attempt));
    }
    for _ in 0..2 {
        assert_eq!(status(&deliver(&server, &paid)), "max_retries");
    }
    assert_eq!(endpoint.calls().len(), 3);
    let keys = endpoint.keys();
    assert!(keys.iter().all(|key| *key == keys[0]), "the same key each time: {keys:?}");
    let failed = stored(place, "stripe", "evt_1").unwrap();
    assert!(failed.error.as_ref().unwrap().contains("connection was lost"), "{failed:?}");

    // It runs again on a person's request: a worker runs it.
    drop(server);
    let desk = Desk::at(place);
    let again = Decision::Resolve { verdict: Verdict::Retry, expected: None };
    desk.block(desk.database.decide(failed.id, again, "ana", "it is mended")).unwrap();
    let _server = start_as(place, "worker", &[("SEMEL_WEBHOOKS_STRIPE_HANDLERS", &url)]);
    becomes(place, "evt_1", State::Completed);
}

fn a_failed_event_runs_again_without_a_redelivery(place: &Place) {
    let endpoint = Endpoint::that([Does::Answers(500), Does::Answers(503)]);
    let url = forward(&endpoint.url());
    let variables = [("SEMEL_WEBHOOKS_STRIPE_HANDLERS", url.as_str()), ("SEMEL_WEBHOOKS_STRIPE_BACKOFF", "50ms")];
    let server = start_as(place, "api,worker", &variables);
    let paid = event("evt_1", 1_700_000_000, "a");
    assert_eq!(deliver(&server, &paid).status, 500);
    becomes(place, "evt_1", State::Completed);
    assert_eq!((endpoint.calls().len(), stored(place, "stripe", "evt_1").unwrap().failures), (3, 2));
    assert_eq!(status(&deliver(&server, &paid)), "skipped");
}

fn a_redelivery_does_not_wait_for_the_backoff(place: &Place) {
    let endpoint = Endpoint::that([Does::Answers(500)]);
    let url = forward(&endpoint.url());
    let variables = [("SEMEL_WEBHOOKS_STRIPE_HANDLERS", url.as_str()), ("SEMEL_WEBHOOKS_STRIPE_BACKOFF", "5m")];
    let server = start_as(place, "api,worker", &variables);
    let paid = event("evt_1", 1_700_000_000, "a");
    assert_eq!(deliver(&server, &paid).status, 500);
    assert_eq!(status(&deliver(&server, &paid)), "processed");
    assert_eq!(endpoint.calls().len(), 2);
}

fn a_busy_endpoint_counts_no_attempt(place: &Place) {
    let endpoint = Endpoint::that([Does::Answers(429), Does::Answers(409), Does::Answers(425)]);
    let server = start(place, &[("SEMEL_WEBHOOKS_STRIPE_HANDLERS", &forward(&endpoint.url()))]);
    let paid = event("evt_1", 1_700_000_000, "a");
    for _ in 0..3 {
        assert_eq!(status(&deliver(&server, &paid)), "accepted");
        let stored = stored(place, "stripe", "evt_1").unwrap();
        assert_eq!((stored.state, stored.failures), (State::Pending, 0));
        assert!(stored.not_before.is_some());
    }
    assert_eq!(status(&deliver(&server, &paid)), "processed");
}

fn an_unreachable_endpoint_counts_no_attempt(place: &Place) {
    // A closed port.
    let address = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let server = start(place, &[("SEMEL_WEBHOOKS_STRIPE_HANDLERS", &forward(&format!("http://{address}/")))]);
    let paid = event("evt_1", 1_700_000_000, "a");
    for _ in 0..5 {
        assert_eq!(status(&deliver(&server, &paid)), "accepted");
    }
    let stored = stored(place, "stripe", "evt_1").unwrap();
    assert_eq!((stored.state, stored.failures), (State::Pending, 0));
}

/// How long the event waits for its next run.
fn waits(place: &Place) -> Duration {
    let stored = stored(place, "stripe", "evt_1").unwrap();
    assert_eq!((stored.state, stored.failures), (State::Pending, 0));
    stored.not_before.unwrap().since(stored.claimed_at)
}

fn a_busy_endpoint_is_left_alone_for_at_least_ten_seconds(place: &Place) {
    let asks = [(0, 429), (0, 409), (0, 425), (1, 429), (60, 409)];
    let endpoint = Endpoint::that(asks.map(|(seconds, status)| Does::AsksFor(seconds, status)));
    let server = start(place, &[("SEMEL_WEBHOOKS_STRIPE_HANDLERS", &forward(&endpoint.url()))]);
    let paid = event("evt_1", 1_700_000_000, "a");
    for (seconds, code) in asks {
        assert_eq!(status(&deliver(&server, &paid)), "accepted");
        let (waits, least) = (waits(place), Duration::from_secs(seconds.max(10)));
        assert!(waits >= least && waits < least + SOON, "{code} that asks for {seconds} s: {waits:?}");
    }
}

fn the_delay_of_an_unavailable_endpoint_grows_with_the_age_of_the_event(place: &Place) {
    // A closed port.
    let away = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let busy = Endpoint::that([Does::Answers(429), Does::AsksFor(1, 409), Does::Answers(425)]);
    let paid = event("evt_1", 1_700_000_000, "a");
    let servers = [format!("http://{away}/"), busy.url()].map(|url| {
        let variables =
            [("SEMEL_WEBHOOKS_STRIPE_HANDLERS", &*forward(&url)), ("SEMEL_WEBHOOKS_STRIPE_BACKOFF_CAP", "5m")];
        start(place, &variables)
    });
    for (age, least) in [(0, 10), (100, 50), (86_400, 300)] {
        for (server, endpoint) in servers.iter().zip(["away", "busy"]) {
            execute(place, &format!("UPDATE semel_operations SET created_at = claimed_at - {age}000000"));
            assert_eq!(status(&deliver(server, &paid)), "accepted");
            let (waits, least) = (waits(place), Duration::from_secs(least));
            assert!(waits >= least && waits < least + SOON, "{endpoint}, {age} s old: {waits:?}");
        }
    }
}

/// An endpoint that remembers the older data's key would treat newer data as a repeat.
fn newer_data_is_forwarded_under_its_own_key(place: &Place) {
    let script = [Does::Answers(500), Does::Answers(202), Does::Answers(429), Does::Cuts];
    let endpoint = Endpoint::that(script);
    let server = start(place, &[("SEMEL_WEBHOOKS_STRIPE_HANDLERS", &forward(&endpoint.url()))]);
    let (older, newer) = (event("evt_1", 100, "older"), event("evt_1", 200, "newer"));
    assert_eq!(deliver(&server, &older).status, 500);
    assert_eq!(status(&deliver(&server, &older)), "processed");
    assert_eq!(status(&deliver(&server, &newer)), "accepted");
    assert_eq!(deliver(&server, &newer).status, 500);
    assert_eq!(status(&deliver(&server, &newer)), "processed");
    let keys = endpoint.keys();
    let (of_older, of_newer) = keys.split_at(2);
    assert!(of_older.iter().all(|key| *key == keys[0]) && of_newer.iter().all(|key| *key == keys[2]), "{keys:?}");
    assert!(keys.len() == 5 && keys[0] != keys[2], "{keys:?}");
}

/// Starts a server, has it begin a run that hangs, and kills it.
fn killed_in_a_run(place: &Place, variables: &[(&str, &str)], endpoint: &Endpoint) {
    let calls = endpoint.calls().len();
    let mut server = start_as(place, "api,worker", variables);
    let (address, paid) = (server.address, event("evt_1", 1_700_000_000, "a").to_string());
    thread::spawn(move || {
        let mut connection = std::net::TcpStream::connect(address).unwrap();
        let signed = crate::hooks::signed(paid.as_bytes());
        let headers: Vec<_> = signed.iter().map(|(name, value)| (name.as_str(), value.as_str())).collect();
        crate::support::send(&mut connection, "POST", "/webhooks/stripe", &headers, paid.as_bytes());
        thread::sleep(SOON);
    });
    endpoint.is_called(calls + 1);
    server.process.signal(Signal::KILL);
    server.process.end();
}

fn a_run_that_was_lost_times_out_and_runs_again_under_the_same_key(place: &Place) {
    let endpoint = Endpoint::that([Does::Hangs]);
    let url = forward(&endpoint.url());
    let variables = [("SEMEL_WEBHOOKS_STRIPE_HANDLERS", url.as_str()), ("SEMEL_WEBHOOKS_STRIPE_LEASE", "1s")];
    killed_in_a_run(place, &variables, &endpoint);
    // With the default lease, which it must be able to renew.
    let _server = start_as(place, "worker,sweeper", &variables[..1]);
    becomes(place, "evt_1", State::Completed);
    let stored = stored(place, "stripe", "evt_1").unwrap();
    assert_eq!((stored.failures, stored.crashes), (0, 1), "a timeout is no failure");
    let keys = endpoint.keys();
    assert_eq!((keys.len(), &keys[0]), (2, &keys[1]));
}

fn an_event_whose_runs_are_lost_is_parked(place: &Place) {
    let endpoint = Endpoint::that([Does::Hangs]);
    let url = forward(&endpoint.url());
    let variables = [
        ("SEMEL_WEBHOOKS_STRIPE_HANDLERS", url.as_str()),
        ("SEMEL_WEBHOOKS_STRIPE_LEASE", "1s"),
        ("SEMEL_WEBHOOKS_STRIPE_MAX_CRASHES", "1"),
    ];
    killed_in_a_run(place, &variables, &endpoint);
    let server = start_as(place, "api,worker,sweeper", &variables);
    becomes(place, "evt_1", State::TimedOut);
    assert_eq!(status(&deliver(&server, &event("evt_1", 1_700_000_000, "a"))), "parked");
    assert_eq!(endpoint.calls().len(), 1);
}

/// The older is forwarded, the newer goes to the outbox: two modes, one after the other.
fn newer_data_of_another_type_is_run_by_its_own_rule(place: &Place) {
    let endpoint = Endpoint::that([Does::Waits]);
    let rules = format!("invoice.*={}; *=outbox:elsewhere", endpoint.url());
    let server = start_as(place, "api,worker", &[("SEMEL_WEBHOOKS_STRIPE_HANDLERS", &rules)]);
    thread::scope(|scope| {
        let first = scope.spawn(|| status(&deliver(&server, &event("evt_1", 100, "older"))));
        endpoint.is_called(1);
        let mut newer = event("evt_1", 200, "newer");
        newer["type"] = json!("customer.created");
        assert_eq!(status(&deliver(&server, &newer)), "accepted");
        endpoint.let_go();
        assert_eq!(first.join().unwrap(), "processed");
    });
    eventually(SOON, "the newer is published", || {
        let outcome = stored(place, "stripe", "evt_1").unwrap().outcome;
        outcome.is_some_and(|outcome| String::from_utf8_lossy(&outcome.body).contains("elsewhere"))
    });
    assert_eq!(endpoint.calls().len(), 1);
}
