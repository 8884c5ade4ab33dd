//! Stores messages that could not be handled.

use super::{Handler, Refusal, Shared, attempt::Item};
use crate::{
    Error, Fingerprint, Result, Scope, crash_point,
    messaging::{
        ConsumerStore, NewLetter, Received, Retry,
        pause::{Pause, Stop},
    },
};

/// The longest stored reason, in bytes: a handler may put a whole HTTP response into it.
const LONGEST_REASON: usize = 4 << 10;

impl<S: ConsumerStore, H: Handler<S>> Shared<S, H> {
    /// Retry or dead letter, after the `nth` failed run.
    pub(super) fn after(&self, refusal: Refusal, nth: u32, id: i64) -> (String, Retry) {
        match refusal {
            Refusal::Dead(why) => (why, Retry::Dead),
            Refusal::Retry(why) if nth >= self.options.max_attempts => (why, Retry::Dead),
            Refusal::Retry(why) => (why, Retry::After(self.options.backoff.after(nth, id))),
        }
    }

    /// A letter for a message with an inbox key.
    pub(super) fn letter(&self, item: &Item, failures: u32, (reason, retry): (String, Retry)) -> NewLetter {
        NewLetter {
            tenant: item.scope.tenant().to_owned(),
            consumer: self.name.clone(),
            key: item.key.as_str().to_owned(),
            fingerprint: item.fingerprint,
            message: item.message.clone(),
            failures,
            reason: tidy(&reason),
            retry,
        }
    }

    /// A dead letter for a message that cannot be read. Its key is the hash of its body, because its id cannot be
    /// trusted.
    pub(super) fn letter_of_unknown(&self, message: Received, reason: &str) -> NewLetter {
        let fingerprint = Fingerprint::of_bytes(&message.body);
        let tenant = message.tenant.as_deref().filter(|tenant| Scope::new(tenant, "inbox", "any").is_ok());
        NewLetter {
            tenant: tenant.unwrap_or(Scope::DEFAULT_TENANT).to_owned(),
            consumer: self.name.clone(),
            key: format!("body:{fingerprint}"),
            fingerprint,
            message,
            failures: 0,
            reason: tidy(reason),
            retry: Retry::Dead,
        }
    }

    /// Stores a letter; tries once.
    pub(super) async fn put_letter(&self, letter: &NewLetter) -> Result<()> {
        self.store().put_letter(letter.clone()).await?;
        crash_point!("consumer.letter_put");
        self.store_is_back();
        match letter.retry {
            // Wakes this consumer's own retries: another consumer may receive the store's wake.
            Retry::After(_) => self.retry.notify_one(),
            Retry::Dead => {}
        }
        let failed = letter.failures > 0 || letter.retry == Retry::Dead;
        self.tell(&letter.message, letter.failures, &letter.reason, letter.retry, failed);
        Ok(())
    }

    /// Logs a message that could not be handled. Moving it to the retries is no failure, and an unreadable message had
    /// no attempt. The field is not called `message`, because that is the name of the log line's text.
    pub(super) fn tell(&self, message: &Received, attempt: u32, error: &str, retry: Retry, failed: bool) {
        let (consumer, message_id) = (&*self.name, named(message));
        let attempt = Some(attempt).filter(|attempt| *attempt > 0);
        match retry {
            Retry::Dead => tracing::warn!(consumer, message_id, attempt, error, "a message became a dead letter"),
            Retry::After(_) if failed => {
                tracing::warn!(consumer, message_id, attempt, error, "a message failed; it is retried");
            }
            Retry::After(_) => tracing::info!(consumer, message_id, error, "a message moves to the retries"),
        }
    }

    /// Stores a letter, and retries while the store is unavailable.
    pub(super) async fn put_letter_patiently(&self, letter: &NewLetter, stop: &mut Stop) -> Word {
        let mut pause = Pause::new();
        loop {
            match self.put_letter(letter).await {
                Ok(()) => return Word::Done,
                Err(error) if error.is_transient() => {
                    self.store_is_away(&error);
                    if !pause.wait(stop).await {
                        return Word::Back;
                    }
                }
                Err(error) => return self.letter_refused(letter, &error),
            }
        }
    }

    /// Nothing is lost, because the delivery is not acknowledged.
    pub(super) fn letter_refused(&self, letter: &NewLetter, error: &Error) -> Word {
        let (consumer, message_id) = (&*self.name, named(&letter.message));
        let attempt = Some(letter.failures).filter(|attempt| *attempt > 0);
        tracing::error!(
            %error, consumer, message_id, attempt,
            "a message can be neither handled nor stored; it stays with the broker"
        );
        Word::BackLater
    }
}

/// The answer to a delivery.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Word {
    /// Acknowledge it.
    Done,
    /// Return it to the queue.
    Back,
    /// Return it after a delay: it would be delivered again at once.
    BackLater,
}

/// The reason text of a conflict.
pub(super) fn conflict(first: Fingerprint, item: &Item) -> (String, Retry) {
    let second = item.fingerprint;
    (format!("conflict: the key belongs to a message with fingerprint {first}, this one has {second}"), Retry::Dead)
}

/// A number derived from a message's fingerprint, which spreads retries over time.
pub(super) fn spread(item: &Item) -> i64 {
    item.fingerprint.as_bytes().iter().rev().take(8).fold(0, |number, byte| (number << 8) | i64::from(*byte))
}

/// A message's id for the log. Other programs choose it, so it may be any text.
pub(super) fn named(message: &Received) -> String {
    const LONGEST: usize = 64;
    let id = message.id.as_deref().unwrap_or("without an id");
    id.chars().map(|c| if c.is_control() { ' ' } else { c }).take(LONGEST).collect()
}

/// A reason without control characters, which any database stores.
pub(super) fn tidy(reason: &str) -> String {
    let mut end = reason.len().min(LONGEST_REASON);
    while !reason.is_char_boundary(end) {
        end -= 1;
    }
    reason[..end].chars().map(|c| if c.is_control() { ' ' } else { c }).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_reason_is_short_and_has_no_control_characters() {
        assert_eq!(tidy("one\ntwo\0three"), "one two three");
        let long = "é".repeat(LONGEST_REASON);
        assert!(tidy(&long).len() <= LONGEST_REASON);
        assert!(tidy(&format!("x{long}")).starts_with("xé"));
    }
}
