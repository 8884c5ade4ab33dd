//! The fan-out: a message for one kind becomes one notification per recipient and channel.
//!
//! The listener's inbox deduplicates messages by event and kind. A large audience is processed in chunks. Each chunk is
//! one transaction, which also writes the message of the next chunk: if one is cut off, the next delivery does the
//! rest. All chunks see the directory as of the first one's start.

use std::sync::Arc;

use semel::{
    Fingerprint, Ledger, Scope, crash_point,
    messaging::{BoxFuture, Handler, InboxKey, Message, Received, Refusal, Topic, Wake},
    prelude::*,
};
use semel_store::{Database, Tx};

use super::{
    config,
    deliver::delivery,
    message::{self, Place, Told},
    model::{Channel, Kind},
    tables::{fanouts, recipients::Part},
};

/// The handler of a kind's queue.
pub struct Listener {
    pub(super) ledger: Ledger<Database>,
    pub(super) kind: Kind,
    pub(super) config: Arc<config::Notifications>,
    /// Wakes the task that assigns positions in the stream.
    pub(super) in_app: Wake,
}

impl Handler<Database> for Listener {
    fn key(&self, message: &Received) -> Result<InboxKey, Refusal> {
        let told = message::read(self.kind, &self.config.routes, &message.body)?;
        let tenant = tenant(message);
        if Scope::new(tenant, "notifications", self.kind.name()).is_err() {
            return Err(Refusal::Dead("the message is malformed: its tenant is not valid".into()));
        }
        // Its members may be ordered differently next time.
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
                    // No retry can change this.
                    return Err(Refusal::Dead(
                        "there are more recipients than the message for the next chunk can name".into(),
                    ));
                }
                crash_point!("fanout.goes_on");
                self.ledger.store().put(tx, vec![next]).await.map_err(|error| Refusal::Retry(error.to_string()))?;
            }
            crash_point!("fanout.chunk");
            Ok(())
        })
    }

    fn committed(&self, _message: &Received) {
        self.in_app.wake();
    }
}

impl Listener {
    /// Creates the notifications of the next recipients and enqueues their deliveries. Returns the message of the next
    /// chunk, if there are more.
    async fn fan_out(&self, tenant: &str, told: &Told, tx: &Tx) -> semel::Result<Result<Option<Message>, Refusal>> {
        let (kind, event_id) = (self.kind, told.body.event_id.as_str());
        let mut held = tx.connection().await?;
        let mut conn = held.get()?;
        let fanout = match &told.body.fanout {
            None => fanouts::begin(&mut conn, tenant, kind, &told.body).await?,
            Some(_) => fanouts::find(&mut conn, tenant, event_id, kind).await?,
        };
        let Some(fanout) = fanout else {
            return Ok(Err(Refusal::Dead("the message continues a fan-out that never began".into())));
        };
        // The inbox entry has expired, but the fan-out was done.
        if fanout.done_at.is_some() {
            return Ok(Ok(None));
        }
        let after = told.body.fanout.as_ref().map_or("", |place| place.cursor.as_str());
        let part = Part { tenant, kind, whom: &told.whom, revision: fanout.revision, after };
        let mut reached = part.first(&mut conn, self.config.chunk + 1).await?;
        // One more than a chunk was read: it shows whether there are more.
        let more = reached.len() > self.config.chunk;
        reached.truncate(self.config.chunk);
        let wanted = reached.iter().map(|(_, channels)| channels).sum();
        let made = match reached.last() {
            Some((last, _)) => part.notify(&mut conn, event_id, last).await?,
            None => Vec::new(),
        };
        tracing::debug!(kind = kind.name(), wanted, made = made.len(), "notifications were made");
        crash_point!("fanout.inserted");
        fanouts::advance(&mut conn, (tenant, event_id, kind), reached.len(), wanted, !more).await?;
        drop(held);
        let by_call = made.iter().filter(|(_, channel)| channel != Channel::InApp.name());
        let works = by_call.map(|(id, channel)| delivery(tenant, channel, *id)).collect::<semel::Result<_>>()?;
        self.ledger.enqueue_in(tx, works).await?;
        match reached.last() {
            Some((last, _)) if more => self.next(tenant, told, last).map(|next| Ok(Some(next))),
            _ => Ok(Ok(None)),
        }
    }

    /// The message that continues after a user.
    fn next(&self, tenant: &str, told: &Told, cursor: &str) -> semel::Result<Message> {
        let body = told.body.going_on(self.kind, Place { cursor: cursor.to_owned() });
        let bytes = body.to_bytes().map_err(|error| semel::Error::Invalid(error.to_string()))?;
        Ok(Message::new(tenant, Topic::new(&self.kind.queue())?, "notification", bytes))
    }
}

/// The tenant of a message. Messages of other programs may leave it out.
fn tenant(message: &Received) -> &str {
    message.tenant.as_deref().unwrap_or(Scope::DEFAULT_TENANT)
}
