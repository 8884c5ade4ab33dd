//! Takes values out of a document by JSON pointer (RFC 6901).

use super::JsonError;
use super::reader::Value;

/// The reference tokens of a pointer, unescaped, from the root down.
pub(super) type Path = Vec<String>;

/// Parses all pointers, so that a bad one is reported for any payload.
pub(super) fn parse(pointers: &[&str]) -> Result<Vec<Path>, JsonError> {
    let parse_one = |pointer: &&str| {
        let invalid = || JsonError::InvalidPointer { pointer: (*pointer).to_owned() };
        let tokens = pointer.strip_prefix('/').ok_or_else(invalid)?;
        tokens.split('/').map(|token| unescape(token).ok_or_else(invalid)).collect()
    };
    pointers.iter().map(parse_one).collect()
}

/// Marks the value at `path` as excluded, if there is one.
pub(super) fn apply(value: &mut Value<'_>, path: &[String]) {
    let Some((token, rest)) = path.split_first() else {
        *value = Value::Excluded;
        return;
    };
    let child = match value {
        Value::Object(members) => {
            members.iter_mut().find(|member| member.name == *token).map(|member| &mut member.value)
        }
        Value::Array(items) => index(token).and_then(|index| items.get_mut(index)),
        Value::Word(_) | Value::Number { .. } | Value::String(_) | Value::Excluded => None,
    };
    if let Some(child) = child {
        apply(child, rest);
    }
}

/// `~1` stands for a slash and `~0` for a tilde; any other tilde is a mistake.
fn unescape(token: &str) -> Option<String> {
    let mut pieces = token.split('~');
    let mut name = pieces.next().unwrap_or_default().to_owned();
    for piece in pieces {
        let (tilde, rest) = match piece.as_bytes().first()? {
            b'0' => ('~', &piece[1..]),
            b'1' => ('/', &piece[1..]),
            _ => return None,
        };
        name.push(tilde);
        name.push_str(rest);
    }
    Some(name)
}

/// The element that a token means. RFC 6901 knows neither signs nor leading zeros.
fn index(token: &str) -> Option<usize> {
    let index: usize = token.parse().ok()?;
    (index.to_string() == token).then_some(index)
}
