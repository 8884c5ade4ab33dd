//! Converts messages to and from AMQP.

use std::collections::BTreeMap;

use bytes::Bytes;
use lapin::{
    BasicProperties,
    message::Delivery,
    types::{AMQPValue, FieldTable, ShortString},
};
use semel::{
    Fence, Timestamp,
    messaging::{Envelope, Origin, Received},
};

use crate::topology::DEAD;

const TENANT: &str = "semel-tenant";
const OPERATION: &str = "semel-operation";
const FENCE: &str = "semel-fence";
const NUMBER: &str = "semel-number";
/// The timestamp in microseconds; AMQP's own has whole seconds.
const PUT_AT: &str = "semel-put-at";

/// The properties of a message.
///
/// # Errors
/// The reason why no server would accept it.
pub(crate) fn properties(envelope: &Envelope) -> Result<BasicProperties, String> {
    let message = &envelope.message;
    let short =
        |what: &str, text: &str| ShortString::try_new(text).map_err(|_| format!("{what}: must have at most 255 bytes"));
    let mut headers = BTreeMap::new();
    for (name, value) in &message.headers {
        headers.insert(short("a header's name", name)?, AMQPValue::LongString(value.as_str().into()));
    }
    headers.insert(TENANT.into(), AMQPValue::LongString(message.tenant.as_str().into()));
    headers.insert(PUT_AT.into(), AMQPValue::LongLongInt(envelope.put_at.as_micros()));
    if let Some(number) = envelope.number {
        headers.insert(NUMBER.into(), AMQPValue::LongLongInt(number));
    }
    if let Some(origin) = message.origin {
        headers.insert(OPERATION.into(), AMQPValue::LongLongInt(origin.operation));
        headers.insert(FENCE.into(), AMQPValue::LongLongInt(origin.fence.0));
    }
    let seconds = u64::try_from(envelope.put_at.as_micros() / 1_000_000).unwrap_or(0);
    Ok(BasicProperties::default()
        .with_message_id(message.id.to_string().into())
        .with_timestamp(seconds)
        .with_type(short("kind", &message.kind)?)
        // Persistent.
        .with_delivery_mode(2)
        .with_app_id("semel".into())
        .with_headers(FieldTable::from(headers)))
}

/// A delivery as a Semel message, and whether it may have been delivered before. Its sender may be any program.
pub(crate) fn received(queue: &str, delivery: &mut Delivery) -> (Received, bool) {
    let properties = &delivery.properties;
    let empty = FieldTable::default();
    let table = properties.headers().as_ref().unwrap_or(&empty).inner();
    let number = |name: &str| table.get(name).and_then(integer);
    let seconds = properties.timestamp().and_then(|seconds| i64::try_from(seconds).ok()?.checked_mul(1_000_000));
    let mut headers = BTreeMap::new();
    for (name, value) in table {
        let name = name.as_str();
        if !name.starts_with("semel-") && !name.starts_with("x-") {
            headers.extend(text(value).map(|value| (name.to_owned(), value)));
        }
    }
    let death = (queue == DEAD).then(|| last_death(table.get("x-death"))).flatten();
    if let Some(death) = &death {
        headers.insert("x-death-reason".into(), death.reason.clone());
        headers.insert("x-death-count".into(), death.count.to_string());
    }
    let received = Received {
        id: properties.message_id().as_ref().map(|id| id.as_str().to_owned()),
        tenant: table.get(TENANT).and_then(text),
        queue: death.map_or_else(|| queue.to_owned(), |death| death.queue),
        kind: properties.kind().as_ref().map(|kind| kind.as_str().to_owned()).unwrap_or_default(),
        body: Bytes::from(std::mem::take(&mut delivery.data)),
        headers,
        number: number(NUMBER),
        put_at: number(PUT_AT).or(seconds).map(Timestamp::from_micros),
        origin: number(OPERATION)
            .zip(number(FENCE))
            .map(|(operation, fence)| Origin { operation, fence: Fence(fence) }),
    };
    // Quorum queues count deliveries, even if the flag was lost.
    let again = delivery.redelivered || number("x-delivery-count").is_some_and(|count| count > 0);
    (received, again)
}

/// Why, where and how often RabbitMQ gave up on a message.
struct Death {
    queue: String,
    reason: String,
    count: i64,
}

/// The newest entry of RabbitMQ's list, which is the first.
fn last_death(list: Option<&AMQPValue>) -> Option<Death> {
    let Some(AMQPValue::FieldArray(list)) = list else { return None };
    let Some(AMQPValue::FieldTable(death)) = list.as_slice().first() else { return None };
    let death = death.inner();
    Some(Death {
        queue: text(death.get("queue")?)?,
        reason: text(death.get("reason")?)?,
        count: death.get("count").and_then(integer).unwrap_or(1),
    })
}

fn integer(value: &AMQPValue) -> Option<i64> {
    match *value {
        AMQPValue::ShortShortInt(n) => Some(n.into()),
        AMQPValue::ShortShortUInt(n) => Some(n.into()),
        AMQPValue::ShortInt(n) => Some(n.into()),
        AMQPValue::ShortUInt(n) => Some(n.into()),
        AMQPValue::LongInt(n) => Some(n.into()),
        AMQPValue::LongUInt(n) => Some(n.into()),
        AMQPValue::LongLongInt(n) => Some(n),
        _ => None,
    }
}

/// A header's value as text, if it has one.
fn text(value: &AMQPValue) -> Option<String> {
    match value {
        AMQPValue::LongString(text) => String::from_utf8(text.as_bytes().to_vec()).ok(),
        AMQPValue::ShortString(text) => Some(text.as_str().to_owned()),
        AMQPValue::Boolean(yes) => Some(yes.to_string()),
        AMQPValue::Float(n) => Some(n.to_string()),
        AMQPValue::Double(n) => Some(n.to_string()),
        AMQPValue::Timestamp(n) => Some(n.to_string()),
        other => integer(other).map(|n| n.to_string()),
    }
}
