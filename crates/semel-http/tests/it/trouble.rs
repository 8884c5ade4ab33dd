//! Lost leases, services without an answer, stopping ledgers, damaged rows.

use std::{io, time::Duration};

use axum::{
    Router,
    error_handling::HandleError,
    extract::{FromRequestParts as _, Request},
    http::StatusCode,
    response::{IntoResponse as _, Response},
};
use futures_util::FutureExt as _;
use semel::{OnLost, State};
use semel_http::{Idempotency, Route, Transaction};
use semel_store::{Database, broken, on};
use semel_testkit::Kind;
use tower::{Layer as _, service_fn};

use crate::{
    client::{keyed, post, soon},
    shop::{Shop, TENANT, on_both_databases, secs, serve},
};

on_both_databases!(
    a_lost_lease_is_in_doubt_under_hold,
    a_lost_lease_is_taken_over_under_rerun,
    a_service_error_is_in_doubt_under_hold_and_failed_otherwise,
    a_stop_waits_for_requests_in_flight,
    a_stop_does_not_wait_for_ever,
    a_stop_answers_waiting_repeats,
    an_invalid_tenant_name_is_500_and_not_repeated_in_the_answer,
    a_row_damaged_during_its_run_is_503_outcome_unknown,
    a_decode_error_in_a_handlers_own_table_is_an_ordinary_failure,
);

async fn a_lost_lease_is_in_doubt_under_hold(kind: Kind) {
    let shop = Shop::open(kind).await;
    let client = shop.serve(Route::leased()).await;
    let other = Idempotency::for_everyone(shop.lab.ledger_of("other node").await, TENANT);
    let other = serve(shop.router(&other, Route::leased())).await;
    let late = client.spawn(&keyed("k").header("X-Hold", "1"));
    shop.desk.arrival().await;
    shop.lab.pass(secs(31));
    other.send(&keyed("k")).await.is_problem(409, "in-doubt");
    shop.desk.let_go();
    soon(late).await.unwrap().is_problem(409, "lease-lost");
    client.send(&keyed("k")).await.is_problem(409, "in-doubt");
    assert_eq!(shop.desk.runs(), 1);
}

async fn a_lost_lease_is_taken_over_under_rerun(kind: Kind) {
    let shop = Shop::open(kind).await;
    let client = shop.serve(Route::leased().on_lost(OnLost::Rerun)).await;
    let other = Idempotency::for_everyone(shop.lab.ledger_of("other node").await, TENANT);
    let other = serve(shop.router(&other, Route::leased().on_lost(OnLost::Rerun))).await;
    let late = client.spawn(&keyed("k").header("X-Hold", "1"));
    shop.desk.arrival().await;
    shop.lab.pass(secs(31));
    // A lost lease counts as a crash, so the next attempt backs off.
    let early = other.send(&keyed("k")).await;
    if early.status == 409 {
        early.is_problem(409, "backing-off");
        shop.lab.pass(secs(5));
        assert_eq!(other.send(&keyed("k")).await.header("x-run").as_deref(), Some("2"));
    }
    shop.desk.let_go();
    let late = soon(late).await.unwrap();
    late.is_problem(409, "lease-lost");
    let again = client.send(&keyed("k")).await;
    assert_eq!((again.is_replay(), again.header("x-run").as_deref()), (true, Some("2")));
}

async fn a_service_error_is_in_doubt_under_hold_and_failed_otherwise(kind: Kind) {
    let shop = Shop::open(kind).await;
    let silent = service_fn(|_: Request| async { Err::<Response, _>(io::Error::other("timed out")) });
    let told = |error: io::Error| async move { (StatusCode::GATEWAY_TIMEOUT, error.to_string()) };
    let app = |route: Route| {
        let layered = shop.once.layer(route).layer(silent);
        Router::new().route_service("/orders", HandleError::new(layered, told))
    };
    let client = serve(app(Route::leased())).await;
    let first = client.send(&keyed("hold")).await;
    assert_eq!((first.status, first.text().as_str()), (504, "timed out"), "the service's own error is passed on");
    assert_eq!(shop.operation("hold").await.unwrap().state, State::InDoubt);
    client.send(&keyed("hold")).await.is_problem(409, "in-doubt");
    assert_eq!(client.send(&post("/orders")).await.status, 504);
    for (key, route) in [("rerun", Route::leased().on_lost(OnLost::Rerun)), ("atomic", Route::atomic())] {
        let client = serve(app(route)).await;
        assert_eq!(client.send(&keyed(key)).await.status, 504);
        assert_eq!(shop.operation(key).await.unwrap().state, State::Failed);
        assert_eq!(client.send(&post("/orders")).await.status, 504);
    }
}

/// Starts a stop: from now on new requests are refused.
fn begin_to_stop(shop: &Shop) -> tokio::task::JoinHandle<()> {
    let ledger = shop.ledger.clone();
    let mut stop = Box::pin(async move { ledger.stop(secs(15)).await });
    assert!((&mut stop).now_or_never().is_none());
    tokio::spawn(stop)
}

async fn a_stop_waits_for_requests_in_flight(kind: Kind) {
    for route in [Route::leased(), Route::atomic()] {
        let shop = Shop::open(kind).await;
        let client = shop.serve(route).await;
        let first = client.spawn(&keyed("k").header("X-Hold", "1"));
        shop.desk.arrival().await;
        let stopped = begin_to_stop(&shop);
        let refused = client.send(&keyed("new")).await;
        refused.is_problem(503, "store-unavailable");
        assert_eq!(refused.header("retry-after").as_deref(), Some("1"));
        assert!(!stopped.is_finished());
        shop.desk.let_go();
        assert_eq!(first.await.unwrap().status, 201);
        soon(stopped).await.unwrap();
        assert_eq!(shop.desk.runs(), 1);
    }
}

async fn a_stop_does_not_wait_for_ever(kind: Kind) {
    for (route, status, problem, state) in [
        (Route::leased(), 409, "in-doubt", Some(State::InDoubt)),
        (Route::leased().on_lost(OnLost::Rerun), 503, "store-unavailable", None),
        (Route::atomic(), 503, "store-unavailable", None),
    ] {
        let shop = Shop::open(kind).await;
        let client = shop.serve(route).await;
        let first = client.spawn(&keyed("k").header("X-Hold", "1"));
        shop.desk.arrival().await;
        soon(shop.ledger.stop(Duration::ZERO)).await;
        let told = first.await.unwrap();
        told.is_problem(status, problem);
        let in_doubt = state.is_some();
        assert_eq!(told.json()["retryable"], !in_doubt);
        let detail = told.json()["detail"].as_str().unwrap().to_owned();
        assert_eq!(detail.contains("may or may not have taken effect"), in_doubt, "{detail}");
        assert_eq!(shop.operation("k").await.map(|row| row.state), state);
        assert_eq!(shop.effects().await.len(), 0);
    }
}

async fn a_stop_answers_waiting_repeats(kind: Kind) {
    let shop = Shop::open(kind).await;
    let client = shop.serve(Route::leased()).await;
    let first = client.spawn(&keyed("k").header("X-Hold", "1"));
    shop.desk.arrival().await;
    let waiter = client.spawn(&keyed("k").header("Prefer", "wait=30"));
    tokio::time::sleep(Duration::from_millis(50)).await;
    let stopped = begin_to_stop(&shop);
    let waiter = soon(waiter).await.unwrap();
    // 409 if it was waiting, 503 if it arrived after the stop began.
    assert!([409, 503].contains(&waiter.status), "{waiter:?}");
    shop.desk.let_go();
    assert_eq!(first.await.unwrap().status, 201);
    soon(stopped).await.unwrap();
}

async fn an_invalid_tenant_name_is_500_and_not_repeated_in_the_answer(kind: Kind) {
    let shop = Shop::open(kind).await;
    let once = Idempotency::for_everyone(shop.ledger.clone(), "not/a/tenant");
    let client = serve(shop.router(&once, Route::leased())).await;
    let answer = client.send(&keyed("k")).await;
    answer.is_problem(500, "internal");
    assert!(!answer.text().contains("tenant"));
    assert_eq!((shop.desk.runs(), shop.operations().await), (0, 0));
}

async fn damage(shop: &Shop, key: &str) {
    let sql = format!("UPDATE semel_operations SET fingerprint = substr(fingerprint, 1, 1) WHERE key = '{key}'");
    assert_eq!(shop.lab.execute(&sql).await.unwrap(), 1);
}

async fn a_row_damaged_during_its_run_is_503_outcome_unknown(kind: Kind) {
    let shop = Shop::open(kind).await;
    let client = shop.serve(Route::leased()).await;
    // All three are settled as failed, which reads the row.
    for (key, status) in [("fails", 500), ("waits", 503), ("doubts", 504)] {
        let first = client.spawn(&keyed(key).header("X-Hold", "1").gets(status));
        shop.desk.arrival().await;
        damage(&shop, key).await;
        shop.desk.let_go();
        let told = soon(first).await.unwrap();
        told.is_problem(503, "outcome-unknown");
        assert!(told.text().contains("was executed") && !told.text().contains("purge"), "{}", told.text());
        assert_eq!(told.header("retry-after").as_deref(), Some("1"));
    }
    // At the claim nothing has run yet, and the damaged row is known.
    let other = Idempotency::for_everyone(shop.lab.ledger_of("other node").await, TENANT);
    let other = serve(shop.router(&other, Route::leased())).await;
    let again = other.send(&keyed("fails")).await;
    again.is_problem(500, "row-unreadable");
    assert!(again.text().contains(r#""id":"fails""#), "{}", again.text());
    assert_eq!(shop.desk.runs(), 3);
}

async fn a_decode_error_in_a_handlers_own_table_is_an_ordinary_failure(kind: Kind) {
    let shop = Shop::open(kind).await;
    let handler = move |request: Request| async move {
        let (mut head, _) = request.into_parts();
        let Transaction(tx) = Transaction::<Database>::from_request_parts(&mut head, &()).await.unwrap();
        let mut held = tx.connection().await.unwrap();
        // A text where the handler expects a number.
        let sql = "SELECT CAST('many' AS TEXT)";
        let read = on!(held.get().unwrap(), c => sqlx::query_scalar::<_, i64>(sql).fetch_one(c).await.map_err(broken));
        assert!(matches!(read, Err(semel::Error::Refused(_))), "{read:?}");
        StatusCode::INTERNAL_SERVER_ERROR.into_response()
    };
    let client = shop.serve_with(Route::atomic(), handler).await;
    assert_eq!(client.send(&keyed("k")).await.status, 500);
    assert_eq!(shop.operation("k").await.unwrap().state, State::Failed, "it is retried like any failure");
}

/// SQLite only: PostgreSQL does not keep the clock and the fences in a row.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_missing_meta_row_is_500_and_suggests_no_purge() {
    let shop = Shop::open(Kind::Sqlite).await;
    let client = shop.serve(Route::leased()).await;
    assert_eq!(client.send(&keyed("k")).await.status, 201);
    shop.lab.execute("DELETE FROM semel_meta").await.unwrap();
    let told = client.send(&keyed("new")).await;
    told.is_problem(500, "internal");
    assert!(!told.text().contains("purge"), "{}", told.text());
    assert_eq!(shop.desk.runs(), 1);
}
