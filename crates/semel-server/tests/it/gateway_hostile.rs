//! The laws of the gateway before a broken or hostile service: its answer to one request is never taken for the answer
//! to another, and nothing takes effect twice.

use std::{
    io::{self, BufReader, Read as _, Write as _},
    net::{Shutdown, TcpListener, TcpStream},
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    thread,
};

use crate::{
    gateway::{SCOPE, ask, gateway, state_of},
    place::Place,
    support::{Answer, SOON, Server, eventually},
    upstream,
};

/// The bytes of a service's answer, and whether it then closes the connection.
#[derive(Clone)]
struct Said {
    bytes: Vec<u8>,
    close: bool,
}

fn and_close(bytes: impl Into<Vec<u8>>) -> Said {
    Said { bytes: bytes.into(), close: true }
}

fn and_stay(bytes: impl Into<Vec<u8>>) -> Said {
    Said { bytes: bytes.into(), close: false }
}

/// A service that answers each path with the test's bytes. Its threads end with the process.
struct Raw {
    url: String,
    requests: Arc<AtomicUsize>,
    /// Connections that the other side has closed.
    left: Arc<AtomicUsize>,
}

impl Raw {
    fn start(say: impl Fn(&str) -> Said + Send + Sync + 'static) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let (requests, left, say) = (Arc::<AtomicUsize>::default(), Arc::<AtomicUsize>::default(), Arc::new(say));
        let raw = Self { url, requests: requests.clone(), left: left.clone() };
        thread::spawn(move || {
            for connection in listener.incoming() {
                let (connection, requests, left, say) =
                    (connection.unwrap(), requests.clone(), left.clone(), say.clone());
                thread::spawn(move || {
                    let mut reader = BufReader::new(&connection);
                    while let Ok(Some(seen)) = upstream::read(&mut reader, &AtomicUsize::new(0)) {
                        requests.fetch_add(1, Ordering::SeqCst);
                        let Said { bytes, close } = say(seen.line.split(' ').nth(1).unwrap());
                        if (&connection).write_all(&bytes).is_err() || close {
                            let _ = connection.shutdown(Shutdown::Both);
                            return;
                        }
                    }
                    left.fetch_add(1, Ordering::SeqCst);
                });
            }
        });
        raw
    }

    fn requests(&self) -> usize {
        self.requests.load(Ordering::SeqCst)
    }
}

fn before(raw: &Raw) -> (Place, Server) {
    let place = Place::sqlite();
    let server = Server::start_with(&mut gateway(&place, &raw.url));
    (place, server)
}

/// An answer as a client must read it (RFC 9112, 6.3), and its length. None if it is incomplete.
fn parse(bytes: &[u8]) -> Option<(Answer, usize)> {
    let end = bytes.windows(4).position(|window| window == b"\r\n\r\n")? + 4;
    let head = String::from_utf8_lossy(&bytes[..end - 4]).to_ascii_lowercase();
    let status = head.split(' ').nth(1).unwrap().parse().unwrap();
    let mut answer = Answer { status, head, body: String::new() };
    assert!(answer.head.matches("\r\ncontent-length:").count() <= 1, "{}", answer.head);
    let mut at = end;
    if answer.header("transfer-encoding").is_some() {
        assert_eq!(answer.header("content-length"), None, "one length, not two: {}", answer.head);
        loop {
            let line = bytes[at..].windows(2).position(|window| window == b"\r\n")?;
            let size = usize::from_str_radix(&String::from_utf8_lossy(&bytes[at..at + line]), 16).unwrap();
            at += line + 2;
            answer.body.push_str(&String::from_utf8_lossy(bytes.get(at..at + size)?));
            at += size + 2;
            if size == 0 {
                return (at <= bytes.len()).then_some((answer, at));
            }
        }
    }
    let length = answer.header("content-length").map_or(0, |length| length.parse().unwrap());
    answer.body = String::from_utf8_lossy(bytes.get(at..at + length)?).into_owned();
    Some((answer, at + length))
}

/// A kept connection, and the bytes read from it.
struct Kept {
    connection: TcpStream,
    read: Vec<u8>,
}

impl Kept {
    fn open(server: &Server) -> Self {
        let connection = TcpStream::connect(server.address).unwrap();
        connection.set_read_timeout(Some(SOON)).unwrap();
        Self { connection, read: Vec::new() }
    }

    fn send(&mut self, method: &str, path: &str, headers: &str) {
        let text = format!("{method} {path} HTTP/1.1\r\nhost: shop.example\r\n{headers}\r\n");
        self.connection.write_all(text.as_bytes()).unwrap();
    }

    /// The next answer; none if the connection was closed before it was whole.
    fn next(&mut self) -> Option<Answer> {
        loop {
            if let Some((answer, size)) = parse(&self.read) {
                self.read.drain(..size);
                return Some(answer);
            }
            let mut more = [0; 4096];
            match self.connection.read(&mut more) {
                Ok(0) => return None,
                Ok(count) => self.read.extend(&more[..count]),
                Err(error) if error.kind() == io::ErrorKind::ConnectionReset => return None,
                Err(error) => panic!("{error}, after {:?}", String::from_utf8_lossy(&self.read)),
            }
        }
    }
}

const FORGED: &str = "HTTP/1.1 200 OK\r\ncontent-length: 6\r\n\r\nforged";

/// A correct answer that names its path.
fn honest(path: &str) -> Said {
    and_stay(format!("HTTP/1.1 200 OK\r\ncontent-length: {}\r\n\r\n{path}", path.len()))
}

/// Two lengths, one of them false, in either order.
fn both_lengths(path: &str) -> Said {
    let lengths = match path {
        "/length-first" => "content-length: 0\r\ntransfer-encoding: chunked",
        "/chunks-first" => "transfer-encoding: chunked\r\ncontent-length: 3",
        _ => return honest(path),
    };
    let size = FORGED.len();
    and_stay(format!("HTTP/1.1 200 OK\r\n{lengths}\r\n\r\n{size:x}\r\n{FORGED}\r\n0\r\n\r\n"))
}

#[test]
fn an_answer_with_two_lengths_cannot_be_split_in_two() {
    let raw = Raw::start(both_lengths);
    let (_place, server) = before(&raw);
    for path in ["/length-first", "/chunks-first"] {
        // Both requests are under way before the first answer is read.
        let mut client = Kept::open(&server);
        client.send("GET", path, "");
        client.send("GET", "/next", "");
        assert_eq!(client.next().unwrap().body, FORGED, "{path}: it is passed on whole");
        assert_eq!(client.next().unwrap().body, "/next", "{path}");
        // With a key, and again from the ledger.
        let mut client = Kept::open(&server);
        for replayed in [None, Some("true")] {
            client.send("POST", path, &format!("idempotency-key: {path}\r\ncontent-length: 0\r\n"));
            let answer = client.next().unwrap();
            assert_eq!((answer.body.as_str(), answer.header("idempotent-replayed")), (FORGED, replayed), "{path}");
        }
        client.send("GET", "/next", "");
        assert_eq!(client.next().unwrap().body, "/next", "{path}");
    }
}

#[test]
fn a_connection_to_a_service_that_gave_two_lengths_is_not_used_again() {
    let raw = Raw::start(both_lengths);
    let (_place, server) = before(&raw);
    assert_eq!(server.get("/length-first").status, 200);
    // Sooner than an idle connection is closed; if it were kept, this request would use it.
    assert_eq!(server.get("/next").body, "/next");
    eventually(SOON, "the first connection is closed", || raw.left.load(Ordering::SeqCst) >= 1);
}

#[test]
fn bytes_after_the_end_of_an_answer_are_dropped() {
    let raw = Raw::start(|path| match path {
        "/more" => and_stay(format!("HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nfirst{FORGED}")),
        "/none" => and_stay(format!("HTTP/1.1 204 No Content\r\ncontent-length: 5\r\n\r\n{FORGED}")),
        "/unchanged" => and_stay(format!("HTTP/1.1 304 Not Modified\r\n\r\n{FORGED}")),
        "/chunks" => {
            and_stay(format!("HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n5\r\nfirst\r\n0\r\n\r\n{FORGED}"))
        }
        path => honest(path),
    });
    let (_place, server) = before(&raw);
    let mut client = Kept::open(&server);
    for n in 0..10 {
        for (path, body) in [("/more", "first"), ("/chunks", "first"), ("/none", ""), ("/unchanged", "")] {
            client.send("GET", path, "");
            assert_eq!(client.next().unwrap().body, body, "{path}, round {n}");
            let next = format!("/next/{n}");
            client.send("GET", &next, "");
            assert_eq!(client.next().unwrap().body, next, "after {path}");
        }
    }
}

/// Answers that break the rules of HTTP.
fn broken() -> Vec<(&'static str, Vec<u8>)> {
    let head = |lines: &str| format!("HTTP/1.1 200 OK\r\n{lines}\r\n\r\n5\r\nhello\r\n0\r\n\r\n").into_bytes();
    let status = |line: &str| format!("{line}\r\ncontent-length: 0\r\n\r\n").into_bytes();
    vec![
        ("two lengths that differ", head("content-length: 5\r\ncontent-length: 6")),
        ("two lengths in one line", head("content-length: 5, 6")),
        ("a length that is no number", head("content-length: five")),
        ("a length below zero", head("content-length: -5")),
        ("a length with a sign", head("content-length: +5")),
        ("a length in hexadecimal", head("content-length: 0x5")),
        ("a length without a value", head("content-length:")),
        ("a length beyond 64 bits", head("content-length: 99999999999999999999999")),
        ("a coding that is not undone", head("transfer-encoding: gzip, chunked")),
        ("chunks in chunks", head("transfer-encoding: chunked, chunked")),
        ("chunks twice", head("transfer-encoding: chunked\r\ntransfer-encoding: chunked")),
        ("a coding that is none", head("transfer-encoding: identity")),
        ("a misspelt coding and a length", head("transfer-encoding: xchunked\r\ncontent-length: 5")),
        ("a status below 100", status("HTTP/1.1 099 X")),
        ("a status of two digits", status("HTTP/1.1 20 X")),
        ("a status of four digits", status("HTTP/1.1 2000 X")),
        ("no status", status("HTTP/1.1 X")),
        ("another protocol", status("SSH-2.0-OpenSSH_9.2")),
        ("another version", status("HTTP/2.0 200 OK")),
        ("a NUL in the head", head("x-a: \0")),
        ("a space before the colon", head("content-length : 5")),
        ("nothing", Vec::new()),
    ]
}

#[test]
fn an_answer_that_breaks_the_rules_is_a_bad_gateway_and_leaves_its_key_in_doubt() {
    let answers = broken();
    let raw = Raw::start(move |path| match path.trim_start_matches('/').parse::<usize>() {
        Ok(n) => and_close(broken()[n].1.clone()),
        Err(_) => honest(path),
    });
    let (place, server) = before(&raw);
    for (n, (what, _)) in answers.iter().enumerate() {
        let (path, key) = (format!("/{n}"), format!("key-{n}"));
        let unkeyed = Answer::read(ask(&server, "GET", &path, &[], ""));
        assert_eq!(unkeyed.status, 502, "{what}: {unkeyed:?}");
        let sent = raw.requests();
        let first = Answer::read(ask(&server, "POST", &path, &[("idempotency-key", &key)], "a"));
        assert_eq!(first.status, 502, "{what}: {first:?}");
        assert_eq!(first.json()["retryable"], false, "{what}");
        let again = Answer::read(ask(&server, "POST", &path, &[("idempotency-key", &key)], "a"));
        assert_eq!((again.status, again.problem().as_str()), (409, "in-doubt"), "{what}");
        assert_eq!((raw.requests() - sent, state_of(&place, SCOPE, &key).as_str()), (1, "in_doubt"), "{what}");
    }
}

#[test]
fn equal_content_lengths_count_as_one() {
    let raw = Raw::start(|_| and_stay("HTTP/1.1 200 OK\r\ncontent-length: 5\r\ncontent-length: 5\r\n\r\nhello"));
    let (_place, server) = before(&raw);
    let mut client = Kept::open(&server);
    for headers in ["", "", "idempotency-key: k\r\ncontent-length: 0\r\n"] {
        client.send("POST", "/a", if headers.is_empty() { "content-length: 0\r\n" } else { headers });
        assert_eq!(client.next().unwrap().body, "hello");
    }
}

#[test]
fn a_request_answered_with_an_unknown_status_class_is_executed_once() {
    let raw = Raw::start(|path| and_stay(format!("HTTP/1.1 {} X\r\ncontent-length: 2\r\n\r\nok", &path[1..])));
    let (place, server) = before(&raw);
    for status in [600, 666, 700, 999] {
        let (path, key, sent) = (format!("/{status}"), format!("key-{status}"), raw.requests());
        let post = || Answer::read(ask(&server, "POST", &path, &[("idempotency-key", &key)], "a"));
        assert_eq!((post().status, state_of(&place, SCOPE, &key).as_str()), (status, "in_doubt"));
        for _ in 0..3 {
            assert_eq!(post().problem(), "in-doubt", "{status}");
        }
        assert_eq!(raw.requests() - sent, 1, "{status}");
        let unkeyed = Answer::read(ask(&server, "POST", &path, &[], "a"));
        assert_eq!((unkeyed.status, unkeyed.body.as_str()), (status, "ok"), "without a key it is passed on");
    }
}

#[test]
fn informational_answers_are_not_the_final_answer() {
    let raw = Raw::start(|path| {
        let early = "HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nlink: </a>\r\n\r\n".repeat(20);
        match path {
            "/only" => and_close(early),
            _ => and_stay(format!("{early}HTTP/1.1 201 Created\r\ncontent-length: 4\r\n\r\nlast")),
        }
    });
    let (_place, server) = before(&raw);
    for n in 0..2 {
        let answer = Answer::read(ask(&server, "POST", "/then", &[("idempotency-key", "k")], "a"));
        assert_eq!((answer.status, answer.body.as_str()), (201, "last"), "{n}");
        let only = Answer::read(ask(&server, "POST", "/only", &[("idempotency-key", "l")], "a"));
        assert_eq!(only.problem(), ["upstream-lost", "in-doubt"][n]);
    }
    assert_eq!(raw.requests(), 2);
}

/// The state of a key after its answer was cut: known, or in doubt.
#[test]
fn a_cut_answer_is_never_passed_on_as_complete_and_its_request_is_sent_once() {
    const ANSWERS: [&str; 2] = [
        "HTTP/1.1 201 Created\r\ncontent-length: 4\r\n\r\nbody",
        "HTTP/1.1 201 Created\r\ntransfer-encoding: chunked\r\ntrailer: x-a\r\n\r\n4\r\nbody\r\n0\r\nx-a: 1\r\n\r\n",
    ];
    let raw = Raw::start(|path| {
        let mut parts = path[1..].split('/').map(|part| part.parse::<usize>().unwrap());
        let (which, at) = (parts.next().unwrap(), parts.next().unwrap());
        and_close(&ANSWERS[which].as_bytes()[..at])
    });
    let (place, server) = before(&raw);
    for (which, answer) in ANSWERS.iter().enumerate() {
        let head = answer.find("\r\n\r\n").unwrap() + 4;
        for at in 0..answer.len() {
            let (path, key) = (format!("/{which}/{at}"), format!("key-{which}-{at}"));
            let mut client = Kept::open(&server);
            client.send("GET", &path, "");
            let unkeyed = client.next();
            match at < head {
                true => assert_eq!(unkeyed.unwrap().status, 502, "cut at {at}"),
                false => assert!(unkeyed.is_none(), "cut at {at}: {unkeyed:?}, with {:?}", client.read),
            }
            let sent = raw.requests();
            let mut client = Kept::open(&server);
            let headers = format!("idempotency-key: {key}\r\ncontent-length: 0\r\n");
            client.send("POST", &path, &headers);
            let first = client.next();
            assert_eq!(first.is_some(), at < head, "cut at {at}");
            // The status decides; without it the effect is unknown.
            let (state, told) = if at < head { ("in_doubt", "in-doubt") } else { ("completed", "response-not-kept") };
            let mut client = Kept::open(&server);
            client.send("POST", &path, &headers);
            assert_eq!(client.next().unwrap().problem(), told, "cut at {at}");
            assert_eq!((raw.requests() - sent, state_of(&place, SCOPE, &key).as_str()), (1, state), "cut at {at}");
        }
    }
}

#[test]
fn a_request_whose_answer_body_never_ends_takes_effect_once() {
    let raw = Raw::start(|path| match path {
        // Longer than what is kept, and then silence.
        "/endless" => {
            let chunk = format!("10000\r\n{}\r\n", "x".repeat(0x10000)).repeat(20);
            and_stay(format!("HTTP/1.1 201 Created\r\ntransfer-encoding: chunked\r\n\r\n{chunk}"))
        }
        _ => and_stay("HTTP/1.1 201 Created\r\ncontent-length: 1000\r\n\r\n"),
    });
    let (place, server) = before(&raw);
    for (n, path) in ["/endless", "/missing"].into_iter().enumerate() {
        let mut client = Kept::open(&server);
        let headers = format!("idempotency-key: {n}\r\ncontent-length: 0\r\n");
        client.send("POST", path, &headers);
        eventually(SOON, "it is known to have taken effect", || {
            raw.requests() > n && {
                let mut again = Kept::open(&server);
                again.send("POST", path, &headers);
                again.next().unwrap().problem() == "response-not-kept"
            }
        });
        assert_eq!((raw.requests(), state_of(&place, SCOPE, &n.to_string()).as_str()), (n + 1, "completed"));
    }
}

#[test]
fn a_refused_transfer_coding_ends_its_connection() {
    let raw = Raw::start(honest);
    let (_place, server) = before(&raw);
    for coding in ["chunked, chunked", "gzip, chunked", "chunked\r\ntransfer-encoding: chunked"] {
        let mut client = Kept::open(&server);
        // For a reader that decodes the body differently, it contains another request.
        client.send("POST", "/a", &format!("transfer-encoding: {coding}\r\n"));
        client.connection.write_all(b"0\r\n\r\nGET /smuggled HTTP/1.1\r\nhost: a\r\n\r\n").unwrap();
        let answer = client.next().unwrap();
        assert_eq!((answer.status, answer.header("connection")), (501, Some("close")), "{coding}");
        assert!(client.next().is_none(), "{coding}: the connection goes on");
    }
    assert_eq!(raw.requests(), 0);
}

/// Sends a request with two lengths. The upstream gets one request with this body, in one framing, and the connection
/// ends: readers differ about what follows on it.
fn is_one_request(server: &Server, service: &upstream::Upstream, headers: &str, sent: &str, body: &str) {
    let before = service.effects();
    let mut client = Kept::open(server);
    client.send("POST", "/a", headers);
    client.connection.write_all(sent.as_bytes()).unwrap();
    let answer = client.next().unwrap();
    assert_eq!((answer.status, answer.header("connection")), (201, Some("close")), "{headers}{sent}");
    assert!(client.next().is_none(), "{headers}{sent}: the connection goes on");
    // Whichever connection the next request uses, it arrives unchanged.
    assert_eq!(server.get("/next").status, 201);
    let seen = service.seen();
    let [seen, next] = &seen[before..] else { panic!("{headers}{sent}: {:?}", &seen[before..]) };
    assert_eq!((seen.line.as_str(), &*seen.body), ("POST /a HTTP/1.1", body.as_bytes()), "{headers}{sent}");
    assert_eq!(next.line, "GET /next HTTP/1.1", "{headers}{sent}");
    let length = body.len().to_string();
    let framing = [seen.header("content-length"), seen.header("transfer-encoding")].concat();
    let is_one = framing == [length.as_str()] || framing == ["chunked"] || (framing.is_empty() && body.is_empty());
    assert!(is_one, "{headers}{sent}: {}", seen.head);
}

/// By chunks and by length, the same bytes are two different requests. The chunks count (RFC 9112, 6.3).
#[test]
fn a_request_with_two_lengths_cannot_be_split_in_two() {
    const SMUGGLED: &str = "POST /smuggled HTTP/1.1\r\nhost: a\r\ncontent-length: 0\r\n\r\n";
    let (service, place) = (upstream::Upstream::start(), Place::sqlite());
    let server = Server::start_with(&mut gateway(&place, &service.url));
    let inside = format!("{:x}\r\n{SMUGGLED}\r\n0\r\n\r\n", SMUGGLED.len());
    let behind = format!("0\r\n\r\n{SMUGGLED}");
    for (n, (sent, length, body)) in [
        (&inside, 0, SMUGGLED),
        (&inside, 4, SMUGGLED),
        (&inside, inside.len() + 100, SMUGGLED),
        (&behind, 5, ""),
        (&behind, behind.len(), ""),
    ]
    .into_iter()
    .enumerate()
    {
        let (length, chunks) = (format!("content-length: {length}\r\n"), "transfer-encoding: chunked\r\n");
        let lengths = [format!("{length}{chunks}"), format!("{chunks}{length}"), format!("{length}{chunks}{length}")];
        for (m, lengths) in lengths.iter().enumerate() {
            is_one_request(&server, &service, lengths, sent, body);
            is_one_request(&server, &service, &format!("idempotency-key: {n}-{m}\r\n{lengths}"), sent, body);
        }
    }
}

#[test]
fn unknown_and_misspelt_methods_respect_their_key() {
    let raw = Raw::start(honest);
    let (_place, server) = before(&raw);
    for (n, method) in ["post", "Post", "pOST", "patch", "put", "MOVE", "LOCK", "MERGE"].into_iter().enumerate() {
        let key = format!("key-{n}");
        let send = || Answer::read(ask(&server, method, "/a", &[("idempotency-key", &key)], "a"));
        assert_eq!((send().status, send().header("idempotent-replayed")), (200, Some("true")), "{method}");
        assert_eq!(raw.requests(), n + 1, "{method}");
        let other = Answer::read(ask(&server, "POST", "/a", &[("idempotency-key", &key)], "a"));
        assert_eq!(other.problem(), "payload-mismatch", "{method} is another method than POST");
    }
    let before = raw.requests();
    for method in ["GET", "HEAD", "OPTIONS", "TRACE", "PUT", "DELETE"] {
        for _ in 0..2 {
            assert_eq!(Answer::read(ask(&server, method, "/a", &[("idempotency-key", "k")], "")).status, 200);
        }
    }
    assert_eq!(raw.requests() - before, 12, "what is safe, or the same twice as once, is passed on");
}
