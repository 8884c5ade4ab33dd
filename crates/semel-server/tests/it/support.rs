//! The real program, and helpers to talk to it.

use std::{
    io::{BufRead as _, BufReader, Read as _, Write as _},
    net::{SocketAddr, TcpStream},
    process::{Child, Command, ExitStatus, Output, Stdio},
    sync::mpsc,
    thread,
    time::{Duration, Instant},
};

use rustix::process::{Pid, Signal, kill_process};
use tempfile::TempDir;

/// Far longer than anything here takes, far shorter than a person waits.
pub(crate) const SOON: Duration = Duration::from_secs(20);

/// The program, without the tester's own environment variables.
pub(crate) fn semel() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_semel"));
    for (name, _) in std::env::vars_os() {
        if name.as_encoded_bytes().starts_with(b"SEMEL_") {
            command.env_remove(name);
        }
    }
    command.env_remove("RUST_LOG").stdin(Stdio::null());
    command
}

pub(crate) fn stdout(output: &Output) -> &str {
    std::str::from_utf8(&output.stdout).unwrap()
}

pub(crate) fn stderr(output: &Output) -> &str {
    std::str::from_utf8(&output.stderr).unwrap()
}

/// Runs `work` on its own thread and waits for its result, with a time limit.
pub(crate) fn within<T: Send + 'static>(limit: Duration, work: impl FnOnce() -> T + Send + 'static) -> Option<T> {
    let (done, is_done) = mpsc::channel();
    thread::spawn(move || done.send(work()));
    is_done.recv_timeout(limit).ok()
}

/// Polls until the condition holds, with a time limit.
pub(crate) fn eventually(limit: Duration, what: &str, mut holds: impl FnMut() -> bool) {
    let end = Instant::now() + limit;
    while !holds() {
        assert!(Instant::now() < end, "not within {limit:?}: {what}");
        thread::sleep(Duration::from_millis(5));
    }
}

/// A running process that does not outlive its test.
pub(crate) struct Process(pub(crate) Child);

impl Process {
    pub(crate) fn start(command: &mut Command) -> Self {
        Self(command.spawn().unwrap())
    }

    pub(crate) fn pid(&self) -> Pid {
        Pid::from_child(&self.0)
    }

    pub(crate) fn signal(&self, signal: Signal) {
        kill_process(self.pid(), signal).unwrap();
    }

    pub(crate) fn end(&mut self) -> ExitStatus {
        let mut status = None;
        eventually(SOON, "the process ends", || {
            status = self.0.try_wait().unwrap();
            status.is_some()
        });
        status.unwrap()
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// A running `semel serve` on its own port.
pub(crate) struct Server {
    pub(crate) process: Process,
    /// Its data directory by default.
    pub(crate) dir: TempDir,
    pub(crate) address: SocketAddr,
    pub(crate) greeting: Vec<String>,
}

impl Server {
    pub(crate) fn start() -> Self {
        Self::start_with(semel().args(["serve", "--listen", "127.0.0.1:0"]))
    }

    pub(crate) fn start_with(command: &mut Command) -> Self {
        let dir = TempDir::new().unwrap();
        let mut process = Process::start(command.current_dir(&dir).stdout(Stdio::piped()));
        let stdout = process.0.stdout.take().unwrap();
        let greeting: Vec<String> =
            within(SOON, || BufReader::new(stdout).lines().take(3).map(Result::unwrap).collect())
                .expect("the server says where it listens");
        let address = match greeting.first() {
            Some(line) => line.rsplit_once("http://").expect("an address").1.parse().unwrap(),
            // One that is to die may do so before it greets; no request is sent to it.
            None if command.get_envs().any(|(name, _)| name == "SEMEL_CRASH") => ([127, 0, 0, 1], 0).into(),
            None => panic!("the server did not start"),
        };
        Self { process, dir, address, greeting }
    }

    pub(crate) fn get(&self, path: &str) -> Answer {
        self.request("GET", path, &[("host", "localhost")])
    }

    pub(crate) fn request(&self, method: &str, path: &str, headers: &[(&str, &str)]) -> Answer {
        let mut connection = TcpStream::connect(self.address).unwrap();
        send(&mut connection, method, path, headers, b"");
        Answer::read(connection)
    }
}

pub(crate) fn send(connection: &mut TcpStream, method: &str, path: &str, headers: &[(&str, &str)], body: &[u8]) {
    let mut text = format!("{method} {path} HTTP/1.1\r\nconnection: close\r\n");
    for (name, value) in headers {
        text.push_str(&format!("{name}: {value}\r\n"));
    }
    if !body.is_empty() {
        text.push_str(&format!("content-length: {}\r\n", body.len()));
    }
    text.push_str("\r\n");
    connection.write_all(&[text.as_bytes(), body].concat()).unwrap();
}

/// What a server answered.
#[derive(Debug)]
pub(crate) struct Answer {
    pub(crate) status: u16,
    pub(crate) head: String,
    pub(crate) body: String,
}

impl Answer {
    pub(crate) fn read(mut connection: TcpStream) -> Self {
        connection.set_read_timeout(Some(SOON)).unwrap();
        let mut text = String::new();
        connection.read_to_string(&mut text).unwrap();
        let (head, body) = text.split_once("\r\n\r\n").expect("a whole answer");
        let status = head.split(' ').nth(1).unwrap().parse().unwrap();
        Self { status, head: head.to_ascii_lowercase(), body: body.to_owned() }
    }

    pub(crate) fn header(&self, name: &str) -> Option<&str> {
        self.head.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(": "))
    }

    pub(crate) fn json(&self) -> serde_json::Value {
        serde_json::from_str(&self.body).unwrap()
    }

    /// The name of the problem, after a check of the common shape of all problems.
    pub(crate) fn problem(&self) -> String {
        assert_eq!(self.header("content-type"), Some("application/problem+json"));
        let problem = self.json();
        assert_eq!(problem["status"], self.status);
        assert!(problem["title"].is_string() && problem["detail"].is_string() && problem["retryable"].is_boolean());
        problem["type"].as_str().unwrap().strip_prefix("/problems/").unwrap().to_owned()
    }
}
