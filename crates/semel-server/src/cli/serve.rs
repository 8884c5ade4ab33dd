//! `semel serve`: the server.

use std::{convert::Infallible, net::SocketAddr, process::ExitCode, sync::Arc, time::Duration};

use anyhow::Context as _;
use axum::{
    Router,
    body::Body,
    http::{Request, Response},
};
use hyper::body::Incoming;
use semel::{Ledger, Options, Uptime};
use semel_store::Database;
use tokio::net::TcpListener;
use tower::Service;

use super::ledger;
use crate::{
    config::{BrokerUrl, Config, Flags, NodeRole, Webhooks},
    http::{App, principal::Local, request_log, room::Budget},
    jobs::Jobs,
    log,
    node::{self, AsksTheStore, Fault, Node},
    serve::{self, Drained, Limits},
    services::{
        messages::Messages,
        notifications::{Deliverer, Notifications},
        proposals::Proposals,
        webhooks::{Handlers, Receiver},
    },
    stop::Stop,
};

/// How long the database has to be closed, after everything else. The longest of it is bringing the log of a SQLite
/// file into the file.
const CLOSE: Duration = Duration::from_secs(2);

/// Run the server
#[derive(clap::Args)]
pub(super) struct Serve {
    #[command(flatten)]
    flags: Flags,

    /// Take unsigned events at /webhooks/stripe, from this machine only: for trying things out
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
            config.webhooks = config.webhooks.for_trying();
        }
        // PostgreSQL tells every start that the tables are there already, and every connection that the server stops: an
        // outage is told once.
        let outage = log::start_server();
        if self.dev {
            warn_of_dev(&config);
        }
        let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().context("cannot start")?;
        let served = runtime.block_on(serve(&config, outage));
        // Whatever is still running was given its time; waiting for it here would break the promise to end.
        runtime.shutdown_background();
        served?;
        Ok(ExitCode::SUCCESS)
    }
}

/// Warns in the log that the events may say anything.
fn warn_of_dev(config: &Config) {
    let source = Webhooks::TRYING;
    if !config.roles.contains(NodeRole::Api) {
        tracing::warn!("--dev changes nothing: without the role api this node takes no events");
    } else if config.webhooks.sources.get(source).is_some_and(|source| source.is_unsigned()) {
        tracing::warn!(
            "--dev: /webhooks/{source} takes unsigned events, from this machine only; never use it for real ones"
        );
    } else {
        tracing::warn!(
            "--dev changes nothing: the source {source} is in the configuration, and its events must be signed"
        );
    }
}

async fn serve(config: &Config, outage: log::Outage) -> anyhow::Result<()> {
    // Before the port is bound: from the first line on stdout on, a signal means a graceful stop.
    let stop = Stop::on_signals().context("cannot listen to signals")?;
    let listener = serve::bind(&config.listen).await?;
    let ledger = ledger::open(&config.database_url, Options::default()).await?.ledger;
    let broker = node::broker(&config.broker_url, ledger.store(), &config.messages)?;
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

/// Whether a server that has stopped was asked to. If not, a supervisor should know, and start it again.
pub(super) fn verdict(fault: &Fault) -> anyhow::Result<()> {
    match fault.task() {
        None => Ok(()),
        Some(task) => anyhow::bail!("stopped because of a fault: the task {task} ended early"),
    }
}

/// Opens the services and starts what this node's roles ask for. The routes of the services, and those of webhooks.
async fn start(config: &Config, ledger: &Ledger<Database>, node: &Node) -> anyhow::Result<(Router, Router)> {
    let has = |role| config.roles.contains(role);
    let proposals = Proposals::open(ledger, config.proposals).await?;
    let notifications = Notifications::open(ledger, node.broker(), config.notifications.clone()).await?;
    let deliverer = Deliverer::open(ledger, &config.notifications.channels)?;
    let webhooks = Receiver::open(ledger, config.webhooks.clone(), &Handlers::default()).await?;
    let jobs = Jobs::open(ledger, [Messages::job_kinds(ledger), webhooks.job_kinds()].concat()).await?;
    let messages = Messages::open(ledger, &jobs).await?;
    if has(NodeRole::Sweeper) {
        ledger.sweep_every(config.sweep.every);
        if let Some(clean_up) = proposals.clean_up_every(config.sweep.every, node.stopping()) {
            node.spawn("proposals clean-up", clean_up);
        }
    }
    if has(NodeRole::Relay) || has(NodeRole::Worker) {
        node.declare([notifications.queues(), webhooks.queues()].concat());
    }
    if has(NodeRole::Relay) {
        node.relay(ledger.store().clone(), config.messages.relay());
    }
    if has(NodeRole::Worker) {
        for listener in notifications.listeners(&config.messages.consumer(), &deliverer) {
            node.consume("listener", listener.run(node.stopping()));
        }
        node.keep_given_up(&config.broker_url, ledger.store().clone());
        node.spawn("in-app", notifications.in_app(node.stopping()));
        node.spawn("deliverer", deliverer.clone().run(node.stopping()));
        node.spawn("jobs", jobs.clone().run(node.stopping()));
        node.spawn("webhooks runner", webhooks.run(node.stopping()));
    }
    if has(NodeRole::Api) || has(NodeRole::Worker) {
        node.spawn("webhooks counts", webhooks.count(node.stopping()));
    }
    if !has(NodeRole::Api) {
        return Ok((Router::new(), Router::new()));
    }
    node.spawn("streams", notifications.streams());
    notifications.end_streams_on(node.stopping());
    let of_events = webhooks.routes_for_people().merge(webhooks.job_routes(&jobs));
    let routes = [notifications.routes(), deliverer.routes(), jobs.routes(), messages.routes(), of_events];
    Ok((routes.into_iter().fold(proposals.routes(), Router::merge), webhooks.routes()))
}

/// Serves until a stop is asked for; then requests in flight, what else this node does, and the ledger after them, have
/// their time.
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
    // After the requests, which need them, and in what is left of their time.
    let rest = async {
        if tokio::time::timeout(until.remaining(), others).await.is_err() {
            tracing::warn!("messages in hand were left to be delivered again");
        }
        ledger.stop(until.remaining()).await;
        if tokio::time::timeout(CLOSE, ledger.store().close()).await.is_err() {
            tracing::warn!("the database was not closed in time; its log stays beside it, and nothing is lost");
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
        env!("CARGO_PKG_VERSION"),
    )
}
