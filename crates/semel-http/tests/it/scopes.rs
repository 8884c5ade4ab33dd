//! The scope of a key: tenant, method, route, resource.

use axum::{
    Router,
    extract::Request,
    http::StatusCode,
    middleware::{Next, from_fn},
    response::{IntoResponse as _, Response},
    routing::post as posted,
};
use semel_http::{Idempotency, Principal, Role, Route};
use semel_testkit::Kind;

use crate::{
    client::{ask, keyed, post},
    shop::{Shop, at_once, on_both_databases, secs, serve},
};

on_both_databases!(
    tenants_have_their_own_keys,
    a_new_token_of_the_same_tenant_is_the_same_caller,
    without_a_principal_nothing_is_claimed,
    an_unauthorised_repeat_gets_no_stored_answer,
    a_key_belongs_to_a_method_and_a_template,
    a_key_on_another_resource_is_refused_under_every_policy,
    a_key_of_a_failed_request_is_refused_on_another_resource,
    a_nested_route_compares_the_whole_path,
    equivalent_percent_encodings_are_one_path,
    routes_of_one_kind_share_their_keys,
    long_paths_are_compared_in_full,
);

/// A simple authentication: `Authorization: Bearer tenant.subject.token`. The subject `fired` is refused.
async fn authenticate(mut request: Request, next: Next) -> Response {
    let said = request.headers().get("authorization").and_then(|value| value.to_str().ok()).unwrap_or_default();
    let words: Vec<&str> = said.trim_start_matches("Bearer ").split('.').collect();
    if let [tenant, subject, _token] = words[..] {
        if subject == "fired" {
            return StatusCode::FORBIDDEN.into_response();
        }
        let (tenant, subject) = (tenant.to_owned(), subject.to_owned());
        request.extensions_mut().insert(Principal { tenant, subject, role: Role::Admin });
    }
    next.run(request).await
}

async fn guarded(shop: &Shop) -> crate::client::Client {
    let once = Idempotency::new(shop.ledger.clone());
    serve(shop.router(&once, Route::leased()).layer(from_fn(authenticate))).await
}

async fn tenants_have_their_own_keys(kind: Kind) {
    let shop = Shop::open(kind).await;
    let client = guarded(&shop).await;
    for (tenant, body) in [("one", "a"), ("two", "b")] {
        let order = keyed("k").header("Authorization", format!("Bearer {tenant}.ann.1")).body(body);
        assert_eq!(client.send(&order).await.status, 201);
        let again = client.send(&order).await;
        assert!(again.is_replay());
        assert_eq!(again.text(), format!("took {body}"));
    }
    assert_eq!((shop.desk.runs(), shop.operations().await), (2, 2));
}

async fn a_new_token_of_the_same_tenant_is_the_same_caller(kind: Kind) {
    let shop = Shop::open(kind).await;
    let client = guarded(&shop).await;
    client.send(&keyed("k").header("Authorization", "Bearer one.ann.1")).await;
    assert!(client.send(&keyed("k").header("Authorization", "Bearer one.ann.2")).await.is_replay());
    assert_eq!(shop.desk.runs(), 1);
}

async fn without_a_principal_nothing_is_claimed(kind: Kind) {
    let shop = Shop::open(kind).await;
    let client = guarded(&shop).await;
    client.send(&keyed("k")).await.is_problem(500, "internal");
    assert_eq!((shop.desk.runs(), shop.operations().await), (0, 0));
}

async fn an_unauthorised_repeat_gets_no_stored_answer(kind: Kind) {
    let shop = Shop::open(kind).await;
    let client = guarded(&shop).await;
    assert_eq!(client.send(&keyed("k").header("Authorization", "Bearer one.ann.1")).await.status, 201);
    let refused = client.send(&keyed("k").header("Authorization", "Bearer one.fired.1")).await;
    assert_eq!((refused.status, refused.text().as_str()), (403, ""));
    // A refusal does not use up the key.
    client.send(&keyed("new").header("Authorization", "Bearer one.fired.1")).await;
    assert_eq!(client.send(&keyed("new").header("Authorization", "Bearer one.ann.1")).await.status, 201);
}

async fn a_key_belongs_to_a_method_and_a_template(kind: Kind) {
    let shop = Shop::open(kind).await;
    let client = shop.serve(Route::leased()).await;
    for order in [post("/orders"), ask("PATCH", "/orders"), post("/orders/1"), ask("PATCH", "/orders/1")] {
        assert!(!client.send(&order.clone().key("k")).await.is_replay());
        assert!(client.send(&order.key("k")).await.is_replay());
    }
    assert_eq!((shop.desk.runs(), shop.operations().await), (4, 4));
}

async fn a_key_on_another_resource_is_refused_under_every_policy(kind: Kind) {
    let shop = Shop::open(kind).await;
    for (route, key) in [(Route::leased(), "reject"), (Route::leased().replay_mismatches(), "replay")] {
        let client = shop.serve(route).await;
        let first = client.send(&post("/orders/1").key(key).body("a")).await;
        assert_eq!(first.status, 201);
        let other = client.send(&post("/orders/2").key(key).body("a")).await;
        other.is_problem(422, "payload-mismatch");
        assert!(!other.is_replay() && other.json()["first_seen"].is_string(), "{other:?}");
        assert_eq!(client.send(&post("/orders/1").key(key).body("a")).await.body, first.body);
        // Also while the first is in flight, even if the other would wait.
        let held = format!("{key}-held");
        let running = client.spawn(&post("/orders/1").key(&held).header("X-Hold", "1"));
        shop.desk.arrival().await;
        let other = post("/orders/2").key(&held).header("Prefer", "wait=20");
        client.send(&other).await.is_problem(422, "payload-mismatch");
        shop.desk.let_go();
        assert_eq!(running.await.unwrap().status, 201);
    }
    assert_eq!(shop.desk.runs(), 4);
}

async fn a_key_of_a_failed_request_is_refused_on_another_resource(kind: Kind) {
    let shop = Shop::open(kind).await;
    let policy = at_once(semel::Policy::default());
    let reject = Route::leased().policy(policy.clone());
    let replay = Route::leased().policy(policy).replay_mismatches();
    for (route, key) in [(reject, "reject"), (replay, "replay")] {
        let client = shop.serve(route).await;
        assert_eq!(client.send(&post("/orders/1").key(key).gets(500)).await.status, 500);
        client.send(&post("/orders/2").key(key)).await.is_problem(422, "payload-mismatch");
        // Released on a later attempt, the key still belongs to the first resource.
        assert_eq!(client.send(&post("/orders/1").key(key).gets(409)).await.text(), "took ");
        client.send(&post("/orders/2").key(key)).await.is_problem(422, "payload-mismatch");
        let done = client.send(&post("/orders/1").key(key)).await;
        assert_eq!((done.status, done.is_replay()), (201, false), "the key is still of the first resource: {done:?}");
        // Released on the first attempt, the key is free.
        let free = format!("{key}-free");
        assert_eq!(client.send(&post("/orders/1").key(&free).gets(429)).await.status, 429);
        assert_eq!(client.send(&post("/orders/2").key(&free)).await.status, 201);
        client.send(&post("/orders/1").key(&free)).await.is_problem(422, "payload-mismatch");
    }
    // A request for another resource does not end the backoff.
    let client = shop.serve(Route::leased().replay_mismatches()).await;
    assert_eq!(client.send(&post("/orders/1").key("b").gets(500)).await.status, 500);
    client.send(&post("/orders/2").key("b")).await.is_problem(422, "payload-mismatch");
    client.send(&post("/orders/1").key("b")).await.is_problem(409, "backing-off");
    shop.lab.pass(secs(2));
    assert_eq!(client.send(&post("/orders/1").key("b")).await.status, 201);
}

async fn a_nested_route_compares_the_whole_path(kind: Kind) {
    let shop = Shop::open(kind).await;
    let client = serve(Router::new().nest("/shops/{shop}", shop.router(&shop.once, Route::leased()))).await;
    assert_eq!(client.send(&post("/shops/1/orders").key("k")).await.status, 201);
    client.send(&post("/shops/2/orders").key("k")).await.is_problem(422, "payload-mismatch");
    assert!(client.send(&post("/shops/1/orders").key("k")).await.is_replay());
    assert_eq!(shop.desk.runs(), 1);
}

async fn equivalent_percent_encodings_are_one_path(kind: Kind) {
    let shop = Shop::open(kind).await;
    let client = shop.serve(Route::leased()).await;
    for (path, same, other) in [
        ("/orders/~a", "/orders/%7ea", "/orders/~A"),
        ("/orders/a%2fb", "/orders/a%2Fb", "/orders/ab"),
        ("/orders/\u{c0}\u{e9}", "/orders/%c3%80%C3%A9", "/orders/%C3%80"),
    ] {
        let key = same;
        assert_eq!(client.send(&post(path).key(key)).await.status, 201, "{path}");
        assert!(client.send(&post(same).key(key)).await.is_replay(), "{same}");
        client.send(&post(other).key(key)).await.is_problem(422, "payload-mismatch");
    }
}

async fn routes_of_one_kind_share_their_keys(kind: Kind) {
    let shop = Shop::open(kind).await;
    let layer = shop.once.layer(Route::leased().service("shop").kind("order"));
    let app = Router::new().route("/a", posted(|| async { "a" })).route("/b", posted(|| async { "b" })).layer(layer);
    let client = serve(app).await;
    assert_eq!(client.send(&post("/a").key("k")).await.text(), "a");
    client.send(&post("/b").key("k")).await.is_problem(422, "payload-mismatch");
    assert_eq!(shop.lab.texts("SELECT service || '/' || kind FROM semel_operations").await, ["shop/order"]);
}

async fn long_paths_are_compared_in_full(kind: Kind) {
    let shop = Shop::open(kind).await;
    let client = shop.serve(Route::leased().replay_mismatches()).await;
    let long = "x".repeat(3000);
    assert_eq!(client.send(&post(&format!("/orders/{long}1")).key("k")).await.status, 201);
    assert!(client.send(&post(&format!("/orders/{long}1")).key("k")).await.is_replay());
    client.send(&post(&format!("/orders/{long}2")).key("k")).await.is_problem(422, "payload-mismatch");
}
