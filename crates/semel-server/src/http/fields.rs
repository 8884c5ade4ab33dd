//! The fields of a JSON body: read one by one, so that all mistakes are reported at once.

use std::{collections::BTreeMap, fmt, time::Duration};

use axum::extract::{FromRequest, Request};
use bytes::Bytes;
use semel::Timestamp;
use serde::{
    Deserialize, Deserializer,
    de::{IgnoredAny, MapAccess, Visitor},
};
use serde_json::{Value, json, value::RawValue};

use super::{
    problem::{BODY_TIMEOUT, INVALID_FIELDS, INVALID_JSON, Kind, Problem},
    query::time,
};

/// How many wrong fields are reported, and how many characters of a name.
const MOST_TOLD: usize = 20;
const MOST_OF_A_NAME: usize = 64;

/// How many members of a body are read. No request has more.
const MOST_MEMBERS: usize = 64;

/// How much of a JSON error is reported: the error quotes the body.
const MOST_OF_A_REASON: usize = 200;

/// How long a body may take to arrive.
const PATIENCE: Duration = Duration::from_secs(60);

/// Stands for the name of several fields.
const SEVERAL: &str = "…";

/// The members of a request's JSON object, unparsed. A handler takes it as its last argument.
pub struct Fields {
    given: BTreeMap<String, Box<RawValue>>,
    wrong: Wrong,
    /// Whether the body is empty.
    empty: bool,
}

/// The mistakes of a request, by field. The answer stays short however many there are.
#[derive(Debug, Default)]
pub struct Wrong {
    told: Vec<(String, String)>,
    /// How many more there are.
    more: usize,
}

impl Wrong {
    /// Adds a mistake.
    pub fn note(&mut self, field: &str, message: impl Into<String>) {
        if self.told.len() < MOST_TOLD {
            self.told.push((cut(field, MOST_OF_A_NAME), message.into()));
        } else {
            self.more += 1;
        }
    }

    /// Whether there are no mistakes.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.told.is_empty()
    }

    /// Ok, or the problem that lists all mistakes.
    ///
    /// # Errors
    /// When there are mistakes.
    pub fn check(self, kind: &'static Kind) -> Result<(), Problem> {
        if self.told.is_empty() { Ok(()) } else { Err(self.problem(kind)) }
    }

    /// The problem that lists all mistakes.
    pub fn problem(mut self, kind: &'static Kind) -> Problem {
        if self.more > 0 {
            let more = if self.more == 1 {
                "and 1 more is wrong".to_owned()
            } else {
                format!("and {} more are wrong", self.more)
            };
            self.told.push((SEVERAL.to_owned(), more));
        }
        let detail =
            self.told.iter().map(|(field, message)| format!("{field} {message}")).collect::<Vec<_>>().join("; ");
        let errors = self.told.into_iter().map(|(field, message)| json!({ "field": field, "message": message }));
        Problem::new(kind).detail(format!("{detail}.")).with("errors", Value::from_iter(errors))
    }
}

impl Fields {
    /// Parses a body. An empty body counts as an object without members: it is enough if all fields are optional;
    /// otherwise [`Fields::finish`] names the missing ones.
    ///
    /// # Errors
    /// When it is not a JSON object.
    pub fn parse(body: &[u8]) -> Result<Self, Problem> {
        if body.trim_ascii().is_empty() {
            return Ok(Self { given: BTreeMap::new(), wrong: Wrong::default(), empty: true });
        }
        let members: Members = serde_json::from_slice(body).map_err(|error| no_json(&error))?;
        let mut fields = Self { given: BTreeMap::new(), wrong: Wrong::default(), empty: false };
        if members.more {
            fields.wrong.note(SEVERAL, format!("are more than {MOST_MEMBERS} members, and only so many were read"));
        }
        for (name, value) in members.read {
            // Readers differ about which of two equal names counts.
            if fields.given.insert(name.clone(), value).is_some() {
                fields.wrong.note(&name, "is given twice");
            }
        }
        Ok(fields)
    }

    /// Parses an object within a body; `None` if it is not an object. End it with [`Fields::finish_into`].
    pub fn inside(raw: &str) -> Option<Self> {
        Self::parse(raw.as_bytes()).ok()
    }

    /// Whether the field exists and was not taken.
    #[must_use]
    pub fn has(&self, name: &str) -> bool {
        self.given.contains_key(name)
    }

    /// Takes a required field; `read` parses it.
    pub fn must<T, E: Into<String>>(&mut self, name: &str, read: impl FnOnce(&str) -> Result<T, E>) -> Option<T> {
        if !self.given.contains_key(name) {
            self.wrong.note(name, "is missing");
        }
        self.may(name, read)
    }

    /// Takes an optional field.
    pub fn may<T, E: Into<String>>(&mut self, name: &str, read: impl FnOnce(&str) -> Result<T, E>) -> Option<T> {
        let value = self.given.remove(name)?;
        read(value.get()).map_err(|message| self.wrong.note(name, message)).ok()
    }

    /// Adds a mistake of a part of a taken field, such as `addresses.EMAIL`.
    pub fn note(&mut self, field: &str, message: impl Into<String>) {
        self.wrong.note(field, message);
    }

    /// Ends the reading. Fields that are left are unknown: otherwise a misspelled optional field would be ignored
    /// silently.
    ///
    /// # Errors
    /// When there are mistakes.
    pub fn finish(self) -> Result<(), Problem> {
        let empty = self.empty;
        let wrong = self.all_wrong();
        if empty && !wrong.is_empty() {
            let missing: Vec<_> = wrong.told.iter().map(|(field, _)| field.as_str()).collect();
            let detail = format!("The body is empty. It must be a JSON object with {}.", missing.join(" and "));
            return Err(wrong.problem(&INVALID_JSON).detail(detail));
        }
        wrong.check(&INVALID_FIELDS)
    }

    /// Ends the reading of an object that is at `at` in the body, such as `[3]`: its mistakes are added to `wrong`.
    /// Returns whether there are any.
    pub fn finish_into(self, at: &str, wrong: &mut Wrong) -> bool {
        let mine = self.all_wrong();
        let any = !mine.told.is_empty();
        for (field, message) in mine.told {
            wrong.note(&if at.is_empty() { field } else { format!("{at}.{field}") }, message);
        }
        wrong.more += mine.more;
        any
    }

    fn all_wrong(mut self) -> Wrong {
        for name in self.given.keys() {
            self.wrong.note(name, "is not a field of this request");
        }
        self.wrong
    }
}

/// The problem of a body that is not JSON or not an object, with line and column.
pub fn no_json(error: &serde_json::Error) -> Problem {
    let what = if error.is_data() { "JSON object" } else { "JSON" };
    let place = format!(" at line {} column {}", error.line(), error.column());
    let told = error.to_string();
    // The reason may quote the body and is cut; the position must stay.
    let reason = cut(told.strip_suffix(&place).unwrap_or(&told), MOST_OF_A_REASON);
    Problem::new(&INVALID_JSON).detail(format!("The body is no {what}: {reason}{place}."))
}

/// A text of at most so many characters; an ellipsis marks a cut.
fn cut(text: &str, most: usize) -> String {
    if text.chars().nth(most).is_none() {
        return text.to_owned();
    }
    text.chars().take(most - 1).chain(['…']).collect()
}

/// Reads a field that is a text.
///
/// # Errors
/// When it is not a text, or contains characters that no text should have.
pub fn text(raw: &str) -> Result<String, String> {
    let text: String = serde_json::from_str(raw).map_err(|_| "must be a text")?;
    // PostgreSQL accepts no NUL. Other control and format characters are accidents or attacks on a reader's terminal.
    if text.chars().any(is_hidden) { Err("must not have control or format characters".to_owned()) } else { Ok(text) }
}

/// Whether a character is a control or format character.
pub fn is_hidden(c: char) -> bool {
    c.is_control() || is_format(c)
}

/// Whether a character is invisible and changes how others are shown or found: text direction, line breaks, zero-width
/// spaces, tags. The two joiners are allowed: some scripts need them.
const fn is_format(c: char) -> bool {
    matches!(c,
        '\u{ad}' | '\u{61c}' | '\u{180e}' | '\u{200b}' | '\u{200e}' | '\u{200f}' | '\u{2028}'..='\u{202e}'
        | '\u{2060}'..='\u{206f}' | '\u{feff}' | '\u{fff9}'..='\u{fffb}' | '\u{1bca0}'..='\u{1bca3}'
        | '\u{1d173}'..='\u{1d17a}' | '\u{e0000}'..='\u{e007f}')
}

/// Whether a text shows nothing.
pub fn is_blank(text: &str) -> bool {
    let invisible = |c| {
        matches!(c,
            '\u{34f}' | '\u{115f}' | '\u{1160}' | '\u{17b4}' | '\u{17b5}' | '\u{180b}'..='\u{180f}'
            | '\u{200c}' | '\u{200d}' | '\u{2800}' | '\u{3164}' | '\u{fe00}'..='\u{fe0f}' | '\u{ffa0}'
            | '\u{e0100}'..='\u{e01ef}')
    };
    text.chars().all(|c| c.is_whitespace() || is_format(c) || invisible(c))
}

/// Reads a reason, which a person gives for an action.
///
/// # Errors
/// When it is empty or too long.
pub fn reason(raw: &str) -> Result<String, String> {
    let reason = text(raw)?;
    match reason.trim() {
        said if is_blank(said) => Err("must say why".to_owned()),
        said if said.len() <= 1000 => Ok(said.to_owned()),
        _ => Err("must have at most 1000 bytes".to_owned()),
    }
}

/// Reads a field that is a time of RFC 3339.
///
/// # Errors
/// When it is none.
pub fn moment(raw: &str) -> Result<Timestamp, String> {
    Ok(time(&text(raw)?)?)
}

/// Reads a field that is true wherever it stands.
///
/// # Errors
/// When it is anything else.
pub fn only_true(raw: &str) -> Result<bool, &'static str> {
    if raw == "true" { Ok(true) } else { Err("must be true, or left out") }
}

/// Reads a field that is a whole number.
///
/// # Errors
/// When it is not one, or beyond 64 bits.
pub fn integer(raw: &str) -> Result<i64, &'static str> {
    raw.parse().map_err(|_| "must be a whole number")
}

impl<S: Send + Sync> FromRequest<S> for Fields {
    type Rejection = Problem;

    async fn from_request(request: Request, state: &S) -> Result<Self, Problem> {
        let body = tokio::time::timeout(PATIENCE, Bytes::from_request(request, state)).await;
        Self::parse(&body.map_err(|_| Problem::new(&BODY_TIMEOUT))??)
    }
}

/// The reason of a person who acts, as the only field of a body. A handler takes it as its last argument.
pub struct Because(pub String);

impl<S: Send + Sync> FromRequest<S> for Because {
    type Rejection = Problem;

    async fn from_request(request: Request, state: &S) -> Result<Self, Problem> {
        let mut fields = Fields::from_request(request, state).await?;
        let reason = fields.must("reason", reason);
        fields.finish()?;
        Ok(Self(reason.unwrap_or_default()))
    }
}

/// The members of an object in order: the first ones, and whether there are more.
struct Members {
    read: Vec<(String, Box<RawValue>)>,
    more: bool,
}

impl<'de> Deserialize<'de> for Members {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Object;
        impl<'de> Visitor<'de> for Object {
            type Value = Members;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Members, A::Error> {
                let mut read = Vec::new();
                while read.len() < MOST_MEMBERS {
                    let Some(member) = map.next_entry()? else { return Ok(Members { read, more: false }) };
                    read.push(member);
                }
                let mut more = false;
                while map.next_entry::<IgnoredAny, IgnoredAny>()?.is_some() {
                    more = true;
                }
                Ok(Members { read, more })
            }
        }
        deserializer.deserialize_map(Object)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_wrong_field_is_reported_at_once() {
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
    fn a_refusal_of_any_body_is_short() {
        let told = |body: &str| {
            let refused = Fields::parse(body.as_bytes()).and_then(Fields::finish).unwrap_err();
            let text = String::from_utf8(refused.into_http().into_body().to_vec()).unwrap();
            assert!(text.len() < 20_000, "{} bytes", text.len());
            serde_json::from_str::<Value>(&text).unwrap()
        };
        let members = |count: usize, name: &dyn Fn(usize) -> String| {
            let members: Vec<_> = (0..count).map(|i| format!("\"{}\":1", name(i))).collect();
            format!("{{{}}}", members.join(","))
        };
        for name in [&|i| format!("f{i}"), &|_| String::new(), &|i| format!("{i}{}", "\\u0001".repeat(5_000))]
            as [&dyn Fn(usize) -> String; 3]
        {
            let errors = told(&members(1_000, name))["errors"].as_array().unwrap().clone();
            assert_eq!(errors.len(), 21);
            assert_eq!(errors[0]["message"], "are more than 64 members, and only so many were read");
            assert!(errors[20]["message"].as_str().unwrap().starts_with("and "), "{}", errors[20]);
            assert!(errors.iter().all(|error| error["field"].as_str().unwrap().chars().count() <= 64));
        }
        let errors = told(&members(64, &|i| format!("f{i}")))["errors"].clone();
        assert_eq!(errors[20], json!({ "field": "…", "message": "and 44 more are wrong" }));
        assert_eq!(told(&members(20, &|i| format!("f{i}")))["errors"].as_array().unwrap().len(), 20);
        assert_eq!(told(&format!("\"{}\"", "x".repeat(50_000)))["type"], "/problems/invalid-json");
    }

    #[test]
    fn a_text_with_invisible_characters_is_refused() {
        for hidden in ["\u{200b}", "a\u{202e}b", "a\u{2066}b", "\u{feff}a", "a\u{ad}b", "a\u{2028}b", "a\u{e0041}"] {
            assert!(text(&json!(hidden).to_string()).is_err(), "{hidden:?}");
        }
        for seen in ["João da Silva", "می\u{200c}خواهم", "👩\u{200d}💻", "李", "עברית"] {
            assert_eq!(text(&json!(seen).to_string()).as_deref(), Ok(seen));
            assert!(!is_blank(seen), "{seen}");
        }
        for blank in ["", " ", "\u{a0}\u{3000}", "\u{200d}", "\u{3164}", "\u{2800}", "\u{fe0f}"] {
            assert!(is_blank(blank), "{blank:?}");
        }
    }

    #[test]
    fn a_body_must_be_an_object() {
        for body in ["{", "[]", "1", "null", "\"{}\"", "{}{}", "nome=Ana", "{\"a\":1,}"] {
            let problem = Fields::parse(body.as_bytes()).err().unwrap();
            assert_eq!(problem.kind().name, "invalid-json", "{body}");
        }
        assert!(Fields::parse(b" {} ").is_ok());
        let told = |body: &[u8]| Fields::parse(body).err().unwrap().said().to_owned();
        assert_eq!(told(b"{\n\"a\" 1}"), "The body is no JSON: expected `:` at line 2 column 5.");
        assert_eq!(told(b"nome"), "The body is no JSON: expected ident at line 1 column 2.");
        assert!(told(b"[]").starts_with("The body is no JSON object: invalid type: sequence"), "{}", told(b"[]"));
    }

    #[test]
    fn an_empty_body_is_refused_with_the_required_fields_and_accepted_without_any() {
        for body in ["", " \r\n"] {
            let mut fields = Fields::parse(body.as_bytes()).unwrap();
            assert_eq!(fields.may("result", text), None);
            fields.finish().unwrap();
            let mut fields = Fields::parse(body.as_bytes()).unwrap();
            assert_eq!((fields.must("status", text), fields.must("reason", text)), (None, None));
            let refused = fields.finish().unwrap_err();
            assert_eq!(refused.kind().name, "invalid-json");
            let told: Value = serde_json::from_slice(refused.into_http().body()).unwrap();
            assert_eq!(told["detail"], "The body is empty. It must be a JSON object with status and reason.");
            assert_eq!(told["errors"][1], json!({ "field": "reason", "message": "is missing" }));
        }
    }

    #[test]
    fn an_integer_has_no_fraction_no_exponent_and_64_bits() {
        assert_eq!(integer("12"), Ok(12));
        for raw in ["1.0", "1e3", "\"1\"", "null", "9223372036854775808", "true"] {
            assert!(integer(raw).is_err(), "{raw}");
        }
    }
}
