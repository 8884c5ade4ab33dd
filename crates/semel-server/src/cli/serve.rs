//! `semel serve`: the server.

use std::{convert::Infallible, net::SocketAddr, process::ExitCode, sync::Arc};

use anyhow::Context as _;
use axum::{
    Router,
    body::Body,
    http::{Request, Response},
};
use hyper::body::Incoming;
use semel::{Ledger, Options, Store as _, Uptime};
use semel_store::Database;
use tokio::net::TcpListener;
use tower::Service;

use super::ledger;
use crate::{
    config::{BrokerUrl, Config, Flags, NodeRole},
    http::{
        App, BoxFuture,
        health::{Readiness, Report},
        principal::Local,
    },
    log,
    serve::{self, DRAIN, Drained},
    services::proposals::Proposals,
    stop::Stop,
};

/// Run the server
#[derive(clap::Args)]
pub(super) struct Serve {
    #[command(flatten)]
    flags: Flags,
}

impl Serve {
    pub(super) fn run(self) -> anyhow::Result<ExitCode> {
        let config = super::load(&self.flags)?;
        // PostgreSQL tells every start that the tables are there already, which is news to nobody.
        log::start("info,sqlx::postgres::notice=warn");
        let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().context("cannot start")?;
        let served = runtime.block_on(serve(&config));
        // Whatever is still running was given its time; waiting for it here would break the promise to end.
        runtime.shutdown_background();
        served?;
        Ok(ExitCode::SUCCESS)
    }
}

async fn serve(config: &Config) -> anyhow::Result<()> {
    // Before the port is bound: from the first line on stdout on, a signal means a graceful stop.
    let stop = Stop::on_signals().context("cannot listen to signals")?;
    let listener = serve::bind(&config.listen).await?;
    let ledger = ledger::open(&config.database_url, Options::default()).await?.ledger;
    let proposals = Proposals::open(&ledger, config.proposals).await?;
    if config.roles.contains(NodeRole::Sweeper) {
        ledger.sweep_every(config.sweep.every);
        proposals.clean_up_every(config.sweep.every);
    }
    let readiness = AsksTheStore { store: ledger.store().clone(), broker: broker(&config.broker_url) };
    let routes = if config.roles.contains(NodeRole::Api) { proposals.routes() } else { Router::new() };
    let app = App { readiness: Arc::new(readiness), authenticate: Arc::new(Local), routes };
    super::say(&greeting(config, listener.local_addr()?))?;

    until_stopped(listener, app.into_router(), &ledger, stop).await;
    Ok(())
}

/// Serves until a stop is asked for; then requests in flight, and the ledger after them, have their time.
pub(super) async fn until_stopped<App>(listener: TcpListener, app: App, ledger: &Ledger<Database>, stop: Stop)
where
    App: Service<Request<Incoming>, Response = Response<Body>, Error = Infallible, Future: Send>
        + Clone
        + Send
        + Sync
        + 'static,
{
    let asked = async {
        stop.asked().await;
        Uptime::now() + DRAIN
    };
    let (drained, until) = tokio::join!(serve::run(listener, app, stop.clone(), DRAIN), asked);
    // After the requests, which need it, and in what is left of their time.
    tokio::select! {
        () = ledger.stop(until.remaining()) => {}
        () = stop.forced() => {}
    }
    match drained {
        Drained::Finished => tracing::info!("stopped; every request was answered"),
        Drained::CutOff => tracing::warn!("stopped; some requests were cut off"),
    }
}

/// A node is ready when its database answers.
pub(super) struct AsksTheStore {
    pub(super) store: Database,
    pub(super) broker: &'static str,
}

impl Readiness for AsksTheStore {
    fn check(&self) -> BoxFuture<'_, Report> {
        Box::pin(async {
            let database = self.store.now().await.map(drop).map_err(|error| {
                // Not in the answer: whoever can reach the port may read that, and it may name a host.
                tracing::warn!(%error, "not ready: the database does not answer");
                "does not answer".to_owned()
            });
            Report { database, broker: self.broker.to_owned() }
        })
    }
}

pub(super) fn broker(url: &BrokerUrl) -> &'static str {
    match url {
        BrokerUrl::Embedded => "embedded",
        BrokerUrl::Amqp(_) => "amqp",
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
