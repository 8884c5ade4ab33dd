//! The state of an event's message. The event is completed when the message is in the outbox; only the outbox knows
//! whether it was published.

use semel::{
    Result,
    journal::{Event as Told, Note, skipped},
    messaging::{MessageId, OutboxState},
};
use semel_store::Database;
use serde_json::{Value, value::RawValue};

use crate::{
    services::webhooks::process::Done,
    view::{Meaning, View},
};

/// The state of an event's message.
#[derive(Debug, PartialEq, Eq)]
pub(in super::super) enum Sent {
    /// The broker has accepted it.
    Published,
    /// It is in the outbox; the error, if there is one.
    Waits(OutboxState, Option<String>),
    /// A person removed it from the outbox unpublished.
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

    /// The event's result, with the state of its message.
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

/// The meaning of a completion whose message has reached no consumer and needs a person.
pub(super) fn stuck(view: &View) -> Option<Meaning> {
    let Some(Done::Published { topic, message }) = view.operation.outcome.as_ref().and_then(Done::read) else {
        return None;
    };
    let state = view.messages.iter().find(|held| held.id == message).map(|held| held.state);
    let (verdict, what, next) = match state {
        Some(OutboxState::Unroutable) => ("it was processed, but its message has no queue", "is unroutable", NO_QUEUE),
        Some(OutboxState::Parked) => ("it was processed, but the broker refused its message", "is parked", REFUSED),
        None if is_skipped(&message, &view.notes) => {
            ("it was processed, but its message was skipped", "was skipped", "it is never published")
        }
        _ => return None,
    };
    let next = next.replace("{message}", &message);
    Some(Meaning { verdict, kept: None, next: format!("The message {message} to the topic {topic} {what}: {next}.") })
}

/// The remedy for an unroutable message.
const NO_QUEUE: &str = "bind a queue to the topic, and it is published; or discard it with POST /outbox/{message}/skip. A rule with another \
     topic applies to later events; this one uses it if it is retried with the result published";

/// The remedy for a message that the broker refused.
const REFUSED: &str = "POST /outbox/{message}/redrive publishes it again, POST /outbox/{message}/skip discards it";

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
    fn a_result_shows_where_the_message_is() {
        assert_eq!(told(&Sent::Published)["result"], "published");
        assert_eq!(told(&Sent::Skipped)["result"], "skipped");
        assert_eq!(told(&Sent::Waits(OutboxState::Ready, None))["result"], "waiting");
        let unroutable = told(&Sent::Waits(OutboxState::Unroutable, Some("no queue".into())));
        assert_eq!((&unroutable["result"], &unroutable["error"]), (&"unroutable".into(), &"no queue".into()));
        assert!(unroutable["next"].as_str().unwrap().contains("bind a queue to the topic"));
        assert_eq!((&unroutable["topic"], &unroutable["message"]), (&"a".into(), &"m".into()));
    }
}
