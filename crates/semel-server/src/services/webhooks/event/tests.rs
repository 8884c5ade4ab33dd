//! The laws of reading events.

use axum::http::{HeaderMap, HeaderName, HeaderValue};
use bytes::Bytes;
use serde_json::{Value, json};

use super::{Event, NoEvent, UNTYPED, read};
use crate::{
    services::webhooks::config::{self, Hmac, Secrets, SourceKind},
    services::webhooks::problems::EVENT_MALFORMED,
    services::webhooks::{handler::Handlers, source::Source},
};

fn source(kind: SourceKind) -> Source {
    open(config::Source::new(kind, Secrets(vec!["YSBnb29kIHNlY3JldA==".into()])))
}

fn open(config: config::Source) -> Source {
    Source::open("shop", config, &Handlers::default()).unwrap()
}

fn headers(pairs: &[(&'static str, &'static str)]) -> HeaderMap {
    let mut headers = HeaderMap::new();
    for (name, value) in pairs {
        headers.append(HeaderName::from_static(name), HeaderValue::from_static(value));
    }
    headers
}

fn taken(source: &Source, id: Option<&str>, given: &[(&'static str, &'static str)], body: &Value) -> Event {
    read(source, "f", id.map(str::to_owned), &headers(given), Bytes::from(body.to_string())).unwrap()
}

/// The wrong fields.
fn wrong(source: &Source, given: &[(&'static str, &'static str)], body: &[u8]) -> Vec<String> {
    let NoEvent::Malformed(wrong) = read(source, "f", None, &headers(given), Bytes::copy_from_slice(body)).unwrap_err()
    else {
        panic!("it is of the other mode")
    };
    let answer: Value = serde_json::from_slice(wrong.problem(&EVENT_MALFORMED).into_http().body()).unwrap();
    answer["errors"].as_array().unwrap().iter().map(|error| error["field"].as_str().unwrap().to_owned()).collect()
}

fn stripe() -> Value {
    json!({
        "id": "evt_1", "object": "event", "type": "invoice.paid", "created": 1_700_000_000, "livemode": false,
        "data": { "object": { "id": "in_1" } }, "pending_webhooks": 3,
    })
}

#[test]
fn a_stripe_event_is_read_from_its_body() {
    let event = taken(&source(SourceKind::Stripe), None, &[], &stripe());
    assert_eq!((event.id.as_str(), event.kind.as_str(), event.created), ("evt_1", "invoice.paid", Some(1_700_000_000)));
    assert_eq!((event.source.as_str(), event.function.as_str()), ("shop", "f"));
    assert_eq!(event.body, stripe().to_string());
}

#[test]
fn every_wrong_field_of_a_stripe_event_is_reported_at_once() {
    let source = source(SourceKind::Stripe);
    assert_eq!(wrong(&source, &[], b"{}"), ["id", "object", "type", "created", "livemode", "data"]);
    let changed = |name: &str, value: Value| {
        let mut event = stripe();
        event[name] = value;
        wrong(&source, &[], event.to_string().as_bytes())
    };
    for (name, values) in [
        ("id", vec![json!(7), json!(""), json!(null), json!("x".repeat(256)), json!("a\u{0}b"), json!("a\nb")]),
        ("object", vec![json!("v2.core.event"), json!("customer"), json!(1)]),
        ("type", vec![json!(""), json!(["a"]), json!("x".repeat(129)), json!("a\tb")]),
        ("created", vec![json!("1700000000"), json!(1.5), json!(-1), json!(1e300), json!(null)]),
        ("livemode", vec![json!("false"), json!(0), json!(null)]),
        ("pending_webhooks", vec![json!("1"), json!({}), json!(1.5)]),
        ("data", vec![json!({}), json!([]), json!({ "object": "x" }), json!({ "object": null }), json!("x")]),
    ] {
        for value in values {
            assert_eq!(changed(name, value.clone()), [name], "{name} {value}");
        }
    }
}

#[test]
fn a_body_that_is_no_object_or_can_be_read_in_two_ways_is_no_event() {
    for kind in [SourceKind::Stripe, SourceKind::Standard, SourceKind::Github, SourceKind::Shopify] {
        let source = source(kind);
        let deep = [b"{\"a\":".repeat(10_000), b"1".to_vec(), b"}".repeat(10_000)].concat();
        let twice = br#"{"id":"evt_1","id":"evt_2"}"#;
        for body in [&b""[..], b"[]", b"7", b"\"x\"", b"null", b"{", b"{\"a\":\"\xff\"}", twice, &deep] {
            assert_eq!(
                wrong(&source, &[], body),
                ["body"],
                "{:?}",
                String::from_utf8_lossy(&body[..body.len().min(40)])
            );
        }
    }
}

#[test]
fn a_changed_delivery_count_is_the_same_data() {
    let source = source(SourceKind::Stripe);
    let with = |name: &str, value: Value| {
        let mut event = stripe();
        event[name] = value;
        taken(&source, None, &[], &event).fingerprint
    };
    let event = taken(&source, None, &[], &stripe()).fingerprint;
    assert_eq!(with("pending_webhooks", json!(0)), event);
    assert_ne!(with("created", json!(1_700_000_001)), event);
    assert_ne!(with("data", json!({ "object": { "id": "in_2" } })), event);
}

/// Also next to numbers that no double can represent.
#[test]
fn integers_of_any_size_and_layout_keep_the_fingerprint() {
    let source = source(SourceKind::Stripe);
    let with = |number: &str, pending: u8, space: &str| {
        let body = format!(
            r#"{{"pending_webhooks":{pending},{space}"id":"evt_1","object":"event","type":"a","created":1,"livemode":true,
            "data":{{"object":{{"number":{number}}}}}}}"#
        );
        read(&source, "f", None, &HeaderMap::new(), Bytes::from(body)).unwrap().fingerprint
    };
    for number in ["9007199254740993", "-18446744073709551615", &"9".repeat(40)] {
        assert_eq!(with(number, 0, " "), with(number, 3, ""), "{number}");
    }
    assert_ne!(with("9007199254740993", 1, ""), with("9007199254740995", 1, ""));
    assert_ne!(with("9007199254740993", 1, ""), with("9007199254740992", 1, ""), "what a double would make of it");
}

#[test]
fn a_source_of_one_mode_takes_no_event_of_the_other() {
    for (only, sent, fits) in [(true, true, true), (true, false, false), (false, true, false), (false, false, true)] {
        let config = config::Source::new(SourceKind::Stripe, Secrets(vec!["a good secret".into()]));
        let source = open(config::Source { livemode: Some(only), ..config });
        let mut event = stripe();
        event["livemode"] = json!(sent);
        let read = read(&source, "f", None, &HeaderMap::new(), event.to_string().into());
        assert_eq!(matches!(read, Err(NoEvent::OtherMode)), !fits, "{only} {sent}");
    }
}

#[test]
fn a_standard_webhook_has_its_id_in_a_header_and_its_type_in_the_body() {
    let source = source(SourceKind::Standard);
    let body = json!({ "type": "user.made", "timestamp": "2023-11-14T22:13:20.5Z", "data": {} });
    let event = taken(&source, Some("msg_1"), &[], &body);
    assert_eq!((event.id.as_str(), event.kind.as_str(), event.created), ("msg_1", "user.made", Some(1_700_000_000)));
    let bare = taken(&source, Some("msg_1"), &[], &json!({ "timestamp": 7 }));
    assert_eq!((bare.kind.as_str(), bare.created), (UNTYPED, None));
    assert_eq!(wrong(&source, &[], br#"{"type":7}"#), ["type"]);
}

#[test]
fn a_github_event_has_its_type_in_a_header_and_its_action_in_the_body() {
    let source = source(SourceKind::Github);
    let push = [("x-github-event", "push")];
    let event = taken(&source, Some("72d3162e"), &push, &json!({ "ref": "main" }));
    assert_eq!((event.id.as_str(), event.kind.as_str(), event.created), ("72d3162e", "push", None));
    let opened = taken(&source, Some("1"), &[("x-github-event", "issues")], &json!({ "action": "opened" }));
    assert_eq!(opened.kind, "issues.opened");
    assert_eq!(wrong(&source, &[], b"{}"), ["x-github-event"]);
    assert_eq!(wrong(&source, &[("x-github-event", "a"), ("x-github-event", "b")], b"{}"), ["x-github-event"]);
}

#[test]
fn a_shopify_event_has_its_topic_in_a_header_and_no_time_that_counts() {
    let source = source(SourceKind::Shopify);
    let given = [("x-shopify-topic", "orders/create"), ("x-shopify-triggered-at", "2023-11-14T22:13:20Z")];
    let event = taken(&source, Some("w1"), &given, &json!({}));
    assert_eq!((event.kind.as_str(), event.created), ("orders/create", None));
    assert_eq!(wrong(&source, &[], b"{}"), ["x-shopify-topic"]);
}

#[test]
fn pointers_find_id_type_and_time_in_the_body_of_a_custom_source() {
    let pointer = config::Pointer::new;
    let scheme = semel_http::webhooks::HmacScheme { header: "x-signature".into(), ..Default::default() };
    let hmac = Hmac { scheme, id: pointer("/e/id"), kind: pointer("/e/what"), created: pointer("/e/when") };
    let source = source(SourceKind::Hmac(hmac));
    let event =
        taken(&source, None, &[], &json!({ "e": { "id": 42, "what": "paid", "when": "2023-11-14T22:13:20Z" } }));
    assert_eq!((event.id.as_str(), event.kind.as_str(), event.created), ("42", "paid", Some(1_700_000_000)));
    let event = taken(&source, None, &[], &json!({ "e": { "id": "a", "what": "paid", "when": 1_700_000_000 } }));
    assert_eq!((event.id.as_str(), event.created), ("a", Some(1_700_000_000)));
    for whole in ["-9223372036854775808", "18446744073709551615"] {
        let body: Value = serde_json::from_str(&format!(r#"{{"e":{{"id":{whole},"what":"paid","when":1}}}}"#)).unwrap();
        assert_eq!(taken(&source, None, &[], &body).id, whole);
    }
    for several in ["1.5", "1e2", "-0", "18446744073709551616", "-9223372036854775809"] {
        let body = format!(r#"{{"e":{{"id":{several},"what":"paid","when":1}}}}"#);
        assert_eq!(wrong(&source, &[], body.as_bytes()), ["id"], "{several}");
    }
    assert_eq!(wrong(&source, &[], b"{}"), ["id", "type", "created"]);
    assert_eq!(wrong(&source, &[], br#"{"e":{"id":[],"what":1,"when":"soon"}}"#), ["id", "type", "created"]);
}

#[test]
fn an_event_without_an_id_is_identified_by_its_source_and_its_body() {
    let given = [("x-github-event", "push")];
    let github = source(SourceKind::Github);
    let id = |source: &Source, body: Value| taken(source, None, &given, &body).id;
    let first = id(&github, json!({ "a": 1 }));
    assert_eq!(id(&github, json!({ "a": 1 })), first);
    assert_ne!(id(&github, json!({ "a": 2 })), first);
    let config = config::Source::new(SourceKind::Github, Secrets(vec!["a good secret".into()]));
    let other = Source::open("other", config, &Handlers::default()).unwrap();
    assert_ne!(id(&other, json!({ "a": 1 })), first, "two sources never share an id by chance");
}
