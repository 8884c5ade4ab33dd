//! The messages of the queues `notification.<kind>`. Other programs may read and write them.

use std::collections::BTreeMap;

use bytes::Bytes;
use semel::messaging::Refusal;
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;

use super::model::{Ident, Kind};
use crate::{
    http::json::{DEEPEST, flaw},
    services::notifications::config::Routes,
};

pub(super) const BROADCAST: &str = "BROADCAST";
pub(super) const USER: &str = "USER";

/// The prefix of a chunk's inbox key.
const CHUNK: &str = "fanout:";

/// A message. Unknown members are ignored.
#[derive(Default, Serialize, Deserialize)]
pub(super) struct Body {
    pub(super) event_id: String,
    pub(super) event_type: String,
    pub(super) aggregate_type: String,
    #[serde(rename = "recipientType")]
    pub(super) recipient_type: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) restaurant_id: Option<Box<RawValue>>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) customer_id: Option<Box<RawValue>>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) agency_id: Option<Box<RawValue>>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) admin_id: Option<Box<RawValue>>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) payload: Option<Box<RawValue>>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) recipients: Option<Vec<Named>>,
    /// Only in the service's own messages: where the fan-out continues.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) fanout: Option<Place>,
}

/// A recipient.
#[derive(Clone, Serialize, Deserialize)]
pub(super) struct Named {
    pub(super) kind: String,
    #[serde(rename = "userId")]
    pub(super) user_id: Box<RawValue>,
}

/// The progress of a fan-out.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Place {
    /// The last user that was reached.
    pub(super) cursor: String,
}

impl Body {
    /// The member that names the group of a kind.
    pub(super) fn group_mut(&mut self, kind: Kind) -> &mut Option<Box<RawValue>> {
        match kind {
            Kind::Restaurant => &mut self.restaurant_id,
            Kind::Customer => &mut self.customer_id,
            Kind::Agency => &mut self.agency_id,
            Kind::Admin => &mut self.admin_id,
        }
    }

    pub(super) fn group(&self, kind: Kind) -> &Option<Box<RawValue>> {
        match kind {
            Kind::Restaurant => &self.restaurant_id,
            Kind::Customer => &self.customer_id,
            Kind::Agency => &self.agency_id,
            Kind::Admin => &self.admin_id,
        }
    }

    /// The message that continues a fan-out: its recipients and its position. The payload is stored already.
    pub(super) fn going_on(&self, kind: Kind, place: Place) -> Self {
        let mut next = Self {
            event_id: self.event_id.clone(),
            event_type: self.event_type.clone(),
            aggregate_type: self.aggregate_type.clone(),
            recipient_type: self.recipient_type.clone(),
            recipients: self.recipients.clone(),
            fanout: Some(place),
            ..Self::default()
        };
        *next.group_mut(kind) = self.group(kind).clone();
        next
    }

    /// The JSON text.
    pub(super) fn to_bytes(&self) -> Result<Bytes, serde_json::Error> {
        serde_json::to_vec(self).map(Bytes::from)
    }
}

/// The recipients of an event.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Whom {
    /// All users of a group.
    Group(String),
    /// All users of the kind.
    All,
    /// These users.
    Users(Vec<String>),
}

/// A valid message.
pub(super) struct Told {
    pub(super) body: Body,
    pub(super) whom: Whom,
}

/// Parses a message from the queue of a kind. A message that is refused now may be valid after a change of the rules.
pub(super) fn read(kind: Kind, routes: &Routes, bytes: &[u8]) -> Result<Told, Refusal> {
    let dead = |why: String| Refusal::Dead(why);
    // One level more than a payload may have: the message encloses it.
    if let Some(flaw) = std::str::from_utf8(bytes).ok().and_then(|json| flaw(json, DEEPEST + 1)) {
        return Err(dead(format!("the message is malformed: it has {flaw}")));
    }
    let body: Body = serde_json::from_slice(bytes)
        .map_err(|error| dead(format!("the message is malformed: {}", what_is_wrong(bytes, &error))))?;
    if semel::Key::new(&body.event_id).is_err() {
        return Err(dead(
            "the message is malformed: event_id must be 1 to 255 bytes without control characters".into(),
        ));
    }
    for (name, text) in [("event_type", &body.event_type), ("aggregate_type", &body.aggregate_type)] {
        if text.is_empty() || text.chars().count() > super::reading::LONGEST_NAME || text.chars().any(char::is_control)
        {
            let why = format!("the message is malformed: {name} must be 1 to 100 characters, none of them a control");
            return Err(dead(why));
        }
    }
    let kinds = routes.kinds(&body.aggregate_type, &body.event_type);
    if !kinds.contains(&kind.name()) {
        // The types are not repeated: the sender may have put anything there.
        let why = if kinds.is_empty() { "unknown event type: no rule" } else { "wrong queue: no rule" };
        return Err(dead(format!("{why} sends this aggregate_type and event_type to {}", kind.name())));
    }
    if body.fanout.as_ref().is_some_and(|place| place.cursor.chars().any(char::is_control)) {
        return Err(dead("the message is malformed: the cursor of fanout is no user's id".into()));
    }
    if body.fanout.is_none() && !body.payload.as_ref().is_some_and(|payload| payload.get().starts_with('{')) {
        return Err(dead("the message is malformed: payload must be an object".into()));
    }
    let group = body.group(kind).as_ref().map(|raw| Ident::read(raw.get()));
    let whom = match (body.recipient_type.as_str(), group) {
        (BROADCAST, Some(Ok(group))) => Whom::Group(group.text),
        (BROADCAST, Some(Err(why))) => {
            return Err(dead(format!("the message is malformed: {} {why}", kind.group_field())));
        }
        (BROADCAST, None) if kind == Kind::Admin => Whom::All,
        (BROADCAST, None) => return Err(dead(format!("the message is malformed: {} is missing", kind.group_field()))),
        (USER, _) => Whom::Users(users(kind, body.recipients.as_deref())?),
        _ => return Err(dead("the message is malformed: recipientType must be BROADCAST or USER".into())),
    };
    Ok(Told { body, whom })
}

fn users(kind: Kind, recipients: Option<&[Named]>) -> Result<Vec<String>, Refusal> {
    let dead = |why: &str| Refusal::Dead(format!("the message is malformed: {why}"));
    let recipients = recipients.ok_or_else(|| dead("recipients is missing"))?;
    let mine = recipients.iter().filter(|named| named.kind == kind.name());
    let read = |named: &Named| Ident::read(named.user_id.get()).map(|ident| ident.text);
    mine.map(read).collect::<Result<_, _>>().map_err(|_| dead("recipients has a userId that is not valid"))
}

/// The error of a text that is not a [`Body`]. Only names of our members are repeated; serde's error may quote the
/// text.
fn what_is_wrong(bytes: &[u8], error: &serde_json::Error) -> String {
    let no_json = |error: &serde_json::Error| format!("no JSON, at line {} column {}", error.line(), error.column());
    if !error.is_data() {
        return no_json(error);
    }
    match serde_json::from_slice::<Members<'_>>(bytes) {
        Ok(members) => wrong_member(&members).unwrap_or_else(|| "a member is of another type".to_owned()),
        Err(error) if error.is_data() => "it must be an object".to_owned(),
        // After the member of another type.
        Err(error) => no_json(&error),
    }
}

type Members<'a> = BTreeMap<String, &'a RawValue>;

/// The first member of a [`Body`] that is missing or of another type, and what it must be.
fn wrong_member(members: &Members<'_>) -> Option<String> {
    let recipients = || match serde_json::from_str::<Option<Vec<&RawValue>>>(members.get("recipients")?.get()) {
        Ok(list) => list?.into_iter().enumerate().find_map(|(n, one)| wrong_recipient(n, one)),
        Err(_) => Some("recipients must be a list".to_owned()),
    };
    let fanout = || match serde_json::from_str::<Option<Members<'_>>>(members.get("fanout")?.get()) {
        Ok(place) => wrong_text(&place?, "cursor").map(|wrong| format!("fanout.{wrong}")),
        Err(_) => Some("fanout must be an object".to_owned()),
    };
    let texts = ["event_id", "event_type", "aggregate_type", "recipientType"];
    texts.into_iter().find_map(|name| wrong_text(members, name)).or_else(recipients).or_else(fanout)
}

fn wrong_recipient(n: usize, one: &RawValue) -> Option<String> {
    let Ok(members) = serde_json::from_str::<Members<'_>>(one.get()) else {
        return Some(format!("recipients[{n}] must be an object"));
    };
    let no_user = || (!members.contains_key("userId")).then(|| "userId is missing".to_owned());
    let wrong = wrong_text(&members, "kind").or_else(no_user)?;
    Some(format!("recipients[{n}].{wrong}"))
}

fn wrong_text(members: &Members<'_>, name: &str) -> Option<String> {
    match members.get(name).map(|raw| serde_json::from_str::<String>(raw.get())) {
        None => Some(format!("{name} is missing")),
        Some(Err(_)) => Some(format!("{name} must be a text")),
        Some(Ok(_)) => None,
    }
}

/// The inbox key of a message: the event's id; for a later chunk, made from the event and the position. The id of the
/// message itself is not used.
pub(super) fn inbox_key(body: &Body) -> String {
    let of = semel::Fingerprint::fields().field("event_id", body.event_id.as_bytes());
    let of = match &body.fanout {
        // An event may have an id that looks like the key of another's chunk: it must not take its place.
        None if body.event_id.starts_with(CHUNK) => of,
        None => return body.event_id.clone(),
        Some(place) => of.field("cursor", place.cursor.as_bytes()),
    };
    format!("{CHUNK}{}", of.finish().to_hex())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn refused(kind: Kind, message: &serde_json::Value) -> String {
        match read(kind, &Routes::default(), message.to_string().as_bytes()) {
            Err(Refusal::Dead(why)) => why,
            other => panic!("{:?}", other.map(|told| told.whom)),
        }
    }

    #[test]
    fn a_missing_or_mistyped_member_is_named_without_its_value() {
        let why = refused(Kind::Admin, &json!({ "event_type": "X" }));
        assert_eq!(why, "the message is malformed: event_id is missing");
        let good = json!({ "event_id": "e", "event_type": "X", "aggregate_type": "AGENCY", "recipientType": "USER",
            "recipients": [{ "kind": "agency", "userId": 1 }], "payload": {} });
        let secrets = [json!({ "s3same": "s3same" }), json!(["s3same"]), json!(4_711)];
        for (member, told) in [
            ("event_id", "event_id must be a text"),
            ("event_type", "event_type must be a text"),
            ("aggregate_type", "aggregate_type must be a text"),
            ("recipientType", "recipientType must be a text"),
        ] {
            for secret in &secrets {
                let mut message = good.clone();
                message[member] = secret.clone();
                assert_eq!(refused(Kind::Agency, &message), format!("the message is malformed: {told}"), "{message}");
            }
            let mut message = good.clone();
            message.as_object_mut().unwrap().remove(member);
            assert_eq!(refused(Kind::Agency, &message), format!("the message is malformed: {member} is missing"));
        }
        for (member, value, told) in [
            ("recipients", json!({ "s3same": 4_711 }), "recipients must be a list"),
            ("recipients", json!([good["recipients"][0], "s3same"]), "recipients[1] must be an object"),
            ("recipients", json!([{ "kind": ["s3same"], "userId": 1 }]), "recipients[0].kind must be a text"),
            ("recipients", json!([{ "userId": "s3same" }]), "recipients[0].kind is missing"),
            ("recipients", json!([{ "kind": "s3same" }]), "recipients[0].userId is missing"),
            ("fanout", json!("s3same"), "fanout must be an object"),
            ("fanout", json!({ "cursor": 4_711 }), "fanout.cursor must be a text"),
            ("fanout", json!({ "s3same": "" }), "fanout.cursor is missing"),
        ] {
            let mut message = good.clone();
            message[member] = value;
            assert_eq!(refused(Kind::Agency, &message), format!("the message is malformed: {told}"), "{message}");
        }
        for (text, told) in [
            (r#""s3same""#, "it must be an object"),
            (r#"{"event_id":4711,"s3same"}"#, "no JSON, at line 1 column 26"),
            ("s3same", "no JSON, at line 1 column 1"),
        ] {
            let Err(Refusal::Dead(why)) = read(Kind::Agency, &Routes::default(), text.as_bytes()) else { panic!() };
            assert_eq!(why, format!("the message is malformed: {told}"));
        }
    }

    #[test]
    fn the_message_of_the_source_document_is_understood() {
        let message = json!({ "event_id": "evt-001", "event_type": "RESERVATION_REQUESTED",
            "aggregate_type": "RESTAURANT", "recipientType": "BROADCAST", "restaurant_id": 5, "payload": {} });
        let told = read(Kind::Restaurant, &Routes::default(), message.to_string().as_bytes()).ok().unwrap();
        assert_eq!(told.whom, Whom::Group("5".to_owned()));
        assert_eq!(inbox_key(&told.body), "evt-001");
        assert!(refused(Kind::Customer, &message).starts_with("wrong queue"));
    }

    #[test]
    fn a_malformed_message_is_dead_with_a_reason() {
        let good = json!({ "event_id": "e", "event_type": "X", "aggregate_type": "AGENCY",
            "recipientType": "BROADCAST", "agency_id": "a", "payload": {} });
        for (member, value, why) in [
            ("event_id", json!(""), "event_id"),
            ("event_id", json!(7), "event_id must be a text"),
            ("aggregate_type", json!("QUUX"), "unknown event type"),
            ("recipientType", json!("SOME"), "recipientType"),
            ("recipientType", json!("USER"), "recipients is missing"),
            ("agency_id", json!(null), "agency_id is missing"),
            ("agency_id", json!({}), "agency_id must be"),
            ("payload", json!("text"), "payload"),
            ("event_type", json!("x".repeat(101)), "event_type must be"),
            ("fanout", json!({ "cursor": "\0" }), "cursor"),
        ] {
            let mut message = good.clone();
            message[member] = value;
            assert!(refused(Kind::Agency, &message).contains(why), "{message}");
        }
        let with = |payload: &str| good.to_string().replace(r#""payload":{}"#, &format!(r#""payload":{payload}"#));
        let nested = |levels: usize| format!("{}{}", r#"{"a":"#.repeat(levels - 1) + "{}", "}".repeat(levels - 1));
        for (payload, why) in [
            (r#"{"a":1e999999}"#.to_owned(), "at payload.a a number beyond"),
            (r#"{"a":"\ud800"}"#.to_owned(), "at payload.a half of"),
            (r#"{"a":1,"a":1}"#.to_owned(), "it has payload.a twice"),
            (nested(65), "more than 65 levels"),
        ] {
            let Err(Refusal::Dead(told)) = read(Kind::Agency, &Routes::default(), with(&payload).as_bytes()) else {
                panic!("{payload} was taken");
            };
            assert!(told.contains(why), "{told}");
        }
        let deepest = with(&nested(64));
        assert!(
            read(Kind::Agency, &Routes::default(), deepest.as_bytes()).is_ok(),
            "what POST /events accepts is accepted here"
        );
        assert!(read(Kind::Agency, &Routes::default(), b"{").is_err());
        assert!(read(Kind::Agency, &Routes::default(), good.to_string().as_bytes()).is_ok());
    }

    #[test]
    fn every_chunk_has_a_name_of_its_own() {
        let body = |event: &str, cursor: Option<&str>| {
            let fanout = cursor.map(|cursor| Place { cursor: cursor.to_owned() });
            inbox_key(&Body { event_id: event.to_owned(), fanout, ..Body::default() })
        };
        // An id that equals the key of another's chunk.
        let forged = body("e", Some("a"));
        let names = [
            body("e", None),
            body("e", Some("a")),
            body("e", Some("b")),
            body("ea", Some("")),
            body("f", Some("a")),
            body(&forged, None),
            body(&body(&forged, None), None),
        ];
        assert_eq!(names.iter().collect::<std::collections::BTreeSet<_>>().len(), names.len());
        assert!(names.iter().all(|name| semel::Key::new(name).is_ok()));
    }
}
