//! A broker in the same database: no other server is needed.

use std::{
    collections::HashSet,
    sync::{Arc, OnceLock},
    time::Duration,
};

use parking_lot::Mutex;
use semel::{
    Error, Result, Uptime, crash_point,
    lane::{Lane, Limits, guarded, lane},
    messaging::{BoxFuture, Broker, BrokerHealth, Deliveries, Envelope, Published, Queue},
};

use super::{
    deliveries::{Embedded, House, Leaving},
    queue::VISIBILITY,
    unacked::Keeper,
};
use crate::Database;

/// A broker whose queues are rows of the database. Cheap to clone.
#[derive(Clone)]
pub struct EmbeddedBroker(Arc<Shared>);

struct Shared {
    store: Database,
    /// How long a message is leased to its consumer, which renews it while it has it.
    lease: Duration,
    /// Known queues; none is ever removed.
    known: Mutex<HashSet<String>>,
    /// The error of the last statement, if it failed.
    down: Arc<Mutex<Option<String>>>,
    /// The lane of acknowledgements: concurrent ones share a statement.
    said: OnceLock<Lane<Said, bool>>,
    leaving: Arc<Leaving>,
    /// Renews the messages of consumers.
    keeper: OnceLock<Arc<Keeper>>,
}

/// The answer to a delivery.
#[derive(Clone, Copy, Debug)]
pub(super) enum Said {
    /// Acknowledged.
    Done { id: i64, token: i64 },
    /// Returned: it was not begun.
    NotBegun { id: i64, token: i64 },
}

impl EmbeddedBroker {
    /// The broker in this database.
    #[must_use]
    pub fn new(store: Database) -> Self {
        Self::with_lease(store, VISIBILITY)
    }

    /// The broker in this database. A message whose consumer died is delivered to another one after `lease`; a live
    /// consumer renews its messages.
    #[must_use]
    pub fn with_lease(store: Database, lease: Duration) -> Self {
        let lease = lease.max(Duration::from_millis(100));
        let (known, down, said, leaving) = (Mutex::default(), Arc::default(), OnceLock::new(), Arc::default());
        Self(Arc::new(Shared { store, lease, known, down, said, leaving, keeper: OnceLock::new() }))
    }

    /// Which of these topics have a queue.
    async fn routed(&self, batch: &[Envelope]) -> Result<HashSet<String>> {
        let topics: HashSet<&str> = batch.iter().map(|envelope| envelope.message.topic.as_str()).collect();
        let (known, unknown): (Vec<&str>, Vec<&str>) = {
            let known = self.0.known.lock();
            topics.into_iter().partition(|topic| known.contains(*topic))
        };
        let mut there: HashSet<String> = known.into_iter().map(str::to_owned).collect();
        if !unknown.is_empty() {
            let found = self.0.store.find_queues(&unknown).await?;
            self.0.known.lock().extend(found.iter().cloned());
            there.extend(found);
        }
        Ok(there)
    }

    async fn publish_all(&self, batch: Vec<Envelope>, until: Uptime) -> Vec<Published> {
        let there = match self.routed(&batch).await {
            Ok(there) => there,
            Err(error) => {
                self.note(Some(error.to_string()));
                return batch.iter().map(|_| Published::NotSent(error.to_string())).collect();
            }
        };
        let is_routed = |envelope: &Envelope| there.contains(envelope.message.topic.as_str());
        let mut answers: Vec<Option<Published>> = batch
            .iter()
            .map(|envelope| {
                let missing = || Published::Unroutable(format!("there is no queue {}", envelope.message.topic));
                (!is_routed(envelope)).then(missing)
            })
            .collect();
        let routed: Vec<Envelope> = batch.into_iter().filter(is_routed).collect();
        let mut said = self.publish_routed(&routed, until).await.into_iter();
        for answer in &mut answers {
            if answer.is_none() {
                *answer = said.next();
            }
        }
        answers.into_iter().map(|answer| answer.unwrap_or(Published::NotSent("not tried".into()))).collect()
    }

    /// One statement for all. If it is refused, one for each: only the offending one is refused.
    async fn publish_routed(&self, batch: &[Envelope], until: Uptime) -> Vec<Published> {
        if batch.is_empty() {
            return Vec::new();
        }
        let sent = self.0.store.publish_rows(batch, until).await;
        self.note(match &sent {
            Published::NotSent(why) | Published::Unknown(why) => Some(why.clone()),
            _ => None,
        });
        if batch.len() == 1 || !matches!(sent, Published::Refused(_)) {
            return vec![sent; batch.len()];
        }
        let mut each = Vec::with_capacity(batch.len());
        for envelope in batch {
            each.push(self.0.store.publish_rows(std::slice::from_ref(envelope), until).await);
        }
        each
    }

    fn note(&self, down: Option<String>) {
        *self.0.down.lock() = down;
    }

    /// The lane of acknowledgements; its task starts with the first consumer.
    fn said(&self) -> Lane<Said, bool> {
        let begin = || {
            let store = self.0.store.clone();
            let (said, serve) = lane(Limits::default(), move |batch: Vec<Said>| {
                let store = store.clone();
                guarded(async move { say(&store, &batch).await })
            });
            tokio::spawn(serve);
            said
        };
        self.0.said.get_or_init(begin).clone()
    }

    /// The task that renews starts with the first consumer, too.
    fn keeper(&self) -> Arc<Keeper> {
        let begin = || {
            let keeper = Arc::<Keeper>::default();
            tokio::spawn(Keeper::work(Arc::downgrade(&keeper), self.0.store.clone(), self.0.lease));
            keeper
        };
        self.0.keeper.get_or_init(begin).clone()
    }
}

/// Stores acknowledgements; returns for each whether the consumer still held the message.
async fn say(store: &Database, batch: &[Said]) -> Result<Vec<bool>> {
    crash_point!("queue.said");
    let (mut done, mut back) = (Vec::new(), Vec::new());
    for said in batch {
        match *said {
            Said::Done { id, token } => done.push((id, token)),
            Said::NotBegun { id, token } => back.push((id, token, true)),
        }
    }
    let mut ours = HashSet::new();
    if !done.is_empty() {
        ours.extend(store.acknowledge_rows(&done).await?);
    }
    if !back.is_empty() {
        ours.extend(store.requeue_rows(&back).await?);
    }
    let is_ours = |said: &Said| match said {
        Said::Done { id, .. } | Said::NotBegun { id, .. } => ours.contains(id),
    };
    Ok(batch.iter().map(is_ours).collect())
}

impl Broker for EmbeddedBroker {
    fn declare(&self, queues: Vec<Queue>) -> BoxFuture<'_, Result<()>> {
        Box::pin(async move { self.0.store.declare_queues(&queues).await })
    }

    fn publish(&self, batch: Vec<Envelope>, until: Uptime) -> BoxFuture<'_, Vec<Published>> {
        Box::pin(self.publish_all(batch, until))
    }

    fn consume(&self, queue: &str, prefetch: u16) -> BoxFuture<'_, Result<Box<dyn Deliveries>>> {
        let queue = queue.to_owned();
        Box::pin(async move {
            let found = self.0.store.find_queues(&[&queue]).await;
            self.note(found.as_ref().err().map(ToString::to_string));
            if found?.is_empty() {
                return Err(Error::Unavailable(format!("there is no queue {queue} yet")));
            }
            let house = House {
                store: self.0.store.clone(),
                lease: self.0.lease,
                said: self.said(),
                down: self.0.down.clone(),
                leaving: self.0.leaving.clone(),
                keeper: self.keeper(),
            };
            Ok(Box::new(Embedded::begin(house, queue, prefetch)) as Box<dyn Deliveries>)
        })
    }

    fn health(&self) -> BrokerHealth {
        match &*self.0.down.lock() {
            None => BrokerHealth::Up,
            Some(why) => BrokerHealth::Down(why.clone()),
        }
    }

    fn close(&self) -> BoxFuture<'_, ()> {
        // There is no connection to close; but the messages of consumers are returned for others.
        Box::pin(self.0.leaving.ended())
    }
}
