//! The laws of seats: no source runs more events at a time than it has seats, and each waiting event gets a seat.

use std::{
    sync::atomic::{AtomicBool, AtomicU32, Ordering},
    thread,
};

use semel::State;
use serde_json::json;

use crate::{
    endpoint::{Does, Endpoint},
    hooks::{becomes, deliver, event, forward, start, start_as, status, stored},
    place::{Place, on_both_databases},
};

on_both_databases! {
    events_over_the_concurrency_limit_wait_for_the_worker
    a_delivery_that_finds_no_seat_is_stored_for_the_worker
    newer_data_that_waited_keeps_the_seat_of_the_older
    due_events_get_seats_under_a_stream_of_deliveries
}

fn events_over_the_concurrency_limit_wait_for_the_worker(place: &Place) {
    let endpoint = Endpoint::that([Does::Waits]);
    let url = forward(&endpoint.url());
    let variables = [
        ("SEMEL_WEBHOOKS_STRIPE_ASYNC", "true"),
        ("SEMEL_WEBHOOKS_STRIPE_HANDLERS", url.as_str()),
        ("SEMEL_WEBHOOKS_STRIPE_CONCURRENCY", "1"),
    ];
    let server = start_as(place, "api,worker", &variables);
    assert_eq!(status(&deliver(&server, &event("evt_1", 1_700_000_000, "a"))), "accepted");
    endpoint.is_called(1);
    assert_eq!(status(&deliver(&server, &event("evt_2", 1_700_000_000, "a"))), "accepted");
    assert_eq!(stored(place, "stripe", "evt_2").unwrap().state, State::Pending);
    endpoint.let_go();
    becomes(place, "evt_2", State::Completed);
    assert_eq!(endpoint.calls().len(), 2);
}

/// One seat, and a lease that is too short to wait long for it: half of it is spent on waiting, without a renewal. The
/// rest must be enough for a slow disk.
fn one_seat(url: &str) -> [(&str, &str); 3] {
    [
        ("SEMEL_WEBHOOKS_STRIPE_HANDLERS", url),
        ("SEMEL_WEBHOOKS_STRIPE_CONCURRENCY", "1"),
        ("SEMEL_WEBHOOKS_STRIPE_LEASE", "6s"),
    ]
}

fn a_delivery_that_finds_no_seat_is_stored_for_the_worker(place: &Place) {
    let endpoint = Endpoint::that([Does::Waits]);
    let url = forward(&endpoint.url());
    let variables = one_seat(&url);
    let server = start(place, &variables);
    thread::scope(|scope| {
        let first = scope.spawn(|| status(&deliver(&server, &event("evt_1", 1_700_000_000, "a"))));
        endpoint.is_called(1);
        assert_eq!(status(&deliver(&server, &event("evt_2", 1_700_000_000, "a"))), "accepted");
        let waits = stored(place, "stripe", "evt_2").unwrap();
        assert_eq!((waits.state, waits.failures, waits.crashes), (State::Pending, 0, 0));
        endpoint.let_go();
        assert_eq!(first.join().unwrap(), "processed");
    });
    let _worker = start_as(place, "worker", &variables);
    becomes(place, "evt_2", State::Completed);
}

fn newer_data_that_waited_keeps_the_seat_of_the_older(place: &Place) {
    let endpoint = Endpoint::that([Does::Waits, Does::Hangs]);
    let url = forward(&endpoint.url());
    let variables = one_seat(&url);
    let server = start(place, &variables);
    thread::scope(|scope| {
        let older = scope.spawn(|| status(&deliver(&server, &event("evt_1", 100, "older"))));
        endpoint.is_called(1);
        assert_eq!(status(&deliver(&server, &event("evt_1", 200, "newer"))), "accepted");
        endpoint.let_go();
        assert_eq!(older.join().unwrap(), "processed");
    });
    endpoint.is_called(2);
    assert_eq!(status(&deliver(&server, &event("evt_2", 100, "a"))), "accepted", "the one seat is taken");
    assert_eq!(stored(place, "stripe", "evt_2").unwrap().state, State::Pending);
    assert_eq!(endpoint.calls().len(), 2);
}

/// Sets a flag when it is dropped.
struct Sets<'a>(&'a AtomicBool);

impl Drop for Sets<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// With one seat, for which several deliveries wait at any time.
fn due_events_get_seats_under_a_stream_of_deliveries(place: &Place) {
    const SENDERS: usize = 8;
    let (fails_once, quick) = (Endpoint::that([Does::Answers(500)]), Endpoint::that([]));
    let rules = format!("due={}; *={}", fails_once.url(), quick.url());
    let variables = [
        ("SEMEL_WEBHOOKS_STRIPE_HANDLERS", rules.as_str()),
        ("SEMEL_WEBHOOKS_STRIPE_CONCURRENCY", "1"),
        ("SEMEL_WEBHOOKS_STRIPE_BACKOFF", "1ms"),
    ];
    let server = start_as(place, "api,worker", &variables);
    let (enough, sent) = (AtomicBool::new(false), AtomicU32::new(0));
    thread::scope(|scope| {
        for _ in 0..SENDERS {
            scope.spawn(|| {
                while !enough.load(Ordering::Relaxed) {
                    let id = format!("evt_{}", sent.fetch_add(1, Ordering::Relaxed));
                    assert_eq!(deliver(&server, &event(&id, 1_700_000_000, "a")).status, 200);
                }
            });
        }
        let _enough = Sets(&enough);
        quick.is_called(2 * SENDERS);
        let mut due = event("due", 1_700_000_000, "a");
        due["type"] = json!("due");
        assert_eq!(deliver(&server, &due).status, 500);
        becomes(place, "due", State::Completed);
    });
    assert_eq!(fails_once.calls().len(), 2);
}
