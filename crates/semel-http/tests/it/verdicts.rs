//! Which answers are final.

use axum::{extract::Request, http::StatusCode, response::IntoResponse as _};
use semel::{Policy, State};
use semel_http::{Route, Verdict};
use semel_testkit::Kind;

use crate::{
    client::keyed,
    shop::{Shop, at_once, on_both_databases, secs},
};

on_both_databases!(
    final_answers_are_kept,
    statuses_408_409_425_and_429_free_the_key,
    a_failure_backs_off_and_is_tried_again,
    max_attempts_limits_failed_attempts,
    a_verdict_of_the_handler_overrides_the_status,
    a_verdict_of_the_route_overrides_the_default,
    a_panic_is_in_doubt_and_not_run_again,
    a_status_of_no_known_class_is_in_doubt,
);

async fn final_answers_are_kept(kind: Kind) {
    for route in [Route::leased(), Route::atomic()] {
        let shop = Shop::open(kind).await;
        let client = shop.serve(route).await;
        for status in [200, 201, 202, 204, 301, 303, 304, 400, 401, 403, 404, 405, 410, 415, 422, 451] {
            let key = status.to_string();
            let first = client.send(&keyed(&key).gets(status)).await;
            assert_eq!((first.status, first.is_replay()), (status, false));
            let again = client.send(&keyed(&key).gets(200)).await;
            assert_eq!((again.status, again.is_replay()), (status, true));
            assert_eq!((again.header("x-run"), again.body), (first.header("x-run"), first.body));
        }
        assert_eq!(shop.desk.runs(), 16);
    }
}

async fn statuses_408_409_425_and_429_free_the_key(kind: Kind) {
    for route in [Route::leased(), Route::atomic()] {
        let shop = Shop::open(kind).await;
        let client = shop.serve(route).await;
        for status in [408, 409, 425, 429] {
            let key = status.to_string();
            let first = client.send(&keyed(&key).gets(status)).await;
            assert_eq!((first.status, first.text().as_str()), (status, "took "), "the handler's own answer");
            assert_eq!(shop.operation(&key).await, None);
            // Even another payload may use the key now.
            assert_eq!(client.send(&keyed(&key).body("other")).await.status, 201);
        }
        assert_eq!(shop.desk.runs(), 8);
    }
}

async fn a_failure_backs_off_and_is_tried_again(kind: Kind) {
    for route in [Route::leased(), Route::atomic()] {
        let shop = Shop::open(kind).await;
        let client = shop.serve(route).await;
        for status in [500, 501, 502, 503, 504, 599] {
            let key = status.to_string();
            let first = client.send(&keyed(&key).gets(status)).await;
            assert_eq!((first.status, first.text().as_str()), (status, "took "), "the handler's own answer");
            let row = shop.operation(&key).await.unwrap();
            assert_eq!((row.state, row.error.unwrap().contains(&key)), (State::Failed, true));
            let early = client.send(&keyed(&key)).await;
            early.is_problem(409, "backing-off");
            assert_eq!(early.header("retry-after").as_deref(), Some("1"));
            assert_eq!(early.json()["first_seen"], row.created_at.to_string());
            client.send(&keyed(&key).body("other")).await.is_problem(422, "payload-mismatch");
            shop.lab.pass(secs(1));
            let second = client.send(&keyed(&key)).await;
            assert_eq!((second.status, second.is_replay()), (201, false));
            assert!(client.send(&keyed(&key)).await.is_replay());
        }
        assert_eq!(shop.desk.runs(), 12);
    }
}

async fn max_attempts_limits_failed_attempts(kind: Kind) {
    let shop = Shop::open(kind).await;
    let policy = Policy { max_attempts: Some(2), ..at_once(Policy::default()) };
    let client = shop.serve(Route::leased().policy(policy)).await;
    for _ in 0..2 {
        assert_eq!(client.send(&keyed("k").gets(500)).await.status, 500);
    }
    client.send(&keyed("k")).await.is_problem(409, "attempts-exhausted");
    assert_eq!(shop.desk.runs(), 2);
}

async fn a_verdict_of_the_handler_overrides_the_status(kind: Kind) {
    let shop = Shop::open(kind).await;
    let desk = shop.desk.clone();
    let handler = move |request: Request| {
        let run = desk.count();
        async move {
            let verdict = match request.headers()["x-verdict"].as_bytes() {
                b"final" => Verdict::Complete,
                b"release" => Verdict::Release,
                b"doubt" => Verdict::Doubt,
                _ => Verdict::Fail,
            };
            let status = request.headers()["x-status"].to_str().unwrap().parse::<u16>().unwrap();
            let mut response = (StatusCode::from_u16(status).unwrap(), run.to_string()).into_response();
            response.extensions_mut().insert(verdict);
            response
        }
    };
    let client = shop.serve_with(Route::leased(), handler).await;
    let order = |key, status, verdict: &str| keyed(key).gets(status).header("X-Verdict", verdict);
    for (key, status, verdict, state) in [
        ("a", 500, "final", Some(State::Completed)),
        ("b", 429, "final", Some(State::Completed)),
        ("c", 200, "release", None),
        ("d", 200, "fail", Some(State::Failed)),
        ("e", 200, "doubt", Some(State::InDoubt)),
    ] {
        let first = client.send(&order(key, status, verdict)).await;
        assert_eq!((first.status, first.is_replay()), (status, false), "the first caller gets the handler's answer");
        assert_eq!(shop.operation(key).await.map(|row| row.state), state, "{verdict}");
    }
    let again = client.send(&order("a", 500, "final")).await;
    assert_eq!((again.status, again.text().as_str(), again.is_replay()), (500, "1", true));
    client.send(&order("e", 200, "final")).await.is_problem(409, "in-doubt");
}

async fn a_verdict_of_the_route_overrides_the_default(kind: Kind) {
    let shop = Shop::open(kind).await;
    let client = shop.serve(Route::leased().verdict(Verdict::only_success)).await;
    for status in [303, 400, 404, 422] {
        let key = status.to_string();
        assert_eq!(client.send(&keyed(&key).gets(status)).await.status, status);
        assert_eq!(shop.operation(&key).await, None, "a refused request does not use up its key");
        assert_eq!(client.send(&keyed(&key).body("mended")).await.status, 201);
        assert!(client.send(&keyed(&key).body("mended")).await.is_replay());
    }
}

async fn a_panic_is_in_doubt_and_not_run_again(kind: Kind) {
    let shop = Shop::open(kind).await;
    let client = shop.serve(Route::leased()).await;
    let first = client.send(&keyed("k").header("X-Panic", "1")).await;
    first.is_problem(500, "internal");
    assert_eq!(first.json()["retryable"], false, "in doubt: a repeat is not run");
    assert_eq!(shop.operation("k").await.unwrap().state, State::InDoubt);
    let again = client.send(&keyed("k")).await;
    again.is_problem(409, "in-doubt");
    assert_eq!((again.json()["retryable"].as_bool(), again.header("retry-after")), (Some(false), None));
    shop.lab.pass(secs(48 * 3600));
    shop.ledger.sweep().await.unwrap();
    client.send(&keyed("k")).await.is_problem(409, "in-doubt");
    assert_eq!(shop.desk.runs(), 1);
}

async fn a_status_of_no_known_class_is_in_doubt(kind: Kind) {
    let shop = Shop::open(kind).await;
    let client = shop.serve(Route::leased()).await;
    for status in [600, 777, 999] {
        let key = status.to_string();
        assert_eq!(client.send(&keyed(&key).gets(status)).await.status, status, "the handler's own answer");
        assert_eq!(shop.operation(&key).await.unwrap().state, State::InDoubt);
        client.send(&keyed(&key)).await.is_problem(409, "in-doubt");
    }
    assert_eq!(shop.desk.runs(), 3);
    // In atomic mode, or under rerun, it is not in doubt.
    let again = at_once(Policy { on_lost: semel::OnLost::Rerun, ..Policy::default() });
    for route in [Route::atomic().policy(again.clone()), Route::leased().policy(again)] {
        let shop = Shop::open(kind).await;
        let client = shop.serve(route).await;
        assert_eq!(client.send(&keyed("k").gets(600)).await.status, 600);
        assert_eq!((client.send(&keyed("k")).await.status, shop.desk.runs()), (201, 2));
    }
}
