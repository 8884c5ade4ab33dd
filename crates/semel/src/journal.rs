//! The journal: the durable history of an operation.
//!
//! An ordinary life (claimed once, settled once) is in the operation's row and needs no note. Every other
//! event writes a note, in the transaction of the change. Repeats (duplicates and conflicts) would flood
//! the journal, so they are stored as an exact count with the first and the last ten.

use std::{borrow::Cow, fmt, str::FromStr};

use serde::{Deserialize, Serialize};

use crate::{Error, Fence, Timestamp};

/// The note of a release without a reason. Journals contain this text, so it must not change.
pub const RELEASED: &str = "put back; this costs no attempt";

/// The note about a skipped message of an operation: it is never published.
#[must_use]
pub fn skipped(message: &str, reason: &str) -> String {
    format!("its message {message} was skipped: {reason}")
}

/// The note of an expired lease: its owner, and since when it was held.
pub(crate) fn lapsed(owner: &str, since: Timestamp) -> String {
    format!("the lease of {owner}{HELD_SINCE}{since}{UNSETTLED}")
}

const HELD_SINCE: &str = ", held since ";
const UNSETTLED: &str = ", expired";

/// The actor of a lease expiry, found by the sweep or by an earlier claim.
pub(crate) const SWEEP: &str = "sweep";

/// The event of a note.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Event {
    /// It was claimed again after a run that did not complete.
    TakenOver,
    /// A run completed. Written only before another run: until then the row has it.
    Completed,
    /// A run failed.
    Failed,
    /// A lease expired; it may run again.
    TimedOut,
    /// It may or may not have taken effect.
    Doubted,
    /// A run was released.
    Released,
    /// A write under an old fence was refused.
    Refused,
    /// Newer data replaced the older.
    Superseded,
    /// A renewal came later than half a lease.
    RenewedLate,
    /// A person or a probe resolved it.
    Resolved,
    /// A person or a program asked its run to stop.
    CancelAsked,
    /// It was cancelled: withdrawn, or its run stopped.
    Cancelled,
    /// Its data was archived.
    Archived,
    /// A person purged it.
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

    /// Its word in SQL and JSON.
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

/// One entry of the journal.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Note {
    /// When, by the database's clock.
    pub at: Timestamp,
    /// The event.
    pub event: Event,
    /// The fence of the operation.
    pub fence: Fence,
    /// The actor: a node, a person, a probe, the sweep.
    pub actor: String,
    /// The details, in words.
    pub detail: String,
}

impl Note {
    /// Whether it is about lease expiry.
    #[must_use]
    pub fn is_lapse(&self) -> bool {
        self.event == Event::TimedOut || (self.event == Event::Doubted && self.actor == SWEEP)
    }

    /// The owner of the expired lease, in words, and since when it was held. Notes of earlier versions lack the time.
    #[must_use]
    pub fn lapsed_lease(&self) -> Option<(&str, Timestamp)> {
        let (lease, since) = self.detail.strip_suffix(UNSETTLED)?.rsplit_once(HELD_SINCE)?;
        let time = chrono::DateTime::parse_from_rfc3339(since).ok()?;
        Some((lease, Timestamp::from_micros(time.timestamp_micros())))
    }
}

/// The two kinds of repeated claims.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Repeat {
    /// The same payload under the same key.
    Duplicate,
    /// Another payload under the same key.
    Conflict,
}

impl Repeat {
    /// Its word in SQL and JSON.
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
    /// Its answer.
    pub answer: Cow<'static, str>,
    /// Its fingerprint in hex; empty if it equals the operation's.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub fingerprint: String,
}

/// The repeats of an operation's key: an exact count, with the first and the last ten.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Repeats {
    /// The number.
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

    /// Adds the repeats of another node, or of a later second.
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
    fn the_note_of_an_expiry_has_the_time_of_the_claim() {
        let lapse = |detail: String| {
            let (at, fence, actor) = (Timestamp::from_micros(9), Fence(1), SWEEP.to_owned());
            Note { at, event: Event::TimedOut, fence, actor, detail }
        };
        let since = Timestamp::from_micros(1_700_000_000_000_001);
        let note = lapse(lapsed("a, held since noon", since));
        assert_eq!(note.lapsed_lease(), Some(("the lease of a, held since noon", since)));
        let earlier = lapse("the lease of a ended without a word".to_owned());
        assert_eq!(earlier.lapsed_lease(), None, "as earlier versions wrote it");
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
