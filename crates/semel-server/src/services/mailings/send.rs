//! Level 3: each entry is sent once.
//!
//! An entry is marked SENDING in a commit of its own before its first byte leaves, and at most as many are marked as
//! there are connections. So a killed node leaves at most that many entries whose mail may or may not have left. The
//! next run settles them first: by asking the transport where it can find out, otherwise by the mailing's policy.
//!
//! One step settles the mails that have ended and marks the next ones: while it commits, the other mails go on.

use std::{
    collections::VecDeque,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::{Duration, SystemTime},
};

use lettre::message::Mailbox;
use semel::{Result, Unfinished, crash_point, micros, prelude::*};
use semel_store::{Conn, codec};
use serde_json::json;
use sha2::{Digest as _, Sha256};
use tokio::{
    sync::{OwnedSemaphorePermit, Semaphore},
    task::JoinSet,
    time::Instant,
};

use super::{
    config::LONGEST_BACKOFF,
    list::shape::Shape,
    mail::{
        message::{Outgoing, address},
        template::{Rendered, Templates},
        verdict::{Sent, Settle},
    },
    message::Message,
    run::{Change, Halt, Run},
    tables::{
        chunks,
        entries::{self, Entry, Marked, Settled, Turn},
        mailings::Mailing,
    },
};
use crate::unfinished::unfinished;

/// How many entries are read ahead.
const AHEAD: i64 = 512;

/// How often due retries are looked for while fresh entries are sent.
const LOOK_FOR_DUE: i64 = 1_000_000;

/// Missed starts of a rate are caught up within this time only.
const BURST: i64 = 1_000_000;

/// A wait that is longer gives the place back instead.
const SHORT_WAIT: Duration = Duration::from_secs(2);

/// The pause before a step is repeated.
const STEP_AGAIN: Duration = Duration::from_millis(250);

/// Mails that have ended wait at most this long for others that are settled with them.
const LONGEST_LANDING: Duration = Duration::from_millis(10);

/// How long to wait after an answer without a time.
const SOON: Duration = Duration::from_secs(5);

/// The connections of a node, shared by its runs.
pub(super) struct Connections {
    seats: Arc<Semaphore>,
    all: usize,
    runs: AtomicUsize,
}

impl Connections {
    pub(super) fn new(all: usize) -> Self {
        Self { seats: Arc::new(Semaphore::new(all)), all, runs: AtomicUsize::new(0) }
    }

    fn enter(self: &Arc<Self>) -> Entered {
        self.runs.fetch_add(1, Ordering::Relaxed);
        Entered(self.clone())
    }

    /// How many connections one of the present runs may use.
    fn share(&self) -> usize {
        (self.all / self.runs.load(Ordering::Relaxed).max(1)).max(1)
    }
}

/// Counts a run among those that share the connections.
struct Entered(Arc<Connections>);

impl Drop for Entered {
    fn drop(&mut self) {
        self.0.runs.fetch_sub(1, Ordering::Relaxed);
    }
}

/// What a run needs to make mails of entries.
pub(super) struct Composer {
    templates: Templates,
    columns: Vec<String>,
    from: Mailbox,
    tenant: String,
    id: String,
    number: i64,
    domain: String,
    public_url: Option<String>,
}

impl Composer {
    /// For the entries of a mailing.
    pub(super) async fn of(service: &super::Service, mailing: &Mailing) -> Result<Result<Self, String>> {
        let message = service.message_of(mailing).await?;
        Ok(Self::new(service, mailing, &message))
    }

    fn new(service: &super::Service, mailing: &Mailing, message: &Message) -> Result<Self, String> {
        let templates = message.templates().map_err(|_| "the templates cannot be read".to_owned())?;
        let shape: Shape = serde_json::from_str(&mailing.shape).map_err(|error| error.to_string())?;
        let from = message.from.parse::<Mailbox>().map_err(|error| error.to_string())?;
        Ok(Self {
            templates,
            columns: shape.columns,
            from,
            tenant: mailing.tenant.clone(),
            id: mailing.id.clone(),
            number: mailing.number,
            domain: service.config.message_domain.clone(),
            public_url: service.config.public_url.as_ref().map(|url| url.0.clone()),
        })
    }

    /// The mail of an entry: the same bytes on every attempt.
    pub(super) fn compose(&self, entry: &Entry, date: i64) -> Result<Outgoing, String> {
        let cells = codec::decode(entry.cells.clone()).map_err(|error| error.to_string())?;
        let values: Vec<String> = serde_json::from_slice(&cells).map_err(|error| error.to_string())?;
        let unsubscribe = self
            .public_url
            .as_ref()
            .map(|url| format!("{url}/u/{}-{}-{}", self.number, entry.line, hex::encode(&entry.token)));
        let rendered = rendered(&self.templates, &self.columns, &values, &entry.email, unsubscribe.as_deref())?;
        Ok(Outgoing {
            id: format!("{}-{}", self.id, entry.line),
            key: idempotency_key(&self.tenant, &self.id, entry.line),
            from: self.from.clone(),
            to: address(&entry.email)?,
            message_id: message_id(&self.id, entry.line, &self.domain),
            // Whole seconds: a Date has no more.
            date: SystemTime::UNIX_EPOCH + Duration::from_secs(u64::try_from(date / 1_000_000).unwrap_or(0)),
            rendered,
            unsubscribe,
        })
    }
}

/// The Message-ID of an entry without its brackets, the same on every attempt.
pub(super) fn message_id(mailing: &str, line: i64, domain: &str) -> String {
    format!("{mailing}.{line}@{domain}")
}

/// The Idempotency-Key of an entry, the same on every attempt of every run.
fn idempotency_key(tenant: &str, id: &str, line: i64) -> String {
    let mut hash = Sha256::new();
    for part in ["semel-mail", tenant, id, &line.to_string()] {
        hash.update((part.len() as u64).to_be_bytes());
        hash.update(part);
    }
    hex::encode(hash.finalize())
}

/// Renders the templates for a row.
pub(super) fn rendered(
    templates: &Templates,
    columns: &[String],
    values: &[String],
    email: &str,
    unsubscribe: Option<&str>,
) -> Result<Rendered, String> {
    let mut variables: Vec<(&str, &str)> = columns.iter().zip(values).map(|(c, v)| (c.as_str(), v.as_str())).collect();
    variables.retain(|(name, _)| *name != "email");
    variables.push(("email", email));
    variables.push(("unsubscribe_url", unsubscribe.unwrap_or_default()));
    templates.render(&variables)
}

/// Sends what is due. Returns how the run ended.
pub(super) async fn send(run: &Run, mailing: Mailing) -> Result<Result<&'static str, Halt>, Unfinished> {
    let composer = Composer::of(&run.service, &mailing).await.map_err(unfinished)?;
    let composer = composer.map_err(Unfinished::failed_for_good)?;
    let connections = run.service.connections.clone();
    let mut sender = Sender {
        run,
        composer: Arc::new(composer),
        ahead: mailing.last_line,
        mailing,
        fresh: VecDeque::new(),
        due: VecDeque::new(),
        look_for_due: 0,
        flights: JoinSet::new(),
        ended: Vec::new(),
        stop: None,
        wait_until: 0,
        step_took: Duration::ZERO,
        rescanned: false,
        _entered: connections.enter(),
        connections,
    };
    if let Err(halt) = sender.settle_former().await? {
        return Ok(Err(halt));
    }
    sender.send_all().await
}

/// A mail that has ended: its mark, how, and the connection it used.
type Ended = (Marked, Flown, OwnedSemaphorePermit);

/// How a mail ended.
enum Flown {
    /// By this answer.
    Sent(Sent),
    /// It did not begin: the node stops, or the lease is lost.
    NotBegun,
    /// It cannot be made.
    NotComposed(String),
    /// It may have been sent, and sending it again is harmless.
    Again(String),
}

/// Why sending stops before all is done.
enum Stop {
    /// The transport refuses us: a person has to look.
    Pause(String),
    /// The transport cannot be reached.
    Away(String),
    /// The mailing was paused or cancelled.
    Stopped,
    /// The turn is over, or the node stops.
    TurnOver,
}

/// The sending of one run.
struct Sender<'a> {
    run: &'a Run,
    mailing: Mailing,
    composer: Arc<Composer>,
    connections: Arc<Connections>,
    _entered: Entered,
    /// The last line that was read ahead.
    ahead: i64,
    fresh: VecDeque<Entry>,
    due: VecDeque<Entry>,
    /// When to look for due retries again.
    look_for_due: i64,
    flights: JoinSet<Ended>,
    ended: Vec<Ended>,
    stop: Option<Stop>,
    /// Nothing is begun before this time.
    wait_until: i64,
    /// How long the last step took.
    step_took: Duration,
    rescanned: bool,
}

impl Sender<'_> {
    /// Settles the mails that an earlier run was sending when it ended.
    async fn settle_former(&mut self) -> Result<Result<(), Halt>, Unfinished> {
        if self.mailing.sending == 0 {
            return Ok(Ok(()));
        }
        let (number, lines) = (self.mailing.number, self.mailing.in_flight.clone());
        let database = &self.run.service.database;
        let left =
            database.read(async |conn| entries::sending(conn, number, &lines).await).await.map_err(unfinished)?;
        let now = database.now().await.map_err(unfinished)?.as_micros();
        let transport = &self.run.service.transport;
        let mut settled = Vec::with_capacity(left.len());
        for entry in left {
            let age = age(entry.mail_date, now);
            let why = "the node was lost while it sent this mail";
            let found = match self.composer.compose(&entry, entry.mail_date.unwrap_or(now)) {
                Ok(mail) => transport.settle(&mail, age).await,
                Err(_) => Settle::Unknown,
            };
            settled.push(match found {
                Settle::Sent { external_id } => Settled { external_id, ..ended(entry.line, "SENT") },
                Settle::Resend => Settled { next_attempt: Some(now), ..ended(entry.line, "PENDING") },
                Settle::Unknown => self.unknown(entry.line, entry.attempts, why.to_owned(), now),
            });
        }
        let lines = self.mailing.sending;
        tracing::info!(mailing = self.mailing.id, lines, "settling the mails that an earlier run was sending");
        let stepped = self.step(settled, &[]).await?;
        Ok(stepped.map(drop))
    }

    /// An entry whose mail may or may not have left.
    fn unknown(&self, line: i64, attempts: i64, why: String, now: i64) -> Settled {
        if self.mailing.policy == "never-miss" && attempts < self.run.service.max_attempts() {
            return Settled { next_attempt: Some(now), error: Some(why), ..ended(line, "PENDING") };
        }
        tracing::warn!(mailing = self.mailing.id, line, why, "it is in doubt whether a mail was sent");
        Settled { error: Some(why), ..ended(line, "IN_DOUBT") }
    }

    async fn send_all(&mut self) -> Result<Result<&'static str, Halt>, Unfinished> {
        loop {
            if self.stop.is_none() && self.run.context.turn_is_over() {
                self.stop = Some(Stop::TurnOver);
            }
            let now = self.run.now().await?;
            let permits = self.permits().await;
            let chosen = self.choose(permits.len(), now).await.map_err(unfinished)?;
            if chosen.is_empty() && self.ended.is_empty() {
                drop(permits);
                if self.flights.is_empty() {
                    match self.idle(now).await? {
                        Some(end) => return Ok(end),
                        None => continue,
                    }
                }
                self.land().await;
                continue;
            }
            let settled = self.verdicts(now);
            let lines: Vec<i64> = chosen.iter().map(|entry| entry.line).collect();
            let marked = match self.step(settled, &lines).await? {
                Ok(marked) => marked,
                Err(halt) => return Ok(Err(halt)),
            };
            crash_point!("mailing.marked");
            self.fly(chosen, marked, permits);
            if !self.flights.is_empty() {
                self.land().await;
            }
        }
    }

    /// Connections for the next mails: within the share of this run, and at least one if none of its mails is under way.
    async fn permits(&self) -> Vec<OwnedSemaphorePermit> {
        let room = self.connections.share().saturating_sub(self.flights.len());
        if self.stop.is_some() || room == 0 {
            return Vec::new();
        }
        let mut permits = Vec::with_capacity(room);
        while permits.len() < room {
            match self.connections.seats.clone().try_acquire_owned() {
                Ok(permit) => permits.push(permit),
                Err(_) => break,
            }
        }
        if permits.is_empty() && self.flights.is_empty() && self.ended.is_empty() {
            permits.extend(self.connections.seats.clone().acquire_owned().await);
        }
        permits
    }

    /// The next entries: due retries first, then fresh ones by line.
    async fn choose(&mut self, most: usize, now: i64) -> Result<Vec<Entry>> {
        if most == 0 || self.stop.is_some() || self.wait_until > now {
            return Ok(Vec::new());
        }
        let (database, number) = (&self.run.service.database, self.mailing.number);
        if self.due.is_empty() && self.look_for_due <= now {
            self.look_for_due = now + LOOK_FOR_DUE;
            self.due = database.read(async |conn| entries::due(conn, number, now, AHEAD).await).await?.into();
        }
        if self.due.len() < most && self.fresh.len() < most && self.ahead < i64::MAX {
            let after = self.ahead;
            let more = database.read(async |conn| entries::fresh(conn, number, after, AHEAD).await).await?;
            self.ahead = more.last().map_or(i64::MAX, |last| last.line);
            self.fresh.extend(more);
        }
        let most = self.within_rate(most.min(self.due.len() + self.fresh.len()), now).await?;
        let mut chosen: Vec<Entry> = self.due.drain(..most.min(self.due.len())).collect();
        let rest = (most - chosen.len()).min(self.fresh.len());
        chosen.extend(self.fresh.drain(..rest));
        Ok(chosen)
    }

    /// How many of so many mails the rate of the transport allows now. Its row is locked for one statement only: a node
    /// that froze in a transaction would hold up every mailing.
    async fn within_rate(&mut self, most: usize, now: i64) -> Result<usize> {
        let service = &self.run.service;
        let Some(every) = service.config.rate.map(super::config::Rate::every).filter(|_| most > 0) else {
            return Ok(most);
        };
        let (transport, rate) = (service.transport.name().to_owned(), chunks::Rate { every, burst: BURST });
        let asked = i64::try_from(most).unwrap_or(i64::MAX);
        let (granted, free_at) = match service.is_postgres {
            true => service.database.read(async |c| chunks::reserve(c, &transport, rate, asked, now).await).await?,
            false => {
                let reserve = service.ledger.transact(move |tx| async move {
                    chunks::reserve(&mut tx.connection().await?.get()?, &transport, rate, asked, now).await
                });
                reserve.await?
            }
        };
        self.wait_until = self.wait_until.max(free_at);
        Ok(usize::try_from(granted).unwrap_or(0).min(most))
    }

    /// Waits for a mail to end, then for others as long as the last step took: one step settles all of them.
    async fn land(&mut self) {
        let mut next = self.flights.join_next().await;
        let until = Instant::now() + self.step_took;
        while let Some(landed) = next {
            match landed {
                Ok(landed) => self.ended.push(landed),
                // It stays SENDING: the next run settles it.
                Err(error) => tracing::error!(mailing = self.mailing.id, %error, "sending a mail panicked"),
            }
            next = match self.flights.try_join_next() {
                Some(landed) => Some(landed),
                None => tokio::time::timeout_at(until, self.flights.join_next()).await.unwrap_or_default(),
            };
        }
    }

    /// What the mails that ended mean for their entries.
    fn verdicts(&mut self, now: i64) -> Vec<Settled> {
        let all = std::mem::take(&mut self.ended);
        all.into_iter().map(|(marked, flown, _permit)| self.verdict(&marked, flown, now)).collect()
    }

    fn verdict(&mut self, marked: &Marked, flown: Flown, now: i64) -> Settled {
        let (line, attempts) = (marked.line, marked.attempts);
        let again = |next: i64, error: Option<String>, undone: bool| Settled {
            next_attempt: Some(next),
            error,
            undone,
            ..ended(line, "PENDING")
        };
        let sent = match flown {
            Flown::NotBegun => return again(now, None, true),
            Flown::NotComposed(why) => return Settled { error: Some(why), ..ended(line, "FAILED") },
            Flown::Again(why) if attempts < self.run.service.max_attempts() => {
                return again(now + micros(self.backoff(attempts)), Some(why), false);
            }
            Flown::Again(why) => return self.unknown(line, attempts, why, now),
            Flown::Sent(sent) => sent,
        };
        match sent {
            Sent::Accepted { external_id } => Settled { external_id, ..ended(line, "SENT") },
            Sent::Refused { why } => Settled { error: Some(why), ..ended(line, "INVALID") },
            Sent::KeyConflict { why } => {
                tracing::warn!(
                    mailing = self.mailing.id,
                    line,
                    why,
                    "the transport knows the key of a mail with another content"
                );
                Settled { error: Some(why), ..ended(line, "FAILED") }
            }
            Sent::NotNow { why, after } => self.later(marked, why, after, now),
            Sent::InFlight { after } => again(now + micros(after.unwrap_or(SOON)), None, true),
            Sent::TooMany { why, after } => {
                self.wait_until = self.wait_until.max(now + micros(after.unwrap_or(SOON)));
                again(self.wait_until, Some(why), true)
            }
            Sent::ServerRefuses { why } => {
                self.stop = Some(Stop::Pause(why.clone()));
                again(now, Some(why), true)
            }
            Sent::Away { why } => {
                if !matches!(self.stop, Some(Stop::Pause(_))) {
                    self.stop = Some(Stop::Away(why.clone()));
                }
                again(now, Some(why), true)
            }
            Sent::Unknown { why } => self.unknown(line, attempts, why, now),
        }
    }

    /// An entry that was refused for now.
    fn later(&self, marked: &Marked, why: String, after: Option<Duration>, now: i64) -> Settled {
        let (line, attempts) = (marked.line, marked.attempts);
        if attempts >= self.run.service.max_attempts() {
            return Settled { error: Some(why), ..ended(line, "FAILED") };
        }
        let wait = self.backoff(attempts).max(after.unwrap_or_default()).min(LONGEST_BACKOFF * 24);
        // A service that recognises keys may have sent the mail before it failed; after its window a repeat would be a
        // second mail.
        let first = age(Some(marked.mail_date), now);
        if self
            .run
            .service
            .transport
            .window()
            .is_some_and(|window| first + wait + self.run.service.config.timeout > window)
        {
            return self.unknown(line, attempts, why, now);
        }
        Settled { next_attempt: Some(now + micros(wait)), error: Some(why), ..ended(line, "PENDING") }
    }

    fn backoff(&self, attempts: i64) -> Duration {
        let doubled = u32::try_from(attempts.saturating_sub(1)).unwrap_or(0).min(16);
        (self.run.service.config.backoff * 2_u32.pow(doubled)).min(LONGEST_BACKOFF)
    }

    /// Settles mails and marks others, in one commit.
    async fn step(&mut self, settled: Vec<Settled>, lines: &[i64]) -> Result<Result<Vec<Marked>, Halt>, Unfinished> {
        let service = &self.run.service;
        let change = SettleAndMark { settled, lines: lines.to_vec(), transport: service.transport.name().to_owned() };
        // The answers of mails that were sent are not lost with the database's connection: the step is repeated while
        // the lease lasts. It has no effect twice.
        let begun = Instant::now();
        let stepped = loop {
            match self.run.step(change.clone()).await {
                Err(Unfinished::Released { .. }) if !self.run.context.is_lost() => tokio::time::sleep(STEP_AGAIN).await,
                stepped => break stepped?,
            }
        };
        let (marked, mailing) = match stepped {
            Ok(done) => done,
            Err(halt) => return Ok(Err(halt)),
        };
        (self.mailing, self.step_took) = (mailing, begun.elapsed().min(LONGEST_LANDING));
        let stopped = ["PAUSED", "CANCELLED"].contains(&self.mailing.status.as_str());
        if (stopped || self.mailing.task.is_some()) && self.stop.is_none() {
            self.stop = Some(Stop::Stopped);
        }
        Ok(Ok(marked))
    }

    /// Begins the mails that were marked. An entry that was not was changed by a person.
    fn fly(&mut self, chosen: Vec<Entry>, marked: Vec<Marked>, mut permits: Vec<OwnedSemaphorePermit>) {
        for entry in chosen {
            let mark = marked.iter().find(|marked| marked.line == entry.line && marked.status == "SENDING");
            let Some(marked) = mark.cloned() else { continue };
            let Some(permit) = permits.pop() else { continue };
            let (service, composer, context) =
                (self.run.service.clone(), self.composer.clone(), self.run.context.clone());
            let date = marked.mail_date;
            self.flights.spawn(async move {
                let flown = match composer.compose(&entry, date) {
                    Err(why) => Flown::NotComposed(why),
                    // Only under the fence that marked it.
                    Ok(_) if context.is_lost() => Flown::NotBegun,
                    Ok(mail) => {
                        let sent = service.transport.send(&mail).await;
                        crash_point!("mailing.sent");
                        match sent {
                            Sent::Unknown { why } => find_out(&service, &mail, date, why).await,
                            sent => Flown::Sent(sent),
                        }
                    }
                };
                (marked, flown, permit)
            });
        }
    }

    /// Nothing is under way and nothing can begin: ends the run, or waits a moment.
    async fn idle(&mut self, now: i64) -> Result<Option<Result<&'static str, Halt>>, Unfinished> {
        let run = self.run;
        match self.stop.take() {
            Some(Stop::Pause(why)) => return run.pause(why).await.map(Some),
            Some(Stop::Stopped) => {
                // A cancel that arrived during the run is carried out by the next one.
                return match self.mailing.task {
                    Some(_) => Err(Unfinished::TurnOver),
                    None => run.end("stopped").await.map(Some),
                };
            }
            Some(Stop::TurnOver) => return Err(Unfinished::TurnOver),
            Some(Stop::Away(why)) => {
                let target = run.service.transport.name().to_owned();
                return Err(Unfinished::Away { target, after: Duration::ZERO, why });
            }
            None => {}
        }
        let number = self.mailing.number;
        let next =
            run.service.database.read(async |conn| entries::next(conn, number).await).await.map_err(unfinished)?;
        let next = match next {
            Some(next) => Some(next.max(self.wait_until)),
            None if !self.fresh.is_empty() || !self.due.is_empty() => Some(self.wait_until),
            None => None,
        };
        if let Some(next) = next {
            let wait = Duration::from_micros(u64::try_from(next - now).unwrap_or(0));
            if wait > SHORT_WAIT {
                return Err(Unfinished::released(wait));
            }
            self.look_for_due = 0;
            tokio::time::sleep(wait.max(Duration::from_millis(1))).await;
            return Ok(None);
        }
        match run.step(Finish).await? {
            Err(halt) => Ok(Some(Err(halt))),
            Ok((Some(outcome), mailing)) => {
                let counts = json!({ "sent": mailing.sent, "failed": mailing.failed, "invalid": mailing.invalid,
                                     "suppressed": mailing.suppressed, "inDoubt": mailing.in_doubt });
                tracing::info!(mailing = mailing.id, outcome, %counts, "a run of a mailing has ended");
                Ok(Some(Ok(outcome)))
            }
            // An entry became pending meanwhile: it is found by its next attempt, or by reading all lines once more.
            Ok((None, _)) if self.rescanned => Err(Unfinished::failed("pending entries were not found")),
            Ok((None, mailing)) => {
                (self.rescanned, self.ahead, self.look_for_due, self.mailing) = (true, 0, 0, mailing);
                Ok(None)
            }
        }
    }
}

/// The time since the first attempt of an entry.
fn age(first: Option<i64>, now: i64) -> Duration {
    Duration::from_micros(u64::try_from(now - first.unwrap_or(now)).unwrap_or(0))
}

/// What the transport can find out about a mail whose answer is missing.
async fn find_out(service: &super::Service, mail: &Outgoing, date: i64, why: String) -> Flown {
    let Ok(now) = service.database.now().await else { return Flown::Sent(Sent::Unknown { why }) };
    match service.transport.settle(mail, age(Some(date), now.as_micros())).await {
        Settle::Sent { external_id } => Flown::Sent(Sent::Accepted { external_id }),
        Settle::Resend => Flown::Again(why),
        Settle::Unknown => Flown::Sent(Sent::Unknown { why }),
    }
}

fn ended(line: i64, status: &'static str) -> Settled {
    Settled { line, status, next_attempt: None, external_id: None, error: None, undone: false }
}

/// Settles mails that have ended, and marks the next ones. It may be repeated after a commit whose result is unknown.
#[derive(Clone)]
struct SettleAndMark {
    settled: Vec<Settled>,
    lines: Vec<i64>,
    transport: String,
}

impl Change for SettleAndMark {
    /// The entries that are marked.
    type Out = Vec<Marked>;

    async fn make(mut self, conn: &mut Conn<'_>, mailing: &mut Mailing, now: i64) -> Result<Vec<Marked>> {
        let number = mailing.number;
        let ids: Vec<(i64, &str)> =
            self.settled.iter().filter_map(|s| Some((s.line, s.external_id.as_deref()?))).collect();
        let taken = entries::claim_ids(conn, &self.transport, number, &ids).await?;
        for settled in self.settled.iter_mut().filter(|settled| taken.contains(&settled.line)) {
            let id = settled.external_id.take().unwrap_or_default();
            settled.status = "IN_DOUBT";
            settled.error = Some(format!("the transport gave the id {id} to another mail before"));
        }
        let mut in_flight: Vec<i64> = serde_json::from_str(&mailing.in_flight).unwrap_or_default();
        in_flight.retain(|line| !self.settled.iter().any(|settled| settled.line == *line));
        let mut all_marked = Vec::new();
        // Marked by this very step, if its first commit was not answered: their mails have not begun.
        let (marked, fresh) = self.lines.iter().partition::<Vec<i64>, _>(|line| in_flight.contains(line));
        if !marked.is_empty() {
            let found = entries::sending(conn, number, &json!(marked).to_string()).await?;
            all_marked.extend(found.into_iter().map(Marked::again));
        }
        self.lines = fresh;
        if ["PAUSED", "CANCELLED"].contains(&mailing.status.as_str()) || mailing.task.is_some() {
            self.lines.clear();
        }
        let turn = Turn { mailing: number, tenant: &mailing.tenant, now, settled: &self.settled, lines: &self.lines };
        let (settled, marked) = turn.take(conn).await?;
        self.count(mailing, &settled, &marked);
        all_marked.extend(marked);
        let sending = all_marked.iter().filter(|marked| marked.status == "SENDING");
        in_flight.extend(sending.map(|marked| marked.line));
        in_flight.sort_unstable();
        in_flight.dedup();
        mailing.in_flight = json!(in_flight).to_string();
        // Lines are marked in their order, so no fresh one before the last was left out.
        mailing.last_line = self.lines.iter().copied().max().unwrap_or(0).max(mailing.last_line);
        Ok(all_marked)
    }
}

impl SettleAndMark {
    /// Counts what has changed.
    fn count(&self, mailing: &mut Mailing, settled: &[i64], marked: &[Marked]) {
        for settled in self.settled.iter().filter(|ended| settled.contains(&ended.line)) {
            mailing.sending -= 1;
            match settled.status {
                "SENT" => mailing.sent += 1,
                "FAILED" => mailing.failed += 1,
                "INVALID" => mailing.invalid += 1,
                "IN_DOUBT" => mailing.in_doubt += 1,
                _ => {}
            }
        }
        for marked in marked {
            match marked.status.as_str() {
                "SENDING" => mailing.sending += 1,
                _ => mailing.suppressed += 1,
            }
        }
    }
}

/// Ends the run if nothing is pending: then the mailing is completed, or only waits for decisions.
struct Finish;

impl Change for Finish {
    type Out = Option<&'static str>;

    async fn make(self, _: &mut Conn<'_>, mailing: &mut Mailing, _: i64) -> Result<Self::Out> {
        if mailing.pending() > 0 || mailing.sending > 0 || mailing.task.is_some() {
            return Ok(None);
        }
        mailing.active = false;
        if mailing.in_doubt > 0 {
            return Ok(Some("waiting for decisions"));
        }
        if !["PAUSED", "CANCELLED"].contains(&mailing.status.as_str()) {
            mailing.status = "COMPLETED".to_owned();
        }
        crash_point!("mailing.finishing");
        Ok(Some("completed"))
    }
}
