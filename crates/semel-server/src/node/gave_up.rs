//! Messages that the broker itself gave up on: they become dead letters, so that a person sees them and can re-drive
//! them to the consumer they were for.

use std::{sync::Arc, time::Duration};

use semel::{
    Fingerprint, Scope,
    messaging::{Broker, Delivery, MessageStore, NewLetter, Received, Retry},
};
use semel_amqp::DEAD;
use tokio::sync::watch;

/// Messages that are taken at once.
const PREFETCH: u16 = 16;

/// How long to wait after something that did not work.
const PAUSE: Duration = Duration::from_secs(1);

pub(super) async fn keep(broker: Arc<dyn Broker>, store: impl MessageStore, mut stop: watch::Receiver<bool>) {
    let work = async {
        loop {
            match broker.consume(DEAD, PREFETCH).await {
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
    let letter = letter_of(message);
    while let Err(error) = store.put_letter(letter.clone()).await {
        if !error.is_transient() {
            // Not acknowledged, so the broker has it; and those behind it go on.
            return tracing::error!(
                %error, message_id = letter.key,
                "what the broker gave up on cannot be kept; it stays there"
            );
        }
        tracing::warn!(%error, message_id = letter.key, "a dead letter cannot be kept yet");
        tokio::time::sleep(PAUSE).await;
    }
    let (consumer, message_id, error) = (&*letter.consumer, &*letter.key, &*letter.reason);
    // How often it was tried is not known: the broker counted, and gave up.
    tracing::warn!(consumer, message_id, error, "a message became a dead letter");
    if let Err(error) = acknowledge.ack().await {
        tracing::debug!(%error, "a dead letter was kept and not acknowledged: it comes again");
    }
}

/// Anybody may have sent it: what it says of itself counts only where it can be true.
fn letter_of(message: Received) -> NewLetter {
    let fingerprint = Fingerprint::of_bytes(&message.body);
    let tenant = message.tenant.as_deref().filter(|tenant| Scope::new(tenant, "inbox", "any").is_ok());
    NewLetter {
        tenant: tenant.unwrap_or(Scope::DEFAULT_TENANT).to_owned(),
        // Consumers are named after their queues.
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
    fn what_says_nothing_of_itself_is_known_by_its_body_and_somebody_sees_it() {
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
