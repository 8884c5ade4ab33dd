//! Scripted brokers.

use std::sync::{
    Arc, Mutex,
    atomic::{AtomicUsize, Ordering},
};

use semel::{
    Error, Result, Uptime,
    messaging::{
        Acknowledge, BoxFuture, Broker, BrokerHealth, Deliveries, Delivery, Envelope, Published, Queue, Received,
    },
};
use tokio::sync::mpsc;

use super::tools::text;

type Answering = dyn Fn(Vec<Envelope>, Uptime) -> BoxFuture<'static, Vec<Published>> + Send + Sync;

/// Takes messages, answers by the test's script, and records confirmed messages.
pub(super) struct Script {
    answering: Mutex<Arc<Answering>>,
    health: Mutex<BrokerHealth>,
    kept: Mutex<Vec<Envelope>>,
    calls: AtomicUsize,
}

impl Script {
    /// One that confirms everything.
    pub(super) fn new() -> Arc<Self> {
        Self::that(|_| Published::Confirmed)
    }

    /// One that answers each message like this.
    pub(super) fn that(answer: impl Fn(&Envelope) -> Published + Send + Sync + 'static) -> Arc<Self> {
        let script = Self::doing(|_, _| async { Vec::new() });
        script.answer(answer);
        script
    }

    /// One that answers each batch like this.
    pub(super) fn doing<F: Future<Output = Vec<Published>> + Send + 'static>(
        answering: impl Fn(Vec<Envelope>, Uptime) -> F + Send + Sync + 'static,
    ) -> Arc<Self> {
        let answering: Arc<Answering> = Arc::new(move |batch, until| Box::pin(answering(batch, until)));
        Arc::new(Self {
            answering: Mutex::new(answering),
            health: Mutex::new(BrokerHealth::Up),
            kept: Mutex::default(),
            calls: AtomicUsize::new(0),
        })
    }

    /// From now on, answers each message like this.
    pub(super) fn answer(&self, answer: impl Fn(&Envelope) -> Published + Send + Sync + 'static) {
        *self.answering.lock().unwrap() = Arc::new(move |batch: Vec<Envelope>, _| {
            let answers = batch.iter().map(&answer).collect();
            Box::pin(std::future::ready(answers))
        });
    }

    pub(super) fn set_health(&self, health: BrokerHealth) {
        *self.health.lock().unwrap() = health;
    }

    /// The texts of confirmed messages, in order, with repetitions.
    pub(super) fn texts(&self) -> Vec<String> {
        self.kept.lock().unwrap().iter().map(|envelope| text(&envelope.message.body)).collect()
    }

    pub(super) fn kept(&self) -> Vec<Envelope> {
        self.kept.lock().unwrap().clone()
    }

    /// The number of its batches.
    pub(super) fn calls(&self) -> usize {
        self.calls.load(Ordering::SeqCst)
    }
}

impl Broker for Script {
    fn declare(&self, _queues: Vec<Queue>) -> BoxFuture<'_, Result<()>> {
        Box::pin(std::future::ready(Ok(())))
    }

    fn publish(&self, batch: Vec<Envelope>, until: Uptime) -> BoxFuture<'_, Vec<Published>> {
        self.calls.fetch_add(1, Ordering::SeqCst);
        let answering = self.answering.lock().unwrap().clone();
        Box::pin(async move {
            let answers = answering(batch.clone(), until).await;
            let mut kept = self.kept.lock().unwrap();
            for (envelope, answer) in batch.into_iter().zip(&answers) {
                if *answer == Published::Confirmed {
                    kept.push(envelope);
                }
            }
            answers
        })
    }

    fn consume(&self, _queue: &str, _prefetch: u16) -> BoxFuture<'_, Result<Box<dyn Deliveries>>> {
        Box::pin(std::future::ready(Err(Error::Unavailable("nothing is delivered here".into()))))
    }

    fn health(&self) -> BrokerHealth {
        self.health.lock().unwrap().clone()
    }

    fn close(&self) -> BoxFuture<'_, ()> {
        Box::pin(std::future::ready(()))
    }
}

/// Delivers the test's messages, and records the answers.
pub(super) struct Feed {
    sender: mpsc::UnboundedSender<Delivery>,
    receiver: Arc<tokio::sync::Mutex<mpsc::UnboundedReceiver<Delivery>>>,
    words: Arc<Mutex<Vec<(String, Word)>>>,
}

/// The answer to a delivery.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Word {
    Acked,
    PutBack,
    /// It was dropped unanswered.
    Dropped,
}

impl Feed {
    pub(super) fn new() -> Arc<Self> {
        let (sender, receiver) = mpsc::unbounded_channel();
        Arc::new(Self { sender, receiver: Arc::new(tokio::sync::Mutex::new(receiver)), words: Arc::default() })
    }

    pub(super) fn deliver(&self, message: &Received) {
        self.give(message, false, false);
    }

    pub(super) fn deliver_again(&self, message: &Received) {
        self.give(message, true, false);
    }

    /// Delivers messages that another consumer has by the time this one receives them.
    pub(super) fn deliver_late(&self, message: &Received) {
        self.give(message, false, true);
    }

    fn give(&self, message: &Received, redelivered: bool, lost: bool) {
        let text = text(&message.body);
        let acknowledge = Box::new(Slip { text: Some(text), words: self.words.clone(), lost });
        let delivery = Delivery { message: message.clone(), redelivered, acknowledge };
        assert!(self.sender.send(delivery).is_ok());
    }

    /// The answers, sorted by text.
    pub(super) fn words(&self) -> Vec<(String, Word)> {
        let mut words = self.words.lock().unwrap().clone();
        words.sort();
        words
    }

    /// How many deliveries were acknowledged.
    pub(super) fn acked(&self) -> usize {
        self.words.lock().unwrap().iter().filter(|(_, word)| *word == Word::Acked).count()
    }
}

struct Slip {
    text: Option<String>,
    words: Arc<Mutex<Vec<(String, Word)>>>,
    lost: bool,
}

impl Slip {
    fn say(&mut self, word: Word) {
        if let Some(text) = self.text.take() {
            self.words.lock().unwrap().push((text, word));
        }
    }
}

impl Acknowledge for Slip {
    fn ack(mut self: Box<Self>) -> BoxFuture<'static, Result<()>> {
        Box::pin(async move {
            self.say(Word::Acked);
            Ok(())
        })
    }

    fn requeue(mut self: Box<Self>) -> BoxFuture<'static, Result<()>> {
        Box::pin(async move {
            self.say(Word::PutBack);
            Ok(())
        })
    }

    fn is_lost(&self) -> bool {
        self.lost
    }
}

impl Drop for Slip {
    fn drop(&mut self) {
        self.say(Word::Dropped);
    }
}

struct Handed(Arc<tokio::sync::Mutex<mpsc::UnboundedReceiver<Delivery>>>);

impl Deliveries for Handed {
    fn next(&mut self) -> BoxFuture<'_, Delivery> {
        Box::pin(async {
            match self.0.lock().await.recv().await {
                Some(delivery) => delivery,
                None => std::future::pending().await,
            }
        })
    }
}

impl Broker for Feed {
    fn declare(&self, _queues: Vec<Queue>) -> BoxFuture<'_, Result<()>> {
        Box::pin(std::future::ready(Ok(())))
    }

    fn publish(&self, batch: Vec<Envelope>, _until: Uptime) -> BoxFuture<'_, Vec<Published>> {
        Box::pin(std::future::ready(batch.iter().map(|_| Published::NotSent("nothing is taken here".into())).collect()))
    }

    fn consume(&self, _queue: &str, _prefetch: u16) -> BoxFuture<'_, Result<Box<dyn Deliveries>>> {
        let deliveries: Box<dyn Deliveries> = Box::new(Handed(self.receiver.clone()));
        Box::pin(std::future::ready(Ok(deliveries)))
    }

    fn health(&self) -> BrokerHealth {
        BrokerHealth::Up
    }

    fn close(&self) -> BoxFuture<'_, ()> {
        Box::pin(std::future::ready(()))
    }
}
