//! What became of the message that an event was published as. The event is completed when the message is in the outbox;
//! whether it went out from there is known there only.

use semel::{
    Operation, Result,
    journal::{Event as Told, Note, skipped},
    messaging::{MessageId, OutboxState},
};
use semel_store::Database;
use serde_json::{Value, value::RawValue};

use crate::services::webhooks::process::Done;

/// Where the message of an event is.
#[derive(Debug, PartialEq, Eq)]
pub(in super::super) enum Sent {
    /// The broker has it.
    Published,
    /// It is in the outbox, and why if something is wrong.
    Waits(OutboxState, Option<String>),
    /// A person took it out of the outbox, so that it went nowhere.
    Skipped,
}

impl Sent {
    pub(in super::super) async fn find(store: &Database, tenant: &str, message: &str, notes: &[Note]) -> Result<Self> {
        let Ok(id) = message.parse::<MessageId>() else { return Ok(Self::Published) };
        Ok(match store.in_outbox(tenant, id).await? {
            Some((state, error)) => Self::Waits(state, error),
            None if is_skipped(message, notes) => Self::Skipped,
            None => Self::Published,
        })
    }

    /// What is kept of the event's result, with the word for where its message is.
    pub(super) fn told(&self, kept: &[u8]) -> Option<Box<RawValue>> {
        let mut told: Value = serde_json::from_slice(kept).ok()?;
        let (word, error, next) = match self {
            Self::Published => ("published", None, None),
            Self::Skipped => ("skipped", None, None),
            Self::Waits(OutboxState::Unroutable, error) => ("unroutable", error.as_ref(), Some(NO_QUEUE)),
            Self::Waits(OutboxState::Parked, error) => ("parked", error.as_ref(), Some(REFUSED)),
            Self::Waits(_, error) => ("waiting", error.as_ref(), None),
        };
        told["result"] = word.into();
        if let Some(error) = error {
            told["error"] = error.as_str().into();
        }
        if let Some(next) = next {
            told["next"] = next.into();
        }
        serde_json::value::to_raw_value(&told).ok()
    }
}

/// The message of an event that reached nobody, and does not by itself.
pub(crate) struct Stuck {
    /// How the event stands, as a part of a sentence.
    pub(crate) verdict: &'static str,
    /// What to do about it, as a sentence.
    pub(crate) next: String,
}

/// Whether an event was published as a message that is stuck. Only the outbox knows.
pub(crate) async fn stuck(store: &Database, operation: &Operation, notes: &[Note]) -> Result<Option<Stuck>> {
    let Some(Done::Published { topic, message }) = operation.outcome.as_ref().and_then(Done::read) else {
        return Ok(None);
    };
    let (verdict, what, next) = match Sent::find(store, operation.scope.tenant(), &message, notes).await? {
        Sent::Waits(OutboxState::Unroutable, _) => {
            ("it was processed, but its message has no queue", "is unroutable", NO_QUEUE)
        }
        Sent::Waits(OutboxState::Parked, _) => {
            ("it was processed, but the broker refuses its message", "is parked", REFUSED)
        }
        Sent::Skipped => ("it was processed, but its message was skipped", "was skipped", "it is never published"),
        Sent::Published | Sent::Waits(..) => return Ok(None),
    };
    let next = next.replace("{message}", &message);
    Ok(Some(Stuck { verdict, next: format!("The message {message} to the topic {topic} {what}: {next}.") }))
}

/// What to do about a message that no queue takes.
const NO_QUEUE: &str = "listen on the topic, and it goes out by itself; or give it up by POST /outbox/{message}/skip. A rule with another \
     topic is for later events; this one runs by it if it is retried with the result published";

/// What to do about a message that the broker refuses.
const REFUSED: &str = "POST /outbox/{message}/redrive tries it again, POST /outbox/{message}/skip gives it up";

/// Whether a person skipped this message. An event that ran more than once has had others.
fn is_skipped(message: &str, notes: &[Note]) -> bool {
    let said = skipped(message, "");
    notes.iter().any(|note| note.event == Told::Resolved && note.detail.starts_with(&said))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn told(sent: &Sent) -> Value {
        let kept = br#"{"result":"published","topic":"a","message":"m"}"#;
        serde_json::from_str(sent.told(kept).unwrap().get()).unwrap()
    }

    #[test]
    fn a_result_says_where_the_message_is() {
        assert_eq!(told(&Sent::Published)["result"], "published");
        assert_eq!(told(&Sent::Skipped)["result"], "skipped");
        assert_eq!(told(&Sent::Waits(OutboxState::Ready, None))["result"], "waiting");
        let unroutable = told(&Sent::Waits(OutboxState::Unroutable, Some("no queue".into())));
        assert_eq!((&unroutable["result"], &unroutable["error"]), (&"unroutable".into(), &"no queue".into()));
        assert!(unroutable["next"].as_str().unwrap().contains("listen on the topic"));
        assert_eq!((&unroutable["topic"], &unroutable["message"]), (&"a".into(), &"m".into()));
    }
}
