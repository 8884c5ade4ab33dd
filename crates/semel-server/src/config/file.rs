//! The TOML file, as a flat list of fields that know their line.

use std::{collections::BTreeMap, path::Path};

use toml::{
    Spanned, Value,
    de::{DeTable, DeValue},
};

use super::{Environment, Mistake, Origin, expand::expand};

/// What the file says about one field: a value, or why the text could not be expanded to one.
pub(super) struct Given {
    pub(super) value: Result<Value, Vec<String>>,
    pub(super) origin: Origin,
}

/// The fields of a file by their full names, such as `sweep.every`.
pub(super) type Fields = BTreeMap<String, Given>;

/// Reads the text of a file; what is wrong with it as TOML is added to `mistakes`.
pub(super) fn read(path: &Path, text: &str, environment: &Environment, mistakes: &mut Vec<Mistake>) -> Fields {
    let at = |offset: usize| Origin::File {
        path: path.to_owned(),
        line: 1 + text[..offset.min(text.len())].matches('\n').count(),
    };

    let (table, errors) = DeTable::parse_recoverable(text);
    if !errors.is_empty() {
        // The parser's own report quotes the line, which may hold a password: only its words are repeated. The fields
        // it could still make out are left alone, since a guess about them would only mislead.
        mistakes.extend(errors.iter().map(|error| Mistake {
            field: None,
            origin: at(error.span().map_or(0, |span| span.start)),
            message: format!("not valid TOML: {}", error.message()),
        }));
        return Fields::new();
    }

    let mut fields = Fields::new();
    flatten("", table.get_ref(), &mut |name, key_at, value| {
        let value = plain(value, environment);
        fields.insert(name, Given { value, origin: at(key_at) });
    });
    fields
}

/// Calls `found` for every value that is not a section. An empty section is a value, so that a wrongly spelled one is
/// seen even with nothing in it.
fn flatten(within: &str, table: &DeTable<'_>, found: &mut impl FnMut(String, usize, &DeValue<'_>)) {
    for (key, value) in table {
        let name = format!("{within}{}", written(key.get_ref()));
        match value.get_ref() {
            DeValue::Table(section) if !section.is_empty() => flatten(&format!("{name}."), section, found),
            value => found(name, key.span().start, value),
        }
    }
}

/// A key as one would write it: quoted if need be, so that `"sweep.every"` is not taken for `every` in `[sweep]`.
fn written(key: &str) -> String {
    let bare = !key.is_empty() && key.chars().all(|c| c.is_ascii_alphanumeric() || c == '_' || c == '-');
    if bare { key.to_owned() } else { format!("{key:?}") }
}

/// The value without spans, its texts expanded.
fn plain(value: &DeValue<'_>, environment: &Environment) -> Result<Value, Vec<String>> {
    Ok(match value {
        DeValue::String(text) => Value::String(expand(text, environment)?),
        DeValue::Integer(number) => i64::from_str_radix(number.as_str(), number.radix())
            .map(Value::Integer)
            .map_err(|_| vec![format!("the number {number} is too large")])?,
        DeValue::Float(number) => {
            number.as_str().parse().map(Value::Float).map_err(|_| vec![format!("{number} is not a number")])?
        }
        DeValue::Boolean(truth) => Value::Boolean(*truth),
        DeValue::Datetime(time) => Value::Datetime(*time),
        DeValue::Array(items) => {
            Value::Array(items.iter().map(|item| plain(item.get_ref(), environment)).collect::<Result<_, _>>()?)
        }
        DeValue::Table(table) => Value::Table(
            table
                .iter()
                .map(|(key, value): (_, &Spanned<DeValue<'_>>)| {
                    Ok((key.get_ref().clone().into_owned(), plain(value.get_ref(), environment)?))
                })
                .collect::<Result<_, Vec<String>>>()?,
        ),
    })
}
