//! Parses a delivery, by kind of source.

use std::borrow::Cow;

use axum::http::HeaderMap;
use bytes::Bytes;
use chrono::DateTime;
use semel::{Key, Labels};
use serde_json::{Value, value::RawValue};
use sha2::{Digest as _, Sha256};

use super::{
    Event, UNTYPED,
    strict::{self, Members},
};
use crate::{
    http::fields::Wrong,
    services::webhooks::config::{Hmac, Pointer, SourceKind},
    services::webhooks::source::Source,
};

/// The number of endpoints that have not accepted the event yet: it differs between deliveries.
const STRIPE_COUNTS: &[&str] = &["/pending_webhooks"];

/// The fields of a delivery.
#[derive(Default)]
struct Said {
    id: Option<String>,
    kind: Option<String>,
    created: Option<i64>,
    livemode: Option<bool>,
}

/// Why a delivery is refused.
#[derive(Debug)]
pub(in super::super) enum NoEvent {
    /// It is not a valid event; all mistakes.
    Malformed(Wrong),
    /// It is of the other mode.
    OtherMode,
}

/// Parses the event of a delivery. `id` is the one from a header, if the scheme has one.
pub(in super::super) fn read(
    source: &Source,
    function: &str,
    id: Option<String>,
    headers: &HeaderMap,
    body: Bytes,
) -> Result<Event, NoEvent> {
    let mut wrong = Wrong::default();
    let without = if source.config.kind == SourceKind::Stripe { STRIPE_COUNTS } else { &[] };
    let fingerprint = match strict::fingerprint(&body, without) {
        Ok(fingerprint) => fingerprint,
        Err(why) => {
            wrong.note("body", why);
            return Err(NoEvent::Malformed(wrong));
        }
    };
    let Some(members) = strict::members(&body) else {
        wrong.note("body", "must be a JSON object");
        return Err(NoEvent::Malformed(wrong));
    };
    let said = match &source.config.kind {
        SourceKind::Stripe => stripe(&members, &mut wrong),
        SourceKind::Standard => standard(id, &members, &mut wrong),
        SourceKind::Github => github(id, headers, &members, &mut wrong),
        SourceKind::Shopify => shopify(id, headers, &mut wrong),
        SourceKind::Hmac(hmac) => generic(hmac, id, &body, &mut wrong),
    };
    let id = said.id.unwrap_or_else(|| hashed(&source.name, &body));
    if Key::new(&id).is_err() {
        wrong.note("id", "must be 1 to 255 bytes without control characters");
    }
    let kind = said.kind.unwrap_or_else(|| UNTYPED.to_owned());
    if kind.len() > LONGEST_TYPE || Labels::default().with(1, &kind).is_err() {
        wrong.note("type", "must be 1 to 128 bytes without control characters");
    }
    if !wrong.is_empty() {
        return Err(NoEvent::Malformed(wrong));
    }
    if source.config.livemode.is_some_and(|only| said.livemode != Some(only)) {
        return Err(NoEvent::OtherMode);
    }
    Ok(Event {
        tenant: source.config.tenant.clone(),
        source: source.name.clone(),
        function: function.to_owned(),
        id,
        kind,
        created: said.created,
        fingerprint,
        body,
    })
}

/// The longest type of an event, in bytes.
pub(crate) const LONGEST_TYPE: usize = 128;

/// The type in a body, if the source's events have it there.
pub(super) fn kind_in(body: &[u8], source: &Source) -> Option<String> {
    let pointed = |pointer: &Pointer| {
        let body: Value = serde_json::from_slice(body).ok()?;
        body.pointer(pointer.as_str())?.as_str().map(str::to_owned)
    };
    match &source.config.kind {
        SourceKind::Stripe | SourceKind::Standard => {
            let members = strict::members(body)?;
            strict::text(members.get("type")?).map(Cow::into_owned)
        }
        SourceKind::Hmac(hmac) => hmac.kind.as_ref().and_then(pointed),
        SourceKind::Github | SourceKind::Shopify => None,
    }
}

/// The id of an event without one: it is the same for the same bytes.
fn hashed(source: &str, body: &[u8]) -> String {
    let mut hash = Sha256::new();
    hash.update(source.as_bytes());
    // No source has this byte in its name.
    hash.update([0]);
    hash.update(body);
    format!("sha256:{}", hex::encode(hash.finalize()))
}

/// The hash of a body, independent of any id.
pub(in super::super) fn body_hash(body: &[u8]) -> String {
    hex::encode(Sha256::digest(body))
}

fn stripe(members: &Members<'_>, wrong: &mut Wrong) -> Said {
    let mut needed = |name: &str, rule: &str, fits: &dyn Fn(&RawValue) -> bool| {
        let found = members.get(name).copied();
        match found {
            None => wrong.note(name, "is missing"),
            Some(value) if !fits(value) => wrong.note(name, rule),
            Some(_) => return found,
        }
        None
    };
    let is_text = |value: &RawValue| strict::text(value).is_some_and(|text| !text.is_empty());
    let is_event = |value: &RawValue| strict::text(value).is_some_and(|text| text == "event");
    let id = needed("id", "must be a string of 1 to 255 bytes", &is_text);
    needed("object", "must be \"event\"; thin events are not accepted", &is_event);
    let kind = needed("type", "must be a string", &is_text);
    let created = needed("created", "must be a whole number of seconds since 1970", &|value| seconds(value).is_some());
    let livemode = needed("livemode", "must be true or false", &|value| ["true", "false"].contains(&value.get()));
    needed("data", "must be an object with the member object, which is an object", &|value| {
        let data = strict::members(value.get().as_bytes());
        data.is_some_and(|data| data.get("object").is_some_and(|object| object.get().starts_with('{')))
    });
    // It is not part of the fingerprint, so it was not checked yet.
    let counts = |value: &&RawValue| value.get() == "null" || value.get().parse::<i64>().is_ok();
    if members.get("pending_webhooks").is_some_and(|value| !counts(value)) {
        wrong.note("pending_webhooks", "must be a whole number");
    }
    Said {
        // A placeholder for a wrong value, so that it is not reported twice.
        id: Some(id.and_then(strict::text).map_or_else(|| "-".to_owned(), Cow::into_owned)),
        kind: kind.and_then(strict::text).map(Cow::into_owned),
        created: created.and_then(seconds),
        livemode: livemode.map(|value| value.get() == "true"),
    }
}

/// A time in seconds since 1970, not negative.
fn seconds(value: &RawValue) -> Option<i64> {
    value.get().parse().ok().filter(|seconds| *seconds >= 0)
}

fn standard(id: Option<String>, members: &Members<'_>, wrong: &mut Wrong) -> Said {
    let kind = members.get("type").map(|value| strict::text(value).map(Cow::into_owned));
    if kind == Some(None) {
        wrong.note("type", "must be a string");
    }
    let created = members.get("timestamp").and_then(|value| strict::text(value)).and_then(|text| moment(&text));
    Said { id, kind: kind.flatten(), created, livemode: None }
}

/// An RFC 3339 time in seconds since 1970.
fn moment(text: &str) -> Option<i64> {
    DateTime::parse_from_rfc3339(text).ok().map(|time| time.timestamp())
}

/// A header of a delivery: at most once, and text.
fn header<'h>(headers: &'h HeaderMap, name: &'static str, wrong: &mut Wrong) -> Option<&'h str> {
    let mut values = headers.get_all(name).iter();
    match (values.next(), values.next()) {
        (None, _) => None,
        (Some(value), None) => {
            let text = value.to_str().ok().map(str::trim).filter(|text| !text.is_empty());
            if text.is_none() {
                wrong.note(name, "must be visible ASCII");
            }
            text
        }
        _ => {
            wrong.note(name, "was sent more than once");
            None
        }
    }
}

fn github(id: Option<String>, headers: &HeaderMap, members: &Members<'_>, wrong: &mut Wrong) -> Said {
    let event = header(headers, "x-github-event", wrong);
    if event.is_none() && !headers.contains_key("x-github-event") {
        wrong.note("x-github-event", "is missing");
    }
    let action = members.get("action").and_then(|value| strict::text(value)).filter(|action| !action.is_empty());
    let kind = event.map(|event| match action {
        Some(action) => format!("{event}.{action}"),
        None => event.to_owned(),
    });
    Said { id, kind, ..Said::default() }
}

fn shopify(id: Option<String>, headers: &HeaderMap, wrong: &mut Wrong) -> Said {
    let topic = header(headers, "x-shopify-topic", wrong);
    if topic.is_none() && !headers.contains_key("x-shopify-topic") {
        wrong.note("x-shopify-topic", "is missing");
    }
    // Shopify's time header is not signed, so it must not make data newer.
    Said { id, kind: topic.map(str::to_owned), ..Said::default() }
}

fn generic(hmac: &Hmac, id: Option<String>, body: &[u8], wrong: &mut Wrong) -> Said {
    let pointers = [&hmac.id, &hmac.kind, &hmac.created];
    let body = if pointers.iter().any(|pointer| pointer.is_some()) { serde_json::from_slice(body).ok() } else { None };
    let body = body.unwrap_or(Value::Null);
    let at = |pointer: &Option<Pointer>| pointer.as_ref().map(|pointer| body.pointer(pointer.as_str()));
    let id = id.or_else(|| match at(&hmac.id)? {
        Some(Value::String(text)) => Some(text.clone()),
        // Other numbers have several spellings of the same value.
        Some(Value::Number(number)) if number.is_i64() || number.is_u64() => Some(number.to_string()),
        found => {
            wrong.note("id", if found.is_none() { "is missing" } else { "must be a string or an integer of 64 bits" });
            Some("-".to_owned())
        }
    });
    let kind = at(&hmac.kind).and_then(|found| match found {
        Some(Value::String(text)) => Some(text.clone()),
        found => {
            wrong.note("type", if found.is_none() { "is missing" } else { "must be a string" });
            None
        }
    });
    let created = at(&hmac.created).and_then(|found| {
        let created = match found {
            Some(Value::String(text)) => moment(text),
            Some(Value::Number(number)) => number.as_i64(),
            _ => None,
        };
        if created.is_none() {
            wrong.note("created", "must be a whole number of seconds since 1970, or a time such as RFC 3339 has it");
        }
        created
    });
    Said { id, kind, created, livemode: None }
}
