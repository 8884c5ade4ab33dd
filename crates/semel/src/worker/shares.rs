//! Shares the free seats among tenants.

use std::{
    collections::{BTreeMap, HashMap},
    ops::Bound,
};

use crate::{Scope, store::Want};

/// A kind and tenant.
pub(super) type Pair = (String, String);

/// How many kinds and tenants are counted. Beyond that the counts begin anew, which postpones the next longest-due one.
const MOST_COUNTED: usize = 10_000;

/// The state between rounds.
#[derive(Default)]
pub(super) struct Shares {
    /// By kind of work: the kind and tenant that was served last. The next round begins after it.
    turns: BTreeMap<usize, Pair>,
    /// By kind and tenant: how many were taken since the last longest-due one.
    taken: HashMap<Scope, u32>,
}

impl Shares {
    /// Shares free seats among kinds and tenants with due operations, at least one each as far as they suffice. The
    /// order rotates, because there may be fewer seats than tenants.
    pub(super) fn of<T>(&self, kind: usize, due: &BTreeMap<Pair, T>, mut free: usize) -> Vec<(Pair, usize)> {
        // At the end of the list it starts from the beginning.
        let last = self.turns.get(&kind).cloned().unwrap_or_default();
        let after = due.range((Bound::Excluded(&last), Bound::Unbounded));
        let (mut shares, mut left) = (Vec::new(), due.len());
        for (due, _) in after.chain(due.range(..=&last)) {
            let share = free.div_ceil(left);
            if share == 0 {
                break;
            }
            free -= share;
            left -= 1;
            shares.push((due.clone(), share));
        }
        shares
    }

    /// How many operations of a kind and tenant were taken since the last longest-due one.
    pub(super) fn since(&self, scope: &Scope) -> u32 {
        self.taken.get(scope).copied().unwrap_or_default()
    }

    /// Counts taken operations.
    pub(super) fn count(&mut self, scope: &Scope, taken: usize) {
        if self.taken.len() >= MOST_COUNTED && !self.taken.contains_key(scope) {
            self.taken.clear();
        }
        let since = self.taken.entry(scope.clone()).or_default();
        *since = since.saturating_add(u32::try_from(taken).unwrap_or(u32::MAX)) % Want::OLDEST_OF;
    }

    /// Notes which kind and tenant was served last. A limit of the fleet may serve only the first of those that were
    /// offered a share: the next one is first in the next round.
    pub(super) fn end_at(&mut self, kind: usize, last: &Scope) {
        self.turns.insert(kind, (last.kind().to_owned(), last.tenant().to_owned()));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn due(tenants: &[&str]) -> BTreeMap<Pair, ()> {
        tenants.iter().map(|tenant| (("kind".to_owned(), (*tenant).to_owned()), ())).collect()
    }

    fn scope(tenant: &str) -> Scope {
        Scope::new(tenant, "service", "kind").unwrap()
    }

    /// A round that serves all shares.
    fn round(shares: &mut Shares, tenants: &[&str], free: usize) -> Vec<(String, usize)> {
        let given: Vec<_> = shares.of(0, &due(tenants), free).into_iter().map(|((_, who), n)| (who, n)).collect();
        shares.end_at(0, &scope(&given.last().unwrap().0));
        given
    }

    #[test]
    fn free_seats_are_shared_and_none_is_left_over() {
        let shares = round(&mut Shares::default(), &["a", "b", "c"], 16);
        assert_eq!((shares.len(), shares.iter().map(|(_, n)| n).sum::<usize>()), (3, 16));
        assert!(shares.iter().all(|(_, n)| *n >= 5), "{shares:?}");
    }

    #[test]
    fn with_one_seat_every_tenant_has_its_turn() {
        let mut shares = Shares::default();
        let turns: Vec<_> = (0..6).flat_map(|_| round(&mut shares, &["a", "b", "c"], 1)).map(|(who, _)| who).collect();
        assert_eq!(turns, ["a", "b", "c", "a", "b", "c"]);
        assert_eq!(round(&mut shares, &["a"], 1), [("a".to_owned(), 1)], "one that is alone is not passed over");
    }

    #[test]
    fn the_order_continues_after_the_tenant_that_was_served_last() {
        let mut shares = Shares::default();
        let order = |shares: &Shares| {
            let given = shares.of(0, &due(&["a", "b", "c"]), 16);
            given.into_iter().map(|((_, who), _)| who).collect::<Vec<_>>()
        };
        assert_eq!(order(&shares), ["a", "b", "c"]);
        shares.end_at(0, &scope("a"));
        assert_eq!(order(&shares), ["b", "c", "a"], "only the first was served");
    }

    #[test]
    fn every_tenth_of_each_tenant_is_the_longest_due_of_all() {
        let mut shares = Shares::default();
        let (mut oldest, tenants) = ([0; 2], ["a", "b"].map(scope));
        for n in 0..200 {
            let (tenant, policy) = (&tenants[n % 2], crate::Policy::default());
            let want = Want {
                scope: tenant.clone(),
                most: 1,
                since: Some(shares.since(tenant)),
                policy,
                lease: None,
                limits: <_>::default(),
            };
            oldest[n % 2] += want.oldest(1);
            shares.count(tenant, 1);
            assert_eq!(want.oldest(100), 10);
        }
        assert_eq!(oldest, [10, 10]);
        shares.count(&tenants[0], 4);
        shares.count(&tenants[0], 0);
        assert_eq!(shares.since(&tenants[0]), 4, "a take that found nothing does not count");
    }
}
