//! How a run ends after an error of the ledger or its database.

use std::time::Duration;

use semel::{Error, Unfinished};

/// How long to wait for a database that cannot be reached.
const AWAY: Duration = Duration::from_secs(1);

/// The end of a run that works on the database only: an error means that nothing was done. An outage counts no attempt.
/// An error that no retry can fix fails the operation for good.
pub(crate) fn unfinished(error: Error) -> Unfinished {
    match error {
        error if error.is_transient() => Unfinished::released_because(AWAY, error.to_string()),
        Error::Invalid(_) | Error::Corrupt(_) => Unfinished::failed_for_good(error.to_string()),
        error => Unfinished::failed(error.to_string()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_outage_counts_no_attempt_and_a_damaged_row_is_not_tried_again() {
        for error in [Error::Unavailable("x".into()), Error::OutcomeUnknown("x".into()), Error::Stopping] {
            let why = error.to_string();
            assert_eq!(unfinished(error), Unfinished::Released { after: AWAY, why: Some(why) });
        }
        for error in [Error::Invalid("x".into()), Error::Corrupt("x")] {
            let why = error.to_string();
            assert_eq!(unfinished(error), Unfinished::failed_for_good(why));
        }
        let refused = Error::Refused("x".into());
        assert_eq!(unfinished(refused.clone()), Unfinished::failed(refused.to_string()));
    }
}
