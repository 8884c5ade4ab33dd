//! Limits the waiting requests, so that one key or one tenant cannot fill the node with them.

use std::{collections::HashMap, hash::Hash, sync::Arc};

use parking_lot::Mutex;
use semel::{Key, Scope};

/// Waiting requests for one key, on this node.
const PER_KEY: usize = 1_000;
/// Waiting requests of one tenant, on this node.
const PER_TENANT: usize = 10_000;

/// The waiting requests of this node.
#[derive(Default)]
pub(crate) struct Waiting(Mutex<Counts>);

#[derive(Default)]
struct Counts {
    keys: HashMap<(Scope, Key), usize>,
    tenants: HashMap<String, usize>,
}

/// A place among them, given back when dropped.
pub(crate) struct Place {
    waiting: Arc<Waiting>,
    key: (Scope, Key),
}

impl Waiting {
    /// A place, if the limits allow one.
    pub(crate) fn enter(self: &Arc<Self>, scope: &Scope, key: &Key) -> Option<Place> {
        let mut counts = self.0.lock();
        let place = (scope.clone(), key.clone());
        let at = |n: Option<&usize>| n.copied().unwrap_or_default();
        if at(counts.keys.get(&place)) >= PER_KEY || at(counts.tenants.get(scope.tenant())) >= PER_TENANT {
            return None;
        }
        *counts.keys.entry(place.clone()).or_default() += 1;
        *counts.tenants.entry(scope.tenant().to_owned()).or_default() += 1;
        Some(Place { waiting: self.clone(), key: place })
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let mut counts = self.waiting.0.lock();
        leave(&mut counts.keys, &self.key);
        leave(&mut counts.tenants, &self.key.0.tenant().to_owned());
    }
}

fn leave<K: Hash + Eq>(counts: &mut HashMap<K, usize>, key: &K) {
    if let Some(n) = counts.get_mut(key) {
        *n -= 1;
        if *n == 0 {
            counts.remove(key);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_are_limited_and_given_back() {
        let waiting = Arc::new(Waiting::default());
        let scope = Scope::new("t", "s", "k").unwrap();
        let key = |i: usize| Key::new(&format!("k{i}")).unwrap();
        let one: Vec<_> = (0..PER_KEY).map(|_| waiting.enter(&scope, &key(0)).unwrap()).collect();
        assert!(waiting.enter(&scope, &key(0)).is_none(), "a key has its limit");
        let others: Vec<_> = (PER_KEY..PER_TENANT).map(|i| waiting.enter(&scope, &key(i)).unwrap()).collect();
        assert!(waiting.enter(&scope, &key(1)).is_none(), "a tenant has its limit");
        assert!(waiting.enter(&Scope::new("u", "s", "k").unwrap(), &key(1)).is_some(), "others have their own");
        drop((one, others));
        let counts = waiting.0.lock();
        assert!(counts.keys.is_empty() && counts.tenants.is_empty(), "nothing is left behind");
    }
}
