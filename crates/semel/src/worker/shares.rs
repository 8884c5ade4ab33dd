//! Shares the free seats among tenants.

use std::collections::BTreeMap;

use crate::look::DueKind;

/// One of this many operations is the longest due one, with any priority: so low priorities do not starve.
const OLDEST_OF: u32 = 10;

/// The state between rounds.
#[derive(Default)]
pub(super) struct Shares {
    /// By kind of work: the kind and tenant that was served last. The next round begins after it.
    turns: BTreeMap<usize, (String, String)>,
    /// By kind of work: how many were asked for since the last longest-due one.
    asked: BTreeMap<usize, u32>,
}

impl Shares {
    /// Shares free seats among kinds and tenants with due operations, at least one each as far as they suffice. The
    /// order rotates, because there may be fewer seats than tenants.
    pub(super) fn of(&mut self, kind: usize, mut due: Vec<DueKind>, mut free: usize) -> Vec<(DueKind, usize)> {
        if let Some((last_kind, last_tenant)) = self.turns.get(&kind) {
            let first = due.partition_point(|due| (&due.kind, &due.tenant) <= (last_kind, last_tenant));
            // At the end of the list it starts from the beginning.
            due.rotate_left(first);
        }
        let mut shares = Vec::new();
        let mut left = due.len();
        for due in due {
            let share = free.div_ceil(left);
            if share == 0 {
                break;
            }
            free -= share;
            left -= 1;
            shares.push((due, share));
        }
        if let Some((last, _)) = shares.last() {
            self.turns.insert(kind, (last.kind.clone(), last.tenant.clone()));
        }
        shares
    }

    /// How many to ask for, and how many of these are the longest due ones: every tenth.
    pub(super) fn ages(&mut self, kind: usize, share: usize) -> (u32, u32) {
        let most = u32::try_from(share).unwrap_or(u32::MAX);
        let asked = self.asked.entry(kind).or_default();
        let sum = asked.saturating_add(most);
        *asked = sum % OLDEST_OF;
        (most, sum / OLDEST_OF)
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::Timestamp;

    fn due(tenant: &str) -> DueKind {
        let (kind, tenant) = ("kind".to_owned(), tenant.to_owned());
        DueKind { kind, tenant, next: Timestamp::from_micros(1), wait: Duration::ZERO }
    }

    fn round(shares: &mut Shares, tenants: &[&str], free: usize) -> Vec<(String, usize)> {
        let due = tenants.iter().map(|tenant| due(tenant)).collect();
        shares.of(0, due, free).into_iter().map(|(due, n)| (due.tenant, n)).collect()
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
    fn a_tenth_of_the_seats_goes_to_the_longest_due() {
        let mut shares = Shares::default();
        let oldest: u32 = (0..100).map(|_| shares.ages(0, 1).1).sum();
        assert_eq!(oldest, 10);
        assert_eq!(shares.ages(0, 100), (100, 10));
    }
}
