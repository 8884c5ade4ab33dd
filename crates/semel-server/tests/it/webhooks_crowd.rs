//! The laws of concurrent deliveries to several processes on one database: one of them runs.

use std::{collections::BTreeMap, net::SocketAddr, sync::Barrier, thread, time::Duration};

use semel::{State, machine::Verdict, prelude::*, store::Decision};
use semel_http::webhooks::Verifier;
use serde_json::{Value, json};

use crate::{
    desk::Desk,
    endpoint::{Does, Endpoint},
    hooks::{
        becomes, conflicts, counted, deliver, event, forward, outbox, post_raw, signed, signed_by, start, start_as,
        status, stored,
    },
    place::{Place, on_both_databases},
    proposals::rows,
    support::{SOON, Server, eventually},
};

on_both_databases! {
    heavy_a_hundred_deliveries_of_one_event_over_two_processes_are_published_once
    heavy_a_hundred_deliveries_of_one_event_over_two_processes_are_forwarded_once
    heavy_the_same_bytes_under_fifty_ids_at_once_are_published_once
    heavy_the_same_bytes_under_fifty_ids_at_once_are_forwarded_once
    heavy_the_newest_of_many_concurrent_deliveries_runs_last
    exhausted_events_do_not_block_others
    a_busy_source_blocks_no_other
}

/// A signed delivery: where it goes, its headers, its body.
type Delivery = (&'static str, Vec<(String, String)>, String);

fn of_stripe(event: &Value) -> Delivery {
    let body = event.to_string();
    ("/webhooks/stripe", signed(body.as_bytes()), body)
}

/// Sends all of them at the same moment, to each of the servers in turn; returns how often each answer was given.
fn at_once(servers: &[Server], deliveries: &[Delivery]) -> BTreeMap<String, usize> {
    let barrier = Barrier::new(deliveries.len());
    let send = |address: SocketAddr, (path, headers, body): &Delivery| {
        barrier.wait();
        status(&post_raw(address, path, headers, body.as_bytes()))
    };
    let mut counts = BTreeMap::new();
    thread::scope(|scope| {
        let calls: Vec<_> = deliveries
            .iter()
            .zip(servers.iter().cycle())
            .map(|(delivery, server)| scope.spawn(move || send(server.address, delivery)))
            .collect();
        for call in calls {
            *counts.entry(call.join().unwrap()).or_default() += 1;
        }
    });
    counts
}

/// One was processed, and each of the others was answered that it is completed or in flight.
fn one_of(n: usize, answers: &BTreeMap<String, usize>) {
    let told = |word: &str| answers.get(word).copied().unwrap_or_default();
    assert_eq!((told("processed"), told("rejected") + told("skipped")), (1, n - 1), "{answers:?}");
}

fn heavy_a_hundred_deliveries_of_one_event_over_two_processes_are_published_once(place: &Place) {
    let servers = [start(place, &[]), start(place, &[])];
    for round in 0..3 {
        let delivery = of_stripe(&event(&format!("evt_{round}"), 1_700_000_000, "a"));
        one_of(100, &at_once(&servers, &vec![delivery; 100]));
        assert_eq!(outbox(place).len(), round + 1);
    }
}

/// The endpoint does not answer before all the others were answered "in flight": so they did overlap.
fn heavy_a_hundred_deliveries_of_one_event_over_two_processes_are_forwarded_once(place: &Place) {
    let endpoint = Endpoint::that([Does::Waits]);
    let url = forward(&endpoint.url());
    let variables = [("SEMEL_WEBHOOKS_STRIPE_HANDLERS", url.as_str())];
    let servers =
        [start_as(place, "api,worker,sweeper", &variables), start_as(place, "api,worker,sweeper", &variables)];
    let deliveries = vec![of_stripe(&event("evt_1", 1_700_000_000, "a")); 100];
    let answers = thread::scope(|scope| {
        let all = scope.spawn(|| at_once(&servers, &deliveries));
        eventually(SOON, "the others are told", || counted(place, "in_flight") == 99);
        endpoint.let_go();
        all.join().unwrap()
    });
    assert_eq!(answers, [("processed".to_owned(), 1), ("rejected".to_owned(), 99)].into());
    assert_eq!(endpoint.calls().len(), 1);
}

const GITHUB: [(&str, &str); 2] =
    [("SEMEL_WEBHOOKS_GITHUB_KIND", "github"), ("SEMEL_WEBHOOKS_GITHUB_SECRETS", "geheim-geheim")];

/// The same body under so many ids, as a third party could replay it.
fn replayed(n: usize) -> Vec<Delivery> {
    let (body, verifier) = (json!({ "ref": "main" }).to_string(), Verifier::github(["geheim-geheim"]).unwrap());
    let under = |i: usize| {
        let mut headers = signed_by(&verifier, Some(&format!("guid-{i}")), body.as_bytes(), Duration::ZERO);
        headers.push(("x-github-event".to_owned(), "push".to_owned()));
        ("/webhooks/github", headers, body.clone())
    };
    (0..n).map(under).collect()
}

/// All stored events are settled: one took effect, the others are duplicates of it. Those that arrived after its
/// completion are not stored.
fn all_are_copies_of_one(place: &Place, n: usize) {
    let outcome = |i: usize| -> Option<(usize, Value)> {
        let stored = stored(place, "github", &format!("guid-{i}"))?;
        assert_eq!(stored.state, State::Completed);
        Some((i, serde_json::from_slice(&stored.outcome.unwrap().body).unwrap()))
    };
    let outcomes: Vec<_> = (0..n).filter_map(outcome).collect();
    let (first, _) = *outcomes.iter().find(|(_, outcome)| outcome["result"] != "duplicate").unwrap();
    for (i, outcome) in outcomes.iter().filter(|(i, _)| *i != first) {
        assert_eq!(*outcome, json!({ "result": "duplicate", "of": format!("guid-{first}") }), "{i}");
    }
}

fn heavy_the_same_bytes_under_fifty_ids_at_once_are_published_once(place: &Place) {
    let servers = [start(place, &GITHUB), start(place, &GITHUB)];
    one_of(50, &at_once(&servers, &replayed(50)));
    assert_eq!(outbox(place), ["webhook.github.push"]);
    all_are_copies_of_one(place, 50);
}

fn heavy_the_same_bytes_under_fifty_ids_at_once_are_forwarded_once(place: &Place) {
    let endpoint = Endpoint::that([]);
    let url = forward(&endpoint.url());
    let variables = [&GITHUB[..], &[("SEMEL_WEBHOOKS_GITHUB_HANDLERS", url.as_str())]].concat();
    let servers = [start(place, &variables), start(place, &variables)];
    one_of(50, &at_once(&servers, &replayed(50)));
    assert_eq!(endpoint.calls().len(), 1);
    all_are_copies_of_one(place, 50);
}

/// In any order of arrival, an older one never runs after a newer one, and the newest runs.
fn heavy_the_newest_of_many_concurrent_deliveries_runs_last(place: &Place) {
    const N: usize = 40;
    let endpoint = Endpoint::that([]);
    let url = forward(&endpoint.url());
    let variables = [("SEMEL_WEBHOOKS_STRIPE_HANDLERS", url.as_str())];
    let servers = [start_as(place, "api,worker", &variables), start_as(place, "api,worker", &variables)];
    let mut deliveries: Vec<_> = (0..N as i64).map(|i| of_stripe(&event("evt_1", i, &format!("data {i}")))).collect();
    fastrand::shuffle(&mut deliveries);
    let answers = at_once(&servers, &deliveries);
    let known = ["processed", "accepted", "skipped", "rejected"];
    assert!(answers.keys().all(|answer| known.contains(&answer.as_str())), "{answers:?}");
    let newest = N as i64 - 1;
    eventually(SOON, "the newest has run", || {
        let stored = stored(place, "stripe", "evt_1").unwrap();
        (stored.state, stored.order) == (State::Completed, Some(newest))
    });
    let ran: Vec<i64> = endpoint.calls().iter().map(|call| call.body["created"].as_i64().unwrap()).collect();
    assert!(ran.is_sorted_by(|before, after| before < after), "{ran:?}");
    assert_eq!(ran.last(), Some(&newest));
    // All but the first met other data, and each is recorded once as a conflict.
    let told = conflicts(place);
    assert_eq!(told.len(), N - 1, "{told:?}");
    let two = "SELECT event_id FROM semel_webhook_conflicts WHERE came_fingerprint = stored_fingerprint";
    assert_eq!(rows(place, two), [""; 0], "each with both fingerprints");
}

/// Events that failed once under a policy of three attempts, and are exhausted under a stricter one. One of the same
/// source, which runs again on a person's request, comes after all of them.
fn exhausted_events_do_not_block_others(place: &Place) {
    // More than a worker claims in one batch: the source has 64 seats.
    const GIVEN_UP: usize = 70;
    let endpoint = Endpoint::that([Does::Answers(500); GIVEN_UP + 1]);
    let url = forward(&endpoint.url());
    let variables = [("SEMEL_WEBHOOKS_STRIPE_HANDLERS", url.as_str()), ("SEMEL_WEBHOOKS_STRIPE_BACKOFF", "1ms")];
    let server = start(place, &variables);
    for i in 0..=GIVEN_UP {
        assert_eq!(deliver(&server, &event(&format!("evt_{i}"), 1_700_000_000, "a")).status, 500);
    }
    drop(server);
    let last = format!("evt_{GIVEN_UP}");
    let (desk, failed) = (Desk::at(place), stored(place, "stripe", &last).unwrap());
    let again = Decision::Resolve { verdict: Verdict::Retry, expected: None };
    desk.block(desk.database.decide(failed.id, again, "ana", "it is mended")).unwrap();
    let stricter = [&variables[..], &[("SEMEL_WEBHOOKS_STRIPE_MAX_ATTEMPTS", "1")]].concat();
    let _server = start_as(place, "worker", &stricter);
    becomes(place, &last, State::Completed);
    assert_eq!(endpoint.calls().len(), GIVEN_UP + 2);
}

/// A source with a slow endpoint and more due than it has seats, and another one with little.
fn a_busy_source_blocks_no_other(place: &Place) {
    const DUE: usize = 40;
    let (slow, quick) = (Endpoint::that([Does::Waits; DUE]), Endpoint::that([Does::Answers(500)]));
    let (to_slow, to_quick) = (forward(&slow.url()), forward(&quick.url()));
    let variables = [
        ("SEMEL_WEBHOOKS_STRIPE_HANDLERS", to_slow.as_str()),
        ("SEMEL_WEBHOOKS_STRIPE_CONCURRENCY", "1"),
        ("SEMEL_WEBHOOKS_STRIPE_ASYNC", "true"),
        ("SEMEL_WEBHOOKS_OTHER_KIND", "stripe"),
        ("SEMEL_WEBHOOKS_OTHER_SECRETS", crate::hooks::SECRET),
        ("SEMEL_WEBHOOKS_OTHER_HANDLERS", to_quick.as_str()),
        ("SEMEL_WEBHOOKS_OTHER_BACKOFF", "1ms"),
    ];
    let server = start_as(place, "api,worker", &variables);
    for i in 0..DUE {
        assert_eq!(status(&deliver(&server, &event(&format!("evt_{i}"), 1_700_000_000, "a"))), "accepted");
    }
    slow.is_called(1);
    let (_, headers, body) = of_stripe(&event("evt_last", 1_700_000_000, "a"));
    assert_eq!(post_raw(server.address, "/webhooks/other", &headers, body.as_bytes()).status, 500);
    eventually(SOON, "the other has run", || stored(place, "other", "evt_last").unwrap().state == State::Completed);
    assert_eq!(slow.calls().len(), 1, "the busy one is still at its first");
    slow.let_go();
    becomes(place, &format!("evt_{}", DUE - 1), State::Completed);
}
