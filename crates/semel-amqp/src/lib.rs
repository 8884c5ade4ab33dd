//! RabbitMQ behind Semel's [`Broker`] trait.
//!
//! - Every queue is durable and, where the server has them, a quorum queue. Messages go through the default exchange,
//!   which knows every queue by its name: there is no exchange and no binding of ours that could be missing.
//! - What RabbitMQ itself gives up on (rejected, expired, delivered too often) goes to the queue [`DEAD`] by way of the
//!   exchange of the same name; consume it like any other.
//! - Publishing and consuming have a connection each: a server that is short of memory stops reading from those who
//!   publish, and acknowledgements must not wait behind that.
//! - Lost connections are opened again with backoff, and the queues made again before anything is published.
//!
//! The modules: `link` keeps a connection, `publish` and `consume` use it, `topology` makes queues, `message` translates.

mod consume;
mod link;
mod message;
mod publish;
mod topology;

use std::{collections::BTreeSet, fmt, sync::Arc, time::Duration};

use lapin::uri::{AMQPScheme, AMQPUri};
use semel::{
    Backoff, Error, Result, Uptime,
    messaging::{BoxFuture, Broker, BrokerHealth, Deliveries, Envelope, Published, Queue},
};
use tokio::sync::{Mutex, Semaphore};

use link::{Link, State};
pub use topology::DEAD;

/// How to work with RabbitMQ.
#[derive(Clone, Debug)]
pub struct Options {
    /// What the connection is called in RabbitMQ's own listings.
    pub name: String,
    /// How many messages may be on their way without the server's word. A long body counts as several.
    pub window: u32,
    /// How long to wait for the server's word on a message.
    pub confirm_timeout: Duration,
    /// How long opening a connection may take, and any other question to the server.
    pub timeout: Duration,
    /// How long to wait between attempts to connect.
    pub backoff: Backoff,
    /// Certificates to trust, in PEM, instead of the well-known authorities.
    pub ca: Option<String>,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            name: "semel".into(),
            window: 2048,
            confirm_timeout: Duration::from_secs(10),
            timeout: Duration::from_secs(5),
            backoff: Backoff { first: Duration::from_millis(100), cap: Duration::from_secs(10) },
            ca: None,
        }
    }
}

/// RabbitMQ. Cheap to clone; all clones share their connections.
#[derive(Clone)]
pub struct Amqp {
    shared: Arc<Shared>,
}

/// What publishers, consumers and the keepers of connections share.
struct Shared {
    uri: AMQPUri,
    options: Options,
    /// Queues that are made again after a reconnect.
    queues: Mutex<BTreeSet<String>>,
    publishing: Link,
    consuming: Link,
    window: Arc<Semaphore>,
}

impl Shared {
    /// The error of a server that is away or refuses: it says which one, and not by which user.
    fn away(&self, why: &str) -> Error {
        let AMQPUri { authority, .. } = &self.uri;
        Error::BrokerUnavailable(format!("RabbitMQ at {}:{}: {why}", authority.host, authority.port))
    }
}

/// Says where it goes, and nothing of who goes there.
impl fmt::Debug for Amqp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let AMQPUri { scheme, authority, vhost, .. } = &self.shared.uri;
        write!(f, "Amqp({scheme}://{}:{}/{vhost})", authority.host, authority.port)
    }
}

impl Amqp {
    /// RabbitMQ at a URL: `amqp://user:password@host:5672/vhost`, or `amqps://…` for TLS. Connects in the
    /// background: a server that is away now is no reason not to start.
    ///
    /// # Panics
    /// Outside of a tokio runtime.
    ///
    /// # Errors
    /// [`Error::Invalid`] for a URL that is none; it is not repeated, for it may have a password in it.
    pub fn connect(url: &str, options: Options) -> Result<Self> {
        // The reason is not repeated either: some have the whole URL in them.
        let mut uri: AMQPUri =
            url.parse().map_err(|_| Error::Invalid("broker url: must be amqp://… or amqps://…".into()))?;
        if uri.vhost.is_empty() {
            // By the letter, a slash at the end means a virtual host without a name, which nobody has.
            uri.vhost = "/".into();
        }
        // A peer that went away without a word must be noticed before leases run out.
        uri.query.heartbeat.get_or_insert(15);
        if uri.scheme == AMQPScheme::AMQP && options.ca.is_some() {
            return Err(Error::Invalid("broker url: certificates are of no use without amqps://".into()));
        }
        let window = Arc::new(Semaphore::new(options.window.max(1) as usize));
        let shared = Arc::new(Shared {
            uri,
            options,
            queues: Mutex::default(),
            publishing: Link::new("publishing"),
            consuming: Link::new("consuming"),
            window,
        });
        shared.publishing.keep(&shared);
        Ok(Self { shared })
    }
}

impl Broker for Amqp {
    fn declare(&self, queues: Vec<Queue>) -> BoxFuture<'_, Result<()>> {
        Box::pin(async move {
            let names: Vec<String> = queues.into_iter().map(|queue| queue.name).collect();
            // Kept before they are made: if that fails for want of a connection, the next one brings them.
            self.shared.queues.lock().await.extend(names.iter().cloned());
            let open = self.shared.publishing.up(&self.shared).await.map_err(|why| self.shared.away(&why))?;
            let declared = topology::declare(&open.connection, &names, self.shared.options.timeout).await;
            declared.map_err(|why| self.shared.away(&why))
        })
    }

    fn publish(&self, batch: Vec<Envelope>, until: Uptime) -> BoxFuture<'_, Vec<Published>> {
        Box::pin(async move { publish::publish(&self.shared, &batch, until).await })
    }

    fn consume(&self, queue: &str, prefetch: u16) -> BoxFuture<'_, Result<Box<dyn Deliveries>>> {
        let queue = queue.to_owned();
        Box::pin(async move {
            let deliveries = consume::QueueDeliveries::begin(self.shared.clone(), queue, prefetch).await?;
            Ok(Box::new(deliveries) as Box<dyn Deliveries>)
        })
    }

    fn health(&self) -> BrokerHealth {
        match self.shared.publishing.state() {
            // Lost a moment ago, and its keeper does not know yet.
            State::Up(open) if !open.is_up() => BrokerHealth::Down("the connection was lost".into()),
            State::Up(open) => open.blocked().map_or(BrokerHealth::Up, BrokerHealth::Blocked),
            State::Down(why) => BrokerHealth::Down(why),
            State::Closed => BrokerHealth::Down("it is closed".into()),
        }
    }

    fn close(&self) -> BoxFuture<'_, ()> {
        Box::pin(async move {
            let Shared { options, window, publishing, consuming, .. } = &*self.shared;
            // What is on its way holds a part of the window.
            let all = window.acquire_many(options.window.max(1));
            let _ = tokio::time::timeout(options.confirm_timeout, all).await;
            window.close();
            publishing.close(options.timeout).await;
            consuming.close(options.timeout).await;
        })
    }
}
