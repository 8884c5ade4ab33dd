//! How a field's value is read and shown.

use std::{path::PathBuf, time::Duration};

/// A type that a field may have.
pub(super) trait Value: Sized {
    /// A right value, for the message about a wrong one.
    const EXAMPLE: &'static str;

    /// Reads the text given by flag, by environment or as a TOML string. The message completes "*field* …" and must
    /// not repeat the text if that may hold a password.
    fn parse(text: &str) -> Result<Self, String>;

    /// Reads a TOML value; a type that has another form than text overrides this.
    fn from_toml(value: &toml::Value) -> Result<Self, String> {
        match value {
            toml::Value::String(text) => Self::parse(text),
            other => Err(wrong_type(other, Self::EXAMPLE)),
        }
    }

    /// The value for people to see, secrets hidden.
    fn to_toml(&self) -> toml::Value;
}

pub(super) fn wrong_type(value: &toml::Value, example: &str) -> String {
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
            .map_err(|_| format!("must be a length of time such as 15s, 500ms or 1h 30m, not \"{text}\""))
    }

    fn to_toml(&self) -> toml::Value {
        /// Whole days stay days: "90days" is what people write, and its months would be no months of the calendar.
        const DAY: u64 = 24 * 3600;
        let days = self.as_secs() / DAY;
        if days > 1 && *self == Self::from_secs(days * DAY) {
            return format!("{days}days").into();
        }
        humantime::format_duration(*self).to_string().into()
    }
}
