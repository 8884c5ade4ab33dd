//! What a node does besides answering requests: it carries messages to the broker and takes them from there.

mod fault;
mod gave_up;
mod ready;

use std::{
    sync::{Arc, Mutex, PoisonError},
    time::{Duration, Instant},
};

use semel::messaging::{Broker, BrokerHealth, MessageStore, Queue, Relay, RelayOptions};
use semel_amqp::Amqp;
use semel_store::{Database, EmbeddedBroker};
use tokio::{sync::watch, task::JoinSet};

use crate::{
    config::{self, BrokerUrl},
    stop::Stop,
};

pub use fault::Fault;
pub use ready::AsksTheStore;

/// How long to wait before queues are declared again that could not be.
const DECLARE_PAUSE: Duration = Duration::from_secs(1);

/// How often the log says that queues cannot be declared yet.
const TOLD_EVERY: Duration = Duration::from_secs(60);

/// After how many tries a broker that is there, and does not make all queues, is worked with all the same: it may only
/// have been starting.
const PATIENT_TRIES: u32 = 3;

/// The broker that the configuration names. It may be away: the outbox waits for it, and so do the consumers.
///
/// # Errors
/// When the URL cannot be understood.
pub fn broker(url: &BrokerUrl, database: &Database, options: &config::Messages) -> semel::Result<Arc<dyn Broker>> {
    Ok(match url {
        BrokerUrl::Embedded => Arc::new(EmbeddedBroker::with_visibility(database.clone(), options.visibility)),
        BrokerUrl::Amqp(url) => Arc::new(Amqp::connect(url.expose(), semel_amqp::Options::default())?),
    })
}

/// The tasks of a node. They end in two steps: those that take work in as soon as a stop is asked for, the relay after
/// the last request, whose messages should still go out.
pub struct Node {
    broker: Arc<dyn Broker>,
    intake: Part,
    relay: Part,
    /// Turns true when the queues are there. A message for a queue that is not there yet would be unroutable, and wait
    /// for long before it is tried again.
    declared: watch::Sender<bool>,
    fault: Fault,
}

/// When something that goes on was last told.
#[derive(Default)]
struct Told {
    at: Option<Instant>,
}

impl Told {
    /// Whether to tell it now: the first time, and then once a minute.
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
        self.tasks.lock().unwrap_or_else(PoisonError::into_inner).spawn(task);
    }

    /// Whether its tasks may end.
    fn may_end(&self) -> impl Fn() -> bool + Send + 'static {
        let stop = self.stop.clone();
        move || *stop.borrow()
    }

    async fn stop(&self) {
        self.stop.send_replace(true);
        let mut tasks = std::mem::take(&mut *self.tasks.lock().unwrap_or_else(PoisonError::into_inner));
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

    /// Where messages go.
    #[must_use]
    pub fn broker(&self) -> Arc<dyn Broker> {
        self.broker.clone()
    }

    /// The task that ended early, should there be one.
    #[must_use]
    pub fn fault(&self) -> Fault {
        self.fault.clone()
    }

    /// Turns true when the node takes no more work in.
    #[must_use]
    pub fn stopping(&self) -> watch::Receiver<bool> {
        self.intake.stop.subscribe()
    }

    /// Runs a task that ends when [`Node::stopping`] says so. One that ends before is a [`Fault`] by this name.
    pub fn spawn(&self, name: &'static str, task: impl Future<Output = ()> + Send + 'static) {
        self.intake.spawn(self.fault().guard(name, self.intake.may_end(), task));
    }

    /// Sees to it that the queues are there, as soon as the broker is. One that it refuses to make (somebody has made it
    /// otherwise) is tried again and again, and does not keep the others waiting.
    pub fn declare(&self, queues: Vec<Queue>) {
        let (broker, declared, mut stop) = (self.broker.clone(), self.declared.clone(), self.stopping());
        let declare = async move {
            let (mut told, mut last) = (Told::default(), None);
            for tries in 1_u32.. {
                match broker.declare(queues.clone()).await {
                    Ok(()) => {
                        // With the error: if that was the database's, the end of its outage is told for all parts.
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
        // The only task that is done one day.
        self.intake.spawn(self.fault().guard("queues", || true, declare));
    }

    /// Runs a task that takes messages from queues, once they are there.
    pub fn consume(&self, name: &'static str, task: impl Future<Output = ()> + Send + 'static) {
        self.spawn(name, once_declared(self.declared.subscribe(), self.stopping(), task));
    }

    /// Carries the outbox to the broker, once the queues are there.
    pub fn relay(&self, store: Database, options: RelayOptions) {
        let (relay, stop) = (Relay::new(store, self.broker.clone(), options), self.relay.stop.subscribe());
        let task = once_declared(self.declared.subscribe(), stop.clone(), relay.run(stop));
        self.relay.spawn(self.fault().guard("relay", self.relay.may_end(), task));
    }

    /// Keeps what a broker gave up on by itself.
    pub fn keep_given_up(&self, url: &BrokerUrl, store: impl MessageStore) {
        if let BrokerUrl::Amqp(_) = url {
            self.spawn("given up", gave_up::keep(self.broker.clone(), store, self.stopping()));
        }
    }

    /// Ends everything, in order.
    pub async fn stop(self) {
        self.intake.stop().await;
        self.relay.stop().await;
        self.broker.close().await;
    }
}

/// Runs a task once the queues are there, if they are before the stop.
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

    /// A broker that does not make all queues.
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
    fn what_goes_on_is_told_at_once_and_then_once_a_minute() {
        let (begin, mut told) = (Instant::now(), Told::default());
        let due = [0, 1, 59, 60, 61, 119, 120].map(|after| told.is_due(begin + Duration::from_secs(after)));
        assert_eq!(due, [true, false, false, true, false, false, true]);
    }

    #[tokio::test]
    async fn a_queue_that_cannot_be_made_does_not_keep_the_others_waiting() {
        let (up, away) = (BrokerHealth::Up, BrokerHealth::Down("it is away".into()));
        let nodes = [up, away].map(|health| Node::new(Arc::new(Refusing(health)), &Stop::new()));
        let began = nodes.each_ref().map(|node| {
            let (began, begins) = tokio::sync::oneshot::channel();
            node.declare(vec![Queue::new("news")]);
            node.consume("news", async { began.send(()).unwrap_or_default() });
            begins
        });
        let [up, mut away] = began;
        tokio::time::timeout(Duration::from_secs(60), up).await.expect("it never began").unwrap();
        assert!(away.try_recv().is_err(), "a broker that is away is waited for");
    }
}
