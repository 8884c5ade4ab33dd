//! From a trigger to RabbitMQ: a message that a program without the library publishes by SQL.

use std::{sync::Arc, time::Duration};

use futures_util::StreamExt as _;
use lapin::{
    options::BasicConsumeOptions,
    types::{AMQPValue, FieldTable},
};
use semel::messaging::{Broker as _, Queue, Relay, RelayOptions};
use semel_testkit::{Kind, Lab, conformance::brokers::BrokerLab as _};
use tokio::{sync::watch, time::timeout};

use crate::lab::RabbitLab;

const PATIENCE: Duration = Duration::from_secs(60);

#[tokio::test(flavor = "multi_thread")]
async fn a_trigger_publishes_to_rabbitmq_and_wakes_the_relay() {
    let (rabbit, lab) = (RabbitLab::new().await, Lab::in_real_time(Kind::Postgres).await);
    let (amqp, queue) = (Arc::new(rabbit.amqp().await), rabbit.name());
    amqp.declare(vec![Queue::new(&queue)]).await.unwrap();
    // It would not poll for an hour.
    let options = RelayOptions { poll: Duration::from_secs(3600), ..RelayOptions::default() };
    let (stop, stops) = watch::channel(false);
    let relay = tokio::spawn(Relay::new(lab.open().await, amqp, options).run(stops));
    for sql in [
        "CREATE TABLE orders (id BIGINT PRIMARY KEY)",
        &format!(
            "CREATE FUNCTION tell() RETURNS TRIGGER LANGUAGE plpgsql AS $$
             BEGIN
                 PERFORM semel_publish('{queue}', to_jsonb(NEW)::text, kind => 'order.created', ordering_key => 'orders',
                                       headers => '{{\"trace\": \"7\"}}', tenant => 'acme');
                 RETURN NULL;
             END $$"
        ),
        "CREATE TRIGGER tell AFTER INSERT ON orders FOR EACH ROW EXECUTE FUNCTION tell()",
    ] {
        lab.execute(sql).await.unwrap();
    }
    let (_connection, channel) = rabbit.raw().await;
    let consume = BasicConsumeOptions { no_ack: true, ..BasicConsumeOptions::default() };
    let mut messages =
        channel.basic_consume(queue.as_str().into(), "".into(), consume, FieldTable::default()).await.unwrap();
    for n in 1..=5 {
        lab.execute(&format!("INSERT INTO orders VALUES ({n})")).await.unwrap();
        let got = timeout(PATIENCE, messages.next()).await.expect("the relay was not woken").unwrap().unwrap();
        assert_eq!(got.data, format!("{{\"id\": {n}}}").as_bytes());
        assert_eq!(got.properties.kind().as_ref().unwrap().as_str(), "order.created");
        let headers = got.properties.headers().as_ref().unwrap().inner();
        assert_eq!(headers.get("trace"), Some(&AMQPValue::LongString("7".into())));
        assert_eq!(headers.get("semel-tenant"), Some(&AMQPValue::LongString("acme".into())));
        assert_eq!(headers.get("semel-number"), Some(&AMQPValue::LongLongInt(n)));
        assert!(!headers.contains_key("semel-operation"));
    }
    stop.send_replace(true);
    timeout(PATIENCE, relay).await.unwrap().unwrap();
    rabbit.end().await;
}
