//! The laws of forwarded requests, and of the gateway as a process.

use std::{
    io::{Read as _, Write as _},
    net::{Shutdown, TcpStream},
    process::Stdio,
};

use rustix::process::Signal;

use crate::{
    gateway::{SCOPE, ask, gateway, start, state_of},
    place::Place,
    support::{Answer, SOON, Server, eventually, semel, stderr},
    upstream::Upstream,
};

/// Reads until the text has come.
pub(crate) fn read_until(connection: &mut TcpStream, text: &str) -> String {
    connection.set_read_timeout(Some(SOON)).unwrap();
    let mut read = Vec::new();
    while !String::from_utf8_lossy(&read).contains(text) {
        let mut more = [0; 4096];
        let count = connection.read(&mut more).unwrap();
        assert!(count > 0, "ended after {:?}", String::from_utf8_lossy(&read));
        read.extend(&more[..count]);
    }
    String::from_utf8(read).unwrap()
}

#[test]
fn an_answer_without_a_key_is_passed_on_as_it_comes() {
    let (place, upstream) = (Place::sqlite(), Upstream::start());
    let server = start(&place, &upstream);
    let mut connection = ask(&server, "GET", "/chunks", &[], "");
    read_until(&mut connection, "first");
    upstream.open_gate();
    read_until(&mut connection, "last");
}

#[test]
fn a_body_without_a_key_is_passed_on_as_it_comes() {
    let (place, upstream) = (Place::sqlite(), Upstream::start());
    let server = start(&place, &upstream);
    let mut connection = TcpStream::connect(server.address).unwrap();
    connection
        .write_all(b"POST /orders HTTP/1.1\r\nhost: a\r\nconnection: close\r\ntransfer-encoding: chunked\r\n\r\n")
        .unwrap();
    connection.write_all(b"5\r\nfirst\r\n").unwrap();
    eventually(SOON, "the first part has arrived", || upstream.arrived() == 5);
    connection.write_all(b"4\r\nlast\r\n0\r\n\r\n").unwrap();
    assert_eq!(Answer::read(connection).status, 201);
    assert_eq!(upstream.seen()[0].body, b"firstlast");
}

#[test]
fn an_event_stream_with_a_key_is_passed_on_at_once() {
    let (place, upstream) = (Place::sqlite(), Upstream::start());
    let server = start(&place, &upstream);
    let mut connection = ask(&server, "POST", "/events", &[("idempotency-key", "k")], "a");
    read_until(&mut connection, "first");
    let again = Answer::read(ask(&server, "POST", "/events", &[("idempotency-key", "k")], "a"));
    assert_eq!((again.status, again.problem().as_str()), (409, "response-not-kept"));
    upstream.open_gate();
    read_until(&mut connection, "last");
    assert_eq!(upstream.effects(), 1);
}

#[test]
fn an_upgraded_connection_passes_data_both_ways() {
    let (place, upstream) = (Place::sqlite(), Upstream::start());
    let server = start(&place, &upstream);
    let mut connection = TcpStream::connect(server.address).unwrap();
    connection
        .write_all(b"GET /echo HTTP/1.1\r\nhost: a\r\nconnection: upgrade\r\nupgrade: websocket\r\n\r\n")
        .unwrap();
    let head = read_until(&mut connection, "hello ").to_ascii_lowercase();
    assert!(head.starts_with("http/1.1 101 ") && head.contains("\r\nupgrade: websocket\r\n"), "{head}");
    for text in ["one", "two"] {
        connection.write_all(text.as_bytes()).unwrap();
        read_until(&mut connection, text);
    }
    assert_eq!(upstream.seen()[0].header("connection"), ["upgrade"]);
}

#[test]
fn an_upgrade_to_h2c_is_not_made() {
    let (place, upstream) = (Place::sqlite(), Upstream::start());
    let server = start(&place, &upstream);
    let ask_for = |path: &str, protocol: &str| {
        let mut connection = TcpStream::connect(server.address).unwrap();
        let head = format!(
            "GET {path} HTTP/1.1\r\nhost: a\r\nconnection: close, upgrade\r\nupgrade: {protocol}\r\n\
             http2-settings: AAMAAABkAAQAAP__\r\n\r\n"
        );
        connection.write_all(head.as_bytes()).unwrap();
        Answer::read(connection)
    };
    for (n, protocol) in ["h2c", "websocket, h2c"].iter().enumerate() {
        assert_eq!(ask_for("/orders", protocol).status, 201, "it is forwarded without the upgrade");
        let seen = &upstream.seen()[n];
        assert_eq!((seen.header("upgrade"), seen.header("http2-settings")), (vec![], vec![]), "{protocol}");
        assert_eq!(seen.header("connection"), [""; 0]);
    }
    for protocol in ["h2c", "websocket"] {
        let answer = ask_for("/h2c", protocol);
        assert_eq!((answer.status, answer.problem().as_str()), (502, "upstream-lost"), "{protocol}");
    }
}

#[test]
fn underscore_twins_of_guarded_headers_are_not_passed_on() {
    let (place, upstream) = (Place::sqlite(), Upstream::start());
    let server = start(&place, &upstream);
    let sent = [
        ("Semel_Fence", "999999"),
        ("Idempotency_Key", "k"),
        ("X_Forwarded_For", "10.0.0.1"),
        ("X_Forwarded_Prefix", "/a"),
        ("X_Own", "1"),
    ];
    assert_eq!(Answer::read(ask(&server, "POST", "/orders", &sent, "{}")).status, 201);
    let seen = &upstream.seen()[0];
    let with_underscore: Vec<_> = seen.head.lines().filter(|line| line.contains('_')).collect();
    assert_eq!(with_underscore, ["x_own: 1"]);
}

#[test]
fn an_upstream_cannot_mark_its_answer_as_replayed() {
    let (place, upstream) = (Place::sqlite(), Upstream::start());
    let server = start(&place, &upstream);
    let key: &[_] = &[("idempotency-key", "k")];
    for (headers, replayed) in [(&[][..], None), (key, None), (key, Some("true"))] {
        let answer = Answer::read(ask(&server, "POST", "/replayed", headers, "a"));
        assert_eq!((answer.status, answer.header("idempotent-replayed")), (201, replayed));
        assert_eq!(answer.header("idempotency-mismatch"), None);
    }
}

#[test]
fn a_password_in_the_target_is_not_passed_on() {
    let (place, upstream) = (Place::sqlite(), Upstream::start());
    let server = start(&place, &upstream);
    assert_eq!(server.request("GET", "http://ana:secret@evil.example/a", &[("host", "other")]).status, 201);
    let seen = &upstream.seen()[0];
    assert_eq!((seen.line.as_str(), seen.header("host")), ("GET /a HTTP/1.1", vec!["evil.example"]));
    assert!(!seen.head.contains("secret"), "{seen:?}");
}

#[test]
fn an_incomplete_body_of_a_client_is_answered_400_or_408() {
    let (place, upstream) = (Place::sqlite(), Upstream::start());
    let started = |timeout: &str| {
        let mut command = gateway(&place, &upstream.url);
        Server::start_with(command.env("SEMEL_GATEWAY_TIMEOUT", timeout).stderr(Stdio::piped()))
    };
    let (patient, hasty) = (started("1m"), started("300ms"));
    let told = |server: &Server, sent: &str, half: bool| {
        let mut connection = TcpStream::connect(server.address).unwrap();
        let head = "POST /orders HTTP/1.1\r\nhost: a\r\nconnection: close\r\n";
        connection.write_all(format!("{head}{sent}").as_bytes()).unwrap();
        if half {
            connection.shutdown(Shutdown::Write).unwrap();
        }
        let answer = Answer::read(connection);
        (answer.status, answer.problem())
    };
    let incomplete = (400, "body-incomplete".to_owned());
    assert_eq!(told(&patient, "transfer-encoding: chunked\r\n\r\n1\r\na\r\nzz\r\n", false), incomplete);
    assert_eq!(told(&patient, "content-length: 2\r\n\r\na", true), incomplete);
    let late = (408, "body-timeout".to_owned());
    assert_eq!(told(&hasty, "transfer-encoding: chunked\r\n\r\n1\r\na\r\n", false), late);
    assert_eq!(told(&hasty, "content-length: 2\r\n\r\na", false), late);
    assert_eq!(upstream.effects(), 0);
    // The upstream's own silence still is a timeout.
    let silent = Answer::read(ask(&hasty, "POST", "/silent", &[], "a"));
    assert_eq!((silent.status, silent.problem().as_str()), (504, "upstream-timeout"));
    for (mut server, warnings) in [(patient, 0), (hasty, 1)] {
        server.process.signal(Signal::TERM);
        server.process.end();
        let mut log = String::new();
        server.process.0.stderr.take().unwrap().read_to_string(&mut log).unwrap();
        assert_eq!(log.matches("WARN").count(), warnings, "{log}");
    }
}

#[test]
fn headers_keep_their_count_order_and_bytes_and_those_of_one_connection_stay_there() {
    let (place, upstream) = (Place::sqlite(), Upstream::start());
    let server = start(&place, &upstream);
    for (method, headers, cookies) in
        [("GET", vec![], 1), ("POST", vec![("idempotency-key", "k")], 1), ("POST", vec![("idempotency-key", "k")], 0)]
    {
        let sent = [&headers[..], &[("x-own", "1"), ("te", "trailers"), ("keep-alive", "9")]].concat();
        let mut connection = ask(&server, method, "/headers", &sent, "");
        let mut answer = Vec::new();
        connection.read_to_end(&mut answer).unwrap();
        let has = |bytes: &[u8]| answer.windows(bytes.len()).filter(|window| *window == bytes).count();
        assert_eq!((has(b"x-two: a\r\n"), has(b"x-two: b\r\n"), has(b"x-raw: \xff\xfe\r\n")), (1, 1, 1));
        assert_eq!((has(b"set-cookie"), has(b"x-hop"), has(b"timeout=9")), (cookies, 0, 0), "{method}");
    }
    assert_eq!(upstream.effects(), 2);
    let seen = upstream.seen();
    assert_eq!(
        (seen[0].header("x-own"), seen[1].header("te"), seen[0].header("keep-alive")),
        (vec!["1"], vec![], vec![])
    );
    assert_eq!(seen[0].header("x-forwarded-for"), ["127.0.0.1"]);
    assert_eq!(
        (seen[0].header("x-forwarded-host"), seen[0].header("x-forwarded-proto")),
        (vec!["shop.example"], vec!["http"])
    );
}

#[test]
fn an_answer_to_head_keeps_its_length() {
    let (place, upstream) = (Place::sqlite(), Upstream::start());
    let server = start(&place, &upstream);
    let answer = Answer::read(ask(&server, "HEAD", "/head", &[("idempotency-key", "k")], ""));
    assert_eq!((answer.status, answer.header("content-length"), answer.body.as_str()), (200, Some("1234"), ""));
    let answer = Answer::read(ask(&server, "GET", "/204", &[], ""));
    assert_eq!(answer.status, 204);
}

#[test]
fn an_old_client_that_names_no_host_is_served() {
    let (place, upstream) = (Place::sqlite(), Upstream::start());
    let server = start(&place, &upstream);
    let mut connection = TcpStream::connect(server.address).unwrap();
    connection.write_all(b"GET /orders HTTP/1.0\r\n\r\n").unwrap();
    let answer = Answer::read(connection);
    assert!(answer.head.starts_with("http/1.0 201 "), "{}", answer.head);
    let seen = upstream.seen();
    assert_eq!(seen[0].line, "GET /orders HTTP/1.1");
    assert_eq!(seen[0].header("host"), [upstream.url.strip_prefix("http://").unwrap()]);
}

#[test]
fn a_connection_is_used_again_and_one_that_was_closed_is_not() {
    let (place, upstream) = (Place::sqlite(), Upstream::start());
    let server = start(&place, &upstream);
    let post =
        |path: &str, key: &str| Answer::read(ask(&server, "POST", path, &[("idempotency-key", key)], "a")).status;
    eventually(SOON, "a connection is used again", || {
        let before = upstream.seen().len();
        let keys = [format!("k{before}"), format!("l{before}")];
        assert_eq!((post("/orders", &keys[0]), post("/orders", &keys[1])), (201, 201));
        let seen = upstream.seen();
        seen[before].port == seen[before + 1].port
    });
    // Closed by the upstream: no reason for doubt.
    for n in 0..20 {
        assert_eq!(post("/close", &format!("m{n}")), 201);
        eventually(SOON, "the connection is closed", || upstream.closed() > n);
        assert_eq!(post("/orders", &format!("n{n}")), 201);
    }
}

#[test]
fn an_idle_connection_to_the_upstream_is_closed() {
    let (place, upstream) = (Place::sqlite(), Upstream::start());
    let server = start(&place, &upstream);
    for _ in 0..2 {
        let before = upstream.left();
        assert_eq!(server.get("/orders").status, 201);
        eventually(SOON, "the connection is closed", || upstream.left() > before);
    }
}

#[test]
fn all_paths_but_the_gateways_own_reach_the_upstream() {
    let (place, upstream) = (Place::sqlite(), Upstream::start());
    let server = start(&place, &upstream);
    assert_eq!((server.get("/semel/healthz").status, server.get("/semel/readyz").status), (200, 200));
    assert!(server.get("/semel/problems/upstream-lost").body.contains("upstream-lost"));
    assert_eq!(server.request("GET", "/semel/healthz", &[("host", "evil.example")]).problem(), "host-not-allowed");
    assert_eq!(server.request("DELETE", "/semel/healthz", &[("host", "localhost")]).status, 405);
    assert_eq!(upstream.effects(), 0);
    for (n, path) in
        ["/", "/healthz", "/semel/", "/semel/other", "/problems/in-doubt", "//a/../b%2f?x=%20"].iter().enumerate()
    {
        assert_eq!(server.get(path).status, 201);
        assert_eq!(upstream.seen()[n].line, format!("GET {path} HTTP/1.1"));
    }
}

#[test]
fn a_stop_lets_requests_in_flight_finish() {
    let (place, upstream) = (Place::sqlite(), Upstream::start());
    let mut server = start(&place, &upstream);
    let first = ask(&server, "POST", "/slow", &[("idempotency-key", "k")], "a");
    eventually(SOON, "the upstream is at it", || upstream.effects() == 1);
    server.process.signal(Signal::TERM);
    eventually(SOON, "nothing new is taken", || TcpStream::connect(server.address).is_err());
    upstream.open_gate();
    assert_eq!(Answer::read(first).body, "/slow 1");
    assert!(server.process.end().success());
    assert_eq!(state_of(&place, SCOPE, "k"), "completed");
}

#[test]
fn unsupported_settings_are_refused_at_the_start() {
    let place = Place::sqlite();
    let told = |arguments: &[&str]| {
        let output = semel().arg("gateway").args(arguments).current_dir(&place.dir).output().unwrap();
        assert_eq!(output.status.code(), Some(1));
        stderr(&output).to_owned()
    };
    assert!(told(&[]).contains("which service?"));
    let https = told(&["--upstream", "https://a.example"]);
    assert!(https.contains("gateway.upstream (--upstream): cannot be https"), "{https}");
    assert!(told(&["--upstream", "http://a/b"]).contains("nothing after the port"));
    assert!(told(&["--upstream", "http://127.0.0.1:3", "--listen", "127.0.0.1:3"]).contains("the gateway itself"));
    let open = told(&["--upstream", "http://127.0.0.1:3", "--listen", "0.0.0.0:0"]);
    assert!(open.contains("only loopback is served"), "{open}");
    let output = gateway(&place, "http://127.0.0.1:3").env("SEMEL_GATEWAY_TENANT_HEADER", "x-tenant").output().unwrap();
    assert!(stderr(&output).contains("trusted proxies only"));
    let key = [("SEMEL_GATEWAY_TENANT_HEADER", "Idempotency-Key"), ("SEMEL_GATEWAY_TRUSTED_PROXIES", "127.0.0.1")];
    let output = gateway(&place, "http://127.0.0.1:3").envs(key).output().unwrap();
    assert!(stderr(&output).contains("a dedicated header"), "{}", stderr(&output));
}
