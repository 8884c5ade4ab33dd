//! How the value of a field is read and shown.

use std::{path::PathBuf, time::Duration};

use semel::{OnLost, Scope};

/// A type that a field may have.
pub(crate) trait Value: Sized {
    /// A valid value, for the error about an invalid one.
    const EXAMPLE: &'static str;

    /// Parses the text of a flag, a variable or a TOML string. The error completes "*field* …" and must not repeat a
    /// text that may contain a password.
    fn parse(text: &str) -> Result<Self, String>;

    /// Reads a TOML value. Types that are not texts override this.
    fn from_toml(value: &toml::Value) -> Result<Self, String> {
        match value {
            toml::Value::String(text) => Self::parse(text),
            other => Err(wrong_type(other, Self::EXAMPLE)),
        }
    }

    /// The value for people, secrets hidden.
    fn to_toml(&self) -> toml::Value;
}

pub(crate) fn wrong_type(value: &toml::Value, example: &str) -> String {
    let found = match value.type_str() {
        vowel @ ("integer" | "array") => format!("an {vowel}"),
        other => format!("a {other}"),
    };
    format!("must be a string such as \"{example}\", not {found}")
}

impl Value for PathBuf {
    const EXAMPLE: &'static str = "./semel-data";

    fn parse(text: &str) -> Result<Self, String> {
        match text {
            "" => Err("must not be empty".to_owned()),
            path => Ok(path.into()),
        }
    }

    fn to_toml(&self) -> toml::Value {
        self.to_string_lossy().as_ref().into()
    }
}

impl Value for Duration {
    const EXAMPLE: &'static str = "15s";

    fn parse(text: &str) -> Result<Self, String> {
        humantime::parse_duration(text)
            .map_err(|_| format!("must be a duration such as 15s, 500ms or 1h 30m, not \"{text}\""))
    }

    fn to_toml(&self) -> toml::Value {
        /// Whole days are shown as days: people write "90days", and its months would not be calendar months.
        const DAY: u64 = 24 * 3600;
        let days = self.as_secs() / DAY;
        if days > 1 && *self == Self::from_secs(days * DAY) {
            return format!("{days}days").into();
        }
        humantime::format_duration(*self).to_string().into()
    }
}

impl Value for bool {
    const EXAMPLE: &'static str = "true";

    fn parse(text: &str) -> Result<Self, String> {
        text.parse().map_err(|_| format!("must be true or false, not \"{text}\""))
    }

    fn from_toml(value: &toml::Value) -> Result<Self, String> {
        match value {
            toml::Value::Boolean(truth) => Ok(*truth),
            toml::Value::String(text) => Self::parse(text),
            other => Err(wrong_type(other, Self::EXAMPLE)),
        }
    }

    fn to_toml(&self) -> toml::Value {
        (*self).into()
    }
}

/// True, false or unset.
impl Value for Option<bool> {
    const EXAMPLE: &'static str = "true";

    fn parse(text: &str) -> Result<Self, String> {
        if text.is_empty() { Ok(None) } else { bool::parse(text).map(Some) }
    }

    fn from_toml(value: &toml::Value) -> Result<Self, String> {
        match value {
            toml::Value::String(text) => Self::parse(text),
            other => bool::from_toml(other).map(Some),
        }
    }

    fn to_toml(&self) -> toml::Value {
        self.map_or_else(|| "".into(), toml::Value::Boolean)
    }
}

/// A duration, or for ever.
impl Value for Option<Duration> {
    const EXAMPLE: &'static str = "30days";

    fn parse(text: &str) -> Result<Self, String> {
        if text == FOREVER { Ok(None) } else { Duration::parse(text).map(Some) }
    }

    fn to_toml(&self) -> toml::Value {
        self.map_or_else(|| FOREVER.into(), |duration| duration.to_toml())
    }
}

const FOREVER: &str = "forever";

impl Value for usize {
    const EXAMPLE: &'static str = "1000";

    fn parse(text: &str) -> Result<Self, String> {
        text.parse().map_err(|_| format!("must be a whole number such as {}, not \"{text}\"", Self::EXAMPLE))
    }

    fn from_toml(value: &toml::Value) -> Result<Self, String> {
        match value {
            toml::Value::Integer(number) => {
                Self::try_from(*number).map_err(|_| format!("must be a whole number such as {}", Self::EXAMPLE))
            }
            toml::Value::String(text) => Self::parse(text),
            other => Err(wrong_type(other, Self::EXAMPLE)),
        }
    }

    fn to_toml(&self) -> toml::Value {
        i64::try_from(*self).unwrap_or(i64::MAX).into()
    }
}

impl Value for OnLost {
    const EXAMPLE: &'static str = "hold";

    fn parse(text: &str) -> Result<Self, String> {
        match text {
            "hold" => Ok(Self::Hold),
            "rerun" => Ok(Self::Rerun),
            _ => Err(format!("must be hold or rerun, not \"{text}\"")),
        }
    }

    fn to_toml(&self) -> toml::Value {
        if self.doubts() { "hold".into() } else { "rerun".into() }
    }
}

/// A tenant.
pub(crate) struct Tenant(pub(crate) String);

impl Value for Tenant {
    const EXAMPLE: &'static str = "default";

    fn parse(text: &str) -> Result<Self, String> {
        match Scope::new(text, "gateway", "request") {
            Ok(_) => Ok(Self(text.to_owned())),
            Err(_) => Err("must be 1 to 64 bytes without / and control characters".to_owned()),
        }
    }

    fn to_toml(&self) -> toml::Value {
        self.0.as_str().into()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_retention_is_a_time_or_for_ever() {
        let days = Duration::from_secs(30 * 24 * 3600);
        assert_eq!(<Option<Duration>>::parse("30days"), Ok(Some(days)));
        assert_eq!(<Option<Duration>>::parse("forever"), Ok(None));
        assert!(<Option<Duration>>::parse("soon").is_err());
        for retention in [None, Some(days)] {
            assert_eq!(<Option<Duration>>::from_toml(&retention.to_toml()), Ok(retention), "as it is shown");
        }
    }
}
