//! The nouns: kinds of recipients, channels, identifiers, notifications.

use serde::{Serialize, Serializer};
use serde_json::value::RawValue;

use crate::http::{
    answers::{maybe_time, time},
    fields::text,
};

/// A kind of recipient. Each has its own queue and its own users: equal user ids of two kinds are two people.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) enum Kind {
    Restaurant,
    Customer,
    Agency,
    Admin,
}

impl Kind {
    pub(super) const ALL: [Self; 4] = [Self::Restaurant, Self::Customer, Self::Agency, Self::Admin];

    pub(super) const fn name(self) -> &'static str {
        match self {
            Self::Restaurant => "restaurant",
            Self::Customer => "customer",
            Self::Agency => "agency",
            Self::Admin => "admin",
        }
    }

    /// The member that names the group of this kind, in payloads and messages.
    pub(super) const fn group_field(self) -> &'static str {
        match self {
            Self::Restaurant => "restaurant_id",
            Self::Customer => "customer_id",
            Self::Agency => "agency_id",
            Self::Admin => "admin_id",
        }
    }

    /// The queue of this kind, which is also the name of its listener.
    pub(super) fn queue(self) -> String {
        format!("notification.{}", self.name())
    }

    pub(super) fn parse(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|kind| kind.name() == name)
    }
}

impl Serialize for Kind {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(self.name())
    }
}

/// A way to reach a recipient; the `notificationType` of a notification.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Channel {
    Push,
    Email,
    Sms,
    InApp,
}

impl Channel {
    pub(super) const ALL: [Self; 4] = [Self::Push, Self::Email, Self::Sms, Self::InApp];

    pub(super) const fn name(self) -> &'static str {
        match self {
            Self::Push => "PUSH",
            Self::Email => "EMAIL",
            Self::Sms => "SMS",
            Self::InApp => "IN_APP",
        }
    }

    pub(super) fn parse(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|channel| channel.name() == name)
    }
}

/// The values of a notification's `status`.
pub(super) const STATUSES: [&str; 4] = ["PENDING", "SENT", "FAILED", "IN_DOUBT"];

/// The longest external identifier, in bytes.
pub(super) const LONGEST_IDENT: usize = 255;

/// An external identifier: a text or a whole number. `5` and `"5"` are the same identifier, but each is passed on as it
/// was written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Ident {
    /// The form for comparisons.
    pub(super) text: String,
    /// The form as it was written.
    pub(super) json: String,
}

impl Ident {
    /// Reads a JSON value.
    pub(super) fn read(raw: &str) -> Result<Self, String> {
        if let Ok(number) = raw.parse::<i64>() {
            return Ok(Self { text: number.to_string(), json: number.to_string() });
        }
        let wrong = || "must be a text of 1 to 255 bytes or a whole number".to_owned();
        if !raw.starts_with('"') {
            return Err(wrong());
        }
        let read = text(raw)?;
        if read.is_empty() || read.len() > LONGEST_IDENT {
            return Err(wrong());
        }
        let json = serde_json::to_string(&read).map_err(|error| error.to_string())?;
        Ok(Self { text: read, json })
    }

    /// The JSON value as it was written.
    pub(super) fn raw(&self) -> Option<Box<RawValue>> {
        RawValue::from_string(self.json.clone()).ok()
    }
}

/// A notification in an answer.
#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Notification {
    pub(super) id: i64,
    pub(super) event_id: String,
    pub(super) event_type: Option<String>,
    pub(super) kind: String,
    pub(super) user_id: String,
    pub(super) notification_type: String,
    /// The recipient's present address for this channel.
    pub(super) address: Option<String>,
    pub(super) status: String,
    #[serde(serialize_with = "time")]
    pub(super) created_at: i64,
    #[serde(serialize_with = "maybe_time")]
    pub(super) read_at: Option<i64>,
    /// Why it is FAILED or IN_DOUBT.
    pub(super) error: Option<String>,
    /// Why the last call failed, while it is PENDING.
    pub(super) last_error: Option<String>,
    /// The number of the last attempt; 0 before the first.
    pub(super) attempt: i64,
    /// The event's payload, as it was written.
    pub(super) payload: Option<Box<RawValue>>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_number_and_its_digits_are_one_identifier_and_keep_their_json_form() {
        let (number, digits) = (Ident::read("5").unwrap(), Ident::read("\"5\"").unwrap());
        assert_eq!(number.text, digits.text);
        assert_eq!((number.json.as_str(), digits.json.as_str()), ("5", "\"5\""));
    }

    #[test]
    fn an_invalid_identifier_is_refused() {
        let long = format!("\"{}\"", "x".repeat(256));
        for raw in ["\"\"", "1.5", "null", "true", "[]", "{}", "\"a\\u0000\"", long.as_str()] {
            assert!(Ident::read(raw).is_err(), "{raw}");
        }
    }
}
