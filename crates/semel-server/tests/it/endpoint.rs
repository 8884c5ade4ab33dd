//! An endpoint for deliveries that follows a script and records every call.

use std::{
    collections::VecDeque,
    io::{BufRead as _, BufReader, Read as _, Write as _},
    net::{Shutdown, SocketAddr, TcpListener, TcpStream},
    sync::{Arc, Condvar, Mutex},
    thread,
};

use serde_json::Value;

use crate::support::{SOON, eventually};

/// What to do with a call.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Does {
    /// Answers with a status.
    Answers(u16),
    /// Answers with a status, and asks for so many seconds.
    AsksFor(u64, u16),
    /// Answers 202, but not before it is released.
    Waits,
    /// Never answers.
    Hangs,
    /// Closes the connection without an answer.
    Cuts,
}

/// A call as it arrived.
#[derive(Clone, Debug)]
pub(crate) struct Call {
    pub(crate) head: String,
    pub(crate) body: Value,
}

impl Call {
    pub(crate) fn header(&self, name: &str) -> &str {
        let found = self.head.lines().filter_map(|line| line.split_once(": ")).find(|(found, _)| *found == name);
        found.unwrap_or_else(|| panic!("no {name} in {}", self.head)).1
    }

    pub(crate) fn key(&self) -> &str {
        self.header("idempotency-key")
    }
}

/// A running endpoint. Its threads end with the process.
pub(crate) struct Endpoint {
    address: SocketAddr,
    state: Arc<State>,
}

#[derive(Default)]
struct State {
    calls: Mutex<Vec<Call>>,
    script: Mutex<VecDeque<Does>>,
    open: Mutex<bool>,
    opened: Condvar,
}

impl Endpoint {
    /// An endpoint that follows this script, call by call, and then answers 202.
    pub(crate) fn that(script: impl IntoIterator<Item = Does>) -> Self {
        Self::on(TcpListener::bind("127.0.0.1:0").unwrap(), script)
    }

    pub(crate) fn on(listener: TcpListener, script: impl IntoIterator<Item = Does>) -> Self {
        let address = listener.local_addr().unwrap();
        let state = Arc::<State>::default();
        *state.script.lock().unwrap() = script.into_iter().collect();
        let shared = state.clone();
        thread::spawn(move || {
            for connection in listener.incoming() {
                let (connection, state) = (connection.unwrap(), shared.clone());
                thread::spawn(move || state.serve(&connection));
            }
        });
        Self { address, state }
    }

    pub(crate) fn url(&self) -> String {
        format!("http://{}/deliver", self.address)
    }

    pub(crate) fn calls(&self) -> Vec<Call> {
        self.state.calls.lock().unwrap().clone()
    }

    /// The keys of all calls.
    pub(crate) fn keys(&self) -> Vec<String> {
        self.calls().iter().map(|call| call.key().to_owned()).collect()
    }

    /// Lets waiting calls continue.
    pub(crate) fn let_go(&self) {
        *self.state.open.lock().unwrap() = true;
        self.state.opened.notify_all();
    }

    /// Waits until so many calls have arrived.
    pub(crate) fn is_called(&self, times: usize) {
        eventually(SOON, "the endpoint is called", || self.calls().len() >= times);
    }
}

impl State {
    fn serve(&self, connection: &TcpStream) {
        let mut reader = BufReader::new(connection);
        while let Some(call) = read(&mut reader) {
            self.calls.lock().unwrap().push(call);
            let does = self.script.lock().unwrap().pop_front().unwrap_or(Does::Answers(202));
            let mut connection = connection;
            match does {
                Does::Answers(status) => {
                    let answer = format!("HTTP/1.1 {status} X\r\ncontent-length: 2\r\nlocation: /elsewhere\r\n\r\nok");
                    if connection.write_all(answer.as_bytes()).is_err() {
                        return;
                    }
                }
                Does::AsksFor(seconds, status) => {
                    let head = format!("HTTP/1.1 {status} X\r\ncontent-length: 0\r\nretry-after: {seconds}\r\n\r\n");
                    if connection.write_all(head.as_bytes()).is_err() {
                        return;
                    }
                }
                Does::Waits => {
                    let waited = self.opened.wait_timeout_while(self.open.lock().unwrap(), SOON, |open| !*open);
                    drop(waited.unwrap());
                    let _ = connection.write_all(b"HTTP/1.1 202 X\r\ncontent-length: 0\r\n\r\n");
                }
                Does::Hangs => return thread::sleep(SOON),
                Does::Cuts => {
                    let _ = connection.shutdown(Shutdown::Both);
                    return;
                }
            }
        }
    }
}

/// Reads a call; none if the connection was closed.
fn read(reader: &mut BufReader<&TcpStream>) -> Option<Call> {
    let mut head = String::new();
    loop {
        let mut line = String::new();
        if reader.read_line(&mut line).ok()? == 0 {
            return None;
        }
        if line.trim_end().is_empty() {
            break;
        }
        head.push_str(&line.to_ascii_lowercase());
    }
    // Keys are case-sensitive; they all have one case here, so that the head can be lower-cased.
    let length = head.lines().find_map(|line| line.strip_prefix("content-length: "))?.trim().parse().ok()?;
    let mut body = vec![0; length];
    reader.read_exact(&mut body).ok()?;
    Some(Call { head, body: serde_json::from_slice(&body).ok()? })
}
