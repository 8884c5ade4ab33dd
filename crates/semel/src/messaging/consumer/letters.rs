//! Keeping what could not be handled.

use super::{Handler, Refusal, Shared, attempt::Item};
use crate::{
    Error, Fingerprint, Result, Scope, crash_point,
    messaging::{
        MessageStore, NewLetter, Received, Retry,
        pause::{Pause, Stop},
    },
};

/// The longest reason that is kept, in bytes: a handler may put a whole answer of somebody else's into it.
const LONGEST_REASON: usize = 4 << 10;

impl<S: MessageStore, H: Handler<S>> Shared<S, H> {
    /// What is to become of a message whose run failed for the `nth` time.
    pub(super) fn after(&self, refusal: Refusal, nth: u32, id: i64) -> (String, Retry) {
        match refusal {
            Refusal::Dead(why) => (why, Retry::Dead),
            Refusal::Retry(why) if nth >= self.options.max_failures => (why, Retry::Dead),
            Refusal::Retry(why) => (why, Retry::After(self.options.backoff.after(nth, id))),
        }
    }

    /// A letter about a message that is known.
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

    /// A dead letter about a message that cannot be understood. It goes by its body: whatever it calls itself, that
    /// was not understood.
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

    /// Writes a letter, once.
    pub(super) async fn put_letter(&self, letter: &NewLetter) -> Result<()> {
        self.store().put_letter(letter.clone()).await?;
        crash_point!("consumer.letter_put");
        self.store_is_back();
        match letter.retry {
            // Our own retries look at once: the store's wake may be taken by another consumer.
            Retry::After(_) => self.retry.notify_one(),
            Retry::Dead => {}
        }
        let failed = letter.failures > 0 || letter.retry == Retry::Dead;
        self.tell(&letter.message, letter.failures, &letter.reason, letter.retry, failed);
        Ok(())
    }

    /// Logs what became of a message that could not be handled. What was only moved to the retries is no failure, and
    /// what was not understood had no attempt. The field is not called `message`: that is the name of the line's own
    /// text, and the id would be printed without a name.
    pub(super) fn tell(&self, message: &Received, attempt: u32, error: &str, retry: Retry, failed: bool) {
        let (consumer, message_id) = (&*self.name, named(message));
        let attempt = Some(attempt).filter(|attempt| *attempt > 0);
        match retry {
            Retry::Dead => tracing::warn!(consumer, message_id, attempt, error, "a message became a dead letter"),
            Retry::After(_) if failed => {
                tracing::warn!(consumer, message_id, attempt, error, "a message was not handled; it is tried again");
            }
            Retry::After(_) => tracing::info!(consumer, message_id, error, "a message goes to the retries"),
        }
    }

    /// Writes a letter, however long the store is away.
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

    /// Nothing is lost, since it is not acknowledged either.
    pub(super) fn letter_refused(&self, letter: &NewLetter, error: &Error) -> Word {
        let (consumer, message_id) = (&*self.name, named(&letter.message));
        let attempt = Some(letter.failures).filter(|attempt| *attempt > 0);
        tracing::error!(
            %error, consumer, message_id, attempt,
            "a message can neither be handled nor kept; the broker has it"
        );
        Word::BackLater
    }
}

/// What is to be said of a delivery.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Word {
    /// It is done with.
    Done,
    /// Somebody else may have it.
    Back,
    /// So it is, but not at once: it would only come round and round.
    BackLater,
}

/// What a conflict is called.
pub(super) fn conflict(first: Fingerprint, item: &Item) -> (String, Retry) {
    let second = item.fingerprint;
    (format!("conflict: the key belongs to a message with fingerprint {first}, this one has {second}"), Retry::Dead)
}

/// A number of a message's own, to spread its retries by.
pub(super) fn spread(item: &Item) -> i64 {
    item.fingerprint.as_bytes().iter().rev().take(8).fold(0, |number, byte| (number << 8) | i64::from(*byte))
}

/// What a message is called in a log: its id, which may be anything that another program has sent.
pub(super) fn named(message: &Received) -> String {
    const LONGEST: usize = 64;
    let id = message.id.as_deref().unwrap_or("without an id");
    id.chars().map(|c| if c.is_control() { ' ' } else { c }).take(LONGEST).collect()
}

/// A reason that any database keeps and any page shows.
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
