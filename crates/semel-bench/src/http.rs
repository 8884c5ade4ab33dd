//! The HTTP layer: keyed requests, next to the same server without it.

use std::{
    net::SocketAddr,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, bail};
use axum::{Router, extract::State, http::StatusCode, routing::post};
use parking_lot::Mutex;
use semel::{Claim, Key, Ledger, Outcome, Settled};
use semel_http::{Idempotency, Route, Transaction};
use semel_store::{Database, Tx, on};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::{TcpListener, TcpStream},
};

use crate::{
    Plan,
    load::drive,
    report::{Report, Subject},
    site::{Backend, Site, close},
    work::{OUTCOME, new_key, work},
};

/// The number of connections.
pub(crate) const CONNECTIONS: usize = 64;

/// New keys in leased mode, and a handler without work.
pub(crate) const LEASED: &str = "leased";
/// The same claim and completion, each in its own transaction.
pub(crate) const OWN: &str = "two transactions";
/// New keys in atomic mode, and a handler that inserts a row.
pub(crate) const ATOMIC: &str = "atomic";
/// The same handler's transaction without a key.
pub(crate) const BARE: &str = "its transaction";
/// Keys that have completed.
pub(crate) const REPLAYS: &str = "replays";
/// Completed keys on a route that pins its answers: a node has them in memory.
pub(crate) const PINNED: &str = "pinned replays";
/// A row by its primary key.
pub(crate) const SELECT: &str = "point select";
/// A handler that does nothing.
pub(crate) const NOTHING: &str = "nothing";

const ALL: [&str; 8] = [LEASED, OWN, ATOMIC, BARE, REPLAYS, SELECT, PINNED, NOTHING];

/// How long a connection may be idle: a server closes it after 30 s.
const STALE: Duration = Duration::from_secs(10);

/// The number of replayed keys, in turn.
const KEYS: usize = 8_192;

pub(crate) async fn measure(plan: &Plan, backend: Backend, report: &mut Report) -> Result<()> {
    let site = Site::fresh(plan, backend).await?;
    let (ledger, unbatched) = (site.ledger(true).await?, site.ledger(false).await?);
    make_rows(&ledger).await?;
    let listener = TcpListener::bind("127.0.0.1:0").await?;
    let client = Client::of(listener.local_addr()?);
    let server = tokio::spawn(axum::serve(listener, app(&ledger, unbatched.clone())).into_future());
    let mut keys = Vec::new();
    for _ in 0..KEYS {
        keys.push(new_key()?);
    }
    let keys = Arc::new(keys);
    for path in ["/leased", "/pinned"] {
        complete(&client, path, &keys).await?;
    }
    for _ in 0..plan.rounds {
        for how in ALL.into_iter().filter(|how| plan.wants(how, CONNECTIONS)) {
            let (client, keys, turn) = (client.clone(), keys.clone(), Arc::new(AtomicUsize::new(0)));
            let figure = drive(plan, site.cpu, CONNECTIONS, move || {
                let (client, keys) = (client.clone(), keys.clone());
                let turn = turn.fetch_add(1, Ordering::Relaxed);
                async move {
                    match how {
                        LEASED => client.post("/leased", Some(&new_key()?)).await,
                        OWN => client.post("/own", Some(&new_key()?)).await,
                        ATOMIC => client.post("/atomic", Some(&new_key()?)).await,
                        BARE => client.post("/atomic", None).await,
                        REPLAYS => client.post("/leased", keys.get(turn % KEYS)).await,
                        PINNED => client.post("/pinned", keys.get(turn % KEYS)).await,
                        SELECT => client.post("/select", None).await,
                        _ => client.post("/nothing", None).await,
                    }
                }
            })
            .await?;
            report.add(Subject { section: "http", backend, how, tasks: CONNECTIONS }, figure);
            site.tidy(&ledger).await?;
        }
    }
    server.abort();
    close(ledger).await;
    close(unbatched).await;
    site.remove().await
}

/// Requests of the keys to replay.
async fn complete(client: &Client, path: &'static str, keys: &[Key]) -> Result<()> {
    for some in keys.chunks(CONNECTIONS) {
        let mut running = tokio::task::JoinSet::new();
        for key in some {
            let (client, key) = (client.clone(), key.clone());
            running.spawn(async move { client.post(path, Some(&key)).await });
        }
        while let Some(done) = running.join_next().await {
            done??;
        }
    }
    Ok(())
}

/// The body of the handlers' answers: the size of a small JSON document.
pub(crate) fn answer() -> String {
    String::from_utf8_lossy(&OUTCOME).into_owned()
}

fn app(ledger: &Ledger<Database>, unbatched: Ledger<Database>) -> Router {
    let layers = Idempotency::for_everyone(ledger.clone(), "bench");
    Router::new()
        .route("/leased", post(async || answer()).layer(layers.layer(Route::leased())))
        .route("/pinned", post(async || answer()).layer(layers.layer(Route::leased().pinned())))
        .route("/own", post(own).with_state(unbatched))
        .route("/atomic", post(insert).layer(layers.layer(Route::atomic())))
        .route("/select", post(select).with_state(ledger.store().clone()))
        .route("/nothing", post(async || answer()))
}

type Failed = (StatusCode, String);

fn failed(error: impl std::fmt::Display) -> Failed {
    (StatusCode::INTERNAL_SERVER_ERROR, error.to_string())
}

async fn own(State(ledger): State<Ledger<Database>>) -> Result<String, Failed> {
    let work = new_key().and_then(work).map_err(failed)?;
    let settled = match ledger.claim(work).await.map_err(failed)? {
        Claim::Acquired(lease) => lease.complete(Outcome::kept(&OUTCOME[..])).await.map_err(failed)?,
        other => return Err(failed(other.word())),
    };
    match settled {
        Settled::Yes { .. } => Ok(answer()),
        Settled::LeaseLost => Err(failed("a lease was lost within moments")),
    }
}

async fn insert(Transaction(tx): Transaction<Database>) -> Result<String, Failed> {
    insert_in(&tx, fastrand::i64(1_000_000..)).await.map_err(failed)?;
    Ok(answer())
}

async fn insert_in(tx: &Tx, id: i64) -> Result<()> {
    let mut held = tx.connection().await?;
    let insert = sqlx::AssertSqlSafe("INSERT INTO bench_rows (id, body) VALUES ($1, $2)");
    on!(held.get()?, c => sqlx::query(insert).bind(id).bind(answer()).execute(&mut *c).await.map(drop))?;
    Ok(())
}

async fn select(State(database): State<Database>) -> Result<String, Failed> {
    let mut reader = database.reader().await.map_err(failed)?;
    let id = fastrand::i64(0..KEYS as i64);
    let found: Result<String, _> = on!(reader.conn(), c => {
        sqlx::query_scalar("SELECT body FROM bench_rows WHERE id = $1").bind(id).fetch_one(&mut *c).await
    });
    reader.leave();
    found.map_err(failed)
}

/// The table of the handlers, with rows to select.
async fn make_rows(ledger: &Ledger<Database>) -> Result<()> {
    let made = ledger.transact(|tx: Tx| async move {
        let mut held = tx.connection().await?;
        let create = "CREATE TABLE bench_rows (id BIGINT PRIMARY KEY, body TEXT NOT NULL)";
        on!(held.get()?, c => sqlx::query(create).execute(&mut *c).await.map(drop))?;
        drop(held);
        for id in 0..KEYS as i64 {
            insert_in(&tx, id).await?;
        }
        anyhow::Ok(())
    });
    made.await
}

/// A client with as many kept-alive connections as are used at the same time.
#[derive(Clone)]
pub(crate) struct Client {
    address: String,
    /// With the time of each return.
    idle: Arc<Mutex<Vec<(TcpStream, Instant)>>>,
}

impl Client {
    pub(crate) fn of(address: SocketAddr) -> Self {
        Self { address: address.to_string(), idle: Arc::default() }
    }

    pub(crate) async fn post(&self, path: &str, key: Option<&Key>) -> Result<()> {
        self.send("POST", path, key, "{}").await
    }

    pub(crate) async fn send(&self, method: &str, path: &str, key: Option<&Key>, body: &str) -> Result<()> {
        let key = key.map(|key| format!("idempotency-key: {}\r\n", key.as_str())).unwrap_or_default();
        self.send_with(method, path, &key, body).await
    }

    /// Sends a request with additional headers, each with its line end.
    pub(crate) async fn send_with(&self, method: &str, path: &str, headers: &str, body: &str) -> Result<()> {
        self.ask(method, path, headers, body).await.map(drop)
    }

    /// The same; returns the body of the answer.
    pub(crate) async fn ask(&self, method: &str, path: &str, headers: &str, body: &str) -> Result<Vec<u8>> {
        let idle = self.idle.lock().pop();
        let mut connection = match idle {
            Some((connection, left)) if left.elapsed() < STALE => connection,
            _ => {
                let connection = TcpStream::connect(&self.address).await?;
                connection.set_nodelay(true)?;
                connection
            }
        };
        let (address, length) = (&self.address, body.len());
        let request = format!(
            "{method} {path} HTTP/1.1\r\nhost: {address}\r\n{headers}content-type: application/json\r\ncontent-length: {length}\r\n\r\n{body}"
        );
        connection.write_all(request.as_bytes()).await?;
        let mut answer = Vec::with_capacity(4096);
        let start = loop {
            if let Some(start) = start_of_body(&answer)? {
                break start;
            }
            if connection.read_buf(&mut answer).await? == 0 {
                bail!("the server closed the connection");
            }
        };
        if !answer.starts_with(b"HTTP/1.1 2") {
            bail!("{path}: {}", String::from_utf8_lossy(&answer));
        }
        self.idle.lock().push((connection, Instant::now()));
        Ok(answer.split_off(start))
    }
}

/// Where the body begins, once an answer with a content length is complete.
fn start_of_body(answer: &[u8]) -> Result<Option<usize>> {
    let Some(end) = answer.windows(4).position(|bytes| bytes == b"\r\n\r\n") else { return Ok(None) };
    let head = std::str::from_utf8(&answer[..end])?.to_ascii_lowercase();
    let length = head.lines().find_map(|line| line.strip_prefix("content-length:"));
    let length: usize = length.context("an answer without a content length")?.trim().parse()?;
    let start = end + 4;
    Ok((answer.len() >= start + length).then_some(start))
}
