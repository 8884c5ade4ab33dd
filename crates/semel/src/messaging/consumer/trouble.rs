//! Tells a message that is in trouble by itself from a store that is away for all.

use super::{Handler, Shared, attempt::Item, fresh::BENEFITS_OF_THE_DOUBT};
use crate::{Error, messaging::MessageStore};

/// The passing failures of one message, in a row.
#[derive(Default)]
pub(super) struct Trouble {
    /// How often its handler was entered when the last failure was looked at.
    entered: u32,
    /// Failures after which the store answered somebody else's question.
    strikes: u32,
}

impl Trouble {
    /// Notes a failure; whether the message has had as many as it may.
    fn note(&mut self, entered: u32, store_answers: bool) -> bool {
        let was_run = entered > std::mem::replace(&mut self.entered, entered);
        match was_run && store_answers {
            true => self.strikes += 1,
            false => self.strikes = 0,
        }
        self.strikes >= BENEFITS_OF_THE_DOUBT
    }

    /// Whether the last failure may have been the message's own.
    pub(super) fn is_suspected(&self) -> bool {
        self.strikes > 0
    }
}

impl<S: MessageStore, H: Handler<S>> Shared<S, H> {
    /// Whether a message that could not be committed, for a passing reason, is in trouble by itself: its handler was run
    /// several times, each ended so, and after each the store answered. A store that does not answer is away for all,
    /// and costs no message anything.
    pub(super) async fn is_its_own(&self, trouble: &mut Trouble, item: &Item, error: &Error) -> bool {
        let answers = self.store().now().await;
        let its_own = trouble.note(item.entered(), answers.is_ok());
        if !trouble.is_suspected() {
            self.store_is_away(answers.as_ref().err().unwrap_or(error));
        }
        its_own
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn three_runs_in_a_row_that_fail_while_the_store_answers_are_a_messages_own_trouble() {
        let mut trouble = Trouble::default();
        assert_eq!([1, 2, 3].map(|run| trouble.note(run, true)), [false, false, true]);
        // Once more it fails, and is still to blame.
        assert!(trouble.note(4, true));
    }

    #[test]
    fn a_store_that_does_not_answer_is_to_blame_and_so_is_one_that_lets_nothing_run() {
        let mut trouble = Trouble::default();
        for run in 1..10 {
            assert!(!trouble.note(run, run % 3 != 0), "{run}");
        }
        let mut trouble = Trouble::default();
        for _ in 0..10 {
            assert!(!trouble.note(1, true), "its handler was entered once");
        }
    }
}
