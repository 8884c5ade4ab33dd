//! Arguments that several commands read.

use std::time::Duration;

/// Reads a length of time from the command line.
pub(super) fn duration(text: &str) -> Result<Duration, String> {
    humantime::parse_duration(text).map_err(|_| "must be a length of time such as 30s, 5m or 1h 30m".to_owned())
}

/// Reads why a person does something.
pub(super) fn reason(text: &str) -> Result<String, &'static str> {
    match text.trim() {
        "" => Err("must say something"),
        reason if reason.len() > 1000 => Err("must have at most 1000 bytes"),
        reason => Ok(reason.to_owned()),
    }
}
