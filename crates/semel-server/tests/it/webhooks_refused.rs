//! The laws of refused deliveries: nothing of them is stored, and all are counted.

use std::{
    io::Write as _,
    net::{SocketAddr, TcpStream},
    time::Duration,
};

use axum::{extract::ConnectInfo, http::Request};
use semel::{Ledger, Options};
use semel_http::webhooks::{DEFAULT_TOLERANCE, Verifier};
use semel_server::{
    services::webhooks::config::Webhooks,
    services::webhooks::{Handlers, Receiver},
};
use semel_store::{Database, Settings};
use tower::ServiceExt as _;

use crate::{
    hooks::{HOST, SECRET, command, counted, deliver, deliver_to, event, post_raw, signed, signed_by, start, status},
    place::{Place, on_both_databases},
    proposals::rows,
    serve_faults::{log, logged},
    support::{Answer, SOON, Server, eventually, send},
};

on_both_databases! {
    an_unsigned_delivery_is_refused_and_counted
    a_delivery_that_is_no_event_is_refused_and_counted
    bodies_have_a_size_limit_and_a_timeout
    only_a_post_to_a_known_source_is_taken
    a_compressed_body_is_not_inflated
    an_event_of_another_livemode_is_refused
    without_a_signature_only_this_machine_may_send
    a_sender_of_unknown_address_is_not_this_machine
    a_function_that_the_source_does_not_have_is_refused
}

fn nothing_is_stored(place: &Place) {
    assert_eq!(rows(place, "SELECT kind FROM semel_operations"), [""; 0]);
    assert_eq!(rows(place, "SELECT topic FROM semel_outbox"), [""; 0]);
}

fn refused(answer: &Answer, status: u16, problem: &str) {
    assert_eq!((answer.status, answer.problem().as_str()), (status, problem), "{}", answer.body);
}

fn is_counted(place: &Place, word: &str, times: i64) {
    eventually(SOON, &format!("{word} is counted"), || counted(place, word) == times);
}

fn an_unsigned_delivery_is_refused_and_counted(place: &Place) {
    let server = start(place, &[]);
    let body = event("evt_1", 1_700_000_000, "a").to_string().into_bytes();
    let post =
        |headers: &[(String, String)], body: &[u8]| post_raw(server.address, "/webhooks/stripe/f", headers, body);
    let stripe = |secret: &str| Verifier::stripe([secret], DEFAULT_TOLERANCE).unwrap();
    let late = |ago| signed_by(&stripe(SECRET), None, &body, Duration::from_secs(ago));
    let right = signed(&body);
    let twice = [right.clone(), right.clone()].concat();
    let other_secret = signed_by(&stripe("whsec_other"), None, &body, Duration::ZERO);
    let mut flipped = body.clone();
    flipped[1] ^= 1;
    for (headers, body, reason) in [
        (Vec::new(), &body, "missing"),
        (twice, &body, "repeated"),
        (other_secret, &body, "wrong"),
        (right.clone(), &flipped, "wrong"),
        (right.clone(), &[&body[..], b"\n"].concat(), "wrong"),
        (late(302), &body, "too_old"),
        (vec![("stripe-signature".to_owned(), "t=1,v0=00".to_owned())], &body, "unsupported"),
        (vec![("stripe-signature".to_owned(), "v1=00".to_owned())], &body, "malformed"),
    ] {
        let answer = post(&headers, body);
        refused(&answer, 400, "signature-refused");
        assert_eq!(answer.json()["reason"], reason);
        assert!(!answer.body.contains(SECRET));
    }
    nothing_is_stored(place);
    is_counted(place, "refused_wrong", 3);
    for word in ["missing", "repeated", "too_old", "unsupported", "malformed"] {
        is_counted(place, &format!("refused_{word}"), 1);
    }
    // Unverified senders choose the function, so nothing is counted by it.
    assert_eq!(rows(place, "SELECT label2 FROM semel_deltas WHERE label2 = 'f'"), [""; 0]);
    assert_eq!(post(&late(290), &body).status, 200, "old, but not too old");
}

fn a_delivery_that_is_no_event_is_refused_and_counted(place: &Place) {
    let server = start(place, &[]);
    let bodies: [&[u8]; 7] = [
        b"{}",
        b"[]",
        b"{\"id\":",
        b"{\"id\":\"a\",\"id\":\"b\"}",
        b"{\"id\":\"\xff\"}",
        &b"[".repeat(10_000),
        br#"{"id":"evt_1","object":"v2.core.event"}"#,
    ];
    for body in bodies {
        let answer = post_raw(server.address, "/webhooks/stripe", &signed(body), body);
        refused(&answer, 400, "event-malformed");
        assert!(answer.json()["errors"].as_array().is_some_and(|errors| !errors.is_empty()), "{}", answer.body);
    }
    refused(&post_raw(server.address, "/webhooks/stripe", &signed(b""), b""), 400, "event-malformed");
    nothing_is_stored(place);
    is_counted(place, "refused_event", 8);
}

fn bodies_have_a_size_limit_and_a_timeout(place: &Place) {
    let limits = [("SEMEL_WEBHOOKS_STRIPE_MAX_BODY", "2KiB"), ("SEMEL_WEBHOOKS_STRIPE_BODY_TIMEOUT", "300ms")];
    let server = start(place, &limits);
    let padded = |length: usize| {
        let empty = event("evt_1", 1_700_000_000, "").to_string().len();
        event("evt_1", 1_700_000_000, &"x".repeat(length - empty)).to_string().into_bytes()
    };
    let post = |body: &[u8]| post_raw(server.address, "/webhooks/stripe", &signed(body), body);
    refused(&post(&padded(2049)), 413, "body-too-large");
    nothing_is_stored(place);
    assert_eq!(status(&post(&padded(2048))), "processed");

    // Chunks without an end, and a body that does not arrive.
    let open = |head: &str| {
        let mut connection = TcpStream::connect(server.address).unwrap();
        let text = format!("POST /webhooks/stripe HTTP/1.1\r\nhost: {HOST}\r\nconnection: close\r\n{head}");
        connection.write_all(text.as_bytes()).unwrap();
        connection
    };
    // In one write: this thread may get no time between two of them.
    let chunk = format!("400\r\n{}\r\n", "x".repeat(0x400));
    let endless = open(&format!("transfer-encoding: chunked\r\n\r\n{}", chunk.repeat(3)));
    refused(&Answer::read(endless), 413, "body-too-large");
    let slow = open("content-length: 100\r\n\r\n");
    refused(&Answer::read(slow), 408, "body-timeout");
    for (word, times) in [("refused_too_large", 2), ("refused_timeout", 1)] {
        is_counted(place, word, times);
    }
}

fn only_a_post_to_a_known_source_is_taken(place: &Place) {
    let server = start(place, &[]);
    let body = event("evt_1", 1_700_000_000, "a").to_string().into_bytes();
    let long = format!("/webhooks/stripe/{}", "f".repeat(65));
    for path in ["/webhooks/other", "/webhooks/stripe/a%20b", "/webhooks/stripe/%ff", "/webhooks/%00", &long] {
        refused(&post_raw(server.address, path, &signed(&body), &body), 404, "not-found");
    }
    let slash = post_raw(server.address, "/webhooks/stripe/", &signed(&body), &body);
    assert!(slash.status >= 400 && slash.header("location").is_none(), "a redirect counts as a failure");
    for method in ["GET", "PUT", "DELETE", "OPTIONS", "PATCH"] {
        for path in ["/webhooks/stripe", "/webhooks/stripe/f", "/webhooks/other"] {
            let answer = server.request(method, path, &[("host", HOST)]);
            refused(&answer, 405, "method-not-allowed");
            assert_eq!(answer.header("allow"), Some("post"), "{}", answer.head);
        }
    }
    assert_eq!(server.request("HEAD", "/webhooks/stripe", &[("host", HOST)]).status, 405);
    nothing_is_stored(place);
    // Only signed routes accept any Host.
    assert_eq!(server.request("GET", "/jobs", &[("host", HOST)]).status, 403);
}

fn a_compressed_body_is_not_inflated(place: &Place) {
    let server = start(place, &[]);
    let body = event("evt_1", 1_700_000_000, "a").to_string().into_bytes();
    for coding in ["gzip", "deflate", "br", "zstd", "identity, gzip", "x"] {
        let headers = [signed(&body), vec![("content-encoding".to_owned(), coding.to_owned())]].concat();
        refused(&post_raw(server.address, "/webhooks/stripe", &headers, &body), 415, "body-encoded");
    }
    is_counted(place, "refused_encoded", 6);
    let headers = [signed(&body), vec![("content-encoding".to_owned(), "Identity".to_owned())]].concat();
    assert_eq!(status(&post_raw(server.address, "/webhooks/stripe", &headers, &body)), "processed");
}

fn an_event_of_another_livemode_is_refused(place: &Place) {
    let server = start(place, &[("SEMEL_WEBHOOKS_STRIPE_LIVEMODE", "true")]);
    refused(&deliver(&server, &event("evt_1", 1_700_000_000, "a")), 400, "livemode-mismatch");
    nothing_is_stored(place);
    is_counted(place, "refused_livemode", 1);
}

fn without_a_signature_only_this_machine_may_send(place: &Place) {
    let mut dev = place.semel(["serve", "--listen", "127.0.0.1:0", "--roles", "api", "--dev"]);
    logged(&mut dev, place);
    let server = Server::start_with(&mut dev);
    assert!(log(place).contains("WARN") && log(place).contains("accepts unsigned events"), "{}", log(place));
    let body = event("evt_1", 1_700_000_000, "a").to_string();
    let post = |headers: &[(&str, &str)]| {
        let mut connection = TcpStream::connect(server.address).unwrap();
        send(&mut connection, "POST", "/webhooks/stripe", headers, body.as_bytes());
        Answer::read(connection)
    };
    refused(&post(&[("host", HOST)]), 403, "host-not-allowed");
    refused(&post(&[("host", "localhost"), ("origin", "http://evil.example")]), 403, "cross-origin");
    nothing_is_stored(place);
    assert_eq!(status(&post(&[("host", "localhost")])), "processed");
    is_counted(place, "refused_foreign", 2);

    // A configured source does not change, and without the flag there is none.
    let mut command = command(place, "api", &[]);
    logged(command.arg("--dev"), place);
    let server = Server::start_with(&mut command);
    assert!(log(place).contains("--dev changes nothing"), "{}", log(place));
    refused(&post_raw(server.address, "/webhooks/stripe", &[], body.as_bytes()), 400, "signature-refused");
    let server = Server::start_with(&mut place.semel(["serve", "--listen", "127.0.0.1:0", "--roles", "api"]));
    refused(&post_raw(server.address, "/webhooks/stripe", &[], body.as_bytes()), 404, "not-found");
}

/// In a program that serves the routes without the sender's address.
fn a_sender_of_unknown_address_is_not_this_machine(place: &Place) {
    tokio::runtime::Builder::new_multi_thread().enable_all().build().unwrap().block_on(async {
        let database = Database::open(&place.url, Settings::default()).await.unwrap();
        let ledger = Ledger::new(database, Options::default()).unwrap();
        let trying = Webhooks::default().for_trying();
        let app = Receiver::open(&ledger, trying, &Handlers::default()).await.unwrap().routes();
        let near = SocketAddr::from(([127, 0, 0, 1], 4000));
        let far = SocketAddr::from(([192, 0, 2, 1], 4000));
        for (peer, status) in [(None, 403), (Some(far), 403), (Some(near), 200)] {
            let body = event("evt_1", 1_700_000_000, "a").to_string();
            let mut request = Request::post("/webhooks/stripe").header("host", "localhost").body(body).unwrap();
            if let Some(peer) = peer {
                request.extensions_mut().insert(ConnectInfo(peer));
            }
            assert_eq!(app.clone().oneshot(request).await.unwrap().status(), status, "{peer:?}");
        }
    });
}

/// The path is not signed: one delivery could be replayed to any number of names.
fn a_function_that_the_source_does_not_have_is_refused(place: &Place) {
    let functions = ("SEMEL_WEBHOOKS_STRIPE_FUNCTIONS", "connect,billing");
    let server = start(place, &[functions, ("SEMEL_WEBHOOKS_STRIPE_DEDUP_PER_FUNCTION", "true")]);
    let paid = event("evt_1", 1_700_000_000, "a");
    for function in ["invented", "Connect", "connect.x"] {
        refused(&deliver_to(&server, &format!("/webhooks/stripe/{function}"), &paid), 404, "not-found");
    }
    nothing_is_stored(place);
    is_counted(place, "refused_function", 3);
    assert_eq!(rows(place, "SELECT label2 FROM semel_deltas WHERE label2 <> ''"), [""; 0]);
    for path in ["/webhooks/stripe", "/webhooks/stripe/connect", "/webhooks/stripe/billing"] {
        assert_eq!(status(&deliver_to(&server, path, &paid)), "processed", "{path}");
    }
    assert_eq!(status(&deliver_to(&server, "/webhooks/stripe/stripe", &paid)), "skipped", "the source's own");
    drop(server);
    let server = start(place, &[functions]);
    let paid = event("evt_2", 1_700_000_000, "a");
    refused(&deliver_to(&server, "/webhooks/stripe/invented", &paid), 404, "not-found");
    assert_eq!(status(&deliver_to(&server, "/webhooks/stripe/connect", &paid)), "processed");
}
