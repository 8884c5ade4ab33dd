//! Servers that stand still with an event in their hands for longer than it is theirs, and then go on as if nothing had
//! happened: what they do late is refused.

use std::{thread, time::Duration};

use rustix::process::Signal;
use semel::State;

use crate::{
    endpoint::{Does, Endpoint},
    hooks::{becomes, deliver, event, forward, outbox, start, start_as, status, stored},
    notifications_crash_pauses::is_still,
    place::{Place, on_both_databases},
    support::{SOON, Server, eventually},
    webhooks_crash::{BACKOFF, start_dying},
};

on_both_databases! {
    who_stands_still_in_a_call_completes_nothing_late
    who_stands_still_after_a_call_completes_nothing_late
    who_stands_still_before_its_run_publishes_nothing_late
}

/// Longer than it takes from a claim to where a server stands still, so that it does so in nobody's way: a renewal in
/// the middle would have the database's only writer stand still with it.
const LEASE: (&str, &str) = ("SEMEL_WEBHOOKS_STRIPE_LEASE", "3s");

const PAST_THE_LEASE: Duration = Duration::from_secs(4);

/// One server stands still; another one does its work; the first goes on. What the sender of its delivery is told.
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

/// Both calls are under the same key, and only the second one's answer counted.
fn who_stands_still_in_a_call_completes_nothing_late(place: &Place) {
    let endpoint = Endpoint::that([Does::Waits]);
    let url = forward(&endpoint.url());
    let variables = [LEASE, BACKOFF, ("SEMEL_WEBHOOKS_STRIPE_HANDLERS", url.as_str())];
    let still = start(place, &variables);
    let said = overtaken(place, &still, &variables, || {
        endpoint.is_called(1);
        still.process.signal(Signal::STOP);
        // A signal takes its time, and the endpoint's answer must not be there before it.
        eventually(SOON, "it stands still", || is_still(&still));
        endpoint.let_go();
    });
    assert_eq!(said, "rejected");
    let keys = endpoint.keys();
    assert_eq!((keys.len(), &keys[0]), (2, &keys[1]));
}

fn who_stands_still_after_a_call_completes_nothing_late(place: &Place) {
    let endpoint = Endpoint::that([]);
    let url = forward(&endpoint.url());
    let variables = [LEASE, BACKOFF, ("SEMEL_WEBHOOKS_STRIPE_HANDLERS", url.as_str())];
    let still = start_dying(place, "api", "webhooks.after_effect:1:stop", &variables);
    assert_eq!(overtaken(place, &still, &variables, || ()), "rejected");
    let keys = endpoint.keys();
    assert_eq!((keys.len(), &keys[0]), (2, &keys[1]));
}

fn who_stands_still_before_its_run_publishes_nothing_late(place: &Place) {
    publishes_nothing_late(place, "webhooks.after_store");
}

fn publishes_nothing_late(place: &Place, point: &str) {
    let variables = [LEASE, BACKOFF];
    let still = start_dying(place, "api", &format!("{point}:1:stop"), &variables);
    assert_eq!(overtaken(place, &still, &variables, || ()), "rejected", "{point}");
    assert_eq!(outbox(place), ["webhook.stripe.invoice.paid"], "{point}");
}

/// With the message written, and with the completion too, but not committed. PostgreSQL ends such a transaction when
/// the lease does; SQLite has one writer, so there everybody stands still.
#[test]
fn who_stands_still_in_its_transaction_publishes_nothing_late() {
    for point in ["webhooks.after_effect", "atomic.before_complete", "atomic.before_commit"] {
        publishes_nothing_late(&Place::postgres(), point);
    }
}

/// On SQLite the others wait, and go on when it does.
#[test]
fn who_stands_still_in_the_transaction_of_all_publishes_once() {
    for point in ["webhooks.after_effect", "atomic.before_commit"] {
        let (place, variables) = (Place::sqlite(), [LEASE, BACKOFF]);
        let still = start_dying(&place, "api", &format!("{point}:1:stop"), &variables);
        let paid = event("evt_1", 1_700_000_000, "a");
        thread::scope(|scope| {
            // Started before, for it could not open the file while somebody stands still in the middle of it.
            let _other = start_as(&place, "worker,sweeper", &variables);
            let late = scope.spawn(|| deliver(&still, &paid));
            eventually(SOON, "it stands still", || is_still(&still));
            thread::sleep(PAST_THE_LEASE);
            still.process.signal(Signal::CONT);
            // It was given up, or it was in time for the others, who could not do anything.
            let said = late.join().unwrap();
            assert!(said.status == 500 || ["processed", "rejected"].contains(&status(&said).as_str()), "{}", said.body);
            becomes(&place, "evt_1", State::Completed);
        });
        assert_eq!(outbox(&place), ["webhook.stripe.invoice.paid"], "{point}");
    }
}
