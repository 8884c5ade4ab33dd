//! Parses `POST /events`: reports all mistakes at once; valid events are ready to be stored.

use std::collections::{BTreeMap, HashMap};

use semel::{
    Fingerprint, Key,
    messaging::{Message, Topic},
};
use serde_json::value::RawValue;

use super::{
    message::{BROADCAST, Body, Named, USER},
    model::{Ident, Kind},
};
use crate::{
    http::{
        fields::{Fields, Wrong, is_blank, no_json, text},
        json::{DEEPEST, flaw},
        problem::{INVALID_FIELDS, INVALID_JSON, Problem},
    },
    services::notifications::config::Routes,
};

/// The most events of one request.
pub(super) const MOST_EVENTS: usize = 1_000;

/// The longest payload. A message has at most 1 MiB, and its recipients need room in it, too.
const LONGEST_PAYLOAD: usize = 256 << 10;

/// The most recipients that an event may name. Groups reach more.
const MOST_RECIPIENTS: usize = 1_000;

/// The longest type of an event or aggregate, in characters.
pub(super) const LONGEST_NAME: usize = 100;

/// A valid event, with a message for each kind of recipient.
pub(super) struct NewEvent {
    pub(super) id: Key,
    pub(super) aggregate_type: String,
    pub(super) aggregate_id: Option<Ident>,
    pub(super) event_type: String,
    pub(super) payload: Box<RawValue>,
    /// Tells a repeat from another event with the same id.
    pub(super) fingerprint: Fingerprint,
    pub(super) messages: Vec<(Kind, Message)>,
}

impl NewEvent {
    /// Its approximate weight in a transaction.
    pub(super) fn weight(&self) -> usize {
        let bodies: usize = self.messages.iter().map(|(_, message)| message.body.len()).sum();
        // Rows and their indices cost about as much as a page, with any content.
        4096 + self.payload.get().len() + bodies
    }
}

/// The events of a body, and whether they came as a list.
pub(super) struct Given {
    pub(super) events: Vec<NewEvent>,
    pub(super) list: bool,
}

/// Reads a body: one event, or a list of them.
pub(super) fn read(body: &[u8], tenant: &str, routes: &Routes) -> Result<Given, Problem> {
    if body.trim_ascii().is_empty() {
        let detail = "The body is empty. It must be an event, as a JSON object, or a list of events.";
        return Err(Problem::new(&INVALID_JSON).detail(detail));
    }
    let list = body.iter().find(|byte| !byte.is_ascii_whitespace()) == Some(&b'[');
    let parsed = if list { serde_json::from_slice(body) } else { serde_json::from_slice(body).map(|one| vec![one]) };
    let raws: Vec<Box<RawValue>> = parsed.map_err(|error| no_json(&error))?;
    let mut wrong = Wrong::default();
    if raws.is_empty() || raws.len() > MOST_EVENTS {
        wrong.note("[]", format!("must have 1 to {MOST_EVENTS} events, not {}", raws.len()));
        return Err(wrong.problem(&INVALID_FIELDS));
    }
    let mut events = Vec::with_capacity(raws.len());
    let mut seen: HashMap<String, (usize, Fingerprint)> = HashMap::new();
    for (index, raw) in raws.iter().enumerate() {
        let at = if list { format!("[{index}]") } else { String::new() };
        let Some(fields) = Fields::inside(raw.get()) else {
            if !list {
                return Err(Problem::new(&INVALID_JSON).detail("The body is neither a JSON object nor a list of them."));
            }
            wrong.note(&at, "must be an object");
            continue;
        };
        let mut reading = Reading { at: &at, tenant, routes, wrong: &mut wrong };
        let Some(event) = reading.event(raw.get(), fields) else { continue };
        let (first, fingerprint) = *seen.entry(event.id.as_str().to_owned()).or_insert((index, event.fingerprint));
        if fingerprint != event.fingerprint {
            wrong.note(&format!("{at}.eventId"), format!("is that of [{first}], which has another body"));
        }
        events.push(event);
    }
    wrong.check(&INVALID_FIELDS)?;
    Ok(Given { events, list })
}

/// The parsing of one event.
struct Reading<'a> {
    /// Its position in the body, such as `[3]`.
    at: &'a str,
    tenant: &'a str,
    routes: &'a Routes,
    wrong: &'a mut Wrong,
}

impl Reading<'_> {
    fn event(&mut self, raw: &str, mut fields: Fields) -> Option<NewEvent> {
        let rule = "must be 1 to 255 bytes without control characters";
        let id = fields.must("eventId", |raw| Key::new(&text(raw)?).map_err(|_| rule.to_owned()));
        let aggregate_type = fields.must("aggregateType", name);
        let named_aggregate = fields.has("aggregateId");
        let aggregate_id = fields.may("aggregateId", Ident::read);
        let event_type = fields.must("eventType", name);
        let payload = fields.must("payload", payload);
        let named_recipients = fields.has("recipients");
        let recipients = fields
            .may("recipients", |raw| serde_json::from_str::<Vec<Box<RawValue>>>(raw).map_err(|_| "must be a list"));
        let wrong = fields.finish_into(self.at, self.wrong);
        let recipients = recipients.map(|raws| self.recipients(&raws));

        // Reports as many mistakes as possible, but none that only follow from others.
        let kinds = self.kinds(aggregate_type.as_ref()?, event_type.as_ref()?)?;
        if (named_aggregate && aggregate_id.is_none()) || (named_recipients && !matches!(recipients, Some(Some(_)))) {
            return None;
        }
        let recipients = recipients.flatten();
        let about = About { aggregate_type: aggregate_type?, aggregate_id, payload: payload? };
        let audiences = self.audiences(&about, kinds, recipients.as_deref())?;
        let (id, event_type) = (id?, event_type?);
        if wrong {
            return None;
        }
        let messages = audiences
            .into_iter()
            .map(|audience| Some((audience.kind, self.message(&id, &event_type, &about, audience)?)));
        let messages = messages.collect::<Option<_>>()?;
        let About { aggregate_type, aggregate_id, payload } = about;
        // A body without a canonical form (with a number beyond a double, say) is compared by its bytes.
        let bytes = raw.as_bytes();
        let fingerprint = Fingerprint::of_json(bytes).unwrap_or_else(|_| Fingerprint::of_bytes(bytes));
        Some(NewEvent { id, aggregate_type, aggregate_id, event_type, payload, fingerprint, messages })
    }

    /// The kinds of recipients that get it.
    fn kinds(&mut self, aggregate_type: &str, event_type: &str) -> Option<Vec<Kind>> {
        let kinds: Vec<_> = self.routes.kinds(aggregate_type, event_type).into_iter().filter_map(Kind::parse).collect();
        if kinds.is_empty() {
            let field = if self.routes.knows(aggregate_type) { "eventType" } else { "aggregateType" };
            self.note(field, "matches no routing rule, so it has no recipients");
            return None;
        }
        Some(kinds)
    }

    fn recipients(&mut self, raws: &[Box<RawValue>]) -> Option<Vec<(Kind, Ident)>> {
        if raws.is_empty() || raws.len() > MOST_RECIPIENTS {
            let most = format!("must have 1 to {MOST_RECIPIENTS} recipients; leave it out to reach the group");
            self.note("recipients", most);
            return None;
        }
        let mut named = Vec::with_capacity(raws.len());
        for (index, raw) in raws.iter().enumerate() {
            let at = self.field(&format!("recipients[{index}]"));
            let Some(mut fields) = Fields::inside(raw.get()) else {
                self.wrong.note(&at, "must be an object");
                continue;
            };
            let kind = fields.must("kind", kind);
            let user = fields.must("userId", Ident::read);
            if !fields.finish_into(&at, self.wrong) {
                named.extend(kind.zip(user));
            }
        }
        (named.len() == raws.len()).then_some(named)
    }

    /// The audience, by kind.
    fn audiences<'r>(
        &mut self,
        about: &About,
        kinds: Vec<Kind>,
        recipients: Option<&'r [(Kind, Ident)]>,
    ) -> Option<Vec<Audience<'r>>> {
        let named = recipients.unwrap_or_default();
        if let Some(index) = named.iter().position(|(kind, _)| !kinds.contains(kind)) {
            self.note(&format!("recipients[{index}].kind"), "does not get such an event, by the routing rules");
            return None;
        }
        let mut audiences = Vec::with_capacity(kinds.len());
        for kind in kinds {
            let users: Vec<_> = named.iter().filter(|(of, _)| *of == kind).map(|(_, user)| user).collect();
            // If recipients are named, a kind without a named recipient gets nothing.
            if recipients.is_some() && users.is_empty() {
                continue;
            }
            let group =
                about.group(kind).map_err(|why| self.note(&format!("payload.{}", kind.group_field()), why)).ok()?;
            if group.is_none() && users.is_empty() && kind != Kind::Admin {
                let why =
                    format!("is missing, and so is payload.{}: one of them must name the group", kind.group_field());
                self.note("aggregateId", why);
                return None;
            }
            audiences.push(Audience { kind, group, users });
        }
        Some(audiences)
    }

    fn message(&mut self, id: &Key, event_type: &str, about: &About, audience: Audience<'_>) -> Option<Message> {
        let Audience { kind, group, users } = audience;
        let named = |user: &&Ident| Some(Named { kind: kind.name().to_owned(), user_id: user.raw()? });
        let mut body = Body {
            event_id: id.as_str().to_owned(),
            event_type: event_type.to_owned(),
            aggregate_type: about.aggregate_type.clone(),
            recipient_type: if users.is_empty() { BROADCAST } else { USER }.to_owned(),
            payload: Some(about.payload.clone()),
            recipients: if users.is_empty() { None } else { users.iter().map(named).collect() },
            ..Body::default()
        };
        *body.group_mut(kind) = group.as_ref().and_then(Ident::raw);
        let mut message =
            Message::new(self.tenant, Topic::new(&kind.queue()).ok()?, "notification", body.to_bytes().ok()?);
        let aggregate = about.aggregate_id.as_ref().or(group.as_ref());
        message.ordering_key = aggregate.map(|id| ordering_key(&about.aggregate_type, &id.text));
        message.receipt = true;
        if message.check().is_err() {
            self.note("recipients", "make the message too long, together with the payload");
            return None;
        }
        Some(message)
    }

    fn note(&mut self, field: &str, message: impl Into<String>) {
        let field = self.field(field);
        self.wrong.note(&field, message);
    }

    fn field(&self, field: &str) -> String {
        if self.at.is_empty() { field.to_owned() } else { format!("{}.{field}", self.at) }
    }
}

/// The aggregate of an event.
struct About {
    aggregate_type: String,
    aggregate_id: Option<Ident>,
    payload: Box<RawValue>,
}

/// The recipients of one kind: the named users, or all of the group.
struct Audience<'a> {
    kind: Kind,
    group: Option<Ident>,
    users: Vec<&'a Ident>,
}

impl About {
    /// The group of a kind. An aggregate is the group of its own kind, and of another kind only if the payload names
    /// none: customer 5 must not get what was meant for the customer of an order of restaurant 5. The id of another
    /// thing never selects administrators.
    fn group(&self, kind: Kind) -> Result<Option<Ident>, String> {
        let own = self.aggregate_type.eq_ignore_ascii_case(kind.name());
        if own && self.aggregate_id.is_some() {
            return Ok(self.aggregate_id.clone());
        }
        let members: BTreeMap<String, &RawValue> = serde_json::from_str(self.payload.get()).unwrap_or_default();
        match members.get(kind.group_field()).map(|raw| raw.get()).filter(|raw| *raw != "null") {
            Some(raw) => Ident::read(raw).map(Some),
            None if kind == Kind::Admin => Ok(None),
            None => Ok(self.aggregate_id.clone()),
        }
    }
}

/// Messages about the same aggregate keep their order.
fn ordering_key(aggregate_type: &str, id: &str) -> String {
    let key = format!("{aggregate_type}/{id}");
    // Too long for a key of a broker or database: use its hash.
    if key.len() > 255 { Fingerprint::of_bytes(key.as_bytes()).to_hex() } else { key }
}

fn name(raw: &str) -> Result<String, String> {
    let name = text(raw)?;
    match name.chars().count() {
        _ if is_blank(&name) => Err("must not be empty".to_owned()),
        ..=LONGEST_NAME => Ok(name),
        _ => Err(format!("must have at most {LONGEST_NAME} characters")),
    }
}

fn kind(raw: &str) -> Result<Kind, String> {
    let names = Kind::ALL.map(Kind::name).join(", ");
    text(raw).ok().and_then(|name| Kind::parse(&name)).ok_or_else(|| format!("must be one of {names}"))
}

fn payload(raw: &str) -> Result<Box<RawValue>, String> {
    match raw.len() {
        _ if !raw.starts_with('{') => Err("must be an object".to_owned()),
        // It is shown on pages and sent to endpoints as it is. A payload that some reader refuses would hide the rest
        // of its page. Of a duplicate member, one value may select other recipients than the other.
        ..=LONGEST_PAYLOAD => match flaw(raw, DEEPEST) {
            Some(flaw) => Err(format!("has {flaw}")),
            None => RawValue::from_string(raw.to_owned()).map_err(|error| error.to_string()),
        },
        _ => Err(format!("must have at most {LONGEST_PAYLOAD} bytes")),
    }
}

#[cfg(test)]
mod tests {
    use semel_http::Problem;
    use serde_json::{Value, json};

    use super::*;

    fn given(body: &Value) -> Given {
        read(body.to_string().as_bytes(), "default", &Routes::default()).ok().unwrap()
    }

    fn fields(problem: Problem) -> Vec<String> {
        let problem: Value = serde_json::from_slice(problem.into_http().body()).unwrap();
        problem["errors"].as_array().unwrap().iter().map(|error| error["field"].as_str().unwrap().to_owned()).collect()
    }

    fn wrong(body: &Value) -> Vec<String> {
        fields(read(body.to_string().as_bytes(), "default", &Routes::default()).err().unwrap())
    }

    fn event() -> Value {
        json!({ "eventId": "e", "aggregateType": "RESTAURANT", "aggregateId": 5, "eventType": "X", "payload": {} })
    }

    fn with(member: &str, value: Value) -> Value {
        let mut event = event();
        event[member] = value;
        event
    }

    #[test]
    fn the_message_has_the_fields_of_the_source_document() {
        let given = given(&event());
        let (kind, message) = &given.events[0].messages[0];
        assert_eq!((*kind, message.topic.as_str()), (Kind::Restaurant, "notification.restaurant"));
        assert_eq!(message.ordering_key.as_deref(), Some("RESTAURANT/5"));
        let text = "{\"event_id\":\"e\",\"event_type\":\"X\",\"aggregate_type\":\"RESTAURANT\",\
                    \"recipientType\":\"BROADCAST\",\"restaurant_id\":5,\"payload\":{}}";
        assert_eq!(message.body, text);
    }

    #[test]
    fn the_group_is_the_aggregate_or_named_in_the_payload() {
        let routes = Routes::of("RESTAURANT=restaurant,customer,admin; ORDER=agency").unwrap();
        let bodies = |event: Value| {
            let given = read(event.to_string().as_bytes(), "default", &routes).map_err(fields)?;
            let body = |(_, message): &(Kind, Message)| serde_json::from_slice::<Value>(&message.body).unwrap();
            Ok::<_, Vec<String>>(given.events[0].messages.iter().map(body).collect::<Vec<_>>())
        };
        let all = bodies(with("payload", json!({ "restaurant_id": 6, "customer_id": "c" }))).unwrap();
        assert_eq!((&all[0]["restaurant_id"], &all[1]["customer_id"]), (&json!(5), &json!("c")));
        assert_eq!(all[2].get("admin_id"), None, "all administrators");
        let all = bodies(event()).unwrap();
        assert_eq!(all[1]["customer_id"], 5);
        let mut order = with("aggregateType", json!("ORDER"));
        order["payload"] = json!({ "agency_id": 8 });
        assert_eq!(bodies(order.clone()).unwrap()[0]["agency_id"], 8);
        order.as_object_mut().unwrap().remove("aggregateId");
        order["payload"] = json!({ "agency_id": null });
        assert_eq!(bodies(order.clone()).unwrap_err(), ["aggregateId"]);
        order["payload"] = json!({ "agency_id": [] });
        assert_eq!(bodies(order).unwrap_err(), ["payload.agency_id"]);
    }

    #[test]
    fn every_mistake_is_reported_with_its_place() {
        assert_eq!(wrong(&json!({})), ["eventId", "aggregateType", "eventType", "payload"]);
        let named = json!([{ "kind": "boss", "userId": 1 }, { "kind": "customer" }, 7]);
        let mut second = with("recipients", named);
        second["quux"] = json!(1);
        let third = with("aggregateType", json!("QUUX"));
        let list = json!([event(), second, 5, third]);
        let expected = [
            "[1].quux",
            "[1].recipients[0].kind",
            "[1].recipients[1].userId",
            "[1].recipients[2]",
            "[2]",
            "[3].aggregateType",
        ];
        assert_eq!(wrong(&list), expected);
        assert_eq!(wrong(&with("aggregateId", json!(true))), ["aggregateId"]);
        assert_eq!(wrong(&with("recipients", json!([]))), ["recipients"]);
        assert_eq!(wrong(&with("recipients", json!([{ "kind": "admin", "userId": 1 }]))), ["recipients[0].kind"]);
        assert_eq!(wrong(&json!([])), ["[]"]);
        assert_eq!(wrong(&json!([event(), with("payload", json!({ "a": 1 }))])), ["[1].eventId"]);
        assert_eq!(wrong(&with("payload", json!({ "a": "x".repeat(LONGEST_PAYLOAD) }))), ["payload"]);
    }

    #[test]
    fn an_ambiguous_member_is_refused_by_name() {
        for (event, field, message) in [
            (r#""payload":{"restaurant_id":6,"restaurant_id":7}"#, "payload", "has restaurant_id twice"),
            (r#""payload":{"a":[{"b":1,"\u0062":1}]}"#, "payload", "has a[0].b twice"),
            (
                r#""payload":{"a":{"b":[1e999999]}}"#,
                "payload",
                "has at a.b[0] a number beyond the range of a double (about 1.8e308)",
            ),
            (r#""payload":{},"aggregateId":6"#, "aggregateId", "is given twice"),
            (r#""payload":{},"payload":{}"#, "payload", "is given twice"),
            (
                r#""payload":{},"recipients":[{"kind":"restaurant","userId":1,"userId":2}]"#,
                "recipients[0].userId",
                "is given twice",
            ),
        ] {
            let body =
                format!(r#"{{"eventId":"e","aggregateType":"RESTAURANT","aggregateId":5,"eventType":"X",{event}}}"#);
            for (body, at) in [(body.clone(), ""), (format!("[{body}]"), "[0].")] {
                let refused = read(body.as_bytes(), "default", &Routes::default()).err().unwrap();
                let told: Value = serde_json::from_slice(refused.into_http().body()).unwrap();
                let error = json!({ "field": format!("{at}{field}"), "message": message });
                assert_eq!(told["errors"], json!([error]), "{body}");
            }
        }
    }

    #[test]
    fn a_repeat_is_recognised_with_its_members_in_any_order() {
        let read =
            |text: &str| read(text.as_bytes(), "default", &Routes::default()).ok().unwrap().events[0].fingerprint;
        let one = r#"{"eventId":"e","aggregateType":"ADMIN","eventType":"X","payload":{"a":1,"b":2}}"#;
        let two = r#"{ "payload": {"b":2, "a":1}, "eventType":"X","aggregateType":"ADMIN","eventId":"e" }"#;
        let other = r#"{"eventId":"e","aggregateType":"ADMIN","eventType":"X","payload":{"a":1,"b":"2"}}"#;
        assert_eq!(read(one), read(two));
        assert_ne!(read(one), read(other));
    }
}
