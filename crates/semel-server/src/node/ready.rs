//! The readiness of this node, and its problems.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use semel::{
    Ledger,
    messaging::{Broker, BrokerHealth, OutboxState},
    prelude::*,
};
use semel_store::{AWAY, Database};

use super::Fault;
use crate::{
    config::BrokerUrl,
    http::{
        BoxFuture,
        health::{Readiness, Report},
    },
};

const EMBEDDED: &str = "embedded";

/// The age of the oldest message in the outbox from which it is reported.
const LAG: Duration = Duration::from_secs(60);

/// Up to how many dead letters are counted.
const MOST_LETTERS: u32 = 1000;

/// A node is ready if its database can be written and read and its tasks run. Broker, outbox, dead letters and a clock
/// that is ahead are only reported: requests are answered and nothing is lost.
pub struct AsksTheStore {
    store: Database,
    /// The kind of broker and the broker, if this node has one.
    broker: Option<(&'static str, Arc<dyn Broker>)>,
    fault: Fault,
    /// Whether the log reports that the database is in trouble.
    told: AtomicBool,
}

impl AsksTheStore {
    /// For a node with a broker.
    #[must_use]
    pub fn new(ledger: &Ledger<Database>, broker: Arc<dyn Broker>, url: &BrokerUrl, fault: Fault) -> Self {
        let kind = match url {
            BrokerUrl::Embedded => EMBEDDED,
            BrokerUrl::Amqp(_) => "amqp",
        };
        Self { store: ledger.store().clone(), broker: Some((kind, broker)), fault, told: AtomicBool::new(false) }
    }

    /// For a node without messages.
    #[must_use]
    pub fn without_broker(ledger: &Ledger<Database>, fault: Fault) -> Self {
        Self { store: ledger.store().clone(), broker: None, fault, told: AtomicBool::new(false) }
    }

    /// Whether the database can be written and read; if not, a public reason. The error itself may name a host and is
    /// only logged.
    async fn database(&self) -> Result<(), String> {
        let asked = match self.store.check_writes().await {
            Ok(()) => self.store.now().await.map(drop),
            failed => failed,
        };
        let is_told = self.told.swap(asked.is_err(), Ordering::Relaxed);
        asked.map_err(|error| {
            if !is_told {
                tracing::warn!(%error, "not ready: the database is in trouble");
            }
            match error.reason() {
                None | Some(AWAY) => "does not answer".to_owned(),
                Some(reason) => reason.to_owned(),
            }
        })
    }

    fn clock(&self) -> Option<String> {
        let ahead = humantime::format_duration(Duration::from_secs(self.store.clock_is_ahead()?.as_secs()));
        Some(format!("the time in the database is {ahead} ahead of this host's clock: see semel clock show"))
    }

    async fn letters(&self) -> semel::Result<Option<String>> {
        let wait = "wait for a person: see GET /dead-letters";
        Ok(match self.store.dead_letters(MOST_LETTERS + 1).await? {
            0 => None,
            1 => Some("1 dead letter waits for a person: see GET /dead-letters".to_owned()),
            n if n > MOST_LETTERS => Some(format!("over {MOST_LETTERS} dead letters {wait}")),
            n => Some(format!("{n} dead letters {wait}")),
        })
    }

    /// Rows that the sweep and the workers skip, because they cannot be read or changed.
    async fn set_aside(&self) -> semel::Result<Option<String>> {
        let n: i64 = self.store.count_set_aside().await?.iter().map(|(_, n)| n).sum();
        let are = if n == 1 { "1 operation is".to_owned() } else { format!("{n} operations are") };
        Ok((n > 0).then(|| format!("{are} set aside: semel operations list --set-aside shows why")))
    }

    /// Messages of other versions or keys, and unreadable retries, as far as this node has met them.
    fn put_off(&self) -> Option<String> {
        let wait = |messages: &str| format!("{messages} postponed, because this node cannot read");
        match self.store.count_put_off() {
            0 => None,
            1 => Some(format!("{} it: see its log", wait("1 message is"))),
            n => Some(format!("{} them: see its log", wait(&format!("{n} messages are")))),
        }
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
            let database = self.database().await;
            let mut degraded: Vec<String> = self.clock().into_iter().collect();
            let fault = self.fault.task().map(|task| format!("the task {task} ended early: this node stops"));
            let aside = match &database {
                Ok(()) => self.set_aside().await.unwrap_or_default(),
                Err(_) => None,
            };
            let Some((kind, broker)) = &self.broker else {
                degraded.extend(aside);
                return Report { database, broker: "none".to_owned(), degraded, fault };
            };
            match broker.health() {
                // The embedded broker is the database, which is reported already.
                _ if *kind == EMBEDDED && database.is_err() => {}
                BrokerHealth::Up => {}
                BrokerHealth::Blocked(_) => degraded.push("the broker asks for a pause".to_owned()),
                BrokerHealth::Down(_) => degraded.push("the broker does not answer".to_owned()),
            }
            if database.is_ok() {
                degraded.extend(self.outbox().await.unwrap_or_default());
                degraded.extend(self.letters().await.unwrap_or_default());
                degraded.extend(self.put_off());
                degraded.extend(aside);
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
