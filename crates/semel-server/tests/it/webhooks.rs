//! The laws of webhooks: an event takes effect once, however often it is delivered. The other files of this name have
//! the rest.

use std::{thread, time::Duration};

use rustix::process::Signal;
use semel::State;
use serde_json::json;

use crate::{
    endpoint::{Does, Endpoint},
    hooks::{
        becomes, conflicts, counted, deliver, deliver_to, event, forward, outbox, start, start_as, status, stored,
    },
    place::{Place, on_both_databases},
    proposals::rows,
    support::{SOON, eventually},
};

on_both_databases! {
    a_new_event_is_processed_and_each_repeat_is_skipped
    an_event_sent_to_a_second_function_is_skipped
    each_function_takes_effect_separately_if_configured
    an_event_is_accepted_as_soon_as_it_is_stored
    a_delivery_of_a_running_event_is_rejected
    newer_data_is_processed_and_older_is_not
    newer_data_waits_for_the_older_that_runs
    a_changed_delivery_count_is_no_conflict
    a_stop_waits_for_the_run
    a_stop_releases_events_that_exceed_its_grace
    a_forwarded_event_has_all_that_the_endpoint_needs
    equal_ids_of_two_sources_are_two_events
    an_archived_event_is_still_known
}

fn a_new_event_is_processed_and_each_repeat_is_skipped(place: &Place) {
    let server = start(place, &[]);
    let paid = event("evt_1", 1_700_000_000, "a");
    assert_eq!(status(&deliver(&server, &paid)), "processed");
    for _ in 0..3 {
        assert_eq!(status(&deliver(&server, &paid)), "skipped");
    }
    assert_eq!(outbox(place), ["webhook.stripe.invoice.paid"]);
    let stored = stored(place, "stripe", "evt_1").unwrap();
    assert_eq!((stored.state, stored.order, stored.failures), (State::Completed, Some(1_700_000_000), 0));
    let labels = ["invoice.paid", "stripe", "stripe"].map(|label| Some(label.to_owned()));
    assert_eq!(stored.labels.0[..3], labels);
    assert_eq!(stored.payload.unwrap(), paid.to_string(), "byte for byte");
    let outcome: serde_json::Value = serde_json::from_slice(&stored.outcome.unwrap().body).unwrap();
    assert_eq!((&outcome["result"], &outcome["topic"]), (&json!("published"), &json!("webhook.stripe.invoice.paid")));
    // It is archived 90 days later, at two in the night.
    let archive = stored.archive_at.unwrap();
    let hours = archive.since(stored.settled_at.unwrap()).as_secs() / 3600;
    assert!((90 * 24..=91 * 24).contains(&hours), "{hours}");
    assert!(archive.to_string().contains("T02:0"), "{archive}");
    assert_eq!(stored.expires_at, None);
    eventually(SOON, "repeats are counted", || counted(place, "replay") == 3);
}

fn an_event_sent_to_a_second_function_is_skipped(place: &Place) {
    let server = start(place, &[]);
    let paid = event("evt_1", 1_700_000_000, "a");
    assert_eq!(status(&deliver_to(&server, "/webhooks/stripe/connect", &paid)), "processed");
    assert_eq!(status(&deliver_to(&server, "/webhooks/stripe/billing", &paid)), "skipped");
    assert_eq!(status(&deliver(&server, &paid)), "skipped");
    assert_eq!(stored(place, "stripe", "evt_1").unwrap().labels.0[1].as_deref(), Some("connect"));
}

fn each_function_takes_effect_separately_if_configured(place: &Place) {
    let variables =
        [("SEMEL_WEBHOOKS_STRIPE_DEDUP_PER_FUNCTION", "true"), ("SEMEL_WEBHOOKS_STRIPE_FUNCTIONS", "connect,billing")];
    let server = start(place, &variables);
    let paid = event("evt_1", 1_700_000_000, "a");
    for function in ["connect", "billing"] {
        assert_eq!(status(&deliver_to(&server, &format!("/webhooks/stripe/{function}"), &paid)), "processed");
        assert_eq!(status(&deliver_to(&server, &format!("/webhooks/stripe/{function}"), &paid)), "skipped");
        assert!(stored(place, &format!("stripe.{function}"), "evt_1").is_some());
    }
    assert_eq!(outbox(place).len(), 2);
}

fn an_event_is_accepted_as_soon_as_it_is_stored(place: &Place) {
    let endpoint = Endpoint::that([Does::Waits]);
    let url = forward(&endpoint.url());
    let server = start(place, &[("SEMEL_WEBHOOKS_STRIPE_ASYNC", "true"), ("SEMEL_WEBHOOKS_STRIPE_HANDLERS", &url)]);
    let paid = event("evt_1", 1_700_000_000, "a");
    assert_eq!(status(&deliver(&server, &paid)), "accepted");
    endpoint.is_called(1);
    assert_eq!(stored(place, "stripe", "evt_1").unwrap().state, State::Processing);
    endpoint.let_go();
    becomes(place, "evt_1", State::Completed);
    assert_eq!(status(&deliver(&server, &paid)), "skipped");
}

fn a_delivery_of_a_running_event_is_rejected(place: &Place) {
    let endpoint = Endpoint::that([Does::Waits]);
    let server = start(place, &[("SEMEL_WEBHOOKS_STRIPE_HANDLERS", &forward(&endpoint.url()))]);
    let paid = event("evt_1", 1_700_000_000, "a");
    thread::scope(|scope| {
        let first = scope.spawn(|| status(&deliver(&server, &paid)));
        endpoint.is_called(1);
        assert_eq!(status(&deliver(&server, &paid)), "rejected");
        endpoint.let_go();
        assert_eq!(first.join().unwrap(), "processed");
    });
    assert_eq!(endpoint.calls().len(), 1);
}

fn newer_data_is_processed_and_older_is_not(place: &Place) {
    let server = start(place, &[]);
    assert_eq!(status(&deliver(&server, &event("evt_1", 200, "first"))), "processed");
    assert_eq!(status(&deliver(&server, &event("evt_1", 300, "newer"))), "processed");
    assert_eq!(status(&deliver(&server, &event("evt_1", 300, "newer"))), "skipped", "a repeat, no conflict");
    assert_eq!(status(&deliver(&server, &event("evt_1", 100, "older"))), "skipped");
    assert_eq!(status(&deliver(&server, &event("evt_1", 300, "as old"))), "skipped");
    assert_eq!(status(&deliver(&server, &event("evt_1", 300, "as old"))), "skipped");
    assert_eq!(outbox(place).len(), 2);
    let told = ["evt_1 taken 1 300 200", "evt_1 skipped 1 100 300", "evt_1 skipped 2 300 300"];
    assert_eq!(conflicts(place), told);
    let fingerprints = rows(place, "SELECT came_fingerprint || stored_fingerprint FROM semel_webhook_conflicts");
    assert!(fingerprints.iter().all(|both| both.len() == 132), "{fingerprints:?}");
    let stored = stored(place, "stripe", "evt_1").unwrap();
    assert_eq!(stored.order, Some(300));
}

fn newer_data_waits_for_the_older_that_runs(place: &Place) {
    let endpoint = Endpoint::that([Does::Waits]);
    let mut server = start(place, &[("SEMEL_WEBHOOKS_STRIPE_HANDLERS", &forward(&endpoint.url()))]);
    thread::scope(|scope| {
        let first = scope.spawn(|| status(&deliver(&server, &event("evt_1", 100, "older"))));
        endpoint.is_called(1);
        assert_eq!(status(&deliver(&server, &event("evt_1", 200, "newer"))), "accepted");
        assert_eq!(status(&deliver(&server, &event("evt_1", 200, "newer"))), "accepted", "it waits already");
        assert_eq!(status(&deliver(&server, &event("evt_1", 150, "between"))), "skipped");
        endpoint.let_go();
        assert_eq!(first.join().unwrap(), "processed");
    });
    endpoint.is_called(2);
    becomes(place, "evt_1", State::Completed);
    let notes: Vec<_> = endpoint.calls().iter().map(|call| call.body["data"]["object"]["note"].clone()).collect();
    assert_eq!(notes, ["older", "newer"]);
    assert_eq!(conflicts(place), ["evt_1 taken 2 200 100", "evt_1 skipped 1 150 100"]);
    let keys = endpoint.keys();
    assert_ne!(keys[0], keys[1], "the newer is no repeat of the older");
    // All counts are written before the end.
    server.process.signal(Signal::TERM);
    assert!(server.process.end().success());
    assert_eq!((counted(place, "mismatch"), counted(place, "in_flight")), (3, 0), "each delivery counts once");
}

/// Also next to a number that no double can represent.
fn a_changed_delivery_count_is_no_conflict(place: &Place) {
    let server = start(place, &[]);
    for (id, number) in [("evt_1", 1_u64), ("evt_2", 9_007_199_254_740_993)] {
        let mut paid = event(id, 1_700_000_000, "a");
        paid["data"]["object"]["number"] = json!(number);
        assert_eq!(status(&deliver(&server, &paid)), "processed");
        paid["pending_webhooks"] = json!(0);
        assert_eq!(status(&deliver(&server, &paid)), "skipped");
        assert_eq!(conflicts(place), [""; 0], "{number}");
    }
    let mut other = event("evt_2", 1_700_000_000, "a");
    other["data"]["object"]["number"] = json!(9_007_199_254_740_995_u64);
    assert_eq!(status(&deliver(&server, &other)), "skipped");
    assert_eq!(conflicts(place).len(), 1, "another number is other data");
}

fn a_stop_waits_for_the_run(place: &Place) {
    let endpoint = Endpoint::that([Does::Waits]);
    let url = forward(&endpoint.url());
    let variables = [("SEMEL_WEBHOOKS_STRIPE_ASYNC", "true"), ("SEMEL_WEBHOOKS_STRIPE_HANDLERS", url.as_str())];
    let mut server = start(place, &variables);
    assert_eq!(status(&deliver(&server, &event("evt_1", 1_700_000_000, "a"))), "accepted");
    endpoint.is_called(1);
    server.process.signal(Signal::TERM);
    thread::sleep(Duration::from_millis(100));
    endpoint.let_go();
    assert!(server.process.end().success());
    assert_eq!(stored(place, "stripe", "evt_1").unwrap().state, State::Completed);
}

fn a_stop_releases_events_that_exceed_its_grace(place: &Place) {
    let endpoint = Endpoint::that([Does::Hangs]);
    let url = forward(&endpoint.url());
    let variables = [("SEMEL_WEBHOOKS_STRIPE_ASYNC", "true"), ("SEMEL_WEBHOOKS_STRIPE_HANDLERS", url.as_str())];
    let mut server = start(place, &variables);
    assert_eq!(status(&deliver(&server, &event("evt_1", 1_700_000_000, "a"))), "accepted");
    endpoint.is_called(1);
    server.process.signal(Signal::TERM);
    assert!(server.process.end().success());
    let back = stored(place, "stripe", "evt_1").unwrap();
    assert_eq!((back.state, back.failures, back.crashes), (State::Pending, 0, 0), "its lease need not expire first");
    let _server = start_as(place, "worker", &variables);
    becomes(place, "evt_1", State::Completed);
}

fn a_forwarded_event_has_all_that_the_endpoint_needs(place: &Place) {
    let endpoint = Endpoint::that([]);
    let rules = format!("invoice.*={}; *=outbox:elsewhere", endpoint.url());
    let server = start(place, &[("SEMEL_WEBHOOKS_STRIPE_HANDLERS", &rules)]);
    let paid = event("evt_1", 1_700_000_000, "a");
    assert_eq!(status(&deliver_to(&server, "/webhooks/stripe/billing", &paid)), "processed");
    let calls = endpoint.calls();
    assert_eq!(calls.len(), 1);
    assert_eq!(calls[0].body, paid);
    for (name, value) in [
        ("semel-webhook-id", "evt_1"),
        ("semel-webhook-type", "invoice.paid"),
        ("semel-webhook-source", "stripe"),
        ("semel-webhook-function", "billing"),
        ("content-type", "application/json"),
    ] {
        assert_eq!(calls[0].header(name), value);
    }
    assert!(calls[0].key().starts_with("semel_"));
    let mut other = event("evt_2", 1_700_000_000, "a");
    other["type"] = json!("customer.created");
    assert_eq!(status(&deliver(&server, &other)), "processed");
    assert_eq!(outbox(place), ["elsewhere"]);
}

fn equal_ids_of_two_sources_are_two_events(place: &Place) {
    let other = [("SEMEL_WEBHOOKS_OTHER_KIND", "stripe"), ("SEMEL_WEBHOOKS_OTHER_SECRETS", crate::hooks::SECRET)];
    let server = start(place, &other);
    let paid = event("evt_1", 1_700_000_000, "a");
    for path in ["/webhooks/stripe", "/webhooks/other"] {
        assert_eq!(status(&deliver_to(&server, path, &paid)), "processed");
    }
}

fn an_archived_event_is_still_known(place: &Place) {
    let server = start_as(place, "api,worker,sweeper", &[]);
    let paid = event("evt_1", 1_700_000_000, "a");
    assert_eq!(status(&deliver(&server, &paid)), "processed");
    // Three months pass.
    crate::desk::execute(place, "UPDATE semel_operations SET archive_at = 1, look_at = 1");
    eventually(SOON, "it is archived", || stored(place, "stripe", "evt_1").unwrap().archived);
    assert_eq!(status(&deliver(&server, &paid)), "skipped");
    assert_eq!(status(&deliver(&server, &event("evt_1", 1_600_000_000, "older"))), "skipped");
    assert_eq!(stored(place, "stripe", "evt_1").unwrap().payload.unwrap(), paid.to_string(), "it can be looked up");
    assert_eq!(outbox(place), ["webhook.stripe.invoice.paid"]);
}
