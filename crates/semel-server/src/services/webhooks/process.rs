//! What becomes of an event: it is stored, or goes to the outbox, to a URL, or to a handler.

use std::{
    collections::BTreeMap,
    sync::{Arc, OnceLock},
    time::Duration,
};

use reqwest::header::{CONTENT_TYPE, HeaderMap, HeaderValue};
use semel::{
    Context, Failure, Lease, Ledger, Operation, Outcome, Ran, Result, Retry, Unfinished, crash_point,
    messaging::{Message, MessageStore as _, Origin, Topic},
};
use semel_http::Mode;
use semel_store::{Database, Tx};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use tokio::sync::OwnedSemaphorePermit;

use super::{
    bodies,
    event::Event,
    handler::{Run, key_of_data},
    source::{Source, Way},
};
use crate::{
    http::held::{Held, LeaseLost},
    services::call::{Called, Caller},
};

/// The step that the key of a call is derived for.
const STEP: &str = "forward";

/// How long to wait, at least, for an endpoint that is at the same event, that asked for time, or that cannot be
/// reached. Nothing was done there, so it costs no attempt: without a pause it would be called without end.
const LATER: Duration = Duration::from_secs(10);

/// How long to wait, at least, for a handler that wants to be asked later, and for our own database.
const A_MOMENT: Duration = Duration::from_secs(1);

/// The longest topic.
const LONGEST_TOPIC: usize = 200;

/// The word for an event that no rule took.
pub(crate) const STORED: &str = "stored";

/// The words for all ways in which an event may have been processed.
pub(crate) const RESULTS: [&str; 5] = [STORED, "published", "forwarded", "handled", "duplicate"];

/// How an event was processed: what is kept of it.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "result", rename_all = "snake_case")]
pub(super) enum Done {
    /// No rule takes it. It can be run again when one does.
    Stored,
    /// It went to the outbox.
    Published { topic: String, message: String },
    /// An endpoint took it.
    Forwarded { status: u16 },
    /// A handler did it.
    Handled { value: Value },
    /// The same bytes were taken in under another id before.
    Duplicate { of: String },
}

impl Done {
    fn outcome(&self) -> Result<Outcome, Unfinished> {
        serde_json::to_vec(self).map(Outcome::kept).map_err(|error| Unfinished::failed(error.to_string()))
    }

    /// How an event was processed, by its outcome.
    pub(super) fn read(outcome: &Outcome) -> Option<Self> {
        serde_json::from_slice(&outcome.body).ok()
    }

    /// The word for it.
    pub(super) const fn word(&self) -> &'static str {
        match self {
            Self::Stored => STORED,
            Self::Published { .. } => "published",
            Self::Forwarded { .. } => "forwarded",
            Self::Handled { .. } => "handled",
            Self::Duplicate { .. } => "duplicate",
        }
    }

    /// Whether an outcome says that nothing was done.
    pub(super) fn is_duplicate(outcome: &Outcome) -> bool {
        matches!(Self::read(outcome), Some(Self::Duplicate { .. }))
    }
}

/// Runs an event under its lease, and newer data that comes meanwhile. The seat is free again after the last of it. An
/// event that was put back because the store is away is an error: it is tried again, but nobody else is to blame.
pub(super) async fn run(
    ledger: Ledger<Database>,
    lease: Lease<Database>,
    source: Arc<Source>,
    event: Event,
    seat: OwnedSemaphorePermit,
) -> Result<Ran> {
    let Some(mode) = source.way(&event).map(|way| way.mode()) else {
        return Err(semel::Error::Invalid("an event that no rule knows what to do with".into()));
    };
    let trouble = Arc::default();
    let job = Arc::new(Job { ledger, source, event, mode, trouble: Arc::clone(&trouble), _seat: seat });
    let ran = match mode {
        Mode::Atomic => lease.run_atomic(move |context, tx| job.clone().run(context, Some(tx))).await,
        Mode::Leased => lease.run(move |context| job.clone().run(context, None)).await,
    };
    match (ran, trouble.get()) {
        (Ok(Ran::Released), Some(error)) => Err(error.clone()),
        (ran, _) => ran,
    }
}

/// An event to be run, and all that its run needs.
struct Job {
    ledger: Ledger<Database>,
    source: Arc<Source>,
    event: Event,
    mode: Mode,
    /// What was wrong with the store, if that is why it was put back.
    trouble: Arc<OnceLock<semel::Error>>,
    /// Held by the job, because that outlives the answer to whoever began it: newer data runs after it.
    _seat: OwnedSemaphorePermit,
}

impl Job {
    async fn run(self: Arc<Self>, context: Context<Database>, tx: Option<Tx>) -> Result<Outcome, Unfinished> {
        // After the first run, the same job is given newer data that waited for it.
        let newer;
        let event = if context.operation().fingerprint == self.event.fingerprint {
            &self.event
        } else {
            newer = Event::of(context.operation(), &self.source);
            newer.as_ref().ok_or_else(|| Unfinished::failed_for_good("the event's data is not there any more"))?
        };
        let way = self.source.way(event).filter(|way| way.mode() == self.mode);
        // Newer data may be of a type with another rule: the runner takes it up.
        let Some(way) = way else { return Err(Unfinished::NotYet(Duration::ZERO)) };
        let whose = bodies::claim_in_run(&self.ledger, &self.source, event, tx.as_ref()).await;
        if let Some(of) = whose.map_err(|error| self.broken(error, context.operation()))?? {
            return Done::Duplicate { of }.outcome();
        }
        let done = match way {
            Way::Store => Ok(Done::Stored),
            Way::Outbox(topic) => self.publish(event, &context, tx.as_ref(), topic).await,
            Way::Forward(caller) => {
                let later = later(context.operation(), LATER, self.source.config.backoff.cap);
                forward(event, &context, caller, later).await
            }
            Way::Handler(handler) => {
                let run = Run { context, tx };
                let value = handler.handle(event, &run).await.map_err(unhurried)?;
                Ok(Done::Handled { value })
            }
        }?;
        crash_point!("webhooks.after_effect");
        if self.mode == Mode::Atomic {
            // Heard of only if the run is put back all the same, and then this is why.
            let _ = self.trouble.set(semel::Error::Unavailable("the event could not be committed".into()));
        }
        done.outcome()
    }

    /// A store that is away is no failure of the event: it waits for a while, and whoever waits for it is told.
    fn broken(&self, error: semel::Error, operation: &Operation) -> Unfinished {
        if !error.is_transient() {
            return Unfinished::failed(error.to_string());
        }
        let wait = later(operation, A_MOMENT, self.source.config.backoff.cap);
        let _ = self.trouble.set(error);
        Unfinished::NotYet(wait)
    }

    async fn publish(
        &self,
        event: &Event,
        context: &Context<Database>,
        tx: Option<&Tx>,
        topic: Option<&Topic>,
    ) -> Result<Done, Unfinished> {
        let broken = |error: semel::Error| self.broken(error, context.operation());
        let Some(tx) = tx else { return Err(Unfinished::failed("there is no transaction to publish in")) };
        let topic = match topic {
            Some(topic) => topic.clone(),
            None => Topic::new(&topic_of(event)).map_err(broken)?,
        };
        let mut message = Message::new(&*event.tenant, topic, &*event.kind, event.body.clone());
        message.headers = headers_of(event);
        message.origin = Some(Origin { operation: context.operation().id, fence: context.fence() });
        let done = Done::Published { topic: message.topic.to_string(), message: message.id.to_string() };
        self.ledger.store().put(tx, vec![message]).await.map_err(broken)?;
        Ok(done)
    }
}

/// How long to wait for what did nothing: half the event's age, up to the longest backoff. An endpoint that is away for
/// days would else fill the event's journal.
fn later(operation: &Operation, least: Duration, most: Duration) -> Duration {
    (operation.claimed_at.since(operation.created_at) / 2).clamp(least, most.max(least))
}

/// What a handler may say: there is no doubt about what can simply be run again, and no asking again without a pause.
fn unhurried(unfinished: Unfinished) -> Unfinished {
    match unfinished {
        Unfinished::Unknown(reason) => Unfinished::failed(reason),
        Unfinished::NotYet(wait) => Unfinished::NotYet(wait.max(A_MOMENT)),
        Unfinished::NotNow { after, why } => Unfinished::NotNow { after: after.max(A_MOMENT), why },
        other => other,
    }
}

/// Where an event goes unless its rule says otherwise. What a topic cannot hold is an underscore there; the message has
/// the type as it was written.
fn topic_of(event: &Event) -> String {
    let fits = |c: char| c.is_ascii_alphanumeric() || ".-_:/".contains(c);
    let kind = event.kind.chars().map(|c| if fits(c) { c } else { '_' });
    format!("webhook.{}.", event.source).chars().chain(kind).take(LONGEST_TOPIC).collect()
}

fn headers_of(event: &Event) -> BTreeMap<String, String> {
    let created = event.created.map(|created| ("event-created", created.to_string()));
    let named = [
        ("event-id", event.id.clone()),
        ("event-type", event.kind.clone()),
        ("event-source", event.source.clone()),
        ("webhook-function", event.function.clone()),
        ("content-type", "application/json".to_owned()),
    ];
    named.into_iter().chain(created).map(|(name, value)| (name.to_owned(), value)).collect()
}

/// Posts an event, under a key that is the same on every attempt at this data. `later` is how long to wait, at least, if
/// nothing was done.
async fn forward(
    event: &Event,
    context: &Context<Database>,
    caller: &Caller,
    later: Duration,
) -> Result<Done, Unfinished> {
    let mut headers = HeaderMap::new();
    headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
    headers.insert("semel-fence", context.fence().0.into());
    for (name, value) in [
        ("idempotency-key", key_of_data(context, STEP).as_str()),
        ("semel-webhook-source", &event.source),
        ("semel-webhook-function", &event.function),
        ("semel-webhook-id", &event.id),
        ("semel-webhook-type", &event.kind),
    ] {
        // None of these has a control character in it, so each can be a header.
        let value = HeaderValue::from_bytes(value.as_bytes()).map_err(|error| Unfinished::failed(error.to_string()))?;
        headers.insert(name, value);
    }
    let answered = |status| format!("the endpoint answered {status}");
    let not_now = |wait: Option<Duration>, why: String| Unfinished::NotNow {
        after: wait.map_or(later, |wait| wait.max(later)),
        why,
    };
    match caller.post(headers, event.body.clone(), &Held::of(context)).await {
        Called::Taken(status) => Ok(Done::Forwarded { status: status.as_u16() }),
        Called::InFlight(wait) => Err(not_now(wait, "the endpoint answered 409: it is at the same event".to_owned())),
        Called::NotNow(status, wait) if matches!(status.as_u16(), 425 | 429) => Err(not_now(wait, answered(status))),
        Called::NotNow(status, Some(wait)) => {
            Err(Unfinished::Failed(Failure { error: answered(status), retry: Retry::After(wait) }))
        }
        Called::NotNow(status, None) | Called::Refused(status) => Err(Unfinished::failed(answered(status))),
        Called::NotSent(why) => Err(not_now(None, format!("the endpoint cannot be reached: {why}"))),
        Called::LeaseLost => Err(not_now(None, LeaseLost.to_string())),
        // Called again under the same key: an endpoint that honours it knows.
        Called::Unknown(why) => Err(Unfinished::failed(why)),
    }
}
