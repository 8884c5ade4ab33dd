//! The stored form of payloads: a version byte, a key id byte, then the bytes.
//!
//! Key id 0 is plain. The other ids are for encryption: switching it on changes new rows, and the old ones stay
//! readable.

use bytes::Bytes;
use semel::Error;

const VERSION: u8 = 1;
const PLAIN: u8 = 0;

/// The error for a payload that may be intact: a newer version, or a node with the key, can read it.
const ANOTHER: &str = "a payload of another version or key";

/// The stored form of bytes.
#[must_use]
pub fn encode(plain: &[u8]) -> Vec<u8> {
    let mut stored = Vec::with_capacity(plain.len() + 2);
    stored.extend([VERSION, PLAIN]);
    stored.extend(plain);
    stored
}

/// Decodes stored bytes. Unreadable bytes are an error, never "absent": the operation has taken effect.
///
/// # Errors
/// [`Error::Corrupt`] if another version or key has stored it, or if it is damaged.
pub fn decode(stored: Vec<u8>) -> Result<Bytes, Error> {
    match stored[..] {
        [VERSION, PLAIN, ..] => Ok(Bytes::from(stored).slice(2..)),
        // Versions are counted from 1.
        [VERSION..=u8::MAX, _, ..] => Err(Error::Corrupt(ANOTHER)),
        _ => Err(Error::Corrupt("a payload whose first bytes are damaged")),
    }
}

/// Whether a row is unreadable because another version or key has stored it, not because it is damaged.
pub(crate) fn is_of_another(error: &Error) -> bool {
    matches!(error, Error::Corrupt(why) if *why == ANOTHER)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn empty_bytes_are_stored_and_come_back() {
        assert_eq!(decode(encode(b"")).unwrap(), Bytes::new());
        assert_eq!(decode(encode(b"x\0y")).unwrap(), Bytes::from_static(b"x\0y"));
    }

    #[test]
    fn another_version_or_key_is_distinguished_from_damage() {
        for stored in [vec![9, 0, 1], vec![1, 7, 1]] {
            assert!(is_of_another(&decode(stored).unwrap_err()));
        }
        for stored in [vec![], vec![1], vec![9], vec![0, 0, 1]] {
            assert!(!is_of_another(&decode(stored).unwrap_err()));
        }
    }
}
