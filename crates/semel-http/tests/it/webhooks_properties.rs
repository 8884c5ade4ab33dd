//! Signed deliveries are accepted unchanged, and refused if any bit differs.

use axum::http::{HeaderMap, HeaderValue};
use proptest::{collection::vec, prelude::*, sample::select};
use semel_http::webhooks::{DEFAULT_TOLERANCE, HmacScheme, Verifier};

use crate::{
    webhooks::{T, at, headers},
    webhooks_naive::Sender,
};

fn schemes() -> impl Strategy<Value = HmacScheme> {
    let words = (select(vec!["sha1", "sha256", "sha512"]), select(vec!["hex", "base64"]), "[a-z0-9=]{0,6}");
    let signed =
        select(vec!["{body}", "{timestamp}.{body}", "v0:{timestamp}:{body}", "{id}.{timestamp}.{body}", "{body}#{id}"]);
    (words, signed).prop_map(|((algorithm, encoding, prefix), signed)| HmacScheme {
        header: "x-signature".into(),
        algorithm: algorithm.parse().unwrap(),
        encoding: encoding.parse().unwrap(),
        prefix,
        timestamp_header: signed.contains("{timestamp}").then(|| "x-time".into()),
        id_header: Some("x-id".into()),
        signed: signed.into(),
    })
}

/// Flips one bit of a header's value; `None` if the result is no valid header.
fn flip(headers: &HeaderMap, name: &str, bit: usize) -> Option<HeaderMap> {
    let mut value = headers[name].as_bytes().to_vec();
    let bit = bit % (value.len() * 8);
    value[bit / 8] ^= 1 << (bit % 8);
    let mut changed = headers.clone();
    changed.insert(axum::http::HeaderName::try_from(name).unwrap(), HeaderValue::from_bytes(&value).ok()?);
    Some(changed)
}

/// Whether a header is equal in both, apart from upper and lower case.
fn same_but_for_case(one: &HeaderMap, other: &HeaderMap, name: &str) -> bool {
    one[name].as_bytes().eq_ignore_ascii_case(other[name].as_bytes())
}

proptest! {
    #[test]
    fn prop_a_signed_delivery_is_accepted_and_is_refused_if_any_bit_differs(
        sender in select(Sender::ALL.to_vec()),
        id in "[!-\\-/-~]{1,40}",
        body in vec(any::<u8>(), 0..300),
        skew in 0_u64..=600,
        bit in any::<prop::sample::Index>(),
    ) {
        let verifier = sender.verifier();
        let now = at(T + skew - 300);
        let signed = verifier.sign(Some(&id), at(T), &body).unwrap();
        let verified = verifier.verify(&signed, &body, now).unwrap();
        let expected = (sender != Sender::Stripe).then_some(id);
        prop_assert_eq!(verified.id, expected);

        if !body.is_empty() {
            let (mut changed, bit) = (body.clone(), bit.index(body.len() * 8));
            changed[bit / 8] ^= 1 << (bit % 8);
            prop_assert!(verifier.verify(&signed, &changed, now).is_err());
        }
        for name in sender.headers() {
            let Some(changed) = flip(&signed, name, bit.index(1 << 20)) else { continue };
            let verdict = verifier.verify(&changed, &body, now);
            // An unsigned id can be changed; `id_is_signed` is false then.
            let unsigned_id = name.contains("delivery") || name.contains("webhook-id") && !verified.id_is_signed;
            let hex_case = *name == "x-hub-signature-256" || *name == "stripe-signature";
            let harmless = hex_case && same_but_for_case(&signed, &changed, name) && !changed_prefix(&signed, &changed, name);
            prop_assert!(verdict.is_err() || unsigned_id || harmless, "{}: {:?}", name, changed);
        }
    }

    #[test]
    fn prop_every_scheme_accepts_only_its_own_signatures(
        scheme in schemes(),
        id in "[a-z0-9_]{1,20}",
        body in vec(any::<u8>(), 1..100),
        bit in any::<prop::sample::Index>(),
    ) {
        let verifier = Verifier::hmac(&scheme, ["geheim"], DEFAULT_TOLERANCE).unwrap();
        let signed = verifier.sign(Some(&id), at(T), &body).unwrap();
        let verified = verifier.verify(&signed, &body, at(T)).unwrap();
        prop_assert_eq!(verified.id.as_deref(), Some(&id[..]));
        prop_assert_eq!(verified.signs_only_body, scheme.signed == "{body}");
        prop_assert_eq!(verified.timestamp.is_some(), scheme.timestamp_header.is_some());

        let (mut changed, bit) = (body.clone(), bit.index(body.len() * 8));
        changed[bit / 8] ^= 1 << (bit % 8);
        prop_assert_eq!(verifier.verify(&signed, &changed, at(T)).unwrap_err().word(), "wrong");
        let other = Verifier::hmac(&scheme, ["geheim2"], DEFAULT_TOLERANCE).unwrap();
        prop_assert_eq!(other.verify(&signed, &body, at(T)).unwrap_err().word(), "wrong");
        let mut renamed = signed.clone();
        renamed.insert("x-id", HeaderValue::from_static("another-one"));
        prop_assert_eq!(verifier.verify(&renamed, &body, at(T)).is_ok(), !verified.id_is_signed);
    }

    #[test]
    fn prop_random_headers_are_refused_without_a_panic(
        values in vec(vec(any::<u8>(), 0..200), 3),
        body in vec(any::<u8>(), 0..50),
    ) {
        let values: Vec<Vec<u8>> =
            values.into_iter().map(|value| value.into_iter().filter(|byte| *byte >= 32 && *byte != 127).collect()).collect();
        for sender in Sender::ALL {
            let lines = sender.headers().iter().copied().zip(&values);
            prop_assert!(sender.verifier().verify(&headers(lines), &body, at(T)).is_err());
        }
    }

    /// The headers are made of random parts.
    #[test]
    fn prop_the_stripe_verifier_agrees_with_the_reference(pieces in vec(0_usize..16, 0..12)) {
        let verifier = Sender::Stripe.verifier();
        let signed = verifier.sign(None, at(T), b"body").unwrap();
        let right = signed["stripe-signature"].to_str().unwrap().split_once("v1=").unwrap().1.to_owned();
        let (upper, short) = (right.to_uppercase(), &right[..62]);
        let time = T.to_string();
        let words = [
            ",", ",", ",", "t=", &time, "v1=", &right, &upper, short, " ", "\t", "0", "=", "v0=", "t=1700000000,", "v1=00,",
        ];
        let header: String = pieces.iter().map(|piece| words[*piece]).collect();
        let verdict = verifier.verify(&headers([("stripe-signature", &header)]), b"body", at(T));
        let expected = Sender::Stripe.accepts(&[header.clone().into_bytes()], b"body");
        prop_assert_eq!(verdict.is_ok(), expected, "{}: {:?}", header, verdict);
        // The same parts inside a valid header, so that both verdicts are frequent.
        let around = format!("t={time},{header},v1={right}");
        let verdict = verifier.verify(&headers([("stripe-signature", &around)]), b"body", at(T));
        let expected = Sender::Stripe.accepts(&[around.clone().into_bytes()], b"body");
        prop_assert_eq!(verdict.is_ok(), expected, "{}: {:?}", around, verdict);
    }
}

/// Whether the text before the signature differs: `SHA256=` is not `sha256=`.
fn changed_prefix(one: &HeaderMap, other: &HeaderMap, name: &str) -> bool {
    let before = |headers: &HeaderMap| headers[name].as_bytes().iter().rev().skip(64).copied().collect::<Vec<u8>>();
    before(one) != before(other)
}
