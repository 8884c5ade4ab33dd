//! Events through the outbox to the broker, and from there to one notification per recipient and channel.
//!
//! Each of two levels takes effect once. Level 1: an event is accepted once (`accept`), with a message per kind of
//! recipient in the outbox of the same transaction. Level 2: a message is fanned out once (`listener`), with a row per
//! recipient and channel. In reading order:
//!
//! - `model`: the nouns; `reading`: parses an event; `message`: the messages of the queues
//! - `accept`, `events`, `event_list`: level 1 and its routes; `listener`: level 2
//! - `recipients`: the directory; `list`: lists of notifications
//! - `in_app`, `feed`, `stream`: delivery in the app
//! - `deliver`, `deliver_call`, `deliver_routes`: delivery by a call to an endpoint; `carry_over`: notifications of an
//!   earlier version
//! - `tables`, `deliver_tables`: the SQL

mod accept;
mod busy;
mod carry_over;
pub mod channels;
pub mod config;
mod deliver;
mod deliver_call;
mod deliver_routes;
mod deliver_tables;
mod event_list;
mod events;
mod feed;
mod in_app;
mod list;
mod listener;
mod message;
mod model;
pub mod problems;
mod reading;
mod recipients;
mod stream;
mod tables;

use std::sync::Arc;

use axum::{
    Router,
    extract::DefaultBodyLimit,
    routing::{get, post},
};
use semel::{
    Ledger,
    messaging::{Broker, Consumer, ConsumerOptions, Queue, Wake},
};
use semel_store::Database;
use tokio::sync::{Semaphore, watch};

use crate::{
    config::NodeRole,
    service::{Opened, Parts, Service as Definition, Task, migrations},
    services::messages,
    view::Telling,
};
use accept::Acceptor;
use feed::Feed;
pub use listener::Listener;
use model::Kind;

/// The service, for the list of all services.
pub static NOTIFICATIONS: Definition = Definition {
    name: deliver::SERVICE,
    section: Some(|reader| Arc::new(config::Notifications::read(reader))),
    problems: &problems::ALL,
    openapi: &[include_str!("openapi.json"), include_str!("deliver_openapi.json")],
    telling: Telling::PLAIN,
    migrations: migrations!(
        "0002_notifications",
        "0004_deliveries",
        "0006_listings",
        "0008_attempts",
        "0009_deliveries_by_worker",
    ),
    projections: &[deliver_tables::STATUS],
    #[cfg(test)]
    statements: &[tables::statements, deliver_tables::statements],
    open: |parts| Box::pin(open(parts)),
};

/// Opens the service for the server.
async fn open(parts: &Parts<'_>) -> semel::Result<Opened> {
    const WORKS: &[NodeRole] = &[NodeRole::Worker];
    let config: config::Notifications = parts.config.services.get();
    let messages: messages::config::Messages = parts.config.services.get();
    let notifications = Arc::new(Notifications::open(parts.ledger, parts.broker.clone(), config).await?);
    let listeners = notifications.listeners(&messages.consumer()).into_iter();
    let mut tasks: Vec<_> =
        listeners.map(|listener| Task::new("listener", WORKS, move |stop| listener.run(stop)).consuming()).collect();
    let (routes, queues, kinds) = (notifications.routes(), notifications.queues(), notifications.kinds()?);
    let of_streams = notifications.clone();
    tasks.push(Task::new("in-app", WORKS, move |stop| notifications.in_app(stop)));
    tasks.push(Task::new("streams", &[NodeRole::Api], move |stop| of_streams.streams(stop)));
    Ok(Opened { routes, queues, kinds, tasks, ..Opened::default() })
}

/// The service, with its tables up to date.
pub struct Notifications {
    service: Arc<Service>,
    broker: Arc<dyn Broker>,
    in_app: Wake,
}

/// How many kibibytes of events are parsed and stored at a time: eight of the largest bodies, or tens of thousands of
/// ordinary events.
const ROOM: usize = 64 << 10;

/// The state of the routes.
struct Service {
    ledger: Ledger<Database>,
    database: Database,
    config: Arc<config::Notifications>,
    acceptor: Acceptor,
    /// Room for events that are being parsed and stored, in kibibytes of their bodies.
    room: Arc<Semaphore>,
    feed: Arc<Feed>,
}

impl Notifications {
    /// Opens the service on a ledger and a broker.
    ///
    /// # Errors
    /// When the database cannot be reached.
    pub async fn open(
        ledger: &Ledger<Database>,
        broker: Arc<dyn Broker>,
        config: config::Notifications,
    ) -> semel::Result<Self> {
        super::migrate(ledger.store()).await?;
        carry_over::begin(ledger).await?;
        let feed = Feed::new(config.streams);
        let service = Service {
            ledger: ledger.clone(),
            database: ledger.store().clone(),
            config: Arc::new(config),
            acceptor: Acceptor::open(ledger.clone()),
            room: Arc::new(Semaphore::new(ROOM)),
            feed,
        };
        Ok(Self { service: Arc::new(service), broker, in_app: Wake::default() })
    }

    /// The routes.
    pub fn routes(&self) -> Router {
        let recipient = get(recipients::show).put(recipients::put).delete(recipients::delete);
        Router::new()
            .route(
                "/events",
                get(event_list::list).post(events::create).layer(DefaultBodyLimit::max(events::BODY_LIMIT)),
            )
            .route("/events/{eventId}", get(events::show))
            .route("/recipients/{kind}", get(recipients::list))
            .route("/recipients/{kind}/{userId}", recipient)
            .route("/notifications", get(list::list))
            .route("/notifications/stream", get(stream::open))
            .route("/notifications/{id}", get(list::show))
            .route("/notifications/{id}/read", post(list::read))
            .route("/notifications/{id}/resolve", post(deliver_routes::resolve))
            .with_state(self.service.clone())
    }

    /// The queues, one per kind of recipient.
    #[must_use]
    pub fn queues(&self) -> Vec<Queue> {
        Kind::ALL.map(|kind| Queue::new(kind.queue())).into()
    }

    /// The kinds of work: the deliveries of each channel with an endpoint, and the migration.
    ///
    /// # Errors
    /// When an endpoint cannot be called from here.
    pub fn kinds(&self) -> semel::Result<Vec<semel::Kind<Database>>> {
        let mut kinds = deliver::kinds(&self.service.database, &self.service.config.channels)?;
        kinds.push(carry_over::kind(&self.service.ledger));
        Ok(kinds)
    }

    /// The listeners, one per kind of recipient.
    #[must_use]
    pub fn listeners(&self, options: &ConsumerOptions) -> Vec<Consumer<Database, Listener>> {
        let listener = |kind: Kind| {
            let handler = Listener {
                ledger: self.service.ledger.clone(),
                kind,
                config: self.service.config.clone(),
                in_app: self.in_app.clone(),
            };
            let (ledger, broker) = (self.service.ledger.clone(), self.broker.clone());
            Consumer::new(ledger, broker, kind.queue(), kind.queue(), handler, options.clone())
        };
        Kind::ALL.map(listener).into()
    }

    /// Delivers in the app until `stop` turns true.
    pub fn in_app(&self, stop: watch::Receiver<bool>) -> impl Future<Output = ()> + Send + use<> {
        let (ledger, feed) = (self.service.ledger.clone(), self.service.feed.clone());
        in_app::work(ledger, self.in_app.clone(), feed, stop)
    }

    /// Reads news for the streams. When `stop` turns true it ends them: otherwise they would never end, and a stopping
    /// server would wait for them.
    pub fn streams(&self, mut stop: watch::Receiver<bool>) -> impl Future<Output = ()> + Send + use<> {
        let (feed, database) = (self.service.feed.clone(), self.service.database.clone());
        async move {
            let work = feed.clone().work(database);
            let end = async {
                // A dropped sender counts as a stop request.
                let _ = stop.wait_for(|stop| *stop).await;
                feed.end();
            };
            tokio::join!(work, end);
        }
    }
}
