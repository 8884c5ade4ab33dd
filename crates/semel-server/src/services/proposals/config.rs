//! The section `[proposals]`.

use std::time::Duration;

use semel::Policy;

use crate::config::Reader;

/// The shortest retention: a client must have time to retry.
const SHORTEST_RETENTION: Duration = Duration::from_secs(1);

/// The rules of the proposals service.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Proposals {
    /// Whether another body under the same key is always refused, not only on request.
    pub estrito: bool,
    /// How long keys are kept; `None` is for ever.
    pub retention: Option<Duration>,
    /// The retention of the keys and records of changes (submissions and the like), if it differs from the rest.
    pub submissions_retention: Option<Duration>,
}

impl Proposals {
    /// The retention of changes; `None` is for ever.
    #[must_use]
    pub fn submissions(&self) -> Option<Duration> {
        self.submissions_retention.or(self.retention)
    }

    pub(crate) fn read(reader: &mut Reader<'_>) -> Self {
        let read = Self {
            estrito: reader.field("proposals.estrito", || false),
            retention: reader.field("proposals.retention", || None),
            submissions_retention: reader.field("proposals.submissions_retention", || None),
        };
        let kept =
            [("proposals.retention", read.retention), ("proposals.submissions_retention", read.submissions_retention)];
        for (name, retention) in kept {
            if retention.is_some_and(|retention| !(SHORTEST_RETENTION..=Policy::LONGEST).contains(&retention)) {
                let why = "must be at least 1s and at most 1000 years: a later retry is executed again";
                reader.mistake(name, why.to_owned());
            }
        }
        read
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn submissions_have_the_common_retention_unless_one_is_set() {
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
