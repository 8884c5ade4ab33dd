//! Millions of bodies, most of them nearly an event.

use std::time::{Duration, Instant};

use axum::http::{HeaderMap, HeaderValue};
use bytes::Bytes;
use fastrand::Rng;
use semel::Key;
use serde_json::Value;

use super::{NoEvent, read};
use crate::{
    services::webhooks::config::{self, Secrets, SourceKind},
    services::webhooks::{handler::Handlers, source::Source},
};

const EVENT: &str = r#"{"id":"evt_1","object":"event","type":"invoice.paid","created":1700000000,"livemode":false,
    "pending_webhooks":1,"data":{"object":{"id":"in_1","lines":[{"a":1.5e2},{"b":null}],"text":"\u00e9\ud83c\udf89"}}}"#;

/// Parts of an event: in the wrong place, they make the interesting mistakes.
const PIECES: [&str; 20] = [
    "{",
    "}",
    "[",
    "]",
    "\"",
    ":",
    ",",
    "\\",
    "\\u",
    "\\ud800",
    "null",
    "true",
    "-0",
    "1e400",
    "9223372036854775808",
    "\"id\":\"evt_2\",",
    "\"object\":\"event\",",
    "\"created\":1,",
    "\u{feff}",
    "\u{0}",
];

fn mutate(body: &mut Vec<u8>, rng: &mut Rng) {
    let at = rng.usize(..=body.len());
    match rng.u8(..7) {
        0 if at < body.len() => body[at] ^= 1 << rng.u8(..8),
        1 if at < body.len() => body[at] = rng.u8(..),
        2 => {
            let end = at + rng.usize(..=(body.len() - at).min(40));
            body.drain(at..end);
        }
        3 => {
            let end = at + rng.usize(..=(body.len() - at).min(40));
            let (copied, to) = (body[at..end].to_vec(), rng.usize(..=body.len()));
            body.splice(to..to, copied);
        }
        4 if rng.u8(..8) == 0 => {
            let nested = if rng.bool() { "[".repeat(rng.usize(1..300)) } else { "{\"a\":".repeat(rng.usize(1..300)) };
            body.splice(at..at, nested.into_bytes());
        }
        _ => {
            let piece = PIECES[rng.usize(..PIECES.len())];
            body.splice(at..at, piece.bytes());
        }
    }
}

/// Whether a text has the fields of an event, by a plain JSON parser.
fn is_an_event(body: &[u8]) -> bool {
    let Ok(event) = serde_json::from_slice::<Value>(body) else { return false };
    let text = |name: &str| event[name].as_str().unwrap_or_default();
    Key::new(text("id")).is_ok()
        && text("object") == "event"
        && (1..=128).contains(&text("type").len())
        && event["created"].as_i64().is_some_and(|created| created >= 0)
        && event["livemode"].is_boolean()
        && event["data"]["object"].is_object()
}

/// Runs for `SEMEL_FUZZ_SECONDS`; the default is one.
#[test]
fn fuzz_mutated_bodies_are_events_only_where_the_obvious_reading_sees_one() {
    let seconds = std::env::var("SEMEL_FUZZ_SECONDS").ok().and_then(|text| text.parse().ok()).unwrap_or(1);
    let end = Instant::now() + Duration::from_secs(seconds);
    let seed = fastrand::u64(..);
    let mut rng = Rng::with_seed(seed);
    let source = |kind| {
        let config = config::Source::new(kind, Secrets(vec!["YSBnb29kIHNlY3JldA==".into()]));
        Source::open("shop", config, &Handlers::default()).unwrap()
    };
    let (stripe, github) = (source(SourceKind::Stripe), source(SourceKind::Github));
    let headers = HeaderMap::from_iter([("x-github-event".parse().unwrap(), HeaderValue::from_static("push"))]);
    let (mut taken, mut refused) = (0_u64, 0_u64);
    while Instant::now() < end {
        let mut body = EVENT.as_bytes().to_vec();
        for _ in 0..rng.usize(..4) {
            mutate(&mut body, &mut rng);
        }
        let body = Bytes::from(body);
        match read(&stripe, "f", None, &headers, body.clone()) {
            Ok(event) => {
                taken += 1;
                assert!(is_an_event(&body), "seed {seed}: {body:?}");
                let value: Value = serde_json::from_slice(&body).unwrap();
                assert_eq!((&value["id"], &value["type"]), (&event.id.into(), &event.kind.into()), "seed {seed}");
                assert_eq!(value["created"].as_i64(), event.created, "seed {seed}");
                assert!(read(&github, "f", None, &headers, body).is_ok(), "seed {seed}: it is JSON for others, too");
            }
            Err(NoEvent::Malformed(_)) => refused += 1,
            Err(NoEvent::OtherMode) => panic!("seed {seed}: no mode was asked for"),
        }
    }
    assert!(taken > 0 && refused > 0, "{taken} taken, {refused} refused: both must be tried");
}
