//! A commit by SQL wakes workers and relays.

use std::{sync::Arc, time::Duration};

use semel::{
    Kind, Outcome, Worker,
    messaging::{Broker as _, Queue, Relay, RelayOptions},
};
use semel_store::EmbeddedBroker;
use sqlx::postgres::PgListener;
use tokio::sync::{mpsc, watch};

use super::{Place, publish, run, soon};

/// No poll comes in time.
const NEVER: Duration = Duration::from_secs(3600);

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_commit_by_sql_wakes_a_sleeping_worker() {
    let place = Place::new().await;
    let (begun, mut runs) = mpsc::unbounded_channel();
    let kind = Kind::leased("shop", "mail", move |context: semel::Context<_>| {
        let operation = context.operation();
        let _ = begun.send((operation.key.as_str().to_owned(), operation.payload.clone()));
        async { Ok(Outcome::kept("")) }
    });
    let (stop, stops) = watch::channel(false);
    let worker = tokio::spawn(Worker::new(&place.ledger).on(kind).poll(NEVER).run(stops));
    let mut program = place.program().await;
    run(&mut program, "CREATE TABLE orders (id BIGINT PRIMARY KEY)").await;
    for n in 0..10 {
        let enqueue = format!("SELECT * FROM semel_enqueue('shop', 'mail', 'order-{n}', '{{\"order\":{n}}}')");
        run(&mut program, &format!("BEGIN; INSERT INTO orders VALUES ({n}); {enqueue}")).await;
        run(&mut program, "COMMIT").await;
        let (key, payload) = soon(runs.recv()).await.unwrap();
        assert_eq!((key, payload.as_deref()), (format!("order-{n}"), Some(format!("{{\"order\":{n}}}").as_bytes())));
        // Long enough for the worker to be asleep again.
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    stop.send_replace(true);
    soon(worker).await.unwrap();
    place.counters_are_exact().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_trigger_publishes_and_wakes_a_sleeping_relay() {
    let place = Place::new().await;
    let broker = Arc::new(EmbeddedBroker::new(place.lab.open().await));
    broker.declare(vec![Queue::new("orders")]).await.unwrap();
    let options = RelayOptions { poll: NEVER, ..RelayOptions::default() };
    let (stop, stops) = watch::channel(false);
    let relay = tokio::spawn(Relay::new(place.ledger.store().clone(), broker, options).run(stops));
    let mut program = place.program().await;
    run(
        &mut program,
        "CREATE TABLE orders (id BIGINT PRIMARY KEY, customer TEXT NOT NULL);
         CREATE FUNCTION tell_order() RETURNS TRIGGER LANGUAGE plpgsql AS $$
         BEGIN
             PERFORM semel_publish('orders', to_jsonb(NEW)::text, kind => 'order.' || lower(TG_OP),
                                   ordering_key => 'order-' || NEW.id);
             RETURN NULL;
         END $$;
         CREATE TRIGGER tell_order AFTER INSERT OR UPDATE ON orders FOR EACH ROW EXECUTE FUNCTION tell_order()",
    )
    .await;
    for n in 0..10 {
        run(
            &mut program,
            &format!("INSERT INTO orders VALUES ({n}, 'ann'); UPDATE orders SET customer = 'bob' WHERE id = {n}"),
        )
        .await;
        let there = format!("SELECT count(*) FROM semel_queue WHERE queue = 'orders' AND body::text <> '' AND number <= 2 AND put_at > 0
                             AND convert_from(substr(body, 3), 'UTF8')::jsonb ->> 'id' = '{n}'");
        soon(async {
            while place.lab.number(&there).await < 2 {
                tokio::time::sleep(Duration::from_millis(2)).await;
            }
        })
        .await;
    }
    let told = place
        .lab
        .texts("SELECT kind || ' ' || convert_from(substr(body, 3), 'UTF8') FROM semel_queue ORDER BY id LIMIT 2")
        .await;
    let expected = [r#"order.insert {"id": 0, "customer": "ann"}"#, r#"order.update {"id": 0, "customer": "bob"}"#];
    assert_eq!(told, expected);
    // What is rolled back is not published.
    run(
        &mut program,
        "BEGIN; INSERT INTO orders VALUES (100, 'eve'); ROLLBACK; INSERT INTO orders VALUES (101, 'ann')",
    )
    .await;
    soon(async {
        while place.lab.number("SELECT count(*) FROM semel_queue").await < 21 {
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    })
    .await;
    assert_eq!(place.lab.number("SELECT count(*) FROM semel_queue WHERE encode(body, 'escape') LIKE '%eve%'").await, 0);
    stop.send_replace(true);
    soon(relay).await.unwrap();
}

#[tokio::test]
async fn a_transaction_notifies_once_and_only_if_it_may() {
    let place = Place::new().await;
    let mut program = place.program().await;
    let channel = format!("semel_{}", place.schema().await);
    let mut listener = PgListener::connect(&place.lab.url).await.unwrap();
    listener.listen(&channel).await.unwrap();
    let work = "SELECT * FROM generate_series(1, 20) AS n, semel_enqueue('shop', 'mail', 'KEY ' || n, 'x'),
                LATERAL (SELECT semel_publish('orders', 'x')) AS p";
    run(&mut program, &format!("SET semel.notify = off; {}", work.replace("KEY", "silent"))).await;
    run(
        &mut program,
        &format!("RESET semel.notify; BEGIN; {}; {}; COMMIT", work.replace("KEY", "a"), work.replace("KEY", "b")),
    )
    .await;
    // A last one from elsewhere, so that nothing can come after it.
    run(&mut program, &format!("SELECT pg_notify('{channel}', 'end')")).await;
    let mut heard = Vec::new();
    while heard.last().is_none_or(|last| last != "end") {
        heard.push(soon(listener.recv()).await.unwrap().payload().to_owned());
    }
    heard.sort_unstable();
    assert_eq!(heard, ["end", "sql due", "sql outbox"]);
    // A known key is no news.
    run(&mut program, "SELECT * FROM semel_enqueue('shop', 'mail', 'a 1', 'x')").await;
    publish(&mut program, "'orders', 'x'").await;
    assert_eq!(soon(listener.recv()).await.unwrap().payload(), "sql outbox");
}
