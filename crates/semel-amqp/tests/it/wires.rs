//! Connections that break, stall or close while messages are in flight.

use std::time::Duration;

use semel::{
    Uptime,
    messaging::{Broker as _, BrokerHealth, Published, Queue},
};
use semel_amqp::Options;
use semel_testkit::{
    conformance::brokers::{BrokerLab as _, drain, envelope, publish, text},
    faults::Flow,
};

use crate::lab::{RabbitLab, healthy, options, until};

/// The server has the messages, but its confirmations are lost. Later messages are confirmed.
#[tokio::test(flavor = "multi_thread")]
async fn messages_are_unknown_if_the_connection_is_cut_before_the_confirm() {
    let lab = RabbitLab::new().await;
    let (amqp, queue) = (lab.amqp().await, lab.name());
    amqp.declare(vec![Queue::new(&queue)]).await.unwrap();
    // The channel is open already, so that only the confirmation is lost.
    assert_eq!(publish(&amqp, vec![envelope(&queue, "0")]).await, [Published::Confirmed]);
    lab.wire.set(Flow::Deaf);
    let (node, batch) = (amqp.clone(), (1..4).map(|i| envelope(&queue, i.to_string())).collect());
    let publishing = tokio::spawn(async move { publish(&node, batch).await });
    // Another client sees them in the queue.
    let (_connection, channel) = lab.raw().await;
    let passive = lapin::options::QueueDeclareOptions { passive: true, ..Default::default() };
    until(async || {
        let queue = channel.queue_declare(queue.as_str().into(), passive, Default::default()).await.unwrap();
        queue.message_count() == 4
    })
    .await;
    lab.wire.cut();
    lab.wire.set(Flow::Open);
    let answers = publishing.await.unwrap();
    assert!(answers.iter().all(|it| matches!(it, Published::Unknown(_))), "{answers:?}");

    // Confirmations work again, and those of the old channel are not taken for new ones.
    healthy(&amqp, BrokerHealth::Up).await;
    let again = (1..4).map(|i| envelope(&queue, i.to_string())).collect();
    assert_eq!(publish(&amqp, again).await, vec![Published::Confirmed; 3]);
    assert_eq!(drain(&amqp, &queue, 7).await, ["0", "1", "2", "3", "1", "2", "3"]);
    lab.end().await;
}

/// The server does not answer.
#[tokio::test(flavor = "multi_thread")]
async fn a_message_without_a_confirm_times_out_as_unknown() {
    let lab = RabbitLab::new().await;
    let amqp = lab.amqp_with(Options { confirm_timeout: Duration::from_millis(300), ..options() }).await;
    let queue = lab.name();
    amqp.declare(vec![Queue::new(&queue)]).await.unwrap();
    assert_eq!(publish(&amqp, vec![envelope(&queue, "0")]).await, [Published::Confirmed]);
    lab.wire.set(Flow::Deaf);
    let answers = publish(&amqp, vec![envelope(&queue, "1"), envelope(&queue, "2")]).await;
    assert!(answers.iter().all(|it| matches!(it, Published::Unknown(_))), "{answers:?}");
    // Late confirmations are not taken for those of later messages.
    lab.wire.set(Flow::Open);
    let nowhere = lab.name();
    let answers = publish(&amqp, vec![envelope(&nowhere, "3"), envelope(&queue, "4")]).await;
    assert!(matches!(answers[..], [Published::Unroutable(_), Published::Confirmed]), "{answers:?}");
    assert_eq!(drain(&amqp, &queue, 4).await, ["0", "1", "2", "4"]);
    lab.end().await;
}

/// A message that the socket did not accept in time must not be sent later: another relay may have taken over.
#[tokio::test(flavor = "multi_thread")]
async fn a_message_stuck_at_the_deadline_is_never_sent() {
    let lab = RabbitLab::new().await;
    let (amqp, queue) = (lab.amqp().await, lab.name());
    amqp.declare(vec![Queue::new(&queue)]).await.unwrap();
    assert_eq!(publish(&amqp, vec![envelope(&queue, "first")]).await, [Published::Confirmed]);
    lab.wire.set(Flow::Mute);
    // More than the buffers of all the sockets in between.
    let large = vec![b'x'; 1 << 20];
    let batch: Vec<_> = (0..24).map(|_| envelope(&queue, large.clone())).collect();
    let (begun, until) = (Uptime::now(), Uptime::now() + Duration::from_millis(500));
    let answers = amqp.publish(batch, until).await;
    assert!(begun + Duration::from_secs(8) > Uptime::now(), "publish returned long after its deadline");
    let unsent = answers.iter().filter(|it| matches!(it, Published::NotSent(_))).count();
    let unknown = answers.iter().filter(|it| matches!(it, Published::Unknown(_))).count();
    assert!(unsent > 0 && unsent + unknown == 24, "{unsent} not sent, {unknown} unknown");
    lab.wire.set(Flow::Open);
    healthy(&amqp, BrokerHealth::Up).await;
    super::lab::until(async || publish(&amqp, vec![envelope(&queue, "last")]).await == [Published::Confirmed]).await;
    // Unknown messages may be in the queue; messages that were not sent must not be.
    let mut deliveries = amqp.consume(&queue, 1).await.unwrap();
    let mut came = 0;
    loop {
        let delivery = deliveries.next().await;
        let it = text(&delivery);
        delivery.acknowledge.ack().await.unwrap();
        if it == "last" {
            break;
        }
        came += usize::from(it != "first");
    }
    assert!(came <= unknown, "{came} came, but at most {unknown} were sent");
    lab.end().await;
}

/// A consumer whose connection is cut gets its unacknowledged messages again, as redelivered; old acknowledgements fail
/// and are harmless.
#[tokio::test(flavor = "multi_thread")]
async fn a_consumer_goes_on_after_its_connection_was_cut() {
    let lab = RabbitLab::new().await;
    let (amqp, queue) = (lab.amqp().await, lab.name());
    amqp.declare(vec![Queue::new(&queue)]).await.unwrap();
    let batch = (0..3).map(|i| envelope(&queue, i.to_string())).collect();
    assert_eq!(publish(&amqp, batch).await, vec![Published::Confirmed; 3]);
    let mut deliveries = amqp.consume(&queue, 1).await.unwrap();
    deliveries.next().await.acknowledge.ack().await.unwrap();
    let held = deliveries.next().await;
    assert_eq!((text(&held).as_str(), held.redelivered), ("1", false));
    lab.wire.cut();
    let again = deliveries.next().await;
    assert_eq!((text(&again).as_str(), again.redelivered), ("1", true));
    assert!(held.acknowledge.ack().await.is_err(), "its channel is gone");
    again.acknowledge.ack().await.unwrap();
    let last = deliveries.next().await;
    assert_eq!(text(&last), "2");
    last.acknowledge.ack().await.unwrap();
    lab.end().await;
}

/// Queues are declared again before anything is published on a new connection.
#[tokio::test(flavor = "multi_thread")]
async fn queues_are_declared_again_after_a_reconnect() {
    let lab = RabbitLab::new().await;
    let (amqp, queue) = (lab.amqp().await, lab.name());
    lab.wire.set(Flow::Away);
    healthy(&amqp, BrokerHealth::Down(String::new())).await;
    // A declaration while the server is unreachable fails, and is repeated after the reconnect.
    let declaring = amqp.declare(vec![Queue::new(&queue)]);
    assert!(declaring.await.unwrap_err().is_transient());
    lab.wire.set(Flow::Open);
    healthy(&amqp, BrokerHealth::Up).await;
    assert_eq!(publish(&amqp, vec![envelope(&queue, "1")]).await, [Published::Confirmed]);
    lab.delete(&queue).await;
    lab.wire.cut();
    healthy(&amqp, BrokerHealth::Down(String::new())).await;
    healthy(&amqp, BrokerHealth::Up).await;
    assert_eq!(publish(&amqp, vec![envelope(&queue, "2")]).await, [Published::Confirmed]);
    lab.end().await;
}

/// At most `window` messages are unconfirmed at a time, even in a larger batch.
#[tokio::test(flavor = "multi_thread")]
async fn the_window_limits_unconfirmed_messages() {
    let lab = RabbitLab::new().await;
    let amqp = lab.amqp_with(Options { window: 10, ..options() }).await;
    let queue = lab.name();
    amqp.declare(vec![Queue::new(&queue)]).await.unwrap();
    assert_eq!(publish(&amqp, vec![envelope(&queue, "0")]).await, [Published::Confirmed]);
    lab.wire.set(Flow::Deaf);
    let (node, batch) = (amqp.clone(), (1..100).map(|i| envelope(&queue, i.to_string())).collect());
    let publishing = tokio::spawn(async move { publish(&node, batch).await });
    let (_connection, channel) = lab.raw().await;
    let passive = lapin::options::QueueDeclareOptions { passive: true, ..Default::default() };
    let count = async || {
        channel.queue_declare(queue.as_str().into(), passive, Default::default()).await.unwrap().message_count()
    };
    until(async || count().await == 11).await;
    lab.wire.set(Flow::Open);
    assert_eq!(publishing.await.unwrap(), vec![Published::Confirmed; 99]);
    until(async || count().await == 100).await;
    lab.end().await;
}

/// Closing waits for messages in flight; then nothing is sent any more.
#[tokio::test(flavor = "multi_thread")]
async fn closing_waits_for_messages_in_flight() {
    let lab = RabbitLab::new().await;
    let (amqp, queue) = (lab.amqp().await, lab.name());
    amqp.declare(vec![Queue::new(&queue)]).await.unwrap();
    assert_eq!(publish(&amqp, vec![envelope(&queue, "0")]).await, [Published::Confirmed]);
    lab.wire.set(Flow::Deaf);
    let (node, batch) = (amqp.clone(), vec![envelope(&queue, "1")]);
    let publishing = tokio::spawn(async move { publish(&node, batch).await });
    let (_connection, channel) = lab.raw().await;
    let passive = lapin::options::QueueDeclareOptions { passive: true, ..Default::default() };
    until(async || {
        channel.queue_declare(queue.as_str().into(), passive, Default::default()).await.unwrap().message_count() == 2
    })
    .await;
    let node = amqp.clone();
    let closing = tokio::spawn(async move { node.close().await });
    lab.wire.set(Flow::Open);
    assert_eq!(publishing.await.unwrap(), [Published::Confirmed]);
    closing.await.unwrap();
    assert!(matches!(publish(&amqp, vec![envelope(&queue, "2")]).await[..], [Published::NotSent(_)]));
    assert!(matches!(amqp.health(), BrokerHealth::Down(_)));
    assert!(amqp.consume(&queue, 1).await.is_err());
    lab.end().await;
}
