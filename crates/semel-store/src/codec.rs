//! How payloads are stored: a version byte, a key id byte, then the bytes.
//!
//! Key id 0 is plain. The other ids are for encryption: switching it on changes new rows, and the
//! old ones stay readable.

use bytes::Bytes;
use semel::Error;

const VERSION: u8 = 1;
const PLAIN: u8 = 0;

/// Why a payload cannot be read that may be whole: a version, or a node with the key, that knows it can read it.
const ANOTHER: &str = "a payload of another version or key";

/// Bytes as they are stored.
#[must_use]
pub fn encode(plain: &[u8]) -> Vec<u8> {
    let mut stored = Vec::with_capacity(plain.len() + 2);
    stored.extend([VERSION, PLAIN]);
    stored.extend(plain);
    stored
}

/// Bytes as they were given. What this version cannot read is an error, never "absent": the
/// operation behind it has taken effect.
///
/// # Errors
/// [`Error::Corrupt`] for what another version or key has stored, and for what is damaged.
pub fn decode(stored: Vec<u8>) -> Result<Bytes, Error> {
    match stored[..] {
        [VERSION, PLAIN, ..] => Ok(Bytes::from(stored).slice(2..)),
        // Versions are counted from 1.
        [VERSION..=u8::MAX, _, ..] => Err(Error::Corrupt(ANOTHER)),
        _ => Err(Error::Corrupt("a payload whose first bytes are damaged")),
    }
}

/// Whether a row cannot be read because another version or key has stored it, and not because it is damaged.
pub(crate) fn is_of_another(error: &Error) -> bool {
    matches!(error, Error::Corrupt(why) if *why == ANOTHER)
}

/// Stored bytes in hex, as they travel in a JSON batch.
#[must_use]
pub fn hex(stored: &[u8]) -> String {
    const DIGITS: &[u8; 16] = b"0123456789abcdef";
    let digit = |nibble: u8| char::from(DIGITS[usize::from(nibble)]);
    stored.iter().flat_map(|byte| [digit(byte >> 4), digit(byte & 15)]).collect()
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
    fn another_version_or_key_is_told_from_damage() {
        for stored in [vec![9, 0, 1], vec![1, 7, 1]] {
            assert!(is_of_another(&decode(stored).unwrap_err()));
        }
        for stored in [vec![], vec![1], vec![9], vec![0, 0, 1]] {
            assert!(!is_of_another(&decode(stored).unwrap_err()));
        }
    }

    #[test]
    fn hex_is_lower_case_and_whole() {
        assert_eq!(hex(&[0, 0x0f, 0xa0, 0xff]), "000fa0ff");
    }
}
