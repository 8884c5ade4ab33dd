//! Messages that the broker itself gave up on become dead letters, so that a person sees them and can re-drive them to
//! their consumer.

use std::{sync::Arc, time::Duration};

use semel::{
    Fingerprint, Scope,
    messaging::{Broker, ConsumerStore, Delivery, NewLetter, Received, Retry},
};
use semel_amqp::DEAD;
use tokio::sync::watch;

/// Messages that are taken at once.
const PREFETCH: u16 = 16;

/// The pause after an error.
const PAUSE: Duration = Duration::from_secs(1);

pub(super) async fn keep(broker: Arc<dyn Broker>, store: impl ConsumerStore, mut stop: watch::Receiver<bool>) {
    let work = async {
        loop {
            match broker.consume(DEAD, PREFETCH).await {
                Ok(mut deliveries) => loop {
                    let delivery = deliveries.next().await;
                    keep_one(&store, delivery).await;
                },
                Err(error) => tracing::debug!(%error, "the queue of given-up messages cannot be read yet"),
            }
            tokio::time::sleep(PAUSE).await;
        }
    };
    tokio::select! {
        () = work => {}
        _ = stop.wait_for(|stop| *stop) => {}
    }
}

async fn keep_one(store: &impl ConsumerStore, Delivery { message, acknowledge, .. }: Delivery) {
    let letter = letter_of(message);
    while let Err(error) = store.put_letter(letter.clone()).await {
        if !error.is_transient() {
            // It is not acknowledged, so the broker keeps it; the messages behind it continue.
            return tracing::error!(
                %error, message_id = letter.key,
                "a message that the broker gave up on cannot be stored; it stays in the broker"
            );
        }
        tracing::warn!(%error, message_id = letter.key, "a dead letter cannot be stored yet");
        tokio::time::sleep(PAUSE).await;
    }
    let (consumer, message_id, error) = (&*letter.consumer, &*letter.key, &*letter.reason);
    // The number of attempts is unknown: the broker counted them.
    tracing::warn!(consumer, message_id, error, "a message became a dead letter");
    if let Err(error) = acknowledge.ack().await {
        tracing::debug!(%error, "a dead letter was stored but not acknowledged: it will be delivered again");
    }
}

/// Any program may have sent it: its own claims count only if they are plausible.
fn letter_of(message: Received) -> NewLetter {
    let fingerprint = Fingerprint::of_bytes(&message.body);
    let tenant = message.tenant.as_deref().filter(|tenant| Scope::new(tenant, "inbox", "any").is_ok());
    NewLetter {
        tenant: tenant.unwrap_or(Scope::DEFAULT_TENANT).to_owned(),
        // Consumers have the names of their queues.
        consumer: message.queue.clone(),
        key: message.id.clone().filter(|id| !id.is_empty()).unwrap_or_else(|| fingerprint.to_hex()),
        fingerprint,
        failures: 0,
        reason: message.headers.get("x-death-reason").map_or_else(
            || "the broker gave up on it".to_owned(),
            |reason| format!("the broker gave up on it: {reason}"),
        ),
        retry: Retry::Dead,
        message,
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;

    #[test]
    fn a_message_without_an_id_becomes_a_letter_with_its_body_hash() {
        let message = |id: Option<&str>, tenant: Option<&str>| Received {
            id: id.map(Into::into),
            tenant: tenant.map(Into::into),
            queue: "news".into(),
            kind: String::new(),
            body: "body".into(),
            headers: BTreeMap::new(),
            number: None,
            put_at: None,
            origin: None,
        };
        let known = letter_of(message(Some("id"), Some("acme")));
        assert_eq!((known.key.as_str(), known.tenant.as_str(), known.consumer.as_str()), ("id", "acme", "news"));
        for unknown in [message(None, None), message(Some(""), Some(""))] {
            let letter = letter_of(unknown);
            assert_eq!((letter.key, letter.tenant.as_str()), (letter.fingerprint.to_hex(), Scope::DEFAULT_TENANT));
        }
    }
}
