//! Messages that the broker itself gave up on: they become dead letters, so that a person sees them and can re-drive
//! them to the consumer they were for.

use std::{sync::Arc, time::Duration};

use semel::{
    Fingerprint,
    messaging::{Broker, Delivery, MessageStore, NewLetter, Retry},
};
use tokio::sync::watch;

/// The queue to which RabbitMQ brings what it gives up on.
const QUEUE: &str = "semel.dead";

/// Messages that are taken at once.
const PREFETCH: u16 = 16;

/// How long to wait after something that did not work.
const PAUSE: Duration = Duration::from_secs(1);

pub(super) async fn keep(broker: Arc<dyn Broker>, store: impl MessageStore, mut stop: watch::Receiver<bool>) {
    let work = async {
        loop {
            match broker.consume(QUEUE, PREFETCH).await {
                Ok(mut deliveries) => loop {
                    let delivery = deliveries.next().await;
                    keep_one(&store, delivery).await;
                },
                Err(error) => tracing::debug!(%error, "the queue of what was given up on cannot be read yet"),
            }
            tokio::time::sleep(PAUSE).await;
        }
    };
    tokio::select! {
        () = work => {}
        _ = stop.wait_for(|stop| *stop) => {}
    }
}

async fn keep_one(store: &impl MessageStore, Delivery { message, acknowledge, .. }: Delivery) {
    let fingerprint = Fingerprint::of_bytes(&message.body);
    let letter = NewLetter {
        tenant: message.tenant.clone().unwrap_or_else(|| "default".to_owned()),
        // Consumers are named after their queues.
        consumer: message.queue.clone(),
        key: message.id.clone().unwrap_or_else(|| fingerprint.to_hex()),
        fingerprint,
        failures: 0,
        reason: message.headers.get("x-death-reason").map_or_else(
            || "the broker gave up on it".to_owned(),
            |reason| format!("the broker gave up on it: {reason}"),
        ),
        retry: Retry::Dead,
        message,
    };
    while let Err(error) = store.put_letter(letter.clone()).await {
        tracing::warn!(%error, "a dead letter cannot be kept yet");
        tokio::time::sleep(PAUSE).await;
    }
    if let Err(error) = acknowledge.ack().await {
        tracing::debug!(%error, "a dead letter was kept and not acknowledged: it comes again");
    }
}
