//! Enqueues of new keys.

use std::{sync::Arc, time::Duration};

use semel::{Enqueued, Fingerprint, Labels, OnLost, Policy, Priority, Scope, Timestamp, Work, prelude::*};
use semel_testkit::key;
use sqlx::Connection as _;
use tokio::{sync::Barrier, task::JoinSet};

use super::{Place, answer, enqueue, mail, publish, refused, run, soon};

fn work(name: &str, payload: &[u8]) -> Work {
    let work = Work::new(mail(), key(name), Fingerprint::of_bytes(payload));
    work.payload(payload.to_vec()).policy_of_worker(Policy::default())
}

/// Everything that is stored for an operation, but its id, its key and its times, of which only differences count.
async fn stored(place: &Place, name: &str) -> String {
    let sql = format!(
        "SELECT (to_jsonb(o) - ARRAY['id', 'fence', 'key', 'created_at', 'look_at']
                 || jsonb_build_object('kept', o.look_at - o.created_at, 'is new', o.id = o.fence, 'backlog',
                        (SELECT to_jsonb(b) - ARRAY['operation', 'due']
                                || jsonb_build_object('due', CASE WHEN o.not_before IS NULL THEN b.due - o.created_at ELSE b.due END)
                         FROM semel_backlog AS b WHERE b.operation = o.id)))::text
         FROM semel_operations AS o WHERE o.key = '{name}'"
    );
    place.lab.texts(&sql).await.join("\n")
}

#[tokio::test]
async fn an_enqueue_by_sql_stores_what_the_library_stores() {
    let place = Place::new().await;
    let mut program = place.program().await;
    let later = Timestamp::from_micros(4_102_444_800_123_456);
    let labels = Labels::default().with(1, "mail").unwrap().with(2, "de").unwrap().with(4, "customer 7").unwrap();
    let policy = Policy {
        max_attempts: Some(3),
        on_lost: OnLost::Hold,
        lease: Duration::from_millis(61_500),
        retention: Some(Duration::from_secs(7 * 86_400)),
        ..Policy::default()
    };
    let long = Policy { lease: Duration::from_secs(7200), max_run: Duration::from_secs(7200), ..Policy::default() };
    let short = Policy { on_lost: OnLost::Rerun, max_run: Duration::from_secs(60), ..Policy::default() };
    let acme = Scope::new("acme", "shop", "mail to/ünknown").unwrap();
    let of_acme = Work::new(acme, key("library 7"), Fingerprint::of_bytes(b"x")).payload("x");
    for (n, (with, work)) in [
        ("", work("library 0", b"x")),
        (", not_before => '2100-01-01 00:00:00.123456Z', priority => -2", {
            work("library 1", b"x").not_before(later).priority(Priority::new(-2).unwrap())
        }),
        (", not_before => '1999-01-01Z'", work("library 2", b"x").not_before(Timestamp::from_micros(1))),
        (", label1 => 'mail', label2 => 'de', label4 => 'customer 7'", work("library 3", b"x").labels(labels)),
        (
            ", max_attempts => 3, on_lost => 'hold', lease => '61.5 s', retention => '7 days'",
            work("library 4", b"x").policy(policy),
        ),
        (", lease => '2 hours'", work("library 5", b"x").policy(long)),
        (", on_lost => 'rerun', max_run => '1 minute'", work("library 6", b"x").policy(short)),
        (", tenant => 'acme'", of_acme.policy_of_worker(Policy::default())),
    ]
    .into_iter()
    .enumerate()
    {
        let kind = if n == 7 { "mail to/ünknown" } else { "mail" };
        let (said, id, created) = enqueue(&mut program, &format!("'shop', '{kind}', 'sql {n}', 'x'{with}")).await;
        assert_eq!((said.as_str(), created), ("enqueued", true));
        let Enqueued::New(op) = place.ledger.enqueue(work).await.unwrap() else { panic!("{with}") };
        assert!(op.id > id, "ids grow");
        let (ours, theirs) = (stored(&place, &format!("sql {n}")).await, stored(&place, &format!("library {n}")).await);
        assert_eq!(ours, theirs, "{with}");
        assert!(ours.contains("pending"), "{ours}");
    }
    place.counters_are_exact().await;
}

#[tokio::test]
async fn the_library_knows_the_bytes_that_sql_has_fingerprinted() {
    let place = Place::new().await;
    let mut program = place.program().await;
    let mut payloads: Vec<Vec<u8>> = [0, 1, 23, 24, 55, 56, 64, 255, 256, 65_536, 100_001]
        .map(|n: usize| (0..n).map(|at| u8::try_from((at * 7 + n) % 256).unwrap()).collect())
        .into();
    payloads.extend([b"\\x00 \\".to_vec(), "{\"to\": \"Zoë 🎉\"}\r\n".into()]);
    for (n, payload) in payloads.iter().enumerate() {
        let name = format!("k{n}");
        let sql = "SELECT answer, operation, created FROM semel_enqueue_bytes('shop', 'mail', $1, $2)";
        let ask =
            |name: String, payload: Vec<u8>| sqlx::query_as::<_, (String, i64, bool)>(sql).bind(name).bind(payload);
        let (said, id, _) = ask(name.clone(), payload.clone()).fetch_one(&mut program).await.unwrap();
        assert_eq!(said, "enqueued");
        let Enqueued::Waiting(waiting) = place.ledger.enqueue(work(&name, payload)).await.unwrap() else {
            panic!("{n}")
        };
        assert_eq!((waiting.operation.id, waiting.operation.payload.as_deref()), (id, Some(&payload[..])));
        let other = [payload, &b"."[..]].concat();
        assert_eq!(place.ledger.enqueue(work(&name, &other)).await.unwrap().word(), "mismatch");
        assert_eq!(ask(name, other).fetch_one(&mut program).await.unwrap(), ("mismatch".to_owned(), id, false));
        // The other way round.
        let name = format!("l{n}");
        let Enqueued::New(op) = place.ledger.enqueue(work(&name, payload)).await.unwrap() else { panic!("{n}") };
        let again = ask(name, payload.clone()).fetch_one(&mut program).await.unwrap();
        assert_eq!(again, ("waiting".to_owned(), op.id, false));
        // Text is its UTF-8.
        if let Ok(text) = std::str::from_utf8(payload)
            && !text.contains('\0')
        {
            let sql = "SELECT answer FROM semel_enqueue('shop', 'mail', $1, $2)";
            let said: String =
                sqlx::query_scalar(sql).bind(format!("k{n}")).bind(text).fetch_one(&mut program).await.unwrap();
            assert_eq!(said, "waiting");
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_key_enqueued_by_sql_and_by_the_library_at_once_is_one_operation() {
    let place = Place::new().await;
    let all = 16;
    for round in 0..10 {
        let (start, mut asks) = (Arc::new(Barrier::new(all)), JoinSet::new());
        let name = format!("key {round}");
        for n in 0..all {
            let (start, name, ledger, mut program) =
                (start.clone(), name.clone(), place.ledger.clone(), place.program().await);
            asks.spawn(async move {
                start.wait().await;
                match n % 2 {
                    0 => {
                        let (said, id, created) =
                            enqueue(&mut program, &format!("'shop', 'mail', '{name}', 'x'")).await;
                        assert_eq!(created, said == "enqueued");
                        (said, id)
                    }
                    _ => {
                        let enqueued = ledger.enqueue(work(&name, b"x")).await.unwrap();
                        (enqueued.word().to_owned(), enqueued.operation().id)
                    }
                }
            });
        }
        let answers = soon(asks.join_all()).await;
        assert_eq!(answers.iter().filter(|(said, _)| said == "enqueued").count(), 1, "{answers:?}");
        assert!(answers.iter().all(|(said, id)| *id == answers[0].1 && (said == "enqueued" || said == "waiting")));
    }
    assert_eq!(place.lab.number("SELECT count(*) FROM semel_operations").await, 10);
    place.counters_are_exact().await;
}

#[tokio::test]
async fn work_and_a_message_commit_with_the_rows_of_their_transaction_or_not_at_all() {
    const ALL: &str = "SELECT (SELECT count(*) FROM orders) + (SELECT count(*) FROM semel_operations)
        + (SELECT count(*) FROM semel_backlog) + (SELECT count(*) FROM semel_deltas) + (SELECT count(*) FROM semel_outbox)
        + (SELECT count(*) FROM semel_outbox_keys)";
    const WORK: &str = "BEGIN; INSERT INTO orders VALUES (1);
        SELECT * FROM semel_enqueue('shop', 'mail', 'order-1', 'x');
        SELECT semel_publish('orders', 'x', ordering_key => 'order-1')";
    let place = Place::new().await;
    let mut program = place.program().await;
    run(&mut program, "CREATE TABLE orders (id BIGINT PRIMARY KEY)").await;
    run(&mut program, WORK).await;
    assert_eq!(place.lab.number(ALL).await, 0, "nobody sees them before the commit");
    run(&mut program, "ROLLBACK").await;
    assert_eq!(place.lab.number(ALL).await, 0);
    // A savepoint, too; and a connection that is lost.
    run(&mut program, &format!("BEGIN; SAVEPOINT s; {}; ROLLBACK TO s; COMMIT", WORK.trim_start_matches("BEGIN; ")))
        .await;
    run(&mut program, WORK).await;
    program.close().await.unwrap();
    assert_eq!(place.lab.number(ALL).await, 0);
    let mut program = place.program().await;
    run(&mut program, &format!("{WORK}; COMMIT")).await;
    assert_eq!(place.lab.number(ALL).await, 6);
    place.counters_are_exact().await;
}

#[tokio::test]
async fn an_uncommitted_enqueue_blocks_no_other_key() {
    let place = Place::new().await;
    let (mut slow, mut program) = (place.program().await, place.program().await);
    assert_eq!(answer(&mut program, "'shop', 'mail', 'known', 'x'").await, "enqueued");
    run(&mut slow, "BEGIN; SELECT * FROM semel_enqueue('shop', 'mail', 'held', 'x')").await;
    run(&mut slow, "SELECT * FROM semel_operations WHERE key = 'known' FOR UPDATE").await;
    run(&mut program, "SET lock_timeout = '100ms'").await;
    assert_eq!(answer(&mut program, "'shop', 'mail', 'free', 'x'").await, "enqueued");
    assert_eq!(answer(&mut program, "'shop', 'mail', 'known', 'x'").await, "waiting", "it is read, not locked");
    assert_eq!(soon(place.ledger.enqueue(work("another", b"x"))).await.unwrap().word(), "enqueued");
    let (code, _) = refused(&mut program, "SELECT * FROM semel_enqueue('shop', 'mail', 'held', 'x')").await;
    assert_eq!(code, "55P03", "its own key waits for the commit");
    let waits = tokio::spawn(async move {
        run(&mut program, "SET lock_timeout = 0").await;
        answer(&mut program, "'shop', 'mail', 'held', 'x'").await
    });
    run(&mut slow, "ROLLBACK").await;
    assert_eq!(soon(waits).await.unwrap(), "enqueued");
}

#[tokio::test]
async fn wrong_arguments_are_refused_by_their_names() {
    let place = Place::new().await;
    let mut program = place.program().await;
    let long = |n: usize| format!("repeat('x', {n})");
    let fit = format!("{}, {}, {}, {}, label1 => {}", long(64), long(200), long(255), long(8 << 20), long(255));
    assert_eq!(answer(&mut program, &format!("{fit}, tenant => {}", long(64))).await, "enqueued", "the limits");
    for (arguments, why) in [
        ("'', 'mail', 'k', 'x'", "service: is empty"),
        ("NULL, 'mail', 'k', 'x'", "service: is null"),
        ("'a/b', 'mail', 'k', 'x'", "service: has a slash in it"),
        (&format!("{}, 'mail', 'k', 'x'", long(65)), "service: is longer than 64 bytes"),
        (&format!("'shop', {}, 'k', 'x'", long(201)), "kind: is longer than 200 bytes"),
        ("'shop', '', 'k', 'x'", "kind: is empty"),
        ("'shop', 'mail', '', 'x'", "key: is empty"),
        ("'shop', 'mail', NULL, 'x'", "key: is null"),
        ("'shop', 'mail', repeat('é', 128), 'x'", "key: is longer than 255 bytes"),
        (r"'shop', 'mail', E'a\nb', 'x'", "key: has control characters"),
        (r"'shop', 'mail', E'a\u0085b', 'x'", "key: has control characters"),
        ("'shop', 'mail', 'k', NULL", "payload: is null"),
        (&format!("'shop', 'mail', 'k', {}", long((8 << 20) + 1)), "payload: is larger than 8388608 bytes"),
        ("'shop', 'mail', 'k', 'x', priority => 3", "priority: is 3, must be -2 to 2"),
        ("'shop', 'mail', 'k', 'x', priority => NULL", "priority: is null, must be -2 to 2"),
        ("'shop', 'mail', 'k', 'x', not_before => 'infinity'", "not_before: is infinite"),
        ("'shop', 'mail', 'k', 'x', not_before => '9999-01-01'", "not_before: is more than 1000 years ahead"),
        ("'shop', 'mail', 'k', 'x', label3 => ''", "label3: is empty"),
        (&format!("'shop', 'mail', 'k', 'x', label4 => {}", long(256)), "label4: is longer than 255 bytes"),
        ("'shop', 'mail', 'k', 'x', max_attempts => 0", "max_attempts: must be 1 to 4294967295"),
        ("'shop', 'mail', 'k', 'x', on_lost => 'probe'", "on_lost: must be rerun or hold"),
        ("'shop', 'mail', 'k', 'x', lease => '99 ms'", "lease: is shorter than 100ms"),
        ("'shop', 'mail', 'k', 'x', lease => '1 h', max_run => '59 min'", "max_run: is shorter than the lease"),
        ("'shop', 'mail', 'k', 'x', retention => '0'", "retention: must be longer than 0"),
        ("'shop', 'mail', 'k', 'x', retention => '1003 years'", "retention: is longer than 1000 years"),
        ("'shop', 'mail', 'k', 'x', tenant => 'a/b'", "tenant: has a slash in it"),
        ("'', 'mail', '', 'x', priority => 9", "service: is empty; key: is empty; priority: is 9, must be -2 to 2"),
    ] {
        let refusal = refused(&mut program, &format!("SELECT * FROM semel_enqueue({arguments})")).await;
        assert_eq!(refusal, ("22023".to_owned(), format!("semel_enqueue: {why}")));
    }
    assert_eq!(place.lab.number("SELECT count(*) FROM semel_operations").await, 1);
}

#[tokio::test]
async fn equal_keys_of_two_tenants_are_two_operations() {
    let place = Place::new().await;
    let mut program = place.program().await;
    let mut ids = Vec::new();
    for (tenant, payload) in [("a", "x"), ("b", "y"), ("default", "z")] {
        let (said, id, _) =
            enqueue(&mut program, &format!("'shop', 'mail', 'k', '{payload}', tenant => '{tenant}'")).await;
        assert_eq!(said, "enqueued");
        ids.push(id);
    }
    for (tenant, payload, said) in [("a", "x", "waiting"), ("b", "x", "mismatch"), ("default", "z", "waiting")] {
        assert_eq!(
            answer(&mut program, &format!("'shop', 'mail', 'k', '{payload}', tenant => '{tenant}'")).await,
            said
        );
    }
    let scope = Scope::new("b", "shop", "mail").unwrap();
    let of_b = place.ledger.store().by_key(&scope, &key("k")).await.unwrap().unwrap();
    assert_eq!((of_b.id, of_b.payload.as_deref()), (ids[1], Some(&b"y"[..])));
}

/// As after the promotion of a standby whose sequence is behind.
#[tokio::test]
async fn nothing_is_enqueued_on_another_server_before_a_node_has_raised_the_epoch() {
    let place = Place::new().await;
    let mut program = place.program().await;
    let (_, first, _) = enqueue(&mut program, "'shop', 'mail', 'first', 'x'").await;
    run(&mut program, "UPDATE semel_epoch SET timeline = timeline + 1; SELECT setval('semel_fence', 1, false)").await;
    let (code, why) = refused(&mut program, "SELECT * FROM semel_enqueue('shop', 'mail', 'second', 'x')").await;
    assert_eq!(code, "55000");
    assert!(why.contains("no node of Semel has connected to this server"), "{why}");
    let _node = place.lab.open().await;
    let (said, second, _) = enqueue(&mut program, "'shop', 'mail', 'second', 'x'").await;
    assert_eq!(said, "enqueued");
    assert!(second > first, "{second} is not above {first}");
}

/// As after the first `migrate` of a database, without a node.
#[tokio::test]
async fn nothing_is_enqueued_before_a_node_has_written_the_epoch() {
    let place = Place::new().await;
    let mut program = place.program().await;
    run(&mut program, "DELETE FROM semel_epoch").await;
    let (code, _) = refused(&mut program, "SELECT * FROM semel_enqueue('shop', 'mail', 'k', 'x')").await;
    assert_eq!(code, "55000");
}

#[tokio::test]
async fn no_call_scans_a_table() {
    let place = Place::new().await;
    for analyzed in [false, true] {
        let mut program = place.program().await;
        if analyzed {
            let many = (0..3000).map(|n| work(&format!("many {n}"), b"x")).collect();
            place.ledger.enqueue_all(many).await.unwrap();
            run(&mut program, "ANALYZE").await;
        }
        run(&mut program, "BEGIN").await;
        // More than five times each: then a plan is generic.
        for n in 0..8 {
            let name = format!("{analyzed} {n}");
            assert_eq!(answer(&mut program, &format!("'shop', 'mail', '{name}', 'x'")).await, "enqueued");
            assert_eq!(answer(&mut program, &format!("'shop', 'mail', '{name}', 'x'")).await, "waiting");
            let expire = format!(
                "SET LOCAL enable_seqscan = off;
                 UPDATE semel_operations SET state = 'failed', settled_at = 1, expires_at = 1
                 WHERE tenant = 'default' AND service = 'shop' AND kind = 'mail' AND key = '{name}';
                 SET LOCAL enable_seqscan = on"
            );
            run(&mut program, &expire).await;
            assert_eq!(answer(&mut program, &format!("'shop', 'mail', '{name}', 'x'")).await, "enqueued");
            publish(&mut program, &format!("'orders', 'x', ordering_key => '{}'", n % 2)).await;
        }
        let scanned = "SELECT relname::text FROM pg_stat_xact_user_tables
                       WHERE schemaname = current_schema() AND seq_scan > 0";
        let scans: Vec<String> = sqlx::query_scalar(scanned).fetch_all(&mut program).await.unwrap();
        assert_eq!(scans, Vec::<String>::new(), "analyzed: {analyzed}");
        run(&mut program, "COMMIT").await;
    }
}

#[tokio::test]
async fn the_version_of_the_functions_is_shown() {
    let place = Place::new().await;
    assert_eq!(place.lab.number("SELECT semel_sql_version()::bigint").await, 1);
}
