//! Events through the outbox to the broker, and from there to one notification per recipient and channel.
//!
//! Two levels, each of which takes effect once. Level 1: an event is accepted once (`accept`), with the message for
//! each kind of recipient in the outbox of the same transaction. Level 2: a message is brought to its recipients once
//! (`listener`), with a row per recipient and channel. In reading order:
//!
//! - `model`: the nouns; `reading`: how an event is read; `message`: what is said on the queues
//! - `accept`, `events`, `event_list`: level 1 and its routes; `listener`: level 2
//! - `recipients`: the directory; `list`: what there is for whom
//! - `in_app`, `feed`, `stream`: delivery in the app
//! - `deliver`, `deliver_call`, `deliver_marks`, `deliver_routes`: delivery by a call to an endpoint
//! - `tables`, `deliver_tables`: the SQL

mod accept;
mod busy;
mod deliver;
mod deliver_call;
mod deliver_marks;
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
use semel_store::{Database, Tx};
use tokio::sync::{Semaphore, watch};

use crate::config;
use accept::Acceptor;
pub use deliver::Deliverer;
pub use deliver_routes::OPENAPI as DELIVERIES_OPENAPI;
use feed::Feed;
pub use listener::Listener;
use model::Kind;

/// The part of `/openapi.json` that is this service's.
pub const OPENAPI: &str = include_str!("openapi.json");

/// The service, its tables brought up to date.
pub struct Notifications {
    service: Arc<Service>,
    broker: Arc<dyn Broker>,
    in_app: Wake,
}

/// How many kibibytes of events are read and stored at the same time: eight of the largest bodies, or tens of thousands
/// of ordinary events.
const ROOM: usize = 64 << 10;

/// What the routes share.
struct Service {
    ledger: Ledger<Database>,
    database: Database,
    config: Arc<config::Notifications>,
    acceptor: Acceptor,
    /// For events that are being read and stored, in kibibytes of their bodies.
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
            .with_state(self.service.clone())
    }

    /// The queues that must be there, one per kind of recipient.
    #[must_use]
    pub fn queues(&self) -> Vec<Queue> {
        Kind::ALL.map(|kind| Queue::new(kind.queue())).into()
    }

    /// The listeners, one per kind of recipient; they wake the deliverer of this node.
    #[must_use]
    pub fn listeners(&self, options: &ConsumerOptions, deliverer: &Deliverer) -> Vec<Consumer<Database, Listener>> {
        let listener = |kind: Kind| {
            let handler = Listener {
                database: self.service.database.clone(),
                kind,
                config: self.service.config.clone(),
                in_app: self.in_app.clone(),
                deliverer: deliverer.clone(),
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

    /// Looks for what is new for the streams, until they end.
    pub fn streams(&self) -> impl Future<Output = ()> + Send + use<> {
        self.service.feed.clone().work(self.service.database.clone())
    }

    /// Ends the streams when `stop` turns true: they would otherwise never end, and a server that stops would wait for
    /// them.
    pub fn end_streams_on(&self, mut stop: watch::Receiver<bool>) {
        let feed = self.service.feed.clone();
        tokio::spawn(async move {
            // A sender that is gone asks for the same.
            let _ = stop.wait_for(|stop| *stop).await;
            feed.end();
        });
    }
}

impl Service {
    /// Runs work in a transaction: what succeeds is committed, what fails is rolled back.
    async fn transact<F, Fut, T>(&self, work: F) -> semel::Result<T>
    where
        F: FnOnce(Tx) -> Fut + Send + 'static,
        Fut: Future<Output = semel::Result<T>> + Send,
        T: Send + 'static,
    {
        let work = |tx| async move {
            let done = work(tx).await;
            if done.is_ok() { Ok(done) } else { Err(done) }
        };
        self.ledger.transact(work).await?
    }
}
