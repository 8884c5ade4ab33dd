//! Events that nobody sends again: the runner takes them up, after failures, after crashes, and newer data after older.

use std::{
    collections::BTreeSet,
    sync::atomic::{AtomicUsize, Ordering},
    thread,
};

use rustix::process::Signal;
use semel::State;

use crate::{
    desk::post,
    endpoint::{Does, Endpoint},
    fleet::stop,
    hooks::{becomes, conflicts, deliver, event, forward, outbox, start, start_as, status, stored},
    place::{Place, on_both_databases},
    support::{SOON, Server, eventually},
    webhooks_crash::{BACKOFF, LEASE, died_at, start_dying, try_deliver},
};

on_both_databases! {
    what_fails_is_tried_three_times_without_its_sender
    what_kills_its_process_is_parked_after_five_crashes
    an_endpoint_is_left_alone_for_as_long_as_it_asks
    newer_data_survives_the_crash_of_what_it_waits_for
    a_stop_in_the_middle_of_deliveries_loses_none_and_repeats_none
}

/// A person has an event run again.
fn retry(server: &Server, id: &str) {
    let answer = post(server, &format!("/webhooks/stripe/events/{id}/retry"), r#"{"reason":"it is mended"}"#);
    assert_eq!(answer.status, 202, "{}", answer.body);
}

fn what_fails_is_tried_three_times_without_its_sender(place: &Place) {
    let endpoint = Endpoint::that([Does::Answers(500); 3]);
    let url = forward(&endpoint.url());
    let server = start_as(place, "api,worker,sweeper", &[BACKOFF, ("SEMEL_WEBHOOKS_STRIPE_HANDLERS", &url)]);
    let paid = event("evt_1", 1_700_000_000, "a");
    assert_eq!(deliver(&server, &paid).status, 500);
    eventually(SOON, "it has failed three times", || stored(place, "stripe", "evt_1").unwrap().failures == 3);
    assert_eq!(status(&deliver(&server, &paid)), "max_retries");
    // The runner that took it up three times takes up another one, and not this one again.
    let other = event("evt_2", 1_700_000_000, "a");
    assert_eq!(status(&deliver(&server, &other)), "processed");
    assert_eq!((endpoint.calls().len(), stored(place, "stripe", "evt_1").unwrap().state), (4, State::Failed));
    retry(&server, "evt_1");
    becomes(place, "evt_1", State::Completed);
    assert_eq!(endpoint.calls().len(), 5);
    assert_eq!(status(&deliver(&server, &paid)), "skipped");
}

/// With the defaults: five crashes, however often it may fail.
fn what_kills_its_process_is_parked_after_five_crashes(place: &Place) {
    let (variables, point) = ([LEASE, BACKOFF], "webhooks.after_effect");
    let paid = event("evt_1", 1_700_000_000, "a");
    let mut server = start_dying(place, "api", point, &variables);
    assert!(try_deliver(server.address, &paid).is_none());
    died_at(place, point, &mut server);
    for crash in 2..=5 {
        let mut server = start_dying(place, "worker,sweeper", point, &variables);
        died_at(place, point, &mut server);
        // The lease of the last crash may not have ended yet.
        let crashes = stored(place, "stripe", "evt_1").unwrap().crashes;
        assert!(crashes == crash || crashes + 1 == crash, "{crashes} at {crash}");
    }
    let server = start_dying(place, "api,worker,sweeper", point, &variables);
    becomes(place, "evt_1", State::TimedOut);
    assert_eq!(status(&deliver(&server, &paid)), "parked");
    let parked = stored(place, "stripe", "evt_1").unwrap();
    assert_eq!((parked.crashes, parked.failures), (5, 0));
    assert!(place.lines("points").iter().all(|line| line != point), "it is not run again");
    assert_eq!(outbox(place), [""; 0]);
    drop(server);
    let server = start_as(place, "api,worker,sweeper", &variables);
    retry(&server, "evt_1");
    becomes(place, "evt_1", State::Completed);
    assert_eq!(outbox(place).len(), 1);
}

/// Longer than we would wait by ourselves. Only a redelivery asks sooner.
fn an_endpoint_is_left_alone_for_as_long_as_it_asks(place: &Place) {
    const ASKED: u64 = 100;
    let asks = [409, 425, 429].map(|status| Does::AsksFor(ASKED, status));
    let endpoint = Endpoint::that(asks);
    let url = forward(&endpoint.url());
    let server = start_as(place, "api,worker", &[BACKOFF, ("SEMEL_WEBHOOKS_STRIPE_HANDLERS", &url)]);
    let paid = event("evt_1", 1_700_000_000, "a");
    for calls in 1..=asks.len() {
        assert_eq!(status(&deliver(&server, &paid)), "accepted");
        let waits = stored(place, "stripe", "evt_1").unwrap();
        assert_eq!((waits.state, waits.failures, endpoint.calls().len()), (State::Pending, 0, calls));
        let wait = waits.not_before.unwrap().since(waits.claimed_at).as_secs();
        assert!((ASKED..ASKED + 20).contains(&wait), "{wait}");
    }
    assert_eq!(status(&deliver(&server, &paid)), "processed");
    assert_eq!(endpoint.calls().len(), asks.len() + 1);
}

fn newer_data_survives_the_crash_of_what_it_waits_for(place: &Place) {
    let endpoint = Endpoint::that([Does::Hangs]);
    let url = forward(&endpoint.url());
    let variables = [LEASE, BACKOFF, ("SEMEL_WEBHOOKS_STRIPE_HANDLERS", url.as_str())];
    let mut server = start(place, &variables);
    let address = server.address;
    let older = thread::spawn(move || try_deliver(address, &event("evt_1", 100, "older")));
    endpoint.is_called(1);
    assert_eq!(status(&deliver(&server, &event("evt_1", 200, "newer"))), "accepted");
    server.process.signal(Signal::KILL);
    server.process.end();
    assert!(older.join().unwrap().is_none());
    // Without the short lease: its own it is to keep.
    let _runner = start_as(place, "worker,sweeper", &variables[1..]);
    eventually(SOON, "the newer has run", || {
        let stored = stored(place, "stripe", "evt_1").unwrap();
        (stored.state, stored.order, stored.successor.is_none()) == (State::Completed, Some(200), true)
    });
    let notes: Vec<_> = endpoint.calls().iter().map(|call| call.body["data"]["object"]["note"].clone()).collect();
    assert_eq!(notes.last().unwrap(), "newer", "{notes:?}");
    assert_eq!(notes.iter().filter(|note| *note == "newer").count(), 1, "{notes:?}");
    assert_eq!(conflicts(place), ["evt_1 taken 1 200 100"]);
}

/// Two servers; one is told to stop in the middle. Senders go to the other one with what they got no answer for.
fn a_stop_in_the_middle_of_deliveries_loses_none_and_repeats_none(place: &Place) {
    const EVENTS: usize = 80;
    let endpoint = Endpoint::that([]);
    let url = forward(&endpoint.url());
    let variables = [("SEMEL_WEBHOOKS_STRIPE_HANDLERS", url.as_str())];
    let stopping = start_as(place, "api,worker,sweeper", &variables);
    let other = start_as(place, "api,worker,sweeper", &variables);
    let (number, addresses) = (AtomicUsize::new(0), [stopping.address, other.address]);
    let send = || {
        loop {
            let i = number.fetch_add(1, Ordering::SeqCst);
            if i >= EVENTS {
                return;
            }
            let paid = event(&format!("evt_{i}"), 1_700_000_000, "a");
            let answer = try_deliver(addresses[i % 2], &paid).or_else(|| try_deliver(other.address, &paid));
            let answer = status(&answer.unwrap());
            assert!(["processed", "accepted", "skipped", "rejected"].contains(&answer.as_str()), "{answer}");
        }
    };
    thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(send);
        }
        endpoint.is_called(EVENTS / 3);
        stop(stopping);
    });
    for i in 0..EVENTS {
        becomes(place, &format!("evt_{i}"), State::Completed);
    }
    let keys = endpoint.keys();
    let once: BTreeSet<_> = keys.iter().collect();
    assert_eq!((keys.len(), once.len()), (EVENTS, EVENTS), "each was called once");
}
