//! The laws of a broker. [`broker_suite!`](crate::broker_suite) makes a test of each.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
    time::Duration,
};

use bytes::Bytes;
use semel::{
    Fence, Timestamp, Uptime,
    messaging::{
        BoxFuture, Broker, BrokerHealth, Deliveries, Delivery, Envelope, Message, Origin, Published, Queue, Topic,
    },
};
use tokio::task::JoinSet;

use super::tools::{eventually, secs, soon};

/// A broker under test.
pub trait BrokerLab: Send + Sync {
    /// The broker as seen by one more node.
    fn broker(&self) -> BoxFuture<'_, Arc<dyn Broker>>;

    /// A queue name that no other test uses.
    fn name(&self) -> String;

    /// Makes the broker unreachable for all nodes.
    fn cut(&self) -> BoxFuture<'_, ()>;

    /// Makes it reachable again.
    fn mend(&self) -> BoxFuture<'_, ()>;

    /// Clears up.
    fn end(self) -> impl Future<Output = ()> + Send;
}

/// Makes a test of each law for a broker: `broker_suite!(rabbitmq, Rabbit::new())`, with an expression that may wait.
#[macro_export]
macro_rules! broker_suite {
    ($name:ident, $lab:expr) => {
        mod $name {
            $crate::broker_suite!(@laws $lab;
                a_confirmed_message_is_delivered_with_all_its_properties,
                a_large_body_and_an_empty_one_are_delivered,
                a_message_without_a_queue_is_unroutable_and_stored_nowhere,
                each_unroutable_message_of_a_batch_is_reported,
                declaring_is_harmless_to_repeat_and_by_many_at_once,
                prefetch_limits_unacknowledged_messages,
                an_unacknowledged_message_is_delivered_again,
                an_acknowledged_message_is_never_delivered_again,
                a_returned_message_is_delivered_again_at_once,
                two_consumers_share_a_queue,
                one_consumer_gets_messages_in_order,
                nothing_is_sent_after_the_deadline,
                a_batch_of_a_thousand_is_confirmed,
                waiting_for_a_message_can_be_given_up,
                queues_do_not_mix,
                an_unreachable_broker_confirms_nothing_and_recovers,
            );
        }
    };
    (@laws $lab:expr; $($law:ident),+ $(,)?) => {
        $(#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
        async fn $law() {
            #[allow(unused_imports, reason = "the expression may be a path from there")]
            use super::*;
            let lab = $lab.await;
            $crate::conformance::brokers::$law(&lab).await;
            $crate::conformance::brokers::BrokerLab::end(lab).await;
        })+
    };
}

/// A message with any bytes arrives as it was sent.
pub async fn a_confirmed_message_is_delivered_with_all_its_properties(lab: &impl BrokerLab) {
    let (broker, queue) = (lab.broker().await, lab.name());
    broker.declare(vec![Queue::new(&queue)]).await.unwrap();
    let mut sent = envelope(&queue, &b"\x00\xff\xfe{\"a\": 1}\n\x80"[..]);
    sent.message.tenant = "acme".into();
    sent.message.kind = "invoice.paid".into();
    sent.message.headers = BTreeMap::from([("trace".into(), "ä/7".into()), ("empty".into(), String::new())]);
    sent.message.origin = Some(Origin { operation: i64::MAX, fence: Fence(42) });
    sent.number = Some(7);
    let plain = envelope(&queue, "plain");
    assert_eq!(
        publish(&*broker, vec![sent.clone(), plain.clone()]).await,
        [Published::Confirmed, Published::Confirmed]
    );

    let mut deliveries = broker.consume(&queue, 10).await.unwrap();
    for expected in [sent, plain] {
        let Delivery { message, redelivered, acknowledge } = soon(deliveries.next()).await;
        assert_eq!(message.id, Some(expected.message.id.to_string()));
        assert_eq!(message.tenant.as_deref(), Some(expected.message.tenant.as_str()));
        assert_eq!(message.queue, queue);
        assert_eq!(message.kind, expected.message.kind);
        assert_eq!(message.body, expected.message.body);
        assert_eq!(message.headers, expected.message.headers);
        assert_eq!(message.number, expected.number);
        assert_eq!(message.put_at, Some(expected.put_at));
        assert_eq!(message.origin, expected.message.origin);
        assert!(!redelivered, "it was delivered for the first time");
        acknowledge.ack().await.unwrap();
    }
}

/// A body of a mebibyte, and an empty one.
pub async fn a_large_body_and_an_empty_one_are_delivered(lab: &impl BrokerLab) {
    let (broker, queue) = (lab.broker().await, lab.name());
    broker.declare(vec![Queue::new(&queue)]).await.unwrap();
    let large: Vec<u8> = (0..1_usize << 20).map(|i| (i % 251) as u8).collect();
    let bodies = [Bytes::from(large), Bytes::new(), Bytes::from("after")];
    let batch = bodies.iter().map(|body| envelope(&queue, body.clone())).collect();
    assert_eq!(publish(&*broker, batch).await, vec![Published::Confirmed; 3]);
    let mut deliveries = broker.consume(&queue, 10).await.unwrap();
    for body in bodies {
        let delivery = soon(deliveries.next()).await;
        assert!(delivery.message.body == body, "{} bytes came instead of {}", delivery.message.body.len(), body.len());
        delivery.acknowledge.ack().await.unwrap();
    }
}

/// Without a queue, a message is not confirmed; and a queue that is declared later does not have it.
pub async fn a_message_without_a_queue_is_unroutable_and_stored_nowhere(lab: &impl BrokerLab) {
    let (broker, queue) = (lab.broker().await, lab.name());
    let answers = publish(&*broker, vec![envelope(&queue, "lost")]).await;
    assert!(matches!(answers[..], [Published::Unroutable(_)]), "{answers:?}");
    broker.declare(vec![Queue::new(&queue)]).await.unwrap();
    assert_eq!(publish(&*broker, vec![envelope(&queue, "found")]).await, [Published::Confirmed]);
    assert_eq!(drain(&*broker, &queue, 1).await, ["found"]);
}

/// Each message has its own answer, also if the others have different ones.
pub async fn each_unroutable_message_of_a_batch_is_reported(lab: &impl BrokerLab) {
    let broker = lab.broker().await;
    for _ in 0..5 {
        // A new queue each time: the consumer of the previous round may still return its messages.
        let (queue, nowhere) = (lab.name(), lab.name());
        broker.declare(vec![Queue::new(&queue)]).await.unwrap();
        let lost = |i: usize| i % 7 == 3 || i == 199;
        let batch = (0..200).map(|i| envelope(if lost(i) { &nowhere } else { &queue }, i.to_string())).collect();
        let answers = publish(&*broker, batch).await;
        for (i, answer) in answers.iter().enumerate() {
            match answer {
                Published::Unroutable(_) => assert!(lost(i), "{i} has a queue"),
                Published::Confirmed => assert!(!lost(i), "{i} has no queue"),
                other => panic!("{i}: {other:?}"),
            }
        }
        let came = drain(&*broker, &queue, (0..200).filter(|i| !lost(*i)).count()).await;
        assert_eq!(came, (0..200).filter(|i| !lost(*i)).map(|i| i.to_string()).collect::<Vec<_>>());
    }
}

/// Nodes that start together all declare the same queues.
pub async fn declaring_is_harmless_to_repeat_and_by_many_at_once(lab: &impl BrokerLab) {
    let (one, two, queue) = (lab.broker().await, lab.broker().await, lab.name());
    let queues = vec![Queue::new(&queue), Queue::new(lab.name())];
    let mut all = JoinSet::new();
    for i in 0..8 {
        let (broker, queues) = (if i % 2 == 0 { one.clone() } else { two.clone() }, queues.clone());
        all.spawn(async move { broker.declare(queues).await });
    }
    while let Some(declared) = all.join_next().await {
        declared.unwrap().unwrap();
    }
    assert_eq!(publish(&*one, vec![envelope(&queue, "kept")]).await, [Published::Confirmed]);
    two.declare(queues).await.unwrap();
    assert_eq!(drain(&*two, &queue, 1).await, ["kept"]);
}

/// At most `prefetch` messages are unacknowledged.
pub async fn prefetch_limits_unacknowledged_messages(lab: &impl BrokerLab) {
    let (broker, queue) = (lab.broker().await, lab.name());
    broker.declare(vec![Queue::new(&queue)]).await.unwrap();
    let batch = (0..5).map(|i| envelope(&queue, i.to_string())).collect();
    assert_eq!(publish(&*broker, batch).await, vec![Published::Confirmed; 5]);
    let mut deliveries = broker.consume(&queue, 3).await.unwrap();
    let mut held = Vec::new();
    for _ in 0..3 {
        held.push(soon(deliveries.next()).await);
    }
    assert!(soon_none(&mut *deliveries).await, "a fourth came, with three not acknowledged");
    held.remove(0).acknowledge.ack().await.unwrap();
    held.push(soon(deliveries.next()).await);
    assert!(soon_none(&mut *deliveries).await, "a fifth came, with three not acknowledged");
}

/// A consumer that goes away leaves its messages to others, as redelivered.
pub async fn an_unacknowledged_message_is_delivered_again(lab: &impl BrokerLab) {
    let (broker, other, queue) = (lab.broker().await, lab.broker().await, lab.name());
    broker.declare(vec![Queue::new(&queue)]).await.unwrap();
    let batch = (0..3).map(|i| envelope(&queue, i.to_string())).collect();
    assert_eq!(publish(&*broker, batch).await, vec![Published::Confirmed; 3]);
    let mut deliveries = broker.consume(&queue, 10).await.unwrap();
    let first = soon(deliveries.next()).await;
    first.acknowledge.ack().await.unwrap();
    let second = soon(deliveries.next()).await;
    assert!(!second.redelivered);
    drop((second, deliveries));

    let mut deliveries = other.consume(&queue, 10).await.unwrap();
    let mut came = BTreeMap::new();
    while came.len() < 2 {
        let delivery = soon(deliveries.next()).await;
        came.insert(text(&delivery), delivery.redelivered);
        delivery.acknowledge.ack().await.unwrap();
    }
    assert_eq!(came.keys().collect::<Vec<_>>(), ["1", "2"]);
    assert!(came["1"], "it was delivered before");
}

/// An acknowledged message is not delivered again.
pub async fn an_acknowledged_message_is_never_delivered_again(lab: &impl BrokerLab) {
    let (broker, queue) = (lab.broker().await, lab.name());
    broker.declare(vec![Queue::new(&queue)]).await.unwrap();
    let batch = (0..20).map(|i| envelope(&queue, i.to_string())).collect();
    assert_eq!(publish(&*broker, batch).await, vec![Published::Confirmed; 20]);
    assert_eq!(drain(&*broker, &queue, 20).await.len(), 20);
    // Another consumer gets later messages, and none of the earlier ones.
    assert_eq!(publish(&*broker, vec![envelope(&queue, "after")]).await, [Published::Confirmed]);
    assert_eq!(drain(&*lab.broker().await, &queue, 1).await, ["after"]);
}

/// A returned message is delivered again.
pub async fn a_returned_message_is_delivered_again_at_once(lab: &impl BrokerLab) {
    let (broker, queue) = (lab.broker().await, lab.name());
    broker.declare(vec![Queue::new(&queue)]).await.unwrap();
    assert_eq!(publish(&*broker, vec![envelope(&queue, "it")]).await, [Published::Confirmed]);
    let mut deliveries = broker.consume(&queue, 10).await.unwrap();
    for _ in 0..3 {
        let delivery = soon(deliveries.next()).await;
        assert_eq!(text(&delivery), "it");
        delivery.acknowledge.requeue().await.unwrap();
    }
    let mut other = lab.broker().await.consume(&queue, 10).await.unwrap();
    drop(deliveries);
    let delivery = soon(other.next()).await;
    assert_eq!(text(&delivery), "it");
    delivery.acknowledge.ack().await.unwrap();
    assert!(soon_none(&mut *other).await);
}

/// Two consumers: no message is delivered to both, and together they get all.
pub async fn two_consumers_share_a_queue(lab: &impl BrokerLab) {
    let (broker, queue) = (lab.broker().await, lab.name());
    broker.declare(vec![Queue::new(&queue)]).await.unwrap();
    let mut consumers = Vec::new();
    for _ in 0..2 {
        consumers.push(lab.broker().await.consume(&queue, 5).await.unwrap());
    }
    let batch = (0..100).map(|i| envelope(&queue, i.to_string())).collect();
    assert_eq!(publish(&*broker, batch).await, vec![Published::Confirmed; 100]);
    let (sender, mut heard) = tokio::sync::mpsc::unbounded_channel();
    let mut tasks = JoinSet::new();
    // Each takes its `prefetch` before any is acknowledged.
    let mut first = Vec::new();
    for deliveries in &mut consumers {
        for _ in 0..5 {
            first.push(soon(deliveries.next()).await);
        }
    }
    for delivery in first {
        let _ = sender.send((text(&delivery), delivery.redelivered));
        delivery.acknowledge.ack().await.unwrap();
    }
    for mut deliveries in consumers {
        let sender = sender.clone();
        tasks.spawn(async move {
            loop {
                let delivery = deliveries.next().await;
                let _ = sender.send((text(&delivery), delivery.redelivered));
                delivery.acknowledge.ack().await.unwrap();
            }
        });
    }
    let mut seen = BTreeSet::new();
    while seen.len() < 100 {
        let (it, redelivered) = soon(heard.recv()).await.unwrap();
        assert!(!redelivered && seen.insert(it.clone()), "{it} was delivered twice");
    }
    tasks.abort_all();
}

/// First in, first out.
pub async fn one_consumer_gets_messages_in_order(lab: &impl BrokerLab) {
    let (broker, queue) = (lab.broker().await, lab.name());
    broker.declare(vec![Queue::new(&queue)]).await.unwrap();
    for round in 0..3 {
        let batch = (0..100).map(|i| envelope(&queue, (round * 100 + i).to_string())).collect();
        assert_eq!(publish(&*broker, batch).await, vec![Published::Confirmed; 100]);
    }
    assert_eq!(drain(&*broker, &queue, 300).await, (0..300).map(|i| i.to_string()).collect::<Vec<_>>());
}

/// A relay whose lease has expired must not send.
pub async fn nothing_is_sent_after_the_deadline(lab: &impl BrokerLab) {
    let (broker, queue) = (lab.broker().await, lab.name());
    broker.declare(vec![Queue::new(&queue)]).await.unwrap();
    let batch: Vec<_> = (0..10).map(|i| envelope(&queue, i.to_string())).collect();
    let answers = soon(broker.publish(batch, Uptime::now())).await;
    assert!(answers.len() == 10 && answers.iter().all(|it| matches!(it, Published::NotSent(_))), "{answers:?}");
    assert_eq!(publish(&*broker, vec![envelope(&queue, "in time")]).await, [Published::Confirmed]);
    assert_eq!(drain(&*broker, &queue, 1).await, ["in time"]);
}

/// As many as any relay takes, and more than any window.
pub async fn a_batch_of_a_thousand_is_confirmed(lab: &impl BrokerLab) {
    let (broker, queue) = (lab.broker().await, lab.name());
    broker.declare(vec![Queue::new(&queue)]).await.unwrap();
    let mut batches = JoinSet::new();
    for part in 0..4 {
        let (broker, queue) = (broker.clone(), queue.clone());
        batches.spawn(async move {
            let batch = (0..1000).map(|i| envelope(&queue, format!("{part}-{i}"))).collect();
            publish(&*broker, batch).await
        });
    }
    while let Some(answers) = batches.join_next().await {
        assert_eq!(answers.unwrap(), vec![Published::Confirmed; 1000]);
    }
    let came: BTreeSet<_> = drain(&*broker, &queue, 4000).await.into_iter().collect();
    assert_eq!(came.len(), 4000);
    assert!(publish(&*broker, Vec::new()).await.is_empty());
}

/// A wait for a delivery can be cancelled at any moment, and loses nothing.
pub async fn waiting_for_a_message_can_be_given_up(lab: &impl BrokerLab) {
    let (broker, queue) = (lab.broker().await, lab.name());
    broker.declare(vec![Queue::new(&queue)]).await.unwrap();
    let mut deliveries = broker.consume(&queue, 1000).await.unwrap();
    let batch = (0..200).map(|i| envelope(&queue, i.to_string())).collect();
    assert_eq!(publish(&*broker, batch).await, vec![Published::Confirmed; 200]);
    let mut came = Vec::new();
    while came.len() < 200 {
        let patience = Duration::from_micros(came.len() as u64 % 7 * 50);
        if let Ok(delivery) = tokio::time::timeout(patience, deliveries.next()).await {
            came.push(text(&delivery));
            delivery.acknowledge.ack().await.unwrap();
        }
    }
    assert_eq!(came, (0..200).map(|i| i.to_string()).collect::<Vec<_>>());
}

/// A message is in the queue of its topic and in no other.
pub async fn queues_do_not_mix(lab: &impl BrokerLab) {
    let (broker, one, two) = (lab.broker().await, lab.name(), lab.name());
    broker.declare(vec![Queue::new(&one), Queue::new(&two)]).await.unwrap();
    let batch = (0..20).map(|i| envelope(if i % 2 == 0 { &one } else { &two }, i.to_string())).collect();
    assert_eq!(publish(&*broker, batch).await, vec![Published::Confirmed; 20]);
    for (queue, first) in [(one, 0), (two, 1)] {
        let expected: Vec<_> = (first..20).step_by(2).map(|i| i.to_string()).collect();
        assert_eq!(drain(&*broker, &queue, 10).await, expected);
    }
}

/// An unreachable broker confirms nothing; when it is back, publishers and consumers continue by themselves.
pub async fn an_unreachable_broker_confirms_nothing_and_recovers(lab: &impl BrokerLab) {
    let (broker, queue) = (lab.broker().await, lab.name());
    broker.declare(vec![Queue::new(&queue)]).await.unwrap();
    let mut deliveries = broker.consume(&queue, 10).await.unwrap();
    assert_eq!(publish(&*broker, vec![envelope(&queue, "before")]).await, [Published::Confirmed]);
    let before = soon(deliveries.next()).await;
    assert_eq!(text(&before), "before");
    before.acknowledge.ack().await.unwrap();

    lab.cut().await;
    for _ in 0..3 {
        let answers = publish(&*broker, vec![envelope(&queue, "meanwhile")]).await;
        assert!(matches!(answers[..], [Published::NotSent(_) | Published::Unknown(_)]), "{answers:?}");
    }
    eventually(async || matches!(broker.health(), BrokerHealth::Down(_))).await;
    lab.mend().await;

    eventually(async || publish(&*broker, vec![envelope(&queue, "after")]).await == [Published::Confirmed]).await;
    assert_eq!(broker.health(), BrokerHealth::Up);
    loop {
        let delivery = soon(deliveries.next()).await;
        let it = text(&delivery);
        // If the acknowledgement fails, it is delivered again.
        let _ = delivery.acknowledge.ack().await;
        if it == "after" {
            break;
        }
    }
}

/// A message to publish to a queue.
#[must_use]
pub fn envelope(queue: &str, body: impl Into<Bytes>) -> Envelope {
    let message = Message::new("default", Topic::new(queue).unwrap(), "test", body);
    Envelope { message, number: None, put_at: Timestamp::from_micros(1_700_000_000_123_456) }
}

/// Publishes with time enough.
pub async fn publish(broker: &dyn Broker, batch: Vec<Envelope>) -> Vec<Published> {
    soon(broker.publish(batch, Uptime::now() + secs(15))).await
}

/// Takes and acknowledges this many messages; returns their bodies in the order of arrival.
pub async fn drain(broker: &dyn Broker, queue: &str, count: usize) -> Vec<String> {
    let mut deliveries = broker.consume(queue, 100).await.unwrap();
    let mut came = Vec::new();
    while came.len() < count {
        let delivery = soon(deliveries.next()).await;
        came.push(text(&delivery));
        delivery.acknowledge.ack().await.unwrap();
    }
    assert!(soon_none(&mut *deliveries).await, "there was more");
    came
}

/// A delivery's body.
#[must_use]
pub fn text(delivery: &Delivery) -> String {
    String::from_utf8_lossy(&delivery.message.body).into_owned()
}

/// Whether nothing comes for a while. There is no signal for that, so this waits; it can miss a fault, but never
/// reports a false one.
pub async fn soon_none(deliveries: &mut dyn Deliveries) -> bool {
    tokio::time::timeout(Duration::from_millis(200), deliveries.next()).await.is_err()
}
