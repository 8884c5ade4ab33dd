//! A service behind the gateway that does what its paths say, and counts its effects.

use std::{
    io::{self, BufRead as _, BufReader, Read as _, Write as _},
    net::{Shutdown, TcpListener, TcpStream},
    sync::{
        Arc, Condvar, Mutex,
        atomic::{AtomicUsize, Ordering},
    },
    thread,
};

use crate::support::SOON;

/// A running service. Its threads end with the process.
pub(crate) struct Upstream {
    pub(crate) url: String,
    state: Arc<State>,
}

#[derive(Default)]
struct State {
    seen: Mutex<Vec<Seen>>,
    gate: Mutex<bool>,
    opened: Condvar,
    /// Bytes of bodies that came in chunks.
    arrived: AtomicUsize,
    closed: AtomicUsize,
    left: AtomicUsize,
}

/// A request as it arrived.
#[derive(Clone, Debug)]
pub(crate) struct Seen {
    pub(crate) line: String,
    pub(crate) head: String,
    pub(crate) body: Vec<u8>,
    /// The connection that it came by.
    pub(crate) port: u16,
}

impl Seen {
    /// The values of a header, one for each line.
    pub(crate) fn header(&self, name: &str) -> Vec<&str> {
        let lines = self.head.lines().filter_map(|line| line.split_once(": "));
        lines.filter(|(found, _)| found.eq_ignore_ascii_case(name)).map(|(_, value)| value).collect()
    }
}

impl Upstream {
    pub(crate) fn start() -> Self {
        Self::start_on(TcpListener::bind("127.0.0.1:0").unwrap())
    }

    pub(crate) fn start_on(listener: TcpListener) -> Self {
        let url = format!("http://{}", listener.local_addr().unwrap());
        let state = Arc::<State>::default();
        let shared = state.clone();
        thread::spawn(move || {
            for connection in listener.incoming() {
                let (connection, state) = (connection.unwrap(), shared.clone());
                thread::spawn(move || state.serve(&connection));
            }
        });
        Self { url, state }
    }

    /// The requests it has executed.
    pub(crate) fn seen(&self) -> Vec<Seen> {
        self.state.seen.lock().unwrap().clone()
    }

    /// The number of its effects.
    pub(crate) fn effects(&self) -> usize {
        self.state.seen.lock().unwrap().len()
    }

    /// How many bytes have arrived in chunks.
    pub(crate) fn arrived(&self) -> usize {
        self.state.arrived.load(Ordering::SeqCst)
    }

    /// How many connections it closed itself.
    pub(crate) fn closed(&self) -> usize {
        self.state.closed.load(Ordering::SeqCst)
    }

    /// How many connections the other side closed after use.
    pub(crate) fn left(&self) -> usize {
        self.state.left.load(Ordering::SeqCst)
    }

    /// Lets the answers at the gate continue.
    pub(crate) fn open_gate(&self) {
        *self.state.gate.lock().unwrap() = true;
        self.state.opened.notify_all();
    }
}

impl State {
    fn wait_for_gate(&self) {
        let waited = self.opened.wait_timeout_while(self.gate.lock().unwrap(), SOON, |open| !*open);
        drop(waited.unwrap());
    }

    /// Answers the requests of a connection until either side closes it.
    fn serve(&self, connection: &TcpStream) {
        let mut reader = BufReader::new(connection);
        while let Ok(Some(seen)) = read(&mut reader, &self.arrived) {
            let number = {
                let mut all = self.seen.lock().unwrap();
                all.push(seen.clone());
                all.len()
            };
            let path = seen.line.split(' ').nth(1).unwrap().split('?').next().unwrap().to_owned();
            match self.answer(connection, &mut reader, &path, number) {
                Ok(true) => {}
                Ok(false) => {
                    let _ = connection.shutdown(Shutdown::Both);
                    self.closed.fetch_add(1, Ordering::SeqCst);
                    return;
                }
                Err(_) => return,
            }
        }
        self.left.fetch_add(1, Ordering::SeqCst);
    }

    /// Answers a request; returns whether the connection goes on.
    fn answer(
        &self,
        mut to: &TcpStream,
        from: &mut BufReader<&TcpStream>,
        path: &str,
        number: usize,
    ) -> io::Result<bool> {
        let mut say = |text: &str| to.write_all(text.as_bytes());
        let text = format!("{path} {number}");
        let length = text.len();
        match path {
            "/lose" => return Ok(false),
            "/silent" => {
                self.wait_for_gate();
                return Ok(false);
            }
            "/half" => {
                say("HTTP/1.1 201 Created\r\ncontent-length: 100\r\n\r\nhalf")?;
                return Ok(false);
            }
            "/slow" => {
                self.wait_for_gate();
                say(&format!("HTTP/1.1 201 Created\r\ncontent-length: {length}\r\n\r\n{text}"))?;
            }
            "/chunks" => {
                say("HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n5\r\nfirst\r\n")?;
                self.wait_for_gate();
                say("4\r\nlast\r\n0\r\n\r\n")?;
            }
            "/events" => {
                say(
                    "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n5\r\nfirst\r\n",
                )?;
                self.wait_for_gate();
                say("4\r\nlast\r\n0\r\n\r\n")?;
            }
            "/large" => {
                let body = "x".repeat(2 << 20);
                say(&format!(
                    "HTTP/1.1 201 Created\r\nlocation: /large/{number}\r\ncontent-length: {}\r\n\r\n{body}",
                    body.len()
                ))?;
            }
            "/headers" => {
                let head: &[u8] =
                    b"HTTP/1.1 200 Fine By Me\r\nx-two: a\r\nx-raw: \xff\xfe\r\nx-two: b\r\nset-cookie: c=1\r\n\
                    connection: x-hop\r\nx-hop: 1\r\nkeep-alive: timeout=9\r\ncontent-length: 0\r\n\r\n";
                to.write_all(head)?;
            }
            "/head" => say("HTTP/1.1 200 OK\r\ncontent-length: 1234\r\n\r\n")?,
            "/echo" => {
                say("HTTP/1.1 101 Switching Protocols\r\nconnection: upgrade\r\nupgrade: websocket\r\n\r\nhello ")?;
                io::copy(from, &mut to)?;
                return Ok(false);
            }
            "/h2c" => {
                say("HTTP/1.1 101 Switching Protocols\r\nconnection: upgrade\r\nupgrade: h2c\r\n\r\n")?;
                io::copy(from, &mut to)?;
                return Ok(false);
            }
            "/replayed" => {
                say(
                    "HTTP/1.1 201 Created\r\nidempotent-replayed: true\r\nidempotency-mismatch: a\r\ncontent-length: 0\r\n\r\n",
                )?;
            }
            "/close" => {
                // Without a `Connection: close`, so that the other side has to find out.
                say(&format!("HTTP/1.1 201 Created\r\ncontent-length: {length}\r\n\r\n{text}"))?;
                return Ok(false);
            }
            _ => {
                let status = path.trim_start_matches('/').parse::<u16>().unwrap_or(201);
                say(&format!(
                    "HTTP/1.1 {status} X\r\ncontent-length: {length}\r\nlocation: {path}/{number}\r\n\r\n{text}"
                ))?;
            }
        }
        Ok(true)
    }
}

/// Reads a request; none if the connection was closed.
pub(crate) fn read(reader: &mut BufReader<&TcpStream>, arrived: &AtomicUsize) -> io::Result<Option<Seen>> {
    let mut lines = Vec::new();
    loop {
        let mut line = Vec::new();
        if reader.read_until(b'\n', &mut line)? == 0 {
            return Ok(None);
        }
        let line = String::from_utf8_lossy(&line).trim_end().to_owned();
        if line.is_empty() {
            break;
        }
        lines.push(line);
    }
    let line = lines.remove(0);
    let port = reader.get_ref().peer_addr()?.port();
    let mut seen = Seen { line, head: lines.join("\n"), body: Vec::new(), port };
    if seen.header("transfer-encoding") == ["chunked"] {
        loop {
            let mut size = String::new();
            reader.read_line(&mut size)?;
            let size = usize::from_str_radix(size.trim(), 16).map_err(|_| io::ErrorKind::UnexpectedEof)?;
            let mut chunk = vec![0; size + 2];
            reader.read_exact(&mut chunk)?;
            seen.body.extend(&chunk[..size]);
            arrived.fetch_add(size, Ordering::SeqCst);
            if size == 0 {
                break;
            }
        }
    } else if let [length] = seen.header("content-length")[..] {
        seen.body = vec![0; length.parse().unwrap()];
        reader.read_exact(&mut seen.body)?;
    }
    Ok(Some(seen))
}
