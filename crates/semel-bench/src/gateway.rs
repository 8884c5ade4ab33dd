//! The gateway: keyed requests, next to the same proxy's bare hop and to the upstream itself.

use std::sync::Arc;

use anyhow::{Context as _, Result};
use axum::{Router, routing::post};
use semel_http::Credentials;
use semel_server::{
    config::{Environment, Flags, read},
    gateway::Gateway,
    http::{health::AlwaysReady, room::Budget},
    serve::{self, Limits},
    stop::Stop,
};
use tokio::net::TcpListener;

use crate::{
    Plan,
    http::{CONNECTIONS, Client, answer},
    load::drive,
    report::{Report, Subject},
    site::{Backend, Site, close},
    work::new_key,
};

/// New keys through the gateway.
pub(crate) const KEYED: &str = "keyed";
/// Requests without a key, which the gateway forwards unchanged.
pub(crate) const HOP: &str = "bare hop";
/// The upstream itself.
pub(crate) const DIRECT: &str = "no proxy";

pub(crate) async fn measure(plan: &Plan, backend: Backend, report: &mut Report) -> Result<()> {
    let site = Site::fresh(plan, backend).await?;
    let ledger = site.ledger(true).await?;
    let behind = TcpListener::bind("127.0.0.1:0").await?;
    let direct = Client::of(behind.local_addr()?);
    let settings = [("SEMEL_GATEWAY_UPSTREAM", format!("http://{}", behind.local_addr()?))];
    let upstream =
        tokio::spawn(axum::serve(behind, Router::new().route("/nothing", post(async || answer()))).into_future());
    let told = read(&Flags::default(), &Environment::from_iter(settings), "");
    let config = &told.config().map_err(|mistakes| anyhow::anyhow!("{mistakes}"))?.gateway;
    let target = config.upstream.clone().context("no upstream")?;
    let credentials = Credentials::new(b"a secret of thirty-two bytes or so");
    let gateway = Gateway::new(config, target, ledger.clone(), Arc::new(AlwaysReady), Budget::default(), credentials);
    let listener = TcpListener::bind("127.0.0.1:0").await?;
    let through = Client::of(listener.local_addr()?);
    let server = tokio::spawn(serve::run(listener, gateway, Stop::new(), Limits::default()));
    for _ in 0..plan.rounds {
        for how in [KEYED, HOP, DIRECT].into_iter().filter(|how| plan.wants(how, CONNECTIONS)) {
            let client = if how == DIRECT { direct.clone() } else { through.clone() };
            let figure = drive(plan, site.cpu, CONNECTIONS, move || {
                let client = client.clone();
                async move {
                    let key = if how == KEYED { Some(new_key()?) } else { None };
                    client.post("/nothing", key.as_ref()).await
                }
            })
            .await?;
            report.add(Subject { section: "gateway", backend, how, tasks: CONNECTIONS }, figure);
            ledger.sweep().await?;
        }
    }
    server.abort();
    upstream.abort();
    close(ledger).await;
    site.remove().await
}
