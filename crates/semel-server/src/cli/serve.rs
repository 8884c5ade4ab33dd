//! `semel serve`: the server.

use std::{net::SocketAddr, process::ExitCode, sync::Arc};

use anyhow::Context as _;
use axum::Router;

use crate::{
    config::{BrokerUrl, Config, DatabaseUrl, Flags},
    http::{App, health::AlwaysReady, principal::Local},
    log,
    serve::{self, DRAIN, Drained},
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
        log::start();
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
    let app = App { readiness: Arc::new(AlwaysReady), authenticate: Arc::new(Local), routes: Router::new() };
    super::say(&greeting(config, listener.local_addr()?))?;
    match serve::run(listener, app.into_router(), stop, DRAIN).await {
        Drained::Finished => tracing::info!("stopped; every request was answered"),
        Drained::CutOff => tracing::warn!("stopped; some requests were cut off"),
    }
    Ok(())
}

fn greeting(config: &Config, address: SocketAddr) -> String {
    let ledger = match &config.database_url {
        DatabaseUrl::Sqlite(path) => path.display().to_string(),
        DatabaseUrl::Postgres(url) => url.to_string(),
    };
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
