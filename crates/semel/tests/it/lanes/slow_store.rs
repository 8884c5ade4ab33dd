//! A slow store, and what its callers observe.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, MutexGuard},
};

use semel::{
    Result,
    lane::{Lane, Limits, lane},
};
use shuttle::future::{JoinHandle, spawn, yield_now};
use tokio::sync::Semaphore;

pub(super) const LIMITS: Limits = Limits { calls: 3, bytes: 10, queue: 4, regroup: false, alongside: usize::MAX };

/// As these, but two calls are enough for a second flight.
pub(super) const TWO_FLIGHTS: Limits = Limits { alongside: 2, ..LIMITS };

/// A call: its caller, and its bytes.
pub(super) type Call = (u32, usize);

/// The store's answer to a batch.
pub(super) type Judge = fn(nth: usize, batch: &[Call]) -> Result<Vec<u32>>;

/// The record of a store.
#[derive(Default)]
pub(super) struct Seen {
    pub(super) in_flight: usize,
    /// The batches, including refused ones.
    pub(super) batches: Vec<Vec<Call>>,
    /// How often each call has become durable.
    pub(super) durable: HashMap<u32, u32>,
    /// In which order.
    pub(super) made: Vec<u32>,
    /// The first batch of each call.
    pub(super) batch_of: HashMap<u32, usize>,
}

/// A slow store.
#[derive(Clone)]
pub(super) struct SlowStore {
    seen: Arc<Mutex<Seen>>,
    judge: Judge,
    /// How many batches may be in flight.
    flights: usize,
    /// Signals that a batch has begun, and holds it until it may end.
    gates: Option<(Arc<Semaphore>, Arc<Semaphore>)>,
}

impl SlowStore {
    pub(super) fn new(judge: Judge) -> Self {
        Self { seen: Arc::default(), judge, flights: 1, gates: None }
    }

    pub(super) fn with_gates(began: Arc<Semaphore>, may_end: Arc<Semaphore>) -> Self {
        Self { gates: Some((began, may_end)), ..Self::new(always) }
    }

    pub(super) fn seen(&self) -> MutexGuard<'_, Seen> {
        self.seen.lock().expect("no holder panicked")
    }

    async fn flush(self, batch: Vec<Call>) -> Result<Vec<u32>> {
        let nth = self.begin(&batch);
        if let Some((began, may_end)) = &self.gates {
            began.add_permits(1);
            may_end.acquire().await.expect("never closed").forget();
        }
        for _ in 0..2 {
            yield_now().await;
        }
        let answers = (self.judge)(nth, &batch);
        let mut seen = self.seen();
        seen.in_flight -= 1;
        if answers.is_ok() {
            for (who, _) in batch {
                *seen.durable.entry(who).or_default() += 1;
                seen.made.push(who);
            }
        }
        answers
    }

    fn begin(&self, batch: &[Call]) -> usize {
        let mut seen = self.seen();
        seen.in_flight += 1;
        assert!(seen.in_flight <= self.flights, "{} batches at a time", seen.in_flight);
        let bytes: usize = batch.iter().map(|(_, bytes)| bytes).sum();
        assert!((1..=LIMITS.calls).contains(&batch.len()), "too many calls: {batch:?}");
        assert!(bytes <= LIMITS.bytes || batch.len() == 1, "too many bytes: {batch:?}");
        let nth = seen.batches.len();
        seen.batches.push(batch.to_vec());
        for (who, _) in batch {
            seen.batch_of.entry(*who).or_insert(nth);
        }
        nth
    }

    pub(super) fn open(&self, limits: Limits) -> (Lane<Call, u32>, JoinHandle<()>) {
        let store = Self { flights: if limits.alongside == usize::MAX { 1 } else { 2 }, ..self.clone() };
        let (lane, task) = lane(limits, move |batch| store.clone().flush(batch));
        (lane, spawn(task))
    }
}

/// Each answer is derived from its caller.
pub(super) fn answer(who: u32) -> u32 {
    who * 100 + 7
}

pub(super) fn always(_: usize, batch: &[Call]) -> Result<Vec<u32>> {
    Ok(batch.iter().map(|(who, _)| answer(*who)).collect())
}

/// Concurrent calls.
pub(super) fn spawn_all(
    lane: &Lane<Call, u32>,
    store: &SlowStore,
    calls: &[Call],
) -> Vec<(u32, JoinHandle<Result<u32>>)> {
    let call = |&(who, bytes): &Call| {
        let (lane, store) = (lane.clone(), store.clone());
        let caller = spawn(async move {
            let got = lane.call((who, bytes), bytes).await;
            if got.is_ok() {
                assert_eq!(store.seen().durable.get(&who), Some(&1), "{who} was answered before it was durable");
            }
            got
        });
        (who, caller)
    };
    calls.iter().map(call).collect()
}

/// The answer of each caller.
pub(super) async fn wait_for(callers: Vec<(u32, JoinHandle<Result<u32>>)>) -> Vec<(u32, Result<u32>)> {
    let mut got = Vec::new();
    for (who, caller) in callers {
        got.push((who, caller.await.expect("a caller ends")));
    }
    got
}

pub(super) async fn call_all(lane: &Lane<Call, u32>, store: &SlowStore, calls: &[Call]) -> Vec<(u32, Result<u32>)> {
    wait_for(spawn_all(lane, store, calls)).await
}
