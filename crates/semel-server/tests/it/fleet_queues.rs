//! The queues of a fleet, as another program sees them and writes to them.

use lapin::{
    BasicProperties, Channel, Connection, ConnectionProperties,
    options::{BasicGetOptions, BasicPublishOptions, ConfirmSelectOptions, QueueDeclareOptions},
    types::FieldTable,
};
use semel_store::codec;

use crate::{desk::execute, fleet::Fleet};

/// The queue that these tests are about, and those beside it.
pub(crate) const QUEUE: &str = "notification.restaurant";
const QUEUES: [&str; 5] = [QUEUE, "notification.customer", "notification.agency", "notification.admin", "semel.dead"];

impl Fleet {
    /// How many messages wait in the queues.
    pub(crate) fn queued(&self) -> usize {
        if self.rabbitmq.is_none() {
            return self.count("semel_queue");
        }
        self.on_rabbitmq(async |channel| {
            let mut n = 0;
            let passive = QueueDeclareOptions { passive: true, ..QueueDeclareOptions::default() };
            for queue in QUEUES {
                let found = channel.queue_declare(queue.into(), passive, FieldTable::default()).await.unwrap();
                n += found.message_count() as usize;
            }
            n
        })
    }

    /// Puts bodies on the queue, one message each.
    pub(crate) fn say(&self, bodies: &[&[u8]]) {
        self.say_to(QUEUE, bodies);
    }

    /// Puts bodies on a queue, one message each, every one with its own id.
    pub(crate) fn say_to(&self, queue: &str, bodies: &[&[u8]]) {
        if self.rabbitmq.is_some() {
            self.on_rabbitmq(async |channel| {
                for body in bodies {
                    publish(channel, queue, body).await;
                }
            });
            return;
        }
        for body in bodies {
            let hex = hex::encode(codec::encode(body));
            let bytes = match self.place.url.starts_with("sqlite:") {
                true => format!("x'{hex}'"),
                false => format!("'\\x{hex}'"),
            };
            let id = semel::messaging::MessageId::new();
            execute(
                &self.place,
                &format!(
                    "INSERT INTO semel_queue (queue, tenant, message_id, kind, body, headers, put_at)
                     VALUES ('{queue}', 'default', '{id}', '', {bytes}, '{{}}', 0)"
                ),
            );
        }
    }

    /// Triples every waiting message, each with its own id.
    pub(crate) fn triple(&self) {
        let before = self.queued();
        if self.rabbitmq.is_none() {
            for copy in ["second", "third"] {
                execute(
                    &self.place,
                    &format!(
                        "INSERT INTO semel_queue (queue, tenant, message_id, kind, body, headers, number, put_at)
                         SELECT queue, tenant, '{copy}-' || message_id, kind, body, headers, number, put_at
                         FROM semel_queue WHERE message_id NOT LIKE 'second-%'"
                    ),
                );
            }
        } else {
            self.on_rabbitmq(async |channel| {
                for _ in 0..before {
                    let got = channel.basic_get(QUEUE.into(), BasicGetOptions { no_ack: true }).await.unwrap();
                    let body = got.expect("the message waits in its queue").delivery.data;
                    for _ in 0..3 {
                        publish(channel, QUEUE, &body).await;
                    }
                }
            });
        }
        assert_eq!(self.queued(), 3 * before, "each is there three times");
    }

    /// How many messages wait in one queue.
    pub(crate) fn queued_in(&self, queue: &str) -> usize {
        if self.rabbitmq.is_none() {
            return self.count(&format!("semel_queue WHERE queue = '{queue}'"));
        }
        self.on_rabbitmq(async |channel| {
            let passive = QueueDeclareOptions { passive: true, ..QueueDeclareOptions::default() };
            let found = channel.queue_declare(queue.into(), passive, FieldTable::default()).await.unwrap();
            found.message_count() as usize
        })
    }

    fn on_rabbitmq<T>(&self, work: impl AsyncFnOnce(&Channel) -> T) -> T {
        self.runtime.block_on(async {
            let url = self.rabbitmq.as_ref().unwrap();
            let connection = Connection::connect(url, ConnectionProperties::default()).await.unwrap();
            let channel = connection.create_channel().await.unwrap();
            channel.confirm_select(ConfirmSelectOptions::default()).await.unwrap();
            let done = work(&channel).await;
            // All requests were answered.
            let _ = connection.close(200, "OK".into()).await;
            done
        })
    }
}

async fn publish(channel: &Channel, queue: &str, body: &[u8]) {
    let id = semel::messaging::MessageId::new().to_string();
    let properties = BasicProperties::default().with_message_id(id.into()).with_delivery_mode(2);
    let options = BasicPublishOptions { mandatory: true, ..BasicPublishOptions::default() };
    channel.basic_publish("".into(), queue.into(), options, body, properties).await.unwrap().await.unwrap();
}
