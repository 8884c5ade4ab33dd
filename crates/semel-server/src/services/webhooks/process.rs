//! Runs an event: it is stored, or goes to the outbox, to a URL, or to a handler.

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use reqwest::header::{CONTENT_TYPE, HeaderMap, HeaderValue};
use semel::{
    Context, Failure, Handed, Lease, Ledger, Operation, Outcome, Ran, Result, Retry, Settled, Unfinished, crash_point,
    messaging::{Message, Origin, Topic},
    prelude::*,
};
use semel_http::Mode;
use semel_store::{Database, Tx};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use tokio::sync::OwnedSemaphorePermit;
use tracing::Span;

use super::{
    Receiver, bodies,
    event::Event,
    handler::{Run, key_of_data},
    source::{Source, Way},
};
use crate::{
    http::held::{Held, LeaseLost},
    services::call::{Called, Caller},
};

/// The step name for the derived key of a call.
const STEP: &str = "forward";

/// The shortest wait for an endpoint that is processing the same event, or that asked for time. It did nothing, so no
/// attempt is counted: without a pause it would be called endlessly.
const LATER: Duration = Duration::from_secs(10);

/// The shortest wait after a handler's `NotYet`, and for our own database.
const A_MOMENT: Duration = Duration::from_secs(1);

/// The final error of an event without data.
pub(super) const NO_DATA: &str = "the event's data is not there any more";

/// The longest topic.
const LONGEST_TOPIC: usize = 200;

/// The result of an event without a matching rule.
pub(crate) const STORED: &str = "stored";

/// The results of processed events.
pub(crate) const RESULTS: [&str; 6] = [STORED, "published", "forwarded", "handled", "pulled", "duplicate"];

/// The result of a processed event, as it is stored.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "result", rename_all = "snake_case")]
pub(super) enum Done {
    /// No rule matches. It can run again when one does.
    Stored,
    /// It went to the outbox.
    Published { topic: String, message: String },
    /// An endpoint accepted it.
    Forwarded { status: u16 },
    /// A handler processed it.
    Handled { value: Value },
    /// A program asked for it, and completed it.
    Pulled { value: Value },
    /// The same body was stored under another id before.
    Duplicate { of: String },
}

impl Done {
    fn outcome(&self) -> Result<Outcome, Unfinished> {
        serde_json::to_vec(self).map(Outcome::kept).map_err(|error| Unfinished::failed(error.to_string()))
    }

    /// The result in an outcome.
    pub(super) fn read(outcome: &Outcome) -> Option<Self> {
        serde_json::from_slice(&outcome.body).ok()
    }

    /// Its name.
    pub(super) const fn word(&self) -> &'static str {
        match self {
            Self::Stored => STORED,
            Self::Published { .. } => "published",
            Self::Forwarded { .. } => "forwarded",
            Self::Handled { .. } => "handled",
            Self::Pulled { .. } => "pulled",
            Self::Duplicate { .. } => "duplicate",
        }
    }

    /// Whether an outcome is a duplicate, without an effect.
    pub(super) fn is_duplicate(outcome: &Outcome) -> bool {
        matches!(Self::read(outcome), Some(Self::Duplicate { .. }))
    }
}

impl Receiver {
    /// Processes an event under its lease, and newer data that arrives meanwhile. The seat is held until the last of
    /// it; under a worker, the worker holds the seat and runs the newer data. An event that was released because the
    /// store is unreachable is an error: it runs again, but its rule gave no answer.
    pub(super) async fn process(
        self,
        lease: Lease<Database>,
        source: Arc<Source>,
        event: Event,
        seat: Option<OwnedSemaphorePermit>,
    ) -> Result<Ran> {
        let Some(mode) = source.way(&event).map(|way| way.mode()) else {
            return Err(semel::Error::Invalid("an event without a rule".into()));
        };
        if source.pulls(&event.kind) {
            // It was stored under another rule.
            let policy = source.policy_of(&event.kind, (self.0.clock)());
            return Ok(match lease.hand_over(policy).await? {
                Settled::Yes { .. } => Ran::Released,
                Settled::LeaseLost => Ran::LeaseLost,
            });
        }
        let job = Arc::new(Job { ledger: self.0.ledger.clone(), source, event, mode, _seat: seat });
        let run = job.clone();
        let ran = match mode {
            Mode::Atomic => lease.run_atomic_handing(move |context, tx| run.clone().run(context, Some(tx))).await?,
            Mode::Leased => lease.run_handing(move |context| run.clone().run(context, None)).await?,
        };
        match ran {
            (Ran::Completed(outcome), _) => {
                if Done::read(&outcome) == Some(Done::Stored) {
                    self.0.refusals.count_stored(&job.source, &job.event);
                }
                Ok(Ran::Completed(outcome))
            }
            (Ran::Released, Handed::Stored(Some(Trouble(error)))) => Err(error),
            // The event took effect in a transaction that the store could not commit.
            (Ran::Released, Handed::NotStored) => {
                Err(semel::Error::Unavailable("the event could not be committed".into()))
            }
            (ran, _) => Ok(ran),
        }
    }
}

/// The span of an event's run. At the level of errors, so that no filter keeps a line and drops its span.
pub(super) fn span(source: &Source, event: &str, kind: &str) -> Span {
    tracing::error_span!("webhook", source = source.name, event, r#type = kind)
}

/// The store's error, if the event was released because of it.
struct Trouble(semel::Error);

/// Why an event was not processed.
enum Stopped {
    /// Its rule failed.
    By(Unfinished),
    /// The store could not be used.
    Broken(semel::Error),
}

impl From<Unfinished> for Stopped {
    fn from(unfinished: Unfinished) -> Self {
        Self::By(unfinished)
    }
}

impl From<semel::Error> for Stopped {
    fn from(error: semel::Error) -> Self {
        Self::Broken(error)
    }
}

/// An event and what its run needs.
struct Job {
    ledger: Ledger<Database>,
    source: Arc<Source>,
    event: Event,
    mode: Mode,
    /// Held by the job, which outlives the answer to the sender: newer data runs after it.
    _seat: Option<OwnedSemaphorePermit>,
}

impl Job {
    /// Runs the event; returns its outcome, and the value for the sender.
    async fn run(
        self: Arc<Self>,
        context: Context<Database>,
        tx: Option<Tx>,
    ) -> (Result<Outcome, Unfinished>, Option<Trouble>) {
        match self.attempt(&context, tx).await {
            Ok(done) => (done.outcome(), None),
            Err(Stopped::By(unfinished)) => (Err(unfinished), None),
            // An unreachable store is no failure of the event: it waits for a while, and the sender gets 503.
            Err(Stopped::Broken(error)) if error.is_transient() => {
                let wait = later(context.operation(), A_MOMENT, self.source.config.backoff.cap);
                (Err(Unfinished::released(wait)), Some(Trouble(error)))
            }
            Err(Stopped::Broken(error)) => (Err(Unfinished::failed(error.to_string())), None),
        }
    }

    async fn attempt(&self, context: &Context<Database>, tx: Option<Tx>) -> Result<Done, Stopped> {
        // After the first run, the same job gets newer data that waited.
        let newer;
        let event = if context.operation().fingerprint == self.event.fingerprint {
            &self.event
        } else {
            newer = Event::of(context.operation(), &self.source);
            newer.as_ref().ok_or_else(|| Unfinished::failed_for_good(NO_DATA))?
        };
        let way = self.source.way(event).filter(|way| way.mode() == self.mode);
        // Newer data may have a type with another rule: a worker runs it.
        let Some(way) = way else { return Err(Unfinished::released(Duration::ZERO).into()) };
        if let Some(of) = bodies::claim_in_run(&self.ledger, &self.source, event, tx.as_ref()).await?? {
            return Ok(Done::Duplicate { of });
        }
        let done = match way {
            Way::Store => Done::Stored,
            Way::Pull => return Err(Unfinished::released(Duration::ZERO).into()),
            Way::Outbox(topic) => publish(&self.ledger, event, context, tx.as_ref(), topic).await?,
            Way::Forward(caller) => {
                let later = later(context.operation(), LATER, self.source.config.backoff.cap);
                forward(event, context, caller, later).await?
            }
            Way::Handler(handler) => {
                let run = Run { context: context.clone(), tx };
                Done::Handled { value: handler.handle(event, &run).await.map_err(unhurried)? }
            }
        };
        crash_point!("webhooks.after_effect");
        Ok(done)
    }
}

/// Writes an event to the outbox, in the transaction of its completion.
async fn publish(
    ledger: &Ledger<Database>,
    event: &Event,
    context: &Context<Database>,
    tx: Option<&Tx>,
    topic: Option<&Topic>,
) -> Result<Done, Stopped> {
    let tx = tx.ok_or_else(|| Unfinished::failed("there is no transaction to publish in"))?;
    let topic = match topic {
        Some(topic) => topic.clone(),
        None => Topic::new(&topic_of(event))?,
    };
    let mut message = Message::new(&*event.tenant, topic, &*event.kind, event.body.clone());
    message.headers = headers_of(event);
    message.origin = Some(Origin { operation: context.operation().id, fence: context.fence() });
    let done = Done::Published { topic: message.topic.to_string(), message: message.id.to_string() };
    ledger.store().put(tx, vec![message]).await?;
    Ok(done)
}

/// The wait after a call without an effect: half the time for which the event has been tried, up to the longest backoff.
/// An endpoint that is down for days would otherwise fill the journal.
fn later(operation: &Operation, least: Duration, most: Duration) -> Duration {
    (operation.tried_for() / 2).clamp(least, most.max(least))
}

/// A handler's result, adjusted: an event that can run again is never in doubt, and a released one always waits.
fn unhurried(unfinished: Unfinished) -> Unfinished {
    match unfinished {
        Unfinished::Doubted(reason) => Unfinished::failed(reason),
        Unfinished::Released { after, why } => Unfinished::Released { after: after.max(A_MOMENT), why },
        other => other,
    }
}

/// The default topic of an event. Characters that a topic cannot contain become underscores; the message has the
/// original type.
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

/// Posts an event, with a key that is the same on every attempt at this data. `later` is the shortest wait if nothing
/// was done.
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
        // None of these contains a control character, so each can be a header.
        let value = HeaderValue::from_bytes(value.as_bytes()).map_err(|error| Unfinished::failed(error.to_string()))?;
        headers.insert(name, value);
    }
    let answered = |status| format!("the endpoint answered {status}");
    let not_now = |wait: Option<Duration>, why: String| Unfinished::Released {
        after: wait.map_or(later, |wait| wait.max(later)),
        why: Some(why),
    };
    match caller.post(headers, event.body.clone(), &Held::of(context)).await {
        Called::Taken(status) => Ok(Done::Forwarded { status: status.as_u16() }),
        Called::InFlight(wait) => {
            Err(not_now(wait, "the endpoint answered 409: it is processing the same event".to_owned()))
        }
        Called::NotNow(status, wait) if matches!(status.as_u16(), 425 | 429) => Err(not_now(wait, answered(status))),
        Called::NotNow(status, Some(wait)) => {
            Err(Unfinished::Failed(Failure { error: answered(status), retry: Retry::After(wait) }))
        }
        Called::NotNow(status, None) | Called::Refused(status) => Err(Unfinished::failed(answered(status))),
        Called::NotSent(why) => {
            let why = format!("the endpoint cannot be reached: {why}");
            Err(Unfinished::Away { target: caller.target(), after: later, why })
        }
        Called::LeaseLost => Err(not_now(None, LeaseLost.to_string())),
        // It is called again with the same key: an endpoint that honours keys recognises it.
        Called::Unknown(why) => Err(Unfinished::failed(why)),
    }
}
