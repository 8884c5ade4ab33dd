//! A proxy in front of PostgreSQL that breaks one exchange in a chosen way.
//!
//! It reads just enough of the protocol to know one request from the next: the text of simple
//! queries, and which prepared statement is being executed.
#![expect(clippy::missing_panics_doc, clippy::unwrap_used, reason = "a test that cannot set up its proxy fails")]

use std::{
    collections::HashMap,
    io,
    net::SocketAddr,
    sync::{Arc, Mutex},
    time::Duration,
};

use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::{TcpListener, TcpStream},
    sync::watch,
};

/// The request to break.
#[derive(Clone, Copy, Debug)]
pub enum On {
    /// A simple query that begins with this text.
    Query(&'static str),
    /// The execution of a prepared statement with this in its text.
    Execute(&'static str),
}

/// How it is broken.
#[derive(Clone, Copy, Debug)]
pub enum Fault {
    /// Not at all: only measures the length of its answer.
    Measure,
    /// The request is lost, and the connection is cut.
    CutRequest,
    /// This many bytes of the answer pass, then the connection is cut.
    CutAnswer(usize),
    /// The request is lost; the connection stays open.
    SwallowRequest,
    /// The answer is lost; the connection stays open.
    SwallowAnswer,
    /// The answer is lost, and nothing reaches the server any more, until [`Proxy::mend`].
    GoAway,
    /// The answer comes a byte at a time, with this delay.
    Trickle(Duration),
}

/// A proxy; it ends with its last connection, and takes no more when dropped.
pub struct Proxy {
    address: SocketAddr,
    shared: Arc<Shared>,
    listening: tokio::task::JoinHandle<()>,
}

#[derive(Default)]
struct Shared {
    /// The planned fault, once.
    plan: Mutex<Option<(On, Fault)>>,
    /// The length of the last broken answer, as far as it was seen.
    met: Mutex<Option<usize>>,
    /// Whether everything is blocked.
    away: watch::Sender<bool>,
}

impl Proxy {
    /// A proxy in front of the server of a URL.
    pub async fn start(url: &str) -> Self {
        let target = host_of(url).to_owned();
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let shared = Arc::<Shared>::default();
        let used = shared.clone();
        let listening = tokio::spawn(async move {
            while let Ok((client, _)) = listener.accept().await {
                let (shared, target) = (used.clone(), target.clone());
                tokio::spawn(async move {
                    // However it ends, both sides are closed.
                    let _ = forward(client, &target, &shared).await;
                });
            }
        });
        Self { address, shared, listening }
    }

    /// The same database, through the proxy.
    #[must_use]
    pub fn url(&self, url: &str) -> String {
        let mark = if url.contains('?') { '&' } else { '?' };
        format!("{}{mark}sslmode=disable", url.replacen(host_of(url), &self.address.to_string(), 1))
    }

    /// Breaks the next such request, on any connection.
    pub fn plan(&self, on: On, fault: Fault) {
        *self.shared.met.lock().unwrap() = None;
        *self.shared.plan.lock().unwrap() = Some((on, fault));
    }

    /// Ends [`Fault::GoAway`].
    pub fn mend(&self) {
        self.shared.away.send_replace(false);
    }

    /// Whether the planned request came, and how many bytes of its answer were seen.
    #[must_use]
    pub fn met(&self) -> Option<usize> {
        *self.shared.met.lock().unwrap()
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.listening.abort();
    }
}

pub(super) fn host_of(url: &str) -> &str {
    let rest = url.split_once("://").unwrap().1;
    let rest = rest.rsplit_once('@').map_or(rest, |(_, host)| host);
    rest.split(['/', '?']).next().unwrap()
}

async fn forward(mut client: TcpStream, target: &str, shared: &Shared) -> io::Result<()> {
    let mut away = shared.away.subscribe();
    if *away.borrow() {
        return Ok(());
    }
    let mut server = TcpStream::connect(target).await?;
    client.set_nodelay(true)?;
    server.set_nodelay(true)?;
    let mut requests = Requests::default();
    let mut fault = None;
    let (mut asked, mut answered) = (vec![0; 64 << 10], vec![0; 64 << 10]);
    loop {
        tokio::select! {
            () = async { drop(away.wait_for(|away| *away).await) } => return Ok(()),
            read = client.read(&mut asked) => {
                let read = read?;
                if read == 0 {
                    return server.shutdown().await;
                }
                let Some(at) = requests.find(&asked[..read], shared) else {
                    server.write_all(&asked[..read]).await?;
                    continue;
                };
                // Nothing else is in flight: sqlx waits for an answer before its next request.
                match at {
                    Fault::CutRequest => return Ok(()),
                    Fault::SwallowRequest => return hang(client, server).await,
                    other => fault = Some(other),
                }
                server.write_all(&asked[..read]).await?;
            }
            read = server.read(&mut answered) => {
                let read = read?;
                if read == 0 {
                    return client.shutdown().await;
                }
                let seen = &answered[..read];
                if fault.is_some() {
                    *shared.met.lock().unwrap().get_or_insert(0) += read;
                }
                match fault {
                    Some(Fault::CutAnswer(bytes)) => {
                        client.write_all(&seen[..bytes.min(read)]).await?;
                        client.shutdown().await?;
                        return Ok(());
                    }
                    Some(Fault::SwallowAnswer) => return hang(client, server).await,
                    Some(Fault::GoAway) => {
                        shared.away.send_replace(true);
                        return Ok(());
                    }
                    Some(Fault::Trickle(pause)) => {
                        for byte in seen {
                            client.write_all(&[*byte]).await?;
                            tokio::time::sleep(pause).await;
                        }
                    }
                    _ => client.write_all(seen).await?,
                }
                // The answer to a request ends with "ready for query": a type, a length, a state.
                if seen.len() >= 6 && seen[read - 6..read - 1] == [b'Z', 0, 0, 0, 5] {
                    fault = None;
                }
            }
        }
    }
}

/// Keeps both connections open and blocks everything, until the client gives up.
async fn hang(mut client: TcpStream, server: TcpStream) -> io::Result<()> {
    let mut ignored = [0; 1024];
    while client.read(&mut ignored).await? > 0 {}
    // A lost host closes no connection: the server must find out itself.
    tokio::time::sleep(Duration::from_secs(120)).await;
    drop(server);
    Ok(())
}

/// The requests of one connection.
#[derive(Default)]
struct Requests {
    /// The received part of an incomplete message.
    rest: Vec<u8>,
    started: bool,
    statements: HashMap<Vec<u8>, String>,
}

impl Requests {
    /// Parses on, and returns the fault if the planned request is found.
    fn find(&mut self, bytes: &[u8], shared: &Shared) -> Option<Fault> {
        self.rest.extend(bytes);
        let mut found = None;
        loop {
            // The first message has no type, only a length.
            let head = usize::from(self.started);
            let Some(length) = self.rest.get(head..head + 4) else { return found };
            let length = head + u32::from_be_bytes(length.try_into().unwrap()) as usize;
            if self.rest.len() < length {
                return found;
            }
            let message: Vec<u8> = self.rest.drain(..length).collect();
            if std::mem::replace(&mut self.started, true) {
                found = self.meet(message[0], &message[5..], shared).or(found);
            }
        }
    }

    fn meet(&mut self, kind: u8, body: &[u8], shared: &Shared) -> Option<Fault> {
        let mut words = body.split(|byte| *byte == 0);
        let (first, second) = (words.next()?, words.next().unwrap_or_default());
        let text = |word: &[u8]| String::from_utf8_lossy(word).into_owned();
        if kind == b'P' {
            // Parse: a name, then the statement.
            self.statements.insert(first.to_vec(), text(second));
            return None;
        }
        let mut plan = shared.plan.lock().unwrap();
        let is_it = match plan.as_ref()?.0 {
            On::Query(wanted) => kind == b'Q' && text(first).starts_with(wanted),
            // Bind: the portal's name, then the statement's.
            On::Execute(wanted) => kind == b'B' && self.statements.get(second).is_some_and(|it| it.contains(wanted)),
        };
        let (_, fault) = plan.take_if(|_| is_it)?;
        *shared.met.lock().unwrap() = Some(0);
        Some(fault)
    }
}
