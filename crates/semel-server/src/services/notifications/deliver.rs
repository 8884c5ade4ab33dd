//! Deliveries: the notifications of channels with an endpoint, each delivered once by a call.
//!
//! A delivery is an operation in leased mode, enqueued in the commit that creates the notification and run by the
//! worker. The call carries a key derived from the operation, the same on every attempt. The status of the notification
//! follows the operation (`deliver_tables::STATUS`) in the same commit.

use std::{sync::Arc, time::Duration};

use semel::{
    Backoff, Context, Failure, Fingerprint, Key, Kind, Labels, Operation, Outcome, Policy, Result, Retry, Scope,
    Unfinished, Work, crash_point,
};
use semel_store::Database;
use serde_json::{json, value::RawValue};
use tracing::Span;

use super::{
    channels::{Channel, Channels, LONGEST_BACKOFF},
    deliver_call::{Caller, Told},
    deliver_tables::{self as tables, Due},
    tables::recipients::address,
};
use crate::services::call::Called;

/// The service of the ledger's scope.
pub(super) const SERVICE: &str = "notifications";

/// The prefix of the kinds of deliveries; the channel follows.
pub(super) const KINDS: &str = "deliver.";

/// The shortest and the longest lease of a call. It is renewed while the call lasts, so it can be shorter: the
/// deliveries of a killed node continue when it expires.
const LEASES: (Duration, Duration) = (Duration::from_secs(5), Duration::from_secs(10));

/// The retention of a delivery.
pub(super) const RETENTION: Duration = Duration::from_secs(90 * 24 * 3600);

/// How long to wait for an endpoint that is processing the same key.
const IN_FLIGHT: Duration = Duration::from_secs(5);

/// The shortest wait before a retry.
const SOON: Duration = Duration::from_secs(1);

/// How long to wait for an unreadable notification.
const UNREADABLE: Duration = Duration::from_secs(60);

/// The operation of a delivery. The worker's policy applies.
pub(super) fn delivery(tenant: &str, channel: &str, id: i64) -> Result<Work> {
    let fingerprint = Fingerprint::of_bytes(id.to_string().as_bytes());
    let policy = Policy { retention: Some(RETENTION), ..Policy::default() };
    let work = Work::new(scope(tenant, channel)?, key(id)?, fingerprint).policy_of_worker(policy);
    Ok(work.labels(Labels::default().with(1, channel)?))
}

/// The scope of a channel's deliveries.
pub(super) fn scope(tenant: &str, channel: &str) -> Result<Scope> {
    Scope::new(tenant, SERVICE, &format!("{KINDS}{channel}"))
}

/// The key of a notification's delivery.
pub(super) fn key(id: i64) -> Result<Key> {
    Key::new(&id.to_string())
}

fn notification(operation: &Operation) -> Option<i64> {
    operation.key.as_str().parse().ok()
}

/// The kinds of work: one per channel with an endpoint. The operations of other channels wait for one: that is no
/// mistake, and not logged.
///
/// # Errors
/// When an endpoint cannot be called from here.
pub(super) fn kinds(database: &Database, channels: &Channels) -> Result<Vec<Kind<Database>>> {
    let kind = |(channel, config): (&&str, &Channel)| {
        let line = Arc::new(Line {
            database: database.clone(),
            caller: Caller::new(config.clone())?,
            target: format!("{channel} at {}", config.url),
        });
        let target = line.target.clone();
        let handler = move |context: Context<Database>| {
            let line = line.clone();
            async move { line.deliver(&context).await }
        };
        let kind = Kind::leased(SERVICE, &format!("{KINDS}{channel}"), handler);
        let kind = kind.policy(policy(config)).at_once(config.concurrency);
        Ok(kind.target(move |_| Some(target.clone())).span(span))
    };
    let without = Kind::no_work(SERVICE, |kind, _| kind.starts_with(KINDS));
    channels.0.iter().map(kind).chain([Ok(without)]).collect()
}

fn policy(config: &Channel) -> Policy {
    Policy {
        lease: config.timeout.clamp(LEASES.0, LEASES.1),
        retention: Some(RETENTION),
        max_attempts: u32::try_from(config.max_attempts).ok(),
        backoff: Backoff { first: config.backoff, cap: LONGEST_BACKOFF },
        on_lost: config.on_lost,
        ..Policy::default()
    }
}

/// The span of a run: its log lines name the notification, under any log filter. The event is added once the
/// notification was read.
fn span(operation: &Operation) -> Span {
    tracing::error_span!("delivery", notification = notification(operation), event = tracing::field::Empty)
}

/// The deliveries of one channel.
struct Line {
    database: Database,
    caller: Caller,
    /// The endpoint's name in the log.
    target: String,
}

impl Line {
    /// Delivers one notification, under its lease.
    async fn deliver(&self, context: &Context<Database>) -> Result<Outcome, Unfinished> {
        let (due, address) = match self.read(context.operation()).await {
            Ok(Some(read)) => read,
            Ok(None) => return Err(Unfinished::failed_for_good("the event is not there any more")),
            Err(error) if error.is_transient() => return Err(Unfinished::released(SOON)),
            Err(error) => return Err(Unfinished::released_because(UNREADABLE, error.to_string())),
        };
        Span::current().record("event", &due.event_id);
        let payload = std::str::from_utf8(&due.payload).ok().and_then(|text| RawValue::from_string(text.into()).ok());
        let Some(payload) = payload else {
            return Err(Unfinished::failed_for_good("the event's payload is no JSON"));
        };
        let told = Told {
            notification_id: due.id,
            event_id: &due.event_id,
            aggregate_type: &due.aggregate_type,
            event_type: &due.event_type,
            kind: &due.kind,
            user_id: &due.user_id,
            notification_type: &due.notification_type,
            address,
            payload: &payload,
        };
        let called = self.caller.call(context, &told).await;
        if !matches!(called, Called::NotSent(_) | Called::LeaseLost) {
            crash_point!("deliver.sent");
        }
        let fail = |error: String, wait: Option<Duration>| {
            Err(Unfinished::Failed(Failure { error, retry: wait.map_or(Retry::Backoff, Retry::After) }))
        };
        match called {
            Called::Taken(status) => Ok(Outcome::kept(json!({ "status": status.as_u16() }).to_string())),
            Called::Refused(status) => Err(Unfinished::failed_for_good(format!("the endpoint answered {status}"))),
            Called::NotNow(status, wait) => fail(format!("the endpoint answered {status}"), wait),
            Called::InFlight(wait) => {
                let longer = (context.operation().tried_for() / 2).clamp(IN_FLIGHT, LONGEST_BACKOFF);
                let after = wait.unwrap_or(longer).max(SOON);
                Err(Unfinished::released_because(after, "the endpoint answered 409 Conflict"))
            }
            // Nothing was sent, so an unreachable endpoint counts no attempts, however long.
            Called::NotSent(why) => {
                let why = format!("the endpoint could not be reached: {why}");
                Err(Unfinished::Away { target: self.target.clone(), after: Duration::ZERO, why })
            }
            Called::LeaseLost => Err(Unfinished::released(SOON)),
            // It is unknown whether it arrived: only an endpoint that honours keys may be called again.
            Called::Unknown(why) if self.caller.config().on_lost.doubts() => Err(Unfinished::Doubted(why)),
            Called::Unknown(why) => fail(why, None),
        }
    }

    /// The notification and its present address.
    async fn read(&self, operation: &Operation) -> Result<Option<(Due, Option<String>)>> {
        let (Some(id), tenant) = (notification(operation), operation.scope.tenant()) else { return Ok(None) };
        let read = self.database.read(async |conn| {
            let Some(due) = tables::due(conn, tenant, id).await? else { return Ok(None) };
            let address = address(conn, tenant, &due.kind, &due.user_id, &due.notification_type).await?;
            Ok(Some((due, address)))
        });
        read.await
    }
}
