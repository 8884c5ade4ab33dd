//! Keys whose rows other transactions hold: their claims go in a lane of their own.
//!
//! A claim that meets an uncommitted insert of its key waits for it. In the lane that everybody uses, the claims beside
//! it and behind it would wait as well, once for every claim of such a key. So a key of which the store has just said
//! [`Busy`](crate::machine::Answer::Busy) is remembered for a while.

use std::{
    collections::HashMap,
    hash::{BuildHasher, RandomState},
    sync::{Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use crate::{Uptime, machine::Request};

/// How long after it was last busy. A key that is free by then only takes the other lane a little longer.
const FOR: Duration = Duration::from_secs(5);

/// How many are remembered at most: a hundred kilobytes. Beyond that, keys are forgotten and waited for once more.
const MOST: usize = 4096;

#[derive(Default)]
pub(crate) struct Aside {
    hasher: RandomState,
    /// By hash: two keys that share one share the lane, which harms nobody.
    keys: Mutex<HashMap<u64, Uptime>>,
}

impl Aside {
    /// Notes that the key of a claim is busy.
    pub(crate) fn note(&self, request: &Request) {
        let hash = self.hash(request);
        let mut keys = self.lock();
        if keys.len() >= MOST {
            keys.retain(|_, until| !until.has_passed());
        }
        if keys.len() >= MOST {
            keys.clear();
        }
        keys.insert(hash, Uptime::now() + FOR);
    }

    /// Whether the key of a claim was busy a moment ago.
    pub(crate) fn has(&self, request: &Request) -> bool {
        let keys = self.lock();
        !keys.is_empty() && keys.get(&self.hash(request)).is_some_and(|until| !until.has_passed())
    }

    fn hash(&self, request: &Request) -> u64 {
        self.hasher.hash_one((&request.scope, &request.key))
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<u64, Uptime>> {
        self.keys.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Fingerprint, Key, Labels, Policy, Scope, Token};

    fn request(key: &str) -> Request {
        Request {
            scope: Scope::new("acme", "bank", "transfer").expect("a scope"),
            key: Key::new(key).expect("a key"),
            fingerprint: Fingerprint::of_bytes(b""),
            order: None,
            payload: None,
            labels: Labels::default(),
            policy: Policy::default(),
            at_once: false,
            later: None,
            token: Token([0; 16]),
            owner: "node".into(),
        }
    }

    #[test]
    fn a_busy_key_is_remembered_and_no_other() {
        let aside = Aside::default();
        assert!(!aside.has(&request("a")));
        aside.note(&request("a"));
        assert!(aside.has(&request("a")) && !aside.has(&request("b")));
    }

    #[test]
    fn no_more_than_so_many_are_remembered() {
        let aside = Aside::default();
        for n in 0..3 * MOST {
            aside.note(&request(&n.to_string()));
        }
        assert!(aside.lock().len() <= MOST);
    }
}
