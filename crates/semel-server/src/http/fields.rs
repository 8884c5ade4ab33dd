//! The fields of a JSON body: read one by one, so that everything wrong with them is told at once.

use std::{collections::BTreeMap, fmt};

use axum::extract::{FromRequest, Request};
use bytes::Bytes;
use serde::{
    Deserialize, Deserializer,
    de::{MapAccess, Visitor},
};
use serde_json::{Value, json, value::RawValue};

use super::problem::{INVALID_FIELDS, INVALID_JSON, Kind, Problem};

/// The members of a request's JSON object, each still as it was written. A handler takes it as its last argument.
pub struct Fields {
    given: BTreeMap<String, Box<RawValue>>,
    wrong: Wrong,
}

/// What is wrong with a request, field by field.
#[derive(Debug, Default)]
pub struct Wrong(Vec<(String, String)>);

impl Wrong {
    /// Notes what is wrong with a field.
    pub fn note(&mut self, field: &str, message: impl Into<String>) {
        self.0.push((field.to_owned(), message.into()));
    }

    /// Nothing, or the problem that lists everything.
    ///
    /// # Errors
    /// When anything was noted.
    pub fn check(self, kind: &'static Kind) -> Result<(), Problem> {
        if self.0.is_empty() { Ok(()) } else { Err(self.problem(kind)) }
    }

    /// The problem that lists everything.
    pub fn problem(self, kind: &'static Kind) -> Problem {
        let detail = self.0.iter().map(|(field, message)| format!("{field} {message}")).collect::<Vec<_>>().join("; ");
        let errors = self.0.into_iter().map(|(field, message)| json!({ "field": field, "message": message }));
        Problem::new(kind).detail(format!("{detail}.")).with("errors", Value::from_iter(errors))
    }
}

impl Fields {
    /// Reads the text of a body.
    fn parse(body: &[u8]) -> Result<Self, Problem> {
        let members: Members = serde_json::from_slice(body)
            .map_err(|error| Problem::new(&INVALID_JSON).detail(format!("The body is no JSON object: {error}.")))?;
        let mut fields = Self { given: BTreeMap::new(), wrong: Wrong::default() };
        for (name, value) in members.0 {
            // Of two, each reader could believe another.
            if fields.given.insert(name.clone(), value).is_some() {
                fields.wrong.note(&name, "is given twice");
            }
        }
        Ok(fields)
    }

    /// Takes a field that must be there, by a function that reads its text.
    pub fn must<T, E: Into<String>>(&mut self, name: &str, read: impl FnOnce(&str) -> Result<T, E>) -> Option<T> {
        if !self.given.contains_key(name) {
            self.wrong.note(name, "is missing");
        }
        self.may(name, read)
    }

    /// Takes a field that may be missing.
    pub fn may<T, E: Into<String>>(&mut self, name: &str, read: impl FnOnce(&str) -> Result<T, E>) -> Option<T> {
        let value = self.given.remove(name)?;
        read(value.get()).map_err(|message| self.wrong.note(name, message)).ok()
    }

    /// Ends the reading. What is left is nothing that this path knows: a slip of spelling in a field that may be
    /// missing would otherwise be lost in silence.
    ///
    /// # Errors
    /// When anything is wrong.
    pub fn finish(mut self) -> Result<(), Problem> {
        for name in self.given.keys() {
            self.wrong.note(name, "is not a field of this request");
        }
        self.wrong.check(&INVALID_FIELDS)
    }
}

/// Reads a field that is a text.
///
/// # Errors
/// When it is none, or has characters that no text should have.
pub fn text(raw: &str) -> Result<String, String> {
    let text: String = serde_json::from_str(raw).map_err(|_| "must be a text")?;
    // PostgreSQL takes no NUL, and the rest would only ever be an accident or an attack on somebody's terminal.
    if text.chars().any(char::is_control) { Err("must not have control characters".to_owned()) } else { Ok(text) }
}

/// Reads a field that is a whole number.
///
/// # Errors
/// When it is none, or beyond 64 bits.
pub fn integer(raw: &str) -> Result<i64, &'static str> {
    raw.parse().map_err(|_| "must be a whole number")
}

impl<S: Send + Sync> FromRequest<S> for Fields {
    type Rejection = Problem;

    async fn from_request(request: Request, state: &S) -> Result<Self, Problem> {
        Self::parse(&Bytes::from_request(request, state).await?)
    }
}

/// The members of an object in the order in which they came.
struct Members(Vec<(String, Box<RawValue>)>);

impl<'de> Deserialize<'de> for Members {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Object;
        impl<'de> Visitor<'de> for Object {
            type Value = Members;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Members, A::Error> {
                let mut members = Vec::new();
                while let Some(member) = map.next_entry()? {
                    members.push(member);
                }
                Ok(Members(members))
            }
        }
        deserializer.deserialize_map(Object)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn everything_wrong_is_told_at_once() {
        let body = br#"{"a": 1, "b": "x", "b": "y", "c": "\u0000", "quux": {}}"#;
        let mut fields = Fields::parse(body).unwrap();
        assert_eq!(fields.must("a", text), None);
        assert_eq!(fields.must("b", text).as_deref(), Some("y"));
        assert_eq!(fields.may("c", text), None);
        assert_eq!(fields.must("d", integer), None);
        let problem = fields.finish().unwrap_err().into_http();
        let problem: Value = serde_json::from_slice(problem.body()).unwrap();
        let errors: Vec<_> =
            problem["errors"].as_array().unwrap().iter().map(|e| e["field"].as_str().unwrap()).collect();
        assert_eq!(errors, ["b", "a", "c", "d", "quux"]);
    }

    #[test]
    fn what_is_no_object_is_no_body() {
        for body in ["", "{", "[]", "1", "null", "\"{}\"", "{}{}", "nome=Ana", "{\"a\":1,}"] {
            let problem = Fields::parse(body.as_bytes()).err().unwrap();
            assert_eq!(problem.kind().name, "invalid-json", "{body}");
        }
        assert!(Fields::parse(b" {} ").is_ok());
    }

    #[test]
    fn whole_numbers_are_whole() {
        assert_eq!(integer("12"), Ok(12));
        for raw in ["1.0", "1e3", "\"1\"", "null", "9223372036854775808", "true"] {
            assert!(integer(raw).is_err(), "{raw}");
        }
    }
}
