//! A part says once that the store or the broker is away, and once that it is back.

use std::sync::{Mutex, PoisonError};

/// The last error, while it is away.
#[derive(Default)]
pub(super) struct Away(Mutex<Option<String>>);

impl Away {
    /// It is away: calls `say` the first time.
    pub(super) fn begins(&self, error: &str, say: impl FnOnce()) {
        if self.with(|last| last.replace(error.to_owned()).is_none()) {
            say();
        }
    }

    /// It answers: calls `say` with the last error if it was away.
    pub(super) fn ends(&self, say: impl FnOnce(&str)) {
        if let Some(error) = self.with(Option::take) {
            say(&error);
        }
    }

    fn with<T>(&self, change: impl FnOnce(&mut Option<String>) -> T) -> T {
        change(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }
}
