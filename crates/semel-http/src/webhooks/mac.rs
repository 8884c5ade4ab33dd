//! Codes over bytes, and how they are written.

use base64::{Engine, engine::general_purpose::STANDARD};
use hmac::{Hmac, KeyInit, Mac as _};
use sha1::Sha1;
use sha2::{Sha256, Sha512};

use super::{Algorithm, Encoding};

/// An HMAC in the making. The one that a verifier keeps has taken in the secret and nothing else.
#[derive(Clone)]
pub(super) enum Mac {
    Sha1(Hmac<Sha1>),
    Sha256(Hmac<Sha256>),
    Sha512(Hmac<Sha512>),
}

impl Mac {
    /// Begins with a secret. An HMAC takes one of any length, so there always is one.
    pub(super) fn new(algorithm: Algorithm, key: &[u8]) -> Option<Self> {
        Some(match algorithm {
            Algorithm::Sha1 => Self::Sha1(Hmac::new_from_slice(key).ok()?),
            Algorithm::Sha256 => Self::Sha256(Hmac::new_from_slice(key).ok()?),
            Algorithm::Sha512 => Self::Sha512(Hmac::new_from_slice(key).ok()?),
        })
    }

    pub(super) fn update(&mut self, bytes: &[u8]) {
        match self {
            Self::Sha1(mac) => mac.update(bytes),
            Self::Sha256(mac) => mac.update(bytes),
            Self::Sha512(mac) => mac.update(bytes),
        }
    }

    /// Whether this is the code of what was taken in. How long it takes says nothing about where they differ.
    pub(super) fn fits(&self, code: &[u8]) -> bool {
        match self.clone() {
            Self::Sha1(mac) => mac.verify_slice(code).is_ok(),
            Self::Sha256(mac) => mac.verify_slice(code).is_ok(),
            Self::Sha512(mac) => mac.verify_slice(code).is_ok(),
        }
    }

    pub(super) fn finish(self) -> Vec<u8> {
        match self {
            Self::Sha1(mac) => mac.finalize().into_bytes().to_vec(),
            Self::Sha256(mac) => mac.finalize().into_bytes().to_vec(),
            Self::Sha512(mac) => mac.finalize().into_bytes().to_vec(),
        }
    }
}

impl Algorithm {
    /// The length of its codes in bytes.
    fn size(self) -> usize {
        match self {
            Self::Sha1 => 20,
            Self::Sha256 => 32,
            Self::Sha512 => 64,
        }
    }
}

impl Encoding {
    pub(super) fn write(self, code: &[u8]) -> String {
        match self {
            Self::Hex => code.iter().map(|byte| format!("{byte:02x}")).collect(),
            Self::Base64 => STANDARD.encode(code),
        }
    }

    /// Reads a code; nothing if it is not written in this way, or too short or too long for the algorithm.
    pub(super) fn read(self, text: &[u8], algorithm: Algorithm) -> Option<Vec<u8>> {
        let code = match self {
            Self::Hex => hex(text)?,
            // One code is written in one way: with its padding, and without stray bits at the end.
            Self::Base64 => STANDARD.decode(text).ok()?,
        };
        (code.len() == algorithm.size()).then_some(code)
    }
}

/// Bytes from hex digits, upper or lower case.
fn hex(text: &[u8]) -> Option<Vec<u8>> {
    let (pairs, rest) = text.as_chunks::<2>();
    let digit = |byte: u8| char::from(byte).to_digit(16);
    let byte = |[high, low]: &[u8; 2]| u8::try_from(digit(*high)? * 16 + digit(*low)?).ok();
    if rest.is_empty() { pairs.iter().map(byte).collect() } else { None }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_code_is_read_as_it_was_written_and_in_no_other_length() {
        for (algorithm, size) in [(Algorithm::Sha1, 20), (Algorithm::Sha256, 32), (Algorithm::Sha512, 64)] {
            let code: Vec<u8> = (0..size).map(|i| 251_u8.wrapping_mul(i)).collect();
            assert_eq!(Mac::new(algorithm, b"key").unwrap().finish().len(), code.len());
            for encoding in [Encoding::Hex, Encoding::Base64] {
                let written = encoding.write(&code);
                assert_eq!(encoding.read(written.as_bytes(), algorithm), Some(code.clone()));
                for other in [&code[1..], &[&code[..], &[0]].concat(), &[]] {
                    assert_eq!(encoding.read(encoding.write(other).as_bytes(), algorithm), None);
                }
            }
        }
    }

    #[test]
    fn hex_is_pairs_of_hex_digits() {
        assert_eq!(hex(b"00fFaB"), Some(vec![0, 255, 171]));
        for wrong in ["0", "0g", " 00", "0x00", "+1", "\u{e9}"] {
            assert_eq!(hex(wrong.as_bytes()), None, "{wrong}");
        }
    }

    #[test]
    fn base64_is_padded_and_has_no_stray_bits() {
        let written = Encoding::Base64.write(&[7; 32]);
        let read = |text: &str| Encoding::Base64.read(text.as_bytes(), Algorithm::Sha256);
        assert!(read(&written).is_some());
        assert_eq!(read(written.trim_end_matches('=')), None);
        assert_eq!(read(&format!("{}d=", &written[..42])), None, "{written}");
        assert_eq!(read(&written.replace('/', "_").replace('B', "-")), None, "the alphabet of URLs");
    }
}
