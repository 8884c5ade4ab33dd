//! The functions of a source.

use std::collections::BTreeSet;

use crate::config::{Value, wrong_type};

/// The functions that a path may name, besides the source's own name. Any if empty.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Functions(pub BTreeSet<String>);

/// More than any source needs, few enough for a linear search.
const MOST: usize = 100;

/// Paths of other routes.
const TAKEN: [&str; 2] = ["events", "monitor"];

/// Whether a name can be a function. A reserved path cannot, however it was encoded.
pub(crate) fn is_function(name: &str) -> bool {
    let fits = |b: u8| b.is_ascii_alphanumeric() || b"._-".contains(&b);
    (1..=64).contains(&name.len()) && name.bytes().all(fits) && !TAKEN.contains(&name)
}

impl Functions {
    /// The mistake, if there is one.
    pub(super) fn mistake(&self) -> Option<String> {
        if let Some(name) = self.0.iter().find(|name| !is_function(name)) {
            return Some(format!(
                "must be names of 1 to 64 letters, digits, '.', '_' and '-', other than {}, not {name:?}",
                TAKEN.join(" and ")
            ));
        }
        (self.0.len() > MOST).then(|| format!("must be at most {MOST}"))
    }
}

impl Value for Functions {
    const EXAMPLE: &'static str = "connect,billing";

    fn parse(text: &str) -> Result<Self, String> {
        let names = text.split(',').map(|name| name.trim().to_owned());
        Ok(Self(if text.trim().is_empty() { BTreeSet::new() } else { names.collect() }))
    }

    fn from_toml(value: &toml::Value) -> Result<Self, String> {
        match value {
            toml::Value::Array(items) => {
                let text = |item: &toml::Value| item.as_str().map(str::to_owned);
                let names = items.iter().map(|item| text(item).ok_or_else(|| wrong_type(item, "connect")));
                names.collect::<Result<_, _>>().map(Self)
            }
            toml::Value::String(text) => Self::parse(text),
            other => Err(wrong_type(other, Self::EXAMPLE)),
        }
    }

    fn to_toml(&self) -> toml::Value {
        self.0.iter().cloned().collect::<Vec<_>>().into()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn functions_are_read_as_they_are_shown_and_as_a_variable_has_them() {
        let written = Functions::parse("connect, billing").unwrap();
        assert_eq!(written.0.iter().collect::<Vec<_>>(), ["billing", "connect"]);
        assert_eq!(Functions::from_toml(&written.to_toml()), Ok(written));
        assert_eq!(Functions::parse(""), Ok(Functions::default()));
        assert!(Functions::from_toml(&toml::Value::Array(vec![1.into()])).is_err());
    }

    #[test]
    fn a_function_has_a_name_that_a_path_can_have() {
        let mistake = |text: &str| Functions::parse(text).unwrap().mistake();
        for right in ["", "a", "A.b_c-1", &"f".repeat(64)] {
            assert_eq!(mistake(right), None, "{right}");
        }
        let many = (0..=MOST).map(|i| format!("f{i}")).collect::<Vec<_>>().join(",");
        for wrong in ["a,", "a b", "a/b", "monitor", "a,events", &"f".repeat(65), &many] {
            assert!(mistake(wrong).is_some(), "{wrong}");
        }
    }
}
