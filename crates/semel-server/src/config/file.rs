//! The TOML file, as a flat list of fields that know their line.

use std::{collections::BTreeMap, path::Path};

use toml::{
    Spanned, Value,
    de::{DeTable, DeValue},
};

use super::{Environment, Mistake, Origin, expand::expand};

/// One field of the file: its value as far as it can be read, and its mistakes.
pub(super) struct Given {
    pub(super) value: Option<Value>,
    pub(super) mistakes: Vec<String>,
    pub(super) origin: Origin,
}

/// The fields of a file by their full names, such as `sweep.every`.
pub(super) type Fields = BTreeMap<String, Given>;

/// Reads the text of a file. TOML errors are added to `mistakes`.
pub(super) fn read(path: &Path, text: &str, environment: &Environment, mistakes: &mut Vec<Mistake>) -> Fields {
    let at = |offset: usize| Origin::File {
        path: path.to_owned(),
        line: 1 + text[..offset.min(text.len())].matches('\n').count(),
    };

    let (table, errors) = DeTable::parse_recoverable(text);
    if !errors.is_empty() {
        // The parser's own report quotes the line, which may contain a password: only its message is repeated. Fields
        // that the parser recovered are ignored, since a guess about them would mislead.
        mistakes.extend(errors.iter().map(|error| Mistake {
            field: None,
            origin: at(error.span().map_or(0, |span| span.start)),
            message: format!("not valid TOML: {}", error.message()),
        }));
        return Fields::new();
    }

    let mut fields = Fields::new();
    flatten("", table.get_ref(), &mut |name, key_at, value| {
        let mut mistakes = Vec::new();
        let value = plain(value, environment, &mut mistakes);
        fields.insert(name, Given { value, mistakes, origin: at(key_at) });
    });
    fields
}

/// Calls `found` for every value that is not a section. An empty section counts as a value, so that a misspelled one is
/// reported even if it is empty.
fn flatten(within: &str, table: &DeTable<'_>, found: &mut impl FnMut(String, usize, &DeValue<'_>)) {
    for (key, value) in table {
        let name = format!("{within}{}", written(key.get_ref()));
        match value.get_ref() {
            DeValue::Table(section) if !section.is_empty() => flatten(&format!("{name}."), section, found),
            value => found(name, key.span().start, value),
        }
    }
}

/// A key as written in TOML: quoted if needed, so that `"sweep.every"` differs from `every` in `[sweep]`.
fn written(key: &str) -> String {
    let bare = !key.is_empty() && key.chars().all(|c| c.is_ascii_alphanumeric() || c == '_' || c == '-');
    if bare { key.to_owned() } else { format!("{key:?}") }
}

/// The value without spans and with its texts expanded; mistakes go to `mistakes`. A list keeps the items that can be
/// read, so that they are checked too: an unset variable hides no other mistake. A table is read as a whole or not at
/// all, since a part of it could mean something else.
fn plain(value: &DeValue<'_>, environment: &Environment, mistakes: &mut Vec<String>) -> Option<Value> {
    let mut noted = |message: String| {
        mistakes.push(message);
        None
    };
    match value {
        DeValue::String(text) => match expand(text, environment) {
            Ok(text) => Some(Value::String(text)),
            Err(wrong) => {
                mistakes.extend(wrong);
                None
            }
        },
        DeValue::Integer(number) => match i64::from_str_radix(number.as_str(), number.radix()) {
            Ok(number) => Some(Value::Integer(number)),
            Err(_) => noted(format!("the number {number} is too large")),
        },
        DeValue::Float(number) => match number.as_str().parse() {
            Ok(number) => Some(Value::Float(number)),
            Err(_) => noted(format!("{number} is not a number")),
        },
        DeValue::Boolean(truth) => Some(Value::Boolean(*truth)),
        DeValue::Datetime(time) => Some(Value::Datetime(*time)),
        DeValue::Array(items) => {
            let read: Vec<_> = items.iter().filter_map(|item| plain(item.get_ref(), environment, mistakes)).collect();
            // A list of which no item can be read must not be reported as empty.
            (!read.is_empty() || items.is_empty()).then_some(Value::Array(read))
        }
        DeValue::Table(table) => {
            let read: toml::Table = table
                .iter()
                .filter_map(|(key, value): (_, &Spanned<DeValue<'_>>)| {
                    Some((key.get_ref().clone().into_owned(), plain(value.get_ref(), environment, mistakes)?))
                })
                .collect();
            (read.len() == table.len()).then_some(Value::Table(read))
        }
    }
}
