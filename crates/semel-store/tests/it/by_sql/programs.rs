//! Programs in other languages: the examples of docs/sql.md are run as they are printed.

use std::{
    io::Write as _,
    process::{Command, Output, Stdio},
};

use semel::{Enqueued, Fingerprint, Policy, Work};
use semel_testkit::{Kind, Lab, key};

use super::{Place, mail, run};

const PAGE: &str = include_str!("../../../../../docs/sql.md");

/// The first block of the page in a language, after a heading.
fn block(heading: &str, language: &str) -> String {
    let (_, section) = PAGE.split_once(heading).expect(heading);
    let (_, block) = section.split_once(&format!("```{language}\n")).expect(language);
    block.split_once("```").unwrap().0.to_owned()
}

/// Runs a program with an input and a database.
fn started(mut command: Command, input: &str, url: &str) -> Output {
    let command = command.env("DATABASE_URL", url).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut process = command.spawn().unwrap();
    process.stdin.take().unwrap().write_all(input.as_bytes()).unwrap();
    process.wait_with_output().unwrap()
}

/// What psql prints.
fn psql(place: &Place, input: &str) -> String {
    let bin = std::env::var("SEMEL_TEST_POSTGRES_BIN")
        .expect("set SEMEL_TEST_POSTGRES_BIN to what `scripts/postgres.sh bin` prints, or run `make test`");
    let mut command = Command::new(format!("{bin}/psql"));
    command.args(["--no-psqlrc", "--set", "ON_ERROR_STOP=1", &place.lab.url]);
    let said = started(command, input, &place.lab.url);
    assert!(said.status.success(), "{}", String::from_utf8_lossy(&said.stderr));
    String::from_utf8(said.stdout).unwrap()
}

/// Runs a script, and returns what it prints and whether it succeeded.
fn python(place: &Place, script: &str) -> (String, bool) {
    let python = std::env::var_os("SEMEL_TEST_PYTHON")
        .expect("set SEMEL_TEST_PYTHON to what `scripts/python.sh bin` prints, or run `make test`");
    let mut command = Command::new(python);
    command.arg("-");
    let said = started(command, script, &place.lab.url);
    let text = [said.stdout, said.stderr].concat();
    (String::from_utf8(text).unwrap(), said.status.success())
}

fn lines(text: &str) -> Vec<&str> {
    text.lines().map(str::trim_end).collect()
}

async fn counts(place: &Place) -> [i64; 3] {
    let mut counts = [0; 3];
    for (n, table) in ["orders", "semel_operations", "semel_outbox"].into_iter().enumerate() {
        counts[n] = place.lab.number(&format!("SELECT count(*) FROM {table}")).await;
    }
    counts
}

#[tokio::test]
async fn the_session_of_the_documentation_prints_what_is_printed_there() {
    let place = Place::new().await;
    let session = block("# SQL for any language", "console");
    let (mut typed, mut printed) = (String::new(), Vec::new());
    for line in session.lines() {
        match line.split_once("> ").filter(|(prompt, _)| prompt.starts_with("shop=")) {
            Some((_, statement)) => typed += &format!("{statement}\n"),
            None => printed.push(line.trim_end()),
        }
    }
    assert!(typed.contains("COMMIT"), "{typed}");
    assert_eq!(lines(&psql(&place, &typed)), printed);
    assert_eq!(counts(&place).await, [1, 1, 1]);
}

#[tokio::test]
async fn a_sequence_of_psql_that_is_rolled_back_leaves_nothing() {
    let place = Place::new().await;
    let session = "INSERT INTO orders VALUES (1, 'ann');
        SELECT * FROM semel_enqueue('shop', 'mail', 'order-1', 'x');
        SELECT semel_publish('orders', 'x');";
    psql(&place, &format!("CREATE TABLE orders (id BIGINT, customer TEXT); BEGIN; {session} ROLLBACK;"));
    assert_eq!(counts(&place).await, [0, 0, 0]);
    psql(&place, &format!("BEGIN; {session} COMMIT;"));
    assert_eq!(counts(&place).await, [1, 1, 1]);
}

#[tokio::test]
async fn the_python_of_the_documentation_commits_all_or_nothing() {
    let place = Place::new().await;
    run(&mut place.program().await, "CREATE TABLE orders (id BIGINT PRIMARY KEY, customer TEXT NOT NULL)").await;
    let script = block("## In Python", "python").replace("\"dbname=shop\"", "__import__('os').environ['DATABASE_URL']");
    let (said, done) = python(&place, &format!("{script}\n    raise Exception('changed my mind')\n"));
    assert!(!done && said.contains("changed my mind"), "{said}");
    assert_eq!(counts(&place).await, [0, 0, 0], "rolled back");
    let (said, done) = python(&place, &format!("{script}\nprint(answer, created, operation > 0)\n"));
    assert!(done, "{said}");
    assert_eq!(said, "enqueued True True\n");
    assert_eq!(counts(&place).await, [1, 1, 1]);
    let payload = r#"{"to": "bob@example.com"}"#;
    let again = Work::new(mail(), key("order-4712"), Fingerprint::of_bytes(payload.as_bytes()));
    let Enqueued::Waiting(waiting) = place.ledger.enqueue(again.policy_of_worker(Policy::default())).await.unwrap()
    else {
        panic!("the library does not know it")
    };
    assert_eq!(waiting.operation.payload.as_deref(), Some(payload.as_bytes()));
    // Other bytes under the key: the program rolls back.
    let other = script.replace("4712, \"bob@example.com\"", "4713, \"x\"").replace("{\"to\": ", "{\"To\": ");
    let (said, done) = python(&place, &other);
    assert!(!done && said.contains("was enqueued with other data"), "{said}");
    assert_eq!(counts(&place).await, [1, 1, 1]);
}

/// The arguments have the types that the driver gives them: bytes, integers, times, intervals, JSON.
#[tokio::test]
async fn a_program_in_python_gives_every_argument_in_its_own_type() {
    let place = Place::new().await;
    let (said, done) = python(
        &place,
        r#"
import datetime, os, uuid
import psycopg
from psycopg.types.json import Jsonb

hour = datetime.timedelta(hours=1)
soon = datetime.datetime.now(datetime.timezone.utc) + hour
with psycopg.connect(os.environ["DATABASE_URL"]) as db:
    print(db.execute(
        "SELECT answer FROM semel_enqueue_bytes(%s, %s, %s, %s, not_before => %s, priority => %s, label1 => %s,"
        " max_attempts => %s, on_lost => %s, lease => %s, max_run => %s, retention => %s, tenant => %s)",
        ("shop", "mail", "k", b"\x00\xff", soon, 2, "a", 3, "hold", hour, 2 * hour, 24 * hour, "acme"),
    ).fetchone()[0])
    given = uuid.uuid4()
    print(given == db.execute(
        "SELECT semel_publish_bytes(%s, %s, kind => %s, ordering_key => %s, headers => %s, not_before => %s,"
        " receipt => %s, message_id => %s, tenant => %s)",
        ("orders", b"\x00\xff", "k", "o", Jsonb({"a": "b"}), soon, True, given, "acme"),
    ).fetchone()[0])
    try:
        db.execute("SELECT * FROM semel_enqueue('shop', 'mail', %s, 'x')", ("",))
    except psycopg.errors.InvalidParameterValue as error:
        print(error.diag.message_primary)
"#,
    );
    assert!(done, "{said}");
    assert_eq!(lines(&said), ["enqueued", "True", "semel_enqueue: key: is empty"]);
}

#[tokio::test]
async fn the_trigger_of_the_documentation_publishes_every_change() {
    let place = Place::new().await;
    let mut program = place.program().await;
    run(&mut program, "CREATE TABLE orders (id BIGINT PRIMARY KEY, customer TEXT NOT NULL)").await;
    run(&mut program, &block("## In a trigger", "sql")).await;
    run(
        &mut program,
        "INSERT INTO orders VALUES (1, 'ann'), (2, 'bob'); UPDATE orders SET customer = 'eve' WHERE id = 2",
    )
    .await;
    let told =
        place.lab.texts("SELECT concat_ws(' ', kind, ordering_key, number, state) FROM semel_outbox ORDER BY id").await;
    let expected = ["order.insert order-1 1 ready", "order.insert order-2 1 ready", "order.update order-2 2 blocked"];
    assert_eq!(told, expected);
}

/// Without a session: each transaction gets another connection, with the settings of others.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_functions_work_behind_a_pooler_in_transaction_mode() {
    let lab = Lab::in_real_time(Kind::Postgres).await;
    let guest = lab.guest().await;
    let place = Place { ledger: lab.ledger().await, lab };
    let grant = "GRANT EXECUTE ON FUNCTION semel_enqueue, semel_publish TO";
    let role = guest.url.split_once("://").unwrap().1.split_once('@').unwrap().0.to_owned();
    run(&mut place.program().await, &format!("{grant} {role}")).await;
    let bouncer = semel_testkit::faults::PgBouncer::start(&guest.url, "pool_mode = transaction\ndefault_pool_size = 2");
    let url = bouncer.url(&guest.url);
    let options = url.parse::<sqlx::postgres::PgConnectOptions>().unwrap().extra_float_digits(None);
    let mut programs = tokio::task::JoinSet::new();
    for n in 0..6 {
        let options = options.clone();
        programs.spawn(async move {
            let mut conn = <sqlx::PgConnection as sqlx::Connection>::connect_with(&options).await.unwrap();
            for round in 0..10 {
                let work = format!("SELECT * FROM semel_enqueue('shop', 'mail', 'k {n} {round}', 'x')");
                run(&mut conn, &format!("BEGIN; {work}; SELECT semel_publish('orders', 'x'); COMMIT")).await;
            }
        });
    }
    super::soon(programs.join_all()).await;
    assert_eq!(place.lab.number("SELECT count(*) FROM semel_backlog").await, 60);
    assert_eq!(place.lab.number("SELECT count(*) FROM semel_outbox").await, 60);
}
