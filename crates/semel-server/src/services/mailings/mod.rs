//! Mailings: a CSV list becomes one mail per address.
//!
//! Three levels take effect once. Level 1: an upload becomes one mailing (`upload`). Level 2: an address becomes one
//! entry (`import`). Level 3: an entry is sent once (`send`). In reading order:
//!
//! - `form`, `check`, `upload`, `intake`, `identity`, `message`, `files`: level 1; `dry_run`; `trial`: test mails
//! - `listener`, `run`: the queue, and the run that the worker executes
//! - `list`: reads lists of addresses; `reader`, `import`: level 2
//! - `mail`: templates, mails, transports; `send`: level 3
//! - `act`: what people do; `recover`: lost runs; `clean`: what is removed; `suppress`: addresses that get no mail
//! - `routes`, `pages`, `view`: HTTP; `command`: the same for commands; `tables`: the SQL

mod act;
mod check;
mod clean;
pub(crate) mod command;
pub mod config;
mod dry_run;
mod files;
#[cfg(test)]
mod fixture;
mod form;
mod identity;
mod import;
mod intake;
mod list;
mod listener;
pub(crate) mod mail;
mod message;
mod pages;
pub mod problems;
mod reader;
mod recover;
mod routes;
mod run;
mod send;
mod suppress;
mod tables;
mod trial;
mod upload;
mod view;

use std::{
    fs::DirBuilder,
    hash::{BuildHasher as _, RandomState},
    os::unix::fs::DirBuilderExt as _,
    path::Path,
    sync::Arc,
};

use axum::{
    Router,
    extract::DefaultBodyLimit,
    routing::{delete, get, post},
};
use semel::{
    Ledger,
    messaging::{Consumer, Queue},
};
use semel_store::Database;

use crate::{
    config::{Config, DatabaseUrl, NodeRole},
    service::{Opened, Parts, Service as Definition, Sweep, Task, migrations},
    services::messages,
    view::Telling,
};
use config::Mailings;
use files::{Files, OWN_DIRECTORY};
use intake::Intake;
use listener::Listener;
use mail::{
    dkim::Dkim,
    transport::{Options, Transport},
    transport_url::TransportUrl,
};
use send::Connections;

/// The service of the ledger's scope.
pub(crate) const SERVICE: &str = "mailings";

/// The queue of mailings to be processed.
pub(crate) const QUEUE: &str = "mailing.process";

/// The service, for the list of all services.
pub static MAILINGS: Definition = Definition {
    name: SERVICE,
    section: Some(|reader| Arc::new(Mailings::read(reader))),
    problems: &problems::ALL,
    openapi: &[include_str!("openapi.json")],
    telling: Telling::PLAIN,
    migrations: migrations!("0010_mailings"),
    projections: &[tables::mailings::STATUS],
    #[cfg(test)]
    statements: &[tables::statements],
    open: |parts| Box::pin(open(parts)),
};

/// Opens the service for the server.
async fn open(parts: &Parts<'_>) -> semel::Result<Opened> {
    const WORKS: &[NodeRole] = &[NodeRole::Worker];
    let service = Arc::new(Service::open(parts.ledger, parts.config)?);
    let options = parts.config.services.get::<messages::config::Messages>().consumer();
    let handler = Listener { ledger: parts.ledger.clone() };
    let consumer = Consumer::new(parts.ledger.clone(), parts.broker.clone(), QUEUE, QUEUE, handler, options);
    Ok(Opened {
        routes: routes(&service),
        signed: links(&service),
        queues: vec![Queue::new(QUEUE)],
        kinds: vec![run::kind(&service)],
        tasks: vec![Task::new("mailings", WORKS, move |stop| consumer.run(stop)).consuming()],
        // Apart: one that fails or hangs must not keep the others.
        sweeps: vec![
            sweep(&service, "mailings: recovery", |service| async move { service.recover().await }),
            sweep(&service, "mailings: files", |service| async move { service.remove_unneeded().await }),
            sweep(&service, "mailings: deleted ones", |service| async move { service.remove_deleted().await }),
            sweep(&service, "mailings: cut uploads", |service| async move { service.remove_forgotten().await }),
            sweep(&service, "mailings: links", |service| async move { service.forget_links().await }),
        ],
        ..Opened::default()
    })
}

/// A part of the sweep.
fn sweep<Fut>(
    service: &Arc<Service>,
    name: &'static str,
    part: impl Fn(Arc<Service>) -> Fut + Send + Sync + 'static,
) -> Sweep
where
    Fut: Future<Output = semel::Result<()>> + Send + 'static,
{
    let service = service.clone();
    Sweep::new(name, move || part(service.clone()))
}

/// The state of the routes and of the runs.
pub(crate) struct Service {
    ledger: Ledger<Database>,
    database: Database,
    config: Mailings,
    files: Files,
    transport: Transport,
    connections: Arc<Connections>,
    intake: Intake,
    is_postgres: bool,
    hasher: Hasher,
}

/// Hashes addresses with a key of this process, so that nobody can make them collide.
#[derive(Clone)]
struct Hasher(RandomState);

impl Hasher {
    fn hash(&self, text: &str) -> u64 {
        self.0.hash_one(text)
    }
}

impl Service {
    pub(crate) fn open(ledger: &Ledger<Database>, config: &Config) -> semel::Result<Self> {
        let section: Mailings = config.services.get();
        let (files, is_postgres) = match &config.database_url {
            DatabaseUrl::Sqlite(path) => {
                let beside = path.parent().unwrap_or_else(|| Path::new("."));
                (Files::Disk(beside.join("uploads")), false)
            }
            DatabaseUrl::Postgres(_) => (Files::Rows(ledger.clone()), true),
        };
        let url = match &section.transport {
            Some(url) => url.clone(),
            None => {
                let dir = config.data_dir.join("mail");
                let made = DirBuilder::new().recursive(true).mode(OWN_DIRECTORY).create(&dir);
                made.map_err(|error| invalid(format!("cannot create {}: {error}", dir.display())))?;
                TransportUrl::parse(&format!("file:{}", dir.display())).map_err(invalid)?
            }
        };
        let options = Options { connections: section.connections, timeout: section.timeout, dkim: dkim(&section)? };
        let transport = Transport::of(&url, options).map_err(invalid)?;
        match (section.public_url.is_none(), transport.kind()) {
            (false, _) => {}
            (true, "file") => tracing::info!("public_url is not set: mails of mailings have no link to unsubscribe"),
            (true, _) => tracing::warn!("public_url is not set: mails of mailings have no link to unsubscribe"),
        }
        Ok(Self {
            ledger: ledger.clone(),
            database: ledger.store().clone(),
            files,
            transport,
            connections: Arc::new(Connections::new(section.connections)),
            intake: Intake::default(),
            is_postgres,
            hasher: Hasher(RandomState::new()),
            config: section,
        })
    }

    /// How often an entry is tried.
    fn max_attempts(&self) -> i64 {
        i64::try_from(self.config.max_attempts).unwrap_or(i64::MAX)
    }
}

fn invalid(why: String) -> semel::Error {
    semel::Error::Invalid(format!("mail_transport: {why}"))
}

fn dkim(section: &Mailings) -> semel::Result<Option<Dkim>> {
    if section.dkim_domain.is_empty() {
        return Ok(None);
    }
    let dkim = Dkim::new(&section.dkim_domain, &section.dkim_selector, &section.dkim_key.0);
    dkim.map(Some).map_err(|why| semel::Error::Invalid(format!("mailings.dkim_key: {why}")))
}

fn routes(service: &Arc<Service>) -> Router {
    Router::new()
        .route("/mailings", get(routes::list).post(routes::create).layer(DefaultBodyLimit::disable()))
        .route("/mailings/{id}", get(routes::show).delete(routes::delete))
        .route("/mailings/{id}/entries", get(routes::entries))
        .route("/mailings/{id}/duplicates", get(routes::duplicates))
        .route("/mailings/{id}/rejects.csv", get(routes::rejects))
        .route("/mailings/{id}/export.csv", get(routes::export))
        .route("/mailings/{id}/pause", post(routes::pause))
        .route("/mailings/{id}/resume", post(routes::resume))
        .route("/mailings/{id}/retry", post(routes::retry))
        .route("/mailings/{id}/cancel", post(routes::cancel))
        .route("/mailings/{id}/test", post(routes::test))
        .route("/mailings/{id}/entries/{entryId}/resolve", post(routes::resolve))
        .route("/suppressions", get(suppress::list).post(suppress::add))
        .route("/suppressions/{id}", delete(suppress::remove))
        .with_state(service.clone())
}

/// The links in mails, for everyone who has one.
fn links(service: &Arc<Service>) -> Router {
    Router::new().route("/u/{id}", get(suppress::page).post(suppress::unsubscribe)).with_state(service.clone())
}
