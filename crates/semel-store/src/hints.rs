//! Keys that were seen a moment ago.
//!
//! A hint and nothing more: a claim whose key is remembered here is looked up first instead of
//! inserted first, which spares a replay the failing insert, and on SQLite the writer. A wrong hint
//! (the row has expired, or was purged) costs a round trip; the answer is the same.

use std::{
    collections::HashSet,
    hash::{BuildHasher, RandomState},
    sync::{Mutex, MutexGuard, PoisonError},
};

use semel::machine::Request;

/// Keys per generation. Two are kept: 1 to 2 MB, enough for the retries of some seconds.
const GENERATION: usize = 65_536;

#[derive(Default)]
pub(crate) struct Hints {
    hasher: RandomState,
    seen: Mutex<[HashSet<u64>; 2]>,
}

impl Hints {
    /// Remembers a key.
    pub(crate) fn remember(&self, request: &Request) {
        let hash = self.hash(request);
        let mut seen = self.lock();
        if seen[0].len() >= GENERATION {
            seen.swap(0, 1);
            seen[0].clear();
        }
        seen[0].insert(hash);
    }

    /// Whether a key was seen a moment ago.
    pub(crate) fn knows(&self, request: &Request) -> bool {
        let hash = self.hash(request);
        self.lock().iter().any(|generation| generation.contains(&hash))
    }

    fn hash(&self, request: &Request) -> u64 {
        self.hasher.hash_one((&request.scope, &request.key))
    }

    fn lock(&self) -> MutexGuard<'_, [HashSet<u64>; 2]> {
        self.seen.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
