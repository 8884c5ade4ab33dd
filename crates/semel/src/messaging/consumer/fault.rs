//! Tells a message that causes transient failures from an unavailable store.

use super::{Handler, Shared, attempt::Item, fresh::MOST_STRIKES};
use crate::{Error, messaging::ConsumerStore};

/// The consecutive transient failures of one message.
#[derive(Default)]
pub(super) struct Faults {
    /// How many times its handler had been called at the last failure.
    entered: u32,
    /// Failures after which the store answered another request.
    strikes: u32,
}

impl Faults {
    /// Counts a failure; true at the limit.
    fn note(&mut self, entered: u32, store_answers: bool) -> bool {
        let was_run = entered > std::mem::replace(&mut self.entered, entered);
        match was_run && store_answers {
            true => self.strikes += 1,
            false => self.strikes = 0,
        }
        self.strikes >= MOST_STRIKES
    }

    /// Whether the message may have caused the last failure.
    pub(super) fn is_suspected(&self) -> bool {
        self.strikes > 0
    }
}

impl<S: ConsumerStore, H: Handler<S>> Shared<S, H> {
    /// Whether a message causes its transient failures itself: its handler ran several times, each run ended so, and
    /// the store answered after each. An unavailable store fails for all messages, and counts against none.
    pub(super) async fn is_at_fault(&self, faults: &mut Faults, item: &Item, error: &Error) -> bool {
        let answers = self.store().now().await;
        let at_fault = faults.note(item.entered(), answers.is_ok());
        if !faults.is_suspected() {
            self.store_is_away(answers.as_ref().err().unwrap_or(error));
        }
        at_fault
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn three_failures_while_the_store_answers_are_the_messages_fault() {
        let mut faults = Faults::default();
        assert_eq!([1, 2, 3].map(|run| faults.note(run, true)), [false, false, true]);
        // It fails once more, and is still at fault.
        assert!(faults.note(4, true));
    }

    #[test]
    fn failures_without_a_run_or_a_store_answer_are_not_the_messages_fault() {
        let mut faults = Faults::default();
        for run in 1..10 {
            assert!(!faults.note(run, run % 3 != 0), "{run}");
        }
        let mut faults = Faults::default();
        for _ in 0..10 {
            assert!(!faults.note(1, true), "its handler was entered once");
        }
    }
}
