//! The fan-out: one message of a kind becomes one notification per recipient and channel.
//!
//! The listener's inbox lets each message through once, by the event and its kind. A large audience goes in chunks.
//! Each is a transaction of its own, which also puts the message that goes on after it: whichever of them is cut off,
//! the next delivery does the rest. All chunks see the directory as it was when the first began.

use std::sync::Arc;

use semel::{
    Fingerprint, Scope, crash_point,
    messaging::{BoxFuture, Handler, InboxKey, Message, MessageStore as _, Received, Refusal, Topic, Wake},
};
use semel_store::{Database, Tx};

use super::{
    Deliverer,
    message::{self, Place, Told},
    model::Kind,
    tables::{fanouts, recipients::Part},
};
use crate::config;

/// The handler of a kind's queue.
pub struct Listener {
    pub(super) database: Database,
    pub(super) kind: Kind,
    pub(super) config: Arc<config::Notifications>,
    /// Wakes who gives notifications their place in the stream.
    pub(super) in_app: Wake,
    /// Wakes who brings them to endpoints.
    pub(super) deliverer: Deliverer,
}

impl Handler<Database> for Listener {
    fn key(&self, message: &Received) -> Result<InboxKey, Refusal> {
        let told = message::read(self.kind, &self.config.routes, &message.body)?;
        let tenant = tenant(message);
        if Scope::new(tenant, "notifications", self.kind.name()).is_err() {
            return Err(Refusal::Dead("the message is malformed: it names a tenant that cannot be one".into()));
        }
        // Its members may come in another order the next time.
        let bytes = &message.body[..];
        let fingerprint = Fingerprint::of_json(bytes).unwrap_or_else(|_| Fingerprint::of_bytes(bytes));
        Ok(InboxKey { tenant: tenant.to_owned(), key: message::inbox_key(&told.body), fingerprint })
    }

    fn handle<'a>(&'a self, message: &'a Received, tx: &'a Tx) -> BoxFuture<'a, Result<(), Refusal>> {
        Box::pin(async move {
            let told = message::read(self.kind, &self.config.routes, &message.body)?;
            let next = self.fan_out(tenant(message), &told, tx).await;
            let next = next.map_err(|error| Refusal::Retry(error.to_string()))??;
            if let Some(next) = next {
                if next.check().is_err() {
                    // It would be so however often it is tried.
                    return Err(Refusal::Dead("recipients are more than the message that goes on can name".into()));
                }
                crash_point!("fanout.goes_on");
                self.database.put(tx, vec![next]).await.map_err(|error| Refusal::Retry(error.to_string()))?;
            }
            crash_point!("fanout.chunk");
            Ok(())
        })
    }

    fn committed(&self, _message: &Received) {
        self.in_app.wake();
        self.deliverer.wake();
    }
}

impl Listener {
    /// Brings an event to the next of its recipients; the message that goes on, if there are more.
    async fn fan_out(&self, tenant: &str, told: &Told, tx: &Tx) -> semel::Result<Result<Option<Message>, Refusal>> {
        let (kind, event_id) = (self.kind, told.body.event_id.as_str());
        let mut held = tx.connection().await?;
        let mut conn = held.get()?;
        let fanout = match &told.body.fanout {
            None => fanouts::begin(&mut conn, tenant, kind, &told.body).await?,
            Some(_) => fanouts::find(&mut conn, tenant, event_id, kind).await?,
        };
        let Some(fanout) = fanout else {
            return Ok(Err(Refusal::Dead("the message goes on with a fan-out that never began".into())));
        };
        // The inbox has forgotten it, and it was done all the same.
        if fanout.done_at.is_some() {
            return Ok(Ok(None));
        }
        let after = told.body.fanout.as_ref().map_or("", |place| place.cursor.as_str());
        let part = Part { tenant, kind, whom: &told.whom, revision: fanout.revision, after };
        let mut reached = part.first(&mut conn, self.config.chunk + 1).await?;
        // One more than a chunk was looked for: it tells whether there are more.
        let more = reached.len() > self.config.chunk;
        reached.truncate(self.config.chunk);
        let wanted = reached.iter().map(|(_, channels)| channels).sum();
        if let Some((last, _)) = reached.last() {
            let made = part.notify(&mut conn, event_id, last).await?;
            tracing::debug!(kind = kind.name(), wanted, made, "notifications were made");
        }
        crash_point!("fanout.inserted");
        fanouts::advance(&mut conn, (tenant, event_id, kind), reached.len(), wanted, !more).await?;
        match reached.last() {
            Some((last, _)) if more => self.next(tenant, told, last).map(|next| Ok(Some(next))),
            _ => Ok(Ok(None)),
        }
    }

    /// The message that goes on after a user.
    fn next(&self, tenant: &str, told: &Told, cursor: &str) -> semel::Result<Message> {
        let body = told.body.going_on(self.kind, Place { cursor: cursor.to_owned() });
        let bytes = body.to_bytes().map_err(|error| semel::Error::Invalid(error.to_string()))?;
        Ok(Message::new(tenant, Topic::new(&self.kind.queue())?, "notification", bytes))
    }
}

/// Whose message it is. One from another program need not say so.
fn tenant(message: &Received) -> &str {
    message.tenant.as_deref().unwrap_or(Scope::DEFAULT_TENANT)
}
