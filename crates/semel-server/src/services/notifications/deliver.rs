//! Delivers the notifications of channels that have an endpoint, each once.
//!
//! Whether a notification is delivered is the ledger's word: a call is a run in leased mode, under a key derived from
//! the operation, the same on every attempt. The notification's status follows from it; where a node died between the
//! two, the next who looks asks the ledger again and puts the status right.

use std::{
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use semel::{
    Backoff, Claim, Context, Failure, Fingerprint, Key, Labels, Ledger, OnLost, Outcome, Policy, Ran, Replay, Result,
    Retry, Scope, Store as _, Unfinished, Uptime, Work, crash_point, messaging::Wake,
};
use semel_store::{Database, Tx};
use serde_json::{json, value::RawValue};
use tokio::{
    sync::{Semaphore, mpsc, watch},
    task::{JoinError, JoinSet},
};
use tracing::Instrument as _;

use super::{
    deliver_call::{Caller, Told},
    deliver_marks::{AT_ONCE, Looked, Stands, write_marks},
    deliver_tables::{self as tables, Due},
    tables::{
        fanouts::{Content, content},
        recipients::address,
    },
};
use crate::{
    config::{Channels, LONGEST_BACKOFF},
    services::call::Called,
};

/// The service of the ledger's scope.
pub(super) const SERVICE: &str = "notifications";

/// How often to look for notifications without being woken.
const POLL: Duration = Duration::from_secs(1);

/// How long a node gathers free places before it takes notifications for a few of them: taking is a commit.
const GATHER: Duration = Duration::from_millis(20);

/// The lease of a call, at least and at most. It is renewed while the call lasts, so it can be shorter than that: what a
/// killed node had goes on when it ends.
const LEASES: (Duration, Duration) = (Duration::from_secs(5), Duration::from_secs(10));

/// How long a delivery is remembered. Only a notification whose status was not put right in all this time, because no
/// node was up, could be sent again.
const RETENTION: Duration = Duration::from_secs(90 * 24 * 3600);

/// How long to wait for an endpoint that is at the same notification already.
const IN_FLIGHT: Duration = Duration::from_secs(5);

/// How long a channel pauses when its endpoint cannot be reached: at first, and at most. Nothing was sent, so it costs
/// no attempt; without the pause, everything that waits would be tried over and over.
const PAUSES: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(30));

/// Delivers the notifications of all channels that have an endpoint. Clones share it.
#[derive(Clone)]
pub struct Deliverer(Arc<Inner>);

struct Inner {
    ledger: Ledger<Database>,
    lines: Vec<Arc<Line>>,
}

/// One channel.
struct Line {
    ledger: Ledger<Database>,
    channel: &'static str,
    caller: Caller,
    wake: Wake,
    pause: Mutex<Pause>,
}

/// A call that was not made, or that the endpoint was at already: it costs no attempt.
struct PutBack {
    wait: Duration,
    why: Option<String>,
}

/// Why a call did not deliver.
enum NotDelivered {
    Unfinished(Unfinished),
    PutBack(PutBack),
}

impl From<Unfinished> for NotDelivered {
    fn from(unfinished: Unfinished) -> Self {
        Self::Unfinished(unfinished)
    }
}

#[derive(Default)]
struct Pause {
    /// How often in a row the endpoint could not be reached.
    times: u32,
    until: Option<Uptime>,
}

impl Deliverer {
    /// A deliverer for these channels.
    ///
    /// # Errors
    /// When an endpoint cannot be called from here, whatever it says.
    pub fn open(ledger: &Ledger<Database>, channels: &Channels) -> Result<Self> {
        let lines = channels.0.iter().map(|(channel, config)| {
            Ok(Arc::new(Line {
                ledger: ledger.clone(),
                channel,
                caller: Caller::new(config.clone())?,
                wake: Wake::default(),
                pause: Mutex::default(),
            }))
        });
        Ok(Self(Arc::new(Inner { ledger: ledger.clone(), lines: lines.collect::<Result<_>>()? })))
    }

    pub(super) fn ledger(&self) -> &Ledger<Database> {
        &self.0.ledger
    }

    /// There are new notifications: look at once.
    pub fn wake(&self) {
        for line in &self.0.lines {
            line.wake.wake();
        }
    }

    /// Delivers until `stop` turns true; ends when the calls that are open then have ended.
    pub async fn run(self, mut stop: watch::Receiver<bool>) {
        let lines = self.0.lines.iter().map(|line| work(line.clone(), stop.clone()));
        lines.collect::<JoinSet<()>>().join_all().await;
        // There may be no channel at all.
        let _ = stop.wait_for(|stop| *stop).await;
    }
}

/// The scope of a channel's deliveries.
pub(super) fn scope(tenant: &str, channel: &str) -> Result<Scope> {
    Scope::new(tenant, SERVICE, &format!("deliver.{channel}"))
}

/// The key of a notification's delivery.
pub(super) fn key(id: i64) -> Result<Key> {
    Key::new(&id.to_string())
}

/// The delivery of a notification, as the ledger is asked about it.
pub(super) fn delivery(tenant: &str, channel: &str, id: i64, policy: Policy) -> Result<Work> {
    let fingerprint = Fingerprint::of_bytes(id.to_string().as_bytes());
    let work = Work::new(scope(tenant, channel)?, key(id)?, fingerprint);
    Ok(work.policy(policy).labels(Labels::default().with(1, channel)?))
}

/// The policy of a claim that calls nobody: whoever was lost on the way has sent nothing.
pub(super) fn without_a_call() -> Policy {
    Policy { lease: LEASES.0, retention: Some(RETENTION), on_lost: OnLost::Rerun, ..Policy::default() }
}

/// Takes and delivers the notifications of a channel.
async fn work(line: Arc<Line>, mut stop: watch::Receiver<bool>) {
    let places = line.caller.config().concurrency;
    let seats = Arc::new(Semaphore::new(places));
    let (marks, to_write) = mpsc::channel(AT_ONCE);
    let writer = tokio::spawn(write_marks(line.ledger.clone(), to_write));
    let mut runs = JoinSet::new();
    // Without its writer it would look at the same notifications again and again.
    while !*stop.borrow() && !writer.is_finished() {
        while runs.try_join_next().is_some() {}
        let free = seats.available_permits();
        if free < places.div_ceil(4) {
            tokio::select! {
                _ = runs.join_next() => {}
                () = tokio::time::sleep(GATHER), if free > 0 => {}
                _ = stop.wait_for(|stop| *stop) => {}
            }
            if seats.available_permits() == 0 {
                continue;
            }
        }
        let wait = match line.paused() {
            Some(pause) => Some(pause),
            None => match line.take(seats.available_permits()).await {
                Ok((taken, wait)) => {
                    for due in taken {
                        let Ok(seat) = seats.clone().try_acquire_owned() else { break };
                        let (line, marks) = (line.clone(), marks.clone());
                        runs.spawn(async move {
                            line.deliver(due, &marks).await;
                            drop(seat);
                        });
                    }
                    wait
                }
                Err(error) => {
                    tracing::warn!(channel = line.channel, %error, "notifications could not be taken; trying again");
                    Some(POLL)
                }
            },
        };
        if let Some(wait) = wait {
            tokio::select! {
                () = line.wake.woken() => {}
                () = tokio::time::sleep(wait) => {}
                _ = stop.wait_for(|stop| *stop) => {}
            }
        }
    }
    while runs.join_next().await.is_some() {}
    drop(marks);
    if let Err(Ok(panic)) = writer.await.map_err(JoinError::try_into_panic) {
        std::panic::resume_unwind(panic);
    }
}

impl Line {
    /// How long this channel still pauses.
    fn paused(&self) -> Option<Duration> {
        let until = self.pause.lock().unwrap_or_else(PoisonError::into_inner).until?;
        Some(until.remaining()).filter(|left| !left.is_zero())
    }

    /// Notes that the endpoint could be reached.
    fn reached(&self) {
        *self.pause.lock().unwrap_or_else(PoisonError::into_inner) = Pause::default();
    }

    /// Notes that the endpoint could not be reached. Every call that is open says so; the first begins the pause.
    fn not_reached(&self, attempt: u32, error: &str) {
        let mut pause = self.pause.lock().unwrap_or_else(PoisonError::into_inner);
        if pause.until.is_none_or(Uptime::has_passed) {
            let (first, longest) = PAUSES;
            pause.until = Some(Uptime::now() + (first * (1 << pause.times.min(8))).min(longest));
            pause.times += 1;
            let channel = self.channel;
            tracing::warn!(channel, attempt, error, "the endpoint cannot be reached; the channel pauses");
        }
    }

    /// Takes what is due, or says how long there is to wait.
    async fn take(&self, limit: usize) -> Result<(Vec<Due>, Option<Duration>)> {
        let store = self.ledger.store();
        let now = store.now().await?;
        // Most looks find nothing; those should not take SQLite's writer.
        let mut reader = store.reader().await?;
        let next = tables::next_due(&mut reader.conn(), self.channel).await?;
        reader.leave();
        match next {
            Some(due) if due <= now => {}
            Some(due) => return Ok((Vec::new(), Some(due.since(now).min(POLL)))),
            None => return Ok((Vec::new(), Some(POLL))),
        }
        let (channel, until) = (self.channel, now + self.lease());
        let limit = i64::try_from(limit).unwrap_or(i64::MAX);
        let taken = in_transaction(&self.ledger, move |tx| async move {
            let mut held = tx.connection().await?;
            tables::take(&mut held.get()?, channel, now, until, limit).await
        });
        Ok((taken.await?, None))
    }

    fn lease(&self) -> Duration {
        self.caller.config().timeout.clamp(LEASES.0, LEASES.1)
    }

    fn backoff(&self) -> Backoff {
        Backoff { first: self.caller.config().backoff, cap: LONGEST_BACKOFF }
    }

    fn policy(&self) -> Policy {
        let config = self.caller.config();
        Policy {
            lease: self.lease(),
            retention: Some(RETENTION),
            max_attempts: u32::try_from(config.max_attempts).ok(),
            backoff: self.backoff(),
            on_lost: config.on_lost,
            ..Policy::default()
        }
    }

    /// Delivers a notification, or finds out that there is nothing to do, and says how it stands.
    async fn deliver(self: Arc<Self>, due: Due, marks: &mpsc::Sender<Looked>) {
        let attempt = Arc::<Mutex<Option<u32>>>::default();
        // How a run ended is logged by the ledger; this says what it was about, whatever filter there is.
        let span = tracing::error_span!("delivery", notification = due.id, event = due.event_id);
        match self.ask(&due, &attempt).instrument(span.clone()).await {
            Ok(stands) => {
                let attempt = *attempt.lock().unwrap_or_else(PoisonError::into_inner);
                let _ = marks.send(Looked { due, stands, attempt }).await;
            }
            Err(semel::Error::Stopping) => {}
            // The next look asks the ledger again.
            Err(error) => {
                tracing::warn!(parent: span, channel = self.channel, %error, "a notification was not delivered yet");
            }
        }
    }

    /// Calls, or asks the ledger why not; notes which attempt that was.
    async fn ask(self: &Arc<Self>, due: &Due, attempt: &Arc<Mutex<Option<u32>>>) -> Result<Stands> {
        let work = delivery(&due.tenant, self.channel, due.id, self.policy())?;
        let (line, asked) = (self.clone(), due.clone());
        // The ledger keeps no word about what was put back, but whoever looks at the notification wants one.
        let put_back = Arc::<Mutex<Option<PutBack>>>::default();
        let (noted, counted) = (put_back.clone(), attempt.clone());
        let call = move |context: Context<Database>| {
            let (line, due, noted) = (line.clone(), asked.clone(), noted.clone());
            *counted.lock().unwrap_or_else(PoisonError::into_inner) = Some(context.operation().attempt());
            async move {
                match line.call(&due, &context).await {
                    Ok(outcome) => Ok(outcome),
                    Err(NotDelivered::Unfinished(unfinished)) => Err(unfinished),
                    Err(NotDelivered::PutBack(back)) => {
                        let wait = back.wait;
                        *noted.lock().unwrap_or_else(PoisonError::into_inner) = Some(back);
                        Err(Unfinished::NotYet(wait))
                    }
                }
            }
        };
        let claim = self.ledger.run(work, call).await?;
        // Made by another node, which did not come to say so.
        if let Claim::Replay(Replay { operation, .. }) | Claim::Exhausted(operation) | Claim::InDoubt(operation) =
            &claim
        {
            *attempt.lock().unwrap_or_else(PoisonError::into_inner) = Some(operation.attempt());
        }
        Ok(match claim {
            Claim::Acquired(Ran::Completed(_)) | Claim::Replay(_) => Stands::Sent,
            Claim::Acquired(Ran::Failed(Failure { error, retry: Retry::After(wait) })) => {
                Stands::Later(wait, Some(error))
            }
            Claim::Acquired(Ran::Failed(failure)) => Stands::Failed(failure.error),
            Claim::Acquired(Ran::Doubted(reason)) => Stands::InDoubt(reason),
            Claim::Acquired(Ran::Released) => match put_back.lock().unwrap_or_else(PoisonError::into_inner).take() {
                Some(back) => Stands::Later(back.wait, back.why),
                None => Stands::Later(IN_FLIGHT, None),
            },
            Claim::Acquired(Ran::LeaseLost) => {
                Stands::Later(self.lease(), Some("the lease of the call was lost; another node looks at it".to_owned()))
            }
            Claim::InFlight(there) => Stands::Later(there.retry_after, None),
            Claim::NotYet(there) => Stands::Later(there.retry_after, there.operation.error.clone()),
            Claim::Exhausted(operation) => {
                let why = operation.error.clone();
                Stands::Failed(why.unwrap_or_else(|| "the nodes that delivered it were lost too often".to_owned()))
            }
            Claim::InDoubt(operation) => {
                let why = operation.error.clone();
                Stands::InDoubt(why.unwrap_or_else(|| "the node that delivered it was lost".to_owned()))
            }
            // The fingerprint is made of the key.
            Claim::Mismatch(_) => Stands::Failed("another notification had this id".to_owned()),
        })
    }

    /// The call itself, under the lease.
    async fn call(&self, due: &Due, context: &Context<Database>) -> Result<Outcome, NotDelivered> {
        let attempt = context.operation().failures + 1;
        let fail = |error: String, wait: Option<Duration>| {
            let config = self.caller.config();
            let last = usize::try_from(attempt).is_ok_and(|attempt| attempt >= config.max_attempts);
            let wait = wait.unwrap_or_else(|| self.backoff().after(attempt, context.operation().id));
            let retry = if last { Retry::Never } else { Retry::After(wait) };
            Err(Unfinished::Failed(Failure { error, retry }).into())
        };
        let put_back = |wait, why| Err(NotDelivered::PutBack(PutBack { wait, why }));
        let (content, address) = match self.read(due).await {
            Ok(Some(read)) => read,
            Ok(None) => return Err(Unfinished::failed_for_good("the event is not there any more").into()),
            Err(_) => return put_back(POLL, None),
        };
        let payload =
            std::str::from_utf8(&content.payload).ok().and_then(|text| RawValue::from_string(text.into()).ok());
        let Some(payload) = payload else {
            return Err(Unfinished::failed_for_good("the event's payload is no JSON").into());
        };
        let told = Told {
            notification_id: due.id,
            event_id: &due.event_id,
            aggregate_type: &content.aggregate_type,
            event_type: &content.event_type,
            kind: &due.kind,
            user_id: &due.user_id,
            notification_type: &due.notification_type,
            address,
            payload: &payload,
        };
        let called = self.caller.call(context, &told).await;
        match &called {
            Called::NotSent(why) => self.not_reached(attempt, why),
            Called::LeaseLost => {}
            _ => {
                crash_point!("deliver.sent");
                self.reached();
            }
        }
        match called {
            Called::Taken(status) => Ok(Outcome::kept(json!({ "status": status.as_u16() }).to_string())),
            Called::Refused(status) => {
                Err(Unfinished::failed_for_good(format!("the endpoint answered {status}")).into())
            }
            Called::NotNow(status, wait) => fail(format!("the endpoint answered {status}"), wait),
            Called::InFlight(wait) => put_back(wait.unwrap_or(IN_FLIGHT).max(POLL), None),
            // Nothing was sent, so an endpoint that is away, however long, costs no attempts.
            Called::NotSent(why) => {
                let pause = self.paused().unwrap_or(PAUSES.0);
                put_back(pause, Some(format!("the endpoint could not be reached: {why}")))
            }
            Called::LeaseLost => put_back(POLL, None),
            // Nobody knows whether it arrived: only an endpoint that honours keys may be called again.
            Called::Unknown(why) if self.caller.config().on_lost.doubts() => Err(Unfinished::Unknown(why).into()),
            Called::Unknown(why) => fail(why, None),
        }
    }

    /// What there is to say, and to whom.
    async fn read(&self, due: &Due) -> Result<Option<(Content, Option<String>)>> {
        let mut reader = self.ledger.store().reader().await?;
        let mut conn = reader.conn();
        let content = content(&mut conn, &due.tenant, &due.event_id, &due.kind).await?;
        let address = address(&mut conn, &due.tenant, &due.kind, &due.user_id, &due.notification_type).await?;
        reader.leave();
        Ok(content.map(|content| (content, address)))
    }
}

/// Runs `work` in a transaction that commits if it succeeds.
pub(super) async fn in_transaction<T, F, Fut>(ledger: &Ledger<Database>, work: F) -> Result<T>
where
    T: Send + 'static,
    F: FnOnce(Tx) -> Fut + Send + 'static,
    Fut: Future<Output = Result<T>> + Send,
{
    let done = ledger.transact(|tx| async move {
        let done = work(tx).await;
        if done.is_ok() { Ok(done) } else { Err(done) }
    });
    done.await?
}
