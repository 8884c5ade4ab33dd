//! The laws of room: request bodies use no more memory than the budget, and a client that sends slowly, or nothing,
//! delays no other.

use std::{
    fs,
    io::{self, Read as _, Write as _},
    net::{SocketAddr, TcpStream},
    sync::Arc,
};

use axum::{
    Router,
    body::{Body, Bytes},
    http::Request,
    routing::post,
};
use semel::{Ledger, Options};
use semel_server::{
    http::{App, health::AlwaysReady, room::Budget},
    services::proposals::Proposals,
    services::proposals::config,
};
use semel_store::{Database, Settings};
use tower::ServiceExt as _;

use crate::{
    gateway::{ask, gateway},
    place::Place,
    proposals_tenants::Believes,
    support::{Answer, SOON, Server, eventually, semel, send},
    upstream::Upstream,
};

/// The budget of the tests, and the bodies that do not fit into it together.
const BUDGET: usize = 32 << 20;
const LONG: usize = 1 << 20;
const MANY: usize = 500;

/// What a process may use beyond its budget: the buffers and tasks of the connections, and the allocator's reserve.
const BESIDES: usize = 96 << 20;

/// Announces a body and sends so many bytes of it.
fn begin(address: SocketAddr, head: &str, announced: usize, sent: usize) -> TcpStream {
    let mut connection = TcpStream::connect(address).unwrap();
    connection.write_all(format!("{head}content-length: {announced}\r\n\r\n").as_bytes()).unwrap();
    // A server without room answers and closes before the body has arrived.
    let _: io::Result<()> = connection.write_all(&vec![b' '; sent]);
    connection
}

/// Whether a connection was answered, or closed.
fn is_answered(connection: &TcpStream) -> bool {
    connection.set_nonblocking(true).unwrap();
    !matches!(connection.peek(&mut [0]), Err(error) if error.kind() == io::ErrorKind::WouldBlock)
}

/// The resident memory of a process, in bytes.
fn resident(server: &Server) -> usize {
    let pid = server.process.pid().as_raw_nonzero();
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
    line.trim().trim_end_matches("kB").trim().parse::<usize>().unwrap() * 1024
}

/// Sends many long bodies without their last byte. Returns how many bytes the process has grown by, and the
/// connections.
fn attack(server: &Server, head: impl Fn(usize) -> String) -> (usize, Vec<TcpStream>) {
    let before = resident(server);
    let held: Vec<_> = (0..MANY).map(|n| begin(server.address, &head(n), LONG, LONG - 1)).collect();
    let answered = || held.iter().filter(|connection| is_answered(connection)).count();
    eventually(3 * SOON, "all are refused that do not fit", || answered() >= MANY - BUDGET / LONG - 1);
    let grown = resident(server).saturating_sub(before);
    eprintln!("{} MiB more for {MANY} bodies of {} MiB", grown >> 20, LONG >> 20);
    (grown, held)
}

/// Bodies without room are answered with 503 and Retry-After.
fn assert_told(held: Vec<TcpStream>) {
    let mut refused = 0;
    for mut connection in held.into_iter().filter(is_answered) {
        connection.set_nonblocking(false).unwrap();
        connection.set_read_timeout(Some(SOON)).unwrap();
        let mut text = Vec::new();
        // The connection is reset after the answer: the rest of the body was not read.
        let _ = connection.read_to_end(&mut text);
        let text = String::from_utf8(text).unwrap().to_ascii_lowercase();
        if text.starts_with("http/1.1 503 ") {
            assert!(text.contains("\r\nretry-after: 1\r\n") && text.contains("/problems/no-room"), "{text}");
            refused += 1;
        } else {
            // On a slow machine, those that had room have timed out.
            assert!(text.is_empty() || text.starts_with("http/1.1 408 "), "{text}");
        }
    }
    assert!(refused > MANY / 2, "{refused}");
}

fn event(id: usize) -> String {
    format!(r#"{{"eventId":"e{id}","aggregateType":"RESTAURANT","aggregateId":5,"eventType":"X","payload":{{}}}}"#)
}

fn post_event(server: &Server, body: &str) -> Answer {
    let mut connection = TcpStream::connect(server.address).unwrap();
    send(&mut connection, "POST", "/events", &[("host", "localhost")], body.as_bytes());
    Answer::read(connection)
}

fn serve(settings: &[(&str, &str)]) -> Server {
    Server::start_with(semel().args(["serve", "--listen", "127.0.0.1:0"]).envs(settings.iter().copied()))
}

const SMALL: [(&str, &str); 1] = [("SEMEL_HTTP_BODY_BUDGET", "32MiB")];

#[test]
fn announced_bodies_that_never_arrive_delay_no_other_request() {
    let server = serve(&[]);
    let head = "POST /events HTTP/1.1\r\nhost: localhost\r\n";
    // Bodies of the longest accepted length, and more of them than there is room for.
    let silent: Vec<_> = (0..64).map(|_| begin(server.address, head, 8 << 20, 0)).collect();
    for n in 0..5 {
        assert_eq!(post_event(&server, &event(n)).status, 202);
    }
    let waiting = silent.iter().filter(|connection| !is_answered(connection)).count();
    assert_eq!(waiting, silent.len(), "the others were answered meanwhile, not afterwards");
}

#[test]
fn stalled_bodies_take_no_more_of_a_server_than_its_budget() {
    let server = serve(&SMALL);
    assert_eq!(post_event(&server, &event(0)).status, 202);
    let (grown, held) = attack(&server, |_| "POST /events HTTP/1.1\r\nhost: localhost\r\n".to_owned());
    assert!(grown < BUDGET + BESIDES, "{} MiB", grown >> 20);
    for n in 1..=20 {
        assert_eq!(post_event(&server, &event(n)).status, 202, "what is short needs no room");
    }
    assert_told(held);
    let long = format!("{}{}", event(21), " ".repeat(LONG));
    eventually(SOON, "the room is given back", || post_event(&server, &long).status == 202);
}

#[test]
fn stalled_bodies_take_no_more_of_a_gateway_than_its_budget() {
    let (place, upstream) = (Place::sqlite(), Upstream::start());
    let server = Server::start_with(gateway(&place, &upstream.url).envs(SMALL));
    let head = |n: usize| format!("POST /orders HTTP/1.1\r\nhost: a\r\nidempotency-key: long-{n}\r\n");
    let (grown, held) = attack(&server, head);
    assert!(grown < BUDGET + BESIDES, "{} MiB", grown >> 20);
    for n in 0..20 {
        let key = format!("short-{n}");
        let answer = Answer::read(ask(&server, "POST", "/orders", &[("idempotency-key", &key)], "a"));
        assert_eq!(answer.status, 201, "what is short needs no room");
    }
    let long = "x".repeat(LONG);
    let unkeyed = Answer::read(ask(&server, "POST", "/orders", &[], &long));
    assert_eq!(unkeyed.status, 201, "what is passed on as it comes needs none");
    assert_eq!(upstream.effects(), 21);
    assert_told(held);
    eventually(SOON, "the room is given back, and the key was not used up", || {
        let mut connection = ask(&server, "POST", "/orders", &[("idempotency-key", "long-0")], &long);
        let mut answer = String::new();
        let _ = connection.read_to_string(&mut answer);
        answer.starts_with("HTTP/1.1 201 ")
    });
    assert_eq!(upstream.effects(), 22);
}

#[tokio::test(flavor = "multi_thread")]
async fn routes_with_and_without_a_key_or_a_signature_keep_within_the_budget() {
    let place = Place::sqlite();
    let database = Database::open(&place.url, Settings::default()).await.unwrap();
    let ledger = Ledger::new(database, Options::default()).unwrap();
    let proposals = Proposals::open(&ledger, config::Proposals::default()).await.unwrap();
    let plain = Router::new().route("/plain", post(|body: Bytes| async move { body.len().to_string() }));
    let signed = Router::new().route("/signed", post(|body: Bytes| async move { body.len().to_string() }));
    let (readiness, authenticate) = (Arc::new(AlwaysReady), Arc::new(Believes));
    let routes = proposals.routes().merge(plain);
    let app = App { readiness, authenticate, routes, signed }.into_router_within(&Budget::new(0));
    for (method, path) in [
        ("POST", "/api/v1/clientes"),
        ("PATCH", "/api/v1/clientes/1"),
        ("POST", "/api/v1/propostas"),
        ("POST", "/plain"),
        ("POST", "/signed"),
    ] {
        // A short body needs no room, and is answered as usual.
        for (size, refused) in [(16 << 10, false), (17 << 10, true)] {
            for key in [None, Some("k")] {
                let request = Request::builder().method(method).uri(path).header("x-who", "a/ana");
                let request = key.into_iter().fold(request, |request, key| request.header("idempotency-key", key));
                let request = request.body(Body::from(vec![b' '; size])).unwrap();
                let answer = app.clone().oneshot(request).await.unwrap();
                let told = answer.headers().get("retry-after").is_some();
                assert_eq!((answer.status() == 503, told), (refused, refused), "{method} {path} {size} {key:?}");
            }
        }
    }
}
