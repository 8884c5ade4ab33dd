//! An SMTP server for tests: it records every mail, and it fails where a test tells it to.
//!
//! A mail counts as arrived from the moment its final dot was received, before the server answers: from then on a
//! real server may deliver it, whatever happens to the connection.

use std::{
    collections::HashMap,
    net::SocketAddr,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use bytes::Bytes;
use tokio::{
    io::{AsyncBufReadExt, AsyncRead, AsyncWriteExt, BufReader, BufWriter},
    net::{
        TcpListener, TcpStream,
        tcp::{OwnedReadHalf, OwnedWriteHalf},
    },
    task::JoinHandle,
};

/// The points of a session at which a fault can happen: each before the server's reply.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Stage {
    /// The connection was accepted; the reply is the greeting.
    Connect,
    /// EHLO or HELO.
    Hello,
    /// AUTH, with its credentials.
    Auth,
    /// MAIL FROM.
    Mail,
    /// RCPT TO. The envelope contains the recipient.
    Recipient,
    /// The DATA command.
    Data,
    /// The first line of the message, after 354. Only [`Fault::Close`], [`Fault::Delay`] and [`Fault::Stall`] make
    /// sense, because a server does not reply here.
    Body,
    /// The final dot. With any fault but a refusing [`Fault::Reply`] the mail has arrived.
    Dot,
    /// RSET. The envelope is that of the mail before.
    Reset,
}

/// What the server does instead of its usual reply.
#[derive(Clone, Debug)]
pub enum Fault {
    /// The usual reply.
    None,
    /// Another reply: a code and a text, without the line end.
    Reply(String),
    /// A reply, then the connection is closed.
    ReplyAndClose(String),
    /// The connection is closed without a reply.
    Close,
    /// The usual reply, later.
    Delay(Duration),
    /// No reply; the connection stays open until the client closes it.
    Stall,
}

/// Sender and recipients as far as they are known.
#[derive(Clone, Debug, Default)]
pub struct Envelope {
    /// The address of MAIL FROM; empty before.
    pub from: String,
    /// The accepted addresses of RCPT TO, and the one that is asked for now.
    pub to: Vec<String>,
}

/// A mail whose final dot was received.
#[derive(Clone, Debug)]
pub struct Arrived {
    /// The recipients of the envelope.
    pub to: Vec<String>,
    /// The sender of the envelope.
    pub from: String,
    /// The Message-ID header, without angle brackets; empty if there is none.
    pub message_id: String,
    /// The message as it was before dot-stuffing.
    pub bytes: Bytes,
}

type Hook = Arc<dyn Fn(Stage, &Envelope) -> Fault + Send + Sync>;

struct Shared {
    extensions: Vec<String>,
    hook: Mutex<Option<Hook>>,
    arrived: Mutex<Vec<Arrived>>,
    connections: Mutex<usize>,
}

/// The server. It stops when it is dropped; open connections end when their clients close them.
pub struct SmtpSink {
    shared: Arc<Shared>,
    address: SocketAddr,
    accepting: JoinHandle<()>,
}

impl SmtpSink {
    /// Listens on a free port of the loopback interface, with the extensions that our client uses.
    pub async fn start() -> Self {
        Self::start_with(&["8BITMIME", "SMTPUTF8", "PIPELINING", "AUTH PLAIN LOGIN"]).await
    }

    /// Listens with these extensions only.
    ///
    /// # Panics
    /// When the loopback interface has no free port.
    pub async fn start_with(extensions: &[&str]) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
        let address = listener.local_addr().expect("a bound socket has an address");
        let shared = Arc::new(Shared {
            extensions: extensions.iter().map(|&e| e.to_owned()).collect(),
            hook: Mutex::new(None),
            arrived: Mutex::new(Vec::new()),
            connections: Mutex::new(0),
        });
        let accepting = tokio::spawn(accept(listener, Arc::clone(&shared)));
        Self { shared, address, accepting }
    }

    /// `smtp://127.0.0.1:PORT`.
    pub fn url(&self) -> String {
        format!("smtp://{}", self.address)
    }

    /// The address it listens on.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Every mail that arrived, in order.
    pub fn arrived(&self) -> Vec<Arrived> {
        lock(&self.shared.arrived).clone()
    }

    /// The number of mails that arrived.
    pub fn count(&self) -> usize {
        lock(&self.shared.arrived).len()
    }

    /// How many mails arrived for each recipient.
    pub fn count_by_recipient(&self) -> HashMap<String, usize> {
        let mut counts = HashMap::new();
        for to in lock(&self.shared.arrived).iter().flat_map(|mail| &mail.to) {
            *counts.entry(to.clone()).or_default() += 1;
        }
        counts
    }

    /// How many connections were accepted so far.
    pub fn connections(&self) -> usize {
        *lock(&self.shared.connections)
    }

    /// Asks this function for a fault at every stage, from now on.
    pub fn set_faults(&self, hook: impl Fn(Stage, &Envelope) -> Fault + Send + Sync + 'static) {
        *lock(&self.shared.hook) = Some(Arc::new(hook));
    }

    /// One fault at every occurrence of a stage.
    pub fn fail_at(&self, at: Stage, fault: Fault) {
        self.set_faults(move |stage, _| if stage == at { fault.clone() } else { Fault::None });
    }

    /// Refuses recipients that contain a text, with a reply such as `550 5.1.1 no such user`.
    pub fn refuse_recipients(&self, text: &str, reply: &str) {
        let (text, reply) = (text.to_owned(), reply.to_owned());
        self.set_faults(move |stage, envelope| {
            let asked = envelope.to.last().is_some_and(|to| to.contains(&text));
            if stage == Stage::Recipient && asked { Fault::Reply(reply.clone()) } else { Fault::None }
        });
    }

    /// Ends all faults.
    pub fn clear_faults(&self) {
        *lock(&self.shared.hook) = None;
    }
}

impl Drop for SmtpSink {
    fn drop(&mut self) {
        self.accepting.abort();
    }
}

/// A test that failed elsewhere must not fail here a second time because of the poisoned lock.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

async fn accept(listener: TcpListener, shared: Arc<Shared>) {
    while let Ok((stream, _)) = listener.accept().await {
        *lock(&shared.connections) += 1;
        let shared = Arc::clone(&shared);
        tokio::spawn(async move { Session::new(stream, shared).run().await });
    }
}

/// The session is over: a fault closed it, or the client did.
struct Over;

impl From<std::io::Error> for Over {
    fn from(_: std::io::Error) -> Self {
        Self
    }
}

struct Session {
    shared: Arc<Shared>,
    reader: BufReader<OwnedReadHalf>,
    writer: BufWriter<OwnedWriteHalf>,
    envelope: Envelope,
}

impl Session {
    fn new(stream: TcpStream, shared: Arc<Shared>) -> Self {
        // Without this, the reply to a pipelined command waits for the client's delayed acknowledgement.
        let _ = stream.set_nodelay(true);
        let (read, write) = stream.into_split();
        Self {
            shared,
            reader: BufReader::with_capacity(64 << 10, read),
            writer: BufWriter::new(write),
            envelope: Envelope::default(),
        }
    }

    async fn run(mut self) {
        // `Over` is the only way out of the loop, and there is nothing to report.
        let _ = self.converse().await;
        let _ = self.writer.shutdown().await;
    }

    async fn converse(&mut self) -> Result<(), Over> {
        self.answer(Stage::Connect, "220 sink ESMTP").await?;
        loop {
            let line = self.line().await?;
            let verb = line.split([' ', ':']).next().unwrap_or_default().to_ascii_uppercase();
            match verb.as_str() {
                "EHLO" | "HELO" => self.hello().await?,
                "AUTH" => self.auth(&line).await?,
                "MAIL" => {
                    self.envelope = Envelope { from: address(&line), to: Vec::new() };
                    self.answer(Stage::Mail, "250 2.1.0 ok").await?;
                }
                "RCPT" => {
                    self.envelope.to.push(address(&line));
                    if !self.answer(Stage::Recipient, "250 2.1.5 ok").await? {
                        self.envelope.to.pop();
                    }
                }
                "DATA" if self.envelope.to.is_empty() => self.reply("503 5.5.1 no recipient").await?,
                "DATA" => {
                    if self.answer(Stage::Data, "354 go on").await? {
                        self.message().await?;
                    }
                }
                "RSET" => {
                    self.answer(Stage::Reset, "250 2.0.0 ok").await?;
                    self.envelope = Envelope::default();
                }
                "NOOP" => self.reply("250 2.0.0 ok").await?,
                "QUIT" => {
                    self.reply("221 2.0.0 bye").await?;
                    self.writer.flush().await?;
                    return Err(Over);
                }
                _ => self.reply("500 5.5.2 unknown command").await?,
            }
        }
    }

    async fn hello(&mut self) -> Result<(), Over> {
        let lines: Vec<&str> =
            std::iter::once("sink").chain(self.shared.extensions.iter().map(String::as_str)).collect();
        let last = lines.len() - 1;
        let reply: Vec<String> = lines
            .iter()
            .enumerate()
            .map(|(i, line)| format!("250{}{line}", if i < last { '-' } else { ' ' }))
            .collect();
        self.answer(Stage::Hello, &reply.join("\r\n")).await?;
        Ok(())
    }

    /// Accepts any credentials: PLAIN with an initial response, LOGIN with two questions.
    async fn auth(&mut self, line: &str) -> Result<(), Over> {
        if line.to_ascii_uppercase().starts_with("AUTH LOGIN") {
            for question in ["334 VXNlcm5hbWU6", "334 UGFzc3dvcmQ6"] {
                self.reply(question).await?;
                self.line().await?;
            }
        }
        self.answer(Stage::Auth, "235 2.7.0 ok").await?;
        Ok(())
    }

    /// Reads a message to its final dot and records it.
    async fn message(&mut self) -> Result<(), Over> {
        let mut bytes = Vec::new();
        let mut began = false;
        loop {
            let start = bytes.len();
            self.flush_if_idle().await?;
            if self.reader.read_until(b'\n', &mut bytes).await? == 0 {
                return Err(Over);
            }
            if !began {
                began = true;
                self.interrupt(Stage::Body).await?;
            }
            if &bytes[start..] == b".\r\n" {
                bytes.truncate(start);
                break;
            }
            if bytes[start] == b'.' {
                bytes.remove(start);
            }
        }
        let fault = self.fault(Stage::Dot);
        let refuses = matches!(&fault, Fault::Reply(text) | Fault::ReplyAndClose(text) if !text.starts_with('2'));
        if !refuses {
            let Envelope { from, to } = self.envelope.clone();
            let message_id = message_id(&bytes);
            lock(&self.shared.arrived).push(Arrived { to, from, message_id, bytes: bytes.into() });
        }
        self.envelope = Envelope::default();
        self.act(fault, "250 2.0.0 accepted").await?;
        Ok(())
    }

    fn fault(&self, stage: Stage) -> Fault {
        let hook = lock(&self.shared.hook).clone();
        hook.map_or(Fault::None, |hook| hook(stage, &self.envelope))
    }

    /// Replies, or does what the test wants instead. True when the reply was the usual one.
    async fn answer(&mut self, stage: Stage, usual: &str) -> Result<bool, Over> {
        let fault = self.fault(stage);
        self.act(fault, usual).await
    }

    async fn act(&mut self, fault: Fault, usual: &str) -> Result<bool, Over> {
        match fault {
            Fault::None => {}
            Fault::Reply(text) => {
                self.reply(&text).await?;
                return Ok(false);
            }
            Fault::ReplyAndClose(text) => {
                self.reply(&text).await?;
                self.writer.flush().await?;
                return Err(Over);
            }
            Fault::Close => return Err(Over),
            Fault::Delay(time) => tokio::time::sleep(time).await,
            Fault::Stall => return Err(self.stall().await),
        }
        self.reply(usual).await?;
        Ok(true)
    }

    /// A fault where the server has nothing to say.
    async fn interrupt(&mut self, stage: Stage) -> Result<(), Over> {
        match self.fault(stage) {
            Fault::Close | Fault::ReplyAndClose(_) => Err(Over),
            Fault::Delay(time) => {
                tokio::time::sleep(time).await;
                Ok(())
            }
            Fault::Stall => Err(self.stall().await),
            Fault::None | Fault::Reply(_) => Ok(()),
        }
    }

    async fn stall(&mut self) -> Over {
        let _ = self.writer.flush().await;
        drain(&mut self.reader).await;
        Over
    }

    async fn reply(&mut self, text: &str) -> Result<(), Over> {
        self.writer.write_all(text.as_bytes()).await?;
        self.writer.write_all(b"\r\n").await?;
        Ok(())
    }

    async fn line(&mut self) -> Result<String, Over> {
        let mut line = String::new();
        self.flush_if_idle().await?;
        if self.reader.read_line(&mut line).await? == 0 {
            return Err(Over);
        }
        line.truncate(line.trim_end().len());
        Ok(line)
    }

    /// The replies to pipelined commands go out together.
    async fn flush_if_idle(&mut self) -> Result<(), Over> {
        if self.reader.buffer().is_empty() {
            self.writer.flush().await?;
        }
        Ok(())
    }
}

async fn drain(reader: &mut (impl AsyncRead + Unpin)) {
    let _ = tokio::io::copy(reader, &mut tokio::io::sink()).await;
}

/// The text between angle brackets.
fn address(line: &str) -> String {
    let inside = line.split_once('<').and_then(|(_, rest)| rest.rsplit_once('>'));
    inside.map_or_else(String::new, |(address, _)| address.to_owned())
}

fn message_id(bytes: &[u8]) -> String {
    for line in bytes.split(|&b| b == b'\n') {
        let line = line.strip_suffix(b"\r").unwrap_or(line);
        if line.is_empty() {
            break;
        }
        if line.len() > 11 && line[..11].eq_ignore_ascii_case(b"message-id:") {
            return String::from_utf8_lossy(&line[11..]).trim().trim_matches(['<', '>']).to_owned();
        }
    }
    String::new()
}

#[cfg(test)]
mod tests {
    use tokio::io::AsyncReadExt;

    use super::*;

    #[tokio::test]
    async fn a_pipelined_session_is_recorded_without_its_dot_stuffing() {
        let sink = SmtpSink::start().await;
        let mut client = TcpStream::connect(sink.address()).await.unwrap();
        let mail = "MAIL FROM:<a@x>\r\nRCPT TO:<b@y>\r\nDATA\r\nMessage-ID: <1@x>\r\n\r\n..dot\r\n.\r\n";
        client.write_all(format!("EHLO me\r\n{mail}{mail}QUIT\r\n").as_bytes()).await.unwrap();
        let mut said = String::new();
        client.read_to_string(&mut said).await.unwrap();
        assert_eq!(said.matches("250 2.0.0 accepted").count(), 2, "{said}");
        let arrived = sink.arrived();
        assert_eq!(arrived[1].message_id, "1@x");
        assert_eq!(&arrived[1].bytes[..], b"Message-ID: <1@x>\r\n\r\n.dot\r\n");
        assert_eq!(sink.count_by_recipient()["b@y"], 2);
    }

    #[tokio::test]
    async fn a_mail_whose_dot_is_refused_has_not_arrived() {
        let sink = SmtpSink::start().await;
        sink.fail_at(Stage::Dot, Fault::Reply("451 4.3.0 later".to_owned()));
        let mut client = TcpStream::connect(sink.address()).await.unwrap();
        let mail = b"MAIL FROM:<a@x>\r\nRCPT TO:<b@y>\r\nDATA\r\n\r\n.\r\nQUIT\r\n";
        client.write_all(mail).await.unwrap();
        let mut said = String::new();
        client.read_to_string(&mut said).await.unwrap();
        assert!(said.contains("451 4.3.0 later"), "{said}");
        assert_eq!(sink.count(), 0);
    }
}
