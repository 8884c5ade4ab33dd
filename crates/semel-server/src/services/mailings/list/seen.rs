//! A hint whether an address came before in the same list.

use std::hash::{BuildHasher, RandomState};

/// With 10 bits and 7 probes per element, about one answer in a hundred is a false "maybe".
const BITS_PER_ELEMENT: usize = 10;
const PROBES: u32 = 7;
/// Enough for 26 million addresses. A larger list gets more false answers, not more memory.
const MAX_BYTES: usize = 32 << 20;

/// A Bloom filter. It is only a hint: "no" is certain, "maybe" is not. An import may use it to insert new addresses
/// without a look-up; whether an address is a duplicate is decided by the unique constraint of the table, which also
/// knows of the rows that came before a restart.
///
/// The hash has a random key, so a client cannot prepare addresses that collide.
pub(crate) struct Seen {
    words: Vec<u64>,
    keys: RandomState,
}

impl Seen {
    /// A filter for about this many addresses.
    pub(crate) fn with_room(expected: usize) -> Seen {
        let bits = expected.saturating_mul(BITS_PER_ELEMENT).clamp(64, MAX_BYTES * 8);
        Seen { words: vec![0; bits.div_ceil(64)], keys: RandomState::new() }
    }

    /// Notes the address. True if it may have been noted before, false if it was certainly not.
    pub(crate) fn insert(&mut self, normal: &str) -> bool {
        let bits = self.words.len() as u64 * 64;
        let hash = self.keys.hash_one(normal);
        // Two halves of one hash serve as well as seven hashes (Kirsch and Mitzenmacher, 2006). The step is odd, hence
        // never zero.
        let (start, step) = (hash & 0xffff_ffff, hash >> 32 | 1);
        let mut was_there = true;
        for probe in 0..u64::from(PROBES) {
            let bit = (start + probe * step) % bits;
            let (word, mask) = (&mut self.words[(bit / 64) as usize], 1 << (bit % 64));
            was_there &= *word & mask != 0;
            *word |= mask;
        }
        was_there
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_that_was_inserted_is_always_seen() {
        let mut seen = Seen::with_room(1_000);
        (0..5_000).for_each(|n| _ = seen.insert(&format!("{n}@x.com")));
        assert!((0..5_000).all(|n| seen.insert(&format!("{n}@x.com"))));
    }

    #[test]
    fn few_new_addresses_are_taken_for_seen_ones() {
        let mut seen = Seen::with_room(20_000);
        let wrong = (0..20_000).filter(|n| seen.insert(&format!("{n}@x.com"))).count();
        assert!(wrong < 200, "{wrong} of 20000 were false");
    }

    #[test]
    fn the_filter_has_an_upper_limit_and_works_without_room() {
        assert_eq!(Seen::with_room(usize::MAX).words.len() * 8, MAX_BYTES);
        let mut seen = Seen::with_room(0);
        assert!(!seen.insert("a@x.com") && seen.insert("a@x.com"));
    }
}
