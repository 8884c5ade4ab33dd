//! Counters that are written every second: refused deliveries, of which nothing else is stored, and events without a
//! matching rule.

use std::collections::HashMap;

use parking_lot::Mutex;
use semel::{Store, look::Group, store::AnswerCount};

use super::{SERVICE, event::Event, process::STORED, source::Source};

/// Why a delivery was refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Reason {
    /// Its signature is missing or wrong; the verifier's word.
    Signature(&'static str),
    /// It is signed, and not an event of the source's kind.
    NoEvent,
    /// It is an event of the other mode.
    OtherMode,
    /// Its body is compressed.
    Encoded,
    /// Its body is too long.
    TooLarge,
    /// Its body took too long.
    Slow,
    /// Its body broke off.
    Incomplete,
    /// There was no memory for its body.
    Busy,
    /// It came from another machine, to an unsigned source.
    Foreign,
    /// Its source has no such function.
    Function,
}

/// The answers of the counters, one per reason.
pub const WORDS: [&str; 18] = [
    "refused_missing",
    "refused_repeated",
    "refused_too_long",
    "refused_too_many",
    "refused_malformed",
    "refused_unsupported",
    "refused_wrong",
    "refused_too_old",
    "refused_too_new",
    "refused_event",
    "refused_livemode",
    "refused_encoded",
    "refused_too_large",
    "refused_timeout",
    "refused_incomplete",
    "refused_busy",
    "refused_foreign",
    "refused_function",
];

impl Reason {
    /// Its counter.
    pub(super) fn word(self) -> &'static str {
        let word = match self {
            Self::Signature(word) => word,
            Self::NoEvent => "event",
            Self::OtherMode => "livemode",
            Self::Encoded => "encoded",
            Self::TooLarge => "too_large",
            Self::Slow => "timeout",
            Self::Incomplete => "incomplete",
            Self::Busy => "busy",
            Self::Foreign => "foreign",
            Self::Function => "function",
        };
        // A word that the verifier has learnt since still counts as a wrong signature.
        WORDS.into_iter().find(|known| known.strip_prefix("refused_") == Some(word)).unwrap_or("refused_wrong")
    }

    /// Whether it was signed by the source.
    pub(super) fn is_proved(self) -> bool {
        matches!(self, Self::NoEvent | Self::OtherMode)
    }
}

/// How many groups may wait to be written. Further ones are counted without their type and function.
const MOST: usize = 1024;

/// Counts that are not written yet.
#[derive(Default)]
pub(super) struct Refusals(Mutex<HashMap<(Group, &'static str), i64>>);

impl Refusals {
    pub(super) fn count(&self, tenant: &str, source: &str, function: &str, reason: Reason) {
        let group = Group {
            tenant: tenant.to_owned(),
            service: SERVICE.to_owned(),
            kind: source.to_owned(),
            label1: String::new(),
            label2: function.to_owned(),
        };
        self.add(group, reason.word(), 1);
    }

    /// Counts an event that was only stored.
    pub(super) fn count_stored(&self, source: &Source, event: &Event) {
        let group = Group {
            tenant: event.tenant.clone(),
            service: SERVICE.to_owned(),
            kind: source.kind(&event.function),
            label1: event.kind.clone(),
            label2: event.function.clone(),
        };
        self.add(group, STORED, 1);
    }

    fn add(&self, mut group: Group, word: &'static str, n: i64) {
        let mut counts = self.0.lock();
        if counts.len() >= MOST {
            group.label1.clear();
            group.label2.clear();
        }
        *counts.entry((group, word)).or_default() += n;
    }

    /// Writes the counts. Those that cannot be written wait for the next time.
    pub(super) async fn flush(&self, store: &impl Store) {
        let counts = std::mem::take(&mut *self.0.lock());
        if counts.is_empty() {
            return;
        }
        let written = counts.iter().map(|((group, answer), n)| AnswerCount { group: group.clone(), answer, n: *n });
        if let Err(error) = store.note_repeats(Vec::new(), written.collect()).await {
            tracing::warn!(%error, "refusals and stored events could not be counted; trying again");
            for ((group, word), n) in counts {
                self.add(group, word, n);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_reason_has_its_own_counter() {
        let signatures = semel_http::webhooks::Refused::WORDS.map(Reason::Signature);
        let others = [
            Reason::NoEvent,
            Reason::OtherMode,
            Reason::Encoded,
            Reason::TooLarge,
            Reason::Slow,
            Reason::Incomplete,
            Reason::Busy,
            Reason::Foreign,
            Reason::Function,
        ];
        let words: Vec<_> = signatures.into_iter().chain(others).map(Reason::word).collect();
        assert_eq!(words, WORDS);
    }

    #[test]
    fn the_counts_that_wait_are_bounded() {
        let refusals = Refusals::default();
        for i in 0..2 * MOST {
            refusals.count("t", "s", &format!("f{i}"), Reason::NoEvent);
        }
        let counts = refusals.0.lock();
        assert_eq!(counts.len(), MOST + 1);
        assert_eq!(counts.values().sum::<i64>(), 2 * i64::try_from(MOST).unwrap(), "none is lost");
    }
}
