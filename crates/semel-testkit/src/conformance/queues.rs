//! The embedded broker's own rules, beside those of every broker: time, and what a node that died leaves behind.

use std::time::Duration;

use semel::{
    Error, Uptime,
    messaging::{Broker as _, BrokerHealth, Deliveries, Delivery, Envelope, Message, Published, Queue, Topic},
};
use semel_store::EmbeddedBroker;

use super::tools::*;
use crate::Lab;

/// For how long a message is nobody else's.
const VISIBILITY: Duration = secs(60);

async fn broker(lab: &Lab) -> EmbeddedBroker {
    let broker = EmbeddedBroker::new(lab.open().await);
    broker.declare(vec![Queue::new("news")]).await.unwrap();
    broker
}

fn envelope(topic: &str, body: &str) -> Envelope {
    let message = Message::new("acme", Topic::new(topic).unwrap(), "note", body.to_owned());
    Envelope { message, number: None, put_at: Lab::START }
}

async fn publish(broker: &EmbeddedBroker, bodies: &[&str]) {
    let batch = bodies.iter().map(|body| envelope("news", body)).collect();
    let sent = soon(broker.publish(batch, Uptime::now() + secs(10))).await;
    assert_eq!(sent, vec![Published::Confirmed; bodies.len()]);
}

async fn consume(broker: &EmbeddedBroker, prefetch: u16) -> Box<dyn Deliveries> {
    soon(broker.consume("news", prefetch)).await.unwrap()
}

async fn next(deliveries: &mut Box<dyn Deliveries>) -> (String, Delivery) {
    let delivery = soon(deliveries.next()).await;
    (String::from_utf8(delivery.message.body.to_vec()).unwrap(), delivery)
}

/// Whether nothing comes.
async fn is_quiet(deliveries: &mut Box<dyn Deliveries>) -> bool {
    tokio::time::timeout(Duration::from_millis(100), deliveries.next()).await.is_err()
}

/// A message whose consumer says nothing is delivered again when its time is over; what that one says then is refused,
/// and harms nobody.
pub async fn a_message_whose_time_is_over_is_delivered_again(lab: Lab) {
    let (here, there) = (broker(&lab).await, broker(&lab).await);
    publish(&here, &["x"]).await;
    // It has no room for more, so it is not the one that gets it again.
    let mut first = consume(&here, 1).await;
    let (_, old) = next(&mut first).await;
    assert!(!old.redelivered);
    lab.pass(VISIBILITY - TICK);
    let mut second = consume(&there, 10).await;
    assert!(is_quiet(&mut second).await, "it is still the first one's");
    lab.pass(TICK);
    let (body, new) = next(&mut second).await;
    assert_eq!((body.as_str(), new.redelivered), ("x", true));
    let refused = soon(old.acknowledge.ack()).await;
    assert!(matches!(refused, Err(Error::Refused(_))), "{refused:?}");
    assert_eq!(lab.number("SELECT count(*) FROM semel_queue").await, 1);
    soon(new.acknowledge.ack()).await.unwrap();
    assert_eq!(lab.number("SELECT count(*) FROM semel_queue").await, 0);
}

/// What a consumer has not begun is put back as if it had never been delivered; what it has seen, as redelivered.
pub async fn what_was_not_begun_is_not_redelivered(lab: Lab) {
    let broker = broker(&lab).await;
    publish(&broker, &["a", "b", "c"]).await;
    let mut first = consume(&broker, 3).await;
    let (_, a) = next(&mut first).await;
    soon(a.acknowledge.put_back()).await.unwrap();
    let (_, b) = next(&mut first).await;
    drop(first);
    // A broker that has closed has put them back: the process may end then.
    soon(broker.close()).await;
    assert_eq!(lab.number("SELECT count(*) FROM semel_queue WHERE token <> 0").await, 0);
    // At once, without any time passing.
    let mut second = consume(&broker, 3).await;
    let mut seen = Vec::new();
    for _ in 0..3 {
        let (body, delivery) = next(&mut second).await;
        seen.push((body, delivery.redelivered));
        soon(delivery.acknowledge.ack()).await.unwrap();
    }
    seen.sort();
    assert_eq!(seen, [("a".to_owned(), false), ("b".to_owned(), true), ("c".to_owned(), false)]);
    assert!(soon(b.acknowledge.ack()).await.is_err(), "it was put back with the rest");
}

/// What another version has written takes nobody's room, however much of it there is, and comes again in its time.
pub async fn a_message_that_cannot_be_read_keeps_no_other_waiting(lab: Lab) {
    let broker = broker(&lab).await;
    publish(&broker, &["a", "b", "c"]).await;
    let headers = lab.texts("SELECT headers FROM semel_queue").await.remove(0);
    lab.execute("UPDATE semel_queue SET headers = 'of another version'").await.unwrap();
    publish(&broker, &["d", "e"]).await;
    let mut deliveries = consume(&broker, 2).await;
    let mut held = Vec::new();
    for expected in ["d", "e"] {
        let (body, delivery) = next(&mut deliveries).await;
        assert_eq!(body, expected);
        held.push(delivery);
    }
    for delivery in held {
        soon(delivery.acknowledge.ack()).await.unwrap();
    }
    lab.execute(&format!("UPDATE semel_queue SET headers = '{headers}'")).await.unwrap();
    lab.pass(VISIBILITY - TICK);
    assert!(is_quiet(&mut deliveries).await, "its time is not over");
    lab.pass(TICK);
    for expected in ["a", "b", "c"] {
        let (body, delivery) = next(&mut deliveries).await;
        assert_eq!(body, expected);
        soon(delivery.acknowledge.ack()).await.unwrap();
    }
    assert_eq!(lab.number("SELECT count(*) FROM semel_queue").await, 0);
}

/// Until there is a queue a message is nowhere, and so is a consumer.
pub async fn a_topic_without_a_queue_is_unroutable(lab: Lab) {
    let broker = broker(&lab).await;
    let batch = || vec![envelope("nowhere", "x"), envelope("news", "y")];
    let until = || Uptime::now() + secs(10);
    for _ in 0..2 {
        let sent = soon(broker.publish(batch(), until())).await;
        assert!(
            matches!(&sent[..], [Published::Unroutable(why), Published::Confirmed] if why.contains("nowhere")),
            "{sent:?}"
        );
    }
    assert!(matches!(soon(broker.consume("nowhere", 1)).await.err(), Some(Error::Unavailable(_))));
    broker.declare(vec![Queue::new("nowhere"), Queue::new("news")]).await.unwrap();
    assert_eq!(soon(broker.publish(batch(), until())).await, [Published::Confirmed, Published::Confirmed]);
    // Nothing is sent when the time is up.
    let late = soon(broker.publish(batch(), Uptime::now())).await;
    assert!(late.iter().all(|sent| matches!(sent, Published::NotSent(_))), "{late:?}");
    assert_eq!(lab.number("SELECT count(*) FROM semel_queue").await, 4);
}

/// The broker is up while the database answers, and down when it does not.
pub async fn a_broker_is_as_well_as_its_database(lab: Lab) {
    let broker = broker(&lab).await;
    publish(&broker, &["x"]).await;
    assert_eq!(broker.health(), BrokerHealth::Up);
    lab.execute("ALTER TABLE semel_queue RENAME TO semel_queue_away").await.unwrap();
    let sent = soon(broker.publish(vec![envelope("news", "y")], Uptime::now() + secs(10))).await;
    assert!(!matches!(sent[0], Published::Confirmed), "{sent:?}");
    lab.execute("ALTER TABLE semel_queue_away RENAME TO semel_queue").await.unwrap();
    publish(&broker, &["z"]).await;
    assert_eq!(broker.health(), BrokerHealth::Up);
}
