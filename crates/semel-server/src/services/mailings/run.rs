//! A run: one operation `{mailingId}/{n}` that imports a mailing, then sends it.
//!
//! Everything that a run writes is a [step](semel::Context::step): its rows, the mailing's row and the fenced checkpoint
//! commit together. So a run that has lost its lease changes nothing, and counts always fit the entries. The step also
//! checks the number of the run: a person's retry begins run n + 1, and run n changes nothing from then on.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use parking_lot::Mutex;

use semel::{
    Backoff, Context, Fence, Fingerprint, Key, Kind, Labels, OnLost, Operation, Outcome, Policy, Result, Scope,
    Unfinished, Uptime, Work, crash_point, micros, prelude::*,
};
use semel_store::{Conn, Database, Tx};
use serde_json::json;

use super::{
    SERVICE, Service, import,
    mail::verdict::without_addresses,
    send,
    tables::{
        entries,
        mailings::{self, Mailing, RUN},
    },
};
use crate::unfinished::unfinished;

/// The turn of a mailing: after it, others have theirs.
const TURN: Duration = Duration::from_secs(60);

/// How often the database is asked for its time.
const ASKED_EVERY: Duration = Duration::from_secs(1);

/// How many entries are cancelled or reset in one transaction.
const CHANGED_AT_ONCE: i64 = 5_000;

/// How long after its time, or after its last run, a mailing is still sent: the server was away, or the database was
/// restored from a backup. A later one waits for a person.
const LATEST: i64 = 24 * 3600 * 1_000_000;

/// The policy of runs.
fn policy(lease: Duration) -> Policy {
    Policy {
        lease,
        retention: None,
        max_attempts: Some(10),
        max_crashes: 10,
        backoff: Backoff { first: Duration::from_secs(5), cap: Duration::from_secs(600) },
        on_lost: OnLost::Rerun,
        ..Policy::default()
    }
}

/// The scope of runs.
pub(super) fn scope(tenant: &str) -> Result<Scope> {
    Scope::new(tenant, SERVICE, RUN)
}

/// The key of a run.
pub(super) fn key(id: &str, run: i64) -> Result<Key> {
    Key::new(&format!("{id}/{run}"))
}

/// The operation of a mailing's present run.
pub(super) fn work(mailing: &Mailing) -> Result<Work> {
    let key = key(&mailing.id, mailing.run)?;
    let fingerprint = Fingerprint::of_bytes(key.as_str().as_bytes());
    let policy = Policy { retention: None, ..Policy::default() };
    let work = Work::new(scope(&mailing.tenant)?, key, fingerprint).policy_of_worker(policy);
    // The file name may be long, and an operation's label is short.
    let label: String = mailing.filename.chars().take(30).collect();
    Ok(work.labels(Labels::default().with(1, &label)?))
}

/// The kind of work. Small mailings wait for a free seat at most as long as one turn; a node has several.
pub(super) fn kind(service: &Arc<Service>) -> Kind<Database> {
    let handler = service.clone();
    Kind::leased(SERVICE, RUN, move |context: Context<Database>| {
        let service = handler.clone();
        async move { Run::begin(service, context).await }
    })
    .policy(policy(service.config.lease))
    .at_once(service.config.at_once)
    .turn(TURN)
    .span(|operation| tracing::error_span!("mailing", run = operation.key.as_str()))
}

/// One run of a mailing.
pub(super) struct Run {
    pub(super) service: Arc<Service>,
    pub(super) context: Context<Database>,
    pub(super) tenant: String,
    pub(super) id: String,
    number: i64,
    clock: Mutex<Option<Clock>>,
    /// Whether the transport could not be reached, as far as is known.
    was_away: AtomicBool,
}

/// The database's time when it was last asked, and until when this node's own clock continues it.
#[derive(Clone, Copy)]
struct Clock {
    asked: i64,
    until: Uptime,
}

/// Why a run ends early.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Halt {
    /// The mailing was deleted, or another run has its place.
    Superseded,
    /// A person has paused or cancelled it, or it is over.
    Stopped,
}

/// A change of a mailing, in the transaction of a step that has locked its row.
pub(super) trait Change: Send {
    /// What the step returns.
    type Out: Send;

    /// Whether it brings the run further. A run that crashes again and again without is parked.
    fn is_progress(&self) -> bool {
        false
    }

    /// Makes the change. The row is saved afterwards.
    fn make(
        self,
        conn: &mut Conn<'_>,
        mailing: &mut Mailing,
        now: i64,
    ) -> impl Future<Output = Result<Self::Out>> + Send;
}

impl Run {
    async fn begin(service: Arc<Service>, context: Context<Database>) -> Result<Outcome, Unfinished> {
        let operation: &Operation = context.operation();
        let tenant = operation.scope.tenant().to_owned();
        let named =
            operation.key.as_str().split_once('/').and_then(|(id, run)| Some((id.to_owned(), run.parse().ok()?)));
        let Some((id, number)) = named else {
            return Err(Unfinished::failed_for_good("the key of a run is the id of a mailing and a number"));
        };
        let run =
            Self { service, context, tenant, id, number, clock: Mutex::default(), was_away: AtomicBool::new(false) };
        match run.go().await? {
            Ok(outcome) => Ok(Outcome::kept(json!({ "ended": outcome }).to_string())),
            Err(halt) => {
                let why = match halt {
                    Halt::Superseded => "superseded",
                    Halt::Stopped => "stopped",
                };
                Ok(Outcome::kept(json!({ "ended": why }).to_string()))
            }
        }
    }

    async fn go(&self) -> Result<Result<&'static str, Halt>, Unfinished> {
        let operation = self.context.operation();
        // The operation was made in the epoch of its id.
        let is_elsewhere = operation.fence.epoch() != Fence(operation.id).epoch();
        let (begun, mut mailing) = match self.step(Begin { is_elsewhere }).await? {
            Ok(begun) => begun,
            Err(halt) => return Ok(Err(halt)),
        };
        self.was_away.store(begun.was_away, Ordering::Relaxed);
        crash_point!("mailing.begun");
        // Also for a mailing that was paused or cancelled since: what was being sent is settled as soon as possible.
        if mailing.sending > 0 {
            mailing = match send::settle_former(self, &mailing).await? {
                Ok(mailing) => mailing,
                Err(halt) => return Ok(Err(halt)),
            };
        }
        while mailing.task.is_some() {
            if self.context.turn_is_over() {
                return Err(Unfinished::TurnOver);
            }
            mailing = match self.step(Task).await? {
                Ok(((), mailing)) => mailing,
                Err(halt) => return Ok(Err(halt)),
            };
        }
        match mailing.status.as_str() {
            "CANCELLED" => return self.end("cancelled").await,
            "PAUSED" => return self.end("paused").await,
            _ => {}
        }
        if let Some(why) = begun.doubt {
            return self.pause(why.to_owned()).await;
        }
        if mailing.phase == "importing" {
            mailing = match import::import(self, mailing).await? {
                Ok(mailing) => mailing,
                Err(halt) => return Ok(Err(halt)),
            };
        }
        if let Some(at) = mailing.send_at {
            let now = self.now().await?;
            if at > now {
                return self.wait(Duration::from_micros(u64::try_from(at - now).unwrap_or(0)), None, None).await;
            }
            if now - at > LATEST && mailing.last_line == 0 {
                let why = "its sendAt has passed more than a day ago; resume it to send it now";
                return self.pause(why.to_owned()).await;
            }
        }
        send::send(self, mailing).await
    }

    /// Whether the last run could not reach the transport.
    pub(super) fn was_away(&self) -> bool {
        self.was_away.load(Ordering::Relaxed)
    }

    /// The database's time. It is asked once a second, since every mail needs it.
    pub(super) async fn now(&self) -> Result<i64, Unfinished> {
        let known = *self.clock.lock();
        if let Some(Clock { asked, until }) = known
            && !until.has_passed()
        {
            return Ok(asked + micros(ASKED_EVERY.saturating_sub(until.remaining())));
        }
        let asked = self.service.database.now().await.map_err(unfinished)?.as_micros();
        *self.clock.lock() = Some(Clock { asked, until: Uptime::now() + ASKED_EVERY });
        Ok(asked)
    }

    /// Runs a step, if the run still has its place. Returns the mailing as the step left it.
    pub(super) async fn step<C: Change>(&self, change: C) -> Result<Result<(C::Out, Mailing), Halt>, Unfinished> {
        let now = self.now().await?;
        let is_progress = change.is_progress();
        let work = |tx: Tx| async move {
            let changed = self.changed(&tx, change, now).await.map_err(unfinished)?;
            let settled = changed.as_ref().map_or(0, |(_, mailing)| mailing.settled());
            Ok((json!({ "settled": settled }).to_string(), changed))
        };
        match is_progress {
            true => self.context.step(work).await,
            false => self.context.step_without_progress(work).await,
        }
    }

    async fn changed<C: Change>(&self, tx: &Tx, change: C, now: i64) -> Result<Result<(C::Out, Mailing), Halt>> {
        let mut held = tx.connection().await?;
        let mut conn = held.get()?;
        let Some(mut mailing) = mailings::lock(&mut conn, &self.tenant, &self.id).await? else {
            return Ok(Err(Halt::Superseded));
        };
        if mailing.run != self.number || !mailing.active {
            return Ok(Err(Halt::Superseded));
        }
        let out = change.make(&mut conn, &mut mailing, now).await?;
        if ["PENDING", "QUEUED", "FAILED"].contains(&mailing.status.as_str()) {
            mailing.status = "PROCESSING".to_owned();
        }
        mailings::save(&mut conn, &mailing, now).await?;
        Ok(Ok((out, mailing)))
    }

    /// Ends the run; the mailing keeps its status. If a person has resumed it meanwhile, the run goes on instead.
    pub(super) async fn end(&self, outcome: &'static str) -> Result<Result<&'static str, Halt>, Unfinished> {
        self.end_by(End { pause: None }, outcome).await
    }

    /// Pauses the mailing for a reason that is shown, and ends the run.
    pub(super) async fn pause(&self, why: String) -> Result<Result<&'static str, Halt>, Unfinished> {
        let shown = without_addresses(&why);
        tracing::warn!(mailing = self.id, why = shown, "a mailing is paused until a person resumes it");
        self.end_by(End { pause: Some(why) }, "paused").await
    }

    /// Gives the place back for a while, because of the transport if there is an error; that is logged once. A person's
    /// action begins the next run at once. `seen` is when the next retry is due, or `i64::MAX`, if the run waits for that.
    pub(super) async fn wait<T>(
        &self,
        wait: Duration,
        error: Option<String>,
        seen: Option<i64>,
    ) -> Result<Result<T, Halt>, Unfinished> {
        if let Some(why) = error.as_deref().filter(|_| !self.was_away.swap(true, Ordering::Relaxed)) {
            let (target, why) = (self.service.transport.name(), without_addresses(why));
            tracing::warn!(mailing = self.id, target, why, "target unreachable; the mailing waits for it");
        }
        match self.step(Wait { error, seen }).await? {
            Ok((true, _)) => Err(Unfinished::released(wait)),
            Ok((false, _)) => Err(Unfinished::TurnOver),
            Err(halt) => Ok(Err(halt)),
        }
    }

    async fn end_by(&self, end: End, outcome: &'static str) -> Result<Result<&'static str, Halt>, Unfinished> {
        match self.step(end).await? {
            Ok((true, _)) => Ok(Ok(outcome)),
            Ok((false, _)) => Err(Unfinished::TurnOver),
            Err(halt) => Ok(Err(halt)),
        }
    }
}

/// The first step of a run.
struct Begin {
    /// Whether the database is on another server than when the run was enqueued.
    is_elsewhere: bool,
}

/// What the first step of a run has found.
struct Begun {
    /// Whether the last run could not reach the transport. The reason is shown until a mail was sent.
    was_away: bool,
    /// Why the mailing is to be paused.
    doubt: Option<&'static str>,
}

impl Begin {
    /// Why the mailing may have sent mails that the database does not know: it may be a restored backup, or a standby
    /// that lacks the last commits.
    fn doubts(&self, mailing: &Mailing, now: i64) -> Option<&'static str> {
        if mailing.is_stopped() || mailing.phase != "sending" || mailing.pending() == 0 {
            return None;
        }
        let last = mailing.rate_since.map(|since| since.max(mailing.send_at.unwrap_or(since)));
        if last.is_some_and(|last| now - last > LATEST) {
            return Some("it last ran more than a day ago: the database may be an old backup; resume it to go on");
        }
        let has_begun = mailing.last_line > 0 && mailing.policy == "never-twice";
        (self.is_elsewhere && has_begun)
            .then_some("the database is on another server now, and may lack the last mails; resume it to go on")
    }
}

impl Change for Begin {
    type Out = Begun;

    async fn make(self, _: &mut Conn<'_>, mailing: &mut Mailing, now: i64) -> Result<Begun> {
        let was_away = mailing.waiting && mailing.error.is_some();
        let doubt = self.doubts(mailing, now);
        (mailing.last_attempt, mailing.waiting) = (Some(now), false);
        if doubt.is_none() {
            mailing.rate_since = Some(now);
        }
        mailing.rate_base = mailing.settled();
        if !mailing.is_stopped() && !was_away {
            mailing.error = None;
        }
        Ok(Begun { was_away, doubt })
    }
}

/// Cancels or resets some entries, as a person asked.
struct Task;

impl Change for Task {
    type Out = ();

    fn is_progress(&self) -> bool {
        true
    }

    async fn make(self, conn: &mut Conn<'_>, mailing: &mut Mailing, now: i64) -> Result<()> {
        let (number, after) = (mailing.number, mailing.task_line);
        let Some(to) = entries::page_end(conn, number, after, CHANGED_AT_ONCE).await? else {
            (mailing.task, mailing.task_line) = (None, 0);
            return Ok(());
        };
        if mailing.task.as_deref() == Some("cancel") {
            let (cancelled, in_doubt) = entries::cancel(conn, number, (after, to), now).await?;
            mailing.cancelled += cancelled;
            mailing.in_doubt += in_doubt;
        } else {
            mailing.failed -= entries::reset(conn, number, (after, to), now, "FAILED").await?;
            mailing.invalid -= entries::reset(conn, number, (after, to), now, "INVALID").await?;
        }
        mailing.task_line = to;
        Ok(())
    }
}

/// The last step before a wait.
struct Wait {
    error: Option<String>,
    seen: Option<i64>,
}

impl Change for Wait {
    /// Whether the run may wait: not if a person has asked for something meanwhile.
    type Out = bool;

    async fn make(self, conn: &mut Conn<'_>, mailing: &mut Mailing, _: i64) -> Result<bool> {
        if mailing.is_stopped() || mailing.task.is_some() {
            return Ok(false);
        }
        // A person may have decided about an entry since the run looked.
        if let Some(seen) = self.seen
            && entries::next(conn, mailing.number).await?.unwrap_or(i64::MAX) != seen
        {
            return Ok(false);
        }
        mailing.waiting = true;
        mailing.error = self.error;
        Ok(true)
    }
}

/// The last step of a run.
struct End {
    pause: Option<String>,
}

impl Change for End {
    /// Whether the run has ended: not if a person has asked for more meanwhile.
    type Out = bool;

    async fn make(self, _: &mut Conn<'_>, mailing: &mut Mailing, _: i64) -> Result<bool> {
        let is_stopped = mailing.is_stopped();
        if mailing.task.is_some() || (!is_stopped && self.pause.is_none()) {
            return Ok(false);
        }
        if let Some(why) = self.pause
            && !is_stopped
        {
            (mailing.status, mailing.error) = ("PAUSED".to_owned(), Some(why));
        }
        mailing.active = false;
        Ok(true)
    }
}
