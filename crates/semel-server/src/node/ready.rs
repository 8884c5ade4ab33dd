//! Whether this node can do its work, and what is not as it should be.

use std::{sync::Arc, time::Duration};

use semel::{
    Ledger, Store as _,
    messaging::{Broker, BrokerHealth, MessageStore as _, OutboxState},
};
use semel_store::Database;

use super::Fault;
use crate::{
    config::BrokerUrl,
    http::{
        BoxFuture,
        health::{Readiness, Report},
    },
};

const EMBEDDED: &str = "embedded";

/// How old the oldest message of the outbox may be before that is worth a word.
const LAG: Duration = Duration::from_secs(60);

/// A node is ready when its database answers and its tasks are at work. Broker and outbox are told of: without a broker requests are answered all
/// the same, and nothing is lost.
pub struct AsksTheStore {
    store: Database,
    /// The kind of broker and the broker, where this node has one.
    broker: Option<(&'static str, Arc<dyn Broker>)>,
    fault: Fault,
}

impl AsksTheStore {
    /// For a node with a broker.
    #[must_use]
    pub fn new(ledger: &Ledger<Database>, broker: Arc<dyn Broker>, url: &BrokerUrl, fault: Fault) -> Self {
        let kind = match url {
            BrokerUrl::Embedded => EMBEDDED,
            BrokerUrl::Amqp(_) => "amqp",
        };
        Self { store: ledger.store().clone(), broker: Some((kind, broker)), fault }
    }

    /// For a node that has nothing to do with messages.
    #[must_use]
    pub fn without_broker(ledger: &Ledger<Database>, fault: Fault) -> Self {
        Self { store: ledger.store().clone(), broker: None, fault }
    }

    async fn outbox(&self) -> semel::Result<Vec<String>> {
        let backlog = self.store.backlog().await?;
        let mut wrong = Vec::new();
        if let Some(oldest) = backlog.oldest {
            let age = self.store.now().await?.since(oldest);
            if age > LAG {
                wrong.push(format!("the oldest message in the outbox is {} s old", age.as_secs()));
            }
        }
        for (state, n) in backlog.counts {
            if n > 0 && matches!(state, OutboxState::Unroutable | OutboxState::Parked) {
                wrong.push(held(n, state));
            }
        }
        Ok(wrong)
    }
}

fn held(n: u64, state: OutboxState) -> String {
    let messages =
        if n == 1 { "1 message in the outbox is".to_owned() } else { format!("{n} messages in the outbox are") };
    format!("{messages} {}", state.as_str())
}

impl Readiness for AsksTheStore {
    fn check(&self) -> BoxFuture<'_, Report> {
        Box::pin(async {
            let database = self.store.now().await.map(drop).map_err(|error| {
                // Not in the answer: whoever can reach the port may read that, and it may name a host.
                tracing::warn!(%error, "not ready: the database does not answer");
                "does not answer".to_owned()
            });
            let fault = self.fault.task().map(|task| format!("the task {task} ended early: this node stops"));
            let Some((kind, broker)) = &self.broker else {
                return Report { database, broker: "none".to_owned(), degraded: Vec::new(), fault };
            };
            let mut degraded = match broker.health() {
                // The embedded broker is the database, and that is told already.
                _ if *kind == EMBEDDED && database.is_err() => Vec::new(),
                BrokerHealth::Up => Vec::new(),
                BrokerHealth::Blocked(_) => vec!["the broker asks for a pause".to_owned()],
                BrokerHealth::Down(_) => vec!["the broker does not answer".to_owned()],
            };
            if database.is_ok() {
                degraded.extend(self.outbox().await.unwrap_or_default());
            }
            Report { database, broker: (*kind).to_owned(), degraded, fault }
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_message_is_not_called_1_messages() {
        assert_eq!(held(1, OutboxState::Parked), "1 message in the outbox is parked");
        assert_eq!(held(2, OutboxState::Unroutable), "2 messages in the outbox are unroutable");
    }
}
