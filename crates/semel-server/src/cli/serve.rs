//! `semel serve`: the server.

use std::{convert::Infallible, net::SocketAddr, process::ExitCode, sync::Arc, time::Duration};

use anyhow::Context as _;
use axum::{
    Router,
    body::Body,
    http::{Request, Response},
};
use hyper::body::Incoming;
use semel::{Ledger, Options, Uptime, Worker, fleet::Sign};
use semel_store::Database;
use tokio::net::TcpListener;
use tower::Service;

use super::ledger;
use crate::{
    config::{BrokerUrl, Config, Flags, NodeRole},
    http::{App, principal::Local, request_log, room::Budget},
    jobs::Jobs,
    log,
    node::{self, AsksTheStore, Fault, Node},
    serve::{self, Drained, Limits},
    service::{LONGEST_ROUND, Parts},
    services::{self, messages::config::Messages, webhooks::config::Webhooks},
    stop::Stop,
};

/// The version of this program.
pub(super) const VERSION: &str = env!("CARGO_PKG_VERSION");

/// How long closing the database may take, after everything else. Checkpointing the log of a SQLite file takes longest.
const CLOSE: Duration = Duration::from_secs(2);

/// Run the server
#[derive(clap::Args)]
pub(super) struct Serve {
    #[command(flatten)]
    flags: Flags,

    /// Accept unsigned events at /webhooks/stripe, from this machine only, for trying things out
    #[arg(long)]
    dev: bool,
}

impl Serve {
    pub(super) fn run(self) -> anyhow::Result<ExitCode> {
        let mut config = super::load(&self.flags)?;
        if self.dev {
            anyhow::ensure!(
                config.listen.is_loopback(),
                "--dev is for this machine only, and {} is not",
                config.listen
            );
            config.services.change(Webhooks::for_trying);
        }
        // Suppresses PostgreSQL's notices about existing tables and its notice to every connection when the server stops:
        // an outage is logged once.
        let outage = log::start_server();
        if self.dev {
            warn_of_dev(&config);
        }
        let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().context("cannot start")?;
        let served = runtime.block_on(serve(&config, outage));
        // The remaining tasks have had their time; waiting for them here would delay the exit.
        runtime.shutdown_background();
        served?;
        Ok(ExitCode::SUCCESS)
    }
}

/// Logs a warning that events are not verified.
fn warn_of_dev(config: &Config) {
    let source = Webhooks::TRYING;
    if !config.roles.contains(NodeRole::Api) {
        tracing::warn!("--dev changes nothing: without the role api this node accepts no events");
    } else if config.services.get::<Webhooks>().sources.get(source).is_some_and(|source| source.is_unsigned()) {
        tracing::warn!(
            "--dev: /webhooks/{source} accepts unsigned events, from this machine only; never use it for real ones"
        );
    } else {
        tracing::warn!(
            "--dev changes nothing: the source {source} is in the configuration, and its events must be signed"
        );
    }
}

async fn serve(config: &Config, outage: log::Outage) -> anyhow::Result<()> {
    // Before the port is bound: from the first line on stdout, a signal means a graceful stop.
    let stop = Stop::on_signals().context("cannot listen to signals")?;
    let listener = serve::bind(&config.listen).await?;
    let ledger = ledger::open(&config.database_url, Options::default()).await?.ledger;
    let broker = node::broker(&config.broker_url, ledger.store(), &config.services.get())?;
    let node = Node::new(broker.clone(), &stop);
    let fault = node.fault();
    fault.watch(&ledger);
    outage.watch(ledger.store().clone());
    let (routes, signed) = start(config, &ledger, &node).await?;
    let readiness = AsksTheStore::new(&ledger, broker, &config.broker_url, fault.clone());
    let app = App { readiness: Arc::new(readiness), authenticate: Arc::new(Local), routes, signed };
    super::greet(&greeting(config, listener.local_addr()?));

    let limits = Limits::of_process(&config.http);
    let router = app.into_router_within(&Budget::new(config.http.body_budget.0));
    let router = if config.http.log_requests { request_log::on(router) } else { router };
    until_stopped(listener, router, limits, &ledger, stop, node.stop()).await;
    verdict(&fault)
}

/// An error if a task ended early, so that a supervisor restarts the server.
pub(super) fn verdict(fault: &Fault) -> anyhow::Result<()> {
    match fault.task() {
        None => Ok(()),
        Some(task) => anyhow::bail!("stopped because of a fault: the task {task} ended early"),
    }
}

/// Opens the services and starts the tasks of this node's roles. Returns the authenticated and the signed routes.
async fn start(config: &Config, ledger: &Ledger<Database>, node: &Node) -> anyhow::Result<(Router, Router)> {
    let has = |role| config.roles.contains(role);
    let jobs = Jobs::open(ledger).await?;
    let parts = Parts { ledger, broker: node.broker(), config, jobs: &jobs };
    let (mut routes, mut signed, mut queues, mut worker) = (Router::new(), Router::new(), vec![], Worker::new(ledger));
    worker = worker.known_as(config.roles.names(), VERSION);
    let (mut job_kinds, mut sweeps) = (Vec::new(), Vec::new());
    for service in services::open(&parts).await? {
        routes = routes.merge(service.routes);
        signed = signed.merge(service.signed);
        queues.extend(service.queues);
        job_kinds.extend(service.jobs);
        sweeps.extend(service.sweeps);
        worker = service.kinds.into_iter().fold(worker, Worker::on);
        worker = service.schedules.into_iter().fold(worker, Worker::every);
        for task in service.tasks.into_iter().filter(|task| task.roles.iter().any(|role| has(*role))) {
            let run = (task.run)(node.stopping());
            if task.consumes { node.consume(task.name, run) } else { node.spawn(task.name, run) }
        }
    }
    jobs.know(job_kinds);
    if has(NodeRole::Sweeper) {
        ledger.sweep_every(config.sweep.every);
        for sweep in sweeps {
            node.spawn(sweep.name, sweep.run_every(config.sweep.every, LONGEST_ROUND, node.stopping()));
        }
    }
    if has(NodeRole::Relay) || has(NodeRole::Worker) {
        node.declare(queues);
    }
    if has(NodeRole::Relay) {
        node.relay(ledger.store().clone(), config.services.get::<Messages>().relay());
    }
    if has(NodeRole::Worker) {
        node.keep_given_up(&config.broker_url, ledger.store().clone());
        node.spawn("worker", worker.run(node.stopping()));
    } else {
        let sign = Sign { roles: config.roles.names(), version: VERSION.to_owned(), kinds: Vec::new() };
        let (ledger, stopping) = (ledger.clone(), node.stopping());
        node.spawn("signs of life", async move { ledger.show_life(sign, stopping).await });
    }
    Ok(if has(NodeRole::Api) { (routes, signed) } else { (Router::new(), Router::new()) })
}

/// Serves until a stop is requested. Then requests in flight, the node's other tasks and the ledger end, in this order,
/// within their time limits.
pub(super) async fn until_stopped<App>(
    listener: TcpListener,
    app: App,
    limits: Limits,
    ledger: &Ledger<Database>,
    stop: Stop,
    others: impl Future<Output = ()>,
) where
    App: Service<Request<Incoming>, Response = Response<Body>, Error = Infallible, Future: Send>
        + Clone
        + Send
        + Sync
        + 'static,
{
    let asked = async {
        stop.asked().await;
        Uptime::now() + limits.drain
    };
    let (drained, until) = tokio::join!(serve::run(listener, app, stop.clone(), limits), asked);
    // After the requests, which need these tasks, within the rest of the time.
    let rest = async {
        if tokio::time::timeout(until.remaining(), others).await.is_err() {
            tracing::warn!("stopped before all messages were handled; they are delivered again");
        }
        ledger.stop(until.remaining()).await;
        if tokio::time::timeout(CLOSE, ledger.store().close()).await.is_err() {
            tracing::warn!("the database was not closed in time; nothing is lost");
        }
    };
    tokio::select! {
        () = rest => {}
        () = stop.forced() => {}
    }
    match drained {
        Drained::Finished => tracing::info!("stopped; every request was answered"),
        Drained::CutOff => tracing::warn!("stopped; some requests were cut off"),
    }
}

fn greeting(config: &Config, address: SocketAddr) -> String {
    let ledger = config.database_url.place();
    let messages = match &config.broker_url {
        BrokerUrl::Embedded => "in the same database".to_owned(),
        BrokerUrl::Amqp(url) => format!("through {url}"),
    };
    format!(
        "Semel {} listens on http://{address}\n\
         The ledger is in {ledger}; messages go {messages}.\n\
         Press Ctrl-C to stop.\n",
        VERSION,
    )
}
