//! The operations API over HTTP, as a worker in another language uses it.
//!
//! - `pairs`: claims and completions of new keys, next to requests without work and to pgbench
//! - `next`: workers that ask for waiting operations, from a queue of 100,000
//!
//! Client and server share this process, as in the section `http`.

pub(crate) mod next;
pub(crate) mod pairs;

use std::sync::Arc;

use anyhow::{Context as _, Result, ensure};
use axum::{Router, body::Bytes, routing::post};
use semel::Ledger;
use semel_server::{
    config::{Environment, Flags, read},
    http::{App, health::AlwaysReady, principal::Local},
    jobs::Jobs,
    node::Node,
    serve::{self, Limits},
    service::Parts,
    services::operations::OPERATIONS,
    stop::Stop,
};
use semel_store::{Database, EmbeddedBroker};
use serde_json::Value;
use tokio::net::TcpListener;

use crate::{
    Plan,
    http::{CONNECTIONS, Client, answer},
    report::{Report, Subject},
    site::{Backend, Site, close},
};

pub(crate) use self::pairs::{PAIRS, PGBENCH};

/// The name of all operations.
const NAME: &str = "bench";

/// The path of the API.
const PATH: &str = "/v1/operations";

/// The path of the route that does nothing.
const NOTHING_PATH: &str = "/nothing";

pub(crate) fn subject(backend: Backend, how: &'static str) -> Subject {
    Subject { section: "operations", backend, how, tasks: CONNECTIONS }
}

pub(crate) async fn measure(plan: &Plan, backend: Backend, report: &mut Report) -> Result<()> {
    pairs::measure(plan, backend, report).await?;
    next::measure(plan, backend, report).await
}

/// A server with the API on a fresh database.
struct Server {
    site: Site,
    ledger: Ledger<Database>,
    node: Node,
    stop: Stop,
    api: Api,
}

impl Server {
    async fn start(plan: &Plan, backend: Backend) -> Result<Self> {
        let site = Site::fresh(plan, backend).await?;
        let ledger = site.ledger(true).await?;
        let told = read(&Flags::default(), &Environment::from_iter::<[(&str, &str); 0]>([]), "");
        let config = told.config().map_err(|mistakes| anyhow::anyhow!("{mistakes}"))?;
        let (jobs, stop) = (Jobs::open(&ledger).await?, Stop::new());
        let node = Node::new(Arc::new(EmbeddedBroker::new(ledger.store().clone())), &stop);
        let opened = (OPERATIONS.open)(&Parts { ledger: &ledger, broker: node.broker(), config, jobs: &jobs }).await?;
        for task in opened.tasks {
            node.spawn(task.name, (task.run)(node.stopping()));
        }
        let app = App {
            readiness: Arc::new(AlwaysReady),
            authenticate: Arc::new(Local),
            routes: opened.routes.route(NOTHING_PATH, post(nothing)),
            signed: Router::new(),
        };
        let socket = TcpListener::bind("127.0.0.1:0").await?;
        let api = Api(Client::of(socket.local_addr()?));
        tokio::spawn(serve::run(socket, app.into_router(), stop.clone(), Limits::default()));
        Ok(Self { site, ledger, node, stop, api })
    }

    /// Cleans up after a measurement.
    async fn tidy(&self) -> Result<()> {
        self.site.tidy(&self.ledger).await
    }

    async fn end(self) -> Result<()> {
        self.stop.ask();
        self.node.stop().await;
        close(self.ledger).await;
        self.site.remove().await
    }
}

/// Reads the body, as the API does, and answers.
async fn nothing(_: Bytes) -> String {
    answer()
}

/// An operation that was handed to this client.
struct Held {
    id: i64,
    fence: i64,
}

impl Held {
    /// From `{lease, operation}`, which is the answer to a claim and an item of the answer to `next`.
    fn of(given: &Value) -> Result<Self> {
        let number = |place: &str| given.pointer(place).and_then(Value::as_i64).with_context(|| format!("no {place}"));
        Ok(Self { id: number("/operation/id")?, fence: number("/lease/fence")? })
    }
}

/// A client of the API.
#[derive(Clone)]
struct Api(Client);

impl Api {
    /// Claims a new key.
    async fn claim(&self, body: &str) -> Result<Held> {
        let answer: Value = serde_json::from_slice(&self.0.ask("POST", PATH, "", body).await?)?;
        ensure!(answer["claim"] == "acquired", "a new key was answered {answer}");
        Held::of(&answer).with_context(|| format!("in the answer {answer}"))
    }

    /// Stores an operation for later.
    async fn enqueue(&self, body: &str) -> Result<()> {
        self.0.send("POST", PATH, None, body).await
    }

    /// Asks for waiting operations.
    async fn next(&self, body: &str) -> Result<Vec<Held>> {
        let answer: Value = serde_json::from_slice(&self.0.ask("POST", &format!("{PATH}/next"), "", body).await?)?;
        let given = answer["operations"].as_array().with_context(|| format!("no operations in {answer}"))?;
        given.iter().map(Held::of).collect()
    }

    async fn complete(&self, held: &Held) -> Result<()> {
        self.0.send("POST", &format!("{PATH}/{}/complete", held.id), None, &completion(held.fence)).await
    }

    /// A request without work.
    async fn nothing(&self, body: &str) -> Result<()> {
        self.0.send("POST", NOTHING_PATH, None, body).await
    }
}

/// The body of a completion, with the outcome that the other sections store.
fn completion(fence: i64) -> String {
    format!(r#"{{"fence":{fence},"resultData":{{"receipt":"{}"}}}}"#, answer())
}
