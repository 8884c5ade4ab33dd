//! PostgreSQL: programs that enqueue by SQL, and workers that pull by HTTP.

use std::{
    io::Write as _,
    process::{Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use serde_json::{Value, json};

use crate::{operations_api::Api, operations_nodes::token, place::Place, proposals::rows, support::stderr};

/// A program that stores an order and enqueues its mail in one transaction, and ends it as told.
type Program = fn(place: &Place, order: u32, end: &str);

/// What a program prints that is given this input.
fn run(place: &Place, mut command: Command, input: &str) -> String {
    let command = command.env("DATABASE_URL", &place.url).stdin(Stdio::piped());
    let mut process = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    process.stdin.take().unwrap().write_all(input.as_bytes()).unwrap();
    let said = process.wait_with_output().unwrap();
    assert!(said.status.success(), "{}", stderr(&said));
    String::from_utf8(said.stdout).unwrap()
}

fn psql(place: &Place, session: &str) -> String {
    let bin = std::env::var("SEMEL_TEST_POSTGRES_BIN")
        .expect("set SEMEL_TEST_POSTGRES_BIN to what `scripts/postgres.sh bin` prints, or run `make test`");
    let mut command = Command::new(format!("{bin}/psql"));
    command.args(["--no-psqlrc", "--tuples-only", "--no-align", "--set", "ON_ERROR_STOP=1", &place.url]);
    run(place, command, session)
}

fn by_psql(place: &Place, order: u32, end: &str) {
    let enqueue = format!(r#"SELECT * FROM semel_enqueue('shop', 'mail', 'order-{order}', '{{"order": {order}}}')"#);
    psql(place, &format!("BEGIN; INSERT INTO orders VALUES ({order}); {enqueue}; {end};"));
}

fn by_python(place: &Place, order: u32, end: &str) {
    let script = r#"
import json, os, sys
import psycopg

order, end = int(sys.argv[1]), sys.argv[2]
with psycopg.connect(os.environ["DATABASE_URL"]) as db:
    db.execute("INSERT INTO orders VALUES (%s)", (order,))
    work = ("shop", "mail", f"order-{order}", json.dumps({"order": order}))
    db.execute("SELECT * FROM semel_enqueue(%s, %s, %s, %s)", work)
    {"COMMIT": db.commit, "ROLLBACK": db.rollback}[end]()
"#;
    let python = std::env::var_os("SEMEL_TEST_PYTHON")
        .expect("set SEMEL_TEST_PYTHON to what `scripts/python.sh bin` prints, or run `make test`");
    let mut command = Command::new(python);
    command.args(["-c", script, &order.to_string(), end]);
    run(place, command, "");
}

/// The scope of a pull is the service of the enqueue.
fn pull(wait: u32) -> Value {
    json!({ "operationNames": ["mail"], "scope": "shop", "max": 10, "wait": wait, "claimToken": token() })
}

fn a_commit_by(program: Program) {
    let place = Place::postgres();
    let api = Api::start(&place);
    psql(&place, "CREATE TABLE orders (id BIGINT PRIMARY KEY)");
    program(&place, 1, "ROLLBACK");
    assert_eq!(api.next(&pull(0)), []);
    let (mut pulled, waited) = thread::scope(|scope| {
        let waiting = scope.spawn(|| (api.next(&pull(30)), Instant::now()));
        program(&place, 2, "ROLLBACK");
        program(&place, 3, "COMMIT");
        let committed = Instant::now();
        let (pulled, answered) = waiting.join().unwrap();
        (pulled, answered.saturating_duration_since(committed))
    });
    assert!(pulled.len() == 1 && waited < Duration::from_secs(10), "{pulled:?} after {waited:?}");
    let held = pulled.remove(0);
    let operation = &held.operation;
    assert_eq!((&operation["idempotencyKey"], &operation["input"]), (&json!("order-3"), &json!({ "order": 3 })));
    assert_eq!((&operation["scope"], &operation["retryCount"]), (&json!("shop"), &json!(0)));
    assert_eq!(rows(&place, "SELECT id::text FROM orders"), ["3"]);
    api.complete(&held, json!({ "mail": 7 }));
    // The program's own retry is told, and changes nothing.
    let again = r#"SELECT answer, created FROM semel_enqueue('shop', 'mail', 'order-3', '{"order": 3}')"#;
    assert_eq!(psql(&place, again), "replay|f\n");
    assert_eq!(api.next(&pull(0)), []);
    let found = api.get("?scope=shop&key=order-3").json()["items"].take();
    assert_eq!((found.as_array().unwrap().len(), &found[0]["resultData"]), (1, &json!({ "mail": 7 })));
    assert_eq!(api.get("?key=order-3").json()["items"], json!([]), "another scope");
}

#[test]
fn a_commit_by_psql_reaches_a_waiting_pull_and_a_rollback_reaches_none() {
    a_commit_by(by_psql);
}

#[test]
fn a_commit_by_python_reaches_a_waiting_pull_and_a_rollback_reaches_none() {
    a_commit_by(by_python);
}
