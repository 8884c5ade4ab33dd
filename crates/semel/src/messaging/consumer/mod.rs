//! The consumer: broker to handler, once per key.
//!
//! - `mod.rs`: options, the handler trait, and the tasks of a consumer
//! - `attempt.rs`: the transaction: inbox, handler, commit
//! - `fresh.rs`: deliveries, several per transaction
//! - `retries.rs`: messages that failed or may have killed their process, each alone
//! - `letters.rs`: stores messages that could not be handled
//! - `fault.rs`: distinguishes a message that always fails from an unavailable store

mod attempt;
mod fault;
mod fresh;
mod letters;
mod retries;

use std::{sync::Arc, time::Duration};

use parking_lot::Mutex;
use tokio::{
    sync::{Notify, mpsc, watch},
    task::JoinSet,
};

use super::{
    BoxFuture, Broker, ConsumerStore, Deliveries, Delivery, Received,
    away::Away,
    pause::{Pause, Stop},
};
use crate::{Backoff, Fingerprint, Ledger, Scope, store::Transactions};

/// Options of a consumer.
#[derive(Clone, Debug)]
pub struct ConsumerOptions {
    /// The most unacknowledged messages.
    pub prefetch: u16,
    /// The most concurrent transactions. A database with one writer uses one.
    pub concurrency: usize,
    /// The most messages per transaction.
    pub batch: usize,
    /// How many runs may fail before a message becomes a dead letter.
    pub max_attempts: u32,
    /// How many runs may be cut off or kill their process before it becomes one.
    pub max_crashes: u32,
    /// The delay after a failure.
    pub backoff: Backoff,
    /// The lease of a retry. Short, because the retries of a killed process wait for it. A run needs no renewal: its
    /// transaction has locked the row.
    pub lease: Duration,
    /// The retention of inbox keys.
    pub retention: Option<Duration>,
}

impl Default for ConsumerOptions {
    fn default() -> Self {
        Self {
            prefetch: 256,
            concurrency: 4,
            batch: 64,
            max_attempts: 10,
            max_crashes: 5,
            backoff: Backoff::default(),
            lease: Duration::from_secs(10),
            retention: Some(super::inbox::RETENTION),
        }
    }
}

/// How the inbox identifies a message.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct InboxKey {
    /// The tenant.
    pub tenant: String,
    /// The key in the consumer's inbox.
    pub key: String,
    /// Distinguishes a duplicate from another message with the same key.
    pub fingerprint: Fingerprint,
}

impl InboxKey {
    /// The message's id, its tenant and the hash of its body: right for messages from an outbox.
    ///
    /// # Errors
    /// [`Refusal::Dead`] for a message without an id.
    pub fn of(message: &Received) -> Result<Self, Refusal> {
        let Some(id) = &message.id else { return Err(Refusal::Dead("the message has no id".into())) };
        let tenant = message.tenant.clone().unwrap_or_else(|| Scope::DEFAULT_TENANT.into());
        Ok(Self { tenant, key: id.clone(), fingerprint: Fingerprint::of_bytes(&message.body) })
    }
}

/// Why a message was not handled.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Refusal {
    /// A retry may succeed.
    Retry(String),
    /// A retry cannot succeed: the message becomes a dead letter at once.
    Dead(String),
}

impl Refusal {
    /// [`Refusal::Retry`] with the text of an error.
    pub fn retry(why: impl std::fmt::Display) -> Self {
        Self::Retry(why.to_string())
    }

    /// [`Refusal::Dead`] with the text of an error.
    pub fn dead(why: impl std::fmt::Display) -> Self {
        Self::Dead(why.to_string())
    }
}

/// Handles the messages of a queue.
///
/// A panic counts as a failure, and so does a run that exceeds the time limit of a transaction.
pub trait Handler<S: Transactions>: Send + Sync + 'static {
    /// The inbox key of a message, by default [its own id](InboxKey::of). Called for every run; must return the same
    /// key each time.
    ///
    /// # Errors
    /// The message becomes a dead letter, whichever refusal this is.
    fn key(&self, message: &Received) -> Result<InboxKey, Refusal> {
        InboxKey::of(message)
    }

    /// Handles the message, in the transaction that also stores its inbox key. Succeeds once per key. It must not use
    /// the ledger.
    fn handle<'a>(&'a self, message: &'a Received, tx: &'a S::Tx) -> BoxFuture<'a, Result<(), Refusal>>;

    /// Called after the commit, to wake tasks that wait for the effect. Not called if the process dies before.
    fn committed(&self, _message: &Received) {}
}

/// Consumes a queue and runs the handler once per key, until it is stopped.
///
/// ```
/// use std::sync::Arc;
///
/// use semel::{
///     Ledger,
///     messaging::{BoxFuture, Broker, Consumer, ConsumerOptions, ConsumerStore, Handler, Message, OutboxStore, Received, Refusal, Topic},
/// };
/// use tokio::sync::watch;
///
/// /// Answers every message with another one, once, however often it is delivered.
/// struct Answers<S>(S);
///
/// impl<S: OutboxStore> Handler<S> for Answers<S> {
///     fn handle<'a>(&'a self, message: &'a Received, tx: &'a S::Tx) -> BoxFuture<'a, Result<(), Refusal>> {
///         Box::pin(async move {
///             let topic = Topic::new("answers").map_err(Refusal::dead)?;
///             let answer = Message::new("default", topic, "answer", message.body.clone());
///             self.0.put(tx, vec![answer]).await.map_err(Refusal::retry)
///         })
///     }
/// }
///
/// async fn consume<S: ConsumerStore + OutboxStore>(ledger: Ledger<S>, broker: Arc<dyn Broker>, stop: watch::Receiver<bool>) {
///     let handler = Answers(ledger.store().clone());
///     let consumer = Consumer::new(ledger, broker, "answers", "questions", handler, ConsumerOptions::default());
///     consumer.run(stop).await;
/// }
/// ```
pub struct Consumer<S: ConsumerStore, H> {
    ledger: Ledger<S>,
    broker: Arc<dyn Broker>,
    name: String,
    queue: String,
    handler: Arc<H>,
    options: ConsumerOptions,
}

/// The state that the tasks of a consumer share.
struct Shared<S: ConsumerStore, H> {
    ledger: Ledger<S>,
    name: String,
    handler: Arc<H>,
    options: ConsumerOptions,
    /// Wakes this consumer's retries after it has stored one.
    retry: Notify,
    /// Retries that were not begun and whose release could not be stored yet, by row and token.
    owed: Mutex<Vec<(i64, i64)>>,
    away: Away,
}

impl<S: ConsumerStore, H: Handler<S>> Consumer<S, H> {
    /// A consumer of this name. Its inbox, retries and dead letters go by this name, for messages from any
    /// queue.
    pub fn new(
        ledger: Ledger<S>,
        broker: Arc<dyn Broker>,
        name: impl Into<String>,
        queue: impl Into<String>,
        handler: H,
        options: ConsumerOptions,
    ) -> Self {
        let handler = Arc::new(handler);
        Self { ledger, broker, name: name.into(), queue: queue.into(), handler, options }
    }

    /// Works until `stop` turns true; then takes nothing new, finishes running messages, and returns the rest to the
    /// queue.
    pub async fn run(self, stop: watch::Receiver<bool>) {
        let mut stop = Stop::new(stop);
        let workers = if self.ledger.store().one_writer() { 1 } else { self.options.concurrency.max(1) };
        let prefetch = self.options.prefetch.max(1);
        let shared = Arc::new(Shared {
            ledger: self.ledger,
            name: self.name,
            handler: self.handler,
            options: self.options,
            retry: Notify::new(),
            owed: Mutex::default(),
            away: Away::default(),
        });
        let (sender, receiver) = mpsc::channel(usize::from(prefetch));
        let receiver = Arc::new(tokio::sync::Mutex::new(receiver));
        let mut tasks = JoinSet::new();
        for n in 0..=workers {
            let (shared, receiver, stop) = (shared.clone(), receiver.clone(), stop.clone());
            tasks.spawn(kept_alive(move || -> BoxFuture<'static, ()> {
                match n {
                    0 => Box::pin(retries::work(shared.clone(), workers, stop.clone())),
                    _ => Box::pin(fresh::work(shared.clone(), receiver.clone(), stop.clone())),
                }
            }));
        }
        // Held to the end: dropping it returns unacknowledged messages to the queue.
        let deliveries = pull(&*self.broker, (&shared.name, &self.queue), prefetch, sender, &mut stop).await;
        while tasks.join_next().await.is_some() {}
        let mut receiver = receiver.lock().await;
        let mut back = JoinSet::new();
        while let Ok(delivery) = receiver.try_recv() {
            return_to_queue(&mut back, delivery);
        }
        while back.join_next().await.is_some() {}
        drop(deliveries);
    }
}

/// Runs a task until it ends. A task that panics is restarted: the broker delivers its messages again, and the queue
/// must continue.
async fn kept_alive(task: impl Fn() -> BoxFuture<'static, ()>) {
    let mut running = JoinSet::new();
    running.spawn(task());
    while let Some(Err(error)) = running.join_next().await {
        tracing::error!(%error, "a consumer task panicked; restarting it");
        running.spawn(task());
    }
}

/// Takes deliveries for the tasks until it is stopped.
async fn pull(
    broker: &dyn Broker,
    (consumer, queue): (&str, &str),
    prefetch: u16,
    workers: mpsc::Sender<Delivery>,
    stop: &mut Stop,
) -> Option<Box<dyn Deliveries>> {
    let mut pause = Pause::new();
    let mut said = false;
    let mut deliveries = loop {
        let consume = tokio::select! {
            () = stop.come() => return None,
            consume = broker.consume(queue, prefetch) => consume,
        };
        match consume {
            Ok(mut deliveries) => {
                deliveries.serve(consumer);
                break deliveries;
            }
            Err(error) => {
                if !std::mem::replace(&mut said, true) {
                    tracing::warn!(%error, queue, "the broker cannot be reached; the consumer waits");
                }
                if !pause.wait(stop).await {
                    return None;
                }
            }
        }
    };
    loop {
        // Reserves a place before it takes a message, so that no taken message waits.
        let place = tokio::select! {
            () = stop.come() => break,
            place = workers.reserve() => place,
        };
        let Ok(place) = place else { break };
        tokio::select! {
            () = stop.come() => break,
            delivery = deliveries.next() => place.send(delivery),
        }
    }
    Some(deliveries)
}

/// Returns a delivery that was not begun.
fn return_to_queue(back: &mut JoinSet<()>, delivery: Delivery) {
    let returned = delivery.acknowledge.requeue();
    back.spawn(async move {
        if let Err(error) = returned.await {
            tracing::debug!(%error, "a delivery could not be returned; the broker delivers it again");
        }
    });
}

impl<S: ConsumerStore, H: Handler<S>> Shared<S, H> {
    fn store(&self) -> &S {
        self.ledger.store()
    }

    fn store_is_away(&self, error: &crate::Error) {
        let error = error.to_string();
        self.away.begins(&error, || {
            tracing::warn!(error, consumer = self.name, "the store cannot be reached; the consumer waits");
        });
    }

    fn store_is_back(&self) {
        self.away.ends(|after| {
            tracing::info!(after, consumer = self.name, "the store is back; the consumer continues");
        });
    }
}
