//! Messages: out of a transaction, through a broker, into a transaction.
//!
//! A service that writes its database and publishes a message does both or neither: it [puts](MessageStore::put) the
//! message into the outbox in its own transaction, and the [`Relay`] brings it to the [`Broker`] from there. A broker
//! delivers at least once; the [`Consumer`] makes that take effect once, with an inbox row in the transaction of the
//! effect.
//!
//! - [`Message`], [`Envelope`], [`Received`]: a message before, on, and after its way
//! - [`Broker`]: what a broker must do (`semel-store` has one in the database, `semel-amqp` is RabbitMQ)
//! - [`MessageStore`]: what a database must do
//! - [`Outbox`]: into it, in your transaction; [`Relay`]: from there to the broker
//! - [`Inbox`]: once per consumer, in your transaction
//! - [`Consumer`]: broker to handler, all of it; failures become retries, and in the end [letters](DeadLetter) for a
//!   person

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
    Backlog, Lent, Mark, MarkRow, MessageStore, OutboxFilter, OutboxListing, OutboxRow, OutboxState, Redriven, Taken,
    Tended, UnreadableMessage, Wake,
};
