//! The journal: the durable story of an operation.
//!
//! The ordinary life (claimed once, settled once) is told by the operation's own row and costs no
//! extra write. A note is written, with the change that it tells of, for what is out of the
//! ordinary. Repeats (duplicates and conflicts) would flood it, so they are kept as an exact count
//! with the first and the last ten.

use std::{borrow::Cow, fmt, str::FromStr};

use serde::{Deserialize, Serialize};

use crate::{Error, Fence, Timestamp};

/// What the note of a run says that was put back without a reason.
pub const PUT_BACK: &str = "put back; this costs no attempt";

/// What the note says of a person who skipped a message of an operation: it never went out.
#[must_use]
pub fn skipped(message: &str, reason: &str) -> String {
    format!("its message {message} was skipped: {reason}")
}

/// Who acts when a lapsed lease is found, by the sweep or by a claim that came before it.
pub(crate) const SWEEP: &str = "sweep";

/// What a note tells of.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Event {
    /// It was claimed again after an earlier run ended badly.
    TakenOver,
    /// A run completed. Told only when it is run once more: until then the row says it.
    Completed,
    /// A run failed.
    Failed,
    /// A lease ended without a word; it may run again.
    TimedOut,
    /// Nobody knows whether it took effect.
    Doubted,
    /// It was put back before its work began.
    Released,
    /// A write under an old fence was refused.
    Refused,
    /// Newer data took the place of the older.
    Superseded,
    /// A renewal came later than half a lease.
    RenewedLate,
    /// A person or a probe said how it ended, or that it should run again.
    Resolved,
    /// A person or a program has asked for its run to stop.
    CancelAsked,
    /// It was withdrawn, or its run was stopped, because somebody asked for that.
    Cancelled,
    /// Its data went to the archive.
    Archived,
    /// A person freed the key.
    Purged,
}

impl Event {
    const ALL: [Self; 14] = [
        Self::TakenOver,
        Self::Completed,
        Self::Failed,
        Self::TimedOut,
        Self::Doubted,
        Self::Released,
        Self::Refused,
        Self::Superseded,
        Self::RenewedLate,
        Self::Resolved,
        Self::CancelAsked,
        Self::Cancelled,
        Self::Archived,
        Self::Purged,
    ];

    /// The word for it, in SQL and JSON.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::TakenOver => "taken_over",
            Self::Completed => "completed",
            Self::Failed => "failed",
            Self::TimedOut => "timed_out",
            Self::Doubted => "doubted",
            Self::Released => "released",
            Self::Refused => "refused",
            Self::Superseded => "superseded",
            Self::RenewedLate => "renewed_late",
            Self::Resolved => "resolved",
            Self::CancelAsked => "cancel_asked",
            Self::Cancelled => "cancelled",
            Self::Archived => "archived",
            Self::Purged => "purged",
        }
    }
}

impl fmt::Display for Event {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

impl FromStr for Event {
    type Err = Error;
    fn from_str(text: &str) -> Result<Self, Error> {
        Self::ALL.into_iter().find(|event| event.as_str() == text).ok_or(Error::Corrupt("a journal event"))
    }
}

/// One line of an operation's story.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Note {
    /// When, by the database's clock.
    pub at: Timestamp,
    /// What happened.
    pub event: Event,
    /// The fence it concerns.
    pub fence: Fence,
    /// Who did it: a node, a person, a probe, the sweep.
    pub actor: String,
    /// The rest, in words.
    pub detail: String,
}

impl Note {
    /// Whether it tells of a lease that ended without a word.
    #[must_use]
    pub fn is_lapse(&self) -> bool {
        self.event == Event::TimedOut || (self.event == Event::Doubted && self.actor == SWEEP)
    }
}

/// The two ways in which a claim can come again.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Repeat {
    /// The same payload under the same key.
    Duplicate,
    /// Another payload under the same key.
    Conflict,
}

impl Repeat {
    /// The word for it, in SQL and JSON.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Duplicate => "duplicate",
            Self::Conflict => "conflict",
        }
    }
}

/// One repeated claim, as the journal keeps it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Sighting {
    /// When.
    pub at: Timestamp,
    /// What it was answered.
    pub answer: Cow<'static, str>,
    /// The fingerprint it came with, in hex; nothing if it was the operation's own.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub fingerprint: String,
}

/// How often an operation's key came again: an exact count, with the first and the last ten.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Repeats {
    /// How many.
    pub count: i64,
    /// The first ten.
    pub first: Vec<Sighting>,
    /// The last ten of the rest.
    pub last: Vec<Sighting>,
}

impl Repeats {
    /// How many are kept at each end.
    pub const KEPT: usize = 10;

    /// Adds one more.
    pub fn add(&mut self, sighting: Sighting) {
        self.count += 1;
        self.keep(sighting);
    }

    /// Adds what another node (or a later second) has seen.
    pub fn merge(&mut self, later: Self) {
        self.count += later.count;
        for sighting in later.first.into_iter().chain(later.last) {
            self.keep(sighting);
        }
    }

    fn keep(&mut self, sighting: Sighting) {
        if self.first.len() < Self::KEPT {
            self.first.push(sighting);
            return;
        }
        if self.last.len() == Self::KEPT {
            self.last.remove(0);
        }
        self.last.push(sighting);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sighting(at: i64) -> Sighting {
        Sighting { at: Timestamp::from_micros(at), answer: "replay".into(), fingerprint: String::new() }
    }

    #[test]
    fn repeats_keep_an_exact_count_and_both_ends() {
        let mut whole = Repeats::default();
        for second in 0..5 {
            let mut part = Repeats::default();
            for n in 0..21 {
                part.add(sighting(second * 21 + n));
            }
            whole.merge(part);
        }
        assert_eq!(whole.count, 105);
        let at = |list: &[Sighting]| list.iter().map(|s| s.at.as_micros()).collect::<Vec<_>>();
        assert_eq!(at(&whole.first), (0..10).collect::<Vec<_>>());
        assert_eq!(at(&whole.last), (95..105).collect::<Vec<_>>());
    }
}
