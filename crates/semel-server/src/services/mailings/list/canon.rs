//! The hash of a list: equal for equal sets of addresses, in whatever order they came.

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

/// The sum of the SHA-256 hashes of all addresses modulo 2^256, and their number.
///
/// A sum does not depend on the order and needs constant memory, so an import can go on with it after a crash.
/// An XOR would do so, too, but two lists with the same XOR are found by solving
/// linear equations. Even for a sum, the author of two lists can find a collision with large effort and many made-up
/// addresses: the hash recognises a list that comes again. It does not prove anything against its author.
///
/// Addresses must be in their normal form and must be added once each: the sum of a duplicate is another sum.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(into = "String", try_from = "String")]
pub(crate) struct ListHash {
    /// From the lowest lane to the highest.
    sum: [u64; 4],
    count: u64,
}

impl ListHash {
    /// Adds an address in its normal form that was not added before.
    pub(crate) fn add(&mut self, normal: &str) {
        let hash: [u8; 32] = Sha256::digest(normal.as_bytes()).into();
        self.add_sum(lanes(&hash), 1);
    }

    /// The hash of the addresses that were added so far: 64 hexadecimal digits. The sum is hashed once more together
    /// with the number of addresses, so two lists of different sizes never share a sum.
    pub(crate) fn to_hex(self) -> String {
        hex::encode(Sha256::digest(self.to_bytes()))
    }

    fn add_sum(&mut self, sum: [u64; 4], count: u64) {
        let mut carry = false;
        for (lane, other) in self.sum.iter_mut().zip(sum) {
            let (partial, first) = lane.overflowing_add(other);
            let (total, second) = partial.overflowing_add(u64::from(carry));
            *lane = total;
            carry = first || second;
        }
        self.count = self.count.wrapping_add(count);
    }

    fn to_bytes(self) -> [u8; 40] {
        let mut bytes = [0; 40];
        for (eight, lane) in bytes.chunks_exact_mut(8).zip(self.sum.iter().chain([&self.count])) {
            eight.copy_from_slice(&lane.to_le_bytes());
        }
        bytes
    }
}

fn lanes(bytes: &[u8; 32]) -> [u64; 4] {
    let mut lanes = [0; 4];
    for (lane, eight) in lanes.iter_mut().zip(bytes.chunks_exact(8)) {
        *lane = eight.iter().rev().fold(0, |lane, &byte| lane << 8 | u64::from(byte));
    }
    lanes
}

/// As text, because many readers of JSON round integers above 2^53.
impl From<ListHash> for String {
    fn from(hash: ListHash) -> String {
        hex::encode(hash.to_bytes())
    }
}

impl TryFrom<String> for ListHash {
    type Error = hex::FromHexError;

    fn try_from(text: String) -> Result<ListHash, hex::FromHexError> {
        let mut bytes = [0; 40];
        hex::decode_to_slice(text, &mut bytes)?;
        let mut sum = [0; 32];
        sum.copy_from_slice(&bytes[..32]);
        let mut count = [0; 8];
        count.copy_from_slice(&bytes[32..]);
        Ok(ListHash { sum: lanes(&sum), count: u64::from_le_bytes(count) })
    }
}

#[cfg(test)]
mod tests {
    use super::super::address::Email;
    use super::*;

    fn hash(addresses: &[&str]) -> ListHash {
        let mut hash = ListHash::default();
        addresses.iter().for_each(|address| hash.add(&Email::parse(address).unwrap().normal));
        hash
    }

    #[test]
    fn the_hash_does_not_depend_on_order_or_case() {
        let one = hash(&["a@x.com", "b@x.com", "c@x.com"]);
        let other = hash(&["C@X.com", "A@x.com", "b@x.COM"]);
        assert_eq!(one.to_hex(), other.to_hex());
    }

    #[test]
    fn different_lists_have_different_hashes() {
        let lists: [&[&str]; 5] = [&[], &["a@x.com"], &["b@x.com"], &["a@x.com", "b@x.com"], &["a@x.com", "a@x.com"]];
        let hashes: std::collections::HashSet<_> = lists.iter().map(|list| hash(list).to_hex()).collect();
        assert_eq!(hashes.len(), lists.len());
    }

    #[test]
    fn the_sum_carries_from_lane_to_lane() {
        let mut hash = ListHash { sum: [u64::MAX, u64::MAX, 7, 0], count: 0 };
        hash.add_sum([1, 0, 0, 0], 1);
        assert_eq!(hash.sum, [0, 0, 8, 0]);
        let mut full = ListHash { sum: [u64::MAX; 4], count: 0 };
        full.add_sum([u64::MAX; 4], 1);
        assert_eq!(full.sum, [u64::MAX - 1, u64::MAX, u64::MAX, u64::MAX]);
    }

    #[test]
    fn the_hash_of_known_addresses_stays_the_same_between_versions() {
        assert_eq!(
            hash(&["a@x.com", "b@x.com"]).to_hex(),
            "7196eceba6e776ffcea2aa5aebce7ec23dec49c3ed3d627b84ed641661128870"
        );
    }

    #[test]
    fn a_stored_hash_goes_on_where_it_was() {
        let mut hash = hash(&["a@x.com"]);
        let stored = serde_json::to_string(&hash).unwrap();
        let mut restored: ListHash = serde_json::from_str(&stored).unwrap();
        hash.add("b@x.com");
        restored.add("b@x.com");
        assert_eq!(hash, restored);
        assert!(serde_json::from_str::<ListHash>("\"00\"").is_err());
    }
}
