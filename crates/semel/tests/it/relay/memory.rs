//! An outbox in memory that records its calls, and a scripted broker.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, MutexGuard},
    time::Duration,
};

use semel::{
    Error, Result, Timestamp, Uptime,
    messaging::{
        BoxFuture, Broker, BrokerHealth, Deliveries, Envelope, Lent, Mark, MarkRow, Message, Published, Queue,
        RelayStore, Taken, Tended, Topic, Wake,
    },
    store::TimeSource,
};
use tokio::sync::Semaphore;

/// An outbox whose leases never expire: there is one relay, and it does not die.
#[derive(Clone)]
pub(super) struct Memory {
    state: Arc<Mutex<State>>,
    wake: Wake,
    /// Marks wait here while the test has closed it.
    pub(super) marking: Arc<Semaphore>,
}

#[derive(Default)]
pub(super) struct State {
    ready: BTreeMap<i64, Message>,
    leased: BTreeMap<i64, (i64, Message)>,
    pub(super) marked: Vec<Vec<MarkRow>>,
    pub(super) takes: Vec<u32>,
    /// How many rows each renewal was for.
    pub(super) holds: Vec<usize>,
    pub(super) tends: usize,
    /// How many of the next marks are refused, and whether that is transient.
    pub(super) refuse_marks: usize,
    /// Marks with this row are refused for good.
    pub(super) bad_row: Option<i64>,
    next: i64,
}

impl Memory {
    pub(super) fn new() -> Self {
        Self { state: Arc::default(), wake: Wake::default(), marking: Arc::new(Semaphore::new(1)) }
    }

    pub(super) fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap()
    }

    /// Puts messages, and wakes the relay.
    pub(super) fn fill(&self, n: usize) {
        let topic = Topic::new("orders").unwrap();
        let mut state = self.state();
        for _ in 0..n {
            state.next += 1;
            let next = state.next;
            state.ready.insert(next, Message::new("acme", topic.clone(), "test", next.to_string()));
        }
        drop(state);
        self.wake.wake();
    }

    /// All marks, in the order in which they were made.
    pub(super) fn marks(&self) -> Vec<(i64, Mark)> {
        self.state().marked.iter().flatten().map(|row| (row.id, row.mark.clone())).collect()
    }

    pub(super) fn sent(&self) -> usize {
        self.marks().iter().filter(|(_, mark)| *mark == Mark::Sent).count()
    }
}

impl RelayStore for Memory {
    async fn take(&self, limit: u32, _lease: Duration) -> Result<Taken> {
        let mut state = self.state();
        state.takes.push(limit);
        state.next += 1;
        let token = state.next;
        let mut rows = Vec::new();
        while rows.len() < limit as usize
            && let Some((id, message)) = state.ready.pop_first()
        {
            state.leased.insert(id, (token, message.clone()));
            let envelope = Envelope { message, number: None, put_at: Timestamp::from_micros(1) };
            rows.push(Lent { id, failures: 0, envelope });
        }
        Ok(Taken { more: rows.len() >= limit as usize, rows, token })
    }

    async fn hold(&self, rows: Vec<(i64, i64)>, _lease: Duration) -> Result<Vec<i64>> {
        let mut state = self.state();
        state.holds.push(rows.len());
        let is_ours = |(id, token): &&(i64, i64)| state.leased.get(id).is_some_and(|(held, _)| held == token);
        Ok(rows.iter().filter(is_ours).map(|(id, _)| *id).collect())
    }

    async fn mark(&self, marks: Vec<MarkRow>) -> Result<u64> {
        drop(self.marking.acquire().await);
        let mut state = self.state();
        if state.refuse_marks > 0 {
            state.refuse_marks -= 1;
            return Err(Error::Unavailable("not now".into()));
        }
        if marks.iter().any(|row| Some(row.id) == state.bad_row) {
            return Err(Error::Refused("this row".into()));
        }
        for row in &marks {
            let Some((token, message)) = state.leased.remove(&row.id) else { continue };
            assert_eq!(token, row.token);
            if row.mark != Mark::Sent {
                state.ready.insert(row.id, message);
            }
        }
        state.marked.push(marks);
        Ok(0)
    }

    async fn tend(&self) -> Result<Tended> {
        self.state().tends += 1;
        Ok(Tended::default())
    }

    fn outbox_wake(&self) -> Wake {
        self.wake.clone()
    }
}

impl TimeSource for Memory {
    async fn now(&self) -> Result<Timestamp> {
        Ok(Timestamp::from_micros(1))
    }
}

type Answering = dyn Fn(usize, Vec<Envelope>, Uptime) -> BoxFuture<'static, Vec<Published>> + Send + Sync;

/// Answers the n-th batch by the test's script.
pub(super) struct Script {
    answering: Box<Answering>,
    pub(super) calls: Mutex<usize>,
    pub(super) health: Mutex<BrokerHealth>,
}

impl Script {
    pub(super) fn new<F: Future<Output = Vec<Published>> + Send + 'static>(
        answering: impl Fn(usize, Vec<Envelope>, Uptime) -> F + Send + Sync + 'static,
    ) -> Arc<Self> {
        let answering = Box::new(move |n, batch, until| -> BoxFuture<'static, Vec<Published>> {
            Box::pin(answering(n, batch, until))
        });
        Arc::new(Self { answering, calls: Mutex::default(), health: Mutex::new(BrokerHealth::Up) })
    }
}

impl Broker for Script {
    fn declare(&self, _queues: Vec<Queue>) -> BoxFuture<'_, Result<()>> {
        Box::pin(async { Ok(()) })
    }

    fn publish(&self, batch: Vec<Envelope>, until: Uptime) -> BoxFuture<'_, Vec<Published>> {
        let mut calls = self.calls.lock().unwrap();
        *calls += 1;
        (self.answering)(*calls, batch, until)
    }

    fn consume(&self, _queue: &str, _prefetch: u16) -> BoxFuture<'_, Result<Box<dyn Deliveries>>> {
        Box::pin(async { Err(Error::Refused("a relay consumes nothing".into())) })
    }

    fn health(&self) -> BrokerHealth {
        self.health.lock().unwrap().clone()
    }

    fn close(&self) -> BoxFuture<'_, ()> {
        Box::pin(async {})
    }
}
