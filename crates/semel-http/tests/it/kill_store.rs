//! The database is killed or locked during a request.

use std::time::{Duration, Instant};

use semel::{Ledger, Options, Policy};
use semel_http::{Idempotency, Route};
use semel_store::{Database, Settings};
use semel_testkit::{
    Kind, Lab,
    faults::{Fault, On, Proxy, Server},
};

use crate::{
    client::{Client, keyed, post, soon},
    shop::{Desk, Shop, TENANT, at_once, secs, serve},
};

/// A shop on a separate PostgreSQL server.
async fn shop_on(server: &Server, lab: Lab) -> Shop {
    let db = Database::open(&server.url(), Settings::default()).await.unwrap();
    let ledger = Ledger::new(db, Options::default()).unwrap();
    let once = Idempotency::for_everyone(ledger.clone(), TENANT);
    Shop { lab, ledger, once, desk: Desk::default() }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn requests_to_a_killed_store_are_503_and_run_nothing() {
    let server = Server::start("");
    let shop = shop_on(&server, Lab::in_real_time(Kind::Sqlite).await).await;
    let (leased, atomic) = (shop.serve(Route::leased()).await, shop.serve(Route::atomic()).await);
    server.crash();
    let asks = [leased.spawn(&keyed("k")), atomic.spawn(&keyed("k")), atomic.spawn(&post("/orders"))];
    for answer in asks {
        let answer = soon(answer).await.unwrap();
        answer.is_problem(503, "store-unavailable");
        assert_eq!(answer.header("retry-after").as_deref(), Some("1"));
    }
    assert_eq!(shop.desk.runs(), 0);
    server.restart();
    assert_eq!(leased.send(&keyed("k")).await.status, 201);
    assert_eq!(shop.desk.runs(), 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_killed_store_during_a_request_leaves_it_in_doubt() {
    let server = Server::start("");
    let shop = shop_on(&server, Lab::in_real_time(Kind::Sqlite).await).await;
    let policy = Policy { lease: secs(5), on_lost: semel::OnLost::Hold, ..Policy::default() };
    let client = shop.serve(Route::leased().policy(policy)).await;
    let first = client.spawn(&keyed("k").header("X-Hold", "1"));
    shop.desk.arrival().await;
    server.crash();
    shop.desk.let_go();
    let first = soon(first).await.unwrap();
    assert_eq!(first.status, 503, "{first:?}");
    first.is_problem(503, "outcome-unknown");
    server.restart();
    // It ran, but its outcome was not stored: in doubt.
    let begun = Instant::now();
    loop {
        let again = client.send(&keyed("k")).await;
        if again.status == 409 && again.json()["type"] == "/problems/in-doubt" {
            break;
        }
        assert!(begun.elapsed() < secs(60), "{again:?}");
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    assert_eq!(shop.desk.runs(), 1);
}

/// A shop whose connection to PostgreSQL can be cut.
async fn wired() -> (Shop, Proxy, Client) {
    let lab = Lab::in_real_time(Kind::Postgres).await;
    let proxy = Proxy::start(&lab.url).await;
    let shop = Shop::on(lab).await;
    let db = Database::open(&proxy.url(&shop.lab.url), Settings::default()).await.unwrap();
    let ledger = Ledger::new(db, Options::default()).unwrap();
    let once = Idempotency::for_everyone(ledger, TENANT);
    let route = Route::atomic().policy(at_once(Policy::default()));
    let client = serve(shop.router(&once, route)).await;
    (shop, proxy, client)
}

const COMMIT: On = On::Query("SAVEPOINT semel");

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_commit_whose_answer_is_lost_is_read_back() {
    let (shop, proxy, client) = wired().await;
    assert_eq!(client.send(&keyed("before")).await.status, 201);
    proxy.plan(COMMIT, Fault::CutAnswer(0));
    let first = client.send(&keyed("k")).await;
    assert!(proxy.met().is_some(), "the connection was cut");
    assert_eq!((first.status, first.is_replay()), (201, false), "{first:?}");
    assert!(client.send(&keyed("k")).await.is_replay());
    assert_eq!(shop.effects().await, ["before", "k"]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_commit_that_never_arrives_is_503_and_can_be_retried() {
    let (shop, proxy, client) = wired().await;
    assert_eq!(client.send(&keyed("before")).await.status, 201);
    proxy.plan(COMMIT, Fault::CutRequest);
    client.send(&keyed("k")).await.is_problem(503, "store-unavailable");
    assert_eq!(shop.effects().await, ["before"]);
    let second = client.send(&keyed("k")).await;
    assert_eq!((second.status, second.is_replay()), (201, false));
    assert_eq!(shop.effects().await, ["before", "k"]);
}

/// Another connection locks the file for longer than a request waits.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn requests_to_a_locked_file_are_503_and_run_nothing() {
    use sqlx::{Connection as _, SqliteConnection};
    let shop = Shop::open(Kind::Sqlite).await;
    let client = shop.serve(Route::atomic()).await;
    let mut other = SqliteConnection::connect(&shop.lab.url).await.unwrap();
    sqlx::query("BEGIN IMMEDIATE").execute(&mut other).await.unwrap();
    client.send(&keyed("k")).await.is_problem(503, "store-unavailable");
    assert_eq!(shop.desk.runs(), 0);
    sqlx::query("ROLLBACK").execute(&mut other).await.unwrap();
    assert_eq!(client.send(&keyed("k")).await.status, 201);
    assert_eq!(shop.desk.runs(), 1);
}
