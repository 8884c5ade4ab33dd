//! A client that sends raw bytes.

use std::{net::SocketAddr, time::Duration};

use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::TcpStream,
};

/// A request.
#[derive(Clone)]
pub(crate) struct Ask {
    method: &'static str,
    path: String,
    headers: Vec<(String, Vec<u8>)>,
    body: Vec<u8>,
}

pub(crate) fn ask(method: &'static str, path: &str) -> Ask {
    Ask { method, path: path.to_owned(), headers: Vec::new(), body: Vec::new() }
}

pub(crate) fn post(path: &str) -> Ask {
    ask("POST", path)
}

/// A POST to `/orders` with a key.
pub(crate) fn keyed(key: &str) -> Ask {
    post("/orders").key(key)
}

impl Ask {
    pub(crate) fn key(self, key: &str) -> Self {
        self.header("Idempotency-Key", key)
    }

    pub(crate) fn header(mut self, name: &str, value: impl AsRef<[u8]>) -> Self {
        self.headers.push((name.to_owned(), value.as_ref().to_vec()));
        self
    }

    pub(crate) fn body(self, body: impl AsRef<[u8]>) -> Self {
        Self { body: body.as_ref().to_vec(), ..self }
    }

    pub(crate) fn json(self, body: &str) -> Self {
        self.header("Content-Type", "application/json").body(body)
    }

    /// Sets the status that the handler answers; see `shop::order`.
    pub(crate) fn gets(self, status: u16) -> Self {
        self.header("X-Status", status.to_string())
    }

    pub(crate) fn head(&self) -> Vec<u8> {
        let mut out =
            format!("{} {} HTTP/1.1\r\nHost: shop\r\nConnection: close\r\n", self.method, self.path).into_bytes();
        for (name, value) in &self.headers {
            out.extend([name.as_bytes(), b": ", value, b"\r\n"].concat());
        }
        out
    }

    pub(crate) fn bytes(&self) -> Vec<u8> {
        let length = format!("Content-Length: {}\r\n\r\n", self.body.len());
        [self.head(), length.into_bytes(), self.body.clone()].concat()
    }
}

/// An answer, as received.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Answer {
    pub(crate) status: u16,
    pub(crate) headers: Vec<(String, Vec<u8>)>,
    pub(crate) body: Vec<u8>,
    /// Whether the whole announced body was received.
    pub(crate) whole: bool,
}

impl Answer {
    /// The value of a header that occurs at most once.
    pub(crate) fn header(&self, name: &str) -> Option<String> {
        let all = self.all(name);
        assert!(all.len() < 2, "{name} occurs more than once: {all:?}");
        all.into_iter().next()
    }

    pub(crate) fn all(&self, name: &str) -> Vec<String> {
        let lines = self.headers.iter().filter(|(known, _)| known == name);
        lines.map(|(_, value)| String::from_utf8_lossy(value).into_owned()).collect()
    }

    pub(crate) fn text(&self) -> String {
        String::from_utf8_lossy(&self.body).into_owned()
    }

    pub(crate) fn json(&self) -> serde_json::Value {
        serde_json::from_slice(&self.body).unwrap_or_else(|e| panic!("{e}: {self:?}"))
    }

    pub(crate) fn is_replay(&self) -> bool {
        self.header("idempotent-replayed").as_deref() == Some("true")
    }

    /// Checks that it is this problem, with this status.
    #[track_caller]
    pub(crate) fn is_problem(&self, status: u16, name: &str) -> &Self {
        assert_eq!(self.header("content-type").as_deref(), Some("application/problem+json"), "{self:?}");
        let said = (self.status, self.json()["type"].clone());
        assert_eq!(said, (status, format!("/problems/{name}").into()), "{self:?}");
        assert_eq!(self.json()["status"], status);
        self
    }
}

/// Sends requests to this address.
#[derive(Clone, Copy)]
pub(crate) struct Client(pub(crate) SocketAddr);

/// With a deadline, so that a test fails instead of hanging.
pub(crate) async fn soon<T>(what: impl Future<Output = T>) -> T {
    tokio::time::timeout(Duration::from_secs(20), what).await.expect("this took longer than 20 s")
}

/// Polls until it is true, for background work that gives no signal.
pub(crate) async fn eventually<F: Future<Output = bool>>(mut is_so: impl FnMut() -> F) {
    soon(async {
        while !is_so().await {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    })
    .await;
}

impl Client {
    pub(crate) async fn send(self, ask: &Ask) -> Answer {
        self.raw(&ask.bytes()).await
    }

    /// Sends, and reads the answer in another task.
    pub(crate) fn spawn(self, ask: &Ask) -> tokio::task::JoinHandle<Answer> {
        let bytes = ask.bytes();
        tokio::spawn(async move { self.raw(&bytes).await })
    }

    pub(crate) async fn raw(self, bytes: &[u8]) -> Answer {
        let stream = self.start(bytes).await;
        soon(read(stream)).await
    }

    /// Sends, and does not read the answer.
    pub(crate) async fn start(self, bytes: &[u8]) -> TcpStream {
        let mut stream = TcpStream::connect(self.0).await.unwrap();
        // The server may close before it has read everything.
        let _ = stream.write_all(bytes).await;
        stream
    }
}

/// Reads to the end of the connection.
pub(crate) async fn read(mut stream: TcpStream) -> Answer {
    let mut bytes = Vec::new();
    // After a reset, the bytes read so far are the answer.
    let _ = stream.read_to_end(&mut bytes).await;
    parse(&bytes)
}

fn parse(bytes: &[u8]) -> Answer {
    let end = bytes.windows(4).position(|four| four == b"\r\n\r\n");
    let end = end.unwrap_or_else(|| panic!("no answer: {:?}", String::from_utf8_lossy(bytes)));
    let (head, body) = (&bytes[..end], &bytes[end + 4..]);
    let mut lines = head.split(|byte| *byte == b'\n').map(<[u8]>::trim_ascii);
    let status = String::from_utf8_lossy(lines.next().unwrap()).split(' ').nth(1).unwrap().parse().unwrap();
    let headers: Vec<_> = lines
        .map(|line| {
            let colon = line.iter().position(|byte| *byte == b':').unwrap();
            let name = String::from_utf8_lossy(&line[..colon]).to_ascii_lowercase();
            (name, line[colon + 1..].trim_ascii().to_vec())
        })
        .collect();
    let mut answer = Answer { status, headers, body: body.to_vec(), whole: true };
    if answer.header("transfer-encoding").is_some() {
        (answer.body, answer.whole) = unchunked(body);
    } else if let Some(length) = answer.header("content-length") {
        answer.whole = answer.body.len() == length.parse::<usize>().unwrap();
    }
    answer
}

fn unchunked(mut rest: &[u8]) -> (Vec<u8>, bool) {
    let mut body = Vec::new();
    loop {
        let Some(end) = rest.windows(2).position(|two| two == b"\r\n") else { return (body, false) };
        let size = usize::from_str_radix(&String::from_utf8_lossy(&rest[..end]), 16).unwrap();
        rest = &rest[end + 2..];
        if size == 0 {
            return (body, true);
        }
        if rest.len() < size + 2 {
            body.extend_from_slice(rest);
            return (body, false);
        }
        body.extend_from_slice(&rest[..size]);
        rest = &rest[size + 2..];
    }
}
