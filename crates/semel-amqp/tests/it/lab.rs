//! RabbitMQ behind a wire, with private queues.

use std::{
    sync::{Arc, Mutex},
    time::Duration,
};

use lapin::{Channel, Connection, ConnectionProperties, options::QueueDeleteOptions};
use semel::{
    Backoff,
    messaging::{BoxFuture, Broker, BrokerHealth, MessageId},
};
use semel_amqp::{Amqp, Options};
use semel_testkit::{
    conformance::brokers::BrokerLab,
    faults::{Flow, Wire, rabbitmq_server},
};

/// A RabbitMQ, and the wire through which brokers of this lab reach it.
pub(crate) struct RabbitLab {
    pub(crate) wire: Wire,
    url: String,
    names: Mutex<Vec<String>>,
}

impl RabbitLab {
    /// On the server of this test run.
    pub(crate) async fn new() -> Self {
        Self::at(&rabbitmq_server()).await
    }

    /// On the server at this URL.
    pub(crate) async fn at(url: &str) -> Self {
        Self { wire: Wire::to(url).await, url: url.to_owned(), names: Mutex::default() }
    }

    /// One more node.
    pub(crate) async fn amqp(&self) -> Amqp {
        self.amqp_with(options()).await
    }

    /// One more node, with its own options.
    pub(crate) async fn amqp_with(&self, options: Options) -> Amqp {
        let amqp = Amqp::connect(&self.wire.url(&self.url), options).unwrap();
        healthy(&amqp, BrokerHealth::Up).await;
        amqp
    }

    /// A direct connection to RabbitMQ, without Semel.
    pub(crate) async fn raw(&self) -> (Connection, Channel) {
        let connection = Connection::connect(&self.url, ConnectionProperties::default()).await.unwrap();
        let channel = connection.create_channel().await.unwrap();
        (connection, channel)
    }

    /// Deletes a queue without Semel.
    pub(crate) async fn delete(&self, name: &str) {
        let (connection, channel) = self.raw().await;
        channel.queue_delete(name.into(), QueueDeleteOptions::default()).await.unwrap();
        connection.close(200, "OK".into()).await.unwrap();
    }
}

impl BrokerLab for RabbitLab {
    fn broker(&self) -> BoxFuture<'_, Arc<dyn Broker>> {
        Box::pin(async { Arc::new(self.amqp().await) as Arc<dyn Broker> })
    }

    fn name(&self) -> String {
        let name = format!("test.{}", MessageId::new());
        self.names.lock().unwrap().push(name.clone());
        name
    }

    fn cut(&self) -> BoxFuture<'_, ()> {
        self.wire.set(Flow::Away);
        Box::pin(async {})
    }

    fn mend(&self) -> BoxFuture<'_, ()> {
        self.wire.set(Flow::Open);
        Box::pin(async {})
    }

    async fn end(self) {
        let (connection, channel) = self.raw().await;
        for name in self.names.into_inner().unwrap() {
            channel.queue_delete(name.into(), QueueDeleteOptions::default()).await.unwrap();
        }
        connection.close(200, "OK".into()).await.unwrap();
    }
}

/// Options with a short backoff.
pub(crate) fn options() -> Options {
    let backoff = Backoff { first: Duration::from_millis(20), cap: Duration::from_millis(200) };
    Options { backoff, ..Options::default() }
}

/// Waits until a broker is in this state.
pub(crate) async fn healthy(amqp: &Amqp, expected: BrokerHealth) {
    let expected = std::mem::discriminant(&expected);
    for _ in 0..6000 {
        if std::mem::discriminant(&amqp.health()) == expected {
            return;
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    panic!("not in the expected state after 30 s: {:?}", amqp.health());
}

/// Polls until it is true.
pub(crate) async fn until(mut is_so: impl AsyncFnMut() -> bool) {
    let asking = async {
        while !is_so().await {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(30), asking).await.expect("not true after 30 s");
}
