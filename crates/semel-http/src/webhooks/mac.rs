//! HMACs and their encodings.

use base64::{Engine, engine::general_purpose::STANDARD};
use hmac::{Hmac, KeyInit, Mac as _};
use sha1::Sha1;
use sha2::{Sha256, Sha512};

use super::{Algorithm, Encoding};

/// An HMAC in progress. A verifier keeps one that has read only the secret.
#[derive(Clone)]
pub(super) enum Mac {
    Sha1(Hmac<Sha1>),
    Sha256(Hmac<Sha256>),
    Sha512(Hmac<Sha512>),
}

impl Mac {
    /// Begins with a secret. It never fails, because an HMAC takes a secret of any length.
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

    /// Compares in constant time.
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
    /// The length of an HMAC in bytes.
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
            Self::Hex => hex::encode(code),
            Self::Base64 => STANDARD.encode(code),
        }
    }

    /// Decodes an HMAC; none if the encoding or the length is wrong.
    pub(super) fn read(self, text: &[u8], algorithm: Algorithm) -> Option<Vec<u8>> {
        let code = match self {
            Self::Hex => hex::decode(text).ok()?,
            // An HMAC has one spelling: with padding, and without stray bits at the end.
            Self::Base64 => STANDARD.decode(text).ok()?,
        };
        (code.len() == algorithm.size()).then_some(code)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_hmac_is_decoded_only_in_its_exact_length() {
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
        let read = |text: &str| Encoding::Hex.read(format!("{text}{}", "0a".repeat(17)).as_bytes(), Algorithm::Sha1);
        assert_eq!(read("00fFaB").unwrap()[..4], [0, 255, 171, 10]);
        for wrong in ["00fFa", "00fFag", " 0fFaB", "0xfFaB", "+1fFaB", "00fF\u{e9}"] {
            assert_eq!(read(wrong), None, "{wrong}");
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
