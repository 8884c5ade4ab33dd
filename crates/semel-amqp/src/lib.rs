//! RabbitMQ behind Semel's [`Broker`] trait.
//!
//! - Every queue is durable and, if the server supports it, a quorum queue. Messages go through the default exchange,
//!   which routes by queue name: no exchange or binding of ours can be missing.
//! - Messages that RabbitMQ itself gives up on (rejected, expired, delivered too often) go to the queue [`DEAD`],
//!   through the exchange of the same name; consume it like any other.
//! - Publishing and consuming use separate connections: a server that is short of memory stops reading from publishers,
//!   and acknowledgements must not wait behind that.
//! - Lost connections are reopened with backoff, and the queues are declared again before anything is published.
//!
//! The modules: `link` keeps a connection open, `publish` and `consume` use it, `topology` declares queues, `message`
//! converts.

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

/// Options of the connection.
#[derive(Clone, Debug)]
pub struct Options {
    /// The connection's name in RabbitMQ's listings.
    pub name: String,
    /// How many messages may be unconfirmed at a time. A long body counts as several.
    pub window: u32,
    /// The timeout of a confirmation.
    pub confirm_timeout: Duration,
    /// The timeout of a connection attempt, and of any other request to the server.
    pub timeout: Duration,
    /// The backoff between connection attempts.
    pub backoff: Backoff,
    /// Trusted certificates, in PEM, instead of the well-known authorities.
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

/// The state that publishers, consumers and the connections' tasks share.
struct Shared {
    uri: AMQPUri,
    options: Options,
    /// Queues that are declared again after a reconnect.
    queues: Mutex<BTreeSet<String>>,
    publishing: Link,
    consuming: Link,
    window: Arc<Semaphore>,
}

impl Shared {
    /// The error of a server that is unavailable or refuses: it names the server, and not the user.
    fn away(&self, why: &str) -> Error {
        let AMQPUri { authority, .. } = &self.uri;
        Error::BrokerUnavailable(format!("RabbitMQ at {}:{}: {why}", authority.host, authority.port))
    }
}

/// Shows the server, and not the user.
impl fmt::Debug for Amqp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let AMQPUri { scheme, authority, vhost, .. } = &self.shared.uri;
        write!(f, "Amqp({scheme}://{}:{}/{vhost})", authority.host, authority.port)
    }
}

impl Amqp {
    /// RabbitMQ at a URL: `amqp://user:password@host:5672/vhost`, or `amqps://…` for TLS. Connects in the
    /// background, so an unavailable server does not prevent the start.
    ///
    /// # Panics
    /// Outside of a tokio runtime.
    ///
    /// # Errors
    /// [`Error::Invalid`] for an invalid URL; it is not repeated, because it may contain a password.
    pub fn connect(url: &str, options: Options) -> Result<Self> {
        // The reason is not repeated either: it may contain the whole URL.
        let mut uri: AMQPUri =
            url.parse().map_err(|_| Error::Invalid("broker url: must be amqp://… or amqps://…".into()))?;
        if uri.vhost.is_empty() {
            // Strictly, a trailing slash means a virtual host with an empty name, which does not exist.
            uri.vhost = "/".into();
        }
        // A dead peer must be noticed before leases expire.
        uri.query.heartbeat.get_or_insert(15);
        if uri.scheme == AMQPScheme::AMQP && options.ca.is_some() {
            return Err(Error::Invalid("broker url: certificates need amqps://".into()));
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
            // Stored before they are declared: if there is no connection, the next one declares them.
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
            // Lost a moment ago, before its task noticed.
            State::Up(open) if !open.is_up() => BrokerHealth::Down("the connection was lost".into()),
            State::Up(open) => open.blocked().map_or(BrokerHealth::Up, BrokerHealth::Blocked),
            State::Down(why) => BrokerHealth::Down(why),
            State::Closed => BrokerHealth::Down("it is closed".into()),
        }
    }

    fn close(&self) -> BoxFuture<'_, ()> {
        Box::pin(async move {
            let Shared { options, window, publishing, consuming, .. } = &*self.shared;
            // Unconfirmed messages hold a part of the window.
            let all = window.acquire_many(options.window.max(1));
            let _ = tokio::time::timeout(options.confirm_timeout, all).await;
            window.close();
            publishing.close(options.timeout).await;
            consuming.close(options.timeout).await;
        })
    }
}
