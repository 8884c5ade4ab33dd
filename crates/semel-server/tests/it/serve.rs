//! The laws of the server.

use std::{
    io::Read as _, net::TcpStream, os::unix::fs::PermissionsExt as _, process::Stdio, sync::Arc, time::Duration,
};

use axum::{
    Router,
    body::Bytes,
    extract::rejection::BytesRejection,
    routing::{get, post},
};
use rustix::process::Signal;
use semel_server::{
    http::{
        App, BODY_LIMIT, BoxFuture,
        health::{AlwaysReady, Readiness, Report},
        principal::{Local, Principal},
        problem::{self, Problem},
    },
    serve::{self, Drained, Limits},
    stop::Stop,
};
use tokio::{net::TcpListener, sync::Semaphore};

use crate::support::{Answer, SOON, Server, eventually, semel, send, stderr};

#[test]
fn the_server_prints_its_address_and_its_data_directory() {
    let mut command = semel();
    command.args(["serve", "--listen", "localhost:0", "--data-dir", "there"]);
    command.args(["--broker-url", "amqp://ana:geheim@mq/%2f"]);
    let server = Server::start_with(&mut command);
    assert_ne!(server.address.port(), 0);
    assert!(server.address.ip().is_loopback());
    assert!(server.greeting[1].starts_with("The ledger is in there/semel.db; "), "{:?}", server.greeting);
    let folder = server.dir.path().join("there");
    assert!(folder.join("semel.db").exists());
    assert_eq!(folder.metadata().unwrap().permissions().mode() & 0o777, 0o700, "private to the user");
    assert!(server.greeting[1].contains("amqp://ana:***@mq/%2f"), "{:?}", server.greeting);
}

#[test]
fn a_running_server_is_healthy_and_ready() {
    let server = Server::start();
    let health = server.get("/healthz");
    assert_eq!((health.status, health.json()), (200, serde_json::json!({ "status": "ok" })));
    // The database check has a time limit; a slow disk may need more than one try.
    let mut ready = server.get("/readyz");
    eventually(SOON, "it is ready", || {
        ready = server.get("/readyz");
        ready.status == 200
    });
    let expected = serde_json::json!({ "ready": true, "database": "ok", "broker": "embedded", "degraded": [] });
    assert_eq!(ready.json(), expected);
    let index = server.get("/");
    assert_eq!(index.status, 200);
    assert!(index.body.contains("/healthz"), "{}", index.body);
}

#[test]
fn every_problem_has_a_page() {
    let server = Server::start();
    for kind in problem::all() {
        let page = server.get(&format!("/problems/{}", kind.name));
        assert_eq!(page.status, 200);
        assert_eq!(page.header("content-type"), Some("text/html; charset=utf-8"));
        assert!(page.body.contains(kind.title) && page.body.contains(kind.remedy), "{}", page.body);
    }
    assert_eq!(server.get("/problems/none").problem(), "not-found");
    assert_eq!(server.get("/problems/%ff").problem(), "not-found");
}

#[test]
fn a_missing_path_is_a_problem() {
    let server = Server::start();
    let answer = server.get("/nothing/here");
    assert_eq!((answer.status, answer.problem().as_str()), (404, "not-found"));
    let answer = server.request("DELETE", "/healthz", &[("host", "localhost")]);
    assert_eq!((answer.status, answer.problem().as_str()), (405, "method-not-allowed"));
    assert_eq!(answer.header("allow"), Some("get,head"));
}

#[test]
fn a_foreign_host_or_origin_reaches_no_route() {
    let server = Server::start();
    let here = server.address.to_string();
    for path in ["/", "/healthz", "/problems/not-found", "/nothing"] {
        let answer = server.request("GET", path, &[("host", "evil.example")]);
        assert_eq!((answer.status, answer.problem().as_str()), (403, "host-not-allowed"), "{path}");
        let answer = server.request("GET", path, &[("host", &here), ("origin", "http://evil.example")]);
        assert_eq!((answer.status, answer.problem().as_str()), (403, "cross-origin"), "{path}");
    }
    assert_eq!(server.request("GET", "/", &[]).problem(), "host-not-allowed");
    let own = format!("http://{here}");
    assert_eq!(server.request("GET", "/", &[("host", &here), ("origin", &own)]).status, 200);
}

#[test]
fn a_port_in_use_is_reported_in_one_line() {
    let first = Server::start();
    let address = first.address.to_string();
    let second = semel().args(["serve", "--listen", &address]).output().unwrap();
    assert_eq!(second.status.code(), Some(1));
    let told = stderr(&second);
    assert_eq!(told.lines().count(), 1, "{told}");
    assert!(told.starts_with(&format!("semel: cannot listen on {address}: the port is already in use")), "{told}");
}

#[test]
fn a_signal_stops_an_idle_server_at_once_with_success() {
    for signal in [Signal::TERM, Signal::INT] {
        let mut server = Server::start_with(semel().args(["serve", "--listen", "127.0.0.1:0"]).stderr(Stdio::piped()));
        // One connection that never sent anything, and one that is idle after an answer.
        let silent = TcpStream::connect(server.address).unwrap();
        let mut idle = TcpStream::connect(server.address).unwrap();
        std::io::Write::write_all(&mut idle, b"GET /healthz HTTP/1.1\r\nhost: localhost\r\n\r\n").unwrap();
        idle.read_exact(&mut [0; 64]).unwrap();
        server.process.signal(signal);
        assert_eq!(server.process.end().code(), Some(0));
        let mut log = String::new();
        server.process.0.stderr.take().unwrap().read_to_string(&mut log).unwrap();
        assert!(log.contains("every request was answered"), "idle connections were waited for: {log}");
        drop(silent);
    }
}

/// A server in this process, whose route `/slow` answers when it is told to.
struct Slow {
    address: std::net::SocketAddr,
    stop: Stop,
    arrived: Arc<Semaphore>,
    may_answer: Arc<Semaphore>,
    served: tokio::task::JoinHandle<Drained>,
}

impl Slow {
    async fn start(drain: Duration) -> Self {
        let (arrived, may_answer) = (Arc::new(Semaphore::new(0)), Arc::new(Semaphore::new(0)));
        let route = {
            let (arrived, may_answer) = (Arc::clone(&arrived), Arc::clone(&may_answer));
            async move || {
                arrived.add_permits(1);
                may_answer.acquire().await.unwrap().forget();
                "done"
            }
        };
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let stop = Stop::new();
        let app = Router::new().route("/slow", get(route));
        let served = tokio::spawn(serve::run(listener, app, stop.clone(), Limits { drain, ..Limits::default() }));
        Self { address, stop, arrived, may_answer, served }
    }

    /// Sends a request and waits until it is in flight.
    async fn request(&self) -> TcpStream {
        let mut connection = TcpStream::connect(self.address).unwrap();
        send(&mut connection, "GET", "/slow", &[("host", "localhost")], b"");
        self.arrived.acquire().await.unwrap().forget();
        connection
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn requests_in_flight_are_answered_before_the_server_ends() {
    let slow = Slow::start(SOON).await;
    let connection = slow.request().await;
    slow.stop.ask();
    // The port closes first: then the stop has begun.
    while TcpStream::connect(slow.address).is_ok() {
        tokio::task::yield_now().await;
    }
    assert!(!slow.served.is_finished());
    slow.may_answer.add_permits(1);
    assert_eq!(slow.served.await.unwrap(), Drained::Finished);
    assert_eq!(Answer::read(connection).body, "done");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_second_signal_ends_the_server_with_requests_in_flight() {
    let slow = Slow::start(Duration::from_secs(3600)).await;
    let _connection = slow.request().await;
    slow.stop.ask();
    slow.stop.ask();
    assert_eq!(slow.served.await.unwrap(), Drained::CutOff);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_second_signal_without_requests_in_flight_is_a_clean_stop() {
    // Repeated: `select!` may choose either of two ready branches.
    for _ in 0..20 {
        let idle = Slow::start(Duration::from_secs(3600)).await;
        idle.stop.ask();
        idle.stop.ask();
        assert_eq!(idle.served.await.unwrap(), Drained::Finished);
    }
    // A connection that is idle after its answer has no request, either.
    let idle = Slow::start(Duration::from_secs(3600)).await;
    let connection = idle.request().await;
    idle.may_answer.add_permits(1);
    let mut first = [0; 8];
    std::io::Read::read_exact(&mut &connection, &mut first).unwrap();
    idle.stop.ask();
    idle.stop.ask();
    assert_eq!(idle.served.await.unwrap(), Drained::Finished);
}

#[tokio::test(flavor = "multi_thread")]
async fn requests_in_flight_are_cut_off_after_the_drain_time() {
    let slow = Slow::start(Duration::from_millis(10)).await;
    let _connection = slow.request().await;
    slow.stop.ask();
    assert_eq!(slow.served.await.unwrap(), Drained::CutOff);
}

/// Serves an application in this process; it ends with the test.
pub(crate) async fn serve_app(readiness: impl Readiness, routes: Router) -> std::net::SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let app = App { readiness: Arc::new(readiness), authenticate: Arc::new(Local), routes, signed: Router::new() };
    tokio::spawn(serve::run(listener, app.into_router(), Stop::new(), Limits::default()));
    address
}

pub(crate) async fn ask(
    address: std::net::SocketAddr,
    method: &'static str,
    path: &'static str,
    body: Vec<u8>,
) -> Answer {
    let asked = tokio::task::spawn_blocking(move || {
        let mut connection = TcpStream::connect(address).unwrap();
        send(&mut connection, method, path, &[("host", "localhost")], &body);
        Answer::read(connection)
    });
    asked.await.unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_node_without_its_database_lives_but_is_not_ready() {
    struct Down;
    impl Readiness for Down {
        fn check(&self) -> BoxFuture<'_, Report> {
            Box::pin(async {
                Report {
                    database: Err("unreachable".to_owned()),
                    broker: "amqp".to_owned(),
                    degraded: Vec::new(),
                    fault: None,
                }
            })
        }
    }
    let address = serve_app(Down, Router::new()).await;
    assert_eq!(ask(address, "GET", "/healthz", vec![]).await.status, 200);
    let ready = ask(address, "GET", "/readyz", vec![]).await;
    let expected = serde_json::json!({ "ready": false, "database": "unreachable", "broker": "amqp", "degraded": [] });
    assert_eq!((ready.status, ready.json()), (503, expected));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_readiness_check_that_hangs_is_answered_503() {
    struct Hangs;
    impl Readiness for Hangs {
        fn check(&self) -> BoxFuture<'_, Report> {
            Box::pin(std::future::pending())
        }
    }
    let address = serve_app(Hangs, Router::new()).await;
    let ready = ask(address, "GET", "/readyz", vec![]).await;
    assert_eq!((ready.status, ready.json()["ready"].as_bool()), (503, Some(false)));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_handler_that_panics_is_answered_500() {
    async fn panics() -> &'static str {
        panic!("on purpose")
    }
    let address = serve_app(AlwaysReady, Router::new().route("/panics", get(panics))).await;
    let answer = ask(address, "GET", "/panics", vec![]).await;
    assert_eq!((answer.status, answer.problem().as_str()), (500, "internal"));
    assert!(!answer.body.contains("on purpose"), "{}", answer.body);
    assert_eq!(ask(address, "GET", "/healthz", vec![]).await.status, 200);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_handler_gets_the_principal_and_bodies_up_to_the_limit() {
    let routes = Router::new()
        .route("/who", get(async |who: Principal| format!("{}/{}", who.tenant, who.subject)))
        .route("/size", post(async |body: Result<Bytes, BytesRejection>| Ok::<_, Problem>(body?.len().to_string())));
    let address = serve_app(AlwaysReady, routes).await;
    assert_eq!(ask(address, "GET", "/who", vec![]).await.body, "default/local");
    assert_eq!(ask(address, "POST", "/size", vec![b'x'; BODY_LIMIT]).await.body, BODY_LIMIT.to_string());
    let answer = ask(address, "POST", "/size", vec![b'x'; BODY_LIMIT + 1]).await;
    assert_eq!((answer.status, answer.problem().as_str()), (413, "body-too-large"));
    assert_eq!(ask(address, "GET", "/size", vec![]).await.problem(), "method-not-allowed");
}

#[test]
fn an_impossible_data_directory_is_reported_with_the_remedy() {
    let dir = tempfile::TempDir::new().unwrap();
    std::fs::write(dir.path().join("afile"), "").unwrap();
    for (named, said) in [
        ("afile", "afile is a file, not a directory; set another directory by --data-dir"),
        ("afile/deeper", "afile is a file, not a directory; set another directory by --data-dir"),
        ("/proc/semel", "the directory /proc/semel cannot be created: "),
    ] {
        for command in [&["serve", "--listen", "127.0.0.1:0"][..], &["once", "--key", "a"]] {
            let mut command = semel_with(command, named);
            if command.get_args().any(|arg| arg == "once") {
                command.args(["--", "true"]);
            }
            let output = command.current_dir(&dir).output().unwrap();
            assert!(!output.status.success());
            assert!(stderr(&output).contains(said), "{named}: {}", stderr(&output));
            assert!(stderr(&output).contains("--database-url"), "{}", stderr(&output));
        }
    }
}

/// The driver appends the line of the server's source code, which is useless to readers.
#[test]
fn a_postgresql_error_at_the_start_is_shown_without_source_lines() {
    let server = crate::place::server();
    let (server, _) = server.rsplit_once('/').unwrap();
    let mut command = semel();
    command.args(["serve", "--listen", "127.0.0.1:0", "--database-url", &format!("{server}/no_such_database")]);
    let output = command.output().unwrap();
    let told = stderr(&output);
    assert!(told.contains("database \"no_such_database\" does not exist") && !told.contains(" at line "), "{told}");
}

fn semel_with(arguments: &[&str], data_dir: &str) -> std::process::Command {
    let mut command = semel();
    command.args(arguments).args(["--data-dir", data_dir]);
    command
}
