//! Fingerprints, and the two names that are derived from a key: the derived key for other services and
//! the short hash for log lines.
//!
//! Everything that is hashed here is a list of length-prefixed parts; the first part names the function.
//! So `("ab", "c")` and `("a", "bc")` differ, and no two functions give the same result.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Deserializer, Serialize, Serializer};
use sha2::{Digest, Sha256};

use crate::canonical_json::{Canonical, Inexact, JsonError, canonical, canonicalize_without};

/// SHA-256 over length-prefixed parts. Any change to what is hashed needs a new version, because databases
/// contain rows with the old one.
const VERSION: u8 = 1;

/// One byte for the version, 32 for the digest.
const LENGTH: usize = 33;

/// A versioned cryptographic hash of a payload.
///
/// It is cryptographic, because a caller who could make two payloads collide would get the outcome of the
/// wrong one. It is versioned, because a release with another algorithm must not take every retry of an
/// older operation for a reuse: fingerprints of different versions are never equal, and
/// [`Self::matches`] does not compare them.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Fingerprint([u8; LENGTH]);

impl Fingerprint {
    /// The fingerprint of a payload by its bytes.
    pub fn of_bytes(payload: &[u8]) -> Self {
        Parts::new("semel fingerprint 1: bytes").part(payload).fingerprint()
    }

    /// The fingerprint of a JSON payload; the order of members, white space and string escapes do not
    /// count. Numbers count as they are written: `1` and `1.0` differ.
    pub fn of_json(payload: &[u8]) -> Result<Self, JsonError> {
        Self::of_json_without(payload, &[])
    }

    /// As [`Self::of_json`], but ignores the values at these JSON pointers. It equals the fingerprint of the
    /// payload without them, so payloads that never had them keep theirs when an exclusion is added.
    pub fn of_json_without(payload: &[u8], pointers: &[&str]) -> Result<Self, JsonError> {
        canonicalize_without(payload, pointers).map(|canonical| Self::of_canonical(&canonical))
    }

    /// As [`Self::of_json_without`], with the same result if that has one. It also accepts integers that no
    /// double can hold, and compares them by their digits: for senders with such ids that cannot be changed
    /// to strings.
    pub fn of_json_by_digits(payload: &[u8], pointers: &[&str]) -> Result<Self, JsonError> {
        canonical(payload, pointers, Inexact::Kept).map(|canonical| Self::of_canonical(&canonical))
    }

    fn of_canonical(canonical: &Canonical) -> Self {
        let mut parts = Parts::new("semel fingerprint 1: json").part(&canonical.bytes);
        for literal in &canonical.literals {
            parts = parts.part(&(literal.at as u64).to_be_bytes()).part(literal.text.as_bytes());
        }
        parts.fingerprint()
    }

    /// Begins the fingerprint of a payload of named fields.
    pub fn fields() -> Fields {
        Fields(Parts::new("semel fingerprint 1: fields"))
    }

    /// The stored form: the version, then the digest.
    pub fn as_bytes(&self) -> &[u8; LENGTH] {
        &self.0
    }

    /// Reads the stored form. An unknown version is kept, because nodes of two releases share rows, and
    /// equality needs no knowledge of the algorithm.
    pub fn from_bytes(bytes: &[u8]) -> Result<Self, FingerprintError> {
        bytes.try_into().map(Self).map_err(|_| FingerprintError::Length(bytes.len()))
    }

    /// The version of the algorithm that made this fingerprint.
    pub fn version(&self) -> u8 {
        self.0[0]
    }

    /// Whether two fingerprints can be compared. If not, a difference says nothing about the payloads.
    fn same_algorithm(&self, other: &Self) -> bool {
        self.version() == other.version()
    }

    /// Whether both may be of the same payload: they are equal, or of two algorithms, which cannot be
    /// compared. A release that changes the algorithm must not turn every retry into a mismatch.
    #[must_use]
    pub fn matches(&self, other: &Self) -> bool {
        self == other || !self.same_algorithm(other)
    }

    /// All 66 hexadecimal digits of the stored form; parsing reads them back.
    pub fn to_hex(&self) -> String {
        hex::encode(self.0)
    }
}

/// A short form for messages: `v1:` and 16 digits of the digest.
impl fmt::Display for Fingerprint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "v{}:{}", self.version(), hex::encode(&self.0[1..9]))
    }
}

impl fmt::Debug for Fingerprint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Fingerprint({self})")
    }
}

impl FromStr for Fingerprint {
    type Err = FingerprintError;

    fn from_str(text: &str) -> Result<Self, FingerprintError> {
        let bytes = hex::decode(text).map_err(|_| FingerprintError::NotHex)?;
        Self::from_bytes(&bytes)
    }
}

impl Serialize for Fingerprint {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(&self.to_hex())
    }
}

impl<'de> Deserialize<'de> for Fingerprint {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(serde::de::Error::custom)
    }
}

/// The reason why something is not a stored fingerprint.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum FingerprintError {
    /// The stored form has another length.
    #[error("a fingerprint has 33 bytes, not {0}")]
    Length(usize),
    /// The text is not made of pairs of hexadecimal digits.
    #[error("a fingerprint is written in pairs of hexadecimal digits")]
    NotHex,
}

/// Collects the named fields of a payload. Names and order count; a missing field differs from an empty
/// one.
#[must_use = "fields have a fingerprint only once finished"]
#[derive(Clone)]
pub struct Fields(Parts);

impl Fields {
    /// Adds a complete field.
    pub fn field(self, name: &str, value: &[u8]) -> Self {
        // Its digest, not its bytes: content that arrives in pieces could be hashed before its length is known.
        Self(self.0.part(name.as_bytes()).part(&Sha256::digest(value)))
    }

    /// Adds a field by its fingerprint, such as a JSON body. It never equals a field with the same bytes: its
    /// part is 33 bytes long, that of any other field is a digest of 32.
    pub fn fingerprint(self, name: &str, value: Fingerprint) -> Self {
        Self(self.0.part(name.as_bytes()).part(value.as_bytes()))
    }

    /// The fingerprint of all fields.
    pub fn finish(self) -> Fingerprint {
        self.0.fingerprint()
    }
}

// Unfinished hashes do not belong in logs.
impl fmt::Debug for Fields {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Fields").finish_non_exhaustive()
    }
}

/// The SHA-256 of a JSON text in its canonical form (RFC 8785), in hexadecimal digits: for keys that other programs must be
/// able to compute. Other than in a [fingerprint](Fingerprint::of_json), `1` and `1.0` are equal.
///
/// # Errors
/// The text has no canonical form.
pub fn json_hash(payload: &[u8]) -> Result<String, JsonError> {
    canonicalize_without(payload, &[]).map(|canonical| sha256_hex(&canonical.bytes))
}

/// The SHA-256 of bytes in hexadecimal digits.
#[must_use]
pub fn sha256_hex(bytes: &[u8]) -> String {
    hex::encode(Sha256::digest(bytes))
}

/// The key for the call of an operation's `step` to another service: the same on every attempt, different
/// for every step, and it reveals nothing about the operation.
///
/// It has 32 characters of `a-z`, `2-7` and `_`: the limit of Amazon Pay, the strictest of the large
/// services (Worldline: 40; a UUID's 36 are the common limit elsewhere). Its 128 bits of hash make it
/// infeasible to hit a given key of another tenant.
pub(crate) fn derive_key(scope_parts: &[&str], key: &str, step: &str) -> String {
    let mut parts = Parts::new("semel derived key 1");
    for part in scope_parts.iter().chain(&[key, step]) {
        parts = parts.part(part.as_bytes());
    }
    let digest = parts.digest();
    let (hash, _) = digest.as_chunks::<16>();
    format!("semel_{}", base32(u128::from_be_bytes(hash[0])))
}

/// A short name for an operation in log lines and for `semel why`, because log lines must not contain
/// keys.
///
/// Among a million operations the chance that two share one is 1 in 560, so a look-up must expect more
/// than one result. It does not protect a key that can be guessed: a guess can be hashed, too.
pub fn short_hash(tenant: &str, service: &str, kind: &str, key: &str) -> String {
    let mut parts = Parts::new("semel short hash 1");
    for part in [tenant, service, kind, key] {
        parts = parts.part(part.as_bytes());
    }
    hex::encode(&parts.digest()[..6])
}

/// The first 16 bytes of the hash of parts, for this purpose.
pub(crate) fn digest_of(purpose: &str, parts: &[&str]) -> [u8; 16] {
    let digest = parts.iter().fold(Parts::new(purpose), |all, part| all.part(part.as_bytes())).digest();
    let (first, _) = digest.as_chunks::<16>();
    first[0]
}

/// Writes length-prefixed parts into the hash.
#[derive(Clone)]
struct Parts(Sha256);

impl Parts {
    fn new(tag: &str) -> Self {
        Self(Sha256::new()).part(tag.as_bytes())
    }

    fn part(mut self, bytes: &[u8]) -> Self {
        self.0.update((bytes.len() as u64).to_be_bytes());
        self.0.update(bytes);
        self
    }

    fn digest(self) -> [u8; 32] {
        self.0.finalize().into()
    }

    fn fingerprint(self) -> Fingerprint {
        let mut bytes = [VERSION; LENGTH];
        bytes[1..].copy_from_slice(&self.digest());
        Fingerprint(bytes)
    }
}

/// The 26 digits of a number in the lower-case alphabet of RFC 4648.
fn base32(number: u128) -> String {
    const ALPHABET: [u8; 32] = *b"abcdefghijklmnopqrstuvwxyz234567";
    let digit = |place: u32| char::from(ALPHABET[(number >> (5 * place)) as usize % 32]);
    (0..26).rev().map(digit).collect()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn json(text: &str) -> Fingerprint {
        Fingerprint::of_json(text.as_bytes()).unwrap()
    }

    /// Version 1, computed by another implementation. Databases contain these values: a change needs a new
    /// version, not a new expectation.
    #[test]
    fn version_1_never_changes() {
        let request = Fingerprint::fields().field("method", b"POST").fingerprint("body", json("{}")).finish();
        for (fingerprint, expected) in [
            (Fingerprint::of_bytes(b""), "01b61e5a46152744257b88d00b00f3a8fe76113c55378d5a616fa5d642c112d15c"),
            (Fingerprint::of_bytes(b"semel"), "013fa070c03bb4fc6fbfb582c79432326877525dc507529adfcfc5d3cd4533afc2"),
            (json(r#"{"b": 1.0, "a": [2]}"#), "015219d0cfa2de8805c83e9293a1fb6edf984730fe670a1a8d9d19889056b8d0b8"),
            (request, "018f0e6c943373c04ffd00399ffc7e72f904ce2655b7383cf2a190af0041d33eac"),
        ] {
            assert_eq!(fingerprint.to_hex(), expected);
        }
    }

    #[test]
    fn derived_names_never_change() {
        let scope = ["default", "proposals", "create"];
        assert_eq!(derive_key(&scope, "k-1", "charge"), "semel_g4mueqm3vpcne2cxe7wvlzcqkx");
        assert_eq!(short_hash("default", "proposals", "create", "k-1"), "d08ac67842ff");
    }

    #[test]
    fn helpers_never_collide() {
        let payload = b"{}";
        let of_bytes = Fingerprint::of_bytes(payload);
        let of_field = Fingerprint::fields().field("", payload).finish();
        let all = [of_bytes, json("{}"), of_field, Fingerprint::fields().finish()];
        assert_eq!(all.into_iter().collect::<std::collections::HashSet<_>>().len(), all.len());
        // A nested fingerprint differs from a field with its bytes.
        let nested = Fingerprint::fields().fingerprint("f", of_bytes).finish();
        assert_ne!(nested, Fingerprint::fields().field("f", of_bytes.as_bytes()).finish());
    }

    #[test]
    fn the_spelling_of_json_does_not_count_but_that_of_numbers_does() {
        assert_eq!(json(r#"{"a":1,"b":"é"}"#), json(r#" {"b":"\u00e9", "a":1} "#));
        assert_ne!(json(r#"{"a":1}"#), json(r#"{"a":1.0}"#));
        assert_ne!(json("[1,1.0]"), json("[1.0,1]"));
        assert_ne!(json("[0]"), json("[-0]"));
        assert_ne!(json(r#""\u00e9""#), json(r#""e\u0301""#));
        assert!(Fingerprint::of_json(b"{\"a\":1,\"a\":1}").is_err());
    }

    #[test]
    fn excluded_members_count_as_absent() {
        let without = |text: &str| Fingerprint::of_json_without(text.as_bytes(), &["/pending_webhooks"]).unwrap();
        let event = without(r#"{"id":"evt_1","pending_webhooks":2}"#);
        assert_eq!(event, without(r#"{"pending_webhooks":1.5,"id":"evt_1"}"#));
        assert_eq!(event, json(r#"{"id":"evt_1"}"#));
        assert_ne!(event, without(r#"{"id":"evt_2","pending_webhooks":2}"#));
    }

    #[test]
    fn integers_beyond_a_double_are_compared_by_their_digits() {
        let digits = |text: &str| Fingerprint::of_json_by_digits(text.as_bytes(), &["/n"]).unwrap();
        let big = digits(r#"{"a":9007199254740993,"b":9007199254740992,"n":1}"#);
        assert_eq!(big, digits(r#" {"n":2, "b":9007199254740992, "a":9007199254740993}"#));
        for other in [
            r#"{"a":9007199254740992,"b":9007199254740992}"#,
            r#"{"a":9007199254740992,"b":9007199254740993}"#,
            r#"{"a":9007199254740991,"b":9007199254740992}"#,
            r#"{"a":-9007199254740993,"b":9007199254740992}"#,
            r#"{"a":"9007199254740993","b":9007199254740992}"#,
        ] {
            assert_ne!(digits(other), big, "{other}");
        }
        // It changes no fingerprint that `of_json_without` gives, and accepts nothing else.
        for text in ["[1,1.0,1e2,-0]", "18446744073709551616", r#"{"a":[null]}"#] {
            assert_eq!(digits(text), json(text));
        }
        assert!(Fingerprint::of_json(b"9007199254740993").is_err());
        for wrong in ["1e400", "[9007199254740993,1e400]", r#"{"a":9007199254740993,"a":1}"#] {
            assert!(Fingerprint::of_json_by_digits(wrong.as_bytes(), &[]).is_err(), "{wrong}");
        }
    }

    #[test]
    fn names_boundaries_order_and_absence_of_fields_count() {
        let fields = |fields: &[(&str, &str)]| {
            let all = fields.iter();
            all.fold(Fingerprint::fields(), |all, (n, v)| all.field(n, v.as_bytes())).finish()
        };
        assert_ne!(fields(&[("ab", "c")]), fields(&[("a", "bc")]));
        assert_ne!(fields(&[("a", "x"), ("b", "y")]), fields(&[("b", "y"), ("a", "x")]));
        assert_ne!(fields(&[("a", "x"), ("b", "y")]), fields(&[("a", "y"), ("b", "x")]));
        assert_ne!(fields(&[("a", "")]), fields(&[]));
        assert_ne!(fields(&[("a", ""), ("a", "")]), fields(&[("a", "")]));
    }

    #[test]
    fn the_stored_form_keeps_unknown_versions() {
        let mut bytes = *Fingerprint::of_bytes(b"x").as_bytes();
        let ours = Fingerprint::from_bytes(&bytes).unwrap();
        assert_eq!((ours, ours.version()), (Fingerprint::of_bytes(b"x"), 1));
        bytes[0] = 7;
        let newer = Fingerprint::from_bytes(&bytes).unwrap();
        assert_eq!((newer.version(), newer.as_bytes()), (7, &bytes));
        assert_eq!(newer, Fingerprint::from_bytes(&bytes).unwrap());
        assert_ne!(newer, ours);
        assert!(ours.same_algorithm(&Fingerprint::of_bytes(b"y")) && !ours.same_algorithm(&newer));
        assert_eq!(Fingerprint::from_bytes(&[1; 32]), Err(FingerprintError::Length(32)));
    }

    #[test]
    fn display_is_short_and_hex_is_complete() {
        let fingerprint = Fingerprint::of_bytes(b"semel");
        assert_eq!(fingerprint.to_string(), "v1:3fa070c03bb4fc6f");
        assert_eq!(format!("{fingerprint:?}"), "Fingerprint(v1:3fa070c03bb4fc6f)");
        let hex = fingerprint.to_hex();
        assert_eq!(hex.to_uppercase().parse(), Ok(fingerprint));
        assert_eq!(serde_json::to_string(&fingerprint).unwrap(), format!("\"{hex}\""));
        let read: Fingerprint = serde_json::from_str(&format!("\"{hex}\"")).unwrap();
        assert_eq!(read, fingerprint);
        assert_eq!(hex[2..].parse::<Fingerprint>(), Err(FingerprintError::Length(32)));
        for wrong in [&hex[1..], &hex.replacen("01", "+1", 1), "é"] {
            assert_eq!(wrong.parse::<Fingerprint>(), Err(FingerprintError::NotHex));
        }
        assert!(serde_json::from_str::<Fingerprint>("\"v1\"").is_err());
    }

    #[test]
    fn derived_keys_differ_by_every_part_and_are_short() {
        let key = derive_key(&["t", "s", "k"], "key", "step");
        assert_eq!(key, derive_key(&["t", "s", "k"], "key", "step"));
        assert_eq!(key.len(), 32);
        assert!(key.bytes().all(|byte| matches!(byte, b'a'..=b'z' | b'2'..=b'7' | b'_')));
        for (scope, name, step) in [
            (["t", "s", "k"], "key", "step2"),
            (["t", "s", "k"], "ke", "ystep"),
            (["t", "sk", ""], "key", "step"),
            (["t", "s", ""], "kkey", "step"),
        ] {
            assert_ne!(derive_key(&scope, name, step), key);
        }
        assert_ne!(derive_key(&["t", "s"], "k", "key"), derive_key(&["t"], "s", "k"));
    }

    #[test]
    fn short_hashes_differ_by_scope_and_by_part_boundaries() {
        assert_ne!(short_hash("t", "s", "k", "key"), short_hash("u", "s", "k", "key"));
        assert_ne!(short_hash("t:1", "s", "k", "x"), short_hash("t", "1:s", "k", "x"));
        assert_eq!(short_hash("", "", "", "").len(), 12);
    }

    proptest! {
        #[test]
        fn stored_and_printed_forms_come_back(bytes in any::<[u8; 32]>(), version in any::<u8>()) {
            let stored = [&[version], &bytes[..]].concat();
            let fingerprint = Fingerprint::from_bytes(&stored).unwrap();
            prop_assert_eq!(&fingerprint.as_bytes()[..], &stored[..]);
            prop_assert_eq!(fingerprint.to_hex().parse(), Ok(fingerprint));
        }
    }
}
