//! The section `[proposals]`.

use std::time::Duration;

use semel::Policy;

use super::{
    reader::Reader,
    value::{Value, wrong_type},
};

/// How long a key lives at least, where it does not live for ever: a client must have the time to try again.
const SHORTEST_RETENTION: Duration = Duration::from_secs(1);

/// The rules of the proposals service.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Proposals {
    /// Whether another body under the same key is refused, also for those who do not ask for it.
    pub estrito: bool,
    /// How long keys are kept; `None` is for ever.
    pub retention: Option<Duration>,
    /// How long the keys of changes (submissions and the like) and what they left behind are kept, where that is
    /// shorter or longer than the rest.
    pub submissions_retention: Option<Duration>,
}

impl Proposals {
    /// How long changes are remembered; `None` is for ever.
    #[must_use]
    pub fn submissions(&self) -> Option<Duration> {
        self.submissions_retention.or(self.retention)
    }

    pub(super) fn read(reader: &mut Reader<'_>) -> Self {
        let read = Self {
            estrito: reader.field("proposals.estrito", || false),
            retention: reader.field("proposals.retention", || None),
            submissions_retention: reader.field("proposals.submissions_retention", || None),
        };
        let kept =
            [("proposals.retention", read.retention), ("proposals.submissions_retention", read.submissions_retention)];
        for (name, retention) in kept {
            if retention.is_some_and(|retention| !(SHORTEST_RETENTION..=Policy::LONGEST).contains(&retention)) {
                let why =
                    "must be at least 1s and at most 1000 years: a retry that comes after it is carried out again";
                reader.mistake(name, why.to_owned());
            }
        }
        read
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

/// Yes, no, or nothing said.
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

/// A length of time, or for ever.
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

    #[test]
    fn changes_are_kept_as_long_as_the_rest_unless_told_otherwise() {
        let (long, short) = (Some(Duration::from_secs(9)), Some(Duration::from_secs(1)));
        let kept = |retention, submissions_retention| {
            Proposals { retention, submissions_retention, ..Proposals::default() }.submissions()
        };
        assert_eq!(
            (kept(None, None), kept(long, None), kept(None, short), kept(long, short)),
            (None, long, short, short)
        );
    }
}
