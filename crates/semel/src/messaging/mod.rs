//! Messages: outbox, relay, broker, consumer and inbox.
//!
//! A service that writes its database and publishes a message does both or neither: it [puts](OutboxStore::put) the
//! message into the outbox in its own transaction, and the [`Relay`] publishes it to the [`Broker`] from there. A broker
//! delivers at least once; the [`Consumer`] makes that take effect once, with an inbox row in the transaction of the
//! effect.
//!
//! - [`Message`], [`Envelope`], [`Received`]: a message as put, as published, as delivered
//! - [`Broker`]: the contract of a broker (`semel-store` has one in the database, `semel-amqp` is RabbitMQ)
//! - [`OutboxStore`], [`RelayStore`], [`ConsumerStore`], [`LetterStore`]: the contract of a database, by caller
//! - [`Outbox`]: puts messages in your transaction; [`Relay`]: publishes them
//! - [`Inbox`]: deduplicates per consumer, in your transaction
//! - [`Consumer`]: runs a handler per message; failures become retries, then [dead letters](DeadLetter)

mod away;
mod broker;
mod consumer;
mod inbox;
mod letter;
mod message;
mod pause;
mod relay;
mod store;

pub use broker::{Acknowledge, BoxFuture, Broker, BrokerHealth, Deliveries, Delivery, Published, Queue};
pub use consumer::{Consumer, ConsumerOptions, Handler, InboxKey, Refusal};
pub use inbox::{Inbox, Once, Outbox, Unsettled};
pub use letter::{
    Count as LetterCount, DeadLetter, LetterFilter, LetterPage, NewLetter, Retry, RetryRow, UnreadableLetter,
};
pub use message::{Envelope, Message, MessageId, Origin, Received, Topic};
pub use relay::{Relay, RelayOptions};
pub use store::{
    Backlog, ConsumerStore, Lent, LetterStore, Mark, MarkRow, OutboxFilter, OutboxListing, OutboxRow, OutboxState,
    OutboxStore, Redriven, RelayStore, Taken, Tended, UnreadableMessage, Wake,
};
