//! Invalid verifiers, custom schemes, and values that are never printed.

use std::time::Duration;

use semel_http::webhooks::{
    Algorithm, DEFAULT_TOLERANCE, Encoding, HmacScheme, Mistakes, Refused, Secret, Verified, Verifier,
};

use crate::webhooks::{STANDARD_SECRET, T, at, headers, word};

fn fields<T>(built: Result<T, Mistakes>) -> Vec<String> {
    built.err().map(|mistakes| mistakes.all().iter().map(|mistake| mistake.field.clone()).collect()).unwrap_or_default()
}

fn scheme() -> HmacScheme {
    HmacScheme { header: "x-signature".into(), ..HmacScheme::default() }
}

#[test]
fn a_verifier_with_invalid_secrets_or_tolerance_cannot_be_built() {
    let none: [&str; 0] = [];
    assert_eq!(fields(Verifier::stripe(none, Duration::ZERO)), ["secrets", "tolerance"]);
    assert_eq!(fields(Verifier::stripe(["", "a", ""], DEFAULT_TOLERANCE)), ["secrets[0]", "secrets[2]"]);
    assert_eq!(fields(Verifier::stripe(["a"], Duration::from_millis(999))), ["tolerance"]);
    assert_eq!(fields(Verifier::stripe(["a"], Duration::from_secs(1))), [""; 0]);
    assert_eq!(fields(Verifier::stripe(["whsec_", " a", "a\n"], DEFAULT_TOLERANCE)).len(), 3);
    assert_eq!(fields(Verifier::standard(["", "whsec_", "whsec_!", "whsec_a"], Duration::ZERO)).len(), 5);
    assert_eq!(fields(Verifier::standard(none, DEFAULT_TOLERANCE)), ["secrets"]);
    for build in [Verifier::github::<&str>, Verifier::shopify::<&str>] as [fn(Vec<&'static str>) -> _; 2] {
        assert_eq!(fields(build(vec![])), ["secrets"]);
        assert_eq!(fields(build(vec!["", "a"])), ["secrets[0]"]);
    }
    assert_eq!(fields(Verifier::hmac(&scheme(), none, Duration::ZERO)), ["secrets", "tolerance"]);
}

#[test]
fn all_mistakes_of_a_scheme_are_reported_together() {
    let wrong = HmacScheme {
        header: String::new(),
        prefix: "v\u{e9}".into(),
        signed: "{timestamp}{body}".into(),
        timestamp_header: Some("x y".into()),
        id_header: Some("\u{e9}".into()),
        ..HmacScheme::default()
    };
    let mistakes = Verifier::hmac(&wrong, [""], Duration::ZERO).unwrap_err();
    let text = mistakes.to_string();
    let all = ["header", "prefix", "signed", "timestamp_header", "id_header", "secrets[0]", "tolerance"];
    assert_eq!(fields::<()>(Err(mistakes)), all);
    assert!(text.starts_with("header must not be empty; prefix must "), "{text}");
}

#[test]
fn a_signed_timestamp_or_id_needs_a_header_and_an_unsigned_timestamp_is_refused() {
    let with = |signed: &str, timestamp: Option<&str>, id: Option<&str>| {
        let (timestamp_header, id_header) = (timestamp.map(str::to_owned), id.map(str::to_owned));
        let scheme = HmacScheme { signed: signed.to_owned(), timestamp_header, id_header, ..scheme() };
        fields(Verifier::hmac(&scheme, ["a"], DEFAULT_TOLERANCE))
    };
    assert_eq!(with("{body}", None, None), [""; 0]);
    assert_eq!(with("{body}", None, Some("x-id")), [""; 0]);
    assert_eq!(with("{body}", Some("x-t"), None), ["timestamp_header"]);
    assert_eq!(with("{timestamp}.{body}", None, None), ["timestamp_header"]);
    assert_eq!(with("{id}.{timestamp}.{body}", None, None), ["timestamp_header", "id_header"]);
    assert_eq!(with("{id}.{timestamp}.{body}", Some("x-t"), Some("x-id")), [""; 0]);
    assert_eq!(with("{id}.{timestamp}.{body}", Some("x-t"), Some("X-T")), ["header"]);
    assert_eq!(with("{id}.{timestamp}.{body}", Some("x-signature"), Some("x-id")), ["header"]);
}

/// RFC 2202 and RFC 4231, the second test case of each.
#[test]
fn each_algorithm_matches_its_rfc_vector() {
    for (algorithm, code) in [
        ("sha1", "effcdf6ae5eb2fa2d27416d5f184df9c259a7c79"),
        ("sha256", "5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843"),
        (
            "sha512",
            "164b7a7bfcf819e2e395fbe73b56e0a387bd64222e831fd610270cd7ea2505549758bf75c05a994a6d034f65f8f0e6fdcaeab1a34d4a\
             6b4b636e070a38bce737",
        ),
    ] {
        let scheme = HmacScheme { algorithm: algorithm.parse().unwrap(), ..scheme() };
        let verifier = Verifier::hmac(&scheme, ["Jefe"], DEFAULT_TOLERANCE).unwrap();
        let body = b"what do ya want for nothing?";
        let says = |code: &str| verifier.verify(&headers([("x-signature", code)]), body, at(T));
        let expected = Verified { id: None, id_is_signed: false, timestamp: None, signs_only_body: true, secret: 0 };
        assert_eq!(says(code), Ok(expected), "{algorithm}");
        assert_eq!(says(&code.replacen(&code[..1], "0", 1)), Err(Refused::Wrong), "{algorithm}");
        assert_eq!(word(says(&code[2..])), "malformed", "{algorithm}");
    }
}

#[test]
fn a_custom_scheme_signs_its_template() {
    let chat = HmacScheme {
        prefix: "v0=".into(),
        signed: "v0:{timestamp}:{body}".into(),
        timestamp_header: Some("x-time".into()),
        id_header: Some("x-id".into()),
        ..scheme()
    };
    let verifier = Verifier::hmac(&chat, ["geheim"], DEFAULT_TOLERANCE).unwrap();
    let code = "v0=fd44502ec437b0981ff9806334ec657bd358e732303e3c46eb63a9c8a5b9d7fa";
    let signed = headers([("x-signature", code), ("x-time", "1700000000"), ("x-id", "e.1")]);
    let verified = verifier.verify(&signed, b"payload=1", at(T)).unwrap();
    let expected = Verified {
        id: Some("e.1".into()),
        id_is_signed: false,
        timestamp: Some(1_700_000_000),
        signs_only_body: false,
        secret: 0,
    };
    assert_eq!(verified, expected);
    assert_eq!(verifier.sign(Some("e.1"), at(T), b"payload=1"), Ok(signed.clone()));
    assert_eq!(word(verifier.verify(&signed, b"payload=1", at(T + 301))), "too_old");
    let timeless = headers([("x-signature", code), ("x-id", "e.1")]);
    assert_eq!(word(verifier.verify(&timeless, b"payload=1", at(T))), "missing");

    let shop = HmacScheme {
        algorithm: Algorithm::Sha512,
        encoding: Encoding::Base64,
        signed: "{id}|{timestamp}|{body}".into(),
        timestamp_header: Some("x-time".into()),
        id_header: Some("x-id".into()),
        ..scheme()
    };
    let verifier = Verifier::hmac(&shop, ["geheim"], DEFAULT_TOLERANCE).unwrap();
    let code = "QPKBb8V2EFkaR9zEjOxESmNYLgqN6XTzPCWR2AKPGGk/RIS04j929Lv10hF5meZ7dGSGGtaRUzCtefLKg+vEgw==";
    let with_id = |id| headers([("x-signature", code), ("x-time", "1700000000"), ("x-id", id)]);
    let says = |id| verifier.verify(&with_id(id), b"payload=1", at(T));
    assert!(says("e-1").unwrap().id_is_signed);
    assert_eq!(word(says("e-2")), "wrong");
    assert_eq!(word(says("e|1")), "malformed", "the id contains the separator");
    let anonymous = headers([("x-signature", code), ("x-time", "1700000000")]);
    assert_eq!(word(verifier.verify(&anonymous, b"payload=1", at(T))), "missing");
}

#[test]
fn a_standard_secret_is_the_same_key_with_and_without_padding_and_prefix() {
    let signed =
        Verifier::standard([STANDARD_SECRET], DEFAULT_TOLERANCE).unwrap().sign(Some("m"), at(T), b"x").unwrap();
    let bare = STANDARD_SECRET.trim_start_matches("whsec_");
    for secret in [bare, bare.trim_end_matches('='), STANDARD_SECRET.trim_end_matches('=')] {
        let verifier = Verifier::standard([secret], DEFAULT_TOLERANCE).unwrap();
        assert_eq!(word(verifier.verify(&signed, b"x", at(T))), "ok", "{secret}");
    }
    // A Stripe secret is not decoded: the prefix is part of it.
    let stripe = Verifier::stripe(["whsec_abc"], DEFAULT_TOLERANCE).unwrap().sign(None, at(T), b"x").unwrap();
    let other = Verifier::stripe(["abc"], DEFAULT_TOLERANCE).unwrap();
    assert_eq!(word(other.verify(&stripe, b"x", at(T))), "wrong");
}

#[test]
fn algorithms_and_encodings_are_parsed_from_their_names() {
    for algorithm in [Algorithm::Sha1, Algorithm::Sha256, Algorithm::Sha512] {
        assert_eq!(algorithm.to_string().parse(), Ok(algorithm));
    }
    for encoding in [Encoding::Hex, Encoding::Base64] {
        assert_eq!(encoding.to_string().parse(), Ok(encoding));
    }
    assert_eq!("md5".parse::<Algorithm>(), Err("must be sha1, sha256 or sha512, not \"md5\"".to_owned()));
    assert!("Hex".parse::<Encoding>().is_err());
}

#[test]
fn secrets_and_received_values_are_never_printed() {
    let secret = Secret::from("geheim");
    assert_eq!(
        (format!("{secret:?}"), secret.to_string(), secret.expose()),
        ("Secret(***)".into(), "***".into(), "geheim")
    );
    let verifier = Verifier::stripe([secret], DEFAULT_TOLERANCE).unwrap();
    assert!(!format!("{verifier:?} {verifier:#?}").contains("geheim"));
    let mistakes = Verifier::standard(["geheim geheim"], DEFAULT_TOLERANCE).unwrap_err();
    assert!(!format!("{mistakes} {mistakes:?}").contains("geheim"));
    for header in ["t=geheim,v1=aa", "t=1700000000,v1=geheim", "geheim", "v1=geheim", "t=1,t=geheim"] {
        let refused = verifier.verify(&headers([("stripe-signature", header)]), b"geheim", at(T)).unwrap_err();
        assert!(!format!("{refused} {refused:?}").contains("geheim"), "{refused:?}");
        assert!(Refused::WORDS.contains(&refused.word()));
    }
}
