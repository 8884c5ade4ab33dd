//! The laws of room: unread bodies use no more memory than their source's budget.

use std::{
    io::{self, Write as _},
    net::TcpStream,
    time::{Duration, Instant},
};

use crate::{
    hooks::{HOST, SECRET, counted, event, post_raw, signed, start, status},
    place::{Place, on_both_databases},
    support::{Answer, SOON, Server, eventually},
};

on_both_databases! {
    a_body_that_gets_no_more_room_is_refused_at_once
    a_full_source_blocks_no_other
}

const LONG: usize = 7 << 20;

/// A server whose sources `stripe` and `other` accept long bodies, and wait for them.
fn start_roomy(place: &Place) -> Server {
    let variables = [
        ("SEMEL_WEBHOOKS_STRIPE_MAX_BODY", "7MiB"),
        ("SEMEL_WEBHOOKS_STRIPE_HANDLERS", "*=http://127.0.0.1:9/"),
        ("SEMEL_WEBHOOKS_STRIPE_BODY_TIMEOUT", "1m"),
        ("SEMEL_WEBHOOKS_OTHER_KIND", "stripe"),
        ("SEMEL_WEBHOOKS_OTHER_SECRETS", SECRET),
        ("SEMEL_WEBHOOKS_OTHER_MAX_BODY", "7MiB"),
        ("SEMEL_WEBHOOKS_OTHER_HANDLERS", "*=http://127.0.0.1:9/"),
    ];
    start(place, &variables)
}

/// A body without its end; or the answer to it.
fn almost(server: &Server) -> Result<TcpStream, Answer> {
    let mut connection = TcpStream::connect(server.address).unwrap();
    let head = format!("POST /webhooks/stripe HTTP/1.1\r\nhost: {HOST}\r\ncontent-length: {LONG}\r\n\r\n");
    connection.write_all(head.as_bytes()).unwrap();
    let written: io::Result<()> = connection.write_all(&vec![b'x'; LONG - 1]);
    connection.set_read_timeout(Some(Duration::from_millis(500))).unwrap();
    if written.is_err() || connection.peek(&mut [0]).is_ok() { Err(Answer::read(connection)) } else { Ok(connection) }
}

/// Fills the room of `stripe`; returns the connections that hold it, and the answer to the one that got no more.
fn fill(server: &Server) -> (Vec<TcpStream>, Answer) {
    let (mut held, began) = (Vec::new(), Instant::now());
    loop {
        assert!(held.len() < 12 && began.elapsed() < SOON, "there is always more room");
        match almost(server) {
            Ok(connection) => held.push(connection),
            Err(told) => return (held, told),
        }
    }
}

/// Waiting would be a deadlock.
fn a_body_that_gets_no_more_room_is_refused_at_once(place: &Place) {
    let server = start_roomy(place);
    let (held, busy) = fill(&server);
    assert_eq!((busy.status, busy.problem().as_str()), (503, "too-many-deliveries"), "{}", busy.body);
    assert_eq!(busy.header("retry-after"), Some("1"));
    eventually(SOON, "it is counted", || counted(place, "refused_busy") == 1);
    assert_eq!(held.len(), 9);
}

fn a_full_source_blocks_no_other(place: &Place) {
    let server = start_roomy(place);
    let (_held, _) = fill(&server);
    // Longer than the rest of the room when nine of the longest are held.
    let body = event("evt_1", 1_700_000_000, &"x".repeat(2 << 20)).to_string().into_bytes();
    let answer = post_raw(server.address, "/webhooks/other", &signed(&body), &body);
    assert_eq!(status(&answer), "accepted", "its endpoint is unreachable, but it is stored");
    assert!(almost(&server).is_err(), "that one is still full");
}
