//! Servers that are suspended with an event past its lease, and then continue as if nothing had happened: their late
//! writes are refused.

use std::{thread, time::Duration};

use rustix::process::Signal;
use semel::State;

use crate::{
    endpoint::{Does, Endpoint},
    fleet::stop,
    hooks::{becomes, deliver, event, forward, outbox, start, start_as, status, stored},
    notifications_crash_pauses::is_still,
    place::{Place, on_both_databases},
    support::{SOON, Server, eventually},
    webhooks_crash::{BACKOFF, start_dying},
};

on_both_databases! {
    a_worker_suspended_with_a_claimed_event_writes_nothing_late
    a_server_suspended_in_a_call_completes_nothing_late
    a_server_suspended_after_a_call_completes_nothing_late
    a_server_suspended_before_its_run_publishes_nothing_late
}

/// Longer than the time from the claim to the point of suspension: a renewal in the middle would suspend the database's
/// only writer with it.
const LEASE: (&str, &str) = ("SEMEL_WEBHOOKS_STRIPE_LEASE", "3s");

const PAST_THE_LEASE: Duration = Duration::from_secs(4);

/// One server is suspended; another one does its work; the first continues. Returns the answer to the first one's
/// sender.
fn overtaken(place: &Place, still: &Server, variables: &[(&str, &str)], meanwhile: impl FnOnce()) -> String {
    let paid = event("evt_1", 1_700_000_000, "a");
    thread::scope(|scope| {
        let late = scope.spawn(|| status(&deliver(still, &paid)));
        meanwhile();
        eventually(SOON, "it stands still", || is_still(still));
        let _other = start_as(place, "worker,sweeper", variables);
        becomes(place, "evt_1", State::Completed);
        let done = stored(place, "stripe", "evt_1").unwrap();
        still.process.signal(Signal::CONT);
        let said = late.join().unwrap();
        let after = stored(place, "stripe", "evt_1").unwrap();
        assert_eq!((after.state, after.crashes, after.failures), (State::Completed, 1, 0));
        assert_eq!((after.fence, after.outcome), (done.fence, done.outcome), "what is done stays as it is");
        said
    })
}

/// Both calls have the same key, and only the second one's answer counts.
fn a_server_suspended_in_a_call_completes_nothing_late(place: &Place) {
    let endpoint = Endpoint::that([Does::Waits]);
    let url = forward(&endpoint.url());
    let variables = [LEASE, BACKOFF, ("SEMEL_WEBHOOKS_STRIPE_HANDLERS", url.as_str())];
    let still = start(place, &variables);
    let said = overtaken(place, &still, &variables, || {
        endpoint.is_called(1);
        still.process.signal(Signal::STOP);
        // A signal takes its time, and the endpoint's answer must not arrive before it.
        eventually(SOON, "it stands still", || is_still(&still));
        endpoint.let_go();
    });
    assert_eq!(said, "rejected");
    let keys = endpoint.keys();
    assert_eq!((keys.len(), &keys[0]), (2, &keys[1]));
}

fn a_server_suspended_after_a_call_completes_nothing_late(place: &Place) {
    let endpoint = Endpoint::that([]);
    let url = forward(&endpoint.url());
    let variables = [LEASE, BACKOFF, ("SEMEL_WEBHOOKS_STRIPE_HANDLERS", url.as_str())];
    let still = start_dying(place, "api", "webhooks.after_effect:1:stop", &variables);
    assert_eq!(overtaken(place, &still, &variables, || ()), "rejected");
    let keys = endpoint.keys();
    assert_eq!((keys.len(), &keys[0]), (2, &keys[1]));
}

fn a_server_suspended_before_its_run_publishes_nothing_late(place: &Place) {
    publishes_nothing_late(place, "webhooks.after_store");
}

fn publishes_nothing_late(place: &Place, point: &str) {
    let variables = [LEASE, BACKOFF];
    let still = start_dying(place, "api", &format!("{point}:1:stop"), &variables);
    assert_eq!(overtaken(place, &still, &variables, || ()), "rejected", "{point}");
    assert_eq!(outbox(place), ["webhook.stripe.invoice.paid"], "{point}");
}

/// The worker is suspended past its lease, after it has claimed the event and after it has called its endpoint. Another
/// worker runs the event; the first continues, and its writes are refused.
fn a_worker_suspended_with_a_claimed_event_writes_nothing_late(place: &Place) {
    for (n, (point, calls)) in [("take.after", 1), ("webhooks.after_effect", 2)].into_iter().enumerate() {
        let id = format!("evt_{n}");
        let (broken, endpoint) = (Endpoint::that([Does::Answers(500)]), Endpoint::that([]));
        let (to_broken, url) = (forward(&broken.url()), forward(&endpoint.url()));
        let server = start(place, &[BACKOFF, ("SEMEL_WEBHOOKS_STRIPE_HANDLERS", to_broken.as_str())]);
        assert_eq!(deliver(&server, &event(&id, 1_700_000_000, "a")).status, 500);
        drop(server);
        let variables = [LEASE, BACKOFF, ("SEMEL_WEBHOOKS_STRIPE_HANDLERS", url.as_str())];
        let still = start_dying(place, "worker", &format!("{point}:1:stop"), &variables);
        eventually(SOON, "it stands still", || is_still(&still));
        let other = start_as(place, "worker,sweeper", &variables);
        becomes(place, &id, State::Completed);
        let done = stored(place, "stripe", &id).unwrap();
        still.process.signal(Signal::CONT);
        // It ends its present run first.
        stop(still);
        drop(other);
        let after = stored(place, "stripe", &id).unwrap();
        assert_eq!((after.state, after.crashes, after.failures), (State::Completed, 1, 1), "{point}");
        assert_eq!((after.fence, after.outcome), (done.fence, done.outcome), "{point}: what is done stays as it is");
        let keys = endpoint.keys();
        assert_eq!((keys.len(), &keys[0]), (calls, &keys[calls - 1]), "{point}");
    }
}

/// With the message written, and with the completion too, but not committed. PostgreSQL ends such a transaction when
/// the lease expires; SQLite has one writer, so everything waits.
#[test]
fn a_server_suspended_in_its_transaction_publishes_nothing_late() {
    for point in ["webhooks.after_effect", "atomic.before_complete", "atomic.before_commit"] {
        publishes_nothing_late(&Place::postgres(), point);
    }
}

/// On SQLite the others wait until it continues.
#[test]
fn a_server_suspended_with_the_only_writer_publishes_once() {
    for point in ["webhooks.after_effect", "atomic.before_commit"] {
        let (place, variables) = (Place::sqlite(), [LEASE, BACKOFF]);
        let still = start_dying(&place, "api", &format!("{point}:1:stop"), &variables);
        let paid = event("evt_1", 1_700_000_000, "a");
        thread::scope(|scope| {
            // Started before, because it could not open the file while a suspended process holds it.
            let _other = start_as(&place, "worker,sweeper", &variables);
            let late = scope.spawn(|| deliver(&still, &paid));
            eventually(SOON, "it stands still", || is_still(&still));
            thread::sleep(PAST_THE_LEASE);
            still.process.signal(Signal::CONT);
            // It lost its lease, or it was in time, because the others had to wait.
            let said = late.join().unwrap();
            assert!(said.status == 500 || ["processed", "rejected"].contains(&status(&said).as_str()), "{}", said.body);
            becomes(&place, "evt_1", State::Completed);
        });
        assert_eq!(outbox(&place), ["webhook.stripe.invoice.paid"], "{point}");
    }
}
