//! Events that others send, each taking effect once.
//!
//! An event is one operation of the ledger: its key is the sender's id, its payload the bytes that were signed. What
//! the ledger answers to the claim is what the sender is answered; a failed event is tried again by the sender's
//! redelivery and by our own runner. In reading order:
//!
//! - `event`: what a delivery says has happened; `source`: a sender, its rules and who checks its signatures
//! - `receive`: the route; `deliver`: from the claim to the answer; `bodies`: whose bytes are, where an id tells nothing;
//!   `process`: what becomes of an event
//! - `handler`: what an application does by itself; `runner`: what nobody runs and is due
//! - `refusals`: what was not let in, counted; `conflicts`: other data under the same id
//! - `events`: looking, and running again by hand; `again` and `reprocess`: what has completed, once more, one by one and
//!   many; `record`: an event as it is shown
//! - `monitor`: whether all is well; `monitor_count`: what the counters say; `health`: the verdict

pub(crate) mod again;
mod bodies;
mod conflicts;
mod deliver;
mod event;
pub(crate) mod events;
mod handler;
mod health;
mod monitor;
mod monitor_count;
pub(crate) mod named;
pub(crate) mod process;
mod receive;
pub(crate) mod record;
mod refusals;
pub(crate) mod reprocess;
mod runner;
mod source;

use std::{
    collections::BTreeMap,
    sync::Arc,
    time::{Duration, SystemTime},
};

use axum::{Router, routing::post};
use semel::{
    Ledger,
    messaging::{Queue, Wake},
};
use semel_store::Database;
use tokio::sync::watch;

use crate::config::{self, Deed};
pub use conflicts::{Conflict, list as list_conflicts, of_event as conflicts_of_event};
pub use event::Event;
pub use handler::{Handler, Handlers, Run};
pub use refusals::WORDS as REFUSALS;
pub use source::Source;

use refusals::Refusals;

/// The part of `/openapi.json` that is this service's.
pub const OPENAPI: &str = include_str!("openapi.json");

/// The service of the ledger's scope.
pub const SERVICE: &str = "webhooks";

/// Receives events and processes them. Clones share it.
#[derive(Clone)]
pub struct Receiver(Arc<Inner>);

struct Inner {
    ledger: Ledger<Database>,
    sources: BTreeMap<String, Arc<Source>>,
    refusals: Refusals,
    /// Wakes the runner of this process.
    wake: Wake,
    clock: Clock,
}

/// What time it is. Signatures grow old by it.
pub type Clock = Arc<dyn Fn() -> SystemTime + Send + Sync>;

impl Receiver {
    /// Opens the sources of a configuration on a ledger, with the handlers that it names.
    ///
    /// # Errors
    /// [`semel::Error::Invalid`] when a source cannot be used as it is; when the database cannot be reached.
    pub async fn open(ledger: &Ledger<Database>, config: config::Webhooks, handlers: &Handlers) -> semel::Result<Self> {
        Self::open_at(ledger, config, handlers, Arc::new(SystemTime::now)).await
    }

    /// As [`Receiver::open`], by another clock: for tests.
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
            wake: Wake::default(),
            clock,
        })))
    }

    /// The routes. They ask for no token and no `Host`, for what is sent here is signed; a source that signs nothing
    /// looks at the `Host` by itself, and at the sender's address: it takes nothing unless whoever serves the routes adds
    /// that to each request, as `ConnectInfo<SocketAddr>`.
    pub fn routes(&self) -> Router {
        Router::new()
            .route("/webhooks/{source}", post(receive::at_source))
            .route("/webhooks/{source}/{function}", post(receive::at_function))
            .with_state(self.clone())
    }

    /// The queues that the configuration names. Those of the topics `webhook.SOURCE.TYPE` are for whoever listens to
    /// make: nobody else knows the types.
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

    /// Processes what nobody runs and is due, until `stop` turns true; ends when what it began has ended.
    pub fn run(&self, stop: watch::Receiver<bool>) -> impl Future<Output = ()> + Send + use<> {
        runner::work(self.clone(), stop)
    }

    /// Writes the counts of what was refused and of what was only stored, every second, until `stop` turns true.
    pub fn count(&self, mut stop: watch::Receiver<bool>) -> impl Future<Output = ()> + Send + use<> {
        let receiver = self.clone();
        async move {
            while !*stop.borrow() {
                tokio::select! {
                    () = tokio::time::sleep(Duration::from_secs(1)) => {}
                    _ = stop.wait_for(|stop| *stop) => {}
                }
                receiver.0.refusals.flush(receiver.0.ledger.store()).await;
            }
        }
    }

    /// There may be something to run: look at once.
    pub fn wake(&self) {
        self.0.wake.wake();
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

    /// The ledger that the events are in.
    #[must_use]
    pub fn ledger(&self) -> &Ledger<Database> {
        &self.0.ledger
    }
}
