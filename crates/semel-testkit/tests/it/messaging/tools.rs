//! Helpers of these tests.

use std::{
    collections::BTreeMap,
    sync::{
        Arc, Mutex,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use bytes::Bytes;
use semel::{
    Backoff, Fence, Ledger, Options,
    messaging::{
        BoxFuture, Broker, Consumer, ConsumerOptions, ConsumerStore, DeadLetter, Handler, LetterFilter, Message,
        MessageId, OutboxFilter, OutboxRow, Received, Refusal, Relay, RelayOptions, RelayStore, Topic,
    },
    prelude::*,
    store::Commit,
    store::Transactions,
};
use semel_store::{Database, Tx};
use semel_testkit::{
    Kind, Lab,
    faults::{effect_rows, make_effect_table, take_in},
};
use tokio::{
    sync::{Notify, Semaphore, watch},
    task::JoinHandle,
};

pub(super) const TENANT: &str = "acme";
pub(super) const QUEUE: &str = "orders";
pub(super) const CONSUMER: &str = "books";

/// Awaits something that must happen soon. A broken law fails instead of hanging.
pub(super) async fn soon<T>(what: impl Future<Output = T>) -> T {
    tokio::time::timeout(Duration::from_secs(60), what).await.expect("this should have happened long ago")
}

/// Polls until it is true.
pub(super) async fn eventually(mut is_so: impl AsyncFnMut() -> bool) {
    soon(async {
        while !is_so().await {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    })
    .await;
}

/// A database with an outbox and effects.
pub(super) struct Place {
    pub(super) lab: Lab,
    pub(super) db: Database,
}

impl Place {
    /// With a manual clock.
    pub(super) async fn new(kind: Kind) -> Self {
        Self::of(Lab::new(kind).await).await
    }

    pub(super) async fn in_real_time(kind: Kind) -> Self {
        Self::of(Lab::in_real_time(kind).await).await
    }

    async fn of(lab: Lab) -> Self {
        let db = lab.open().await;
        make_effect_table(&db).await;
        Self { lab, db }
    }

    /// Puts messages, in one transaction.
    pub(super) async fn put(&self, messages: Vec<Message>) {
        let tx = self.db.begin(Duration::from_secs(5)).await.unwrap();
        self.db.put(&tx, messages).await.unwrap();
        assert!(matches!(self.db.commit(&tx).await, Commit::Done));
    }

    /// The rows of the outbox.
    pub(super) async fn outbox(&self) -> Vec<OutboxRow> {
        let filter = OutboxFilter { tenant: TENANT.into(), ..OutboxFilter::default() };
        let (mut rows, mut after) = (Vec::new(), None);
        loop {
            let page = self.db.outbox(&filter, after, 500).await.unwrap();
            rows.extend(page.items);
            after = page.next;
            if after.is_none() {
                return rows;
            }
        }
    }

    pub(super) async fn until_outbox_is_empty(&self) {
        eventually(async || self.outbox().await.is_empty()).await;
    }

    /// The dead letters.
    pub(super) async fn letters(&self) -> Vec<DeadLetter> {
        let filter = LetterFilter { tenant: TENANT.into(), ..LetterFilter::default() };
        self.db.letters(&filter, None, 500).await.unwrap().items
    }

    /// How often each message took effect.
    pub(super) async fn effects(&self) -> BTreeMap<String, i64> {
        effect_rows(&self.db).await
    }

    /// Waits until there are this many effects, of this many messages.
    pub(super) async fn until_effects(&self, n: usize) {
        eventually(async || self.effects().await.len() >= n).await;
    }

    /// A relay on a given store.
    pub(super) async fn relay(&self, broker: &Arc<impl Broker>, options: RelayOptions) -> Running {
        relay(self.lab.open().await, broker, options)
    }

    /// A consumer on a given store.
    pub(super) async fn consumer(&self, broker: &Arc<impl Broker>, books: &Books, options: ConsumerOptions) -> Running {
        consumer(self.lab.open().await, broker, books, options)
    }
}

pub(super) fn relay<S: RelayStore>(store: S, broker: &Arc<impl Broker>, options: RelayOptions) -> Running {
    let broker: Arc<dyn Broker> = broker.clone();
    Running::start(|stop| Relay::new(store, broker, options).run(stop))
}

pub(super) fn consumer<S: ConsumerStore<Tx = Tx>>(
    store: S,
    broker: &Arc<impl Broker>,
    books: &Books,
    options: ConsumerOptions,
) -> Running {
    let broker: Arc<dyn Broker> = broker.clone();
    let ledger = Ledger::new(store, Options::default()).unwrap();
    let books = books.clone();
    Running::start(|stop| Consumer::new(ledger, broker, CONSUMER, QUEUE, books, options).run(stop))
}

/// Something that runs until it is stopped.
pub(super) struct Running {
    stop: watch::Sender<bool>,
    task: JoinHandle<()>,
}

impl Running {
    fn start<F: Future<Output = ()> + Send + 'static>(run: impl FnOnce(watch::Receiver<bool>) -> F) -> Self {
        let (stop, stopped) = watch::channel(false);
        Self { stop, task: tokio::spawn(run(stopped)) }
    }

    pub(super) fn ask_to_stop(&self) {
        self.stop.send_replace(true);
    }

    pub(super) fn has_ended(&self) -> bool {
        self.task.is_finished()
    }

    pub(super) async fn stop(self) {
        self.ask_to_stop();
        soon(self.task).await.unwrap();
    }
}

/// A message whose body is this text.
pub(super) fn message(text: &str) -> Message {
    Message::new(TENANT, Topic::new(QUEUE).unwrap(), "test", text.to_owned())
}

pub(super) fn messages(n: usize) -> Vec<Message> {
    (0..n).map(|n| message(&format!("m{n}"))).collect()
}

pub(super) fn keyed(key: &str, text: &str) -> Message {
    Message { ordering_key: Some(key.into()), ..message(text) }
}

/// The text of a body.
pub(super) fn text(body: &Bytes) -> String {
    String::from_utf8(body.to_vec()).unwrap()
}

/// A message as a broker delivers it.
pub(super) fn received(text: &str) -> Received {
    Received {
        id: Some(MessageId::new().to_string()),
        tenant: Some(TENANT.into()),
        queue: QUEUE.into(),
        kind: "test".into(),
        body: Bytes::from(text.to_owned()),
        headers: BTreeMap::new(),
        number: None,
        put_at: None,
        origin: None,
    }
}

/// Polls often, waits little.
pub(super) fn quick_relay() -> RelayOptions {
    RelayOptions {
        poll: Duration::from_millis(20),
        backoff: Backoff { first: Duration::from_secs(1), cap: Duration::from_secs(60) },
        ..RelayOptions::default()
    }
}

pub(super) fn quick_consumer() -> ConsumerOptions {
    ConsumerOptions { backoff: Backoff::NONE, ..ConsumerOptions::default() }
}

type Behaviour = dyn Fn(String, usize) -> BoxFuture<'static, Result<(), Refusal>> + Send + Sync;

/// A handler that records its calls: a row in the transaction, and a count beside it.
#[derive(Clone)]
pub(super) struct Books {
    behaviour: Arc<Behaviour>,
    entered: Arc<Mutex<BTreeMap<String, usize>>>,
    committed: Arc<AtomicUsize>,
}

impl Books {
    /// One that always succeeds.
    pub(super) fn new() -> Self {
        Self::that(|_, _| async { Ok(()) })
    }

    /// One that, after its write, does this: with the text and the number of the run, from 1.
    pub(super) fn that<F: Future<Output = Result<(), Refusal>> + Send + 'static>(
        behaviour: impl Fn(String, usize) -> F + Send + Sync + 'static,
    ) -> Self {
        let behaviour = Arc::new(move |text: String, run: usize| -> BoxFuture<'static, Result<(), Refusal>> {
            Box::pin(behaviour(text, run))
        });
        Self { behaviour, entered: Arc::default(), committed: Arc::default() }
    }

    /// One that, after its write, signals and waits until the semaphore is closed.
    pub(super) fn that_wait() -> (Self, Arc<Notify>, Arc<Semaphore>) {
        let (entered, gate) = (Arc::new(Notify::new()), Arc::new(Semaphore::new(0)));
        let (says, waits) = (entered.clone(), gate.clone());
        let books = Self::that(move |_, _| {
            let (says, waits) = (says.clone(), waits.clone());
            async move {
                says.notify_one();
                drop(waits.acquire().await);
                Ok(())
            }
        });
        (books, entered, gate)
    }

    /// How often the handler was called with a text.
    pub(super) fn entered(&self, text: &str) -> usize {
        self.entered.lock().unwrap().get(text).copied().unwrap_or(0)
    }

    pub(super) fn all_entered(&self) -> usize {
        self.entered.lock().unwrap().values().sum()
    }

    /// How often its after-commit hook was called.
    pub(super) fn committed(&self) -> usize {
        self.committed.load(Ordering::SeqCst)
    }
}

impl<S: Transactions<Tx = Tx>> Handler<S> for Books {
    fn handle<'a>(&'a self, message: &'a Received, tx: &'a Tx) -> BoxFuture<'a, Result<(), Refusal>> {
        Box::pin(async move {
            let text = text(&message.body);
            let run = {
                let mut entered = self.entered.lock().unwrap();
                let runs = entered.entry(text.clone()).or_default();
                *runs += 1;
                *runs
            };
            take_in(tx, &text, Fence(0)).await.map_err(Refusal::retry)?;
            (self.behaviour)(text, run).await
        })
    }

    fn committed(&self, _message: &Received) {
        self.committed.fetch_add(1, Ordering::SeqCst);
    }
}
