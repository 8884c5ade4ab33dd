//! What a node does besides answering requests: it carries messages to the broker and takes them from there.

mod gave_up;
mod ready;

use std::{
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use semel::messaging::{Broker, MessageStore, Queue, Relay, RelayOptions};
use semel_amqp::Amqp;
use semel_store::{Database, EmbeddedBroker};
use tokio::{sync::watch, task::JoinSet};

use crate::{
    config::{self, BrokerUrl},
    stop::Stop,
};

pub use ready::AsksTheStore;

/// How long to wait before queues are declared again that could not be.
const DECLARE_PAUSE: Duration = Duration::from_secs(1);

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

    async fn stop(&self) {
        self.stop.send_replace(true);
        let mut tasks = std::mem::take(&mut *self.tasks.lock().unwrap_or_else(PoisonError::into_inner));
        while let Some(ended) = tasks.join_next().await {
            if let Err(error) = ended {
                tracing::error!(%error, "a task of this node ended early");
            }
        }
    }
}

impl Node {
    /// A node without tasks yet.
    #[must_use]
    pub fn new(broker: Arc<dyn Broker>, stop: &Stop) -> Self {
        let node = Self { broker, intake: Part::default(), relay: Part::default(), declared: watch::Sender::default() };
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

    /// Turns true when the node takes no more work in.
    #[must_use]
    pub fn stopping(&self) -> watch::Receiver<bool> {
        self.intake.stop.subscribe()
    }

    /// Runs a task that ends when [`Node::stopping`] says so.
    pub fn spawn(&self, task: impl Future<Output = ()> + Send + 'static) {
        self.intake.spawn(task);
    }

    /// Sees to it that the queues are there, as soon as the broker is.
    pub fn declare(&self, queues: Vec<Queue>) {
        let (broker, declared, mut stop) = (self.broker.clone(), self.declared.clone(), self.stopping());
        self.spawn(async move {
            loop {
                match broker.declare(queues.clone()).await {
                    Ok(()) => {
                        declared.send_replace(true);
                        return;
                    }
                    Err(error) => tracing::warn!(%error, "queues cannot be declared yet"),
                }
                tokio::select! {
                    () = tokio::time::sleep(DECLARE_PAUSE) => {}
                    _ = stop.wait_for(|stop| *stop) => return,
                }
            }
        });
    }

    /// Runs a task that takes messages from queues, once they are there.
    pub fn consume(&self, task: impl Future<Output = ()> + Send + 'static) {
        self.spawn(once_declared(self.declared.subscribe(), self.stopping(), task));
    }

    /// Carries the outbox to the broker, once the queues are there.
    pub fn relay(&self, store: Database, options: RelayOptions) {
        let (relay, stop) = (Relay::new(store, self.broker.clone(), options), self.relay.stop.subscribe());
        self.relay.spawn(once_declared(self.declared.subscribe(), stop.clone(), relay.run(stop)));
    }

    /// Keeps what a broker gave up on by itself.
    pub fn keep_given_up(&self, url: &BrokerUrl, store: impl MessageStore) {
        if let BrokerUrl::Amqp(_) = url {
            self.spawn(gave_up::keep(self.broker.clone(), store, self.stopping()));
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
