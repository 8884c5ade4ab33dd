//! The results of sending a mail.
//!
//! They differ in what the caller must do next, and above all in one question: may the mail have been sent?
//! [`Sent::Unknown`] and [`Sent::Strange`] leave it open.

use std::time::{Duration, SystemTime};

/// The longest wait that a server can ask for.
pub(crate) const LONGEST_WAIT: Duration = Duration::from_secs(3600);

/// The longest reason that is kept, in characters.
const LONGEST_REASON: usize = 500;

/// The result of one attempt to send a mail.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Sent {
    /// The transport has it.
    Accepted {
        /// The transport's name for the mail, if it gave one.
        external_id: Option<String>,
    },
    /// This recipient or message is refused for good. It was not sent.
    Refused {
        /// The reason.
        why: String,
    },
    /// This mail is not accepted now. It was not sent, or a repeat with the same key is harmless.
    NotNow {
        /// The reason.
        why: String,
        /// The wait that the server asked for.
        after: Option<Duration>,
    },
    /// The transport accepts no mail for a while. It was not sent.
    TooMany {
        /// The reason.
        why: String,
        /// The wait that the server asked for.
        after: Option<Duration>,
    },
    /// The transport itself fails, whatever the mail: it was not sent, or a repeat with the same key is harmless.
    Failing {
        /// The reason.
        why: String,
        /// The wait that the server asked for.
        after: Option<Duration>,
    },
    /// The transport refuses us, whatever the mail: the mailing must pause until an operator acts. It was not sent.
    ServerRefuses {
        /// The reason.
        why: String,
    },
    /// This recipient is refused, with words that may be about us and not about the recipient. It was not sent.
    RefusedOrUs {
        /// The reason.
        why: String,
    },
    /// No mail service answers like this, so no other mail should be given to it. This one may have been sent.
    Strange {
        /// The reason.
        why: String,
    },
    /// The transport could not be reached. Nothing was sent.
    Away {
        /// The reason.
        why: String,
    },
    /// It may have been sent: the answer is missing.
    Unknown {
        /// The reason.
        why: String,
    },
    /// The transport is processing an earlier request with the same key.
    InFlight {
        /// What it said.
        why: String,
        /// The wait that the server asked for.
        after: Option<Duration>,
    },
    /// The transport has seen the key with another content. The first content may have been sent.
    KeyConflict {
        /// The reason.
        why: String,
    },
}

/// What is known about a mail whose worker died between "sending" and "sent".
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Settle {
    /// It was sent.
    Sent {
        /// The transport's name for the mail, if known.
        external_id: Option<String>,
    },
    /// It was not sent, or sending it again with the same key has no further effect.
    Resend,
    /// It may have been sent, and the transport cannot tell.
    Unknown,
}

/// A reason of bounded length without control characters and without a secret, which a server might repeat.
pub(super) fn reason(text: &str, secret: Option<&str>) -> String {
    let hidden = match secret {
        Some(secret) if !secret.is_empty() => text.replace(secret, "***"),
        _ => text.to_owned(),
    };
    let plain = hidden.chars().map(|c| if c.is_control() { ' ' } else { c });
    plain.take(LONGEST_REASON).collect::<String>().trim().to_owned()
}

/// Whether a connection failed because of the server's certificate: no waiting helps then.
pub(super) fn is_certificate(why: &str) -> bool {
    why.contains("certificate")
}

/// The text without mail addresses, for the log.
pub(crate) fn without_addresses(text: &str) -> String {
    let word = |word: &str| if word.contains('@') { "…".to_owned() } else { word.to_owned() };
    text.split(' ').map(word).collect::<Vec<_>>().join(" ")
}

/// A Retry-After in seconds or as a date, which is relative to the server's own Date if it sent one: its clock may
/// differ from ours.
pub(super) fn retry_after(value: &str, date: Option<&str>, now: SystemTime) -> Option<Duration> {
    let value = value.trim();
    if !value.is_empty() && value.bytes().all(|b| b.is_ascii_digit()) {
        // A number too large to parse counts as a long time.
        return Some(value.parse().map_or(LONGEST_WAIT, Duration::from_secs).min(LONGEST_WAIT));
    }
    let until = http_date(value)?;
    let from = date.and_then(http_date).unwrap_or(now);
    Some(until.duration_since(from).unwrap_or_default().min(LONGEST_WAIT))
}

/// A date such as `Sun, 06 Nov 1994 08:49:37 GMT`. It has the form of RFC 2822, which chrono reads.
fn http_date(text: &str) -> Option<SystemTime> {
    chrono::DateTime::parse_from_rfc2822(text.trim()).ok().map(SystemTime::from)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_retry_after_is_seconds_or_a_date_and_is_capped() {
        let now = http_date("Wed, 21 Oct 2026 07:28:00 GMT").unwrap();
        let wait = |value, date| retry_after(value, date, now).map(|wait| wait.as_secs());
        for (value, waits) in [("0", 0), (" 7 ", 7), ("3601", 3600), ("18446744073709551616", 3600)] {
            assert_eq!(wait(value, None), Some(waits), "{value}");
        }
        assert_eq!(wait("Wed, 21 Oct 2026 07:28:30 GMT", None), Some(30));
        assert_eq!(wait("Wed, 21 Oct 2026 07:27:00 GMT", None), Some(0));
        // The server's clock is an hour ahead.
        let date = Some("Wed, 21 Oct 2026 08:28:00 GMT");
        assert_eq!(wait("Wed, 21 Oct 2026 08:28:10 GMT", date), Some(10));
        for value in ["", "-1", "1.5", "soon"] {
            assert_eq!(wait(value, None), None, "{value}");
        }
    }

    #[test]
    fn a_reason_is_short_and_has_no_secret_and_no_line_break() {
        assert_eq!(reason("no\r\nkey geheim!", Some("geheim")), "no  key ***!");
        assert_eq!(reason(&"ä".repeat(1000), Some("")).chars().count(), LONGEST_REASON);
    }
}
