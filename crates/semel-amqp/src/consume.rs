//! Consumes a queue.

use std::{sync::Arc, time::Duration};

use futures_util::StreamExt as _;
use lapin::{
    Acker, Channel, Consumer,
    options::{BasicAckOptions, BasicConsumeOptions, BasicNackOptions, BasicQosOptions},
    types::{FieldTable, ShortString},
};
use semel::{
    Error, Result,
    messaging::{Acknowledge, BoxFuture, Deliveries, Delivery},
};
use tokio::time::{error::Elapsed, timeout};
use tracing::warn;

use crate::{
    Shared,
    link::{Open, pause},
    message, topology,
};

/// The messages of one queue. Dropping it closes its channel, and RabbitMQ requeues unacknowledged messages.
pub(crate) struct QueueDeliveries {
    shared: Arc<Shared>,
    queue: String,
    prefetch: u16,
    subscription: Option<Subscription>,
    failures: u32,
}

/// A channel with one consumer on it.
struct Subscription {
    consumer: Consumer,
    channel: Channel,
    open: Arc<Open>,
}

impl Subscription {
    /// The next delivery, or the reason why there will be none.
    async fn next(&mut self) -> Result<lapin::message::Delivery, String> {
        loop {
            tokio::select! {
                biased;
                next = self.consumer.next() => {
                    return match next {
                        Some(Ok(delivery)) => Ok(delivery),
                        Some(Err(error)) => Err(error.to_string()),
                        None => Err("the server has ended the consumer".into()),
                    };
                }
                // A safety net: a consumer that misses the end of its channel would wait for ever.
                () = tokio::time::sleep(LOOK) => {
                    if !self.open.is_up() || !self.channel.status().connected() {
                        return Err("its channel is gone".into());
                    }
                }
            }
        }
    }
}

/// How often a waiting consumer checks its channel.
const LOOK: Duration = Duration::from_secs(1);

impl QueueDeliveries {
    /// Subscribes.
    pub(crate) async fn begin(shared: Arc<Shared>, queue: String, prefetch: u16) -> Result<Self> {
        let mut deliveries = Self { shared, queue, prefetch, subscription: None, failures: 0 };
        let subscribed = deliveries.subscribe().await.map_err(|why| deliveries.shared.away(&why));
        deliveries.subscription = Some(subscribed?);
        Ok(deliveries)
    }

    async fn subscribe(&self) -> Result<Subscription, String> {
        let open = self.shared.consuming.up(&self.shared).await?;
        let subscribed = timeout(self.shared.options.timeout, async {
            let channel = open.connection.create_channel().await?;
            // RabbitMQ reads zero as "no limit".
            channel.basic_qos(self.prefetch.max(1), BasicQosOptions::default()).await?;
            let queue = ShortString::try_new(self.queue.as_str()).map_err(std::io::Error::other)?;
            let (tag, options) = (ShortString::default(), BasicConsumeOptions::default());
            let consumer = channel.basic_consume(queue, tag, options, FieldTable::default()).await?;
            Ok::<_, lapin::Error>(Subscription { consumer, channel, open: open.clone() })
        });
        let error = match subscribed.await {
            Ok(Ok(subscription)) => return Ok(subscription),
            Ok(Err(error)) => error,
            Err(_) => return Err("the server does not answer".into()),
        };
        // The queue was deleted: if it is a declared one, the next attempt creates it again.
        if error.is_amqp_soft_error() && self.shared.queues.lock().await.contains(&self.queue) {
            let queue = std::slice::from_ref(&self.queue);
            let _ = topology::declare(&open.connection, queue, self.shared.options.timeout).await;
        }
        Err(format!("queue {}: {error}", self.queue))
    }

    async fn next_delivery(&mut self) -> Delivery {
        loop {
            if let Some(subscription) = &mut self.subscription {
                match subscription.next().await {
                    Ok(delivery) => return self.deliver(delivery),
                    Err(why) => warn!(queue = self.queue, why, "lost the consumer; subscribing again"),
                }
                self.subscription = None;
            }
            match self.subscribe().await {
                Ok(subscription) => {
                    self.failures = 0;
                    self.subscription = Some(subscription);
                }
                Err(why) => {
                    if self.failures == 0 {
                        warn!(queue = self.queue, why, "cannot subscribe; trying again");
                    }
                    self.failures += 1;
                    tokio::time::sleep(pause(&self.shared.options.backoff, self.failures)).await;
                }
            }
        }
    }

    fn deliver(&self, mut delivery: lapin::message::Delivery) -> Delivery {
        let (message, redelivered) = message::received(&self.queue, &mut delivery);
        Delivery {
            message,
            redelivered,
            acknowledge: Box::new(Word { acker: delivery.acker, time: self.shared.options.timeout }),
        }
    }
}

impl Deliveries for QueueDeliveries {
    fn next(&mut self) -> BoxFuture<'_, Delivery> {
        Box::pin(self.next_delivery())
    }
}

/// Acknowledges a delivery on its channel.
struct Word {
    acker: Acker,
    time: Duration,
}

impl Acknowledge for Word {
    fn ack(self: Box<Self>) -> BoxFuture<'static, Result<()>> {
        Box::pin(async move { said(timeout(self.time, self.acker.ack(BasicAckOptions::default())).await) })
    }

    fn requeue(self: Box<Self>) -> BoxFuture<'static, Result<()>> {
        let options = BasicNackOptions { requeue: true, ..BasicNackOptions::default() };
        Box::pin(async move { said(timeout(self.time, self.acker.nack(options)).await) })
    }
}

fn said(answer: Result<lapin::Result<bool>, Elapsed>) -> Result<()> {
    match answer {
        Ok(Ok(true)) => Ok(()),
        Ok(Ok(false)) => Err(Error::BrokerUnavailable("RabbitMQ: the channel of the delivery is gone".into())),
        Ok(Err(error)) => Err(Error::BrokerUnavailable(format!("RabbitMQ: {error}"))),
        Err(_) => Err(Error::BrokerUnavailable("RabbitMQ: the server does not take it".into())),
    }
}
