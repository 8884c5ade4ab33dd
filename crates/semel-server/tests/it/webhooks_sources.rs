//! The laws of each kind of source, and of unsigned ids.

use std::time::Duration;

use semel_http::webhooks::{DEFAULT_TOLERANCE, HmacScheme, Verifier};
use serde_json::{Value, json};

use crate::{
    desk::shown,
    endpoint::{Does, Endpoint},
    hooks::{conflicts, counted, outbox, post_raw, signed_by, status, stored},
    place::{Place, on_both_databases},
    support::{Answer, SOON, Server, eventually},
};

on_both_databases! {
    each_kind_of_source_is_understood
    the_same_bytes_under_another_id_take_effect_once
    the_same_bytes_are_forwarded_once
    the_same_body_is_rejected_until_the_first_event_completes
    the_body_of_another_event_under_a_known_id_is_a_duplicate
    a_failed_event_keeps_its_body
    another_body_under_the_same_unsigned_id_is_a_conflict
    an_unsigned_time_does_not_make_data_newer
    another_unsigned_topic_is_not_another_event
    an_event_without_an_id_is_identified_by_its_body
    any_of_several_secrets_is_accepted
}

const STANDARD_SECRET: &str = "whsec_c2VtZWwtc3RhbmRhcmQtd2ViaG9va3Mta2V5IQ==";

const SOURCES: [(&str, &str); 16] = [
    ("SEMEL_WEBHOOKS_GITHUB_KIND", "github"),
    ("SEMEL_WEBHOOKS_GITHUB_SECRETS", "old-secret, geheim-geheim"),
    ("SEMEL_WEBHOOKS_SHOPIFY_KIND", "shopify"),
    ("SEMEL_WEBHOOKS_SHOPIFY_SECRETS", "hush-hush"),
    ("SEMEL_WEBHOOKS_STANDARD_KIND", "standard"),
    ("SEMEL_WEBHOOKS_STANDARD_SECRETS", STANDARD_SECRET),
    ("SEMEL_WEBHOOKS_CHAT_KIND", "hmac"),
    ("SEMEL_WEBHOOKS_CHAT_SECRETS", "geheim-geheim"),
    ("SEMEL_WEBHOOKS_CHAT_HEADER", "x-chat-signature"),
    ("SEMEL_WEBHOOKS_CHAT_ALGORITHM", "sha512"),
    ("SEMEL_WEBHOOKS_CHAT_ENCODING", "base64"),
    ("SEMEL_WEBHOOKS_CHAT_PREFIX", "v0="),
    ("SEMEL_WEBHOOKS_CHAT_SIGNED", "v0:{timestamp}:{body}"),
    ("SEMEL_WEBHOOKS_CHAT_TIMESTAMP_HEADER", "x-chat-timestamp"),
    ("SEMEL_WEBHOOKS_CHAT_ID_POINTER", "/event/id"),
    ("SEMEL_WEBHOOKS_CHAT_TYPE_POINTER", "/event/kind"),
];

fn start(place: &Place, more: &[(&str, &str)]) -> Server {
    let mut command = place.semel(["serve", "--listen", "127.0.0.1:0", "--roles", "api"]);
    for source in ["GITHUB", "SHOPIFY", "STANDARD", "CHAT"] {
        command.env(format!("SEMEL_WEBHOOKS_{source}_HANDLERS"), "*=outbox");
    }
    Server::start_with(command.envs(SOURCES).envs(more.iter().copied()))
}

fn chat() -> HmacScheme {
    HmacScheme {
        header: "x-chat-signature".into(),
        algorithm: semel_http::webhooks::Algorithm::Sha512,
        encoding: semel_http::webhooks::Encoding::Base64,
        prefix: "v0=".into(),
        signed: "v0:{timestamp}:{body}".into(),
        timestamp_header: Some("x-chat-timestamp".into()),
        ..HmacScheme::default()
    }
}

/// Posts a body as a source signs it, to it or to one of its functions, with more headers.
fn post(server: &Server, source: &str, id: Option<&str>, more: &[(&str, &str)], body: &Value) -> Answer {
    let verifier = match source.split('/').next().unwrap() {
        "github" => Verifier::github(["geheim-geheim"]),
        "shopify" => Verifier::shopify(["hush-hush"]),
        "standard" => Verifier::standard([STANDARD_SECRET], DEFAULT_TOLERANCE),
        _ => Verifier::hmac(&chat(), ["geheim-geheim"], DEFAULT_TOLERANCE),
    };
    let body = body.to_string().into_bytes();
    let mut headers = signed_by(&verifier.unwrap(), id, &body, Duration::ZERO);
    headers.extend(more.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())));
    post_raw(server.address, &format!("/webhooks/{source}"), &headers, &body)
}

fn push(server: &Server, id: Option<&str>, body: &Value) -> String {
    status(&post(server, "github", id, &[("x-github-event", "push")], body))
}

fn each_kind_of_source_is_understood(place: &Place) {
    let server = start(place, &[]);
    let issue = [("x-github-event", "issues")];
    let order = [("x-shopify-topic", "orders/create"), ("x-shopify-triggered-at", "2023-11-14T22:13:20Z")];
    let said = json!({ "type": "user.made", "timestamp": "2023-11-14T22:13:20Z" });
    for (source, id, more, body, stored_as, kind, created) in [
        ("github", Some("guid-1"), &issue[..], json!({ "action": "opened" }), "guid-1", "issues.opened", None),
        ("shopify", Some("w-1"), &order[..], json!({ "id": 1 }), "w-1", "orders/create", None),
        ("standard", Some("msg_1"), &[], said, "msg_1", "user.made", Some(1_700_000_000)),
        ("chat", None, &[], json!({ "event": { "id": "e1", "kind": "said it" } }), "e1", "said it", None),
    ] {
        assert_eq!(status(&post(&server, source, id, more, &body)), "processed", "{source}");
        assert_eq!(status(&post(&server, source, id, more, &body)), "skipped", "{source}");
        let stored = stored(place, source, stored_as).unwrap();
        assert_eq!((stored.labels.0[0].as_deref(), stored.order), (Some(kind), created), "{source}");
    }
    let topics = ["github.issues.opened", "shopify.orders/create", "standard.user.made", "chat.said_it"];
    assert_eq!(outbox(place), topics.map(|topic| format!("webhook.{topic}")));
}

fn the_same_bytes_under_another_id_take_effect_once(place: &Place) {
    let server = start(place, &[]);
    let body = json!({ "ref": "main" });
    assert_eq!(push(&server, Some("guid-1"), &body), "processed");
    assert_eq!(push(&server, Some("guid-2"), &body), "skipped");
    assert_eq!(push(&server, Some("guid-2"), &body), "skipped");
    assert_eq!(outbox(place).len(), 1);
    // A third party could replay the first under any number of ids.
    assert!(stored(place, "github", "guid-2").is_none(), "nothing of it is stored");
    eventually(SOON, "both are counted", || counted(place, "mismatch") == 2);
    // If the id is signed, equal bodies are two events.
    for id in ["msg_1", "msg_2"] {
        assert_eq!(status(&post(&server, "standard", Some(id), &[], &body)), "processed");
    }
}

fn the_same_bytes_are_forwarded_once(place: &Place) {
    let endpoint = Endpoint::that([]);
    let rule = format!("*={}", endpoint.url());
    let server = start(place, &[("SEMEL_WEBHOOKS_GITHUB_HANDLERS", &rule)]);
    let body = json!({ "ref": "main" });
    assert_eq!(push(&server, Some("guid-1"), &body), "processed");
    assert_eq!(push(&server, Some("guid-2"), &body), "skipped");
    assert_eq!(endpoint.calls().len(), 1);
}

fn the_same_body_is_rejected_until_the_first_event_completes(place: &Place) {
    let endpoint = Endpoint::that([Does::Answers(500)]);
    let rule = format!("*={}", endpoint.url());
    let server = start(place, &[("SEMEL_WEBHOOKS_GITHUB_HANDLERS", &rule)]);
    let (body, event) = (json!({ "ref": "main" }), [("x-github-event", "push")]);
    assert_eq!(post(&server, "github", Some("guid-1"), &event, &body).status, 500);
    assert_eq!(push(&server, Some("guid-2"), &body), "rejected");
    assert!(stored(place, "github", "guid-2").is_none(), "the stored copy of the first is tried again");
    assert_eq!(push(&server, Some("guid-1"), &body), "processed");
    assert_eq!(push(&server, Some("guid-2"), &body), "skipped");
    assert_eq!(endpoint.calls().len(), 2);
}

fn the_body_of_another_event_under_a_known_id_is_a_duplicate(place: &Place) {
    let server = start(place, &[]);
    let (main, other) = (json!({ "ref": "main" }), json!({ "ref": "other" }));
    assert_eq!(push(&server, Some("guid-1"), &main), "processed");
    assert_eq!(push(&server, Some("guid-2"), &other), "processed");
    assert_eq!(push(&server, Some("guid-2"), &main), "skipped");
    assert!(conflicts(place).is_empty(), "otherwise a replay of two deliveries could alert a person every day");
    assert_eq!(outbox(place).len(), 2);
    eventually(SOON, "it is counted", || shown(&server, "/webhooks/github/monitor")["duplicates_suppressed"] == 1);
    let told = shown(&server, "/webhooks/github/monitor");
    assert_eq!((&told["conflicts"]["count"], &told["health"]["status"]), (&json!(0), &json!("ok")));
}

/// A failed attempt has claimed its body already, and it is still its own at the redelivery.
fn a_failed_event_keeps_its_body(place: &Place) {
    let endpoint = Endpoint::that([Does::Answers(500)]);
    let rule = format!("*={}", endpoint.url());
    let server = start(place, &[("SEMEL_WEBHOOKS_GITHUB_HANDLERS", &rule)]);
    let (body, event) = (json!({ "ref": "main" }), [("x-github-event", "push")]);
    assert_eq!(post(&server, "github", Some("guid-1"), &event, &body).status, 500);
    assert_eq!(push(&server, Some("guid-1"), &body), "processed");
    assert_eq!(endpoint.calls().len(), 2);
}

fn another_body_under_the_same_unsigned_id_is_a_conflict(place: &Place) {
    let server = start(place, &[]);
    assert_eq!(push(&server, Some("guid-1"), &json!({ "ref": "main" })), "processed");
    assert_eq!(push(&server, Some("guid-1"), &json!({ "ref": "other" })), "skipped");
    assert_eq!(conflicts(place), ["guid-1 skipped 1 0 0"]);
    assert_eq!(outbox(place).len(), 1);
}

/// The time header is not signed, so a third party can write any time.
fn an_unsigned_time_does_not_make_data_newer(place: &Place) {
    let server = start(place, &[]);
    for (day, body, said) in [("14", json!({ "id": 1 }), "processed"), ("15", json!({ "id": 2 }), "skipped")] {
        let at = format!("2023-11-{day}T22:13:20Z");
        let order = [("x-shopify-topic", "orders/create"), ("x-shopify-triggered-at", &*at)];
        assert_eq!(status(&post(&server, "shopify", Some("w-1"), &order, &body)), said);
    }
    assert_eq!(conflicts(place), ["w-1 skipped 1 0 0"]);
    assert_eq!(outbox(place).len(), 1);
}

/// Shopify sends the same body under several topics. A third party could replay it under any topic, so it takes effect
/// once for all topics; or once at each path, if configured so.
fn another_unsigned_topic_is_not_another_event(place: &Place) {
    let apart = [("SEMEL_WEBHOOKS_SHOPIFY_DEDUP_PER_FUNCTION", "true"), ("SEMEL_WEBHOOKS_SHOPIFY_FUNCTIONS", "gone")];
    let shop = |server: &Server, path: &str, id: &str, topic: &str, body: &Value| {
        status(&post(server, path, Some(id), &[("x-shopify-topic", topic), ("x-shopify-event-id", id)], body))
    };
    let (server, body) = (start(place, &[]), json!({ "shop": "a" }));
    assert_eq!(shop(&server, "shopify", "w-1", "shop/update", &body), "processed");
    assert_eq!(shop(&server, "shopify", "w-2", "app/uninstalled", &body), "skipped");
    assert_eq!(shop(&server, "shopify/gone", "w-3", "app/uninstalled", &body), "skipped");
    let (server, body) = (start(place, &apart), json!({ "shop": "b" }));
    assert_eq!(shop(&server, "shopify", "w-4", "shop/update", &body), "processed");
    assert_eq!(shop(&server, "shopify/gone", "w-5", "app/uninstalled", &body), "processed");
    assert_eq!(shop(&server, "shopify/gone", "w-6", "shop/redact", &body), "skipped");
    assert_eq!(
        outbox(place),
        ["shop/update", "shop/update", "app/uninstalled"].map(|it| format!("webhook.shopify.{it}"))
    );
}

fn an_event_without_an_id_is_identified_by_its_body(place: &Place) {
    let server = start(place, &[]);
    assert_eq!(push(&server, None, &json!({ "ref": "main" })), "processed");
    assert_eq!(push(&server, None, &json!({ "ref": "main" })), "skipped");
    assert_eq!(push(&server, None, &json!({ "ref": "other" })), "processed");
    assert_eq!(outbox(place).len(), 2);
}

fn any_of_several_secrets_is_accepted(place: &Place) {
    let server = start(place, &[]);
    let (body, verifier) = (json!({ "ref": "old" }).to_string(), Verifier::github(["old-secret"]).unwrap());
    let mut headers = signed_by(&verifier, Some("guid-1"), body.as_bytes(), Duration::ZERO);
    headers.push(("x-github-event".to_owned(), "push".to_owned()));
    assert_eq!(status(&post_raw(server.address, "/webhooks/github", &headers, body.as_bytes())), "processed");
    assert_eq!(push(&server, Some("guid-2"), &json!({ "ref": "new" })), "processed");
}
