//! What becomes of an event: it goes to the outbox, to a URL, or to a handler.

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use reqwest::header::{CONTENT_TYPE, HeaderMap, HeaderValue};
use semel::{
    Claim, Context, Failure, Fingerprint, Key, Lease, Ledger, Operation, Outcome, Policy, Ran, Result, Retry, Scope,
    State, Store as _, Unfinished, Work, crash_point,
    messaging::{Message, MessageStore as _, Origin, Topic},
};
use semel_http::Mode;
use semel_store::{Database, Tx};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::{
    event::{Event, body_hash},
    handler::{Run, key_of_data},
    source::{Source, Way},
};
use crate::services::call::{Called, Caller};

/// The step that the key of a call is derived for.
const STEP: &str = "forward";

/// How long to wait, at least, for an endpoint that is at the same event, that asked for time, or that cannot be
/// reached. Nothing was done there, so it costs no attempt: without a pause it would be called without end.
const LATER: Duration = Duration::from_secs(10);

/// How long to wait, at least, for a handler that wants to be asked later.
const A_MOMENT: Duration = Duration::from_secs(1);

/// The longest topic.
const LONGEST_TOPIC: usize = 200;

/// How an event was processed: what is kept of it.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "result", rename_all = "snake_case")]
pub(super) enum Done {
    /// It went to the outbox.
    Published { topic: String, message: String },
    /// An endpoint took it.
    Forwarded { status: u16 },
    /// A handler did it.
    Handled { value: Value },
    /// The same bytes came under another id before.
    Duplicate { of: String },
}

impl Done {
    fn outcome(&self) -> Result<Outcome, Unfinished> {
        serde_json::to_vec(self).map(Outcome::kept).map_err(|error| Unfinished::failed(error.to_string()))
    }

    /// Whether an outcome says that nothing was done.
    pub(super) fn is_duplicate(outcome: &Outcome) -> bool {
        matches!(serde_json::from_slice(&outcome.body), Ok(Self::Duplicate { .. }))
    }
}

/// Runs an event under its lease.
pub(super) async fn run(
    ledger: Ledger<Database>,
    lease: Lease<Database>,
    source: Arc<Source>,
    event: Event,
) -> Result<Ran> {
    let Some(mode) = source.way(&event).map(|way| way.mode()) else {
        return Err(semel::Error::Invalid("an event that no rule knows what to do with".into()));
    };
    let job = Arc::new(Job { ledger, source, event, mode });
    match mode {
        Mode::Atomic => lease.run_atomic(move |context, tx| job.clone().run(context, Some(tx))).await,
        Mode::Leased => lease.run(move |context| job.clone().run(context, None)).await,
    }
}

/// An event to be run, and all that its run needs.
struct Job {
    ledger: Ledger<Database>,
    source: Arc<Source>,
    event: Event,
    mode: Mode,
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
        if let Some(of) = self.same_body_before(event, tx.as_ref()).await? {
            return Done::Duplicate { of }.outcome();
        }
        let done = match way {
            Way::Outbox(topic) => self.publish(event, &context, tx.as_ref(), topic).await,
            Way::Forward(caller) => {
                let later = later(context.operation(), self.source.config.backoff.cap);
                forward(event, &context, caller, later).await
            }
            Way::Handler(handler) => {
                let run = Run { context, tx };
                let value = handler.handle(event, &run).await.map_err(unhurried)?;
                Ok(Done::Handled { value })
            }
        }?;
        crash_point!("webhooks.after_effect");
        done.outcome()
    }

    /// The other event that had the same bytes, where an id alone does not tell a duplicate. The claim of the bytes is
    /// in the transaction of the effect; without one, it comes first, and is found to be this event's own next time.
    async fn same_body_before(&self, event: &Event, tx: Option<&Tx>) -> Result<Option<String>, Unfinished> {
        if !self.source.config.id_can_be_forged() {
            return Ok(None);
        }
        let broken = |error: semel::Error| Unfinished::failed(error.to_string());
        let work = body_key(&self.source, event).map(|(scope, key)| body_work(event, scope, key)).map_err(broken)?;
        let claim = match tx {
            Some(tx) => self.ledger.claim_inline(tx, work).await.map_err(broken)?,
            None => {
                let ledger = self.ledger.clone();
                let claim = self.ledger.transact(move |tx| async move {
                    let claim = ledger.claim_inline(&tx, work).await;
                    if claim.is_ok() { Ok(claim) } else { Err(claim) }
                });
                claim.await.and_then(|claim| claim).map_err(broken)?
            }
        };
        Ok(match claim {
            Claim::Mismatch(other) => Some(owner(&other).unwrap_or_else(|| "another event".to_owned())),
            _ => None,
        })
    }

    async fn publish(
        &self,
        event: &Event,
        context: &Context<Database>,
        tx: Option<&Tx>,
        topic: Option<&Topic>,
    ) -> Result<Done, Unfinished> {
        let broken = |error: semel::Error| Unfinished::failed(error.to_string());
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

/// The key of an event's bytes, apart from any id.
fn body_key(source: &Source, event: &Event) -> Result<(Scope, Key)> {
    Ok((source.body_scope(event)?, Key::new(&body_hash(&event.body))?))
}

/// The claim of an event's bytes: they belong to the id that they first came under.
fn body_work(event: &Event, scope: Scope, key: Key) -> Work {
    let work = Work::new(scope, key, Fingerprint::of_bytes(event.id.as_bytes()));
    work.payload(event.id.clone()).policy(Policy { retention: None, ..Policy::default() })
}

/// The id of the event that some bytes belong to.
fn owner(body: &Operation) -> Option<String> {
    body.payload.as_deref().map(|id| String::from_utf8_lossy(id).into_owned())
}

/// Whether a delivery is nothing but the bytes of a completed event under an id that is new. It is counted, and nothing
/// of it is stored: whoever has seen one delivery can make such ids without end. That the same bytes take effect once
/// is for the claim in the run to see to.
pub(super) async fn took_effect_before(ledger: &Ledger<Database>, source: &Source, event: &Event) -> Result<bool> {
    if !source.config.id_can_be_forged() {
        return Ok(false);
    }
    let (store, (scope, key)) = (ledger.store(), body_key(source, event)?);
    let body = store.by_key(&scope, &key).await?;
    let Some(owner) = body.as_ref().and_then(owner).filter(|owner| *owner != event.id) else { return Ok(false) };
    let events = source.scope(&event.function)?;
    let first = store.by_key(&events, &Key::new(&owner)?).await?;
    if first.is_none_or(|first| first.state != State::Completed) {
        return Ok(false);
    }
    // Under an id that is known, it is a conflict or a repeat like any other.
    if store.by_key(&events, &Key::new(&event.id)?).await?.is_some() {
        return Ok(false);
    }
    // The bytes are another's, so this claim gets nothing and only counts.
    match ledger.claim(body_work(event, scope, key)).await? {
        Claim::Mismatch(_) => Ok(true),
        // Somebody has purged them in between.
        Claim::Acquired(lease) => lease.release(Duration::ZERO).await.map(|_| false),
        _ => Ok(false),
    }
}

/// How long to wait for an endpoint that did nothing: half the event's age, up to the longest backoff. One that is away
/// for days would else fill the event's journal.
fn later(operation: &Operation, most: Duration) -> Duration {
    (operation.claimed_at.since(operation.created_at) / 2).clamp(LATER, most.max(LATER))
}

/// What a handler may say: there is no doubt about what can simply be run again, and no asking again without a pause.
fn unhurried(unfinished: Unfinished) -> Unfinished {
    match unfinished {
        Unfinished::Unknown(reason) => Unfinished::failed(reason),
        Unfinished::NotYet(wait) => Unfinished::NotYet(wait.max(A_MOMENT)),
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
    let not_yet = |wait: Option<Duration>| Unfinished::NotYet(wait.map_or(later, |wait| wait.max(later)));
    match caller.post(headers, event.body.clone()).await {
        Called::Taken(status) => Ok(Done::Forwarded { status: status.as_u16() }),
        Called::InFlight(wait) => Err(not_yet(wait)),
        Called::NotNow(status, wait) if matches!(status.as_u16(), 425 | 429) => Err(not_yet(wait)),
        Called::NotNow(status, Some(wait)) => {
            Err(Unfinished::Failed(Failure { error: answered(status), retry: Retry::After(wait) }))
        }
        Called::NotNow(status, None) | Called::Refused(status) => Err(Unfinished::failed(answered(status))),
        Called::NotSent(why) => {
            tracing::warn!(source = event.source, why, "an endpoint cannot be reached");
            Err(not_yet(None))
        }
        // Called again under the same key: an endpoint that honours it knows.
        Called::Unknown(why) => Err(Unfinished::failed(why)),
    }
}
