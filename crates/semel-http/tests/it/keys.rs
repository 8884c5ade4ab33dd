//! Which requests have a key, and which keys are valid.

use axum::http::Method;
use semel_http::Route;
use semel_testkit::Kind;

use crate::{
    client::{ask, keyed, post},
    shop::{Shop, on_both_databases},
};

on_both_databases!(
    quoted_and_bare_are_one_key,
    a_strict_route_accepts_only_quoted_keys,
    an_invalid_key_is_400_and_claims_nothing,
    a_route_may_require_a_key,
    a_request_without_a_key_is_not_stored,
    keys_of_safe_methods_are_ignored,
    a_route_decides_which_methods_have_keys,
    different_keys_are_different_orders,
);

async fn quoted_and_bare_are_one_key(kind: Kind) {
    let shop = Shop::open(kind).await;
    let client = shop.serve(Route::leased()).await;
    let first = client.send(&keyed("k-1")).await;
    assert_eq!((first.status, first.is_replay()), (201, false));
    for same in ["\"k-1\"", "  k-1 ", "\"k-1\";p=1", "\"k-1\" ; p=\"x\""] {
        let again = client.send(&keyed(same)).await;
        assert!(again.is_replay() && again.body == first.body, "{same}: {again:?}");
    }
    assert_eq!((shop.desk.runs(), shop.operations().await), (1, 1));
    // An escaped quote is a quote.
    assert_eq!(client.send(&keyed(r#""a\"b""#)).await.status, 201);
    assert!(shop.operation("a\"b").await.is_some());
}

async fn a_strict_route_accepts_only_quoted_keys(kind: Kind) {
    let shop = Shop::open(kind).await;
    let client = shop.serve(Route::leased().strict_keys()).await;
    client.send(&keyed("k")).await.is_problem(400, "key-invalid");
    assert_eq!(client.send(&keyed("\"k\"")).await.status, 201);
    assert_eq!(shop.desk.runs(), 1);
}

async fn an_invalid_key_is_400_and_claims_nothing(kind: Kind) {
    let shop = Shop::open(kind).await;
    let client = shop.serve(Route::leased()).await;
    let (longest, too_long) = ("k".repeat(255), "k".repeat(256));
    let wrong: [&[u8]; 13] = [
        b"",
        b"\"\"",
        b"  ",
        b"a, b",
        b"\"a\", \"b\"",
        b"a b",
        b"a\tb",
        b"\"a",
        b"\"a\"b",
        b"\"a\\b\"",
        b"caf\xc3\xa9",
        b"\"\xff\"",
        too_long.as_bytes(),
    ];
    for line in wrong {
        let answer = client.send(&post("/orders").header("Idempotency-Key", line)).await;
        answer.is_problem(400, "key-invalid");
        assert_eq!(answer.json()["retryable"], false);
    }
    client.send(&keyed("a").key("a")).await.is_problem(400, "key-invalid");
    client.send(&keyed("a").header("IDEMPOTENCY-KEY", "b")).await.is_problem(400, "key-invalid");
    // An invalid header never reaches the layer.
    assert_eq!(client.send(&keyed("a\x01b")).await.status, 400);
    assert_eq!((shop.desk.runs(), shop.operations().await), (0, 0));
    assert_eq!(client.send(&keyed(&longest)).await.status, 201);
}

async fn a_route_may_require_a_key(kind: Kind) {
    let shop = Shop::open(kind).await;
    let client = shop.serve(Route::leased().required()).await;
    client.send(&post("/orders")).await.is_problem(400, "key-missing");
    client.send(&keyed("")).await.is_problem(400, "key-invalid");
    assert_eq!(shop.desk.runs(), 0);
    assert_eq!(client.send(&keyed("k")).await.status, 201);
}

async fn a_request_without_a_key_is_not_stored(kind: Kind) {
    let shop = Shop::open(kind).await;
    let client = shop.serve(Route::leased()).await;
    for run in ["1", "2"] {
        assert_eq!(client.send(&post("/orders")).await.header("x-run").unwrap(), run);
    }
    assert_eq!(shop.operations().await, 0);
}

async fn keys_of_safe_methods_are_ignored(kind: Kind) {
    let shop = Shop::open(kind).await;
    let all = [Method::GET, Method::HEAD, Method::OPTIONS, Method::POST];
    let client = shop.serve(Route::leased().methods(all).required()).await;
    for method in ["GET", "HEAD", "OPTIONS"] {
        for key in ["k", "no, key", ""] {
            let answer = client.send(&ask(method, "/orders").key(key).header("Idempotent-Replayed", "true")).await;
            assert_eq!((answer.status, answer.is_replay()), (201, false), "{method} {key}");
        }
    }
    assert_eq!((shop.desk.runs(), shop.operations().await), (9, 0));
}

async fn a_route_decides_which_methods_have_keys(kind: Kind) {
    let shop = Shop::open(kind).await;
    let usual = shop.serve(Route::leased()).await;
    for (method, replays) in [("POST", true), ("PATCH", true), ("PUT", false), ("DELETE", false)] {
        usual.send(&ask(method, "/orders").key("k")).await;
        assert_eq!(usual.send(&ask(method, "/orders").key("k")).await.is_replay(), replays, "{method}");
    }
    let other = shop.serve(Route::leased().methods([Method::PUT, Method::DELETE])).await;
    for (method, replays) in [("POST", false), ("PUT", true), ("DELETE", true)] {
        other.send(&ask(method, "/orders").key("k")).await;
        assert_eq!(other.send(&ask(method, "/orders").key("k")).await.is_replay(), replays, "{method}");
    }
}

async fn different_keys_are_different_orders(kind: Kind) {
    let shop = Shop::open(kind).await;
    let client = shop.serve(Route::leased()).await;
    for key in ["a", "b", "A", "a%20", "a;p=1"] {
        let answer = client.send(&keyed(key).body("the same")).await;
        assert!(!answer.is_replay(), "{key}");
    }
    assert_eq!(shop.desk.runs(), 5);
}
