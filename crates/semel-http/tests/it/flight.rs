//! Equal requests at the same time.

use std::time::{Duration, Instant};

use axum::response::IntoResponse as _;
use semel::{State, prelude::*};
use semel_http::{Idempotency, Route};
use semel_testkit::Kind;

use crate::{
    client::{Ask, eventually, keyed, soon},
    shop::{Shop, TENANT, on_both_databases, secs, serve},
};

on_both_databases!(
    a_concurrent_repeat_is_409_in_flight,
    a_repeat_with_prefer_wait_gets_the_first_answer,
    a_route_can_make_repeats_wait_by_default,
    a_wait_is_no_longer_than_the_route_allows,
    prefer_wait_can_shorten_the_wait_of_the_route,
    another_payload_is_refused_while_the_first_runs,
    when_the_first_is_released_one_waiter_runs,
    a_waiter_that_disconnects_changes_nothing,
    a_waiting_repeat_is_counted_once,
    concurrent_repeats_make_one_order,
    concurrent_repeats_at_two_nodes_make_one_order,
    a_repeat_at_another_node_waits_and_is_replayed,
    a_client_that_disconnects_does_not_stop_the_handler,
    a_timeout_outside_of_the_layer_does_not_stop_the_handler,
);

fn held(key: &str) -> Ask {
    keyed(key).header("X-Hold", "1")
}

fn waiting(key: &str, seconds: u32) -> Ask {
    held(key).header("Prefer", format!("respond-async, Wait=\"{seconds}\" ; x=1"))
}

async fn a_concurrent_repeat_is_409_in_flight(kind: Kind) {
    let shop = Shop::open(kind).await;
    let client = shop.serve(Route::leased()).await;
    let first = client.spawn(&held("k"));
    shop.desk.arrival().await;
    for prefer in ["", "wait=0", "wait", "wait=-1", "wait=abc", "return=minimal"] {
        let second = client.send(&keyed("k").header("Prefer", prefer)).await;
        second.is_problem(409, "in-flight");
        let after: u64 = second.header("retry-after").unwrap().parse().unwrap();
        assert!((1..=30).contains(&after));
        let said = second.json();
        assert_eq!((said["retryable"].as_bool(), said["retry_after"].as_u64()), (Some(true), Some(after)));
        assert_eq!(said["first_seen"], shop.operation("k").await.unwrap().created_at.to_string());
        assert!(!second.is_replay());
    }
    shop.desk.let_go();
    assert_eq!(first.await.unwrap().status, 201);
    assert!(client.send(&keyed("k")).await.is_replay());
    assert_eq!(shop.desk.runs(), 1);
}

async fn a_repeat_with_prefer_wait_gets_the_first_answer(kind: Kind) {
    let shop = Shop::open(kind).await;
    let client = shop.serve(Route::leased()).await;
    let first = client.spawn(&held("k"));
    shop.desk.arrival().await;
    let second = client.spawn(&waiting("k", 15));
    tokio::time::sleep(Duration::from_millis(50)).await;
    assert!(!second.is_finished());
    shop.desk.let_go();
    let (first, second) = (first.await.unwrap(), second.await.unwrap());
    assert_eq!((first.is_replay(), second.is_replay()), (false, true));
    assert_eq!((first.status, first.body), (second.status, second.body));
    assert_eq!(shop.desk.runs(), 1);
}

async fn a_route_can_make_repeats_wait_by_default(kind: Kind) {
    let shop = Shop::open(kind).await;
    let client = shop.serve(Route::leased().wait(secs(15))).await;
    let first = client.spawn(&held("k"));
    shop.desk.arrival().await;
    let second = client.spawn(&held("k"));
    // With wait=0 a repeat does not wait.
    client.send(&waiting("k", 0)).await.is_problem(409, "in-flight");
    assert!(!second.is_finished());
    shop.desk.let_go();
    assert!(second.await.unwrap().is_replay());
    first.await.unwrap();
}

async fn a_wait_is_no_longer_than_the_route_allows(kind: Kind) {
    let shop = Shop::open(kind).await;
    let client = shop.serve(Route::leased().longest_wait(Duration::from_millis(100))).await;
    let first = client.spawn(&held("k"));
    shop.desk.arrival().await;
    let row = shop.operation("k").await;
    let begun = Instant::now();
    client.send(&waiting("k", 4_000_000_000)).await.is_problem(409, "in-flight");
    assert!((Duration::from_millis(100)..secs(20)).contains(&begun.elapsed()), "{:?}", begun.elapsed());
    assert_eq!(shop.operation("k").await, row, "a waiter changes nothing");
    shop.desk.let_go();
    assert_eq!(first.await.unwrap().status, 201);
}

async fn prefer_wait_can_shorten_the_wait_of_the_route(kind: Kind) {
    let shop = Shop::open(kind).await;
    let client = shop.serve(Route::leased().wait(secs(30))).await;
    let first = client.spawn(&held("k"));
    shop.desk.arrival().await;
    let begun = Instant::now();
    client.send(&waiting("k", 1)).await.is_problem(409, "in-flight");
    assert!((secs(1)..secs(20)).contains(&begun.elapsed()), "{:?}", begun.elapsed());
    shop.desk.let_go();
    first.await.unwrap();
}

async fn another_payload_is_refused_while_the_first_runs(kind: Kind) {
    let shop = Shop::open(kind).await;
    let client = shop.serve(Route::leased()).await;
    let first = client.spawn(&held("k"));
    shop.desk.arrival().await;
    client.send(&waiting("k", 20).body("other")).await.is_problem(422, "payload-mismatch");
    shop.desk.let_go();
    assert_eq!(first.await.unwrap().status, 201);
    assert_eq!(shop.desk.runs(), 1);
}

async fn when_the_first_is_released_one_waiter_runs(kind: Kind) {
    let shop = Shop::open(kind).await;
    let client = shop.serve(Route::leased()).await;
    let first = client.spawn(&held("k").gets(429));
    shop.desk.arrival().await;
    let waiters: Vec<_> = (0..5).map(|_| client.spawn(&waiting("k", 15))).collect();
    tokio::time::sleep(Duration::from_millis(100)).await;
    shop.desk.let_go();
    assert_eq!(first.await.unwrap().status, 429);
    shop.desk.arrival().await;
    shop.desk.let_go();
    let mut replays = 0;
    for waiter in waiters {
        let answer = soon(waiter).await.unwrap();
        assert_eq!((answer.status, answer.header("x-run").as_deref()), (201, Some("2")), "{answer:?}");
        replays += usize::from(answer.is_replay());
    }
    assert_eq!((shop.desk.runs(), replays), (2, 4));
}

async fn a_waiter_that_disconnects_changes_nothing(kind: Kind) {
    let shop = Shop::open(kind).await;
    let client = shop.serve(Route::leased()).await;
    let first = client.spawn(&held("k"));
    shop.desk.arrival().await;
    let waiter = client.start(&waiting("k", 15).bytes()).await;
    tokio::time::sleep(Duration::from_millis(50)).await;
    drop(waiter);
    shop.desk.let_go();
    assert_eq!(first.await.unwrap().status, 201);
    assert!(client.send(&keyed("k")).await.is_replay());
    assert_eq!(shop.desk.runs(), 1);
}

async fn a_waiting_repeat_is_counted_once(kind: Kind) {
    let shop = Shop::open(kind).await;
    let client = shop.serve(Route::leased()).await;
    let first = client.spawn(&held("k"));
    shop.desk.arrival().await;
    let second = client.spawn(&waiting("k", 15));
    tokio::time::sleep(Duration::from_millis(50)).await;
    shop.desk.let_go();
    assert!(second.await.unwrap().is_replay());
    first.await.unwrap();
    shop.ledger.flush().await;
    let id = shop.operation("k").await.unwrap().id;
    let (_, repeats) = shop.ledger.store().journal(id).await.unwrap();
    assert_eq!(repeats.iter().map(|(_, seen)| seen.count).sum::<i64>(), 1);
}

/// Checks that all answers are equal, and that exactly one is not a replay.
async fn one_first(shop: &Shop, answers: Vec<tokio::task::JoinHandle<crate::client::Answer>>) {
    let mut firsts = 0;
    let mut bodies = std::collections::BTreeSet::new();
    for answer in answers {
        let answer = soon(answer).await.unwrap();
        assert_eq!(answer.status, 201, "{answer:?}");
        firsts += usize::from(!answer.is_replay());
        bodies.insert((answer.body.clone(), answer.header("x-run")));
    }
    assert_eq!((firsts, bodies.len(), shop.desk.runs()), (1, 1, 1));
}

async fn concurrent_repeats_make_one_order(kind: Kind) {
    for route in [Route::leased(), Route::atomic()] {
        let shop = Shop::open(kind).await;
        let client = shop.serve(route).await;
        one_first(&shop, (0..40).map(|_| client.spawn(&keyed("k").header("Prefer", "wait=15"))).collect()).await;
    }
}

async fn concurrent_repeats_at_two_nodes_make_one_order(kind: Kind) {
    let shop = Shop::open(kind).await;
    let other = Idempotency::for_everyone(shop.lab.ledger_of("other node").await, TENANT);
    let nodes = [shop.serve(Route::atomic()).await, serve(shop.router(&other, Route::atomic())).await];
    one_first(&shop, (0..40).map(|i| nodes[i % 2].spawn(&keyed("k").header("Prefer", "wait=15"))).collect()).await;
    assert_eq!(shop.effects().await, ["k"]);
}

async fn a_repeat_at_another_node_waits_and_is_replayed(kind: Kind) {
    let shop = Shop::open(kind).await;
    let other = Idempotency::for_everyone(shop.lab.ledger_of("other node").await, TENANT);
    let nodes = [shop.serve(Route::leased()).await, serve(shop.router(&other, Route::leased())).await];
    let first = nodes[0].spawn(&held("k"));
    shop.desk.arrival().await;
    nodes[1].send(&keyed("k")).await.is_problem(409, "in-flight");
    nodes[1].send(&keyed("k").body("x")).await.is_problem(422, "payload-mismatch");
    let waiter = nodes[1].spawn(&waiting("k", 15));
    tokio::time::sleep(Duration::from_millis(50)).await;
    shop.desk.let_go();
    assert_eq!(first.await.unwrap().status, 201);
    assert!(soon(waiter).await.unwrap().is_replay());
    assert!(nodes[1].send(&keyed("k")).await.is_replay());
}

async fn a_client_that_disconnects_does_not_stop_the_handler(kind: Kind) {
    for (route, atomic) in [(Route::leased(), false), (Route::atomic(), true)] {
        let shop = Shop::open(kind).await;
        let client = shop.serve(route).await;
        let first = client.start(&held("k").bytes()).await;
        shop.desk.arrival().await;
        drop(first);
        if (kind, atomic) != (Kind::Sqlite, true) {
            // On SQLite an open transaction holds the only writer, and a claim would wait for it.
            client.send(&keyed("k")).await.is_problem(409, "in-flight");
        }
        shop.desk.let_go();
        eventually(|| async { shop.operation("k").await.is_some_and(|op| op.state == State::Completed) }).await;
        let again = client.send(&keyed("k")).await;
        assert!(again.is_replay() && again.text() == "took ");
        assert_eq!(shop.desk.runs(), 1);
    }
}

async fn a_timeout_outside_of_the_layer_does_not_stop_the_handler(kind: Kind) {
    let shop = Shop::open(kind).await;
    let limited = axum::middleware::from_fn(|request: axum::extract::Request, next: axum::middleware::Next| async {
        match tokio::time::timeout(Duration::from_millis(100), next.run(request)).await {
            Ok(response) => response,
            Err(_) => axum::http::StatusCode::GATEWAY_TIMEOUT.into_response(),
        }
    });
    let client = serve(shop.router(&shop.once, Route::leased()).layer(limited)).await;
    assert_eq!(client.send(&held("k")).await.status, 504);
    shop.desk.let_go();
    eventually(|| async { client.send(&keyed("k")).await.is_replay() }).await;
    assert_eq!(shop.desk.runs(), 1);
}
