//! Published test vectors, and others made with the same tools.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use axum::http::{HeaderMap, HeaderName, HeaderValue};
use semel_http::webhooks::{DEFAULT_TOLERANCE, Refused, Verified, Verifier};

pub(crate) const T: u64 = 1_700_000_000;
pub(crate) const B: &str = r#"{"id":"evt_test_1","object":"event","type":"payment_intent.succeeded"}"#;
pub(crate) const SECRET: &str = "whsec_test_secret";
pub(crate) const OLD_SECRET: &str = "whsec_old_secret";
pub(crate) const STANDARD_SECRET: &str = "whsec_c2VtZWwtc3RhbmRhcmQtd2ViaG9va3Mta2V5IQ==";
/// The signatures of B with the current and with the old secret.
pub(crate) const V1: &str = "871acfe933554b446cc41d791076dd56a10c0553cc61aafbeb881d0082b45043";
pub(crate) const OLD_V1: &str = "16aefa73878372c037f147c10813a519e6a72ba4d9e4f3ef790e9a49cca4b538";
pub(crate) const STANDARD_V1: &str = "v1,cx3PKWlrf0jsd1X5P77e0cPHHqyJlyy5WRFTZ/OUQh4=";
pub(crate) const GITHUB_BODY: &str = "Hello, World!";
pub(crate) const GITHUB_V: &str = "sha256=757107ea0eb2509fc211221cce984b8a37570b6d7586c22c46f4379c8b043e17";
const SHOPIFY_V: &str = "tryM9DY31TtbSS/HuzgqHkq8LW+sYhux3+iHy/wOb6k=";

pub(crate) fn at(unix: u64) -> SystemTime {
    UNIX_EPOCH + Duration::from_secs(unix)
}

pub(crate) fn headers<'a, V: AsRef<[u8]> + 'a>(lines: impl IntoIterator<Item = (&'a str, V)>) -> HeaderMap {
    let line = |(name, value): (&str, V)| {
        (HeaderName::try_from(name).unwrap(), HeaderValue::from_bytes(value.as_ref()).unwrap())
    };
    lines.into_iter().map(line).fold(HeaderMap::new(), |mut map, (name, value)| {
        map.append(name, value);
        map
    })
}

pub(crate) fn stripe() -> Verifier {
    Verifier::stripe([SECRET], DEFAULT_TOLERANCE).unwrap()
}

/// Verifies B with this `Stripe-Signature`, at the time of the vectors.
pub(crate) fn stripe_says(header: impl AsRef<[u8]>) -> Result<Verified, Refused> {
    stripe().verify(&headers([("Stripe-Signature", header)]), B.as_bytes(), at(T))
}

pub(crate) fn word(answer: Result<Verified, Refused>) -> &'static str {
    answer.map_or_else(|refused| refused.word(), |_| "ok")
}

#[test]
fn stripes_published_vector_is_accepted() {
    let body = concat!(
        r#"{"account":"acct_123","api_version":"2017-05-25","created":1533204620,"data":{"object":{"amount":1000,"#,
        r#""currency":"usd","customer":"cus_123","date":1533204620,"description":"Test Invoice Item","#,
        r#""discountable":false,"id":"ii_123","invoice":"in_123","livemode":false,"metadata":{},"#,
        r#""object":"invoiceitem","period":{"end":1533204620,"start":1533204620},"proration":false,"quantity":3,"#,
        r#""quantity_decimal":"0"}},"id":"evt_123","livemode":false,"object":"event","pending_webhooks":1,"#,
        r#""request":{"id":"req_123","idempotency_key":"idempotency-key-123"},"type":"invoiceitem.created"}"#,
    );
    assert_eq!(body.len(), 569);
    let verifier = Verifier::stripe(["secret"], DEFAULT_TOLERANCE).unwrap();
    let header = "t=1533204620,v1=d7373bc68f4bd320b253cd7461f87af6e1cdf1b4d7db1614d8d1d746972d2d0a";
    let verified = verifier.verify(&headers([("Stripe-Signature", header)]), body.as_bytes(), at(1_533_204_620));
    let expected =
        Verified { id: None, id_is_signed: false, timestamp: Some(1_533_204_620), signs_only_body: false, secret: 0 };
    assert_eq!(verified, Ok(expected));
}

#[test]
fn a_stripe_signature_covers_the_exact_bytes() {
    let with_newline = format!("{B}\n");
    let vectors = [
        (SECRET, B, V1),
        (OLD_SECRET, B, OLD_V1),
        (SECRET, &with_newline, "68f293692f0ceaecf787a3fb411b8d6d52bf15b48fdb8e78abd248ea4ed8195e"),
        (
            SECRET,
            "{\"id\":\"evt_test_2\",\"name\":\"Zo\u{eb} \u{1f389}\"}",
            "082858961d7f8529478ffe86a6c9cda0e9780955bffec05470509145c4d8c76f",
        ),
        (SECRET, "", "316b9ab98c15bfa039d243f3196acee619cf29749a91a634e6a8154e2f7b6727"),
    ];
    for (i, (secret, body, v1)) in vectors.iter().enumerate() {
        let verifier = Verifier::stripe([*secret], DEFAULT_TOLERANCE).unwrap();
        let signed = headers([("Stripe-Signature", format!("t={T},v1={v1}"))]);
        assert_eq!(word(verifier.verify(&signed, body.as_bytes(), at(T))), "ok", "{body}");
        assert_eq!(verifier.sign(None, at(T), body.as_bytes()), Ok(signed.clone()), "{body}");
        for (j, (_, other, _)) in vectors.iter().enumerate() {
            let same = i == j || body == other;
            assert_eq!(verifier.verify(&signed, other.as_bytes(), at(T)).is_ok(), same, "{body} for {other}");
        }
    }
}

/// The signature is right for this text, so only the zero is wrong.
#[test]
fn a_timestamp_with_a_leading_zero_is_refused_although_its_code_is_right() {
    let answer = stripe_says("t=01700000000,v1=33ed255e2c26fc17f2baf38b5550ba736754b468fee0b98b36ac94baacaf004f");
    assert_eq!(word(answer), "malformed");
}

#[test]
fn githubs_published_vector_is_accepted() {
    let verifier = Verifier::github(["It's a Secret to Everybody"]).unwrap();
    let signed = headers([("X-Hub-Signature-256", GITHUB_V), ("X-GitHub-Delivery", "72d3162e-cc78-11e3")]);
    let id = Some("72d3162e-cc78-11e3".to_owned());
    let expected = Verified { id, id_is_signed: false, timestamp: None, signs_only_body: true, secret: 0 };
    assert_eq!(verifier.verify(&signed, GITHUB_BODY.as_bytes(), at(T)), Ok(expected));
    assert_eq!(verifier.sign(Some("72d3162e-cc78-11e3"), at(T), GITHUB_BODY.as_bytes()), Ok(signed));
}

#[test]
fn the_standard_webhooks_vector_is_accepted() {
    let verifier = Verifier::standard([STANDARD_SECRET], DEFAULT_TOLERANCE).unwrap();
    let signed = headers([
        ("webhook-id", "msg_test_1"),
        ("webhook-timestamp", "1700000000"),
        ("webhook-signature", STANDARD_V1),
    ]);
    let id = Some("msg_test_1".to_owned());
    let expected =
        Verified { id, id_is_signed: true, timestamp: Some(1_700_000_000), signs_only_body: false, secret: 0 };
    assert_eq!(verifier.verify(&signed, B.as_bytes(), at(T)), Ok(expected));
    assert_eq!(verifier.sign(Some("msg_test_1"), at(T), B.as_bytes()), Ok(signed));
}

#[test]
fn the_shopify_vector_is_accepted() {
    let verifier = Verifier::shopify(["hush"]).unwrap();
    let signed = headers([("X-Shopify-Hmac-SHA256", SHOPIFY_V), ("X-Shopify-Webhook-Id", "b54557e4")]);
    let verified = verifier.verify(&signed, B.as_bytes(), at(T)).unwrap();
    assert_eq!(
        (verified.id.as_deref(), verified.id_is_signed, verified.signs_only_body),
        (Some("b54557e4"), false, true)
    );
    assert_eq!(verifier.sign(Some("b54557e4"), at(T), B.as_bytes()), Ok(signed));
}
