//! Fairness: no source, no function and no endpoint keeps another one from running.

use std::{cell::Cell, net::TcpListener, thread, time::Duration};

use semel::State;
use serde_json::json;

use crate::{
    desk::Desk,
    endpoint::{Does, Endpoint},
    hooks::{SECRET, becomes, deliver, deliver_to, event, forward, outbox, start, start_as, status, stored},
    place::{Place, on_both_databases},
    proposals::rows,
    support::{SOON, Server, eventually},
};

on_both_databases! {
    an_unreachable_endpoint_is_paused_and_counts_no_attempt
    a_source_without_free_seats_blocks_no_other
    a_function_with_a_long_backlog_blocks_no_other
    a_slow_function_leaves_seats_for_others
    events_of_a_source_that_is_gone_wait_untouched_until_it_is_back
    events_of_another_tenant_are_left_alone_and_delay_no_other
    deliveries_of_a_paused_source_are_stored_and_run_after_the_pause
}

fn deliveries_of_a_paused_source_are_stored_and_run_after_the_pause(place: &Place) {
    let sent = Cell::new(0);
    let send = |server: &Server| {
        sent.set(sent.get() + 1);
        status(&deliver(server, &event(&format!("evt_{}", sent.get()), 1_700_000_000, "a")))
    };
    let server = start_as(place, "api,worker", &[]);
    assert_eq!(send(&server), "processed");
    let desk = Desk::at(place);
    desk.block(desk.database.pause_kind("webhooks", "stripe", "ann", "the books are closed")).unwrap();
    eventually(SOON, "the node knows of the pause", || send(&server) == "accepted");
    drop(server);
    let server = start_as(place, "api,worker", &[]);
    assert_eq!(send(&server), "accepted", "a node that starts knows of it at once");
    let last = format!("evt_{}", sent.get());
    let waits = stored(place, "stripe", &last).unwrap();
    assert_eq!((waits.state, waits.failures, waits.crashes), (State::Pending, 0, 0));
    assert_eq!(outbox(place).len(), sent.get() - 2, "it has had no effect");
    assert!(desk.block(desk.database.resume_kind("webhooks", "stripe", "ann", "they are open")).unwrap());
    becomes(place, &last, State::Completed);
    eventually(SOON, "the node knows of the end of the pause", || send(&server) == "processed");
    eventually(SOON, "every event took effect", || outbox(place).len() == sent.get());
}

/// A source that was moved to another tenant: the older events under its name belong to the former one.
fn events_of_another_tenant_are_left_alone_and_delay_no_other(place: &Place) {
    const DUE: usize = 70;
    let (broken, mended) = (Endpoint::that([Does::Answers(500); DUE + 1]), Endpoint::that([Does::Answers(202)]));
    let (to_broken, to_mended) = (forward(&broken.url()), forward(&mended.url()));
    let owned = |tenant, url| {
        [
            ("SEMEL_WEBHOOKS_STRIPE_TENANT", tenant),
            ("SEMEL_WEBHOOKS_STRIPE_HANDLERS", url),
            ("SEMEL_WEBHOOKS_STRIPE_BACKOFF", "1ms"),
        ]
    };
    let server = start(place, &owned("default", to_broken.as_str()));
    let ids: Vec<_> = (0..DUE).map(|i| format!("evt_{i}")).collect();
    for id in &ids {
        assert_eq!(deliver(&server, &event(id, 1_700_000_000, "a")).status, 500);
    }
    drop(server);
    let before: Vec<_> = ids.iter().map(|id| stored(place, "stripe", id)).collect();
    let server = start(place, &owned("acme", to_broken.as_str()));
    assert_eq!(deliver(&server, &event("evt_0", 1_700_000_000, "a")).status, 500, "to acme it is new");
    drop(server);
    let _server = start_as(place, "worker", &owned("acme", to_mended.as_str()));
    mended.is_called(1);
    let theirs = "SELECT state FROM semel_operations WHERE tenant = 'acme' AND kind = 'stripe'";
    eventually(SOON, "acme's event is completed", || rows(place, theirs) == ["completed"]);
    assert_eq!(mended.calls().len(), 1);
    assert_eq!(ids.iter().map(|id| stored(place, "stripe", id)).collect::<Vec<_>>(), before);
}

/// More events wait for it than there are seats. Those of another endpoint of the same source go on; when it is
/// reachable again, so do its own.
fn an_unreachable_endpoint_is_paused_and_counts_no_attempt(place: &Place) {
    const AWAY: usize = 8;
    let address = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let there = Endpoint::that([Does::Answers(500)]);
    let rules = format!("away=http://{address}/in; *={}", there.url());
    let variables = [
        ("SEMEL_WEBHOOKS_STRIPE_HANDLERS", rules.as_str()),
        ("SEMEL_WEBHOOKS_STRIPE_CONCURRENCY", "2"),
        ("SEMEL_WEBHOOKS_STRIPE_BACKOFF", "1ms"),
        ("SEMEL_WEBHOOKS_STRIPE_MAX_ATTEMPTS", "2"),
    ];
    let server = start_as(place, "api,worker", &variables);
    for i in 0..AWAY {
        let mut sent = event(&format!("evt_{i}"), 1_700_000_000, "a");
        sent["type"] = json!("away");
        assert_eq!(status(&deliver(&server, &sent)), "accepted");
    }
    // Long enough for each to be due again, and for the worker to notice.
    thread::sleep(Duration::from_secs(3));
    assert_eq!(deliver(&server, &event("evt_last", 1_700_000_000, "a")).status, 500);
    completes(place, "stripe", "evt_last");
    for i in 0..AWAY {
        let waits = stored(place, "stripe", &format!("evt_{i}")).unwrap();
        assert_eq!((waits.failures, waits.crashes), (0, 0), "evt_{i}");
        assert!(waits.error.is_some_and(|error| error.starts_with("the endpoint cannot be reached")), "evt_{i}");
    }
    let back = Endpoint::on(TcpListener::bind(address).unwrap(), []);
    for i in 0..AWAY {
        completes(place, "stripe", &format!("evt_{i}"));
        assert_eq!(stored(place, "stripe", &format!("evt_{i}")).unwrap().failures, 0, "evt_{i}");
    }
    assert_eq!(back.calls().len(), AWAY);
}

/// Waits until an event of a kind is completed.
fn completes(place: &Place, kind: &str, id: &str) {
    let what = format!("{id} of {kind} is completed");
    eventually(SOON, &what, || stored(place, kind, id).unwrap().state == State::Completed);
}

/// With the default number of seats, all of them taken by the worker.
fn a_source_without_free_seats_blocks_no_other(place: &Place) {
    const SEATS: usize = 64;
    const DUE: usize = SEATS + 6;
    let (broken, slow) = (Endpoint::that([Does::Answers(500); DUE]), Endpoint::that([Does::Waits; DUE]));
    let quick = Endpoint::that([Does::Answers(500)]);
    let (to_broken, to_slow, to_quick) = (forward(&broken.url()), forward(&slow.url()), forward(&quick.url()));
    let backoff = ("SEMEL_WEBHOOKS_STRIPE_BACKOFF", "1ms");
    let server = start(place, &[backoff, ("SEMEL_WEBHOOKS_STRIPE_HANDLERS", &to_broken)]);
    for i in 0..DUE {
        assert_eq!(deliver(&server, &event(&format!("evt_{i}"), 1_700_000_000, "a")).status, 500);
    }
    drop(server);
    let variables = [
        backoff,
        ("SEMEL_WEBHOOKS_STRIPE_HANDLERS", to_slow.as_str()),
        ("SEMEL_WEBHOOKS_OTHER_KIND", "stripe"),
        ("SEMEL_WEBHOOKS_OTHER_SECRETS", SECRET),
        ("SEMEL_WEBHOOKS_OTHER_HANDLERS", to_quick.as_str()),
        ("SEMEL_WEBHOOKS_OTHER_BACKOFF", "1ms"),
    ];
    let server = start_as(place, "api,worker", &variables);
    slow.is_called(SEATS);
    let last = event("evt_last", 1_700_000_000, "a");
    assert_eq!(deliver_to(&server, "/webhooks/other", &last).status, 500);
    quick.is_called(2);
    assert_eq!(slow.calls().len(), SEATS, "no more than there are seats");
    slow.let_go();
    for i in 0..DUE {
        completes(place, "stripe", &format!("evt_{i}"));
    }
    assert_eq!(slow.calls().len(), DUE);
}

/// With one seat, which is taken until all of them are due.
fn a_function_with_a_long_backlog_blocks_no_other(place: &Place) {
    const DUE: usize = 12;
    let endpoint = Endpoint::that([Does::Waits]);
    let url = forward(&endpoint.url());
    let variables = [
        ("SEMEL_WEBHOOKS_STRIPE_HANDLERS", url.as_str()),
        ("SEMEL_WEBHOOKS_STRIPE_CONCURRENCY", "1"),
        ("SEMEL_WEBHOOKS_STRIPE_ASYNC", "true"),
        ("SEMEL_WEBHOOKS_STRIPE_DEDUP_PER_FUNCTION", "true"),
        ("SEMEL_WEBHOOKS_STRIPE_FUNCTIONS", "much,little,z.body"),
    ];
    let server = start_as(place, "api,worker", &variables);
    let accept = |function: &str, i: usize| {
        let sent = event(&format!("evt_{i}"), 1_700_000_000, "a");
        assert_eq!(status(&deliver_to(&server, &format!("/webhooks/stripe/{function}"), &sent)), "accepted");
    };
    (0..DUE).for_each(|i| accept("much", i));
    // Before and after it in the order of names, and one named like a body claim.
    let others = ["little", "z.body"];
    others.iter().for_each(|function| accept(function, 0));
    endpoint.is_called(1);
    endpoint.let_go();
    for i in 0..DUE {
        completes(place, "stripe.much", &format!("evt_{i}"));
    }
    let calls = endpoint.calls();
    assert_eq!(calls.len(), DUE + others.len());
    for function in others {
        let turn = calls.iter().position(|call| call.header("semel-webhook-function") == function);
        assert!(turn.is_some_and(|turn| turn <= 3), "{function} came as number {turn:?}");
        completes(place, &format!("stripe.{function}"), "evt_0");
    }
}

/// With two seats, and more of one function due than that.
fn a_slow_function_leaves_seats_for_others(place: &Place) {
    const DUE: usize = 6;
    let (broken, slow) = (Endpoint::that([Does::Answers(500); DUE + 1]), Endpoint::that([Does::Waits; DUE + 1]));
    let (to_broken, to_slow) = (forward(&broken.url()), forward(&slow.url()));
    let variables = |url| {
        [
            ("SEMEL_WEBHOOKS_STRIPE_HANDLERS", url),
            ("SEMEL_WEBHOOKS_STRIPE_CONCURRENCY", "2"),
            ("SEMEL_WEBHOOKS_STRIPE_BACKOFF", "1ms"),
            ("SEMEL_WEBHOOKS_STRIPE_DEDUP_PER_FUNCTION", "true"),
            ("SEMEL_WEBHOOKS_STRIPE_FUNCTIONS", "much,zero"),
        ]
    };
    let server = start(place, &variables(to_broken.as_str()));
    for (function, i) in (0..DUE).map(|i| ("much", i)).chain([("zero", 0)]) {
        let sent = event(&format!("evt_{i}"), 1_700_000_000, "a");
        assert_eq!(deliver_to(&server, &format!("/webhooks/stripe/{function}"), &sent).status, 500);
    }
    drop(server);
    let _server = start_as(place, "worker", &variables(to_slow.as_str()));
    slow.is_called(2);
    let calls = slow.calls();
    let mut begun: Vec<_> = calls.iter().map(|call| call.header("semel-webhook-function")).collect();
    begun.sort_unstable();
    assert_eq!(begun, ["much", "zero"]);
    slow.let_go();
    (0..DUE).for_each(|i| completes(place, "stripe.much", &format!("evt_{i}")));
    completes(place, "stripe.zero", "evt_0");
}

fn events_of_a_source_that_is_gone_wait_untouched_until_it_is_back(place: &Place) {
    const DUE: usize = 40;
    let endpoint = Endpoint::that([Does::Answers(500); DUE + 1]);
    let url = forward(&endpoint.url());
    let gone = [
        ("SEMEL_WEBHOOKS_GONE_KIND", "stripe"),
        ("SEMEL_WEBHOOKS_GONE_SECRETS", SECRET),
        ("SEMEL_WEBHOOKS_GONE_HANDLERS", url.as_str()),
        ("SEMEL_WEBHOOKS_GONE_BACKOFF", "1ms"),
    ];
    let there = [("SEMEL_WEBHOOKS_STRIPE_HANDLERS", url.as_str()), ("SEMEL_WEBHOOKS_STRIPE_BACKOFF", "1ms")];
    let ids: Vec<_> = (0..DUE).map(|i| format!("evt_{i}")).collect();
    let server = start(place, &gone);
    for id in &ids {
        assert_eq!(deliver_to(&server, "/webhooks/gone", &event(id, 1_700_000_000, "a")).status, 500);
    }
    drop(server);
    let before: Vec<_> = ids.iter().map(|id| stored(place, "gone", id)).collect();
    let server = start_as(place, "api,worker", &there);
    assert_eq!(deliver(&server, &event("evt_last", 1_700_000_000, "a")).status, 500);
    completes(place, "stripe", "evt_last");
    drop(server);
    assert_eq!(ids.iter().map(|id| stored(place, "gone", id)).collect::<Vec<_>>(), before);
    let _server = start_as(place, "api,worker", &[&there[..], &gone].concat());
    ids.iter().for_each(|id| completes(place, "gone", id));
    assert_eq!(endpoint.calls().len(), 2 * DUE + 2);
}
