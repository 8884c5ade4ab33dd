//! Requests to RabbitMQ, and its answers.

use futures_util::StreamExt as _;
use lapin::{
    options::{BasicConsumeOptions, BasicGetOptions, BasicPublishOptions, BasicRejectOptions, QueueDeclareOptions},
    types::{AMQPValue, FieldTable},
};
use semel::{
    Fence,
    messaging::{Broker as _, Origin, Published, Queue},
};
use semel_amqp::DEAD;
use semel_testkit::conformance::brokers::{BrokerLab as _, drain, envelope, publish, text};

use crate::lab::{RabbitLab, until};

/// A consumer in another language gets the same message.
#[tokio::test(flavor = "multi_thread")]
async fn a_message_is_readable_for_other_clients() {
    let lab = RabbitLab::new().await;
    let (amqp, queue) = (lab.amqp().await, lab.name());
    amqp.declare(vec![Queue::new(&queue)]).await.unwrap();
    let mut sent = envelope(&queue, "body");
    sent.message.tenant = "acme".into();
    sent.message.kind = "invoice.paid".into();
    sent.message.headers.insert("trace".into(), "7".into());
    sent.message.origin = Some(Origin { operation: 12, fence: Fence(34) });
    sent.number = Some(56);
    assert_eq!(publish(&amqp, vec![sent.clone()]).await, [Published::Confirmed]);

    let (_connection, channel) = lab.raw().await;
    let got = channel.basic_get(queue.as_str().into(), BasicGetOptions { no_ack: true }).await.unwrap().unwrap();
    assert_eq!(got.delivery.data, b"body");
    assert_eq!(got.delivery.routing_key.as_str(), queue);
    let properties = &got.delivery.properties;
    assert_eq!(properties.message_id().as_ref().unwrap().as_str(), sent.message.id.to_string());
    assert_eq!(*properties.timestamp(), Some(1_700_000_000));
    assert_eq!(properties.kind().as_ref().unwrap().as_str(), "invoice.paid");
    assert_eq!(*properties.delivery_mode(), Some(2));
    assert_eq!(properties.app_id().as_ref().unwrap().as_str(), "semel");
    let headers = properties.headers().as_ref().unwrap().inner();
    let expected = [
        ("semel-tenant", AMQPValue::LongString("acme".into())),
        ("semel-operation", AMQPValue::LongLongInt(12)),
        ("semel-fence", AMQPValue::LongLongInt(34)),
        ("semel-number", AMQPValue::LongLongInt(56)),
        ("semel-put-at", AMQPValue::LongLongInt(1_700_000_000_123_456)),
        ("trace", AMQPValue::LongString("7".into())),
    ];
    for (name, value) in expected {
        assert_eq!(headers.get(name), Some(&value), "{name}");
    }
    lab.end().await;
}

/// A message from a program without Semel is delivered, without the headers that Semel cannot read.
#[tokio::test(flavor = "multi_thread")]
async fn a_message_of_another_program_is_delivered() {
    let lab = RabbitLab::new().await;
    let (amqp, queue) = (lab.amqp().await, lab.name());
    amqp.declare(vec![Queue::new(&queue)]).await.unwrap();
    let (_connection, channel) = lab.raw().await;
    let mut headers = FieldTable::default();
    headers.insert("count".into(), AMQPValue::LongInt(3));
    headers.insert("semel-fence".into(), AMQPValue::Boolean(true));
    headers.insert("table".into(), AMQPValue::FieldTable(FieldTable::default()));
    let properties = lapin::BasicProperties::default().with_headers(headers);
    let options = BasicPublishOptions::default();
    let sent = channel.basic_publish("".into(), queue.as_str().into(), options, b"x", properties).await;
    sent.unwrap().await.unwrap();
    let mut deliveries = amqp.consume(&queue, 1).await.unwrap();
    let delivery = deliveries.next().await;
    let message = &delivery.message;
    assert_eq!((&message.id, &message.tenant, message.number, message.origin), (&None, &None, None, None));
    assert_eq!((text(&delivery).as_str(), message.kind.as_str(), message.put_at), ("x", "", None));
    assert_eq!(message.headers.iter().collect::<Vec<_>>(), [(&"count".to_owned(), &"3".to_owned())]);
    delivery.acknowledge.ack().await.unwrap();
    lab.end().await;
}

/// Such a message is never reported as confirmed. After the declaration, publishing works again.
#[tokio::test(flavor = "multi_thread")]
async fn messages_to_a_deleted_queue_are_unroutable_until_it_is_declared() {
    let lab = RabbitLab::new().await;
    let (amqp, queue) = (lab.amqp().await, lab.name());
    amqp.declare(vec![Queue::new(&queue)]).await.unwrap();
    assert_eq!(publish(&amqp, vec![envelope(&queue, "gone")]).await, [Published::Confirmed]);
    lab.delete(&queue).await;
    let answers = publish(&amqp, vec![envelope(&queue, "lost")]).await;
    assert_eq!(answers, [Published::Unroutable("NO_ROUTE".into())]);
    amqp.declare(vec![Queue::new(&queue)]).await.unwrap();
    assert_eq!(publish(&amqp, vec![envelope(&queue, "found")]).await, [Published::Confirmed]);
    assert_eq!(drain(&amqp, &queue, 1).await, ["found"]);
    lab.end().await;
}

/// The server cancels the consumer of a deleted queue. Semel declares the queue again and consumes it.
#[tokio::test(flavor = "multi_thread")]
async fn a_consumer_outlives_the_deletion_of_its_queue() {
    let lab = RabbitLab::new().await;
    let (amqp, queue) = (lab.amqp().await, lab.name());
    amqp.declare(vec![Queue::new(&queue)]).await.unwrap();
    let mut deliveries = amqp.consume(&queue, 1).await.unwrap();
    let waiting = tokio::spawn(async move { text(&deliveries.next().await) });
    lab.delete(&queue).await;
    until(async || publish(&amqp, vec![envelope(&queue, "again")]).await == [Published::Confirmed]).await;
    assert_eq!(waiting.await.unwrap(), "again");
    lab.end().await;
}

/// A dead letter has the reason and the queue of the message.
#[tokio::test(flavor = "multi_thread")]
async fn rejected_messages_become_dead_letters() {
    let lab = RabbitLab::new().await;
    let (amqp, queue) = (lab.amqp().await, lab.name());
    amqp.declare(vec![Queue::new(&queue)]).await.unwrap();
    let sent = envelope(&queue, "poison");
    assert_eq!(publish(&amqp, vec![sent.clone()]).await, [Published::Confirmed]);
    let (_connection, channel) = lab.raw().await;
    let (options, arguments) = (BasicConsumeOptions::default(), FieldTable::default());
    let mut consumer = channel.basic_consume(queue.as_str().into(), "".into(), options, arguments).await.unwrap();
    let delivery = consumer.next().await.unwrap().unwrap();
    delivery.reject(BasicRejectOptions { requeue: false }).await.unwrap();

    // Other tests use this server, too: their messages are returned.
    let mut dead = amqp.consume(DEAD, 1).await.unwrap();
    let letter = loop {
        let delivery = dead.next().await;
        if delivery.message.id == Some(sent.message.id.to_string()) {
            break delivery;
        }
        delivery.acknowledge.requeue().await.unwrap();
    };
    assert_eq!(letter.message.queue, queue);
    assert_eq!(letter.message.headers["x-death-reason"], "rejected");
    assert_eq!(letter.message.headers["x-death-count"], "1");
    assert_eq!((text(&letter).as_str(), letter.message.put_at), ("poison", Some(sent.put_at)));
    letter.acknowledge.ack().await.unwrap();
    lab.end().await;
}

/// Queues are quorum queues, which survive the loss of a server.
#[tokio::test(flavor = "multi_thread")]
async fn queues_are_quorum_queues_and_classic_ones_are_accepted() {
    let lab = RabbitLab::new().await;
    let (amqp, queue, old) = (lab.amqp().await, lab.name(), lab.name());
    amqp.declare(vec![Queue::new(&queue)]).await.unwrap();
    let durable = QueueDeclareOptions { durable: true, ..QueueDeclareOptions::default() };
    let mut arguments = FieldTable::default();
    arguments.insert("x-dead-letter-exchange".into(), AMQPValue::LongString(DEAD.into()));
    // A declaration as a classic queue is refused, because the type differs.
    let mut all_but_the_type = arguments.clone();
    all_but_the_type.insert("x-dead-letter-strategy".into(), AMQPValue::LongString("at-least-once".into()));
    all_but_the_type.insert("x-overflow".into(), AMQPValue::LongString("reject-publish".into()));
    let (_connection, channel) = lab.raw().await;
    let refused = channel.queue_declare(queue.as_str().into(), durable, all_but_the_type).await.unwrap_err();
    assert!(refused.to_string().contains("x-queue-type"), "{refused}");
    // An existing classic queue is accepted.
    let (_connection, channel) = lab.raw().await;
    channel.queue_declare(old.as_str().into(), durable, arguments).await.unwrap();
    amqp.declare(vec![Queue::new(&old)]).await.unwrap();
    assert_eq!(publish(&amqp, vec![envelope(&old, "it")]).await, [Published::Confirmed]);
    assert_eq!(drain(&amqp, &old, 1).await, ["it"]);
    // A queue that would lose messages is refused with the reason; the others are declared.
    let (bad, good) = (lab.name(), lab.name());
    let (connection, channel) = lab.raw().await;
    channel.queue_declare(bad.as_str().into(), QueueDeclareOptions::default(), FieldTable::default()).await.unwrap();
    let refused = amqp.declare(vec![Queue::new(&bad), Queue::new(&good)]).await.unwrap_err();
    assert!(refused.to_string().contains(&bad) && !refused.to_string().contains(&good), "{refused}");
    assert_eq!(publish(&amqp, vec![envelope(&good, "it")]).await, [Published::Confirmed]);
    connection.close(200, "OK".into()).await.unwrap();
    lab.end().await;
}
