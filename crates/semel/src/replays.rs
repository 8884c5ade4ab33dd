//! Replays from memory.
//!
//! Only operations that cannot change any more are cached: pinned and completed ones, until they expire or are
//! archived, if this node has completed or replayed them. The node measures that time by its boot clock, from before
//! its request, less a tenth: it evicts early, and asks again. The cache is bounded in bytes and keeps the most
//! requested entries.

use std::{hash::Hash, sync::Arc};

use quick_cache::{
    DefaultHashBuilder, Equivalent, OptionsBuilder, Weighter,
    sync::{Cache, DefaultLifecycle},
};

use crate::{
    Key, Operation, Outcome, Result, Scope, Timestamp, Uptime,
    claim::Claim,
    machine::{self, Event, Next, Request, Write, step},
    store::Applied,
};

/// The approximate size of an entry beside its payload and outcome.
const ENTRY: usize = 1024;

/// The number of shards, each with its own lock. An entry must fit into a shard; at the default size a shard has room
/// for several answers of a MiB.
const PARTS: usize = 16;

pub(crate) struct Replays {
    /// `None` if the cache is off.
    cache: Option<Cache<(Scope, Key), Remembered, Bytes>>,
}

#[derive(Clone)]
struct Remembered {
    operation: Arc<Operation>,
    /// The database's time when it was read.
    read_at: Timestamp,
    /// When to evict it; `None` is never.
    until: Option<Uptime>,
}

/// A borrowed cache key: a look-up does not allocate.
#[derive(Hash)]
struct Place<'a>(&'a Scope, &'a Key);

impl Equivalent<(Scope, Key)> for Place<'_> {
    fn equivalent(&self, (scope, key): &(Scope, Key)) -> bool {
        (self.0, self.1) == (scope, key)
    }
}

#[derive(Clone)]
struct Bytes;

impl Weighter<(Scope, Key), Remembered> for Bytes {
    fn weight(&self, _: &(Scope, Key), remembered: &Remembered) -> u64 {
        let Operation { payload, outcome, .. } = &*remembered.operation;
        let payload = payload.as_ref().map_or(0, bytes::Bytes::len);
        let outcome = outcome.as_ref().map_or(0, |outcome| outcome.body.len());
        (ENTRY + payload + outcome) as u64
    }
}

impl Replays {
    pub(crate) fn new(bytes: u64) -> Self {
        let entries = usize::try_from(bytes).unwrap_or(usize::MAX) / ENTRY;
        let options =
            OptionsBuilder::new().shards(PARTS).estimated_items_capacity(entries).weight_capacity(bytes).build();
        let cache = options.ok().filter(|_| entries > 0).map(|options| {
            Cache::with_options(options, Bytes, DefaultHashBuilder::default(), DefaultLifecycle::default())
        });
        Self { cache }
    }

    /// The answer to a claim, if its operation is cached now.
    pub(crate) fn recall(&self, request: &Request, now: Uptime) -> Option<Result<Claim<Arc<Operation>>>> {
        // A claim whose policy is not pinned always asks the store.
        let cache = self.cache.as_ref().filter(|_| request.policy.pinned)?;
        let Remembered { operation, read_at, until } = cache.get(&Place(&request.scope, &request.key))?;
        if until.is_some_and(|until| until <= now) {
            return None;
        }
        let answer = machine::read(&operation, request, read_at)?;
        Some(Claim::from_answer(answer, operation, read_at))
    }

    /// Caches an operation that cannot change any more. It was requested after `sent`, and read at `read_at` by the
    /// database's clock.
    pub(crate) fn remember(&self, operation: &Arc<Operation>, sent: Uptime, read_at: Timestamp) {
        let Some(cache) = self.cache.as_ref() else { return };
        // Without its outcome there is little to save: that is rare, or a tombstone.
        let kept = operation.outcome.as_ref().is_some_and(|outcome| outcome.kept);
        if !operation.is_final(read_at) || !kept {
            return;
        }
        let end = operation.expires_at.into_iter().chain(operation.archive_at).min();
        let until = end.map(|end| {
            let left = end.since(read_at);
            sent + (left - left / 10)
        });
        let remembered = Remembered { operation: operation.clone(), read_at, until };
        cache.insert((operation.scope.clone(), operation.key.clone()), remembered);
    }

    /// Caches an operation that this node has completed, after `sent`: `held` is the operation as it was claimed.
    pub(crate) fn remember_completed(&self, held: &Operation, outcome: &Outcome, applied: &Applied, sent: Uptime) {
        if self.cache.is_none() || !held.pinned {
            return;
        }
        let completed = match &applied.operation {
            Some(operation) => Some(Arc::new(operation.clone())),
            // A plain completion does not return its row; this is what it wrote.
            None => {
                let event = Event::Write { fence: held.fence, write: Write::Complete(outcome.clone()) };
                match step(Some(held), &event, applied.now).next {
                    Next::Put(operation) => Some(Arc::from(operation)),
                    _ => None,
                }
            }
        };
        if let Some(operation) = completed {
            self.remember(&operation, sent, applied.now);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::{Fence, Fingerprint, Labels, Policy, Token};

    const HOUR: Duration = Duration::from_secs(3600);

    fn request(key: &str) -> Request {
        Request {
            scope: Scope::new("acme", "tests", "replays").unwrap(),
            key: Key::new(key).unwrap(),
            fingerprint: Fingerprint::of_bytes(b"payload"),
            order: None,
            payload: None,
            labels: Labels::default(),
            policy: Policy { pinned: true, retention: Some(HOUR), ..Policy::default() },
            at_once: false,
            later: None,
            lease: None,
            token: Token([0; 16]),
            sent_again: false,
            owner: "worker".into(),
        }
    }

    fn at(time: Duration) -> Timestamp {
        Timestamp::from_micros(0) + time
    }

    /// An operation that was replayed `since` its completion, with an outcome of this many bytes.
    fn remember(replays: &Replays, request: &Request, since: Duration, bytes: usize, sent: Uptime) {
        let fence = Fence(1);
        let Next::Anew(claimed) = step(None, &Event::Claim { request, fence }, at(Duration::ZERO)).next else {
            panic!("a first claim")
        };
        let write = Write::Complete(Outcome::kept(vec![0; bytes]));
        let completed = step(Some(&claimed), &Event::Write { fence, write }, at(Duration::ZERO));
        let Next::Put(operation) = completed.next else { panic!("a completion") };
        replays.remember(&Arc::from(operation), sent, at(since));
    }

    #[test]
    fn a_cached_operation_ends_a_tenth_early_counted_from_before_the_request() {
        let (replays, asked, sent) = (Replays::new(1 << 20), request("k"), Uptime::now());
        remember(&replays, &asked, HOUR / 2, 1, sent);
        let early = HOUR / 2 * 9 / 10;
        assert!(replays.recall(&asked, sent + (early - Duration::from_nanos(1))).is_some());
        assert!(replays.recall(&asked, sent + early).is_none());
    }

    #[test]
    fn an_operation_without_an_end_is_cached_for_ever() {
        let (replays, mut asked) = (Replays::new(1 << 20), request("k"));
        asked.policy.retention = None;
        remember(&replays, &asked, HOUR, 1, Uptime::now());
        assert!(replays.recall(&asked, Uptime::now() + HOUR * 10_000).is_some());
    }

    #[test]
    fn memory_is_bounded_in_bytes() {
        const LIMIT: u64 = 4 << 20;
        let (replays, sent) = (Replays::new(LIMIT), Uptime::now());
        for n in 0..2000 {
            remember(&replays, &request(&n.to_string()), HOUR / 2, 10_000, sent);
        }
        let cache = replays.cache.as_ref().unwrap();
        assert!(cache.weight() <= LIMIT && cache.len() > 100, "{} bytes, {} entries", cache.weight(), cache.len());
        let remembered = (0..2000).filter(|n| replays.recall(&request(&n.to_string()), sent).is_some()).count();
        assert_eq!(remembered, cache.len());
        let large = request("large");
        remember(&replays, &large, HOUR / 2, 4 << 20, sent);
        assert!(replays.recall(&large, sent).is_none(), "one that is larger than all of it");
        assert!(cache.weight() <= LIMIT);
    }
}
