//! Which parts of a request are compared: retry or reuse of the key.

use semel_http::Route;
use semel_testkit::Kind;

use crate::{
    client::{Ask, keyed, post},
    shop::{Shop, on_both_databases},
};

on_both_databases!(
    query_content_type_and_body_are_compared,
    canonical_json_is_compared_by_value,
    ignored_fields_and_query_parameters_are_not_compared,
    a_multipart_boundary_is_not_compared,
    the_transfer_encoding_is_not_compared,
    replay_mismatches_replays_the_first_answer_for_another_payload,
    adapt_can_refuse_mismatches_of_one_request,
    a_fingerprint_of_another_version_is_no_mismatch,
);

/// Sends both under one key, and returns whether the second is replayed.
async fn same(shop: &Shop, route: Route, one: Ask, other: Ask) -> bool {
    let client = shop.serve(route).await;
    let key = format!("k{}", shop.desk.runs());
    assert_eq!(client.send(&one.key(&key)).await.status, 201);
    let runs = shop.desk.runs();
    let answer = client.send(&other.key(&key)).await;
    assert_eq!(shop.desk.runs(), runs, "it ran twice");
    if !answer.is_replay() {
        answer.is_problem(422, "payload-mismatch");
        assert!(answer.json()["first_seen"].is_string());
    }
    answer.is_replay()
}

fn json(body: &str) -> Ask {
    post("/orders").json(body)
}

async fn query_content_type_and_body_are_compared(kind: Kind) {
    let shop = Shop::open(kind).await;
    let one = || post("/orders?x=1").json("{}");
    let others = [
        post("/orders?x=1").json("{ }"),
        post("/orders?x=1").json(""),
        post("/orders?x=2").json("{}"),
        post("/orders").json("{}"),
        post("/orders?x=1&x=1").json("{}"),
        post("/orders?x=1").header("Content-Type", "text/plain").body("{}"),
        post("/orders?x=1").body("{}"),
    ];
    for other in others {
        assert!(!same(&shop, Route::leased(), one(), other).await);
    }
    assert!(same(&shop, Route::leased(), one(), one().header("X-Trace", "2").header("User-Agent", "b")).await);
}

async fn canonical_json_is_compared_by_value(kind: Kind) {
    let shop = Shop::open(kind).await;
    let route = || Route::leased().canonical_json();
    let one = || json(r#"{"a":1,"b":[1,2]}"#);
    assert!(same(&shop, route(), one(), json("{ \"b\": [1, 2],\n \"a\": 1 }")).await);
    assert!(!same(&shop, Route::leased(), one(), json(r#"{"b":[1,2],"a":1}"#)).await, "only with canonical_json");
    for (this, that) in [
        (r#"{"a":1}"#, r#"{"a":1.0}"#),
        (r#"{"a":9007199254740993}"#, r#"{"a":9007199254740992}"#),
        (r#"{"a":1}"#, r#"{"a":1,"a":1}"#),
        ("{\"a\":\"\u{e9}\"}", "{\"a\":\"e\u{301}\"}"),
        (r#"{"a":[1,2]}"#, r#"{"a":[2,1]}"#),
        ("{\"a\":1", "{ \"a\":1"),
    ] {
        assert!(!same(&shop, route(), json(this), json(that)).await, "{this} {that}");
    }
}

async fn ignored_fields_and_query_parameters_are_not_compared(kind: Kind) {
    let shop = Shop::open(kind).await;
    let route = || Route::leased().ignore_fields(["/sent_at"]).ignore_query(["trace"]);
    let one = || post("/orders?x=1&trace=7").json(r#"{"a":1,"sent_at":1}"#);
    assert!(same(&shop, route(), one(), post("/orders?trace=8&x=1").json(r#"{"a":1,"sent_at":2}"#)).await);
    assert!(same(&shop, route(), one(), post("/orders?x=1").json(r#"{"a":1}"#)).await);
    assert!(!same(&shop, route(), one(), post("/orders?x=1").json(r#"{"a":2}"#)).await);
    assert!(!same(&shop, route(), one(), post("/orders?x=2").json(r#"{"a":1}"#)).await);
}

async fn a_multipart_boundary_is_not_compared(kind: Kind) {
    let shop = Shop::open(kind).await;
    let form = |boundary: &str, text: &str| {
        let part = "content-disposition: form-data; name=\"a\"\r\n\r\n";
        let body = format!("--{boundary}\r\n{part}{text}\r\n--{boundary}--\r\n");
        post("/orders").header("Content-Type", format!("multipart/form-data; boundary={boundary}")).body(body)
    };
    assert!(same(&shop, Route::leased(), form("aaa", "x"), form("bbb", "x")).await);
    assert!(!same(&shop, Route::leased(), form("aaa", "x"), form("aaa", "y")).await);
    let nested = "x\r\n--aaa\r\ncontent-disposition: form-data; name=\"b\"\r\n\r\ny";
    let forged = nested.replace("--aaa", "--");
    assert!(!same(&shop, Route::leased(), form("aaa", nested), form("aaa", &forged)).await);
}

async fn the_transfer_encoding_is_not_compared(kind: Kind) {
    let shop = Shop::open(kind).await;
    let client = shop.serve(Route::leased()).await;
    client.send(&keyed("k").body("hello")).await;
    let chunked = [keyed("k").head(), b"Transfer-Encoding: chunked\r\n\r\n2\r\nhe\r\n3\r\nllo\r\n0\r\n\r\n".to_vec()];
    let again = client.raw(&chunked.concat()).await;
    assert!(again.is_replay(), "{again:?}");
    assert_eq!(again.text(), "took hello");
}

async fn replay_mismatches_replays_the_first_answer_for_another_payload(kind: Kind) {
    let shop = Shop::open(kind).await;
    let client = shop.serve(Route::leased().replay_mismatches()).await;
    let first = client.send(&keyed("k").body("a")).await;
    assert_eq!(first.header("idempotency-mismatch"), None);
    let other = client.send(&keyed("k").body("b").header("Idempotency-Mismatch", "false")).await;
    assert!(other.is_replay());
    assert_eq!((other.status, other.text().as_str()), (201, "took a"));
    assert_eq!(other.header("idempotency-mismatch").as_deref(), Some("true"));
    let same = client.send(&keyed("k").body("a").header("Idempotency-Mismatch", "true")).await;
    assert_eq!((same.is_replay(), same.header("idempotency-mismatch")), (true, None));
    assert_eq!(shop.desk.runs(), 1);
}

async fn adapt_can_refuse_mismatches_of_one_request(kind: Kind) {
    let shop = Shop::open(kind).await;
    let route = Route::leased().replay_mismatches().ignore_query(["strict"]).adapt(|head, policy| {
        if head.uri.query() == Some("strict=true") {
            policy.on_mismatch = semel::OnMismatch::Reject;
        }
    });
    let client = shop.serve(route).await;
    client.send(&keyed("k").body("a")).await;
    assert!(client.send(&keyed("k").body("b")).await.is_replay());
    client.send(&post("/orders?strict=true").key("k").body("b")).await.is_problem(422, "payload-mismatch");
    assert!(client.send(&post("/orders?strict=true").key("k").body("a")).await.is_replay());
}

async fn a_fingerprint_of_another_version_is_no_mismatch(kind: Kind) {
    let shop = Shop::open(kind).await;
    let client = shop.serve(Route::leased()).await;
    client.send(&keyed("k").body("a")).await;
    assert_eq!(shop.operation("k").await.unwrap().fingerprint.version(), 1);
    // Fingerprints of different versions cannot be compared, so this is no mismatch.
    let other = match kind {
        Kind::Sqlite => "CAST(x'02' || substr(fingerprint, 2) AS BLOB)",
        Kind::Postgres => "set_byte(fingerprint, 0, 2)",
    };
    shop.lab.execute(&format!("UPDATE semel_operations SET fingerprint = {other}")).await.unwrap();
    assert!(client.send(&keyed("k").body("a")).await.is_replay());
}
