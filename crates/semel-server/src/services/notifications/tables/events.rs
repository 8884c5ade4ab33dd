//! Accepted events.

use bytes::Bytes;
use semel::{Result, messaging::MessageId};
use semel_store::{Conn, broken, codec, on};
use serde::{Deserialize, Serialize};
use serde_json::json;

use super::super::reading::NewEvent;
use crate::sql::statements;

/// A kind of recipient and its message about an event.
#[derive(Serialize, Deserialize)]
pub(in super::super) struct Sent {
    pub(in super::super) kind: String,
    pub(in super::super) message: String,
}

impl Sent {
    pub(in super::super) fn id(&self) -> Option<MessageId> {
        self.message.parse().ok()
    }
}

/// An event, as it is stored.
pub(in super::super) struct StoredEvent {
    pub(in super::super) aggregate_type: String,
    /// As JSON.
    pub(in super::super) aggregate_id: Option<String>,
    pub(in super::super) event_type: String,
    pub(in super::super) payload: Bytes,
    pub(in super::super) messages: Vec<Sent>,
    pub(in super::super) created_at: i64,
}

/// Differs in how a JSON text becomes rows, and hex becomes bytes.
const INSERT_POSTGRES: &str = "
    INSERT INTO notification_events (tenant, event_id, aggregate_type, aggregate_id, event_type, payload, messages)
    SELECT r.tenant, r.event_id, r.aggregate_type, r.aggregate_id, r.event_type, decode(r.payload, 'hex'), r.messages
    FROM json_to_recordset($1::json) AS r(tenant text, event_id text, aggregate_type text, aggregate_id text,
        event_type text, payload text, messages text)";
const INSERT_SQLITE: &str = "
    INSERT INTO notification_events (tenant, event_id, aggregate_type, aggregate_id, event_type, payload, messages)
    SELECT value ->> 'tenant', value ->> 'event_id', value ->> 'aggregate_type', value ->> 'aggregate_id',
        value ->> 'event_type', unhex(value ->> 'payload'), value ->> 'messages'
    FROM json_each($1)";

/// Inserts new events, each with its tenant.
pub(in super::super) async fn insert(conn: &mut Conn<'_>, events: &[(&str, &NewEvent)]) -> Result<()> {
    let row = |(tenant, event): &(&str, &NewEvent)| {
        let sent = event
            .messages
            .iter()
            .map(|(kind, message)| Sent { kind: kind.name().to_owned(), message: message.id.to_string() });
        json!({
            "tenant": tenant,
            "event_id": event.id.as_str(),
            "aggregate_type": event.aggregate_type,
            "aggregate_id": event.aggregate_id.as_ref().map(|id| &id.json),
            "event_type": event.event_type,
            "payload": hex::encode(codec::encode(event.payload.get().as_bytes())),
            "messages": json!(sent.collect::<Vec<_>>()).to_string(),
        })
    };
    let rows = serde_json::Value::from_iter(events.iter().map(row)).to_string();
    let sql = match conn {
        Conn::Postgres(_) => INSERT_POSTGRES,
        Conn::Sqlite(_) => INSERT_SQLITE,
    };
    on!(conn, c => sqlx::query(sql).bind(rows).execute(&mut **c).await.map(drop).map_err(broken))
}

/// Differs because only PostgreSQL waits for rows; on SQLite the transaction has waited for the writer before.
const SHORT_WAIT: &str = "SET LOCAL lock_timeout = '100ms'";

/// Sets a short lock timeout for this transaction.
pub(in super::super) async fn wait_briefly(conn: &mut Conn<'_>) -> Result<()> {
    match conn {
        Conn::Postgres(conn) => sqlx::raw_sql(SHORT_WAIT).execute(&mut **conn).await.map(drop).map_err(broken),
        Conn::Sqlite(_) => Ok(()),
    }
}

const FIND: &str = "
    SELECT aggregate_type, aggregate_id, event_type, payload, messages, created_at FROM notification_events
    WHERE tenant = $1 AND event_id = $2";

type Row = (String, Option<String>, String, Vec<u8>, String, i64);

pub(in super::super) async fn find(conn: &mut Conn<'_>, tenant: &str, event_id: &str) -> Result<Option<StoredEvent>> {
    let row: Option<Row> = on!(conn, c => sqlx::query_as(FIND).bind(tenant).bind(event_id).fetch_optional(&mut **c).await.map_err(broken)?);
    let Some((aggregate_type, aggregate_id, event_type, payload, messages, created_at)) = row else { return Ok(None) };
    let payload = codec::decode(payload)?;
    let messages = serde_json::from_str(&messages).map_err(|_| semel::Error::Corrupt("the messages of an event"))?;
    Ok(Some(StoredEvent { aggregate_type, aggregate_id, event_type, payload, messages, created_at }))
}

statements!(INSERT_POSTGRES, INSERT_SQLITE, FIND);
