//! Recently seen keys.
//!
//! Only a hint: a claim with a key in here reads before it inserts. This spares a replay the failing insert, and on
//! SQLite the writer. A wrong hint (the row has expired, or was purged) costs a round trip; the answer is the same.

use std::{
    collections::HashSet,
    hash::{BuildHasher, RandomState},
};

use parking_lot::Mutex;
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
        let mut seen = self.seen.lock();
        if seen[0].len() >= GENERATION {
            seen.swap(0, 1);
            seen[0].clear();
        }
        seen[0].insert(hash);
    }

    /// Whether a key was seen recently.
    pub(crate) fn knows(&self, request: &Request) -> bool {
        let hash = self.hash(request);
        self.seen.lock().iter().any(|generation| generation.contains(&hash))
    }

    fn hash(&self, request: &Request) -> u64 {
        self.hasher.hash_one((&request.scope, &request.key))
    }
}
