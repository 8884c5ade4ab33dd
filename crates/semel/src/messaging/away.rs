//! Logs once that the store or the broker is unreachable, and once that it is back.

use parking_lot::Mutex;

/// The last error, while it is unreachable.
#[derive(Default)]
pub(super) struct Away(Mutex<Option<String>>);

impl Away {
    /// It is unreachable: calls `say` the first time.
    pub(super) fn begins(&self, error: &str, say: impl FnOnce()) {
        if self.with(|last| last.replace(error.to_owned()).is_none()) {
            say();
        }
    }

    /// It answers: calls `say` with the last error if it was unreachable.
    pub(super) fn ends(&self, say: impl FnOnce(&str)) {
        if let Some(error) = self.with(Option::take) {
            say(&error);
        }
    }

    fn with<T>(&self, change: impl FnOnce(&mut Option<String>) -> T) -> T {
        change(&mut self.0.lock())
    }
}
