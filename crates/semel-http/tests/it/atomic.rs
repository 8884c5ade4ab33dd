//! Atomic routes: one transaction commits the rows and the answer of a handler.

use axum::{
    Router,
    extract::Request,
    http::{Method, StatusCode},
    response::IntoResponse as _,
    routing::post as posted,
};
use semel::{Policy, State};
use semel_http::{Attempt, Idempotency, Route, Transaction, Verdict};
use semel_store::{Database, on};
use semel_testkit::Kind;

use crate::{
    client::{ask, keyed, post},
    shop::{Desk, Shop, TENANT, insert, on_both_databases, secs, serve},
};

on_both_databases!(
    rows_and_answer_commit_together,
    a_422_answer_is_stored_and_its_rows_are_rolled_back,
    an_answer_that_is_not_final_leaves_no_rows,
    a_commit_that_is_refused_is_not_reported_as_success,
    a_panic_leaves_no_rows,
    without_a_key_the_status_decides_commit_or_rollback,
    without_a_key_a_refused_commit_is_500,
    a_transaction_needs_an_atomic_route,
    a_handler_takes_its_transaction_and_its_attempt_as_arguments,
    a_transaction_that_takes_too_long_is_rolled_back,
    the_verdict_decides_commit_or_rollback,
);

async fn rows_and_answer_commit_together(kind: Kind) {
    let shop = Shop::open(kind).await;
    let client = shop.serve(Route::atomic()).await;
    let first = client.send(&keyed("k").body("a")).await;
    assert_eq!((first.status, first.text().as_str()), (201, "took a"));
    assert_eq!(shop.effects().await, ["k"]);
    let again = client.send(&keyed("k").body("a")).await;
    assert!(again.is_replay() && again.body == first.body);
    assert_eq!(shop.effects().await, ["k"]);
}

async fn a_422_answer_is_stored_and_its_rows_are_rolled_back(kind: Kind) {
    let shop = Shop::open(kind).await;
    let client = shop.serve(Route::atomic()).await;
    let first = client.send(&keyed("k").gets(422)).await;
    let again = client.send(&keyed("k")).await;
    assert_eq!((first.status, again.status), (422, 422));
    assert_eq!((first.is_replay(), again.is_replay()), (false, true));
    assert_eq!(first.body, again.body);
    assert_eq!((shop.effects().await.len(), shop.desk.runs()), (0, 1));
}

async fn an_answer_that_is_not_final_leaves_no_rows(kind: Kind) {
    let shop = Shop::open(kind).await;
    let client = shop.serve(Route::atomic()).await;
    for status in [500, 503, 409, 429] {
        assert_eq!(client.send(&keyed("k").gets(status)).await.status, status);
        assert_eq!(shop.effects().await.len(), 0);
        shop.lab.pass(secs(300));
    }
    assert_eq!(client.send(&keyed("k")).await.status, 201);
    assert_eq!(shop.effects().await, ["k"]);
}

/// Serves a handler whose first run violates a deferred foreign key: its commit fails.
async fn doomed(shop: &Shop, route: Route) -> crate::client::Client {
    shop.lab.execute("CREATE TABLE parents (id INTEGER PRIMARY KEY)").await.unwrap();
    let child = "CREATE TABLE children (parent INTEGER REFERENCES parents (id) DEFERRABLE INITIALLY DEFERRED)";
    shop.lab.execute(child).await.unwrap();
    let desk = shop.desk.clone();
    let handler = move |Transaction(tx): Transaction<Database>| {
        let run = desk.count();
        async move {
            let mut held = tx.connection().await.unwrap();
            let sql = if run == 1 { "INSERT INTO children VALUES (1)" } else { "INSERT INTO parents VALUES (1)" };
            on!(held.get().unwrap(), c => sqlx::query(sql).execute(c).await.map(drop)).unwrap();
            (StatusCode::CREATED, "made")
        }
    };
    serve(Router::new().route("/orders", posted(handler).layer(shop.once.layer(route)))).await
}

async fn a_commit_that_is_refused_is_not_reported_as_success(kind: Kind) {
    let shop = Shop::open(kind).await;
    let client = doomed(&shop, Route::atomic()).await;
    client.send(&keyed("k")).await.is_problem(500, "not-committed");
    assert_eq!(shop.lab.number("SELECT count(*) FROM children").await, 0);
    assert_eq!(shop.operation("k").await.unwrap().state, State::Failed);
    shop.lab.pass(secs(1));
    let second = client.send(&keyed("k")).await;
    assert_eq!((second.status, second.text().as_str(), second.is_replay()), (201, "made", false));
    assert!(client.send(&keyed("k")).await.is_replay());
    assert_eq!(shop.lab.number("SELECT count(*) FROM parents").await, 1);
}

async fn a_panic_leaves_no_rows(kind: Kind) {
    let shop = Shop::open(kind).await;
    let client = shop.serve(Route::atomic()).await;
    client.send(&keyed("k").header("X-Panic", "1")).await.is_problem(500, "internal");
    assert_eq!(shop.effects().await.len(), 0);
    assert_eq!(shop.operation("k").await.unwrap().state, State::Failed, "nothing is in doubt");
    client.send(&keyed("k")).await.is_problem(409, "backing-off");
    shop.lab.pass(secs(1));
    assert_eq!(client.send(&keyed("k")).await.status, 201);
    assert_eq!(shop.effects().await, ["k"]);
}

async fn without_a_key_the_status_decides_commit_or_rollback(kind: Kind) {
    let shop = Shop::open(kind).await;
    let client = shop.serve(Route::atomic()).await;
    for (status, rows) in [(201, 1), (204, 2), (303, 3), (404, 3), (409, 3), (500, 3)] {
        assert_eq!(client.send(&post("/orders").gets(status)).await.status, status);
        assert_eq!(shop.effects().await.len(), rows, "{status}");
    }
    // A panic ends the connection, as it does without the layer.
    let mut stream = client.start(&post("/orders").header("X-Panic", "1").bytes()).await;
    let mut said = Vec::new();
    let _ = tokio::io::AsyncReadExt::read_to_end(&mut stream, &mut said).await;
    assert!(said.is_empty());
    assert_eq!((shop.effects().await.len(), shop.operations().await), (3, 0));
}

async fn without_a_key_a_refused_commit_is_500(kind: Kind) {
    let shop = Shop::open(kind).await;
    let client = doomed(&shop, Route::atomic()).await;
    client.send(&post("/orders")).await.is_problem(500, "not-committed");
    assert_eq!(client.send(&post("/orders")).await.status, 201);
}

async fn a_transaction_needs_an_atomic_route(kind: Kind) {
    let shop = Shop::open(kind).await;
    let handler = |_tx: Transaction<Database>| async { "never" };
    let layer = shop.once.layer(Route::leased());
    let client = serve(Router::new().route("/orders", posted(handler).layer(layer))).await;
    client.send(&keyed("k")).await.is_problem(500, "internal");
    client.send(&post("/orders")).await.is_problem(500, "internal");
    // A method that the route does not cover has no transaction either.
    let layer = shop.once.layer(Route::atomic());
    let client = serve(Router::new().route("/orders", axum::routing::put(handler).layer(layer))).await;
    client.send(&ask("PUT", "/orders").key("k")).await.is_problem(500, "internal");
    let layer = shop.once.layer(Route::atomic().methods([Method::PUT]));
    let client = serve(Router::new().route("/orders", axum::routing::put(handler).layer(layer))).await;
    assert_eq!(client.send(&ask("PUT", "/orders").key("k")).await.text(), "never");
}

async fn a_handler_takes_its_transaction_and_its_attempt_as_arguments(kind: Kind) {
    let shop = Shop::open(kind).await;
    let told = |attempt: &Attempt| {
        let keys = (attempt.derived_key("charge"), attempt.derived_key("mail"));
        assert_ne!(keys.0, keys.1, "each step has its own key");
        format!("{} {} {}", attempt.key().as_str(), attempt.fence(), keys.0)
    };
    let handler = move |attempt: Option<Attempt>, Transaction(tx): Transaction<Database>, body: String| async move {
        insert(&tx, &body).await.unwrap();
        let status = if body == "fails" { StatusCode::BAD_GATEWAY } else { StatusCode::CREATED };
        (status, attempt.map_or_else(|| "no key".to_owned(), |attempt| told(&attempt)))
    };
    let keyed_only = |attempt: Attempt| async move { attempt.key().as_str().to_owned() };
    let layer = shop.once.layer(Route::atomic().replay_mismatches());
    let app = Router::new().route("/orders", posted(handler)).route("/keyed", posted(keyed_only)).layer(layer);
    let client = serve(app).await;
    assert_eq!(client.send(&post("/orders").body("x")).await.text(), "no key");
    client.send(&post("/keyed")).await.is_problem(400, "key-missing");
    assert_eq!(client.send(&post("/keyed").key("k")).await.text(), "k");
    let first = client.send(&keyed("k").body("fails")).await.text();
    shop.lab.pass(secs(1));
    let second = client.send(&keyed("k").body("works")).await.text();
    let other = client.send(&keyed("other").body("works")).await.text();
    let words = |text: &str| text.split(' ').map(str::to_owned).collect::<Vec<_>>();
    let (first, second, other) = (words(&first), words(&second), words(&other));
    assert_eq!((&first[0], &first[2]), (&second[0], &second[2]), "the keys are the same on every attempt");
    assert_ne!(first[1], second[1], "each attempt has its own fence");
    assert_ne!(first[2], other[2], "each key has its own derived key");
}

async fn a_transaction_that_takes_too_long_is_rolled_back(kind: Kind) {
    let shop = Shop::open(kind).await;
    let policy = Policy { lease: std::time::Duration::from_millis(500), ..Policy::default() };
    let client = shop.serve(Route::atomic().policy(policy)).await;
    let late = client.send(&keyed("k").header("X-Hold", "1")).await;
    assert!([409, 500].contains(&late.status), "{late:?}");
    assert_eq!(shop.effects().await.len(), 0);
    shop.lab.pass(secs(10));
    assert_eq!(client.send(&keyed("k")).await.status, 201);
    assert_eq!(shop.effects().await, ["k"]);
}

async fn the_verdict_decides_commit_or_rollback(kind: Kind) {
    let shop = Shop::open(kind).await;
    let handler = |Transaction(tx): Transaction<Database>, request: Request| async move {
        let name = request.headers()["x-name"].to_str().unwrap().to_owned();
        insert(&tx, &name).await.unwrap();
        let (status, verdict) = match &name[..] {
            "final 500" => (StatusCode::INTERNAL_SERVER_ERROR, Verdict::Complete),
            "failed 200" => (StatusCode::OK, Verdict::Fail),
            "released 200" => (StatusCode::OK, Verdict::Release),
            _ => (StatusCode::OK, Verdict::Complete),
        };
        let mut response = status.into_response();
        response.extensions_mut().insert(verdict);
        response
    };
    let layer = shop.once.layer(Route::atomic());
    let client = serve(Router::new().route("/orders", posted(handler).layer(layer))).await;
    for (key, name) in [("a", "final 500"), ("b", "failed 200"), ("c", "released 200"), ("d", "final 200")] {
        client.send(&keyed(key).header("X-Name", name)).await;
        client.send(&post("/orders").header("X-Name", name)).await;
    }
    assert_eq!(shop.effects().await, ["final 200", "final 200"], "with a key and without");
    assert!(client.send(&keyed("a").header("X-Name", "final 500")).await.is_replay(), "a final 500 is replayed");
}

/// PostgreSQL only: on SQLite a transaction holds the only writer, so no other node can take over while it is open.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_rows_of_a_zombie_are_rolled_back() {
    let shop = Shop::open(Kind::Postgres).await;
    let zombie = shop.serve(Route::atomic()).await;
    let desk = Desk::default();
    let successor = Idempotency::for_everyone(shop.lab.ledger_of("other node").await, TENANT);
    let successor = serve(desk.router(&successor, Route::atomic())).await;
    let late = zombie.spawn(&keyed("k").header("X-Hold", "1"));
    shop.desk.arrival().await;
    shop.lab.pass(secs(31));
    assert_eq!(successor.send(&keyed("k")).await.status, 201);
    shop.desk.let_go();
    let late = late.await.unwrap();
    late.is_problem(409, "lease-lost");
    assert_eq!(late.json()["retryable"], true);
    assert_eq!((shop.effects().await, desk.runs()), (vec!["k".to_owned()], 1));
    assert!(zombie.send(&keyed("k")).await.is_replay());
}
