//! Events that are not sent again: a worker runs them, after failures, after crashes, and newer data after older.

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

/// As many crashes as a test may need.
const MANY_CRASHES: (&str, &str) = ("SEMEL_WEBHOOKS_STRIPE_MAX_CRASHES", "20");

on_both_databases! {
    a_claimed_event_of_a_killed_worker_is_run_by_the_next_worker
    an_event_whose_worker_is_killed_after_the_commit_is_not_run_again
    a_failing_event_runs_three_times_without_a_redelivery
    an_event_that_kills_its_process_is_parked_after_five_crashes
    the_retry_after_of_an_endpoint_is_respected
    newer_data_survives_the_crash_of_the_older_run
    a_stop_in_the_middle_of_deliveries_loses_none_and_repeats_none
}

/// Runs an event again on a person's request.
fn retry(server: &Server, id: &str) {
    let answer = post(server, &format!("/webhooks/stripe/events/{id}/retry"), r#"{"reason":"it is mended"}"#);
    assert_eq!(answer.status, 202, "{}", answer.body);
}

fn a_failing_event_runs_three_times_without_a_redelivery(place: &Place) {
    let endpoint = Endpoint::that([Does::Answers(500); 3]);
    let url = forward(&endpoint.url());
    let server = start_as(place, "api,worker,sweeper", &[BACKOFF, ("SEMEL_WEBHOOKS_STRIPE_HANDLERS", &url)]);
    let paid = event("evt_1", 1_700_000_000, "a");
    assert_eq!(deliver(&server, &paid).status, 500);
    eventually(SOON, "it has failed three times", || stored(place, "stripe", "evt_1").unwrap().failures == 3);
    assert_eq!(status(&deliver(&server, &paid)), "max_retries");
    // The worker that ran it three times runs another one, and not this one again.
    let other = event("evt_2", 1_700_000_000, "a");
    assert_eq!(status(&deliver(&server, &other)), "processed");
    assert_eq!((endpoint.calls().len(), stored(place, "stripe", "evt_1").unwrap().state), (4, State::Failed));
    retry(&server, "evt_1");
    becomes(place, "evt_1", State::Completed);
    assert_eq!(endpoint.calls().len(), 5);
    assert_eq!(status(&deliver(&server, &paid)), "skipped");
}

/// With the defaults: five crashes, independent of max_attempts.
fn an_event_that_kills_its_process_is_parked_after_five_crashes(place: &Place) {
    let (variables, point) = ([LEASE, BACKOFF], "webhooks.after_effect");
    let paid = event("evt_1", 1_700_000_000, "a");
    let mut server = start_dying(place, "api", point, &variables);
    assert!(try_deliver(server.address, &paid).is_none());
    died_at(place, point, &mut server);
    for crash in 2..=5 {
        let mut server = start_dying(place, "worker,sweeper", point, &variables);
        died_at(place, point, &mut server);
        // The lease of the last crash may not have expired yet.
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

/// An event that has failed once, and is due.
fn one_is_due(place: &Place) {
    let broken = Endpoint::that([Does::Answers(500)]);
    let server = start(place, &[BACKOFF, ("SEMEL_WEBHOOKS_STRIPE_HANDLERS", &forward(&broken.url()))]);
    assert_eq!(deliver(&server, &event("evt_1", 1_700_000_000, "a")).status, 500);
}

/// Killed at each step from the claim to the commit: the next worker runs the event, and it takes effect once.
fn a_claimed_event_of_a_killed_worker_is_run_by_the_next_worker(place: &Place) {
    one_is_due(place);
    for point in [
        "take.before",
        "store.take.claimed",
        "take.after",
        "atomic.begun",
        "webhooks.after_effect",
        "atomic.before_complete",
        "atomic.before_commit",
    ] {
        let mut worker = start_dying(place, "worker,sweeper", point, &[LEASE, BACKOFF, MANY_CRASHES]);
        died_at(place, point, &mut worker);
        assert_eq!((stored(place, "stripe", "evt_1").unwrap().failures, outbox(place)), (1, vec![]), "{point}");
    }
    let _worker = start_as(place, "worker,sweeper", &[BACKOFF, MANY_CRASHES]);
    becomes(place, "evt_1", State::Completed);
    assert_eq!(outbox(place), ["webhook.stripe.invoice.paid"]);
    assert_eq!(stored(place, "stripe", "evt_1").unwrap().failures, 1, "a crash is no failure");
}

/// The same after the commit: nothing is left to do.
fn an_event_whose_worker_is_killed_after_the_commit_is_not_run_again(place: &Place) {
    one_is_due(place);
    let mut worker = start_dying(place, "worker,sweeper", "atomic.after_commit", &[LEASE, BACKOFF]);
    died_at(place, "atomic.after_commit", &mut worker);
    let done = stored(place, "stripe", "evt_1").unwrap();
    assert_eq!((done.state, done.crashes), (State::Completed, 0));
    let server = start_as(place, "api,worker,sweeper", &[BACKOFF]);
    assert_eq!(status(&deliver(&server, &event("evt_1", 1_700_000_000, "a"))), "skipped");
    assert_eq!(outbox(place), ["webhook.stripe.invoice.paid"]);
}

/// Longer than our own backoff. Only a redelivery comes sooner.
fn the_retry_after_of_an_endpoint_is_respected(place: &Place) {
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

fn newer_data_survives_the_crash_of_the_older_run(place: &Place) {
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
    // With the default lease, which it must be able to renew.
    let _worker = start_as(place, "worker,sweeper", &variables[1..]);
    eventually(SOON, "the newer has run", || {
        let stored = stored(place, "stripe", "evt_1").unwrap();
        (stored.state, stored.order, stored.successor.is_none()) == (State::Completed, Some(200), true)
    });
    let notes: Vec<_> = endpoint.calls().iter().map(|call| call.body["data"]["object"]["note"].clone()).collect();
    assert_eq!(notes.last().unwrap(), "newer", "{notes:?}");
    assert_eq!(notes.iter().filter(|note| *note == "newer").count(), 1, "{notes:?}");
    assert_eq!(conflicts(place), ["evt_1 taken 1 200 100"]);
}

/// Two servers; one is stopped in the middle. Senders repeat unanswered deliveries to the other one.
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
