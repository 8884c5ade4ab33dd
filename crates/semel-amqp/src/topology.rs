//! Declares queues, and the queue for RabbitMQ's own dead letters.

use std::time::Duration;

use lapin::{
    Connection, ExchangeKind,
    options::{ExchangeDeclareOptions, QueueBindOptions, QueueDeclareOptions},
    types::{AMQPValue, FieldTable, ShortString},
};
use tokio::time::timeout;

/// The queue, and the exchange in front of it, for messages that RabbitMQ itself gives up on.
pub const DEAD: &str = "semel.dead";

/// Declares queues.
pub(crate) async fn declare(connection: &Connection, names: &[String], time: Duration) -> Result<(), String> {
    let mut wrong = Vec::new();
    for name in std::iter::once(DEAD).chain(names.iter().map(String::as_str).filter(|name| *name != DEAD)) {
        let made = timeout(time, declare_one(connection, name)).await;
        if let Err(why) = made.unwrap_or_else(|_| Err("the server does not answer".into())) {
            wrong.push(format!("queue {name}: {why}"));
        }
    }
    match wrong[..] {
        [] => Ok(()),
        _ => Err(wrong.join("; ")),
    }
}

async fn declare_one(connection: &Connection, name: &str) -> Result<(), String> {
    let short = ShortString::try_new(name).map_err(|error| error.to_string())?;
    let said = match declare_as(connection, &short, quorum(name)).await {
        Ok(()) => None,
        // A server without quorum queues, or an existing queue of the other kind.
        Err(error) if error.is_amqp_soft_error() => {
            declare_as(connection, &short, classic(name)).await.err().map(|_| error)
        }
        Err(error) => Some(error),
    };
    if let Some(error) = said {
        return Err(error.to_string());
    }
    if name == DEAD { bind_dead(connection).await.map_err(|error| error.to_string()) } else { Ok(()) }
}

/// On a separate channel, because a refusal closes it.
async fn declare_as(connection: &Connection, name: &ShortString, arguments: FieldTable) -> lapin::Result<()> {
    let durable = QueueDeclareOptions { durable: true, ..QueueDeclareOptions::default() };
    let channel = connection.create_channel().await?;
    channel.queue_declare(name.clone(), durable, arguments).await.map(drop)
}

async fn bind_dead(connection: &Connection) -> lapin::Result<()> {
    let durable = ExchangeDeclareOptions { durable: true, ..ExchangeDeclareOptions::default() };
    let channel = connection.create_channel().await?;
    // A fanout exchange: the routing key keeps the name of the queue that the message was in.
    channel.exchange_declare(DEAD.into(), ExchangeKind::Fanout, durable, FieldTable::default()).await?;
    channel.queue_bind(DEAD.into(), DEAD.into(), "".into(), QueueBindOptions::default(), FieldTable::default()).await
}

fn quorum(name: &str) -> FieldTable {
    let mut arguments = classic(name);
    arguments.insert("x-queue-type".into(), text("quorum"));
    if name == DEAD {
        // This queue has no dead-letter exchange, so without this RabbitMQ 4 drops a message after twenty redeliveries.
        arguments.insert("x-delivery-limit".into(), AMQPValue::LongInt(i32::MAX));
    } else {
        // Without these, a message that is dead-lettered while its new queue is unavailable is lost. Each needs the
        // other.
        arguments.insert("x-dead-letter-strategy".into(), text("at-least-once"));
        arguments.insert("x-overflow".into(), text("reject-publish"));
    }
    arguments
}

fn classic(name: &str) -> FieldTable {
    let mut arguments = FieldTable::default();
    if name != DEAD {
        arguments.insert("x-dead-letter-exchange".into(), text(DEAD));
    }
    arguments
}

fn text(value: &str) -> AMQPValue {
    AMQPValue::LongString(value.into())
}
