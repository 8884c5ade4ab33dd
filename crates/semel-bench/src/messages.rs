//! Messages: the relay next to a bare publisher, the latency of an idle relay, and events from end to end.

use std::{
    collections::HashMap,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result};
use parking_lot::Mutex;
use semel::{
    Ledger, Timestamp, Uptime,
    messaging::{
        BoxFuture, Broker, BrokerHealth, Deliveries, Envelope, Message, MessageId, Published, Queue, Relay,
        RelayOptions, Topic,
    },
    prelude::*,
};
use semel_amqp::Amqp;
use semel_store::Database;
use tokio::{sync::watch, task::JoinSet};

use crate::{
    Plan,
    load::Figure,
    report::{Report, Subject},
    site::{Backend, Site, close},
};

/// The outbox, emptied by the relay.
pub(crate) const RELAY: &str = "relay";
/// The same messages, published from memory: same client, same window, same size.
pub(crate) const BARE: &str = "bare publisher";
/// From a commit to the moment its message is handed to the client of the broker, on an idle relay.
pub(crate) const WAIT: &str = "commit to publish";

/// The body of a message: the size of a small JSON document.
const BODY: [u8; 256] = [b'm'; 256];

/// The number of messages for the idle relay, one after the other.
const WAITS: usize = 300;

pub(crate) async fn measure(plan: &Plan, backend: Backend, report: &mut Report) -> Result<()> {
    let url = plan.rabbitmq_url.as_deref().context("SEMEL_TEST_RABBITMQ_URL is not set; scripts/bench.sh sets it")?;
    let subject = |how| Subject { section: "messages", backend, how, tasks: 1 };
    let most = if plan.rounds == 1 { 10_000 } else { 30_000 };
    for round in 0..plan.rounds {
        let site = Site::fresh(plan, backend).await?;
        let ledger = site.ledger(true).await?;
        let broker = Watched::new(Arc::new(Amqp::connect(url, semel_amqp::Options::default())?));
        let topic = Topic::new(&format!("bench.{backend}.{round}.{:08x}", fastrand::u32(..)))?;
        declare(&broker, &topic).await?;
        if plan.wants(BARE, 1) {
            report.add(subject(BARE), bare(&site, &broker, &topic, most).await?);
        }
        if plan.wants(RELAY, 1) {
            report.add(subject(RELAY), relay(&site, &ledger, &broker, &topic, most).await?);
        }
        if plan.wants(WAIT, 1) {
            report.add(subject(WAIT), wait(&site, &ledger, &broker, &topic).await?);
        }
        broker.close().await;
        close(ledger).await;
        site.remove().await?;
    }
    Ok(())
}

/// A server that has just dropped much data may be slow.
async fn declare(broker: &Watched, topic: &Topic) -> Result<()> {
    let patience = Instant::now() + Duration::from_secs(60);
    loop {
        match broker.declare(vec![Queue::new(topic.as_str())]).await {
            Err(error) if error.is_transient() && Instant::now() < patience => {
                tokio::time::sleep(Duration::from_millis(200)).await;
            }
            done => return Ok(done?),
        }
    }
}

fn message(topic: &Topic) -> Message {
    Message::new("bench", topic.clone(), "bench", &BODY[..])
}

/// Publishes from memory, with as many batches in flight as a relay has.
async fn bare(site: &Site, broker: &Arc<Watched>, topic: &Topic, most: usize) -> Result<Figure> {
    let RelayOptions { batch, in_flight, .. } = RelayOptions::default();
    let made: Vec<_> = (0..most)
        .map(|_| Envelope { message: message(topic), number: None, put_at: Timestamp::from_micros(0) })
        .collect();
    let mut batches = made.chunks(batch as usize).map(<[_]>::to_vec).collect::<Vec<_>>().into_iter();
    let (cpu, begun) = (site.cpu.used(), Instant::now());
    let mut flying = JoinSet::new();
    let mut confirmed = 0;
    loop {
        while flying.len() < in_flight
            && let Some(batch) = batches.next()
        {
            let broker = broker.clone();
            flying.spawn(async move { broker.publish(batch, Uptime::now() + Duration::from_secs(30)).await });
        }
        let Some(done) = flying.join_next().await else { break };
        confirmed += done?.iter().filter(|published| **published == Published::Confirmed).count();
    }
    anyhow::ensure!(confirmed == most, "only {confirmed} of {most} messages were confirmed");
    Ok(figure(most, begun.elapsed(), site.cpu.used() - cpu))
}

/// Fills the outbox, and lets a relay empty it.
async fn relay(
    site: &Site,
    ledger: &Ledger<Database>,
    broker: &Arc<Watched>,
    topic: &Topic,
    most: usize,
) -> Result<Figure> {
    for _ in 0..most / 500 {
        put(ledger, (0..500).map(|_| message(topic)).collect()).await?;
    }
    let (stop, stopped) = watch::channel(false);
    broker.confirmed.store(0, Ordering::Relaxed);
    let (cpu, begun) = (site.cpu.used(), Instant::now());
    let relay = tokio::spawn(Relay::new(ledger.store().clone(), broker.clone(), RelayOptions::default()).run(stopped));
    while broker.confirmed.load(Ordering::Relaxed) < most {
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
    while ledger.store().backlog().await?.counts.iter().any(|(_, n)| *n > 0) {
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
    let done = figure(most, begun.elapsed(), site.cpu.used() - cpu);
    stop.send_replace(true);
    relay.await?;
    Ok(done)
}

/// Puts one message after the other, and measures how long each waits.
async fn wait(site: &Site, ledger: &Ledger<Database>, broker: &Arc<Watched>, topic: &Topic) -> Result<Figure> {
    let (stop, stopped) = watch::channel(false);
    let relay = tokio::spawn(Relay::new(ledger.store().clone(), broker.clone(), RelayOptions::default()).run(stopped));
    tokio::time::sleep(Duration::from_millis(200)).await;
    let mut committed = Vec::new();
    let (cpu, begun) = (site.cpu.used(), Instant::now());
    for _ in 0..WAITS {
        let message = message(topic);
        let id = message.id;
        put(ledger, vec![message]).await?;
        committed.push((id, Instant::now()));
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    let used = site.cpu.used() - cpu;
    let window = begun.elapsed();
    tokio::time::sleep(Duration::from_millis(500)).await;
    stop.send_replace(true);
    relay.await?;
    let seen = broker.seen.lock();
    // It may be published before its own caller knows that it is committed.
    let waited = committed.iter().map(|(id, at)| Some(seen.get(id)?.saturating_duration_since(*at)));
    let waited = waited.collect::<Option<Vec<_>>>().context("a message was never published")?;
    Ok(Figure::new(waited, window, used))
}

async fn put(ledger: &Ledger<Database>, messages: Vec<Message>) -> Result<()> {
    let store = ledger.store().clone();
    Ok(ledger.transact(move |tx| async move { store.put(&tx, messages).await }).await?)
}

fn figure(n: usize, window: Duration, cpu: Duration) -> Figure {
    let n = n as f64;
    Figure { rate: n / window.as_secs_f64(), p50: f64::NAN, p99: f64::NAN, per_cpu: n / cpu.as_secs_f64() }
}

/// A broker wrapper that records the time of each message, and the number of confirmations.
struct Watched {
    inner: Arc<dyn Broker>,
    seen: Mutex<HashMap<MessageId, Instant>>,
    confirmed: AtomicUsize,
}

impl Watched {
    fn new(inner: Arc<dyn Broker>) -> Arc<Self> {
        Arc::new(Self { inner, seen: Mutex::default(), confirmed: AtomicUsize::new(0) })
    }
}

impl Broker for Watched {
    fn declare(&self, queues: Vec<Queue>) -> BoxFuture<'_, semel::Result<()>> {
        self.inner.declare(queues)
    }

    fn publish(&self, batch: Vec<Envelope>, until: Uptime) -> BoxFuture<'_, Vec<Published>> {
        let now = Instant::now();
        let mut seen = self.seen.lock();
        // Only if single messages are measured; with thousands it would measure the map.
        if batch.len() < 16 {
            seen.extend(batch.iter().map(|envelope| (envelope.message.id, now)));
        }
        drop(seen);
        Box::pin(async move {
            let published = self.inner.publish(batch, until).await;
            let confirmed = published.iter().filter(|published| **published == Published::Confirmed).count();
            self.confirmed.fetch_add(confirmed, Ordering::Relaxed);
            published
        })
    }

    fn consume(&self, queue: &str, prefetch: u16) -> BoxFuture<'_, semel::Result<Box<dyn Deliveries>>> {
        self.inner.consume(queue, prefetch)
    }

    fn health(&self) -> BrokerHealth {
        self.inner.health()
    }

    fn close(&self) -> BoxFuture<'_, ()> {
        self.inner.close()
    }
}
