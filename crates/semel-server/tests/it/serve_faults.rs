//! The laws of a server whose output cannot be written, or one of whose tasks dies.

use std::{
    fs::{self, File},
    process::{Command, Stdio},
    sync::Arc,
};

use axum::Router;
use rustix::process::Signal;
use semel::{Ledger, Options};
use semel_server::{
    config::BrokerUrl,
    node::{AsksTheStore, Node},
    stop::Stop,
};
use semel_store::{Database, EmbeddedBroker, Settings};

use crate::{
    gateway::gateway,
    hooks::{command, deliver, event, outbox, start_as, status},
    place::Place,
    serve::{ask, serve_app},
    support::{Process, SOON, Server, eventually, stdout},
};

pub(crate) const ALL: &str = "api,relay,worker,sweeper";

/// Events go to an existing queue, and a message of a dead server is soon redelivered.
const QUEUE: [(&str, &str); 2] =
    [("SEMEL_WEBHOOKS_STRIPE_HANDLERS", "*=outbox:news"), ("SEMEL_MESSAGES_RELAY_LEASE", "1s")];

/// Files that cannot be written: a full disk, and a pipe without a reader.
fn deaf() -> [Stdio; 2] {
    let (reader, writer) = std::io::pipe().unwrap();
    drop(reader);
    [full().into(), writer.into()]
}

fn full() -> File {
    File::options().write(true).open("/dev/full").unwrap()
}

/// Has the server's log written to a file.
pub(crate) fn logged(command: &mut Command, place: &Place) {
    command.stderr(File::create(place.path("log")).unwrap());
}

pub(crate) fn log(place: &Place) -> String {
    fs::read_to_string(place.path("log")).unwrap()
}

#[test]
fn a_server_works_and_stops_cleanly_without_a_writable_log() {
    for stderr in deaf() {
        let place = Place::sqlite();
        // At the most verbose level, each task writes to the log sooner or later.
        let mut server = Server::start_with(command(&place, ALL, &QUEUE).env("RUST_LOG", "debug").stderr(stderr));
        assert_eq!(status(&deliver(&server, &event("evt_1", 100, "one"))), "processed");
        // A conflict is a warning.
        assert_eq!(status(&deliver(&server, &event("evt_1", 100, "other"))), "skipped");
        eventually(SOON, "the relay goes on", || outbox(&place).is_empty());
        eventually(SOON, "it is ready", || server.get("/readyz").status == 200);
        server.process.signal(Signal::TERM);
        assert_eq!(server.process.end().code(), Some(0));
    }
}

#[test]
fn a_server_that_cannot_write_its_greeting_logs_its_address() {
    for (n, stdout) in deaf().into_iter().enumerate() {
        let place = Place::sqlite();
        let mut command = if n == 0 { command(&place, ALL, &[]) } else { gateway(&place, "http://127.0.0.1:1") };
        logged(&mut command, &place);
        let mut process = Process::start(command.stdout(stdout));
        eventually(SOON, "the log says where it listens", || log(&place).contains("listens on http://127.0.0.1:"));
        process.signal(Signal::TERM);
        assert_eq!(process.end().code(), Some(0), "{}", log(&place));
    }
}

#[test]
fn a_command_runs_once_even_if_its_output_cannot_be_written() {
    for stderr in deaf() {
        let place = Place::sqlite();
        let mut command = place.semel(["once", "--key", "k", "--", "echo", "done"]);
        // A filter that cannot be parsed is an error, and logged first.
        let output = command.env("RUST_LOG", "[[").stdout(Stdio::piped()).stderr(stderr).spawn().unwrap();
        let output = output.wait_with_output().unwrap();
        assert_eq!((output.status.code(), stdout(&output)), (Some(0), "done\n"));
    }
}

/// Asserts that a server ends by itself with a failure, and that both its log and its last line name the task.
pub(crate) fn ends_because_of(task: &str, process: &mut Process, place: &Place) {
    let end = process.end();
    let log = log(place);
    assert_eq!(end.code(), Some(1), "{log}");
    assert!(log.contains(&format!("task=\"{task}\"")), "{log}");
    let last = log.lines().last().unwrap();
    assert!(last.starts_with("semel: ") && last.contains(task), "{log}");
}

#[test]
fn a_task_that_panics_ends_the_server_with_a_failure_that_names_it() {
    // The relay itself, and the part of it that deletes published messages.
    for point in ["relay.taken:1:panic", "relay.marked:1:panic"] {
        let place = Place::sqlite();
        let mut relay = command(&place, ALL, &QUEUE);
        logged(relay.env("SEMEL_CRASH", point), &place);
        let mut server = Server::start_with(&mut relay);
        // It was stored before the relay saw it, and the server answers the request in flight.
        assert_eq!(status(&deliver(&server, &event("evt_1", 100, "one"))), "processed");
        ends_because_of("relay", &mut server.process, &place);

        // The next server publishes its leased messages.
        let _next = start_as(&place, ALL, &QUEUE);
        eventually(SOON, "the message is carried", || outbox(&place).is_empty());
    }
}

#[test]
fn a_sweep_that_panics_ends_a_server_and_a_gateway_alike() {
    let place = Place::sqlite();
    for mut command in [command(&place, "sweeper", &[]), gateway(&place, "http://127.0.0.1:1")] {
        logged(command.env("SEMEL_SWEEP_EVERY", "100ms").env("SEMEL_CRASH", "sweep.before:1:panic"), &place);
        ends_because_of("sweep", &mut Process::start(command.stdout(Stdio::null())), &place);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_node_whose_task_has_ended_early_is_not_ready_while_it_still_answers() {
    let place = Place::sqlite();
    let database = Database::open(&place.url, Settings::default()).await.unwrap();
    let ledger = Ledger::new(database.clone(), Options::default()).unwrap();
    let (broker, stop) = (Arc::new(EmbeddedBroker::new(database)), Stop::new());
    let node = Node::new(broker.clone(), &stop);
    let ready = AsksTheStore::new(&ledger, broker, &BrokerUrl::Embedded, node.fault());
    let address = serve_app(ready, Router::new()).await;
    assert_eq!(ask(address, "GET", "/readyz", vec![]).await.status, 200);
    node.spawn("counter", async {});
    stop.asked().await;
    let ready = ask(address, "GET", "/readyz", vec![]).await;
    let expected = serde_json::json!({
        "ready": false, "database": "ok", "broker": "embedded",
        "degraded": ["the task counter ended early: this node stops"],
    });
    assert_eq!((ready.status, ready.json()), (503, expected));
}
