//! Random events, each written in two ways, and corrupted in one: equal events have equal fingerprints, corrupted ones
//! are refused.

use std::time::{Duration, Instant};

use axum::http::HeaderMap;
use bytes::Bytes;
use fastrand::Rng;

use super::{Event, NoEvent, read};
use crate::{
    services::webhooks::config::{self, Secrets, SourceKind},
    services::webhooks::{handler::Handlers, source::Source},
};

/// JSON before it is written.
#[derive(Clone, Debug)]
enum Json {
    /// Written as it is: a number, a boolean, null.
    Word(String),
    Text(String),
    List(Vec<Json>),
    Object(Vec<(String, Json)>),
}

fn text(text: &str) -> Json {
    Json::Text(text.to_owned())
}

/// Letters, characters that need an escape, and characters of several bytes.
fn some_text(rng: &mut Rng) -> String {
    const CHARS: [char; 12] = ['a', 'Z', '0', ' ', '"', '\\', '/', '\n', '\u{1}', 'é', '🎉', '\u{ffff}'];
    (0..rng.usize(..8)).map(|_| CHARS[rng.usize(..CHARS.len())]).collect()
}

/// JSON of at most so many levels.
fn some_json(rng: &mut Rng, levels: usize) -> Json {
    match rng.u8(..if levels == 0 { 3 } else { 5 }) {
        0 => Json::Word(
            rng.choice(["null", "true", "false", "0", "-1", "1.5", "1e3", "9007199254740991", "9007199254740993"])
                .unwrap()
                .into(),
        ),
        1 | 2 => Json::Text(some_text(rng)),
        3 => Json::List((0..rng.usize(..4)).map(|_| some_json(rng, levels - 1)).collect()),
        _ => Json::Object(
            (0..rng.usize(..4)).map(|i| (format!("{}{i}", some_text(rng)), some_json(rng, levels - 1))).collect(),
        ),
    }
}

/// A Stripe event with random content.
fn some_event(rng: &mut Rng) -> Vec<(String, Json)> {
    let object = (0..rng.usize(1..5)).map(|i| (format!("{}{i}", some_text(rng)), some_json(rng, 4))).collect();
    let members = [
        ("id", text(&format!("evt_{}", rng.u32(..)))),
        ("object", text("event")),
        ("type", text(rng.choice(["invoice.paid", "a", "customer.créé"]).unwrap())),
        ("created", Json::Word(rng.u32(..).to_string())),
        ("livemode", Json::Word(rng.bool().to_string())),
        ("pending_webhooks", Json::Word(rng.u8(..).to_string())),
        ("data", Json::Object(vec![("object".to_owned(), Json::Object(object))])),
        ("request", some_json(rng, 2)),
    ];
    members.map(|(name, value)| (name.to_owned(), value)).into()
}

/// Writes JSON in a random layout: members in any order, spaces anywhere, characters escaped or not.
struct Writer<'r>(&'r mut Rng);

impl Writer<'_> {
    fn write(&mut self, json: &Json, to: &mut String) {
        self.space(to);
        match json {
            Json::Word(word) => to.push_str(word),
            Json::Text(text) => self.text(text, to),
            Json::List(list) => {
                to.push('[');
                for (i, item) in list.iter().enumerate() {
                    to.push_str(if i == 0 { "" } else { "," });
                    self.write(item, to);
                }
                self.space(to);
                to.push(']');
            }
            Json::Object(members) => {
                let mut members: Vec<_> = members.iter().collect();
                self.0.shuffle(&mut members);
                to.push('{');
                for (i, (name, value)) in members.into_iter().enumerate() {
                    to.push_str(if i == 0 { "" } else { "," });
                    self.space(to);
                    self.text(name, to);
                    self.space(to);
                    to.push(':');
                    self.write(value, to);
                }
                self.space(to);
                to.push('}');
            }
        }
        self.space(to);
    }

    fn space(&mut self, to: &mut String) {
        while self.0.u8(..8) == 0 {
            to.push(self.0.choice([' ', '\t', '\n', '\r']).unwrap_or(' '));
        }
    }

    fn text(&mut self, text: &str, to: &mut String) {
        to.push('"');
        for c in text.chars() {
            let needed = c < ' ' || c == '"' || c == '\\';
            if needed || self.0.u8(..8) == 0 {
                for unit in c.encode_utf16(&mut [0; 2]) {
                    to.push_str(&if self.0.bool() { format!("\\u{unit:04x}") } else { format!("\\u{unit:04X}") });
                }
            } else {
                to.push(c);
            }
        }
        to.push('"');
    }
}

fn written(rng: &mut Rng, event: &[(String, Json)]) -> String {
    let mut to = String::new();
    Writer(rng).write(&Json::Object(event.to_vec()), &mut to);
    to
}

/// One of the objects in some JSON, counted from the outside in.
fn object<'j>(members: &'j mut Vec<(String, Json)>, which: &mut usize) -> Option<&'j mut Vec<(String, Json)>> {
    if *which == 0 {
        return Some(members);
    }
    *which -= 1;
    members.iter_mut().find_map(|(_, value)| object_in(value, which))
}

fn object_in<'j>(json: &'j mut Json, which: &mut usize) -> Option<&'j mut Vec<(String, Json)>> {
    match json {
        Json::Object(members) => object(members, which),
        Json::List(list) => list.iter_mut().find_map(|item| object_in(item, which)),
        _ => None,
    }
}

/// Corrupts an event in a way about which readers differ; returns its bytes, and how.
fn spoiled(rng: &mut Rng, mut event: Vec<(String, Json)>) -> (Vec<u8>, &'static str) {
    match rng.u8(..4) {
        0 => {
            let mut which = rng.usize(..4);
            match object(&mut event, &mut which).filter(|members| !members.is_empty()) {
                Some(members) => {
                    let again = members[rng.usize(..members.len())].0.clone();
                    members.push((again, some_json(rng, 1)));
                }
                None => event.push(event[0].clone()),
            }
            (written(rng, &event).into_bytes(), "a member twice")
        }
        1 => {
            let deep = (0..rng.usize(65..200)).fold(Json::List(Vec::new()), |inner, i| match i % 2 {
                0 => Json::List(vec![inner]),
                _ => Json::Object(vec![("a".to_owned(), inner)]),
            });
            event.push(("deep".to_owned(), deep));
            (written(rng, &event).into_bytes(), "too deep")
        }
        2 => {
            let (body, bad) = (written(rng, &event), [&b"\xff"[..], b"\xc3", b"\xed\xa0\x80", b"\xf5\x80\x80\x80"]);
            // Wherever one of these is inserted, the text is not UTF-8.
            let at = rng.usize(..=body.len());
            let (before, after) = body.as_bytes().split_at(at);
            ([before, bad[rng.usize(..bad.len())], after].concat(), "no UTF-8")
        }
        _ => {
            let half = rng.choice(["\\ud800", "\\uDFFF", "\\udbff\\u0041"]).unwrap();
            let body = written(rng, &event);
            let end = body.rfind('}').unwrap_or_default();
            (format!("{},\"half\":\"{half}\"}}", &body[..end]).into_bytes(), "half a character")
        }
    }
}

/// An event that differs slightly from this one.
fn changed(rng: &mut Rng, event: &[(String, Json)]) -> Vec<(String, Json)> {
    let mut event = event.to_vec();
    let fresh = ("fresh".to_owned(), some_json(rng, 1));
    match &mut event[6].1 {
        Json::Object(data) if rng.bool() => data.push(fresh),
        _ => event.push(fresh),
    }
    event
}

/// Runs for `SEMEL_FUZZ_SECONDS`; the default is one.
#[test]
fn fuzz_made_events_are_equal_in_any_notation_and_refused_when_spoiled() {
    let seconds = std::env::var("SEMEL_FUZZ_SECONDS").ok().and_then(|text| text.parse().ok()).unwrap_or(1);
    let end = Instant::now() + Duration::from_secs(seconds);
    let seed = fastrand::u64(..);
    let mut rng = Rng::with_seed(seed);
    let config = config::Source::new(SourceKind::Stripe, Secrets(vec!["a good secret".into()]));
    let source = Source::open("shop", config, &Handlers::default()).unwrap();
    let read =
        |body: Vec<u8>| -> Result<Event, NoEvent> { read(&source, "f", None, &HeaderMap::new(), Bytes::from(body)) };
    let mut rounds = 0;
    while Instant::now() < end {
        let mut event = some_event(&mut rng);
        let body = written(&mut rng, &event);
        let first = read(body.clone().into_bytes()).unwrap_or_else(|why| panic!("seed {seed}: {body}: {why:?}"));
        assert_eq!(serde_json::from_str::<serde_json::Value>(&body).unwrap()["id"], first.id, "seed {seed}");
        let other = changed(&mut rng, &event);
        let other = read(written(&mut rng, &other).into_bytes()).unwrap();
        assert_ne!(first.fingerprint, other.fingerprint, "seed {seed}: {body}");
        let (bytes, how) = spoiled(&mut rng, event.clone());
        let taken = read(bytes.clone()).is_ok();
        assert!(!taken, "seed {seed}: {how}: {}", String::from_utf8_lossy(&bytes));
        // Stripe's countdown is not part of the event.
        event[5].1 = Json::Word(rng.u8(..).to_string());
        let again = read(written(&mut rng, &event).into_bytes()).unwrap();
        assert_eq!((first.fingerprint, &first.id), (again.fingerprint, &again.id), "seed {seed}: {body}");
        rounds += 1;
    }
    assert!(rounds > 10, "only {rounds} rounds");
}
