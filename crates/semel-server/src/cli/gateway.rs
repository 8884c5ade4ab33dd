//! `semel gateway`: a reverse proxy that adds Idempotency-Key to the service behind it.

use std::{convert::Infallible, process::ExitCode, sync::Arc};

use anyhow::Context as _;
use axum::{
    body::Body,
    http::{Request, Response},
};
use hyper::body::Incoming;
use semel::{Ledger, Options, fleet::Sign};
use semel_http::Credentials;
use semel_store::Database;
use tokio::sync::watch;
use tower::Service;

use super::{
    ledger,
    serve::{VERSION, until_stopped},
};
use crate::{
    config::{Config, Flags, StoreFlags},
    gateway::{
        self,
        config::{self, Upstream},
    },
    http::{request_log::Line, room::Budget},
    log,
    node::{AsksTheStore, Fault},
    serve::{self, Limits},
    stop::Stop,
};

/// Run a reverse proxy that makes requests with an Idempotency-Key take effect once
#[derive(clap::Args)]
pub(super) struct Gateway {
    /// Forward requests to this service, such as http://127.0.0.1:3000 [env: SEMEL_GATEWAY_UPSTREAM]
    #[arg(long, value_name = "URL")]
    upstream: Option<String>,

    /// Serve HTTP on this address; port 0 selects a free one [env: SEMEL_LISTEN] [default: 127.0.0.1:8080]
    #[arg(long, value_name = "ADDR")]
    listen: Option<String>,

    /// Log each request [env: SEMEL_HTTP_LOG_REQUESTS] [default: false]
    #[arg(long)]
    log_requests: bool,

    #[command(flatten)]
    store: StoreFlags,
}

impl Gateway {
    pub(super) fn run(self) -> anyhow::Result<ExitCode> {
        let Self { upstream, listen, log_requests, store } = self;
        let config = super::load(&Flags { upstream, listen, log_requests, ..Flags::from(store) })?;
        let upstream = config.gateway.upstream.clone();
        let upstream =
            upstream.context("which service? Set --upstream, SEMEL_GATEWAY_UPSTREAM or [gateway] upstream")?;
        let outage = log::start_server();
        let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().context("cannot start")?;
        let served = runtime.block_on(serve(&config, upstream, outage));
        // Requests in flight have had their time; waiting for them here would delay the exit.
        runtime.shutdown_background();
        served?;
        Ok(ExitCode::SUCCESS)
    }
}

async fn serve(config: &Config, upstream: Upstream, outage: log::Outage) -> anyhow::Result<()> {
    // Before the port is bound: from the first line on stdout, a signal means a graceful stop.
    let stop = Stop::on_signals().context("cannot listen to signals")?;
    let listener = serve::bind(&config.listen).await?;
    let ledger = ledger::open(&config.database_url, Options::default()).await?.ledger;
    let fault = Fault::new(&stop);
    fault.watch(&ledger);
    outage.watch(ledger.store().clone());
    // A gateway may be the only process on its ledger.
    ledger.sweep_every(config.sweep.every);
    let readiness = AsksTheStore::without_broker(&ledger, fault.clone());
    let greeting = format!(
        "Semel {} listens on http://{}\n\
         Requests go to {upstream}; the ledger is in {}.\n\
         Press Ctrl-C to stop.\n",
        VERSION,
        listener.local_addr()?,
        config.database_url.place(),
    );
    let bodies = Budget::new(config.http.body_budget.0);
    let credentials = credentials(&config.gateway, &ledger).await?;
    let readiness = Arc::new(readiness);
    let app = gateway::Gateway::new(&config.gateway, upstream, ledger.clone(), readiness, bodies, credentials);
    let app = logged(app, config.http.log_requests);
    super::greet(&greeting);
    let limits = Limits::of_process(&config.http);
    let (end, ends) = watch::channel(false);
    let (node, sign) =
        (ledger.clone(), Sign { roles: vec!["gateway".to_owned()], version: VERSION.to_owned(), ..Sign::default() });
    let signs = tokio::spawn(async move { node.show_life(sign, ends).await });
    let others = async move {
        end.send_replace(true);
        let _ = signs.await;
    };
    until_stopped(listener, app, limits, &ledger, stop, others).await;
    super::serve::verdict(&fault)
}

/// The gateway, with a log line per request if `each` is set.
fn logged(
    app: gateway::Gateway,
    each: bool,
) -> impl Service<Request<Incoming>, Response = Response<Body>, Error = Infallible, Future: Send> + Clone {
    tower::service_fn(move |request: Request<Incoming>| {
        let line = each.then(|| Line::of_another(&request));
        let answer = app.clone().call(request);
        async move {
            let answer = answer.await?;
            if let Some(line) = line {
                line.end(answer.status());
            }
            Ok(answer)
        }
    })
}

/// How callers are distinguished; `None` if the configuration shares answers or a proxy separates tenants.
async fn credentials(config: &config::Gateway, ledger: &Ledger<Database>) -> anyhow::Result<Option<Credentials>> {
    if config.shares_answers() {
        return Ok(None);
    }
    let secret = gateway::secret::of(ledger).await.context("cannot read the secret of the database")?;
    Ok(Credentials::new(&secret).map(|credentials| credentials.cookies(config.cookies.0.clone())))
}
