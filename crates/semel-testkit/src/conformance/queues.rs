//! Laws of the embedded broker beside those of every broker: time, and messages of a dead node.

use std::time::{Duration, Instant};

use semel::{
    Error, Uptime,
    messaging::{
        Broker as _, BrokerHealth, Deliveries, Delivery, Envelope, LetterFilter, Message, Published, Queue, Topic,
    },
    prelude::*,
};
use semel_store::EmbeddedBroker;

use super::tools::*;
use crate::{Kind, Lab};

/// The lease of a message. So long that none is renewed while a test runs: leases expire by the lab's clock, renewals
/// use the machine's.
const VISIBILITY: Duration = secs(600);

/// As above, for tests in which messages are renewed.
const RENEWED: Duration = Duration::from_millis(500);

async fn broker(lab: &Lab) -> EmbeddedBroker {
    broker_with(lab, VISIBILITY).await
}

async fn broker_with(lab: &Lab, lease: Duration) -> EmbeddedBroker {
    let broker = EmbeddedBroker::with_lease(lab.open().await, lease);
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

/// A message that its consumer does not answer is delivered again when its lease expires; a later answer of the first
/// consumer is refused and harmless.
pub async fn a_message_whose_lease_expired_is_delivered_again(lab: Lab) {
    let (here, there) = (broker(&lab).await, broker(&lab).await);
    publish(&here, &["x"]).await;
    // It has no room for more, so another consumer gets it.
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

/// A slow consumer keeps its message, lease after lease, on two queues.
pub async fn a_delivered_message_is_renewed_while_it_is_handled(lab: Lab) {
    let (here, there) = (broker_with(&lab, RENEWED).await, broker(&lab).await);
    here.declare(vec![Queue::new("olds")]).await.unwrap();
    publish(&here, &["x"]).await;
    let sent = soon(here.publish(vec![envelope("olds", "y")], Uptime::now() + secs(10))).await;
    assert_eq!(sent, [Published::Confirmed]);
    let mut slow = [consume(&here, 1).await, soon(here.consume("olds", 1)).await.unwrap()];
    let mut held = Vec::new();
    for deliveries in &mut slow {
        held.push(next(deliveries).await.1);
    }
    let mut now = Lab::START;
    for _ in 0..3 {
        lab.pass(RENEWED - TICK);
        now = now + (RENEWED - TICK);
        let end = (now + RENEWED).as_micros();
        eventually(async || lab.number("SELECT min(visible_at) FROM semel_queue").await == end).await;
    }
    let mut other = consume(&there, 10).await;
    assert!(is_quiet(&mut other).await, "it is the slow one's");
    for delivery in held {
        soon(delivery.acknowledge.ack()).await.unwrap();
    }
    assert_eq!(lab.number("SELECT count(*) FROM semel_queue").await, 0);
}

/// A consumer is informed before it begins a message that another one has; and it does not renew the other's lease.
pub async fn a_message_taken_by_another_consumer_is_lost_and_not_renewed(lab: Lab) {
    let here = broker_with(&lab, RENEWED).await;
    publish(&here, &["x"]).await;
    let mut deliveries = consume(&here, 1).await;
    let (_, delivery) = next(&mut deliveries).await;
    // As if another consumer had taken it right after its lease expired.
    lab.execute("UPDATE semel_queue SET token = token + 1, visible_at = visible_at + 1000000").await.unwrap();
    let lease = lab.number("SELECT visible_at FROM semel_queue").await;
    eventually(async || delivery.acknowledge.is_lost()).await;
    let refused = soon(delivery.acknowledge.ack()).await;
    assert!(matches!(refused, Err(Error::Refused(_))), "{refused:?}");
    assert_eq!(lab.number("SELECT visible_at FROM semel_queue").await, lease);
}

/// A message that a consumer has not received is returned as never delivered; one that it has received, as redelivered.
pub async fn a_message_that_was_not_begun_is_not_marked_redelivered(lab: Lab) {
    let broker = broker(&lab).await;
    publish(&broker, &["a", "b", "c"]).await;
    let mut first = consume(&broker, 3).await;
    let (_, a) = next(&mut first).await;
    soon(a.acknowledge.requeue()).await.unwrap();
    let (_, b) = next(&mut first).await;
    drop(first);
    // A closed broker has returned them: the process may end then.
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
    assert!(soon(b.acknowledge.ack()).await.is_err(), "it was returned with the rest");
}

/// A damaged message takes no room of its consumer. It becomes a dead letter with all its stored data; once a person
/// has repaired and re-driven it, it is one retry, with the message's own id.
pub async fn a_message_that_cannot_be_read_becomes_a_dead_letter(lab: Lab) {
    let (broker, store) = (broker(&lab).await, lab.open().await);
    publish(&broker, &["a", "b", "c"]).await;
    let headers = lab.texts("SELECT headers FROM semel_queue").await.remove(0);
    let ids = lab.texts("SELECT message_id FROM semel_queue ORDER BY id").await;
    lab.execute("UPDATE semel_queue SET headers = 'damaged'").await.unwrap();
    publish(&broker, &["d", "e"]).await;
    let mut deliveries = consume(&broker, 2).await;
    deliveries.serve("reader");
    for expected in ["d", "e"] {
        let (body, delivery) = next(&mut deliveries).await;
        assert_eq!(body, expected);
        soon(delivery.acknowledge.ack()).await.unwrap();
    }
    assert_eq!(lab.number("SELECT count(*) FROM semel_queue").await, 0);
    assert_eq!(store.dead_letters(10).await.unwrap(), 3, "they wait for a person");
    let got = lab.texts("SELECT consumer || ' ' || queue || ' ' || reason FROM semel_dead_letters ORDER BY id").await;
    assert!(got.iter().all(|got| got.starts_with("reader news unreadable: ")), "{got:?}");
    lab.execute(&format!("UPDATE semel_dead_letters SET headers = '{headers}'")).await.unwrap();
    let filter = LetterFilter { tenant: "acme".into(), ..LetterFilter::default() };
    let whole = store.letters(&filter, None, 10).await.unwrap();
    let bodies: Vec<_> = whole.items.iter().rev().map(|letter| letter.message.body.clone()).collect();
    assert_eq!(bodies, ["a", "b", "c"]);
    assert_eq!(store.redrive_letters(&filter, None, 10, "ana").await.unwrap().moved, 3);
    let retries = soon(store.take_retries("reader", 10, VISIBILITY)).await.unwrap();
    let again: Vec<_> = retries.iter().map(|retry| (retry.message.id.clone().unwrap(), retry.starts)).collect();
    assert_eq!(again, ids.into_iter().map(|id| (id, 1)).collect::<Vec<_>>());
}

/// Of many unreadable messages in a queue, a consumer leases no more at once than it has room for,
/// each becomes one dead letter, and the messages behind them arrive. This happens also while the consumer does not ask
/// for a message.
pub async fn messages_that_cannot_be_read_are_put_aside_a_batch_at_a_time(lab: Lab) {
    let broker = broker(&lab).await;
    publish(&broker, &["x"; 300]).await;
    damage_body(&lab, "semel_queue", "id > 0").await;
    publish(&broker, &["a", "b", "c", "d"]).await;
    let mut deliveries = consume(&broker, 2).await;
    deliveries.serve("reader");
    eventually(async || lab.number("SELECT count(*) FROM semel_queue").await == 4).await;
    eventually(async || lab.number("SELECT count(*) FROM semel_queue WHERE token <> 0").await == 2).await;
    for expected in ["a", "b", "c", "d"] {
        let (body, delivery) = next(&mut deliveries).await;
        assert_eq!(body, expected);
        soon(delivery.acknowledge.ack()).await.unwrap();
    }
    assert_eq!(lab.number("SELECT count(*) FROM semel_dead_letters WHERE consumer = 'reader'").await, 300);
}

/// While no dead letter can be stored, a consumer leases only a few unreadable messages per second. Later each of them
/// becomes one letter.
pub async fn a_consumer_pauses_while_it_can_put_nothing_aside(lab: Lab) {
    let broker = broker(&lab).await;
    publish(&broker, &["x"; 300]).await;
    damage_body(&lab, "semel_queue", "id > 0").await;
    lab.execute("ALTER TABLE semel_dead_letters RENAME TO semel_letters_away").await.unwrap();
    let begun = Instant::now();
    let mut deliveries = consume(&broker, 2).await;
    deliveries.serve("reader");
    eventually(async || lab.number("SELECT count(*) FROM semel_queue WHERE token <> 0").await >= 8).await;
    // Three pauses of a second, of which a late wake may end some.
    assert!(begun.elapsed() >= secs(1), "four batches were taken within {:?}", begun.elapsed());
    lab.execute("ALTER TABLE semel_letters_away RENAME TO semel_dead_letters").await.unwrap();
    lab.pass(VISIBILITY);
    eventually(async || lab.number("SELECT count(*) FROM semel_queue").await == 0).await;
    assert_eq!(lab.number("SELECT count(*) FROM semel_dead_letters").await, 300);
}

/// During a rolling update, an older consumer postpones messages of a newer version. They arrive once they are
/// readable, as never delivered.
pub async fn a_message_of_another_version_is_postponed_and_no_dead_letter(lab: Lab) {
    let store = lab.open().await;
    let broker = EmbeddedBroker::with_lease(store.clone(), VISIBILITY);
    broker.declare(vec![Queue::new("news")]).await.unwrap();
    publish(&broker, &["a"]).await;
    store_as_newer(&lab, "semel_queue", "id > 0").await;
    publish(&broker, &["b"]).await;
    let mut deliveries = consume(&broker, 1).await;
    let (body, delivery) = next(&mut deliveries).await;
    assert_eq!((body.as_str(), store.count_put_off()), ("b", 1));
    soon(delivery.acknowledge.ack()).await.unwrap();
    assert_eq!(lab.number("SELECT count(*) FROM semel_dead_letters").await, 0);
    let due = (Lab::START + secs(300)).as_micros();
    assert_eq!(lab.number("SELECT visible_at FROM semel_queue").await, due);
    store_body(&lab, "semel_queue", "id > 0", "010061").await;
    assert!(is_quiet(&mut deliveries).await, "it is postponed");
    lab.pass(secs(300));
    let (body, delivery) = next(&mut deliveries).await;
    assert_eq!((body.as_str(), delivery.redelivered), ("a", false));
}

/// After a restore the ids of rows may be reused. Each unreadable message has its own letter nevertheless.
pub async fn reused_row_ids_lose_no_letter(lab: Lab) {
    let broker = broker(&lab).await;
    for n in 1..=2 {
        publish(&broker, &["a"]).await;
        assert_eq!(lab.number("SELECT id FROM semel_queue").await, 1);
        damage_body(&lab, "semel_queue", "id = 1").await;
        let mut deliveries = consume(&broker, 1).await;
        deliveries.serve("reader");
        eventually(async || lab.number("SELECT count(*) FROM semel_queue").await == 0).await;
        assert_eq!(lab.number("SELECT count(*) FROM semel_dead_letters").await, n);
        drop(deliveries);
        soon(broker.close()).await;
        let back = match lab.kind() {
            Kind::Sqlite => "UPDATE sqlite_sequence SET seq = 0 WHERE name = 'semel_queue'",
            Kind::Postgres => "ALTER TABLE semel_queue ALTER COLUMN id RESTART WITH 1",
        };
        lab.execute(back).await.unwrap();
    }
}

/// A queue goes on after a message with any damage, also for a consumer with room for one.
pub async fn a_damaged_message_does_not_stop_its_queue(lab: Lab) {
    let broker = broker(&lab).await;
    publish(&broker, &["a", "b", "c"]).await;
    damage_body(&lab, "semel_queue", "id = (SELECT min(id) FROM semel_queue)").await;
    damage_column(&lab, "semel_queue", "id = (SELECT min(id) + 1 FROM semel_queue)").await;
    let mut deliveries = consume(&broker, 1).await;
    let (body, delivery) = next(&mut deliveries).await;
    assert_eq!(body, "c");
    soon(delivery.acknowledge.ack()).await.unwrap();
    assert_eq!(broker.health(), BrokerHealth::Up);
    assert_eq!(lab.number("SELECT count(*) FROM semel_dead_letters").await, 2, "nothing is lost");
}

/// Without a queue, a message is unroutable, and there is no consumer.
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
    assert!(soon(broker.consume("nowhere", 1)).await.is_err_and(|error| error.is_transient()));
    broker.declare(vec![Queue::new("nowhere"), Queue::new("news")]).await.unwrap();
    assert_eq!(soon(broker.publish(batch(), until())).await, [Published::Confirmed, Published::Confirmed]);
    // Nothing is sent when the time is up.
    let late = soon(broker.publish(batch(), Uptime::now())).await;
    assert!(late.iter().all(|sent| matches!(sent, Published::NotSent(_))), "{late:?}");
    assert_eq!(lab.number("SELECT count(*) FROM semel_queue").await, 4);
}

/// The broker is up while the database answers, and down otherwise.
pub async fn the_embedded_broker_is_up_while_its_database_answers(lab: Lab) {
    let broker = broker(&lab).await;
    publish(&broker, &["x"]).await;
    assert_eq!(broker.health(), BrokerHealth::Up);
    lab.execute("ALTER TABLE semel_queue RENAME TO semel_queue_away").await.unwrap();
    let sent = soon(broker.publish(vec![envelope("news", "y")], Uptime::now() + secs(10))).await;
    assert!(!matches!(sent[0], Published::Confirmed), "{sent:?}");
    let health = broker.health();
    assert!(matches!(&health, BrokerHealth::Down(why) if why.contains("semel_queue")), "{health:?}");
    lab.execute("ALTER TABLE semel_queue_away RENAME TO semel_queue").await.unwrap();
    publish(&broker, &["z"]).await;
    assert_eq!(broker.health(), BrokerHealth::Up);
    // A consumer notices it, too, when it looks for the next message.
    let mut deliveries = consume(&broker, 10).await;
    for _ in 0..2 {
        soon(next(&mut deliveries).await.1.acknowledge.ack()).await.unwrap();
    }
    lab.execute("ALTER TABLE semel_queue RENAME TO semel_queue_away").await.unwrap();
    eventually(async || matches!(broker.health(), BrokerHealth::Down(_))).await;
    lab.execute("ALTER TABLE semel_queue_away RENAME TO semel_queue").await.unwrap();
    eventually(async || broker.health() == BrokerHealth::Up).await;
}
