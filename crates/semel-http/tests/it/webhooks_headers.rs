//! Deliveries with a wrong signature, or without one.

use std::time::{Duration, UNIX_EPOCH};

use axum::http::{HeaderMap, HeaderValue};
use semel_http::webhooks::{DEFAULT_TOLERANCE, Refused, Verifier};

use crate::webhooks::{
    B, GITHUB_BODY, GITHUB_V, OLD_SECRET, OLD_V1, SECRET, STANDARD_SECRET, STANDARD_V1, T, V1, at, headers, stripe,
    stripe_says, word,
};

#[test]
fn a_delivery_without_a_signature_is_refused() {
    let github = Verifier::github(["s"]).unwrap();
    let shopify = Verifier::shopify(["s"]).unwrap();
    let standard = Verifier::standard([STANDARD_SECRET], DEFAULT_TOLERANCE).unwrap();
    for verifier in [&stripe(), &github, &shopify, &standard] {
        assert_eq!(word(verifier.verify(&HeaderMap::new(), b"", at(T))), "missing", "{verifier:?}");
        let mut empty = verifier.sign(Some("id"), at(T), b"").unwrap();
        assert_eq!(word(verifier.verify(&empty, b"", at(T))), "ok", "{verifier:?}");
        for name in ["stripe-signature", "x-hub-signature-256", "x-shopify-hmac-sha256", "webhook-signature"] {
            if let Some(value) = empty.get_mut(name) {
                *value = HeaderValue::from_static("");
            }
        }
        assert!(verifier.verify(&empty, b"", at(T)).is_err(), "{verifier:?}");
    }
}

#[test]
fn a_body_that_differs_from_the_signed_one_is_refused() {
    let signed = headers([("Stripe-Signature", format!("t={T},v1={V1}"))]);
    let (newline, spaced) = (format!("{B}\n"), B.replace(':', ": "));
    for body in [&newline, &spaced, &B.replace('1', "2"), &B[1..], ""] {
        assert_eq!(stripe().verify(&signed, body.as_bytes(), at(T)), Err(Refused::Wrong), "{body}");
    }
}

#[test]
fn the_tolerance_is_exact_for_old_and_for_future_timestamps() {
    let signed = headers([("Stripe-Signature", format!("t={T},v1={V1}"))]);
    let wrong = headers([("Stripe-Signature", format!("t={T},v1={OLD_V1}"))]);
    for (now, expected) in [
        (T - 301, "too_new"),
        (T - 300, "ok"),
        (T - 299, "ok"),
        (T, "ok"),
        (T + 299, "ok"),
        (T + 300, "ok"),
        (T + 301, "too_old"),
        (0, "too_new"),
    ] {
        assert_eq!(word(stripe().verify(&signed, B.as_bytes(), at(now))), expected, "{now}");
        // A forged signature is wrong at any time.
        assert_eq!(word(stripe().verify(&wrong, B.as_bytes(), at(now))), "wrong", "{now}");
    }
    let long_ago = UNIX_EPOCH - Duration::from_secs(1);
    assert_eq!(word(stripe().verify(&signed, B.as_bytes(), long_ago)), "too_new");
    let refused = stripe().verify(&signed, B.as_bytes(), at(T + 301)).unwrap_err();
    assert_eq!(refused.to_string(), "the delivery was signed 301 s ago, and 300 s are allowed");
    let patient = Verifier::stripe([SECRET], Duration::from_secs(301)).unwrap();
    assert_eq!(word(patient.verify(&signed, B.as_bytes(), at(T + 301))), "ok");
}

#[test]
fn any_matching_v1_in_any_position_is_enough() {
    let (a, b) = ("a".repeat(64), "b".repeat(64));
    for list in [[V1, &a, &b], [&a, V1, &b], [&a, &b, V1]] {
        let [one, two, three] = list;
        for header in [
            format!("t={T},v1={one},v1={two},v1={three}"),
            format!("v1={one},v1={two},t={T},v1={three}"),
            format!("v1={one},v0={two},v1={two},v1={three},t={T}"),
        ] {
            assert_eq!(word(stripe_says(&header)), "ok", "{header}");
        }
    }
}

#[test]
fn all_secrets_are_tried_and_the_matching_one_is_reported() {
    let signed = |v1: &str| headers([("Stripe-Signature", format!("t={T},v1={v1}"))]);
    for (secrets, new, old) in [
        (vec![SECRET, OLD_SECRET], Some(0), Some(1)),
        (vec![OLD_SECRET, SECRET], Some(1), Some(0)),
        (vec!["x", SECRET, "y", OLD_SECRET, "z"], Some(1), Some(3)),
        (vec![SECRET], Some(0), None),
        (vec!["x"], None, None),
    ] {
        let verifier = Verifier::stripe(secrets.clone(), DEFAULT_TOLERANCE).unwrap();
        let which = |v1| verifier.verify(&signed(v1), B.as_bytes(), at(T)).ok().map(|verified| verified.secret);
        assert_eq!((which(V1), which(OLD_V1)), (new, old), "{secrets:?}");
    }
}

#[test]
fn signatures_of_other_schemes_are_ignored() {
    let a = "a".repeat(64);
    for (header, expected) in [
        (format!("t={T},v0={V1}"), "unsupported"),
        (format!("t={T},v0={V1},v1={a}"), "wrong"),
        (format!("t={T},v2={V1}"), "unsupported"),
        (format!("t={T},V1={V1}"), "unsupported"),
        (format!("t={T},v1 ={V1}"), "unsupported"),
        (format!("t={T},v11={V1}"), "unsupported"),
        (format!("t={T},{V1}"), "unsupported"),
        (format!("t={T}"), "unsupported"),
        (format!("t={T},v0={a},v1={V1},v2=x"), "ok"),
    ] {
        assert_eq!(word(stripe_says(&header)), expected, "{header}");
    }
}

#[test]
fn an_unreadable_v1_is_skipped() {
    let z = "z".repeat(64);
    for unreadable in [&z, "", "ab", &V1[..62], &V1[..63], &format!("{V1}00"), &format!("0x{V1}"), "caf\u{e9}"] {
        assert_eq!(word(stripe_says(format!("t={T},v1={unreadable}"))), "wrong", "{unreadable}");
        assert_eq!(word(stripe_says(format!("t={T},v1={unreadable},v1={V1}"))), "ok", "{unreadable}");
    }
    assert_eq!(word(stripe_says(format!("t={T},v1={}", V1.to_uppercase()))), "ok");
}

#[test]
fn too_long_a_header_and_too_many_signatures_are_refused_even_with_a_right_one_among_them() {
    let filler = ",v1=aa".repeat(31);
    assert_eq!(word(stripe_says(format!("t={T}{filler},v1={V1}"))), "ok", "32 signatures");
    assert_eq!(word(stripe_says(format!("t={T}{filler},v1=aa,v1={V1}"))), "too_many", "33 signatures");
    let header = format!("t={T},v1={V1},");
    let padded = |bytes: usize| format!("{header}{}", "x".repeat(bytes - header.len()));
    assert_eq!(word(stripe_says(padded(8 * 1024))), "ok");
    assert_eq!(word(stripe_says(padded(8 * 1024 + 1))), "too_long");
    assert_eq!(word(stripe_says(format!("t={T},v1={V1}{}", ",v1=aa".repeat(10_000)))), "too_long");

    let standard = Verifier::standard([STANDARD_SECRET], DEFAULT_TOLERANCE).unwrap();
    let mut many = standard.sign(Some("id"), at(T), b"").unwrap();
    let right = many["webhook-signature"].to_str().unwrap().to_owned();
    for (others, expected) in [(31, "ok"), (32, "too_many")] {
        many.insert("webhook-signature", format!("{}{right}", "v1,aa ".repeat(others)).parse().unwrap());
        assert_eq!(word(standard.verify(&many, b"", at(T))), expected, "{others} others");
    }
}

#[test]
fn exactly_one_plain_decimal_timestamp_is_required() {
    for time in [
        "",
        "-1700000000",
        "+1700000000",
        "01700000000",
        "0",
        "00",
        "1700000000.0",
        "1.7e9",
        "0x65",
        "1_700_000_000",
        "17000 00000",
        "1700000000=",
        "=1700000000",
        "\u{661}\u{667}",
        "9223372036854775808",
        "18446744073709551616",
        "99999999999999999999999999999999999999999",
        "NaN",
    ] {
        let header = format!("t={time},v1={V1}");
        assert_eq!(word(stripe_says(&header)), "malformed", "{header}");
    }
    for header in [format!("v1={V1}"), format!("t={T},t={T},v1={V1}"), format!("t={T},v1={V1},t=1")] {
        assert_eq!(word(stripe_says(&header)), "malformed", "{header}");
    }
    // The largest timestamp is too new, and does not overflow.
    let largest = i64::MAX.to_string();
    let verifier = stripe();
    let signed = verifier.sign(None, UNIX_EPOCH + Duration::from_secs(i64::MAX as u64), b"").unwrap();
    assert!(signed["stripe-signature"].to_str().unwrap().contains(&largest));
    assert_eq!(word(verifier.verify(&signed, b"", at(T))), "too_new");
    assert_eq!(word(stripe_says(format!("t={largest},v1={V1}"))), "wrong");
}

#[test]
fn spaces_around_a_pair_and_empty_pairs_are_ignored() {
    for header in [
        format!("t={T}, v1={V1}"),
        format!(" t={T} ,\tv1={V1} "),
        format!(",t={T},,v1={V1},"),
        format!("t={T},v1={V1},x,=,y=,v1"),
    ] {
        assert_eq!(word(stripe_says(&header)), "ok", "{header}");
    }
    for (header, expected) in [
        (format!("t= {T},v1={V1}"), "malformed"),
        (format!("t ={T},v1={V1}"), "malformed"),
        (format!("t={T},v1= {V1}"), "wrong"),
        (format!("t={T},v1={V1}="), "wrong"),
        (format!("t={T};v1={V1}"), "malformed"),
        (format!("\"t={T},v1={V1}\""), "malformed"),
    ] {
        assert_eq!(word(stripe_says(&header)), expected, "{header}");
    }
    assert_eq!(word(stripe_says(b"t=1700000000,v1=\xff\xfe,\x80")), "wrong");
}

#[test]
fn a_header_that_comes_twice_is_refused_even_if_both_agree() {
    let line = ("Stripe-Signature", format!("t={T},v1={V1}"));
    let twice = headers([line.clone(), line]);
    assert_eq!(word(stripe().verify(&twice, B.as_bytes(), at(T))), "repeated");

    let standard = Verifier::standard([STANDARD_SECRET], DEFAULT_TOLERANCE).unwrap();
    let github = Verifier::github(["s"]).unwrap();
    for verifier in [standard, github] {
        let signed = verifier.sign(Some("id"), at(T), b"").unwrap();
        for (name, value) in &signed {
            let mut twice = signed.clone();
            twice.append(name, value.clone());
            assert_eq!(word(verifier.verify(&twice, b"", at(T))), "repeated", "{name}");
        }
    }
}

#[test]
fn standard_webhooks_needs_its_id_and_its_timestamp() {
    let verifier = Verifier::standard([STANDARD_SECRET], DEFAULT_TOLERANCE).unwrap();
    let signed = verifier.sign(Some("msg_1"), at(T), B.as_bytes()).unwrap();
    let with = |name: &'static str, value: &str| {
        let mut changed = signed.clone();
        changed.insert(name, HeaderValue::from_bytes(value.as_bytes()).unwrap());
        word(verifier.verify(&changed, B.as_bytes(), at(T)))
    };
    for name in ["webhook-id", "webhook-timestamp", "webhook-signature"] {
        let mut without = signed.clone();
        without.remove(name);
        assert_eq!(word(verifier.verify(&without, B.as_bytes(), at(T))), "missing", "{name}");
    }
    let long = "i".repeat(256);
    for id in ["", "msg.1", "msg_1.1700000000", "msg 1", "m\u{e9}", &long] {
        assert_eq!(with("webhook-id", id), "malformed", "{id}");
    }
    assert_eq!(with("webhook-id", "msg_2"), "wrong");
    for time in ["", "01700000000", "+1700000000", " 1700000000", "1700000000 ", "9223372036854775808"] {
        assert_eq!(with("webhook-timestamp", time), "malformed", "{time}");
    }
    assert_eq!(with("webhook-timestamp", "1700000001"), "wrong");
    assert_eq!(word(verifier.verify(&signed, B.as_bytes(), at(T + 301))), "too_old");
    assert_eq!(word(verifier.verify(&signed, B.as_bytes(), at(T - 301))), "too_new");
    assert!(verifier.sign(None, at(T), b"").is_err() && verifier.sign(Some("a.b"), at(T), b"").is_err());
}

#[test]
fn standard_webhooks_accepts_any_v1_that_matches_in_full() {
    let verifier = Verifier::standard([STANDARD_SECRET], DEFAULT_TOLERANCE).unwrap();
    let v1a = "v1a,hnO3f9T8Ytu9HwrXslvumlUpqtNVqkhqw/enGzPCXe5BdqzCInXqYXFymVJaA7AZdpXwVLPo3mNl8EM+m7TBAg==";
    let other = "v1,K5oZfzN95Z9UVu1EsfQmfVNQhnkZ2pj9o9NDN/H/pI4=";
    let code = &STANDARD_V1[3..];
    for (list, expected) in [
        (format!("{STANDARD_V1} {other}"), "ok"),
        (format!("{other} {STANDARD_V1} {v1a}"), "ok"),
        (format!("{v1a}  {other}   {STANDARD_V1}"), "ok"),
        (format!("{other} {v1a}"), "wrong"),
        (v1a.to_owned(), "unsupported"),
        (format!("v2,{code}"), "unsupported"),
        (code.to_owned(), "unsupported"),
        (format!("v1={code}"), "unsupported"),
        ("v1,".to_owned(), "wrong"),
        // A prefix of the right signature is not enough.
        (STANDARD_V1[..20].to_owned(), "wrong"),
        (STANDARD_V1.trim_end_matches('=').to_owned(), "wrong"),
        (format!("{STANDARD_V1},{other}"), "wrong"),
    ] {
        let lines = [("webhook-id", "msg_test_1"), ("webhook-timestamp", "1700000000"), ("webhook-signature", &list)];
        assert_eq!(word(verifier.verify(&headers(lines), B.as_bytes(), at(T))), expected, "{list}");
    }
}

#[test]
fn a_sha1_signature_of_github_is_not_accepted() {
    let verifier = Verifier::github(["It's a Secret to Everybody"]).unwrap();
    let says =
        |lines: &[(&str, &str)]| word(verifier.verify(&headers(lines.iter().copied()), GITHUB_BODY.as_bytes(), at(T)));
    let sha1 = "sha1=01dc10d0c83e72ed246219cdd91669667fe2ca59";
    assert_eq!(says(&[("X-Hub-Signature", sha1)]), "missing");
    assert_eq!(says(&[("X-Hub-Signature-256", sha1)]), "malformed");
    assert_eq!(says(&[("X-Hub-Signature", GITHUB_V)]), "missing");
    assert_eq!(says(&[("X-Hub-Signature-256", GITHUB_V), ("X-Hub-Signature", sha1)]), "ok");
    assert_eq!(says(&[("X-Hub-Signature-256", &GITHUB_V[7..])]), "malformed");
    assert_eq!(says(&[("X-Hub-Signature-256", &GITHUB_V.replace("sha256=", "SHA256="))]), "malformed");
    assert_eq!(says(&[("X-Hub-Signature-256", &GITHUB_V[..69])]), "malformed");
    assert_eq!(says(&[("X-Hub-Signature-256", &format!("{GITHUB_V}, {GITHUB_V}"))]), "malformed");
}

/// Without an id the receiver deduplicates by body hash.
#[test]
fn an_unsigned_id_may_be_absent_but_not_malformed() {
    let verifier = Verifier::github(["s"]).unwrap();
    let absent = verifier.sign(None, at(T), b"x").unwrap();
    assert_eq!(verifier.verify(&absent, b"x", at(T)).unwrap().id, None);
    for id in ["", "a b", "caf\u{e9}", &"i".repeat(256)] {
        let mut senseless = absent.clone();
        senseless.insert("x-github-delivery", HeaderValue::from_bytes(id.as_bytes()).unwrap());
        assert_eq!(word(verifier.verify(&senseless, b"x", at(T))), "malformed", "{id}");
    }
}
