//! Messages that a program publishes.

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use semel::{
    Timestamp,
    messaging::{Message, MessageId, Topic},
    prelude::*,
    store::Commit,
};
use semel_store::Database;
use tokio::task::JoinSet;

use super::{Place, publish, refused, run, soon};

fn message() -> Message {
    Message::new("default", Topic::new("orders").unwrap(), "", "{\"id\": 1}")
}

async fn put(store: &Database, message: Message) {
    let tx = store.begin(Duration::from_secs(5)).await.unwrap();
    store.put(&tx, vec![message]).await.unwrap();
    assert!(matches!(store.commit(&tx).await, Commit::Done));
}

#[tokio::test]
async fn a_message_by_sql_is_stored_as_the_library_stores_it() {
    let place = Place::new().await;
    let mut program = place.program().await;
    let later = Timestamp::from_micros(4_102_444_800_123_456);
    let headers = BTreeMap::from([("priority".to_owned(), "7".to_owned()), ("from".to_owned(), "Zoë".to_owned())]);
    let id = "01a1f20f-84e7-7f3d-9bf7-1402d32406bb";
    let line = |key: &str| Some(key.to_owned());
    let cases = [
        ("", message()),
        (", kind => 'order.created'", Message { kind: "order.created".into(), ..message() }),
        (", not_before => '2100-01-01 00:00:00.123456Z'", Message { not_before: Some(later), ..message() }),
        (", not_before => '1970-01-01 00:00:01Z'", {
            Message { not_before: Some(Timestamp::from_micros(1_000_000)), ..message() }
        }),
        (r#", headers => '{"priority": "7", "from": "Zoë"}', receipt => TRUE"#, {
            Message { headers, receipt: true, ..message() }
        }),
        (", tenant => 'acme'", Message { tenant: "acme".into(), ..message() }),
        // The first of a key, and two that are blocked by it.
        (", ordering_key => 'KEY'", Message { ordering_key: line("library"), ..message() }),
        (", ordering_key => 'KEY', not_before => '2100-01-01 00:00:00.123456Z'", {
            Message { ordering_key: line("library"), not_before: Some(later), ..message() }
        }),
        (", ordering_key => 'KEY'", Message { ordering_key: line("library"), ..message() }),
        (", ordering_key => 'KEY', not_before => '2100-01-01 00:00:00.123456Z'", {
            Message { ordering_key: line("another"), not_before: Some(later), ..message() }
        }),
        (
            &format!(", message_id => '{id}'"),
            Message { id: "01a1f20f-84e7-7f3d-9bf7-1402d32406bc".parse().unwrap(), ..message() },
        ),
    ];
    for (n, (with, message)) in cases.into_iter().enumerate() {
        let with = with.replace("KEY", if n == 9 { "sql, too" } else { "sql" });
        let given = publish(&mut program, &format!("'orders', '{{\"id\": 1}}'{with}")).await;
        let theirs = message.id.to_string();
        put(place.ledger.store(), message).await;
        let stored = async |id: &str| {
            let sql = format!(
                "SELECT (to_jsonb(o) - ARRAY['id', 'message_id', 'put_at', 'ordering_key', 'headers']
                         || jsonb_build_object('headers', o.headers::jsonb, 'has a key', o.ordering_key IS NOT NULL))::text
                 FROM semel_outbox AS o WHERE message_id = '{id}'"
            );
            place.lab.texts(&sql).await.join("\n")
        };
        let (ours, theirs) = (stored(&given).await, stored(&theirs).await);
        assert_eq!(ours, theirs, "{with}");
        assert!(ours.contains("orders"), "{with}: {ours}");
        assert!(n < 10 || given == id, "{given}");
    }
    assert_eq!(place.lab.number("SELECT count(DISTINCT state) FROM semel_outbox").await, 3);
}

#[tokio::test]
async fn message_ids_are_new_and_ordered_by_time() {
    let place = Place::new().await;
    let mut program = place.program().await;
    let mut ids = Vec::new();
    for _ in 0..50 {
        ids.push(publish(&mut program, "'orders', 'x'").await);
        run(&mut program, "SELECT pg_sleep(0.002)").await;
    }
    ids.push(MessageId::new().to_string());
    assert!(ids.is_sorted_by(|a, b| a < b), "{ids:?}");
    assert!(ids.iter().all(|id| id.as_bytes()[14] == b'7' && b"89ab".contains(&id.as_bytes()[19])), "{ids:?}");
    assert!(ids.iter().all(|id| id.parse::<MessageId>().is_ok()));
}

#[tokio::test]
async fn a_message_id_that_is_in_the_outbox_is_refused() {
    let place = Place::new().await;
    let mut program = place.program().await;
    let one = "'orders', 'x', message_id => '01a1f20f-84e7-7f3d-9bf7-1402d32406bb'";
    publish(&mut program, one).await;
    let (code, why) = refused(&mut program, &format!("SELECT semel_publish({one})")).await;
    assert_eq!(
        (code.as_str(), why.as_str()),
        ("23505", "semel_publish: message_id: a message with this id is in the outbox already")
    );
    publish(&mut program, &format!("{one}, tenant => 'another'")).await;
}

#[tokio::test]
async fn wrong_arguments_of_a_message_are_refused_by_their_names() {
    let place = Place::new().await;
    let mut program = place.program().await;
    let most = "repeat('t', 200), repeat('x', 1048576), kind => repeat('k', 255), ordering_key => repeat('o', 255),
                headers => jsonb_build_object(repeat('h', 128), repeat('v', 16384 - 128))";
    publish(&mut program, most).await;
    let many: Vec<String> = (0..65).map(|n| format!("\"h{n}\":\"\"")).collect();
    let many = format!("'t', 'x', headers => '{{{}}}'", many.join(","));
    let texts = "headers: must be an object of texts";
    let size = "headers: must be at most 64 of together at most 16 KiB";
    let topic = "topic: must be 1 to 200 letters, digits, '.', '-', '_', ':' or '/'";
    for (arguments, why) in [
        ("'', 'x'", topic),
        ("'an order', 'x'", topic),
        (r"E'orders\n', 'x'", topic),
        ("repeat('t', 201), 'x'", topic),
        ("NULL, 'x'", "topic: is null"),
        ("'t', NULL", "body: is null"),
        ("'t', repeat('x', 1048577)", "body: is larger than 1048576 bytes"),
        ("'t', 'x', kind => NULL", "kind: is null"),
        ("'t', 'x', kind => repeat('k', 256)", "kind: is longer than 255 bytes"),
        ("'t', 'x', ordering_key => ''", "ordering_key: is empty"),
        ("'t', 'x', ordering_key => E'a\\tb'", "ordering_key: has control characters"),
        ("'t', 'x', headers => '[]'", texts),
        ("'t', 'x', headers => '7'", texts),
        (r#"'t', 'x', headers => '{"a": 7}'"#, texts),
        (&many, size),
        ("'t', 'x', headers => jsonb_build_object('h', repeat('v', 16384))", size),
        (r#"'t', 'x', headers => '{"": "a"}'"#, "headers: a name must be 1 to 128 bytes without control characters"),
        (r#"'t', 'x', headers => '{"x-a": "a"}'"#, "headers: names that begin with semel- or x- are not free"),
        (r#"'t', 'x', headers => '{"semel-a": "a"}'"#, "headers: names that begin with semel- or x- are not free"),
        ("'t', 'x', not_before => '-infinity'", "not_before: is infinite"),
        ("'t', 'x', tenant => ''", "tenant: is empty"),
        ("'', NULL, tenant => NULL", &format!("tenant: is null; {topic}; body: is null")),
    ] {
        let refusal = refused(&mut program, &format!("SELECT semel_publish({arguments})")).await;
        assert_eq!(refusal, ("22023".to_owned(), format!("semel_publish: {why}")));
    }
    assert_eq!(place.lab.number("SELECT count(*) FROM semel_outbox").await, 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn messages_of_a_key_by_sql_and_by_the_library_are_in_one_line() {
    let place = Place::new().await;
    let mut tasks = JoinSet::new();
    let store = Arc::new(place.ledger.store().clone());
    for n in 0..8 {
        let (store, mut program) = (store.clone(), place.program().await);
        tasks.spawn(async move {
            for _ in 0..20 {
                match n % 2 {
                    0 => drop(publish(&mut program, "'orders', 'x', ordering_key => 'line'").await),
                    _ => put(&store, Message { ordering_key: Some("line".into()), ..message() }).await,
                }
            }
        });
    }
    soon(tasks.join_all()).await;
    let numbers = place.lab.texts("SELECT number || ' ' || state FROM semel_outbox ORDER BY number").await;
    let expected: Vec<String> =
        (1..=160).map(|n| format!("{n} {}", if n == 1 { "ready" } else { "blocked" })).collect();
    assert_eq!(numbers, expected, "no gap, and one that may be published");
}
