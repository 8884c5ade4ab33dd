//! The contract of a broker. The conformance suite in `semel-testkit` is its definition.

use std::pin::Pin;

use super::{Envelope, Received};
use crate::{Result, Uptime};

/// A boxed future: the broker is chosen at run time.
pub type BoxFuture<'a, T> = Pin<Box<dyn Future<Output = T> + Send + 'a>>;

/// A queue to declare.
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

/// The result of publishing a message.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Published {
    /// Confirmed: the broker has stored it durably in a queue.
    Confirmed,
    /// No queue is bound to its topic. Only the outbox has it.
    Unroutable(String),
    /// The broker refused this message. Only the outbox has it.
    Refused(String),
    /// Not sent: the broker is unreachable, asks for a pause, or the time was up. The message itself is not at fault.
    NotSent(String),
    /// Sent, but not confirmed: it may be in a queue. It must be published again under the same id.
    Unknown(String),
}

/// The state of a broker.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum BrokerHealth {
    /// It answers.
    Up,
    /// It asks publishers to pause.
    Blocked(String),
    /// It cannot be reached.
    Down(String),
}

/// Stores messages and delivers each at least once.
pub trait Broker: Send + Sync + 'static {
    /// Declares queues. Idempotent; they are declared again after a reconnect.
    fn declare(&self, queues: Vec<Queue>) -> BoxFuture<'_, Result<()>>;

    /// Publishes, and waits for a confirmation of each; answers in order. Sends nothing after `until`. Confirmations
    /// may come later: a relay keeps its rows leased until then.
    fn publish(&self, batch: Vec<Envelope>, until: Uptime) -> BoxFuture<'_, Vec<Published>>;

    /// Consumes a queue, with at most `prefetch` unacknowledged messages.
    ///
    /// # Errors
    /// The broker cannot be reached now. Later connection losses are handled inside.
    fn consume(&self, queue: &str, prefetch: u16) -> BoxFuture<'_, Result<Box<dyn Deliveries>>>;

    /// Its state as last known; sends no request.
    fn health(&self) -> BrokerHealth;

    /// Closes connections after requests in flight have ended.
    fn close(&self) -> BoxFuture<'_, ()>;
}

/// The deliveries of one queue. Dropping it returns unacknowledged messages to the queue.
pub trait Deliveries: Send {
    /// Waits for the next delivery. Cancel safe.
    fn next(&mut self) -> BoxFuture<'_, Delivery>;

    /// Sets the name of the consumer. A broker that keeps dead letters itself stores them under this name.
    fn serve(&mut self, _consumer: &str) {}
}

/// A delivered message, which must be acknowledged.
pub struct Delivery {
    /// The message.
    pub message: Received,
    /// Whether it may have been delivered before: an earlier consumer may have begun it and crashed.
    pub redelivered: bool,
    /// Acknowledges or returns it.
    pub acknowledge: Box<dyn Acknowledge>,
}

/// Answers a delivery. If it is dropped unanswered, the message is delivered again when its connection or its lease
/// ends.
pub trait Acknowledge: Send + Sync {
    /// Acknowledges it. If this fails, the message is delivered again and found in the inbox.
    fn ack(self: Box<Self>) -> BoxFuture<'static, Result<()>>;

    /// Returns it to the queue: it was not begun, and another consumer may have it at once.
    fn requeue(self: Box<Self>) -> BoxFuture<'static, Result<()>>;

    /// Whether another consumer has or may have the message by now, because this process was paused past the lease. It
    /// must not be begun then. Always false for a broker that ties deliveries to a connection.
    fn is_lost(&self) -> bool {
        false
    }
}
