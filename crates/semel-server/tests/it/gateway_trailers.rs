//! The laws of trailers at the gateway: it forwards none, so that a trailer cannot forge a header.

use std::{
    io::{Read as _, Write as _},
    net::{TcpListener, TcpStream},
    sync::{Arc, Mutex},
    thread,
};

use crate::{
    gateway::gateway,
    place::Place,
    support::{SOON, Server},
};

/// A service that records each request byte by byte, and answers with the test's bytes. Its threads end with the
/// process.
struct Verbatim {
    url: String,
    requests: Arc<Mutex<Vec<String>>>,
}

impl Verbatim {
    fn that_says(answer: &'static str) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let requests = Arc::<Mutex<Vec<String>>>::default();
        let kept = requests.clone();
        thread::spawn(move || {
            for connection in listener.incoming() {
                let mut connection = connection.unwrap();
                // One request per connection: the rest of the first is never taken for a second one.
                let request = read_request(&mut connection);
                kept.lock().unwrap().push(request.to_ascii_lowercase());
                connection.write_all(answer.as_bytes()).unwrap();
            }
        });
        Self { url, requests }
    }

    fn seen(&self) -> Vec<String> {
        self.requests.lock().unwrap().clone()
    }
}

/// A request to its end, trailers included.
fn read_request(connection: &mut TcpStream) -> String {
    connection.set_read_timeout(Some(SOON)).unwrap();
    let (mut read, mut buffer) = (Vec::new(), [0; 4096]);
    loop {
        let text = String::from_utf8_lossy(&read).into_owned();
        let is_whole = text.split_once("\r\n\r\n").is_some_and(|(head, body)| {
            let chunked = head.to_ascii_lowercase().contains("transfer-encoding: chunked");
            let ends = (body.starts_with("0\r\n") || body.contains("\r\n0\r\n")) && body.ends_with("\r\n\r\n");
            if chunked { ends } else { body.ends_with("body") || !head.contains("content-length: 4") }
        });
        if is_whole {
            return text;
        }
        let count = connection.read(&mut buffer).unwrap();
        assert!(count > 0, "it ends in the middle: {text}");
        read.extend_from_slice(&buffer[..count]);
    }
}

/// Sends bytes, and reads all that comes back.
fn exchange(server: &Server, request: &str) -> String {
    let mut connection = TcpStream::connect(server.address).unwrap();
    connection.set_read_timeout(Some(SOON)).unwrap();
    connection.write_all(request.as_bytes()).unwrap();
    let mut answer = String::new();
    connection.read_to_string(&mut answer).unwrap();
    answer.to_ascii_lowercase()
}

#[test]
fn trailers_of_a_client_are_not_passed_on() {
    let upstream = Verbatim::that_says("HTTP/1.1 201 Created\r\nconnection: close\r\ncontent-length: 2\r\n\r\nok");
    let place = Place::sqlite();
    let server = Server::start_with(&mut gateway(&place, &upstream.url));
    let names = ["X-Tenant", "Semel-Fence", "X-Forwarded-For", "Idempotency-Key", "X_Tenant", "X-Own"];
    let trailers: String = names.iter().map(|name| format!("{name}: forged\r\n")).collect();
    for (n, key) in ["", "idempotency-key: k\r\n"].into_iter().enumerate() {
        let head = format!(
            "POST /orders HTTP/1.1\r\nhost: shop.example\r\nconnection: close\r\nte: trailers\r\n{key}trailer: {}\r\n\
             transfer-encoding: chunked\r\n\r\n",
            names.join(", ")
        );
        let answer = exchange(&server, &format!("{head}4\r\nbody\r\n0\r\n{trailers}\r\n"));
        assert!(answer.starts_with("http/1.1 201 "), "{answer}");
        let seen = upstream.seen();
        assert_eq!(seen.len(), n + 1, "it was sent once");
        assert!(seen[n].contains("body") && !seen[n].contains("forged"), "{}", seen[n]);
        assert!(!seen[n].contains("\ntrailer:") && !seen[n].contains("\nte:"), "{}", seen[n]);
    }
}

#[test]
fn trailers_of_an_upstream_are_not_passed_on() {
    let upstream = Verbatim::that_says(
        "HTTP/1.1 201 Created\r\nconnection: close\r\ntrailer: Idempotent-Replayed, X-Sum\r\n\
         transfer-encoding: chunked\r\n\r\n4\r\nbody\r\n0\r\nIdempotent-Replayed: true\r\nX-Sum: 9\r\n\r\n",
    );
    let place = Place::sqlite();
    let server = Server::start_with(&mut gateway(&place, &upstream.url));
    let ask = |key: &str| {
        let head = "POST /orders HTTP/1.1\r\nhost: shop.example\r\nconnection: close\r\nte: trailers\r\n";
        exchange(&server, &format!("{head}{key}content-length: 4\r\n\r\nbody"))
    };
    for key in ["", "idempotency-key: k\r\n"] {
        let answer = ask(key);
        assert!(answer.starts_with("http/1.1 201 ") && answer.contains("body"), "{answer}");
        for said in ["idempotent-replayed", "x-sum", "trailer"] {
            assert!(!answer.contains(said), "{said}: {answer}");
        }
    }
    // Without its trailers the answer is complete, so it is stored.
    let again = ask("idempotency-key: k\r\n");
    assert!(again.starts_with("http/1.1 201 ") && again.ends_with("\r\n\r\nbody"), "{again}");
    assert!(again.contains("\r\nidempotent-replayed: true\r\n") && !again.contains("x-sum"), "{again}");
    assert_eq!(upstream.seen().len(), 2);
}
