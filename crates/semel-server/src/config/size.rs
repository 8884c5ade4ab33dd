//! Sizes in bytes.

use super::value::Value;

/// A number of bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Size(pub usize);

impl Size {
    const UNITS: [(&'static str, usize); 4] = [("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10), ("B", 1)];
    /// The ledger's limit for a row, less room for the answer's headers.
    const LARGEST: usize = 7 << 20;

    /// The number of bytes of a text such as `512KiB`.
    pub(crate) fn bytes(text: &str) -> Option<usize> {
        let (number, unit) = text.split_at(text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len()));
        let unit = Self::UNITS.iter().find(|(name, _)| *name == unit.trim()).map(|(_, bytes)| *bytes);
        let unit = unit.or((number == text).then_some(1))?;
        number.parse::<usize>().ok()?.checked_mul(unit)
    }
}

impl Value for Size {
    const EXAMPLE: &'static str = "1MiB";

    fn parse(text: &str) -> Result<Self, String> {
        match Self::bytes(text) {
            Some(bytes) if bytes <= Self::LARGEST => Ok(Self(bytes)),
            Some(_) => Err("must be at most 7MiB".to_owned()),
            None => Err(format!("must be a size such as 512KiB or 1MiB, not \"{text}\"")),
        }
    }

    fn from_toml(value: &toml::Value) -> Result<Self, String> {
        match value {
            toml::Value::Integer(bytes) => Self::parse(&bytes.to_string()),
            toml::Value::String(text) => Self::parse(text),
            _ => Err("must be a size such as \"1MiB\"".to_owned()),
        }
    }

    fn to_toml(&self) -> toml::Value {
        let whole = Self::UNITS.iter().find(|(_, bytes)| self.0 != 0 && self.0.is_multiple_of(*bytes));
        let (unit, bytes) = whole.unwrap_or(&("B", 1));
        format!("{}{unit}", self.0 / bytes).into()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_size_is_shown_as_people_write_it() {
        for (text, shown) in [("1MiB", "1MiB"), ("1048576", "1MiB"), ("1536 KiB", "1536KiB"), ("7", "7B"), ("0", "0B")]
        {
            assert_eq!(Size::parse(text).map(|size| size.to_toml()), Ok(shown.into()), "{text}");
        }
        for text in ["", "MiB", "1 GB", "8MiB", "-1", "99999999999999999999", "1.5MiB"] {
            assert!(Size::parse(text).is_err(), "{text}");
        }
    }
}
