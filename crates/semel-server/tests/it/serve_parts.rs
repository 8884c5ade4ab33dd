//! The laws of a server in which a part of a task dies: what nobody could do without ends it, the rest goes on.

use std::{
    io::{Read as _, Write as _},
    net::TcpStream,
    process::Command,
};

use crate::{
    deliveries::{email, one},
    desk::{post, serve},
    endpoint::Endpoint,
    hooks::{command, start_as},
    notifications::of_restaurant,
    place::Place,
    proposals::rows,
    serve_faults::{ALL, ends_because_of, log, logged},
    support::{SOON, Server, eventually},
};

/// What was in the hands of somebody who died soon comes again.
const SOON_AGAIN: [(&str, &str); 1] = [("SEMEL_MESSAGES_VISIBILITY", "1s")];

/// A server in which a task panics at a point.
fn breaking(place: &Place, point: &str, variables: &[(&str, &str)]) -> Command {
    let mut server = command(place, ALL, variables);
    logged(server.env("SEMEL_CRASH", format!("{point}:1:panic")), place);
    server
}

/// Whether all that came with an event has been carried to everybody, and nothing is left in a queue.
fn is_carried(place: &Place) -> bool {
    let done = "SELECT kind FROM notification_fanouts WHERE done_at IS NOT NULL";
    !rows(place, done).is_empty() && rows(place, "SELECT CAST(id AS TEXT) FROM semel_queue").is_empty()
}

#[test]
fn a_queue_that_nobody_reads_any_more_ends_the_server() {
    let place = Place::sqlite();
    let mut server = Server::start_with(&mut breaking(&place, "queue.taken", &SOON_AGAIN));
    assert_eq!(post(&server, "/events", &of_restaurant("e1", 5).to_string()).status, 202);
    ends_because_of("listener", &mut server.process, &place);
    let _next = start_as(&place, ALL, &SOON_AGAIN);
    eventually(SOON, "the event is carried", || is_carried(&place));
}

#[test]
fn words_about_messages_that_were_lost_are_said_again() {
    let place = Place::sqlite();
    let server = Server::start_with(&mut breaking(&place, "queue.said", &SOON_AGAIN));
    assert_eq!(post(&server, "/events", &of_restaurant("e1", 5).to_string()).status, 202);
    eventually(SOON, "it breaks", || log(&place).contains("on purpose, at queue.said"));
    eventually(SOON, "the queue is empty", || is_carried(&place));
}

#[test]
fn a_batch_of_events_that_breaks_does_not_close_the_way_in() {
    let place = Place::sqlite();
    let server = Server::start_with(&mut breaking(&place, "events.stored", &[]));
    let event = of_restaurant("e1", 5).to_string();
    assert_eq!(post(&server, "/events", &event).status, 503);
    assert_eq!(post(&server, "/events", &event).status, 202);
}

#[test]
fn a_deliverer_that_can_mark_nothing_ends_the_server() {
    let place = Place::sqlite();
    one(&place);
    let endpoint = Endpoint::that([]);
    let url = endpoint.url();
    let mut server = Server::start_with(&mut breaking(&place, "deliver.marked", &email(&url, "hold")));
    ends_because_of("deliverer", &mut server.process, &place);
    assert_eq!(
        (endpoint.calls().len(), rows(&place, "SELECT status FROM notifications")),
        (1, vec!["SENT".to_owned()])
    );
}

#[test]
fn streams_that_nobody_looks_after_end_the_server() {
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
