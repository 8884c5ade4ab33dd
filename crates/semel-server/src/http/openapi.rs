//! `GET /openapi.json`: every route, for client generators.
//!
//! Written by hand, each service's part in its folder: the texts matter more than the types, and a macro per route
//! would slow down every build. A test compares the document with the running server.

use std::sync::LazyLock;

use axum::{http::header, response::IntoResponse};
use serde_json::Value;

use crate::services;

/// The parts: those of every server, and the services'.
fn parts() -> impl Iterator<Item = &'static str> {
    let of_services = services::ALL.into_iter().flat_map(|service| service.openapi.iter().copied());
    [include_str!("openapi.json")].into_iter().chain(of_services)
}

static DOCUMENT: LazyLock<String> = LazyLock::new(|| {
    let mut whole = Value::Null;
    for part in parts() {
        match serde_json::from_str(part) {
            Ok(part) => merge(&mut whole, part),
            // A test parses all parts.
            Err(error) => tracing::error!(%error, "a part of the OpenAPI document is no JSON"),
        }
    }
    whole["info"]["version"] = env!("CARGO_PKG_VERSION").into();
    whole.to_string()
});

pub(super) async fn show() -> impl IntoResponse {
    ([(header::CONTENT_TYPE, "application/json")], DOCUMENT.as_str())
}

/// Adds the members of one object to another, recursively.
fn merge(into: &mut Value, from: Value) {
    match (into, from) {
        (Value::Object(into), Value::Object(from)) => {
            for (name, value) in from {
                merge(into.entry(name).or_insert(Value::Null), value);
            }
        }
        (into, from) => *into = from,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_part_is_json_and_every_reference_leads_somewhere() {
        for part in parts() {
            serde_json::from_str::<Value>(part).unwrap();
        }
        let whole: Value = serde_json::from_str(&DOCUMENT).unwrap();
        let text = whole.to_string();
        let mut seen = 0;
        for reference in text.split("\"$ref\":\"#").skip(1) {
            let pointer = reference.split('"').next().unwrap();
            assert!(whole.pointer(pointer).is_some(), "{pointer} leads nowhere");
            seen += 1;
        }
        assert!(seen > 10, "the document refers to its components");
    }
}
