//! The consumer: broker to handler, once per key.
//!
//! - `mod.rs`: what a consumer is given, and how its tasks hang together
//! - `attempt.rs`: the transaction: inbox, handler, commit
//! - `fresh.rs`: deliveries, several in a transaction where several wait
//! - `retries.rs`: what failed or may have killed its process, each alone
//! - `letters.rs`: keeping what could not be handled
//! - `trouble.rs`: a message that always fails in passing, or a store that is away

mod attempt;
mod fresh;
mod letters;
mod retries;
mod trouble;

use std::{
    sync::{Arc, Mutex},
    time::Duration,
};

use tokio::{
    sync::{Notify, mpsc, watch},
    task::JoinSet,
};

use super::{
    BoxFuture, Broker, Deliveries, Delivery, MessageStore, Received,
    away::Away,
    pause::{Pause, Stop},
};
use crate::{Backoff, Fingerprint, Ledger, Scope};

/// How a consumer works.
#[derive(Clone, Debug)]
pub struct ConsumerOptions {
    /// Messages that are taken and not acknowledged yet.
    pub prefetch: u16,
    /// Transactions at the same time. On a database with one writer there is one.
    pub concurrency: usize,
    /// Messages that share a transaction, where more than one waits.
    pub batch: usize,
    /// How many runs may fail before a message is a dead letter.
    pub max_failures: u32,
    /// How many runs may be cut off, or kill their process, before it is one.
    pub max_crashes: u32,
    /// How long to wait after a failure.
    pub backoff: Backoff,
    /// How long a retry that was taken is kept from other consumers. Short, because the retries of a killed process wait
    /// for it. A run needs no renewals: its transaction has the row locked, however long it takes.
    pub retry_lease: Duration,
    /// How long a key is remembered.
    pub retention: Option<Duration>,
}

impl Default for ConsumerOptions {
    fn default() -> Self {
        Self {
            prefetch: 256,
            concurrency: 4,
            batch: 64,
            max_failures: 10,
            max_crashes: 5,
            backoff: Backoff::default(),
            retry_lease: Duration::from_secs(10),
            retention: Some(super::inbox::RETENTION),
        }
    }
}

/// By what a message is known.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct InboxKey {
    /// Whose it is.
    pub tenant: String,
    /// Its name in the consumer's inbox.
    pub key: String,
    /// What tells a repeat from another message under the same name.
    pub fingerprint: Fingerprint,
}

impl InboxKey {
    /// The message's own id, of the tenant that it names, and its body: right for what comes through an outbox.
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
    /// It may work later.
    Retry(String),
    /// It never will: it goes to the dead letters at once.
    Dead(String),
}

impl Refusal {
    /// A refusal for now, because of an error.
    pub fn retry(why: impl std::fmt::Display) -> Self {
        Self::Retry(why.to_string())
    }

    /// A refusal for good, because of an error.
    pub fn dead(why: impl std::fmt::Display) -> Self {
        Self::Dead(why.to_string())
    }
}

/// Handles the messages of a queue.
///
/// A panic counts as a failure, and so does a run that takes longer than a transaction may.
pub trait Handler<S: MessageStore>: Send + Sync + 'static {
    /// By what a message is known: [its own id](InboxKey::of), if nothing else is said. It is asked again for every
    /// run, and must answer the same.
    ///
    /// # Errors
    /// A message that has none is a dead letter, whichever refusal it is.
    fn key(&self, message: &Received) -> Result<InboxKey, Refusal> {
        InboxKey::of(message)
    }

    /// Does what the message asks for, in the transaction that also remembers its key. Runs once per key, if it
    /// succeeds. It must not use the ledger.
    fn handle<'a>(&'a self, message: &'a Received, tx: &'a S::Tx) -> BoxFuture<'a, Result<(), Refusal>>;

    /// It is committed: the moment to wake whoever waits for what it did. Not called if the process dies before.
    fn committed(&self, _message: &Received) {}
}

/// Takes messages from a queue and has them handled, once per key, until it is stopped.
///
/// ```
/// use std::sync::Arc;
///
/// use semel::{
///     Ledger,
///     messaging::{BoxFuture, Broker, Consumer, ConsumerOptions, Handler, Message, MessageStore, Received, Refusal, Topic},
/// };
/// use tokio::sync::watch;
///
/// /// Answers every message with another one, once, however often it is delivered.
/// struct Answers<S>(S);
///
/// impl<S: MessageStore> Handler<S> for Answers<S> {
///     fn handle<'a>(&'a self, message: &'a Received, tx: &'a S::Tx) -> BoxFuture<'a, Result<(), Refusal>> {
///         Box::pin(async move {
///             let topic = Topic::new("answers").map_err(Refusal::dead)?;
///             let answer = Message::new("default", topic, "answer", message.body.clone());
///             self.0.put(tx, vec![answer]).await.map_err(Refusal::retry)
///         })
///     }
/// }
///
/// async fn consume<S: MessageStore>(ledger: Ledger<S>, broker: Arc<dyn Broker>, stop: watch::Receiver<bool>) {
///     let handler = Answers(ledger.store().clone());
///     let consumer = Consumer::new(ledger, broker, "answers", "questions", handler, ConsumerOptions::default());
///     consumer.run(stop).await;
/// }
/// ```
pub struct Consumer<S: MessageStore, H> {
    ledger: Ledger<S>,
    broker: Arc<dyn Broker>,
    name: String,
    queue: String,
    handler: Arc<H>,
    options: ConsumerOptions,
}

/// What the tasks of a consumer share.
struct Shared<S: MessageStore, H> {
    ledger: Ledger<S>,
    name: String,
    handler: Arc<H>,
    options: ConsumerOptions,
    /// Wakes our own retries: those that we have just put.
    retry: Notify,
    /// Retries that were not begun, by row and token, and of which the store could not be told yet.
    owed: Mutex<Vec<(i64, i64)>>,
    away: Away,
}

impl<S: MessageStore, H: Handler<S>> Consumer<S, H> {
    /// A consumer of this name: the inbox, the retries and the dead letters of a name belong together, whatever queue
    /// their messages came from.
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

    /// Works until `stop` turns true; then takes nothing new, ends what it has begun, and puts the rest back.
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
        // Held to the end: what is not acknowledged goes back when it is dropped.
        let deliveries = pull(&*self.broker, (&shared.name, &self.queue), prefetch, sender, &mut stop).await;
        while tasks.join_next().await.is_some() {}
        let mut receiver = receiver.lock().await;
        let mut back = JoinSet::new();
        while let Ok(delivery) = receiver.try_recv() {
            put_back(&mut back, delivery);
        }
        while back.join_next().await.is_some() {}
        drop(deliveries);
    }
}

/// Runs a task until it ends by itself. One that panics is begun anew: whatever it had in its hands comes again, and
/// the queue must go on.
async fn kept_alive(task: impl Fn() -> BoxFuture<'static, ()>) {
    let mut running = JoinSet::new();
    running.spawn(task());
    while let Some(Err(error)) = running.join_next().await {
        tracing::error!(%error, "a task of a consumer ended early, and is begun anew");
        running.spawn(task());
    }
}

/// Takes deliveries for the workers until it is time to stop.
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
                    tracing::warn!(%error, queue, "messages cannot be taken; the consumer waits for the broker");
                }
                if !pause.wait(stop).await {
                    return None;
                }
            }
        }
    };
    loop {
        // A place first: what is taken from the broker is in somebody's hands at once.
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

/// Gives a delivery back that has not been begun.
fn put_back(back: &mut JoinSet<()>, delivery: Delivery) {
    let back_it_goes = delivery.acknowledge.put_back();
    back.spawn(async move {
        if let Err(error) = back_it_goes.await {
            tracing::debug!(%error, "a delivery was not put back; it comes back by itself");
        }
    });
}

impl<S: MessageStore, H: Handler<S>> Shared<S, H> {
    fn store(&self) -> &S {
        self.ledger.store()
    }

    fn store_is_away(&self, error: &crate::Error) {
        let error = error.to_string();
        self.away.begins(&error, || {
            tracing::warn!(error, consumer = self.name, "the store cannot be reached; the consumer holds what it has");
        });
    }

    fn store_is_back(&self) {
        self.away.ends(|after| {
            tracing::info!(after, consumer = self.name, "the store is back; the consumer goes on");
        });
    }
}
