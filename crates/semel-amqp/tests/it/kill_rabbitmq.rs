//! RabbitMQ stopped, killed and starved. Each test has a private server.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
    time::Duration,
};

use semel::{
    Uptime,
    messaging::{Broker as _, BrokerHealth, Published, Queue},
};
use semel_amqp::Amqp;
use semel_testkit::{
    conformance::brokers::{BrokerLab as _, drain, envelope, publish, text},
    faults::{Rabbit, torture},
};
use tokio::{sync::watch, task::JoinHandle};

use crate::lab::{RabbitLab, healthy, until};

/// Every confirmed message is delivered, even after a graceful stop and a kill of the server.
#[tokio::test(flavor = "multi_thread")]
async fn confirmed_messages_survive_a_stop_and_a_kill_of_the_server() {
    let rabbit = Arc::new(tokio::task::spawn_blocking(Rabbit::start).await.unwrap());
    let lab = RabbitLab::at(rabbit.url()).await;
    let (amqp, queue) = (lab.amqp().await, lab.name());
    amqp.declare(vec![Queue::new(&queue)]).await.unwrap();
    let (stop, stopped) = watch::channel(false);
    let publishers: Vec<_> = (0..2).map(|n| pump(amqp.clone(), queue.clone(), n, stopped.clone())).collect();
    let mut deliveries = amqp.consume(&queue, 100).await.unwrap();
    let consumer = tokio::spawn(async move {
        let mut came = BTreeSet::new();
        loop {
            let delivery = deliveries.next().await;
            let it = text(&delivery);
            // If the acknowledgement fails, it is delivered again.
            let _ = delivery.acknowledge.ack().await;
            if it == "the end" {
                return came;
            }
            came.insert(it);
        }
    });
    for _ in 0..if torture() { 5 } else { 1 } {
        let node = rabbit.clone();
        let breaking = tokio::task::spawn_blocking(move || {
            node.ctl(&["stop_app"]);
            node.ctl(&["start_app"]);
            node.kill();
            node.start_again();
        });
        breaking.await.unwrap();
        healthy(&amqp, BrokerHealth::Up).await;
    }
    stop.send_replace(true);
    let mut answers = BTreeMap::new();
    for publisher in publishers {
        answers.extend(publisher.await.unwrap());
    }
    until(async || publish(&amqp, vec![envelope(&queue, "the end")]).await == [Published::Confirmed]).await;
    let came = consumer.await.unwrap();
    let mut count = BTreeMap::new();
    for (it, answer) in &answers {
        let word = match answer {
            Published::Confirmed => "confirmed",
            Published::Unknown(_) => "unknown",
            Published::NotSent(_) => "not sent",
            Published::Refused(_) | Published::Unroutable(_) => "refused",
        };
        *count.entry(word).or_insert(0) += 1;
        match answer {
            Published::Confirmed => assert!(came.contains(it), "{it} was confirmed but not delivered"),
            Published::Unknown(_) => {}
            _ => assert!(!came.contains(it), "{it} was delivered, although the answer was {answer:?}"),
        }
    }
    assert!(count.get("confirmed").is_some_and(|n| *n > 100), "{count:?}");
    assert!(count.contains_key("not sent"), "nothing broke: {count:?}");
}

/// Publishes until it is stopped; returns the answers, by body.
fn pump(
    amqp: Amqp,
    queue: String,
    n: usize,
    stopped: watch::Receiver<bool>,
) -> JoinHandle<BTreeMap<String, Published>> {
    tokio::spawn(async move {
        let (mut answers, mut next) = (BTreeMap::new(), 0);
        while !*stopped.borrow() {
            let bodies: Vec<_> = (next..next + 20).map(|i| format!("{n}-{i}")).collect();
            next += 20;
            let batch = bodies.iter().map(|body| envelope(&queue, body.clone())).collect();
            let until = Uptime::now() + Duration::from_secs(15);
            answers.extend(bodies.into_iter().zip(amqp.publish(batch, until).await));
            // A pause, because publishing continues while the server is unreachable.
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        answers
    })
}

/// A server that is short of memory asks for a pause: nothing is sent, and no failure is counted.
#[tokio::test(flavor = "multi_thread")]
async fn a_server_short_of_memory_pauses_publishers_but_not_consumers() {
    let rabbit = Arc::new(tokio::task::spawn_blocking(Rabbit::start).await.unwrap());
    let lab = RabbitLab::at(rabbit.url()).await;
    let (amqp, queue) = (lab.amqp().await, lab.name());
    amqp.declare(vec![Queue::new(&queue)]).await.unwrap();
    let mut deliveries = amqp.consume(&queue, 1).await.unwrap();
    let batch = vec![envelope(&queue, "1"), envelope(&queue, "2")];
    assert_eq!(publish(&amqp, batch).await, vec![Published::Confirmed; 2]);
    let first = deliveries.next().await;
    let node = rabbit.clone();
    tokio::task::spawn_blocking(move || node.ctl(&["set_vm_memory_high_watermark", "0.000001"])).await.unwrap();
    // Only publishers are blocked.
    let (stop, stopped) = watch::channel(false);
    let publishing = pump(amqp.clone(), queue.clone(), 0, stopped);
    healthy(&amqp, BrokerHealth::Blocked(String::new())).await;
    stop.send_replace(true);
    let answers = publish(&amqp, vec![envelope(&queue, "3")]).await;
    assert!(matches!(&answers[..], [Published::NotSent(why)] if why.contains("pause")), "{answers:?}");
    // Consumers use another connection, and go on.
    first.acknowledge.ack().await.unwrap();
    let second = tokio::time::timeout(Duration::from_secs(10), deliveries.next()).await.unwrap();
    assert_eq!(text(&second), "2");
    second.acknowledge.ack().await.unwrap();

    let node = rabbit.clone();
    tokio::task::spawn_blocking(move || node.ctl(&["set_vm_memory_high_watermark", "0.4"])).await.unwrap();
    healthy(&amqp, BrokerHealth::Up).await;
    for answer in publishing.await.unwrap().into_values() {
        assert!(matches!(answer, Published::Confirmed | Published::Unknown(_) | Published::NotSent(_)), "{answer:?}");
    }
    assert_eq!(publish(&amqp, vec![envelope(&queue, "4")]).await, [Published::Confirmed]);
}

/// The server closes the channel because of a message that is too large. Only that one is refused.
#[tokio::test(flavor = "multi_thread")]
async fn a_message_too_large_for_the_server_is_refused_and_the_others_are_sent() {
    let start = || Rabbit::start_with("max_message_size = 100000\n");
    let rabbit = tokio::task::spawn_blocking(start).await.unwrap();
    let lab = RabbitLab::at(rabbit.url()).await;
    let (amqp, queue) = (lab.amqp().await, lab.name());
    amqp.declare(vec![Queue::new(&queue)]).await.unwrap();
    let large = vec![b'x'; 200_000];
    let body = |i: usize| if i == 20 || i == 30 { large.clone() } else { i.to_string().into_bytes() };
    for _ in 0..3 {
        let answers = publish(&amqp, (0..50).map(|i| envelope(&queue, body(i))).collect()).await;
        for (i, answer) in answers.into_iter().enumerate() {
            match answer {
                Published::Refused(why) if i == 20 || i == 30 => assert!(why.contains("larger"), "{why}"),
                Published::Confirmed if i != 20 && i != 30 => {}
                other => panic!("{i}: {other:?}"),
            }
        }
    }
    // Some may be delivered twice, because their first confirmations were lost with the channel.
    let mut deliveries = amqp.consume(&queue, 100).await.unwrap();
    let mut came = BTreeSet::new();
    assert_eq!(publish(&amqp, vec![envelope(&queue, "the end")]).await, [Published::Confirmed]);
    loop {
        let delivery = deliveries.next().await;
        let it = text(&delivery);
        delivery.acknowledge.ack().await.unwrap();
        if it == "the end" {
            break;
        }
        came.insert(it);
    }
    assert_eq!(came.len(), 48);
    assert!(drain(&amqp, &queue, 0).await.is_empty());
}
