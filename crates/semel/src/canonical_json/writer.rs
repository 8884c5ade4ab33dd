//! Writes a document in the form of RFC 8785.

use super::reader::{Member, Value};
use super::{Canonical, Inexact, JsonError, Literal};

/// The canonical form of `document`.
pub(super) fn write(document: &Value<'_>, inexact: Inexact) -> Result<Canonical, JsonError> {
    let mut writer = Writer { out: Canonical { bytes: Vec::new(), literals: Vec::new() }, inexact };
    writer.value(document)?;
    Ok(writer.out)
}

struct Writer {
    out: Canonical,
    inexact: Inexact,
}

impl Writer {
    fn value(&mut self, value: &Value<'_>) -> Result<(), JsonError> {
        match value {
            Value::Word(word) => self.push(word),
            Value::Number { text, at } => self.number(text, *at)?,
            Value::String(text) => self.string(text),
            Value::Array(items) => self.array(items)?,
            Value::Object(members) => self.object(members)?,
            // Arrays and objects leave out what was excluded, and the whole document cannot be.
            Value::Excluded => {}
        }
        Ok(())
    }

    fn array(&mut self, items: &[Value<'_>]) -> Result<(), JsonError> {
        self.push("[");
        let kept = items.iter().filter(|item| !matches!(item, Value::Excluded));
        for (index, item) in kept.enumerate() {
            if index > 0 {
                self.push(",");
            }
            self.value(item)?;
        }
        self.push("]");
        Ok(())
    }

    fn object(&mut self, members: &[Member<'_>]) -> Result<(), JsonError> {
        self.push("{");
        let kept = members.iter().filter(|member| !matches!(member.value, Value::Excluded));
        for (index, member) in kept.enumerate() {
            if index > 0 {
                self.push(",");
            }
            self.string(&member.name);
            self.push(":");
            self.value(&member.value)?;
        }
        self.push("}");
        Ok(())
    }

    /// Escapes what must be escaped and nothing else, in the one way that RFC 8785 allows.
    fn string(&mut self, text: &str) {
        self.push("\"");
        let mut rest = text;
        while let Some(end) = rest.bytes().position(|byte| byte < b' ' || byte == b'"' || byte == b'\\') {
            self.push(&rest[..end]);
            match rest.as_bytes()[end] {
                b'"' => self.push("\\\""),
                b'\\' => self.push("\\\\"),
                0x08 => self.push("\\b"),
                b'\t' => self.push("\\t"),
                b'\n' => self.push("\\n"),
                0x0c => self.push("\\f"),
                b'\r' => self.push("\\r"),
                control => self.push(&format!("\\u{control:04x}")),
            }
            rest = &rest[end + 1..];
        }
        self.push(rest);
        self.push("\"");
    }

    /// Prints the nearest double as ECMAScript does, and keeps the literal if that changes its text.
    fn number(&mut self, literal: &str, at: usize) -> Result<(), JsonError> {
        let expected = "a number";
        let double: f64 = literal.parse().map_err(|_| JsonError::Syntax { at, expected })?;
        if !double.is_finite() {
            return Err(JsonError::NumberOverflow { at });
        }
        let mut buffer = ryu_js::Buffer::new();
        let canonical = buffer.format_finite(double);
        // Canonical text is taken even where it is the rounded name of a double, such as 2^68
        // written as 295147905179352830000: what this function returns must be fit to be read
        // again.
        if canonical != literal {
            if self.inexact == Inexact::Refused && is_integer(literal) && !holds_exactly(double, literal) {
                return Err(JsonError::InexactInteger { at });
            }
            self.out.literals.push(Literal { at: self.out.bytes.len(), text: literal.to_owned() });
        }
        self.push(canonical);
        Ok(())
    }

    fn push(&mut self, text: &str) {
        self.out.bytes.extend_from_slice(text.as_bytes());
    }
}

/// Whether a number is written as an integer. `1e30` and `0.1` are not: readers round them, and the literal keeps them
/// apart from their neighbours.
fn is_integer(literal: &str) -> bool {
    !literal.contains(['.', 'e', 'E'])
}

/// Whether `double` equals `integer` exactly. Without a fraction a double is printed with all its digits, and JSON
/// allows no leading zeros, so equal values are equal texts.
fn holds_exactly(double: f64, integer: &str) -> bool {
    format!("{:.0}", double.abs()) == integer.trim_start_matches('-')
}
