//! The laws of connections: idle ones are closed, and their number is limited.

use std::{
    io::{self, Read as _, Write as _},
    net::{SocketAddr, TcpStream},
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};

use axum::{Router, routing::get};
use semel_server::{
    serve::{self, Drained, Limits},
    stop::Stop,
};
use tokio::{net::TcpListener, sync::Notify};

use crate::{
    gateway::gateway,
    gateway_passing::read_until,
    place::Place,
    support::{Answer, SOON, Server, semel, send},
    upstream::Upstream,
};

/// The shortest that can be configured.
const HEAD: Duration = Duration::from_secs(1);
const SHORT: (&str, &str) = ("SEMEL_HTTP_HEAD_TIMEOUT", "1s");

fn serve(variables: &[(&str, &str)]) -> Server {
    Server::start_with(semel().args(["serve", "--listen", "127.0.0.1:0"]).envs(variables.iter().copied()))
}

/// Writes one byte after another until the connection is closed. Returns how long that took, if it was soon.
fn closed_after(mut connection: TcpStream, bytes: &[u8]) -> Option<Duration> {
    let (begun, mut bytes) = (Instant::now(), bytes.iter());
    connection.set_read_timeout(Some(Duration::from_millis(50))).unwrap();
    while begun.elapsed() < SOON {
        let written = bytes.next().map_or(Ok(()), |byte| connection.write_all(&[*byte]));
        match connection.read(&mut [0; 64]) {
            Ok(0) => return Some(begun.elapsed()),
            Ok(_) => panic!("there was no request"),
            Err(error) if matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut) => {}
            Err(_) => return Some(begun.elapsed()),
        }
        if written.is_err() {
            return Some(begun.elapsed());
        }
    }
    None
}

/// A connection that was answered once, and is kept.
fn answered(address: SocketAddr, path: &str) -> TcpStream {
    let mut connection = TcpStream::connect(address).unwrap();
    connection.write_all(format!("GET {path} HTTP/1.1\r\nhost: localhost\r\n\r\n").as_bytes()).unwrap();
    read_until(&mut connection, "{\"status\":\"ok\"}");
    connection
}

fn is_left_no_time(server: &Server, health: &str) {
    let head = format!("GET {health} HTTP/1.1\r\nhost: localhost\r\nx-endless: {}", "x".repeat(1000));
    let fresh = || TcpStream::connect(server.address).unwrap();
    let kept = || answered(server.address, health);
    let cases = [
        ("nothing", fresh(), String::new()),
        ("a head byte by byte", fresh(), head.clone()),
        ("nothing after an answer", kept(), String::new()),
        ("a head byte by byte after an answer", kept(), head),
    ];
    std::thread::scope(|scope| {
        for (what, connection, bytes) in cases {
            scope.spawn(move || {
                let after = closed_after(connection, bytes.as_bytes());
                assert!(after.is_some_and(|after| after > HEAD / 2), "{what}: {after:?}");
            });
        }
    });
    assert_eq!(server.get(health).status, 200);
}

#[test]
fn an_incomplete_request_head_times_out() {
    is_left_no_time(&serve(&[SHORT]), "/healthz");
}

#[test]
fn an_incomplete_request_head_times_out_at_the_gateway() {
    let (place, upstream) = (Place::sqlite(), Upstream::start());
    let server = Server::start_with(gateway(&place, &upstream.url).envs([SHORT]));
    is_left_no_time(&server, "/semel/healthz");
}

#[test]
fn a_request_head_over_64_kib_is_refused() {
    let server = serve(&[]);
    let with = |length: usize| {
        let long = "x".repeat(length);
        server.request("GET", "/healthz", &[("host", "localhost"), ("x-long", &long)]).status
    };
    assert_eq!((with(60 * 1024), with(64 * 1024)), (200, 431));
}

/// Two idle connections have all the seats, until they are cut off.
#[test]
fn a_connection_over_the_limit_waits_and_is_then_served() {
    let server = serve(&[SHORT, ("SEMEL_HTTP_MAX_CONNECTIONS", "2")]);
    let begun = Instant::now();
    let silent = [(); 2].map(|()| TcpStream::connect(server.address).unwrap());
    assert_eq!(server.get("/healthz").status, 200);
    assert!(begun.elapsed() > HEAD / 2, "it was let in beside them, after {:?}", begun.elapsed());
    drop(silent);
}

#[tokio::test(flavor = "multi_thread")]
async fn the_number_of_connections_never_exceeds_the_limit() {
    static OPEN: AtomicUsize = AtomicUsize::new(0);
    static MOST: AtomicUsize = AtomicUsize::new(0);
    async fn count() -> &'static str {
        MOST.fetch_max(OPEN.fetch_add(1, Ordering::SeqCst) + 1, Ordering::SeqCst);
        // Time for others to be accepted, if that is possible.
        tokio::time::sleep(Duration::from_millis(50)).await;
        OPEN.fetch_sub(1, Ordering::SeqCst);
        "counted"
    }
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let limits = Limits { connections: 3, ..Limits::default() };
    tokio::spawn(serve::run(listener, Router::new().route("/", get(count)), Stop::new(), limits));
    let ask = move || {
        let mut connection = TcpStream::connect(address).unwrap();
        send(&mut connection, "GET", "/", &[("host", "localhost")], b"");
        Answer::read(connection).body
    };
    let asked: Vec<_> = (0..24).map(|_| tokio::task::spawn_blocking(ask)).collect();
    for answer in asked {
        assert_eq!(answer.await.unwrap(), "counted");
    }
    assert_eq!(MOST.load(Ordering::SeqCst), 3);
}

/// The connection with the only seat keeps it, and the server still stops on request.
#[tokio::test(flavor = "multi_thread")]
async fn a_server_without_free_connections_stops_on_request() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let limits = Limits { connections: 1, drain: Duration::from_millis(10), ..Limits::default() };
    let (stop, arrived) = (Stop::new(), Arc::new(Notify::new()));
    let told = Arc::clone(&arrived);
    let hangs = async move || {
        told.notify_one();
        std::future::pending::<&str>().await
    };
    let served = tokio::spawn(serve::run(listener, Router::new().route("/", get(hangs)), stop.clone(), limits));
    let mut connection = TcpStream::connect(address).unwrap();
    send(&mut connection, "GET", "/", &[("host", "localhost")], b"");
    arrived.notified().await;
    stop.ask();
    assert_eq!(tokio::time::timeout(SOON, served).await.unwrap().unwrap(), Drained::CutOff);
}

#[test]
fn an_upgraded_connection_counts_toward_the_limit() {
    let (place, upstream) = (Place::sqlite(), Upstream::start());
    let server = Server::start_with(gateway(&place, &upstream.url).envs([("SEMEL_HTTP_MAX_CONNECTIONS", "1")]));
    let mut tunnel = TcpStream::connect(server.address).unwrap();
    tunnel.write_all(b"GET /echo HTTP/1.1\r\nhost: a\r\nconnection: upgrade\r\nupgrade: websocket\r\n\r\n").unwrap();
    read_until(&mut tunnel, "hello ");
    let mut other = TcpStream::connect(server.address).unwrap();
    send(&mut other, "GET", "/semel/healthz", &[("host", "localhost")], b"");
    other.set_read_timeout(Some(Duration::from_millis(300))).unwrap();
    let early = other.read(&mut [0; 1]);
    assert!(early.is_err(), "it was let in beside the tunnel: {early:?}");
    drop(tunnel);
    assert_eq!(Answer::read(other).status, 200);
}

#[test]
fn limits_out_of_range_are_refused() {
    for (variable, value, told) in [
        ("SEMEL_HTTP_HEAD_TIMEOUT", "0s", "http.head_timeout (SEMEL_HTTP_HEAD_TIMEOUT): must be at least 1s"),
        ("SEMEL_HTTP_HEAD_TIMEOUT", "1h", "http.head_timeout (SEMEL_HTTP_HEAD_TIMEOUT): must be at least 1s"),
        ("SEMEL_HTTP_MAX_CONNECTIONS", "0", "http.max_connections (SEMEL_HTTP_MAX_CONNECTIONS): must be 1 to"),
        ("SEMEL_HTTP_MAX_CONNECTIONS", "1000001", "http.max_connections (SEMEL_HTTP_MAX_CONNECTIONS): must be 1 to"),
    ] {
        let output = semel().args(["config", "check"]).env(variable, value).output().unwrap();
        assert!(!output.status.success());
        assert!(crate::support::stderr(&output).contains(told), "{value}: {output:?}");
    }
}

/// A client that is still sending when its body is refused reads the answer. A connection that is closed while data comes
/// in is reset, and the answer is lost with it.
#[test]
fn a_body_that_is_refused_while_it_is_sent_is_answered() {
    const PIECES: usize = 24;
    let server = serve(&[]);
    let mut connection = TcpStream::connect(server.address).unwrap();
    let head = format!("POST /events HTTP/1.1\r\nhost: localhost\r\ncontent-length: {}\r\n\r\n", PIECES << 19);
    connection.write_all(head.as_bytes()).unwrap();
    for _ in 0..PIECES {
        connection.write_all(&[b' '; 1 << 19]).unwrap();
        // The server has closed its half long before the last piece.
        std::thread::sleep(Duration::from_millis(20));
    }
    let answer = Answer::read(connection);
    assert_eq!((answer.status, answer.problem().as_str()), (413, "body-too-large"));
}
