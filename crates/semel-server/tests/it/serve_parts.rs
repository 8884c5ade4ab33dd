//! The laws of a server in which a part of a task dies: it ends if the part is essential; otherwise it goes on.

use std::{
    io::{Read as _, Write as _},
    net::TcpStream,
    process::Command,
};

use crate::{
    desk::{post, serve},
    hooks::{command, start_as},
    notifications::of_restaurant,
    place::Place,
    proposals::rows,
    serve_faults::{ALL, ends_because_of, log, logged},
    support::{SOON, Server, eventually},
};

/// The messages of a dead process are soon redelivered.
const SOON_AGAIN: [(&str, &str); 1] = [("SEMEL_MESSAGES_VISIBILITY", "1s")];

/// A server in which a task panics at a point.
fn breaking(place: &Place, point: &str, variables: &[(&str, &str)]) -> Command {
    let mut server = command(place, ALL, variables);
    logged(server.env("SEMEL_CRASH", format!("{point}:1:panic")), place);
    server
}

/// Whether an event has reached all recipients, and no queue has messages left.
fn is_carried(place: &Place) -> bool {
    let done = "SELECT kind FROM notification_fanouts WHERE done_at IS NOT NULL";
    !rows(place, done).is_empty() && rows(place, "SELECT CAST(id AS TEXT) FROM semel_queue").is_empty()
}

#[test]
fn a_server_ends_if_a_consumer_dies() {
    let place = Place::sqlite();
    let mut server = Server::start_with(&mut breaking(&place, "queue.taken", &SOON_AGAIN));
    assert_eq!(post(&server, "/events", &of_restaurant("e1", 5).to_string()).status, 202);
    ends_because_of("listener", &mut server.process, &place);
    let _next = start_as(&place, ALL, &SOON_AGAIN);
    eventually(SOON, "the event is carried", || is_carried(&place));
}

#[test]
fn a_message_whose_acknowledgement_panicked_is_redelivered() {
    let place = Place::sqlite();
    let server = Server::start_with(&mut breaking(&place, "queue.said", &SOON_AGAIN));
    assert_eq!(post(&server, "/events", &of_restaurant("e1", 5).to_string()).status, 202);
    eventually(SOON, "it breaks", || log(&place).contains("on purpose, at queue.said"));
    eventually(SOON, "the queue is empty", || is_carried(&place));
}

#[test]
fn a_batch_of_events_that_panics_does_not_stop_later_ones() {
    let place = Place::sqlite();
    let server = Server::start_with(&mut breaking(&place, "events.stored", &[]));
    let event = of_restaurant("e1", 5).to_string();
    assert_eq!(post(&server, "/events", &event).status, 503);
    assert_eq!(post(&server, "/events", &event).status, 202);
}

#[test]
fn a_server_ends_if_its_stream_task_dies() {
    let place = Place::sqlite();
    drop(serve(&place, "api", &[]));
    let mut server = Server::start_with(&mut breaking(&place, "streams.looked", &[]));
    let mut stream = TcpStream::connect(server.address).unwrap();
    stream.set_read_timeout(Some(SOON)).unwrap();
    let ask = "GET /notifications/stream?kind=restaurant&userId=ana HTTP/1.0\r\nhost: localhost\r\n\r\n";
    stream.write_all(ask.as_bytes()).unwrap();
    ends_because_of("streams", &mut server.process, &place);
    let mut said = String::new();
    stream.read_to_string(&mut said).unwrap();
    assert!(said.contains(" 200 "), "{said}");
}
