//! What a broker must do. The conformance suite in `semel-testkit` is its definition.

use std::pin::Pin;

use super::{Envelope, Received};
use crate::{Result, Uptime};

/// A future in a box: a broker is chosen when the program runs.
pub type BoxFuture<'a, T> = Pin<Box<dyn Future<Output = T> + Send + 'a>>;

/// A queue that must be there.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Queue {
    /// Its name, which is also the topic of its messages.
    pub name: String,
}

impl Queue {
    /// The queue of this name.
    #[must_use]
    pub fn new(name: impl Into<String>) -> Self {
        Self { name: name.into() }
    }
}

/// What became of a message that was to be published.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Published {
    /// The broker has it, durably, in a queue.
    Confirmed,
    /// No queue wants it. It is nowhere but in the outbox.
    Unroutable(String),
    /// The broker refused this very message. It is nowhere but in the outbox.
    Refused(String),
    /// It was not sent: the broker is away or asks for a pause, or the time was up. Nothing is said about the message.
    NotSent(String),
    /// It was sent, and no word came back: it may be in a queue. It must be published again under the same id.
    Unknown(String),
}

/// How a broker is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum BrokerHealth {
    /// It answers.
    Up,
    /// It asks publishers to pause.
    Blocked(String),
    /// It cannot be reached.
    Down(String),
}

/// Takes messages, keeps them, and delivers each at least once.
pub trait Broker: Send + Sync + 'static {
    /// Makes sure that queues are there. Harmless to repeat; they are made again after a reconnect.
    fn declare(&self, queues: Vec<Queue>) -> BoxFuture<'_, Result<()>>;

    /// Publishes, and waits for the broker's word on each; answered in order. Nothing is sent after `until`. The word on
    /// what was sent may come later: a relay keeps its rows leased until then.
    fn publish(&self, batch: Vec<Envelope>, until: Uptime) -> BoxFuture<'_, Vec<Published>>;

    /// Takes messages from a queue, with at most `prefetch` that are not acknowledged yet.
    ///
    /// # Errors
    /// When the broker cannot be reached now. Later losses of the connection are mended inside.
    fn consume(&self, queue: &str, prefetch: u16) -> BoxFuture<'_, Result<Box<dyn Deliveries>>>;

    /// How it is, as far as is known without asking.
    fn health(&self) -> BrokerHealth;

    /// Closes connections after what is on its way has ended.
    fn close(&self) -> BoxFuture<'_, ()>;
}

/// The messages of one queue, as they come. Dropping it puts back what was not acknowledged.
pub trait Deliveries: Send {
    /// The next; waits for one. May be dropped while it waits without losing any.
    fn next(&mut self) -> BoxFuture<'_, Delivery>;

    /// Says which consumer they come to. A broker that keeps dead letters itself writes them under this name.
    fn serve(&mut self, _consumer: &str) {}
}

/// A message that was delivered and must be acknowledged.
pub struct Delivery {
    /// The message.
    pub message: Received,
    /// Whether it may have been delivered before: then somebody may have begun it and died.
    pub redelivered: bool,
    /// How to say what became of it.
    pub acknowledge: Box<dyn Acknowledge>,
}

/// Says what became of a delivery. Dropped without a word, the message is delivered again when its connection or its
/// time ends.
pub trait Acknowledge: Send + Sync {
    /// It is done with. If this cannot be said, it is delivered again, and found in the inbox.
    fn ack(self: Box<Self>) -> BoxFuture<'static, Result<()>>;

    /// It has not been begun, and somebody else may have it at once.
    fn put_back(self: Box<Self>) -> BoxFuture<'static, Result<()>>;

    /// Whether another consumer has the message by now, or may have it: this one was paused for longer than it may be.
    /// Then it must not be begun. A broker that takes a connection for a sign of life has nothing to say here.
    fn is_lost(&self) -> bool {
        false
    }
}
