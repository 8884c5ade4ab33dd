//! The tasks of a node besides answering requests: it publishes and consumes messages.

mod fault;
mod gave_up;
mod ready;

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use parking_lot::Mutex;
use semel::messaging::{Broker, BrokerHealth, ConsumerStore, Queue, Relay, RelayOptions};
use semel_amqp::Amqp;
use semel_store::{Database, EmbeddedBroker};
use tokio::{sync::watch, task::JoinSet};

use crate::{config::BrokerUrl, services::messages::config::Messages, stop::Stop};

pub use fault::Fault;
pub use ready::AsksTheStore;

/// The pause before queues are declared again.
const DECLARE_PAUSE: Duration = Duration::from_secs(1);

/// How often the log says that queues cannot be declared yet.
const TOLD_EVERY: Duration = Duration::from_secs(60);

/// After how many tries the node starts work although a reachable broker has not declared all queues: it may only have
/// been starting.
const PATIENT_TRIES: u32 = 3;

/// The broker that the configuration names. It may be unreachable: the outbox and the consumers wait for it.
///
/// # Errors
/// When the URL is invalid.
pub fn broker(url: &BrokerUrl, database: &Database, options: &Messages) -> semel::Result<Arc<dyn Broker>> {
    Ok(match url {
        BrokerUrl::Embedded => Arc::new(EmbeddedBroker::with_lease(database.clone(), options.lease)),
        BrokerUrl::Amqp(url) => Arc::new(Amqp::connect(url.expose(), semel_amqp::Options::default())?),
    })
}

/// The tasks of a node. They end in two steps: those that take work in end when a stop is requested, the relay after
/// the last request, whose messages should still be published.
pub struct Node {
    broker: Arc<dyn Broker>,
    intake: Part,
    relay: Part,
    /// Turns true when the queues exist. A message for a missing queue would be unroutable and wait long for its next
    /// try.
    declared: watch::Sender<bool>,
    fault: Fault,
}

/// When a lasting condition was last logged.
#[derive(Default)]
struct Told {
    at: Option<Instant>,
}

impl Told {
    /// Whether to log it now: the first time, and then once a minute.
    fn is_due(&mut self, now: Instant) -> bool {
        let due = self.at.is_none_or(|at| now.duration_since(at) >= TOLD_EVERY);
        if due {
            self.at = Some(now);
        }
        due
    }
}

#[derive(Default)]
struct Part {
    stop: watch::Sender<bool>,
    tasks: Mutex<JoinSet<()>>,
}

impl Part {
    fn spawn(&self, task: impl Future<Output = ()> + Send + 'static) {
        self.tasks.lock().spawn(task);
    }

    /// Whether its tasks may end.
    fn may_end(&self) -> impl Fn() -> bool + Send + 'static {
        let stop = self.stop.clone();
        move || *stop.borrow()
    }

    async fn stop(&self) {
        self.stop.send_replace(true);
        let mut tasks = std::mem::take(&mut *self.tasks.lock());
        while tasks.join_next().await.is_some() {}
    }
}

impl Node {
    /// A node without tasks yet.
    #[must_use]
    pub fn new(broker: Arc<dyn Broker>, stop: &Stop) -> Self {
        let fault = Fault::new(stop);
        let (intake, relay, declared) = (Part::default(), Part::default(), watch::Sender::default());
        let node = Self { broker, intake, relay, declared, fault };
        let (asked, intake) = (stop.clone(), node.intake.stop.clone());
        tokio::spawn(async move {
            asked.asked().await;
            intake.send_replace(true);
        });
        node
    }

    /// The broker.
    #[must_use]
    pub fn broker(&self) -> Arc<dyn Broker> {
        self.broker.clone()
    }

    /// The task that ended early, if one did.
    #[must_use]
    pub fn fault(&self) -> Fault {
        self.fault.clone()
    }

    /// Turns true when the node takes no more work.
    #[must_use]
    pub fn stopping(&self) -> watch::Receiver<bool> {
        self.intake.stop.subscribe()
    }

    /// Runs a task that ends when [`Node::stopping`] turns true. If it ends earlier, that is a [`Fault`] of this name.
    pub fn spawn(&self, name: &'static str, task: impl Future<Output = ()> + Send + 'static) {
        self.intake.spawn(self.fault().guard(name, self.intake.may_end(), task));
    }

    /// Declares the queues as soon as the broker is reachable. A queue that the broker refuses (it exists with other
    /// arguments) is tried again and does not delay the others.
    pub fn declare(&self, queues: Vec<Queue>) {
        let (broker, declared, mut stop) = (self.broker.clone(), self.declared.clone(), self.stopping());
        let declare = async move {
            let (mut told, mut last) = (Told::default(), None);
            for tries in 1_u32.. {
                match broker.declare(queues.clone()).await {
                    Ok(()) => {
                        // With the error: if it was the database's, the end of its outage is logged for all parts.
                        if let Some(after) = last {
                            tracing::info!(%after, tries, "queues are declared");
                        }
                        declared.send_replace(true);
                        return;
                    }
                    Err(error) => {
                        if told.is_due(Instant::now()) {
                            tracing::warn!(%error, "queues cannot be declared yet; the log says so once a minute");
                        }
                        last = Some(error);
                    }
                }
                if tries >= PATIENT_TRIES && broker.health() == BrokerHealth::Up {
                    declared.send_replace(true);
                }
                tokio::select! {
                    () = tokio::time::sleep(DECLARE_PAUSE) => {}
                    _ = stop.wait_for(|stop| *stop) => return,
                }
            }
        };
        // The only task that may end before the stop.
        self.intake.spawn(self.fault().guard("queues", || true, declare));
    }

    /// Runs a task that consumes messages, once the queues exist.
    pub fn consume(&self, name: &'static str, task: impl Future<Output = ()> + Send + 'static) {
        self.spawn(name, once_declared(self.declared.subscribe(), self.stopping(), task));
    }

    /// Publishes the outbox, once the queues exist.
    pub fn relay(&self, store: Database, options: RelayOptions) {
        let (relay, stop) = (Relay::new(store, self.broker.clone(), options), self.relay.stop.subscribe());
        let task = once_declared(self.declared.subscribe(), stop.clone(), relay.run(stop));
        self.relay.spawn(self.fault().guard("relay", self.relay.may_end(), task));
    }

    /// Stores messages that the broker gave up on.
    pub fn keep_given_up(&self, url: &BrokerUrl, store: impl ConsumerStore) {
        if let BrokerUrl::Amqp(_) = url {
            self.spawn("given up", gave_up::keep(self.broker.clone(), store, self.stopping()));
        }
    }

    /// Stops all tasks in order.
    pub async fn stop(self) {
        self.intake.stop().await;
        self.relay.stop().await;
        self.broker.close().await;
    }
}

/// Runs a task once the queues exist, unless the stop comes first.
async fn once_declared(
    mut declared: watch::Receiver<bool>,
    mut stop: watch::Receiver<bool>,
    task: impl Future<Output = ()>,
) {
    tokio::select! {
        _ = declared.wait_for(|declared| *declared) => {}
        _ = stop.wait_for(|stop| *stop) => return,
    }
    task.await;
}

#[cfg(test)]
mod tests {
    use semel::{
        Error, Uptime,
        messaging::{BoxFuture, Deliveries, Envelope, Published},
    };

    use super::*;

    /// A broker that refuses some queues.
    struct Refusing(BrokerHealth);

    impl Broker for Refusing {
        fn declare(&self, _queues: Vec<Queue>) -> BoxFuture<'_, semel::Result<()>> {
            Box::pin(async { Err(Error::Unavailable("a queue of this name has other arguments".into())) })
        }

        fn publish(&self, _batch: Vec<Envelope>, _until: Uptime) -> BoxFuture<'_, Vec<Published>> {
            Box::pin(async { Vec::new() })
        }

        fn consume(&self, _queue: &str, _prefetch: u16) -> BoxFuture<'_, semel::Result<Box<dyn Deliveries>>> {
            Box::pin(async { Err(Error::Unavailable("there is none".into())) })
        }

        fn health(&self) -> BrokerHealth {
            self.0.clone()
        }

        fn close(&self) -> BoxFuture<'_, ()> {
            Box::pin(async {})
        }
    }

    #[test]
    fn a_lasting_condition_is_logged_at_once_and_then_once_a_minute() {
        let (begin, mut told) = (Instant::now(), Told::default());
        let due = [0, 1, 59, 60, 61, 119, 120].map(|after| told.is_due(begin + Duration::from_secs(after)));
        assert_eq!(due, [true, false, false, true, false, false, true]);
    }

    #[tokio::test]
    async fn a_refused_queue_does_not_block_consumers_of_a_reachable_broker() {
        let (up, away) = (BrokerHealth::Up, BrokerHealth::Down("it is unreachable".into()));
        let nodes = [up, away].map(|health| Node::new(Arc::new(Refusing(health)), &Stop::new()));
        let began = nodes.each_ref().map(|node| {
            let (began, begins) = tokio::sync::oneshot::channel();
            node.declare(vec![Queue::new("news")]);
            node.consume("news", async { began.send(()).unwrap_or_default() });
            begins
        });
        let [up, mut away] = began;
        tokio::time::timeout(Duration::from_secs(60), up).await.expect("it never began").unwrap();
        assert!(away.try_recv().is_err(), "an unreachable broker is waited for");
    }
}
