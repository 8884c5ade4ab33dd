//! Busy keys: claims of keys whose rows other transactions have locked use a separate lane.
//!
//! A claim that meets an uncommitted insert of its key waits for it. In the common lane, the claims in the same batch
//! and behind it would wait as well, once for every claim of such a key. So a key that the store answered
//! [`Busy`](crate::machine::Answer::Busy) is remembered for a while.

use std::{
    collections::HashMap,
    hash::{BuildHasher, RandomState},
    time::Duration,
};

use parking_lot::Mutex;

use crate::{Uptime, machine::Request};

/// How long a key stays here after it was last busy. If it is free before, its claims only take the other lane a little
/// longer.
const FOR: Duration = Duration::from_secs(5);

/// The most keys: a hundred kilobytes. Further ones are forgotten and waited for once more.
const MOST: usize = 4096;

#[derive(Default)]
pub(crate) struct Aside {
    hasher: RandomState,
    /// By hash: two keys with the same hash share the lane, which is harmless.
    keys: Mutex<HashMap<u64, Uptime>>,
}

impl Aside {
    /// Notes that the key of a claim is busy.
    pub(crate) fn note(&self, request: &Request) {
        let hash = self.hash(request);
        let mut keys = self.keys.lock();
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
        let keys = self.keys.lock();
        !keys.is_empty() && keys.get(&self.hash(request)).is_some_and(|until| !until.has_passed())
    }

    fn hash(&self, request: &Request) -> u64 {
        self.hasher.hash_one((&request.scope, &request.key))
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
            lease: None,
            token: Token([0; 16]),
            sent_again: false,
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
    fn the_number_of_remembered_keys_is_bounded() {
        let aside = Aside::default();
        for n in 0..3 * MOST {
            aside.note(&request(&n.to_string()));
        }
        assert!(aside.keys.lock().len() <= MOST);
    }
}
