//! Events from other services, each taking effect once.
//!
//! An event is one operation: its key is the sender's id, its payload the signed bytes. The ledger's answer to the
//! claim decides the answer to the sender. A failed event is retried by the sender's redelivery and by a worker. In
//! reading order:
//!
//! - `event`: the event of a delivery; `source`: a sender, its rules and the check of its signatures
//! - `receive`: the route; `deliver`: from a delivery to its answer; `status`: the answers; `take_in`: the claim; `bodies`:
//!   deduplicates by body hash when the signature does not cover the event id; `process`: runs an event
//! - `pull`: events that programs ask for; `handler`: handlers of an application; `work`: the kinds of work for the worker
//! - `refusals`: counts of refused deliveries; `conflicts`: other data under the same id
//! - `events`: lists and reruns; `again` and `reprocess`: reruns of completed events, one by one and many; `record`: an
//!   event as it is shown
//! - `monitor`: the monitor, by [`crate::monitor`]; `health`: health rules of deliveries

pub(crate) mod again;
mod bodies;
pub mod config;
mod conflicts;
mod deliver;
mod event;
pub(crate) mod events;
mod handler;
mod health;
mod monitor;
pub(crate) mod named;
pub mod problems;
pub(crate) mod process;
pub(crate) mod pull;
mod receive;
pub(crate) mod record;
mod refusals;
pub(crate) mod reprocess;
mod source;
mod status;
mod take_in;
mod work;

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
    time::{Duration, SystemTime},
};

use axum::{Router, routing::post};
use parking_lot::RwLock;
use semel::{Ledger, messaging::Queue};
use semel_store::Database;
use tokio::sync::watch;

use crate::{
    config::NodeRole,
    service::{Opened, Service, Task, migrations},
};
use config::Deed;
pub use conflicts::{Conflict, list as list_conflicts, of_event as conflicts_of_event};
pub use event::Event;
pub use handler::{Handler, Handlers, Run};
pub use refusals::WORDS as REFUSALS;
pub use source::Source;

use refusals::Refusals;

/// The service, for the list of all services.
pub static WEBHOOKS: Service = Service {
    name: SERVICE,
    section: Some(|reader| Arc::new(config::Webhooks::read(reader))),
    problems: &problems::ALL,
    openapi: &[include_str!("openapi.json")],
    telling: record::TELLING,
    migrations: migrations!("0005_webhooks", "0011_pulls"),
    projections: &[],
    #[cfg(test)]
    statements: &[conflicts::statements, pull::statements],
    open: |parts| {
        Box::pin(async {
            // Handlers are for Rust programs that embed Semel; this program has none.
            let receiver = Receiver::open(parts.ledger, parts.config.services.get(), &Handlers::default()).await?;
            let counts = receiver.clone();
            Ok(Opened {
                routes: receiver.routes_for_people().merge(receiver.job_routes(parts.jobs)),
                signed: receiver.routes(),
                queues: receiver.queues(),
                jobs: receiver.job_kinds(),
                kinds: receiver.kinds(),
                tasks: vec![Task::new("webhooks counts", &[NodeRole::Api, NodeRole::Worker], move |stop| {
                    counts.count(stop)
                })],
                ..Opened::default()
            })
        })
    },
};

/// The service of the ledger's scope.
pub const SERVICE: &str = "webhooks";

/// Receives events and processes them. Clones share it.
#[derive(Clone)]
pub struct Receiver(Arc<Inner>);

struct Inner {
    ledger: Ledger<Database>,
    sources: BTreeMap<String, Arc<Source>>,
    refusals: Refusals,
    /// The paused kinds, as they were a second ago at most: deliveries are not delayed to read them.
    paused: RwLock<BTreeSet<String>>,
    clock: Clock,
}

/// The current time, for the age of signatures.
pub type Clock = Arc<dyn Fn() -> SystemTime + Send + Sync>;

impl Receiver {
    /// Opens the sources of a configuration on a ledger, with its handlers.
    ///
    /// # Errors
    /// [`semel::Error::Invalid`] when a source's configuration is invalid; when the database cannot be reached.
    pub async fn open(ledger: &Ledger<Database>, config: config::Webhooks, handlers: &Handlers) -> semel::Result<Self> {
        Self::open_at(ledger, config, handlers, Arc::new(SystemTime::now)).await
    }

    /// As [`Receiver::open`], with another clock: for tests.
    ///
    /// # Errors
    /// As [`Receiver::open`].
    pub async fn open_at(
        ledger: &Ledger<Database>,
        config: config::Webhooks,
        handlers: &Handlers,
        clock: Clock,
    ) -> semel::Result<Self> {
        super::migrate(ledger.store()).await?;
        let sources = config.sources.into_iter().map(|(name, config)| {
            let source = Source::open(&name, config, handlers)?;
            Ok((name, Arc::new(source)))
        });
        Ok(Self(Arc::new(Inner {
            ledger: ledger.clone(),
            sources: sources.collect::<semel::Result<_>>()?,
            refusals: Refusals::default(),
            paused: RwLock::new(ledger.store().paused_kinds(SERVICE).await?),
            clock,
        })))
    }

    /// The routes. They check neither credentials nor `Host`, because deliveries are signed. An unsigned source checks
    /// the `Host` and the sender's address itself: it refuses everything unless the server adds the address to each
    /// request, as `ConnectInfo<SocketAddr>`.
    pub fn routes(&self) -> Router {
        Router::new()
            .route("/webhooks/{source}", post(receive::at_source))
            .route("/webhooks/{source}/{function}", post(receive::at_function))
            .with_state(self.clone())
    }

    /// The queues of configured topics. The listener declares those of the topics `webhook.SOURCE.TYPE`: only it knows
    /// the types.
    #[must_use]
    pub fn queues(&self) -> Vec<Queue> {
        let rules = self.0.sources.values().flat_map(|source| &source.config.handlers.0);
        let topics = rules.filter_map(|rule| match &rule.deed {
            Deed::Outbox(Some(topic)) => Some(topic.as_str()),
            _ => None,
        });
        let topics: std::collections::BTreeSet<_> = topics.collect();
        topics.into_iter().map(Queue::new).collect()
    }

    /// Writes the counts of refused and of stored events, and reads which kinds are paused, every second until `stop`
    /// turns true.
    pub fn count(&self, mut stop: watch::Receiver<bool>) -> impl Future<Output = ()> + Send + use<> {
        let receiver = self.clone();
        async move {
            while !*stop.borrow() {
                tokio::select! {
                    () = tokio::time::sleep(Duration::from_secs(1)) => {}
                    _ = stop.wait_for(|stop| *stop) => {}
                }
                receiver.0.refusals.flush(receiver.0.ledger.store()).await;
                receiver.look_at_pauses().await;
            }
        }
    }

    async fn look_at_pauses(&self) {
        match self.0.ledger.store().paused_kinds(SERVICE).await {
            Ok(paused) => *self.0.paused.write() = paused,
            // Those that are known still count.
            Err(error) => tracing::debug!(%error, "the paused kinds could not be read"),
        }
    }

    /// Whether a person has paused a kind: its events are stored, and run after the pause.
    fn is_paused(&self, kind: &str) -> bool {
        self.0.paused.read().contains(kind)
    }

    /// A source by its name.
    #[must_use]
    pub fn source(&self, name: &str) -> Option<&Arc<Source>> {
        self.0.sources.get(name)
    }

    /// All sources, in the order of their names.
    pub fn sources(&self) -> impl Iterator<Item = &Arc<Source>> {
        self.0.sources.values()
    }

    /// The ledger of the events.
    #[must_use]
    pub fn ledger(&self) -> &Ledger<Database> {
        &self.0.ledger
    }
}
